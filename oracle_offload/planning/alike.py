"""Blocks that are alike: of a row of them a step runs five, and the others are derived from those.

A model of 57 blocks computes the same in each but for its weights. So a step is run with the first
three of such a row, one of its middle and its last; what the third and the middle one ask for and
keep is compared, use by use and byte by byte, and represents all between the second and the last.
Where the two differ nothing is derived from them: the whole model is run.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._core import FORWARD

_FEWEST = 7  # of a shorter row hardly any would be left out
_PLAIN = (bool, int, float, str, tuple, type(None))


class Memory(NamedTuple):
    """What became of bytes since the last mark, without those that lived then.

    Attributes
    ----------
    high, low, delta : int
        Most and least that lived since, and those that live at the end.
    """

    high: int
    low: int
    delta: int


class Mark(NamedTuple):
    """An event of a step, and what became of memory since the one before.

    Attributes
    ----------
    event : tuple
        See `oracle_offload.planning.measure.Step.events`; ``("stage",)`` where a stage ends.
    region : hashable
        Of the checkpointed region whose forward asks for a leaf; 0 elsewhere.
    memory : Memory
        Of all.
    staying : Memory
        Of the same less what `oracle_offload.train.offload_activations` would have let leave.
    largest : int
        Bytes of the largest that would have left since.
    """

    event: tuple[Any, ...]
    region: Hashable
    memory: Memory
    staying: Memory
    largest: int


@dataclass(frozen=True)
class Row:
    """Blocks of one list that are alike.

    Attributes
    ----------
    name : str
        Of the list.
    blocks : nn.ModuleList
        The list itself.
    begin, end : int
        The blocks that are alike, by their places in it.
    """

    name: str
    blocks: nn.ModuleList
    begin: int
    end: int

    @property
    def run(self) -> tuple[int, int, int, int, int]:
        """The places of those that are run for all."""
        # What is below the first may need no gradient, and backward ends in the first or before it.
        begin, end = self.begin, self.end
        return begin, begin + 1, begin + 2, (begin + end + 2) // 2, end - 1

    @property
    def kept(self) -> list[int]:
        """The places of all blocks that are run, those outside of the row included."""
        outside = (n for n in range(len(self.blocks)) if not self.begin <= n < self.end)
        return sorted({*outside, *self.run})

    def name_of(self, place: int, rest: str) -> str:
        """Return the name of what a block holds under `rest`."""
        return f"{self.name}.{place}.{rest}".rstrip(".")


def rows_of(module: nn.Module, managed: Iterable[str], adapters: dict[str, Any]) -> list[Row]:
    """Return the rows of alike blocks in `module`, at most one of each list.

    Parameters
    ----------
    module : nn.Module
    managed : iterable of str
        Names of the leaves that an engine is asked for.
    adapters : dict
        What is added to layers, by their names.
    """
    names = set(managed)
    users = Counter(id(tensor) for inner in module.modules() for tensor in _own(inner))
    found: list[Row] = []
    for name, inner in module.named_modules():
        inside = any(name.startswith(f"{row.name}.") for row in found)
        if inside or type(inner) is not nn.ModuleList or len(inner) < _FEWEST:
            continue
        row = _longest(Row(name, inner, 0, len(inner)), names, adapters)
        shares = any(users[id(tensor)] > 1 for block in inner for tensor in block.parameters())
        if row.end - row.begin >= _FEWEST and not shares:
            found.append(row)
    return found


def _longest(whole: Row, managed: set[str], adapters: dict[str, Any]) -> Row:
    """Return the longest part of a list whose blocks are all like its first."""
    best, begin = Row(whole.name, whole.blocks, 0, 0), 0
    for place in range(1, len(whole.blocks) + 1):
        if place < len(whole.blocks) and _alike(whole, begin, place, managed, adapters):
            continue
        if place - begin > best.end - best.begin:
            best = Row(whole.name, whole.blocks, begin, place)
        begin = place
    return best


def _alike(row: Row, one: int, other: int, managed: set[str], adapters: dict[str, Any]) -> bool:
    """Whether two blocks differ in nothing but the values of tensors, and their own places."""
    first, second = row.blocks[one], row.blocks[other]
    parts, others = list(first.named_modules()), list(second.named_modules())
    if len(parts) != len(others):
        return False
    for (rest, a), (also, b) in zip(parts, others, strict=True):
        names = row.name_of(one, rest), row.name_of(other, also)
        if rest != also or type(a) is not type(b) or _shapes(a) != _shapes(b):
            return False
        if (names[0] in managed) != (names[1] in managed):
            return False
        if adapters.get(names[0]) != adapters.get(names[1]):
            return False
        values, same = vars(a), vars(b)
        if values.keys() != same.keys():
            return False
        for key, value in values.items():
            beside = same[key]
            if type(value) is not type(beside):
                return False
            if isinstance(value, _PLAIN) and value != beside:
                is_place = isinstance(value, int) and beside - value == other - one
                if not is_place:
                    return False
    return True


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in module._parameters.values() if tensor is not None)


def _shapes(module: nn.Module) -> list[Any]:
    tensors = {**module._parameters, **module._buffers}
    return [
        (name, *(() if t is None else (t.shape, t.stride(), t.dtype, t.requires_grad)))
        for name, t in tensors.items()
    ]


@contextlib.contextmanager
def shortened(rows: Sequence[Row]) -> Iterator[Callable[[str], str | None]]:
    """Leave in each list the blocks that are run; the lists are whole again behind it.

    Yields what turns a name of the whole model into that of the shorter one; None where it is of a
    block that is left out.
    """
    whole = [(vars(row.blocks), row.blocks._modules) for row in rows]
    try:
        for row, (own, modules) in zip(rows, whole, strict=True):
            blocks = list(modules.values())
            own["_modules"] = {str(n): blocks[place] for n, place in enumerate(row.kept)}
        yield lambda name: _renamed(rows, name)
    finally:
        for own, modules in whole:
            own["_modules"] = modules


def _renamed(rows: Sequence[Row], name: str) -> str | None:
    for row in rows:
        if name.startswith(f"{row.name}."):
            place, _, rest = name.removeprefix(f"{row.name}.").partition(".")
            if int(place) not in row.kept:
                return None
            return row.name_of(row.kept.index(int(place)), rest)
    return name


# ---- what the blocks that were run say of the others ----


def told(marks: Sequence[Mark], rows: Sequence[Row], numbers: dict[str, int]) -> list[Mark] | None:
    """Return the marks of the whole model; None where blocks that look alike are not.

    Parameters
    ----------
    marks : sequence of Mark
        Of a step with the blocks of `Row.kept`; leaves are numbered as in the whole model.
    rows : sequence of Row
    numbers : dict of str to int
        The leaves of the whole model, by name.
    """
    found: list[Mark] | None = list(marks)
    for row in rows:
        found = _told(found, row, numbers) if found is not None else None
    return found


class _Part(NamedTuple):
    """Where one block computes, and then another; the places of those that are like them."""

    marks: list[int]  # where the one begins, the other, and what is behind both
    places: range
    one: int
    other: int


def _told(marks: Sequence[Mark], row: Row, numbers: dict[str, int]) -> list[Mark] | None:
    names = {number: name for name, number in numbers.items()}
    blocks: dict[int, tuple[int, str]] = {}  # by leaf: its block, and its name in it
    for number, name in names.items():
        if name.startswith(f"{row.name}."):
            block, _, rest = name.removeprefix(f"{row.name}.").partition(".")
            if row.begin <= int(block) < row.end:
                blocks[number] = int(block), rest
    asked = [
        (at, blocks[mark.event[1]][0], mark.event[2] == FORWARD)
        for at, mark in enumerate(marks)
        if mark.event[0] == "acquire" and mark.event[1] in blocks
    ]
    _, second, third, middle, last = row.run

    def begins(is_forward: bool, *places: int) -> list[int]:
        found = ((at for at, block, f in asked if (block, f) == (p, is_forward)) for p in places)
        return [next(ats, -1) for ats in found]

    forward = begins(True, third, middle, last)
    backward = begins(False, middle, third, second)
    if -1 in forward:
        return None
    parts = [_Part(forward, range(third, last), third, middle)]
    if backward != [-1] * 3:
        if -1 in backward:
            return None
        parts.append(_Part(backward, range(last - 1, second, -1), middle, third))
    ends = [at for part in parts for at in part.marks]
    inner = [at for at, block, _ in asked if block in (third, middle)]
    spans = [range(part.marks[0], part.marks[2]) for part in parts]
    if ends != sorted(ends) or not all(any(at in span for span in spans) for at in inner):
        return None  # not one after the other, or a block computes again elsewhere
    found: list[Mark] = []
    done = 0
    for (begin, turn, end), places, one, other in parts:
        period, beside = marks[begin:turn], marks[turn:end]
        outside = {mark.region for mark in (*marks[:begin], *marks[turn:])} - {0}
        if _form(period, blocks, one) != _form(beside, blocks, other):
            return None
        if outside & {mark.region for mark in period}:
            return None  # a checkpointed region of several blocks
        found += marks[done:begin]
        for place in places:
            found += _copied(period, row, blocks, numbers, place)
        done = end
    return [*found, *marks[done:]]


def _form(marks: Sequence[Mark], blocks: dict[int, tuple[int, str]], place: int) -> list[Any]:
    """Return what is compared of two blocks: numbers by first appearance, names in the block."""
    tickets: dict[Hashable, int] = {}
    regions: dict[Hashable, int] = {0: 0}
    found: list[Any] = []
    for event, region, *memory in marks:
        row: tuple[Any, ...] = event
        if event[0] == "acquire":
            block, rest = blocks.get(event[1], (None, event[1]))
            if block is not None and block != place:
                return [None, place]  # blocks compute in turns
            ticket = tickets.setdefault(event[3], len(tickets))
            row = ("acquire", block is None, rest, event[2], ticket)
        elif event[0] == "release":
            if event[1] not in tickets:
                return [None, place]  # of a use that began elsewhere
            row = ("release", tickets[event[1]])
        found.append((row, regions.setdefault(region, len(regions)), *memory))
    return found


def _copied(
    marks: Sequence[Mark],
    row: Row,
    blocks: dict[int, tuple[int, str]],
    numbers: dict[str, int],
    place: int,
) -> Iterator[Mark]:
    """Yield the marks of one block as those of another."""
    for mark in marks:
        event = mark.event
        if event[0] == "acquire":
            leaf = event[1]
            if leaf in blocks:
                leaf = numbers[row.name_of(place, blocks[leaf][1])]
            event = ("acquire", leaf, event[2], (row.name, place, event[3]))
        elif event[0] == "release":
            event = ("release", (row.name, place, event[1]))
        region = (row.name, place, mark.region) if mark.region else 0
        yield mark._replace(event=event, region=region)
