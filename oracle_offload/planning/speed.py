"""How fast a planned step would be: the engine's own choices, replayed in virtual time."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..engine.geometry import tensor_bytes
from ..engine.replay import Size, predict_elsewhere
from ..engine.simulated_time import SimulatedTime
from ..engine.simulator import Device
from ..errors import OffloadError
from ..host.sizes import format_size
from .cards import Card
from .fit import NOWHERE, RESIDENT, Fit
from .measure import Step

logger = logging.getLogger("oracle_offload.planning")

_COPY_LATENCY_S = 2.5e-6  # as the simulator's presets have it: assumed


@dataclass(frozen=True)
class Speed:
    """Seconds of a step: forward and backward, without the optimizer's.

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
        ``"compute"``, ``"link"``, or ``"unknown"``.
    why : str
        Why nothing is known.
    d2h_bytes : float
        Of a full training: gradients, and what was stepped, that go home in a step.
    optimizer : str
        How the optimizer of a full training is taken to step: "after backward, on the device".
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


def speed_of(step: Step, fit: Fit, card: Card) -> Speed:
    """Return the seconds of a step that lies as `fit` has it, on `card`."""
    if step.why:
        return Speed(why=step.why)
    if fit.verdict == NOWHERE:
        return Speed(why="it does not fit")
    if fit.verdict != RESIDENT and fit.storage.recipe.train == "full":
        return _streamed_step(step, fit, card)
    times = [_time(card, share) for share in (0.0, 0.5, 1.0)]
    if fit.verdict == RESIDENT:
        slow, middle, fast = (sum(step.phases(time)) for time in times)
        return Speed(fast, middle, slow, fast, middle, bottleneck="compute")
    logger.info("replaying a step at three speeds")
    questions = [question(step, fit, card, share) for share in (0.0, 0.5, 1.0)]
    try:
        answers = predict_elsewhere(questions)
    except OffloadError as error:  # for want of memory, say: whether it fits is known all the same
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


def _streamed_step(step: Step, fit: Fit, card: Card) -> Speed:
    """Return what a step of a full training moves, where the optimizer is streamed.

    Each forward, each backward and the step bring what the arena does not hold from before. Where
    micro-batches take turns in a loop, the sum of their gradients comes and goes with each.
    """
    weights, gradients, states = (
        fit.host.get(kind, 0) for kind in ("weights", "gradients", "optimizer state")
    )
    rounds = 1 if step.together else step.micro_batches
    sweeps = fit.sweep_bytes or (fit.storage.travelling_bytes,) * 2
    swept = sum(max(0, used - fit.arena_bytes) for used in sweeps)
    stepped = max(0, weights - fit.arena_bytes) + gradients + states
    moved = rounds * swept + (rounds - 1) * gradients + stepped
    home = rounds * gradients + weights + states
    seconds = stepped / _link_rate(card, 0.5)
    mode = "after backward, on the device"
    return Speed(
        h2d_bytes=moved,
        d2h_bytes=home,
        optimizer=mode,
        why=(
            "how long gradients take to leave is not modelled; with an optimizer that steps "
            f"{mode} (train.stream_optimizer), {format_size(moved)} go to the device in it and "
            f"{format_size(home)} home, of which its own {format_size(stepped)} and "
            f"{format_size(weights + states)} at once, in {seconds:.2g} s or more"
        ),
    )


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
