"""All weights train, in virtual time: rounds of gradients and a streamed step, and the bound.

    python benchmarks/full_training.py           # the tables
    python benchmarks/full_training.py --page    # ... and docs/full-fine-tuning.md
    python benchmarks/full_training.py --early   # of steps in backward alone

The engine, gradients that leave and `stream_optimizer` as they are, over the simulated driver: true
sizes, of which addresses alone are taken; copies that move no byte; kernels of the model that take
what `model_traces` says; a step that takes what moving its bytes takes. No operator computes
anything. Each direction of the link has a share of its rate while both copy.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import mmap
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER), str(FOLDER.parent / "tools")]

import plans  # noqa: E402 - the folder must be findable first
from model_traces import BACKWARD, CARDS, RECOMPUTE, Card, Trace, Visit, trace_of  # noqa: E402

PAGE = FOLDER.parent / "docs" / "full-fine-tuning.md"
END = "<!-- end of what it printed -->"
BEGIN = "<!-- printed by benchmarks/full_training.py -->"
BEGIN_EARLY = "<!-- printed by benchmarks/full_training.py --early -->"
GIB = 2**30
TIME_GOAL, BYTES_GOAL = 1.05, 1.02
SHARES = (1.0, 0.9, 0.5)  # of the link's rate, for each direction while both copy
# An H100 computes as an H200; NVIDIA states 3.35 TB/s for its memory.
ON = {
    "3090": CARDS["3090"],
    "4090": CARDS["4090"],
    "5090": CARDS["5090"],
    "h100": Card(16e9, 55e9, 600e12, 3350e9),
}
MEMORY = 24 * GIB  # of each, or as much of it as may be used
CONTEXT = 0.6e9  # of the driver and its libraries: assumed
LOGITS = 1e9  # of a part of a language model's output, with what its loss takes: assumed
LEAVING = 0.75e9  # gradients on their way home, one that is made, and sums that come: at most
HOST = 64 * GIB


class Case(NamedTuple):
    """A model, the samples of a round, the rounds of an optimizer step, and the optimizer.

    With `early` that steps in backward.
    """

    model: str
    size: int
    batch: int
    rounds: int
    optimizer: str
    early: bool = False


CASES = (
    Case("llama-8b-whole", 8192, 2, 34, "AdamW"),
    Case("llama-8b-whole", 8192, 2, 1, "AdamW"),
    Case("flux1", 1024, 1, 1, "AdamW"),
    Case("flux1", 1024, 1, 1, "8-bit AdamW"),
    Case("qwen-image", 1024, 1, 1, "8-bit AdamW"),
)
EARLY = (
    Case("llama-8b-whole", 8192, 2, 1, "AdamW", early=True),
    Case("flux1", 1024, 1, 1, "AdamW", early=True),
    Case("flux1", 1024, 1, 1, "8-bit AdamW", early=True),
    Case("qwen-image", 1024, 1, 1, "8-bit AdamW", early=True),
)
NAMES = {
    "llama-8b-whole": "Llama 3 8B, {batch} x {size} tokens",
    "flux1": "FLUX.1 12B, {size} x {size}",
    "qwen-image": "Qwen-Image 20B, {size} x {size}",
}
# What als244/ml_dataflow reports for the first case on an H100, in its CSV files: tokens a second
# with all of the card, and in so much of its memory and of the host's.
RIVAL_ALL, RIVAL_PART = 11_406, 9_781
RIVAL_CARD, RIVAL_HOST = 23.4 * GIB, 63.6 * GIB


def name_of(case: Case) -> str:
    """Return a case as a reader says it."""
    rounds = "1 round" if case.rounds == 1 else f"{case.rounds} rounds"
    way = " in backward" if case.early else ""
    return f"{NAMES[case.model].format(**case._asdict())}, {rounds}, {case.optimizer}{way}"


# ---- what a case takes ----


def trained_trace(case: Case, card: Card) -> Trace:
    """Return what a round uses; a table and a head are no blocks, and computed once."""
    trace = trace_of(case.model, case.size, card, "bf16", case.batch, trained=True)
    if case.model == "llama-8b-whole":
        once = {*trace.blocks[0], *trace.blocks[-1]}
        trace.train = [v for v in trace.train if v.kind != RECOMPUTE or v.unit not in once]
    return trace


def state_bytes(case: Case, weights: int) -> int:
    """Return what the optimizer keeps of bf16 weights of so many bytes."""
    of_each = 4.0 if case.optimizer == "AdamW" else 2.0 + 2 * 4 / _BLOCK
    return int(weights / 2 * of_each)


def stepped_bytes(case: Case, trace: Trace) -> int:
    """Return the most that gradients and states take that are stepped in backward.

    Batches wait for their states, are stepped, and go home, as `during_backward=True` has it.
    """
    from oracle_offload.train import stepping

    limit = stepping.BATCH_BYTES
    batch, now, most = [0, 0], 0, 0  # gradients and states
    waiting: list[list[int]] = []
    leaving: list[list[int]] = []

    def size_of(batch: list[int]) -> int:
        return 2 * batch[0] + batch[1]

    for visit in trace.train:
        if visit.kind == BACKWARD:
            weights = trace.unit_bytes[visit.unit]
            states = state_bytes(case, weights)
            if batch[0] and size_of(batch) + 2 * weights + states > limit:
                now += batch[1]
                most = max(most, now)
                while sum(map(size_of, waiting)) > stepping.WAITING * limit:
                    now -= waiting[0][0]
                    leaving.append(waiting.pop(0))
                    while len(leaving) > 1 and sum(map(sum, leaving)) > stepping.LEAVING * limit:
                        now -= leaving.pop(0)[1]
                waiting.append(batch)
                batch = [0, 0]
            batch[0] += weights
            batch[1] += states
            now += weights
            most = max(most, now)
    return most


def arena_of(case: Case, trace: Trace, memory: float) -> int:
    """Return the arena: what the rest of a training leaves of the card's memory."""
    hidden = 4096 if case.model == "llama-8b-whole" else 3072
    tokens = case.size if case.model == "llama-8b-whole" else (case.size // 16) ** 2 + 512
    unit = 2 * case.batch * tokens * hidden
    kept = unit * len(trace.blocks)  # the input of each block
    # What the largest block saves once it is computed again, and what else its backward takes.
    recomputed = unit * (20.5 if case.model == "llama-8b-whole" else 22) * 1.25
    logits = LOGITS if case.model == "llama-8b-whole" else 0.0
    leaving = stepped_bytes(case, trace) if case.early else LEAVING
    room = memory - CONTEXT - leaving - kept - recomputed - logits
    return int(min(max(room, trace.floor_bytes()), trace.total_bytes)) // 256 * 256


class Least(NamedTuple):
    """The least bytes of a step by phases, to the device and home."""

    forward: tuple[float, float]
    backwards: list[tuple[float, float]]
    step: tuple[float, float]

    def sums(self) -> tuple[float, float]:
        """Return the least of each direction in a step with all of its rounds."""
        rounds = len(self.backwards)
        there = rounds * self.forward[0] + self.step[0] + sum(b[0] for b in self.backwards)
        return there, self.step[1] + sum(b[1] for b in self.backwards)


def least(weights: float, states: float, arena: float, rounds: int, is_sent: bool = False) -> Least:
    """Return the least bytes of a step: the arena holds weights, at its end gradients.

    To the device (2 rounds + 1)(M - C) + rounds G + S, home M + S + (rounds - 1) G + max(0, G - C).
    A sum of gradients that the arena holds over a round takes the place of as many weights, which
    come twice: all bytes together stay the same.

    With `is_sent` all gradients go home, as ``.grad`` is there after each backward; the arena holds
    weights alone. To the device the same, home M + S + rounds G: min(G, C) more, which no engine
    can save that sets ``.grad`` where its Parameter is.
    """
    missing, gradients = max(0.0, weights - arena), weights
    backwards = [
        (
            missing + (gradients if number else 0.0),
            gradients if is_sent or number < rounds - 1 else missing,
        )
        for number in range(rounds)
    ]
    return Least((missing, 0.0), backwards, (weights + missing + states, weights + states))


def least_early(weights: float, states: float, arena: float) -> Least:
    """Return the least bytes of a step in backward: to the device 2 (M - C) + S, home M + S."""
    missing = max(0.0, weights - arena)
    return Least((missing, 0.0), [(missing + states, weights + states)], (0.0, 0.0))


def made_s(
    trace: Trace, home: float, there: float, link_bps: float, share: float, early: float = 0.0
) -> float:
    """Return the least seconds of a backward whose units go home, each once its gradient is made.

    Of a unit of b bytes `home` b go home and `there` b come, of all units at most `early` bytes
    before they are stepped. So the last n units take no less than the kernels until the first of
    their gradients is made, and the link's time for all of them.
    """
    made, at = [], 0.0
    for visit in trace.train:
        if visit.kind in (RECOMPUTE, BACKWARD):
            at += visit.seconds
        if visit.kind == BACKWARD:
            made.append((at, trace.unit_bytes[visit.unit]))
    worst = rest = 0.0
    for at, nbytes in reversed(made):
        rest += nbytes
        both = link_s(max(0.0, there * rest - early), home * rest, link_bps, share)
        worst = max(worst, at + both)
    return worst


def link_s(there: float, home: float, link_bps: float, share: float) -> float:
    """Return the least seconds in which so many bytes pass each way."""
    # Both at once, at `share` of the rate each, for what is less, and the rest alone.
    less, more = sorted((there, home))
    alone = (more - less) / link_bps
    return min(less / (share * link_bps) + alone, (there + home) / link_bps)


def bound_s(
    case: Case, trace: Trace, arena: int, card: Card, share: float, is_sent: bool = False
) -> float:
    """Return seconds that no step can beat whose optimizer steps when that of the case does.

    Each forward, each backward and the optimizer's step take at least their kernels, and at least
    the link's time for the least bytes. Gradients that all go home take no less than `made_s`, nor
    does what is stepped in backward: states come to the memory of `stepped_bytes` alone.
    """
    weights, rounds = trace.total_bytes, case.rounds
    states = state_bytes(case, weights)
    bytes_of = least_of(case, weights, arena, is_sent)
    turn = next(n for n, visit in enumerate(trace.train) if visit.kind in (RECOMPUTE, BACKWARD))
    forward = sum(visit.seconds for visit in trace.train[:turn])
    backward = sum(visit.seconds for visit in trace.train[turn:])
    kernels = (3 * weights + 2 * states) / card.memory_bps
    if case.early:
        backward, kernels = backward + kernels, 0.0
    sweep = plans.interval_bound_s(
        trace.unit_bytes, trace.train[:turn], arena, card.link_bps, plans.COPY_LATENCY_S
    )
    seconds = rounds * max(forward, sweep, link_s(*bytes_of.forward, card.link_bps, share))
    for there, home in bytes_of.backwards:
        least_s = max(backward, link_s(there, home, card.link_bps, share))
        if home >= weights:
            states_too = (states / weights, card.link_bps, share, stepped_bytes(case, trace))
            of = states_too if case.early else (0.0, card.link_bps, share)
            least_s = max(least_s, made_s(trace, home / weights, *of))
        seconds += least_s
    return seconds + max(kernels, link_s(*bytes_of.step, card.link_bps, share))


def least_of(case: Case, weights: float, arena: float, is_sent: bool = False) -> Least:
    """Return the least bytes of a case; see `least` and `least_early`."""
    states = state_bytes(case, int(weights))
    if case.early:
        return least_early(weights, states, arena)
    return least(weights, states, arena, case.rounds, is_sent)


# ---- the run ----

_BLOCK = 256  # 8-bit states have a float32 scale for so many values


def _optimizers() -> dict[str, Any]:
    """Return the optimizers, by name: torch's, and one with the states of bitsandbytes' AdamW8bit.

    The latter is not installed where this runs, and nothing is computed: states are all there is.
    """
    import torch

    class EightBit(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None or self.state[parameter]:
                        continue
                    count, like = parameter.numel(), {"device": parameter.device}
                    blocks = -(-count // _BLOCK)
                    for number in (1, 2):
                        state = self.state[parameter]
                        state[f"state{number}"] = torch.zeros(count, dtype=torch.uint8, **like)
                        state[f"absmax{number}"] = torch.zeros(blocks, **like)

    return {
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
        "8-bit AdamW": EightBit,
    }


def _idle() -> Any:
    """Return a mode in which operators allocate what they return, and compute nothing."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    in_place = {aten.add_.Tensor, aten.copy_.default}
    of_lists = {
        aten._foreach_add_.Scalar,
        aten._fused_adamw_.default,
        aten._fused_adamw_.tensor_lr,
    }
    fresh = {aten.zeros_like.default: torch.empty_like, aten.zeros.default: torch.empty}

    class Idle(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in in_place:
                return args[0]
            if func in of_lists:
                return None
            return fresh.get(func, func)(*args, **(kwargs or {}))

    made: Any = Idle
    return made()


def _version(parameter: Any) -> int:
    return int(parameter._version)


class _Held:
    """Replaces an attached model where its device and `stream_optimizer` look for one."""

    def __init__(self, state: Any, gradients: Any) -> None:
        self._state = state
        self._attachment = types.SimpleNamespace(gradients=gradients)
        self.layers: list[Any] = []

    def add(self, unit: int, member: int, parameter: Any, view: Any) -> Any:
        """Return a stand-in for a layer with that weight; `view` is one of the arena."""
        layer = types.SimpleNamespace(
            unit=unit,
            member=member,
            attachment=self._attachment,
            masters=types.SimpleNamespace(
                tensors=(parameter,), present=(parameter,), are=lambda _: True
            ),
            parameters={},
            state=self._state,
            landings={},
            views={},
            view_at=lambda address: (view(address, parameter),),
        )
        self.layers.append(layer)
        return layer

    def tell_trained(self) -> None:
        for layer in self.layers:
            (master,) = layer.masters.tensors
            self._state.engine.set_trainable(layer.unit, not self._state.is_streamed(master))

    def before_forward(self) -> None: ...

    def during_forward(self) -> None: ...

    def before_step(self) -> bool:
        return True

    def before_frozen_write(self, tensors: Any) -> None: ...

    def after_step(self) -> None: ...

    def forget_views(self) -> None: ...


@contextlib.contextmanager
def _device(card: Card, share: float) -> Iterator[None]:
    """Have the card simulated; copies move no byte."""
    from oracle_offload.engine import simulator

    before = simulator.get_device(0)
    device = replace(
        before,
        link_gbps=card.link_bps / 1e9,
        copy_latency_s=plans.COPY_LATENCY_S,
        memory_bytes=float(2**48),
        memory_gbps=card.memory_bps / 1e9,
        launch_s=0.0,
        duplex_share=share,
    )
    simulator.set_device(0, device)
    simulator.poison(False)
    simulator.copy_nothing(True)
    simulator.detect_races(False)
    try:
        yield
    finally:
        simulator.poison(True)
        simulator.copy_nothing(False)
        simulator.detect_races(True)
        simulator.set_device(0, before)


def run(
    case: Case,
    card: Card,
    share: float,
    *,
    memory: float = MEMORY,
    steps: int = 3,
    kernels_s: float | None = None,
    timeline: list[Any] | None = None,
) -> dict[str, Any]:
    """Train, and return what the last of `steps` optimizer steps takes, with all of its rounds.

    `kernels_s` is what the kernels of a round take, where that is known. The rows of the
    simulator's trace of that step are put into `timeline`.
    """
    trace = trained_trace(case, card)
    if kernels_s is not None:
        faster = kernels_s / sum(visit.seconds for visit in trace.train)
        trace.train = [replace(visit, seconds=faster * visit.seconds) for visit in trace.train]
    arena = arena_of(case, trace, memory)
    weights = trace.total_bytes
    with _device(card, share), _idle_after() as begin_idle:
        times, moved, waits, host = _train(case, trace, arena, steps, begin_idle, timeline)
    there, home = least_of(case, weights, arena).sums()
    sent = least_of(case, weights, arena, is_sent=True).sums()
    bound, bound_sent = (bound_s(case, trace, arena, card, share, each) for each in (False, True))
    seconds = times[-1] - times[-2]
    h2d, d2h = (moved[-1][way] - moved[-2][way] for way in (0, 1))
    return {
        "case": case,
        "share": share,
        "weights_bytes": weights,
        "arena_bytes": arena,
        "host_bytes": host,
        "kernels_s": case.rounds * sum(visit.seconds for visit in trace.train),
        "step_s": seconds,
        "bound_s": bound,
        "h2d_bytes": h2d,
        "d2h_bytes": d2h,
        "least_h2d_bytes": there,
        "least_d2h_bytes": home,
        "least_sent_bytes": sum(sent),
        "host_waits": waits[-1] - waits[-2],
        "time_ratio": seconds / bound,
        "bytes_ratio": (h2d + d2h) / (there + home),
        "time_sent_ratio": seconds / bound_sent,
        "bytes_sent_ratio": (h2d + d2h) / sum(sent),
    }


@contextlib.contextmanager
def _idle_after() -> Iterator[Any]:
    """Yield a function from whose call on operators compute nothing."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(_idle())


def _train(
    case: Case, trace: Trace, arena: int, steps: int, begin_idle: Any, timeline: Any
) -> tuple[list[float], list[tuple[int, int]], list[int], int]:
    """Return, after each step: the time, the bytes each way, the host's waits; and RAM."""
    import numpy as np
    import torch

    from oracle_offload import _core
    from oracle_offload.engine import simulator
    from oracle_offload.engine.engines import opened
    from oracle_offload.layers.gradients import Gradients, Late, landing
    from oracle_offload.train import stream_optimizer

    space = mmap.mmap(-1, arena, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    with opened(torch.device("cpu")) as state, contextlib.ExitStack() as ends:
        engine, stream = state.engine, state.stream()
        gradients = Gradients(state, lambda nbytes: True)
        lease, model = engine.add_lease(), engine.add_model()
        address = np.frombuffer(space, "b").ctypes.data
        base = -(-address // 256) * 256
        engine.add_segment(lease, base, arena, stream)
        segment: Any = types.SimpleNamespace(address=base, nbytes=arena)
        state.exchange_segments([], [segment])
        ends.callback(state.exchange_segments, [segment], [])
        with warnings.catch_warnings(action="ignore"):  # no code writes there: see `_idle`
            slots = torch.frombuffer(space, dtype=torch.uint8)[base - address :]

        def view(at: int, parameter: Any) -> Any:
            return slots[at - base :][: parameter.nbytes].view(parameter.dtype)

        held = _Held(state, gradients)
        members, parameters, buffers = [], [], []
        for nbytes in trace.unit_bytes:
            buffer = _core.HostBuffer(nbytes)
            engine.lock(buffer)
            unit, added = engine.add_unit(model, [[(buffer.address, nbytes)]], True)
            members.append(added[0][0])
            flat = torch.frombuffer(memoryview(buffer), dtype=torch.bfloat16)
            parameters.append(torch.nn.Parameter(flat))
            buffers.append(buffer)
            state.add_member(unit, members[-1], functools.partial(_version, parameters[-1]))
            landing(held.add(unit, members[-1], parameters[-1], view), parameters[-1])
        state.join(held)
        ends.callback(state.leave, held)
        optimizer = _optimizers()[case.optimizer](parameters)
        stream_optimizer(optimizer, during_backward=case.early)
        begin_idle()
        task = 0

        def use(visit: Visit) -> None:
            member = members[visit.unit]
            of_task = task if visit.kind in (RECOMPUTE, BACKWARD) else -1
            stamp = _version(parameters[visit.unit])
            ticket, _, fetched = engine.acquire(member, stream, stamp, visit.kind, of_task, 0.0)
            if fetched:
                state.stamp_units(fetched)
            simulator.launch(stream, (), (), visit.seconds)
            if visit.kind == BACKWARD and state.n_stepping:
                state.keep_for_step(held.layers[visit.unit])
            if fetched := engine.release(ticket, stream):
                state.stamp_units(fetched)

        turn = next(n for n, v in enumerate(trace.train) if v.kind in (RECOMPUTE, BACKWARD))

        def one_round() -> None:
            state.begin_forward()
            for visit in trace.train[:turn]:
                use(visit)
            late = Late(state)
            late.keeps_graph = False  # no graph task runs that could be asked
            for visit in trace.train[turn:]:
                use(visit)
                if visit.kind == BACKWARD:
                    master = parameters[visit.unit]
                    gradient = torch.empty_like(master)
                    with state.gradients_lock:
                        if case.early:
                            late.step(state.steppers[id(master)], master, gradient.detach())
                        elif not gradients._send(late, master, gradient.detach()):
                            raise RuntimeError("a gradient was not sent")
                    del gradient
            with state.gradients_lock:
                late.finish_steps()
            late.finish()
            state.rest()

        times, moved, waits = [simulator.now()], [(0, 0)], [0]
        for number in range(steps):
            recorded = number == steps - 1 and timeline is not None
            recording: Any = simulator.trace() if recorded else contextlib.nullcontext([])
            with recording as rows:
                for _ in range(case.rounds):
                    task += 1
                    one_round()
                optimizer.step()
                optimizer.zero_grad()
            if recorded:
                timeline += rows
            times.append(simulator.now())
            done = simulator.stats()
            moved.append((done.h2d_bytes, done.d2h_bytes))
            waits.append(engine.stats()["host_waits"])
        locked = sum(trace.unit_bytes) + gradients.locked_bytes
        del optimizer
        parameters.clear()
        engine.remove_lease(lease)
        engine.remove_model(model)
        gradients.give_back_all()
        for buffer in buffers:
            engine.unlock(buffer)
    return times, moved, waits, locked


# ---- the page ----


def cells(cases: Sequence[Case]) -> Iterator[tuple[Case, str, list[dict[str, Any]]]]:
    """Run all cells: by case and card one for each share."""
    for case in cases:
        for name, card in ON.items():
            steps = 2 if case.rounds > 1 else 3
            yield case, name, [run(case, card, share, steps=steps) for share in SHARES]


def beside_rival() -> dict[str, Any]:
    """Run the first case in the memory of ml_dataflow's row, by the kernels of its other one."""
    case = CASES[0]
    tokens = case.batch * case.size
    row = run(case, ON["h100"], 1.0, memory=RIVAL_CARD, steps=2, kernels_s=tokens / RIVAL_ALL)
    return {**row, "tokens_a_second": case.rounds * tokens / row["step_s"]}


def table(rows: Sequence[tuple[Case, str, list[dict[str, Any]]]]) -> list[str]:
    """Return the table as Markdown."""
    shares = [f"{share:g}" for share in SHARES]
    early = rows[0][0].early
    ends = ["moved, GiB", "least, GiB", "moved / least"]
    if not early:
        ends = ["at the worst, sent", "bytes / least", "sent"]
    lines = [
        "| | | locked, GiB | arena, GiB | kernels, s | step, s, at a share of "
        f"{' | '.join(shares)} | step / bound at {' | '.join(shares)} | {' | '.join(ends)} |",
        f"| --- | --- |{' ---: |' * (6 + 2 * len(SHARES))}",
    ]
    former = None
    for case, card, of in rows:
        first = of[0]
        held = f"{first['host_bytes'] / GIB:.1f}"
        if first["host_bytes"] > HOST:
            held += ", does not fit 64"
        moved = [first["h2d_bytes"] + first["d2h_bytes"]]
        moved.append(first["least_h2d_bytes"] + first["least_d2h_bytes"])
        last = [f"{nbytes / GIB:.1f}" for nbytes in moved] + [f"{first['bytes_ratio']:.3f}"]
        if not early:
            worst = max(row["time_sent_ratio"] for row in of)
            last = [f"{worst:.3f}", last[-1], f"{first['bytes_sent_ratio']:.3f}"]
        figures = [
            held,
            f"{first['arena_bytes'] / GIB:.1f}",
            f"{first['kernels_s']:.1f}",
            *(f"{row['step_s']:.2f}" for row in of),
            *(f"{row['time_ratio']:.3f}" for row in of),
            *last,
        ]
        on = "H100" if card == "h100" else f"RTX {card}"
        lines.append(
            f"| {name_of(case) if case != former else ''} | {on} | {' | '.join(figures)} |"
        )
        former = case
    return lines


def verdict(rows: Sequence[tuple[Case, str, list[dict[str, Any]]]]) -> str:
    """Return how many cells are within the goals."""
    all_rows = [row for _, _, of in rows for row in of]
    in_time = sum(row["time_ratio"] <= TIME_GOAL for row in all_rows)
    in_bytes = sum(row["bytes_ratio"] <= BYTES_GOAL for row in all_rows)
    time = max(row["time_sent_ratio"] for row in all_rows)
    moved = max(row["bytes_sent_ratio"] for row in all_rows)
    of = "They" if rows[0][0].early else "Where all gradients go home they"
    return (
        f"{in_time} of {len(all_rows)} cells take at most {TIME_GOAL} of the bound, {in_bytes} "
        f"move at most {BYTES_GOAL} of the least bytes. {of} take at most {time:.3f} of the bound, "
        f"and move at most {moved:.3f} of the least bytes."
    )


def beside(row: dict[str, Any]) -> str:
    """Return our predicted tokens a second, and what ml_dataflow reports as measured."""
    ours = row["tokens_a_second"]
    return (
        f"In the memory of als244/ml_dataflow's row of {RIVAL_PART:,} tokens/s (an H100, "
        f"{RIVAL_CARD / GIB:.1f} GiB of it and {RIVAL_HOST / GIB:.1f} of the host), with kernels "
        f"as fast as its row with all of the card ({RIVAL_ALL:,}), this is predicted to reach "
        f"{ours:,.0f}: {ours / RIVAL_PART - 1:+.1%}. {row['host_bytes'] / GIB:.1f} GiB are locked. "
        "Its rows are its authors' measurements; ours is simulated, and no measurement."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 3 where a cell is above a goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write docs/full-fine-tuning.md")
    parser.add_argument("--early", action="store_true", help="steps in backward alone")
    options = parser.parse_args(argv)
    missed = False
    for begin, cases in ((BEGIN_EARLY, EARLY),) if options.early else PARTS:
        rows = list(cells(cases))
        said = [*table(rows), "", verdict(rows)]
        if begin == BEGIN:
            said += ["", beside(beside_rival())]
        printed = "\n".join(said)
        print(printed, flush=True)
        if options.page:
            head, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
            tail = rest.partition(END)[2]
            PAGE.write_text(f"{head}{begin}\n\n{printed}\n\n{END}{tail}", encoding="utf-8")
        missed |= any(
            row["time_ratio"] > TIME_GOAL or row["bytes_ratio"] > BYTES_GOAL
            for _, _, of in rows
            for row in of
        )
    return 3 if missed else 0


PARTS = ((BEGIN, CASES), (BEGIN_EARLY, EARLY))

if __name__ == "__main__":
    sys.exit(main())
