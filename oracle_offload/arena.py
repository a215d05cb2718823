"""The device memory that one attached model lends to the engine of its device."""

from __future__ import annotations

import logging

import torch

from .engines import DeviceState, Segment
from .errors import OffloadError
from .geometry import aligned
from .sizes import format_size

logger = logging.getLogger("oracle_offload")


class Arena:
    """The segments of one model, in ordinary torch allocations.

    It begins with one and grows by further ones beside it, so that it never holds more than it
    lends. There are few of them, because no unit spans two.

    Parameters
    ----------
    state : DeviceState
        The device that lends them.

    Attributes
    ----------
    capacity_bytes : int
        Size of what is lent.
    floor_bytes : int
        The part of it that must be there: two of the largest units, or one checkpointed block.
    may_grow : bool
        Whether it may grow to the blocks that are learned.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self.capacity_bytes = 0
        self.floor_bytes = 0
        self.may_grow = False
        self._lease: int | None = None
        self._lent: list[Segment] = []
        self._worth_trying_bytes = 0  # what must be free before it tries to grow again

    @property
    def segments(self) -> list[Segment]:
        """The device memory lent to the engine."""
        with self._state.lock:
            return list(self._lent)

    def lend(self, nbytes: int) -> None:
        """Lend `nbytes` more of device memory, in one segment."""
        with self._state.lock:
            engine = self._state.engine
            if self._lease is None:
                self._lease = engine.add_lease()
            segment = Segment(nbytes, self._state.device)
            # Findable first: other threads are answered with it as soon as the engine has it.
            self._state.exchange_segments([], [segment])
            self._lent.append(segment)
            try:
                engine.add_segment(self._lease, segment.address, nbytes, self._state.stream())
            except BaseException:
                self._lent.remove(segment)
                self._state.exchange_segments([segment], [])
                raise
            self.capacity_bytes += nbytes

    def grow(self, block_bytes: int, largest_unit: int, most_bytes: int) -> None:
        """Grow by what a checkpointed block, which the engine has learned, needs beyond the floor.

        The difference holds two of the largest units at least: a smaller segment would be of no use
        to most units. Where the device has no room, it is tried again once that much more is free.
        """
        needed = min(block_bytes - self.floor_bytes, most_bytes - self.capacity_bytes)
        if needed <= 0:
            return
        difference = aligned(max(needed, 2 * largest_unit))
        free = 0
        try:
            free = self._state.free_bytes()
            if free < self._worth_trying_bytes:
                return
            self.lend(difference)
            self.floor_bytes += difference
        except (OffloadError, MemoryError, torch.OutOfMemoryError) as error:
            level = logging.INFO if self._worth_trying_bytes else logging.WARNING
            self._worth_trying_bytes = free + difference
            logger.log(level, "the arena stays at %s: %s", format_size(self.capacity_bytes), error)

    def make_room(self, least_bytes: int) -> None:
        """Lend what units that come later need at least, where the arena is smaller than that.

        Raises
        ------
        OffloadError
            It must not grow: its size was asked for.
        """
        if least_bytes > self.capacity_bytes:
            if not self.may_grow:
                raise OffloadError(
                    f"they need an arena of {format_size(least_bytes)}, and vram_budget allows "
                    f"{format_size(self.capacity_bytes)}; raise it"
                )
            self.lend(aligned(least_bytes))
        self.floor_bytes = max(self.floor_bytes, least_bytes)

    def take_back(self) -> None:
        """Take everything back; what fails is there still."""
        with self._state.lock:
            if self._lease is None:
                return
            # The memory stays alive until the engine has let go of it.
            self._state.engine.remove_lease(self._lease)
            self._lease = None
            lent, self._lent = self._lent, []
            self._state.exchange_segments(lent, [])
