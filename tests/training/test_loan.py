"""The loan of Linear and convolutions against the resident layer: its node, gradients, refusals.

What the matrix of test_matrix.py does not have: how gradients are asked for, what sees them, and
what happens between forward and backward.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_matrix
import torch
from equality import assert_models_agree, assert_same, attached, resident_pair
from torch import nn
from torch.utils.checkpoint import checkpoint

from oracle_offload import OffloadError, StaleWeightsError

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
                with test_matrix.Products() as products:
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
            with test_matrix.Products() as products:
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


def test_a_layer_whose_masters_are_being_moved_waits_for_them():
    model = three("linear")[:1]
    x = leaf().detach()
    expected = model(x)
    with attached(model) as manager:
        layer, begun = manager.layers[0], threading.Event()

        def move() -> None:
            with layer.state.lock:
                layer.moving = True
                begun.set()
                time.sleep(0.2)
                layer.moving = False

        thread = threading.Thread(target=move)
        thread.start()
        assert begun.wait(10)
        found = model(x)
        assert not layer.moving
        thread.join()
    assert_same(found, expected)


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
