"""`Budget`: one object for `attach` and `plan`. `set_budget`: another while attached."""

from __future__ import annotations

import gc

import pytest
import torch
from equality import assert_same, attached, resident_pair
from models import Parts
from torch import nn

import oracle_offload
from oracle_offload import Budget, DriverError, OffloadError, _core

LAYER = 256 * 256 * 4
OTHERS = {"ram_budget": "1GiB", "lock": "8MiB", "compress": None}


def deep():
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))


def step(model, device):
    """A step of a batch; return all it has computed."""
    x = torch.ones(4, 256, device=device, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    found = [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return found


def test_one_object_and_its_fields_are_the_same_attach(device):
    model = deep()
    with attached(model, device, vram_budget=3 * LAYER, **OTHERS) as manager:
        asked = manager.budget
        size = manager.attachment.arena.capacity_bytes
        locked = manager.attachment.pieces.in_order()[0].locked_bytes
    assert asked == Budget(vram_budget=3 * LAYER, offload_percent=1.0, **OTHERS)
    with attached(model, device, budget=asked) as manager:
        assert manager.budget is asked
        assert manager.attachment.arena.capacity_bytes == size == 3 * LAYER
        assert manager.attachment.pieces.in_order()[0].locked_bytes == locked > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": "8GiB"}, "budget='8GiB' is no oracle_offload.Budget"),
        ({"budget": Budget(), "lock": "never"}, "lock='never' next to budget="),
        (
            {"budget": Budget(), "vram_budget": "1GiB", "offload_percent": 0.5},
            "offload_percent=0.5, vram_budget='1GiB' next to budget=",
        ),
    ],
)
def test_what_is_given_twice_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        oracle_offload.attach(deep(), "cpu", **options)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("offload_percent", 70, "outside [0, 1]; did you mean 0.7?"),
        ("offload_percent", "1", "not a number in [0, 1]"),
        ("vram_budget", "much", "not a size"),
        ("vram_budget", 0, "must be above zero"),
        ("ram_budget", True, "not a size"),
        ("lock", "sometimes", "neither 'auto' nor 'never', nor a size"),
        ("compress", "zip", "none of None, 'lossless', 'auto'"),
    ],
)
def test_a_field_that_makes_no_sense_is_told_with_its_value(field, value, says):
    with pytest.raises(ValueError) as raised:
        Budget(**{field: value})
    assert str(raised.value).startswith(f"{field}={value!r}") and says in str(raised.value)


@pytest.mark.parametrize("asked", [{"offload_percent": 0.25}, {"vram_budget": 6 * LAYER}])
def test_the_model_computes_the_same_with_each_budget(device, asked):
    resident, model = resident_pair(deep())
    expected = step(resident.to(device), device)
    with attached(model, device) as manager:
        arena, engine = manager.attachment.arena, manager.state.engine
        assert len(manager.layers) == 8 and arena.capacity_bytes == 2 * LAYER
        assert_same(step(model, device), expected)
        before = engine.stats()["h2d_bytes"]
        with manager.set_budget(**asked):
            large = arena.capacity_bytes
            assert large > 4 * LAYER and len(arena.segments) == 1
            assert_same(step(model, device), expected)
            assert engine.stats()["h2d_bytes"] > before, "all copies are made again"
        assert arena.capacity_bytes == 2 * LAYER and manager.budget == Budget(offload_percent=1.0)
        assert_same(step(model, device), expected)


def test_it_holds_from_then_on_without_a_block(device):
    model = deep().requires_grad_(False)
    with attached(model, device) as manager:
        arena = manager.attachment.arena
        manager.set_budget(vram_budget=4 * LAYER)
        gc.collect()  # nothing keeps what it returned
        assert manager.budget.vram_budget == 4 * LAYER and arena.capacity_bytes == 4 * LAYER
        manager.set_budget(Budget(offload_percent=1.0))
        assert arena.capacity_bytes == 2 * LAYER
        manager.set_budget(vram_budget="1GiB")
        assert arena.capacity_bytes == 10 * LAYER, "no more than the model can use"
        step(model, device)
        before = manager.state.engine.stats()["h2d_bytes"]
        step(model, device)
        assert manager.state.engine.stats()["h2d_bytes"] == before, "all of it is there"


@pytest.mark.parametrize("width", [512, 64])
def test_it_places_what_there_is_by_now(device, width):
    """Layers that others have replaced after attach are larger, or smaller, than they were."""
    resident, model = resident_pair(deep().requires_grad_(False))
    resident.to(device)
    with attached(model, device) as manager:
        step(model, device)
        for place, of in ((2, (256, width)), (3, (width, 256))):
            torch.manual_seed(place)
            model[place] = nn.Linear(*of, bias=False).requires_grad_(False)
            resident[place] = nn.Linear(*of, bias=False).requires_grad_(False)
            resident[place].load_state_dict(model[place].state_dict())
        expected = step(resident.to(device), device)
        assert_same(step(model, device), expected)
        assert len(manager.layers) == 8
        arena, managed = manager.attachment.arena, manager.attachment.managed_bytes
        assert managed == 6 * LAYER + 2 * 256 * width * 4
        with manager.set_budget(offload_percent=0.0):
            assert arena.capacity_bytes == managed + arena.floor_bytes
            step(model, device)
            before = manager.state.engine.stats()["h2d_bytes"]
            with torch.no_grad():
                model(torch.ones(4, 256, device=device))
            assert manager.state.engine.stats()["h2d_bytes"] == before, "all of it is there"
        with manager.set_budget(vram_budget="1GiB"):
            assert arena.capacity_bytes == managed + arena.floor_bytes
            assert_same(step(model, device), expected)


def test_a_graph_of_before_ends_with_the_budget_of_after(device):
    resident, model = resident_pair(deep())
    resident.to(device)
    x = torch.ones(4, 256, device=device)
    expected = resident(x).square().mean()
    expected.backward()
    with attached(model, device) as manager:
        loss = model(x).square().mean()
        with manager.set_budget(offload_percent=0.0):
            loss.backward()
        assert_same(loss.detach(), expected.detach())
        for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
            assert_same(ours.grad, theirs.grad)


def test_auto_begins_at_the_floor_and_ends_with_the_block(device):
    model = deep()
    with attached(model, device, vram_budget=6 * LAYER) as manager:
        arena = manager.attachment.arena
        with manager.set_budget(vram_budget="auto"):
            assert arena.capacity_bytes == 2 * LAYER
            assert manager.attachment.auto_budget is not None and arena.may_grow
        assert manager.attachment.auto_budget is None and not arena.may_grow
        assert arena.capacity_bytes == 6 * LAYER


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({}, ValueError, "needs a budget=, an offload_percent= or vram_budget="),
        ({"vram_budget": LAYER}, OffloadError, "the units need 512.00 KiB on the device"),
        ({"vram_budget": "much"}, ValueError, "vram_budget='much' is not a size"),
        ({"budget": Budget(lock="never")}, ValueError, "lock='never': the model was attached"),
        ({"budget": Budget(compress="auto")}, ValueError, "compress='auto': the model was"),
        ({"budget": Budget(ram_budget="1MiB")}, ValueError, "ram_budget='1MiB': the model was"),
        ({"budget": Budget(), "vram_budget": "1GiB"}, ValueError, "next to budget="),
    ],
)
def test_what_cannot_be_changes_nothing(device, asked, error, says):
    model = deep()
    with attached(model, device, vram_budget=4 * LAYER) as manager:
        before = manager.budget
        with pytest.raises(error, match=says):
            manager.set_budget(**asked)
        assert manager.budget is before
        assert manager.attachment.arena.capacity_bytes == 4 * LAYER
        step(model, device)


def test_a_device_without_room_keeps_the_arena_that_it_had(sim):
    sim.change(memory_bytes=6 * LAYER)
    model = deep().requires_grad_(False)
    with attached(model, "cpu") as manager:
        with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
            manager.set_budget(offload_percent=0.0)
        assert manager.attachment.arena.capacity_bytes == 2 * LAYER
        assert manager.budget == Budget(offload_percent=1.0)
        step(model, "cpu")


class Scaled(nn.Module):
    """Computes with a weight that is lent to its forward, and asks for more in it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256, 256))
        self.manager = None
        self.refused = []

    def forward(self, x):
        x = x @ self.scale
        if self.manager is not None:
            with pytest.raises(OffloadError) as raised:
                self.manager.set_budget(offload_percent=0.0)
            self.refused.append(str(raised.value))
        return x


def test_it_is_refused_while_a_call_computes_with_the_model(device):
    model = nn.Sequential(Scaled(), nn.Linear(256, 256))
    resident, model = resident_pair(model)
    expected = step(resident.to(device), device)
    with attached(model, device) as manager:
        size = manager.attachment.arena.capacity_bytes
        model[0].manager = manager
        assert_same(step(model, device), expected)
        assert len(model[0].refused) == 1 and manager.attachment.arena.capacity_bytes == size
        model[0].manager = None
        manager.set_budget(offload_percent=0.0)
        assert_same(step(model, device), expected)


def test_the_end_of_the_block_of_a_detached_model_does_nothing(device):
    model = deep()
    manager = oracle_offload.attach(model, device)
    with manager.set_budget(offload_percent=0.5):
        manager.detach()
    assert not manager.attachment.is_attached


def keeping():
    """Return code of a library that may keep what it has of a weight."""

    def compute(parts, x):
        weight = parts.weight.t()
        if parts.keeps:
            parts.kept = weight.detach()
        return torch.nn.functional.linear(x, weight).tanh()

    return Parts(compute, weight=nn.Parameter(torch.randn(256, 256) / 16), keeps=False, kept=None)


def test_at_the_end_of_the_block_an_error_goes_on_and_the_arena_follows_later(device, caplog):
    model = nn.Sequential(*(keeping() for _ in range(3))).requires_grad_(False)
    x = torch.ones(2, 256, device=device)
    with attached(model, device) as manager:
        arena, before = manager.attachment.arena, manager.budget
        expected, size = model(x), arena.capacity_bytes
        failing = pytest.raises(RuntimeError, match="sampling failed")
        with failing, manager.set_budget(vram_budget="2MiB"):
            model[0].keeps = True
            model(x)
            raise RuntimeError("sampling failed")
        assert manager.budget is before and arena.capacity_bytes > size
        assert "tried again before the next forward that" in caplog.text
        model[0].keeps, model[0].kept = False, None
        gc.collect()
        assert_same(model(x), expected)
        assert_same(model(x.clone().requires_grad_()), expected)
        assert arena.capacity_bytes == size


def test_an_arena_that_is_in_use_keeps_its_size(device):
    """What an arena that follows the steps has added is in a segment of its own."""
    model = deep().requires_grad_(False)
    x = torch.ones(2, 256, device=device)
    with attached(model, device, vram_budget="auto") as manager:
        arena, state = manager.attachment.arena, manager.state
        expected = model(x)
        with state.lock:
            arena.resize(7 * LAYER)
        model(x)
        segments = [segment.nbytes for segment in arena.segments]
        assert len(segments) == 2
        for layer in manager.layers:
            used = state.engine.use(
                layer.member, state.stream(), 0, _core.FORWARD, -1, 0.0, state.stamp_units
            )
            with used, pytest.raises(OffloadError, match="is being computed with"):
                manager.set_budget(vram_budget=4 * LAYER)
            assert sum(segment.nbytes for segment in arena.segments) == 7 * LAYER
            assert arena.capacity_bytes == 7 * LAYER
        assert_same(model(x), expected)
