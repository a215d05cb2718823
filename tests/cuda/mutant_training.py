"""Train on PyTorch's CUDA build with weights offloaded in several ways: what tells a broken wait.

    .venv-cuda/bin/python tests/cuda/mutant_training.py     # PYTHONPATH: the package that is tried

Each way runs under some schedules of the simulated driver, next to the same model resident on the
card. It ends with 0 where all is equal and nothing was reported, and else says what it saw first.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import simulated_cuda
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import oracle_offload
from oracle_offload.train import offload_activations, stream_optimizer

WIDTH = 256
SCHEDULES = (("TIMED", 0), ("RANDOM", 7), ("DELAYED", 41))
WAYS: tuple[dict[str, object], ...] = (
    dict(trains=False, options=dict(offload_percent=1.0)),
    dict(trains=True, options=dict(offload_percent=0.5)),
    # So large that the copy threads are at a layer when it is asked for.
    dict(trains=True, options=dict(offload_percent=1.0, lock="never"), width=2048),
    dict(trains=False, options=dict(offload_percent=1.0, compress="lossless"), coded=True),
    dict(trains=False, options=dict(offload_percent=1.0), from_card=True),
    dict(trains=False, options=dict(offload_percent=1.0), rewritten=True),
    dict(trains=True, options=dict(offload_percent=0.5), stepped=True),
    dict(trains=True, options=dict(offload_percent=0.5), leaving=True),
    dict(trains=False, options=dict(offload_percent=1.0), resized=True),
    dict(trains=False, options=dict(offload_percent=1.0), sampled=True),
)
SMALL_BYTES = 800_000  # of an arena for two layers


class Seen(Exception):
    """What tells that something is wrong."""


def chain(trains: bool, coded: bool, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(8) for part in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers).requires_grad_(trains)
    if coded:  # as trained weights are: they take fewer bytes in code
        for parameter in model.bfloat16().parameters():
            nn.init.normal_(parameter, std=0.02)
    return model


def step(
    model: nn.Sequential,
    x: torch.Tensor,
    optimizer: torch.optim.Optimizer | None,
    checkpoints: bool = True,
) -> list[torch.Tensor]:
    given = x.clone().requires_grad_()
    y = checkpoint_sequential(model, 4, given, use_reentrant=False) if checkpoints else model(given)
    y.square().mean().backward()
    found = [y.detach(), given.grad]
    torch.cuda.synchronize()
    found += [p.grad for p in model.parameters() if p.grad is not None]
    if optimizer:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return [value.cpu().clone() for value in found]


def sample(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what two streams compute at the same time."""
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    with torch.no_grad():
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found += [model(x), model[:8](x)]
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    return [value.cpu() for value in found]


def judge(what: str) -> None:
    torch.cuda.synchronize()
    reports = simulated_cuda.verdict()
    if reports:
        raise Seen(f"{what}: {reports[0].splitlines()[0]}")


def fill(value: float) -> None:
    """Write over what torch's allocator has free: the arena may be there next, or has been."""
    for exponent in range(10, 18):
        torch.empty(1 << exponent, device="cuda").fill_(value)


def train(trains: bool, options: dict[str, object], width: int = WIDTH, **how: bool) -> None:
    model = chain(trains, how.get("coded", False), width)
    resident = copy.deepcopy(model).cuda()
    if how.get("from_card"):
        model = model.cuda()
    fill(1)
    manager = oracle_offload.attach(model, "cuda", **options)  # type: ignore[arg-type]
    if len(manager.layers) != 8:
        raise RuntimeError(f"{len(manager.layers)} layers are managed, not 8")
    optimizers: list[torch.optim.Optimizer | None] = [None, None]
    if how.get("stepped"):  # where the weights are, on the card
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, resident)]
        stream_optimizer(optimizers[0])
    offload = offload_activations(model, least=1024) if how.get("leaving") else None
    for index in range(3):
        torch.manual_seed(index)
        x = torch.randn(16, width, device="cuda").to(model[0].weight.dtype)
        with contextlib.ExitStack() as budget:
            if how.get("resized") and index == 1:
                budget.enter_context(manager.set_budget(vram_budget=SMALL_BYTES))
                fill(3)
            both = zip((model, resident), optimizers, strict=True)
            made = [step(m, x, o, offload is None) for m, o in both]
            if how.get("sampled"):
                made = [sample(m, x) for m in (model, resident)]
        for one, other in zip(*made, strict=True):
            if not torch.equal(one, other):
                raise Seen(f"step {index} has other bits")
        if (trains or how.get("rewritten")) and not how.get("stepped"):
            with torch.no_grad():
                for mine, theirs in zip(model.parameters(), resident.parameters(), strict=True):
                    mine.mul_(0.99)
                    theirs.copy_(mine)
        judge(f"step {index}")
    if how.get("coded") and not manager.state.engine.stats()["decoded_bytes"]:
        raise RuntimeError("nothing was decoded on the card")
    if offload is not None:
        if not offload.counts.left_bytes:
            raise RuntimeError("no activation has left the card")
        offload.remove()
    manager.detach()
    fill(2)
    judge("detach")
    for mine, theirs in zip(model.parameters(), resident.parameters(), strict=True):
        if not torch.equal(mine.cpu(), theirs.cpu()):
            raise Seen("weights come back with other bits")


def main() -> int:
    simulator = simulated_cuda.simulator()
    for name, seed in SCHEDULES:
        for way in WAYS:
            simulator.set_schedule(simulator.Schedule[name], seed)
            try:
                train(**way)  # type: ignore[arg-type]
            except Seen as error:
                print(f"{name.lower()}:{seed}, {way}: {error}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
