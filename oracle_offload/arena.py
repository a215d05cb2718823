"""The device memory that one attached model lends to the engine of its device."""

from __future__ import annotations

import logging

import torch

from .engines import DeviceState, Segment
from .errors import DriverError, OffloadError
from .geometry import aligned
from .sizes import GIB, format_size

logger = logging.getLogger("oracle_offload")

_SEGMENT_BYTES = GIB


class Arena:
    """The segments of one model, in ordinary torch allocations.

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
        Whether it may grow to the block that is learned.
    lent : dict
        Segments, by the engine's lease. All but those of the lease in use go back as soon as the
        engine lets them.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self.capacity_bytes = 0
        self.floor_bytes = 0
        self.may_grow = False
        self.lent: dict[int, list[Segment]] = {}
        self._lease = -1

    @property
    def segments(self) -> list[Segment]:
        """The device memory lent to the engine."""
        with self._state.lock:
            return [segment for segments in self.lent.values() for segment in segments]

    def lend(self, nbytes: int, largest_unit: int) -> None:
        """Lend `nbytes` of device memory, in segments of about 1 GiB.

        What was lent before is taken back once the new memory is there: units do not span
        segments, so one large segment caches more than the same bytes in pieces.
        """
        with self._state.lock:  # else another thread's forward takes back what is being lent
            engine = self._state.engine
            size = max(_SEGMENT_BYTES, 4 * largest_unit)
            lease, left = engine.add_lease(), nbytes
            segments = self.lent[lease] = []
            try:
                while left > 0:
                    # A rest too small for the largest unit would be of no use to most units.
                    take = left if left < size + 2 * largest_unit else size
                    segment = Segment(take, self._state.device)
                    # Findable first: other threads are answered with it as soon as the engine has
                    # it.
                    segments.append(segment)
                    self._state.exchange_segments([], [segment])
                    engine.add_segment(lease, segment.address, take, self._state.stream())
                    left -= take
                self._lease, self.capacity_bytes = lease, nbytes
            finally:
                self.take_back_replaced()

    def grow(self, block_bytes: int, largest_unit: int, most_bytes: int) -> None:
        """Grow, once, to a checkpointed block that the engine has learned."""
        capacity = min(self.capacity_bytes + block_bytes - self.floor_bytes, most_bytes)
        if capacity <= self.capacity_bytes:
            return
        self.may_grow = False
        try:
            self.lend(aligned(capacity), largest_unit)
            self.floor_bytes = block_bytes
        except (OffloadError, MemoryError, torch.OutOfMemoryError) as error:
            logger.warning("the arena stays at %s: %s", format_size(self.capacity_bytes), error)

    def take_back_replaced(self) -> None:
        """Take back all but the lease in use; what another thread computes with goes later."""
        with self._state.lock:
            for lease in [lease for lease in self.lent if lease != self._lease]:
                try:
                    self._take_back(lease)
                except OffloadError as error:
                    level = logging.WARNING if isinstance(error, DriverError) else logging.INFO
                    logger.log(level, "replaced device memory is given back later: %s", error)

    def take_back_all(self) -> None:
        """Take everything back; what fails is there still."""
        with self._state.lock:
            for lease in list(self.lent):
                self._take_back(lease)

    def _take_back(self, lease: int) -> None:
        """Take memory back from the engine; it stays alive until the engine has let go of it."""
        self._state.engine.remove_lease(lease)
        self._state.exchange_segments(self.lent.pop(lease), [])
