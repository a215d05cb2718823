"""`memory_summary`: what is where, what moved and what waited, counted by the engine.

In the manner of ``torch.cuda.memory_summary()``, but it returns a report: ``print`` it, show it in
a notebook, or take ``to_dict()``. No figure is derived from a plan; bytes are counted at the copy
call and seconds come from events on the device.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..attachment import Attachment, attachments_on
from ..devices import parse_device
from ..engines import open_states
from ..residents import list_residents, resident_bytes
from ..sizes import format_size
from ..traffic import stalls_of, stalls_text
from .schema import schema
from .terminal import Text
from .verdict import Load, Verdict, judge

if TYPE_CHECKING:
    from ..engines import DeviceState

SCHEMA = schema("memory-summary", 1)
_WIDTH = 80
_LEGEND = (
    "late: not in the arena when asked for; stale: in it, but changed on the host",
    "GB/s and stalls: by a sample of the copies and of the waits for them",
)


@dataclass(frozen=True)
class ModelUsage:
    """One attached model. Sizes in bytes, times in seconds, rates in 10^9 bytes per second.

    A layer asks for its unit with an acquire. It is a hit when the unit is in the arena or on its
    way; late when its copy begins only then; stale when it is there, but its master has changed
    since. A stall is a wait of the compute stream for a copy, longer than 10 microseconds.

    Times are measured of a sample, one copy and one wait in 16, and of all while a timeline is
    recorded: `stalls` and `stall_s` are what `timed_waits` of all `waits` tell, in proportion.

    `kept_bytes` is the part of `resident_bytes` for which ``ram_budget`` had no room on the host.

    `rows_bytes` of tables were read where they lie, by `rows_read` kernels; `step_h2d_bytes` counts
    them, `h2d_bytes` the copies alone.

    `x_min_bytes` is the least that a step can move to the device, docs/how-it-works.md.
    """

    name: str
    layers: int
    resident_parameters: int
    resident_bytes: int
    kept_bytes: int
    managed_bytes: int
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
    acquires: int
    hits: int
    late: int
    stale: int
    prefetches: int
    evictions: int
    waits: int
    timed_waits: int
    stalls: int
    stall_s: float
    h2d_bytes: int
    h2d_copies: int
    h2d_gbps: float | None
    d2h_bytes: int
    d2h_copies: int
    d2h_gbps: float | None
    steps: int
    step_h2d_bytes: int | None
    step_d2h_bytes: int | None
    x_min_bytes: int


@dataclass(frozen=True)
class DeviceUsage:
    """One device and the models attached to it.

    What is not page-locked passes through rings of `ring_bytes` that are; `unlocked_h2d_gbps` is
    how fast the engine's copy threads fed them, by the host's clock, also on the simulated device.
    `lock_refusals` counts how often the driver gave no page-locked memory.
    """

    device: str
    name: str
    simulated: bool
    free_bytes: int
    total_bytes: int
    torch_allocated_bytes: int | None
    arena_bytes: int
    in_arena_bytes: int
    peak_in_arena_bytes: int
    locked_bytes: int
    pageable_bytes: int
    lock_refusals: int
    ring_bytes: int
    unlocked_h2d_gbps: float | None
    host_waits: int
    recoveries: int
    allocations: int
    models: list[ModelUsage] = field(default_factory=list)
    verdict: Verdict | None = None


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """What `memory_summary` returns; ``str()`` and ``repr()`` are the table.

    Attributes
    ----------
    devices : list of DeviceUsage
        Devices with an attached model.
    optimizer_bytes : dict
        Bytes of the optimizer's state per device, where an optimizer was given.
    abbreviated : bool
        Whether the table leaves the counters out.
    """

    devices: list[DeviceUsage]
    optimizer_bytes: dict[str, int] = field(default_factory=dict)
    abbreviated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data with a ``"schema"``."""
        return {"schema": SCHEMA, **asdict(self)}

    def __str__(self) -> str:
        if not self.devices:
            return "oracle_offload: no model is attached"
        verdicts = [d.verdict.sentence(d.device) for d in self.devices if d.verdict is not None]
        text = Text(_WIDTH + 2)
        for sentence in verdicts:
            text.block(sentence)
        return str(text).lstrip("\n") + "\n".join(_table(device, self) for device in self.devices)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


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

    Raises
    ------
    ValueError, OffloadError
        `device` is not a device of this machine.
    """
    wanted = None if device is None else str(parse_device(device))
    rows = []
    for state in open_states():
        if wanted is not None and str(state.device) != wanted:
            continue
        with state.lock:
            attachments = [
                attachment
                for attachment in attachments_on(state)
                if attachment.is_attached and (model is None or _manages(attachment, model))
            ]
            if attachments:
                rows.append(_device_usage(state, attachments))
    return MemoryReport(rows, _optimizer_bytes(optimizer), abbreviated)


def _manages(attachment: Attachment, model: nn.Module) -> bool:
    manager = model.__dict__.get("_memory_manager")
    return manager is not None and manager.attachment is attachment


def _device_usage(state: DeviceState, attachments: list[Attachment]) -> DeviceUsage:
    stats = state.engine.stats()
    free, total = state.engine.mem_info()
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
        host_waits=stats["host_waits"],
        recoveries=stats["recoveries"],
        allocations=stats["allocations"],
        models=[_model_usage(state, attachment) for attachment in attachments],
        verdict=_verdict(state, stats),
    )


def _verdict(state: DeviceState, stats: Mapping[str, Any]) -> Verdict:
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


def _model_usage(state: DeviceState, attachment: Attachment) -> ModelUsage:
    stats = state.engine.stats(attachment.model)
    stalls, stall_s = stalls_of(stats)
    traffic = attachment.traffic
    module = attachment.module()
    residents = {} if module is None else list_residents(module, attachment.reasons)
    left = 0 if module is None else resident_bytes(module)
    return ModelUsage(
        name=attachment.name,
        layers=len(attachment.layers),
        resident_parameters=len(residents),
        resident_bytes=left,
        kept_bytes=attachment.kept_bytes,
        managed_bytes=stats["managed_bytes"],
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
        acquires=stats["acquires"],
        hits=stats["hits"],
        late=stats["late"],
        stale=stats["stale"],
        prefetches=stats["prefetches"],
        evictions=stats["evictions"],
        waits=stats["waits"],
        timed_waits=stats["timed_waits"],
        stalls=round(stalls),
        stall_s=stall_s,
        h2d_bytes=stats["h2d_bytes"],
        h2d_copies=stats["h2d_copies"],
        h2d_gbps=_rate(stats["h2d_timed_bytes"], stats["h2d_seconds"]),
        d2h_bytes=stats["d2h_bytes"],
        d2h_copies=stats["d2h_copies"],
        d2h_gbps=_rate(stats["d2h_timed_bytes"], stats["d2h_seconds"]),
        steps=traffic.steps,
        step_h2d_bytes=traffic.step_h2d_bytes,
        step_d2h_bytes=traffic.step_d2h_bytes,
        x_min_bytes=attachment.x_min_bytes(),
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
    label = f"{device.device} ({device.name}{', simulated' if device.simulated else ''})"
    rule, thin = f"|{'=' * _WIDTH}|", f"|{'-' * _WIDTH}|"
    lines = [rule, f"|{'oracle_offload memory summary, ' + label:^{_WIDTH}}|", rule]
    rows: list[tuple[str, str]] = [
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
    if not report.abbreviated:
        rows += [
            (
                "device memory free / total",
                f"{format_size(device.free_bytes)} / {format_size(device.total_bytes)}",
            ),
            ("host waits", str(device.host_waits)),
            ("recoveries after a failed driver call", str(device.recoveries)),
            ("driver objects and host blocks created", str(device.allocations)),
        ]
        if device.torch_allocated_bytes is not None:
            rows.insert(-3, ("allocated by torch", format_size(device.torch_allocated_bytes)))
    lines += [_row(*row) for row in rows]
    for model in device.models:
        lines += [thin, _row(model.name, f"{model.layers} layers in {model.units} units")]
        lines += [_row(*row) for row in _model_rows(model, report.abbreviated)]
    if report.optimizer_bytes:
        lines.append(thin)
        lines += [
            _row(f"optimizer state on {place}", format_size(nbytes))
            for place, nbytes in report.optimizer_bytes.items()
        ]
    if not report.abbreviated:
        lines += [thin, *(f"| {line:<{_WIDTH - 2}} |" for line in _LEGEND)]
    return "\n".join([*lines, rule])


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
    if model.kept_bytes:
        rows.insert(2, ("    of them kept, to spare host memory", format_size(model.kept_bytes)))
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
    hits = f"{model.hits} of {model.acquires}"
    if model.acquires:
        hits += f" ({100 * model.hits / model.acquires:.1f}%)"
    return [
        *rows,
        ("  to the device, in all", _traffic(model.h2d_bytes, model.h2d_copies, model.h2d_gbps)),
        *(
            [("  rows read from the host, in all", f"{format_size(model.rows_bytes)} in {read}")]
            if (read := model.rows_read)
            else []
        ),
        ("  to the host, in all", _traffic(model.d2h_bytes, model.d2h_copies, model.d2h_gbps)),
        ("  hits", hits),
        ("  prefetched / late / stale", f"{model.prefetches} / {model.late} / {model.stale}"),
        ("  stalls", stalls_text(model.stalls, model.stall_s, model.timed_waits, model.waits)),
        *(
            [("  forward again in backward", f"{again}, {model.flops_again / 1e12:.3f} TFLOP")]
            if (again := model.runs_again)
            else []
        ),
    ]


def _traffic(nbytes: int, copies: int, rate: float | None) -> str:
    text = f"{format_size(nbytes)} in {copies} copies"
    return text if rate is None else f"{text}, {rate:.1f} GB/s"


def _row(label: str, value: str) -> str:
    return f"| {label:<39}| {value:<{_WIDTH - 42}}|"
