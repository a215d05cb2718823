"""Batches that become smaller where memory runs out, while the effective batch stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .attempts import HALVE, Counts, Shrink, shrink_until_it_fits
from .keeping import keep
from .random_state import RandomState


class AdaptiveBatch:
    """Forward and backward of a whole batch, in parts that fit.

    Every part counts by its weight (samples, or the tokens that have a loss), so the gradient is
    that of the whole batch however it is divided. Where memory runs out, gradients, buffers and
    generators go back to where the batch began, and it begins again in smaller parts; their size
    stays for the batches that follow.

    Parameters
    ----------
    model : nn.Module
        Whose gradients are computed.
    loss_of : callable
        Takes a part of the batch, returns its **mean** loss: a tensor of one element.
    size : int
        Samples of a part at first; `find_batch_size` finds it.
    weight_of : callable, optional
        Takes a part, returns what its mean is over, such as the number of labels that are not
        -100. By default the samples.
    shrink : Shrink
        How a size that does not fit becomes smaller.
    scaler : torch.amp.GradScaler, optional
        Scales the losses.
    generators : iterable of torch.Generator
        Those that `loss_of` draws from, in addition to the process's own.

    Attributes
    ----------
    size : int
        Samples of a part now.
    counts : Counts
        Batches that went through, and attempts that ran out of memory.

    Raises
    ------
    ValueError
        `size` is no positive number.

    Examples
    --------
    In a loop::

        batches = oracle_offload.train.AdaptiveBatch(model, loss_of, size=16)
        for batch in loader:
            loss = batches.backward(batch)
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[[Any], Tensor],
        *,
        size: int,
        weight_of: Callable[[Any], int | float | Tensor] | None = None,
        shrink: Shrink = HALVE,
        scaler: Any = None,
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        self.size = whole_number("size", size)
        self.counts = Counts()
        self._model = model
        self._loss_of = loss_of
        self._weight_of = weight_of or samples_of
        self._shrink = shrink
        self._scaler = scaler
        self._generators = tuple(generators)

    def backward(self, batch: Any) -> Tensor:
        """Compute the gradients of the mean loss of a batch, and add them to ``.grad``.

        Parameters
        ----------
        batch : tensor, or dict, list or tuple of them
            All samples, along the first dimension of each tensor.

        Returns
        -------
        Tensor
            The mean loss, of one element, without a graph.

        Raises
        ------
        ValueError
            The batch cannot be split, or weighs nothing.
        NoRoomError
            The smallest size does not fit; torch's out of memory as well.
        """
        total = float(self._weight_of(batch))
        if total <= 0:
            raise ValueError(f"the batch weighs {total:g}; at least one sample or token must count")
        random = RandomState(self._generators)
        gradients = {p: p.grad for p in self._model.parameters()}
        # What is added to in place is copied; what is None needs no copy to be None again.
        restore = keep(gradients, {})
        # Whether code wrote to them cannot be seen: batch norm does so behind torch's version.
        buffers = [keep(buffer, {}) for buffer in self._model.buffers()]

        def go_back() -> None:
            for parameter, gradient in restore().items():
                parameter.grad = gradient
            for restore_buffer in buffers:
                restore_buffer()
            random.restore()

        def whole(size: int) -> Tensor:
            if self.counts.failures > failures:
                go_back()
            return self._in_parts(batch, size, total)

        failures = self.counts.failures
        largest = min(self.size, samples_of(batch))
        try:
            loss, size = shrink_until_it_fits(whole, largest, self._shrink, counts=self.counts)
        except BaseException:
            go_back()
            raise
        if size < largest:
            self.size = size
        return loss

    def _in_parts(self, batch: Any, size: int, total: float) -> Tensor:
        mean: Tensor | None = None
        for part in as_parts(batch, size):
            share = float(self._weight_of(part)) / total
            if not share:
                continue
            loss = self._loss_of(part)
            weighted = loss if share == 1.0 else loss * share
            (weighted if self._scaler is None else self._scaler.scale(weighted)).backward()
            mean = weighted.detach() if mean is None else mean + weighted.detach()
        assert mean is not None  # the batch weighs something
        return mean


def whole_number(name: str, value: Any) -> int:
    """Return `value`, which has to be a whole number above zero.

    Raises
    ------
    ValueError
        It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is not a whole number above zero")
    return value


def as_parts(batch: Any, size: int) -> list[Any]:
    """Split a batch along its first dimension into parts of `size` samples; the last is smaller.

    Parameters
    ----------
    batch : tensor, or dict, list or tuple of them
        What is no tensor, or a tensor without dimensions, is in every part.
    size : int
        Samples of a part.
    """
    return [_part(batch, begin, size) for begin in range(0, samples_of(batch), size)]


def samples_of(batch: Any) -> int:
    """Return how many samples a batch has.

    Raises
    ------
    ValueError
        It has no tensor, or tensors of different lengths.
    """
    lengths = {len(tensor) for tensor in _tensors(batch) if tensor.ndim}
    if len(lengths) != 1:
        raise ValueError(
            f"a batch ({type(batch).__name__}) with first dimensions {sorted(lengths)} cannot be "
            "split; give tensors whose first dimension is that of the samples"
        )
    return lengths.pop()


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return _tensors(list(batch.values()))
    return [t for each in batch for t in _tensors(each)] if isinstance(batch, list | tuple) else []


def _part(batch: Any, begin: int, size: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[begin : begin + size] if batch.ndim else batch
    if isinstance(batch, Mapping):
        parts = {key: _part(each, begin, size) for key, each in batch.items()}
        made: Any = dict if isinstance(batch, dict) else type(batch)  # a BatchEncoding stays one
        return made(parts)
    if isinstance(batch, list | tuple):
        found = [_part(each, begin, size) for each in batch]
        return type(batch)(*found) if hasattr(batch, "_fields") else type(batch)(found)
    return batch
