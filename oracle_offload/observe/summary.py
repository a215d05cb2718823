"""`memory_summary`: what is where, what moved and what waited, counted by the engine.

In the manner of ``torch.cuda.memory_summary()``, but it returns a report: ``print`` it, show it in
a notebook, or take ``to_dict()``. No figure is derived from a plan; bytes are counted at the copy
call and seconds come from events on the device.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..engine.devices import Cuda, parse_device
from ..engine.engines import open_states, parent_process
from ..errors import OffloadError
from ..host.ranks import in_words, place
from ..host.schema import schema
from ..host.sizes import format_size
from ..host.terminal import Text, printable
from ..layers.traffic import stalls_of, stalls_text
from ..model.attachment import Attachment, attachments_on
from ..model.residents import list_residents, resident_bytes, resident_gradient_bytes
from .bars import text_bar
from .memory import Memory, device_memory, host_memory, show_size
from .page import page
from .sections import Section, render
from .verdict import Load, Verdict, judge

if TYPE_CHECKING:
    from ..engine.engines import DeviceState
    from ..engine.phases import Waits

SCHEMA = schema("memory-summary", 1)
_WIDTH = 80
_LABEL = 38  # columns of a row's label
_MOST_STALLED = 3  # layers that the text names; `to_dict` has all
_LEGEND = (
    "late: not in the arena when asked for; stale: in it, but changed on the host",
    "GB/s and stalls: by a sample of the copies and of the waits for them",
    "below stalls: the layers that stalled longest, as measured in that sample",
)


@dataclass(frozen=True)
class StalledLayer:
    """Layers that travel together, how many waits for them were timed, and the stalls of those."""

    layers: str
    timed_waits: int
    stalls: int
    stall_s: float


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What was used, moved and waited for. Sizes in bytes, rates in 10^9 bytes per second.

    A layer asks for its unit with an acquire. It is a hit when the unit is in the arena or on its
    way; late when its copy begins only then; stale when it is there, but its master has changed
    since. A stall is a wait of the compute stream for a copy, longer than 10 microseconds.

    Times are measured of a sample, one copy and one wait in 16, and of all while a timeline is
    recorded: `stalls` and `stall_s` (seconds) are what `timed_waits` of all `waits` tell, in
    proportion. `stalled` are the layers with a stall among the timed waits, longest in all first,
    as measured. `overlap` is the share of the time of copies to the device, `h2d_bytes` at
    `h2d_gbps`, that held nothing up; None where no copy was timed.
    """

    name: str
    acquires: int
    hits: int
    late: int
    stale: int
    evictions: int
    waits: int
    timed_waits: int
    stalls: int
    stall_s: float
    stalled: list[StalledLayer] = field(default_factory=list)
    h2d_bytes: int
    h2d_copies: int
    h2d_gbps: float | None
    d2h_bytes: int
    d2h_copies: int
    d2h_gbps: float | None
    overlap: float | None


@dataclass(frozen=True, kw_only=True)
class ModelUsage(Usage):
    """One attached model, and what was counted of it; see `Usage`.

    `kept_bytes` is the part of `resident_bytes` for which ``ram_budget`` had no room on the host.

    `rows_bytes` of tables were read in host memory, by `rows_read` kernels; `step_h2d_bytes` counts
    them, `h2d_bytes` the copies alone.

    `compressed_bytes` of the weights are compressed, into `compressed_host_bytes`; they pass
    through `staging_bytes` of the device, outside the arena. `compressed_because` says why
    ``compress="auto"`` chose these, or none.

    `x_min_bytes` is the least that a step can move to the device, docs/how-it-works.md.

    `budget_changes` is how often ``vram_budget="auto"`` has changed the arena, the last time
    because of `budget_reason`; None where the budget is another. `look_ahead_units` of the largest
    units fit into the arena in addition to the one in use.

    `shared_bytes` of the host's memory for weights are one copy for `shared_by` ranks of the
    machine, each of which counts them.
    """

    layers: int
    resident_parameters: int
    resident_bytes: int
    kept_bytes: int
    managed_bytes: int
    compressed_bytes: int = 0
    compressed_host_bytes: int = 0
    staging_bytes: int = 0
    compressed_because: str = ""
    computed_bytes: int
    runs_again: int
    flops_again: float
    derived_bytes: int
    rows_read: int
    rows_bytes: int
    in_arena_bytes: int
    capacity_bytes: int
    units: int
    units_in_arena: int
    prefetches: int
    steps: int
    step_h2d_bytes: int | None
    step_d2h_bytes: int | None
    x_min_bytes: int
    look_ahead_units: int
    budget_changes: int | None
    budget_reason: str | None
    shared_bytes: int = 0
    shared_by: int = 1


@dataclass(frozen=True, kw_only=True)
class PhaseUsage(Usage):
    """What one device's engine counted in one phase, of all models; see `Usage`.

    The phase has taken `seconds` so far, by the clock that steps are measured with. `bound_s` is
    what it could take at best with the bytes that it moved: the time without the stalls, yet not
    less than the copies to the device; None where no copy was timed, or where the clock did not
    wait for the device.
    """

    seconds: float
    bound_s: float | None


@dataclass(frozen=True)
class DeviceUsage:
    """One device and the models attached to it.

    What is not page-locked passes through rings of `ring_bytes` that are; `unlocked_h2d_gbps` is
    how fast the engine's copy threads fed them, by the host's clock, also on the simulated device.
    These run on `numa_node`, the one nearest to the device, where the system names it. Of
    `disk_bytes` of weights that stay in files, and `disk_kept_bytes` that are kept in memory once
    read (`disk_arrived_bytes` are), `disk_read_bytes` have been read so far; `disk_gbps` is how
    fast one thread reads, as several do at once.
    `lock_refusals` counts how often the driver gave no page-locked memory. `left_bytes` of
    activations have left for the host, and `returned_bytes` of them came back. `brought_bytes` came
    to be added to, or stepped: sums of gradients, and what `stream_optimizer` brings. What of those
    returns to the host is in ``d2h_bytes``, as gradients are. `optimizers` says of those that
    `stream_optimizer` was given, by their classes, where they step.
    """

    device: str
    name: str
    simulated: bool
    free_bytes: int | None
    total_bytes: int | None
    torch_allocated_bytes: int | None
    arena_bytes: int
    in_arena_bytes: int
    peak_in_arena_bytes: int
    locked_bytes: int
    pageable_bytes: int
    lock_refusals: int
    ring_bytes: int
    unlocked_h2d_gbps: float | None
    numa_node: int | None
    host_waits: int
    recoveries: int
    allocations: int
    left_bytes: int = 0
    left_copies: int = 0
    returned_bytes: int = 0
    returned_copies: int = 0
    brought_bytes: int = 0
    brought_copies: int = 0
    disk_bytes: int = 0
    disk_kept_bytes: int = 0
    disk_arrived_bytes: int = 0
    disk_read_bytes: int = 0
    disk_gbps: float | None = None
    optimizers: list[tuple[str, str]] = field(default_factory=list)
    models: list[ModelUsage] = field(default_factory=list)
    phases: list[PhaseUsage] = field(default_factory=list)
    verdict: Verdict | None = None


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """What `memory_summary` returns; ``str()`` and ``repr()`` are text, a notebook shows a page.

    Attributes
    ----------
    devices : list of DeviceUsage
        Devices with an attached model.
    optimizer_bytes : dict
        Bytes of the optimizer's state per device, where an optimizer was given.
    abbreviated : bool
        Whether the table leaves the counters out.
    memory : list of Memory
        Who holds the memory of the devices, and that of the host.
    notes : list of str
        What could not be read, and why.
    place : dict or None
        Which of the ranks of its job this process is, under torchrun.
    """

    devices: list[DeviceUsage]
    optimizer_bytes: dict[str, int] = field(default_factory=dict)
    abbreviated: bool = False
    memory: list[Memory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    place: dict[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data with a ``"schema"``."""
        return {"schema": SCHEMA, **asdict(self)}

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_html(self) -> str:
        """Return the report as one self-contained page without scripts."""
        return page("oracle_offload memory summary", self._repr_html_())

    def _verdicts(self) -> list[str]:
        if not self.devices:
            return ["oracle_offload: no model is attached"]
        first = [] if self.place is None else [in_words(self.place)]
        said = [(d.device, d.verdict) for d in self.devices if d.verdict is not None]
        texts = [(verdict.sentence(device), verdict.copies()) for device, verdict in said]
        return [*first, *(text for pair in texts for text in pair if text)]

    def __str__(self) -> str:
        text = Text(_WIDTH + 2)
        for sentence in [*self._verdicts(), *self.notes]:
            text.block(sentence)
        for memory in self.memory:
            text.line()
            text.line(f"{memory.title}: {show_size(memory.total_bytes)}")
            for line in text_bar(list(memory.parts.items()), text.width, show_size):
                text.line(line)
            for note in memory.notes:
                text.block(note, "   ", "   ")
        lines = str(text).strip("\n").splitlines()
        if self.memory and self.devices:
            lines.append("")
        return "\n".join([*lines, *(_table(device, self) for device in self.devices)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        said = [("verdict", text) for text in self._verdicts()]
        sections = [Section(says=[*said, *(("warn", text) for text in self.notes)])]
        for memory in self.memory:
            title = f"{memory.title}: {show_size(memory.total_bytes)}"
            sections.append(Section(title, bar=list(memory.parts.items()), notes=memory.notes))
        for device in self.devices:
            sections.append(Section(_label(device), rows=_device_rows(device, self.abbreviated)))
            for model in device.models:
                units = f"{model.layers} layers in {model.units} units"
                rows = _model_rows(model, self.abbreviated)
                sections.append(Section(rows=[(model.name, units), *rows]))
            for phase in _told_phases(device, self.abbreviated):
                sections.append(Section(rows=_phase_rows(phase)))
        legend = _LEGEND if self.devices and not self.abbreviated else ()
        sections.append(Section(rows=_optimizer_rows(self), notes=legend))
        return render("summary", sections)


def memory_summary(
    device: Any = None,
    abbreviated: bool = False,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> MemoryReport:
    """Report memory and traffic of attached models.

    Parameters
    ----------
    device : torch.device or str, optional
        Only this device; all of them by default.
    abbreviated : bool
        Leave counters out of the table (``to_dict()`` keeps them).
    model : nn.Module, optional
        Only this attached model.
    optimizer : torch.optim.Optimizer, optional
        Also report the bytes of its state.

    Returns
    -------
    MemoryReport

    Notes
    -----
    It raises nothing: what cannot be read is missing in the report, which says why in its `notes`.
    So it can be called before CUDA starts, after an error, and in a forked worker.

    Examples
    --------
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    >>> with oracle_offload.attach(model, "cpu"):
    ...     y = model(torch.randn(2, 256))
    ...     report = oracle_offload.memory_summary(model=model)  # print(report) shows it
    >>> [row.device for row in report.devices]
    ['cpu']
    """
    notes: list[str] = []
    rows: list[DeviceUsage] = []
    memory: list[Memory] = []
    sizes: dict[str, int] = {}
    sizes = _or_note(notes, "the optimizer's state", sizes, lambda: _optimizer_bytes(optimizer))
    parent = parent_process()
    states: list[DeviceState] = []
    wanted = None
    if parent is not None:
        notes.append(
            f"this process was forked from process {parent}, where models are attached: ask there"
        )
    else:
        states = _or_note(notes, "the devices", states, open_states)
        if device is not None:
            wanted = _or_note(notes, "the device", "none", lambda: str(parse_device(device)))
    for state in states:
        if wanted is None or str(state.device) == wanted:
            add = partial(_add_device, state, model, optimizer, sizes, rows, memory)
            _or_note(notes, str(state.device), None, add)
    if not rows:
        memory += _or_note(notes, "the device's memory", memory[:0], _idle_cards)
    locked = sum(row.locked_bytes for row in rows)
    pageable = sum(row.pageable_bytes for row in rows)
    read_host = partial(host_memory, locked, pageable)
    host = _or_note(notes, "the host's memory", None, read_host)
    if host is not None:
        memory.append(host)
    at = place()
    return MemoryReport(
        rows, sizes, abbreviated, memory, notes, None if at is None else at.as_row()
    )


_T = TypeVar("_T")
_S = TypeVar("_S")


def _or_note(notes: list[str], what: str, otherwise: _T, read: Callable[[], _S]) -> _T | _S:
    """Return what `read` does; where it fails, `otherwise`, with a note of why."""
    try:
        return read()
    except Exception as error:  # a report is wanted most when something has failed
        notes.append(f"{what} could not be read: {error}")
        return otherwise


def _idle_cards() -> list[Memory]:
    """Return who holds the current card's memory, where CUDA has started without a model."""
    if not torch.cuda.is_initialized():
        return []
    device = Cuda.find(torch.device("cuda"))
    card = Cuda(device)
    free, total = torch.cuda.mem_get_info(device)
    return [
        device_memory(
            str(device),
            free,
            total,
            allocated=card.allocated_bytes(),
            cached=card.cached_bytes(),
            arena=0,
            weights=0,
            gradients=0,
            optimizer=None,
        )
    ]


def _add_device(
    state: DeviceState,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    optimizer_bytes: dict[str, int],
    rows: list[DeviceUsage],
    memory: list[Memory],
) -> None:
    """Add a device to the report, if models are attached there."""
    with state.lock:
        everything = [held for held in attachments_on(state) if held.is_attached]
        chosen = [held for held in everything if model is None or _manages(held, model)]
        if not chosen:
            return
        usage = _device_usage(state, chosen)
        modules = [module for held in everything if (module := held.module()) is not None]
        # Of the simulated device the state is on "cpu" too, as is that of managed weights.
        told = optimizer is not None and not state.simulated
        memory.append(
            device_memory(
                _label(usage),
                usage.free_bytes,
                usage.total_bytes,
                allocated=usage.torch_allocated_bytes,
                cached=state.kind.cached_bytes(),
                arena=usage.arena_bytes,
                weights=sum(resident_bytes(module) for module in modules),
                gradients=sum(resident_gradient_bytes(module) for module in modules),
                optimizer=optimizer_bytes.get(usage.device, 0) if told else None,
            )
        )
        rows.append(usage)


def _manages(attachment: Attachment, model: nn.Module) -> bool:
    manager = model.__dict__.get("_memory_manager")
    return manager is not None and manager.attachment is attachment


def _device_usage(state: DeviceState, attachments: list[Attachment]) -> DeviceUsage:
    stats, waits = state.engine.stats(), state.engine.unit_waits()
    waited = state.phases.waited(waits)
    layers = {u: names for held in attachments_on(state) for u, names in held.unit_layers().items()}
    free, total = _free_and_total(state)
    return DeviceUsage(
        device=str(state.device),
        name=state.engine.device_name,
        simulated=state.simulated,
        free_bytes=free,
        total_bytes=total,
        torch_allocated_bytes=state.kind.allocated_bytes(),
        arena_bytes=stats["arena_bytes"],
        in_arena_bytes=stats["resident_bytes"],
        peak_in_arena_bytes=stats["peak_resident_bytes"],
        locked_bytes=stats["locked_bytes"],
        pageable_bytes=stats["pageable_bytes"],
        lock_refusals=stats["lock_refusals"],
        ring_bytes=stats["ring_bytes"],
        unlocked_h2d_gbps=_rate(stats["unlocked_h2d_bytes"], stats["unlocked_h2d_seconds"]),
        numa_node=node if (node := state.engine.numa_node) >= 0 else None,
        host_waits=stats["host_waits"],
        recoveries=stats["recoveries"],
        allocations=stats["allocations"],
        left_bytes=stats["left_bytes"],
        left_copies=stats["left_copies"],
        returned_bytes=stats["returned_bytes"],
        returned_copies=stats["returned_copies"],
        brought_bytes=stats["brought_bytes"],
        brought_copies=stats["brought_copies"],
        disk_bytes=stats["disk_bytes"],
        disk_kept_bytes=stats["disk_kept_bytes"],
        disk_arrived_bytes=stats["disk_arrived_bytes"],
        disk_read_bytes=stats["disk_read_bytes"],
        disk_gbps=_rate(stats["disk_read_bytes"], stats["disk_read_seconds"]),
        optimizers=[(type(one).__name__, how) for one, how in list(state.optimizers.items())],
        models=[_model_usage(state, attachment, waits) for attachment in attachments],
        phases=[
            _phase_usage(name, grown, _stalled(waited[name], layers))
            for name, grown in state.phases.counted(state.counters(stats)).items()
        ],
        verdict=verdict_on(state, stats),
    )


def _phase_usage(name: str, grown: Mapping[str, Any], stalled: list[StalledLayer]) -> PhaseUsage:
    counted, seconds = _counted(grown, stalled), max(0.0, grown["now_s"])
    moved, rate = counted["h2d_bytes"], counted["h2d_gbps"]
    copies_s = moved / rate / 1e9 if rate else math.inf if moved else 0.0
    bound_s = None if copies_s > seconds else max(seconds - counted["stall_s"], copies_s)
    return PhaseUsage(name=name, seconds=seconds, bound_s=bound_s, **counted)


def _counted(grown: Mapping[str, Any], stalled: list[StalledLayer]) -> dict[str, Any]:
    """Return the fields of `Usage`, without its name, as the engine counted them."""
    stalls, stall_s = stalls_of(grown)
    rate = _rate(grown["h2d_timed_bytes"], grown["h2d_seconds"])
    copies_s = grown["h2d_bytes"] / rate / 1e9 if rate else 0.0
    alike = (
        "acquires hits late stale evictions waits timed_waits h2d_bytes h2d_copies d2h_bytes "
        "d2h_copies"
    )
    return {
        "stalls": round(stalls),
        "stall_s": stall_s,
        "stalled": stalled,
        "h2d_gbps": rate,
        "d2h_gbps": _rate(grown["d2h_timed_bytes"], grown["d2h_seconds"]),
        "overlap": max(0.0, 1 - stall_s / copies_s) if copies_s else None,
        **{key: grown[key] for key in alike.split()},
    }


def _stalled(waits: Waits, layers: Mapping[int, str]) -> list[StalledLayer]:
    """Return the layers that stalled, longest in all first."""
    rows = [StalledLayer(layers[u], *waits[u]) for u in waits if u in layers and waits[u][1]]
    return sorted(rows, key=lambda row: (-row.stall_s, row.layers))


def _free_and_total(state: DeviceState) -> tuple[int, int] | tuple[None, None]:
    try:
        return state.engine.mem_info()
    except OffloadError:  # an earlier error has ended the engine; its counters can still be read
        return None, None


def verdict_on(state: DeviceState, stats: Mapping[str, Any]) -> Verdict:
    """Judge the steps of a device, which all of its models take part in."""
    loads = [
        Load(held.weight_bytes, held.arena.capacity_bytes, held.traffic.step_h2d_bytes or 0)
        for held in attachments_on(state)
        if held.is_attached
    ]
    unlocked = _rate(stats["unlocked_h2d_bytes"], stats["unlocked_h2d_seconds"])
    return judge(
        state.pace.window(),
        state.pace.ended,
        loads,
        stats["pageable_bytes"],
        # On the simulated device the host's threads are timed by a real clock, the steps are not.
        None if unlocked is None or state.simulated else unlocked * 1e9,
    )


def _model_usage(state: DeviceState, attachment: Attachment, waits: Waits) -> ModelUsage:
    stats = state.engine.stats(attachment.model)
    traffic = attachment.traffic
    module = attachment.module()
    residents = {} if module is None else list_residents(module, attachment.reasons)
    left = 0 if module is None else resident_bytes(module)
    compressed, on_host = attachment.coded_bytes()
    share = attachment.pieces.share
    return ModelUsage(
        name=attachment.name,
        **_counted(stats, _stalled(waits, attachment.unit_layers())),
        layers=len(attachment.layers),
        resident_parameters=len(residents),
        resident_bytes=left,
        kept_bytes=attachment.kept_bytes,
        managed_bytes=stats["managed_bytes"],
        compressed_bytes=compressed,
        compressed_host_bytes=on_host,
        staging_bytes=attachment.arena.staging_bytes,
        compressed_because=attachment.compressed_because,
        computed_bytes=sum(traffic.computed_bytes.values()),
        runs_again=traffic.runs_again,
        flops_again=traffic.flops_again,
        derived_bytes=sum(traffic.derived_bytes.values()),
        rows_read=traffic.rows_read,
        rows_bytes=traffic.rows_bytes,
        in_arena_bytes=stats["resident_bytes"],
        capacity_bytes=attachment.arena.capacity_bytes,
        units=stats["units"],
        units_in_arena=stats["resident_units"],
        prefetches=stats["prefetches"],
        steps=traffic.steps,
        step_h2d_bytes=traffic.step_h2d_bytes,
        step_d2h_bytes=traffic.step_d2h_bytes,
        x_min_bytes=attachment.x_min_bytes(),
        look_ahead_units=attachment.look_ahead_units(),
        budget_changes=None if attachment.auto_budget is None else attachment.auto_budget.changes,
        budget_reason=(
            None
            if attachment.auto_budget is None or attachment.auto_budget.last is None
            else attachment.auto_budget.last.why
        ),
        shared_bytes=0 if share is None else share.nbytes,
        shared_by=1 if share is None else share.ranks.at.local_world,
    )


def _rate(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds / 1e9 if seconds > 0 else None


def _optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for state in optimizer.state.values() if optimizer is not None else ():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                place = str(value.device)
                sizes[place] = sizes.get(place, 0) + value.numel() * value.element_size()
    return sizes


# ---- the table ----


def _table(device: DeviceUsage, report: MemoryReport) -> str:
    rule, thin = f"|{'=' * _WIDTH}|", f"|{'-' * _WIDTH}|"
    title = printable(f"oracle_offload memory summary, {_label(device)}")
    title = title if len(title) <= _WIDTH else f"{title[: _WIDTH - 3]}..."
    lines = [rule, f"|{title:^{_WIDTH}}|", rule]
    lines += [_row(*row) for row in _device_rows(device, report.abbreviated)]
    for model in device.models:
        lines += [thin, _row(model.name, f"{model.layers} layers in {model.units} units")]
        lines += [_row(*row) for row in _model_rows(model, report.abbreviated)]
    for phase in _told_phases(device, report.abbreviated):
        lines += [thin, *(_row(*row) for row in _phase_rows(phase))]
    if report.optimizer_bytes:
        lines += [thin, *(_row(*row) for row in _optimizer_rows(report))]
    if not report.abbreviated:
        lines += [thin, *(f"| {line:<{_WIDTH - 2}} |" for line in _LEGEND)]
    return "\n".join([*lines, rule])


def _label(device: DeviceUsage) -> str:
    return f"{device.device} ({device.name}{', simulated' if device.simulated else ''})"


def _device_rows(device: DeviceUsage, abbreviated: bool) -> list[tuple[str, str]]:
    rows = [
        ("arena", format_size(device.arena_bytes)),
        (
            "  weights in it now / at most",
            f"{format_size(device.in_arena_bytes)} / {format_size(device.peak_in_arena_bytes)}",
        ),
        ("host memory, page-locked", format_size(device.locked_bytes)),
    ]
    if device.lock_refusals:
        rows.append(("  refusals to page-lock some", str(device.lock_refusals)))
    rows.append(("host memory, pageable", format_size(device.pageable_bytes)))
    if device.pageable_bytes:
        way = f"rings of {format_size(device.ring_bytes)}" if device.ring_bytes else "the driver"
        if device.unlocked_h2d_gbps is not None:
            way += f", {device.unlocked_h2d_gbps:.1f} GB/s"
        rows.append(("  which is copied through", way))
    if device.disk_bytes or device.disk_kept_bytes:
        kept, arrived = map(format_size, (device.disk_kept_bytes, device.disk_arrived_bytes))
        read = format_size(device.disk_read_bytes)
        if device.disk_gbps is not None:
            read += f", {device.disk_gbps:.2f} GB/s a thread"
        rows += [
            ("weights in files", format_size(device.disk_bytes)),
            ("  kept in memory once read", f"{arrived} of {kept} there"),
            ("  read from there so far", read),
        ]
    if device.left_copies:
        left = _traffic(device.left_bytes, device.left_copies, None)
        back = _traffic(device.returned_bytes, device.returned_copies, None)
        rows += [("activations that left", left), ("  and came back", back)]
    if device.brought_copies:
        brought = _traffic(device.brought_bytes, device.brought_copies, None)
        rows.append(("gradients and states brought", brought))
    rows += [(f"{name} steps", how) for name, how in device.optimizers]
    if not abbreviated:
        rows += [
            (
                "device memory free / total",
                f"{show_size(device.free_bytes)} / {show_size(device.total_bytes)}",
            ),
            ("host waits", str(device.host_waits)),
            ("recoveries after a failed driver call", str(device.recoveries)),
            ("driver objects and host blocks created", str(device.allocations)),
        ]
        if device.torch_allocated_bytes is not None:
            rows.insert(-3, ("allocated by torch", format_size(device.torch_allocated_bytes)))
        if device.numa_node is not None:
            rows.insert(-3, ("nearest NUMA node", str(device.numa_node)))
    return rows


def _optimizer_rows(report: MemoryReport) -> list[tuple[str, str]]:
    return [
        (f"optimizer state on {place}", format_size(nbytes))
        for place, nbytes in report.optimizer_bytes.items()
    ]


def _model_rows(model: ModelUsage, abbreviated: bool) -> list[tuple[str, str]]:
    rows = [
        ("  weights managed", format_size(model.managed_bytes)),
        (
            "  parameters that are not managed",
            f"{format_size(model.resident_bytes)} in {model.resident_parameters}",
        ),
        (
            "  weights in the arena",
            f"{format_size(model.in_arena_bytes)} of {format_size(model.capacity_bytes)}",
        ),
    ]
    if model.shared_by > 1:
        shown = f"{format_size(model.shared_bytes)}, for {model.shared_by} ranks"
        rows.append(("    on the host, in one copy", shown))
    if model.budget_changes is not None:
        times = "once" if model.budget_changes == 1 else f"{model.budget_changes} times"
        rows.append(
            ("    auto budget, changed", f"{times}; looks {model.look_ahead_units} units ahead")
        )
        if model.budget_reason is not None:
            rows.append(("    the last time because", model.budget_reason))
    if model.kept_bytes:
        rows.insert(2, ("    of them kept, to spare host memory", format_size(model.kept_bytes)))
    if model.compressed_bytes:
        share = model.compressed_host_bytes / model.compressed_bytes
        told = (
            f"{format_size(model.compressed_bytes)} in {format_size(model.compressed_host_bytes)}"
        )
        rows[1:1] = [
            ("    of them compressed on the host", f"{told}, {100 * share:.1f}%"),
            ("    which pass on the device through", format_size(model.staging_bytes)),
        ]
    if model.compressed_because:
        at = 3 if model.compressed_bytes else 1
        rows.insert(at, ("    because", model.compressed_because))
    if model.computed_bytes:
        rows.insert(1, ("  weights computed on the host", format_size(model.computed_bytes)))
    if model.derived_bytes:
        kept = format_size(model.derived_bytes)
        rows.append(("  made of weights, kept to backward", f"{kept}: checkpoint the blocks"))
    if model.step_h2d_bytes is not None:
        step = format_size(model.step_h2d_bytes)
        if model.x_min_bytes:
            step += f" = {model.step_h2d_bytes / model.x_min_bytes:.3f} X_min"
        rows.append(("  to the device, last step", step))
        rows.append(("  to the host, last step", format_size(model.step_d2h_bytes or 0)))
    rows.append(("  X_min, least bytes a step can need", format_size(model.x_min_bytes)))
    if abbreviated:
        return rows
    return [
        *rows,
        ("  to the device, in all", _traffic(model.h2d_bytes, model.h2d_copies, model.h2d_gbps)),
        *(
            [("  rows read from the host, in all", f"{format_size(model.rows_bytes)} in {read}")]
            if (read := model.rows_read)
            else []
        ),
        ("  to the host, in all", _traffic(model.d2h_bytes, model.d2h_copies, model.d2h_gbps)),
        ("  hits", _hits(model)),
        ("  prefetched / late / stale", f"{model.prefetches} / {model.late} / {model.stale}"),
        *_stall_rows(model),
        *(
            [("  forward again in backward", f"{again}, {model.flops_again / 1e12:.3f} TFLOP")]
            if (again := model.runs_again)
            else []
        ),
    ]


def _told_phases(device: DeviceUsage, abbreviated: bool) -> list[PhaseUsage]:
    """Return the phases, where there is more than the whole that the models tell already."""
    return [] if abbreviated or len(device.phases) < 2 else device.phases


def _phase_rows(phase: PhaseUsage) -> list[tuple[str, str]]:
    return [
        (f"phase {printable(phase.name)[:32]}", "all models"),
        ("  has taken", _over_bound(phase)),
        ("  to the device", _traffic(phase.h2d_bytes, phase.h2d_copies, phase.h2d_gbps)),
        ("  to the host", _traffic(phase.d2h_bytes, phase.d2h_copies, phase.d2h_gbps)),
        ("  hits", _hits(phase)),
        ("  late / stale / evicted", f"{phase.late} / {phase.stale} / {phase.evictions}"),
        *_stall_rows(phase),
    ]


def _over_bound(phase: PhaseUsage) -> str:
    taken = f"{phase.seconds:.3f} s"
    if not phase.bound_s:
        return f"{taken}; at best unknown"
    return f"{taken}, {phase.seconds / phase.bound_s:.2f} times what its bytes need at best"


def _stall_rows(usage: Usage) -> list[tuple[str, str]]:
    """Return the stalls, and below them the layers that stalled most."""
    told = stalls_text(usage.stalls, usage.stall_s, usage.timed_waits, usage.waits)
    hidden = usage.overlap
    return [
        *([] if hidden is None else [("  copies' time that held nothing up", f"{hidden:.0%}")]),
        ("  stalls", told),
        *(
            (f"    {_short(row.layers)}", _stalls_of_waits(row))
            for row in usage.stalled[:_MOST_STALLED]
        ),
    ]


def _stalls_of_waits(row: StalledLayer) -> str:
    return f"{row.stall_s * 1e3:.2f} ms, {row.stalls} of {row.timed_waits} timed waits"


def _short(layers: str) -> str:
    """Return the names of layers where there is room for 34 characters: the first, by its end."""
    first, *others = printable(layers).split(", ")
    more = f" +{len(others)}" if others else ""
    room = 34 - len(more)
    return (first if len(first) <= room else f"...{first[3 - room :]}") + more


def _hits(usage: Usage) -> str:
    share = f" ({100 * usage.hits / usage.acquires:.1f}%)" if usage.acquires else ""
    return f"{usage.hits} of {usage.acquires}{share}"


def _traffic(nbytes: int, copies: int, rate: float | None) -> str:
    text = f"{format_size(nbytes)} in {copies} copies"
    return text if rate is None else f"{text}, {rate:.1f} GB/s"


def _row(label: str, value: str) -> str:
    """Return a row within the frame, in as many lines as its value needs."""
    label = printable(label)
    if len(label) > _LABEL:  # the name of a class: its beginning tells most
        label = f"{label[: _LABEL - 3]}..."
    first, *more = textwrap.wrap(printable(value), _WIDTH - 42) or [""]
    lines = [(label, first), *(("", line) for line in more)]
    return "\n".join(f"| {left:<{_LABEL + 1}}| {right:<{_WIDTH - 42}}|" for left, right in lines)
