"""How fast a planned step would be: the engine's own choices, replayed in virtual time."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..engine.geometry import tensor_bytes
from ..engine.replay import Size, predict_elsewhere
from ..engine.simulated_time import SimulatedTime
from ..engine.simulator import Device
from ..errors import OffloadError
from ..host.sizes import GIB
from .cards import DISK_GBPS, Card, Interval
from .fit import NOWHERE, RESIDENT, Fit
from .measure import Step

logger = logging.getLogger("oracle_offload.planning")

_COPY_LATENCY_S = 2.5e-6  # as the simulator's presets have it: assumed
_SHARES = (0.0, 0.5, 1.0)  # of the intervals of a card's rates: slowest, middle, fastest
# What each direction of a link has of its rate while both copy, on a bad host and on a good one.
_DUPLEX = (0.5, 1.0)


@dataclass(frozen=True)
class Speed:
    """Seconds of a step: forward and backward; of a full training that streams the optimizer, too.

    Attributes
    ----------
    low_s, step_s, high_s : float or None
        At the fastest rates that are likely, in the middle, and at the slowest; None unknown.
    bound_s : float or None
        No step of this arena can be shorter, at the fastest rates: docs/plan.md has the formula.
    compute_s, link_s : float
        What the kernels take, and what the copies to the device take, in the middle.
    h2d_bytes : float
        That travel in a step; of a full training with its optimizer's.
    bottleneck : str
        ``"compute"``, ``"link"``, ``"disk"``, or ``"unknown"``.
    why : str
        Why nothing is known.
    d2h_bytes : float
        Of a full training: gradients, and what was stepped, that go home in a step.
    optimizer : str
        How the optimizer of a full training is taken to step: "after backward, on the device", or
        "in backward, on the device".
    disk_bytes, disk_s : float
        What a step reads of weights that stay in their files, and what that takes in the middle.
    disk_paces : str
        What waits for the disk in the middle: "forward", "backward", "both", or nothing.
    ram_gib_saves_s : float
        Seconds less for one more GiB of weights in memory; 0 where nothing waits for the disk.
    ram_enough_bytes : int
        Weights in memory from which on nothing waits for it; 0 where nothing does.
    """

    low_s: float | None = None
    step_s: float | None = None
    high_s: float | None = None
    bound_s: float | None = None
    compute_s: float = 0.0
    link_s: float = 0.0
    h2d_bytes: float = 0.0
    bottleneck: str = "unknown"
    why: str = ""
    d2h_bytes: float = 0.0
    optimizer: str = ""
    disk_bytes: float = 0.0
    disk_s: float = 0.0
    disk_paces: str = ""
    ram_gib_saves_s: float = 0.0
    ram_enough_bytes: int = 0


def speed_of(step: Step, fit: Fit, card: Card, disk_gbps: Interval = DISK_GBPS) -> Speed:
    """Return the seconds of a step whose bytes are where `fit` has them, on `card`."""
    found = _without_disk(step, fit, card)
    return _with_disk(found, step, fit, card, disk_gbps) if any(fit.read_bytes) else found


def _with_disk(found: Speed, step: Step, fit: Fit, card: Card, disk_gbps: Interval) -> Speed:
    """Return what a step takes where forward and backward have to wait for the disk as well.

    Each takes the longest of its kernels, its copies and its reads, which go on at the same time.
    """
    rates = [1e9 * (disk_gbps[0] + share * (disk_gbps[1] - disk_gbps[0])) for share in _SHARES]

    def beyond(number: int) -> list[float]:
        """Return the seconds by which reading is longer than the rest of each phase."""
        share = _SHARES[number]
        kernels = [0.0, 0.0] if step.why else step.phases(_time(card, share))
        missing = (fit.storage.link_share * nbytes for nbytes in _missing(fit))
        copies = [nbytes / _link_rate(card, share) for nbytes in missing]
        rest = map(max, kernels, copies)
        return [read / rates[number] - s for read, s in zip(fit.read_bytes, rest, strict=True)]

    slow, middle, fast = (sum(max(0.0, s) for s in beyond(number)) for number in range(3))
    waits, reads = beyond(1), sum(fit.read_bytes)
    paces = sum(s > 0 for s in waits)
    held = sum(fit.host.get(name, 0) for name in ("weights", "padding"))
    found = replace(
        found,
        disk_bytes=reads,
        disk_s=reads / rates[1],
        disk_paces=("", "backward", "forward", "both")[2 * (waits[0] > 0) + (waits[1] > 0)],
        ram_gib_saves_s=paces * GIB / rates[1],
        ram_enough_bytes=int(held + max(waits) * rates[1]) if paces else 0,
    )
    if found.low_s is None or found.step_s is None or found.high_s is None:
        return found
    step_s = found.step_s + middle
    return replace(
        found,
        low_s=found.low_s + fast,
        step_s=step_s,
        high_s=found.high_s + slow,
        bound_s=None if found.bound_s is None else found.bound_s + fast,
        bottleneck="disk" if found.disk_s >= 0.9 * step_s else found.bottleneck,
    )


def _without_disk(step: Step, fit: Fit, card: Card) -> Speed:
    is_full = fit.storage.recipe.train == "full" and fit.verdict not in (RESIDENT, NOWHERE)
    if step.why:
        return _full_bytes(step, fit, step.why) if is_full else Speed(why=step.why)
    if fit.verdict == NOWHERE:
        return Speed(why="it does not fit")
    if is_full:
        return _full_step(step, fit, card)
    times = [_time(card, share) for share in _SHARES]
    if fit.verdict == RESIDENT:
        slow, middle, fast = (sum(step.phases(time)) for time in times)
        return Speed(fast, middle, slow, fast, middle, bottleneck="compute")
    logger.info("replaying a step at three speeds")
    questions = [question(step, fit, card, share) for share in _SHARES]
    try:
        answers = predict_elsewhere(questions)
    except OffloadError as error:  # for want of memory, say: whether it fits is known anyway
        return Speed(why=str(error))
    slow, middle, fast = (answer["predicted_step_s"] for answer in answers)
    moved = answers[1]["predicted_h2d_bytes"]
    compute_s = sum(step.phases(times[1]))
    best = zip(step.phases(times[2]), _copies_s(fit, card, 1.0), strict=True)
    bound_s = min(fast, sum(max(computed, copied) for computed, copied in best))
    return Speed(
        fast,
        middle,
        slow,
        bound_s,
        compute_s,
        moved / _link_rate(card, 0.5),
        moved,
        "compute" if compute_s >= 0.9 * middle else "link",
    )


def _full_step(step: Step, fit: Fit, card: Card) -> Speed:
    """Return what a step of a full training takes and moves, where the optimizer is streamed.

    Each forward, each backward and the step bring what the arena does not hold from before. Where
    micro-batches take turns in a loop, the sum of their gradients comes and goes with each. In
    backward no gradient leaves, and what was used there is stepped where it is.
    """
    logger.info("replaying a step at three speeds")
    try:
        answers = predict_elsewhere([question(step, fit, card, share) for share in _SHARES])
    except OffloadError as error:
        return _full_bytes(step, fit, str(error))
    bounds = [_phases_s(step, fit, card, share) for share in _SHARES]
    slow, middle, fast = (
        # What the engine adds to the phases of its weights (latency, turns), it adds here too.
        sum(phases) + max(0.0, answer["predicted_step_s"] - sum(alone))
        for answer, (phases, alone) in zip(answers, bounds, strict=True)
    )
    compute_s = sum(_kernels_s(step, fit, card, 0.5))
    known = _full_bytes(step, fit, "")
    return replace(
        known,
        low_s=fast,
        step_s=middle,
        high_s=slow,
        bound_s=min(fast, sum(bounds[2][0])),
        compute_s=compute_s,
        link_s=known.h2d_bytes / _link_rate(card, 0.5),
        bottleneck="compute" if compute_s >= 0.9 * middle else "link",
    )


def _full_bytes(step: Step, fit: Fit, why: str) -> Speed:
    """Return what a step of a full training moves, and why no seconds are known."""
    there, home = map(sum, zip(*_moved(step, fit), strict=True))
    when = "in" if fit.storage.recipe.during_backward else "after"
    mode = f"{when} backward, on the device"
    return Speed(h2d_bytes=there, d2h_bytes=home, optimizer=mode, why=why)


def _missing(fit: Fit) -> tuple[int, int]:
    """Return the bytes that forward and backward use and the arena does not hold."""
    forward, backward = fit.sweep_bytes or (fit.storage.travelling_bytes,) * 2
    return max(0, forward - fit.arena_bytes), max(0, backward - fit.arena_bytes)


def _moved(step: Step, fit: Fit) -> list[tuple[int, int]]:
    """Return the bytes there and home of all forwards, of each backward, and of the step."""
    kinds = ("weights", "gradients", "optimizer state")
    weights, gradients, states = (fit.host.get(kind, 0) for kind in kinds)
    rounds = 1 if step.together else step.micro_batches
    forward, backward = _missing(fit)
    sweep = (rounds * forward, 0)
    if fit.storage.recipe.during_backward:
        return [sweep, (backward + states, weights + states), (0, 0)]
    stepped = max(0, weights - fit.arena_bytes) + gradients + states, weights + states
    sums = (gradients if number else 0 for number in range(rounds))
    return [sweep, *((backward + running, gradients) for running in sums), stepped]


def _kernels_s(step: Step, fit: Fit, card: Card, share: float) -> list[float]:
    """Return the seconds of kernels of forward, of backward, and of the optimizer."""
    weights, states = (fit.host.get(kind, 0) for kind in ("weights", "optimizer state"))
    stepped = (3 * weights + 2 * states) / (1e9 * card.rates(share)["memory_gbps"])
    return [*step.phases(_time(card, share)), stepped]


def _phases_s(step: Step, fit: Fit, card: Card, share: float) -> tuple[list[float], list[float]]:
    """Return the least seconds of forward, backward and step; and without gradients and step."""
    kernels, rate = _kernels_s(step, fit, card, share), _link_rate(card, share)
    duplex = _DUPLEX[0] + share * (_DUPLEX[1] - _DUPLEX[0])
    first, *backwards, last = (_link_s(*phase, rate, duplex) for phase in _moved(step, fit))
    of_each = kernels[1] / len(backwards)
    if fit.storage.recipe.during_backward:
        of_each, kernels[2] = of_each + kernels[2], 0.0
    found = [
        max(kernels[0], first),
        sum(max(of_each, link_s) for link_s in backwards),
        max(kernels[2], last),
    ]
    forward, backward = _missing(fit)
    rounds = len(backwards)
    alone = [
        max(kernels[0], rounds * forward / rate),
        max(step.phases(_time(card, share))[1], rounds * backward / rate),
    ]
    return found, alone


def _link_s(there: float, home: float, rate: float, duplex: float) -> float:
    """Return the seconds in which so many bytes pass; both ways each has `duplex` of the rate."""
    less, more = sorted((there, home))
    return min(less / (duplex * rate) + (more - less) / rate, (there + home) / rate)


def _link_rate(card: Card, share: float) -> float:
    return 1e9 * card.rates(share)["link_gbps"]


def _copies_s(fit: Fit, card: Card, share: float) -> list[float]:
    """Return the seconds that the least copies of forward and of backward take."""
    rate = _link_rate(card, share)
    missing = (max(0, used - fit.arena_bytes) for used in fit.sweep_bytes)
    return [fit.storage.link_share * nbytes / rate for nbytes in missing]


def _device(card: Card, share: float) -> Device:
    rates = card.rates(share)
    return Device(
        name=card.name,
        link_gbps=rates["link_gbps"],
        copy_latency_s=_COPY_LATENCY_S,
        memory_bytes=float(1 << 40),  # whether it fits is the plan's matter
        tflops=rates["tflops"],
        memory_gbps=rates["memory_gbps"],
        launch_s=rates["launch_s"],
    )


def _time(card: Card, share: float) -> SimulatedTime:
    return SimulatedTime(_device(card, share))


def question(step: Step, fit: Fit, card: Card, share: float) -> dict[str, Any]:
    """Return what `oracle_offload.engine.replay` is asked."""
    numbers, coded = step.numbers, fit.storage.coded

    def size(tensor: Tensor) -> Size:
        nbytes = tensor_bytes(tensor)
        return [nbytes, coded[id(tensor)]] if id(tensor) in coded and not nbytes % 2 else nbytes

    units = [
        [(numbers[leaf.name], [size(t) for t in leaf.tensors()]) for leaf in unit]
        for unit in fit.storage.units
        if unit[0].kind.needs_place
    ]
    there = {number for unit in units for number, _ in unit}
    events, dropped = [], set()
    for event in step.replayed(_time(card, share)):
        if event[0] == "acquire" and event[1] not in there:
            dropped.add(event[4])
        elif event[0] != "release" or event[1] not in dropped:
            events.append(event)
    return {
        "device": vars(_device(card, share)),
        "events": events,
        "units": units,
        "segments": [fit.arena_bytes],
        "staging": fit.storage.staging_bytes,
    }
