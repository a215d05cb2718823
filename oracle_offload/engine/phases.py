"""What an engine counted in each phase of a run: training, sampling, evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST = "training"  # until the program says otherwise
# Counters that say how things are, not how often something happened: they do not grow.
AS_THEY_ARE = frozenset(
    {
        "managed_bytes",
        "locked_bytes",
        "pageable_bytes",
        "disk_bytes",
        "disk_kept_bytes",
        "disk_arrived_bytes",
        "ring_bytes",
        "arena_bytes",
        "staging_bytes",
        "resident_bytes",
        "peak_resident_bytes",
        "largest_unit_bytes",
        "learned_block_bytes",
        "units",
        "resident_units",
    }
)


Waits = Mapping[int, tuple[int, int, float]]  # by unit: see `_core.Engine.unit_waits`
_NO_WAIT = (0, 0, 0.0)


def growth(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return by how much counters have grown, and how those are that do not grow."""
    return {key: now[key] if key in AS_THEY_ARE else now[key] - before[key] for key in now}


class Phases:
    """The phases of one device, and what was counted in each.

    Parameters
    ----------
    name : str
        The phase that it is in.
    counters : mapping
        The engine's, of all models, now.
    waits : mapping
        For each unit, now.
    """

    def __init__(self, name: str, counters: Mapping[str, Any], waits: Waits) -> None:
        self._name = name
        self._begun = dict(counters)
        self._begun_waits = waits
        self._sums: dict[str, dict[str, Any]] = {}
        self._waits: dict[str, Waits] = {}

    def begin(self, name: str, counters: Mapping[str, Any], waits: Waits) -> None:
        """Another phase begins, or the same goes on."""
        self._sums, self._waits = self.counted(counters), self.waited(waits)
        self._name, self._begun, self._begun_waits = name, dict(counters), waits

    def counted(self, counters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return by how much the counters grew in each phase, by name, up to `counters`."""
        grown = growth(counters, self._begun)
        before = self._sums.get(self._name, dict.fromkeys(grown, 0))
        sums = {key: before[key] + grown[key] for key in grown if key not in AS_THEY_ARE}
        return {**self._sums, self._name: sums}

    def waited(self, waits: Waits) -> dict[str, Waits]:
        """Return the waits for each unit in each phase, by name, up to `waits`."""
        before = self._waits.get(self._name, {})
        sums: dict[int, tuple[int, int, float]] = dict(before)
        for unit, (timed, stalls, seconds) in waits.items():
            then = self._begun_waits.get(unit, _NO_WAIT)
            so_far = before.get(unit, _NO_WAIT)
            sums[unit] = (
                so_far[0] + timed - then[0],
                so_far[1] + stalls - then[1],
                so_far[2] + seconds - then[2],
            )
        return {**self._waits, self._name: sums}
