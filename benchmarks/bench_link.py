"""What the link carries: sizes, kinds of host memory, directions, and gaps between copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import common


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure with the C program, which queues faster than Python can."""
    # The simulated driver moves every byte on this processor.
    largest, per_figure = (2**20, 2**20) if common.is_simulated(device) else (2**28, 2**30)
    yield from common.c_rows(device, "driver_calls.c", ["link", str(largest), str(per_figure)])
