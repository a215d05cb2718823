"""What one managed ``nn.Linear`` costs the host, beside the least that an autograd function can.

Four chains of modules alternate in one run, by the time of the processor, over a driver whose calls cost nothing, every use a
hit: ``nn.Linear``; a module with an ``autograd.Function`` that calls ``F.linear`` and ``mm`` and
does nothing else; a managed ``nn.Linear`` by the loan in Python; and, where they were built, by the
operators in C++ (goal: 1.15 of the second).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import bench_host_cost

ROWS, FEATURES = 8, 64
LAYERS = 8
CALLS = 100
ROUNDS = 7


@contextlib.contextmanager
def operators(mode: str) -> Iterator[None]:
    """Let models be attached with the operators in C++, or without."""
    before = os.environ.get("ORACLE_OFFLOAD_OPS")
    os.environ["ORACLE_OFFLOAD_OPS"] = mode
    try:
        yield
    finally:
        if before is None:
            del os.environ["ORACLE_OFFLOAD_OPS"]
        else:
            os.environ["ORACLE_OFFLOAD_OPS"] = before


def median_seconds(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median over rounds of each call's mean, in seconds of the processor."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():  # warm up
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.process_time()  # not what others take of a loaded machine
            for _ in range(CALLS):
                call()
            times[name].append((time.process_time() - start) / CALLS)
    return {name: statistics.median(values) for name, values in times.items()}


@contextlib.contextmanager
def chains() -> Iterator[dict[str, Any]]:
    """Yield the chains by name, attached for so long."""
    import torch
    from torch.nn import functional as F

    import oracle_offload
    from oracle_offload.ops.load import operators as built

    class Least(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
            ctx.layer = layer
            return F.linear(x, layer.weight, layer.bias)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0].mm(ctx.layer.weight), None

    class Module(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = Least.apply(x, self)  # type: ignore[no-untyped-call]
            return found

    def chain(kind: type[torch.nn.Linear]) -> torch.nn.Sequential:
        made = (kind(FEATURES, FEATURES) for _ in range(LAYERS))
        return torch.nn.Sequential(*made).requires_grad_(False)

    found = {"linear": chain(torch.nn.Linear), "function": chain(Module)}
    managers = []
    for name, mode in (("managed_python", "off"), ("managed", "auto")):
        if mode != "off" and built() is None:
            continue
        found[name] = chain(torch.nn.Linear)
        with operators(mode):
            managers.append(oracle_offload.attach(found[name], "cpu", offload_percent=0.0))
        assert len(managers[-1].layers) == LAYERS
        assert all((layer.native is None) == (mode == "off") for layer in managers[-1].layers)
    yield found
    for manager in managers:
        manager.detach()


def benchmarks(device: str) -> list[dict[str, Any]]:
    """Measure on the host alone: `device` makes no difference to this file."""
    import torch

    torch.set_num_threads(1)
    x = torch.randn(ROWS, FEATURES)
    leaf = x.clone().requires_grad_()
    ones = torch.ones(ROWS, FEATURES)
    ways: dict[str, Callable[[Any], Callable[[], object]]] = {
        "forward_without_grad": lambda model: lambda: model(x),
        "forward": lambda model: lambda: model(leaf),
        "forward_backward": lambda model: lambda: torch.autograd.grad(model(leaf), leaf, ones),
    }
    rows = []
    with bench_host_cost.null_driver(), chains() as found:
        for what, made in ways.items():
            calls = {name: made(model) for name, model in found.items()}
            seconds = {name: s / LAYERS for name, s in median_seconds(calls).items()}
            rows.append(
                {
                    "name": f"operator_linear_{what}",
                    **{f"{name}_s": value for name, value in seconds.items()},
                    **{
                        f"{name}_over_function_ratio": value / seconds["function"]
                        for name, value in seconds.items()
                        if name.startswith("managed")
                    },
                }
            )
    return rows
