"""The budget that adapts: how large an arena may be, by what each step left of the device.

The first step runs on the floor. From then on the arena takes what is left of the device at the
peak of a step, less a margin; a step that ran out of memory takes from it, calm gives back. This
file has the rule alone, without torch: numbers go in, a size comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.geometry import aligned_down

MARGIN = 0.05  # of what torch may hold: fragments of its cache, and steps larger than those seen
_REMEMBERED_STEPS = 64  # a peak counts for so many steps at least, and twice as many at most
_FIRST_PATIENCE = 8  # calm steps before it grows again after a failure; twice as many each time
_MOST_PATIENCE = 512
_SHARE_THAT_PAYS = 16  # grow by no less than this part: every change costs a step its prefetches


@dataclass(frozen=True)
class Reading:
    """Memory of one device at the end of a step, in bytes.

    Attributes
    ----------
    total_bytes, free_bytes : int
        As the driver tells. Shared memory, to which Windows (WDDM) moves what does not fit, counts
        in neither.
    reserved_bytes : int
        Held by torch's allocator: the arenas, tensors, and cached blocks that are not in use.
    peak_bytes : int
        The most that was allocated at once, arenas included, since any of them changed.
    failures : int
        How often torch's allocator has run out of memory, or only just not, so far.
    limit_bytes : int or None
        The most that torch may reserve (``set_per_process_memory_fraction``).
    """

    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    peak_bytes: int
    failures: int
    limit_bytes: int | None = None

    @property
    def cap_bytes(self) -> int:
        """The most that torch can hold here, as long as others hold what they hold now."""
        cap = min(self.free_bytes + self.reserved_bytes, self.total_bytes)
        return cap if self.limit_bytes is None else min(cap, self.limit_bytes)


@dataclass(frozen=True)
class Change:
    """The arena shall have another size.

    Attributes
    ----------
    bytes : int
        Which one.
    why : str
        In a few words.
    """

    bytes: int
    why: str


class AutoBudget:
    """The size of one arena, step by step.

    Parameters
    ----------
    failures : int
        `Reading.failures` before the first step.

    Attributes
    ----------
    changes : int
        How often the arena has changed.
    last : Change or None
        The latest of these changes.
    window : int
        Steps since peaks were last forgotten; at 1 torch's peak is to be reset.
    """

    def __init__(self, failures: int = 0) -> None:
        self._failures = failures
        self._patience = 1
        self._calm = 0
        self._others = [0, 0]  # peaks of everything but the arena: in this window, in the last one
        self.window = 0
        self.changes = 0
        self.last: Change | None = None

    def begin_anew(self) -> None:
        """Forget the peaks: another arena of this device has changed, and they held it."""
        self._others = [0, 0]
        self.window = self._calm = 0

    def after_step(
        self, reading: Reading, capacity: int, floor: int, most: int, grain: int, sharing: int = 1
    ) -> Change | None:
        """Return what the arena shall be from the next step on; None to leave it as it is.

        Parameters
        ----------
        reading : Reading
            The device after the step.
        capacity, floor, most : int
            Bytes: of the arena now, that it must have, that it can use.
        grain : int
            The least bytes beyond the floor that are of use.
        sharing : int
            How many arenas of the device grow by what is left.
        """
        failed, self._failures = reading.failures > self._failures, reading.failures
        self.window += 1
        if self.window > _REMEMBERED_STEPS:
            self.window, self._others = 1, [0, self._others[0]]
        self._others[0] = max(self._others[0], reading.peak_bytes - capacity)
        margin = int(MARGIN * reading.cap_bytes)
        left = reading.cap_bytes - max(self._others) - margin
        room = self._useful(min(left, most), floor, grain)
        if failed:
            self._calm = 0
            self._be_patient()
            half = self._useful((floor + capacity) // 2, floor, grain)
            return _change(capacity, min(half, room), "torch ran out of device memory")
        if left < capacity - margin // 2:
            self._calm = 0
            return _change(capacity, min(room, capacity), "the device has less room")
        self._calm += 1
        if self._calm < self._patience:
            return None
        # What has failed before is approached, not taken at once.
        share = sharing if self._patience == 1 else 2 * sharing
        grown = aligned_down((room - capacity) // share)
        if room == most and grown < grain:
            grown = room - capacity
        elif grown < max(grain, capacity // _SHARE_THAT_PAYS):
            return None
        return _change(capacity, capacity + grown, "a step left room")

    def changed(self, change: Change, size: int) -> None:
        """Take note that the arena was made to change, and is of `size` now."""
        self._calm = 0
        self.changes += 1
        self.last = Change(size, change.why)
        if size < change.bytes:  # the device had less room than was counted
            self._be_patient()

    def _be_patient(self) -> None:
        self._patience = min(max(_FIRST_PATIENCE, 2 * self._patience), _MOST_PATIENCE)

    @staticmethod
    def _useful(size: int, floor: int, grain: int) -> int:
        return aligned_down(size) if size - floor >= grain else floor


def _change(capacity: int, size: int, why: str) -> Change | None:
    return None if size == capacity else Change(size, why)
