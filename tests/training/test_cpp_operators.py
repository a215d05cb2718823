"""The operators that a compiler sees, computed in C++: as their twins in Python, and as often.

Every case asserts by a counter that C++ computed it, or that it did not.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import pytest
import test_matrix
import torch
from cpp import Taken, managed
from equality import assert_models_agree, assert_same, resident_pair
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from oracle_offload import OffloadError, StaleWeightsError, gradients, selection
from oracle_offload.engines import open_states
from oracle_offload.layers import traced

OPS = torch.ops.oracle_offload
TRAINED = pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def taken(in_cpp: Taken, monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Models that are attached from now on use the operators, however small they are."""
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)
    monkeypatch.setattr(selection, "SMALL_TOGETHER", (0, 0))
    torch.manual_seed(0)
    torch._dynamo.reset()
    return in_cpp


def twins(name: str) -> list[Any]:
    """Return an operator and that which Python computes."""
    return [getattr(OPS, each).default for each in (name, f"{name}_in_python")]


def geometry(tensor: Any) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride()


def assert_twins(name: str, *arguments: Any) -> list[Any]:
    """Return what an operator makes of its arguments: bits, layouts and uses of its twin."""
    found, uses = [], []
    for operator in twins(name):
        (state,) = open_states()
        before = state.engine.stats()["acquires"]
        state.turned = False
        with torch._C._AutoDispatchBelowAutograd():  # as where a compiled graph calls it
            answer = operator(*arguments)
        found.append(list(answer) if isinstance(answer, tuple) else [answer])
        uses.append((state.engine.stats()["acquires"] - before, state.turned))
    assert uses[0] == uses[1]
    assert_same(found[0], found[1])
    assert [geometry(t) for t in found[0]] == [geometry(t) for t in found[1]]
    return found[0]


def compare(layer: Any, module: Any, x: Any, dtype: Any, *arguments: Any) -> int:
    """Compare both operators of a layer over one input; return how many backwards there were."""
    name = "convolution" if arguments else "linear"
    weight, bias = layer.given(module)
    x = x if dtype is None else x.to(dtype)
    (y,) = assert_twins(name, x, weight, bias, layer.key, dtype, traced.NOT, *arguments)
    kept = x if weight.requires_grad else None
    trains = weight.requires_grad, bias is not None and bias.requires_grad
    wanted = {*itertools.product(*((False, each) for each in (True, *trains)))} - {(False,) * 3}
    for needs in sorted(wanted):
        before = torch.randn_like(y), kept, list(x.shape), list(x.stride()), weight, bias
        after = layer.key, dtype, list(needs), *arguments
        assert_twins(f"{name}_backward", *before, *after)
    return len(wanted)


def stack(features: int = 48, depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(features, features) for _ in range(depth)))


def forward(layer: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
    """Call the operator of a linear layer."""
    with torch._C._AutoDispatchBelowAutograd():
        return OPS.linear(x, *layer.given(module), layer.key, None, traced.NOT)


def backward(layer: Any, module: Any, x: torch.Tensor, needs: list[bool]) -> list[torch.Tensor]:
    """Call its derivative, for a gradient of ones."""
    weight, bias = layer.given(module)
    grad = torch.ones(*x.shape[:-1], weight.shape[0])
    geometry = list(x.shape), list(x.stride())
    return OPS.linear_backward(grad, x, *geometry, weight, bias, layer.key, None, needs)


# ---- the same bits ----


@pytest.mark.parametrize("features", [(48, 40), (1, 7), (33, 1)], ids=str)
@pytest.mark.parametrize("dtype", [None, HALF], ids=["float32", "autocast"])
@pytest.mark.parametrize("trains", ["", "weight bias", "bias", "weight"])
def test_linear_over_every_geometry(features, dtype, trains, taken):
    for bias in (True, False):
        model = nn.Sequential(nn.Linear(*features, bias=bias))
        for name, parameter in model[0].named_parameters():
            parameter.requires_grad_(name in trains)
        with managed(model, offload_percent=1.0) as manager:
            taken()
            backwards = 0
            for build in test_matrix.GEOMETRIES.values():
                x = build(features[0])
                backwards += compare(manager.layers[0], model[0], x, dtype)
            assert taken() == (len(test_matrix.GEOMETRIES), backwards)


@TRAINED
@pytest.mark.parametrize("dtype", [None, HALF], ids=["float32", "autocast"])
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"padding": 1, "stride": 2}, {"groups": 4, "bias": False}, {"dilation": 2, "padding": 2}],
    ids=str,
)
def test_convolutions(options, axes, dtype, trained, taken):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    model = nn.Sequential(kind(8, 8, 3, **options)).requires_grad_(trained)
    with managed(model, offload_percent=1.0) as manager:
        layer, module = manager.layers[0], model[0]
        arguments = [list(module.stride), list(module.padding), list(module.dilation)]
        x = torch.randn(2, 8, *(9, 7, 8)[:axes])
        sliced = torch.randn(2, 16, *(9, 7, 8)[:axes])[:, ::2]
        backwards = [
            compare(layer, module, each, dtype, *arguments, module.groups) for each in (x, sliced)
        ]
        assert taken() == (2, sum(backwards))


@TRAINED
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_computes_by_them(device, backend, trained, taken):
    """The resident model's bits (under aot_eager), and every use is one in C++."""
    blocks = [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)]
    one, other = resident_pair(nn.Sequential(*blocks).requires_grad_(trained))
    other.to(device)
    called = {other: torch.compile(other, backend=backend, fullgraph=True)}

    def step(model):
        x = torch.randn(2, 8, 8, 8).to(device).requires_grad_()
        y = called[model](x)
        y.square().sum().backward()
        with torch.no_grad():
            return [y, x.grad, called[model](x)]

    with managed(one, device=device):
        called[one] = torch.compile(one, backend=backend, fullgraph=True)
        step(one)  # the first forward is watched over, by a mode that asks Python
        one.zero_grad()
        taken()
        found, expected = ((torch.manual_seed(1), step(model))[1] for model in (one, other))
        assert taken() == (6, 3)
        if backend == "aot_eager":
            assert_same(found, expected)
            assert_same([p.grad for p in one.parameters()], [p.grad for p in other.parameters()])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(48, 48)

    def forward(self, x):
        return nn.functional.gelu(self.linear(x))


class Checkpointed(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@TRAINED
def test_compiled_blocks_under_a_checkpoint(trained, taken):
    one, other = resident_pair(Checkpointed(*(Block() for _ in range(3))).requires_grad_(trained))

    def step(model):
        x = torch.randn(4, 48, requires_grad=True)
        model(x).square().sum().backward()
        return [x.grad]

    for block in (*one, *other):
        block.compile(backend="aot_eager", fullgraph=True)
    with managed(one):
        step(one)  # the first forward is watched over, by a mode that asks Python
        one.zero_grad()
        taken()
        assert_models_agree(one, other, step, steps=1)
        assert taken() == (6, 3)  # the second run of it is under the witness


def test_the_bytes_and_uses_of_a_compiled_step(taken):
    """The engine sees the same uses, whoever computes."""

    def uses(mode):
        model = stack(512).requires_grad_(False)
        called = torch.compile(model, backend="aot_eager", fullgraph=True)
        with managed(model, mode, offload_percent=1.0) as manager:
            engine = manager.state.engine
            brought = []
            for _ in range(4):
                x = torch.ones(2, 512, requires_grad=True)
                before = engine.stats()["h2d_bytes"]
                called(x).sum().backward()
                brought.append(engine.stats()["h2d_bytes"] - before)
            return brought, engine.stats()["acquires"]

    in_python, in_cpp = uses("off"), uses("auto")
    assert in_python == in_cpp and min(in_python[0]) > 0
    assert min(taken()) > 0


@pytest.mark.parametrize("nbytes", [0, 1 << 40])
def test_gradients_of_every_size_reach_the_host(nbytes, monkeypatch, taken):
    """Small ones by the operators, large ones into locked memory by Python."""
    monkeypatch.setattr(gradients, "LEAST_BYTES", nbytes)
    one, other = resident_pair(nn.Sequential(nn.Linear(48, 40)))
    x = torch.randn(5, 48)
    other(x).sum().backward()
    with managed(one) as manager:
        taken()
        _, gw, gb = backward(manager.layers[0], one[0], x, [False, True, True])
        assert taken() == (0, 1)
    assert_same([gw, gb], [other[0].weight.grad, other[0].bias.grad])


def test_several_threads(taken):
    model = stack().requires_grad_(False)
    x = torch.randn(5, 48)
    expected = model(x)
    found = []
    with managed(model) as manager:
        one, two, three = manager.layers

        def work():
            for _ in range(20):
                y = x
                for layer, module in zip((one, two, three), model, strict=True):
                    y = forward(layer, module, y)
                found.append(y)

        taken()
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert taken() == (180, 0)
    assert_same(found, [expected] * 60)


def test_a_forward_after_a_backward_begins_another(taken):
    """A graph that autograd has recorded as a whole says so; what it runs records nothing."""
    model = stack(depth=1).requires_grad_(False)
    with managed(model) as manager:
        (layer,), state = manager.layers, manager.state
        begun = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(state), "begin_forward", lambda self: begun.append(self))
            taken()
            for turned, recorded in itertools.product((False, True), (traced.NOT, traced.BY_GRAPH)):
                state.turned = turned
                with torch.no_grad():
                    OPS.linear(torch.ones(5, 48), *layer.given(model[0]), layer.key, None, recorded)
                assert begun == [state] * (turned and recorded != traced.NOT)
                begun.clear()
        assert taken() == (4, 0)


# ---- what goes to Python ----


def test_a_profiler_is_shown_the_loan_in_python(taken):
    one, other = resident_pair(stack(depth=1))
    x = torch.randn(5, 48)
    with managed(one) as manager, torch.profiler.profile():
        taken()
        assert_same(forward(manager.layers[0], one[0], x), other(x))
        backward(manager.layers[0], one[0], x, [True, True, True])
        assert taken() == (0, 0)


def test_layers_that_were_attached_without_them_go_to_python(taken):
    one, other = resident_pair(stack(depth=1))
    x = torch.randn(5, 48)
    with managed(one, "off") as manager:
        assert_same(forward(manager.layers[0], one[0], x), other(x))
        backward(manager.layers[0], one[0], x, [True, True, True])
    assert taken() == (0, 0)


def test_a_computed_weight_goes_to_python(taken):
    one, other = resident_pair(stack(depth=1))
    x, others = torch.randn(5, 48), {"0.weight": torch.randn(48, 48)}
    called = torch.compile(lambda x: functional_call(one, others, (x,)), backend="aot_eager")
    with managed(one), torch.no_grad():
        one(x)
        taken()
        assert_same(called(x), functional_call(other, others, (x,)))
        assert taken() == (0, 0)


def test_a_bias_of_another_size_is_no_masters(taken):
    model = stack(depth=1).requires_grad_(False)
    with managed(model) as manager:
        (layer,), (weight, bias) = manager.layers, manager.layers[0].given(model[0])
        x = torch.randn(5, 48)
        expected = forward(layer, model[0], x)
        taken()
        with torch._C._AutoDispatchBelowAutograd():
            for used in (None, bias.clone(), bias[:1]):
                y = OPS.linear(x, weight, used, layer.key, None, traced.NOT)
                plain = torch.nn.functional.linear(x, weight, used)
                assert_same(y, plain)
            for used in (weight.clone(), weight.t()):
                y = OPS.linear(x, used, bias, layer.key, None, traced.NOT)
                assert_same(y, torch.nn.functional.linear(x, used, bias))
        assert taken() == (0, 0)
        assert_same(forward(layer, model[0], x), expected)
        assert taken() == (1, 0)


def test_a_recorded_call_below_autograd_goes_to_python(taken):
    model = stack(depth=1)
    with managed(model) as manager:
        taken()
        layer = manager.layers[0]
        with torch._C._AutoDispatchBelowAutograd():
            OPS.linear(torch.ones(5, 48), *layer.given(model[0]), layer.key, None, traced.HERE)
        assert taken() == (0, 0)


@TRAINED
def test_autograd_without_a_graph_of_its_own_goes_to_python_and_its_backward_does_not(
    trained, taken
):
    one, other = resident_pair(stack(depth=1).requires_grad_(trained))
    called = torch.compile(one, backend="eager", fullgraph=True)

    def step(model):
        x = torch.ones(5, 48, requires_grad=True)
        y = (called if model is one else model)(x)
        y.sum().backward()
        return [y, x.grad]

    with managed(one):
        step(one)
        one.zero_grad()
        taken()
        assert_models_agree(one, other, step, steps=1)
        forwards, backwards = taken()
        assert forwards == 0 and backwards > 0


def test_a_convolution_whose_module_pads_in_its_own_way_goes_to_python(taken):
    one, other = resident_pair(nn.Sequential(nn.Conv2d(4, 4, 3)))
    x = torch.randn(1, 4, 8, 8)
    window = [1, 1], [0, 0], [1, 1], 1
    with managed(one) as manager, torch._C._AutoDispatchBelowAutograd():
        layer = manager.layers[0]
        one[0]._conv_forward = one[0]._conv_forward
        taken()
        y = OPS.convolution(x, *layer.given(one[0]), layer.key, None, traced.NOT, *window)
        assert taken() == (0, 0)
        del one[0].__dict__["_conv_forward"]
        assert_same(y, other(x))
        assert_same(
            OPS.convolution(x, *layer.given(one[0]), layer.key, None, traced.NOT, *window), y
        )
        assert taken() == (1, 0)


# ---- what is refused, in Python's words ----


def test_a_layer_that_was_detached_is_refused(taken):
    model = stack(depth=1)
    x = torch.ones(5, 48)
    with managed(model) as manager:
        layer = manager.layers[0]
        forward(layer, model[0], x)
    taken()
    with pytest.raises(OffloadError, match="was detached since"):
        forward(layer, model[0], x)
    with pytest.raises(OffloadError, match="detached between forward and backward"):
        backward(layer, model[0], x, [True, False, False])
    key, given, gone = layer.key, layer.given(model[0]), weakref.ref(layer)
    del layer, manager
    assert gone() is None
    for recorded in (traced.NOT, traced.BY_GRAPH):
        with pytest.raises(OffloadError, match="was detached since"), torch.no_grad():
            OPS.linear(x, *given, key, None, recorded)
    assert taken() == (0, 0)


def test_a_weight_that_is_no_more_what_forward_saw_is_refused(taken):
    model = stack(depth=1)
    x = torch.ones(5, 48)
    with managed(model) as manager:
        layer, weight = manager.layers[0], model[0].weight.detach()
        forward(layer, model[0], x)
        model[0].weight.data = torch.zeros(48, 48)
        taken()
        with pytest.raises(StaleWeightsError, match="which is for after backward"):
            OPS.linear_backward(
                x, x, [5, 48], [48, 1], weight, None, layer.key, None, [True, False, False]
            )
        assert taken() == (0, 0)


def test_a_backward_that_lacks_the_input_is_pythons(taken):
    model = stack(depth=1)
    with managed(model) as manager:
        layer, x = manager.layers[0], torch.ones(5, 48)
        taken()
        for operator in twins("linear_backward"):
            with pytest.raises(ValueError, match="not enough values"):
                operator(
                    *(x, None, [5, 48], [48, 1], *layer.given(model[0]), layer.key, None),
                    [False, True, False],
                )
        assert taken() == (0, 0)


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_a_forward_begins_before_its_first_use(mode):
    model = stack(depth=1)
    with managed(model, mode) as manager:
        state, begun = manager.state, []
        visits = lambda: len(state.engine.visits(manager.attachment.model))  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(state), "begin_forward", lambda self: begun.append(visits()))
            state.turned = True
            model(torch.ones(5, 48, requires_grad=True))
        assert begun == [0] and visits() == 1


def test_an_error_of_the_engine_is_raised_as_it_is(taken):
    """Through the dispatcher, too: by its class and in its words."""
    model = stack(depth=1)
    with managed(model) as manager:
        layer, state = manager.layers[0], manager.state
        with pytest.MonkeyPatch.context() as patch:

            def refuse(self):
                raise OffloadError("no device today")

            patch.setattr(type(state), "begin_use", refuse)
            with pytest.raises(OffloadError, match="no device today"):
                forward(layer, model[0], torch.ones(5, 48))
