"""Weights on their way from the device to the host, at the speed of the link.

A copy to ordinary memory goes through the driver's own small buffers, on one thread, which also
meets each page of the new memory for the first time. So weights pass two page-locked buffers
instead: while the device fills one, threads spread what has arrived in the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .._core import HostBuffer
from ..engine.geometry import aligned, is_dense, tensor_bytes
from ..errors import OffloadError
from ..host.sizes import MIB

if TYPE_CHECKING:
    from ..engine.engines import DeviceState

HALF_BYTES = 64 * MIB  # of each of the two buffers


class _Part(NamedTuple):
    """`nbytes` of a tensor, from `begin` on, which are at `place` of a half on their way."""

    tensor: Tensor
    begin: int
    nbytes: int
    place: int


class Intake:
    """Takes the weights of one attach off its device; a context manager.

    Parameters
    ----------
    state : DeviceState
        The device whose engine locks the buffers.
    nbytes : int
        Of the weights that are there; 0 for none, and then nothing is locked.
    """

    def __init__(self, state: DeviceState, nbytes: int) -> None:
        self._state = state
        self._half_bytes = aligned(min(HALF_BYTES, nbytes))
        self._halves: list[HostBuffer] = []
        self._copies = state.kind.copies_aside() if nbytes else None

    def __enter__(self) -> Intake:
        for _ in range(2 if self._copies is not None else 0):
            half = HostBuffer(self._half_bytes, self._state.engine.numa_node)
            if self._state.engine.lock(half) is not None:
                self.close()
                break
            self._halves.append(half)  # until then, the end of `half` unlocks it
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the buffers back, and take nothing more."""
        halves, self._halves = self._halves, []
        if halves and self._copies is not None:
            # An attach that was interrupted leaves copies under way, into memory that is given back
            # and from weights that may be dropped.
            self._copies.mark()()
        for half in halves:
            with contextlib.suppress(OffloadError):  # the end of `half` tries again
                self._state.engine.unlock(half)

    def takes(self, tensor: Tensor) -> bool:
        """Whether `fetch` can have the values of `tensor`."""
        return (
            len(self._halves) == 2
            and tensor.device == self._state.device
            and tensor.numel() > 0
            and is_dense(tensor)
            and not (tensor.is_conj() or tensor.is_neg())
        )

    def fetch(
        self,
        tensors: Sequence[tuple[Tensor, int]],
        buffer: HostBuffer,
        on_bytes: Callable[[int], object],
        on_arrival: Callable[[Tensor, int], object],
    ) -> None:
        """Copy tensors to their offsets in `buffer`.

        Parameters
        ----------
        tensors : sequence of tuples
            Those that it takes, each with its offset.
        buffer : HostBuffer
            Where they go.
        on_bytes : callable
            Called with how many bytes have arrived, again and again.
        on_arrival : callable
            Given each tensor once all of it has arrived, and its offset.
        """
        assert self._copies is not None
        offsets = {id(tensor): offset for tensor, offset in tensors}

        def spread(window: list[_Part], half: HostBuffer, wait: Callable[[], object]) -> None:
            wait()  # else what was there before is spread
            for part in window:
                offset = offsets[id(part.tensor)]
                buffer.fill(offset + part.begin, half.address + part.place, part.nbytes)
                on_bytes(part.nbytes)
                if part.begin + part.nbytes == tensor_bytes(part.tensor):
                    on_arrival(part.tensor, offset)

        flying: tuple[list[_Part], HostBuffer, Callable[[], object]] | None = None
        for number, window in enumerate(_windows(tensors, self._half_bytes)):
            half = self._halves[number % 2]  # what it had before was spread in the round before
            whole = torch.frombuffer(half, dtype=torch.uint8)
            for tensor, begin, nbytes, place in window:
                source = flat_bytes(tensor)[begin : begin + nbytes]
                self._copies.copy(whole[place : place + nbytes], source)
            begun = window, half, self._copies.mark()
            if flying is not None:
                spread(*flying)
            flying = begun
        if flying is not None:
            spread(*flying)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor as they are in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _windows(tensors: Sequence[tuple[Tensor, int]], nbytes: int) -> Iterator[list[_Part]]:
    """Yield what passes a half of `nbytes` together."""
    window: list[_Part] = []
    place = 0
    for tensor, _ in tensors:
        begin, size = 0, tensor_bytes(tensor)
        while begin < size:
            part = min(nbytes - place, size - begin)
            window.append(_Part(tensor, begin, part, place))
            begin += part
            place += aligned(part)
            if place == nbytes:
                yield window
                window, place = [], 0
    if window:
        yield window
