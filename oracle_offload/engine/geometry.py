"""Where the bytes of a tensor are: addresses, strides, sizes as the engine counts; and writes."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._core import ALIGNMENT


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment of tensors."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_down(nbytes: int) -> int:
    """Return `nbytes` rounded down to the alignment of tensors."""
    return nbytes // ALIGNMENT * ALIGNMENT


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def unit_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of a unit: each tensor at the next multiple of the alignment."""
    return sum(aligned(tensor_bytes(tensor)) for tensor in tensors)


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on `device`. A library's ``to`` may be one of its own, without ``copy``."""
    return tensor.clone() if tensor.device == device else tensor.to(device)


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes a tensor takes; of a wrapper, those of the tensors that it is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor_bytes(tensor)
    return sum(stored_bytes(getattr(tensor, name)) for name in flatten()[0])


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(1, size)
    return tuple(reversed(stride))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for step, size in sorted(
        (step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if step != expected:
            return False
        expected *= size
    return True


def count_writes(tensor: Tensor) -> int:
    """Return how many writes to a tensor torch knows of; 0 for all that it does not count.

    It counts none to what was made in inference mode, and goes on counting none where memory that
    was not takes the place of its own: `is_inference` says no then.
    """
    try:
        return int(tensor._version)
    except RuntimeError:
        return 0


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address range ``(start, end)`` of a tensor's elements; empty where it has none."""
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # it is sparse, say
        return 0, 0
    if not start:  # it has no element, or is a meta tensor, a fake one or a wrapper subclass
        return 0, 0
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + extent * tensor.element_size()


class Spans:
    """Byte ranges that do not overlap, each with what it is."""

    def __init__(self, spans: list[tuple[int, int, Any]]) -> None:
        self.spans = sorted(set(spans), key=lambda span: span[:2])
        self.starts = [span[0] for span in self.spans]

    def touched(self, start: int, end: int) -> Iterator[tuple[int, int, Any]]:
        """Yield the intersections of [start, end) with the ranges."""
        first = max(0, bisect.bisect_right(self.starts, start) - 1)
        for index in range(first, len(self.spans)):
            low, high, what = self.spans[index]
            if low >= end:
                return
            if high > start:
                yield max(low, start), min(high, end), what
