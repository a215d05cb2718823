"""Training where the driver collects work before it hands it to the device: Windows' (WDDM) does.

Same bits, no step that never ends, copies that still overlap with the work before them, and figures
that are figures.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from equality import assert_models_agree, assert_same, attached, gradients, resident_pair
from torch import nn
from torch.utils.checkpoint import checkpoint

from oracle_offload.host.sizes import MIB
from oracle_offload.model.witness import Witness

WIDTH = 128


@pytest.fixture(autouse=True)
def late(sim):
    """The engine asks when it is created, so before any attach."""
    sim.late_submission(True)


class Block(nn.Module):
    """A layer, a convolution, and a module that is lent its weights; perhaps a weight to train."""

    def __init__(self, trainable):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.rnn = nn.GRU(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH).requires_grad_(trainable)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = self.conv(x.reshape(4, 4, -1, 16)).reshape(-1, WIDTH)
        return self.last(self.rnn(x)[0])


class Model(nn.Module):
    """Blocks, perhaps checkpointed, between adapters that are trained on the device."""

    def __init__(self, trainable, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Block(trainable) for _ in range(4))
        for block in self.blocks:
            for part in (block.first, block.conv, block.rnn):
                part.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = x * self.scale
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def step(model):
    torch.manual_seed(1)
    x = torch.randn(16, WIDTH).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    found = [y, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]
    model.zero_grad()
    return found


@pytest.mark.parametrize("lock", ["all", "some", "none"])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("trainable", [False, True], ids=["adapter", "weights"])
def test_training_has_the_residents_bits(sim, lock, reentrant, trainable):
    """`assert_models_agree` runs each step alone and under the witness."""
    torch.manual_seed(0)
    managed, resident = resident_pair(Model(trainable, reentrant))
    quota = {"all": 2**40, "some": MIB, "none": 0}[lock]
    with sim.lock_quota(quota), attached(managed) as manager:
        assert len(manager.layers) == 4 * 4
        assert_models_agree(managed, resident, step, steps=3)
        stats = manager.state.engine.stats()
        assert (stats["pageable_bytes"] > 0) == (lock != "all")
        assert (stats["locked_bytes"] > 0) == (lock != "none")
        assert stats["prefetches"] > 0 and stats["prefetch_failures"] == 0


def trained(late, sim, witness):
    """Return what two steps give, seconds of each stall of the forwards, and the summary's figures.

    The host has other work before each layer, in which the copy of its weights can travel.
    """
    sim.late_submission(late)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).requires_grad_(False)
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: sim.advance(1e-3))
    stalls_s = []
    with attached(model) as manager:
        engine = manager.state.engine
        with Witness(clock=True) if witness else contextlib.nullcontext():
            for _ in range(3):
                x = torch.ones(256, 1024, requires_grad=True)
                engine.trace_start()
                y = model(x)
                rows = engine.trace_stop()
                y.square().sum().backward()
                stalls_s += [
                    row["end_s"] - row["start_s"] for row in rows if row["kind"] == "stall"
                ]
        (usage,) = manager.memory_summary().devices[0].models
        return x.grad, stalls_s, sim.finish(), engine.stats(), usage


@pytest.mark.parametrize("witness", [False, True])
def test_copies_overlap_as_they_do_without_it_and_stalls_are_counted(sim, witness):
    """What the driver only collects would begin when its layer is called: each would stall."""
    expected, at_once_s, _, at_once, _ = trained(False, sim, witness)
    found, late_s, elapsed_s, counted, usage = trained(True, sim, witness)
    assert_same(found, expected)
    assert counted["prefetches"] == at_once["prefetches"] > 0
    assert len(late_s) == len(at_once_s) > 8
    assert sum(late_s) <= sum(at_once_s) + 50e-6, f"{late_s} instead of {at_once_s}"
    assert 0 < counted["timed_waits"] <= counted["waits"]
    assert counted["stalls"] <= counted["timed_waits"]
    assert 0 <= counted["stall_seconds"] <= elapsed_s
    assert math.isfinite(usage.stall_s) and 0 <= usage.stall_s <= elapsed_s


def test_an_optimizer_steps_between_backwards_that_accumulate(sim):
    torch.manual_seed(0)
    managed, resident = resident_pair(Model(True, None))
    with attached(managed):
        for model in (managed, resident):
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            for number in range(4):
                torch.manual_seed(number)
                model(torch.randn(16, WIDTH)).square().sum().backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        assert_same(gradients(managed), gradients(resident))
        assert_same(list(managed.parameters()), list(resident.parameters()))
