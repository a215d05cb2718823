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
from typing import Any

import models
import pytest
import test_autocast
import test_convolutions
import test_gradients
import test_matrix
import test_writes
import torch
from cpp import Taken, managed
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

from oracle_offload import OffloadError, StaleWeightsError, gradients, selection
from oracle_offload.witness import Witness


@pytest.fixture(autouse=True)
def taken(in_cpp: Taken) -> Taken:
    """Models that are attached from now on use the operators."""
    return in_cpp


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


def in_both(run: Callable[[str], Any]) -> Any:
    """Return what `run` answers in C++, which is what it answers in Python."""
    expected, found = run("off"), run("auto")
    if isinstance(expected, str | tuple):
        assert found == expected
    else:
        assert_same(found, expected)
    return found


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (5, 48), requires_grad=True)


# ---- the same bits ----

GEOMETRY = test_matrix.test_linear_over_every_geometry
OVER_ONE = test_matrix.test_linear_over_every_stride_of_an_axis_of_one
PRODUCTS = test_matrix.test_linear_runs_the_residents_products_over_every_geometry
IN_PLACE = test_matrix.test_outputs_can_be_changed_in_place
LINEAR = test_matrix.test_linear_has_the_residents_bits
CONV2D = test_matrix.test_conv2d_has_the_residents_bits
CONVOLUTION = test_convolutions.test_a_convolution_has_the_residents_bits
ADAPTERS = test_autocast.test_adapters_of_float32_models_train_alike
ARGUMENTS = test_matrix.test_every_argument_of_conv2d
CONVOLUTIONS = test_matrix.CONVOLUTIONS
PADDED = test_convolutions.test_each_padding_has_the_residents_bits
CHANGED = test_matrix.test_arguments_of_a_convolution_changed_after_attach
WIDENING = test_convolutions.test_backward_uses_the_arguments_that_forward_used
KERNEL = test_matrix.test_a_same_padded_kernel_replaced_by_one_of_another_size
IMAGES = test_autocast.test_an_image_is_cast_once_for_managed_and_resident_convolutions
FLOAT64 = test_autocast.test_float64_is_not_cast
GROUPED = {"padding": 1, "groups": test_convolutions.CHANNELS}
TRAINED = {False: "frozen", True: "trained"}
CASES: dict[str, Callable[[], object]] = {
    **{
        f"linear of {dtype}, bias {bias}, checkpoint {kind}, autocast {autocast}, {said}": (
            lambda a=(dtype, bias, trained, kind, autocast): LINEAR("cpu", *a)
        )
        for trained, said in TRAINED.items()
        for dtype, bias, kind in (
            *((torch.float32, *way) for way in ((True, None), (False, True), (True, False))),
            (torch.bfloat16, True, None),
        )
        for autocast in (False, True)
    },
    **{
        f"conv2d, checkpoint {kind}, autocast {autocast}, {said}": (
            lambda a=(torch.float32, True, trained, kind, autocast): CONV2D("cpu", *a)
        )
        for trained, said in TRAINED.items()
        for kind in (True, False)
        for autocast in (False, True)
    },
    **{
        f"{way} of {how}, checkpoint {kind}, {said}": (
            lambda a=(way, trained, kind, how): CONVOLUTION("cpu", *a)
        )
        for way in ("conv1d", "conv3d", "causal")
        for trained, said in TRAINED.items()
        for how, kind in (("float32", None), ("bfloat16", True), ("autocast", False))
    },
    **{
        f"every geometry of {features}, trained {trains}": (
            lambda f=features, t=trains: GEOMETRY("cpu", f, t)
        )
        for features, trains in (
            *((f, t) for f in ((48, 40), (1, 7), (33, 1)) for t in ((0, 0), (1, 1))),
            *(((48, 40), t) for t in ((0, 1), (1, 0))),
        )
    },
    **{
        f"every stride of an axis of one, {said}, autocast {autocast}": (
            lambda t=trained, a=autocast: OVER_ONE("cpu", t, a)
        )
        for trained, said in TRAINED.items()
        for autocast in (False, True)
    },
    **{
        f"the products of {features}, {said}": lambda f=features, t=trained: PRODUCTS(f, t, True)
        for features in ((48, 40), (1, 7), (33, 1))
        for trained, said in TRAINED.items()
    },
    **{
        f"output of {shape} changed in place, {said}": (
            lambda s=shape, t=trained: IN_PLACE("cpu", s, t, False)
        )
        for shape in ((5, 8), (2, 5, 8), (2, 8, 5, 8))
        for trained, said in TRAINED.items()
    },
    **{
        f"adapters, reentrant {kind}": (
            lambda k=kind: ADAPTERS("cpu", "llama", ["q_proj", "v_proj"], k)
        )
        for kind in (True, False)
    },
    **{
        f"{axes} axes, {options}, {said}": (
            lambda a=axes, o=options, t=trained: PADDED("cpu", a, o, t)
        )
        for axes in (1, 3)
        for options in ({"padding": 2, "stride": 2, "dilation": 2, "bias": False}, GROUPED)
        for trained, said in TRAINED.items()
    },
    **{
        f"arguments changed after attach: {change}": lambda c=change: CHANGED("cpu", c)
        for change in test_matrix.CHANGES
    },
    **{
        f"an argument that a loop changes, {said}": lambda t=trained: WIDENING("cpu", t)
        for trained, said in TRAINED.items()
    },
    "a kernel of another size": lambda: KERNEL("cpu"),
    **{
        f"conv2d: {options}, {said}, {layout}": (
            lambda o=options, t=trained, m=layout: ARGUMENTS("cpu", CONVOLUTIONS[o], t, m)
        )
        for options, layout in (
            ("depthwise", torch.contiguous_format),
            ("3x3", torch.channels_last),
        )
        for trained, said in TRAINED.items()
    },
    "layouts of gradients": lambda: test_matrix.test_gradients_keep_the_residents_layout("cpu"),
    "layouts of an input's": lambda: [
        test_matrix.test_the_gradient_of_an_input_has_the_residents_layout("cpu", bias, trained)
        for bias in (True, False)
        for trained in TRAINED
    ],
    "regions of autocast": lambda: test_matrix.test_autocast_regions_are_kept_apart("cpu"),
    "a leaf for three": lambda: test_matrix.test_inputs_of_one_leaf_share_autocasts_cast("cpu"),
    "a leaf after another": lambda: test_matrix.test_a_leaf_in_the_place_of_another_is_cast_anew(
        "cpu"
    ),
    "images of one leaf": lambda: IMAGES("cpu", (2, 8, 9, 10), False),
    "autocast in float64": lambda: FLOAT64("cpu"),
    "a shared parameter": lambda: [
        test_autocast.test_layers_that_share_a_parameter_share_its_cast("cpu", kind)
        for kind in (None, True, False)
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_the_residents_bits(case, taken, monkeypatch):
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)
    monkeypatch.setattr(selection, "SMALL_TOGETHER", (0, 0))
    CASES[case]()
    forwards, backwards = taken()
    assert forwards > 0 and (backwards > 0 or case == "a leaf after another")


def test_products_without_grad_of_a_trained_weight(taken):
    """torch folds an input as in training: it asks whether the weight requires grad."""
    one, other = resident_pair(nn.Sequential(nn.Linear(48, 40)))
    with managed(one), torch.no_grad():
        for build in test_matrix.GEOMETRIES.values():
            ran, x = [], build(48)
            for model in (one, other):
                with test_matrix.Products() as products:
                    model(x)
                ran.append(products.ran)
            assert ran[0] == ran[1]
    assert taken() == (len(test_matrix.GEOMETRIES), 0)


def test_products_of_a_trained_weight_that_is_laid_out_by_columns(taken):
    ran = []
    one, other = resident_pair(nn.Sequential(nn.Linear(48, 40)))
    one[0].weight.data = one[0].weight.data.t().contiguous().t()
    other[0].weight.data = other[0].weight.data.t().contiguous().t()
    with managed(one):
        for model in (one, other):
            with test_matrix.Products() as products:
                model(torch.ones(5, 48, requires_grad=True)).sum().backward()
            ran.append(sorted(products.ran))
    assert ran[0] == ran[1]
    assert taken() == (1, 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no", "inference"])
@pytest.mark.parametrize("trained", TRAINED, ids=TRAINED.values())
def test_without_grad(mode, trained, taken):
    test_matrix.test_without_grad("cpu", mode, trained)
    assert taken() == (18, 0)  # three layers, three steps, with the witness and without


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


@pytest.mark.parametrize("trained", TRAINED, ids=TRAINED.values())
def test_a_weight_that_is_laid_out_anew_where_it_lies(trained, taken):
    one, other = resident_pair(stack().requires_grad_(trained))
    step = test_matrix.make_step(torch.randn(5, 48), "cpu", False)
    with managed(one):
        for _ in range(2):
            assert_models_agree(one, other, step, steps=1)
            for model in (one, other):
                model[0].weight.data = model[0].weight.data.t()
                model.zero_grad()
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


def uses(mode: str, reentrant: bool | None, percent: float, how: str) -> tuple[Any, ...]:
    """Return what the engine saw of a few steps."""
    trained, autocast = how != "frozen", how == "autocast"
    model = large().requires_grad_(trained)
    blocks = [model[:2], model[2:]]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with managed(model, mode, offload_percent=percent) as manager:
        for _ in range(4):
            y = leaf(2, WIDE)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                for block in blocks:
                    again = reentrant is not None
                    y = checkpoint(block, y, use_reentrant=reentrant) if again else block(y)
            y.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = manager.state.engine.stats()
        kept = ("acquires", "hits", "late", "stale", "prefetches", "h2d_bytes", "evictions")
        kept = *kept, "d2h_bytes", "host_waits"
        pace = manager.state.pace
        counted = *(stats[name] for name in kept), pace.uses, pace.passes
        return counted, manager.state.engine.visits(manager.attachment.model), stats["h2d_bytes"]


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["nockpt", "reentrant", "ckpt"])
@pytest.mark.parametrize("percent", [0.0, 1.0], ids=["cached", "streamed"])
@pytest.mark.parametrize("how", ["frozen", "trained", "autocast"])
def test_bytes_and_order_are_those_of_the_loan_in_python(reentrant, percent, how, taken):
    *_, moved = in_both(lambda mode: uses(mode, reentrant, percent, how))
    forwards, backwards = taken()
    assert forwards >= 16 and backwards == 16
    assert moved > (10 if percent else 0) * WIDE * WIDE * 4


# ---- the graph ----


KINDS = {
    "linear": (lambda: nn.Linear(48, 48), (5, 48)),
    "batched": (lambda: nn.Linear(48, 48), (2, 3, 48)),
    "conv1d": (lambda: nn.Conv1d(4, 4, 3, padding=1), (2, 4, 12)),
    "conv2d": (lambda: nn.Conv2d(4, 4, 3, padding=1), (2, 4, 6, 8)),
    "conv3d": (lambda: nn.Conv3d(4, 4, 3, padding=1), (2, 4, 3, 4, 4)),
}


def three(kind: str, *trained: str) -> nn.Sequential:
    """Return three layers of a kind, of which the parameters with these names are trained."""
    torch.manual_seed(0)
    model = nn.Sequential(*(KINDS[kind][0]() for _ in range(3)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(trained))
    return model


TRAINS = [(), ("weight",), ("bias",), ("weight", "bias")]
trains = pytest.mark.parametrize("trained", TRAINS, ids=lambda t: "+".join(t) or "frozen")


@trains
@pytest.mark.parametrize("kind", KINDS)
def test_the_node_is_the_same_and_keeps_the_same(kind, trained, taken):
    model, shape = three(kind, *trained), KINDS[kind][1]

    def look(mode: str) -> tuple[Any, ...]:
        saved: list[torch.Size] = []
        with managed(model, mode):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: saved.append(t.shape) or t, lambda t: t
            ):
                y = model(leaf(*shape))
            assert type(y.grad_fn).__name__ == y.grad_fn.name()
            below = tuple(node.name() for node, _ in y.grad_fn.next_functions)
            return y.grad_fn.name(), below, tuple(saved)

    name, below, saved = in_both(look)
    assert name == below[0] == f"Managed{type(model[0]).__name__}Backward"
    assert len(below) == 1 + len(trained)
    assert len(saved) == (3 if "weight" in trained else 0)
    assert taken() == (3, 0)


@trains
@pytest.mark.parametrize("kind", KINDS)
def test_each_gradient_alone(kind, trained, taken):
    """As ``torch.autograd.grad`` asks for one, of an input that may need none."""
    model = three(kind, *trained)

    def each(mode: str) -> list[Any]:
        found: list[Any] = []
        with managed(model, mode):
            for needs in (True, False)[: 1 + bool(trained)]:
                torch.manual_seed(1)
                x = leaf(*KINDS[kind][1]).detach().requires_grad_(needs)
                wanted = [
                    *([x] if needs else []),
                    *(p for p in model.parameters() if p.requires_grad),
                ]
                y = model(x)
                for tensor in wanted:
                    found += torch.autograd.grad(y.square().sum(), tensor, retain_graph=True)
        return found

    assert len(in_both(each)) == 1 + 2 * 3 * len(trained)
    forwards, backwards = taken()
    assert forwards == (6 if trained else 3) and backwards >= 3


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_an_optimizer_trains(kind, autocast, taken):
    one, other = resident_pair(three(kind, "weight", "bias"))
    optimizers = {id(m): torch.optim.AdamW(m.parameters(), 0.01) for m in (one, other)}
    step = test_matrix.make_step(torch.randn(KINDS[kind][1]), "cpu", autocast)
    with managed(one, offload_percent=0.5):
        for _ in range(4):
            assert_models_agree(one, other, step, steps=1)
            for model in (one, other):
                optimizers[id(model)].step()
                optimizers[id(model)].zero_grad()
            assert_same([*one.parameters()], [*other.parameters()])
    assert taken() == (4 * 3 * 2, 4 * 3 * 2)  # with the witness and without


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Else it may hold by chance what should be written there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_a_gradient_with_gaps(taken):
    """That of a vector's bias is the output's own, however that lies."""
    one, other = resident_pair(three("linear", "bias")[:1])

    def step(model: nn.Module) -> Any:
        x = torch.linspace(-1, 1, 96)[::2].requires_grad_()
        model(x).backward(torch.linspace(-1, 1, 96)[::2])
        return [x.grad]

    with managed(one):
        assert_models_agree(one, other, step)
    assert taken() == (4, 4)


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["nockpt", "reentrant", "ckpt"])
def test_after_a_backward_masters_may_be_rewritten(reentrant, taken):
    """The engine is told at the end of the graph task, which a backward or a recompute notes."""
    model = three("linear", "weight")
    noted: list[bool] = []
    with managed(model) as manager:
        x = leaf()
        x.register_hook(lambda g: noted.append(bool(manager.state.tasks_with_gradients)))
        y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        assert not manager.state.tasks_with_gradients
        y.sum().backward()
        assert not manager.state.tasks_with_gradients
    assert noted == [True] and taken()[1] == 3


def test_large_gradients_lie_in_locked_memory_that_is_used_again(taken, monkeypatch):
    monkeypatch.setattr(gradients, "LEAST_BYTES", 1 << 14)
    for accumulate in (False, True):
        test_gradients.test_gradients_are_the_resident_ones_in_locked_memory("cpu", accumulate)
    test_gradients.test_a_gradient_that_is_kept_is_not_overwritten("cpu")
    test_gradients.test_a_convolution_s_gradient_keeps_its_strides("cpu")
    test_gradients.test_autocast_s_gradients_lie_there_too("cpu", torch.bfloat16)
    assert min(taken()) > 10


def test_the_stream_is_asked_for_once_for_a_layer_and_its_gradients(taken):
    """A call of Python; torch sets the stream for the whole node."""
    with managed(three("linear", "weight", "bias")) as manager:
        state, asked = manager.state, []
        stream = state.stream
        loss = manager.module(leaf()).sum()
        state.stream = lambda: asked.append(1) or stream()
        loss.backward()
        state.stream = stream
        assert state.engine.stats()["d2h_copies"] == 2 * 3
    assert len(asked) == 3
    assert taken() == (3, 3)


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


@pytest.mark.parametrize("trained", TRAINED, ids=TRAINED.values())
def test_hooks_see_the_gradients_that_they_saw(trained, taken):
    def see(mode: str) -> list[Any]:
        model, seen = stack().requires_grad_(trained), []
        with managed(model, mode):
            x = leaf().detach().fill_(1.0).requires_grad_()
            y = model[0](x)
            y.register_hook(lambda g: seen.append(g) or g * 2)
            y.grad_fn.register_prehook(lambda gs: seen.append(gs[0]))
            y.grad_fn.register_hook(lambda gx, gs: seen.extend([*gx, *gs]))
            model[1:](y).sum().backward()
        return [*seen, x.grad]

    assert len(in_both(see)) == (7 if trained else 5)
    assert taken() == (3, 3)


# ---- what is refused, in the same words ----


def in_place(model: nn.Module) -> None:
    model[1].weight.add_(1.0)


def replaced(model: nn.Module) -> None:
    model[1].weight.data = torch.zeros_like(model[1].weight)


def detached(model: nn.Module) -> None:
    model._memory_manager.detach()


def refusal(mode: str, model: nn.Module, use: Callable[[nn.Module], object]) -> tuple[Any, str]:
    with managed(model, mode), pytest.raises(RuntimeError) as raised:
        use(model)
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize("change", [in_place, replaced, detached])
@pytest.mark.parametrize("kind", ["linear", "conv2d"])
@trains
def test_a_change_between_forward_and_backward(change, kind, trained, taken):
    def use(model: nn.Module) -> None:
        loss = model(leaf(*KINDS[kind][1])).sum()
        with torch.no_grad():
            change(model)
        loss.backward()

    error, _ = in_both(lambda mode: refusal(mode, three(kind, *trained), use))
    assert issubclass(error, OffloadError)
    assert change is detached or error is StaleWeightsError
    assert taken() == (3, 0 if change is detached else 1)


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_an_input_written_between_forward_and_backward(kind, taken):
    def use(model: nn.Module) -> None:
        x = leaf(*KINDS[kind][1]) * 1
        loss = model(x).sum()
        x.add_(1)
        loss.backward()

    _, said = in_both(lambda mode: refusal(mode, three(kind, "weight"), use))
    assert "modified by an inplace operation" in said
    assert taken() == (3, 2)


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_a_second_backward_through_what_was_freed(kind, taken):
    def use(model: nn.Module) -> None:
        loss = model(leaf(*KINDS[kind][1])).sum()
        loss.backward()
        loss.backward()

    _, said = in_both(lambda mode: refusal(mode, three(kind, "weight"), use))
    assert "Trying to backward through the graph a second time" in said
    assert taken() == (3, 3)


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
@trains
def test_double_backward(kind, trained, taken):
    def use(model: nn.Module) -> None:
        x = leaf(*KINDS[kind][1])
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.sum().backward()

    error, _ = in_both(lambda mode: refusal(mode, three(kind, *trained), use))
    assert issubclass(error, OffloadError)
    assert taken() == (3, 0)


@trains
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_under_create_graph(kind, trained, taken):
    """In Python, from what forward kept in C++."""
    model = three(kind, *trained)

    def ask(mode: str) -> Any:
        torch.manual_seed(1)
        x = leaf(*KINDS[kind][1])
        wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
        found = []
        with managed(model, mode):
            for autocast in (False, True):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    y = model(x * 1).float()
                found += torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
        return [t.detach() for t in found]

    in_both(ask)
    assert taken() == (6, 0)


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
    error, _ = in_both(lambda mode: refusal(mode, stack(depth=1), use))
    assert issubclass(error, OffloadError)
    assert taken() == (0, 0)


def test_an_input_of_a_wrong_shape_leaves_nothing_in_use(taken):
    model = stack()

    def use(mode: str) -> tuple[str, ...]:
        said = []
        with managed(model, mode) as manager:
            for x in (torch.ones(5, 47), torch.ones(5, 48, dtype=torch.float64), torch.tensor(1.0)):
                with pytest.raises(RuntimeError) as raised:
                    model(x)
                said.append(str(raised.value))
            manager.refresh()
            model(leaf()).sum().backward()  # nothing is in use: the copies are replaced
        return tuple(said)

    in_both(use)
    assert taken() == (3, 3)


class RaisesOnce(TorchDispatchMode):
    """Fails the n-th product."""

    PRODUCTS = ("mm", "addmm", "convolution", "convolution_backward")

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in self.PRODUCTS:
            self.left -= 1
            if self.left == 0:
                raise KeyError("planted")
        return func(*args, **(kwargs or {}))


FAILURES = [
    (number, kind, trained, each)
    for kind, trained, each in (("linear", (), 1), ("linear", ("weight",), 2), ("conv2d", (), 1))
    for number in range(1, 3 * (1 + each) + 1)
]


@pytest.mark.parametrize(("number", "kind", "trained", "each"), FAILURES)
def test_an_exception_while_it_computes_leaves_nothing_in_use(number, kind, trained, each, taken):
    """In the middle of forward, or of backward, where a layer has so many products."""
    model = three(kind, *trained)
    x = leaf(*KINDS[kind][1])
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    expected = torch.autograd.grad(model(x).sum(), wanted)
    with managed(model) as manager:
        with pytest.raises(KeyError, match="planted"), RaisesOnce(number):
            model(x).sum().backward()
        assert taken() == (min(number - 1, 3), max(0, number - 4) // each)
        manager.refresh()
        found = torch.autograd.grad(model(x).sum(), wanted)
    assert_same(list(found), list(expected))
    assert taken() == (3, 3)


def test_an_arena_without_room_says_so_in_the_same_words(taken):
    model = nn.Sequential(*(nn.Linear(1200, 1200) for _ in range(3))).requires_grad_(False)
    x = leaf(2, 1200)

    def use(mode: str) -> str:
        with managed(model, mode) as manager, contextlib.ExitStack() as held:
            state = manager.state
            for layer in manager.layers[:2]:  # what is in use makes no place
                ticket, _, _ = state.engine.acquire(
                    layer.member, state.stream(), layer.stamp(), 0, -1, 0.0
                )
                held.callback(state.engine.release, ticket, state.stream())
            with pytest.raises(torch.OutOfMemoryError) as raised:
                model[2](x)
            held.close()
            model(x).sum().backward()
        return str(raised.value)

    assert "no room for layer '2'" in in_both(use)
    assert taken() == (3, 3)


# ---- what goes to Python ----


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
@trains
def test_what_stands_before_the_engine_sees_every_use(kind, trained, taken):
    model, resident = resident_pair(three(kind, *trained))
    with managed(model) as manager:
        state = manager.state
        recorder = Recorder(state.engine)

        def step(module: nn.Module) -> Any:
            x = torch.linspace(-1, 1, torch.Size(KINDS[kind][1]).numel()).view(KINDS[kind][1])
            x.requires_grad_()
            y = module(x)
            if module is model:
                state.engine = recorder  # since forward
            try:
                y.square().sum().backward()
            finally:
                state.engine = recorder._engine
            return [y, x.grad]

        assert_models_agree(model, resident, step, steps=1)
        assert len(recorder.acquired) == 6 and taken() == (6, 0)
        state.engine = recorder
        model(leaf(*KINDS[kind][1])).sum().backward()
        state.engine = recorder._engine
        assert len(recorder.acquired) == 12
    assert taken() == (0, 0)


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_what_a_checkpoint_keeps_is_asked_for_once(kind, taken):
    """By the backward here, before it hands over to Python."""
    model = three(kind, "weight")
    x = leaf(*KINDS[kind][1])
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    expected = torch.autograd.grad(model(x).sum(), wanted)
    with managed(model) as manager:
        state = manager.state
        y = checkpoint(model, x, use_reentrant=False).sum()
        recorder = state.engine = Recorder(state.engine)  # since forward
        try:
            y.backward()
        finally:
            state.engine = recorder._engine
        assert len(recorder.acquired) >= 3
    assert_same([t.grad for t in wanted], list(expected))
    assert taken() == (3, 0)


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


def test_subclasses_of_tensors_go_to_python(taken):
    class Marked(torch.Tensor):
        pass

    with managed(stack()) as manager, torch.no_grad():
        assert type(manager.module[0](torch.ones(5, 48).as_subclass(Marked))) is Marked
    assert taken() == (0, 0)


def test_what_a_convolution_does_beside_its_operator_goes_to_python(taken):
    """A border of another kind, an image without a batch, a list for an argument."""
    made, shape = KINDS["conv2d"]
    one, other = resident_pair(nn.Sequential(made(), made()).requires_grad_(False))
    ways: list[tuple[Callable[[nn.Module], object], tuple[int, ...], int]] = [
        (lambda layer: None, shape, 4),
        (lambda layer: None, shape[1:], 0),
        (lambda layer: setattr(layer, "padding_mode", "reflect"), shape, 0),
        (lambda layer: setattr(layer, "padding_mode", "zeros"), shape, 4),
        (lambda layer: setattr(layer, "stride", [2, 1]), shape, 0),
        (lambda layer: layer.stride.reverse(), shape, 0),
        (lambda layer: setattr(layer, "stride", (1, 1)), shape, 4),
    ]
    with managed(one):
        for change, given, here in ways:
            for layer in (*one, *other):
                change(layer)
            step = test_matrix.make_step(torch.randn(given), "cpu", False)
            assert_models_agree(one, other, step, steps=1)
            assert taken() == (here, here)


def test_a_patched_convolution_goes_to_python(taken):
    test_convolutions.test_a_convolution_of_another_way_is_not_passed_over("after", False, "cpu")
    assert taken() == (4 + 4, 4 + 4)  # then the layer that is not patched, alone


def coded_masters(mode: str, before: str) -> list[torch.Tensor]:
    """Return gradients through coded masters, which are written before a forward or a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512)).bfloat16().requires_grad_(False)
    x = torch.randn(2, 512).bfloat16().requires_grad_()
    with managed(model, mode, compress="lossless") as manager:
        assert manager.layers[0].coded
        found = [*torch.autograd.grad(model(x).sum(), x)]
        y = model(x) if before == "backward" else None
        model[0].weight.data.view(-1)[:4] = 1.0  # of which torch knows nothing
        y = model(x) if y is None else y
        found += [*torch.autograd.grad(y.sum(), x), y.detach()]
        found += torch.autograd.grad(model(x).sum(), x)
    return found


@pytest.mark.parametrize("before", ["forward", "backward"])
def test_coded_masters_are_looked_at_as_in_python(before, taken):
    first, written, _, after = in_both(lambda mode: coded_masters(mode, before))
    assert_same(written, after)
    assert not torch.equal(first, written)
    assert min(taken()) > 0


def test_on_every_kind_of_device(device, taken):
    """Where a device is not the host, backward runs in a thread of its own."""
    for kind in (None, True, False):
        for trained in TRAINED:
            for test in (LINEAR, CONV2D):
                test(device, torch.float32, True, trained, kind, False)
                assert min(taken()) > 0


def test_off_is_off(taken, monkeypatch):
    monkeypatch.setenv("ORACLE_OFFLOAD_OPS", "off")
    model = stack()
    with attached(model, "cpu") as manager:
        model(leaf()).sum().backward()
        assert all(layer.native is None for layer in manager.layers)
    assert taken() == (0, 0)


@trains
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_device_that_is_simulated_time_is_charged_alike(kind, trained, sim):
    assert is_simulated("cpu")

    def seconds(mode: str) -> list[float]:
        model = three(kind, *trained)
        with managed(model, mode) as manager, Witness(declare=True, clock=True):
            for _ in range(2):
                model(leaf(*KINDS[kind][1])).sum().backward()
                start = sim.now()
            model(leaf(*KINDS[kind][1])).sum().backward()
            waited = sim.now() - start  # for gradients
            sim.finish()
            assert manager.layers
            return [waited, sim.now() - start]

    expected = seconds("off")
    assert seconds("auto") == pytest.approx(expected, rel=1e-9) and expected[1] > 0
