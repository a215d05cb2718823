"""The first forward is watched, and the first after a change: what is let pass, what is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from equality import assert_same, attached, copied_bytes, gradients, is_simulated, resident_pair
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import oracle_offload
from oracle_offload import OffloadError, first_forward, selection
from oracle_offload.witness import Witness

REFUSED = r"host master of '(\w+\.)*inner\.weight'.*ignore_modules=\["


class Block(nn.Module):
    """One layer; `use_directly` computes with its weight in a way that no reader of source sees."""

    def __init__(self, use_directly=False):
        super().__init__()
        self.inner, self.use_directly = nn.Linear(8, 8), use_directly

    def forward(self, x):
        y = torch.tanh(self.inner(x))
        return directly(self.inner, y) if self.use_directly else y


def directly(layer, x):
    return F.linear(x, layer.weight)


def build(**options):
    torch.manual_seed(0)
    return nn.Sequential(Block(**options), nn.LayerNorm(8), Block())


def inputs():
    return torch.linspace(-1, 1, 24).view(3, 8)


def computed_bytes(model):
    return oracle_offload.memory_summary(model=model).devices[0].models[0].computed_bytes


# ---- how a watch ends ----


def raising(error):
    def hook(*_):
        raise error

    return hook


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_an_interrupted_first_forward_leaves_no_watch_behind(error):
    model, other = build(), nn.Linear(8, 8)
    with attached(model, "cpu"), FlopCounterMode(display=False) as outer:
        depth = torch._C._len_torch_dispatch_stack()
        handle = model[1].register_forward_hook(raising(error))
        with pytest.raises(error):
            model(inputs())
        assert torch._C._len_torch_dispatch_stack() == depth
        handle.remove()
        assert model[0].inner.weight.norm() > 0
        assert other(inputs()).shape == (3, 8)
    assert outer.get_total_flops() > 0
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_forward_that_did_not_end_well_is_followed_by_another_watch(error):
    model = build(use_directly=True)
    with attached(model, "cpu"):
        handle = model[0].inner.register_forward_hook(raising(error))
        with pytest.raises(error):
            model(inputs())
        handle.remove()
        for _ in range(2):
            with pytest.raises(OffloadError, match=REFUSED):
                model(inputs())


def test_an_interrupted_model_gives_its_memory_back():
    model = build()
    oracle_offload.attach(model, "cpu")
    model[1].register_forward_hook(raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(inputs())
    gone = weakref.ref(model[0].inner)
    del model
    gc.collect()
    assert gone() is None
    from oracle_offload.engines import open_states

    assert not open_states()


def test_the_watch_is_on_the_model_alone():
    """Nothing of torch's is changed, copies and files know nothing of it, and it ends."""
    model, hooks = build(), torch.nn.modules.module
    with attached(model, "cpu"):
        assert not hooks._global_forward_hooks
        assert not hooks._global_forward_pre_hooks
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        clones = [copy.deepcopy(model), torch.load(saved, weights_only=False)]
        for clone in clones:
            assert all("_compiled_call_impl" not in part.__dict__ for part in clone.modules())
            clone[0].use_directly = True
            clone(inputs())
        assert not model._compiled_call_impl, "nothing was compiled"
        model(inputs())
        parts = [part for part in model.modules() if "_compiled_call_impl" in part.__dict__]
        assert parts == [model]
    assert "_compiled_call_impl" not in model.__dict__


def test_a_module_compiled_before_attach_stays_compiled():
    model = build()
    calls = []
    model._compiled_call_impl = lambda *args: calls.append(args) or model._call_impl(*args)
    compiled = model._compiled_call_impl
    with attached(model, "cpu"):
        model(inputs())
    model(inputs())
    assert len(calls) == 2
    assert model.__dict__["_compiled_call_impl"] is compiled


def test_a_module_compiled_after_attach_is_watched_and_stays_compiled():
    model, calls = build(use_directly=True), []
    with attached(model, "cpu"):
        model._compiled_call_impl = lambda *args: calls.append(args) or model._call_impl(*args)
        compiled = model._compiled_call_impl.call
        with pytest.raises(OffloadError, match=REFUSED):
            model(inputs())
        assert len(calls) == 1
    assert model.__dict__["_compiled_call_impl"] is compiled


def test_a_module_compiled_after_its_first_forward_is_watched_once_its_code_changes():
    model, calls = build(), []
    with attached(model, "cpu"):
        model(inputs())
        model._compiled_call_impl = lambda *args: calls.append(args) or model._call_impl(*args)
        model(inputs())
        model[0].forward = lambda x: directly(model[0].inner, x)
        with pytest.raises(OffloadError, match=REFUSED):
            model(inputs())
        assert len(calls) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_where_a_mode_would_end_compilation_a_compiled_part_is_called_without_a_watch(
    monkeypatch, compiled
):
    monkeypatch.setattr(first_forward, "_COMPILES_UNDER_MODES", False)
    model, depths = build(), []
    if compiled:
        model[2]._compiled_call_impl = lambda *args: model[2]._call_impl(*args)
    model[0].register_forward_hook(lambda *_: depths.append(torch._C._len_torch_dispatch_stack()))
    with attached(model, "cpu"):
        model(inputs())
        model(inputs())
    assert depths == [0 if compiled else 1, 0]


def test_the_watch_over_parts_ends():
    model, depths = build(), []
    model[0].register_forward_hook(lambda *_: depths.append(torch._C._len_torch_dispatch_stack()))
    with attached(model, "cpu"):
        for _ in range(20):
            model[0](inputs())
    assert depths == [1] * 16 + [0] * 4


def test_a_part_within_a_watched_part_has_no_watch_of_its_own():
    model, depths = nn.Sequential(build(), nn.LayerNorm(8)), []
    model[0][0].register_forward_hook(
        lambda *_: depths.append(torch._C._len_torch_dispatch_stack())
    )
    with attached(model, "cpu"):
        for _ in range(20):
            model[0](inputs())
    assert depths == [1] * 16 + [0] * 4


def test_parts_of_a_model_are_watched_where_it_is_not_called_itself():
    model = build(use_directly=True)
    with attached(model, "cpu"):
        with pytest.raises(OffloadError, match=REFUSED):
            model[0](inputs())
        model[2](inputs())
        with pytest.raises(OffloadError, match=REFUSED):
            model[0](inputs())


# ---- what starts it again ----


def add_module(model, monkeypatch):
    model.append(Borrower(model[0].inner))


def replace_module(model, monkeypatch):
    model[1] = Borrower(model[0].inner)


def nest_module(model, monkeypatch):
    model[2].add_module("adapter", Borrower(model[0].inner))
    model[2].register_forward_hook(lambda block, _, output: block.adapter(output))


def replace_forward_of_an_instance(model, monkeypatch):
    model[1].forward = lambda x: directly(model[0].inner, x)


def replace_forward_of_a_managed_layer(model, monkeypatch):
    model[2].inner.forward = lambda x: directly(model[0].inner, x)


def replace_forward_of_a_class(model, monkeypatch):
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda _, x: directly(model[0].inner, x))


def add_parameter(model, monkeypatch):
    model[0].inner.register_parameter("scale", nn.Parameter(torch.ones(8)))
    model[0].use_directly = True


def add_buffer(model, monkeypatch):
    model[0].register_buffer("mask", torch.ones(8))
    model[0].use_directly = True


def replace_kind_of_parameter(model, monkeypatch):
    class Other(nn.Parameter):
        pass

    model[1].weight = Other(torch.ones(8))
    model[0].use_directly = True


class Borrower(nn.Module):
    """Computes with the weight of a layer that is not its own child."""

    def __init__(self, layer):
        super().__init__()
        self.layers = (layer,)

    def forward(self, x):
        return directly(self.layers[0], x)


CHANGES = [
    add_module,
    replace_module,
    nest_module,
    replace_forward_of_an_instance,
    replace_forward_of_a_managed_layer,
    replace_forward_of_a_class,
    add_parameter,
    add_buffer,
    replace_kind_of_parameter,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_structure_starts_the_watch_again(change, monkeypatch):
    model = build()
    with attached(model, "cpu"):
        for _ in range(3):
            model(inputs())
        change(model, monkeypatch)
        for _ in range(2):
            with pytest.raises(OffloadError, match=REFUSED):
                model(inputs())


def test_a_part_that_is_replaced_by_its_like_gets_no_watch():
    model = build()
    with attached(model, "cpu"):
        model(inputs())
        model[1] = nn.LayerNorm(8)
        model(inputs())
        assert [n for n, p in model.named_modules() if "_compiled_call_impl" in p.__dict__] == [""]


def test_a_model_with_a_part_replaced_by_its_like_is_not_watched_again():
    """The part is the only one of its class: what is gone is not taken for a change of code."""
    model, depths = build(), []
    with attached(model, "cpu"):
        model(inputs())
        model[1] = nn.LayerNorm(8)
        model[1].register_forward_hook(
            lambda *_: depths.append(torch._C._len_torch_dispatch_stack())
        )
        model(inputs())
    assert depths == [0]


def test_one_forward_of_an_instance_in_the_place_of_another_is_watched():
    model = build()
    with attached(model, "cpu"):
        model[0].forward = lambda x: torch.tanh(model[0].inner(x))
        model(inputs())
        model[0].forward = lambda x: directly(model[0].inner, x)
        with pytest.raises(OffloadError, match=REFUSED):
            model(inputs())


def test_the_first_forward_of_a_model_leaves_the_watch_over_a_part_that_is_attached_by_itself():
    outer = nn.Sequential(build(), nn.Linear(8, 8))
    with attached(outer[0], "cpu"), attached(outer, "cpu", ignore_modules=[outer[0]]):
        outer(inputs())
        outer[0][0].forward = lambda x: directly(outer[0][0].inner, x)
        with pytest.raises(OffloadError, match=REFUSED):
            outer[0](inputs())


def test_a_part_outlives_its_model():
    model = build()
    expected, part = model[0](inputs()), model[0]
    manager = oracle_offload.attach(model, "cpu")
    del model
    gc.collect()
    assert torch.equal(part(inputs()), expected)
    assert manager.detach() is None


def test_what_is_no_change_of_structure_leaves_the_watch_off():
    """Each of these happens in ordinary training; a watched forward is slow."""
    model, calls = build(), []
    unrelated = nn.ModuleList()
    with attached(model, "cpu"):
        model(inputs())
        depth = model[1].register_forward_hook(
            lambda *_: calls.append(torch._C._len_torch_dispatch_stack())
        )
        model[1].weight = nn.Parameter(torch.ones(8))
        model[1].weight.requires_grad_(False)
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        unrelated.append(nn.Linear(8, 8))
        model.eval()
        for _ in range(3):
            model(inputs())
        depth.remove()
    assert calls == [0, 0, 0]


def test_a_forward_swapped_to_and_fro_is_watched_once_in_each_form():
    model, depths = build(), []

    def patched(x):
        depths.append(torch._C._len_torch_dispatch_stack())
        return x

    with attached(model, "cpu"):
        for _ in range(3):
            model(inputs())
            model[1].forward = lambda x: patched(x)
            model(inputs())
            del model[1].forward
    assert depths == [1, 0, 0]


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
                if checkpointing is None:
                    y = model(x)
                else:
                    y = checkpoint(model, x, use_reentrant=checkpointing)
                y.square().sum().backward()
                found += [y.detach(), x.grad, {k: g.clone() for k, g in gradients(model).items()}]
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    found.append(model(inputs()))
        return found

    assert_same(train(True), train(False))


def full(layer, delta):
    """AI-Toolkit's FullModule: its delta stands in the parameter's place during forward."""
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
                    if checkpointing is None:
                        y = model(x)
                    else:
                        y = checkpoint(model, x, use_reentrant=checkpointing)
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


@pytest.mark.parametrize("calls", [True, False], ids=["beside the layer", "in its place"])
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
    torch.manual_seed(0)
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
    "with a resident weight": lambda layer, x, norm: x + layer.weight * norm.weight,
    "of what comes late": lambda layer, x, norm: torch.ones(3, 8) @ layer.weight + x,
    "in place": lambda layer, x, norm: layer.weight.data.add_(x[0]),
    "into the host": lambda layer, x, norm: x + torch.zeros(8, 8).copy_(layer.weight)[:3],
    "by what returns nothing": lambda layer, x, norm: x + added_in_a_list(layer.weight)[:3],
}


def added_in_a_list(weight):
    total = [torch.zeros(8, 8)]
    torch._foreach_add_(total, [weight.detach()])
    return total[0]


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_weight_that_meets_the_device_is_refused(use):
    model = build()
    model[1].forward = lambda x: use(model[0].inner, x, model[1])
    with attached(model, "cpu"), pytest.raises(OffloadError, match=REFUSED):
        model(inputs())


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda layer, x, norm: F.linear(x, layer.weight), r"aten\.\w+\.default reads"),
        (lambda layer, x, norm: layer.weight.data.mul_(x.mean()), r"aten\.mul_\.Tensor writes"),
        (
            lambda layer, x, norm: x + (layer.weight * 2)[:3],
            r"aten\.add\.Tensor takes what comes of",
        ),
        (
            lambda layer, x, norm: norm.weight * torch.zeros(8).copy_(layer.weight[0]),
            r"aten\.mul\.Tensor takes what comes of",
        ),
    ],
)
def test_a_refusal_says_what_the_operator_does_with_the_weight(use, said):
    model = build()
    model[1].forward = lambda x: use(model[0].inner, x, model[1])
    with attached(model, "cpu"), pytest.raises(OffloadError) as refused:
        model(inputs())
    assert re.match(
        f"operator {said} the host master of '0\\.inner\\.weight': ", str(refused.value)
    )


def test_a_copy_of_what_comes_of_a_weight_may_go_to_the_device():
    one, other = resident_pair(build())
    for model in (one, other):

        def forward(x, layer=model[0].inner):
            return x + x.detach().clone().copy_(layer.weight.clone()[:3])

        model[1].forward = forward
    with attached(one, "cpu") as manager:
        assert_same(one(inputs()), other(inputs()))
        assert [layer.name for layer in manager.layers] == ["0.inner", "2.inner"]


class Lent(nn.Module):
    """Has no operator of its own here: its forward is lent device tensors."""

    def __init__(self):
        super().__init__()
        self.table, self.write = nn.Parameter(torch.ones(64, 64), requires_grad=False), False

    def forward(self, x):
        if self.write:
            self.table.mul_(0.5)
        return x @ self.table


def test_a_write_to_what_is_lent_is_refused_by_name_and_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)
    model = nn.Sequential(Lent(), Lent())
    with attached(model, "cpu") as manager:
        assert [layer.name for layer in manager.layers] == ["0", "1"]
        model[1].write = True
        said = re.escape(
            "operator aten.mul_.Tensor writes to the weights of '1' in its forward. They lie on "
            "the host: what is written to the device's copy would be lost. Leave the module "
            "resident: attach(..., ignore_modules=['1'])."
        )
        with pytest.raises(OffloadError, match=f"^{said}$"), torch.no_grad():
            model(torch.ones(1, 64))
        model[1].write = False
        with torch.no_grad():
            assert torch.equal(model(torch.ones(1, 64)), torch.full((1, 64), 64.0 * 64))


# ---- the bits of what is watched ----


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
    torch.manual_seed(0)
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
