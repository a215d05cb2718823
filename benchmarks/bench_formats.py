"""Quantised weights with the kernels of their libraries: managed against resident, to the last bit.

Continuous integration has no GPU and puts plain torch in the places of some of these kernels
(`tests/clients/stand_in_kernels.py`). What cannot be made or computed with here is skipped, and its
row says why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import common

WIDTH = 1024
TOKENS = 64
LAYERS = 3


def linears(device: str, **options: Any) -> Any:
    """Return a chain of plain layers in bfloat16."""
    import torch

    made = (torch.nn.Linear(WIDTH, WIDTH, **options) for _ in range(LAYERS))
    return torch.nn.Sequential(*made).to(device, torch.bfloat16)


def torchao(config: str, **options: Any) -> Callable[[str], Any]:
    """Return a maker of layers that torchao has quantised."""

    def make(device: str) -> Any:
        quantization = import_module("torchao.quantization")
        model = linears(device)
        quantization.quantize_(model, getattr(quantization, config)(**options))
        return model

    return make


def quanto(device: str) -> Any:
    """Return layers that optimum-quanto has quantised."""
    library = import_module("optimum.quanto")
    model = linears(device)
    library.quantize(model, weights=library.qint8)
    library.freeze(model)
    return model


def bitsandbytes(kind: str, **options: Any) -> Callable[[str], Any]:
    """Return a maker of layers of bitsandbytes, which quantise as they reach the device."""

    def make(device: str) -> Any:
        import torch

        library = import_module("bitsandbytes")
        layer = getattr(library.nn, kind)
        made = (layer(WIDTH, WIDTH, bias=False, **options) for _ in range(LAYERS))
        return torch.nn.Sequential(*made).to(torch.bfloat16).to(device)

    return make


def fp8_linears(device: str) -> Any:
    """Return layers of transformers with a scale for each block."""
    import torch

    layer = import_module("transformers.integrations.finegrained_fp8").FP8Linear
    options: dict[str, Any] = dict(block_size=(128, 128), has_bias=False)
    made = [layer(WIDTH, WIDTH, **options) for _ in range(LAYERS)]
    for one in made:
        one.weight.data = torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn)
        one.weight_scale_inv.data.fill_(1 / 64)
    return torch.nn.Sequential(*made).to(device)


def routed(experts: Any) -> Any:
    """Return a module that calls experts with what the first features of the tokens choose."""
    import torch

    class Routed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, x: Any) -> Any:
            scores, chosen = x[:, :4].float().softmax(-1).topk(2)
            return self.experts(x, chosen, scores.to(x.dtype))

    return Routed()


def sizes() -> Any:
    """Return what experts of transformers read of a configuration."""
    return SimpleNamespace(
        hidden_size=WIDTH,
        num_experts=4,
        num_local_experts=4,
        intermediate_size=WIDTH,
        moe_intermediate_size=WIDTH,
        hidden_act="silu",
        _experts_implementation="eager",
    )


def fp8_experts(device: str) -> Any:
    """Return fused experts of transformers in FP8."""
    import torch

    library = import_module("transformers.integrations.finegrained_fp8")
    made = library.FP8Experts(sizes(), block_size=(128, 128))
    for stack in ("gate_up_proj", "down_proj"):
        weight = getattr(made, stack)
        weight.data = torch.randn(weight.shape).to(weight.dtype)
        getattr(made, f"{stack}_scale_inv").data.fill_(1 / 64)
    return routed(made.to(device))


def mxfp4_experts(device: str) -> Any:
    """Return gpt-oss's experts, laid out for the kernel that transformers takes from its hub."""
    import torch

    mxfp4 = import_module("transformers.integrations.mxfp4")
    hub = import_module("transformers.integrations.hub_kernels")
    kernels = hub.get_kernel("kernels-community/gpt-oss-triton-kernels", version=1)
    vars(mxfp4)["triton_kernels_hub"] = kernels
    made = mxfp4.Mxfp4GptOssExperts(sizes()).to(device)
    for stack, rows in (("gate_up_proj", 2 * WIDTH), ("down_proj", WIDTH)):
        shape = 4, rows, WIDTH // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device=device)
        scales = torch.full(shape, 122, dtype=torch.uint8, device=device)
        mxfp4.swizzle_mxfp4_convertops(blocks, scales, made, stack, device, kernels)
    return routed(made)


def nvfp4_linears(device: str) -> Any:
    """Return layers of transformers in NVFP4."""
    import torch

    nvfp4 = import_module("transformers.integrations.nvfp4")
    made = torch.nn.Sequential(*(nvfp4.NVFP4Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in made:
        values = {"layer.weight": torch.randn(WIDTH, WIDTH) / WIDTH**0.5}
        packed = nvfp4.NVFP4Quantize(torch.device(device)).convert(values)
        for name, tensor in packed.items():
            setattr(layer, name.removeprefix("layer."), torch.nn.Buffer(tensor))
    return made


INT4: dict[str, Any] = dict(group_size=128, set_inductor_config=False)
# How it is made, and whether its library has a derivative.
FORMATS: dict[str, tuple[Callable[[str], Any], bool]] = {
    "torchao int8": (torchao("Int8WeightOnlyConfig"), True),
    "torchao float8": (torchao("Float8WeightOnlyConfig"), True),
    "torchao int8, dynamic": (torchao("Int8DynamicActivationInt8WeightConfig"), False),
    "torchao int4, tile_packed_to_4d": (
        torchao("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d", **INT4),
        False,
    ),
    "torchao int4, plain": (torchao("Int4WeightOnlyConfig", **INT4), False),
    "quanto qint8": (quanto, True),
    "bitsandbytes int8": (bitsandbytes("Linear8bitLt", has_fp16_weights=False), True),
    "bitsandbytes nf4": (bitsandbytes("Linear4bit", quant_type="nf4"), True),
    "FP8Linear": (fp8_linears, True),
    "FP8Experts": (fp8_experts, True),
    "MXFP4": (mxfp4_experts, False),
    "NVFP4": (nvfp4_linears, False),
}
SIMULATED = ("torchao int8", "torchao int4, tile_packed_to_4d")  # the one computes, the other not


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Compare each format with itself and with the resident model."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # kernels of a hub: those that are here already
    simulated = common.is_simulated(device)
    for name, (make, trains) in FORMATS.items():
        if simulated and name not in SIMULATED:
            yield {"name": name, "skipped": "on a GPU alone"}
        else:
            yield from common.attempt(name, compare, make, trains, device)


def compare(make: Callable[[str], Any], trains: bool, device: str) -> dict[str, Any]:
    """Return how many results are equal; ``skipped`` where there are none of the resident model."""
    import torch

    import oracle_offload

    def step(model: Any) -> list[Any]:
        torch.manual_seed(1)
        x = torch.randn(TOKENS, WIDTH).to(device, torch.bfloat16).requires_grad_(trains)
        with torch.set_grad_enabled(trains):
            y = model(x)
        if not trains:
            return [y]
        y.float().square().mean().backward()
        return [y.detach(), x.grad]

    try:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(make(device).requires_grad_(False))
        resident, managed = models
        expected, again = step(resident), step(resident)
    except Exception as error:  # a library, a kernel or a card that is not there
        return {"skipped": f"{type(error).__name__}: {error}"[:300]}
    manager = oracle_offload.attach(managed, device)
    try:
        row: dict[str, Any] = {
            "layers_count": len(manager.layers),
            "managed_bytes": sum(n for layer in manager.layers for _, n in layer.extents()),
            "results_count": len(expected),
            "equal_to_itself_count": count_equal(again, expected),
            "equal_count": min(count_equal(step(managed), expected) for _ in range(2)),
            "acquires_count": manager.state.engine.stats()["acquires"],
        }
    finally:
        manager.detach()
    assert row["acquires_count"], "no layer was managed"
    if row["equal_count"] < row["equal_to_itself_count"]:
        row["error"] = "the managed model differs from the resident one, which equals itself"
    return row


def count_equal(found: list[Any], expected: list[Any]) -> int:
    """Return how many are equal to the last bit."""
    import torch

    return sum(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
