"""Models are often frozen, or unfrozen, after they were attached."""

from __future__ import annotations

import torch
from equality import attached
from torch import nn


def test_layers_frozen_after_attach_stay_on_the_device_over_an_optimizer_step():
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
    nbytes = 256 * 256 * 4
    with attached(model, offload_percent=0.0) as manager:
        model[:5].requires_grad_(False)
        optimizer = torch.optim.SGD(model[5].parameters(), lr=0.1)
        x = torch.randn(4, 256)
        moved = []
        for _ in range(4):
            before = manager.state.engine.stats()["h2d_bytes"]
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            moved.append(manager.state.engine.stats()["h2d_bytes"] - before)
        assert moved[-1] == nbytes, f"only the trained layer travels again, not {moved}"

        place = model[0].weight.data_ptr()
        model[5].requires_grad_(False)
        model[0].requires_grad_(True)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        for _ in range(3):
            before = manager.state.engine.stats()["h2d_bytes"]
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            moved.append(manager.state.engine.stats()["h2d_bytes"] - before)
        assert moved[-1] == nbytes, f"another layer trains now: {moved}"
        assert model[0].weight.data_ptr() == place, "it is in memory of its own already"
