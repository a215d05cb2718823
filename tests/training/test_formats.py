"""Quantised formats are recognised by the classes of modules and weights, and what is not is named.

The classes are stand-ins that have the names of a library's; tests/clients compute with the real
ones.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from oracle_offload.layers import formats
from oracle_offload.layers.formats import format_of, held_tensors, unknown_format
from oracle_offload.layers.kinds import layer_type

INT8 = torch.zeros(2, 2, dtype=torch.int8)
UINT8 = torch.zeros(2, 2, dtype=torch.uint8)
FP8 = torch.zeros(2, 2, dtype=torch.float8_e4m3fn)


def forward(self: Any, x: Tensor) -> Tensor:
    return x


def forward_anew(self: Any, x: Tensor) -> Tensor:
    return x


def named(name: str, base: type = nn.Module, **own: Any) -> Any:
    """Return a class of this full name, with a forward of its own unless one is given."""
    module, _, last = name.rpartition(".")
    return type(last, (base,), {"forward": forward, **own, "__module__": module})


def inheriting(base: type, name: str = "a.library.Linear") -> Any:
    """Return a class that computes with its base's forward."""
    module, _, last = name.rpartition(".")
    return type(last, (base,), {"__module__": module})


def module_of(kind: Any, weight: Any = None, buffers: Any = (), **attributes: Any) -> Any:
    """Return a module of a class with this weight, whatever that is."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    if isinstance(weight, Tensor):
        made._parameters["weight"] = weight
    for name in buffers:
        made.register_buffer(name, torch.ones(2))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def weight_of(name: str, tensor: Tensor, **attributes: Any) -> Any:
    """Return a tensor of a subclass of this full name."""
    module, _, last = name.rpartition(".")
    kind = type(last, (Tensor,), {"__module__": module})
    made = tensor.as_subclass(kind)
    made.__dict__.update(attributes)
    return made


def made_of_two(name: str, meta: Any = None) -> Any:
    """Return a tensor that is made of two, of a class of this full name."""
    module, _, last = name.rpartition(".")
    flatten = {"__tensor_flatten__": lambda self: (["a", "b"], meta)}
    kind = type(last, (TwoTensor,), {"__module__": module, **flatten})
    return kind(torch.ones(2, 2), torch.ones(2, 2))


EIGHT = named("bitsandbytes.nn.modules.Linear8bitLt")
FOUR = named("bitsandbytes.nn.modules.Linear4bit")
GGUF = named("diffusers.quantizers.gguf.utils.GGUFLinear")
MADE_OF_TENSORS = "a class of tensors that are made of others"
QUANTO = named("optimum.quanto.nn.qlinear.QLinear")
OSTRIS = named("toolkit.util.ostris_quant.OstrisLinear")
FP8_LINEAR = named("transformers.integrations.finegrained_fp8.FP8Linear")
NVFP4_LINEAR = named("transformers.integrations.nvfp4.NVFP4Linear")
COMFY = named("somebody.Linear")
NOW, NOT = SimpleNamespace(has_fp16_weights=False), SimpleNamespace(has_fp16_weights=True)
BITSANDBYTES_8BIT, BITSANDBYTES_4BIT = "bitsandbytes int8", "bitsandbytes 4-bit"
QUANTISED = weight_of("bitsandbytes.Params4bit", UINT8, quant_state=NOW)
GGUF_WEIGHT = weight_of("diffusers.GGUFParameter", UINT8)
QUANTO_WEIGHT = made_of_two("optimum.quanto.tensor.WeightQBytesTensor")
DYNAMIC = "torchao, dynamic activations"
COMFY_NAME = "weight, weight_scale and comfy_quant"
CASES: dict[str, tuple[Any, str | None]] = {
    "8-bit": (module_of(EIGHT, INT8, state=NOW), BITSANDBYTES_8BIT),
    "8-bit, inherited": (module_of(inheriting(EIGHT), INT8, state=NOW), BITSANDBYTES_8BIT),
    "8-bit, not yet": (module_of(EIGHT, torch.ones(2, 2), state=NOW), None),
    "8-bit, kept in half": (module_of(EIGHT, INT8, state=NOT), None),
    "8-bit, with another forward": (
        module_of(named("a.B", EIGHT, forward=forward_anew), INT8, state=NOW),
        None,
    ),
    "8-bit, of another library": (module_of(named("x.Linear8bitLt"), INT8, state=NOW), None),
    "4-bit": (module_of(FOUR, QUANTISED), BITSANDBYTES_4BIT),
    "4-bit, not yet": (module_of(FOUR, weight_of("b.P", UINT8, quant_state=None)), None),
    "4-bit, plain": (module_of(FOUR, UINT8), None),
    "4-bit, of another library": (module_of(named("x.Linear4bit"), QUANTISED), None),
    "gguf": (module_of(GGUF, GGUF_WEIGHT), "GGUF"),
    "gguf, plain": (module_of(GGUF, UINT8), None),
    "gguf, of another library": (module_of(named("x.GGUFLinear"), GGUF_WEIGHT), None),
    "quanto": (module_of(QUANTO, QUANTO_WEIGHT, activation_qtype=None), "optimum-quanto"),
    "quanto itself": (
        module_of(
            named("optimum.quanto.QLinear"), made_of_two("optimum.quanto.T"), activation_qtype=None
        ),
        "optimum-quanto",
    ),
    "quanto, activations": (module_of(QUANTO, QUANTO_WEIGHT, activation_qtype="qint8"), None),
    "quanto, a module of others": (
        module_of(named("optimum.quantos.Q"), QUANTO_WEIGHT, activation_qtype=None),
        None,
    ),
    "quanto, a weight of others": (
        module_of(QUANTO, made_of_two("optimum.other.T"), activation_qtype=None),
        MADE_OF_TENSORS,
    ),
    "quanto, a weight of one": (
        module_of(QUANTO, weight_of("optimum.quanto.T", UINT8), activation_qtype=None),
        None,
    ),
    "torchao": (module_of(nn.Linear, made_of_two("torchao.AffineQuantizedTensor")), "torchao"),
    "torchao, inherited": (
        module_of(inheriting(nn.Linear), made_of_two("torchao.AffineQuantizedTensor")),
        "torchao",
    ),
    "torchao, switches off": (
        module_of(nn.Linear, made_of_two("torchao.q.T", {"act_quant_kwargs": None})),
        "torchao",
    ),
    "torchao, another switch off": (
        module_of(nn.Linear, made_of_two("torchao.q.T", {"activation_quantization": None})),
        "torchao",
    ),
    "torchao, switched on": (
        module_of(nn.Linear, made_of_two("torchao.q.T", {"act_quant_kwargs": "some"})),
        DYNAMIC,
    ),
    "torchao, another switched on": (
        module_of(
            nn.Linear,
            made_of_two("torchao.q.T", {"act_quant_kwargs": None, "activation_quantization": 1}),
        ),
        DYNAMIC,
    ),
    "torchao, without switches": (module_of(nn.Linear, made_of_two("torchao.q.T", {})), DYNAMIC),
    "torchao, another forward": (module_of(COMFY, made_of_two("torchao.q.T", {})), None),
    "of others": (module_of(nn.Linear, made_of_two("torchaos.q.T", {})), MADE_OF_TENSORS),
    "of torch itself": (module_of(nn.Linear, made_of_two("torch.distributed.T", {})), None),
    "torchao, of one": (module_of(nn.Linear, weight_of("torchao.q.T", UINT8)), None),
    "fp8": (module_of(FP8_LINEAR, FP8), "FP8Linear"),
    "fp8, wide": (module_of(FP8_LINEAR, torch.ones(2, 2)), None),
    "nvfp4": (module_of(NVFP4_LINEAR, UINT8), "NVFP4Linear"),
    "nvfp4, wide": (module_of(NVFP4_LINEAR, INT8), None),
    "comfy": (module_of(COMFY, FP8, ("weight_scale", "comfy_quant")), COMFY_NAME),
    "comfy, wide": (module_of(COMFY, torch.ones(2), ("weight_scale", "comfy_quant")), None),
    "comfy, no scale": (module_of(COMFY, FP8, ("comfy_quant",)), None),
    "comfy, plain forward": (module_of(nn.Linear, FP8, ("weight_scale", "comfy_quant")), None),
    "ostris": (module_of(OSTRIS, buffers=("codes",)), "AI-Toolkit's OstrisLinear"),
    "ostris, empty": (module_of(OSTRIS, FP8), None),
    "a weight in a buffer": (module_of(FP8_LINEAR, buffers=("other",)), None),
    "plain": (nn.Linear(2, 2), None),
    "without a weight": (nn.ReLU(), None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_format_is_recognised_by_its_classes_and_nothing_else(case: str) -> None:
    module, name = CASES[case]
    found = format_of(module)
    assert (found.name if found else None) == name
    module.child = nn.Linear(2, 2)
    assert format_of(module) is None, "a module with children is many layers"
    del module.child


def test_a_weight_that_is_a_buffer_counts() -> None:
    module = module_of(FP8_LINEAR)
    module.register_buffer("weight", FP8)
    assert format_of(module) is formats._FP8


@pytest.mark.parametrize(
    ("case", "reads_input"),
    [
        ("8-bit", False),
        ("4-bit", False),
        ("gguf", False),
        ("quanto", False),
        ("torchao", False),
        ("torchao, switched on", True),
        ("fp8", False),
        ("nvfp4", True),
        ("comfy", True),
        ("ostris", True),
    ],
)
def test_a_gradient_goes_by_the_weight_alone_or_reads_the_input(
    case: str, reads_input: bool
) -> None:
    found = format_of(CASES[case][0])
    assert found is not None and found.reads_input is reads_input


def test_what_is_quantised_in_no_known_way_is_named() -> None:
    plain = nn.Linear(2, 2)
    linear = "torch.nn.modules.linear.Linear"
    expected = {
        "": nn.Parameter(torch.ones(2)),
        f"torch.int8 in {linear}": nn.Parameter(INT8, requires_grad=False),
        f"torch.float8_e4m3fn in {linear}": nn.Parameter(FP8, requires_grad=False),
        f"torch.int64 in {linear}": nn.Parameter(torch.ones(2).long(), requires_grad=False),
        f"a.library.Coded in {linear}": weight_of("a.library.Coded", torch.ones(2)),
    }
    assert {unknown_format(plain, weight): weight for weight in expected.values()} == expected
    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert unknown_format(plain, half) == ""
    known, _ = CASES["fp8"]
    assert unknown_format(known, nn.Parameter(FP8, requires_grad=False)) == ""


def test_tensors_of_a_kernels_stack_are_found_where_they_are_kept() -> None:
    kind = named("transformers.integrations.mxfp4.Mxfp4GptOssExperts")
    stacks = {
        name: SimpleNamespace(storage=SimpleNamespace(data=torch.ones(2)))
        for name in ("gate_up_proj", "down_proj")
    }
    scale = SimpleNamespace(
        weight_scale=SimpleNamespace(storage=SimpleNamespace(data=torch.ones(3)))
    )
    for made in (kind, inheriting(kind)):
        module = module_of(made, **stacks, down_proj_precision_config=scale)
        assert held_tensors(module) == {
            "gate_up_proj.storage.data": stacks["gate_up_proj"].storage.data,
            "down_proj.storage.data": stacks["down_proj"].storage.data,
            "down_proj_precision_config.weight_scale.storage.data": scale.weight_scale.storage.data,
        }
    module.gate_up_proj = SimpleNamespace(
        storage=SimpleNamespace(data=UINT8.as_subclass(nn.Buffer))
    )
    assert len(held_tensors(module)) == 2, "what is no plain tensor is left to its owner"
    assert held_tensors(nn.Linear(2, 2)) == {}


def bias_after(settle: Any, x: Tensor, **attributes: Any) -> tuple[Any, Any]:
    """Return a module's bias, of 16 bits before, once a library's forward has seen an input."""
    module = module_of(FOUR, UINT8, **attributes)
    module.bias = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    before = module.bias
    settle(module, x)
    assert module.bias is before
    return module, module.bias.dtype


def test_what_a_first_input_settles_stays() -> None:
    wide, half = torch.ones(1), torch.ones(1, dtype=torch.bfloat16)
    assert bias_after(formats._settle_8bit, wide)[1] is torch.float32
    assert bias_after(formats._settle_8bit, half)[1] is torch.bfloat16
    asked: list[Tensor] = []
    for is_set, computes, x, dtype in (
        (False, None, wide, torch.float32),
        (True, None, half, torch.bfloat16),
        (True, torch.float16, wide, torch.float16),
    ):
        module, found = bias_after(
            formats._settle_4bit,
            x,
            set_compute_type=asked.append,
            compute_type_is_set=is_set,
            compute_dtype=computes,
        )
        assert module.compute_type_is_set is True and found is dtype
    assert [x is wide for x in asked] == [True], "it is settled once"
    without = module_of(FOUR, UINT8, bias=None)
    formats._settle_8bit(without, wide)


def test_compiled_modules_are_of_no_format_and_no_kind() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(2, 2))
    assert format_of(scripted) is None
    assert layer_type(scripted) is None


def test_a_kind_is_that_of_the_class_that_computes() -> None:
    class Other(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input

    kinds = {
        nn.Linear: "LinearLayer",
        nn.Conv1d: "Conv1dLayer",
        nn.Conv2d: "Conv2dLayer",
        nn.Conv3d: "Conv3dLayer",
    }
    for kind, name in kinds.items():
        sizes = (2, 2) if kind is nn.Linear else (2, 2, 1)
        found = layer_type(kind(*sizes))
        assert found is not None and found.__name__ == name
    found = layer_type(nn.Embedding(2, 2))
    assert found is not None and found.__name__ == "EmbeddingLayer"
    found = layer_type(CASES["fp8"][0])
    assert found is not None and found.__name__ == "QuantisedLayer"
    assert layer_type(nn.LayerNorm(2)) is None is layer_type(Other(2, 2))
