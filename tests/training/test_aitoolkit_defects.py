"""Where AI-Toolkit's own memory manager fails; docs/ai-toolkit.md has the table, and more tests."""

from __future__ import annotations

import contextlib
import logging
import random
import time

import pytest
import torch
from equality import assert_same
from models import Parts
from torch import nn

import oracle_offload
from oracle_offload.aitoolkit import MemoryManager, sync_grad_transfers
from oracle_offload.engine import simulator


def h2d_bytes():
    return simulator.stats().h2d_bytes


def weight_bytes(model):
    return sum(parameter.nbytes for parameter in model.parameters())


class Attached:
    """Attach a copy of a model; its weights must have travelled by the end."""

    def __init__(self, model, at_least=1, device="cpu", **options):
        self.model, self.at_least, self.device, self.options = model, at_least, device, options

    def __enter__(self):
        self.before = h2d_bytes()
        assert MemoryManager.attach(self.model, self.device, **self.options) is None
        manager = self.model._memory_manager
        assert len(manager.layers) >= self.at_least, manager.resident
        return self.model

    def __exit__(self, kind, error, trace):
        moved = h2d_bytes() - self.before
        MemoryManager.detach(self.model)
        assert error is not None or moved > 0, "nothing was streamed"


def linears(count=3, width=32, **options):
    return nn.Sequential(*[nn.Linear(width, width, **options) for _ in range(count)])


# 1
@pytest.mark.parametrize("hooks", [False, True], ids=["two uses", "with hooks and accumulation"])
def test_a_trained_layer_used_twice_in_one_graph(sim, hooks):
    sim.slow_link()
    results = []
    for managed in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(32, 32)
        layer.weight = nn.Parameter(torch.randn(32, 32).t())  # not contiguous
        model = nn.Sequential(layer, nn.Tanh())
        seen, added = [], []
        if hooks:
            layer.weight.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
            layer.bias.register_post_accumulate_grad_hook(
                lambda p, added=added: added.append(p.grad.clone())
            )

        def train(model=model, layer=layer, seen=seen, added=added):
            for _ in range(2):  # the second accumulates
                y = model(model(torch.ones(3, 32)))
                y.sum().backward()
                sync_grad_transfers()
            return [layer.weight.grad, layer.bias.grad, *seen, *added]

        with Attached(model) if managed else contextlib.nullcontext():
            results.append(train())
    assert_same(results[1], results[0])


# 4
def test_linears_inside_norms_are_managed_and_stay():
    class AdaLayerNormZero(Parts):
        pass

    def compute(parts, x):
        scale, shift = parts.linear(x).chunk(2, dim=-1)
        return parts.norm(x) * scale + shift

    norm = AdaLayerNormZero(compute, linear=nn.Linear(32, 64), norm=nn.LayerNorm(32))
    model = nn.Sequential(norm, nn.Linear(32, 32))
    x = torch.randn(2, 32)
    expected = model(x)
    with Attached(model, 2):
        assert_same(model(x), expected)
        model.to("meta")
        moved = {name for name, p in model.named_parameters() if p.is_meta}
        assert moved == {"0.norm.weight", "0.norm.bias"}


# 7
def test_classes_that_are_only_named_linear():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x, gain=1.0):
            return x * self.weight * gain

    def compute(parts, x):
        return parts.plain(input=parts.odd(x, gain=3.0))

    model = Parts(compute, odd=Linear(), plain=nn.Linear(8, 8))
    x = torch.randn(2, 8)
    expected = model(x)
    with Attached(model, 1):
        assert_same(model(x), expected)
        assert not hasattr(model.odd, "_layer_memory_manager")


# 10
def test_the_arena_is_bounded_in_bytes():
    model = nn.Sequential(*linears(8, 128), nn.Linear(128, 1280), nn.Linear(1280, 1))
    with Attached(model, 10):
        x = torch.randn(2, 128, requires_grad=True)
        for _ in range(3):
            model(x).sum().backward()
        summary = oracle_offload.memory_summary(model=model).to_dict()["devices"][0]
        largest = model[8].weight.nbytes + model[8].bias.nbytes
        assert summary["arena_bytes"] <= 2 * largest + 4096


# 11
def test_locked_bytes_are_those_of_the_weights():
    model = linears(8, 132, bias=False)  # no power of two
    with Attached(model, 8):
        model(torch.ones(1, 132))
        summary = oracle_offload.memory_summary(model=model).to_dict()["devices"][0]
        assert weight_bytes(model) <= summary["locked_bytes"] <= 1.02 * weight_bytes(model) + 4096
        assert summary["pageable_bytes"] == 0


def test_memory_that_is_not_locked_is_reported_once(caplog):
    caplog.set_level(logging.WARNING, logger="oracle_offload")
    model = linears()
    x = torch.ones(2, 32)
    expected = model(x)
    simulator.set_fault("cuMemHostRegister", 1, 2, lasting=True)
    with Attached(model, 3):
        assert_same([model(x), model(x)], [expected, expected])
    told = [r for r in caplog.records if "does not page-lock" in r.getMessage()]
    assert len(told) == 1


# 12
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.91, 1.0])
def test_no_random_number_is_drawn(share):
    random.seed(0)
    states = random.getstate(), torch.get_rng_state()
    model = linears(20, 64)
    torch.set_rng_state(states[1])
    seen = []
    for _ in range(2):
        with Attached(model, 20 * share, offload_percent=share):
            model(torch.ones(1, 64))
            manager = model._memory_manager
            seen.append((manager.attachment.managed_bytes, sorted(manager.resident)))
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    unit = 4 * 64 * 65
    unit += -unit % 256
    assert seen[0] == seen[1]
    assert 0 <= seen[0][0] - share * 20 * unit <= 64 * 1024, "small layers share a unit"
    assert len(seen[0][1]) == 2 * (20 - seen[0][0] // unit), "the others stay on the device"


# 13
def test_casts_lock_again_and_keep_integers():
    model = nn.Sequential(linears(3, 256), nn.LayerNorm(256))
    model.register_buffer("index", torch.arange(3))
    parent = nn.Sequential(model)
    x = torch.randn(2, 256)
    with Attached(model, 3, ignore_modules=[model.index]):
        for cast, dtype in (
            (lambda: model.to(torch.bfloat16), torch.bfloat16),
            (model.half, torch.float16),
            (lambda: parent.to("cpu", torch.float32), torch.float32),
        ):
            cast()
            assert {p.dtype for p in model.parameters()} == {dtype}
            assert model.index.dtype is torch.int64
            model(x.to(dtype))
            summary = oracle_offload.memory_summary(model=model).to_dict()["devices"][0]
            managed = weight_bytes(model[0])
            assert managed <= summary["locked_bytes"] <= 1.05 * managed
            assert summary["pageable_bytes"] == 0


# 16
def test_asking_for_a_value_does_not_end_prefetch():
    """A trainer that asks ``isfinite`` after each block waits no longer for weights."""
    waits = []
    for asks in (False, True):
        torch.manual_seed(0)
        model = linears(12, 128).requires_grad_(False)
        with Attached(model, 12), torch.no_grad():
            for _ in range(4):
                y = torch.ones(4, 128)
                for layer in model:
                    y = layer(y)
                    if asks:
                        assert torch.isfinite(y).all().item()
            waits.append(model._memory_manager.state.engine.stats()["late"])
    assert waits[0] == waits[1]


# 19
def test_foreign_tensor_classes_are_not_taken_for_weights():
    class Packed(torch.Tensor):
        """As quanto's: a floating dtype to the outside, integers inside."""

    model = linears(2).requires_grad_(False)
    model[1].weight = nn.Parameter(model[1].weight.as_subclass(Packed), requires_grad=False)
    x = torch.ones(2, 32)
    expected = model(x)
    with Attached(model, 1):
        assert [layer.name for layer in model._memory_manager.layers] == ["0"]
        assert "Packed" in model._memory_manager.resident["1.weight"]
        assert_same(torch.Tensor(model(x)), torch.Tensor(expected))


# 20
def test_attach_is_linear_in_layers_and_ignored_tensors():
    """Six times the layers take about six times as long; not thirty-six."""

    def seconds(count):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(count)])
        ignored = [nn.Parameter(torch.zeros(2)) for _ in range(count)]
        for index, parameter in enumerate(ignored):
            model[index].register_parameter("table", parameter)
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            with Attached(model, count, ignore_modules=ignored):
                best = min(best, time.process_time() - began)
                model(torch.ones(1, 8))
        return best

    seconds(50)
    assert seconds(600) < 6 * 2.5 * seconds(100) + 0.05
