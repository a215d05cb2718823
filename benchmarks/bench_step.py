"""Seconds of a training step at several shares offloaded, beside resident and the prediction."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import common

# Before the simulator is loaded: what the prediction is for.
os.environ.setdefault("ORACLE_OFFLOAD_SIM_DEVICE", "h200")

OFFLOADS = (0.91, 1.0, 0.5, 0.0)  # what is asked of most first
TRACE_BYTES = 12 * 2**20


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure Flux at two widths and a UNet."""
    import torch
    import training

    import oracle_offload

    # Small matrices gain nothing from a second thread.
    if common.is_simulated(device):
        torch.set_num_threads(1)
    # Keeps the engine open, and with it the simulated clock, while the resident model is timed.
    anchor = torch.nn.Sequential(torch.nn.Linear(8, 8)).requires_grad_(False)
    manager = oracle_offload.attach(anchor, device)
    try:
        for shape, offloads in (
            (training.flux_shape(device, 1024), OFFLOADS),
            (training.flux_shape(device, 3072), OFFLOADS),
            (training.unet_shape(device), (0.91, 0.0)),  # its host cost, with copies and without
        ):
            yield from rows_of(shape, offloads, device)
            training.clean(device)
    finally:
        manager.detach(anchor)


def rows_of(shape: Any, offloads: tuple[float, ...], device: str) -> Iterator[dict[str, Any]]:
    """Yield one row for the resident training and one for each share offloaded."""
    import training

    nbytes = training.weight_bytes(shape)
    # Resident weights and activations, later the arena beside them; masters on the host.
    why = common.does_not_fit(
        device, 1.3 * nbytes, 2.3 * nbytes + (0 if common.is_simulated(device) else 8 * common.GIB)
    )
    if why:
        yield {"name": shape.name, "skipped": why, "weights_bytes": nbytes, **shape.sizes}
        return
    begin = time.perf_counter()
    model = training.build(shape, device)
    runner = training.Training(model, shape, device)
    built_s = time.perf_counter() - begin
    row, losses = measure(runner, device, None)
    resident_s = row["step_s"]
    yield {
        "name": f"{shape.name}, resident",
        **shape.sizes,
        "weights_bytes": nbytes,
        "build_s": built_s,
        **row,
    }
    recorded = None
    took = 0.0
    for offload in offloads:
        name = f"{shape.name}, offload {offload}"
        if common.left_s() < 1.5 * took:
            yield {
                "name": name,
                "skipped": f"{common.left_s():.0f} s are left, it takes {took:.0f}",
            }
            continue
        begin = time.perf_counter()
        row, recorded = offloaded(runner, device, offload, recorded, losses, resident_s)
        took = time.perf_counter() - begin
        yield {"name": name, "offload": offload, **row}


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
    from oracle_offload.traffic import stalls_of

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


def offloaded(
    runner: Any, device: str, offload: float, recorded: Any, losses: list[float], resident_s: float
) -> tuple[dict[str, Any], Any]:
    """Attach, train, detach, and let the simulator predict the same.

    `recorded` is what a step asks of its engine, whatever is offloaded: recorded once.
    """
    import replay
    import training

    import oracle_offload
    from oracle_offload.replay import predict

    begin = time.perf_counter()
    manager = oracle_offload.attach(
        runner.model,
        device,
        offload_percent=offload,
        ignore_modules=training.adapters(runner.model),
    )
    attach_s = time.perf_counter() - begin
    try:
        row, found = measure(runner, device, manager)
        row |= {"attach_s": attach_s, "over_resident_ratio": row["step_s"] / resident_s}
        shared = min(len(losses), len(found))
        row["compared_steps_count"] = shared
        row["equal_losses_count"] = sum(
            a == b for a, b in zip(losses[:shared], found[:shared], strict=True)
        )
        if recorded is None:
            recorded = replay.record(manager, runner.step), replay.units_of(manager)
            pictures(runner, device, manager)
        segments = [segment.nbytes for segment in manager.attachment.arena.segments]
    finally:
        begin = time.perf_counter()
        manager.detach(runner.model)
        detach_s = time.perf_counter() - begin
    training.clean(device)
    meter, units = recorded
    return {**row, "detach_s": detach_s, **predict(meter.events, units, segments)}, recorded


def pictures(runner: Any, device: str, manager: Any) -> None:
    """Write the engine's timeline of one step and torch's trace of another, once."""
    import torch

    from oracle_offload.views.timeline import timeline_svg

    timeline, trace = common.artifact("step-timeline.svg"), common.artifact("step-trace.json.gz")
    if timeline is None or trace is None or timeline.exists():
        return
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
    if trace.stat().st_size > TRACE_BYTES:
        size = trace.stat().st_size
        trace.unlink()
        print(f"the trace of {size} bytes is too large to bring home", flush=True)
