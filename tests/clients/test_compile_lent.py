"""torch.compile over modules that are lent their weights: a call is one operator, or none."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import random
import re

import capturing
import numpy
import pytest
import torch
from capturing import BACKENDS, Backend, Checkpointed, compiled
from equality import (
    RUNS,
    assert_models_agree,
    assert_same,
    attached,
    resident_pair,
)
from families import FAMILIES
from tiers import in_turn
from torch import nn
from torch._dynamo.utils import counters

from oracle_offload import OffloadError, StaleWeightsError
from oracle_offload.layers import compiled as lent_in_compiled
from oracle_offload.layers.any import AnyLayer
from oracle_offload.model import selection

WIDTH = 16
DEPTH = 3

pytestmark = pytest.mark.usefixtures("made_there", "from_the_start")


@pytest.fixture(autouse=True)
def as_large_ones(nothing_is_small):
    """Small models say what large ones do."""


class Mixing(nn.Module):
    """A module with a forward of its own, which saves more than it is given."""

    def __init__(self, train=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.requires_grad_(train)

    def forward(self, x, factor=1.0, *, shift=None):
        y = torch.einsum("...i,oi->...o", x.sigmoid(), self.weight) * factor * x.shape[-1]
        y = y.sigmoid() * self.scale + (0 if shift is None else shift[0])
        y[..., :4].mul_(2)  # which autograd records where it knows of views
        return y.exp().log1p()


class Block(nn.Module):
    def __init__(self, train):
        super().__init__()
        self.mix = Mixing(train)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.mix(x.sin(), 0.5, shift=(x.mean(), None))
        return x + self.linear(y)


def model_of(checkpointing="", train=False):
    return Checkpointed([Block(train) for _ in range(DEPTH)], None, checkpointing)


def step(called):
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    y = called(x)
    y.square().sum().backward()
    with torch.no_grad():
        sampled = called(x)
    return [y, x.grad, sampled]


def leaves(manager):
    return [layer for layer in manager.attachment.layers if isinstance(layer, AnyLayer)]


@in_turn(
    "how,order,checkpointing,train,name",
    [
        ("torch.compile", "attach first", "", True),
        ("torch.compile", "attach first", "inside", True),
        ("torch.compile", "attach first", "inside", False),
        ("torch.compile", "compile first", "", False),
        ("block.compile", "attach first", "outside", True),
        ("block.compile", "compile first", "", True),
    ],
    BACKENDS,
)
def test_each_call_of_a_lent_module_is_one_operator(how, order, checkpointing, train, name):
    managed, resident = resident_pair(model_of(checkpointing, train))
    backend, called = Backend(name), None
    if order == "compile first":
        called = compiled(managed, how, backend, fullgraph=True)
        step(called)
        managed.zero_grad()
        assert backend.count("lent") == 0
    with attached(managed) as manager:
        assert len(leaves(manager)) == DEPTH
        if called is None:
            called = compiled(managed, how, backend, fullgraph=True)
        backend.ran.clear()
        calls = {managed: called, resident: resident}
        assert_models_agree(managed, resident, lambda m: step(calls.get(m, m)))
        again = checkpointing == "outside"  # its recompute runs the graph again
        assert backend.count("lent") == RUNS * 2 * DEPTH * (2 + again)
        assert backend.count("linear") == RUNS * 2 * DEPTH * (2 + again)
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
        assert not manager.attachment.held()
    assert not counters["graph_break"]


def uses(model, backend, call):
    """What is taken again at once counts once."""
    names, brought = capturing.uses(copy.deepcopy(model), backend, call)
    return once(names), brought


def once(names):
    return [name for name, last in zip(names, [None, *names], strict=False) if name != last]


@pytest.mark.parametrize(
    ("checkpointing", "train", "name"),
    [
        *itertools.product(("", "inside"), (False, True), ["aot_eager"]),
        ("inside", False, "inductor"),
        pytest.param("", False, "inductor", marks=pytest.mark.slow),
        pytest.param("", True, "inductor", marks=pytest.mark.slow),
        pytest.param("inside", True, "inductor", marks=pytest.mark.slow),
    ],
)
def test_order_and_bytes_are_those_of_eager(checkpointing, train, name):
    model = model_of(checkpointing).requires_grad_(train)
    order, brought = uses(model, None, step)
    found, found_brought = uses(model, name, step)
    assert brought > 0
    if checkpointing and train:  # eager takes a trained linear before it recomputes its input
        found, order = ([name.rpartition(".")[0] for name in names] for names in (found, order))
        found, order = once(found), once(order)
    assert found == order
    assert found_brought == brought


@pytest.mark.parametrize(
    ("checkpointing", "eager", "found"), [("", 1, 2), ("inside", 2, 2), ("outside", 2, 3)]
)
def test_backward_makes_a_call_once_more(checkpointing, eager, found, monkeypatch):
    """And no more than eager's, with the checkpoint inside the compiled region."""
    calls, lend_to = [], AnyLayer.lend_to
    monkeypatch.setattr(AnyLayer, "lend_to", lambda *given: calls.append(1) or lend_to(*given))
    model = model_of(checkpointing).requires_grad_(False)
    how = "block.compile" if checkpointing == "outside" else "torch.compile"
    x = torch.randn(2, WIDTH, requires_grad=True)
    with attached(model):
        model(x).sum().backward()
        assert len(calls) == eager * DEPTH
        called = compiled(model, how, "aot_eager", fullgraph=True)
        calls.clear()
        called(x).sum().backward()
        assert len(calls) == found * DEPTH


def test_an_operator_declared_pure_is_caught(monkeypatch):
    """What the test above sees: a compiler drops a pure operator whose result is not used."""

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.other = Mixing(), Mixing()

        def forward(self, x):
            self.other(x)
            return self.mix(x)

    model = Unused()
    order, _ = uses(model, None, step)
    kept, _ = uses(model, "aot_eager", step)
    assert kept == order
    monkeypatch.setattr(lent_in_compiled, "advance", lambda sequence, after: None)
    found, _ = uses(model, "aot_eager", step)
    assert "other" in order
    assert "other" not in found


def read_trained(model, length=7):
    """Call a language model whose table is trained, instead of an input."""
    table = model.get_input_embeddings().weight.requires_grad_()
    table.grad = None
    return model(input_ids=torch.arange(2 * length).view(2, length) % 64)[0]


def experts(implementation, train=False):
    model = FAMILIES["Qwen3-MoE"].make().requires_grad_(train)
    model.config._experts_implementation = implementation
    return model


@pytest.fixture
def experts_alone(monkeypatch):
    """Leave small norms resident, as in large models."""
    monkeypatch.setattr(selection, "SMALL_BYTES", 4 << 10)
    monkeypatch.setattr(selection, "SMALL_TOGETHER", (1 << 20, 1 << 20))


@pytest.mark.usefixtures("experts_alone")
@in_turn(
    "implementation,train,name",
    [("grouped_mm", False), ("grouped_mm", True), ("batched_mm", True), ("batched_mm", False)],
    BACKENDS,
)
def test_experts_are_in_one_graph(implementation, train, name):
    managed, resident = resident_pair(experts(implementation, train))
    backend = Backend(name)

    def read(model):
        y = read_trained(calls.get(model, model))
        y.square().sum().backward()
        return [y]

    with attached(managed) as manager:
        lent, all_layers = leaves(manager), manager.attachment.layers
        assert [layer.name.endswith("mlp.experts") for layer in lent] == [True, True]
        calls = {
            managed: torch.compile(managed, backend=backend, fullgraph=True),
            resident: torch.compile(resident, backend=name, fullgraph=True),
        }
        assert_models_agree(managed, resident, read)
        assert backend.graphs == 1
        assert backend.count("lent") == RUNS * 2 * len(lent)
        own = backend.count("linear", "embedding")
        assert own == RUNS * 2 * (len(all_layers) - len(lent))
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
        assert not manager.attachment.held()


@pytest.mark.slow  # half a minute of gcc; test_compile_families.py has experts under inductor
@pytest.mark.usefixtures("experts_alone")
def test_experts_under_inductor(monkeypatch, tmp_path):
    """Not the bits of eager: what is around the experts has other roundings."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    managed, resident = resident_pair(experts("grouped_mm", train=True))
    with attached(managed) as manager:
        called = torch.compile(managed, fullgraph=True)
        found, expected = read_trained(called), read_trained(resident)
        for y in (found, expected):
            y.square().sum().backward()
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    torch.testing.assert_close(found, expected)
    for one, other in zip(managed.parameters(), resident.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("experts_alone")
@pytest.mark.parametrize("family", ["gpt-oss", "DeepSeek-V3", "Nucleus-MoE-Image"])
def test_experts_of_other_families_are_in_one_graph(family):
    """With biases that stay resident, with shared experts, and with sizes read as values."""
    managed, resident = resident_pair(FAMILIES[family].make().requires_grad_(False))
    backend = Backend("aot_eager")

    def read(model):
        if family == "Nucleus-MoE-Image":
            y, x = FAMILIES[family].call(calls.get(model, model))
            y.square().sum().backward()
            return [y, x.grad]
        y = read_trained(calls.get(model, model))
        y.square().sum().backward()
        return [y]

    with attached(managed) as manager:
        lent = leaves(manager)
        assert lent
        called = torch.compile(managed, backend=backend, fullgraph=True)
        calls = {managed: called, resident: resident}
        assert_models_agree(managed, resident, read)
        assert backend.graphs == 1
        assert backend.count("lent") == RUNS * 2 * len(lent)
        assert not manager.attachment.held()


@pytest.mark.usefixtures("experts_alone")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_keep_order_and_bytes(checkpointing):
    model = experts("grouped_mm")
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})

    def read(called):
        read_trained(called).square().sum().backward()

    order, brought = uses(model, None, read)
    found, found_brought = uses(model, "aot_eager", read)
    assert brought > 0
    assert found == order
    assert found_brought == brought


@pytest.mark.usefixtures("experts_alone")
@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_experts_that_ask_for_values_are_called_from_outside(name):
    managed, resident = resident_pair(experts("eager"))
    backend = Backend(name)

    def read(model):
        y = read_trained(calls.get(model, model))
        y.square().sum().backward()
        return [y]

    with attached(managed) as manager:
        calls = {managed: torch.compile(managed, backend=backend), resident: resident}
        assert_models_agree(managed, resident, read)
        assert all(layer.breaks for layer in leaves(manager))
        assert backend.count("lent") == 0
        assert backend.count("linear") > 0
        assert backend.graphs <= 9  # as without an operator
        read(managed)  # on a card it was deterministic until here, which dynamo guards
        graphs = backend.graphs
        read(managed)
        assert backend.graphs == graphs
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
        assert not manager.attachment.held()


@pytest.mark.usefixtures("experts_alone")
def test_lengths_of_experts_are_compiled_few_times():
    """By dynamo, whose guards say so; test_compile_families.py has any size under aot_eager."""
    managed, resident = resident_pair(experts("grouped_mm"))
    backend = Backend("eager")
    with attached(managed) as manager:
        called = torch.compile(managed, backend=backend, fullgraph=True)
        for length in (5, 7, 11, 3):
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    assert torch.equal(read_trained(called, length), read_trained(resident, length))
        with torch.inference_mode():
            assert torch.equal(read_trained(called, length), read_trained(resident, length))
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    assert backend.graphs <= 5  # with and without gradients: of one length, of any; inference


@pytest.mark.usefixtures("experts_alone")
@pytest.mark.parametrize("first", ["attach", "adapters"])
@pytest.mark.parametrize("stacks", [False, True])
def test_experts_with_lora(first, stacks):
    peft = pytest.importorskip("peft")
    plain = experts("grouped_mm")
    chosen = {"target_parameters": list(FAMILIES["Qwen3-MoE"].stacks)} if stacks else {}
    settings = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **chosen
    )
    torch.manual_seed(3)
    resident = peft.get_peft_model(copy.deepcopy(plain), settings)
    managed = copy.deepcopy(plain)
    torch.manual_seed(3)
    if first == "adapters":
        managed = peft.get_peft_model(managed, settings)
    for model in (managed, resident) if stacks else ():  # what it makes of them waits for backward
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    backend = Backend("aot_eager")

    def read(model):
        y = calls.get(model, model)(input_ids=torch.arange(14).view(2, 7))[0]
        y.square().sum().backward()
        return [y]

    with attached(managed) as manager:
        if first == "attach":
            managed = peft.get_peft_model(managed, settings)
        fullgraph = not stacks
        called = torch.compile(managed, backend=backend, fullgraph=fullgraph)
        calls = {managed: called, resident: resident}
        assert_models_agree(managed, resident, read)
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
        assert not manager.attachment.held()
    assert (backend.count("lent") > 0) == fullgraph
    trained = [p for n, p in managed.named_parameters() if "lora" in n]
    assert trained
    assert all(p.grad is not None for p in trained)


@pytest.mark.usefixtures("experts_alone")
def test_fullgraph_says_what_to_do_about_lora_on_stacks():
    """torch refuses a resident model, too: peft parametrises the stacks within each call."""
    peft = pytest.importorskip("peft")
    chosen = list(FAMILIES["Qwen3-MoE"].stacks)
    settings = peft.LoraConfig(r=2, target_modules=[], target_parameters=chosen)
    model = peft.get_peft_model(experts("grouped_mm"), settings)

    def refused():
        called = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
            called(input_ids=torch.arange(7).view(1, 7))
        return str(raised.value)

    refused()
    with attached(model):
        told = refused()
    if "reason" in inspect.signature(torch.compiler.disable).parameters:  # torch 2.6 gives none
        assert re.search(r"without fullgraph=True.*ignore_modules=\[", told)


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="it takes weights along")
def test_an_export_is_refused_in_a_sentence():
    model, x = nn.Sequential(Mixing()), torch.randn(2, WIDTH)
    expected = model(x)
    with attached(model):
        refused = r"torch\.export cannot trace an attached model.*Detach"
        with pytest.raises(Exception, match=refused):
            torch.export.export(model, (x,), strict=True)
        assert torch.equal(model(x), expected)


class Several(nn.Module):
    """What a graph has to break at, one module for each reason."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)


class Values(Several):
    def forward(self, x):
        return (x if x.sum().item() > 1e9 else x * 2) @ self.weight


class Choosing(Several):
    def forward(self, x):
        return x[x.sum(-1) > 0] @ self.weight


class Drawing(Several):
    def forward(self, x):
        return torch.nn.functional.dropout(x @ self.weight, 0.5, self.training)


class Twice(Several):
    def forward(self, x):
        return (x * x.sigmoid() + x) @ self.weight


class Pair(Several):
    """Is given the same tensor twice."""

    def forward(self, x, z=None):
        return x @ self.weight if z is None else self(x, None) + z.sigmoid()


class Two(Several):
    def forward(self, x):
        return x @ self.weight, None


class Counting(Several):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x @ self.weight


class Noting(Several):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.detach())
        return x @ self.weight


class Unused(Several):
    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x @ self.weight


class Running(Several):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return x @ self.weight


class Below(Several):
    def __init__(self):
        super().__init__()
        self.small = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.small(x @ self.weight)


class Writing(Several):
    def forward(self, x):
        return x.mul_(2) @ self.weight


class Hidden(Several):
    def __init__(self):
        super().__init__()
        self.tensors = [torch.randn(WIDTH, requires_grad=True)]

    def forward(self, x):
        return x @ self.weight * self.tensors[0]


class Nested(Several):
    """Writes to a list that is in a tuple of a dictionary."""

    def __init__(self):
        super().__init__()
        self.seen = {"x": ([], 0)}

    def forward(self, x):
        self.seen["x"][0].append(x.detach())
        return x @ self.weight


class Python(Several):
    def forward(self, x):
        return x @ self.weight * random.random()


class Numpy(Several):
    def forward(self, x):
        return x @ self.weight * float(numpy.random.rand())


class Asking(Several):
    """Asks autograd for gradients itself."""

    def forward(self, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(z.sin().sum(), z)
        return x @ self.weight * slope


class Around(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x).sin()
        x = x * 1
        y = self.inner(x, x) if isinstance(self.inner, Pair) else self.inner(x * 1)
        return x.sum() + self.last(y[0] if isinstance(y, tuple) else y)


BREAKS = {
    Values: "data-dependent",
    Choosing: "the size of its result depends on values|nonzero",
    Drawing: "draws random numbers",
    Twice: "uses an input more than once",
    Pair: "given the same tensor more than once",
    Two: "returns tuple",
    Counting: "writes to its input, or to itself",
    Noting: "writes to its input, or to itself",
    Nested: "writes to its input, or to itself",
    Python: "draws random numbers",
    Numpy: "draws random numbers",
    Asking: "asks autograd for gradients itself",
    Unused: "something trained not at all",
    Running: "writes to its input, or to itself",
    Below: "have Parameters of their own",
    Writing: "in-place",
    Hidden: "",
}


@pytest.mark.parametrize("kind", BREAKS)
def test_what_is_no_operator_is_called_from_outside(kind):
    """Where a graph breaks is dynamo's to say: what comes after it traces what it left."""
    managed, resident = resident_pair(Around(kind))
    backend = Backend("eager")
    with attached(managed) as manager:
        assert any(layer.name == "inner" for layer in leaves(manager))
        calls = {managed: torch.compile(managed, backend=backend), resident: resident}
        assert_models_agree(managed, resident, lambda m: drawn_step(calls.get(m, m)))
        assert backend.count("lent") == 0
        assert backend.count("linear") > 0
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
        assert not manager.attachment.held()
    for one, other in zip(managed.buffers(), resident.buffers(), strict=True):
        assert torch.equal(one, other)
    if kind is Noting:
        assert_same(managed.inner.seen, resident.inner.seen)
    if kind is Nested:
        assert_same(managed.inner.seen["x"][0], resident.inner.seen["x"][0])


def drawn_step(called):
    random.seed(3)
    numpy.random.seed(3)
    return step(called)


@pytest.mark.parametrize("kind", [kind for kind, why in BREAKS.items() if why])
def test_fullgraph_says_why_a_call_is_no_operator(kind):
    with attached(model := Around(kind)):
        called = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="lent") as raised:
            called(torch.randn(2, WIDTH, requires_grad=True))
        told, error = [], raised.value
        while error is not None:
            told.append(error)
            error = error.__cause__ or error.__context__
        (ours,) = {str(error) for error in told if isinstance(error, OffloadError)}
        pattern = rf"'inner' is no operator of a compiled graph \(.*({BREAKS[kind]}).*ignore"
        assert re.search(pattern, ours, re.DOTALL)


@pytest.mark.parametrize("kind", [Drawing, Running])
def test_a_module_that_begins_to_train_breaks_the_graph(kind):
    """What was found of it while it did not does not hold."""
    managed, resident = resident_pair(Around(kind))
    backend = Backend("aot_eager")
    with attached(managed):
        calls = {managed: torch.compile(managed, backend=backend), resident: resident}
        for train in (False, True):
            for model in calls:
                model.train(train)
            assert_models_agree(managed, resident, lambda m: step(calls.get(m, m)))
            assert backend.count("lent") == RUNS * 2 * 2
    for one, other in zip(managed.buffers(), resident.buffers(), strict=True):
        assert torch.equal(one, other)


def test_children_are_called_in_the_mode_of_forward():
    """Also where only one module below was set to train, and after forward."""
    managed, resident = resident_pair(nn.Sequential(Child()))
    x = torch.randn(4, WIDTH, requires_grad=True)
    with attached(managed) as manager:
        called = torch.compile(managed, backend="aot_eager", fullgraph=True)
        grads = []
        for model, call in ((managed, called), (resident, resident)):
            model.eval()
            y = call(x)
            model[0].train()
            y.square().sum().backward()
            assert model[0].training
            assert model[0].below.training
            grads.append(x.grad)
            x.grad = None
        assert_same(*grads)
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
        assert not manager.attachment.held()


class Mode(nn.Module):
    def forward(self, y):
        return y.sin() if self.training else y.cos()


class Child(Several):
    """Computes by its mode, and by that of one below it."""

    def __init__(self):
        super().__init__()
        self.below = Mode()

    def forward(self, x):
        return self.below(x @ self.weight).exp() * (2 if self.training else 3)


class Scaled(Several):
    def forward(self, x, factor):
        return x.sigmoid() @ self.weight * (factor if factor > 0 else 1)


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_float_that_varies_is_taken(name):
    managed, resident = resident_pair(nn.Sequential(Scaled()))
    backend = Backend(name)
    with attached(managed) as manager:
        called = torch.compile(
            lambda x, factor: managed[0](x, factor), backend=backend, fullgraph=True
        )
        for factor in (0.1, 0.7, 0.9, 1e-300, -0.0, 0.1, float("inf"), float("nan")):
            x = torch.randn(2, WIDTH, requires_grad=True)
            found, expected = called(x, factor), resident[0](x, factor)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert backend.count("lent") == 8
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0


class Set(Several):
    def __init__(self):
        super().__init__()
        self.register_buffer("gain", torch.rand(WIDTH))
        self.power = 2

    def forward(self, x):
        return (x.sigmoid() @ self.weight * self.gain) ** self.power


@pytest.mark.parametrize("what", ["in place", "replaced", "set"])
def test_buffers_and_settings_that_change_before_backward_are_refused(what):
    with attached(model := nn.Sequential(Set())) as manager:
        y = torch.compile(model, backend="aot_eager")(torch.randn(2, WIDTH, requires_grad=True))
        inner, error, message = model[0], StaleWeightsError, "buffers of managed layer '0'.*repl"
        if what == "in place":
            inner.gain.mul_(2)
            error, message = RuntimeError, "inplace operation"
        elif what == "replaced":
            inner.gain = inner.gain * 2
        else:
            inner.power, message = 3, r"'0': power was 2 in .* is 3 in backward"
        with pytest.raises(error, match=message):
            y.sum().backward()
        assert not manager.attachment.held()


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_buffer_of_another_dtype_is_compiled_anew(name):
    managed, resident = resident_pair(nn.Sequential(Set()).requires_grad_(False))
    x = torch.randn(2, WIDTH)
    with attached(managed) as manager:
        called = torch.compile(managed, backend=name, fullgraph=True)
        for _ in range(2):
            assert_same([called(x) * 3], [resident(x) * 3])
            for model in (managed, resident):
                model[0].gain = model[0].gain.double()
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0


class Form(Several):
    """Returns another form once `as_told` is set, which no compiler looks at."""

    as_told = staticmethod(lambda y: y)

    def forward(self, x):
        return self.as_told(x @ self.weight)


FORMS = {
    "dtype": lambda y: y.double(),
    "shape": lambda y: torch.cat([y, y]),
    "rank": lambda y: y[None],
    "stride": lambda y: y.t().contiguous().t(),
}


@in_turn(
    "grad,form,name",
    [(False, form) for form in FORMS] + [(True, form) for form in reversed(FORMS)],
    BACKENDS,
)
def test_a_result_that_is_not_as_compiled_code_was_told_is_refused(form, grad, name):
    with attached(model := nn.Sequential(Form())) as manager, torch.set_grad_enabled(grad):
        called = torch.compile(lambda x: model(x) * 2, backend=name, fullgraph=True)
        x = torch.randn(4, WIDTH)
        called(x)
        model[0].as_told = FORMS[form]
        message = r"'0' returns a tensor of torch\..*, and not a tensor of torch\.float32, shape"
        with pytest.raises(OffloadError, match=message):
            called(x)
        assert not manager.attachment.held()


KEPT_ON_DISK = """
import torch
import oracle_offload
from oracle_offload.model import selection
from torch import nn

selection.SMALL_BYTES, selection.SMALL_TOGETHER = 0, (0, 0)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        y = x @ self.weight
        return {{"same": y, "double": y.double(), "wide": torch.cat([y, y], -1)}}["{form}"]


with torch.no_grad():
    model, x = nn.Sequential(Inner()), torch.randn(16, 16)
    expected = (model(x * 2) * 3).cos() + 1
    oracle_offload.attach(model, "cpu")
    found = torch.compile(lambda x: (model(x * 2) * 3).cos() + 1)(x)
torch.testing.assert_close(found, expected)
"""


@pytest.mark.parametrize(
    "forms",
    [("same", "wide"), pytest.param(("same", "double", "wide"), marks=pytest.mark.slow)],
    ids=["two", "three"],
)
def test_what_torch_keeps_on_disk_serves_no_other_code(forms, tmp_path, forks):
    """Its names for what it compiled know nothing of the code of a module."""
    for form in forms:
        forks.print(KEPT_ON_DISK.format(form=form), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))


class Table(Several):
    """Is given nothing that needs a gradient, or nothing at all."""

    def forward(self, length=4):
        return self.weight[:length].sin()


@pytest.mark.parametrize("train", [False, True])
def test_a_module_that_is_given_nothing(train):
    managed, resident = resident_pair(nn.Sequential(nn.Linear(WIDTH, WIDTH), Table()))
    managed[1].requires_grad_(train), resident[1].requires_grad_(train)
    backend = Backend("aot_eager")

    def call(model, called):
        x = torch.randn(4, WIDTH, requires_grad=True)
        y = called(model, x)
        y.square().sum().backward()
        return [y, x.grad]

    def compute(model, x):
        return model[0](x) * model[1]() + model[1](length=x.shape[0])

    with attached(managed) as manager:
        calls = {managed: torch.compile(compute, backend=backend, fullgraph=True)}
        calls[resident] = compute
        assert_models_agree(managed, resident, lambda m: call(m, calls.get(m, compute)))
        assert backend.count("lent") == RUNS * 2 * 2
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0


class View(Several):
    def forward(self, x):
        return self.weight[: x.shape[0]]


def test_a_result_that_is_a_weight_is_a_copy(monkeypatch, tmp_path):
    """A compiler writes over the memory of a result that nothing reads any more."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    managed, resident = resident_pair(nn.Sequential(View()).requires_grad_(False))
    x = torch.randn(4, WIDTH)
    with attached(managed) as manager:
        for name in ("aot_eager", "inductor"):
            called = torch.compile(lambda x: (managed(x) * 2 + x).sin(), backend=name)
            for _ in range(3):
                torch.testing.assert_close(called(x), (resident(x) * 2 + x).sin())
                assert not manager.attachment.held()
        lent = leaves(manager)[0]
        y = torch.ops.oracle_offload.lent(
            [x], lent.own(), lent.key, [], "([True],'forward',(...,),{})", [], None, lent.number
        )
        assert not manager.attachment.held()
        assert torch.equal(y, resident(x))


class Adding(Several):
    def forward(self, x):
        return x + self.weight


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_has_the_memory_and_the_layout_of_its_own(transposed):
    """The gradient that comes in is the input's as well; compiled code expects another."""
    with attached(model := nn.Sequential(Adding())) as manager:
        leaf = leaves(manager)[0]
        x, grad = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
        x = x.t() if transposed else x
        call = "([True],'forward',(...,),{})"
        gx, gw = torch.ops.oracle_offload.lent_backward(
            grad, [x], [model[0].weight], leaf.key, [True, True], call, [], None
        )
    assert torch.equal(gx, grad)
    assert torch.equal(gw.cpu(), grad.cpu())  # a weight's is at home
    assert gx.stride() == x.stride()
    assert gw.stride() == grad.stride()
    assert len({t.untyped_storage().data_ptr() for t in (grad, gx, gw)}) == 3


def test_inductor_may_write_over_what_an_operator_was_given(monkeypatch, tmp_path):
    """It reuses the memory of what it believes to be read no more."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what it wrote before is no proof
    model = model_of(train=True)
    wanted = copy.deepcopy(model)
    x = torch.randn(64, WIDTH, requires_grad=True)
    wanted(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with attached(model):
        torch.compile(model, fullgraph=True)(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)
    for one, other in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@in_turn("train,name", [False, True], BACKENDS)
def test_autocast(train, name):
    managed, resident = resident_pair(model_of(train=train))

    def under_autocast(model):
        x = torch.randn(2, 5, WIDTH, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = calls.get(model, model)(x)
        y.float().square().sum().backward()
        return [y, x.grad]

    with attached(managed):
        calls = {
            managed: torch.compile(managed, backend=name, fullgraph=True),
            resident: torch.compile(resident, backend=name, fullgraph=True),
        }
        assert_models_agree(managed, resident, under_autocast)


class Turning(Several):
    """Computes otherwise once `turned` is filled, which no compiler looks at."""

    def __init__(self):
        super().__init__()
        self.turned = []

    def forward(self, x):
        y = x @ self.weight
        for what in self.turned:
            y = (y, x) if what is None else y * what
        return y


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            torch.ones(WIDTH, requires_grad=True),
            r"trainable tensor of shape \[16\] that is no Para",
        ),
        (None, "returns tuple, and not one tensor"),
    ],
)
def test_what_compiled_code_was_not_told_of_is_refused(what, message):
    with attached(model := nn.Sequential(Turning())) as manager:
        called = torch.compile(model, backend="aot_eager", fullgraph=True)
        x = torch.randn(2, WIDTH, requires_grad=True)
        called(x).sum().backward()
        on_device = None if what is None else what.detach().to(x.device).requires_grad_()
        model[0].turned.append(on_device)
        with pytest.raises(OffloadError, match=rf"'0' .*{message}.*ignore_modules"):
            called(x).sum().backward()
        assert not manager.attachment.held()


@pytest.mark.usefixtures("experts_alone")
def test_saved_activations_are_not_more_than_those_of_eager():
    model = experts("grouped_mm")

    def held_bytes(called):
        held, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

        def keep(tensor):
            if tensor.untyped_storage().data_ptr() not in own:
                held[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            read_trained(called)
        return sum(tensor.nbytes for tensor in held.values())

    with attached(model) as manager:
        assert len(leaves(manager)) == 2
        called = torch.compile(model, backend="aot_eager", fullgraph=True)
        held_bytes(called)
        eager, found = held_bytes(model), held_bytes(called)
    assert 0 < found <= 1.05 * eager


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_computed_weight_is_refused(name):
    model = nn.Sequential(Mixing())
    weight = torch.randn(WIDTH, WIDTH)

    def given(x):
        return torch.func.functional_call(model, {"0.weight": weight}, (x,))

    with attached(model) as manager:
        with pytest.raises(OffloadError, match=r"'0' has a computed weight"):
            torch.compile(given, backend=name)(torch.randn(2, WIDTH))
        assert not manager.attachment.held()


@pytest.mark.parametrize("how", ["in place", ".data"])
def test_weights_that_change_before_backward_are_refused(how):
    model = model_of()
    with attached(model) as manager:
        y = torch.compile(model, backend="aot_eager")(torch.randn(2, WIDTH, requires_grad=True))
        weight = model.blocks[1].mix.weight
        if how == "in place":
            with torch.no_grad():
                weight.mul_(2)
        else:
            weight.data = weight.data * 2
        message = r"'blocks\.1\.mix'.*replaced" if how == ".data" else "inplace operation"
        with pytest.raises(StaleWeightsError if how == ".data" else RuntimeError, match=message):
            y.sum().backward()
        assert not manager.attachment.held()


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_detach_before_backward_is_refused(name):
    model = model_of()
    with attached(model):
        y = torch.compile(model, backend=name)(torch.randn(2, WIDTH, requires_grad=True))
    with pytest.raises(OffloadError, match=r"detached between forward and backward"):
        y.sum().backward()


def test_backward_twice_of_a_graph_that_is_kept():
    managed, resident = resident_pair(model_of(train=True))
    x = torch.randn(2, WIDTH, requires_grad=True)
    with attached(managed) as manager:
        for called in (torch.compile(managed, backend="aot_eager"), resident):
            loss = called(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    found, expected = ([p.grad for p in m.parameters()] for m in (managed, resident))
    assert_same(found, expected)


class Failing(Several):
    fails = False

    def forward(self, x):
        y = x @ self.weight
        if self.fails:
            raise ValueError("so it is")
        return y


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_an_exception_leaves_no_slot_held(name):
    managed, resident = resident_pair(Around(Failing))
    with attached(managed) as manager:
        called = torch.compile(managed, backend=name, fullgraph=True)
        x = torch.randn(2, WIDTH, requires_grad=True)
        called(x)
        Failing.fails = True
        try:
            with pytest.raises(ValueError, match="so it is"):
                called(x)
        finally:
            Failing.fails = False
        gc.collect()
        assert not manager.attachment.held()
        calls = {managed: called, resident: resident}
        assert_models_agree(managed, resident, lambda m: step(calls.get(m, m)))


def test_one_compiled_block_serves_all():
    managed = model_of()
    backend = Backend("aot_eager")
    with attached(managed), torch.no_grad():
        compiled(managed, "block.compile", backend, fullgraph=True)
        for _ in range(3):
            managed(torch.randn(2, 5, WIDTH))
    assert backend.graphs == 1
    assert backend.count("lent") == 3 * DEPTH
