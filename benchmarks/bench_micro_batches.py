"""Micro-batches with one fetch of each block, and the plain loop: bytes, time and activations.

The real engine in virtual time. A step of M micro-batches takes at least the longer of computing
and copying what the arena cannot hold, in forward and again in backward (no copy crosses the turn).
Activations are what operators' results take on the device at once, at the most.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import common
from bench_first_step import link_gbps, set_link

WIDTH = 512  # units of 1 MiB
BLOCKS, LAYERS = 16, 3
MICRO_BATCHES = 4
ROWS = 64
CASES = ((True, 0.9), (True, 0.5), (False, 0.9))  # checkpointed, offloaded share
BALANCES = (1.0, 4.0)  # seconds of copying for one micro-batch by those of computing it


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure 16 blocks of three layers, checkpointed and not."""
    if not common.is_simulated(device):
        yield {"name": "micro-batches", "skipped": "virtual time has the bound to compare with"}
        return
    import torch

    torch.set_num_threads(1)
    for checkpointed, share in CASES:
        set_link(1e6)
        computing = train(share, checkpointed, True)
        one_s = computing["seconds"] / MICRO_BATCHES
        # A gradient of a frozen layer costs what forward does, which a checkpoint does again.
        forward_s = computing["seconds"] / (3 if checkpointed else 2)
        for balance in BALANCES:
            copying_s = balance * one_s
            set_link(link_gbps(computing["least_bytes"], copying_s, WIDTH * WIDTH * 4))
            loop = train(share, checkpointed, False)
            together = train(share, checkpointed, True)
            bound = max(forward_s, copying_s / 2)
            bound += max(computing["seconds"] - forward_s, copying_s / 2)
            yield {
                "name": f"{'' if checkpointed else 'not '}checkpointed, offload {share}, "
                f"copying {balance} times computing",
                "loop_bytes": loop["bytes"],
                "together_bytes": together["bytes"],
                "together_over_loop_ratio": together["bytes"] / loop["bytes"],
                "together_over_least_ratio": together["bytes"] / together["least_bytes"],
                "loop_s": loop["seconds"],
                "together_s": together["seconds"],
                "bound_s": bound,
                "together_over_bound_ratio": together["seconds"] / bound,
                "loop_activation_bytes": loop["activation_bytes"],
                "together_activation_bytes": together["activation_bytes"],
            }


def train(share: float, checkpointed: bool, interleave: bool) -> dict[str, Any]:
    """Train until the order is known; return what the last step took."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    import oracle_offload
    from oracle_offload.engine import simulator
    from oracle_offload.model.witness import Witness

    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.Sequential(
            *[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        )
        for _ in range(BLOCKS)
    ).requires_grad_(False)

    def step(x: Any) -> Any:
        y = x.clone()
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False) if checkpointed else block(y)
        return y.square().mean()

    manager = oracle_offload.attach(blocks, "cpu", offload_percent=share)
    try:
        inputs = [torch.ones(ROWS, WIDTH, requires_grad=True) for _ in range(MICRO_BATCHES)]
        for _ in range(4):
            before = manager.attachment.state.engine.stats()["h2d_bytes"]
            begin = simulator.finish()
            with Witness(strict=False, clock=True):
                for x in inputs:
                    x.grad = None
                oracle_offload.accumulate(step, inputs, interleave=interleave)
            seconds = simulator.finish() - begin
            moved = manager.attachment.state.engine.stats()["h2d_bytes"] - before
        for x in inputs:
            x.grad = None
        with _live_bytes()() as live:
            oracle_offload.accumulate(step, inputs, interleave=interleave)
        least = manager.attachment.x_min_bytes()
    finally:
        manager.detach()
    return {
        "bytes": moved,
        "seconds": seconds,
        "least_bytes": least,
        "activation_bytes": live.peak,
    }


def _live_bytes() -> Any:
    """Return a dispatch mode that adds up the memory of operators' results while it is held."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class LiveBytes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.now = self.peak = 0
            self._known: set[int] = set()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            for one in result if isinstance(result, tuple | list) else (result,):
                if isinstance(one, torch.Tensor):
                    self._add(one.untyped_storage(), args)
            return result

        def _add(self, storage: Any, args: Any) -> None:
            taken = {one.untyped_storage()._cdata for one in args if isinstance(one, torch.Tensor)}
            if storage._cdata in self._known or storage._cdata in taken:
                return
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._end, storage._cdata, storage.nbytes())

        def _end(self, key: int, nbytes: int) -> None:
            self._known.discard(key)
            self.now -= nbytes

    return LiveBytes
