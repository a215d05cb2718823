"""Weights that code uses without calling their layer: what reading finds, and layers on trial."""

from __future__ import annotations

import contextlib
import copy
import gc
import operator
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import simgpu
import torch
import torch.nn.functional as F
from equality import assert_same, attached, gradients
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload import OffloadError, direct_uses, masters, optimizer_states, selection, watch
from oracle_offload.layers import linear, loan, trial
from oracle_offload.witness import Witness

# ---- reading ----


class Reads(nn.Module):
    """Asks for what lies in no memory, and writes masters in place."""

    def __init__(self):
        super().__init__()
        self.wo, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        if isinstance(self.wo.weight, torch.Tensor) and x.dtype != self.wo.weight.dtype:
            x = x.to(self.wo.weight.dtype)
        assert hasattr(self.wo.weight, "shape")
        if self.wo.bias is not None and len(self.wo.bias) == 8:
            with torch.no_grad():
                self.teacher.weight.data.mul_(0.9).add_(self.wo.weight.data, alpha=0.1)
                self.teacher.bias.data = self.wo.bias.data * 1
                self.wo.weight.data[0] *= 0.5
        return self.wo(x) + self.teacher(x)


class Certain(nn.Module):
    def __init__(self):
        super().__init__()
        self.loop, self.called, self.test, self.inherited = (nn.Linear(8, 8) for _ in range(4))
        self.device = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(2):
            x = F.linear(x, self.loop.weight)
        x = x.to(self.device.weight.device)
        return self.project(x) if self.test.bias.sum() > 9 else self.project(x) + self.sure(x)

    def project(self, x):
        return F.linear(x, self.called.weight)

    def sure(self, x):
        return x


class Calls(Certain):
    def forward(self, x):
        return self.project(super().forward(x))


class Doubtful(nn.Module):
    def __init__(self):
        super().__init__()
        names = ("branch", "other", "either", "later", "caught", "matched", "called")
        for name in names:
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x):
        if x.dim() == 9:
            x = x @ self.branch.weight
        else:
            x = x @ self.other.weight
        x = x @ self.either.weight if x.dim() == 9 else x
        found = x.dim() == 9 and x @ self.later.weight
        try:
            found = x
        except ValueError:
            found = self.caught.weight
        match x.dim():
            case 9:
                found = self.matched.weight
        return self.project(found) if x.dim() == 9 else found

    def project(self, x):
        return F.linear(x, self.called.weight)


def found_in(module):
    return {
        path[0]: use.certain for use in direct_uses.direct_uses(type(module)) for path in [use.path]
    }


def test_what_reading_takes_for_no_use():
    assert found_in(Reads()) == {}
    model = nn.Sequential(Reads())
    with attached(model, "cpu") as manager:
        assert len(manager.layers) == 2
        assert manager.resident == {}


def test_what_reading_is_certain_of():
    assert found_in(Certain()) == {"loop": True, "called": False, "test": True, "device": True}
    assert found_in(Calls()) == {"loop": True, "called": True, "test": True, "device": True}


def test_one_certain_use_among_doubtful_ones_decides():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = F.linear(x, self.inner.weight)
            return self.last(y @ self.inner.weight if x.dim() == 9 else y)

    assert [leaf.name for leaf in selection.select(Both()).leaves] == ["last"]


def test_what_reading_cannot_decide():
    names = ("branch", "other", "either", "later", "caught", "matched", "called")
    assert found_in(Doubtful()) == dict.fromkeys(names, False)
    chosen = selection.select(Doubtful())
    assert [leaf.name for leaf in chosen.leaves] == list(names)
    assert all(leaf.doubtful for leaf in chosen.leaves)


class Wrapper(nn.Module):
    """As peft wraps a layer."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x)


class Uses(nn.Module):
    """Uses `inner` directly, where `when` says so; each layer is called as well."""

    def __init__(self, width=8):
        super().__init__()
        self.before, self.inner = nn.Linear(8, width), nn.Linear(width, width)
        self.after = nn.Linear(width, 8)
        self.when = False

    def forward(self, x):
        y = self.inner(torch.tanh(self.before(x)))
        if self.when:
            y = y + F.linear(y, self.inner.weight * 2, self.inner.bias)
        return self.after(torch.tanh(self.inner(y)))


class UsesAlways(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(F.linear(x, self.inner.weight))


def test_a_use_behind_an_adapter_is_seen():
    model = UsesAlways()
    model.inner = Wrapper(model.inner)
    chosen = selection.select(model)
    assert [leaf.name for leaf in chosen.leaves] == ["last"]
    assert chosen.resident["inner.base_layer"].startswith("UsesAlways.forward uses its weight")


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.without = nn.Linear(8, 8, bias=False)
        self.many = nn.ModuleList([nn.Linear(8, 8)])
        self.weight = nn.Parameter(torch.ones(8))
        self.adapted, self.block = Wrapper(nn.Linear(8, 8)), Wrapper(UsesAlways())

    @property
    def itself(self):
        return self

    def forward(self, x):
        return F.linear(x, self.a.weight)

    def project(self, x):
        return F.linear(x, self.b.weight)

    def by_way_of(self, x):
        return self.project(x)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        # ---- what is written, and where from
        ("del self.a.weight", {}),
        ("self.a.weight, y = x", {}),
        ("x.weight = self.a.weight", {"a": True}),
        ("self.a.cache = self.a.weight", {"a": True}),
        ("self.weight.data = self.a.weight.data", {"a": True}),
        ("x = self.a.weight.data = self.a.weight * 2", {"a": True}),
        ("x.data = self.a.weight.data = self.a.weight * 2", {"a": True}),
        ("f(x)[0] = self.a.weight", {"a": True}),
        ("self.a.weight.clone()[0] = self.b.weight", {"a": True, "b": True}),
        ("self.a.weight.data.mul_(2)[0] = self.b.weight", {}),
        ("self.a.weight.mul_(2)", {}),
        ("self.a.weight.add(2)", {"a": True}),
        ("self.a.weight.__mul__(2)", {"a": True}),
        ("x.add_(self.a.weight)", {"a": True}),
        ("f(self.a.weight)", {"a": True}),
        # ---- what is asked for
        ("return self.a.weight.is_sparse, self.a.weight.grad, self.a.bias.stride()", {}),
        ("return (x @ self.a.weight).shape", {"a": True}),
        ("return self.a.weight.device", {"a": True}),
        ("return self.a.weight is None is self.a.bias", {}),
        ("return f(self.a.weight) is None", {"a": True}),
        ("return self.a.weight == 0", {"a": True}),
        ("return isinstance(self.a.weight, f)", {}),
        ("return isinstance(f(self.a.weight), f)", {"a": True}),
        ("return float(self.a.weight)", {"a": True}),
        # ---- whose
        ("return x.a.weight, f(x).weight", {}),
        ("return self.many[int(self.a.bias[0])].weight", {"many.0": True, "a": True}),
        ("return self.without.bias", {}),
        ("return self.weight, self.itself.weight", {}),
        ("return self.adapted.weight", {"adapted.base_layer": True}),
        ("return self.adapted.base_layer.weight", {"adapted.base_layer": True}),
        ("return self.block.last.weight", {"block.base_layer.last": True}),
        # ---- whether every call comes by
        ("return self.a.weight.sum() or self.b.weight", {"a": True, "b": False}),
        ("return self.project(x), self.project(x) if x else x", {"b": True}),
        ("return self.project(x) if x else self.by_way_of(x)", {"b": False}),
        ("return self.project(x) if x else x, self.by_way_of(x)", {"b": True}),
        ("return super().forward(x)", {"a": True}),
    ],
)
def test_which_layers_are_used(tmp_path, code, found):
    file, names = tmp_path / "code.py", {"__class__": Layers}
    file.write_text(f"def forward(self, x):\n    {code}\n")
    exec(compile(file.read_text(), file, "exec"), names)
    model = type("Reads", (Layers,), {"forward": names["forward"]})()
    names = {id(module): name for name, module in model.named_modules()}
    used = direct_uses.used_directly([model])
    assert {names[layer]: use.certain for layer, use in used.items()} == found


def test_code_without_a_source_may_call_what_it_names():
    forward = eval("lambda self, x: self.by_way_of(x)")
    model = type("Reads", (Layers,), {"forward": forward})()
    ((layer, use),) = direct_uses.used_directly([model]).items()
    assert layer == id(model.b) and not use.certain
    assert list(use.sites.values()) == ["Reads.project"] and not use.users


def test_layers_of_torchscript_are_left_to_it():
    model = UsesAlways()
    x = inputs()
    expected = model(x)
    model.inner = torch.jit.script(model.inner)
    assert direct_uses.used_directly(model.modules()) == {}
    with attached(model, "cpu") as manager:
        assert_same(model(x), expected)
        assert [layer.name for layer in manager.layers] == ["last"]
        assert manager.resident["inner.weight"] == "inner is compiled TorchScript"


# ---- on trial ----


def inputs():
    return torch.linspace(-1, 1, 24).view(3, 8)


def train(model, manager=None, first=1, steps=4, checkpointing=None, optimizer=None, witness=False):
    """Return results and gradients; the branch is taken from the forward number `first` on."""
    found = []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW([*trained, nn.Parameter(torch.ones(1))], lr=1e-2)
    for number in range(1, steps + 1):
        model.when = number >= first
        for _ in range(2):  # gradients are accumulated
            x = inputs().requires_grad_()
            with Witness() if witness and manager else contextlib.nullcontext():
                if checkpointing is None:
                    y = model(x)
                else:
                    y = checkpoint(model, x, use_reentrant=checkpointing)
                y.square().sum().backward()
            found += [y.detach(), x.grad]
        found.append({k: None if g is None else g.clone() for k, g in gradients(model).items()})
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(inputs()))
        if manager is not None and not witness:
            assert ("inner.weight" in manager.resident) is (number >= first)
    return found


def build():
    torch.manual_seed(0)
    return Uses()


@pytest.mark.parametrize("witness", [False, True], ids=["plain", "witness"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=str)
@pytest.mark.parametrize("first", [1, 2, 100])
def test_a_branch_taken_late_has_the_residents_bits(
    first, checkpointing, trainable, witness, caplog
):
    if first == 100 and checkpointing is not None:
        first = 5
    resident, managed = build().requires_grad_(trainable), build().requires_grad_(trainable)
    identities = [id(p) for p in managed.parameters()]
    steps = first + 2
    expected = train(resident, None, first, steps, checkpointing)
    with attached(managed, "cpu") as manager, caplog.at_level("WARNING", logger="oracle_offload"):
        assert len(manager.layers) == 3
        assert_same(train(managed, manager, first, steps, checkpointing, witness=witness), expected)
        assert [layer.name for layer in manager.layers] == ["before", "after"]
        managed(inputs())
        assert type(managed.inner) is nn.Linear
        assert "_layer_memory_manager" not in managed.inner.__dict__
        assert "Uses.forward uses its weight" in manager.resident["inner.weight"]
    assert [id(p) for p in managed.parameters()] == identities
    assert_same(dict(managed.state_dict()), dict(resident.state_dict()))
    messages = [r.getMessage() for r in caplog.records if "Uses.forward computes" in r.getMessage()]
    assert len(messages) == 1


def test_a_use_that_is_written_over_several_lines_is_known_by_its_frame():
    class Long(Uses):
        def forward(self, x):
            y = self.inner(self.before(x))
            if self.when:
                weight = (
                    self
                    .inner
                    .weight
                )  # fmt: skip
                y = F.linear(y, weight)
            return self.after(y)

    torch.manual_seed(0)
    managed = Long()
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu") as manager:
        assert len(manager.layers) == 3
        assert_same(train(managed, manager, first=2), train(resident, first=2))
        assert [layer.name for layer in manager.layers] == ["before", "after"]


def test_a_branch_never_taken_leaves_the_layer_managed():
    resident, managed = build(), build()
    with attached(managed, "cpu") as manager:
        assert_same(train(managed, None, first=9), train(resident, None, first=9))
        assert len(manager.layers) == 3
        assert manager.resident == {}
        managed.inner.weight.norm()  # not from the branch
        assert len(manager.layers) == 3


def test_a_line_that_reads_something_else_of_the_layer_moves_no_weight():
    """It reads the weight on other calls."""

    class Optional(Uses):
        def forward(self, x):
            y = self.inner(self.before(x))
            y = y @ self.inner.weight if hasattr(self.inner, "twice") else y
            return self.after(y)

    torch.manual_seed(0)
    managed = Optional()
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu") as manager:
        assert_same(train(managed), train(resident))
        assert len(manager.layers) == 3 and manager.resident == {}
        for model in (managed, resident):
            model.inner.twice = True
        managed(inputs())
        assert [layer.name for layer in manager.layers] == ["before", "after"]


def test_an_optimizer_that_steps_in_the_first_forward_moves_no_weight():
    """What a step computes with, on whatever device, is its own matter."""

    class Decays(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, rate):
            for parameter in self.param_groups[0]["params"]:
                parameter.copy_(torch.mul(parameter, rate))

    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    resident = copy.deepcopy(managed)
    for model in (managed, resident):
        optimizer = Decays(model.parameters())

        def stepping(x, optimizer=optimizer, forward=model.forward):
            optimizer.step(torch.sigmoid(x.mean()))
            return forward(x)

        model.forward = stepping  # as trainers put one there
    with attached(managed, "cpu") as manager:
        for _ in range(2):
            assert_same(managed(inputs()), resident(inputs()))
        assert len(manager.layers) == 2


def test_a_layer_on_trial_is_moved_before_a_write_in_the_branch():
    """What the branch gets is the Parameter itself: a write is not lost."""

    class Writes(Uses):
        def forward(self, x):
            if self.when:
                weight = self.inner.weight
                with torch.no_grad():
                    weight.mul_(0.5)
                weight.data.clamp_(-0.1, 0.1)
            return self.after(self.inner(x))

    torch.manual_seed(0)
    managed = Writes()
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu"):
        assert_same(train(managed, first=2), train(resident, first=2))
        assert_same(dict(managed.state_dict()), dict(resident.state_dict()))


def test_a_use_behind_an_adapter_that_came_later():
    resident, managed = build(), build()
    with attached(managed, "cpu") as manager:
        for model in (resident, managed):
            model(inputs())
            model.inner = Wrapper(model.inner)
        assert_same(train(managed, first=2), train(resident, first=2))
        assert len(manager.layers) == 2


def test_a_module_that_came_later_is_read_too():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return F.linear(x, self.inner.before.weight) + self.inner(x)

    resident, managed = nn.Sequential(build()), nn.Sequential(build())
    with attached(managed, "cpu") as manager:
        for model in (resident, managed):
            model(inputs())
            model[0] = Outer(model[0])
        assert_same(train(managed, first=9), train(resident, first=9))
        assert sorted(manager.resident) == ["0.inner.before.bias", "0.inner.before.weight"]


def test_layers_that_share_a_parameter_leave_together():
    def tied():
        model = build()
        model.after.weight = model.inner.weight
        return model

    resident, managed = tied(), tied()
    with attached(managed, "cpu") as manager:
        assert_same(train(managed, first=2), train(resident, first=2))
        assert [layer.name for layer in manager.layers] == ["before"]
        assert managed.after.weight is managed.inner.weight


def test_code_outside_of_torch_is_named():
    names = {"__name__": "torch.nn.anything", "sys": sys, "named": watch._code_outside}
    exec("def inside(): return named(sys._getframe())", names)

    def outside():
        return names["inside"]()

    assert outside().endswith("test_code_outside_of_torch_is_named.<locals>.outside")
    assert watch._code_outside(None) == "some code"


def test_a_layer_leaves_once(caplog):
    """Whichever thread was first."""
    with attached(build(), "cpu") as manager, caplog.at_level("WARNING", "oracle_offload"):
        inner = {layer.name: layer for layer in manager.layers}["inner"]
        for _ in range(2):
            trial.move_to_device(inner, "a loss")
        assert [layer.name for layer in manager.layers] == ["before", "after"]
    assert len([said for said in caplog.messages if "a loss computes with" in said]) == 1


def test_a_layer_leaves_with_one_that_shares_its_parameter_and_whose_module_is_gone():
    class Tied(Uses):
        def __init__(self):
            super().__init__()
            self.tied = nn.Linear(8, 8)
            self.tied.weight = self.inner.weight

    torch.manual_seed(0)
    managed = Tied()
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu") as manager:
        assert "tied" in [layer.name for layer in manager.layers]
        del managed.tied, resident.tied
        gc.collect()
        assert_same(train(managed, first=2), train(resident, first=2))
        assert not {"tied", "inner"} & {layer.name for layer in manager.layers}


def test_without_room_the_branch_is_refused_with_the_remedy(sim):
    model = build()
    with attached(model, "cpu") as manager:
        expected = model(inputs())
        model.when = True
        device = sim.simulator.get_device(0)
        real = manager.state.engine

        class Full:
            def __getattr__(self, name):
                return (lambda: (16, 1 << 30)) if name == "mem_info" else getattr(real, name)

        manager.state.engine = Full()
        with pytest.raises(torch.OutOfMemoryError, match=r"ignore_modules=\['inner'\]"):
            model(inputs())
        manager.state.engine = real
        assert manager.resident == {}
        model.when = False
        assert_same(model(inputs()), expected)
        assert device is not None


def test_the_memory_of_masters_that_left_is_freed(monkeypatch):
    monkeypatch.setattr(masters, "PIECE_BYTES", 1 << 16)
    model = Uses(width=256).requires_grad_(False)
    with attached(model, "cpu"):

        def usage():
            device = oracle_offload.memory_summary(model=model).devices[0]
            return device.locked_bytes, device.models[0].managed_bytes

        locked, managed = usage()
        model.when = True
        model(inputs())
        nbytes = 256 * 257 * 4
        assert locked - nbytes - 4096 <= usage()[0] <= locked - nbytes  # whole pages
        assert managed - nbytes <= usage()[1] < managed - nbytes + 512
        model(inputs())
        kept = model.inner
    assert type(kept) is nn.Linear
    assert kept(torch.ones(3, 256)).shape == (3, 256)


def test_a_copy_of_a_layer_on_trial_is_read_as_any_other():
    model = build()
    with attached(model, "cpu"):
        copied = copy.deepcopy(model)
        assert_same(copied.inner.weight, model.inner.weight)
        with pytest.raises(AttributeError, match="no attribute 'wight'"):
            copied.inner.wight  # noqa: B018


def test_detach_while_a_layer_is_leaving():
    model = build()
    manager = oracle_offload.attach(model, "cpu")
    model.when = True
    model(inputs())
    assert "_layer_memory_manager" in model.inner.__dict__
    manager.detach()
    assert type(model.inner) is nn.Linear
    resident = build()
    resident.when = True
    assert_same(model(inputs()), resident(inputs()))


@pytest.mark.parametrize("order", ["newer first", "older first", "older alone"])
def test_a_graph_older_than_the_move_has_its_gradients(device, order):
    resident, managed = build().to(device), build()
    for model in (managed, resident):
        model.inner.bias.requires_grad_(False)

    def step(model):
        x = inputs().to(device)
        model(x).square().sum().backward()  # a gradient that is there when the weight moves
        if order == "older alone":
            model.zero_grad()
        graphs = [model(x).square().sum() for model.when in (False, True)]
        kept = model.inner.weight.grad
        for graph in graphs if order == "older first" else graphs[::-1]:
            if order != "older alone" or graph is graphs[0]:
                graph.backward()
                model(x)  # where no graph holds the layer, the class is swapped back
        assert kept is None or model.inner.weight.grad is kept
        return gradients(model)

    with attached(managed, device):
        assert_same(step(managed), step(resident))
        assert managed.inner.weight.grad.device.type == torch.device(device).type


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=str)
def test_two_forwards_before_the_backward_of_both(checkpointing):
    def step(model):
        model.when = True
        losses = []
        for _ in range(2):
            x = inputs().requires_grad_()
            if checkpointing is None:
                y = model(x)
            else:
                y = checkpoint(model, x, use_reentrant=checkpointing)
            losses.append(y.square().sum())
        sum(losses).backward()
        return gradients(model)

    resident, managed = build(), build()
    with attached(managed, "cpu"):
        assert_same(step(managed), step(resident))
        assert_same(step(managed), step(resident))


def test_gradients_of_a_layer_that_left_stay_on_the_device():
    model = build()
    with attached(model, "cpu") as manager:
        model.when = True
        nbytes = 8 * 9 * 4
        for to_host in (3 * nbytes, 2 * nbytes, 2 * nbytes):
            before = manager.state.engine.stats()["d2h_bytes"]
            model(inputs()).sum().backward()
            assert manager.state.engine.stats()["d2h_bytes"] - before == to_host


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_gradients_of_a_convolution_that_left_stay_on_the_device(bias):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, bias=bias)
            self.when = False

        def forward(self, x):
            y = self.conv(x)
            return y * self.conv.weight.norm() if self.when else y

    model = Scaled()
    nbytes = sum(p.nbytes for p in model.parameters())
    with attached(model, "cpu") as manager:
        # In the forward that takes the branch the layer has computed before it leaves.
        for model.when, to_host in ((False, nbytes), (True, nbytes), (True, 0), (False, 0)):
            before = manager.state.engine.stats()["d2h_bytes"]
            model(torch.randn(1, 2, 5, 5)).sum().backward()
            assert manager.state.engine.stats()["d2h_bytes"] - before == to_host


PRUNED = 3  # weights of the inner layer


def put_others(model):
    """``functional_call`` with other tensors in the places of the Parameters."""
    others = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    return torch.func.functional_call(model, others, (inputs(),))


def prune_inner(model):
    """Let the weight be computed, by a hook before each forward."""
    prune.l1_unstructured(model.inner, "weight", PRUNED)
    y = model(inputs())
    y.square().sum().backward()
    return y, model.inner.weight_orig.grad


@pytest.mark.parametrize(
    ("change", "computed"), [(put_others, ["after", "before"]), (prune_inner, ["inner"])]
)
def test_a_layer_that_is_leaving_computes_with_what_is_there(change, computed):
    resident, managed = build(), build()
    with attached(managed, "cpu") as manager:
        found = []
        for model in (managed, resident):
            model.when = True
            kept = model(inputs())  # the graph is alive: the layer has not left
            model.when = False
            found += [change(model), model(inputs())]
            assert kept is not None
        assert_same(found[:2], found[2:])
        assert sorted(manager.attachment.traffic.computed_bytes) == computed


ON_A_DEVICE = """
import sys
sys.path.insert(0, {folder!r})
import copy
import simgpu
simgpu.install()
import torch
from equality import assert_same
from test_direct_uses import build, inputs
import oracle_offload

def there(tensor):
    return tensor.device.type == "simgpu"

x = inputs().to("simgpu")
for build_layer, given in (
    (lambda: torch.nn.Linear(8, 8), inputs()),
    (lambda: torch.nn.Embedding(8, 8), torch.arange(5)),
    (lambda: torch.nn.Conv1d(3, 4, 3), inputs()[None]),
):
    managed = torch.nn.Sequential(build_layer())
    resident = copy.deepcopy(managed).to("simgpu")
    manager = oracle_offload.attach(managed, "simgpu")
    assert len(manager.layers) == 1
    for each in (given, given.to("simgpu")):  # the host's are brought there
        y = managed(each)
        assert there(y)
        assert_same(y, resident(given.to("simgpu")))
    y.square().sum().backward()
    assert all(p.grad.device.type == "cpu" for p in managed.parameters())
    manager.detach()

managed = build()
resident = copy.deepcopy(managed).to("simgpu")
manager = oracle_offload.attach(managed, "simgpu")
for model in (managed, resident):
    model.inner.bias.requires_grad_(False)
optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (managed, resident)]
for model, optimizer in zip((managed, resident), optimizers):
    for model.when in (False, True, True):
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
        model(x).square().sum().backward()
        optimizer.step()
state = optimizers[0].state[managed.inner.weight]
assert there(state["exp_avg"]) and not there(state["step"])
for name, p in managed.named_parameters():
    other = resident.get_parameter(name)
    assert there(p) is name.startswith("inner"), name
    assert p.grad is None or there(p.grad) is there(p), name
    assert_same(p, other, name)
    assert_same(p.grad, other.grad, name)
assert sorted(manager.resident) == ["inner.bias", "inner.weight"]
manager.detach()
"""


@pytest.mark.skipif(not simgpu.is_available(), reason="this torch knows no such device type")
def test_on_a_device_lies_what_was_brought_there_and_what_moved_with_its_state():
    code = ON_A_DEVICE.format(folder=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_threads_take_the_branch_at_once():
    resident, managed = build().requires_grad_(False), build().requires_grad_(False)
    resident.when = managed.when = True
    expected, found = resident(inputs()), []
    with attached(managed, "cpu") as manager:
        threads = [
            threading.Thread(target=lambda: found.append(managed(inputs()))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(found) == 4
        for y in found:
            assert_same(y, expected)
        assert sorted(manager.resident) == ["inner.bias", "inner.weight"]


@contextlib.contextmanager
def call_under_way(manager, owner, name, monkeypatch):
    """Enter with a thread held inside ``owner.name`` of the inner layer; leave as it goes on."""
    original, begun, go_on, found = getattr(owner, name), threading.Event(), threading.Event(), []
    layer = {layer.name: layer for layer in manager.layers}["inner"]

    def waits(*arguments):
        if threading.current_thread() is thread and not begun.is_set():
            begun.set()
            assert go_on.wait(30)
        return original(*arguments)

    thread = threading.Thread(target=lambda: found.append(layer.module()(inputs())))
    monkeypatch.setattr(owner, name, waits)
    thread.start()
    assert begun.wait(30)
    yield found
    go_on.set()
    thread.join(30)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_a_layer_leaves_while_a_thread_computes_with_it(monkeypatch, autocast):
    model = build().requires_grad_(False)
    expected = copy.deepcopy(model.inner)(inputs())
    model.when = True
    with attached(model, "cpu") as manager, torch.autocast("cpu", enabled=autocast):
        master = StorageWeakRef(model.inner.weight.untyped_storage())
        with call_under_way(manager, linear.LinearLayer, "compute", monkeypatch) as found:
            with torch.no_grad():
                model(inputs())
                model(inputs())  # a graph that is gone would let the layer go
            assert sorted(manager.resident) == ["inner.bias", "inner.weight"]
            assert not master.expired(), "the engine may copy from it until the thread returns"
        assert_same(found, [expected])
        with torch.no_grad():
            model(inputs())
        assert type(model.inner) is nn.Linear
        assert master.expired()


def test_a_layer_leaves_between_a_threads_check_and_its_loan(monkeypatch):
    model = build().requires_grad_(False)
    expected = copy.deepcopy(model.inner)(inputs())
    model.when = True
    with attached(model, "cpu") as manager:
        with call_under_way(manager, loan, "version_of", monkeypatch) as found:
            model(inputs())
            assert sorted(manager.resident) == ["inner.bias", "inner.weight"]
        assert_same(found, [expected])


def test_an_optimizers_state_follows_a_parameter_that_moved(monkeypatch):
    # Another test's parameter that moved may have had the `id` of one of these.
    monkeypatch.setattr(optimizer_states, "_moved", {})
    parameter, other = (nn.Parameter(torch.ones(4, device="meta")) for _ in range(2))
    optimizer = torch.optim.AdamW([parameter, other])
    for each in (parameter, other):
        optimizer.state[each] = {"exp_avg": torch.ones(4), "step": torch.tensor(1.0)}
    optimizer_states.note_moved([parameter])
    optimizer_states.follow(optimizer)
    assert optimizer.state[parameter]["exp_avg"].is_meta
    assert not optimizer.state[parameter]["step"].is_meta, "torch keeps it on the host"
    assert not optimizer.state[other]["exp_avg"].is_meta, "not ours to move"


def test_what_reading_does_not_see_still_fails_the_watch():
    class Hidden(Uses):
        def forward(self, x):
            layer = self.inner
            return F.linear(self.before(x), layer.weight)

    model = Hidden()
    with attached(model, "cpu"), pytest.raises(OffloadError, match=r"ignore_modules=\['inner'\]"):
        model(inputs())


class Adapted(nn.Module):
    """As peft's DoRA: an adapter whose code takes the weight of the layer that it wraps."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return scaled(self.base_layer, self.lora, x)


def scaled(base_layer, lora, x):
    weight = base_layer.weight
    norm = torch.linalg.norm(weight + lora.weight, dim=1)
    return base_layer(x) * norm + F.linear(x, lora.weight)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=str)
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_an_adapter_that_takes_a_weight_makes_its_layer_resident(
    trainable, checkpointing, autocast, caplog
):
    """No reader of source can see it: the function is given the layer in an argument."""
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(8, 8), Adapted(nn.Linear(8, 8)), nn.Linear(8, 8))
    for name, parameter in managed.named_parameters():
        parameter.requires_grad_(trainable or "lora" in name)
    resident = copy.deepcopy(managed)

    def step(model):
        model.zero_grad()
        x = inputs().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if checkpointing is None:
                y = model(x)
            else:
                y = checkpoint(model, x, use_reentrant=checkpointing)
            loss = y.float().square().sum()
        loss.backward()
        return [y, x.grad, gradients(model)]

    with attached(managed, "cpu") as manager:
        for _ in range(3):
            assert_same(step(managed), step(resident))
        assert [layer.name for layer in manager.layers] == ["0", "2"]
        assert "scaled uses its weight" in manager.resident["1.base_layer.weight"]
    assert sum("lies on the device from now on" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("asked", ["weight", "bias"])
def test_a_trainers_forward_that_asks_where_a_weight_lies_makes_its_layer_resident(asked, caplog):
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu") as manager:
        for model in (managed, resident):

            def forward(x, model=model):
                last = model[1]
                if asked == "weight":
                    device = last.weight.device
                else:
                    device = last.bias.device
                hidden = model[0](x).to(device)
                return torch.addmm(model[1].bias, hidden, model[1].weight.t())

            model.forward = forward
        for _ in range(3):
            assert_same(managed(inputs()), resident(inputs()))
        assert [layer.name for layer in manager.layers] == ["0"]
    assert "lies on the device from now on (288 B)" in caplog.text


def test_a_models_own_device_moves_no_weight():
    class Asks(nn.Sequential):
        @property
        def device(self):
            return next(self.parameters()).device

        def forward(self, x):
            return super().forward(x.to(self.device))

    model = Asks(nn.Linear(8, 8), Adapted(nn.Linear(8, 8)))
    with attached(model, "cpu") as manager:
        model(inputs())
        assert [layer.name for layer in manager.layers] == ["0"]


class Mixes(nn.Module):
    """Hands what it is lent, and a layer, to a function that takes the layer's weight."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x):
        return x + mixed(self.table, self.layer)


def mixed(table, layer):
    return torch.mul(layer.weight, table).sum(0)


def test_a_weight_that_meets_what_is_lent_from_the_arena_makes_its_layer_resident(monkeypatch):
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(8, 8), Mixes()).requires_grad_(False)
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu") as manager:
        assert [layer.name for layer in manager.layers] == ["0", "1", "1.layer"]
        managed.forward = managed.forward
        assert_same(managed(inputs()), resident(inputs()))
        assert [layer.name for layer in manager.layers] == ["0", "1"]


@pytest.mark.parametrize(
    "combine",
    [torch.Tensor.add_, lambda y, weight: y + weight // y.mean()],
    ids=["in place", "by an operator of Python"],
)
def test_a_weight_that_meets_what_lies_on_the_device_makes_its_layer_resident(combine):
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu") as manager:
        for model in (managed, resident):
            model.forward = lambda x, model=model: combine(model[0](x), model[1].bias)
        assert_same(managed(inputs()), resident(inputs()))
        assert [layer.name for layer in manager.layers] == ["0"]


@pytest.mark.parametrize("write", [torch.Tensor.mul_, operator.imul], ids=["mul_", "*="])
def test_a_weight_that_is_written_with_what_lies_on_the_device_stays_on_the_host_and_is_refused(
    write,
):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    with attached(model, "cpu") as manager:

        def forward(x):
            write(model[1].weight, x.mean())
            return model[1](model[0](x))

        model.forward = forward
        with pytest.raises(OffloadError, match=r"writes the host master of '1\.weight'"):
            model(inputs())
        assert [layer.name for layer in manager.layers] == ["0", "1"]


def test_a_weight_that_is_copied_to_the_device_by_an_index_stays_where_it_is():
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu") as manager:
        for model in (managed, resident):

            def forward(x, model=model):
                y = model[0](x)
                y[0] = model[1].bias
                return model[1](y)

            model.forward = forward
        assert_same(managed(inputs()), resident(inputs()))
        assert [layer.name for layer in manager.layers] == ["0", "1"]


def test_a_weight_that_is_computed_with_on_the_host_alone_stays_there():
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu") as manager:
        norms = []
        for model in (managed, resident):

            def forward(x, model=model):
                norms.append(float((1 - model[1].weight).abs().sum()))
                return model[1](model[0](x))

            model.forward = forward
        assert_same(managed(inputs()), resident(inputs()))
        assert norms[0] == norms[1]
        assert [layer.name for layer in manager.layers] == ["0", "1"]
