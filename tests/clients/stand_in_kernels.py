"""Stand-ins in plain torch for kernels that need a GPU: of the real signature, not of real speed.

They read the tensors that they are handed, so the slot's bytes are what is computed with. The real
kernels run in ``make gpu-check``, part "formats".
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torchao.quantization.quantize_.workflows.int4 import int4_tensor
from transformers.integrations import finegrained_fp8, mxfp4, nvfp4

FP8_LINEAR = finegrained_fp8.fp8_linear  # the real one
_library: Any = []  # of torch's operators: registered once, for good


def halves_of(packed):
    """Return the numbers of four bits, two to a byte along the last dimension."""
    return torch.stack((packed & 15, packed >> 4 & 15), -1).flatten(-2)


# ---- FP8 and NVFP4 ----


def fp8_linear(
    input,
    weight,
    weight_scale_inv,
    block_size=None,
    bias=None,
    activation_scale=None,
    allow_deepgemm=True,
):
    if weight.dtype is torch.int8:  # two to a byte, a scale for 32 of a row; not FP4's values
        weight, block_size = halves_of(weight), (1, 32)
    scale = weight_scale_inv.repeat_interleave(block_size[0], 0).repeat_interleave(block_size[1], 1)
    return F.linear(input, (weight.float() * scale).to(input.dtype), bias)


def nvfp4_kernel():
    """Halves of bytes less 8, times the row's scale and the global one; not NVFP4's layout."""

    def gemm(packed, input):
        scale = packed.sf_rowmajor.repeat_interleave(16, 1).float() * packed.global_scale
        weight = (halves_of(packed.qweight).float() - 8) * scale
        return input @ weight.to(input.dtype).t()

    return SimpleNamespace(
        PackedWeight=SimpleNamespace, gemm=gemm, swizzled_sf_shape=lambda n, k: (n, k // 64)
    )


# ---- MXFP4: what transformers takes from the hub's gpt-oss-triton-kernels ----


@dataclass
class Storage:
    data: torch.Tensor
    layout: Any


@dataclass
class TritonTensor:
    storage: Storage
    dtype: Any = None
    shape: Any = None


def convert_layout(tensor, layout, **options):
    """As the real one: bytes of its own in another order; here with other strides."""
    return TritonTensor(Storage(tensor.storage.data.contiguous(), layout), tensor.dtype)


def matmul_ogs(
    x,
    w,
    bias,
    routing_data,
    gather_indx=None,
    scatter_indx=None,
    precision_config=None,
    gammas=None,
    fused_activation=None,
):
    scales = precision_config.weight_scale.storage.data
    codes = halves_of(w.storage.data.transpose(1, 2)).transpose(1, 2).long()
    values = torch.tensor(mxfp4.FP4_VALUES, device=x.device)[codes]
    values = torch.ldexp(values, scales.int().repeat_interleave(32, 1) - 127).to(x.dtype)
    experts = torch.arange(len(values), device=x.device)
    experts = experts.repeat_interleave(routing_data.expt_hist.long())
    chosen = routing_data.n_expts_act
    rows = x if gather_indx is None else x[gather_indx.src_indx // chosen]
    y = torch.bmm(rows[:, None], values[experts])[:, 0] + bias[experts].to(x.dtype)
    if fused_activation is not None:
        alpha, limit = fused_activation.arguments
        gate = y[:, ::2].clamp(max=limit)
        y = gate * torch.sigmoid(alpha * gate) * (y[:, 1::2].clamp(-limit, limit) + 1)
    if gammas is not None:
        y = y * gammas[:, None].to(y.dtype)
    if scatter_indx is not None:
        y = y[scatter_indx.src_indx].unflatten(0, (-1, chosen)).sum(1)
    return y


def routing(logits, chosen):
    """Return which tokens go to which experts, sorted by expert, and how to come back."""
    scores, experts = logits.topk(chosen)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    back = order.argsort()
    data = SimpleNamespace(
        gate_scal=scores.softmax(-1).flatten()[order],
        expt_hist=flat.bincount(minlength=logits.shape[1]),
        n_expts_act=chosen,
    )
    return data, SimpleNamespace(src_indx=order), SimpleNamespace(src_indx=back)


TRITON_KERNELS = SimpleNamespace(
    matmul_ogs=SimpleNamespace(
        FnSpecs=lambda name, function, arguments: name,
        FusedActivation=lambda specs, arguments, rate: SimpleNamespace(arguments=arguments),
        PrecisionConfig=SimpleNamespace,
        FlexCtx=SimpleNamespace,
        InFlexData=SimpleNamespace,
        matmul_ogs=matmul_ogs,
    ),
    swiglu=SimpleNamespace(swiglu_fn=None),
    routing=SimpleNamespace(routing=routing),
    tensor=SimpleNamespace(
        FP4="fp4",
        wrap_torch_tensor=lambda data, dtype=None: TritonTensor(Storage(data, None), dtype),
        convert_layout=convert_layout,
    ),
    tensor_details=SimpleNamespace(
        layout=SimpleNamespace(
            StridedLayout="strided", make_default_matmul_mxfp4_w_layout=lambda mx_axis: ("mx", {})
        )
    ),
)


# ---- int4 of torchao, over torch's own operator and over those of mslk ----


def convert_weight_to_int4pack(packed, inner_k_tiles):
    """Of the real shape; the bytes stay in the order of the rows."""
    n, k = packed.shape[0], 2 * packed.shape[1]
    shape = n // 8, k // (inner_k_tiles * 16), 32, inner_k_tiles // 2
    return packed.contiguous().view(torch.int32).view(shape).clone()


def weight_int4pack_mm(x, packed, group_size, scale_and_zero):
    n, k = scale_and_zero.shape[1], scale_and_zero.shape[0] * group_size
    codes = packed.contiguous().view(torch.uint8).view(n, k // 2)
    values = torch.stack((codes >> 4, codes & 15), -1).flatten(-2).to(x.dtype) - 8
    scale, zero = (part.t().repeat_interleave(group_size, 1) for part in scale_and_zero.unbind(-1))
    return x @ (values * scale + zero).t()


def int4_row_quantize_zp(weight, group_size):
    groups = weight.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = (high - low).clamp(min=1e-6) / 15
    codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15) - 8
    zero = low + 8 * scale
    scale, zero = (part.t().contiguous().to(weight.dtype) for part in (scale, zero))
    return codes.flatten(1).to(torch.int8), scale, zero


def pack_int4(codes):
    return (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)


@torch.no_grad()
def bf16i4bf16_rowwise(x, packed, scale, zero):
    """As the real one, it has no derivative: nothing flows back through it."""
    codes = halves_of(packed.view(torch.uint8)).to(torch.int8)
    values = torch.where(codes > 7, codes - 16, codes).to(x.dtype)
    size = values.shape[1] // scale.shape[0]
    return (
        x
        @ (values * scale.t().repeat_interleave(size, 1) + zero.t().repeat_interleave(size, 1)).t()
    )


def _register_operators():
    if _library:
        return
    aten, mslk = torch.library.Library("aten", "IMPL"), torch.library.Library("mslk", "DEF")
    aten.impl("_convert_weight_to_int4pack", convert_weight_to_int4pack, "CPU")
    aten.impl("_weight_int4pack_mm", weight_int4pack_mm, "CPU")
    mslk.define("bf16i4bf16_rowwise(Tensor X, Tensor WQ, Tensor w_scale, Tensor w_zp) -> Tensor")
    mslk.impl("bf16i4bf16_rowwise", bf16i4bf16_rowwise, "CPU")
    _library.extend((aten, mslk))


@pytest.fixture
def stand_ins(monkeypatch):
    """Put the stand-ins in the places of the kernels."""
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fp8_linear)
    monkeypatch.setattr(nvfp4, "load_nvfp4_kernel", nvfp4_kernel)
    monkeypatch.setattr(mxfp4, "triton_kernels_hub", TRITON_KERNELS, raising=False)
    monkeypatch.setattr(mxfp4, "get_current_accelerator", lambda: None)
    monkeypatch.setattr(int4_tensor, "int4_row_quantize_zp", int4_row_quantize_zp)
    monkeypatch.setattr(int4_tensor, "pack_int4", pack_int4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    _register_operators()
