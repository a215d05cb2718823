"""What each driver call costs the host, on streams that are idle or busy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import common


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure with the C program, over the project's own table of calls."""
    rounds = 3 if common.is_simulated(device) else 20
    yield from common.c_rows(device, "driver_calls.c", ["calls", str(rounds)])
