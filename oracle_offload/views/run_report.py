"""What a run has left, as a report: a metrics file or a recording; and two of them side by side.

Each figure is of steps after the warm-up where there are any, and None where nothing is known.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..metrics import MetricsRun
from ..sizes import format_size
from ..traffic import stalls_of
from .page import escape, fragment, page
from .recording import Recording
from .schema import schema
from .terminal import WIDEST, Text

SCHEMA = schema("report", 1)
WARM_UP_STEPS = 2  # as in `oracle_offload.pace`, which imports nothing of this
Figures = dict[str, int | float | None]

# Key, what people call it, and how it is shown. The order is that of the table.
_SHOWN = (
    ("runs", "runs", "count"),
    ("steps", "steps that ended", "count"),
    ("errors", "errors", "count"),
    ("loss_first", "loss, first", "number"),
    ("loss_last", "loss, last", "number"),
    ("step_s", "time per step", "time"),
    ("peak_bytes", "peak of torch's memory", "size"),
    ("growth_bytes", "growth of torch's memory", "size"),
    ("h2d_bytes", "to the device, per step", "size"),
    ("d2h_bytes", "to the host, per step", "size"),
    ("stall_s", "stalls, per step", "time"),
    ("hit_share", "hits", "share"),
)


class Explained(Protocol):
    """What `RunReport` shows of an `explain.OomReport`."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""

    def to_text(self, *, width: int, color: bool) -> str:
        """Return it for a terminal."""

    def to_html(self, *, page: bool) -> str:
        """Return it as a page, or as a fragment."""


@dataclass(frozen=True)
class RunReport:
    """The figures of one file, and its pictures.

    Attributes
    ----------
    name : str
        The file.
    kind : str
        ``"metrics"`` or ``"recording"``.
    figures : dict
        As the keys of the table say: bytes, seconds, counts; None is unknown.
    series : dict
        What is drawn: label to (step, number).
    body : str
        HTML that belongs to it besides.
    explained : Explained or None
        Of a recording in which memory ran out, why.
    """

    name: str
    kind: str
    figures: Figures
    series: Mapping[str, Sequence[tuple[int, float]]]
    body: str = ""
    explained: Explained | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data with a ``"schema"``."""
        why = None if self.explained is None else self.explained.to_dict()
        return {
            "schema": SCHEMA,
            "file": self.name,
            "kind": self.kind,
            "figures": self.figures,
            "out_of_memory": why,
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_text(self, *, width: int = WIDEST, color: bool = False) -> str:
        """Return the table for a terminal."""
        text = Text(width, color=color)
        text.block(f"{self.name}: {self.kind}", style="bold")
        for key, label, how in _SHOWN:
            text.line(f"  {label:<28}{show(self.figures[key], how)}")
        if self.explained is None:
            return str(text)
        return f"{text}\n{self.explained.to_text(width=width, color=color)}"

    def to_html(self) -> str:
        """Return one self-contained page without scripts: the table and the pictures."""
        rows = "".join(
            f'<tr><td>{label}</td><td class="n">{show(self.figures[key], how)}</td></tr>'
            for key, label, how in _SHOWN
        )
        body = [f"<h2>{escape(self.name)}</h2>", f"<table>{rows}</table>"]
        body += [f"<h3>{label}</h3>\n{line_svg(label, s)}" for label, s in self.series.items() if s]
        why = "" if self.explained is None else self.explained.to_html(page=False)
        return page(self.name, fragment("report", body) + why + self.body)


@dataclass(frozen=True)
class Comparison:
    """Two reports side by side: before and after."""

    before: RunReport
    after: RunReport

    def to_dict(self) -> dict[str, Any]:
        """Return both and the differences as plain data with a ``"schema"``."""
        return {
            "schema": SCHEMA,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "differences": {key: self._difference(key) for key, _, _ in _SHOWN},
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def _difference(self, key: str) -> float | None:
        before, after = self.before.figures[key], self.after.figures[key]
        return None if before is None or after is None else after - before

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return label, before, after and change of each figure."""
        return [
            (
                label,
                show(self.before.figures[key], how),
                show(self.after.figures[key], how),
                _change(self._difference(key), self.before.figures[key], how),
            )
            for key, label, how in _SHOWN
        ]

    def to_text(self, *, width: int = WIDEST, color: bool = False) -> str:
        """Return the table for a terminal."""
        text = Text(width, color=color)
        text.block(f"before: {self.before.name}", style="bold")
        text.block(f"after:  {self.after.name}", style="bold")
        for label, before, after, change in [("", "before", "after", "change"), *self.rows()]:
            text.line(f"  {label:<26}{before:>14}{after:>14}  {change}")  # a cut figure is another
        return str(text)

    def to_html(self) -> str:
        """Return one self-contained page without scripts."""
        cells = "".join(
            f'<tr><td>{label}</td><td class="n">{before}</td><td class="n">{after}</td>'
            f'<td class="n">{change}</td></tr>'
            for label, before, after, change in self.rows()
        )
        names = [escape(report.name) for report in (self.before, self.after)]
        head = f"<tr><th></th><th>{names[0]}</th><th>{names[1]}</th><th>change</th></tr>"
        return page("before and after", fragment("report", [f"<table>{head}{cells}</table>"]))


# ---- where the figures come from ----


def of_metrics(name: str, runs: Sequence[MetricsRun]) -> RunReport:
    """Return the report of a metrics file."""
    series = {
        label: [point for run in runs for point in run.series(key)]
        for label, key in (
            ("loss", "loss"),
            ("seconds per step", "step_s"),
            ("bytes allocated by torch", "allocated_bytes"),
            ("bytes to the device", "h2d_bytes"),
        )
    }
    losses = [loss for _, loss in series["loss"]]
    acquires, hits = _sum(runs, "acquires"), _sum(runs, "hits")
    figures: Figures = {
        "runs": len(runs),
        "steps": sum(len(run.records) for run in runs),
        "errors": None,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "step_s": _median(_warm(runs, "step_s")),
        "peak_bytes": max(_all(runs, "peak_bytes"), default=None),
        "growth_bytes": _growth(_warm(runs[-1:], "allocated_bytes")),
        "h2d_bytes": _mean(_warm(runs, "h2d_bytes")),
        "d2h_bytes": _mean(_warm(runs, "d2h_bytes")),
        "stall_s": _mean(_warm(runs, "stall_s")),
        "hit_share": hits / acquires if acquires else None,
    }
    return RunReport(name, "metrics", figures, series)


def of_recording(name: str, recording: Recording) -> RunReport:
    """Return the report of a recording: of its first device, where there are several."""
    (device,) = recording.devices()[:1] or [""]
    steps = [step for step in recording.steps() if step["device"] == device]
    mean = recording.averages().get(device) or {"steps": 0, "seconds": None, "counters": {}}
    counters = mean["counters"]
    whole = [step for step in steps if not step["label"]]
    figures: Figures = {
        "runs": 1,
        "steps": len(steps),
        "errors": len(recording.of("error")),
        "loss_first": None,
        "loss_last": None,
        "step_s": mean["seconds"],
        "peak_bytes": max(_known(steps, "peak_bytes"), default=None),
        "growth_bytes": _growth(_known(whole, "allocated_bytes")),
        "h2d_bytes": counters.get("h2d_bytes"),
        "d2h_bytes": counters.get("d2h_bytes"),
        "stall_s": stalls_of(counters)[1] if counters.get("timed_waits") else None,
        "hit_share": counters["hits"] / counters["acquires"] if counters.get("acquires") else None,
    }
    return RunReport(name, "recording", figures, {}, recording._repr_html_())


def _known(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    found = (row.get(key) for row in rows)
    return [value for value in found if isinstance(value, int | float)]


def _all(runs: Sequence[MetricsRun], key: str) -> list[float]:
    return [value for run in runs for value in _known(run.records, key)]


def _warm(runs: Sequence[MetricsRun], key: str) -> list[float]:
    """Return the numbers after the warm-up of each run; all of them where no more are there."""
    warm = [v for run in runs for v in _known(run.records[WARM_UP_STEPS + 1 :], key)]
    return warm or _all(runs, key)


def _sum(runs: Sequence[MetricsRun], key: str) -> float:
    return sum(_all(runs, key))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _growth(values: Sequence[float]) -> float | None:
    return values[-1] - values[0] if len(values) > 1 else None


# ---- how they are shown ----


def show(value: float | None, how: str) -> str:
    """Return a figure as people write it: ``"size"``, ``"time"``, ``"share"``, or a number."""
    if value is None:
        return "unknown"
    if how == "size":
        return format_size(value)
    if how == "time":
        return f"{value:.2f} s" if abs(value) >= 1 else f"{value * 1e3:.2f} ms"
    if how == "share":
        return f"{100 * value:.1f}%"
    return f"{value:.0f}" if how == "count" else f"{value:.6g}"


def _change(difference: float | None, before: float | None, how: str) -> str:
    if difference is None:
        return "unknown"
    sign = "+" if difference >= 0 else "-"
    share = f" ({100 * difference / abs(before):+.1f}%)" if before and how != "share" else ""
    return f"{sign}{show(abs(difference), how)}{share}"


def line_svg(label: str, points: Sequence[tuple[int, float]]) -> str:
    """Return a line through (step, number) as an SVG picture, with its extremes written beside."""
    finite = [(x, y) for x, y in points if abs(y) < float("inf")]  # nan is not less either
    if not finite:
        return ""
    wide, high, left = 760, 140, 100
    first, last = min(x for x, _ in finite), max(x for x, _ in finite)
    low, top = min(y for _, y in finite), max(y for _, y in finite)
    spread_x, spread_y = (last - first) or 1, (top - low) or 1
    path = " ".join(
        f"{left + (x - first) / spread_x * (wide - left - 10):.1f},"
        f"{high - 25 - (y - low) / spread_y * (high - 40):.1f}"
        for x, y in finite
    )
    axis = [(top, 15), (low, high - 25)] if top != low else [(low, high - 25)]
    name = escape(label)
    marks = "".join(
        f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{_tick(value, label)}</text>'
        for value, y in axis
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}" font-family="sans-serif" font-size="12" fill="currentColor" role="img">'
        f"<title>{name}</title>{marks}"
        f'<text x="{left}" y="{high - 6}">step {first}</text>'
        f'<text x="{wide - 10}" y="{high - 6}" text-anchor="end">step {last}</text>'
        f'<polyline points="{path}" fill="none" stroke="#4c78a8" stroke-width="1.5"/></svg>'
    )


def _tick(value: float, label: str) -> str:
    return show(value, "size" if label.startswith("bytes") else "number")
