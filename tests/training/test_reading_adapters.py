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

import oracle_offload
from oracle_offload.layers import any as any_module
from oracle_offload.layers.wrappers import reader_of

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
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
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
        assert kinds_of(manager) == ["AnyLayer"] * 3
        before = count_acquires()
        assert_models_agree(model, resident, lambda m: step_of(m, reentrant), device=device)
        assert count_acquires() > before
    assert all(type(layer) is nn.Linear for layer in model.layers)
    x = torch.ones(1, WIDTH)
    assert_same(model.cpu()(x), resident.cpu()(x))


@pytest.mark.parametrize("context", [None, "checkpoint", "hooks"])
def test_with_a_torch_that_does_not_name_its_hooks(monkeypatch, context, device):
    """As 2.6 and 2.7: what is saved goes on to the pair outside all the same."""
    monkeypatch.setattr(any_module, "_top_hooks", None)
    model, resident = resident_pair(Adapted().adapt(LoRA, Product))
    packed: dict[int, int] = {}

    def step(each):
        def pack(tensor):
            packed[id(each)] = packed.get(id(each), 0) + 1
            return tensor.clone()

        if context != "hooks":
            return step_of(each, None if context is None else False)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor * 1):
            return step_of(each, None)

    with attached(model, device, ignore_modules=[model.adapters]) as manager:
        assert kinds_of(manager) == ["AnyLayer"] * 3
        assert_models_agree(model, resident, step, device=device)
    assert ({id(model), id(resident)} <= packed.keys()) is (context == "hooks")


@pytest.mark.parametrize("kind", [Product, Kept])
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
        assert kinds_of(manager) == ["AnyLayer"] * 3


def test_an_adapter_that_calls_the_layer_leaves_its_operator():
    model = Adapted().adapt(LoRA)
    with attached(model, ignore_modules=[model.adapters]) as manager:
        assert kinds_of(manager) == ["LinearLayer"] * 3
        model.adapt(LoRA)
        model(torch.ones(1, WIDTH))
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


def test_a_quantised_layer_under_such_an_adapter_stays_on_the_device():
    model = Adapted()
    to_ostris(model.layers[0])
    model.adapters.append(Product(model.layers[0]).apply_to())
    with attached(model, ignore_modules=[model.adapters]) as manager:
        assert kinds_of(manager) == ["LinearLayer"] * 2
        why = manager.resident["layers.0.bias"]
        assert why == "Product uses its weight without calling it"


def test_small_layers_under_such_adapters_are_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        Product(layer).apply_to()
    with pytest.raises(oracle_offload.OffloadError, match="Product uses its weight without"):
        oracle_offload.attach(model, "cpu")


class Constant(Product):
    """Computes with nothing of the layer's."""

    def forward(self, x):
        return x @ (self.a @ self.b).t()


class Scaled(Product):
    """Has its base compute."""

    def forward(self, x):
        return super().forward(x) * 2


def test_who_reads_a_layer():
    layer, other = nn.Linear(8, 8), nn.Linear(8, 8)
    assert reader_of(layer) is None
    layer.forward = lambda x: x
    assert reader_of(layer) is None
    del layer.forward
    first = Product(layer).apply_to()
    assert reader_of(layer) is first
    loras = [LoRA(layer).apply_to() for _ in range(15)]
    assert reader_of(layer) is first
    loras.append(LoRA(layer).apply_to())
    assert reader_of(layer) is None  # too many to look at
    other.forward = first.forward  # which reads another layer's
    assert reader_of(other) is None
    second = Product(other)
    second.org_module = other  # not as these adapters have it
    other.forward = second.forward
    assert reader_of(other) is None
    Constant(other).apply_to()
    assert reader_of(other) is None
    third = Scaled(other).apply_to()
    assert reader_of(other) is third
