"""A kind of layer is its operator, derivative and cost: one that is added here is managed whole."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from equality import assert_models_agree, attached
from models import Tower
from torch import nn
from torch.nn import functional as F

from oracle_offload.layers import kinds
from oracle_offload.layers.loan import Layer, node_of

_derivative = torch.ops.aten.native_layer_norm_backward.default


class LayerNormLayer(Layer):
    """A managed ``nn.LayerNorm`` whose forward, and not only its backward, reads both tensors."""

    base_forward = staticmethod(nn.LayerNorm.forward)
    names = ("weight", "bias")
    required = ("weight",)
    backward_reads = ("weight", "bias")
    node = node_of("ManagedLayerNorm")

    def base_call(self, module, x, tensors):
        return F.layer_norm(x, module.normalized_shape, *tensors, module.eps)

    def compute(self, x, tensors):
        return self.base_call(self.module(), x, tensors)

    def record(self, ctx, x, trained, tensors):
        module = self.module()
        ctx.shape = module.normalized_shape
        y, mean, scale = torch.native_layer_norm(x, ctx.shape, *tensors, module.eps)
        ctx.save_for_backward(x, mean, scale)
        return y

    def derivative(self, ctx, grad, needs):
        saved = ctx.saved_tensors
        return self.lend_backward(
            ctx,
            grad,
            needs,
            lambda tensors: _derivative(grad, saved[0], ctx.shape, *saved[1:], *tensors, needs),
        )

    def forward_cost(self, x):
        return 8.0 * x.numel(), 2 * x.nbytes

    def backward_cost(self, grad, needs):
        return 16.0 * grad.numel(), 3 * grad.nbytes


def block():
    parts = {"norm": nn.LayerNorm((3, 16)), "linear": nn.Linear(16, 16), "tanh": nn.Tanh()}
    return nn.Sequential(OrderedDict(parts))


@pytest.mark.parametrize("checkpointed", [None, True, False], ids=["plain", "reentrant", "not"])
@pytest.mark.parametrize("trains", ["", "bias", "weight", "weight bias"])
def test_a_kind_that_a_test_adds_has_the_residents_bits(checkpointed, trains, monkeypatch):
    monkeypatch.setattr(kinds, "KINDS", [*kinds.KINDS, LayerNormLayer])
    managed = Tower(*(block() for _ in range(4)), reentrant=checkpointed)
    for name, parameter in managed.named_parameters():
        nn.init.normal_(parameter)
        parameter.requires_grad_("norm" in name and name.split(".")[-1] in trains.split())
    resident = copy.deepcopy(managed)
    x = torch.randn(5, 3, 16)

    def step(model):
        given = x.clone().requires_grad_()
        y = model(given)
        y.square().sum().backward()
        with torch.no_grad():
            return y, given.grad, model[0](x)

    with attached(managed) as manager:
        assert sum(isinstance(layer, LayerNormLayer) for layer in manager.layers) == 4
        assert_models_agree(managed, resident, step)
        with torch.no_grad():
            for model in (managed, resident):
                model[1].norm.weight.mul_(2)
        assert_models_agree(managed, resident, step)
