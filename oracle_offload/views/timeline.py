"""A picture of one training step: compute, copies and stalls over time, as one SVG file.

Input are the engine's trace rows (`Engine.trace_stop`); the picture needs no script and no font of
its own, and shows in any browser or notebook.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

_LANES = (
    ("compute", "managed layers", "#4c78a8"),
    ("stall", "stalls", "#e45756"),
    ("h2d", "copies to the device", "#54a24b"),
    ("d2h", "copies to the host", "#b279a2"),
)
_WIDTH, _LEFT, _RIGHT, _TOP = 1000, 150, 36, 56
_STALL_FLOOR_S = 10e-6  # shorter waits are two events in a row, as the engine's own counter has it
_LANE, _GAP = 34, 10


def timeline_svg(rows: Sequence[Mapping[str, Any]], title: str, *, max_boxes: int = 4000) -> str:
    """Draw trace rows.

    Parameters
    ----------
    rows : sequence of mappings
        ``kind`` ("compute", "h2d", "d2h" or "stall"), ``unit``, ``start_s``, ``end_s``, ``bytes``.
    title : str
        Shown above; say there whether times are simulated.
    max_boxes : int
        Neighbouring boxes of a lane are merged until no more than this many are left in it.

    Returns
    -------
    str
        The SVG document.
    """
    rows = [
        row
        for row in rows
        if row["kind"] != "stall" or row["end_s"] - row["start_s"] > _STALL_FLOOR_S
    ]
    begin = min((row["start_s"] for row in rows), default=0.0)
    end = max((row["end_s"] for row in rows), default=0.0)
    span = max(end - begin, 1e-12)
    scale = (_WIDTH - _LEFT - _RIGHT) / span
    used = {row["kind"] for row in rows} | {"stall"}  # a step without stalls is worth showing
    lanes = [lane for lane in _LANES if lane[0] in used]
    height = _TOP + len(lanes) * (_LANE + _GAP) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{html.escape(title)}</text>',
    ]
    for index, (kind, label, colour) in enumerate(lanes):
        y = _TOP + index * (_LANE + _GAP)
        mine = sorted(
            (row for row in rows if row["kind"] == kind), key=lambda row: float(row["start_s"])
        )
        busy = sum(row["end_s"] - row["start_s"] for row in mine)
        moved = sum(row["bytes"] for row in mine)
        note = f"{busy * 1e3:.2f} ms" + (
            f", {moved / 1e6:.1f} MB" if kind in ("h2d", "d2h") else ""
        )
        parts.append(f'<text x="8" y="{y + 15}">{label}</text>')
        parts.append(f'<text x="8" y="{y + 30}" fill="#666">{note}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_LANE}" '
            'fill="#f2f2f2"/>'
        )
        boxes = _merged(
            [(row["start_s"] - begin, row["end_s"] - begin) for row in mine], span, max_boxes
        )
        for first, last in boxes:
            parts.append(
                f'<rect x="{_LEFT + first * scale:.2f}" y="{y}" '
                f'width="{max((last - first) * scale, 0.3):.2f}" height="{_LANE}" fill="{colour}"/>'
            )
    base = height - 30
    for tick in range(6):
        x = _LEFT + tick / 5 * (_WIDTH - _LEFT - _RIGHT)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{base}" stroke="#bbb"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">'
            f"{span * tick / 5 * 1e3:.2f} ms</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _merged(boxes: list[tuple[float, float]], span: float, limit: int) -> list[tuple[float, float]]:
    """Join boxes closer than a gap that nobody could see, doubling it until few enough are left."""
    gap = span / 20000
    while True:
        joined: list[tuple[float, float]] = []
        for first, last in boxes:
            if joined and first - joined[-1][1] <= gap:
                joined[-1] = joined[-1][0], max(last, joined[-1][1])
            else:
                joined.append((first, last))
        if len(joined) <= limit:
            return joined
        gap *= 2
