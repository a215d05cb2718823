"""What a run has left, as a report: a metrics file or a recording; and two of them side by side.

Each figure is of steps after the warm-up where there are any, and None where nothing is known.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..host.schema import schema
from ..host.sizes import format_size
from ..host.terminal import WIDEST, Text
from ..layers.traffic import stalls_of
from .metrics import MetricsRun
from .page import escape, page
from .recording import Recording
from .sections import Section, render
from .timeline import round_steps

SCHEMA = schema("report", 1)
WARM_UP_STEPS = 2  # as in `oracle_offload.engine.pace`, which imports nothing of this
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
        More HTML that belongs to it.
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
        rows = [(label, show(self.figures[key], how)) for key, label, how in _SHOWN]
        sections = [Section(self.name, rows=rows, numbers=True)]
        for label, points in self.series.items():
            if picture := line_svg(label, points):
                sections.append(Section(label, pictures=[("", picture)]))
        why = "" if self.explained is None else self.explained.to_html(page=False)
        return page(self.name, render("report", sections) + why + self.body)


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
        head = ("", self.before.name, self.after.name, "change")
        table = Section(head=head, rows=self.rows(), numbers=True)
        return page("before and after", render("report", [table]))


# ---- where the figures come from ----


def of_metrics(name: str, runs: Sequence[MetricsRun]) -> RunReport:
    """Return the report of a metrics file."""
    series = {
        label: [point for run in runs for point in _drawn(run, key)]
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


def _drawn(run: MetricsRun, key: str) -> Sequence[tuple[int, float]]:
    """Return the numbers of a run, without those of its warm-up, which would set the scale."""
    points = run.series(key)
    return points if key == "loss" else points[WARM_UP_STEPS + 1 :] or points


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
    """Return a line through (step, number) as an SVG picture for a page, with round numbers."""
    finite = [(x, y) for x, y in points if abs(y) < float("inf")]  # nan is not less either
    if not finite:
        return ""
    first, last = min(x for x, _ in finite), max(x for x, _ in finite)
    marks, unit, each = _scale(min(y for _, y in finite), max(y for _, y in finite), label)
    high, above, below = 120, 8, 26
    spread_x, spread_y = (last - first) or 1, (marks[-1] - marks[0]) or 1

    def down(value: float) -> float:
        return high * (marks[-1] - value / each) / spread_y

    path = " ".join(f"{1000 * (x - first) / spread_x:.1f},{down(y):.1f}" for x, y in finite)
    lines = []
    for mark in marks:
        y = above + down(mark * each)
        lines.append(
            f'<line x1="0" y1="{y:.1f}" x2="100%" y2="{y:.1f}" stroke="var(--oo-faint)" '
            f'stroke-opacity="0.4"/><text x="-8" y="{y + 4:.1f}" text-anchor="end">'
            f"{f'{mark:.6g} {unit}'.strip()}</text>"
        )
    for step in sorted({first, last, *map(round, round_steps(first, last, 4))}):
        at = (step - first) / spread_x
        if first < step < last and not 0.2 < at < 0.75:  # it would overlap one of these
            continue
        anchor = "start" if step == first else "end" if step == last else "middle"
        lines.append(
            f'<text x="{at:.1%}" y="{above + high + 20}" text-anchor="{anchor}">step {step}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{above + high + below}" '
        'style="box-sizing:border-box;padding-left:5.5rem;overflow:visible" '
        'font-family="sans-serif" font-size="12" fill="currentColor" role="img">'
        f"<title>{escape(label)}</title>"
        f'<svg y="{above}" height="{high}" viewBox="0 0 1000 {high}" preserveAspectRatio="none" '
        f'overflow="visible"><polyline points="{path}" fill="none" stroke="var(--oo-compute)" '
        f'stroke-width="1.5" vector-effect="non-scaling-stroke"/></svg>{"".join(lines)}</svg>'
    )


def _scale(low: float, top: float, label: str) -> tuple[list[float], str, float]:
    """Return round numbers from below the least to above the largest; their unit, and its size."""
    unit, each = "", 1.0
    if label.startswith("bytes"):
        largest = max(abs(low), abs(top))
        unit, each = next(
            (name, float(1 << 10 * power))
            for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"), (0, "B"))
            if largest >= 1 << 10 * power or not power
        )
    elif label.startswith("seconds"):
        unit, each = ("s", 1.0) if top >= 1 else ("ms", 1e-3)
    low, top = low / each, top / each
    marks = round_steps(low, top, 4) if top > low else []
    if len(marks) < 2:
        return ([low, top] if top > low else [low]), unit, each
    step = marks[1] - marks[0]
    before = [marks[0] - step] if marks[0] - low > 1e-6 * step else []
    after = [marks[-1] + step] if top - marks[-1] > 1e-6 * step else []
    return [*before, *marks, *after], unit, each
