"""Weights that a forward computes, writes or replaces: from the first one on as the resident's."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from equality import (
    assert_models_agree,
    assert_same,
    attached,
    copied_bytes,
    gradients,
    is_simulated,
    resident_pair,
    step_of,
)
from models import checkpointed
from torch import nn
from torch.nn.utils import parametrizations, prune

import oracle_offload
from oracle_offload.engine.engines import open_states
from oracle_offload.model.witness import Witness


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.inner(x))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.LayerNorm(8), Block())


def inputs():
    return torch.linspace(-1, 1, 24).view(3, 8)


def computed_bytes(model):
    return oracle_offload.memory_summary(model=model).devices[0].models[0].computed_bytes


def test_an_interrupted_model_gives_its_memory_back():
    def stop(*_):
        raise KeyboardInterrupt

    model = build()
    oracle_offload.attach(model, "cpu")
    model[1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(inputs())
    gone = weakref.ref(model[0].inner)
    del model
    gc.collect()
    assert gone() is None
    assert not open_states()


def test_attach_leaves_torchs_own_call_as_it_is():
    """Nothing of torch's is changed, and nothing is called before a module's own forward."""
    model, hooks = build(), torch.nn.modules.module
    with attached(model, "cpu") as manager:
        assert len(manager.layers) == 2
        model(inputs())
        assert not hooks._global_forward_hooks
        assert not hooks._global_forward_pre_hooks
        assert all("_compiled_call_impl" not in part.__dict__ for part in model.modules())
        model.append(Block())  # looked at before the next call, and once
        assert hooks._global_forward_pre_hooks
        model(inputs())
        assert not hooks._global_forward_pre_hooks


# ---- weights that are computed ----


def legacy_weight_norm(layer):
    return nn.utils.weight_norm(layer)


def prune_half(layer):
    return prune.random_unstructured(layer, "weight", amount=0.5)


def shift(layer):
    class Shift(nn.Module):
        def forward(self, weight):
            return weight + 0.25

    return nn.utils.parametrize.register_parametrization(layer, "weight", Shift())


COMPUTED = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    legacy_weight_norm,
    nn.utils.spectral_norm,
    prune_half,
    shift,
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=str)
@pytest.mark.parametrize("later", [False, True], ids=["before first", "after first"])
@pytest.mark.parametrize("compute", COMPUTED, ids=lambda compute: compute.__name__)
def test_a_weight_that_is_computed_after_attach_has_the_residents_bits(
    compute, later, checkpointing
):
    def train(attach):
        model, found = build(), []
        with contextlib.ExitStack() as stack:
            if attach:
                manager = stack.enter_context(attached(model, "cpu"))
                if later:
                    model(inputs())
                managed = len(manager.layers)
                assert managed == 2
            elif later:
                model(inputs())
            torch.manual_seed(1)
            compute(model[0].inner)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                x = inputs().requires_grad_()
                y = checkpointed(model, x, reentrant=checkpointing)
                y.square().sum().backward()
                found += [y.detach(), x.grad, {k: g.clone() for k, g in gradients(model).items()}]
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    found.append(model(inputs()))
        return found

    assert_same(train(True), train(False))


def full(layer, delta):
    """AI-Toolkit's FullModule: its delta is in the parameter's place during forward."""
    original = layer.forward

    def forward(x):
        weight = layer._parameters["weight"]
        layer._parameters["weight"] = weight + delta
        try:
            return original(x)
        finally:
            layer._parameters["weight"] = weight

    layer.forward = forward


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
def test_a_weight_computed_from_the_master_is_accepted_in_every_forward(
    bias, checkpointing, autocast, caplog
):
    def train(attach):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8, bias=bias) for _ in range(3))).requires_grad_(False)
        deltas = nn.ParameterList(torch.randn(8, 8) / 8 for _ in range(2))
        found = []
        with contextlib.ExitStack() as stack:
            if attach:
                assert len(stack.enter_context(attached(model, "cpu")).layers) == 3
            for layer, delta in zip(model[1:], deltas, strict=True):
                full(layer, delta)
            optimizer = torch.optim.SGD(deltas.parameters(), lr=1e-3)
            for _ in range(4):
                x = inputs().requires_grad_()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    y = checkpointed(model, x, reentrant=checkpointing)
                    loss = y.float().square().sum()
                loss.backward()
                found += [y.detach(), x.grad, *(delta.grad.clone() for delta in deltas)]
                optimizer.step()
                optimizer.zero_grad()
                if not autocast:
                    with torch.no_grad():
                        found.append(model(inputs()))
            if attach:
                assert computed_bytes(model) == 2 * 8 * 8 * 4
                table = str(oracle_offload.memory_summary(model=model, abbreviated=True))
                assert "weights computed on the host" in table
        return found

    with caplog.at_level("WARNING", logger="oracle_offload"):
        found = train(True)
    warned = [r.getMessage() for r in caplog.records if "computed on the host" in r.getMessage()]
    assert len(warned) == 1
    assert "layer '1'" in warned[0]
    assert_same(found, train(False))


class ByWeight:
    """As AI-Toolkit's DoRA and LoKr: computes with the layer's weight, which it brings along."""

    def __init__(self, layer, device, calls):
        self.layer, self.calls = layer, calls
        self.delta = nn.Parameter(torch.randn(layer.weight.shape, device=device) / 8)
        self.org_forward, layer.forward = layer.forward, self.forward

    def forward(self, x):
        weight = self.layer.weight.data.detach()
        if weight.device != x.device:
            weight = weight.to(x.device)
        weight = weight + self.delta / weight.norm()
        operator = F.conv2d if weight.dim() == 4 else F.linear
        y = operator(x, weight, self.layer.bias.to(x.device))
        return y + self.org_forward(x) if self.calls else y


@pytest.mark.parametrize("calls", [True, False], ids=["next to the layer", "in its place"])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_an_adapter_may_compute_with_the_weight_of_its_layer(kind, calls, device):
    def train(attach):
        torch.manual_seed(0)
        if kind == "conv":
            layers = [nn.Conv2d(3, 3, 1) for _ in range(3)]
            x = torch.randn(2, 3, 4, 4).to(device)
        else:
            layers, x = [nn.Linear(8, 8) for _ in range(3)], torch.randn(2, 8).to(device)
        model = nn.Sequential(*layers).requires_grad_(False)
        found = []
        with contextlib.ExitStack() as stack:
            if attach:
                assert len(stack.enter_context(attached(model, device)).layers) == 3
            else:
                model.to(device)
            adapters = [ByWeight(layer, device, calls) for layer in model[1:]]
            for _ in range(3):
                y = model(x)
                y.square().sum().backward()
                found += [y.detach(), *(adapter.delta.grad.clone() for adapter in adapters)]
            if attach:
                assert (
                    copied_bytes()[not is_simulated(device)] > 0
                    and len(model._memory_manager.layers) == 3
                )
        return found

    assert_same(train(True), train(False))


@pytest.mark.parametrize("names", [("weight",), ("bias",), ("weight", "bias")], ids=str)
def test_functional_call_as_the_first_forward(names):
    managed = build()
    resident = copy.deepcopy(managed)
    given = {f"0.inner.{name}": torch.ones(8, 8)[0 if name == "bias" else ...] for name in names}
    given = {key: value.clone().requires_grad_() for key, value in given.items()}

    def call(model):
        x = inputs().requires_grad_()
        y = torch.func.functional_call(model, given, (x,))
        grads = torch.autograd.grad(y.sum(), [x, *given.values(), *model[2].parameters()])
        return [y, *grads]

    with attached(managed, "cpu"):
        assert_same(call(managed), call(resident))
        with Witness():
            found = call(managed)
        assert_same(found, call(resident))
        assert_same(managed(inputs()), resident(inputs()))


# ---- what works on the host alone ----


class Teacher(nn.Module):
    """A student, and a teacher that is an average of it, updated in forward."""

    def __init__(self, update):
        super().__init__()
        self.student, self.teacher, self.update = Block(), Block(), update
        self.shadow = {}

    def forward(self, x):
        with torch.no_grad():
            self.update(self)
            target = self.teacher(x)
        return self.student(x) - target


def pairs(model):
    return list(zip(model.teacher.parameters(), model.student.parameters(), strict=True))


def average(model):
    for mean, value in pairs(model):
        mean.mul_(0.9).add_(value, alpha=0.1)


def average_data(model):
    for mean, value in pairs(model):
        mean.data = mean.data * 0.9 + value.data * 0.1


def average_at_once(model):
    torch._foreach_lerp_(*map(list, zip(*pairs(model), strict=True)), 0.1)


def average_outside(model):
    for name, value in model.student.named_parameters():
        shadow = model.shadow.setdefault(name, torch.zeros_like(value))
        shadow.lerp_(value, 0.1)


def clip(model):
    for value in model.student.parameters():
        value.clamp_(-0.1, 0.1)


def normalise(model):
    weight = model.student.inner.weight
    weight.div_(weight.norm(dim=1, keepdim=True))


def load_from_the_device(model):
    model.teacher.inner.bias.copy_(model.resident)


UPDATES = [
    average,
    average_data,
    average_at_once,
    average_outside,
    clip,
    normalise,
    load_from_the_device,
]


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
def test_writes_from_host_to_host_pass_in_the_first_forward(update):
    def train(attach):
        torch.manual_seed(0)
        model, found = Teacher(update), []
        model.register_buffer("resident", torch.full((8,), 0.5))
        with attached(model, "cpu") if attach else contextlib.nullcontext() as manager:
            assert manager is None or len(manager.layers) == 2
            for _ in range(3):
                y = model(inputs())
                y.square().sum().backward()
                found += [y.detach(), *(p.detach().clone() for p in model.parameters())]
                found += [p.grad.clone() for p in model.student.parameters()]
        return found

    assert_same(train(True), train(False))


USES = {
    "linear": lambda layer, x, norm: F.linear(x, layer.weight),
    "of a copy": lambda layer, x, norm: F.linear(x, layer.weight.clone() * 2),
    "of two copies": lambda layer, x, norm: x @ (layer.weight.t() + 1).tanh(),
    "of a number": lambda layer, x, norm: x * layer.weight.norm(),
    "with a resident weight": lambda layer, x, norm: x + (layer.weight * norm.weight)[:3],
    "of what comes late": lambda layer, x, norm: torch.ones(3, 8).to(x) @ layer.weight + x,
    "into other memory": lambda layer, x, norm: x + torch.zeros(8, 8).to(x).copy_(layer.weight)[:3],
    "by what returns nothing": lambda layer, x, norm: x + added_in_a_list(layer.weight)[:3],
}


def added_in_a_list(weight):
    total = [torch.zeros(8, 8).to(weight.device)]
    torch._foreach_add_(total, [weight.detach()])
    return total[0]


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_weight_may_meet_what_lies_on_the_device(use, device):
    managed, resident = resident_pair(build().requires_grad_(False))
    for model in (managed, resident):
        model[1].forward = lambda x, model=model: use(model[0].inner, x, model[1])

    with attached(managed, device) as manager:
        assert [layer.name for layer in manager.layers] == ["0.inner", "2.inner"]
        assert_models_agree(managed, resident, step_of(inputs(), device), device=device)


# ---- the bits of the first forward ----


class Decomposed(nn.Module):
    """What a dispatch mode makes other operators of: kernels that call operators, and composites.

    On a device that a test defines there are no recurrent kernels and none of attention.
    """

    def __init__(self, device):
        super().__init__()
        self.layer, self.product = nn.Linear(64, 64), nn.Bilinear(64, 64, 16)
        self.recurrent = self.attention = None
        if device != "simgpu":
            self.recurrent = nn.GRU(64, 64, batch_first=True)
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        x = self.layer(x)
        if self.recurrent is not None:
            x = self.recurrent(x)[0]
            x = self.attention(x, x, x)[0]
        x = F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3).squeeze(1)
        x = torch.einsum("bsi,bti->bst", x, x).float() @ x.float()
        return self.product(x.float(), x.float())


class Region(nn.Module):
    """A model whose forward begins a region of autocast, as accelerate's does."""

    def __init__(self, model, device):
        super().__init__()
        self.model, self.device = model, device

    def forward(self, x):
        with torch.autocast(self.device, torch.bfloat16):
            return self.model(x)


@pytest.mark.parametrize("where", ["no region", "around", "within"])
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_a_first_forward_has_the_bits_of_any_other(device, where, grad, trained):
    model = Decomposed(device).requires_grad_(trained)
    if where == "within":
        model = Region(model, device)
    resident = copy.deepcopy(model).to(device)
    x = torch.randn(2, 7, 64).to(device)
    region = torch.autocast(device, torch.bfloat16, enabled=where == "around")
    with attached(model, device, offload_percent=1.0) as manager:
        assert any(layer.name.endswith("layer") for layer in manager.layers)
        with grad(), region:
            expected = resident(x)
            first, second = model(x), model(x)
            assert torch.equal(first, expected) and torch.equal(second, expected)
            if where != "within":  # a witness knows autocast as it was where its block began
                with Witness():
                    third = model(x)
                assert torch.equal(third, expected)
