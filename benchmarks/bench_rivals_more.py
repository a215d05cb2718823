"""The contenders of `bench_rivals` that are worth less: resident, FSDP2, RamTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bench_rivals


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Run them as `bench_rivals` runs the others."""
    yield from bench_rivals.benchmarks(device, bench_rivals.MORE_RUNS)
