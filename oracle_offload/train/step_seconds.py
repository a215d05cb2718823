"""How long the step of an optimizer would take on the device and on the host, by measured rates."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.devices import KINDS
from ..engine.engines import DeviceState
from ..engine.geometry import stored_bytes, tensor_bytes
from ..host.sizes import format_size
from .micro_batches.thread_state import Generators
from .stepping import own_part_of, own_step, tensors_of

_TRIAL_ELEMENTS = 1 << 20  # of a Parameter of each group
_TRIAL_STEPS = 3  # the first makes states, and is not counted


class StepSeconds(NamedTuple):
    """What is predicted of one step of the managed Parameters of an optimizer.

    Attributes
    ----------
    device_s : float
        The longest of the kernels, of the bytes that come, and of those that go home.
    host_s : float
        The host's own kernels, and the copies of what is in the arena, which is copied again then.
    there_bytes, home_bytes : float
        That a step on the device moves each way.
    there_bps, home_bps : float
        Bytes a second of each direction of the link.
    """

    device_s: float
    host_s: float
    there_bytes: float
    home_bytes: float
    there_bps: float
    home_bps: float

    def __str__(self) -> str:
        return (
            f"{self.device_s:.2g} s are predicted on the device "
            f"({format_size(int(self.there_bytes))} to it at {self.there_bps / 1e9:.3g} GB/s, "
            f"{format_size(int(self.home_bytes))} home at {self.home_bps / 1e9:.3g} GB/s), "
            f"{self.host_s:.2g} s on the host"
        )


class _Managed(NamedTuple):
    """Of the managed Parameters of an optimizer, and what a small step of theirs takes."""

    nbytes: float  # of the Parameters
    states: float  # bytes
    seconds: float


def predict(optimizer: Any, kind: Any, state: DeviceState, managed: Container[int]) -> StepSeconds:
    """Return the seconds of a step on the device and on the host; small steps are measured."""
    host = torch.device("cpu")
    on_host = _tried(optimizer, kind, host, managed, KINDS["cpu"](host).seconds_of)
    weights, states = on_host.nbytes, on_host.states
    kept = min(weights, state.arena_bytes())
    there, home = weights - kept + weights + states, weights + states
    if state.simulated:
        dtype = torch.bfloat16  # nothing is computed of which the rate would depend on it
        kernels = state.time.operator_seconds(0.0, 3 * weights + 2 * states, dtype)
    else:
        kernels = _tried(optimizer, kind, state.device, managed, state.kind.seconds_of).seconds
    there_bps, home_bps = _link_rates(state)
    return StepSeconds(
        max(kernels, there / there_bps, home / home_bps),
        on_host.seconds + kept / there_bps,
        there,
        home,
        there_bps,
        home_bps,
    )


def _link_rates(state: DeviceState) -> tuple[float, float]:
    """Return bytes a second to the device and home: of the copies so far, else of a few made now.

    Where no gradient has gone home yet, both directions are taken to be as fast.
    """
    counted = state.counters()
    there_s, home_s = counted["h2d_seconds"], counted["d2h_seconds"]
    if there_s:
        there = counted["h2d_timed_bytes"] / there_s
    else:
        model = state.kind.model
        there = math.inf if model is None else 1e9 * model.link_gbps
    return there, counted["d2h_timed_bytes"] / home_s if home_s else there


def _tried(
    optimizer: Any,
    kind: Any,
    device: torch.device,
    managed: Container[int],
    seconds_of: Callable[[Callable[[], Any]], float],
) -> _Managed:
    """Measure a step of a part of each group's largest managed Parameter."""
    generators = Generators([device])
    before = generators.now()
    sums = [0.0, 0.0, 0.0]
    try:
        for group in optimizer.param_groups:
            own = [p for p in group["params"] if id(p) in managed and p.requires_grad]
            if own:
                found = _of_group(optimizer, kind, group, own, device, seconds_of)
                sums = [one + other for one, other in zip(sums, found, strict=True)]
    finally:
        generators.restore(before)
    return _Managed(*sums)


def _of_group(
    optimizer: Any,
    kind: Any,
    group: dict[str, Any],
    own: list[Tensor],
    device: torch.device,
    seconds_of: Callable[[Callable[[], Any]], float],
) -> _Managed:
    largest = max(own, key=Tensor.numel)
    length, *row = largest.shape or [1]
    shape = [min(length, max(1, _TRIAL_ELEMENTS // max(1, math.prod(row)))), *row]
    tried = nn.Parameter(torch.ones(shape, dtype=largest.dtype, device=device))
    options = {name: copy.deepcopy(v) for name, v in group.items() if name != "params"}
    states: Any = defaultdict(dict)
    part = own_part_of(optimizer, kind, [{**options, "params": [tried]}], states)
    tried.grad = torch.ones_like(tried)
    step = own_step(kind)
    seconds = [seconds_of(lambda: step(part)) for _ in range(_TRIAL_STEPS)]
    nbytes = sum(map(tensor_bytes, own))
    scale = nbytes / max(1, tensor_bytes(tried))
    kept = sum(stored_bytes(each) for each in tensors_of(states.get(tried, {})) if each.dim())
    return _Managed(nbytes, scale * kept, scale * min(seconds[1:]))
