"""The loan in C++ against the one in Python: the same bits, bytes, order and refusals.

Compiled once per machine and source, into build/. Every case asserts by a counter that it was
taken, or that it was not.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import test_autocast
import test_matrix
import test_writes
import torch
from equality import (
    Recorder,
    assert_models_agree,
    assert_same,
    attached,
    is_simulated,
    resident_pair,
)
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from oracle_offload import OffloadError, StaleWeightsError
from oracle_offload.ops import compiling, load

FOLDER = Path(__file__).resolve().parents[2] / "build" / "tests-ops"


@pytest.fixture(scope="module")
def built() -> Path:
    """Where the operators are; they are compiled the first time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(FOLDER))
        try:
            compiling.compiler()
        except OffloadError as error:
            pytest.skip(str(error))
        return compiling.build()[0]


class Taken:
    """Counts what was computed in C++ since the last look."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self._before = native.counts()

    def __call__(self) -> tuple[int, int]:
        before, self._before = self._before, self._native.counts()
        return self._before[0] - before[0], self._before[1] - before[1]


@pytest.fixture(autouse=True)
def taken(built: Path, monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Models that are attached from now on use the operators."""
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(FOLDER))
    monkeypatch.setenv("ORACLE_OFFLOAD_OPS", "auto")
    native = load.operators()
    assert native is not None
    return Taken(native)


def stack(*, bias: bool = True, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(48, 48, bias=bias) for _ in range(depth)]
    return nn.Sequential(*layers).requires_grad_(False)


WIDE, DEPTH = 1100, 4


def large() -> nn.Sequential:
    """A stack whose layers are units of their own, of which an arena holds two."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEPTH)]
    return nn.Sequential(*layers).requires_grad_(False)


@contextlib.contextmanager
def managed(model: nn.Module, mode: str = "auto", **options: Any) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORACLE_OFFLOAD_OPS", mode)
        with attached(model, "cpu", **options) as manager:
            yield manager


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (5, 48), requires_grad=True)


# ---- the same bits ----

GEOMETRY = test_matrix.test_linear_over_every_geometry
PRODUCTS = test_matrix.test_linear_runs_the_residents_products_over_every_geometry
IN_PLACE = test_matrix.test_outputs_can_be_changed_in_place
BITS = test_matrix.test_linear_has_the_residents_bits
ADAPTERS = test_autocast.test_adapters_of_float32_models_train_alike
CASES: dict[str, Callable[[], object]] = {
    **{
        f"bits of {dtype}, bias {bias}, checkpoint {kind}, autocast {autocast}": (
            lambda a=(dtype, bias, False, kind, autocast): BITS("cpu", *a)
        )
        for dtype in (torch.float32, torch.bfloat16)
        for bias, kind in ((True, None), (False, True), (True, True), (True, False))
        for autocast in (False, True)
    },
    **{
        f"every geometry of {features}": lambda f=features: GEOMETRY("cpu", f, (0, 0))
        for features in ((48, 40), (1, 7), (33, 1))
    },
    **{
        f"the products of {features}": lambda f=features: PRODUCTS(f, False, True)
        for features in ((48, 40), (1, 7), (33, 1))
    },
    **{
        f"output of {shape} changed in place": lambda s=shape: IN_PLACE("cpu", s, False, False)
        for shape in ((5, 8), (2, 5, 8))
    },
    **{
        f"adapters, reentrant {kind}": (
            lambda k=kind: ADAPTERS("cpu", "llama", ["q_proj", "v_proj"], k)
        )
        for kind in (True, False)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_the_residents_bits(case, taken):
    CASES[case]()
    forwards, backwards = taken()
    assert forwards > 0 and backwards > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no", "inference"])
def test_without_grad(mode, taken):
    test_matrix.test_without_grad("cpu", mode, False)
    assert taken() == (12, 0)  # two layers, three steps, with the witness and without


def test_a_real_model_trains_alike(taken):
    torch.manual_seed(0)
    one, other = resident_pair(models.flux().train())
    for model in (one, other):
        models.lora(model, ["to_q", "to_v", "proj_out"])
        models.enable_checkpointing(model)
    with managed(one, offload_percent=0.8):
        for _ in range(2):
            assert_models_agree(one, other, models.flux_step, steps=1)
        forwards, backwards = taken()
        assert backwards > 0 and forwards > 2 * backwards * 0.9  # each is computed again


def test_inputs_of_one_leaf_share_autocasts_cast(taken):
    """Gradients of all uses are summed at that cast, in bfloat16: Python sees to it."""

    class Fan(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            return self.q(x) * self.k(x) + self.v(x)

    one, other = resident_pair(Fan().requires_grad_(False))
    with managed(one):
        assert_models_agree(one, other, test_matrix.make_step(torch.randn(64, 32), "cpu", True))
    assert taken() == (0, 0)


def test_a_weight_that_is_laid_out_anew_where_it_lies(taken):
    one, other = resident_pair(stack())
    step = test_matrix.make_step(torch.randn(5, 48), "cpu", False)
    with managed(one):
        for _ in range(2):
            assert_models_agree(one, other, step, steps=1)
            for model in (one, other):
                model[0].weight.data = model[0].weight.data.t()
        assert_models_agree(one, other, step, steps=1)
    assert min(taken()) > 0


def test_accumulation_with_sampling_between(taken):
    one, other = resident_pair(stack())

    def step(model):
        x = leaf()
        for factor in (1, 2):
            (model(x) * factor).sum().backward()
            with torch.no_grad():
                sampled = model(x)
        return [x.grad, sampled]

    with managed(one):
        assert_models_agree(one, other, step)
        assert taken() == (4 * 12, 4 * 6)


def test_weights_written_between_steps_are_seen(taken):
    for write in (test_writes.in_place, test_writes.data_replace):
        one, other = resident_pair(test_writes.build().requires_grad_(False))
        step = test_matrix.make_step(torch.randn(3, 64), "cpu", False)
        with managed(one, offload_percent=0.0):
            for _ in range(2):
                assert_models_agree(one, other, step, steps=1)
                torch.manual_seed(3)
                write(one)
                torch.manual_seed(3)
                write(other)
            assert_models_agree(one, other, step, steps=1)
    assert min(taken()) > 0


@pytest.mark.parametrize("mode", ["sampling", "forward", "training"])
def test_an_element_written_after_its_copy_was_fetched_ahead_is_seen(mode, taken):
    test_writes.test_one_element_written_after_its_copy_was_fetched_ahead_is_seen(mode, "linear")
    assert taken()[0] > 0


@pytest.mark.parametrize("trained", [False, True], ids=["sampling", "forward"])
def test_an_element_written_after_the_copy_of_another_layers_use_is_seen(trained, taken):
    test_writes.test_one_element_written_after_the_copy_that_another_layers_use_began_is_seen(
        "linear", trained
    )
    assert taken()[0] > 0


def test_an_element_written_after_a_release_fetched_its_copy_is_seen(sim, taken):
    one, other = resident_pair(large())
    y = z = torch.ones(2, WIDE)
    with managed(one, offload_percent=1.0) as manager, torch.no_grad():
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
    assert taken() == (5 * DEPTH, 0)


def test_layers_used_by_several_threads(taken):
    model = stack()
    x = leaf().detach()
    expected = model(x)
    found: list[Any] = []

    def work() -> None:
        for _ in range(20):
            mine = x.clone().requires_grad_()
            y = model(mine)
            y.sum().backward()
            found.append((y.detach(), mine.grad))

    with managed(model):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 60
    assert_same([y for y, _ in found], [expected] * 60)
    assert_same([g for _, g in found], [found[0][1]] * 60)
    assert taken() == (180, 180)


# ---- the same uses ----


def uses(mode: str, reentrant: bool | None, percent: float) -> tuple[Any, ...]:
    """Return what the engine saw of a few steps."""
    model = large()
    blocks = [model[:2], model[2:]]
    with managed(model, mode, offload_percent=percent) as manager:
        for _ in range(4):
            y = leaf(2, WIDE)
            for block in blocks:
                y = block(y) if reentrant is None else checkpoint(block, y, use_reentrant=reentrant)
            y.sum().backward()
        stats = manager.state.engine.stats()
        kept = ("acquires", "hits", "late", "stale", "prefetches", "h2d_bytes", "evictions")
        pace = manager.state.pace
        counted = *(stats[name] for name in kept), pace.uses, pace.passes
        return counted, manager.state.engine.visits(manager.attachment.model), stats["h2d_bytes"]


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["nockpt", "reentrant", "ckpt"])
@pytest.mark.parametrize("percent", [0.0, 1.0], ids=["cached", "streamed"])
def test_bytes_and_order_are_those_of_the_loan_in_python(reentrant, percent, taken):
    expected = uses("off", reentrant, percent)
    assert taken() == (0, 0)
    assert uses("auto", reentrant, percent) == expected
    assert min(taken()) > 0
    assert expected[2] > (10 if percent else 0) * WIDE * WIDE * 4


# ---- the graph ----


def test_the_node_has_the_same_name_and_keeps_nothing(taken):
    model = stack()
    for mode in ("off", "auto"):
        saved: list[torch.Tensor] = []
        with managed(model, mode):
            with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
                y = model(leaf())
            assert type(y.grad_fn).__name__ == y.grad_fn.name() == "ManagedLinearBackward"
            assert saved == []
            assert y.grad_fn.next_functions[0][0].name() == "ManagedLinearBackward"
            del y
    assert taken() == (3, 0)


def test_a_graph_that_is_dropped_lets_go_of_the_layer(taken):
    model = stack(depth=1)
    with managed(model) as manager:
        found = weakref.ref(manager.layers[0])
        y = model(leaf())
    assert found() is not None
    del y, manager
    gc.collect()
    assert found() is None
    assert taken() == (1, 0)


def test_masters_that_were_replaced_can_go(taken):
    model = stack(depth=1)
    with managed(model):
        model(leaf())
        held = weakref.ref(model[0]._layer_memory_manager.masters)
        model[0].weight.data = torch.randn(48, 48)
        model(leaf().detach())  # in Python, which follows the weight
        assert held() is None
        model(leaf().detach())
    assert taken() == (2, 0)


def test_hooks_see_the_gradients_that_they_saw(taken):
    found = {}
    for mode in ("off", "auto"):
        model, seen = stack(), []
        with managed(model, mode):
            x = leaf().detach().fill_(1.0).requires_grad_()
            y = model[0](x)
            y.register_hook(lambda g, seen=seen: seen.append(g) or g * 2)
            y.grad_fn.register_prehook(lambda gs, seen=seen: seen.append(gs[0]))
            y.grad_fn.register_hook(lambda gx, gs, seen=seen: seen.extend([*gx[:1], *gs]))
            model[1:](y).sum().backward()
            found[mode] = [*seen, x.grad]
    assert_same(found["auto"], found["off"])
    assert len(found["auto"]) == 5 and taken() == (3, 3)


# ---- what is refused, in the same words ----


def in_place(model: nn.Module) -> None:
    model[1].weight.add_(1.0)


def replaced(model: nn.Module) -> None:
    model[1].weight.data = torch.zeros(48, 48)


def detached(model: nn.Module) -> None:
    model._memory_manager.detach()


@pytest.mark.parametrize("change", [in_place, replaced, detached])
def test_a_change_between_forward_and_backward(change, taken):
    said = []
    for mode in ("off", "auto"):
        model = stack()
        with managed(model, mode):
            loss = model(leaf()).sum()
            change(model)
            with pytest.raises(OffloadError) as raised:
                loss.backward()
            said.append((type(raised.value), str(raised.value)))
    assert said[0] == said[1]
    assert change is detached or said[0][0] is StaleWeightsError
    assert taken() == (3, 0 if change is detached else 1)


def test_double_backward(taken):
    said = []
    for mode in ("off", "auto"):
        with managed(stack(), mode) as manager:
            x = leaf()
            (gradient,) = torch.autograd.grad(
                manager.module(x).square().sum(), x, create_graph=True
            )
            with pytest.raises(OffloadError) as raised:
                gradient.sum().backward()
            said.append(str(raised.value))
    assert said[0] == said[1]
    assert taken() == (3, 0)


def jit_trace(model: nn.Module) -> None:
    torch.jit.trace(model, leaf().detach(), check_trace=False)


def forward_ad(model: nn.Module) -> None:
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(torch.ones(5, 48), torch.ones(5, 48)))


def functorch(model: nn.Module) -> None:
    torch.func.grad(lambda x: model(x).sum())(torch.ones(5, 48))


def make_fx(model: nn.Module) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx as trace

    trace(model)(torch.ones(5, 48))


@pytest.mark.parametrize("use", [jit_trace, forward_ad, functorch, make_fx])
def test_what_a_layer_cannot_do(use, taken):
    said = []
    for mode in ("off", "auto"):
        model = stack(depth=1)
        with managed(model, mode), pytest.raises(OffloadError) as raised:
            use(model)
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert taken() == (0, 0)


def test_an_input_of_a_wrong_shape_leaves_nothing_in_use(taken):
    said = []
    model = stack()
    for mode in ("off", "auto"):
        with managed(model, mode) as manager:
            for x in (torch.ones(5, 47), torch.ones(5, 48, dtype=torch.float64), torch.tensor(1.0)):
                with pytest.raises(RuntimeError) as raised:
                    model(x)
                said.append(str(raised.value))
            manager.refresh()
            model(leaf()).sum().backward()  # nothing is in use: the copies are replaced
    assert said[:3] == said[3:]
    assert taken() == (3, 3)


class RaisesOnce(TorchDispatchMode):
    """Fails the n-th product."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.left -= 1
            if self.left == 0:
                raise KeyError("planted")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", range(1, 7))
def test_an_exception_while_it_computes_leaves_nothing_in_use(number, taken):
    """In the middle of forward, or of backward."""
    model = stack()
    x = leaf()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with managed(model) as manager:
        with pytest.raises(KeyError, match="planted"), RaisesOnce(number):
            model(x).sum().backward()
        done = taken()
        assert sum(done) == number - 1
        manager.refresh()
        (found,) = torch.autograd.grad(model(x).sum(), x)
    assert_same(found, expected)
    assert taken() == (3, 3)


def test_an_arena_without_room_says_so_in_the_same_words(taken):
    said = []
    model = nn.Sequential(*(nn.Linear(1200, 1200) for _ in range(3))).requires_grad_(False)
    x = leaf(2, 1200)
    for mode in ("off", "auto"):
        with managed(model, mode) as manager, contextlib.ExitStack() as held:
            state = manager.state
            for layer in manager.layers[:2]:  # what is in use makes no place
                ticket, _, _ = state.engine.acquire(
                    layer.member, state.stream(), layer.stamp(), 0, -1, 0.0
                )
                held.callback(state.engine.release, ticket, state.stream())
            with pytest.raises(torch.OutOfMemoryError) as raised:
                model[2](x)
            said.append(str(raised.value))
            held.close()
            model(x).sum().backward()
    assert said[0] == said[1] and "no room for layer '2'" in said[0]
    assert taken() == (3, 3)


# ---- what goes to Python ----


def test_what_stands_before_the_engine_sees_every_use(taken):
    model = stack()
    with managed(model) as manager:
        state = manager.state
        recorder = state.engine = Recorder(state.engine)
        try:
            model(leaf()).sum().backward()
        finally:
            state.engine = recorder._engine
        assert len(recorder.acquired) == 6
        y = model(leaf())
        assert taken() == (3, 0)
        state.engine = recorder  # since forward
        y.sum().backward()
        state.engine = recorder._engine
        assert len(recorder.acquired) == 9
    assert taken() == (0, 0)


def test_what_was_added_to_a_layer_is_looked_at_first(taken):
    model = stack()
    with managed(model) as manager:
        structure = manager.layers[0].structure
        model(leaf())
        model[0].register_module("adapter", nn.Identity())
        assert structure.changed
        model[1](leaf())
        assert not structure.changed
    assert taken() == (3, 0)


def test_a_layer_whose_masters_are_being_moved_waits_for_them(taken):
    model = stack(depth=1)
    x = leaf().detach()
    expected = model(x)
    with managed(model) as manager:
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
    assert taken() == (0, 0)


class Functions(TorchFunctionMode):
    """Sees calls of Python, which there are none of in C++."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += func is torch.nn.functional.linear
        return func(*args, **(kwargs or {}))


def test_a_mode_that_sees_calls_of_python_sees_them(taken):
    model = stack()
    with managed(model), Functions() as mode:
        model(leaf()).sum().backward()
    assert mode.seen == 3
    assert taken()[0] == 0


def test_a_profiler_sees_the_names_of_layers(taken):
    model = stack()
    with managed(model), torch.profiler.profile() as profile:
        model(leaf()).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"0 (forward)", "0 (backward)"} <= names
    assert taken() == (0, 0)


def test_trained_weights_and_subclasses_of_tensors_go_to_python(taken):
    model = stack()
    model[1].requires_grad_(True)

    class Marked(torch.Tensor):
        pass

    with managed(model):
        model(leaf()).sum().backward()
        assert model[1].weight.grad is not None
        assert taken() == (2, 2)
        with torch.no_grad():
            assert type(model[0](torch.ones(5, 48).as_subclass(Marked))) is Marked
        assert taken() == (0, 0)


def coded_masters(mode: str) -> list[Any]:
    """Return what a layer with coded masters computes, before and after writes to its weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512)).bfloat16().requires_grad_(False)
    x = torch.randn(2, 512).bfloat16().requires_grad_()
    found: list[Any] = []
    with managed(model, mode, compress="lossless") as manager:
        assert manager.layers[0].coded
        found += torch.autograd.grad(model(x).sum(), x)
        y = model(x)
        model[0].weight.data.view(-1)[:4] = 1.0  # of which torch knows nothing
        with pytest.raises(StaleWeightsError) as raised:
            y.sum().backward()
        found.append(str(raised.value))
        found += [model(x).detach(), *torch.autograd.grad(model(x).sum(), x)]
    return found


def test_coded_masters_are_looked_at_as_in_python(taken):
    *expected, gradient = coded_masters("off")
    assert taken() == (0, 0)
    *found, same = coded_masters("auto")
    assert found[1] == expected[1]
    assert_same([found[0], found[2], same], [expected[0], expected[2], gradient])
    assert min(taken()) > 0


def test_on_every_kind_of_device(device, taken):
    """Where a device is not the host, backward runs in a thread of its own."""
    for kind in (None, True, False):
        BITS(device, torch.float32, True, False, kind, False)
        assert min(taken()) > 0


def test_off_is_off(taken, monkeypatch):
    monkeypatch.setenv("ORACLE_OFFLOAD_OPS", "off")
    model = stack()
    with attached(model, "cpu") as manager:
        model(leaf()).sum().backward()
        assert all(layer.native is None for layer in manager.layers)
    assert taken() == (0, 0)


def test_on_a_device_that_is_simulated_time_is_charged_alike(sim):
    assert is_simulated("cpu")
    now = []
    for mode in ("off", "auto"):
        model = stack()
        with managed(model, mode) as manager:
            model(leaf()).sum().backward()
            start = sim.now(), sim.stats()
            model(leaf()).sum().backward()
            sim.finish()
            now.append(sim.now() - start[0])
            assert manager.layers
    assert now[0] == now[1] > 0
