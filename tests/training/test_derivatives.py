"""Gradients of quantised layers' inputs that follow from the weight, and where there is none.

The weights are stand-ins that have the names and attributes of a library's; tests/clients compares
with the libraries to the last bit.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle_offload.layers import derivatives
from oracle_offload.layers.derivatives import Input

IN, OUT = 6, 4


def known(x: Tensor) -> Input:
    """Return what is kept of an input."""
    return Input(x.shape, x.stride(), x.dtype)


class Int8Tensor:
    """As torchao's: rows of int8, one scale for each, or for each group of a row."""

    act_pre_scale: Tensor | None = None

    def __init__(self, group: int = IN) -> None:
        self.qdata = torch.randint(-9, 9, (OUT, IN), dtype=torch.int8)
        self.scale = torch.rand(OUT, IN // group) / 8
        self.block_size = [1, group]

    def dequantize(self) -> Tensor:
        return self.qdata * self.scale.repeat_interleave(self.block_size[1], 1)


class Turned:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def dequantize(self) -> Tensor:
        return self.values.t().contiguous()


class Float8Tensor:
    def __init__(self) -> None:
        self.values = torch.randn(OUT, IN)

    def t(self) -> Turned:
        return Turned(self.values)

    def dequantize(self) -> Tensor:
        return self.values


class IntxUnpackedToInt8Tensor(Float8Tensor):
    pass


class AnotherTensor(Float8Tensor):
    pass


INPUTS = {
    "rows": lambda: torch.randn(3, IN),
    "one row": lambda: torch.randn(IN),
    "batch": lambda: torch.randn(2, 3, IN),
    "batch of columns": lambda: torch.randn(2, IN, 3).transpose(1, 2),
}


@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize(
    "make", [Int8Tensor, lambda: Int8Tensor(2), Float8Tensor, IntxUnpackedToInt8Tensor]
)
def test_the_gradient_is_that_of_a_product_with_the_weight(make: Any, case: str) -> None:
    torch.manual_seed(0)
    weight, x = make(), INPUTS[case]()
    grad = torch.randn(*x.shape[:-1], OUT)
    for bias in (None, torch.randn(OUT)):
        made = SimpleNamespace(weight=weight, bias=bias)
        found = derivatives.torchao(made, grad, known(x))
        assert found is not None and found.shape == x.shape
        torch.testing.assert_close(found, grad @ weight.dequantize())
    if isinstance(weight, Int8Tensor):
        found = derivatives.torchao(made, grad.bfloat16(), known(x.bfloat16()))
        assert found is not None and found.dtype is torch.bfloat16


@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize("group", [IN, 2])
def test_int8_is_multiplied_before_it_is_scaled_where_a_row_has_one_scale(
    group: int, case: str
) -> None:
    """As torchao's forward does it, whose roundings these are; groups are scaled before."""
    torch.manual_seed(0)
    weight = Int8Tensor(group)
    x = INPUTS[case]().bfloat16().requires_grad_()
    flat = x.reshape(-1, IN)
    if group == IN:
        y = flat @ weight.qdata.to(x.dtype).t() * weight.scale.to(x.dtype).flatten()
    else:
        y = flat @ weight.dequantize().to(x.dtype).t()
    y = y.reshape(*x.shape[:-1], OUT)
    grad = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, grad)
    made = SimpleNamespace(weight=weight, bias=None)
    found = derivatives.torchao(made, grad, known(x))
    assert found is not None and torch.equal(found, expected)


def test_no_formula_is_no_gradient() -> None:
    x, grad = torch.randn(3, IN), torch.randn(3, OUT)
    weight = Int8Tensor()
    weight.act_pre_scale = torch.ones(IN)
    for made in (weight, AnotherTensor()):
        given = SimpleNamespace(weight=made, bias=None)
        assert derivatives.torchao(given, grad, known(x)) is None
    given = SimpleNamespace(weight=Int8Tensor(), bias=None)
    assert derivatives.torchao(given, torch.randn(0, OUT), known(torch.randn(0, IN))) is None
    given = SimpleNamespace(weight=SimpleNamespace(is_cuda=True))
    assert derivatives.gguf(given, grad, known(x)) is None


class Library:
    """Stands for a library's autograd function; keeps what its backward is asked."""

    def __init__(self, answer: Tensor) -> None:
        self.answer = answer
        self.asked: list[tuple[Any, Tensor]] = []

    def backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        self.asked.append((ctx, grad))
        return self.answer, None


def test_bitsandbytes_own_derivative_of_int8_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    x, grad = torch.randn(2, 3, IN).bfloat16(), torch.randn(2, 3, OUT)
    library = Library(torch.randn(2, 3, IN))
    functions = SimpleNamespace(MatMul8bitLt=library)
    monkeypatch.setitem(sys.modules, "bitsandbytes.autograd._functions", functions)
    settled: list[int] = []
    for codes in (None, torch.ones(1)):
        made = SimpleNamespace(
            weight=SimpleNamespace(CB=codes),
            state=object(),
            init_8bit_state=lambda: settled.append(1),
        )
        assert derivatives.bitsandbytes_8bit(made, grad, known(x)) is library.answer
        ctx, given = library.asked[-1]
        assert given is grad and ctx.state is made.state
        assert ctx.dtype_A is torch.bfloat16 and ctx.grad_shape == x.shape
        assert ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:])
        assert len(settled) == (codes is not None), "the weight's own codes move to the state"
    assert derivatives.bitsandbytes_8bit(made, grad, known(torch.empty(0, IN))) is None


def test_bitsandbytes_own_derivative_of_4_bits_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    x, grad = torch.randn(2, IN).bfloat16(), torch.randn(2, OUT)
    library = Library(torch.randn(2, IN))
    functions = SimpleNamespace(MatMul4Bit=library)
    monkeypatch.setitem(sys.modules, "bitsandbytes.autograd._functions", functions)

    class Packed(Tensor):
        pass

    def made(dtype: torch.dtype | None, **state: Any) -> Any:
        weight: Any = torch.zeros(IN * OUT // 2, 1, dtype=torch.uint8).as_subclass(Packed)
        weight.quant_state = SimpleNamespace(shape=(OUT, IN), **state)
        return SimpleNamespace(weight=weight, compute_dtype=dtype)

    for computes, wanted in ((None, torch.bfloat16), (torch.float16, torch.float16)):
        layer = made(computes)
        found = derivatives.bitsandbytes_4bit(layer, grad, known(x))
        assert found is not None and found.dtype is torch.bfloat16
        ctx, given = library.asked[-1]
        assert given.dtype is wanted and ctx.state is layer.weight.quant_state
        assert ctx.tensors[1].shape == layer.weight.shape
        assert ctx.needs_input_grad[0] and not any(ctx.needs_input_grad[1:])
    assert derivatives.bitsandbytes_4bit(made(None), grad, known(torch.empty(0, IN))) is None
    assert derivatives.bitsandbytes_4bit(made(None), grad, known(torch.empty(2, IN + 1))) is None
    packed = made(None, packing_format_for_cpu=True)
    assert derivatives.bitsandbytes_4bit(packed, grad, known(x)) is None
    unpacked = made(None, packing_format_for_cpu=False)
    assert derivatives.bitsandbytes_4bit(unpacked, grad, known(x)) is not None


def test_own_derivatives_of_other_libraries_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    x, grad = torch.randn(2, IN), torch.randn(2, OUT)
    library = Library(torch.randn(2, IN))
    quanto = SimpleNamespace(QuantizedLinearFunction=library)
    monkeypatch.setitem(sys.modules, "optimum.quanto.tensor.function", quanto)
    made = SimpleNamespace(weight=object(), weight_scale_inv=object(), block_size=(2, 2))
    assert derivatives.quanto(made, grad, known(x)) is library.answer
    assert library.asked[0][0].saved_tensors[1] is made.weight
    fp8 = SimpleNamespace(FP8LinearFunction=library)
    monkeypatch.setitem(sys.modules, "transformers.integrations.finegrained_fp8", fp8)
    assert derivatives.fp8(made, grad, known(x)) is library.answer
    ctx, given = library.asked[1]
    assert given is grad and ctx.block_size == (2, 2)
    assert ctx.saved_tensors == (made.weight, made.weight_scale_inv)
    assert derivatives.fp8(made, grad, known(x.bfloat16())) is None, "torch would cast it"


def test_the_gradient_of_gguf_is_of_what_the_library_makes_of_the_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, x = torch.randn(OUT, IN), torch.randn(2, 3, IN)
    grad = torch.randn(2, 3, OUT).bfloat16()
    utils = SimpleNamespace(dequantize_gguf_tensor=lambda packed: packed * 2)
    monkeypatch.setitem(sys.modules, "diffusers.quantizers.gguf.utils", utils)
    made = SimpleNamespace(weight=weight, bias=None, compute_dtype=torch.bfloat16)
    found = derivatives.gguf(made, grad, known(x))
    assert found is not None
    torch.testing.assert_close(found, grad @ (weight * 2).bfloat16())
