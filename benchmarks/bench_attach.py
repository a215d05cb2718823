"""Attach of 3 GiB against a clone of the same bytes, over a driver whose calls cost nothing.

What touches fresh memory first pays for it: a virtual machine gets each page from its host then. So
one round goes before the measured ones, attach and clone alternate, and the figure is the median of
five ratios. The goal is 1.2.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

GIB = 1 << 30
MODEL_BYTES = 3 * GIB
NEEDED_BYTES = 12 * GIB  # the model, its clone, and room that no other program has to free
ROUNDS = 5


def free_bytes() -> int | None:
    """Return the memory that is available without swapping; None where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            rows = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(rows["MemAvailable"].split()[0]) << 10


def build() -> Any:
    """Return 48 layers of 64 MiB each, written once."""
    import torch

    layers = []
    for _ in range(MODEL_BYTES // (4 * 4096 * 4096)):
        layer = torch.nn.utils.skip_init(torch.nn.Linear, 4096, 4096, bias=False)
        torch.nn.init.constant_(layer.weight, 1e-3)
        layers.append(layer)
    return torch.nn.Sequential(*layers).requires_grad_(False)


def one_round(model: Any) -> tuple[float, float]:
    """Return the seconds of an attach, and of a clone of every weight."""
    import oracle_offload

    gc.collect()
    start = time.perf_counter()
    manager = oracle_offload.attach(model, "cpu", offload_percent=1.0)
    attach_s = time.perf_counter() - start
    manager.detach()
    start = time.perf_counter()
    copies = [parameter.detach().clone() for parameter in model.parameters()]
    copy_s = time.perf_counter() - start
    assert len(copies) == len(list(model))
    return attach_s, copy_s


def benchmarks(device: str) -> list[dict[str, Any]]:
    """Measure on the host alone: `device` makes no difference to this file."""
    from bench_host_cost import null_driver

    free = free_bytes()
    if free is not None and free < NEEDED_BYTES:
        return [
            {
                "name": "attach_against_copy",
                "skipped": f"needs {NEEDED_BYTES / GIB:.0f} GiB of free memory, there are "
                f"{free / GIB:.1f}",
            }
        ]
    with null_driver():
        model = build()
        rounds = [one_round(model) for _ in range(1 + ROUNDS)][1:]
    ratios = [attach_s / copy_s for attach_s, copy_s in rounds]
    return [
        {
            "name": "attach_against_copy",
            "attach_s": median(attach_s for attach_s, _ in rounds),
            "copy_s": median(copy_s for _, copy_s in rounds),
            "model_bytes": MODEL_BYTES,
            "over_copy_ratio": median(ratios),
            **{f"round_{number}_ratio": ratio for number, ratio in enumerate(ratios, 1)},
            "processors_count": os.cpu_count(),
        }
    ]
