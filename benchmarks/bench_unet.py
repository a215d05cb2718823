"""Steps that the host's cost bounds: a UNet of many small layers, and a narrow Flux."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bench_step


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure with copies and without, as `bench_step` does."""
    import training

    with bench_step.clock(device):
        yield from bench_step.rows_of(training.unet_shape(device), (0.91, 0.0), device)
        narrow = training.flux_shape(device, 1024)
        yield from bench_step.rows_of(narrow, (0.91, 1.0, 0.5, 0.0), device)
