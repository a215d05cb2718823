"""Quantised modules that keep plain tensors side by side, whose kernels need a GPU.

The kernels here are stand-ins in plain torch, of the real signature. They read the tensors that the
module hands them; so the slot's bytes are what is computed with.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from equality import assert_models_agree, attached
from quantised import MODES, quantised_layers, step_of, through
from torch import nn
from torch.nn import functional as F
from transformers.integrations import finegrained_fp8, nvfp4

from oracle_offload import selection
from oracle_offload.layers.flatten import Copy, plain_tensors

WIDTH = 64


def fp8_linear_stand_in(
    input,
    weight,
    weight_scale_inv,
    block_size=None,
    bias=None,
    activation_scale=None,
    deepgemm=True,
):
    if weight.dtype is torch.int8:  # two to a byte, a scale for 32 of a row; not FP4's values
        weight = torch.stack((weight & 15, weight >> 4), -1).flatten(-2)
        block_size = 1, 32
    scale = weight_scale_inv.repeat_interleave(block_size[0], 0).repeat_interleave(block_size[1], 1)
    return F.linear(input, (weight.float() * scale).to(input.dtype), bias)


def nvfp4_stand_in():
    """Halves of bytes less 8, times the row's scale and the global one; not NVFP4's layout."""

    def gemm(packed, input):
        halves = torch.stack((packed.qweight & 15, packed.qweight >> 4), -1).flatten(-2)
        scale = packed.sf_rowmajor.repeat_interleave(16, 1).float() * packed.global_scale
        weight = (halves.float() - 8) * scale
        return input @ weight.to(input.dtype).t()

    return SimpleNamespace(
        PackedWeight=SimpleNamespace, gemm=gemm, swizzled_sf_shape=lambda n, k: (n, k // 64)
    )


class Product(torch.autograd.Function):
    """A rotated int8 product; its backward needs the weight alone, kept as an attribute."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.weight, ctx.scale = weight, scale
        return (x.flip(-1) @ weight.to(x.dtype).t()) * scale.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return ((grad * ctx.scale.to(grad.dtype)) @ ctx.weight.to(grad.dtype)).flip(-1), None, None


class Int8Linear(nn.Module):
    def __init__(self):
        super().__init__()
        weight = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("weight_scale", torch.rand(WIDTH) / 1024)
        self.register_buffer(
            "comfy_quant", torch.tensor(list(b'{"format": "int8"}'), dtype=torch.uint8)
        )
        self.bias = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x):
        return Product.apply(x, self.weight, self.weight_scale) + self.bias.to(x.dtype)


def make_fp8():
    layer = finegrained_fp8.FP8Linear(WIDTH, WIDTH, block_size=(32, 32), has_bias=True)
    with torch.no_grad():
        layer.weight.data = torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn)
        layer.weight_scale_inv.copy_(torch.rand(2, 2) / 8)
        layer.bias.copy_(torch.randn(WIDTH))
    return layer.requires_grad_(False)


def make_nvfp4():
    layer = nvfp4.NVFP4Linear(WIDTH, WIDTH)
    layer.weight = nn.Buffer(torch.randint(0, 256, (WIDTH, WIDTH // 2), dtype=torch.uint8))
    layer.weight_sf.zero_()
    layer.weight_sf_rowmajor = nn.Buffer(torch.randint(1, 9, (WIDTH, 4), dtype=torch.uint8))
    layer.weight_global_scale.fill_(1 / 256)
    return layer


def experts(expert_dtype):
    """Return experts of transformers with random bytes and scales; they take three inputs."""
    config = SimpleNamespace(
        hidden_size=WIDTH,
        num_experts=4,
        moe_intermediate_size=32,
        hidden_act="silu",
        _experts_implementation="eager",
    )
    made = finegrained_fp8.FP8Experts(config, block_size=(32, 32), expert_dtype=expert_dtype)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(made, name)
            if expert_dtype == "fp8":
                weight.data = torch.randn(weight.shape).to(weight.dtype)
            else:
                weight.random_(-128, 128)
            getattr(made, f"{name}_scale_inv").uniform_(0, 1 / 8)
    return made.requires_grad_(False)


class Routed(nn.Module):
    """Calls experts with what the first features of the tokens choose."""

    def __init__(self, made):
        super().__init__()
        self.experts = made

    def forward(self, x):
        tokens = x.reshape(-1, WIDTH)
        scores, chosen = tokens[:, :4].softmax(-1).topk(2)
        return self.experts(tokens, chosen, scores).view(x.shape)


LAYERS = {"fp8": make_fp8, "nvfp4": make_nvfp4, "comfy": Int8Linear}


class Block(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.norm, self.base = nn.LayerNorm(WIDTH), make()
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        x = self.norm(x)
        return x + F.silu(self.base(x) + self.up(self.down(x)))


def pair_of(make):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.ModuleList(Block(make) for _ in range(3)))
    return models


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fp8_linear_stand_in)
    monkeypatch.setattr(nvfp4, "load_nvfp4_kernel", nvfp4_stand_in)


def test_a_copy_takes_a_tensor_that_came_after_attach_as_it_is():
    layer = Int8Linear()
    replaced = {id(tensor): tensor.clone() for tensor in plain_tensors(layer)[0].values()}
    layer.late = torch.arange(1.0, 4.0)
    made = Copy(replaced, frozenset(), {}).module(layer, Int8Linear)
    assert torch.equal(made.late, layer.late)
    assert made.weight.data_ptr() == replaced[id(layer.weight)].data_ptr()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYERS)
def test_modules_of_plain_quantised_tensors(name, mode):
    managed, resident = pair_of(LAYERS[name])
    x = torch.randn(2, 5, WIDTH)

    with attached(managed) as manager:
        quantised = quantised_layers(manager)
        assert len(quantised) == 3, manager.resident
        assert {path for layer in quantised for path in layer.names} >= {"weight"}
        assert_models_agree(managed, resident, step_of(x, mode))


@pytest.fixture
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)
    monkeypatch.setattr(selection, "SMALL_TOGETHER", (0, 0))


EXPERT_TENSORS = {"gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"}


@pytest.mark.parametrize("mode", MODES)
def test_fp8_experts_are_lent_to_their_forward(mode, nothing_is_small):
    managed, resident = pair_of(lambda: Routed(experts("fp8")))
    x = torch.randn(2, 5, WIDTH)
    with attached(managed) as manager:
        assert manager.resident == {}
        lent = [layer for layer in manager.layers if layer.name.endswith("experts")]
        assert [set(layer.names) for layer in lent] == [EXPERT_TENSORS] * 3
        assert_models_agree(managed, resident, step_of(x, mode))


def test_experts_of_packed_integers_are_lent_to_their_forward(nothing_is_small):
    managed, resident = pair_of(lambda: Routed(experts("fp4")))
    x = torch.randn(2, 5, WIDTH)

    def infer(model):
        with torch.no_grad():
            return (through(model, x),)

    with attached(managed) as manager:
        assert manager.resident == {}
        lent = [layer for layer in manager.layers if layer.name.endswith("experts")]
        assert [set(layer.names) for layer in lent] == [EXPERT_TENSORS] * 3
        assert {layer.tensors()[0].dtype for layer in lent} == {torch.int8}
        assert_models_agree(managed, resident, infer)
