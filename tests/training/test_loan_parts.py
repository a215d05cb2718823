"""The loan of one operator, part by part: views, stamps, foreign weights, other threads."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from equality import Recorder, assert_same, attached, is_simulated, resident_pair
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from oracle_offload import OffloadError, StaleWeightsError
from oracle_offload.layers.leaf import Leaf

X = torch.linspace(-1, 1, 24).view(3, 8)
WEIGHT, BIAS = 8 * 8 * 4, 8 * 4


def pair(layers=1, bias=True):
    torch.manual_seed(0)
    return resident_pair(nn.Sequential(*(nn.Linear(8, 8, bias=bias) for _ in range(layers))))


# ---- what a loan costs ----


def test_tensors_are_viewed_once_where_they_lie_at_the_same_place(monkeypatch):
    """A steady step creates nothing."""
    model, resident = pair(3)
    viewed = []
    view_at = Leaf.view_at

    def views(leaf, address):
        viewed.append((leaf.name, address))
        return view_at(leaf, address)

    monkeypatch.setattr(Leaf, "view_at", views)
    with attached(model, offload_percent=0.0):
        for _ in range(3):
            assert_same(model(X), resident(X))
        assert len(viewed) == len(set(viewed)) == 3


@pytest.mark.parametrize("percent", [0.0, 0.5, 1.0])
def test_what_was_copied_is_known_by_its_version(percent):
    """Where it is still in the arena, it is not copied again: also what was fetched ahead."""
    model, resident = pair(6)
    with attached(model, offload_percent=percent) as manager, torch.no_grad():
        engine = manager.state.engine
        copies = []
        for _ in range(4):
            before = engine.stats()["h2d_bytes"]
            assert_same(model(X), resident(X))
            copies.append(engine.stats()["h2d_bytes"] - before)
        assert max(copies) <= 6 * (WEIGHT + BIAS) + 6 * 512
        if percent == 0.0:
            assert copies[1:] == [0, 0, 0]


def test_an_element_that_is_written_after_a_release_fetched_its_copy_is_seen(sim):
    """One that the engine does not sample: it knows the version that it copied."""
    depth, width = 4, 1100  # an arena holds two
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    model, resident = resident_pair(model.requires_grad_(False))
    y = z = torch.ones(2, width)
    with attached(model, offload_percent=1.0) as manager, torch.no_grad():
        for _ in range(4):  # the order is learned
            model(y)
        before = manager.state.engine.stats()
        for number in range(depth):
            y, z = model[number](y), resident[number](z)
            assert_same(y, z)
            sim.finish()  # what was fetched ahead has arrived
            for each in (model, resident):
                each[(number + 1) % depth].weight[7, 11] += 1.0
        after = manager.state.engine.stats()
    assert after["stale"] > before["stale"] and after["prefetches"] > before["prefetches"]


@pytest.mark.parametrize("trained", [("weight",), ("bias",), ("weight", "bias")], ids=str)
def test_a_gradient_under_autocast_comes_to_the_host_once(trained):
    """The stand-in of a weight brings it, as it does for all uses of one region."""
    model, _ = pair()
    for name, parameter in model[0].named_parameters():
        parameter.requires_grad_(name in trained)
    nbytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    with attached(model) as manager:
        for _ in range(2):
            before = manager.state.engine.stats()["d2h_bytes"]
            with torch.autocast("cpu", torch.bfloat16):
                y = model(X).sum()
            y.backward()
            assert manager.state.engine.stats()["d2h_bytes"] - before == nbytes


# ---- what it refuses, and what it does not ----


def test_an_input_without_a_tangent_is_computed_with_at_any_level_of_forward_mode():
    model, resident = pair()
    with attached(model), forward_ad.dual_level():
        assert_same(model(X), resident(X))


@pytest.mark.parametrize(
    "loss", [torch.sum, lambda y: y.square().sum()], ids=["linear", "quadratic"]
)
def test_a_gradient_of_a_gradient_is_refused_and_never_left_out(loss):
    """Also where the gradient of the result is a constant, which asks for none itself."""
    model, _ = pair(2)
    x = X.clone().requires_grad_()
    with attached(model):
        (grad,) = torch.autograd.grad(loss(model(x)), x, create_graph=True)
        assert grad.requires_grad
        penalty = grad.square().sum() + x.square().sum()
        with pytest.raises(OffloadError, match="double backward through a managed layer"):
            penalty.backward()
        (plain,) = torch.autograd.grad(loss(model(x)), x)
        assert not plain.requires_grad
        assert_same(grad.detach(), plain)


def test_a_backward_whose_weights_are_being_moved_is_refused_and_keeps_nothing():
    model, resident = pair(2)
    with attached(model) as manager:
        layer = manager.layers[0]
        y = model[0](X.clone().requires_grad_())
        y.register_hook(lambda grad: setattr(layer, "moving", True))
        said = "of managed layer '0' was replaced by another thread while its backward began"
        with pytest.raises(StaleWeightsError, match=said):
            y.sum().backward()
        layer.moving = False
        manager.refresh()  # nothing is in use
        model.zero_grad()
        for each in (model, resident):
            each(X).sum().backward()
        for one, other in zip(model.parameters(), resident.parameters(), strict=True):
            assert_same(one.grad, other.grad)


def test_a_forward_whose_weights_are_being_moved_computes_with_the_new_ones():
    model, resident = pair()
    with attached(model) as manager:
        layer, state = manager.layers[0], manager.state
        begun, noticed = threading.Event(), threading.Event()

        class Notices(Recorder):
            @contextlib.contextmanager
            def use(self, *arguments):
                with super().use(*arguments) as address:
                    yield address
                    if layer.moving:
                        noticed.set()

        def move():
            with state.lock:
                layer.moving = True
                begun.set()
                noticed.wait(30)
                layer.moving = False

        engine, state.engine = state.engine, Notices(state.engine)
        try:
            thread = threading.Thread(target=move)
            thread.start()
            assert begun.wait(30)
            found = model(X)
            thread.join(30)
        finally:
            state.engine = engine
        assert noticed.is_set() and not layer.moving
        assert_same(found, resident(X))
        assert len(state.engine.residents()) >= 1
        assert all(pins == 0 for *_, pins in state.engine.residents())


# ---- foreign weights ----


@pytest.mark.parametrize(
    ("names", "nbytes"),
    [(("weight", "bias"), WEIGHT + BIAS), (("weight",), WEIGHT), (("bias",), WEIGHT + BIAS)],
    ids=str,
)
def test_the_bytes_of_a_foreign_call_are_those_that_it_brings(names, nbytes):
    """The weight always travels; a bias that is the master's own is not counted as another's."""
    model, resident = pair()
    others = {f"0.{name}": torch.randn_like(getattr(model[0], name)) for name in names}
    with attached(model) as manager:
        found = torch.func.functional_call(model, others, (X,))
        assert_same(found, torch.func.functional_call(resident, others, (X,)))
        assert manager.attachment.traffic.computed_bytes == {"0": nbytes}


def test_a_foreign_weight_of_a_layer_without_bias_is_all_that_is_counted():
    model, resident = pair(bias=False)
    others = {"0.weight": torch.randn(8, 8)}
    with attached(model) as manager:
        found = torch.func.functional_call(model, others, (X,))
        assert_same(found, torch.func.functional_call(resident, others, (X,)))
        assert manager.attachment.traffic.computed_bytes == {"0": WEIGHT}


class Products(TorchFunctionMode):
    """Sees what products are made of."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            self.seen = args[1], args[2]
        return func(*args, **(kwargs or {}))


def test_a_foreign_weight_with_gaps_is_computed_with_as_it_lies_and_others_are_copied():
    """A copy would close the gaps, and the layout decides the last bits."""
    model, _ = pair()
    wide = torch.randn(8, 16)
    others = {"0.weight": wide[:, ::2], "0.bias": torch.randn(8)}
    with attached(model), Products() as mode:
        torch.func.functional_call(model, others, (X,))
    weight, bias = mode.seen
    assert weight.stride() == (16, 2) and weight.data_ptr() == wide.data_ptr()
    assert bias.data_ptr() != others["0.bias"].data_ptr() and torch.equal(bias, others["0.bias"])


# ---- which times the engine is given ----


def test_time_is_charged_for_what_forward_and_backward_do(sim):
    """Of nothing, the simulated device would compute with no wait for its copies."""
    assert is_simulated("cpu")
    model, _ = pair()
    with attached(model) as manager:
        (layer,) = manager.layers
        forward = layer.forward_seconds(X)
        needs = (True, True, True)
        backward = layer.backward_seconds(X, needs)
        assert 0 < forward < backward
        assert layer.forward_seconds(torch.ones(300_000, 8)) > 2 * forward
        assert layer.backward_seconds(torch.ones(300_000, 8), needs) > 2 * backward
        asked = []

        class Hears(Recorder):
            def use(self, member, *rest):
                asked.append(rest[-2])
                return super().use(member, *rest)

        engine, manager.state.engine = manager.state.engine, Hears(manager.state.engine)
        try:
            model(X.clone().requires_grad_()).sum().backward()
            with torch.no_grad():
                model(X)
        finally:
            manager.state.engine = engine
        assert asked[0] == asked[2] == forward and asked[1] > 0
