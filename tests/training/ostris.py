"""AI-Toolkit's quantised layer in small: what of it is recognised by name, and what it does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Int8:
    """A backend of its quantiser: buffers on the module; in training, inputs are rounded too."""

    def forward(self, module, x):
        if x.requires_grad:
            x = x + ((x * 8).round() / 8 - x).detach()
        with torch.no_grad():
            weight = self.dequantize(module).to(x.dtype)
        return F.linear(x * x, weight, module.bias)  # the gradient depends on the input

    def dequantize(self, module):
        return module.qdata.float() * module.scales


class OstrisLinear(nn.Linear):
    """Its quantised layer: the weight is a property, computed from buffers."""

    is_ostris_quantized = True

    @property
    def weight(self):
        return self.ostris_quantizer.dequantize(self)

    def forward(self, x):
        return self.ostris_quantizer.forward(self, x)


OstrisLinear.__module__ = "toolkit.util.ostris_quant"


def to_ostris(layer):
    device = layer.weight.device
    weight = layer.weight.detach().cpu()  # where a card divides, the last bit differs
    scales = weight.abs().amax(1, keepdim=True) / 127
    qdata = (weight / scales).round().to(torch.int8)
    layer.register_buffer("qdata", qdata.to(device), persistent=False)
    layer.register_buffer("scales", scales.to(device), persistent=False)
    layer.ostris_quantizer = Int8()
    del layer._parameters["weight"]
    layer.__class__ = OstrisLinear
