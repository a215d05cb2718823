"""Write the examples of docs/summary.md from simulated trainings: `python tools/summary_page.py`.

Each is trained on a device whose bound is known, in virtual time, so the figures are those of any
machine. The host's memory is left out, because it is not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "summary.md"
BLOCK = re.compile(
    r"(<!-- example: (\w+) -->\n```\n).*?(```\n<!-- end of example -->\n)", re.DOTALL
)

WIDTH, BATCH, DEPTH, STEPS = 512, 16, 24, 12
# By name: GB/s of the link, seconds that the host takes before each layer.
DEVICES = {"link": (0.5, 0.0), "compute": (25.0, 0.0), "host": (25.0, 2e-3)}


@contextmanager
def trained(name: str, after_step: Callable[[], object] = lambda: None) -> Iterator[Any]:
    """Yield the manager of the training `name` after its steps."""
    import torch
    from torch import nn

    import oracle_offload
    from oracle_offload.engine import simulator

    link_gbps, host_s = DEVICES[name]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                simulator.advance(host_s)
                x = block(x)
            return x

    torch.manual_seed(0)
    beside = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([beside], lr=0.1)
    with simulator.device("rtx4090", link_gbps=link_gbps, tflops=0.02):
        model = Net().requires_grad_(False)
        manager = oracle_offload.attach(model, "cpu", offload_percent=0.75)
        for _ in range(STEPS):
            x = torch.randn(BATCH, WIDTH, requires_grad=True)
            (model(x).square().mean() + beside.sum()).backward()
            simulator.finish()  # as loss.item() waits for a GPU
            optimizer.step()
            after_step()
        yield manager
        manager.detach()


def example(name: str) -> str:
    """Return what `memory_summary` says of the training `name`."""
    with trained(name) as manager:
        report = manager.memory_summary(abbreviated=True)
    text = str(replace(report, memory=report.memory[:1]))
    return text + "\n" if name == "link" else text.split("\n\n")[0] + "\n"


def written(page: str) -> str:
    """Return the page with its examples made again."""
    return BLOCK.sub(lambda block: block[1] + example(block[2]) + block[3], page)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
