"""A recording of a training and its plan, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..engine.geometry import tensor_bytes
from ..host.schema import schema
from ..host.sizes import format_size
from ..host.terminal import Text
from ..observe.page import escape, fragment, page
from ..observe.recording import Recording
from ..observe.run_report import show
from .answer import Answer
from .fit import STREAMED

SCHEMA = schema("plan-verified", 1)
_HEAD = ("", "planned", "measured", "")
_SHORT = "no whole step after the warm-up was recorded: record five steps or more"
Planned = float | tuple[float, float] | None


@dataclass(frozen=True)
class Row:
    """One figure of a plan, and what was measured of it.

    Attributes
    ----------
    name : str
        What it is.
    how : str
        ``"size"`` (bytes), ``"time"`` (seconds) or ``"count"``.
    planned : float, tuple of float or None
        The figure, or the ends of its interval; None unknown.
    measured : float or None
        As the recording has it; None where it holds nothing of it.
    why_not : str
        Why the two cannot be compared; empty where they can.
    """

    name: str
    how: str
    planned: Planned
    measured: float | None
    why_not: str = ""

    @property
    def difference(self) -> float | None:
        """The measured figure less the planned one, or less the end that it is beyond."""
        if self.why_not or self.planned is None or self.measured is None:
            return None
        if not isinstance(self.planned, tuple):
            return self.measured - self.planned
        low, high = self.planned
        return min(0.0, self.measured - low) + max(0.0, self.measured - high)

    @property
    def said(self) -> str:
        """How the two compare, in words."""
        difference = self.difference
        if difference is None:
            return f"not compared: {self.why_not}"
        planned: Any = self.planned
        if isinstance(planned, tuple):
            if not difference:
                return "in the interval"
            end = planned[difference > 0]
            return f"{100 * difference / end:+.1f}% beyond the interval"
        if not difference:
            return "equal"
        return f"{100 * difference / planned:+.1f}%" if planned else "nothing was planned"

    def cells(self) -> tuple[str, str, str, str]:
        """Return name, planned, measured and how they compare, as they are shown."""
        planned, how = self.planned, self.how
        ends = planned if isinstance(planned, tuple) else (planned,)
        shown = " to ".join(show(end, how) for end in ends)
        return self.name, shown, show(self.measured, how), self.said


@dataclass(frozen=True)
class Verification:
    """A plan and what a recording holds of it; ``str()`` is text, a notebook shows a page.

    Attributes
    ----------
    plan : Answer
    device : str
        Of the recording, with its name; empty where nothing was attached while it was made.
    rows : list of Row
    """

    plan: Answer
    device: str
    rows: list[Row]

    def sentence(self) -> str:
        """Return what is compared with what."""
        card = self.plan.question.card.name
        return (
            f"{self.plan.question.source.name}: planned for {card}, recorded on "
            f"{self.device or 'no device'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the rows as plain data with a ``"schema"``; bytes, seconds and counts."""
        rows = [{**vars(row), "difference": row.difference, "said": row.said} for row in self.rows]
        return {
            "schema": SCHEMA,
            "model": self.plan.question.source.name,
            "card": self.plan.question.card.name,
            "device": self.device,
            "rows": rows,
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_text(self, *, width: int = 100, color: bool = False) -> str:
        """Return the rows for a terminal."""
        text = Text(width, color=color)
        text.block(self.sentence(), style="bold")
        cells = [_HEAD, *(row.cells() for row in self.rows if row.difference is not None)]
        name, planned, measured = (max(len(row[i]) for row in cells) for i in range(3))
        for first, second, third, said in cells:
            figures = f"{second:>{planned}}  {third:>{measured}}"
            text.line(f"  {first:<{name}}  {figures}  {said}".rstrip())
        text.line()
        text.line("Not compared")
        for row in self.rows:
            if row.difference is None:
                first, second, third, _ = row.cells()
                figures = f"planned {second}, measured {third}"
                text.block(f"{first} ({figures}): {row.why_not}", "  ", "      ")
        return str(text)

    def to_html(self) -> str:
        """Return one self-contained page without scripts."""
        return page("planned and measured", self._repr_html_())

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _HEAD)
        cells = "".join(
            f'<tr><td>{name}</td><td class="n">{planned}</td><td class="n">{measured}</td>'
            f"<td>{escape(said)}</td></tr>"
            for name, planned, measured, said in (row.cells() for row in self.rows)
        )
        body = f"<table><tr>{head}</tr>{cells}</table>"
        return fragment("plan", [f"<h2>{escape(self.sentence())}</h2>", body])

    def __str__(self) -> str:
        return self.to_text()


def verify(plan: Answer, recording: Recording) -> Verification:
    """Compare `plan` and `recording`: the first device whose steps make an average, if any."""
    means = recording.averages()
    device = next((name for name, mean in means.items() if mean["steps"]), None)
    device = next(iter(means), "") if device is None else device
    names = {row["device"]: row["name"] for row in recording.header["devices"]}
    steps = [step for step in recording.steps() if step["device"] == device]
    mean = means.get(device) or {"steps": 0, "seconds": None, "counters": {}}
    rows = [*_streamed(plan, recording, device, steps, mean), *_allocated(plan, device, steps)]
    shown = f"{names[device]} ({device})" if device else ""
    return Verification(plan, shown, rows)


def _streamed(
    plan: Answer, recording: Recording, device: str, steps: list[Any], mean: dict[str, Any]
) -> Iterator[Row]:
    """Yield what the engine counts."""
    fit, speed = plan.fit, plan.speed
    now = steps[-1]["counters"] if steps else {}
    models = {
        str(event["model"])
        for event in recording.of("compute")
        if event["device"] == device and event["model"]
    }
    why = "" if fit.storage.units else fit.storage.why_not
    if fit.verdict != STREAMED:
        why = f"by the plan it {fit.verdict}, and nothing streams"
    elif not steps:
        why = "the recording holds no step of an attached model"
    elif len(models) > 1:
        why = f"the recording has sums of {len(models)} models: {', '.join(sorted(models))}"

    def row(name: str, how: str, planned: Planned, measured: float | None, also: str = "") -> Row:
        return Row(name, how, planned, measured, why or also)

    weights = fit.host.get("weights", 0) + fit.host.get("padding", 0)
    held = None
    if now:
        held = now["locked_bytes"] + now["pageable_bytes"] - now["ring_bytes"]
    arena = now.get("arena_bytes")
    yield row("units", "count", len(fit.storage.units), now.get("units"))
    managed = fit.storage.managed_bytes
    yield row("managed weights", "size", managed, now.get("managed_bytes"))
    yield row("masters on the host", "size", weights, held)
    yield row("arena", "size", fit.arena_bytes, arena)

    other = _SHORT if not mean["steps"] else ""
    if arena is not None and arena != fit.arena_bytes:
        other = f"the arena has {format_size(arena)}, and the plan is for another"
    counters = mean["counters"]
    down, up = counters.get("h2d_bytes"), counters.get("d2h_bytes")
    unknown = speed.why if speed.step_s is None else ""
    moved = None if unknown else speed.h2d_bytes
    home: float = _gradients(plan)
    if speed.optimizer and down is not None and up is not None:
        if plan.question.recipe.during_backward or up > home:  # stepped weights go home, too
            down, home = down + counters.get("brought_bytes", 0), speed.d2h_bytes
        else:
            unknown = unknown or "the optimizer was not streamed, and the plan's is"
    yield row("to the device, a step", "size", moved, down, other or unknown)
    yield row("to the host, a step", "size", home, up, other)
    ends: Any = None if unknown else (speed.low_s, speed.high_s)
    yield row("time of a step", "time", ends, mean["seconds"], other or unknown)


def _gradients(plan: Answer) -> int:
    """Return the bytes of gradients that travel: of trained weights, from each micro-batch."""
    tensors = {id(t): t for unit in plan.fit.storage.units for leaf in unit for t in leaf.tensors()}
    nbytes = sum(tensor_bytes(tensor) for tensor in tensors.values() if tensor.requires_grad)
    return plan.step.micro_batches * nbytes


def _allocated(plan: Answer, device: str, steps: list[Any]) -> Iterator[Row]:
    """Yield what torch counts on a GPU, as a whole; and the rows that it does not separate."""
    fit, step = plan.fit, plan.step
    known = [s for s in steps if s["peak_bytes"] is not None]
    why = "" if known else f"torch counts no memory on {device}"
    if not steps:
        why = "the recording holds no step of an attached model"
    kept = peak = live = None
    if known:
        kept, peak = known[-1]["allocated_bytes"], max(s["peak_bytes"] for s in known)
        live = peak - kept
    activations = step.activations
    stays = fit.device_bytes - fit.device.get("activations", 0)
    unknown = why or ("" if activations is not None else f"activations are unknown: {step.why}")
    whole = None if activations is None else fit.device_bytes
    yield Row("kept on the device", "size", stays, kept, why)
    yield Row("most on the device", "size", whole, peak, unknown)
    yield Row("activations", "size", activations, live, unknown)
    inside = "it is in the sums above, and no recording tells it apart"
    for part in plan.storage.rows:
        if part.name != "weights":
            yield Row(part.name, "size", part.bytes, None, inside)
