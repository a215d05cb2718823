"""Who held a GPU's memory when it ran out, from torch's memory snapshot: text, JSON, a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..host.schema import schema
from ..host.sizes import format_size
from ..host.terminal import WIDEST, Text, printable
from .bars import Part, text_bar
from .memory import show_size
from .page import page
from .sections import Section, render

SCHEMA = schema("memory-holders", 1)
_MOST_SHOWN = 20
_KINDS = {  # of `oracle_offload.observe.snapshot_file`, as parts of a bar
    "arena": "arena",
    "weights": "weights",
    "gradients": "gradients",
    "optimizer state": "optimizer state",
}


@dataclass(frozen=True)
class SnapshotReport:
    """Who held the bytes.

    Attributes
    ----------
    name : str
        The file.
    held : dict
        What `snapshot_file.held` returns.
    """

    name: str
    held: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data with a ``"schema"``."""
        return {"schema": SCHEMA, "file": self.name, **self.held}

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_text(self, *, width: int = WIDEST, color: bool = False) -> str:
        """Return the report for a terminal."""
        text = Text(width, color=color)
        for number, sentence in enumerate(sentences(self.held)):
            text.block(sentence, style="" if number else "bold")
        text.line()
        for line in text_bar(_parts(self.held), text.width, show_size):
            text.line(line)
        for title, rows in tables(self.held):
            text.line()
            text.line(title)
            room = text.width - 2 - 12 - 9
            for who, size, blocks in rows:
                name = who if len(who) <= room - 1 else f"{who[: room - 4]}..."
                text.line(f"  {name:<{room}}{size:>12}{blocks:>9}".rstrip())
        return str(text)

    def to_html(self) -> str:
        """Return one self-contained page without scripts."""
        return page(self.name, render("snapshot", sections(self.held)))


def sentences(held: Mapping[str, Any]) -> list[str]:
    """Return what ran out and what was cached, as sentences."""
    asked, free, cached = held["asked_bytes"], held["free_bytes"], held["cached_bytes"]
    found = []
    if asked is not None:
        found.append(
            f"{held['device']} ran out of memory: {show_size(asked)} were asked for, "
            f"{show_size(free)} were free, tensors held {show_size(held['held_bytes'])}."
        )
    else:
        found.append(f"On {held['device']} tensors held {show_size(held['held_bytes'])}.")
    if asked is not None and held["largest_cached_bytes"] < asked <= cached:
        found.append(
            f"{show_size(cached)} were cached, in pieces of at most "
            f"{show_size(held['largest_cached_bytes'])}: enough, but too small."
        )
    if held["holders_at_peak"]:
        found.append(
            f"At the peak, earlier, tensors had asked for {show_size(held['peak_bytes'])}."
        )
    return found


def tables(held: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return titles and rows (who, bytes, blocks) of who held the memory."""
    found = []
    for title, key in (
        ("who held the bytes", "holders"),
        ("who had asked for the bytes at the peak", "holders_at_peak"),
        ("what was in the arena", "arena"),
    ):
        if held[key]:
            found.append((title, _rows(held[key])))
    return found


def sections(held: Mapping[str, Any]) -> list[Section]:
    """Return the report as parts of a page."""
    said = [("why" if number else "verdict", text) for number, text in enumerate(sentences(held))]
    found = [Section(says=said, bar=_parts(held))]
    for title, rows in tables(held):
        head = ("", "bytes", "blocks")
        found.append(Section(title, head=head, rows=rows, numbers=True))
    return found


def _rows(holders: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    rows = [
        (
            printable(f"{row['kind']}: {row['who']}" if "kind" in row else row["who"]),
            format_size(row["bytes"]),
            str(row.get("blocks", "")),
        )
        for row in holders[:_MOST_SHOWN]
    ]
    if rest := holders[_MOST_SHOWN:]:
        blocks = sum(row.get("blocks", 0) for row in rest)
        size = format_size(sum(row["bytes"] for row in rest))
        rows.append((f"{len(rest)} more", size, str(blocks or "")))
    return rows


def _parts(held: Mapping[str, Any]) -> list[Part]:
    """Return the bar of what torch reserved, and of what was free apart from that."""
    sums: dict[str, int] = {}
    for row in held["holders"]:
        name = _KINDS.get(row["kind"], "other tensors")
        sums[name] = sums.get(name, 0) + row["bytes"]
    rest = held["reserved_bytes"] - held["held_bytes"] - held["cached_bytes"]
    order = (*_KINDS.values(), "other tensors")
    parts: list[Part] = [(name, sums[name]) for name in order if name in sums]
    parts.append(("cached", held["cached_bytes"] + max(0, rest)))
    if held["free_bytes"] is not None:
        parts.append(("free", held["free_bytes"]))
    return parts
