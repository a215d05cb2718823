"""A plan as text, JSON and HTML."""

from __future__ import annotations

import json
from typing import Any

from ..host.schema import schema
from ..host.sizes import format_size
from ..host.terminal import Text
from ..observe.bars import Part, html_bar, text_bar
from ..observe.page import escape, fragment, page
from ..observe.run_report import show
from . import paste
from .answer import Answer
from .fit import NOWHERE, RESIDENT, STREAMED
from .ladder import ABSENT, Rung
from .source import switch_of

SCHEMA = schema("plan", 1)
_STYLES = {RESIDENT: "green", NOWHERE: "red"}
_MARK = "changes the result of training"
# What of a bar each kind of bytes is drawn as.
_DRAWN = {
    "weights": "weights",
    "buffers": "weights",
    "adapters": "weights",
    "master copies": "optimizer state",
    "optimizer state": "optimizer state",
    "gradients": "gradients",
    "activations": "activations",
    "arena": "arena",
    "staging": "arena",
}


def as_dict(plan: Answer) -> dict[str, Any]:
    """Return the plan as plain data with a ``"schema"``; sizes in bytes."""
    question, fit, storage = plan.question, plan.fit, plan.storage
    return {
        "schema": SCHEMA,
        "model": question.source.name,
        "parameters": storage.parameters,
        "trained": storage.trained,
        "verdict": plan.verdict,
        "fits": plan.fits,
        "unknown": list(plan.unknown),
        "why": fit.why,
        "persistent_bytes": {row.name: row.bytes for row in storage.rows},
        "device_bytes": fit.device,
        "host_bytes": fit.host,
        "device_room_bytes": fit.device_room,
        "host_room_bytes": fit.host_room,
        "missing_device_bytes": fit.missing_device,
        "missing_host_bytes": fit.missing_host,
        "units": len(storage.units),
        "floor_bytes": storage.floor_bytes,
        "arena_bytes": fit.arena_bytes,
        "managed_bytes": storage.managed_bytes,
        "x_min_bytes": fit.x_min_bytes,
        "offload_percent": fit.offload_percent,
        "activations_bytes": plan.step.activations,
        "activations_leaving": None if (left := plan.step.leaving()) is None else left._asdict(),
        "step": vars(plan.speed),
        "ram_budget_bytes": fit.ram_budget,
        "disk_bytes": fit.disk_bytes,
        "disk_gbps": question.room.disk_gbps,
        "compress": question.recipe.compress,
        "compressed_bytes": fit.storage.coded_bytes[0],
        "compressed_host_bytes": fit.storage.coded_bytes[1],
        "card": question.card.name,
        "alternatives": [vars(rung) for rung in plan.alternatives],
        "sharded": [vars(shard) for shard in plan.shards],
        "absent": [dict(zip(("what", "gives", "who"), row, strict=True)) for row in ABSENT],
        "python": _python(plan),
        "aitoolkit": _yaml(plan),
        "assumptions": list(plan.assumptions),
    }


def as_json(plan: Answer) -> str:
    """Return `as_dict` as JSON."""
    return json.dumps(as_dict(plan), indent=2) + "\n"


def _python(plan: Answer) -> str:
    question = plan.question
    if plan.fit.verdict == NOWHERE:
        return ""
    switch = switch_of(question.source.module) if question.checkpointing else ""
    together = plan.step.micro_batches if plan.step.together else 1
    follows = plan.shares_arena
    return paste.python(plan.fit, question.recipe, switch, follows_steps=follows, together=together)


def _yaml(plan: Answer) -> str:
    question = plan.question
    if plan.fit.verdict == NOWHERE or plan.fit.disk_bytes:  # of which AI-Toolkit has no key
        return ""
    recipe, micro_batches = question.recipe, question.micro_batches
    return paste.yaml(plan.fit, recipe, question.checkpointing, question.batch, micro_batches)


def _bars(plan: Answer) -> list[tuple[str, list[Part]]]:
    """Return the bars of device and host: what is there, and what stays free."""
    fit, bars = plan.fit, []
    for name, rows, room in (
        ("device", fit.device, fit.device_room),
        ("host", fit.host, fit.host_room),
    ):
        if not rows:
            continue
        drawn: dict[str, int | None] = {}
        for what, size in rows.items():
            kind = _DRAWN.get(what, "weights")
            drawn[kind] = (drawn.get(kind) or 0) + size
        if name == "device" and "activations" not in rows:
            drawn["activations"] = None
        parts: list[Part] = list(drawn.items())
        parts.append(("free", max(0, room - sum(rows.values()))))
        bars.append((f"{name}: {format_size(room)} for the training", parts))
    return bars


def _anatomy(plan: Answer) -> list[tuple[str, str, str, str, str]]:
    """Return each kind of persistent bytes: sum, bytes a parameter, and how much is where."""
    rows = []
    for name, size, share in plan.anatomy():
        device = plan.fit.device.get(name, 0)
        host = plan.fit.host.get(name, 0)
        rows.append(
            (name, format_size(size), f"{share:.2f}", format_size(device), format_size(host))
        )
    if plan.fit.disk_bytes:
        rows.append(("left in files", format_size(plan.fit.disk_bytes), "", "", ""))
    total, count = plan.storage.bytes, plan.storage.parameters
    rows.append(("together", format_size(total), f"{total / count:.2f}", "", ""))
    return rows


_HEAD = ("persistent", "bytes", "a parameter", "on the device", "on the host")


def as_text(plan: Answer, width: int, color: bool) -> str:
    """Return the plan for a terminal."""
    text = Text(width, color=color)
    text.block(plan.sentence(), style=_STYLES.get(plan.fit.verdict, "yellow"))
    text.block(speed(plan))
    text.line()
    for title, parts in _bars(plan):
        text.line(title)
        for line in text_bar(parts, text.width, _size):
            text.line(line)
    text.line()
    for name, size, share, device, host in (_HEAD, *_anatomy(plan)):
        text.line(f"  {name:<18}{size:>12}{share:>13}{device:>15}{host:>13}".rstrip())
    if plan.alternatives:
        text.line()
        text.line("Alternatives, cheapest first; and what each would change")
        for rung in plan.alternatives:
            mark = f" [{_MARK}]" if rung.changes_result else ""
            text.block(
                f"{rung.name}: {_saved(rung)}, then {plan.said(rung.verdict)}; {rung.cost}{mark} "
                f"({rung.option})",
                "  ",
                "      ",
            )
    text.line()
    text.line("Not in this library")
    for what, gives, who in ABSENT:
        text.block(f"{what}: {gives} ({who})", "  ", "      ")
    stages: dict[int, list[str]] = {}
    for shard in plan.shards:
        stages.setdefault(shard.stage, []).append(f"{format_size(shard.bytes)} of {shard.cards}")
    for stage, sizes in stages.items():
        text.block(f"ZeRO-{stage}, on one card: {', '.join(sizes)}", "      ", "      ")
    for title, code in (("Python", _python(plan)), ("AI-Toolkit", _yaml(plan))):
        if code:
            text.line()
            text.line(title)
            for line in code.splitlines():
                text.line(f"    {line}".rstrip())
    text.line()
    for said in plan.assumptions:
        text.block(said, "assumed: ", "         ")
    return str(text)


def as_fragment(plan: Answer) -> str:
    """Return the plan as a notebook shows it."""
    body = [f"<h2>{escape(plan.sentence())}</h2>"]
    body.append(f"<p>{escape(speed(plan))}</p>")
    for title, parts in _bars(plan):
        body += [f"<p>{escape(title)}</p>", *html_bar(parts, _size)]
    cells = "".join(
        "<tr><td>" + '</td><td class="n">'.join(map(escape, row)) + "</td></tr>"
        for row in _anatomy(plan)
    )
    head = "".join(f"<th>{name}</th>" for name in _HEAD)
    body.append(f"<table><tr>{head}</tr>{cells}</table>")
    if plan.alternatives:
        body.append("<h3>Alternatives, cheapest first</h3>\n<ol>")
        for rung in plan.alternatives:
            mark = f' <span class="mark">{_MARK}</span>' if rung.changes_result else ""
            body.append(
                f"<li>{escape(rung.name)}: {_saved(rung)}, then {plan.said(rung.verdict)}; "
                f"{escape(rung.cost)}{mark}</li>"
            )
        body.append("</ol>")
    body.append("<h3>Not in this library</h3>\n<ul>")
    body += [f"<li>{escape(f'{what}: {gives} ({who})')}</li>" for what, gives, who in ABSENT]
    body.append("</ul>")
    for title, code in (("Python", _python(plan)), ("AI-Toolkit", _yaml(plan))):
        if code:
            body += [f"<h3>{title}</h3>", f"<pre>{escape(code)}</pre>"]
    body.append("<h3>Assumed</h3>\n<ul>")
    body += [f"<li>{escape(said)}</li>" for said in plan.assumptions]
    body.append("</ul>")
    return fragment("plan", body)


def as_page(plan: Answer) -> str:
    """Return one self-contained page without scripts."""
    return page(f"plan of {plan.question.source.name}", as_fragment(plan))


def speed(plan: Answer) -> str:
    """Return how long a step takes, as a sentence."""
    found = plan.speed
    ends = f"{_disk(plan)}{_optimizer(plan)}"
    if found.low_s is None:
        return f"How long a step takes is unknown: {found.why}.{ends}"
    said = f"A step takes {show(found.low_s, 'time')} to {show(found.high_s, 'time')}"
    if plan.fit.verdict == RESIDENT:
        return f"{said}, all of it computing."
    return (
        f"{said}, {found.bottleneck}-bound: in the middle of that computing takes "
        f"{show(found.compute_s, 'time')}, copying {format_size(found.h2d_bytes)} "
        f"{show(found.link_s, 'time')}; no step with this arena takes less than "
        f"{show(found.bound_s, 'time')}.{ends}"
    )


def _disk(plan: Answer) -> str:
    """Return what is read of weights that stay in their files, and what more memory would save."""
    found, fit = plan.speed, plan.fit
    if not fit.disk_bytes:
        needless = plan.question.room.budget.disk and fit.verdict == STREAMED
        return " No weight stays in its file: the host has room for all." if needless else ""
    if not found.disk_bytes:
        return " What stays in files is in the arena from the second step on: none of it is read."
    said = (
        f" A step reads {format_size(found.disk_bytes)} from disk, which takes "
        f"{show(found.disk_s, 'time')} in the middle of its rates; a sweep of sampling reads "
        f"{format_size(fit.read_bytes[0])}."
    )
    rest = "copies take" if found.step_s is None else "computing and copies take"
    if not found.disk_paces:
        return f"{said} The disk does not set the pace: {rest} longer."
    paced = "" if found.disk_paces == "both" else f" of {found.disk_paces}"
    return (
        f"{said} The disk sets the pace{paced}: one more GiB of weights in memory saves "
        f"{show(found.ram_gib_saves_s, 'time')}, up to {format_size(found.ram_enough_bytes)} of "
        f"them, from where on {rest} longer."
    )


def _optimizer(plan: Answer) -> str:
    """Return where the optimizer of a full training is taken to step, and what moves with that."""
    found = plan.speed
    if not found.optimizer:
        return ""
    return (
        f" The optimizer is taken to step {found.optimizer} (train.stream_optimizer): of a step "
        f"{format_size(found.h2d_bytes)} go to the device and {format_size(found.d2h_bytes)} home."
    )


def _size(size: int | None) -> str:
    return "unknown" if size is None else format_size(size)


def _saved(rung: Rung) -> str:
    said = [
        f"{'saves' if size > 0 else 'costs'} {format_size(abs(size))} of {where}"
        for size, where in ((rung.saves_device, "the device"), (rung.saves_host, "the host"))
        if size
    ]
    if rung.saves_disk:
        less = " less" if rung.saves_disk > 0 else ""
        said.append(f"leaves {format_size(abs(rung.saves_disk))}{less} in files")
    return " and ".join(said)
