"""The history of steps before an error: what a single message cannot show.

One JSON object per line, written as training goes::

    {"step": 118, "phase": "forward", "allocated_bytes": 21474836480, "length": 4096}

`step` counts from 0. Other known keys, all optional: `phase` (forward, backward, optimizer,
evaluation), `allocated_bytes`, `reserved_bytes`, `peak_bytes`, and `length` (tokens, frames,
pixels: whatever makes one batch larger than another). The last line is the step that failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from os import PathLike, fspath
from typing import Any, NamedTuple

from ...host.json_lines import records_in
from ...host.sizes import MIB
from .facts import compiled
from .reading import read_excerpt

Record = Mapping[str, Any]

# A leak grows by the step; growth under this share of what is held, or under 64 MiB, is noise.
LEAK_SHARE, LEAK_FLOOR = 0.03, 64 * MIB
LEAK_POINTS = 8
WARM_UP = 3  # the first steps allocate optimizer states and workspaces: not a leak
LONGER = 1.2  # a batch this much longer than any before it is the odd one out
MOST_RECORDS = 200_000


class Sign(NamedTuple):
    """One thing the history shows: a cause, how sure, why, and bytes where they are known."""

    cause: str
    confidence: str
    why: str
    nbytes: int | None = None


def read_history(source: str | PathLike[str] | Iterable[Record]) -> list[dict[str, Any]]:
    """Return the records of a JSONL file (or of an iterable of mappings), skipping broken lines.

    A process killed while writing leaves half a line: that line is skipped, never an error.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    if isinstance(source, (str, PathLike)):
        with open(fspath(source), "rb") as file:
            records = list(records_in(read_excerpt(file).text.split("\n")))
    else:
        records = [dict(record) for record in source if isinstance(record, Mapping)]
    return records if is_recording(records) else records[-MOST_RECORDS:]


def is_recording(rows: Sequence[Record]) -> bool:
    """Return whether rows begin with the header of a recording."""
    if not rows or "schema" not in rows[0]:
        return False
    from ...observe.recording import SCHEMA  # with its views, which an error seldom needs

    return bool(rows[0]["schema"] == SCHEMA)


def records_in_log(text: str) -> list[dict[str, Any]]:
    """Read what common trainers print per step: `max mem: N` (MiB) and the length of a batch."""
    records: list[dict[str, Any]] = []
    for match in compiled(r"max mem: (\d{1,9})\b").finditer(text):
        records.append({"peak_bytes": int(match[1]) * MIB})
    if records:
        return records
    pattern = r"\b(?:max_size:time|tokens|seq_len|sequence_length|max_len)[ =:]{1,3}(\d{1,12})\b"
    return [{"length": int(match[1])} for match in compiled(pattern).finditer(text)]


def _numbers(records: list[dict[str, Any]], key: str) -> list[int]:
    values = (record.get(key) for record in records)
    return [
        int(value)
        for value in values
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**63
    ]


def _leak(values: list[int], *, peak: bool) -> Sign | None:
    values = values[WARM_UP:]
    count = len(values)
    if count < LEAK_POINTS:
        return None
    growth = values[-1] - values[0]
    if growth < max(LEAK_FLOOR, LEAK_SHARE * values[-1]):
        return None
    rises = sum(later > earlier for earlier, later in pairwise(values))
    falls = sum(later < earlier for earlier, later in pairwise(values))
    middle = (count - 1) / 2
    mean = sum(values) / count
    spread_x = sum((i - middle) ** 2 for i in range(count))
    spread_y = sum((v - mean) ** 2 for v in values)
    cross = sum((i - middle) * (v - mean) for i, v in enumerate(values))
    straight = cross * cross / (spread_x * spread_y) if spread_y else 0.0
    if straight < 0.8 or rises < 0.6 * (count - 1) or falls > 0.2 * (count - 1):
        return None  # a peak creeps up in a few jumps; a leak climbs at every step
    per_step = growth // (count - 1)
    kind = "the peak" if peak else "memory in use"
    why = f"{kind} climbed steadily over {count} records, about {per_step / MIB:.1f} MiB each"
    return Sign("leak", "medium" if peak else "high", why, growth)


def signs(records: list[dict[str, Any]], *, confidence: str = "high") -> list[Sign]:
    """Return the causes that a history shows, the surest first. Never raises on odd records."""
    found: list[Sign] = []
    if not records:
        return found
    allocated = _numbers(records, "allocated_bytes")
    # Torch's peak never falls; it says something only where it is not known what was in use.
    peak = len(allocated) < WARM_UP + LEAK_POINTS
    leak = _leak(_numbers(records, "peak_bytes") if peak else allocated, peak=peak)
    if leak is not None:
        found.append(leak)
    lengths = _numbers(records, "length")
    if len(lengths) >= 4 and lengths[-1] > LONGER * max(lengths[:-1]):
        why = f"the last batch has length {lengths[-1]}, the longest before it {max(lengths[:-1])}"
        found.append(Sign("longest_batch", confidence, why))
    phase = str(records[-1].get("phase", "")).lower()
    before = {str(record.get("phase", "")).lower() for record in records[:-1]}
    if phase.startswith(("eval", "valid", "sampl", "test")):
        found.append(Sign("evaluation", confidence, f"the last record is in phase {phase!r}"))
    steps = _numbers(records, "step")
    if steps and not phase.startswith(("eval", "valid", "sampl", "test")):
        done = steps[-1] - steps[0]
        if phase == "optimizer" and phase not in before:
            why = "the first optimizer step had begun: it allocates the optimizer's states"
            found.append(Sign("optimizer_state", confidence, why))
        elif phase == "backward" and phase not in before and done == 0:
            found.append(Sign("first_backward", confidence, "the first backward pass had begun"))
        elif done == 1 and len(set(steps)) == 2:
            why = "the first step passed; the second also has optimizer states to hold"
            found.append(Sign("second_step", confidence, why))
    return found
