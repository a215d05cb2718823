"""What a training does now, as a watcher sees it: bars, step time, rates, stalls, the card.

The document that it shows is written by `oracle_offload.observe.heartbeat`, in this process or in
another; nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..host.cache import folder
from ..host.gpus import CLOCK_REASONS
from ..host.owned import open_own
from ..host.processes import is_alive, machine
from ..host.ranks import in_words
from ..host.schema import schema
from ..host.terminal import NARROWEST, WIDEST, Text
from .bars import text_bar
from .memory import show_size
from .page import page
from .sections import Section, render

SCHEMA = schema("heartbeat", 2)
_PANE = 32  # columns of the narrowest pane that is written for
STALE_S = 10.0  # a step that takes longer is worth a word


def path_of(pid: int) -> Path:
    """Return the path of the heartbeat of a process of this machine.

    Machines and containers may share the folder, and use the same process ids.
    """
    return folder() / f"heartbeat-{machine()}-{pid}.json"


def pid_of(path: Path) -> int | None:
    """Return the process of this machine that has written a file; None for another machine's."""
    found = re.fullmatch(f"heartbeat-{re.escape(machine())}-([0-9]+)", path.stem)
    return int(found[1]) if found else None


def heartbeats() -> list[Path]:
    """Return the heartbeat files that are there, the newest first."""
    found = []
    for path in folder().glob("heartbeat-*.json"):
        # One has just been taken away, or is another user's.
        with contextlib.suppress(OSError), open(open_own(path), "rb") as file:
            found.append((os.fstat(file.fileno()).st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def ranks_beside(live: Live) -> list[Live]:
    """Return the other ranks of the same job that have a heartbeat, in order."""
    if live.document.get("place") is None:
        return []
    found: dict[int, Live] = {}
    for path in heartbeats():  # the newest first: of a job before this one older ones may be left
        with contextlib.suppress(OSError, ValueError):
            other = read(path)
            if live.is_beside(other):
                found.setdefault(other.rank, other)
    return [found[rank] for rank in sorted(found)]


def read(path: Path) -> Live:
    """Return what a heartbeat file says.

    Raises
    ------
    OSError
        It cannot be read, or another user could have written it.
    ValueError
        It is no heartbeat.
    """
    with open(open_own(path), "rb") as file:
        document = json.loads(file.read())
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no heartbeat of this version ({SCHEMA})")
    try:
        live = Live(document)
        live.to_text()
    except Exception as error:  # whatever a file says, a watcher gets one line
        raise ValueError(f"{path} is no heartbeat of this version: {error!r}") from error
    return live


class Live:
    """One look at a training.

    Parameters
    ----------
    document : mapping
        As `heartbeat.pulse` returns it.
    sensors : mapping, optional
        Numbers of the card, that the watcher has asked it for itself.
    others : sequence of Live
        The other ranks of its job, in order.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        sensors: Mapping[str, Any] | None = None,
        others: Sequence[Live] = (),
    ) -> None:
        self.document = document
        self.others = others
        self.numbers: dict[str, Any] = {**document["numbers"], **(sensors or {})}

    def to_dict(self) -> dict[str, Any]:
        """Return the document, with the card's numbers."""
        return {**self.document, "numbers": self.numbers}

    def to_json(self) -> str:
        """Return `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict()) + "\n"

    def notes(self) -> list[str]:
        """Return what is to be known of the process, where something is."""
        pid, age = self.document["pid"], time.time() - self.document["time_s"]
        if self.document["machine"] == machine() and is_alive(pid) is False:
            return [f"process {pid} has ended without a clean exit, {age:.0f} s after this"]
        if age > STALE_S:
            return [f"no step of process {pid} has ended for {age:.0f} s"]
        return []

    def rows(self) -> list[tuple[str, str]]:
        """Return label and text of each figure; what is unknown says so."""
        value = self.numbers.get
        steps = ", ".join(str(device["steps"]) for device in self.document["devices"])
        rows = [
            ("steps so far", steps or "none"),
            ("time per step", show_seconds(value("step_s"))),
            ("to the device", _copies(value("h2d_bytes"), value("h2d_gbps"))),
            ("to the host", _copies(value("d2h_bytes"), value("d2h_gbps"))),
            ("stalls", _stalls(value("stalls"), value("stall_s"), value("interval_s"))),
            ("hits", _hits(value("hits"), value("acquires"))),
        ]
        if value("disk_bytes") or value("disk_kept_bytes"):
            rows.insert(3, ("from files", self._from_files()))
        rows += [(f"rank {other.rank}", other.in_short()) for other in self.others]
        if "power_w" in self.numbers:
            rows += [
                ("power", _unit(value("power_w"), "W")),
                ("temperature", _unit(value("temperature_c"), "degrees C")),
                (
                    "clocks, SM and memory",
                    f"{_unit(value('sm_clock_mhz'), 'MHz')}, "
                    f"{_unit(value('memory_clock_mhz'), 'MHz')}, held back by: "
                    f"{_reasons(value('clock_reasons'))}",
                ),
                ("link", _link(value("link_generation"), value("link_width"))),
            ]
        return rows

    def _from_files(self) -> str:
        value = self.numbers.get
        read, interval_s = value("disk_read_bytes"), value("interval_s")
        gbps = read / interval_s / 1e9 if read and interval_s else None
        to_come = (value("disk_kept_bytes") or 0) - (value("disk_arrived_bytes") or 0)
        arrives = f"; {show_size(to_come)} of what memory keeps is to come" if to_come > 0 else ""
        return _copies(read, gbps) + arrives

    def bars(self) -> list[Mapping[str, Any]]:
        """Return who holds the memory of each device, and of the host."""
        return [*(device["memory"] for device in self.document["devices"]), self.document["host"]]

    def sentences(self) -> list[str]:
        """Return what bounds a step, of each device."""
        said = [device["sentence"] for device in self.document["devices"]]
        return said or ["no model is attached"]

    def heading(self) -> str:
        """Return whose figures these are."""
        pid, on, at = (self.document.get(name) for name in ("pid", "machine", "place"))
        process = f"process {pid}" if on == machine() else f"process {pid} on {on}"
        return process if at is None else f"{in_words(at)}, {process}"

    @property
    def rank(self) -> int:
        """Its number among the processes of its job; 0 where it is alone."""
        at = self.document.get("place")
        return 0 if at is None else int(at["rank"])

    def in_short(self) -> str:
        """Return the figures of one rank in one line, to be shown with another's."""
        steps = ", ".join(str(device["steps"]) for device in self.document["devices"])
        late = "".join(f"; {note}" for note in self.notes())
        step = show_seconds(self.numbers.get("step_s"))
        return f"process {self.document['pid']}, {steps or 'no'} steps, {step} each{late}"

    def is_beside(self, other: Live) -> bool:
        """Whether this is another rank of the same job."""
        here, there = self.document.get("place"), other.document.get("place")
        if here is None or there is None or here["rank"] == there["rank"]:
            return False
        return bool(here["job"] == there["job"] and here["world"] == there["world"])

    def to_text(self, *, width: int = WIDEST, color: bool = False) -> str:
        """Return the view for a terminal, at most `width` (32 to 100) columns wide."""
        text = Text(width, color=color, narrowest=_PANE)
        text.block(self.heading(), style="bold")
        for sentence in self.sentences():
            text.block(sentence)
        for note in self.notes():
            text.block(note, style="yellow")
        for memory in self.bars():
            text.line()
            text.line(f"{memory['title']}: {show_size(memory['total_bytes'])}")
            for line in text_bar(list(memory["parts"].items()), text.width, show_size):
                text.line(line)
        text.line()
        for label, shown in self.rows():
            if text.width < NARROWEST:
                text.line(f"  {label}")
                text.block(shown, "    ", "    ")
            else:
                text.block(shown, f"  {label:<24}", " " * 26)
        return str(text)

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        said = [("verdict", text) for text in self.sentences()]
        said += [("warn", text) for text in self.notes()]
        bars = [
            Section(
                f"{memory['title']}: {show_size(memory['total_bytes'])}",
                bar=list(memory["parts"].items()),
            )
            for memory in self.bars()
        ]
        return render("live", [Section(says=said), *bars, Section(rows=self.rows())])

    def to_html(self) -> str:
        """Return the view as one self-contained page without scripts."""
        return page("oracle_offload", self._repr_html_())


def show_seconds(seconds: float | None) -> str:
    """Return seconds for people; None is "unknown"."""
    if seconds is None:
        return "unknown"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def show_rate(gbps: float) -> str:
    """Return a rate, in 10^9 bytes per second, for people."""
    return f"{gbps:.1f} GB/s"


def _copies(nbytes: int | None, gbps: float | None) -> str:
    rate = "" if gbps is None else f", {show_rate(gbps)}"
    return f"{show_size(nbytes)} since the last look{rate}" if nbytes is not None else "unknown"


def _stalls(stalls: float | None, stall_s: float | None, interval_s: float | None) -> str:
    if stalls is None or stall_s is None:
        return "unknown"
    # One wait in sixteen is timed and scaled: of a short interval that may be more than all of it.
    share = f", {min(1.0, stall_s / interval_s):.0%} of the time" if interval_s else ""
    return f"{stalls:.0f}, {show_seconds(stall_s)}{share}"


def _hits(hits: int | None, acquires: int | None) -> str:
    if hits is None or acquires is None:
        return "unknown"
    return f"{hits} of {acquires}" + (f" ({100 * hits / acquires:.1f}%)" if acquires else "")


def _unit(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.0f} {unit}"


def _reasons(bits: int | None) -> str:
    if bits is None:
        return "unknown"
    return ", ".join(words for bit, words in CLOCK_REASONS.items() if bits & bit) or "nothing"


def _link(generation: int | None, width: int | None) -> str:
    if generation is None or width is None:
        return "unknown"
    return f"PCI Express {generation}.0 x{width}"
