"""Memory under training: at 97% of a cap nothing is retried, and many steps leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Train at the cap, then train for long."""
    import torch

    if common.is_simulated(device):
        torch.set_num_threads(1)
    yield from common.attempt("at 97% of the cap", at_the_cap, device)
    yield from common.attempt("short steps", many_steps, device)


def at_the_cap(device: str) -> dict[str, Any]:
    """Let torch have 1 / 0.97 of what the training was seen to need; 200 steps."""
    import torch
    import training

    import oracle_offload

    simulated, small = common.is_simulated(device), common.is_small(device)
    steps = 6 if small else 200
    shape = (
        training.flux_shape(device, 1024)
        if small
        else training.flux(1024, 128, (4, 8), (1024, 256), 768)
    )
    runner = training.Training(training.build(shape, "cpu"), shape, device)
    manager = oracle_offload.attach(
        runner.model,
        device,
        offload_percent=0.5,
        ignore_modules=training.adapters(runner.model),
    )
    try:
        runner.begin()
        for _ in range(5):  # the arena grows to the largest block, cuBLAS takes its workspace
            runner.step()
        common.synchronize(device)
        row: dict[str, Any] = {"name": "at 97% of the cap", **shape.sizes, "steps_count": steps}
        if not simulated:
            # What is needed at once, from a cache that holds nothing else.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(3):
                runner.step()
            torch.cuda.synchronize()
            needed = torch.cuda.max_memory_reserved()
            total = torch.cuda.get_device_properties(0).total_memory
            cap = int(needed / 0.97)
            torch.cuda.set_per_process_memory_fraction(cap / total)
            row |= {"cap_bytes": cap, "needed_bytes": needed}
            before = torch.cuda.memory_stats()
        for _ in range(steps):
            runner.step()
        common.synchronize(device)
        if simulated:
            row["why_no_cap"] = "the simulated device's memory is not torch's to cap"
        else:
            after = torch.cuda.memory_stats()
            for key in ("num_ooms", "num_alloc_retries"):
                row[f"{key}_count"] = after[key] - before[key]
            row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
            if row["num_ooms_count"] or row["num_alloc_retries_count"]:
                row["error"] = "torch's allocator ran out of memory below the cap"
    finally:
        if not simulated:
            torch.cuda.set_per_process_memory_fraction(1.0)
        manager.detach(runner.model)
    return row


def host_bytes() -> int:
    """Return the resident host memory of this process."""
    import resource

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux: the largest so far
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


def many_steps(device: str) -> dict[str, Any]:
    """Take 1,000 short steps; from the 200th on nothing may grow."""
    import torch

    import oracle_offload

    simulated = common.is_simulated(device)
    steps, width = (100, 64) if common.is_small(device) else (1000, 1024)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    model.requires_grad_(False)
    manager = oracle_offload.attach(model, device, offload_percent=0.75)
    x = torch.randn(16, width, device=device, requires_grad=True)

    def figures() -> dict[str, int]:
        common.synchronize(device)
        stats = manager.state.engine.stats()
        return {
            "host": host_bytes(),
            "device": 0 if simulated else torch.cuda.memory_allocated(),
            "reserved": 0 if simulated else torch.cuda.memory_reserved(),
            "objects": stats["allocations"],
            "acquires": stats["acquires"],
        }

    try:
        early: dict[str, int] = {}
        for number in range(steps):
            x.grad = None
            model(x).square().mean().backward()
            if number + 1 == steps // 5:
                early = figures()
        late = figures()
    finally:
        manager.detach(model)
    row: dict[str, Any] = {
        "name": f"{steps} short steps",
        "width": width,
        "steps_count": steps,
        "host_growth_bytes": late["host"] - early["host"],
        "device_growth_bytes": late["device"] - early["device"],
        "reserved_growth_bytes": late["reserved"] - early["reserved"],
        "driver_objects_growth_count": late["objects"] - early["objects"],
        "acquires_count": late["acquires"],
    }
    grown = [
        key
        for key, most in (
            ("host_growth_bytes", 16 * 2**20),  # the interpreter's own noise
            ("device_growth_bytes", 0),
            ("reserved_growth_bytes", 0),
            ("driver_objects_growth_count", 0),
        )
        if row[key] > most
    ]
    if grown:
        row["error"] = f"not flat: {', '.join(f'{key} {row[key]}' for key in grown)}"
    return row
