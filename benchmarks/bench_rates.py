"""What the card's kernels reach: the rates that a step is predicted from, with the link's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import common

TOKENS, WIDTH = 4608, 3072  # of Flux; its layers are this wide, and 3, 4, 5 and 7 times so
OUTPUTS = (1, 3, 4, 7)


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure products of matrices, traffic within the device, and launches."""
    for name, function in (("matmul", matmul), ("traffic", traffic), ("launches", launches)):
        yield from common.attempt(name, function, device)


def seconds(device: str, work: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of `work` by events, after it has run once."""
    if common.is_simulated(device):
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    import torch

    work()
    pairs = []
    for _ in range(repeats):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        work()
        end_event.record()
        pairs.append((begin_event, end_event))
    torch.cuda.synchronize()
    return float(median(1e-3 * begin.elapsed_time(end) for begin, end in pairs))


def matmul(device: str) -> Iterator[dict[str, Any]]:
    """Yield the rate over the layers of a block, in bfloat16 on random data."""
    import torch

    shrink = 64 if common.is_small(device) else 1
    tokens, width = TOKENS // shrink, WIDTH // shrink
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    total_s, flops = 0.0, 0.0
    for times in OUTPUTS:
        weight = torch.randn(times * width, width, device=device, dtype=torch.bfloat16)
        took_s = seconds(device, lambda w=weight: x @ w.t(), 20)  # type: ignore[misc]
        operations = 2.0 * tokens * width * times * width
        total_s, flops = total_s + took_s, flops + operations
        name = f"{tokens} x {width} x {times * width}"
        yield {"name": name, "took_s": took_s, "matmul_tflops": 1e-12 * operations / took_s}
    yield {"name": "matmul", "took_s": total_s, "tflops": 1e-12 * flops / total_s}


def traffic(device: str) -> Iterator[dict[str, Any]]:
    """Yield the bytes that an elementwise operator reads and writes in a second."""
    import torch

    count = 2**20 if common.is_small(device) else 2**28
    one, other = (torch.randn(count, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(one)
    took_s = seconds(device, lambda: torch.add(one, other, out=out), 10)
    yield {"name": "traffic", "took_s": took_s, "memory_gbps": 1e-9 * 6 * count / took_s}


def launches(device: str) -> Iterator[dict[str, Any]]:
    """Yield the seconds from one kernel to the next, as torch queues them, and where all wait.

    They wait behind a product of matrices that takes longer than the host does for all of them.
    """
    import torch

    count = 400  # fewer than a driver's queue holds
    x = torch.zeros(1, device=device)

    def work() -> None:
        for _ in range(count):
            x.add_(1)

    yield {"name": "launches of torch", "host_launch_s": seconds(device, work, 5) / count}
    if common.is_simulated(device):
        yield {"name": "launches", "launch_s": 0.0}
        return
    width = 256 if common.is_small(device) else 16384
    square = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    least = float("inf")
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        square @ square
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        least = min(least, 1e-3 * begin.elapsed_time(end))
    yield {"name": "launches", "launch_s": least / count}
