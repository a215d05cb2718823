"""A bar of what holds memory: one line of characters or of colours, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..host.terminal import printable
from .page import escape

_WIDEST = 32
Part = tuple[str, int | None]  # a name of `LOOKS`, and bytes; None is unknown

LOOKS = {  # the character of each part; its colour is that of its name
    "tensors": "#",
    "weights": "#",
    "other tensors": "t",
    "gradients": "g",
    "optimizer state": "o",
    "activations": "a",
    "not distinguished": "?",
    "arena": "A",
    "page-locked": "L",
    "pageable": "P",
    "cached": "+",
    "page cache": "+",
    "other processes": "@",
    "outside": "=",
    "everything else": "=",
    "free": ".",
}
_UNKNOWN = "?"  # of a part that a later version names


def text_bar(parts: Sequence[Part], width: int, show: Callable[[int | None], str]) -> list[str]:
    """Return the bar as lines of `width` columns: characters, and below what they mean.

    Parameters
    ----------
    parts : sequence of (str, int or None)
        What is unknown takes no room, but is named.
    width : int
        Columns.
    show : callable
        Returns bytes, or None, as people write them.
    """
    total = sum(size or 0 for _, size in parts) or 1
    cells = width - 6
    line, used = "", 0
    for name, size in parts:
        used += size or 0
        line += LOOKS.get(name, _UNKNOWN) * (round(cells * used / total) - len(line))
    rows = [""]
    for name, size in parts:
        item = f"{LOOKS.get(name, _UNKNOWN)} {_named(name)} {show(size)}"
        joined = f"{rows[-1]}  {item}" if rows[-1] else f"   {item}"
        if len(joined) <= width:
            rows[-1] = joined
        else:
            rows.append(f"   {item}")
    return [f"  [{line}]", *rows]


def colour_of(name: str) -> str:
    """Return the palette's name of a part's colour; what is free has none, it is left empty."""
    if name not in LOOKS:
        return "unknown"
    return "" if name == "free" else name.replace(" ", "-")


def _filled(name: str) -> str:
    colour = colour_of(name)
    return f"background:var(--oo-{colour})" if colour else ""


def _named(name: str) -> str:
    return name if name in LOOKS else f"unknown ({printable(name)[:_WIDEST]})"


def html_bar(parts: Sequence[Part], show: Callable[[int | None], str]) -> list[str]:
    """Return the bar as HTML; nothing where nothing is known."""
    total = sum(size or 0 for _, size in parts)
    if not total:
        return []
    cells = "".join(
        f'<div style="width:{100 * size / total:.2f}%;{_filled(name)}" '
        f'title="{escape(_named(name))} {show(size)}"></div>'
        for name, size in parts
        if size  # nothing has no width, but would have a gap
    )
    keys = "".join(
        f'<span class="part"><span class="key" style="{_filled(name)}"></span>'
        f"{escape(_named(name))} {show(size)}</span>"
        for name, size in parts
    )
    return [f'<div class="bar">{cells}</div>', f"<p>{keys}</p>"]
