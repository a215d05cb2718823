"""Which weights of a model become coded masters, and what they need of the device."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _core
from .._core import HostBuffer
from ..disk.reading import Files
from ..engine.geometry import aligned, is_dense, tensor_bytes
from ..engine.replay import predict_elsewhere
from ..errors import OffloadError
from ..host.sizes import format_size
from ..model.budget import OFFLOADED, Budget
from ..model.kept import Kept, distinct, host_limit, keep
from ..model.selection import Chosen, Unit
from .coder import Coder, kind_of, pays
from .steps import Pace
from .store import user_store

_PIECES = 4  # of the staging memory, each with room for a chunk
_SAMPLES, _SAMPLE = 16, 1 << 14  # weights of a tensor that show how small it gets
_MARGIN = 1.02  # by which it may take more than they show
_CHUNK, _HEADER_BYTES = 4 << 20, 64  # weights of a chunk, see csrc/core/codec.h
_ENOUGH = 1.01  # times the shortest step is short enough
_TRIALS = 16  # of numbers of units, planned at once
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, without their whole part, are spread evenly


def codable(units: Sequence[Sequence[Chosen]]) -> list[Tensor]:
    """Return the tensors that may be coded: frozen, streamed as a whole, of a dtype with a codec.

    A unit that has a trained tensor leaves the device with it, and is coded in no part.
    """
    found: dict[int, Tensor] = {}
    others: set[int] = set()
    for unit in units:
        trained = any(tensor.requires_grad for leaf in unit for tensor in leaf.tensors())
        for leaf in unit:
            for tensor in leaf.tensors():
                if trained or not leaf.kind.needs_place or kind_of(tensor) is None:
                    others.add(id(tensor))
                else:
                    found[id(tensor)] = tensor
    return [tensor for key, tensor in found.items() if key not in others]


class ExpectedBytes(Protocol):
    """An object that knows about how many bytes a tensor takes coded."""

    def bytes_of(self, tensor: Tensor) -> int:
        """Return them for a tensor that is `codable`."""


class Expected:
    """About how many bytes each tensor takes on the host once it is coded, by parts of it.

    Parameters
    ----------
    files : Files or None
        Where values are still to come from.
    """

    def __init__(self, files: Files | None) -> None:
        self._files = files
        self._known: dict[int, int] = {}

    def bytes_of(self, tensor: Tensor) -> int:
        """Return them for a tensor that is `codable`."""
        if id(tensor) not in self._known:
            self._known[id(tensor)] = _expected_bytes(tensor, self._files)
        return self._known[id(tensor)]


@dataclass(frozen=True)
class HostRoom:
    """What `ram_budget` leaves for weights that are compressed.

    Attributes
    ----------
    limit : float
        Most bytes of masters, where the weights have room only if they are compressed.
    short : float
        Bytes of weights as they are for which there is none: infinite where all of them compressed
        have none.
    """

    limit: float = float("inf")
    short: float = 0


def part(
    units: list[Unit], budget: Budget, expected: Expected
) -> tuple[list[Unit], Kept, HostRoom]:
    """`keep` for a model that may be compressed; also returns what room its weights have."""
    streaming, kept = keep(units, budget)
    if budget.compress is None or budget.ram_budget in (None, OFFLOADED) or not kept.bytes:
        return streaming, kept, HostRoom()
    limit = host_limit(units, budget.ram_budget)
    coded = {id(tensor) for tensor in codable(units)}
    streaming, kept = keep(
        units, budget, lambda t: expected.bytes_of(t) if id(t) in coded else tensor_bytes(t)
    )
    whole = sum(aligned(tensor_bytes(tensor)) for tensor in distinct(units))
    return streaming, kept, HostRoom(limit, float("inf") if kept.bytes else whole - limit)


# ---- what "auto" compresses ----


@dataclass(frozen=True)
class Choice:
    """The tensors that are to be coded, and why these, in words; "" where none had to be chosen."""

    tensors: list[Tensor]
    why: str = ""


@dataclass(frozen=True)
class Planned:
    """How a unit would travel.

    Attributes
    ----------
    nbytes : int
        On the device.
    coded : list of Tensor
        Of it, what can be coded.
    saved : int
        Bytes that it takes less, coded.
    saved_host : int
        Of the host; what units share is saved once.
    """

    nbytes: int
    coded: list[Tensor]
    saved: int
    saved_host: int


# Answers a question for `replay.predict`: the units, and the numbers of those that are coded.
Ask = Callable[[Sequence[Planned], Collection[int]], dict[str, Any]]


def choose(
    units: Sequence[Unit],
    sizes: Sequence[int],
    capacity: int,
    short: float,
    ask: Ask | None,
    expected: ExpectedBytes,
    known_by: str = "as planned",
) -> Choice:
    """Return the least that removes what waits for copies, and what the host has no room for.

    Parameters
    ----------
    units, sizes : sequences
        Those that stream, in model order, and their bytes on the device.
    capacity : int
        Of the arena.
    short : float
        Bytes that have to go from the host; see `part`.
    ask : callable or None
        Answers what to ask of `replay.predict` for a step with some units coded; see `ask_by_pace`.
        None where nothing is known of steps.
    expected : Expected
    known_by : str
        How steps are known, in words.
    """
    every = codable(units)
    travels = capacity < sum(sizes)
    if short == float("inf"):
        return Choice(every, "ram_budget has no room for all weights, compressed or not")
    if travels and ask is None:
        return Choice(every, "what travels may hold steps up: none was measured here yet")
    if not travels:
        if not short:
            return Choice([], "all weights have room on the device")
        ask = None
    planned = _planned(units, sizes, every, expected)
    order = _in_order(planned, capacity)
    said, least = [], 0
    if short:
        saved = itertools.accumulate(planned[number].saved_host for number in order)
        least = bisect.bisect_left(list(saved), short) + 1
        said.append(f"ram_budget is {format_size(int(short))} short of the weights as they are")
    if ask is not None:
        try:
            count, plain_s, step_s = _least_for_link(planned, order, ask)
        except OffloadError as error:  # of the process that plans
            return Choice(every, f"a step could not be planned: {error}")
        if count:
            least = max(least, count)
            times = f"{1e3 * plain_s:.3g} ms becomes {1e3 * step_s:.3g} ms"
            said.append(f"a step of {times}, {known_by}")
    taken = [planned[number] for number in order[:least]]
    if not taken:
        return Choice([], f"steps do not wait for copies, {known_by}")
    why = f"{len(taken)} of {len(order)} units that can be: {' and '.join(said)}"
    return Choice([tensor for unit in taken for tensor in unit.coded], why)


def _planned(
    units: Sequence[Unit], sizes: Sequence[int], every: Sequence[Tensor], expected: ExpectedBytes
) -> list[Planned]:
    wanted = {id(tensor) for tensor in every}
    seen: set[int] = set()
    found = []
    for unit, nbytes in zip(units, sizes, strict=True):
        coded = [t for leaf in unit for t in leaf.tensors() if id(t) in wanted]
        saved = {id(t): tensor_bytes(t) - aligned(expected.bytes_of(t)) for t in coded}
        host = sum(nbytes for key, nbytes in saved.items() if key not in seen)
        seen.update(saved)
        found.append(Planned(nbytes, coded, sum(saved.values()), host))
    return found


def _in_order(planned: Sequence[Planned], capacity: int) -> list[int]:
    """Return the numbers of what is worth coding, in the order in which it is to be chosen.

    Those first that travel most often, then what gets smallest. What is alike in both is spread
    over the model, whatever number is taken: each stretch of it has to copy while it computes.
    """
    shares = _shares([unit.nbytes for unit in planned], capacity)
    found = [number for number, unit in enumerate(planned) if unit.saved > 0]

    def key(number: int) -> tuple[float, float, float]:
        unit = planned[number]
        return (
            -round(sum(shares[number]), 1),
            -round(unit.saved / unit.nbytes, 2),
            number * _GOLDEN % 1,
        )

    return sorted(found, key=key)


def _shares(sizes: Sequence[int], capacity: int) -> list[tuple[float, float]]:
    """Return the share of each unit that travels in forward, and in backward.

    What one of them uses last is in the arena when the other begins with it.
    """

    def beyond(sizes: Sequence[int]) -> list[float]:
        ends = itertools.accumulate(sizes)
        return [
            min(1.0, max(0, end - capacity) / size) if size else 0.0
            for size, end in zip(sizes, ends, strict=True)
        ]

    return list(zip(beyond(sizes), beyond(sizes[::-1])[::-1], strict=True))


def _least_for_link(
    planned: Sequence[Planned], order: Sequence[int], ask: Ask
) -> tuple[int, float, float]:
    """Return how many of `order` make a step as short as any do, and its seconds before and after.

    0: it is as short without any.
    """
    known: dict[int, float] = {}

    def try_between(low: int, high: int) -> None:
        counts = {low + (high - low) * n // _TRIALS for n in range(_TRIALS + 1)} - known.keys()
        asked = [ask(planned, {*order[:n]}) for n in counts]
        answers = predict_elsewhere(asked)
        known.update(zip(counts, (a["predicted_step_s"] for a in answers), strict=True))

    def least() -> int:
        return min(n for n in known if known[n] <= _ENOUGH * min(known.values()))

    try_between(0, len(order))
    found = least()
    if found:
        try_between(max(n for n in known if n < found), found)
        found = least()
    return found, known[0], known[found]


def ask_by_pace(
    planned: Sequence[Planned], coded: Collection[int], *, capacity: int, pace: Pace
) -> dict[str, Any]:
    """Ask for a step in which the units of these numbers are coded: see `replay.predict`.

    Each computes for as long as it has bytes: what is known of the seconds is their sum.
    """
    there = {n: unit for n, unit in enumerate(planned) if unit.nbytes}
    seconds = {n: pace.busy_s * unit.nbytes for n, unit in there.items()}
    total = sum(unit.nbytes for unit in there.values())
    events: list[tuple[Any, ...]] = []
    for numbers, kind, task, share in (
        (there, _core.FORWARD, -1, pace.forward_share),
        (reversed(there), _core.BACKWARD, 0, 1 - pace.forward_share),
    ):
        for number in numbers:
            ticket = len(events)
            events.append(("acquire", number, kind, task, ticket))
            events.append(("launch", share * seconds[number] / total))
            events.append(("release", ticket))
    units = [
        [(n, [[unit.nbytes, unit.nbytes - unit.saved] if n in coded else unit.nbytes])]
        for n, unit in there.items()
    ]
    return {
        "device": vars(pace.device),
        "events": events,
        "units": units,
        "segments": [capacity],
        "staging": staging_bytes([tensor for unit in planned for tensor in unit.coded]),
    }


# ---- what it takes ----


def _expected_bytes(tensor: Tensor, files: Files | None) -> int:
    """Return about how many bytes a tensor takes once it is coded, by parts of it."""
    kind = kind_of(tensor)
    assert kind is not None
    with torch.inference_mode(False), torch.no_grad():
        if files is None or not files.have(tensor):
            flat = tensor.detach()
            flat = flat.as_strided((flat.numel(),), (1,)) if is_dense(flat) else flat.reshape(-1)
        elif (origin := files.origin(tensor)) is not None:
            flat = torch.frombuffer(
                origin.memory, dtype=tensor.dtype, count=tensor.numel(), offset=origin.skipped
            )
        else:  # converted while it is read: nothing is known yet
            return tensor_bytes(tensor)
        step = max(_SAMPLE, flat.numel() // _SAMPLES)
        # A flat view of every other element is no sequence of bytes.
        parts = [flat[at : at + _SAMPLE].cpu().contiguous() for at in range(0, flat.numel(), step)]
        sample = torch.cat([part.view(torch.uint8) for part in parts])
    count = sample.numel() // tensor.element_size()
    coded = HostBuffer(_core.coded_room(kind, count))
    nbytes = _core.encode(kind, coded.address, coded.nbytes, 1, sample.data_ptr(), count)
    if not pays(nbytes, sample.numel()):
        return tensor_bytes(tensor)
    return int(min(1.0, _MARGIN * nbytes / sample.numel()) * tensor_bytes(tensor))


def staging_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the device memory that the coded weights of `tensors` pass through."""
    largest = max(
        (min(tensor.numel(), _CHUNK) * tensor.element_size() for tensor in tensors), default=0
    )
    return min(_PIECES * aligned(largest + _HEADER_BYTES), _core.STAGING_BYTES) if largest else 0


def coder_for(
    tensors: Sequence[Tensor], ram_budget: int | float | str | None, room: HostRoom
) -> Coder | None:
    """Return what codes `tensors`, None where there are none; see `Coder`."""
    if not tensors:
        return None
    wanted = {id(tensor) for tensor in tensors}
    return Coder(user_store(), wanted, ram_budget if room.short else None, room.limit)
