"""Bits of resident and managed: 20 steps in the default mode, ten with determinism flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import common


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Train one model again and again from the same LoRA and compare; then so in a process of its
    own, because cuBLAS reads once what makes it deterministic.
    """
    yield from common.attempt("bits", compared, device, 20, (1.0, 0.5))
    done = subprocess.run(
        [sys.executable, __file__, device],
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=max(1.0, min(300.0, common.left_s())),
        check=False,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    yield from rows
    if done.returncode:
        raise RuntimeError(f"with determinism flags: {' '.join(done.stdout.split())[-600:]}")


def deterministic(device: str) -> Iterator[dict[str, Any]]:
    """Compare with determinism flags, and without the fused kernels for attention.

    Their backward sums in another order each time, whatever the flags say.
    """
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    for row in compared(device, 10, (1.0,)):
        yield {**row, "name": f"{row['name']}, deterministic"}


def compared(device: str, steps: int, offloads: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Train so many steps (two where sizes are small) and compare."""
    import torch
    import training

    import oracle_offload

    if common.is_small(device):
        torch.set_num_threads(1)
        shape, steps = training.flux_shape(device, 1024), 2
    else:
        shape = training.flux(1024, 128, (4, 8), (1024, 256), 768)
    runner = training.Training(training.build(shape, device), shape, device)

    def train() -> tuple[list[float], list[torch.Tensor]]:
        runner.begin()
        for _ in range(steps):
            runner.step()
        losses = [float(loss) for loss in runner.losses]
        return losses, [p.detach().clone() for p in runner.trained]

    first = train()
    yield compare("resident against itself", first, train(), shape)

    def offloaded(name: str, offload: float) -> Iterator[dict[str, Any]]:
        manager = oracle_offload.attach(
            runner.model,
            device,
            offload_percent=offload,
            ignore_modules=training.adapters(runner.model),
        )
        try:
            row = compare(name, first, train(), shape)
            row["acquires_count"] = manager.state.engine.stats()["acquires"]
            assert row["acquires_count"], "no layer was managed"
            yield row
            if offload == 1.0:
                yield compare("managed against itself", train(), train(), shape)
        finally:
            manager.detach(runner.model)

    for offload in offloads:
        name = f"managed against resident, offload {offload}"
        yield from common.attempt(name, offloaded, name, offload)
        if not common.is_simulated(device):
            runner.model.to(device)


def compare(name: str, one: Any, other: Any, shape: Any) -> dict[str, Any]:
    """Return how many losses and trained weights are equal to the last bit."""
    import torch

    losses = list(zip(one[0], other[0], strict=True))
    weights = list(zip(one[1], other[1], strict=True))
    equal = [a == b for a, b in losses]
    return {
        "name": name,
        **shape.sizes,
        "steps_count": len(losses),
        "equal_losses_count": sum(equal),
        "first_unequal_step": equal.index(False) if False in equal else None,
        "largest_loss_difference": max(abs(a - b) for a, b in losses),
        "weights_count": len(weights),
        "equal_weights_count": sum(torch.equal(a, b) for a, b in weights),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(common.ROOT))
    for row in deterministic(sys.argv[1]):
        print(json.dumps(row), flush=True)
