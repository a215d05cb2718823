"""A picture of one training step: compute, copies and stalls over time, and the arena, as one SVG.

Input are rows as the engine's trace has them (`Engine.trace_stop`), best with the name of the layer
(`Recording`). The picture needs no script and no font of its own, and shows in any browser or
notebook; a box tells its layer and times to whoever points at it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..sizes import format_size
from .page import escape

_LANES = (
    ("compute", "managed layers", "#4c78a8"),
    ("stall", "stalls", "#e45756"),
    ("rest", "neither of the two", "#eeca3b"),
    ("h2d", "copies to the device", "#54a24b"),
    ("decode", "decodes of weights", "#ff9da6"),
    ("d2h", "copies to the host", "#b279a2"),
)
_LEGEND = {
    "compute": "a managed layer computes",
    "stall": "the device waits for a copy",
    "rest": "other operators compute, or the host has queued nothing",
    "h2d": "weights travel to the device",
    "decode": "coded weights are decoded",
    "d2h": "gradients travel to the host",
}
# None is like that of a lane.
_ARENA_COLOURS = ("#72b7b2", "#d8c8a8", "#9d755d", "#c9c5c1", "#f4b6a6", "#7d8a8c", "#c3e3e0")
_WIDTH, _LEFT, _RIGHT, _TOP = 1000, 170, 30, 84
STALL_FLOOR_S = 10e-6  # shorter waits are two events in a row, as the engine's own counter has it
_MOST_TICKS = 9
_LANE, _GAP, _BLOCKS, _ARENA = 34, 10, 18, 180
_DETAIL_BOXES = 80  # uses of layers that one detail shows: each is then wide enough to tell apart
_MOST_DETAILS = 24

Row = Mapping[str, Any]


class Stay(NamedTuple):
    """A unit's time in the arena: what it is, where it lay, and from when to when."""

    layer: str
    address: int
    nbytes: int
    begin_s: float
    end_s: float


def block_of(layer: str) -> str:
    """Return the block that a layer belongs to: its name up to the first number in it, or all.

    ``"transformer_blocks.3.attn.to_q"`` is of ``"transformer_blocks.3"``.
    """
    match = re.match(r"(?:[^.,]*\.)*?\d+(?=\.|,|$)", layer)
    return match[0] if match else layer


def what_to_look_at(rows: Sequence[Row]) -> str:
    """Return one sentence on where the time between the first row and the last went."""
    rows = _without_short_waits(rows)
    if not rows:
        return "Nothing was timed."
    begin, end = _extent(rows)
    span = end - begin

    def busy(kind: str) -> float:
        return sum(b - a for a, b in _union((r["start_s"], r["end_s"]) for r in _of(rows, kind)))

    stall, compute, link = busy("stall"), busy("compute"), busy("h2d")
    gaps = _rest(rows)
    rest = sum(row["end_s"] - row["start_s"] for row in gaps)
    link_share = f"copies keep the link busy for {_percent(link, span)} of the time"
    if rest > max(stall, 0.25 * span):
        worst, longest = _worst(gaps)
        return (
            f"Look at the yellow: for {_time(rest)} of {_time(span)} no managed layer computes "
            f"and no copy is waited for, longest {worst} ({_time(longest)}): other operators "
            f"compute, or the host has queued nothing; {link_share}."
        )
    if stall > 0.02 * span:
        worst, longest = _worst(_of(rows, "stall"))
        return (
            f"Look at the red: for {_time(stall)} of {_time(span)} the device waits for copies, "
            f"longest for {worst} ({_time(longest)}); {link_share}."
        )
    return (
        f"Look at the blue: managed layers compute for {_percent(compute, span)} of {_time(span)}, "
        f"and copies hide behind them; {link_share}."
    )


def timeline_svg(
    rows: Sequence[Row],
    title: str,
    *,
    stays: Sequence[Stay] = (),
    window: tuple[float, float] | None = None,
    span_s: float = 0.0,
    max_boxes: int = 4000,
) -> str:
    """Draw trace rows.

    Parameters
    ----------
    rows : sequence of mappings
        ``kind`` ("compute", "h2d", "d2h", "stall" or "decode"), ``unit``, ``start_s``, ``end_s``,
        ``bytes``; and ``layer``, where names are known.
    title : str
        Shown above; say there whether times are simulated.
    stays : sequence of Stay
        What lay in the arena; drawn below, where there is any.
    window : tuple of float, optional
        Begin and end of what is drawn, in the time of the rows; all of them by default.
    span_s : float
        Seconds that the axis has at least, so that pictures of several steps compare.
    max_boxes : int
        Neighbouring boxes of a lane are merged until no more than this many are left in it.

    Returns
    -------
    str
        The SVG document.
    """
    rows = _without_short_waits(rows)
    zero, end = _extent(rows)
    begin, end = window or (zero, end)
    sentence = what_to_look_at(_within(rows, begin, end))
    rows += _rest(rows)
    end = max(end, begin + span_s)
    span = max(end - begin, 1e-12)
    scale = (_WIDTH - _LEFT - _RIGHT) / span
    blocks = _blocks(rows, begin, end)
    rows = _within(rows, begin, end)
    stays = [stay for stay in stays if stay.end_s > begin and stay.begin_s < end]
    used = {row["kind"] for row in rows} | {"stall", "rest"}  # a step without is worth showing
    lanes = [lane for lane in _LANES if lane[0] in used]
    top = _TOP + (_BLOCKS if blocks else 0)
    below = top + len(lanes) * (_LANE + _GAP)
    floor = below + (_ARENA + _GAP if stays else 0)
    height = floor + 24 + 18 * len(lanes) + 18 * bool(stays) + 12

    def x(second: float) -> float:
        return _LEFT + (min(max(second, begin), end) - begin) * scale

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="24" font-size="15">{escape(title)}</text>',
    ]
    for number, line in enumerate(_wrapped(sentence, 140)):
        parts.append(f'<text x="8" y="{46 + 16 * number}">{escape(line)}</text>')
    parts += _block_marks(blocks, x, floor)
    for index, (kind, label, colour) in enumerate(lanes):
        y = top + index * (_LANE + _GAP)
        parts += _lane(_of(rows, kind), kind, label, colour, y, x, span, max_boxes)
    if stays:
        parts += _arena(stays, below, x, max_boxes)
    for second, told in _ticks(begin - zero, end - zero):
        at = x(second + zero)
        parts.append(f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{floor}" stroke="#bbb"/>')
        parts.append(f'<text x="{at:.1f}" y="{floor + 14}" text-anchor="middle">{told}</text>')
    y = floor + 36
    for kind, _, colour in lanes:
        parts += _legend(y, colour, _LEGEND[kind])
        y += 18
    if stays:
        parts += _legend(
            y, _ARENA_COLOURS[0], "weights in the arena, one colour for each block: height is bytes"
        )
    return "\n".join([*parts, "</svg>", ""])


def details(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return the windows that a step is cut into, so that its layers can be told apart in each."""
    begin, end = _extent(rows)
    uses = len(_of(rows, "compute"))
    count = min(_MOST_DETAILS, math.ceil(uses / _DETAIL_BOXES))
    if count < 2:
        return []
    cut = (end - begin) / count
    return [(begin + i * cut, begin + (i + 1) * cut) for i in range(count)]


# ---- parts of the picture ----


def _lane(
    rows: Sequence[Row],
    kind: str,
    label: str,
    colour: str,
    y: int,
    x: Any,
    span: float,
    max_boxes: int,
) -> list[str]:
    busy = sum(b - a for a, b in _union((row["start_s"], row["end_s"]) for row in rows))
    note = _time(busy)
    if kind in ("h2d", "d2h", "decode"):
        moved = sum(row["bytes"] for row in rows)
        note += f", {format_size(moved)}"
        if busy > 0:
            note += f", {moved / busy / 1e9:.1f} GB/s"
    parts = [
        f'<text x="8" y="{y + 15}">{label}</text>',
        f'<text x="8" y="{y + 30}" fill="#666" font-size="10.5">{note}</text>',
        f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_LANE}" '
        'fill="#f2f2f2"/>',
    ]
    ordered = sorted(rows, key=lambda row: float(row["start_s"]))
    for first, last, told in _merged(ordered, span, max_boxes):
        left, right = x(first), x(last)
        parts.append(
            f'<rect x="{left:.2f}" y="{y}" width="{max(right - left, 0.3):.2f}" '
            f'height="{_LANE}" fill="{colour}"><title>{escape(told)}</title></rect>'
        )
    return parts


def _blocks(rows: Sequence[Row], begin: float, end: float) -> list[tuple[str, float]]:
    """Return the blocks in the order in which they compute, and when each begins, or the picture.

    None where all layers are of one.
    """
    begun: list[tuple[str, float]] = []
    for row in sorted(_of(rows, "compute"), key=lambda row: float(row["start_s"])):
        name = block_of(str(row.get("layer") or ""))
        if name and (not begun or begun[-1][0] != name):
            begun.append((name, row["start_s"]))
    if len(begun) < 2:
        return []
    before = [(name, begin) for name, second in begun if second < begin][-1:]
    return before + [(name, second) for name, second in begun if begin <= second <= end]


def _block_marks(blocks: Sequence[tuple[str, float]], x: Any, floor: int) -> list[str]:
    """Draw where each block begins, and its name where there is room for it."""
    parts = []
    free = float(_LEFT)
    for name, second in blocks:
        at = x(second)
        told = f"<title>{escape(name)}</title>"
        parts.append(
            f'<line x1="{at:.2f}" y1="{_TOP + 4}" x2="{at:.2f}" y2="{floor}" stroke="#888" '
            f'stroke-width="0.5" stroke-dasharray="2 2">{told}</line>'
        )
        first = name.split(",")[0]  # of layers that travel together
        short = ".".join(part[:9] for part in first.rsplit(".", 2)[-2:]) if "." in first else first
        room = 6.2 * len(short) + 6
        if at >= free and at + room <= _WIDTH:
            parts.append(
                f'<text x="{at:.2f}" y="{_TOP + 12}" font-size="10" fill="#555">'
                f"{escape(short)}{told}</text>"
            )
            free = at + room
    return parts


def _arena(stays: Sequence[Stay], y: int, x: Any, max_boxes: int) -> list[str]:
    """Draw what lies in the arena: time to the right, addresses downwards, gaps between closed."""
    ranges = _union((stay.address, stay.address + stay.nbytes) for stay in stays)
    total = sum(last - first for first, last in ranges)

    def down(address: int) -> float:
        before = sum(max(0, min(last, address) - first) for first, last in ranges)
        return y + _ARENA * before / total

    names = list(dict.fromkeys(block_of(stay.layer) for stay in stays))
    colour = {name: _ARENA_COLOURS[i % len(_ARENA_COLOURS)] for i, name in enumerate(names)}
    parts = [
        f'<text x="8" y="{y + 15}">arena</text>',
        f'<text x="8" y="{y + 30}" fill="#666" font-size="10.5">{format_size(int(total))}</text>',
        f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ARENA}" '
        'fill="#f2f2f2"/>',
    ]
    largest = sorted(stays, key=lambda stay: (stay.begin_s - stay.end_s) * stay.nbytes)[:max_boxes]
    for stay in sorted(largest, key=lambda stay: (stay.begin_s, stay.address)):
        left, right = x(stay.begin_s), x(stay.end_s)
        upper, lower = down(stay.address), down(stay.address + stay.nbytes)
        told = f"{stay.layer}, {format_size(stay.nbytes)}"
        parts.append(
            f'<rect x="{left:.2f}" y="{upper:.2f}" width="{max(right - left, 0.3):.2f}" '
            f'height="{max(lower - upper, 0.3):.2f}" fill="{colour[block_of(stay.layer)]}" '
            f'stroke="white" stroke-width="0.3"><title>{escape(told)}</title></rect>'
        )
    return parts


def _legend(y: int, colour: str, text: str) -> list[str]:
    return [
        f'<rect x="{_LEFT}" y="{y - 10}" width="12" height="12" fill="{colour}"/>',
        f'<text x="{_LEFT + 20}" y="{y}">{text}</text>',
    ]


# ---- rows and times ----


def _without_short_waits(rows: Iterable[Row]) -> list[Row]:
    return [
        row
        for row in rows
        if row["kind"] != "stall" or row["end_s"] - row["start_s"] > STALL_FLOOR_S
    ]


def _rest(rows: Sequence[Row]) -> list[Row]:
    """Return the time in which no managed layer computes and no copy is waited for, as rows.

    Each is named after the layer that follows it.
    """
    done, end = _extent(rows)
    taken = [row for row in rows if row["kind"] in ("compute", "stall")]
    gaps: list[Row] = []
    for row in [*sorted(taken, key=lambda row: float(row["start_s"])), None]:
        until = end if row is None else row["start_s"]
        if until - done > STALL_FLOOR_S:
            place = "at the end" if row is None else f"before {_name(row)}"
            gaps.append(
                {"kind": "rest", "unit": -1, "start_s": done, "end_s": until, "layer": place}
            )
        done = until if row is None else max(done, row["end_s"])
    return gaps


def _within(rows: Iterable[Row], begin: float, end: float) -> list[Row]:
    return [row for row in rows if row["end_s"] >= begin and row["start_s"] <= end]


def _worst(rows: Iterable[Row]) -> tuple[str, float]:
    """Return the name with the most seconds, and these; of layers that travel together, one."""
    sums: dict[str, float] = {}
    for row in rows:
        sums[_name(row)] = sums.get(_name(row), 0.0) + row["end_s"] - row["start_s"]
    worst, seconds = max(sums.items(), key=lambda item: item[1])
    first, *others = worst.split(", ")
    return first + (f" +{len(others)}" if others else ""), seconds


def _name(row: Row) -> str:
    return str(row.get("layer") or (f"unit {row['unit']}" if row["unit"] >= 0 else row["kind"]))


def _of(rows: Iterable[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _extent(rows: Sequence[Row]) -> tuple[float, float]:
    begin = min((row["start_s"] for row in rows), default=0.0)
    return begin, max((row["end_s"] for row in rows), default=begin)


def _union(pairs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same without overlaps, in order."""
    joined: list[tuple[float, float]] = []
    for first, last in sorted(pairs):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined


def _merged(rows: Sequence[Row], span: float, limit: int) -> list[tuple[float, float, str]]:
    """Join boxes closer than a gap that nobody could see, doubling it until few enough are left.

    As long as there are few enough, each row keeps a box of its own.
    """
    boxes = [(float(row["start_s"]), float(row["end_s"]), 1, _told(row)) for row in rows]
    gap = span / 20000
    while len(boxes) > limit:
        joined: list[tuple[float, float, int, str]] = []
        for first, last, count, told in boxes:
            if joined and first - joined[-1][1] <= gap:
                count += joined[-1][2]
                end = max(last, joined[-1][1])
                joined[-1] = joined[-1][0], end, count, f"{count} together"
            else:
                joined.append((first, last, count, told))
        boxes = joined
        gap *= 2
    return [(first, last, told) for first, last, _, told in boxes]


def _told(row: Row) -> str:
    size = f", {format_size(row['bytes'])}" if row["kind"] in ("h2d", "d2h", "decode") else ""
    use = f", {row['use']}" if row.get("use") else ""
    return f"{_name(row)}{use}, {_time(row['end_s'] - row['start_s'])}{size}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return (
        f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 or not seconds else f"{seconds * 1e6:.1f} us"
    )


def _ticks(begin: float, end: float) -> list[tuple[float, str]]:
    """Return the round times from `begin` to `end`, and how each is written."""
    power = 10.0 ** math.floor(math.log10(max(end - begin, 1e-12) / _MOST_TICKS))
    step = next(
        power * digit for digit in (1, 2, 5, 10) if power * digit * _MOST_TICKS > end - begin
    )
    unit, each = ("s", 1.0) if end >= 10 else ("ms", 1e-3) if end >= 1e-3 else ("us", 1e-6)
    first, last = math.ceil(begin / step - 1e-6), math.floor(end / step + 1e-6)
    return [(i * step, f"{round(i * step / each, 6):g} {unit}") for i in range(first, last + 1)]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole > 0 else "0%"


def _wrapped(text: str, width: int) -> list[str]:
    from textwrap import wrap

    return wrap(text, width)
