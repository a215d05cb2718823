"""Weights that are not page-locked: how fast they travel, and what the training thread notices.

Over a driver whose calls cost nothing, and whose copies to the device are a memcpy of the thread
that queues them. So each byte is copied twice by the host: more than a real driver asks of it.
- `streamed`: layers with next to no work of their own; the copies are the step;
- `overlapped`: layers that compute about as long as their weights take to be copied.
Each is compared to the same model resident, in the same run, round by round; torch computes on one
thread. `thread_s` is the processor time of the thread that trains, whatever else the machine does:
where it copies nothing itself, it is the resident's.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

WIDTH = 2048
LAYERS = 16
ROUNDS = 7
ROWS = {"streamed": 1, "overlapped": 64}


def forward_seconds(model: Any, x: Any) -> tuple[float, float]:
    """Return what one forward takes: seconds that pass, and seconds that this thread works."""
    start, thread_start = time.perf_counter(), time.thread_time()
    model(x)
    return time.perf_counter() - start, time.thread_time() - thread_start


def measure(name: str, lock: str) -> dict[str, Any]:
    """Time forwards of a managed model and of the same one resident."""
    import torch

    import oracle_offload

    torch.manual_seed(0)
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    resident = copy.deepcopy(model)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    x = torch.randn(ROWS[name], WIDTH)
    with torch.no_grad():
        manager = oracle_offload.attach(model, "cpu", lock=lock)
        rounds = [
            (forward_seconds(model, x), forward_seconds(resident, x)) for _ in range(1 + ROUNDS)
        ][1:]
        assert torch.equal(model(x), resident(x))
        stats = manager.state.engine.stats()
        manager.detach()
    seconds = median(managed[0] for managed, _ in rounds)
    return {
        "name": f"unlocked_{name}_{lock}",
        "forward_s": seconds,
        "resident_s": median(resident[0] for _, resident in rounds),
        "over_resident_ratio": median(managed[0] / resident[0] for managed, resident in rounds),
        "thread_s": median(managed[1] for managed, _ in rounds),
        "resident_thread_s": median(resident[1] for _, resident in rounds),
        "streamed_gbps": nbytes / seconds / 1e9,
        "copied_gbps": stats["unlocked_h2d_bytes"] / (stats["unlocked_h2d_seconds"] or 1) / 1e9,
        "locked_bytes": stats["locked_bytes"],
        "pageable_bytes": stats["pageable_bytes"],
        "processors_count": os.cpu_count(),
    }


def benchmarks(device: str) -> list[dict[str, Any]]:
    """Measure on the host alone: `device` makes no difference to this file."""
    import torch
    from bench_host_cost import null_driver

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with null_driver():
            return [measure(name, lock) for name in ROWS for lock in ("never", "auto")]
    finally:
        torch.set_num_threads(threads)
