"""`record`: what the engine did and when, step by step and phase by phase, while a block runs.

The engine keeps a journal of what it tells the device to do: a ring of entries, at the cost of a
look at the clock for each. Now and then a whole step is timed by events on the device as well; that
costs driver calls, so such a step is labelled, and left out of averages.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ..engine import engines
from ..engine.engines import DeviceState, Layout
from ..engine.locks import Lock
from ..engine.pace import WARM_UP_STEPS
from ..engine.phases import growth
from ..errors import OffloadError
from ..host.ranks import place
from ..model.attachment import attachments_on
from . import snapshot
from .recording import SCHEMA, Recording, format_of
from .snapshot_file import held as holders_of

logger = logging.getLogger("oracle_offload")

_DEEDS = ("compute", "wait", "copy_to_device", "copy_to_host", "eviction", "decode")  # oo_deed
_TRACED = {
    "compute": "compute",
    "stall": "wait",
    "h2d": "copy_to_device",
    "d2h": "copy_to_host",
    "decode": "decode",
}
_MOST_ROWS = 10_000  # steps and phases of one device
_MOST_SNAPSHOTS = 4  # of the memory that ran out
_MOST_TIMED = 4  # timed steps of one device; each has a row for every use
_LATEST = (1 << 64) - 1  # no entry has this number: the journal answers which comes next


@dataclass
class _Opening:
    """An engine of a device while it is open; each numbers units and entries from the start."""

    number: int
    begin_s: float  # when the recording began, by the clock of this engine's journal
    names: dict[int, tuple[str, str]] = field(default_factory=dict)  # unit -> model, layers


@dataclass
class _Timed:
    """A step that was timed on the device: its rows, and the recording's time of their zero."""

    opening: int
    step: int
    zero_s: float
    rows: list[Any]


@dataclass
class _Part:
    """What is recorded of one device, over all engines that it had.

    The lock of the engine's device protects it. Once the engine is closed it is not changed any
    more: a copy goes on with the next engine, see `Recorder.opened`.
    """

    device: str
    simulated: bool
    name: str  # of the device
    lock: Lock
    state: DeviceState | None  # until its engine is closed, or the recording ends
    opening: _Opening
    phase: str  # that it is in
    counters: Mapping[str, Any]  # when the step began
    begun: Mapping[str, Any]  # when the phase began
    entries: deque[tuple[int, _Opening, Any]]  # (number, engine, entry) of those that were read
    step_growth: Mapping[str, Any] = field(default_factory=dict)  # up to the engine's end
    phase_growth: Mapping[str, Any] = field(default_factory=dict)
    next_entry: int = 0
    dropped: int = 0
    layout: int = -1
    now_s: float = 0.0  # the recording's time, when it was looked at last
    last_s: float | None = None  # when the step before ended
    fresh: bool = True  # the next step to end is the first, or the first since the phase changed
    steps: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_ROWS))
    phases: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_ROWS))
    arenas: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_ROWS))
    batches: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_ROWS))
    stepping: dict[str, Any] | None = None  # the optimizer, since this row, or it has ended
    steps_before: int = 0  # that ended on the device before the recording began
    n_steps: int = 0
    n_phases: int = 0
    timing_since: float | None = None  # while the step under way is timed
    timed: deque[_Timed] = field(default_factory=lambda: deque(maxlen=_MOST_TIMED))
    n_timed: int = 0
    n_arenas: int = 0
    n_batches: int = 0
    next_timed: int = 0  # how many whole steps, without a label, come before the next timed one
    allocated: int | None = None  # when the phase began


class _Phase:
    """A phase as a ``with`` block; see `phase`."""

    def __init__(self, before: str) -> None:
        self._before = before

    def __enter__(self) -> None:
        return

    def __exit__(self, *details: object) -> None:
        phase(self._before)


class Recorder:
    """A recording while it is made; see `record`.

    Parameters
    ----------
    path, max_events, timed_every, lines_of_allocations
        See `record`.

    Attributes
    ----------
    lines : list of str
        One for each change of phase, the latest 10,000.
    on_step : list of callable
        Each is called with the row of a step after it has ended, in the thread that stepped, once
        every device goes on and no lock is held: it may change the phase, or detach. One that
        raises fails no training: its first exception is logged, and is in the recording.
    """

    def __init__(
        self, path: Any = None, *, max_events: int, timed_every: int, lines_of_allocations: bool
    ) -> None:
        if max_events < 1:
            raise ValueError(f"max_events={max_events} must be at least 1")
        if timed_every < 0:
            raise ValueError(f"timed_every={timed_every} must be 0 (never) or more")
        if path is not None:
            format_of(path)  # before hours of training, not after
        self._path = path
        self._max_events = max_events
        self._timed_every = timed_every
        self._wants_lines = lines_of_allocations
        self._notes_lines = False  # torch does, because this recorder made it
        self._memory: deque[dict[str, Any]] = deque(maxlen=_MOST_SNAPSHOTS)
        self._parts: dict[str, _Part] = {}  # by device; replaced, never changed
        # Of two threads that begin devices at once each puts its own there.
        self._parts_lock = threading.Lock()  # nothing is taken under it
        self._phase = engines.phase_now()
        self._errors: deque[dict[str, Any]] = deque(maxlen=_MOST_ROWS)
        self._n_errors = 0
        self._logged: set[object] = set()  # devices and callbacks whose failure was logged
        self._lines: deque[str] = deque(maxlen=_MOST_ROWS)
        self._running = False
        self.on_step: list[Callable[[Mapping[str, Any]], object]] = []

    @property
    def lines(self) -> list[str]:
        """One line for each change of phase."""
        return list(self._lines)

    # ---- from its start to its end ----

    def start(self) -> Recorder:
        """Begin to record.

        Raises
        ------
        OffloadError
            Another recording is under way in this process.
        """
        global _current
        with _current_lock:
            if _current is not None:
                raise OffloadError(
                    "a recording is under way already: end it first (recorder.stop(), or leave "
                    "its with block); there is one journal for each engine"
                )
            _current = self
        self._running = True
        self._phase = engines.phase_now()
        for state in engines.observe(self):
            with state.lock:
                if state in engines.open_states():  # another thread may have closed it since
                    self.opened(state)
        return self

    def stop(self) -> None:
        """End the recording; what was recorded stays. Stopping again does nothing."""
        global _current
        if not self._running:
            return
        self._running = False
        engines.ignore(self)
        snapshot.ignore(self._ran_out)
        if self._notes_lines:
            snapshot.note_lines(None)
            self._notes_lines = False
        for part in self._parts.values():
            with part.lock:
                self._end_part(part)
        with _current_lock:
            _current = None

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._put_error(f"{kind.__name__}: {error}")
        self.stop()
        if self._path is None:
            return
        try:
            self.export(self._path)
        except Exception:
            if kind is None:
                raise
            logger.exception("the recording could not be written to %s", self._path)

    # ---- phases ----

    def phase(self, name: str) -> _Phase:
        """Say what is being done from now on, as `oracle_offload.observe.phase` does.

        One line tells the change, in `lines` and in the log: what torch has allocated (on the
        simulated device: what is not free), how much it has grown since the phase before began,
        torch's peak, and how many copies that phase made, in MB of 10^6 bytes.

        Returns
        -------
        context manager
            ``with recorder.phase("sampling"):`` goes back to the phase before at its end.
        """
        before, self._phase = self._phase, str(name)
        engines.begin_phase(self._phase)
        rows = []
        for part in self._parts.values():
            with part.lock:
                if part.state is None:
                    continue  # its next engine begins in the new phase
                try:
                    rows.append(self._end_phase(part, part.state))
                except Exception as error:
                    self._note(part.device, error)
        line = _phase_line(before, self._phase, rows)
        self._lines.append(line)
        logger.info("%s", line)
        return _Phase(before)

    def _end_phase(self, part: _Part, state: DeviceState) -> dict[str, Any]:
        counters = state.engine.stats()
        grown = growth(counters, part.begun)
        allocated, peak = _allocated_and_peak(state)
        row = {
            "event": "phase",
            "t_s": _look(part, state),
            "step": part.n_steps,
            "phase": self._phase,
            "device": part.device,
            "name": self._phase,
            "before": part.phase,
            "allocated_bytes": allocated,
            "delta_bytes": _less(allocated, part.allocated),
            "peak_bytes": peak,
            "copies": grown["h2d_copies"] + grown["d2h_copies"],
            "counters": grown,
            "entry": _next_entry(part, state),
        }
        part.phases.append(row)
        part.n_phases += 1
        part.begun, part.allocated, part.fresh = counters, allocated, True
        part.phase = self._phase
        return row

    # ---- what engines tell: see `engines.Observer` ----

    def opened(self, state: DeviceState) -> None:
        """Begin the journal of a device, or go on with it: steps and time are those before."""
        device = str(state.device)
        before = self._parts.get(device)
        try:
            state.engine.journal_start(self._max_events)
            now_s = state.engine.journal_read(_LATEST)[1]
            counters, name = state.engine.stats(), state.engine.device_name
            if before is None:
                part = _Part(
                    device,
                    state.simulated,
                    name,
                    state.lock,
                    state,
                    _Opening(0, now_s),
                    self._phase,
                    counters,
                    counters,
                    deque(maxlen=self._max_events),
                    allocated=_allocated_and_peak(state)[0],
                    steps_before=state.pace.steps,
                )
            else:
                part = self._go_on(before, state, now_s, counters)
                if part.phase != self._phase:
                    self._end_phase(part, state)
        except Exception as error:
            self._note(device, error)
            return
        with self._parts_lock:
            self._parts = {**self._parts, device: part}
        self._learn_names(part, state)
        if state.device.type == "cuda":
            try:
                self._listen()
            except Exception as error:  # an allocator that tells nothing
                self._note(device, error)

    def _go_on(
        self, before: _Part, state: DeviceState, now_s: float, counters: Mapping[str, Any]
    ) -> _Part:
        """Return a copy of what was recorded of a device, for its next engine."""
        # The simulator's clock may have started again: no time has passed then.
        begin_s = min(before.opening.begin_s, now_s - before.now_s)
        return replace(
            before,
            lock=state.lock,
            state=state,
            opening=_Opening(before.opening.number + 1, begin_s),
            counters=_less_growth(counters, before.step_growth),
            begun=_less_growth(counters, before.phase_growth),
            entries=before.entries.copy(),
            next_entry=0,
            steps=before.steps.copy(),
            phases=before.phases.copy(),
            timed=before.timed.copy(),
            arenas=before.arenas.copy(),
            batches=before.batches.copy(),
            stepping=None,
            next_timed=0,
        )

    def begins_step(self, state: DeviceState) -> None:
        """Put down that an optimizer steps, for as long as it has not ended."""
        part = self._part_of(state)
        if part is not None:
            with suppress(Exception):  # the end of the step, or of the recording, tells of it
                part.stepping = self._row("optimizer", part, state)

    def ended_step(
        self, state: DeviceState, counters: Mapping[str, Any]
    ) -> Callable[[], object] | None:
        """Put a step down, and decide whether the next one is timed."""
        part = self._part_of(state)
        if part is None:
            return None
        try:
            row = self._end_step(part, state, counters)
        except Exception as error:
            self._note(part.device, error)
            return None
        return partial(self._tell, row) if self.on_step else None

    def _tell(self, row: Mapping[str, Any]) -> None:
        for told in list(self.on_step):
            try:
                told(row)
            except Exception as error:
                if id(told) not in self._logged:
                    self._logged.add(id(told))
                    logger.exception("on_step callback %r failed; the training goes on", told)
                    self._put_error(f"on_step callback {told!r}: {type(error).__name__}: {error}")

    def resized(self, state: DeviceState, model: str, before: int, after: int, why: str) -> None:
        """Put down that the arena of a model has another size."""
        part = self._part_of(state)
        if part is None:
            return
        try:
            now_s = _look(part, state)
        except Exception as error:
            self._note(part.device, error)
            return
        part.arenas.append(
            {
                "event": "arena",
                "t_s": now_s,
                "step": part.n_steps,
                "phase": self._phase,
                "device": part.device,
                "model": model,
                "before_bytes": before,
                "capacity_bytes": after,
                "what": why,
            }
        )
        part.n_arenas += 1

    def leaving(self, state: DeviceState) -> None:
        """Read the journal while the names of its units are known."""
        part = self._part_of(state)
        if part is not None:
            self._learn_names(part, state)

    def closing(self, state: DeviceState) -> None:
        """An engine is about to be closed: take its journal along."""
        part = self._part_of(state)
        if part is not None:
            self._end_part(part)

    def _part_of(self, state: DeviceState) -> _Part | None:
        part = self._parts.get(str(state.device))
        return part if part is not None and part.state is state else None

    def _note(self, device: str, error: Exception) -> None:
        """A recording that fails must not fail the training, nor fill its log."""
        if device not in self._logged:
            self._logged.add(device)
            logger.warning("recording %s: %s", device, error)
        self._put_error(f"recording {device} failed: {type(error).__name__}: {error}")

    def _put_error(self, what: str) -> None:
        self._errors.append({"event": "error", "what": what, "phase": self._phase})
        self._n_errors += 1

    def batch(self, length: int) -> None:
        """Say how long the batch is that begins: tokens, frames, pixels.

        Where memory runs out, `explain` then tells whether it was longer than all before it.
        """
        for part in self._parts.values():
            with part.lock:
                if part.state is not None:
                    try:
                        row = self._row("batch", part, part.state)
                        part.batches.append({**row, "length": int(length)})
                        part.n_batches += 1
                    except Exception as error:
                        self._note(part.device, error)

    def _row(self, event: str, part: _Part, state: DeviceState) -> dict[str, Any]:
        return {
            "event": event,
            "t_s": _now(part, state),
            "step": part.n_steps,
            "phase": self._phase,
            "device": part.device,
        }

    # ---- when memory runs out ----

    def _listen(self) -> None:
        """Be notified of a GPU whose memory runs out."""
        snapshot.listen(self._ran_out)
        if self._wants_lines and not self._notes_lines and not snapshot.lines_are_noted():
            snapshot.note_lines(self._max_events)
            self._notes_lines = True

    def _ran_out(self, device: str, asked: int, free: int) -> None:
        """Take torch's memory snapshot: write it, and put down who held the bytes."""
        part = self._parts.get(device)
        if part is None or part.state is None:
            return
        try:
            taken = snapshot.take(part.state, asked, free)
            row = {**holders_of(taken), **self._row("memory", part, part.state), "file": None}
            self._memory.append(row)
            if self._path is not None:
                path = Path(self._path)
                file = path.with_name(f"{path.stem}.snapshot.pickle")
                snapshot.write(taken, file)
                row["file"] = str(file)
        except Exception as error:
            self._note(device, error)

    # ---- one device ----

    def _learn_names(self, part: _Part, state: DeviceState) -> None:
        part.layout = Layout.version
        for held in attachments_on(state):
            for unit, names in held.unit_layers().items():
                part.opening.names[unit] = held.name, names

    def _end_step(
        self, part: _Part, state: DeviceState, counters: Mapping[str, Any]
    ) -> dict[str, Any]:
        if part.layout != Layout.version:
            self._learn_names(part, state)
        timed = self._end_timing(part, state)
        now_s = _look(part, state)
        allocated, peak = state.kind.allocated_and_peak()
        label = "resume" if part.fresh else ""
        if state.pace.ended <= WARM_UP_STEPS:
            label = "warm-up"
        row = {
            "event": "step",
            "t_s": now_s,
            "step": part.n_steps,
            "phase": self._phase,
            "device": part.device,
            "label": label,
            "timed": timed,
            "seconds": None if part.last_s is None else now_s - part.last_s,
            "counters": growth(counters, part.counters),
            "allocated_bytes": allocated,
            "peak_bytes": peak,
            "entry": _next_entry(part, state),
        }
        part.steps.append(row)
        part.stepping = None
        part.n_steps += 1
        part.counters = counters
        part.fresh = (
            timed  # the host has waited for the device, and the next step begins without it
        )
        if not label and not timed:
            part.next_timed -= 1
        if state.pace.ended >= WARM_UP_STEPS and part.next_timed <= 0 and self._timed_every:
            self._begin_timing(part, state)
        if timed or part.timing_since is not None:  # what the recorder waited for is in no step
            part.counters = state.engine.stats()
        part.last_s = _look(part, state)
        return {key: value for key, value in row.items() if key != "entry"}

    def _begin_timing(self, part: _Part, state: DeviceState) -> None:
        try:
            state.engine.trace_start()
        except OffloadError:  # other code records a timeline; an old driver has none
            part.next_timed = self._timed_every
            return
        part.timing_since = _look(part, state)

    def _end_timing(self, part: _Part, state: DeviceState) -> bool:
        """Take the rows of the step under way, if it is timed; return whether it is."""
        zero_s, part.timing_since = part.timing_since, None
        if zero_s is None:
            return False
        part.next_timed = self._timed_every
        rows = list(state.engine.trace_stop())
        if rows:
            part.timed.append(_Timed(part.opening.number, part.n_steps, zero_s, rows))
            part.n_timed += 1
        return True

    def _read_journal(self, part: _Part, state: DeviceState) -> None:
        """Take what was written since the last time, as far as it is there still."""
        while True:
            first, _, entries = state.engine.journal_read(part.next_entry)
            if not entries:
                return
            part.dropped += first - part.next_entry
            part.next_entry = first + len(entries)
            part.dropped += max(0, len(part.entries) + len(entries) - self._max_events)
            for number, entry in enumerate(entries, first):
                part.entries.append((number, part.opening, entry))

    def _end_part(self, part: _Part) -> None:
        """An engine is closed, or the recording ends: take from it what is still there."""
        state, part.state = part.state, None  # a closed engine and its tensors are not kept
        if state is None:
            return
        try:
            self._learn_names(part, state)
            self._read_journal(part, state)
            counters = state.engine.stats()  # before the recorder waits
            part.step_growth = growth(counters, part.counters)
            part.phase_growth = growth(counters, part.begun)
            self._end_timing(part, state)
            _look(part, state)
            state.engine.journal_stop()
        except Exception as error:
            self._note(part.device, error)

    # ---- what came of it ----

    def recording(self) -> Recording:
        """Return what was recorded so far, as plain data."""
        events: list[dict[str, Any]] = []
        devices: list[dict[str, Any]] = []
        steps = 0
        for part in self._parts.values():
            with part.lock:
                if part.state is not None:
                    try:
                        self._learn_names(part, part.state)
                        self._read_journal(part, part.state)
                    except Exception as error:
                        self._note(part.device, error)
                events += _events_of(part)
                steps = max(steps, part.n_steps)
                devices.append(
                    {
                        "device": part.device,
                        "name": part.name,
                        "simulated": part.simulated,
                        "engines": part.opening.number + 1,
                        "steps_before": part.steps_before,
                        "dropped_events": part.dropped,
                        "dropped_steps": part.n_steps - len(part.steps),
                        "dropped_phases": part.n_phases - len(part.phases),
                        "dropped_timed_steps": part.n_timed - len(part.timed),
                        "dropped_arenas": part.n_arenas - len(part.arenas),
                        "dropped_batches": part.n_batches - len(part.batches),
                    }
                )
        events += list(self._memory)
        end_s = max((event["t_s"] for event in events), default=0.0)
        events += [{**error, "t_s": end_s, "step": steps} for error in list(self._errors)]
        events.sort(key=lambda event: float(event["t_s"]))
        header = {
            "schema": SCHEMA,
            "devices": devices,
            "dropped": sum(device["dropped_events"] for device in devices),
            "dropped_errors": self._n_errors - len(self._errors),
            "max_events": self._max_events,
            "timed_every": self._timed_every,
        }
        at = place()
        if at is not None:
            header["place"] = at.as_row()
        return Recording(header, events)

    def export(self, path: Any, format: str | None = None) -> None:
        """Write what was recorded so far; see `Recording.export`."""
        self.recording().export(path, format)


def _allocated_and_peak(state: DeviceState) -> tuple[int | None, int | None]:
    """Return what torch has allocated (where it does not count: what is not free), and its peak."""
    allocated, peak = state.kind.allocated_and_peak()
    if allocated is None:
        try:
            free, total = state.engine.mem_info()
        except OffloadError:
            return None, None
        return total - free, None
    return allocated, peak


def _look(part: _Part, state: DeviceState) -> float:
    """Return the recording's time, and put it down as the latest."""
    part.now_s = _now(part, state)
    return part.now_s


def _now(part: _Part, state: DeviceState) -> float:
    return float(state.engine.journal_read(_LATEST)[1]) - part.opening.begin_s


def _next_entry(part: _Part, state: DeviceState) -> tuple[int, int]:
    """Return engine and number of the entry that comes next."""
    return part.opening.number, state.engine.journal_read(_LATEST)[0]


def _less_growth(counters: Mapping[str, Any], grown: Mapping[str, Any]) -> dict[str, Any]:
    """Return counters since which `grown` came: what an engine counted that is closed."""
    return {key: counters[key] - grown.get(key, 0) for key in counters}


def _less(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def _phase_line(before: str, after: str, rows: list[dict[str, Any]]) -> str:
    def total(key: str) -> int | None:
        values = [row[key] for row in rows]
        return None if None in values or not values else sum(values)

    copies = sum(row["copies"] for row in rows)
    delta = total("delta_bytes")
    grown = "unknown" if delta is None else f"{delta / 1e6:+.0f} MB"
    return (
        f"Phase transition: {before} -> {after} | VRAM: {_mb(total('allocated_bytes'))} | "
        f"Copies: {copies} | Delta: {grown} | Peak: {_mb(total('peak_bytes'))}"
    )


def _mb(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 1e6:.0f} MB"


def _events_of(part: _Part) -> list[dict[str, Any]]:
    """Return the events of one device, those of timed steps with the device's times."""
    ends = [(row["entry"], row["step"]) for row in part.steps]
    changes = [(row["entry"], row["before"]) for row in part.phases]
    times = {(timed.opening, timed.step): _times_of(timed) for timed in part.timed}
    events: list[dict[str, Any]] = []
    # evictions by the unit that comes in its place
    arriving: dict[tuple[int, int], list[dict[str, Any]]] = {}
    step_at = phase_at = 0
    for at, opening, (deed, unit, host_s, nbytes, detail) in part.entries:
        number = opening.number, at
        while step_at < len(ends) and number >= ends[step_at][0]:
            step_at += 1
        while phase_at < len(changes) and number >= changes[phase_at][0]:
            phase_at += 1
        kind = _DEEDS[deed]
        step = ends[step_at][1] if step_at < len(ends) else part.n_steps
        model, layer = opening.names.get(unit, ("", ""))
        known = times.get((opening.number, step), {}).get((kind, unit))
        span = _taken(known, kind, nbytes) if known else None
        start_s, end_s = span or (None, None)
        event = {
            "event": kind,
            "t_s": host_s - opening.begin_s,
            "step": step,
            "phase": changes[phase_at][1] if phase_at < len(changes) else part.phase,
            "device": part.device,
            "model": model,
            "layer": layer,
            "engine": opening.number,
            "unit": unit,
            "bytes": nbytes,
            "start_s": start_s,
            "end_s": end_s,
            "seconds": None if span is None else span[1] - span[0],
        }
        if kind == "copy_to_device":
            event["address"] = detail
            for eviction in arriving.pop(
                (opening.number, unit), ()
            ):  # its bytes are overwritten from then on
                eviction |= {"start_s": start_s, "end_s": start_s}
                eviction["seconds"] = None if span is None else 0.0
        elif kind == "eviction":
            event["by_unit"] = detail
            arriving.setdefault((opening.number, detail), []).append(event)
        elif kind == "decode":
            event["chunks"] = detail
        elif kind == "compute":
            event["kind"] = ("forward", "recompute", "backward", "forward")[detail]
        events.append(event)
    rows = [*part.steps, *part.phases]
    events += [*part.arenas, *part.batches, *([part.stepping] if part.stepping else ())]
    return events + [{k: v for k, v in row.items() if k != "entry"} for row in rows]


_Times = deque[tuple[float, float, int]]  # start, end and bytes of rows of one kind, of one unit


def _times_of(timed: _Timed) -> dict[tuple[str, int], _Times]:
    """Return the rows of a timed step, by kind and unit, in order."""
    times: dict[tuple[str, int], _Times] = {}
    for row in sorted(timed.rows, key=lambda row: float(row["start_s"])):
        found = timed.zero_s + row["start_s"], timed.zero_s + row["end_s"], row["bytes"]
        times.setdefault((_TRACED[row["kind"]], row["unit"]), deque()).append(found)
    return times


def _taken(known: _Times, kind: str, nbytes: int) -> tuple[float, float]:
    """Return start and end of an event whose rows come next: chunks have one each."""
    start_s, end_s, moved = known.popleft()
    while kind in ("copy_to_device", "decode") and moved < nbytes and known:
        _, end_s, more = known.popleft()
        moved += more
    return start_s, end_s


_current: Recorder | None = None
_current_lock = threading.Lock()  # protects _current; nothing is taken under it


def phase(name: str) -> _Phase:
    """Say what is being done from now on, with or without a recording.

    `memory_summary` then shows what was counted in each phase, and a recording that is under way
    has what `Recorder.phase` says.

    Parameters
    ----------
    name : str
        ``"training"`` at first; ``"sampling"``, ``"evaluation"``, or whatever it is.

    Returns
    -------
    context manager
        ``with oracle_offload.observe.phase("sampling"):`` goes back to the phase before at its end.
    """
    with _current_lock:
        current = _current
    if current is not None:
        return current.phase(name)
    before = engines.phase_now()
    engines.begin_phase(str(name))
    return _Phase(before)


def record(
    path: Any = None,
    *,
    max_events: int = 100_000,
    timed_every: int = 128,
    lines_of_allocations: bool = False,
) -> Recorder:
    """Record what engines do, for a ``with`` block or from ``start()`` to ``stop()``.

    Parameters
    ----------
    path : path-like, optional
        Where the recording is written at the end of the block, also when an exception ends it; the
        format is that of its suffix, see `Recording.export`.
    max_events : int
        Most events that are kept of each device; of more, the latest are kept, and the others are
        counted. One takes 40 bytes while it is in the engine.
    timed_every : int
        One step in so many is timed by events on the device: the first whole step after the
        warm-up, and so on; 0 for none.
    lines_of_allocations : bool
        Also have torch note, as long as the recording lasts, which line of Python makes each
        allocation on a GPU. Where memory runs out, the recording then tells what the model and the
        engine do not know by line; each allocation costs the host some microseconds.

    Returns
    -------
    Recorder

    Raises
    ------
    ValueError
        An argument that makes no sense; a `path` whose suffix tells no format.

    Notes
    -----
    ``docs/recording.md`` says what is recorded, what that costs, and what the files hold.

    Examples
    --------
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with oracle_offload.attach(model, "cpu"), oracle_offload.record() as recorder:
    ...     for _ in range(3):
    ...         model(torch.randn(2, 256)).sum().backward()
    ...         optimizer.step()
    >>> len(recorder.recording().steps())  # recorder.export("run.html") shows them
    3
    """
    return Recorder(
        path,
        max_events=max_events,
        timed_every=timed_every,
        lines_of_allocations=lines_of_allocations,
    )
