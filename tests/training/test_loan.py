"""The loan of Linear and convolutions against the resident layer: its node, gradients, refusals.

What the matrix of test_matrix.py does not have: how gradients are asked for, what sees them, and
what happens between forward and backward.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_matrix
import torch
from equality import (
    Products,
    Recorder,
    assert_models_agree,
    assert_same,
    attached,
    is_simulated,
    resident_pair,
)
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from oracle_offload import OffloadError, StaleWeightsError
from oracle_offload.layers import leaf as leaf_module

KINDS = {
    "linear": (lambda: nn.Linear(48, 48), (5, 48)),
    "batched": (lambda: nn.Linear(48, 48), (2, 3, 48)),
    "conv1d": (lambda: nn.Conv1d(4, 4, 3, padding=1), (2, 4, 12)),
    "conv2d": (lambda: nn.Conv2d(4, 4, 3, padding=1), (2, 4, 6, 8)),
    "conv3d": (lambda: nn.Conv3d(4, 4, 3, padding=1), (2, 4, 3, 4, 4)),
}
TRAINS = [(), ("weight",), ("bias",), ("weight", "bias")]
trains = pytest.mark.parametrize("trained", TRAINS, ids=lambda t: "+".join(t) or "frozen")
kinds = pytest.mark.parametrize("kind", KINDS)


def three(kind: str, *trained: str) -> nn.Sequential:
    """Return three layers of a kind, of which the parameters with these names are trained."""
    torch.manual_seed(0)
    model = nn.Sequential(*(KINDS[kind][0]() for _ in range(3)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(trained))
    return model


def leaf(kind: str = "linear") -> torch.Tensor:
    return torch.randn(KINDS[kind][1], requires_grad=True)


def both(model: nn.Module, see: Callable[[nn.Module], Any]) -> Any:
    """Return what `see` answers of the managed model, which is what it answers of the resident."""
    one, other = resident_pair(model)
    with attached(one, offload_percent=1.0) as manager:
        assert len(manager.layers) == len(one)
        found = see(one)
    assert_same(found, see(other))
    return found


# ---- products and layouts ----


def test_products_without_grad_of_a_trained_weight():
    """torch folds an input as in training: it asks whether the weight requires grad."""
    one, other = resident_pair(nn.Sequential(nn.Linear(48, 40)))
    with attached(one) as manager, torch.no_grad():
        assert manager.layers
        for build in test_matrix.GEOMETRIES.values():
            ran, x = [], build(48)
            for model in (one, other):
                with Products() as products:
                    model(x)
                ran.append(products.ran)
            assert ran[0] == ran[1]


def test_products_of_a_trained_weight_that_is_laid_out_by_columns():
    ran = []
    one, other = resident_pair(nn.Sequential(nn.Linear(48, 40)))
    one[0].weight.data = one[0].weight.data.t().contiguous().t()
    other[0].weight.data = other[0].weight.data.t().contiguous().t()
    with attached(one) as manager:
        assert manager.layers
        for model in (one, other):
            with Products() as products:
                model(torch.ones(5, 48, requires_grad=True)).sum().backward()
            ran.append(sorted(products.ran))
    assert ran[0] == ran[1]


@pytest.mark.parametrize("trained", [(), ("weight", "bias")], ids=["frozen", "trained"])
def test_a_weight_that_is_laid_out_anew_where_it_lies(trained):
    one, other = resident_pair(three("linear", *trained))
    step = test_matrix.make_step(torch.randn(5, 48), "cpu", False)
    with attached(one) as manager:
        assert manager.layers
        for _ in range(2):
            assert_models_agree(one, other, step, steps=1)
            for model in (one, other):
                model[0].weight.data = model[0].weight.data.t()
                model.zero_grad()
        assert_models_agree(one, other, step, steps=1)


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Else it may hold by chance what should be written there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_a_gradient_with_gaps():
    """That of a vector's bias is the output's own, whatever its strides."""

    def see(model: nn.Module) -> Any:
        x = torch.linspace(-1, 1, 96)[::2].requires_grad_()
        model(x).backward(torch.linspace(-1, 1, 96)[::2])
        return [x.grad, model[0].bias.grad]

    both(three("linear", "bias")[:1], see)


# ---- the graph ----


@trains
@kinds
def test_each_gradient_alone(kind, trained):
    """As ``torch.autograd.grad`` asks for one, of an input that may need none."""

    def see(model: nn.Module) -> list[Any]:
        found: list[Any] = []
        for needs in (True, False)[: 1 + bool(trained)]:
            torch.manual_seed(1)
            x = leaf(kind).detach().requires_grad_(needs)
            wanted = [*([x] if needs else []), *(p for p in model.parameters() if p.requires_grad)]
            y = model(x)
            for tensor in wanted:
                found += torch.autograd.grad(y.square().sum(), tensor, retain_graph=True)
        return found

    assert len(both(three(kind, *trained), see)) == 1 + 2 * 3 * len(trained)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@kinds
def test_weights_that_an_optimizer_trains(kind, autocast):
    one, other = resident_pair(three(kind, "weight", "bias"))
    optimizers = {id(m): torch.optim.AdamW(m.parameters(), 0.01) for m in (one, other)}
    step = test_matrix.make_step(torch.randn(KINDS[kind][1]), "cpu", autocast)
    with attached(one, offload_percent=0.5) as manager:
        assert len(manager.layers) == 3
        for _ in range(4):
            assert_models_agree(one, other, step, steps=1)
            for model in (one, other):
                optimizers[id(model)].step()
                optimizers[id(model)].zero_grad()
            assert_same([*one.parameters()], [*other.parameters()])


@pytest.mark.parametrize("trained", [(), ("weight", "bias")], ids=["frozen", "trained"])
def test_hooks_see_the_gradients_that_they_saw(trained):
    def see(model: nn.Module) -> list[Any]:
        seen: list[Any] = []
        x = torch.ones(5, 48, requires_grad=True)
        y = model[0](x)
        y.register_hook(lambda g: seen.append(g) or g * 2)
        y.grad_fn.register_prehook(lambda gs: seen.append(gs[0]))
        model[1:](y).sum().backward()
        return [*seen, x.grad]

    assert len(both(three("linear", *trained), see)) == 3


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["nockpt", "reentrant", "ckpt"])
def test_after_a_backward_masters_may_be_rewritten(reentrant):
    """The engine is notified when the graph task ends: a backward or a recompute asks for that."""
    model = three("linear", "weight")
    noted: list[bool] = []
    with attached(model) as manager:
        x = leaf()
        x.register_hook(lambda g: noted.append(bool(manager.state.late)))
        y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        assert not manager.state.late
        y.sum().backward()
        assert not manager.state.late
    assert noted == [True]


def test_a_graph_that_is_dropped_lets_go_of_the_layer():
    model = three("linear")[:1]
    with attached(model) as manager:
        found = weakref.ref(manager.layers[0])
        y = model(leaf())
    assert found() is not None
    del y, manager
    gc.collect()
    assert found() is None


def test_masters_that_were_replaced_can_go():
    model = three("linear")[:1]
    with attached(model):
        model(leaf())
        held = weakref.ref(model[0]._layer_memory_manager.masters)
        model[0].weight.data = torch.randn(48, 48)
        model(leaf().detach())
        assert held() is None
        model(leaf().detach())


def test_a_forward_begins_before_its_first_use(monkeypatch):
    model = three("linear")[:1]
    with attached(model) as manager:
        state, begun = manager.state, []
        visits = lambda: len(state.engine.visits(manager.attachment.model))  # noqa: E731
        monkeypatch.setattr(type(state), "begin_forward", lambda self: begun.append(visits()))
        state.turned = True
        model(leaf())
        assert begun == [0] and visits() == 1


WIDE, DEPTH = 1100, 4


def test_an_element_written_after_a_release_fetched_its_copy_is_seen(sim):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEPTH)]  # each is a unit of its own
    one, other = resident_pair(nn.Sequential(*layers).requires_grad_(False))
    y = z = torch.ones(2, WIDE)
    with attached(one, offload_percent=1.0) as manager, torch.no_grad():
        for _ in range(4):  # the order is learned
            one(y)
        before = manager.state.engine.stats()
        for number in range(DEPTH):
            y, z = one[number](y), other[number](z)
            assert_same(y, z)
            sim.finish()  # what was fetched ahead has arrived
            for model in (one, other):
                model[(number + 1) % DEPTH].weight[7, 11] += 1.0
        after = manager.state.engine.stats()
    assert after["stale"] > before["stale"] and after["prefetches"] > before["prefetches"]


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
    view_at = leaf_module.Leaf.view_at

    def views(leaf, address):
        viewed.append((leaf.name, address))
        return view_at(leaf, address)

    monkeypatch.setattr(leaf_module.Leaf, "view_at", views)
    with attached(model, offload_percent=0.0):
        for _ in range(3):
            assert_same(model(X), resident(X))
        assert len(viewed) == len(set(viewed)) == 3


def test_views_of_few_addresses_are_kept_and_a_slot_has_to_be_aligned(monkeypatch):
    monkeypatch.setattr(leaf_module, "_MAX_VIEWS", 3)
    model, _ = pair()
    with attached(model) as manager:
        model(X)
        (layer,) = manager.layers
        ((address, views),) = layer.views.items()
        assert [view.shape for view in views] == [(8, 8), (8,)]
        assert layer.view_at(address) is views
        sizes = []
        for step in range(1, 5):
            layer.view_at(address + 4 * step)
            sizes.append(len(layer.views))
        assert sizes == [2, 3, 1, 2]
        with pytest.raises(OffloadError, match=r"of layer '0' is not aligned for torch\.float32"):
            layer.view_at(address + 2)


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


# ---- what is refused ----


def in_place(model: nn.Module) -> None:
    model[1].weight.add_(1.0)


def replaced(model: nn.Module) -> None:
    model[1].weight.data = torch.zeros_like(model[1].weight)


def detached(model: nn.Module) -> None:
    model._memory_manager.detach()


@pytest.mark.parametrize("change", [in_place, replaced, detached])
@pytest.mark.parametrize("kind", ["linear", "conv2d"])
@trains
def test_a_change_between_forward_and_backward(change, kind, trained):
    model = three(kind, *trained)
    with attached(model) as manager:
        assert len(manager.layers) == 3
        loss = model(leaf(kind)).sum()
        with torch.no_grad():
            change(model)
        with pytest.raises(OffloadError if change is detached else StaleWeightsError):
            loss.backward()


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_an_input_written_between_forward_and_backward(kind):
    model = three(kind, "weight")
    with attached(model):
        x = leaf(kind) * 1
        loss = model(x).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_a_second_backward_through_what_was_freed(kind):
    model = three(kind, "weight")
    with attached(model):
        loss = model(leaf(kind)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second"):
            loss.backward()


@trains
@kinds
def test_gradients_under_create_graph(kind, trained):
    def see(model: nn.Module) -> Any:
        torch.manual_seed(1)
        x = leaf(kind)
        wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
        found = []
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = model(x * 1).float()
            found += torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
        return [t.detach() for t in found]

    both(three(kind, *trained), see)


def test_an_input_of_a_wrong_shape_leaves_nothing_in_use():
    one, other = resident_pair(three("linear"))
    with attached(one) as manager:
        for x in (torch.ones(5, 47), torch.ones(5, 48, dtype=torch.float64), torch.tensor(1.0)):
            said = []
            for model in (one, other):
                with pytest.raises(RuntimeError) as raised:
                    model(x)
                said.append(str(raised.value))
            assert said[0] == said[1]
        manager.refresh()
        one(leaf()).sum().backward()  # nothing is in use: the copies are replaced


def test_a_subclass_of_tensors_is_what_it_was():
    class Marked(torch.Tensor):
        pass

    with attached(three("linear")) as manager, torch.no_grad():
        assert type(manager.module[0](torch.ones(5, 48).as_subclass(Marked))) is Marked


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
    ("names", "bias", "nbytes"),
    [
        (("weight", "bias"), True, WEIGHT + BIAS),
        (("weight",), True, WEIGHT),
        (("bias",), True, WEIGHT + BIAS),
        (("weight",), False, WEIGHT),
    ],
    ids=str,
)
def test_the_bytes_of_a_foreign_call_are_those_that_it_brings(names, bias, nbytes):
    """The weight always travels; a bias that is the master's own is not counted as another's."""
    model, resident = pair(bias=bias)
    others = {f"0.{name}": torch.randn_like(getattr(model[0], name)) for name in names}
    with attached(model) as manager:
        found = torch.func.functional_call(model, others, (X,))
        assert_same(found, torch.func.functional_call(resident, others, (X,)))
        assert manager.attachment.traffic.computed_bytes == {"0": nbytes}


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
