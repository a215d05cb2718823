"""Train a small model with its weights offloaded: the torch-level test of the mutation gate.

    PYTHONPATH=. python tests/mutation/torch_training.py

Three optimizer steps and a forward on the simulated device, under the schedules that starve copies
and kernels, next to the same model resident: equal to the last bit, and not one race reported.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn

import oracle_offload
from oracle_offload.engine import simulator
from oracle_offload.model.witness import Witness


def losses(model: nn.Module) -> list[torch.Tensor]:
    """Return what three steps and an evaluation yield: losses, gradients, outputs."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    for _ in range(3):
        batch = torch.randn(4, 48)
        loss = model(batch).square().mean()
        loss.backward()
        seen.append(loss.detach().clone())
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        seen.append(model(torch.ones(2, 48)).clone())
    return seen


def main() -> int:
    """Compare; 0 when all is equal and nothing was reported."""
    for schedule in (
        simulator.Schedule.TIMED,
        simulator.Schedule.STARVE_COPY,
        simulator.Schedule.STARVE_COMPUTE,
    ):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(8):
            layers += [nn.Linear(48, 48), nn.Tanh()]
        model = nn.Sequential(*layers)
        for frozen in list(model.parameters())[:6]:
            frozen.requires_grad_(False)
        resident = copy.deepcopy(model)
        simulator.set_schedule(schedule, 3)
        manager = oracle_offload.attach(model, "cpu", offload_percent=0.8)
        with Witness():
            found = losses(model)
        manager.detach()
        expected = losses(resident)
        found += model.parameters()
        expected += resident.parameters()
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            if not torch.equal(one, other):
                print(f"value {index} differs under {schedule.name}", file=sys.stderr)
                return 1
        reports = simulator.reports()
        if reports:
            print(f"{schedule.name}: {reports[0]}".replace("\n", " "), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
