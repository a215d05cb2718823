"""A pool of page-locked host memory that the device copies into."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._core import HostBuffer

if TYPE_CHECKING:
    from .engines import DeviceState


class LockedPool:
    """Page-locked buffers, each of which serves the next that asks for its size.

    Parameters
    ----------
    state : DeviceState
        The device that copies.
    may_lock : callable
        Whether so many bytes may be page-locked, all of the pool's together.
    """

    def __init__(self, state: DeviceState, may_lock: Callable[[int], bool]) -> None:
        self._state = state
        self._may_lock = may_lock
        self._buffers: list[HostBuffer] = []  # locked, and known to the engine
        self._free: dict[int, list[HostBuffer]] = {}  # those that nobody has, by size
        self._is_refused = False

    @property
    def nbytes(self) -> int:
        """Bytes of all its buffers."""
        return sum(buffer.nbytes for buffer in list(self._buffers))

    def take(self, nbytes: int) -> HostBuffer | None:
        """Return a locked buffer of this size; None where nothing more may, or can, be locked."""
        with contextlib.suppress(IndexError):  # another thread may take the last one
            return self._free.setdefault(nbytes, []).pop()
        with self._state.lock:
            if self._is_refused or not self._may_lock(self.nbytes + nbytes):
                return None
            buffer = HostBuffer(nbytes)
            self._is_refused = self._state.engine.lock(buffer) is not None
            self._buffers.append(buffer)
            if not self._is_refused:
                return buffer
            self.give_back_all()  # what else needs locked memory, now or later, finds some
            return None

    def giver(self, nbytes: int) -> Callable[[HostBuffer], object]:
        """Return what gives a buffer of this size back; it may be called by a finalizer."""
        return self._free.setdefault(nbytes, []).append

    def give_back_all(self) -> None:
        """Unlock all of it; who has a buffer keeps its memory, as ordinary memory."""
        with self._state.lock:
            self._free = {}
            while self._buffers:
                self._state.engine.unlock(self._buffers[-1])
                self._buffers.pop()
