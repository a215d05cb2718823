"""The first step of a run that knows its order from a file, on the simulated clock, by link.

The arena is empty when it begins, so it copies 2M - C at least; the bound is the longer of that and
of computing. Forward alone needs all of M, and two thirds of computing come after it (recompute and
backward of frozen layers): the bound by phases is the sum of these, where that is more. What a copy
costs in addition to its bytes is part of copying.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

WIDTH = 512  # units of 1 MiB
BLOCKS, LAYERS = 16, 3  # of each block; each layer is a unit
SHARES = (1.0, 0.75, 0.5)
BALANCES = (0.5, 1.0, 2.0)  # seconds of copying by those of computing


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure 16 checkpointed blocks of three layers."""
    if not common.is_simulated(device):
        yield {"name": "first step", "skipped": "bench_step.py has the card's"}
        return
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for share in SHARES:
            set_link(1e6)
            _, computing, least, weights = run(None, share)
            for balance in BALANCES:
                set_link(link_gbps(least, balance * computing, weights / (BLOCKS * LAYERS)))
                path = str(Path(folder, f"{share}-{balance}.json"))
                unknown = run(path, share)[0]
                first, steady, *_ = run(path, share)
                bound = max(balance, 1.0) * computing
                phased = max(bound, (balance * weights / least + 2 / 3) * computing)
                name = f"offload {share}, copying {balance} times computing"
                yield {
                    "name": name,
                    "share": share,
                    "balance": balance,
                    "bound_s": bound,
                    "phased_bound_s": phased,
                    "first_step_s": first,
                    "steady_step_s": steady,
                    "without_file_s": unknown,
                    "first_over_bound_ratio": first / bound,
                    "phased_over_bound_ratio": phased / bound,
                    "first_over_steady_ratio": first / steady,
                    "first_over_phased_bound_ratio": first / phased,
                    "steady_over_bound_ratio": steady / bound,
                }


def link_gbps(nbytes: float, seconds: float, unit_bytes: float) -> float:
    """Return the rate at which so many bytes, unit by unit, take so long."""
    from oracle_offload.engine import simulator

    latency_s = simulator.get_device(0).copy_latency_s * nbytes / unit_bytes
    return nbytes / (seconds - latency_s) * 1e-9


def set_link(gbps: float) -> None:
    """Give the simulated device a link."""
    from oracle_offload.engine import simulator

    device = simulator.get_device(0)
    device.link_gbps = gbps
    simulator.set_device(0, device)


def run(path: str | None, share: float) -> tuple[float, float, int, int]:
    """Train; return the first and last step's seconds, the first's least bytes, the weights'."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    import oracle_offload
    from oracle_offload.engine import simulator
    from oracle_offload.model.budget import OFFLOADED
    from oracle_offload.model.witness import Witness

    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.Sequential(
            *[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        )
        for _ in range(BLOCKS)
    ).requires_grad_(False)
    manager = oracle_offload.attach(
        blocks, "cpu", offload_percent=share, ram_budget=OFFLOADED, order_file=path
    )
    try:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])  # whose steps end training's
        seconds = []
        for _ in range(6):
            begin = simulator.finish()
            with Witness(strict=False, clock=True):
                y = torch.ones(16, WIDTH).requires_grad_()
                for block in blocks:
                    y = checkpoint(block, y, use_reentrant=False)
                y.square().mean().backward()
                optimizer.step()
            seconds.append(simulator.finish() - begin)
        weights = manager.attachment.weight_bytes
        held = min(manager.attachment.arena.capacity_bytes, weights)
    finally:
        manager.detach()
    return seconds[0], seconds[-1], 2 * weights - held, weights
