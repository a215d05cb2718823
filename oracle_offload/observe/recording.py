"""A recording as plain data: its averages, and the files that it is written to and read from.

docs/recording.md says what each event holds. Nothing here needs torch.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..host.ranks import in_words
from ..host.replace import replace_file
from ..host.schema import schema
from ..host.sizes import format_size
from ..host.terminal import Text
from .memory_holders import sentences as memory_sentences
from .memory_holders import tables as holders
from .page import page
from .sections import Section, render
from .timeline import STALL_FLOOR_S, Stay, blocks_within, details, timeline_svg

SCHEMA = schema("recording", 1)
_SUFFIXES = {".html": "html", ".htm": "html", ".json": "chrome", ".csv": "csv", ".jsonl": "jsonl"}
_LANES = {"compute": 1, "wait": 2, "copy_to_device": 3, "copy_to_host": 4, "decode": 5}
_LANE_NAMES = (
    *("host", "managed layers", "stalls", "copies to the device", "copies to the host"),
    "decodes of weights",
)
_KINDS = {
    "compute": "compute",
    "wait": "stall",
    "copy_to_device": "h2d",
    "copy_to_host": "d2h",
    "decode": "decode",
}
# What every report asks of these events; a file may lack it.
_NEEDED: dict[str, tuple[str, ...]] = {
    "step": (
        *("device", "step", "phase", "label", "timed", "seconds"),
        *("counters", "allocated_bytes", "peak_bytes"),
    ),
    "compute": ("device", "model", "step"),
    "wait": ("layer", "seconds", "step"),
    "error": ("what",),
}
_MOST_SHOWN = 30  # steps, and layers, in a table
Event = Mapping[str, Any]


class Recording:
    """What `record` recorded; ``str()`` is text, a notebook shows a page.

    Parameters
    ----------
    header : dict
        ``"schema"``, the devices, and how much was dropped.
    events : list of dict
        In the order of ``"t_s"``; docs/recording.md has their keys.
    """

    def __init__(self, header: Mapping[str, Any], events: Sequence[Event]) -> None:
        self.header = dict(header)
        self.events = list(events)

    def __iter__(self) -> Iterator[Event]:
        """Yield the header and every event, as the lines of a JSONL file."""
        yield self.header
        yield from self.events

    def of(self, kind: str) -> list[Event]:
        """Return the events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    def steps(self) -> list[Event]:
        """Return the rows of the steps."""
        return self.of("step")

    def averages(self) -> dict[str, dict[str, Any]]:
        """Return the mean step of each device, by device.

        Steps with a label (warm-up, resume) and steps that were timed are left out.

        Returns
        -------
        dict
            ``"steps"``, how many the means are of; ``"seconds"``, and of the engine's counters how
            much they grow, by name; None where there is no such step.
        """
        means: dict[str, dict[str, Any]] = {}
        for device in self.devices():
            steps = [
                step
                for step in self.steps()
                if step["device"] == device
                and not step["label"]
                and not step["timed"]
                and step["seconds"] is not None
            ]
            count = len(steps)
            means[device] = {
                "steps": count,
                "seconds": sum(s["seconds"] for s in steps) / count if count else None,
                "counters": {
                    name: sum(s["counters"][name] for s in steps) / count
                    for name in (steps[0]["counters"] if steps else ())
                },
            }
        return means

    def devices(self) -> list[str]:
        """Return the names of the devices."""
        return list(dict.fromkeys(str(device["device"]) for device in self.header["devices"]))

    def timed_steps(self) -> list[tuple[str, int]]:
        """Return the timed steps that hold events with times: device and number."""
        found = {
            (str(event["device"]), int(event["step"])): None
            for event in self.events
            if event.get("start_s") is not None
        }
        return list(found)

    def stalled_layers(self) -> list[tuple[str, int, float]]:
        """Return layer, number of stalls and their seconds, in the timed steps; longest first."""
        sums: dict[str, tuple[int, float]] = {}
        for event in self.of("wait"):
            if (event["seconds"] or 0.0) > STALL_FLOOR_S:
                count, seconds = sums.get(event["layer"], (0, 0.0))
                sums[event["layer"]] = count + 1, seconds + event["seconds"]
        rows = [(layer, count, seconds) for layer, (count, seconds) in sums.items()]
        return sorted(rows, key=lambda row: (-row[2], row[0]))

    # ---- text and page ----

    def _sentences(self) -> list[str]:
        at = self.header.get("place")
        lines = [] if at is None else [f"of {in_words(at)}"]
        for device, mean in self.averages().items():
            if not mean["steps"]:
                lines.append(
                    f"{device}: no whole step without a label was recorded, so there is no average"
                )
                continue
            counters = mean["counters"]
            lines.append(
                f"{device}: a step takes {_ms(mean['seconds'])} (mean of {mean['steps']}), moves "
                f"{format_size(round(counters['h2d_bytes']))} to the device in "
                f"{counters['h2d_copies']:.0f} copies and evicts {counters['evictions']:.0f} units"
            )
            read = counters.get("disk_read_bytes", 0)  # of older recordings there is none
            if read:
                lines.append(f"{device}: {format_size(round(read))} of that were read from files")
        for device in self.header["devices"]:
            lost = [
                f"{device[f'dropped_{what}']} {what.replace('_', ' ')}"
                for what in ("events", "steps", "phases", "timed_steps", "arenas", "batches")
                if device.get(f"dropped_{what}")
            ]
            if lost:
                lines.append(
                    f"{device['device']}: dropped, as there was no room: {', '.join(lost)}"
                )
        for event in self.of("memory"):
            lines += memory_sentences(event)
            if event["file"]:
                lines.append(f"Torch's memory snapshot of that is in {event['file']}.")
        if self.header.get("dropped_errors"):
            lines.append(f"dropped, as there was no room: {self.header['dropped_errors']} errors")
        return lines or ["no model was attached while this was recorded"]

    def __str__(self) -> str:
        text = Text()
        for sentence in self._sentences():
            text.block(sentence)
        for title, rows in self._tables():
            text.line()
            text.line(title)
            widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
            for row in rows:
                cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
                text.line(("  " + "  ".join(cells))[: text.width].rstrip())
        return str(text)

    __repr__ = __str__

    def _tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        tables: list[tuple[str, list[tuple[str, ...]]]] = []
        rows: list[tuple[str, ...]]
        stalled = self.stalled_layers()[:_MOST_SHOWN]
        if stalled:
            rows = [(layer, str(count), _ms(seconds)) for layer, count, seconds in stalled]
            tables.append(
                (
                    "layers that stalled most, in the timed steps",
                    _headed("layer|stalls|in all", rows),
                )
            )
        phases = self.of("phase")
        if phases:
            rows = [
                (
                    f"{phase['before']} -> {phase['name']}",
                    _size(phase["allocated_bytes"]),
                    _size(phase["peak_bytes"]),
                    str(phase["copies"]),
                    format_size(phase["counters"]["h2d_bytes"]),
                )
                for phase in phases[-_MOST_SHOWN:]
            ]
            tables.append(
                ("changes of phase", _headed("phase|allocated|peak|copies|to the device", rows))
            )
        for event in self.of("memory"):
            tables += [(title, _headed("|bytes|blocks", rows)) for title, rows in holders(event)]
        steps = self.steps()
        if steps:
            rows = [
                (
                    str(step["step"]),
                    step["phase"],
                    step["label"] or ("timed" if step["timed"] else ""),
                    _ms(step["seconds"]),
                    format_size(step["counters"]["h2d_bytes"]),
                    str(step["counters"]["late"]),
                    _size(step["peak_bytes"]),
                )
                for step in steps[-_MOST_SHOWN:]
            ]
            title = "steps" if len(steps) <= _MOST_SHOWN else f"the last {_MOST_SHOWN} steps"
            tables.append((title, _headed("step|phase|label|time|to the device|late|peak", rows)))
        arenas = self.of("arena")
        if arenas:
            rows = [
                (
                    str(arena["step"]),
                    arena["model"],
                    format_size(arena["before_bytes"]),
                    format_size(arena["capacity_bytes"]),
                    arena["what"],
                )
                for arena in arenas[-_MOST_SHOWN:]
            ]
            tables.append(("sizes of arenas", _headed("step|model|before|after|because", rows)))
        errors = self.of("error")
        if errors:
            tables.append(("errors", [(str(error["what"]),) for error in errors]))
        return tables

    def pictures(self, span_s: float = 0.0, *, fluid: bool = False) -> list[tuple[str, str]]:
        """Return title and SVG of each timed step: the whole of it, then its details in order.

        The axis of a whole step has at least `span_s` seconds, so that several steps compare. One
        that is `fluid` is as wide as its place in a page, others are files of their own.
        """
        made = []
        known = {str(device["device"]): device for device in self.header["devices"]}
        for device, number in self.timed_steps():
            rows = self._timed_rows(device, number)
            stays = self._stays(device, number)
            clock = "simulated times" if known[device]["simulated"] else "measured by events"
            title = f"step {number} on {device}, {known[device]['name']} ({clock})"
            draw = partial(timeline_svg, rows, stays=stays, fluid=fluid)
            made.append((title, draw(title, span_s=span_s)))
            windows = details(rows)
            for i, window in enumerate(windows, 1):
                part = f"{title}, part {i} of {len(windows)}"
                if names := blocks_within(rows, window):
                    part += f": {names}"
                made.append((part, draw(part, window=window)))
        return made

    def _timed_rows(self, device: str, number: int) -> list[dict[str, Any]]:
        """Return the events of a timed step as `timeline_svg` takes them."""
        return [
            {**event, "kind": _KINDS[event["event"]], "use": event.get("kind")}
            for event in self.events
            if event["event"] in _KINDS
            and event["device"] == device
            and event["step"] == number
            and event["start_s"] is not None
        ]

    def _stays(self, device: str, number: int) -> list[Stay]:
        """Return what was in the arena in a timed step, as far as its copy was recorded."""
        rows = self._timed_rows(device, number)
        begin = min(row["start_s"] for row in rows)
        end = max(row["end_s"] for row in rows)
        there: dict[int, Stay] = {}
        stays: list[Stay] = []
        # What travels of compressed weights is less than what is there.
        uses = (row for row in rows if row["kind"] == "compute")
        sizes: dict[int, int] = {row["unit"]: row["bytes"] for row in uses}
        for event in self.events:
            if event.get("device") != device or event["step"] > number:
                continue
            if event.get("engine") != rows[0].get("engine"):  # its arena has gone with it
                continue
            when = begin if event.get("start_s") is None else event["start_s"]
            if event["event"] == "eviction" and event["unit"] in there:
                stays.append(there.pop(event["unit"])._replace(end_s=when))
            elif event["event"] == "copy_to_device" and event["unit"] >= 0:
                came = begin if event["end_s"] is None else event["end_s"]
                if event["unit"] in there:  # it was dropped meanwhile, as its master had changed
                    stays.append(there.pop(event["unit"])._replace(end_s=when))
                there[event["unit"]] = Stay(
                    event["layer"],
                    event["address"],
                    sizes.get(event["unit"]) or event["bytes"],
                    came,
                    end,
                )
        return [stay for stay in (*stays, *there.values()) if stay.end_s > stay.begin_s]

    def _repr_html_(self) -> str:
        sections = [Section(says=[("verdict", line) for line in self._sentences()])]
        whole = None
        for title, picture in self.pictures(fluid=True):
            if whole is None or not title.startswith(f"{whole}, part "):
                whole, folded = title, ""
            else:  # its title is above already
                folded = title.removeprefix(f"{whole}, ")
            sections.append(Section(pictures=[(folded, picture)]))
        for title, (first, *rows) in self._tables():
            sections.append(
                Section(title, head=first, rows=rows) if rows else Section(title, rows=[first])
            )
        return render("recording", sections)

    # ---- files ----

    def to_html(self) -> str:
        """Return the recording as one self-contained page without scripts."""
        return page("oracle_offload recording", self._repr_html_())

    def to_jsonl(self) -> str:
        """Return the header and every event, one JSON object a line, for `read_recording`."""
        return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in self)

    def to_csv(self) -> str:
        """Return every event as a row of one table; counters have columns of their own."""
        names = list(dict.fromkeys(key for event in self.events for key in event))
        counters = list(
            dict.fromkeys(key for event in self.events for key in event.get("counters", ()))
        )
        names = [name for name in names if name != "counters"]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*names, *counters])
        for event in self.events:
            grown = event.get("counters", {})
            writer.writerow(
                [*(event.get(name) for name in names), *(grown.get(name) for name in counters)]
            )
        return out.getvalue()

    def to_chrome(self) -> str:
        """Return the recording in Chrome's trace format, which Perfetto and chrome://tracing show.

        Times are microseconds since the recording began, by the device's clock where an event was
        timed there. What was not is an instant on the host's track.
        """
        rows: list[dict[str, Any]] = []
        devices = self.devices()
        for pid, device in enumerate(devices, 1):
            names = {d["device"]: d["name"] for d in self.header["devices"]}
            label = f"{device} ({names[device]})"
            rows.append(_metadata("process_name", pid, 0, label))
            used: dict[int, str] = {0: _LANE_NAMES[0]}
            slices = []
            for event in self.events:
                if event.get("device") == device:
                    slices.append(_slice(event, pid))
            slices.sort(key=lambda row: (row["ts"], -row.get("dur", 0.0)))
            tracks = [_Tracks() for _ in _LANE_NAMES]
            for row in slices:
                kind = row["tid"]
                if kind:
                    row["tid"] += len(tracks) * tracks[kind].place(
                        row["ts"], row["ts"] + row["dur"]
                    )
                    used[row["tid"]] = _LANE_NAMES[kind]
                rows.append(row)
            rows += [_metadata("thread_name", pid, tid, name) for tid, name in used.items()]
        rows += [_slice(event, 0) for event in self.of("error")]
        rows.sort(key=lambda row: (row["ph"] != "M", row["ts"]))
        document = {
            "traceEvents": rows,
            "displayTimeUnit": "ms",
            "otherData": {"schema": self.header["schema"], "dropped": self.header["dropped"]},
        }
        return json.dumps(document) + "\n"

    def export(self, path: Any, format: str | None = None) -> None:
        """Write the recording to a file.

        Parameters
        ----------
        path : path-like
            The file; one that is there is replaced, at once and whole.
        format : str, optional
            ``"html"``, a page; ``"chrome"``, for Perfetto; ``"csv"``; ``"jsonl"``, which
            `read_recording` reads. By default what the suffix says: .html, .json (Chrome's), .csv
            or .jsonl.

        Raises
        ------
        ValueError
            Another format, or a suffix that tells none.
        OSError
            The file cannot be written.
        """
        target = Path(path)
        writers = {
            "html": self.to_html,
            "chrome": self.to_chrome,
            "csv": self.to_csv,
            "jsonl": self.to_jsonl,
        }
        write_whole(target, writers[format_of(path, format)]().encode())


def write_whole(target: Path, data: bytes) -> None:
    """Write a file in the place of what is there, at once and whole.

    Raises
    ------
    OSError
        It cannot be written.
    """
    replace_file(target, lambda sink: sink.write(data))


def format_of(path: Any, format: str | None = None) -> str:
    """Return the format that a recording is written in; see `Recording.export`."""
    kind = format or _SUFFIXES.get(Path(path).suffix.lower(), "")
    if kind not in _SUFFIXES.values():
        raise ValueError(
            f"{os.fspath(path)!r} with format={format!r}: use 'html', 'chrome', 'csv' or "
            "'jsonl', or a file that ends in .html, .json, .csv or .jsonl"
        )
    return kind


def read_recording(path: Any) -> Recording:
    """Read a recording that `Recording.export` wrote as JSONL.

    Parameters
    ----------
    path : path-like
        The file.

    Raises
    ------
    ValueError
        It is no recording of this version, or a line is broken: which, and why.
    OSError
        The file cannot be read.
    """
    name = os.fspath(path)
    rows: list[dict[str, Any]] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict) or ("schema" if number == 1 else "event") not in row:
                raise ValueError(f"{name}, line {number}: no part of a recording")
            lacks = [key for key in _NEEDED.get(str(row.get("event")), ()) if key not in row]
            if lacks:
                raise ValueError(
                    f"{name}, line {number} is damaged: {row['event']} without {lacks[0]}"
                )
            rows.append(row)
    if not rows or rows[0]["schema"] != SCHEMA:
        found = rows[0]["schema"] if rows else "nothing"
        raise ValueError(f"{name}: begins with {found}, not with {SCHEMA}")
    devices = rows[0].get("devices")
    if not isinstance(devices, list) or not all(
        isinstance(device, dict) and {"device", "name"} <= device.keys() for device in devices
    ):
        raise ValueError(f"{name}, line 1: no part of a recording: it names no devices")
    return Recording(rows[0], rows[1:])


# ---- parts of the above ----


def _headed(names: str, rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [tuple(names.split("|")), *rows]


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_size(nbytes)


def _metadata(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": {"name": value}}


def _slice(event: Event, pid: int) -> dict[str, Any]:
    """Return an event as Chrome's format has it: a slice where it lasts, else an instant."""
    kind = event["event"]
    drawn = {"event", "t_s", "start_s", "end_s", "device"}
    row: dict[str, Any] = {
        "ph": "i",
        "s": "t",
        "pid": pid,
        "tid": 0,
        "name": event.get("layer") or event.get("name") or event.get("what") or kind,
        "cat": kind,
        "ts": max(0.0, event["t_s"] * 1e6),
        "args": {key: value for key, value in event.items() if key not in drawn},
    }
    if kind == "step":
        row["name"] = f"step {event['step']}"
    begin, end = event.get("start_s"), event.get("end_s")
    if kind == "step" and event["seconds"] is not None:
        begin, end = event["t_s"] - event["seconds"], event["t_s"]
    if begin is not None and end is not None and kind != "eviction":
        del row["s"]
        row |= {"ph": "X", "ts": max(0.0, begin * 1e6), "dur": (end - begin) * 1e6}
        row["tid"] = _LANES.get(kind, 0)
    return row


class _Tracks:
    """Tracks of one kind: slices of one track nest, or follow one another."""

    def __init__(self) -> None:
        self._open: list[list[float]] = []  # of each track, when its open slices end

    def place(self, begin: float, end: float) -> int:
        """Return the first track that has room for a slice; slices come in order of their begin."""
        for number, ends in enumerate(self._open):
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or end <= ends[-1]:
                ends.append(end)
                return number
        self._open.append([end])
        return len(self._open) - 1
