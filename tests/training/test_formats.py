"""Quantised modules are recognised by what they hold, and what is not recognised is named.

The classes are stand-ins; tests/clients compute with those of libraries.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from oracle_offload.layers.flatten import held_codes
from oracle_offload.layers.kinds import layer_type
from oracle_offload.layers.quantised import is_quantised, unknown_codes

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


def module_of(
    kind: Any, weight: Any = None, buffers: Any = (), of: Any = None, **attributes: Any
) -> Any:
    """Return a module of a class with this weight, whatever that is, and buffers with values."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    if isinstance(weight, Tensor):
        made._parameters["weight"] = weight
    for name in buffers:
        made.register_buffer(name, torch.ones(2) if of is None else of)
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
OWN = named("a.library.Linear")
NOW = SimpleNamespace(has_fp16_weights=False)
QUANTISED = weight_of("bitsandbytes.Params4bit", UINT8, quant_state=NOW)
CODED = weight_of("a.library.Coded", UINT8)
OF_TWO = made_of_two("a.library.OfTwo")


def two_inputs(self: Any, x: Tensor, scores: Tensor) -> Tensor:
    return x


def an_option(self: Any, x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x


CASES: dict[str, tuple[Any, bool]] = {
    "bytes": (module_of(OWN, INT8), True),
    "unsigned bytes": (module_of(OWN, UINT8), True),
    "float8": (module_of(OWN, FP8), True),
    "packed into words": (module_of(OWN, torch.zeros(2, 2, dtype=torch.int32)), True),
    "a mask": (module_of(OWN, torch.zeros(2, 2, dtype=torch.bool)), False),
    "numbers of rows": (module_of(OWN, torch.zeros(2, 2, dtype=torch.int64)), False),
    "complex": (module_of(OWN, torch.zeros(2, 2, dtype=torch.complex64)), False),
    "half": (module_of(OWN, torch.zeros(2, 2, dtype=torch.float16)), False),
    "a table of bytes": (module_of(OWN, torch.zeros(2, dtype=torch.uint8)), False),
    "a table of float8": (module_of(OWN, FP8[0]), False),
    "of a class of Parameters": (module_of(OWN, CODED), True),
    "of such a class, and wide": (module_of(OWN, weight_of("a.P", torch.ones(2, 2))), False),
    "of two": (module_of(OWN, OF_TWO), True),
    "of two, torch's own": (module_of(OWN, made_of_two("torch.distributed.T")), False),
    "of another library": (module_of(OWN, made_of_two("torchao.T")), True),
    "a weight in a buffer": (module_of(OWN, buffers=("weight",), of=INT8), True),
    "codes in a buffer": (module_of(OWN, buffers=("codes",), of=INT8), True),
    "a scale in a buffer": (module_of(OWN, buffers=("scale",)), False),
    "8-bit": (module_of(EIGHT, INT8, state=NOW), True),
    "8-bit, inherited": (module_of(inheriting(EIGHT), INT8, state=NOW), True),
    "8-bit, not yet": (module_of(EIGHT, torch.ones(2, 2), state=NOW), False),
    "8-bit, with another forward": (
        module_of(named("a.B", EIGHT, forward=forward_anew), INT8, state=NOW),
        True,
    ),
    "4-bit": (module_of(FOUR, QUANTISED), True),
    "torch's forward, of two": (module_of(nn.Linear, OF_TWO), True),
    "torch's forward, inherited": (module_of(inheriting(nn.Linear), OF_TWO), True),
    "torch's forward, of a class of Parameters": (module_of(nn.Linear, CODED), True),
    "torch's forward, plain": (module_of(nn.Linear, FP8), False),
    "torch's forward, in a buffer": (
        module_of(nn.Linear, buffers=("weight", "weight_scale"), of=FP8),
        False,
    ),
    "two inputs": (module_of(named("a.B", forward=two_inputs), INT8), False),
    "an option": (module_of(named("a.B", forward=an_option), INT8), False),
    "plain": (nn.Linear(2, 2), False),
    "without a weight": (nn.ReLU(), False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_module_is_quantised_by_what_it_holds_and_how_it_is_called(case: str) -> None:
    module, expected = CASES[case]
    assert is_quantised(module) is expected
    module.child = nn.Linear(2, 2)
    assert not is_quantised(module), "a module with children is many layers"
    del module.child


def test_what_is_quantised_and_computed_with_by_no_module_is_named() -> None:
    plain = nn.Linear(2, 2)
    linear = "torch.nn.modules.linear.Linear"
    expected = {
        "": nn.Parameter(torch.ones(2)),
        f"torch.int8 in {linear}": nn.Parameter(INT8, requires_grad=False),
        f"torch.float8_e4m3fn in {linear}": nn.Parameter(FP8, requires_grad=False),
        f"torch.int64 in {linear}": nn.Parameter(torch.ones(2).long(), requires_grad=False),
        f"a.library.Coded in {linear}": weight_of("a.library.Coded", torch.ones(2)),
    }
    assert {unknown_codes(plain, weight): weight for weight in expected.values()} == expected
    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert unknown_codes(plain, half) == ""
    known, _ = CASES["float8"]
    assert unknown_codes(known, nn.Parameter(FP8, requires_grad=False)) == ""


def test_codes_of_a_kernels_stack_are_found_where_they_are_kept() -> None:
    kind = named("transformers.integrations.mxfp4.Mxfp4GptOssExperts")
    stacks = {
        name: SimpleNamespace(storage=SimpleNamespace(data=UINT8.clone()))
        for name in ("gate_up_proj", "down_proj")
    }
    scale = SimpleNamespace(
        weight_scale=SimpleNamespace(storage=SimpleNamespace(data=UINT8.clone()))
    )
    for made in (kind, inheriting(kind)):
        module = module_of(made, **stacks, down_proj_precision_config=scale)
        assert held_codes(module) == {
            "gate_up_proj.storage.data": stacks["gate_up_proj"].storage.data,
            "down_proj.storage.data": stacks["down_proj"].storage.data,
            "down_proj_precision_config.weight_scale.storage.data": scale.weight_scale.storage.data,
        }
    module.gate_up_proj = SimpleNamespace(
        storage=SimpleNamespace(data=UINT8.as_subclass(nn.Buffer))
    )
    assert len(held_codes(module)) == 2, "what is no plain tensor is left to its owner"
    module.cache = SimpleNamespace(keys=torch.ones(2, 2))
    assert len(held_codes(module)) == 2, "numbers to compute with may be a cache"
    module.child = nn.Linear(2, 2)
    assert held_codes(module) == {} == held_codes(nn.Linear(2, 2))
    assert held_codes(module_of(nn.Linear, OF_TWO)) == {}, "it is the weight's own"


def test_compiled_modules_are_not_quantised_and_of_no_kind() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(2, 2))
    assert not is_quantised(scripted)
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
    found = layer_type(CASES["float8"][0])
    assert found is not None and found.__name__ == "QuantisedLayer"
    assert layer_type(nn.LayerNorm(2)) is None is layer_type(Other(2, 2))
