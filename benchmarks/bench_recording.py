"""What `record` costs the host in a step of Flux's shape, over a driver whose calls cost nothing.

The step is that of 494 units (19 blocks of 14 layers, 38 of 6), each used in forward, recompute
and backward, through an arena that holds 9% of them. Steps with and without a journal alternate,
and the least of each counts. A recorder puts a step down by a few calls of its own, and times one
in 128 by events, which takes the calls of a timeline: both are measured by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from bench_host_cost import null_driver

BLOCKS = [14] * 19 + [6] * 38
STEP_S = 20e-3  # what the share is of
ROUNDS = 15
UNIT_BYTES = 4096


def least_s(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least seconds of each call; rounds alternate: all see the same load."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def flux_steps() -> tuple[Any, Callable[[], None], Callable[[], None]]:
    """Return an engine, what makes one step on it, and what closes it."""
    from oracle_offload import _core
    from oracle_offload.engine import simulator

    engine = _core.Engine(str(simulator.library_path()), 0)
    stream = engine.compute_stream
    count = sum(BLOCKS)
    lease, model = engine.add_lease(), engine.add_model()
    arena = _core.HostBuffer(int(0.09 * count) * UNIT_BYTES)
    engine.add_segment(lease, arena.address, arena.nbytes, stream)
    masters = _core.HostBuffer(count * UNIT_BYTES)
    engine.lock(masters)
    memory = [arena, masters]
    members = [
        engine.add_unit(model, [[(masters.address + i * UNIT_BYTES, UNIT_BYTES)]], False)[1][0][0]
        for i in range(count)
    ]

    def use(number: int, kind: int) -> None:
        task = -1 if kind == _core.FORWARD else 1
        ticket, _, _ = engine.acquire(members[number], stream, 0, kind, task, 0.0)
        engine.release(ticket, stream)

    def step() -> None:
        for number in range(count):
            use(number, _core.FORWARD)
        end = count
        for layers in reversed(BLOCKS):
            for number in range(end - layers, end):
                use(number, _core.RECOMPUTE)
            for number in reversed(range(end - layers, end)):
                use(number, _core.BACKWARD)
            end -= layers

    def close() -> None:
        engine.remove_lease(lease)
        engine.remove_model(model)
        engine.unlock(masters)
        engine.close()
        memory.clear()

    return engine, step, close


def events() -> dict[str, Any]:
    """Measure the journal, and a timeline, on the engine alone."""
    engine, step, close = flux_steps()
    for _ in range(3):
        step()

    def journaled() -> None:
        engine.journal_start(100_000)
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
        written.append(engine.journal_read((1 << 64) - 1)[0])
        engine.journal_stop()

    def timed() -> None:
        engine.trace_start()
        step()
        engine.trace_stop()

    times: list[float] = []
    written: list[int] = []
    least = least_s({"off": step, "on": journaled, "timed": timed})
    close()
    more = min(times) - least["off"]
    return {
        "events_count": written[-1],
        "step_ms": least["off"] * 1e3,
        "ns_per_event": more / written[-1] * 1e9,
        "events_us": more * 1e6,
        "timed_step_us": (least["timed"] - least["off"]) * 1e6,
    }


def recorder_step_us() -> float:
    """Measure what a recorder does around an optimizer's step, as `DeviceState` calls it."""
    import torch

    import oracle_offload
    from oracle_offload import record

    layers = [torch.nn.Linear(16, 16) for _ in range(sum(BLOCKS))]
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    with oracle_offload.attach(model, "cpu", offload_percent=1.0) as manager:
        state = manager.state
        counters = state.engine.stats()
        with record(timed_every=0) as recorder:

            def step() -> None:
                recorder.begins_step(state)
                recorder.ended_step(state, counters)

            step()
            least = least_s({"step": step})
    return least["step"] * 1e6


def benchmarks(device: str = "cpu") -> Iterator[dict[str, Any]]:
    """Yield one row: what a step costs more, and its share of a step of 20 ms."""
    with null_driver():
        row = events()
        row["step_end_us"] = recorder_step_us()
    more_us = row["events_us"] + row["step_end_us"] + row["timed_step_us"] / 128
    yield {
        "name": "record",
        **row,
        "all_us": more_us,
        "share_of_20_ms_percent": 100 * more_us * 1e-6 / STEP_S,
    }
