"""The move of a layer to the device, part by part: room, what is forgotten, who is left alone."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from equality import Recorder, assert_same, attached, resident_pair
from test_direct_uses import Uses, build, inputs, train
from torch import nn

from oracle_offload.engines import Layout
from oracle_offload.layers import trial
from oracle_offload.layers.swap import HANDLE

BYTES = 8 * 9 * 4  # of one layer's weight and bias


class Room(Recorder):
    """An engine of a device with so many bytes left."""

    free = 0

    def mem_info(self):
        return self.free, 1 << 30


@pytest.mark.parametrize("free", [BYTES - 1, BYTES])
def test_a_weight_moves_where_the_device_has_room_for_its_very_bytes(free, caplog):
    model, resident = build(), build()
    with attached(model, "cpu") as manager:
        state = manager.state
        engine, state.engine = state.engine, Room(state.engine)
        state.engine.free = free
        model.when = resident.when = True
        try:
            if free < BYTES:
                with pytest.raises(torch.OutOfMemoryError, match="no room for its 288 B"):
                    model(inputs())
                assert manager.resident == {} and len(manager.layers) == 3
            else:
                assert_same(model(inputs()), resident(inputs()))
                assert "inner.weight" in manager.resident
                assert "on the device from now on (288 B)" in caplog.text
        finally:
            state.engine = engine


def test_a_card_says_itself_whether_it_has_room():
    """What torch holds for nobody is room as well, of which the driver knows nothing."""
    device = torch.device("cpu")
    engine = SimpleNamespace(mem_info=lambda: (0, 0))
    state = SimpleNamespace(simulated=False, engine=engine, device=device)
    weight = nn.Parameter(torch.ones(4))
    copies = trial._copies(SimpleNamespace(state=state, name="a layer"), [weight], "code")
    assert copies.keys() == {id(weight)}
    assert torch.equal(copies[id(weight)], weight) and not copies[id(weight)].requires_grad
    assert copies[id(weight)].data_ptr() != weight.data_ptr()


def test_a_read_from_the_bottom_of_a_stack_moves_nothing():
    """A thread may have fewer frames than are looked at."""
    model = build()
    with attached(model, "cpu") as manager:
        trial.Trial({("elsewhere.py", 1): "Model.forward"}).read(manager.layers[1], None)
        assert len(manager.layers) == 3


def test_what_a_layer_has_in_the_arena_is_forgotten_as_it_leaves():
    model = build()
    with attached(model, "cpu") as manager:
        model(inputs())
        layer = {layer.name: layer for layer in manager.layers}["inner"]
        unit, member, stamps = layer.unit, layer.member, manager.state.stamps
        assert member in stamps[unit] and layer.views
        version = Layout.version
        model.when = True
        y = model(inputs())
        (leaving,) = manager.attachment.leaving
        assert Layout.version > version, "maps of where masters lie are of the past"
        assert member not in stamps.get(unit, {})
        assert not leaving.views, "a view would keep a segment of the arena"
        assert leaving.kept == () and leaving.on_device
        y.sum().backward()


class Tied(Uses):
    def __init__(self):
        super().__init__()
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.inner.weight


def test_a_module_that_is_another_layers_by_now_is_left_to_it():
    torch.manual_seed(0)
    model = Tied()
    with attached(model, "cpu") as manager, torch.no_grad():
        tied = model.tied
        del tied.__dict__[HANDLE]  # as code that makes a module anew in its place
        model.when = True
        model(inputs())
        assert HANDLE not in vars(tied), "it is nobody's, and no layer takes it"
        names = {layer.name for layer in manager.attachment.leaving}
        assert names == {"inner", "tied"}
        other = vars(model.before)[HANDLE]
        tied.__dict__[HANDLE] = other
        model.when = False
        model(inputs())
        assert not manager.attachment.leaving and type(model.inner) is nn.Linear
        assert vars(tied)[HANDLE] is other and type(tied) is not nn.Linear
        del tied.__dict__[HANDLE]


def test_a_layer_that_is_deleted_while_a_graph_holds_it_leaves_with_the_graph():
    model, resident = resident_pair(build())
    with attached(model, "cpu") as manager:
        model.when = True
        y = model(inputs())
        model.when = False
        for each in (model, resident):
            each.inner = nn.Identity()
        gc.collect()
        assert manager.attachment.leaving
        del y
        for _ in range(2):
            found, expected = model(inputs()), resident(inputs())
            found.sum().backward()
            assert_same(found, expected)
        assert not manager.attachment.leaving


def test_an_optimizer_may_keep_more_than_tensors_of_a_parameter_that_moved():
    class Keeps(torch.optim.SGD):
        def step(self, closure=None):
            for state in self.state.values():
                if isinstance(state, dict):
                    state["count"] += 1
            super().step(closure)

    model, resident = build(), build()
    optimizers = [Keeps(each.parameters(), 0.1) for each in (model, resident)]
    for each, optimizer in zip((model, resident), optimizers, strict=True):
        optimizer.state[each.inner.weight] = {"count": 0, "name": "inner"}
        optimizer.state[each.inner.bias] = ["no dict"]
    with attached(model, "cpu"):
        found = [
            train(each, None, 2, 3, optimizer=optimizer)
            for each, optimizer in zip((model, resident), optimizers, strict=True)
        ]
        assert_same(*found)
    assert optimizers[0].state[model.inner.weight] == {"count": 3, "name": "inner"}


@pytest.mark.parametrize("trained", [("weight",), ("weight", "bias"), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_under_autocast_a_layer_that_is_leaving_trains_as_the_residents(bias, trained):
    model = build()
    if not bias:
        model.inner.bias = None
    for name, parameter in model.inner.named_parameters():
        parameter.requires_grad_(name in trained)
    model, resident = resident_pair(model)

    def step(each):
        x = inputs().requires_grad_()
        each.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = each(x) + each(x * 2)  # of one region
            with torch.no_grad():
                sampled = each(x)
        y.float().square().sum().backward()
        return [y, sampled, x.grad, *(p.grad for p in each.parameters())]

    with attached(model, "cpu") as manager:
        model.when = resident.when = True
        kept = model(inputs())  # the graph is alive: the layer has not left
        assert_same(step(model), step(resident))
        assert manager.attachment.leaving and kept is not None
        assert_same(step(model), step(resident))


class Doubled(nn.Module):
    def forward(self, tensor):
        return tensor * 2


def test_a_class_that_was_derived_of_one_on_trial_is_read_as_any_other_after_detach():
    """A parametrisation's class stays, and its base still has what looked who reads."""
    model, resident = resident_pair(build())
    with attached(model, "cpu"):
        model(inputs())
        for each in (model, resident):
            nn.utils.parametrize.register_parametrization(each.inner, "bias", Doubled())
    assert HANDLE not in vars(model.inner)
    assert_same(model.inner.weight, resident.inner.weight)
    for model.when in (False, True):
        resident.when = model.when
        assert_same(model(inputs()), resident(inputs()))
    with pytest.raises(AttributeError, match="no attribute 'wight'"):
        model.inner.wight  # noqa: B018


def test_a_layer_that_is_leaving_follows_what_lies_on_its_device_alone():
    model = build()
    with attached(model, "cpu") as manager:
        model.when = True
        kept = model(inputs())  # the graph is alive: the layer has not left
        (leaving,) = manager.attachment.leaving
        weight = model.inner.weight
        places = vars(model.inner)["_parameters"]
        for other in (None, nn.Parameter(torch.ones(8, 8, device="meta"))):
            places["weight"] = other
            assert not leaving.adopt() and leaving.masters.present[0] is weight
        places["weight"] = nn.Parameter(torch.eye(8))
        assert leaving.adopt() and leaving.masters.present[0] is places["weight"]
        places["weight"] = weight
        assert leaving.adopt() and kept is not None


def test_a_layer_that_is_leaving_keeps_no_input_for_a_weight_that_is_frozen():
    model = build()
    model.inner.weight.requires_grad_(False)
    saved = []

    def pack(tensor):
        saved.append(tensor.data_ptr())
        return tensor

    with attached(model, "cpu") as manager:
        model.when = True
        kept = model(inputs())  # the graph is alive: the layer has not left
        assert manager.attachment.leaving and kept is not None
        for trained in (False, True):
            model.inner.weight.requires_grad_(trained)
            x = inputs().requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                model.inner(x)
            assert (x.data_ptr() in saved) is trained
