"""Weights that stay in their files: `attach` with ``disk=True``.

What is frozen, and in one file as the model has it, needs no memory of its own, and `attach` reads
nothing of it. What `ram_budget` has room for is kept in memory once its first use has read it; the
rest is read from its file each time it travels. The arena keeps the ends of the model from forward
to backward and from step to step, so that these travel once a step and what is between them twice:
of that some is in memory, spread evenly, so that the disk has as much to read at any time. Of M
bytes with R in memory and an arena of C, a step so reads 2 (M - R - C), the least. Where R + 2 C
exceeds M, the arena would keep some of what is in memory too: as much of the ends stays on the
device for good, and the arena is smaller by it.

A model that samples alone has no ends: there memory has the largest units, since what is read has
its place in the arena all the while, and the smaller it is, the more stays there.
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from .._core import HostBuffer
from ..engine.geometry import aligned, tensor_bytes, unit_bytes
from ..errors import OffloadError
from ..host.disk import remote_kind
from ..host.sizes import KIB, MIB, format_size
from . import masters
from .budget import AUTO, Budget
from .kept import Kept, distinct, host_limit, keep, spread
from .selection import Unit, listed

if TYPE_CHECKING:
    from ..disk.checkpoint import WeightFile
    from .loading import Loading

logger = logging.getLogger("oracle_offload")
SMALL_BYTES = 64 * KIB  # of a tensor: a read of less costs as much
ROOM_BYTES = 256 * MIB  # that are locked at once, when they have arrived
_RESIDENT = "kept on the device: disk=True reads least if it never travels"
_STATES = 4  # times the bytes of bfloat16 weights are AdamW's states
_STEPS_A_DAY = 86400 // 10  # of ten seconds
File = TypeVar("File")
Row = TypeVar("Row")


# A tensor, the file that it is in, and where it begins there.
Place = tuple[Tensor, "WeightFile", int]


@dataclass(frozen=True)
class CodedPlace:
    """Where the coded weights of a tensor are: in which file, from where on, bytes, and kind."""

    file: HostBuffer
    begin: int
    nbytes: int
    kind: int


# As `masters.Row`, of a file that may be gone.
_Row = tuple["weakref.ref[masters.FilePiece]", int, int]
# Returns, by `id`, which of tensors in these places have coded weights in files, and where.
Code = Callable[[Sequence[Unit], dict[int, Place]], dict[int, CodedPlace]]


@dataclass(frozen=True)
class OnDisk:
    """The tensors that stay in their files.

    Attributes
    ----------
    places : dict of int to Place
        By `id`.
    trained, sampled : list of lists of Tensor
        Those of each unit that are kept in memory once they have been read: of a model that is
        trained, and of one that samples alone.
    coded : dict of int to CodedPlace
        By `id`, what is read instead of a tensor, in fewer bytes.
    """

    places: dict[int, Place] = field(default_factory=dict)
    trained: list[list[Tensor]] = field(default_factory=list)
    sampled: list[list[Tensor]] = field(default_factory=list)
    coded: dict[int, CodedPlace] = field(default_factory=dict)

    def has(self, tensor: Tensor) -> bool:
        """Whether `tensor` stays in its file."""
        return id(tensor) in self.places

    def coded_tensors(self) -> list[Tensor]:
        """Return the tensors that are read in fewer bytes."""
        return [self.places[key][0] for key in self.coded]

    def put(
        self, pieces: masters.Pieces, loading: Loading, on_bytes: Callable[[int], object]
    ) -> InMemory:
        """Point the tensors into their files; nothing of them is read.

        Returns
        -------
        InMemory
            What is kept of them.
        """
        files: dict[int, masters.FilePiece] = {}
        for file, rows in _by_file((row[1], row) for row in self.places.values()):
            files[id(file)] = masters.FilePiece(file.memory(), [(t, at) for t, _, at in rows])
            pieces.add(files[id(file)])
            for tensor, _, _ in rows:
                loading.skip(tensor)
                on_bytes(tensor_bytes(tensor))
        of_codes = ((row.file, (self.places[key][0], row)) for key, row in self.coded.items())
        for memory, codes in _by_file(of_codes):
            told = [(tensor, row.begin, row.nbytes, row.kind) for tensor, row in codes]
            files[id(memory)] = masters.FilePiece(memory, [], told)
            pieces.add(files[id(memory)])

        def travels(tensor: Tensor) -> tuple[masters.FilePiece, int, int]:
            code = self.coded.get(id(tensor))
            if code is not None:
                return files[id(code.file)], code.begin, code.nbytes
            _, file, begin = self.places[id(tensor)]
            return files[id(file)], begin, tensor_bytes(tensor)

        def rooms(units: list[list[Tensor]]) -> list[list[list[masters.Row]]]:
            parted = masters.split_pieces(units, ROOM_BYTES)
            return [[[travels(t) for t in unit] for unit in of_room] for of_room in parted]

        both = {id(t) for unit in self.trained for t in unit}
        both &= {id(t) for unit in self.sampled for t in unit}
        for of_room in rooms([[t for t in unit if id(t) in both] for unit in self.trained]):
            pieces.add_room(masters.Room(of_room, pieces.node))
        alone = [
            rooms([[t for t in unit if id(t) not in both] for unit in units])
            for units in (self.trained, self.sampled)
        ]
        return InMemory(pieces, *alone)


class InMemory:
    """What of a model's files memory keeps in one case alone: it is trained, or samples alone.

    Parameters
    ----------
    pieces : Pieces
    trained, sampled : lists of lists of lists of Row
        Of each unit of each room, in the one case and in the other.
    """

    def __init__(
        self,
        pieces: masters.Pieces,
        trained: list[list[list[masters.Row]]],
        sampled: list[list[list[masters.Row]]],
    ) -> None:
        self._pieces = pieces
        self._trained, self._sampled = map(_without_files, (trained, sampled))
        self.samples: bool | None = False  # what memory suits; None while it changes
        self._add(self._trained)

    def suit(self, samples: bool) -> None:
        """Keep what suits a model that samples alone, or one that is trained; no more of the other.

        What is new in memory is there once its next use has read it.
        """
        if samples == self.samples:
            return
        self.samples = None
        self._pieces.empty_rooms()
        try:
            self._add(self._sampled if samples else self._trained)
        except MemoryError:
            logger.warning(
                "the host has no memory for all that ram_budget has room for: more is read from "
                "files, which is slower"
            )
        self.samples = samples

    def _add(self, rooms: list[list[list[_Row]]]) -> None:
        for units in rooms:
            rows = [
                [
                    (file, begin, nbytes)
                    for of, begin, nbytes in unit
                    if (file := of()) is not None and file.is_known  # else nothing needs it
                ]
                for unit in units
            ]
            if any(rows):
                self._pieces.add_room(masters.Room(rows, self._pieces.node, for_now=True))


def _without_files(rooms: list[list[list[masters.Row]]]) -> list[list[list[_Row]]]:
    """Return rows that do not hold their files, which may be needed no more before the model."""
    return [
        [[(weakref.ref(of), begin, nbytes) for of, begin, nbytes in unit] for unit in room]
        for room in rooms
    ]


def _by_file(rows: Iterable[tuple[File, Row]]) -> list[tuple[File, list[Row]]]:
    """Return the rows of each file."""
    found: dict[int, tuple[File, list[Row]]] = {}
    for file, row in rows:
        found.setdefault(id(file), (file, []))[1].append(row)
    return list(found.values())


def part(
    units: list[Unit],
    budget: Budget,
    loading: Loading | None,
    capacity: int,
    floor: int,
    code: Code | None = None,
) -> tuple[list[Unit], Kept, OnDisk]:
    """`keep` for a model whose weights may stay on disk; also returns which do.

    Parameters
    ----------
    units : list of lists of Chosen
        In model order.
    budget : Budget
    loading : Loading or None
        The files that they come from.
    capacity, floor : int
        Bytes of the arena as it would be if nothing stayed on the device for good (0: not known),
        and the least that it needs.
    code : callable, optional
        Codes what is in files.

    Raises
    ------
    OffloadError
        None can, or what cannot exceeds `ram_budget`; the message names the remedy.
    """
    if loading is None:
        raise OffloadError(
            "disk=True leaves weights in the files they come from, and there are none: give them, "
            "attach(..., weights=path), with the model made inside oracle_offload.empty_weights(). "
            "oracle_offload.save_weights writes the files of a model that is loaded."
        )
    if sys.platform not in ("linux", "win32"):
        raise OffloadError(
            "disk=True needs a system that tells which pages of a mapped file were written: Linux "
            "or Windows. Leave it away, and set ram_budget."
        )
    places = {
        id(tensor): (tensor, *place)
        for unit in units
        for leaf in unit
        if leaf.kind.needs_place
        for tensor in leaf.tensors()
        if not tensor.requires_grad and tensor_bytes(tensor) >= SMALL_BYTES
        if (place := loading.place(tensor)) is not None
    }
    wanted = replace(budget, ram_budget=budget.ram_budget or AUTO)
    limit = host_limit(units, wanted.ram_budget or AUTO)
    _refuse_trained(units, limit)
    if not places:
        raise OffloadError(
            f"disk=True: no weight can stay in its file: {_why_none(units, loading)}."
        )
    _refuse_network({file.path for _, file, _ in places.values()})
    units, kept = keep(units, wanted, lambda t: 0 if id(t) in places else tensor_bytes(t))
    room = limit - unit_bytes([tensor for tensor in distinct(units) if id(tensor) not in places])
    there = [[t for t in distinct([unit]) if id(t) in places] for unit in units]
    sizes = [unit_bytes(tensors) for tensors in there]
    coded = {} if code is None else code(units, places)
    on_host = [
        sum(aligned(coded[id(t)].nbytes if id(t) in coded else tensor_bytes(t)) for t in tensors)
        for tensors in there
    ]
    in_memory = between(sizes, room, capacity, on_host)
    left = [number for number in range(len(units)) if number not in in_memory]
    resident: set[int] = set()
    if not kept.bytes and not _are_tied(units):
        resident = _resident(units, left, in_memory, capacity, floor)
        kept = Kept([units[number] for number in sorted(resident)], _RESIDENT)
    streaming = [number for number in range(len(units)) if number not in resident]
    of_streaming = [[values[number] for number in streaming] for values in (sizes, on_host)]
    sampled = {streaming[nth] for nth in largest(of_streaming[0], room, of_streaming[1])}
    staying = {id(t) for number in streaming for t in there[number]}
    trained_units, sampled_units = (
        [[t for t in there[number] if id(t) in staying] for number in sorted(numbers)]
        for numbers in (in_memory, sampled)
    )
    return (
        [units[number] for number in streaming],
        kept,
        OnDisk(
            {key: row for key, row in places.items() if key in staying},
            trained_units,
            sampled_units,
            {key: row for key, row in coded.items() if key in staying},
        ),
    )


def _are_tied(units: Sequence[Unit]) -> bool:
    """Whether any tensor is in two units: then both stay, or none."""
    return len(distinct(units)) < sum(len(distinct([unit])) for unit in units)


def _resident(
    units: Sequence[Unit], left: Sequence[int], in_memory: set[int], capacity: int, floor: int
) -> set[int]:
    """Choose what stays on the device for good of the units that are `left` on disk."""
    sizes = [unit_bytes(distinct([unit])) for unit in units]
    in_both = sum(sizes[number] for number in in_memory) + 2 * capacity - sum(sizes)
    most = min(in_both, capacity - floor)
    if most <= 0 or sum(sizes) <= capacity:  # the arena holds all of them as it is
        return set()
    chosen = spread([sizes[number] for number in left], most)
    return {left[number] for number in chosen}


def middle(sizes: Sequence[int], limit: int) -> set[int]:
    """Choose as many as fit `limit` together, from the middle of their order outwards.

    Returns
    -------
    set of int
        Their numbers.
    """
    first, last = 0, len(sizes)
    before = behind = 0  # bytes that are left out, on either side
    total = sum(sizes)
    while first < last and total > limit:
        if before <= behind:
            before += sizes[first]
            total -= sizes[first]
            first += 1
        else:
            last -= 1
            behind += sizes[last]
            total -= sizes[last]
    chosen = set(range(first, last))
    # What is left over may be room for more: the nearest first.
    for number in itertools.chain(reversed(range(first)), range(last, len(sizes))):
        if total + sizes[number] <= limit:
            chosen.add(number)
            total += sizes[number]
    return chosen


def between(
    sizes: Sequence[int], limit: int, ends: int, on_host: Sequence[int] | None = None
) -> set[int]:
    """Choose as many as fit `limit` together, spread evenly over what is between two ends.

    Where all that is between them fits, or nothing is known of them (0), it is `middle`: whatever
    the arena keeps, it is likely to be something else.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each on the device.
    limit : int
        Bytes that the chosen ones do not exceed together on the host.
    ends : int
        Bytes at either end which the arena keeps from one use to the next.
    on_host : sequence of int, optional
        Bytes of each there; those of `sizes`.

    Returns
    -------
    set of int
        Their numbers.
    """
    before = list(itertools.accumulate(sizes, initial=0))
    on_host = sizes if on_host is None else on_host
    if not ends:
        return middle(on_host, limit)
    inner = [
        number
        for number in range(len(sizes))
        if before[number] >= ends and before[number + 1] <= before[-1] - ends
    ]
    if sum(on_host[number] for number in inner) <= limit:
        return middle(on_host, limit)
    return {inner[number] for number in spread([on_host[number] for number in inner], limit)}


def largest(sizes: Sequence[int], limit: int, on_host: Sequence[int] | None = None) -> set[int]:
    """Choose as many of the largest as fit `limit` together, of one size spread over their order.

    Parameters
    ----------
    sizes, limit, on_host
        As of `between`.

    Returns
    -------
    set of int
        Their numbers.
    """
    on_host = sizes if on_host is None else on_host
    alike: dict[int, list[int]] = {}
    for number, size in enumerate(sizes):
        alike.setdefault(size, []).append(number)
    chosen: set[int] = set()
    for _, numbers in sorted(alike.items(), reverse=True):
        taken = spread([on_host[number] for number in numbers], limit)
        chosen.update(numbers[nth] for nth in taken)
        limit -= sum(on_host[numbers[nth]] for nth in taken)
    return chosen


def _refuse_trained(units: Sequence[Unit], limit: int) -> None:
    """Refuse weights that train and have no room in memory: the disk would be written all day."""
    trained = [tensor for tensor in distinct(units) if tensor.requires_grad]
    nbytes = unit_bytes(trained)
    all_train = not any(
        tensor_bytes(tensor) >= SMALL_BYTES and not tensor.requires_grad
        for tensor in distinct(units)
    )
    if not trained or (nbytes <= limit and not all_train):
        return
    a_day = nbytes * (1 + _STATES) * _STEPS_A_DAY / 1e12
    raise OffloadError(
        f"disk=True is for frozen weights, and {format_size(nbytes)} of the managed ones train. "
        f"They and AdamW's states would be written at every step, {a_day:.3g} TB a day at a step "
        "in ten seconds, and a disk bears some hundreds in its life: nothing is ever written. "
        "Freeze them (model.requires_grad_(False)) and train adapters, or leave disk=True away"
        + ("." if all_train else f"; ram_budget has {format_size(limit)} for them.")
    )


def _refuse_network(paths: Iterable[str]) -> None:
    for path in sorted(paths):
        kind = remote_kind(path)
        if kind:
            raise OffloadError(
                f"disk=True: '{path}' is on a network mount ({kind}), whose reads wait for "
                "another machine, and whose files change unseen: copy it to a local disk, and "
                "name that in weights=."
            )


def _why_none(units: Sequence[Unit], loading: Loading) -> str:
    large = [
        (f"{leaf.name}.{key}", tensor)
        for unit in units
        for leaf in unit
        for key, tensor in leaf.kind.named_tensors(leaf.module).items()
        if tensor_bytes(tensor) >= SMALL_BYTES and not tensor.requires_grad
    ]
    if not large:
        return f"none has {format_size(SMALL_BYTES)}; so little needs no disk, leave it away"
    converted = [name for name, tensor in large if loading.place(tensor) is None]
    if converted:
        return (
            f"{listed(converted)} are converted, quantised or stacked as they are read; write them "
            "once as the model has them (oracle_offload.save_weights) and attach that"
        )
    return f"{listed([name for name, _ in large])} are read from host memory as they are"
