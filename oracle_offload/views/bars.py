"""A bar of who holds memory: one line of characters or of colours, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .page import escape
from .terminal import printable

_WIDEST = 32
Part = tuple[str, int | None]  # a name of `LOOKS`, and bytes; None is unknown

_UNKNOWN = ("?", "#777")  # of a part that a later version names

LOOKS = {  # the character and the colour of each part
    "tensors": ("#", "#2f6db5"),
    "weights": ("#", "#2f6db5"),
    "other tensors": ("t", "#3a9188"),
    "gradients": ("g", "#b279a2"),
    "optimizer state": ("o", "#d1913c"),
    "activations": ("a", "#3a9188"),
    "not told apart": ("?", "#6b7d8c"),
    "arena": ("A", "#12477f"),
    "page-locked": ("L", "#12477f"),
    "pageable": ("P", "#2f6db5"),
    "cached": ("+", "#8fb8e8"),
    "page cache": ("+", "#8fb8e8"),
    "other processes": ("@", "#b5522f"),
    "outside": ("=", "#8c8c8c"),
    "everything else": ("=", "#8c8c8c"),
    "free": (".", "#4d9a5f"),
}


def text_bar(parts: Sequence[Part], width: int, show: Callable[[int | None], str]) -> list[str]:
    """Return the bar as lines of `width` columns: characters, and below what they stand for.

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
        line += _look(name)[0] * (round(cells * used / total) - len(line))
    rows = [""]
    for name, size in parts:
        item = f"{_look(name)[0]} {_named(name)} {show(size)}"
        joined = f"{rows[-1]}  {item}" if rows[-1] else f"   {item}"
        if len(joined) <= width:
            rows[-1] = joined
        else:
            rows.append(f"   {item}")
    return [f"  [{line}]", *rows]


def _look(name: str) -> tuple[str, str]:
    return LOOKS.get(name, _UNKNOWN)


def _named(name: str) -> str:
    return name if name in LOOKS else f"unknown ({printable(name)[:_WIDEST]})"


def html_bar(parts: Sequence[Part], show: Callable[[int | None], str]) -> list[str]:
    """Return the bar as HTML; nothing where nothing is known."""
    total = sum(size or 0 for _, size in parts)
    if not total:
        return []
    cells = "".join(
        f'<div style="width:{100 * size / total:.2f}%;background:{_look(name)[1]}" '
        f'title="{escape(_named(name))} {show(size)}"></div>'
        for name, size in parts
        if size is not None
    )
    keys = "".join(
        f'<span class="part"><span class="key" style="background:{_look(name)[1]}"></span>'
        f"{escape(_named(name))} {show(size)}</span>"
        for name, size in parts
    )
    return [f'<div class="bar">{cells}</div>', f"<p>{keys}</p>"]
