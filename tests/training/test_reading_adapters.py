"""Adapters that compute with a layer's weight instead of calling the layer, as LyCORIS' LoHa."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from equality import (
    assert_models_agree,
    assert_same,
    attached,
    count_acquires,
    gradients,
    resident_pair,
)
from ostris import to_ostris
from torch import nn
from torch.utils.checkpoint import checkpoint

from oracle_offload.layers import any as any_module

WIDTH = 256  # a weight is too large to stay


class Product(nn.Module):
    """As LyCORIS' LoHa: the layer is never called."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(1)
        out, inner = layer.weight.shape[:2]
        self.a = nn.Parameter(torch.randn(out, 4) * 0.1)
        self.b = nn.Parameter(torch.randn(4, inner) * 0.1)
        self.org_module = [layer]

    def apply_to(self):
        self.org_module[0].forward = self.forward
        return self

    def delta(self):
        return (self.a @ self.b) * (self.b.t() @ self.a.t()).t()

    def forward(self, x):
        layer = self.org_module[0]
        with torch.enable_grad():
            return F.linear(x, layer.weight.data + self.delta(), layer.bias.data)


class Kept(Product):
    """As LyCORIS' LoKr: keeps what it found, and does not call it either."""

    def apply_to(self):
        self.org_forward = self.org_module[0].forward
        return super().apply_to()


class LoRA(Kept):
    """Calls what it found."""

    def forward(self, x):
        return self.call(x) + F.linear(x, self.delta())

    def call(self, x):
        return self.org_forward(x)


class Adapted(nn.Module):
    def __init__(self, kind=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[kind(WIDTH, WIDTH) for _ in range(3)])
        self.layers.requires_grad_(False)
        self.adapters = nn.ModuleList()

    def adapt(self, *kinds, device="cpu"):
        for layer in self.layers:
            for kind in kinds:
                self.adapters.append(kind(layer).to(device).apply_to())
        return self

    def forward(self, x):
        return self.layers(x)


def kinds_of(manager):
    return [type(layer).__name__ for layer in manager.layers]


def step_of(model, reentrant):
    torch.manual_seed(2)
    x = torch.randn(4, WIDTH).to(next(model.adapters.parameters()).device).requires_grad_()
    model.zero_grad()
    y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
    y.square().mean().backward()
    with torch.no_grad():
        return [y.detach(), x.grad, *gradients(model.adapters).values(), model(x)]


@pytest.mark.parametrize("reentrant", [None, True, False], ids=str)
@pytest.mark.parametrize("kinds", [(Product,), (Kept, LoRA), (LoRA, Product)], ids=str)
def test_applied_before_attach(kinds, reentrant, device):
    model, resident = resident_pair(Adapted().adapt(*kinds))
    with attached(model, device, ignore_modules=[model.adapters]) as manager:
        assert kinds_of(manager) == ["LinearLayer"] * 3
        assert all(name.startswith("adapters.") for name in manager.resident)
        before = count_acquires()
        assert_models_agree(model, resident, lambda m: step_of(m, reentrant), device=device)
        assert count_acquires() > before
    assert all(type(layer) is nn.Linear for layer in model.layers)
    x = torch.ones(1, WIDTH)
    assert_same(model.cpu()(x), resident.cpu()(x))


class Shifted(nn.Linear):
    """Has a forward of its own."""

    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("context", [None, "checkpoint", "hooks"])
def test_with_a_torch_that_does_not_name_its_hooks(monkeypatch, context, device):
    """As 2.6 and 2.7: what is saved goes on to the pair outside all the same."""
    monkeypatch.setattr(any_module, "_top_hooks", None)
    model, resident = resident_pair(Adapted(Shifted))
    packed: dict[int, int] = {}

    def step(each):
        def pack(tensor):
            packed[id(each)] = packed.get(id(each), 0) + 1
            return tensor.clone()

        if context != "hooks":
            return step_of(each, None if context is None else False)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor * 1):
            return step_of(each, None)

    with attached(model, device) as manager:
        assert kinds_of(manager) == ["AnyLayer"] * 3
        for each in (model, resident):
            each.adapt(LoRA, device=device)
        assert_models_agree(model, resident, step, device=device)
    assert ({id(model), id(resident)} <= packed.keys()) is (context == "hooks")


@pytest.mark.parametrize("kind", [Product, Kept, LoRA])
def test_applied_after_attach(kind, device):
    model, resident = resident_pair(Adapted())
    resident.to(device)
    with attached(model, device) as manager:
        assert kinds_of(manager) == ["LinearLayer"] * 3
        x = torch.ones(1, WIDTH, device=device)
        with torch.no_grad():
            assert_same(model(x), resident(x))
        for each in (model, resident):
            each.adapt(kind, device=device)
        assert_models_agree(model, resident, lambda m: step_of(m, False), device=device)
        assert kinds_of(manager) == ["LinearLayer"] * 3


def test_a_copy_of_the_model_computes_by_itself():
    model = Adapted().adapt(Product)
    x = torch.ones(1, WIDTH)
    expected = model(x)
    with attached(model, ignore_modules=[model.adapters]):
        other = copy.deepcopy(model)
        assert type(other.layers[0]) is nn.Linear
        assert_same(other(x), expected)
        with torch.no_grad():
            other.layers[0].weight.zero_()
        assert_same(model(x), expected)


@pytest.mark.parametrize("kind", [Product, LoRA])
def test_a_quantised_layer_under_such_an_adapter_streams(kind):
    """As AI-Toolkit's recovery adapter, which found an ``nn.Linear``: its forward reads the weight.

    That is dequantised from the buffers where it is asked for.
    """
    model = Adapted().adapt(kind)
    for layer in model.layers:
        to_ostris(layer)
    model, resident = resident_pair(model)
    with attached(model, ignore_modules=[model.adapters]) as manager:
        assert kinds_of(manager) == ["QuantisedLayer"] * 3
        assert all(name.startswith("adapters.") for name in manager.resident)
        assert_models_agree(model, resident, lambda m: step_of(m, None))
