"""A picture of one training step: compute, copies and stalls over time, and the arena, as one SVG.

Input are rows as the engine's trace has them (`Engine.trace_stop`), best with the name of the layer
(`Recording`). The picture needs no script and no font of its own, and shows in any browser or
notebook; a box shows its layer and times when the mouse is over it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from ..host.sizes import format_size
from ..host.terminal import printable
from .page import escape
from .palette import COLOURS, themed

# The kind of the rows, which names their colour, too; and the words above their lane.
_LANES = (
    ("compute", "managed layers compute"),
    ("stall", "stalls: the device waits for a copy"),
    ("rest", "neither: other operators, or nothing queued"),
    ("h2d", "copies to the device: weights"),
    ("decode", "decodes of weights"),
    ("d2h", "copies to the host: gradients"),
)
_ARENA_LABEL = "arena: weights, a colour for each block, height is bytes"
_BLOCK_COLOURS = tuple(name for name in COLOURS if name.startswith("arena-"))
_STYLE = (
    themed([".oo-step"], ["ground", "ink", "faint", *(kind for kind, _ in _LANES), *_BLOCK_COLOURS])
    + "".join(
        f".oo-step .oo-{name}{{fill:var(--oo-{name})}}"
        for name in ("ground", "ink", "faint", *(kind for kind, _ in _LANES), *_BLOCK_COLOURS)
    )
    + (
        ".oo-step line{stroke:var(--oo-faint)}"
        ".oo-step text{paint-order:stroke;stroke:var(--oo-ground);stroke-width:3px}"
        ".oo-step .oo-arena rect{stroke:var(--oo-ground)}"
        "@media (max-width:700px){.oo-fluid .oo-wide{display:none}}"
        "@media (min-width:700.1px){.oo-fluid .oo-narrow{display:none}}"
    )
)
_WIDTH, _NARROW = 1000, 440  # pixels that names of blocks and times are laid out for
_LANE, _LABEL, _GAP, _BLOCKS, _ARENA = 28, 18, 8, 18, 180
_NEAREST = 24  # pixels between two lines
_THINNEST = 0.3 / _WIDTH
STALL_FLOOR_S = 10e-6  # shorter waits are two events in a row, as the engine's own counter has it
_TICK_PIXELS = 110  # that a time has at least
_DETAIL_BOXES = 80  # uses of layers that one detail shows: each is then wide enough to tell apart
_MOST_DETAILS = 24

Row = Mapping[str, Any]


class Stay(NamedTuple):
    """A unit's time in the arena: what it is, where it was, and from when to when."""

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
            f"Look at the orange: for {_time(rest)} of {_time(span)} no managed layer computes "
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
    fluid: bool = False,
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
        What was in the arena; drawn below, where there is any.
    window : tuple of float, optional
        Begin and end of what is drawn, in the time of the rows; all of them by default.
    span_s : float
        Seconds that the axis has at least, so that pictures of several steps compare.
    max_boxes : int
        Neighbouring boxes of a lane are merged until no more than this many are left in it.
    fluid : bool
        Part of a page: as wide as its place, and its words stay as large as they are. Otherwise a
        file of its own, which is scaled as a whole.

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
    blocks = _blocks(rows, begin, end)
    rows = _within(rows, begin, end)
    stays = [stay for stay in stays if stay.end_s > begin and stay.begin_s < end]
    used = {row["kind"] for row in rows} | {"stall", "rest"}  # a step without is worth showing

    def x(second: float) -> float:
        """Return where a time is, as a share of the width."""
        return (min(max(second, begin), end) - begin) / span

    y, parts = 0, []
    for words, size, width in ((title, 15, 54), (sentence, 12, 64)):
        for line in wrap(printable(words), width):
            y += size + 5
            parts.append(f'<text y="{y}" font-size="{size}">{escape(line)}</text>')
    top = y + 10 + (_BLOCKS if blocks else 0)
    lanes, y = [], top
    for kind, label in _LANES:
        if kind in used:
            lanes += _lane(_of(rows, kind), kind, label, y, x, span, max_boxes)
            y += _LABEL + _LANE + _GAP
    if stays:
        lanes += _arena(stays, y, x, max_boxes)
        y += _LABEL + _ARENA + _GAP
    for kind, width in (("wide", _WIDTH), ("narrow", _NARROW))[: 1 + fluid]:
        parts.append(f'<g class="oo-{kind}">')
        parts += _block_marks(blocks, x, top, y, width)
        for second, told in _ticks(begin - zero, end - zero, width // _TICK_PIXELS):
            at = x(second + zero)
            anchor = "start" if at < 0.04 else "end" if at > 0.96 else "middle"
            parts.append(_line(at, top, y))
            parts.append(f'<text x="{at:.3%}" y="{y + 14}" text-anchor="{anchor}">{told}</text>')
        parts.append("</g>")
    height = y + 24
    way = (
        'class="oo-step oo-fluid"'
        if fluid
        else f'class="oo-step" style="max-width:100%;height:auto" viewBox="0 0 {_WIDTH} {height}"'
    )
    ink, ground = COLOURS["ink"][0], COLOURS["ground"][0]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {way} width="{_WIDTH}" height="{height}" '
            'font-family="sans-serif" font-size="12">',
            f"<style>{_STYLE}</style>",
            f'<rect class="oo-ground" width="100%" height="{height}" fill="{ground}"/>',
            f'<g class="oo-ink" fill="{ink}">',
            *parts,
            "</g>",
            *lanes,
            "</svg>",
            "",
        ]
    )


def details(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return the windows that a step is cut into, so that its layers are distinct in each."""
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
    y: int,
    x: Callable[[float], float],
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
    parts = [*_words(y, label, note), _group(kind, kind)]
    ordered = sorted(rows, key=lambda row: float(row["start_s"]))
    for first, last, told in _merged(ordered, span, max_boxes):
        parts.append(_box(x(first), x(last), y + _LABEL, _LANE, told))
    return [*parts, "</g>"]


def _words(y: float, label: str, note: str) -> list[str]:
    """Return the words above a lane: what it shows, and how much."""
    ink, faint = (COLOURS[name][0] for name in ("ink", "faint"))
    return [
        f'<text class="oo-ink" fill="{ink}" y="{y + 13}">{label}</text>',
        f'<text class="oo-faint" fill="{faint}" x="100%" y="{y + 13}" text-anchor="end">'
        f"{note}</text>",
    ]


def _group(name: str, colour: str) -> str:
    """Return what begins boxes of one colour; who knows no variables shows the light one."""
    return f'<g class="oo-{name}" fill="{COLOURS[colour][0]}">'


def _box(left: float, right: float, y: float, height: float, told: str) -> str:
    return (
        f'<rect x="{left:.3%}" y="{y:.5g}" width="{max(right - left, _THINNEST):.3%}" '
        f'height="{height:.5g}"><title>{escape(told)}</title></rect>'
    )


def _line(at: float, y1: float, y2: float, look: str = "") -> str:
    colour = COLOURS["faint"][0]
    return (
        f'<line x1="{at:.3%}" y1="{y1}" x2="{at:.3%}" y2="{y2}" stroke="{colour}" '
        f'stroke-opacity="0.4"{look}/>'
    )


def blocks_within(rows: Sequence[Row], window: tuple[float, float]) -> str:
    """Return what computes in a window: its first block and its last; "" where names are none."""
    names = [name for name, _ in _blocks(_without_short_waits(rows), *window)]
    return " to ".join(dict.fromkeys(name.split(",")[0] for name in (names[:1] + names[-1:])))


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


def _block_marks(
    blocks: Sequence[tuple[str, float]],
    x: Callable[[float], float],
    top: int,
    floor: int,
    width: int,
) -> list[str]:
    """Draw where blocks begin: a name where there is room for one, a line where it can be seen."""
    parts = []
    free, clear = 0.0, 0.0
    for name, second in blocks:
        at = x(second)
        first = name.split(",")[0]  # of layers that travel together
        short = ".".join(part[:9] for part in first.rsplit(".", 2)[-2:]) if "." in first else first
        room = 6.2 * len(short) + 6
        told = f"<title>{escape(name)}</title>"
        is_named = free <= at * width <= width - room
        if is_named:
            parts.append(
                f'<text x="{at:.3%}" y="{top - 6}" font-size="10">{escape(short)}{told}</text>'
            )
            free = at * width + room
        if is_named or at * width >= clear:
            parts.append(_line(at, top - _BLOCKS + 2, floor, ' stroke-dasharray="2 2"'))
            clear = at * width + _NEAREST
    return parts


def _arena(stays: Sequence[Stay], y: int, x: Callable[[float], float], max_boxes: int) -> list[str]:
    """Draw what is in the arena: time to the right, addresses downwards, gaps between closed."""
    ranges = _union((stay.address, stay.address + stay.nbytes) for stay in stays)
    total = sum(last - first for first, last in ranges)

    def down(address: int) -> float:
        before = sum(max(0, min(last, address) - first) for first, last in ranges)
        return y + _LABEL + _ARENA * before / total

    parts = [
        *_words(y, _ARENA_LABEL, format_size(int(total))),
        '<g class="oo-arena" stroke="#fff">',
    ]
    largest = sorted(stays, key=lambda stay: (stay.begin_s - stay.end_s) * stay.nbytes)[:max_boxes]
    names = dict.fromkeys(block_of(stay.layer) for stay in stays)
    for number, name in enumerate(names):
        mine = [stay for stay in largest if block_of(stay.layer) == name]
        colour = _BLOCK_COLOURS[number % len(_BLOCK_COLOURS)]
        parts += [_group(colour, colour)] if mine else []
        for stay in sorted(mine, key=lambda stay: (stay.begin_s, stay.address)):
            upper, lower = down(stay.address), down(stay.address + stay.nbytes)
            told = f"{stay.layer}, {format_size(stay.nbytes)}"
            parts.append(_box(x(stay.begin_s), x(stay.end_s), upper, max(lower - upper, 0.3), told))
        parts += ["</g>"] if mine else []
    return [*parts, "</g>"]


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
    """Join boxes closer than a gap too small to see, doubling it until few enough are left.

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


def _ticks(begin: float, end: float, most: int) -> list[tuple[float, str]]:
    """Return the round times from `begin` to `end`, and how each is written."""
    unit, each = ("s", 1.0) if end >= 10 else ("ms", 1e-3) if end >= 1e-3 else ("us", 1e-6)
    return [(at, f"{round(at / each, 6):g} {unit}") for at in round_steps(begin, end, most)]


def round_steps(begin: float, end: float, most: int) -> list[float]:
    """Return the multiples of 1, 2 or 5 times a power of ten within two numbers, `most` or fewer.

    Where `begin` itself is one, there may be one more.
    """
    power = 10.0 ** math.floor(math.log10(max(end - begin, 1e-12) / most))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit * most > end - begin)
    first, last = math.ceil(begin / step - 1e-6), math.floor(end / step + 1e-6)
    return [i * step for i in range(first, last + 1)]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole > 0 else "0%"
