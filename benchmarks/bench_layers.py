"""What a managed layer's call costs the host on the device under test, and plain layers'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure as bench_host_cost does, with the device's own driver in place of none."""
    import bench_host_cost
    import common

    if common.is_simulated(device):  # times of its bookkeeping are no figures
        bench_host_cost.REPEATS = 3
    yield from bench_host_cost.managed_call(device)
