"""Seconds of a training step at several shares offloaded, resident and predicted."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import common

OFFLOADS = (0.91, 1.0)
TRACE_BYTES = 12 * 2**20


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure Flux at its real width and depth."""
    import training

    with clock(device):
        yield from rows_of(training.flux_shape(device, 3072), OFFLOADS, device, draw=True)


@contextlib.contextmanager
def clock(device: str) -> Iterator[None]:
    """Keep an engine open, and with it the simulated clock, while a resident model is timed."""
    import torch

    import oracle_offload
    from oracle_offload.engine import simulator

    with contextlib.ExitStack() as held:
        if common.is_simulated(device):
            torch.set_num_threads(1)  # small matrices gain nothing from a second thread
            held.enter_context(simulator.device(simulated_card()))
        anchor = torch.nn.Sequential(torch.nn.Linear(8, 8)).requires_grad_(False)
        manager = oracle_offload.attach(anchor, device)
        held.callback(manager.detach)
        yield


def simulated_card() -> str:
    """Return the preset that replaces the card, where none is measured."""
    return os.environ.get("ORACLE_OFFLOAD_SIM_DEVICE") or "h200"


def rows_of(
    shape: Any, offloads: tuple[float, ...], device: str, draw: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield one row for the resident training and two for each share offloaded.

    The first of the two is the prediction, which is there before the step is measured. With `draw`
    the first share's timeline and trace are written, after all rows.
    """
    import training

    nbytes = training.weight_bytes(shape)
    # Resident weights and activations, later the arena with them; masters on the host.
    why = common.does_not_fit(
        device, 1.3 * nbytes, 2.3 * nbytes + (0 if common.is_simulated(device) else 8 * common.GIB)
    )
    if why:
        yield {"name": shape.name, "skipped": why, "weights_bytes": nbytes, **shape.sizes}
        return
    begin = time.perf_counter()
    runner = training.Training(training.build(shape, device), shape, device)
    built_s = time.perf_counter() - begin
    compared = Compared(runner, device)
    for row in common.attempt(f"{shape.name}, resident", compared.resident):
        yield {**shape.sizes, "weights_bytes": nbytes, "build_s": built_s, **row}
    took = 0.0
    for offload in offloads:
        name = f"{shape.name}, offload {offload}"
        if common.left_s() < 1.5 * took:
            why = f"{common.left_s():.0f} s are left, it takes {took:.0f}"
            yield {"name": name, "skipped": why}
            continue
        begin = time.perf_counter()
        for row in common.attempt(name, compared.offloaded, offload):
            yield {"offload": offload, **row}
        took = time.perf_counter() - begin
    if draw and offloads:
        yield from common.attempt(f"{shape.name}, pictures", compared.draw, offloads[0])
    del compared, runner
    training.clean(device)


def memory_figures(device: str) -> dict[str, int]:
    """Return what torch's allocator says."""
    if common.is_simulated(device):
        return {}
    import torch

    stats = torch.cuda.memory_stats()
    return {
        "peak_allocated_bytes": stats.get("allocated_bytes.all.peak", 0),
        "peak_reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
        "ooms_count": stats.get("num_ooms", 0),
        "alloc_retries_count": stats.get("num_alloc_retries", 0),
    }


def measure(runner: Any, device: str, manager: Any) -> tuple[dict[str, Any], list[float]]:
    """Run steps of one training; two warm up, and of the others the median counts."""
    if not common.is_simulated(device):
        import torch

        torch.cuda.reset_peak_memory_stats()
    runner.begin()
    for _ in range(2):
        runner.step()
    common.synchronize(device)
    engine = manager.state.engine if manager else None
    before = engine.stats(manager.attachment.model) if engine else None
    began, times = time.time(), list[float]()
    most = 1 if common.is_simulated(device) else 12  # virtual times do not scatter
    while len(times) < most and (len(times) < 2 or time.time() - began < 5.0):
        times.append(runner.timed())
    row: dict[str, Any] = {
        "step_s": median(times),
        "least_step_s": min(times),
        "steps_count": len(times),
        "epoch_s": [round(began, 2), round(time.time(), 2)],
        **memory_figures(device),
    }
    if engine and before:
        after = engine.stats(manager.attachment.model)
        row |= per_step(before, after, len(times))
        minimum = manager.attachment.x_min_bytes()
        row["x_min_bytes"] = minimum
        if minimum:
            row["over_x_min_ratio"] = row["h2d_bytes"] / minimum
    return row, [float(loss) for loss in runner.losses]


def per_step(before: Any, after: Any, steps: int) -> dict[str, Any]:
    """Return the engine's counters of one step."""
    from oracle_offload.layers.traffic import stalls_of

    moved = {key: after[key] - before[key] for key in after if key != "units"}
    stalls, stall_s = stalls_of(moved)
    row: dict[str, Any] = {
        "h2d_bytes": moved["h2d_bytes"] / steps,
        "copies_count": moved["h2d_copies"] / steps,
        "acquires_count": moved["acquires"] / steps,
        "late_count": moved["late"] / steps,
        "stalls_count": stalls / steps,
        "stall_s": stall_s / steps,
        "timed_waits_count": moved["timed_waits"] / steps,
        "host_waits_count": moved["host_waits"] / steps,
        "evictions_count": moved["evictions"] / steps,
        "arena_bytes": after["arena_bytes"],
        "managed_bytes": after["managed_bytes"],
        "locked_bytes": after["locked_bytes"],
    }
    if moved["h2d_seconds"] > 0:
        row["rate_gbps"] = 1e-9 * moved["h2d_timed_bytes"] / moved["h2d_seconds"]
    return row


class Compared:
    """One model, trained resident and at several shares offloaded, from the same LoRA.

    Parameters
    ----------
    runner : training.Training
    device : str
    """

    def __init__(self, runner: Any, device: str) -> None:
        self.runner, self.device = runner, device
        self.losses: list[float] = []
        self.resident_s = 0.0
        # What a step asks of its engine, whatever is offloaded: recorded once.
        self.recorded: tuple[Any, Any] | None = None

    def resident(self) -> Iterator[dict[str, Any]]:
        """Yield the resident training's row."""
        row, self.losses = measure(self.runner, self.device, None)
        self.resident_s = row["step_s"]
        yield {"name": f"{self.runner.shape.name}, resident", **row}

    @contextlib.contextmanager
    def attached(self, offload: float) -> Iterator[tuple[Any, float]]:
        """Attach for the block; gives the manager, and the seconds that attach took."""
        import training

        import oracle_offload

        begin = time.perf_counter()
        manager = oracle_offload.attach(
            self.runner.model,
            self.device,
            offload_percent=offload,
            ignore_modules=training.adapters(self.runner.model),
        )
        try:
            yield manager, time.perf_counter() - begin
        finally:
            manager.detach(self.runner.model)

    def offloaded(self, offload: float) -> Iterator[dict[str, Any]]:
        """Predict from the card's own rates, then measure; yield a row for each."""
        name = f"{self.runner.shape.name}, offload {offload}"
        with self.attached(offload) as (manager, attach_s):
            for _ in range(2):  # until the arena has room for the largest block
                self.runner.step()
            predicted = self.predict(manager)
            yield {"name": f"{name}, predicted", **predicted}
            row, found = measure(self.runner, self.device, manager)
            begin = time.perf_counter()
        row |= {"attach_s": attach_s, "detach_s": time.perf_counter() - begin}
        if self.resident_s:
            row["over_resident_ratio"] = row["step_s"] / self.resident_s
        row["over_predicted_ratio"] = row["step_s"] / predicted["predicted_step_s"]
        shared = min(len(self.losses), len(found))
        pairs = zip(self.losses[:shared], found[:shared], strict=True)
        row["compared_steps_count"] = shared
        row["equal_losses_count"] = sum(a == b for a, b in pairs)
        yield {"name": name, **row, **predicted}

    def predict(self, manager: Any) -> dict[str, Any]:
        """Return what the simulator says of the step, with this card's rates where they are known.

        The step that is recorded for it runs on the device, and is not timed.
        """
        from oracle_offload.engine import simulator
        from oracle_offload.engine.replay import predict

        rates = {} if common.is_simulated(self.device) else common.measured_rates()
        said = {"predicted_from": "this card's link and rates" if rates else "a preset"}
        if common.is_simulated(self.device):  # its engine is open: the device stays as it is
            return said | self._replayed(manager, predict)
        card = simulator.preset(simulated_card())
        with simulator.device(dataclasses.replace(card, **rates)):
            return said | self._replayed(manager, predict)

    def _replayed(self, manager: Any, predict: Any) -> dict[str, Any]:
        import replay

        if self.recorded is None:
            meter = replay.record(manager, self.runner.step)
            self.recorded = meter, replay.units_of(manager)
        # The replay's copies move no byte; where both are simulated, none of the model's may be
        # among them.
        common.synchronize(self.device)
        meter, units = self.recorded
        segments = [segment.nbytes for segment in manager.attachment.arena.segments]
        found: dict[str, Any] = predict(meter.events, units, segments, rounds=6)
        return found

    def draw(self, offload: float) -> Iterator[dict[str, Any]]:
        """Write the engine's timeline of a step and torch's trace of one; yield what it said."""
        with self.attached(offload) as (manager, _):
            for _ in range(2):
                self.runner.step()
            said = pictures(self.runner, self.device, manager)
        if said:
            yield {"name": f"{self.runner.shape.name}, pictures", "skipped": said}


def pictures(runner: Any, device: str, manager: Any) -> str:
    """Write the engine's timeline of one step and torch's trace of another; say what is missing."""
    import torch

    from oracle_offload.observe.timeline import timeline_svg

    timeline, trace = common.artifact("step-timeline.svg"), common.artifact("step-trace.json.gz")
    if timeline is None or trace is None:
        return ""
    engine = manager.state.engine
    engine.trace_start()
    runner.step()
    common.synchronize(device)
    rows = list(engine.trace_stop())
    how = "simulated times" if common.is_simulated(device) else "measured by events"
    title = f"{runner.shape.name}, one step, {engine.device_name} ({how})"
    timeline.write_text(timeline_svg(rows, title), encoding="utf-8")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not common.is_simulated(device):
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        runner.step()
        common.synchronize(device)
    profile.export_chrome_trace(str(trace))
    size = trace.stat().st_size
    if size > TRACE_BYTES:
        trace.unlink()
        return f"the trace of {size} bytes is too large to bring home"
    return ""
