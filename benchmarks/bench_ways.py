"""What the ways to compute with a weight cost the host: the loan, a handle, a lent module.

Chains of one kind of layer alternate in one run, by the time of the processor, over a driver whose
calls cost nothing, every use a hit. A plain layer is called, which is one loan around its operator
with a derivative written out; its weight is read by code that computes by itself, which is a
handle; and its own forward computes with Parameters that are lent to it, as those of any module.
Rows of an embedding are read in the host's memory; where its table is lent, all of it travels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import bench_host_cost
from bench_operators import median_seconds

LAYERS = 8
CHANNELS, SIZE, FEATURES, ROWS, WORDS = 8, 8, 64, 8, 1000


def kinds() -> dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any], tuple[int, ...]]]:
    """Return of each kind what makes a layer, computes with its weight, and an input's shape."""
    from torch import nn
    from torch.nn import functional as F

    def convolution(axes: int) -> tuple[Any, Any, tuple[int, ...]]:
        make: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        compute: Any = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
        return (
            lambda: make(CHANNELS, CHANNELS, 3, padding=1),
            lambda layer, x: compute(x, layer.weight, layer.bias, 1, 1),
            (1, CHANNELS, *[SIZE if axes < 3 else SIZE // 2] * axes),
        )

    return {
        "linear": (
            lambda: nn.Linear(FEATURES, FEATURES),
            lambda layer, x: F.linear(x, layer.weight, layer.bias),
            (ROWS, FEATURES),
        ),
        **{f"conv{axes}d": convolution(axes) for axes in (1, 2, 3)},
        "embedding": (
            lambda: nn.Embedding(WORDS, FEATURES),
            lambda layer, x: F.embedding(x, layer.weight),
            (ROWS,),
        ),
    }


def rows_of(kind: str, trained: bool) -> Iterator[dict[str, Any]]:
    """Time a kind of layers by each way, forward and with backward."""
    import torch

    import oracle_offload
    from oracle_offload.layers import kinds as managed_kinds

    make, compute, shape = kinds()[kind]
    is_chain = kind != "embedding"  # whose rows are looked up by the same numbers in each layer

    class Layers(torch.nn.Module):
        def __init__(self, call: Callable[[Any, Any], Any]) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(make() for _ in range(LAYERS))
            self.call = [call]

        def forward(self, x: Any) -> list[Any]:
            (call,) = self.call
            found = []
            for layer in self.layers:
                found.append(call(layer, x))
                x = found[-1] if is_chain else x
            return found[-1:] if is_chain else found

    def called(layer: Any, x: Any) -> Any:
        return layer(x)

    chains = {"resident": Layers(called), "loan": Layers(called), "handle": Layers(compute)}
    chains["lent"] = Layers(called)
    managers = []
    with bench_host_cost.nothing_is_small():
        for name in [*chains][1:]:
            kept = managed_kinds.KINDS if name != "lent" else []
            with mock.patch.object(managed_kinds, "KINDS", kept):
                model = chains[name].requires_grad_(trained)
                managers.append(oracle_offload.attach(model, "cpu", offload_percent=0.0))
    chains["resident"].requires_grad_(trained)
    assert {len(manager.layers) for manager in managers} == {LAYERS}
    assert all(layer.lends_to_code for layer in managers[-1].layers)
    x = torch.randn(shape, requires_grad=True) if is_chain else torch.arange(ROWS)
    ones = [torch.ones_like(y) for y in chains["resident"](x)]

    def both(model: Any) -> Callable[[], object]:
        def call() -> None:
            model.zero_grad(set_to_none=True)
            x.grad = None
            torch.autograd.backward(model(x), ones)

        return call

    ways: dict[str, Callable[[Any], Callable[[], object]]] = {
        "forward": lambda model: lambda: model(x),
        **({"forward_backward": both} if is_chain or trained else {}),
    }
    for what, timed in ways.items():
        load = os.getloadavg()[0]
        calls = {name: timed(model) for name, model in chains.items()}
        found = {name: value / LAYERS for name, value in median_seconds(calls).items()}
        yield {
            "name": f"{kind}_{'trained' if trained else 'frozen'}_{what}",
            "load_count": round(load, 1),
            **{f"{name}_s": value for name, value in found.items()},
            **{f"{name}_over_loan_ratio": found[name] / found["loan"] for name in chains},
        }
    for manager in managers:
        manager.detach()


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Measure on the host alone: `device` makes no difference to this file."""
    import torch

    torch.set_num_threads(1)
    with bench_host_cost.null_driver():
        for kind in kinds():
            for trained in (False, True):
                yield from rows_of(kind, trained)
