"""Steps that the host's cost bounds: a UNet of many small layers, and a narrow Flux."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bench_step
import common


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure with copies and without, as `bench_step` does."""
    import training

    with bench_step.clock(device):
        for shape, offloads in (
            (training.unet_shape(device), (0.91, 0.0)),
            (training.flux_shape(device, 1024), (0.91, 1.0, 0.5, 0.0)),
        ):
            yield from common.attempt(shape.name, bench_step.rows_of, shape, offloads, device)
