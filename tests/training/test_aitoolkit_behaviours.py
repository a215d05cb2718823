"""What a drop-in must do; docs/ai-toolkit.md has all of it, and where each is shown."""

from __future__ import annotations

import threading

import pytest
import torch
from equality import assert_same, count_acquires
from models import LoRA
from torch import nn
from torch.utils.checkpoint import checkpoint

from oracle_offload.aitoolkit import MemoryManager, sync_grad_transfers
from oracle_offload.engine import simulator

WIDTH = 256  # each layer is a unit of its own


def chain(layers=6, width=WIDTH):
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*made)


def test_behaviour_3_an_optimizer_from_before_attach_trains():
    """Parameters stay the same objects through attach, casts, moves and detach."""
    results = []
    for managed in (False, True):
        model = chain()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        before = [id(p) for p in model.parameters()]
        if managed:
            MemoryManager.attach(model, "cpu")
            assert len(model._memory_manager.layers) == 6
        model.to("cpu")
        moved = simulator.stats().h2d_bytes
        for number in range(3):
            torch.manual_seed(number)
            model(torch.randn(2, WIDTH)).square().mean().backward()
            sync_grad_transfers()
            optimizer.step()
            optimizer.zero_grad()
        assert (simulator.stats().h2d_bytes > moved) is managed
        MemoryManager.detach(model)
        assert [id(p) for p in model.parameters()] == before
        assert not any("weight" in part.__dict__ for part in model.modules())
        x = torch.ones(1, WIDTH)
        trained = model(x)
        trained.sum().backward()
        optimizer.step()
        assert not torch.equal(model(x), trained), "an optimizer counts after detach"
        model.load_state_dict(chain().state_dict())
        assert not torch.equal(model(x), trained)
        assert_same(model(x), chain()(x))
        results.append(trained)
    assert_same(results[1], results[0])


def test_behaviour_4_adapters_before_adapters_survive_attach_detach_and_free():
    """A LoRA over a LoRA, one applied before attach and one after it."""
    model = chain().requires_grad_(False)
    inner = LoRA(model[1][0])
    x = torch.randn(2, WIDTH)
    plain = chain()(x)
    MemoryManager.attach(model, "cpu")
    assert len(model._memory_manager.layers) == 6
    outer = LoRA(model[1][0])
    before = count_acquires()
    expected = model(x)
    assert count_acquires() - before == 6
    assert not torch.equal(expected, plain)
    expected.sum().backward()
    assert inner.up.weight.grad.any() and outer.up.weight.grad.any()
    MemoryManager.detach(model)
    assert_same(model(x), expected)
    assert model[1][0].forward == outer.forward and outer.org_forward == inner.forward
    MemoryManager.attach(model, "cpu")
    assert_same(model(x), expected)
    MemoryManager.free(model)
    assert not inner.up.weight.is_meta and not outer.up.weight.is_meta


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_behaviours_11_and_12_a_checkpointed_step_allocates_nothing_and_copies_twice(share):
    model = chain(12).requires_grad_(False)
    MemoryManager.attach(model, "cpu", offload_percent=share)
    manager = model._memory_manager
    assert len(manager.layers) >= 12 * share

    def step():
        y = torch.ones(2, WIDTH, requires_grad=True)
        for block in model:
            y = checkpoint(block, y, use_reentrant=False)
        y.sum().backward()

    for _ in range(4):
        step()
    engine, before, driver = manager.state.engine, manager.state.engine.stats(), simulator.stats()
    step()
    after, now = engine.stats(), simulator.stats()
    for count in ("allocations", "host_waits"):
        assert after[count] == before[count], count
    moved = after["h2d_bytes"] - before["h2d_bytes"]
    assert moved == now.h2d_bytes - driver.h2d_bytes, "the driver copied what was counted"
    weights = manager.attachment.weight_bytes
    assert share * weights / 2 < moved <= 2 * weights
    MemoryManager.detach(model)


@pytest.mark.parametrize("gbps", [0.5, 25.0], ids=["a slow link", "a fast link"])
def test_behaviour_13_copies_overlap_with_computing(sim, gbps):
    """A step takes no more than 1.1 times the longer of computing and of copying."""
    sim.change(link_gbps=gbps)
    model = chain(12, 512).requires_grad_(False)
    MemoryManager.attach(model, "cpu")
    assert len(model._memory_manager.layers) == 12
    x = torch.randn(256, 512)

    def step():
        y = x.clone().requires_grad_()
        for block in model:
            y = checkpoint(block, y, use_reentrant=False)
        y.sum().backward()

    for _ in range(4):
        step()
    begun, before = simulator.finish(), simulator.stats()
    for _ in range(3):
        step()
    seconds, after = simulator.finish() - begun, simulator.stats()
    computing = after.compute_busy_s - before.compute_busy_s
    copying = after.h2d_busy_s - before.h2d_busy_s
    assert min(computing, copying) > 0
    assert seconds <= 1.1 * max(computing, copying)
    MemoryManager.detach(model)


@pytest.mark.slow
def test_behaviour_14_two_hundred_steps_of_two_models_in_two_threads(sim):
    """Trained layers, each used twice in a graph, accumulation, hooks, copies always under way."""
    sim.slow_link()
    results = {}

    def train(key, model, managed):
        if managed:
            MemoryManager.attach(model, "cpu")
            assert len(model._memory_manager.layers) == 3
        seen = []
        model[0][0].weight.register_hook(lambda grad: seen.append(grad.clone()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(key)
        for _ in range(200):
            for _ in range(2):
                x = torch.randn(2, WIDTH, generator=generator)
                model(model(x)).square().mean().backward()
            sync_grad_transfers()
            optimizer.step()
            optimizer.zero_grad()
        results[key, managed] = [seen[-1], *(p.detach().clone() for p in model.parameters())]
        MemoryManager.detach(model)

    for managed in (False, True):
        moved = simulator.stats().h2d_bytes
        models = [chain(3) for _ in range(2)]
        threads = [
            threading.Thread(target=train, args=(key, model, managed))
            for key, model in enumerate(models)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (simulator.stats().h2d_bytes > moved) is managed
    for key in (0, 1):
        assert_same(results[key, True], results[key, False])
