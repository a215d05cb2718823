"""torch.compile: what is around managed layers is in graphs, which break at those layers only."""

from __future__ import annotations

import re

import pytest
import sides
import torch
from equality import RUNS, assert_models_agree, assert_same, attached, gradients, resident_pair
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from oracle_offload.model.witness import Witness

pytestmark = pytest.mark.usefixtures("made_there")
DEPTH = 9  # more blocks than dynamo compiles variants of one function


class Block(nn.Module):
    """Five operators that are not managed around two layers that are."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))).sin()).relu()


OPERATORS = ("layer_norm", "gelu", "sin", "relu", "add")


class Model(nn.Module):
    def __init__(self, checkpointing=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.head = nn.Linear(32, 8)
        self.checkpointing = checkpointing

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.head(x)


def step(model):
    x = torch.randn(3, 32, requires_grad=True)
    y = model(x)
    y.square().sum().backward()
    with torch.no_grad():
        sampled = model(x + 1)
    return [y, sampled, x.grad]


class Backend:
    """Compile by a backend of torch, and count what its graphs ran."""

    def __init__(self, name):
        self.compiler = torch._dynamo.lookup_backend(name)
        self.ran = []

    def __call__(self, graph, inputs):
        compiled = self.compiler(graph, inputs)
        calls = [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]

        def run(*arguments):
            self.ran.extend(calls)
            return compiled(*arguments)

        return run

    def count(self, operator):
        return sum(operator in re.sub("0x[0-9a-f]+", "", call) for call in self.ran)


def compiled(model, how, backend):
    """Return what to call in place of `model`."""
    if how == "torch.compile(model)":
        return torch.compile(model, backend=backend)
    for part in [model] if how == "model.compile()" else model.blocks:
        part.compile(backend=backend)
    return model


@pytest.mark.parametrize(
    ("how", "order", "name"),
    [
        ("model.compile()", "attach first", "aot_eager"),
        ("model.compile()", "compile first", "eager"),
        ("torch.compile(model)", "attach first", "eager"),
        ("torch.compile(model)", "compile first", "aot_eager"),
        ("block.compile()", "attach first", "aot_eager"),
        ("block.compile()", "compile first", "eager"),
    ],
)
def test_the_operators_between_managed_layers_are_in_graphs(how, order, name):
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    managed, resident = resident_pair(Model())
    backend = Backend(name)
    called = compiled(managed, how, backend) if order == "compile first" else None
    with attached(managed) as manager:
        assert len(manager.layers) == 2 * DEPTH + 1
        if called is None:
            called = compiled(managed, how, backend)
        for number in range(3):
            backend.ran.clear()
            assert_models_agree(
                managed, resident, lambda m: step(called if m is managed else m), steps=1
            )
            for operator in OPERATORS:  # of each block, in the training and the sampling forward
                expected = RUNS * 2 * DEPTH
                assert backend.count(operator) == expected, (number, operator, backend.ran)
    breaks = [reason for reason in counters["graph_break"] if "managed_class" not in reason]
    breaks = [reason for reason in breaks if "loop" not in reason]  # around the blocks
    assert not breaks, breaks


@pytest.mark.parametrize(
    ("checkpointing", "frozen"),
    [("reentrant", False), ("non-reentrant", False), ("non-reentrant", True)],
)
def test_checkpointing_and_compile(checkpointing, frozen):
    torch.manual_seed(0)
    torch._dynamo.reset()
    managed, resident = resident_pair(Model(checkpointing))
    for model in (managed, resident):
        model.requires_grad_(not frozen)
    backend = Backend("aot_eager")
    with attached(managed):
        for block in managed.blocks:
            block.compile(backend=backend)
        assert_models_agree(managed, resident, step, steps=3)
    for operator in OPERATORS:
        assert backend.count(operator) >= 3 * RUNS * 2 * DEPTH


def test_compile_without_the_witness():
    """The first forward is watched, which must not keep it from being compiled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    managed, resident = resident_pair(Model())
    backend = Backend("aot_eager")
    with attached(managed) as manager:
        managed.compile(backend=backend)
        for number in range(3):
            torch.manual_seed(number)
            expected = step(resident)
            torch.manual_seed(number)
            backend.ran.clear()
            for value, other in zip(step(managed), expected, strict=True):
                assert torch.equal(value, other)
            assert backend.count("gelu") == 2 * DEPTH
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0


def test_compile_under_autocast():
    torch.manual_seed(0)
    torch._dynamo.reset()
    managed, resident = resident_pair(Model())

    def autocast_step(model):
        with torch.autocast(sides.DEVICE, torch.bfloat16):
            y = model(torch.randn(3, 32))
        y.float().square().sum().backward()
        return [y]

    backend = Backend("aot_eager")
    with attached(managed):
        managed.compile(backend=backend)
        assert_models_agree(managed, resident, autocast_step, steps=3)
    assert backend.count("gelu") == 3 * RUNS * DEPTH


def test_a_model_that_waits_for_its_first_forward_keeps_nothing_from_being_compiled():
    """A text encoder whose embeddings are cached may never be called."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    managed, resident = resident_pair(Model())
    backend = Backend("eager")
    with attached(managed), attached(nn.Sequential(nn.Linear(8, 8))):
        managed.compile(backend=backend)
        assert_models_agree(managed, resident, step)
    for operator in OPERATORS:
        assert backend.count(operator) == 2 * RUNS * 2 * DEPTH


def test_one_compiled_block_serves_all_blocks():
    """Managed layers are of one class, so blocks do not differ to the compiler."""
    torch._dynamo.reset()
    counters.clear()
    managed = Model().requires_grad_(False)
    with attached(managed), torch.no_grad():
        for block in managed.blocks:
            block.compile(backend="eager")
        for _ in range(3):
            managed(torch.randn(3, 32))
        once = counters["stats"]["unique_graphs"]
    assert 0 < once <= 3, "of a block, before, between and after its managed layers"


@pytest.mark.parametrize("how", ["model.compile()", "torch.compile(model)"])
def test_a_graph_computes_with_a_weight_that_it_reads(how):
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.second = nn.Linear(16, 16)

        def forward(self, x):
            weights = {name: module.weight for name, module in self.named_children()}
            return F.linear(self.first(x.sin()), weights["second"]).cos()

    torch.manual_seed(0)
    torch._dynamo.reset()
    managed, resident = resident_pair(Direct())
    x = torch.randn(2, 16)
    expected = resident(x)
    with attached(managed) as manager:
        called = compiled(managed, how, "eager")
        assert torch.equal(called(x), expected)
        with Witness():
            assert torch.equal(called(x), expected)
        called(x).sum().backward()
        resident(x).sum().backward()
        assert_same(gradients(managed), gradients(resident))
        assert manager.resident == {}
