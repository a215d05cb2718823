"""What an attachment asks of its device and of others: least bytes, budgets, ends that wait."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref

import pytest
import torch
from equality import Through, attached
from models import Parts
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload.compress import coder
from oracle_offload.engine import devices, engines
from oracle_offload.host.sizes import format_size
from oracle_offload.model import masters
from oracle_offload.model.arena import Arena
from oracle_offload.model.attachment import close_leftovers
from oracle_offload.model.auto_budget import AutoBudget, Change, Reading

LAYER = 64 << 10  # bytes of one of `tower`, a unit of its own
FLOOR = 2 * LAYER


def tower(depth=8):
    torch.manual_seed(0)
    layers = (nn.Linear(128, 128, bias=False) for _ in range(depth))
    return nn.Sequential(*layers).requires_grad_(False)


def step(*models):
    """Let an optimizer step after a forward and backward of all."""
    for model in models:
        model(torch.ones(1, 128, requires_grad=True)).sum().backward()
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()


# ---- the least bytes of a step ----


def test_the_least_bytes_of_a_step_are_what_finds_no_room():
    for room in (2 * LAYER, 3 * LAYER + LAYER // 2, 8 * LAYER):
        with attached(tower(), "cpu", vram_budget=room) as manager:
            assert manager.attachment.x_min_bytes() == 2 * (8 * LAYER - room)


def test_a_sweep_counts_what_it_needs():
    """Behind what trains no backward needs a weight, and samples have no backward."""
    room = 3 * LAYER
    model = tower()
    with attached(model, "cpu", vram_budget=room) as manager:
        held, x = manager.attachment, torch.ones(1, 128)
        model[4].register_forward_pre_hook(lambda _, given: given[0].requires_grad_())
        model(x)
        assert held.x_min_bytes() == 2 * (8 * LAYER - room), "no backward was seen yet"
        for _ in range(4):
            model(x).sum().backward()
            torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
        assert held.x_min_bytes() == (8 * LAYER - room) + (4 * LAYER - room)
        moved = manager.memory_summary().devices[0].models[0].step_h2d_bytes
        assert held.x_min_bytes() <= moved <= 1.25 * held.x_min_bytes()
    with attached(model, "cpu", vram_budget=room) as manager, torch.no_grad():
        model(torch.ones(1, 128))
        assert manager.attachment.x_min_bytes() == 8 * LAYER - room


def test_of_compressed_weights_those_travel_that_get_smallest(cache_folder):
    model = nn.Sequential(
        nn.Linear(512, 1024, bias=False).bfloat16(), nn.Linear(1024, 256, bias=False).bfloat16()
    ).requires_grad_(False)
    with torch.no_grad():  # no two exponents are alike often: it gets hardly smaller
        model[1].weight.copy_(torch.exp(40 * torch.rand(256, 1024) - 20))
    with attached(model, "cpu", compress="lossless") as manager:
        held = manager.attachment
        large, small = (layer.link_bytes() for layer in manager.layers)
        assert large[1] / large[0] < small[1] / small[0] and large[1] > small[1]
        held.arena.capacity_bytes, given = small[0], held.arena.capacity_bytes
        least = held.x_min_bytes()
        held.arena.capacity_bytes = given
    assert least == 2 * large[1]


# ---- what the budget is given, and what follows ----


@pytest.fixture
def told(monkeypatch):
    """What budgets were given, in order."""
    rows = []
    after_step = AutoBudget.after_step

    def telling(budget, *arguments):
        rows.append((budget, *arguments))
        return after_step(budget, *arguments)

    monkeypatch.setattr(AutoBudget, "after_step", telling)
    return rows


@pytest.fixture
def peaks(monkeypatch):
    """How often peaks were begun."""
    begun = []
    monkeypatch.setattr(devices.Simulated, "begin_peak", lambda kind: begun.append(kind))
    return begun


def test_a_budget_is_told_what_the_device_has_and_how_many_grow(sim, told, peaks, monkeypatch):
    sim.change(memory_bytes=64 << 20)
    monkeypatch.setattr(devices.Simulated, "cached_bytes", lambda kind: 4096)
    one, other, plain = tower(), tower(4), tower(2)
    with (
        attached(one, vram_budget="auto", ram_budget=6 * LAYER) as first,
        attached(other, vram_budget="auto") as second,
        attached(plain) as third,
    ):
        arenas = [manager.attachment.arena for manager in (first, second, third)]
        budgets = [manager.attachment.auto_budget for manager in (first, second)]
        free, total = first.state.engine.mem_info()
        most = [6 * LAYER + FLOOR, 4 * LAYER + FLOOR]
        step(one, other, plain)
        sizes = [FLOOR + 3 * LAYER, FLOOR + 2 * LAYER]  # half of what is left for each of two
        assert [arena.capacity_bytes for arena in arenas] == [*sizes, FLOOR]
        rows = zip(budgets, [0, 3 * LAYER], most, strict=True)
        assert told == [
            (
                budget,
                Reading(
                    total, free - taken, 3 * FLOOR + taken + 4096, 3 * FLOOR + taken + 2 * LAYER, 0
                ),
                FLOOR, FLOOR, largest, 2 * LAYER, 2,
            )
            for budget, taken, largest in rows
        ]  # fmt: skip
        assert len(peaks) == 2 * 2, "one as the window begins, one as the arena changes"
        assert [(budget.changes, budget.last) for budget in budgets] == [
            (1, Change(size, "a step left room")) for size in sizes
        ]
        # The second arena has changed since the first budget saw a step: it begins again.
        step(one, other, plain)
        assert [row[0] for row in told[2:]] == [budgets[1]] and budgets[0].window == 0
        for _ in range(20):
            told.clear()
            step(one, other, plain)
        assert [arena.capacity_bytes for arena in arenas] == [*most, FLOOR]
        assert [row[0] for row in told] == budgets
        assert [row[-1] for row in told] == [1, 1], "no other arena grows any more"
        begun = len(peaks)
        step(one, other, plain)
        assert len(peaks) == begun, "in the midst of a window nothing begins"


def test_a_budget_begins_anew_where_another_model_came(sim, told, peaks):
    sim.change(memory_bytes=FLOOR + LAYER)
    model = tower()
    with attached(model, vram_budget="auto") as manager:
        step(model)
        assert len(told) == 1 and manager.attachment.auto_budget.changes == 0, "there is no room"
        with attached(nn.Linear(8, 8)):
            step(model)
            assert len(told) == 1 and manager.attachment.auto_budget.window == 0
            assert len(peaks) == 2
            step(model)
            assert len(told) == 2


def test_a_budget_is_told_of_the_block_that_the_step_has_shown(told):
    def compute(parts, x):
        return checkpoint(parts.inner, x.requires_grad_(), use_reentrant=False)

    model = Parts(compute, inner=tower().requires_grad_())
    with attached(model, vram_budget="auto"):
        step(model)
    ((_, _, capacity, floor, *_),) = told
    assert capacity == floor == 8 * LAYER


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError, MemoryError, oracle_offload.OffloadError]
)
def test_an_arena_that_cannot_grow_is_told_in_a_line_and_counted(monkeypatch, caplog, error):
    class Observer:
        def __getattr__(self, name):
            return (lambda *told: seen.append(told)) if name == "resized" else lambda *told: None

    caplog.set_level(logging.INFO, logger="oracle_offload")
    seen, model = [], tower()
    observer, lend = Observer(), Arena._lend
    wanted = [format_size(size) for size in (8 * LAYER + FLOOR, FLOOR)]
    with attached(model, vram_budget="auto") as manager:

        def refuse(*arguments):
            raise error("no room")

        monkeypatch.setattr(Arena, "_lend", refuse)
        engines.observe(observer)
        caplog.clear()
        step(model)
        assert caplog.messages == [f"Sequential: the arena should be {wanted[0]}: no room"]
        assert not seen and manager.attachment.auto_budget.changes == 1
        monkeypatch.setattr(Arena, "_lend", lend)
        for _ in range(10):
            step(model)
        engines.ignore(observer)
        held = manager.attachment.arena.capacity_bytes
        assert held > FLOOR
        assert caplog.messages[1:] == [
            f"Sequential: the arena is {format_size(held)} now, it was {wanted[1]}: a step left "
            f"room; look-ahead is {held // LAYER - 1} units"
        ]
        assert seen == [(manager.state, "Sequential", FLOOR, held, "a step left room")]


# ---- what is trained ----


def test_the_engine_knows_before_each_step_which_units_are_trained(monkeypatch):
    class Engine(Through):
        def set_trainable(self, unit, trained):
            known[unit] = trained
            self.real.set_trainable(unit, trained)

    model = tower(3).requires_grad_()
    with attached(model) as manager:
        held = manager.attachment
        known = dict.fromkeys((layer.unit for layer in manager.layers), True)
        monkeypatch.setattr(manager.state, "engine", Engine(manager.state.engine))
        for which in ((1, 0, 0), (0, 1, 0), (0, 1, 1), (0, 0, 0), (1, 1, 1)):
            for layer, trained in zip(model, which, strict=True):
                layer.requires_grad_(bool(trained))
            step(model)
            assert list(known.values()) == [bool(trained) for trained in which]
            assert held.before_step() is any(which)


# ---- layers that were lost ----


class Packed(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.packed.float() / 8, self.bias)


def test_of_layers_that_are_lost_the_first_is_told(caplog):
    model = tower(3)
    with attached(model) as manager:
        step(model)
        for layer in model[:2]:
            layer.__class__ = Packed
            layer.packed = layer._parameters.pop("weight").detach().mul(8).round().to(torch.int8)
        for _ in range(2):
            step(model)
        assert [layer.name for layer in manager.layers] == ["2"]
        (said,) = (text for text in caplog.messages if "is not managed any more" in text)
    assert said.startswith("Sequential: layer '0' is not managed any more (")
    assert said.endswith(
        "). What it holds now stays on the device; manager.resident lists this and every further "
        "one."
    )


# ---- ends that wait ----


def test_a_detached_model_whose_arena_another_computes_in_takes_part_in_nothing(caplog):
    caplog.set_level(logging.INFO, logger="oracle_offload")
    one, other = tower(2), tower(6)
    first, second = oracle_offload.attach(one, "cpu"), oracle_offload.attach(other, "cpu")
    state, held = first.state, first.attachment
    segments = [range(s.address, s.address + s.nbytes) for s in held.arena.segments]
    stream, tickets = state.stream(), []
    for layer in second.layers:
        ticket, address, _ = state.engine.acquire(layer.member, stream, layer.stamp(), 0, -1, 0.0)
        tickets.append(ticket)
        if any(address in segment for segment in segments):
            break
    else:
        pytest.fail("nothing is in the arena of the other model")
    first.detach()
    assert "Sequential is detached, but some of its memory could not be given back" in caplog.text
    assert held in state.listeners and not held.is_attached
    assert held.before_step() is False
    steps = held.traffic.steps
    step(one)
    assert held.traffic.steps == steps and second.attachment.traffic.steps == 1
    for ticket in tickets:
        state.engine.release(ticket, stream)
    close_leftovers(state, but=held)
    assert held in state.listeners
    close_leftovers(state)
    assert held not in state.listeners
    second.detach()


@pytest.mark.parametrize("when", ["pass", "detach", "attach"])
def test_what_was_left_of_a_deleted_model_goes_at_the_next(when):
    """Left, because another thread could have held a lock as it went."""
    keeper, model = tower(2).requires_grad_(), tower(2)
    with attached(keeper) as manager:
        left = oracle_offload.attach(model, "cpu").attachment
        with manager.state.lock:
            del model
        assert left in manager.state.listeners and left.is_attached
        if when == "pass":
            step(keeper)
            keeper(torch.ones(1, 128))
        with attached(tower(2)) if when == "attach" else contextlib.nullcontext():
            gone = left not in manager.state.listeners and not left.is_attached
            assert gone is (when != "detach")
    assert not left.is_attached and not engines.open_states()


# ---- masters that are others now ----


def told_of_replaced(caplog):
    return [text for text in caplog.messages if "of its weights were replaced by memory" in text]


def test_weights_that_were_swapped_for_a_whole_step_are_told_of_once(caplog):
    model = tower(2)
    others = [torch.randn_like(layer.weight) for layer in model]
    with attached(model):
        step(model)
        own = [layer.weight.data for layer in model]

        def swap(tensors):
            for layer, tensor in zip(model, tensors, strict=True):
                layer.weight.data = tensor

        swap(others)
        model(torch.ones(1, 128))
        swap(own)
        step(model)
        assert not told_of_replaced(caplog), "they came back before the step was over"
        for tensors in (others, [tensor.clone() for tensor in others]):
            swap(tensors)
            step(model)
            (said,) = told_of_replaced(caplog)
            assert said.startswith("Sequential: 128.00 KiB of its weights were replaced by memory")


def test_before_a_step_those_weights_leave_their_codes_that_were_written_or_are_trained(
    cache_folder, caplog
):
    layers = (nn.Linear(256, 256, bias=False) for _ in range(4))
    model = nn.Sequential(*layers).bfloat16().requires_grad_(False)

    def coded_after_a_step():
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
        return [layer.name for layer in manager.layers if layer.coded]

    with attached(model, compress="lossless") as manager:
        assert coded_after_a_step() == ["0", "1", "2", "3"]
        model[0].weight.data.mul_(2)
        assert coded_after_a_step() == ["1", "2", "3"]
        model[1].requires_grad_()
        assert coded_after_a_step() == ["2", "3"] == coded_after_a_step()
        assert manager.attachment.trained_units == {manager.layers[1].unit}
    (told,) = (text for text in caplog.messages if "it is not compressed any more" in text)
    assert "layer '0'" in told, "it is said once, of the first"


def test_a_step_knows_the_units_of_what_left_its_codes_for_it(cache_folder, monkeypatch):
    """A layer that shares a unit gets one of its own when its codes go: that one is trained."""
    monkeypatch.setattr(coder, "SMALLEST_BYTES", 1)
    layers = (nn.Linear(96, 96, bias=False) for _ in range(3))
    model = nn.Sequential(*layers).bfloat16().requires_grad_(False)
    with attached(model, compress="lossless") as manager:
        first, middle, last = manager.layers
        assert first.unit == middle.unit == last.unit and middle.coded
        model[1].requires_grad_()
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
        assert not middle.coded and len({first.unit, middle.unit, last.unit}) == 3
        assert manager.attachment.trained_units == {middle.unit}


# ---- memory that goes back ----


def test_the_memory_of_a_segment_that_is_exchanged_goes_though_layers_have_computed_in_it():
    model = tower(4)
    with attached(model) as manager:
        arena = manager.attachment.arena
        size = arena.capacity_bytes
        arena.resize(size + 4 * LAYER)
        model(torch.ones(1, 128))
        added = arena.segments[-1]
        assert any(added.address <= at < added.address + added.nbytes
                   for layer in manager.layers for at in layer.views)  # fmt: skip
        memory = StorageWeakRef(added.storage)
        del added
        arena.resize(size)
        gc.collect()
        assert memory.expired()


def test_where_nothing_is_trained_any_more_no_memory_is_locked_for_gradients():
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    with attached(model) as manager:
        optimizer = torch.optim.SGD(model.parameters())

        def locked_after_a_step():
            model(torch.ones(1, 512, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return manager.state.engine.stats()["locked_bytes"]

        nbytes = model[0].weight.nbytes
        assert [locked_after_a_step() for _ in range(2)] == [2 * nbytes, 2 * nbytes]
        model.requires_grad_(False)
        assert locked_after_a_step() == nbytes


def test_a_defect_at_the_end_of_a_deleted_model_is_a_warning_with_its_traceback(
    monkeypatch, caplog
):
    caplog.set_level(logging.INFO, logger="oracle_offload")

    def fail(arena):
        raise RuntimeError("a defect")

    with attached(tower(2)) as keeper:
        model = tower(2)
        left = oracle_offload.attach(model, "cpu").attachment
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Arena, "take_back", fail)
            del model
            gc.collect()
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and record.exc_info is not None
        assert "could not be given back yet: a defect. It is tried again" in record.getMessage()
        assert left in keeper.state.listeners
    assert not engines.open_states()


def test_the_memory_of_a_layer_that_is_let_go_goes_at_once(monkeypatch):
    monkeypatch.setattr(masters, "PIECE_BYTES", 1)  # a piece for each unit
    model = tower(2)
    expected = model(torch.ones(1, 128))
    with attached(model) as manager:
        first, second = manager.attachment.buffers
        assert manager.attachment.let_go(manager.layers[0], "a reason")
        assert manager.attachment.buffers == [second] and not first.locked
        assert torch.equal(model(torch.ones(1, 128)), expected)


def test_memory_for_gradients_goes_with_its_model():
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    with attached(tower(2)) as keeper:
        before = keeper.state.engine.stats()["locked_bytes"]
        with attached(model) as manager:
            model(torch.ones(1, 512)).sum().backward()
            locked = manager.state.engine.stats()["locked_bytes"]
            assert locked == before + 2 * model[0].weight.nbytes
        assert keeper.state.engine.stats()["locked_bytes"] == before


# ---- models that were built under inference mode ----


class Mixed(nn.Module):
    """Layers of several kinds, weights that Python holds weakly, a buffer, tied weights."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
        self.out.weight = self.table.weight
        self.convolution = nn.Conv1d(64, 64, 3, padding=1)
        self.register_buffer("scale", torch.full((64,), 2.0))

    def forward(self, x):
        x = self.convolution(self.table(x).mT).mT
        return self.out(torch.relu(x) * self.scale)


def infer(model, x, how):
    with {"inference": torch.inference_mode, "no_grad": torch.no_grad}[how]():
        return model(x).cpu().clone()


@pytest.mark.parametrize("how", ["inference", "no_grad"])
def test_a_model_built_under_inference_mode_is_used_and_trained(device, how, nothing_is_small):
    ordinary = Mixed().requires_grad_(False)
    with torch.inference_mode():
        torch.manual_seed(0)
        model = Mixed().requires_grad_(False)
    named = dict(model.named_parameters())
    held = [weakref.ref(parameter) for parameter in named.values()]  # as a GRU does
    x = torch.randint(0, 50, (2, 5))
    ordinary.to(device)
    with attached(model, device, offload_percent=1.0) as manager:
        assert {"table", "convolution"} <= {layer.name for layer in manager.layers}
        for _ in range(3):
            expected = infer(ordinary, x.to(device), how)
            assert torch.equal(infer(model, x.to(device), how), expected)
        for each in (model, ordinary):
            each.convolution.requires_grad_()
            each(x.to(device)).sum().backward()
        torch.testing.assert_close(
            model.convolution.weight.grad.cpu(),
            ordinary.convolution.weight.grad.cpu(),
            rtol=0,
            atol=0,
        )
        model.convolution.weight.data.mul_(2)
        ordinary.convolution.weight.data.mul_(2)
        expected = infer(ordinary, x.to(device), how)
        assert torch.equal(infer(model, x.to(device), how), expected)
    assert all(model.get_parameter(name) is tensor for name, tensor in named.items())
    assert model.out.weight is model.table.weight and None not in [each() for each in held]


# ---- a default device ----


class Twofold(nn.Sequential):
    """Layers in a row, the last of which takes what it is given twice."""

    def forward(self, x):
        x = self[1](self[0](x))
        return self[2](x, x)


def twofold():
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256), nn.Conv1d(2, 2, 3, padding=1), nn.Bilinear(256, 256, 256)]
    model = Twofold(*layers).bfloat16().requires_grad_(False)
    model[1].requires_grad_()
    return model


@pytest.mark.parametrize("how", ["plain", "compress", "weights"])
def test_a_default_device_is_for_what_the_user_makes_alone(
    how, tmp_path, cache_folder, nothing_is_small
):
    """As of a script that has called `torch.set_default_device("cuda")`."""
    resident, path = twofold(), tmp_path / "model.safetensors"
    oracle_offload.save_weights(resident, path)
    options = {"plain": {}, "compress": {"compress": "lossless"}, "weights": {"weights": path}}
    with oracle_offload.empty_weights() if how == "weights" else contextlib.nullcontext():
        model = twofold()
    x = [torch.randn(3, 2, 256).bfloat16() for _ in range(2)]
    with torch.device("meta"), attached(model, "cpu", **options[how]) as manager:
        assert len(manager.layers) == 3
        oracle_offload.accumulate(lambda i: model(x[i]).sum(), range(2))
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert torch.equal(model(x[0]), resident(x[0]))
    for each in x:
        resident(each).sum().backward()
    assert torch.equal(model[1].weight.grad, resident[1].weight.grad)
