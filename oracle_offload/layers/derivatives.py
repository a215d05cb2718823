"""Gradients of the input of quantised layers, where they follow from the weight alone.

Each repeats, operator by operator, what torch derives from the library's forward, or runs the
library's own derivative; each is tested against the resident model to the last bit. Where one
answers None, the forward operator is run again instead.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .linear import input_gradient


class Input(NamedTuple):
    """What is known of an input that was not kept."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def bitsandbytes_8bit(made: Any, grad: Tensor, x: Input) -> Tensor | None:
    """The library's own derivative, which is the same for both of its products."""
    if 0 in x.shape:
        return None
    if made.weight.CB is not None:
        made.init_8bit_state()
    ctx = SimpleNamespace(
        is_empty=False,
        needs_input_grad=(True, False, False, False, False),
        tensors=(None, None, None),
        tensor_states=(None, None),
        state=made.state,
        dtype_A=x.dtype,
        grad_shape=x.shape,
    )
    found: Tensor = _own("bitsandbytes.autograd._functions").MatMul8bitLt.backward(ctx, grad)[0]
    return found


def bitsandbytes_4bit(made: Any, grad: Tensor, x: Input) -> Tensor | None:
    """The library's own derivative, between the casts that its layer makes."""
    state = made.weight.quant_state
    packed = getattr(state, "packing_format_for_cpu", False)
    if 0 in x.shape or x.shape[-1] != state.shape[1] or packed:
        return None
    ctx = SimpleNamespace(
        is_empty=False,
        needs_input_grad=(True, False, False, False, False),
        tensors=(None, made.weight.view(-1, 1)),
        state=state,
    )
    grad = grad.to(made.compute_dtype or x.dtype)
    backward = _own("bitsandbytes.autograd._functions").MatMul4Bit.backward
    found: Tensor = backward(ctx, grad)[0].to(x.dtype)
    return found


def quanto(made: Any, grad: Tensor, x: Input) -> Tensor | None:
    """The library's own derivative."""
    ctx = SimpleNamespace(saved_tensors=(None, made.weight), needs_input_grad=(True, False, False))
    backward = _own("optimum.quanto.tensor.function").QuantizedLinearFunction.backward
    found: Tensor = backward(ctx, grad)[0]
    return found


def gguf(made: Any, grad: Tensor, x: Input) -> Tensor | None:
    """Of ``F.linear`` with the weight that diffusers has dequantised."""
    if made.weight.is_cuda:
        return None  # another forward, with kernels that may be there
    library = _own("diffusers.quantizers.gguf.utils")
    weight = library.dequantize_gguf_tensor(made.weight).to(made.compute_dtype)
    return input_gradient(grad, (weight, made.bias), x.shape, x.stride)


def fp8(made: Any, grad: Tensor, x: Input) -> Tensor | None:
    """The library's own derivative."""
    ctx = SimpleNamespace(
        saved_tensors=(made.weight, made.weight_scale_inv), block_size=made.block_size
    )
    library = _own("transformers.integrations.finegrained_fp8")
    found: Tensor = library.FP8LinearFunction.backward(ctx, grad)[0]
    return found if found.dtype is x.dtype else None


def torchao(made: Any, grad: Tensor, x: Input) -> Tensor | None:
    """Of the products that torchao writes out in Python."""
    weight = made.weight
    formula = _OF_TORCHAO.get(type(weight).__name__)
    return None if formula is None else formula(weight, grad, x, made.bias)


def _torchao_int8(weight: Any, grad: Tensor, x: Input, bias: Any) -> Tensor | None:
    if weight.act_pre_scale is not None or 0 in x.shape:
        return None
    rows = grad.reshape(-1, grad.shape[-1])
    flat = torch.empty_strided(x.shape, x.stride, device="meta").reshape(-1, x.shape[-1])
    if weight.block_size[-1] < weight.qdata.shape[-1]:
        values = weight.dequantize().to(x.dtype)
    else:
        rows = rows * weight.scale.to(x.dtype).flatten()
        values = weight.qdata.t().to(x.dtype).t()
    return input_gradient(rows, (values,), flat.shape, flat.stride()).reshape(x.shape)


def _torchao_float8(weight: Any, grad: Tensor, x: Input, bias: Any) -> Tensor | None:
    # It multiplies first and adds the bias after.
    return input_gradient(grad, (weight.t().dequantize().t(),), x.shape, x.stride)


def _torchao_intx(weight: Any, grad: Tensor, x: Input, bias: Any) -> Tensor | None:
    return input_gradient(grad, (weight.dequantize(), bias), x.shape, x.stride)


_OF_TORCHAO = {
    "Int8Tensor": _torchao_int8,
    "Float8Tensor": _torchao_float8,
    "IntxUnpackedToInt8Tensor": _torchao_intx,
}


def _own(module: str) -> Any:
    """Return a module of the library that the weight came from, which is imported therefore."""
    return sys.modules[module]
