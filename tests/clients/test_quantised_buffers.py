"""Quantised weights whose kernels need a GPU: side by side in a module, or in a kernel's objects.

The kernels here are those of `stand_in_kernels`.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import sides
import torch
from equality import assert_models_agree, assert_same, attached
from models import compute_device
from quantised import FORMATS, MODES, model_of, quantised_layers, step_of, through, torchao
from stand_in_kernels import FP8_LINEAR, TRITON_KERNELS, stand_ins  # noqa: F401 - a fixture
from torch import nn
from torch.nn import functional as F
from torchao import quantization as ao
from transformers.integrations import finegrained_fp8, mxfp4, nvfp4
from transformers.models.gpt_oss import modeling_gpt_oss

from oracle_offload.layers.flatten import Copy, plain_tensors, value_at
from oracle_offload.layers.formats import format_of, held_tensors
from oracle_offload.model import selection

pytestmark = pytest.mark.usefixtures("stand_ins")
WIDTH = 64


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
    """Return equal models on the host and on the device: ``to`` moves no kernel's objects."""
    models = []
    for where in (torch.device("cpu"), sides.default_device()):
        torch.manual_seed(0)
        with where:
            models.append(make())
    for one, other in zip(*map(nn.Module.modules, models), strict=True):
        for path, tensor in tensors_of(one).items():  # a device may draw other numbers
            value_at(other, path).detach().copy_(tensor)
    return models


def tensors_of(module):
    holders = frozenset() if (kind := format_of(module)) is None else kind.holders
    return {**plain_tensors(module, holders)[0], **held_tensors(module)}


def blocks_of(make):
    return lambda: nn.ModuleList(Block(make) for _ in range(3))


def test_the_stand_in_takes_what_the_kernel_takes():
    names = [
        [*inspect.signature(function).parameters]
        for function in (finegrained_fp8.fp8_linear, FP8_LINEAR)
    ]
    assert finegrained_fp8.fp8_linear is not FP8_LINEAR and names[0] == names[1]


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
    managed, resident = pair_of(blocks_of(LAYERS[name]))
    x = torch.randn(2, 5, WIDTH)

    with attached(managed) as manager:
        quantised = quantised_layers(manager)
        assert len(quantised) == 3, manager.resident
        assert {path for layer in quantised for path in layer.names} >= {"weight"}
        assert_models_agree(managed, resident, step_of(x, mode))


EXPERT_TENSORS = {"gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"}


@pytest.mark.parametrize("mode", MODES)
def test_fp8_experts_are_lent_to_their_forward(mode, nothing_is_small):
    managed, resident = pair_of(blocks_of(lambda: Routed(experts("fp8"))))
    x = torch.randn(2, 5, WIDTH)
    with attached(managed) as manager:
        assert manager.resident == {}
        lent = [layer for layer in manager.layers if layer.name.endswith("experts")]
        assert [set(layer.names) for layer in lent] == [EXPERT_TENSORS] * 3
        assert_models_agree(managed, resident, step_of(x, mode))


def test_experts_of_packed_integers_are_lent_to_their_forward(nothing_is_small):
    managed, resident = pair_of(blocks_of(lambda: Routed(experts("fp4"))))
    x = torch.randn(2, 5, WIDTH)

    def infer(model):
        with torch.no_grad():
            return (through(model, x.to(compute_device(model))),)

    with attached(managed) as manager:
        assert manager.resident == {}
        lent = [layer for layer in manager.layers if layer.name.endswith("experts")]
        assert [set(layer.names) for layer in lent] == [EXPERT_TENSORS] * 3
        assert {layer.tensors()[0].dtype for layer in lent} == {torch.int8}
        assert_models_agree(managed, resident, infer)


class Mxfp4(nn.Module):
    """gpt-oss's block, as it is once transformers has laid its weights out for the kernel."""

    def __init__(self):
        super().__init__()
        sizes = dict(num_local_experts=4, num_experts_per_tok=2)
        config = SimpleNamespace(**sizes, intermediate_size=32, hidden_size=WIDTH)
        experts = mxfp4.Mxfp4GptOssExperts(config)
        for stack, rows, columns in (("gate_up_proj", 64, WIDTH), ("down_proj", WIDTH, 32)):
            blocks = torch.randint(0, 256, (4, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 128, (4, rows, columns // 32), dtype=torch.uint8)
            mxfp4.swizzle_mxfp4_convertops(
                blocks, scales, experts, stack, blocks.device, TRITON_KERNELS
            )
            getattr(experts, f"{stack}_bias").data.normal_()
        router = modeling_gpt_oss.GptOssTopKRouter(config).requires_grad_(False)
        for parameter in router.parameters():
            nn.init.normal_(parameter)
        self.mlp = mxfp4.Mxfp4GptOssMLP(router, experts)

    def forward(self, x):
        return self.mlp(x)[0].view(x.shape)


@pytest.mark.parametrize("mode", MODES)
def test_mxfp4_experts_are_lent_what_the_objects_of_their_kernel_hold(mode, nothing_is_small):
    managed, resident = pair_of(blocks_of(Mxfp4))
    x = torch.randn(2, 5, WIDTH)
    experts = managed[0].base.mlp.experts
    held = held_tensors(experts)
    assert len(held) == 4 and not {"gate_up_proj", "down_proj"} & {*experts._parameters}
    where = [tensor.data_ptr() for tensor in held.values()]
    with attached(managed) as manager:
        assert manager.resident == {}, "the kernel reads the router's weight"
        lent = [layer for layer in manager.layers if layer.name.endswith("experts")]
        names = {*held, "gate_up_proj_bias", "down_proj_bias"}
        assert [set(layer.names) for layer in lent] == [names] * 3
        assert {*map(id, held.values())} < {*map(id, lent[0].tensors())}
        assert all(t.data_ptr() not in where for t in held.values()), "they are no masters"
        assert_models_agree(managed, resident, step_of(x, mode))
        now = held_tensors(experts)
        assert all(now[path] is tensor for path, tensor in held.items())
    assert_same(step_of(x, mode)(managed), step_of(x, mode)(pair_of(blocks_of(Mxfp4))[0]))


def test_what_a_kernels_objects_hold_is_lent_though_it_is_small_and_said_why_where_it_is_not():
    model = Mxfp4()
    held = held_tensors(model.mlp.experts)
    chosen = selection.choose(model)
    (leaf,) = chosen.leaves
    assert leaf.name == "mlp.experts" and set(leaf.kind.names) == set(held)
    last = held["down_proj.storage.data"]
    chosen = selection.choose(model, [last])
    (leaf,) = chosen.leaves
    assert set(leaf.kind.names) == set(held) - {"down_proj.storage.data"}
    why = chosen.parameters["mlp.experts.down_proj.storage.data"]
    assert why == "'down_proj.storage.data' is named in ignore_modules"
    model.mlp.experts.down_proj.storage.data = last[:, ::2]
    chosen = selection.choose(model)
    assert "has gaps" in chosen.parameters["mlp.experts.down_proj.storage.data"]


def test_weights_that_two_blocks_share_lie_on_the_host_once(nothing_is_small):
    def make():
        blocks = nn.ModuleList(Mxfp4() for _ in range(2))
        blocks[1].mlp.experts.down_proj.storage = blocks[0].mlp.experts.down_proj.storage
        return blocks

    managed, resident = pair_of(make)
    with attached(managed) as manager:
        first, second = (layer for layer in manager.layers if layer.name.endswith("experts"))
        path = "down_proj.storage.data"
        assert first.masters.addresses[path] == second.masters.addresses[path]
        x = torch.randn(2, 5, WIDTH)
        assert_models_agree(managed, resident, lambda model: [through(model, x.to(sides.DEVICE))])


def test_of_objects_that_hold_no_plain_tensor_nothing_is_lent():
    experts = Mxfp4().mlp.experts
    experts.gate_up_proj.storage.data = nn.Parameter(experts.gate_up_proj.storage.data, False)
    del experts.down_proj.storage
    assert set(held_tensors(experts)) == {
        f"{stack}_precision_config.weight_scale.storage.data"
        for stack in ("gate_up_proj", "down_proj")
    }


INT4 = {
    "tile_packed_to_4d": ["weight.qdata", "weight.scale_and_zero"],
    "plain": ["weight.qdata", "weight.scale", "weight.zero_point"],
}


@pytest.fixture(params=INT4)
def int4(request, monkeypatch):
    """Return two models that torchao has quantised to int4, and the tensors of a weight."""
    packing = request.param
    config = ao.Int4WeightOnlyConfig(
        group_size=32, int4_packing_format=packing, set_inductor_config=False
    )
    name = f"torchao-{packing}"
    monkeypatch.setitem(FORMATS, name, (4, *torchao(config)))
    return *(model_of(name, torch.bfloat16) for _ in range(2)), INT4[packing]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_int4_of_torchao_computes_on_the_slots_bytes(int4, autocast):
    managed, resident, tensors = int4
    x = torch.randn(2, 5, WIDTH, dtype=torch.bfloat16)

    def infer(model):
        with torch.no_grad(), torch.autocast(sides.DEVICE, torch.bfloat16, enabled=autocast):
            return (through(model, x.to(compute_device(model))),)

    with attached(managed) as manager:
        layers = quantised_layers(manager)
        assert len(layers) == 6, manager.resident
        assert [set(layer.names) for layer in layers] == [{*tensors, "bias"}] * 6
        assert_models_agree(managed, resident, infer)


@pytest.mark.parametrize("mode", MODES)
def test_int4_of_torchao_gives_back_what_the_resident_gives(int4, mode):
    """Through mslk's operator nothing flows back, but past it to the adapters; torch's refuses."""
    managed, resident, tensors = int4
    step = step_of(torch.randn(2, 5, WIDTH, dtype=torch.bfloat16), mode)
    with attached(managed) as manager:
        assert len(quantised_layers(manager)) == 6
        if "weight.zero_point" in tensors:
            assert_models_agree(managed, resident, step)
            return
        for model in (managed, resident):
            with pytest.raises(RuntimeError, match="derivative for aten::_weight_int4pack_mm"):
                step(model)
