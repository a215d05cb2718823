"""torch.compile: what is around managed layers is in graphs, which break at those layers only."""

from __future__ import annotations

import re

import capturing
import pytest
import sides
import torch
from capturing import Checkpointed, compiled
from equality import RUNS, assert_models_agree, assert_same, attached, gradients, resident_pair
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from oracle_offload.model.witness import Witness

pytestmark = pytest.mark.usefixtures("made_there", "from_the_start")
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


def model_of(checkpointing=""):
    return Checkpointed([Block() for _ in range(DEPTH)], nn.Linear(32, 8), checkpointing)


def step(model):
    x = torch.randn(3, 32, requires_grad=True)
    y = model(x)
    y.square().sum().backward()
    with torch.no_grad():
        sampled = model(x + 1)
    return [y, sampled, x.grad]


class Backend(capturing.Backend):
    """Count any operator of its graphs."""

    def count(self, operator):
        return sum(operator in re.sub("0x[0-9a-f]+", "", call) for call in self.ran)


@pytest.mark.parametrize(
    ("how", "order", "name"),
    [
        ("model.compile", "attach first", "aot_eager"),
        ("model.compile", "compile first", "eager"),
        ("torch.compile", "attach first", "eager"),
        ("torch.compile", "compile first", "aot_eager"),
        ("block.compile", "attach first", "aot_eager"),
        ("block.compile", "compile first", "eager"),
    ],
)
def test_the_operators_between_managed_layers_are_in_graphs(how, order, name):
    managed, resident = resident_pair(model_of())
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
    managed, resident = resident_pair(model_of(checkpointing))
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
    managed, resident = resident_pair(model_of())
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
    managed, resident = resident_pair(model_of())

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
    managed, resident = resident_pair(model_of())
    backend = Backend("eager")
    with attached(managed), attached(nn.Sequential(nn.Linear(8, 8))):
        managed.compile(backend=backend)
        assert_models_agree(managed, resident, step)
    for operator in OPERATORS:
        assert backend.count(operator) == 2 * RUNS * 2 * DEPTH


def test_one_compiled_block_serves_all_blocks():
    """Managed layers are of one class, so blocks do not differ to the compiler."""
    managed = model_of().requires_grad_(False)
    with attached(managed), torch.no_grad():
        for block in managed.blocks:
            block.compile(backend="eager")
        for _ in range(3):
            managed(torch.randn(3, 32))
        once = counters["stats"]["unique_graphs"]
    assert 0 < once <= 3, "of a block, before, between and after its managed layers"


@pytest.mark.parametrize("how", ["model.compile", "torch.compile"])
def test_a_graph_computes_with_a_weight_that_it_reads(how):
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.second = nn.Linear(16, 16)

        def forward(self, x):
            weights = {name: module.weight for name, module in self.named_children()}
            return F.linear(self.first(x.sin()), weights["second"]).cos()

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
