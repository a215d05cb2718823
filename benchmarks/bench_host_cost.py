"""What a managed call costs the host, over a driver whose calls cost nothing.

- a managed Linear over ``F.linear``, and an empty ``autograd.Function`` over ``F.linear`` in the
  same run: the price of any autograd function is the floor, and the ratio is ours (goal: 2.5);
- a module whose own forward computes with what it is lent, and the plain module: any module,
  fused experts, and convolutions, which have an operator of their own, too;
- acquire and release of a hit in C (goal: 1 microsecond).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

FEATURES = 16  # so small that the product itself costs next to nothing
LAYERS = 8
CALLS = 50
REPEATS = 30


def compile_c(folder: Path) -> tuple[Path, Path]:
    """Return (null driver, engine benchmark), built into `folder`."""
    import c_build
    import kernels

    build = c_build.Build(c_build.optimised(), folder)
    driver = [build.object("benchmarks/null_driver.c")]
    engine = build.engine(str(kernels.build("off", folder).source))
    return (
        build.link(folder / "null_driver.so", driver, ["-shared"]),
        build.program("benchmarks/bench_engine.c", engine),
    )


@contextlib.contextmanager
def null_driver() -> Iterator[Path]:
    """Make device "cpu" run over the null driver; yields the engine benchmark's folder."""
    from oracle_offload.engine import simulator

    with tempfile.TemporaryDirectory() as folder:
        library, _ = compile_c(Path(folder))
        with mock.patch.object(simulator, "library_path", lambda: library):
            yield Path(folder)


def seconds_per_call(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return each call's least mean over a round; rounds alternate: all see the same load."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(REPEATS + 1):  # the first warms up
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if repeat:
                times[name].append((time.perf_counter() - start) / CALLS)
    return {name: min(values) for name, values in times.items()}


def managed_call(device: str = "cpu") -> list[dict[str, Any]]:
    """Time a chain of layers, forward and with backward, made of each kind in turn; per layer."""
    import torch
    from torch.nn import functional as F

    import oracle_offload

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
            ctx.layer = layer
            return F.linear(x, layer.weight)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0].mm(ctx.layer.weight), None

    torch.set_num_threads(1)
    x = torch.randn(1, FEATURES, device=device, requires_grad=True)
    plain = torch.nn.Linear(FEATURES, FEATURES, bias=False, device=device).requires_grad_(False)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(LAYERS))
    ).requires_grad_(False)
    manager = oracle_offload.attach(model, device, offload_percent=0.0)
    layers: list[Any] = [layer._layer_memory_manager for layer in model]
    ones = torch.ones(1, FEATURES, device=device)

    def chain(calls: list[Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            y = x
            for call in calls:
                y = call(y)
            return y

        return run

    kinds = {
        "linear": chain([lambda y: F.linear(y, plain.weight)] * LAYERS),
        "empty": chain([lambda y: Empty.apply(y, plain)] * LAYERS),  # type: ignore[no-untyped-call]
        "managed": chain(list(layers)),
        "module": chain([plain] * LAYERS),
        "managed_module": chain(list(model)),
    }
    rows = []

    def backward_of(call: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(), x, ones)

    with_backward = {name: backward_of(call) for name, call in kinds.items()}
    for what, calls in (("forward", kinds), ("forward_backward", with_backward)):
        found = {name: seconds / LAYERS for name, seconds in seconds_per_call(calls).items()}
        floor = found["empty"] - found["linear"]
        rows.append(
            {
                "name": f"managed_linear_{what}",
                **{f"{name}_s": value for name, value in found.items()},
                "over_empty_function_ratio": (found["managed"] - found["linear"]) / floor,
                "module_over_empty_function_ratio": (found["managed_module"] - found["module"])
                / floor,
            }
        )
    manager.detach(model)
    return rows


def lent_call(device: str = "cpu") -> list[dict[str, Any]]:
    """Time modules whose own forward computes, forward and with backward; per module."""
    import torch

    import oracle_offload

    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.randn(FEATURES, FEATURES))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, self.matrix)

    torch.set_num_threads(1)
    x = torch.randn(1, FEATURES, device=device, requires_grad=True)
    plain = torch.nn.Sequential(*(Bare() for _ in range(LAYERS))).requires_grad_(False)
    lent = torch.nn.Sequential(*(Bare() for _ in range(LAYERS))).requires_grad_(False)
    with nothing_is_small():
        manager = oracle_offload.attach(lent, device, offload_percent=0.0)
    assert len(manager.layers) == LAYERS

    def allocations() -> int:
        count: int = manager.state.engine.stats()["allocations"]
        return count

    for _ in range(2):
        torch.autograd.grad(lent(x), x, torch.ones_like(x))
    before = allocations()
    rows = rows_of("lent_module", {"plain": plain, "lent": lent}, x, LAYERS)
    rows[-1]["allocations_count"] = allocations() - before
    assert not rows[-1]["allocations_count"], "a steady step allocates"
    manager.detach(lent)
    return rows


def rows_of(
    name: str, kinds: Mapping[str, Callable[[Any], Any]], x: Any, calls: int
) -> list[dict[str, Any]]:
    """Time each of `kinds`, forward and with backward for the input; per one of `calls` modules."""
    import torch

    ones = torch.ones_like(next(iter(kinds.values()))(x))
    backward = {
        kind: (lambda call=call: torch.autograd.grad(call(x), x, ones))
        for kind, call in kinds.items()
    }
    forward = {kind: (lambda call=call: call(x)) for kind, call in kinds.items()}
    rows = []
    for what, timed in (("forward", forward), ("forward_backward", backward)):
        found = {kind: seconds / calls for kind, seconds in seconds_per_call(timed).items()}
        rows.append(
            {
                "name": f"{name}_{what}",
                **{f"{kind}_s": value for kind, value in found.items()},
                **{
                    f"cost_of_{kind}_s": found[kind] - found["plain"]
                    for kind in found
                    if kind != "plain"
                },
            }
        )
    return rows


@contextlib.contextmanager
def nothing_is_small() -> Iterator[None]:
    """Let tensors of any size be lent."""
    from oracle_offload.model import selection

    with (
        mock.patch.object(selection, "SMALL_BYTES", 0),
        mock.patch.object(selection, "SMALL_TOGETHER", (0, 0)),
    ):
        yield


def convolution_call(device: str = "cpu") -> list[dict[str, Any]]:
    """Time convolutions by their operator, and the same ones by the general loan."""
    import torch

    import oracle_offload
    from oracle_offload.layers import kinds

    torch.set_num_threads(1)
    rows = []
    for name, made, shape in (
        ("conv2d", torch.nn.Conv2d, (1, 4, 4, 4)),
        ("conv3d", torch.nn.Conv3d, (1, 4, 3, 4, 4)),
    ):
        models = {
            kind: torch.nn.Sequential(*(made(4, 4, 1, bias=False) for _ in range(LAYERS)))
            .to(device)
            .requires_grad_(False)
            for kind in ("plain", "operator", "lent")
        }
        with nothing_is_small():
            managers = [oracle_offload.attach(models["operator"], device, offload_percent=0.0)]
            with mock.patch.object(kinds, "KINDS", []):
                managers.append(oracle_offload.attach(models["lent"], device, offload_percent=0.0))
        assert [layer.lends_to_code for m in managers for layer in m.layers] == [
            *[False] * LAYERS,
            *[True] * LAYERS,
        ]
        x = torch.randn(shape, device=device, requires_grad=True)
        rows += rows_of(name, models, x, LAYERS)
        for manager in managers:
            manager.detach()
    return rows


def experts_call(device: str = "cpu") -> list[dict[str, Any]]:
    """Time a block of fused experts that are lent, and the plain one; per implementation.

    What an operator of its own could save at most is the difference. Without transformers there is
    nothing to time.
    """
    import torch

    import oracle_offload

    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    except ImportError:
        return []
    torch.set_num_threads(1)
    rows = []
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        config = Qwen3MoeConfig(
            hidden_size=FEATURES,
            moe_intermediate_size=FEATURES,
            num_experts=8,
            num_experts_per_tok=2,
        )
        config._experts_implementation = implementation

        def block(config: Any = config) -> torch.nn.Module:
            made = Qwen3MoeSparseMoeBlock(config)
            for parameter in made.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
            return made.to(device, torch.bfloat16).requires_grad_(False)

        plain, lent = block(), block()
        with nothing_is_small():
            manager = oracle_offload.attach(lent, device, offload_percent=0.0)
        assert any(layer.lends_to_code for layer in manager.layers)
        x = torch.randn(1, 8, FEATURES, device=device, dtype=torch.bfloat16, requires_grad=True)

        rows += rows_of(f"experts_{implementation}", {"plain": plain, "lent": lent}, x, 1)
        manager.detach()
    return rows


def engine_hit(folder: Path) -> list[dict[str, Any]]:
    """Run the C benchmark."""
    output = subprocess.run(
        [folder / "bench_engine", folder / "null_driver.so"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


def benchmarks(device: str) -> list[dict[str, Any]]:
    """Measure on the host alone: `device` makes no difference to this file."""
    with null_driver() as folder:
        return [
            *managed_call(),
            *lent_call(),
            *convolution_call(),
            *experts_call(),
            *engine_hit(folder),
        ]
