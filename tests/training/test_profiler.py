"""Ranges of torch's profiler bear the names of layers, while one runs and not otherwise."""

from __future__ import annotations

import contextlib
from collections import OrderedDict

import pytest
import torch
from equality import attached
from models import Tower
from torch import nn
from torch.autograd import profiler

from oracle_offload.model.witness import Witness


def net(reentrant=None):
    """A table, checkpointed blocks, and a cell, which is lent to its own forward."""
    parts = {
        "table": nn.Embedding(200, 128),
        "blocks": Tower(
            *(nn.Sequential(nn.Linear(128, 128)) for _ in range(3)), reentrant=reentrant
        ),
        "cell": nn.GRUCell(128, 128),
    }
    return nn.Sequential(OrderedDict(parts))


IDS = torch.arange(5)


def ranges(model, steps=1, watch=contextlib.nullcontext):
    with profiler.profile() as profile, watch():
        for _ in range(steps):
            model(IDS).sum().backward()
    return [event.name for event in profile.function_events if event.name.endswith(")")]


@pytest.mark.parametrize("watch", [contextlib.nullcontext, Witness])
def test_each_layer_has_its_range_in_forward_and_backward(watch):
    model = net()
    with attached(model, "cpu", offload_percent=0.9) as manager:
        names = {layer.name for layer in manager.attachment.layers}
        assert names == {"blocks.0.0", "blocks.1.0", "blocks.2.0", "cell", "table"}
        found = ranges(model, 2, watch)
    assert {name.rpartition(" (")[0] for name in found} == names
    for name in names:
        assert found.count(f"{name} (forward)") == 2, name
        backward = 2 if name.startswith("blocks") else 0
        assert found.count(f"{name} (backward)") == backward, name


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_says_so(reentrant):
    model = net(reentrant)
    with attached(model, "cpu"):
        found = ranges(model)
    for index in range(3):
        for what in ("forward", "forward again", "backward"):
            assert found.count(f"blocks.{index}.0 ({what})") == 1, (index, what)


def test_the_operator_lies_within_the_range_of_its_layer():
    model = net()
    with attached(model, "cpu"):
        with torch.profiler.profile() as profile:
            model(IDS).sum().backward()
        within = set()
        for event in profile.events():
            outer = event.cpu_parent
            while event.name == "aten::addmm" and outer is not None:
                within.add(outer.name)
                outer = outer.cpu_parent
    assert {f"blocks.{index}.0 (forward)" for index in range(3)} <= within


def test_without_a_profiler_there_is_no_range(monkeypatch):
    def refuse(name):
        raise AssertionError(f"a range {name} without a profiler")

    monkeypatch.setattr(profiler, "record_function", refuse)
    for model in (net(), net(True)):
        with attached(model, "cpu"):
            model(IDS).sum().backward()
    with attached(model, "cpu"), pytest.raises(AssertionError, match="a range table"):
        ranges(model)


def test_a_range_changes_no_bit():
    torch.manual_seed(1)
    plain, profiled = net(), net()
    profiled.load_state_dict(plain.state_dict())
    plain(IDS).sum().backward()
    with attached(profiled, "cpu"):
        ranges(profiled)
        for mine, other in zip(profiled.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
