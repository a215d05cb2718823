"""A pool of page-locked host memory that the device copies into."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._core import HostBuffer
from ..errors import OffloadError

if TYPE_CHECKING:
    from .engines import DeviceState


class LockedPool:
    """Page-locked buffers, each of which serves the next that fills at least half of it.

    Where no more may be locked, those are unlocked whose size has been unused for longest. An
    interrupt leaves it as it was, but for a buffer that no caller receives: that is lost to the
    pool.

    Parameters
    ----------
    state : DeviceState
        The device that copies.
    may_lock : callable
        Whether so many bytes may be page-locked, all of the pool's together.

    Attributes
    ----------
    give : callable
        Takes a buffer back, once or twice; a finalizer may call it.
    """

    def __init__(self, state: DeviceState, may_lock: Callable[[int], bool]) -> None:
        self._state = state
        self._may_lock = may_lock
        self._buffers: dict[int, HostBuffer] = {}  # known to the engine, by address
        self._back: deque[HostBuffer] = deque()  # given back, and not looked at yet
        self.give: Callable[[HostBuffer], object] = self._back.append
        # Those that are not in use, by size: first the size of which none was given back for
        # longest.
        self._free: dict[int, list[HostBuffer]] = {}
        self._is_refused = False

    @property
    def nbytes(self) -> int:
        """Bytes of all its buffers."""
        return sum(buffer.nbytes for buffer in list(self._buffers.values()))

    def take(self, nbytes: int) -> HostBuffer | None:
        """Return a locked buffer of this size, or a larger one.

        None: nothing more may, or can, be locked.
        """
        with self._state.lock:
            self.settle()
            size = min((size for size in self._free if nbytes <= size <= 2 * nbytes), default=None)
            if size is not None:
                return self._pop(size)
            free = sum(size * len(buffers) for size, buffers in self._free.items())
            if self._is_refused or not self._may_lock(self.nbytes - free + nbytes):
                return None
            while self._free and not self._may_lock(self.nbytes + nbytes):
                self._unlock_free()
            buffer = HostBuffer(nbytes)
            self._is_refused = self._state.engine.lock(buffer) is not None
            self._buffers[buffer.address] = buffer
            if not self._is_refused:
                return buffer
            self.give(buffer)
            self.settle()
            return None

    def settle(self) -> None:
        """Look at what was given back.

        Once the system has refused to lock more, it is unlocked, and so is what is free: what else
        needs locked memory, now or later, finds some. What is in use stays locked until then.
        """
        with self._state.lock:
            while self._back:
                buffer = self._back[0]
                if buffer.address in self._buffers:  # else unlocked meanwhile
                    free = dict(self._free)
                    others = [other for other in free.pop(buffer.nbytes, []) if other is not buffer]
                    self._free = {**free, buffer.nbytes: [*others, buffer]}
                self._back.popleft()
            while self._is_refused and self._free:
                self._unlock_free()

    def give_back_all(self) -> None:
        """Unlock all of it; code that has a buffer keeps its memory, as ordinary memory."""
        with self._state.lock:
            self.settle()
            while self._free:
                self._unlock_free()
            while self._buffers:
                self._unlock(next(iter(self._buffers.values())))

    def _pop(self, size: int) -> HostBuffer:
        """Return a free buffer of this size, which is then no longer free."""
        *others, buffer = self._free[size]
        if others:
            self._free[size] = others
        else:
            del self._free[size]
        return buffer

    def _unlock_free(self) -> None:
        """Unlock one that is not in use; where that fails, it is free still."""
        buffer = self._pop(next(iter(self._free)))
        try:
            self._unlock(buffer)
        except OffloadError:
            self.give(buffer)
            raise

    def _unlock(self, buffer: HostBuffer) -> None:
        del self._buffers[buffer.address]
        try:
            self._state.engine.unlock(buffer)  # cut short before it, the end of the buffer does so
        except OffloadError:  # the error keeps the buffer alive: unlock it at the next try
            self._buffers[buffer.address] = buffer
            raise
