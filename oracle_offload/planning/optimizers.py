"""What optimizers keep of each trained tensor, in bytes, as their own `init_state` lays it out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_BLOCK = 256  # elements that share a scale in bitsandbytes' 8-bit states
_LEAST_8BIT = 4096  # elements below which those stay in float32
_QMAP_BYTES = 256 * 4
_STEP_BYTES = 4  # torch's own optimizers count steps in a float32 scalar for each tensor

Shape = Sequence[int]
StateBytes = Callable[[Shape, torch.dtype], int]


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as far as memory goes.

    Attributes
    ----------
    name : str
        As `plan` takes it.
    where : str
        The class that it names.
    state_bytes : callable
        Bytes of the state of a tensor, by its shape and dtype.
    shared_bytes : int
        Kept once for all tensors that are large enough for 8 bits.
    lighter : str
        The one to try where this one does not fit; empty where there is none.
    """

    name: str
    where: str
    state_bytes: StateBytes
    shared_bytes: int = 0
    lighter: str = ""

    def total(self, tensors: Sequence[tuple[Shape, torch.dtype]]) -> int:
        """Return the bytes of the state of all `tensors` (shape and dtype of each)."""
        own = sum(self.state_bytes(shape, dtype) for shape, dtype in tensors)
        large = any(math.prod(shape) >= _LEAST_8BIT for shape, _ in tensors)
        return own + (self.shared_bytes if large else 0)


def _copies(number: int) -> StateBytes:
    """As many tensors like the trained one, and torch's count of steps."""
    return lambda shape, dtype: number * math.prod(shape) * dtype.itemsize + _STEP_BYTES


def _momentum(shape: Shape, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _nothing(shape: Shape, dtype: torch.dtype) -> int:
    return 0


def _float32(shape: Shape, dtype: torch.dtype) -> int:
    """As bitsandbytes' states of 32 bits, two of them."""
    return 2 * 4 * math.prod(shape)


def _bitsandbytes(states: int) -> StateBytes:
    def state_bytes(shape: Shape, dtype: torch.dtype) -> int:
        count = math.prod(shape)
        if count < _LEAST_8BIT:
            return states * 4 * count
        return states * (count + 4 * -(-count // _BLOCK))

    return state_bytes


def _rows_and_columns(shape: Shape, dtype: torch.dtype) -> int:
    """As `torch.optim.Adafactor` factors the second moment of a matrix; its step counts too."""
    if len(shape) < 2:
        return math.prod(shape) * dtype.itemsize + _STEP_BYTES
    rows = math.prod(shape[:-1])
    columns = math.prod(shape[:-2]) * shape[-1]
    return (rows + columns) * dtype.itemsize + _STEP_BYTES


def _rows_and_columns_float32(shape: Shape, dtype: torch.dtype) -> int:
    """As transformers' Adafactor: in float32 whatever is trained."""
    if len(shape) < 2:
        return 4 * math.prod(shape)
    return 4 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1])


OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("adamw", "torch.optim.AdamW", _copies(2), lighter="adamw8bit"),
        Optimizer("adam", "torch.optim.Adam", _copies(2), lighter="adamw8bit"),
        Optimizer(
            "adamw8bit",
            "bitsandbytes.optim.AdamW8bit",
            _bitsandbytes(2),
            2 * _QMAP_BYTES,
            lighter="adafactor",
        ),
        Optimizer(
            "paged_adamw8bit",
            "bitsandbytes.optim.PagedAdamW8bit",
            _bitsandbytes(2),
            2 * _QMAP_BYTES,
            lighter="adafactor",
        ),
        Optimizer(
            "paged_adamw", "bitsandbytes.optim.PagedAdamW", _float32, lighter="paged_adamw8bit"
        ),
        Optimizer(
            "lion8bit", "bitsandbytes.optim.Lion8bit", _bitsandbytes(1), _QMAP_BYTES, "adafactor"
        ),
        Optimizer("adafactor", "torch.optim.Adafactor", _rows_and_columns),
        Optimizer("adafactor_transformers", "transformers.Adafactor", _rows_and_columns_float32),
        Optimizer("sgd", "torch.optim.SGD", _nothing),
        Optimizer("sgd_momentum", "torch.optim.SGD(momentum=...)", _momentum, lighter="sgd"),
        Optimizer("rmsprop", "torch.optim.RMSprop", _copies(1), lighter="adafactor"),
        Optimizer("adagrad", "torch.optim.Adagrad", _copies(1), lighter="adafactor"),
    )
}


def optimizer_of(name: object) -> Optimizer:
    """Return an optimizer by name, or by the class of it.

    Raises
    ------
    ValueError
        One whose state is not known here.
    """
    said = name.__name__ if isinstance(name, type) else str(name)
    found = OPTIMIZERS.get(said.lower().replace("-", "_"))
    if found is None:
        raise ValueError(
            f"optimizer={said!r}: its state is not known; there are {', '.join(OPTIMIZERS)}"
        )
    return found
