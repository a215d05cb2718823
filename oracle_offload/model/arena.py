"""The device memory that one attached model lends to the engine of its device."""

from __future__ import annotations

import contextlib
import logging

import torch

from .. import _core
from ..engine.engines import DeviceState, Segment, remove
from ..engine.geometry import aligned, aligned_down
from ..errors import OffloadError
from ..host.sizes import format_size

logger = logging.getLogger("oracle_offload")

_LEAST_STAGING = 4 * _core.ALIGNMENT  # that the engine takes


class Arena:
    """The segments of one model, in ordinary torch allocations.

    It begins with one and grows by further ones, which leave the first in place, so that it never
    holds more than it lends. There are few of them, because no unit spans two. What a budget that
    adapts adds is one segment more, which is given back when another size is due.

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
        self._added_lease: int | None = None  # of the segment that `resize` lends
        self._added: list[Segment] = []
        self._staging_lease: int | None = None
        self._staging: Segment | None = None  # what coded weights pass through
        self._worth_trying_bytes = 0  # what must be free before it tries to grow again

    @property
    def segments(self) -> list[Segment]:
        """The device memory lent to the engine."""
        with self._state.lock:
            return [*self._lent, *self._added]

    def lend(self, nbytes: int) -> None:
        """Lend `nbytes` more of device memory, in one segment."""
        with self._state.lock:
            if self._lease is None:
                self._lease = self._state.engine.add_lease()
            self._lend(nbytes, self._lease, self._lent)

    def _lend(self, nbytes: int, lease: int, lent: list[Segment]) -> None:
        segment = Segment(nbytes, self._state.device)
        # Findable first: other threads are answered with it as soon as the engine has it.
        self._state.exchange_segments([], [segment])
        lent.append(segment)
        try:
            self._state.engine.add_segment(lease, segment.address, nbytes, self._state.stream())
        except BaseException:
            lent.remove(segment)
            self._state.exchange_segments([segment], [])
            raise
        self.capacity_bytes += nbytes

    @property
    def staging_bytes(self) -> int:
        """Device memory that coded weights pass through, in addition to the arena."""
        return 0 if self._staging is None else self._staging.nbytes

    def lend_staging(self, nbytes: int) -> None:
        """Lend device memory that coded weights pass through on their way into the arena."""
        engine = self._state.engine
        with self._state.lock:
            segment = Segment(nbytes, self._state.device)
            self._staging_lease = engine.add_lease()
            engine.add_staging(self._staging_lease, segment.address, nbytes, self._state.stream())
            self._staging = segment

    def check_staging(self) -> None:
        """Refuse coded weights on a device that cannot decode; what is lent for that goes back.

        Raises
        ------
        OffloadError
            The build has no kernels, say, or none for this device.
        """
        with self._state.lock:
            try:
                self.lend_staging(_LEAST_STAGING)
            finally:
                self._take_back_staging()

    def _take_back_staging(self) -> None:
        if self._staging_lease is not None:
            remove(self._state.engine.remove_lease, self._staging_lease)
            self._staging_lease, self._staging = None, None

    def resize(self, nbytes: int) -> None:
        """Hold `nbytes` in all, or less where the device has less room; what is lent stays lent.

        The added segment is replaced by one of another size, and what was in it has to be copied
        again. Nothing is lent beyond what is free of the device or in torch's cache.

        Raises
        ------
        OffloadError
            The segment is in use; the arena is as it was.
        """
        with self._state.lock:
            if self._added_lease is None:
                self._added_lease = self._state.engine.add_lease()
            else:
                self._give_back(self._added_lease, self._added)
                self._added_lease, self._added = self._state.engine.add_lease(), []
            self.capacity_bytes = sum(segment.nbytes for segment in self._lent)
            self._state.kind.release_cached()  # only a segment of its very size could be reused
            added = min(nbytes - self.capacity_bytes, aligned_down(self._state.free_bytes()))
            if added > 0:
                self._lend(added, self._added_lease, self._added)

    def replace(self, nbytes: int) -> None:
        """Hold one segment of `nbytes` in place of all; what was in them has to be copied again.

        Raises
        ------
        OffloadError
            A segment is in use; the arena has the size that it had.
        torch.OutOfMemoryError
            The device has no room for it; it holds a segment of the size that it had.
        """
        with self._state.lock:
            before = self.capacity_bytes
            try:
                self._give_back_segments()
                self._worth_trying_bytes = 0
                self._state.kind.release_cached()
                self.lend(nbytes)
            except BaseException:
                with contextlib.suppress(OffloadError):  # Ctrl-C may have come in the middle
                    self._give_back_segments()
                if self.capacity_bytes < before:
                    self.lend(before - self.capacity_bytes)
                raise

    def _give_back_segments(self) -> None:
        """Give back all of the arena; what fails is there still, and counts."""
        if self._added_lease is not None:
            self._give_back(self._added_lease, self._added)
            self.capacity_bytes = sum(segment.nbytes for segment in self._lent)
            self._added_lease, self._added = None, []
        if self._lease is not None:
            self._give_back(self._lease, self._lent)
            self.capacity_bytes = 0
            self._lease, self._lent = None, []

    def _give_back(self, lease: int, lent: list[Segment]) -> None:
        # The memory stays alive until the engine has let go of it.
        remove(self._state.engine.remove_lease, lease)
        self._state.exchange_segments(lent, [])

    def grow(self, block_bytes: int, largest_unit: int, most_bytes: int) -> None:
        """Grow by what a checkpointed block, which the engine has learned, needs beyond the floor.

        The difference holds two of the largest units at least: a smaller segment would be of no use
        to most units. Where the device has no room, it is tried again once that much more is free.
        """
        if self._added and block_bytes <= self.capacity_bytes:
            self.floor_bytes = max(self.floor_bytes, block_bytes)
            return
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
            size = self.capacity_bytes
            self._give_back_segments()
            self.capacity_bytes = size  # for code that asks about the model after its end
            self._take_back_staging()
