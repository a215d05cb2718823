"""Small models in every quantised format that computes on a CPU, made twice from one seed."""

from __future__ import annotations

import bitsandbytes
import gguf
import sides
import torch
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from models import compute_device
from optimum import quanto
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchao import quantization as ao
from torchao.quantization.quant_api import IntxWeightOnlyConfig

from oracle_offload.layers.quantised import QuantisedLayer

MODES = ["plain", "reentrant", "not-reentrant", "autocast"]


def quantised_layers(manager):
    return [layer for layer in manager.layers if isinstance(layer, QuantisedLayer)]


def on_device(model):
    """Move a model. Only a layer's own `to` takes along what bitsandbytes keeps of a weight."""
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            if module.weight.CB is not None:
                module.init_8bit_state()
            module.to(sides.DEVICE)
    return model.to(sides.DEVICE)


def through(blocks, x, mode="plain"):
    for block in blocks:
        if mode in ("plain", "autocast"):
            x = block(x)
        else:
            x = checkpoint(block, x, use_reentrant=mode == "reentrant")
    return x


def step_of(x, mode="plain"):
    """Return a training step of a list of blocks, and a sample of the first of them."""

    def step(model):
        given = x.to(compute_device(model)).clone().requires_grad_()
        with torch.autocast(given.device.type, torch.bfloat16, enabled=mode == "autocast"):
            y = through(model, given, mode)
        y.float().square().mean().backward()
        with torch.no_grad():
            return y, given.grad, model[0](given)

    return step


def bitsandbytes_like(plain, kind, **options):
    """Return a layer of bitsandbytes with the weights of an ``nn.Linear``, not yet quantised."""
    shape, bias = (plain.in_features, plain.out_features), plain.bias is not None
    linear = getattr(bitsandbytes.nn, kind)(*shape, bias=bias, **options)
    linear.load_state_dict(plain.state_dict())
    return linear


def torchao(config):
    def convert(model):
        ao.quantize_(model, config, filter_fn=lambda module, name: name.endswith("base"))
        return model

    return nn.Linear, convert


def optimum_quanto(weights):
    def convert(model):
        quanto.quantize(model, weights=weights, include="*base")
        quanto.freeze(model)
        return model

    return nn.Linear, convert


def bitsandbytes_linear(kind, **options):
    def make(features, out_features):
        return bitsandbytes_like(nn.Linear(features, out_features), kind, **options)

    return make, lambda model: model.to("cpu")


def gguf_linear(kind):
    kind = getattr(gguf.GGMLQuantizationType, kind)

    def make(features, out_features):
        values = torch.randn(out_features, features).numpy() / features**0.5
        linear = GGUFLinear(features, out_features, bias=True, compute_dtype=torch.bfloat16)
        packed = torch.from_numpy(gguf.quants.quantize(values, kind))
        linear.weight = GGUFParameter(packed, quant_type=kind)
        return linear

    return make, lambda model: model


# Bits of a weight, statistics apart; how a linear layer is made; what then becomes of the model.
FORMATS = {
    "torchao-int8": (8, *torchao(ao.Int8WeightOnlyConfig())),
    "torchao-int8-groups": (8, *torchao(ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(32)))),
    "torchao-float8": (8, *torchao(ao.Float8WeightOnlyConfig())),
    "torchao-intx": (8, *torchao(IntxWeightOnlyConfig())),
    "quanto-qint8": (8, *optimum_quanto(quanto.qint8)),
    "quanto-qint4": (4, *optimum_quanto(quanto.qint4)),
    "quanto-qint2": (2, *optimum_quanto(quanto.qint2)),
    "quanto-qfloat8": (8, *optimum_quanto(quanto.qfloat8)),
    "bitsandbytes-int8": (8, *bitsandbytes_linear("Linear8bitLt", has_fp16_weights=False)),
    "bitsandbytes-int8-outliers": (
        8,
        *bitsandbytes_linear("Linear8bitLt", has_fp16_weights=False, threshold=1.0),
    ),
    "bitsandbytes-nf4-nested": (4, *bitsandbytes_linear("Linear4bit", quant_type="nf4")),
    "bitsandbytes-fp4": (
        4,
        *bitsandbytes_linear("Linear4bit", quant_type="fp4", compress_statistics=False),
    ),
    "gguf-q8_0": (8, *gguf_linear("Q8_0")),
    "gguf-q4_0": (4, *gguf_linear("Q4_0")),
}


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank one next to it."""

    def __init__(self, make, features, out_features):
        super().__init__()
        self.base = make(features, out_features)
        self.down = nn.Linear(features, 4, bias=False)
        self.up = nn.Linear(4, out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, make, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = Adapted(make, width, 2 * width)
        self.down = Adapted(make, 2 * width, width)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


def unquantised_model_of(name, dtype, *, width=64, depth=3):
    """Return a model whose ``base`` layers are to be quantised; always the same."""
    _, make, _ = FORMATS[name]
    torch.manual_seed(0)
    model = nn.ModuleList(Block(make, width) for _ in range(depth))
    library = name.partition("-")[0]
    if library == "gguf":
        for module in model.modules():
            if isinstance(module, GGUFLinear):
                module.compute_dtype = dtype
    for key, module in model.named_modules():
        if not key.endswith("base") or library in ("torchao", "quanto"):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    return freeze(model)


def model_of(name, dtype, **sizes):
    """Return a model whose ``base`` layers are quantised and frozen; always the same."""
    return freeze(FORMATS[name][2](unquantised_model_of(name, dtype, **sizes)))


def freeze(model):
    """Let the adapters alone be trained."""
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("base" not in key and "norm" not in key)
    return model
