"""Bits in the default mode, without any determinism flag: resident and managed, 20 steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import common


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Train one model again and again from the same LoRA and compare."""
    import torch
    import training

    import oracle_offload

    steps = 20
    if common.is_simulated(device):
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
    for offload in (1.0, 0.5):
        manager = oracle_offload.attach(
            runner.model,
            device,
            offload_percent=offload,
            ignore_modules=training.adapters(runner.model),
        )
        try:
            name = f"managed against resident, offload {offload}"
            row = compare(name, first, train(), shape)
            row["acquires_count"] = manager.state.engine.stats()["acquires"]
            assert row["acquires_count"], "no layer was managed"
            yield row
            if offload == 1.0:
                yield compare("managed against itself", train(), train(), shape)
        finally:
            manager.detach(runner.model)
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
