"""A recording as the history of an error: what came before it, and in which pieces memory was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...host.json_lines import records_in
from .facts import format_size
from .history import Record, Sign, is_recording

_USES = {"forward": "forward", "recompute": "backward", "backward": "backward"}


def errors_in(text: str) -> str | None:
    """Return the errors that a recording, as JSON lines, holds; None where it is none."""
    first, _, rest = text.partition("\n")
    if not is_recording(list(records_in([first]))):
        return None
    rows = records_in(rest.split("\n"))
    return "\n".join(str(row.get("what")) for row in rows if row.get("event") == "error")


def history_of(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the history of steps up to the last time that memory ran out, else up to the end.

    Parameters
    ----------
    rows : sequence of mappings
        The header of a recording, and its events. Of several devices it is the one whose memory ran
        out, else the one that computed last.
    """
    events = rows[1:]
    last = next((i for i in reversed(range(len(events))) if _is(events[i], "memory")), None)
    if last is not None:
        events = events[:last]
    failed = rows[1 + last] if last is not None else {}
    device = failed.get("device") or next(
        (event.get("device") for event in reversed(events) if _is(event, "compute")), None
    )
    headers = [each for each in rows[0].get("devices") or () if isinstance(each, Mapping)]
    before = next((d.get("steps_before") for d in headers if d.get("device") == device), None)
    # Of a recording that began later the steps before it are known by their number.
    records: list[dict[str, Any]] = [{"step": 0, "phase": "backward"}] if before else []
    for event in events:
        record = _record(event) if event.get("device") == device else None
        if record is None:
            continue
        if isinstance(before, int) and isinstance(event.get("step"), int):
            record["step"] = before + event["step"] + _is(event, "step")
        if not records or record != records[-1]:  # a pass has many uses
            records.append(record)
    return records


def pieces_in(rows: Sequence[Record]) -> list[Sign]:
    """Return that memory was in pieces too small, where torch's snapshot shows it."""
    failed = next((row for row in reversed(rows) if _is(row, "memory")), None)
    if failed is None:
        return []
    asked, cached, largest = (
        size if isinstance(size := failed.get(key), int) else 0
        for key in ("asked_bytes", "cached_bytes", "largest_cached_bytes")
    )
    if not 0 < largest < asked <= cached:
        return []
    why = (
        f"{format_size(cached)} were cached, in pieces of at most {format_size(largest)}, and "
        f"{format_size(asked)} asked for"
    )
    return [Sign("fragmentation", "high", why, cached)]


def _record(event: Record) -> dict[str, Any] | None:
    """Return what an event says of a step; None where it says nothing."""
    kind, phase = event.get("event"), str(event.get("phase", ""))
    if kind == "compute":
        use = _USES.get(str(event.get("kind")))
        return {"phase": use if phase in ("", "training") else phase}
    if kind == "optimizer":
        return {"phase": "optimizer"}
    if kind == "phase":
        name = str(event.get("name"))
        return {"phase": "" if name == "training" else name}
    if kind == "batch":
        return {"length": event.get("length")}
    if kind == "step":
        return {
            "allocated_bytes": event.get("allocated_bytes"),
            "peak_bytes": event.get("peak_bytes"),
        }
    return None


def _is(event: Record, kind: str) -> bool:
    return event.get("event") == kind
