"""Activations leave the device and come back: same bits, once, in time, and nothing stays."""

from __future__ import annotations

import contextlib
import copy
import gc
import linecache
import pickle
import sys
import types
import weakref

import models
import pytest
import torch
from equality import assert_same, attached, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload.engine import locked
from oracle_offload.engine.engines import open_states
from oracle_offload.engine.simulator import Schedule
from oracle_offload.errors import OffloadError
from oracle_offload.model.witness import Witness
from oracle_offload.train import activations as module
from oracle_offload.train import offload_activations

WIDTH, ROWS = 48, 64
LEAST = 4 * WIDTH * ROWS  # bytes of one hidden state
KINDS = {"plain": None, "reentrant": True, "not reentrant": False}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(models.Tower):
    def __init__(self, kind="plain", blocks=4):
        torch.manual_seed(0)
        super().__init__(*(Block() for _ in range(blocks)), reentrant=KINDS[kind])


def batch(device, number=0):
    torch.manual_seed(number)
    return torch.randn(ROWS, WIDTH).to(device).requires_grad_()


def losses(model, device, steps=3, autocast=False, save=contextlib.nullcontext):
    """Losses and gradients of some steps of two micro-batches, with a validation in between."""
    found = []
    for step in range(steps):
        model.zero_grad()
        for micro in range(2):
            kind = torch.device(device).type
            with torch.autocast(kind, torch.bfloat16, enabled=autocast), save():
                loss = model(batch(device, 2 * step + micro)).float().square().mean()
            loss.backward()
            found.append(loss.detach().clone())
            with torch.no_grad():
                found.append(model(batch(device, 99)).float().sum())
        found.append({name: grad.clone() for name, grad in gradients(model).items()})
    return found


def count_live(offload):
    gc.collect()
    offload.after_step()
    return len(offload._live), offload._held_bytes, len(offload._leaving)


@pytest.fixture(params=[False, True], ids=["resident", "attached"])
def manage(request):
    return lambda model, device: (
        attached(model, device) if request.param else contextlib.nullcontext(model.to(device))
    )


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_bits_of_torch_alone_and_of_save_on_cpu(device, manage, kind, autocast):
    resident = Model(kind).to(device)
    expected = losses(resident, device, autocast=autocast)
    saved = losses(resident, device, autocast=autocast, save=torch.autograd.graph.save_on_cpu)
    assert_same(saved, expected)
    model, least = Model(kind), LEAST // 2 if autocast else LEAST
    with manage(model, device), offload_activations(model, least, device_budget=2 * LEAST) as o:
        assert_same(losses(model, device, autocast=autocast), expected)
        counts = o.counts
        assert counts.left >= 12 and counts.returned >= 6, counts
        if kind != "plain":  # what the checkpoints keep, and nothing of a recompute
            assert counts.left + counts.stayed <= 3 * 2 * 5, counts
        assert counts.left_bytes >= counts.left * LEAST // 2
        stats = open_states()[0].engine.stats()
        assert (stats["left_copies"], stats["returned_copies"]) == (counts.left, counts.returned)
        assert stats["left_bytes"] == counts.left_bytes
        is_attached = "_memory_manager" in model.__dict__
        assert (stats["managed_bytes"] > 0) == (stats["h2d_bytes"] > 0) == is_attached
        assert count_live(o) == (0, 0, 0)


def test_it_is_the_same_under_the_witness(device):
    resident, model = Model().to(device), Model()
    expected = losses(resident, device)
    with attached(model, device), offload_activations(model, LEAST) as offload, Witness():
        assert_same(losses(model, device), expected)
        assert offload.counts.returned > 6


@pytest.mark.parametrize("schedule", list(Schedule))
def test_no_schedule_of_the_device_changes_the_bits(sim, schedule):
    expected = losses(Model(), "cpu", steps=2)
    sim.set_schedule(schedule, 3)
    sim.slow_link(0.05)
    model = Model()
    with attached(model), offload_activations(model, LEAST, device_budget=4 * LEAST) as offload:
        assert_same(losses(model, "cpu", steps=2), expected)
        assert offload.counts.returned > 8, offload.counts


def test_memory_that_goes_back_before_its_copy_has_read_it_is_seen(sim, monkeypatch):
    """Were it not, the tests above would show nothing of the wait before memory goes back."""
    kept = []

    def forgets(self, trip, stream):
        if trip.is_leaving:
            self._leaving_bytes -= trip.nbytes
            trip.is_leaving = False
            kept.append(trip.here)  # else the next owner's numbers would be anybody's
            self._state.time.flush(stream)
            sim.launch(stream, (), ((trip.here.data_ptr(), trip.nbytes),))

    model = Model()
    with offload_activations(model, LEAST, device_budget=2 * LEAST) as offload:
        model(batch("cpu")).sum().backward()
        assert offload.counts.left > 0 and not sim.reports()
        monkeypatch.setattr(module.ActivationOffload, "_join_out", forgets)
        model(batch("cpu")).sum().backward()
        monkeypatch.undo()
        assert kept and "bytes that leave" in sim.reports("race")[0]
    sim.clear_reports()


def test_what_comes_next_is_there_when_backward_asks(device):
    model = Model(blocks=6).to(device)
    with offload_activations(model, LEAST) as offload:
        losses(model, device, steps=2)
        late = offload.counts.late
        losses(model, device, steps=2)
        assert offload.counts.late == late, "the order was not learned"
        assert offload.counts.stayed > 0, "what comes back first has left"


class Branches(nn.Module):
    """Two branches with a result of each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x):
        ends = []
        for half in (self.layers[:4], self.layers[4:]):
            y = x * 1.0
            for layer in half:
                y = torch.tanh(layer(y))
            ends.append(y)
        return ends

    def step(self, x):
        """Go back through the branch first that was computed first."""
        for end in self(x):
            end.square().sum().backward()


def test_the_order_of_return_is_learned(device):
    model = Branches().to(device)
    with offload_activations(model, LEAST, device_budget=6 * LEAST) as offload:
        for step in range(3):
            model.step(batch(device, step))
        run = offload._run
        late = offload.counts.late
        assert run.returned != sorted(run.returned, reverse=True), "the first guess is right"
        model.step(batch(device, 3))
        assert offload._run.order is offload._learned[1] is run.returned
        assert offload.counts.late == late and offload.counts.returned > 0


def test_views_of_one_storage_travel_once(device):
    def compute(parts, x):
        q, k, v = parts.layer(x).chunk(3, -1)
        y = (q * k) * v + q.exp() * k.t().reshape(k.shape)
        del q, k, v
        return (y * 1.0).square()

    model = models.Parts(compute, layer=nn.Linear(WIDTH, 3 * WIDTH))
    resident = copy.deepcopy(model).to(device)
    model.to(device)
    expected = resident(batch(device)).sum()
    expected.backward()
    with offload_activations(model, 3 * LEAST) as offload:
        loss = model(batch(device)).sum()
        assert offload.counts.left == 1 and offload.counts.left_bytes == 3 * LEAST
        loss.backward()
        assert offload.counts.returned <= 1
        assert_same(gradients(model), gradients(resident))
        assert_same(loss, expected)


def test_a_handle_passes_through_uncopied(device, monkeypatch):
    """What torch saves where code computes with a layer's weight itself."""
    inner = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    model = models.Parts(lambda parts, x: (x @ parts.inner.weight).tanh(), inner=inner)
    resident = copy.deepcopy(model).to(device)
    x, y = batch(device), batch(device)
    resident(x).sum().backward()
    asked = []
    with attached(model, device), offload_activations(model, 16) as offload:
        looks = module.ActivationOffload.storage_that_leaves

        def look(self, tensor):
            found = looks(self, tensor)
            asked.append((type(tensor).__name__, found is not None))
            return found

        monkeypatch.setattr(module.ActivationOffload, "storage_that_leaves", look)
        model(y).sum().backward()
        assert asked == [("Handle", False), ("Tensor", True)]
        assert offload.counts.left == 1 and offload.counts.left_bytes == LEAST
    assert_same(y.grad, x.grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interleave", [True, False], ids=["in turns", "one by one"])
def test_what_each_micro_batch_saves_leaves(device, kind, interleave):
    """They take turns in one thread, and each has its own hooks."""

    def inputs():
        return [batch(device, number) for number in range(3)]

    resident, model = Model(kind).to(device), Model(kind)
    for x in inputs():
        resident(x).square().mean().backward()
    with attached(model, device), offload_activations(model, LEAST) as offload:
        for _ in range(2):
            model.zero_grad()
            oracle_offload.accumulate(
                lambda x: model(x).square().mean(), inputs(), interleave=interleave
            )
            assert_same(gradients(model), gradients(resident))
        saved = 15 if kind == "plain" else 4  # of a micro-batch
        assert offload.counts.left + offload.counts.stayed >= 2 * 3 * saved, offload.counts
        assert offload.counts.returned > 0 or not interleave
        assert count_live(offload) == (0, 0, 0)


def test_weights_and_masters_never_leave(device, manage):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with manage(model, device), offload_activations(model, 16) as offload:
        x = batch(device)[:2].detach().clone().requires_grad_()
        model(x).sum().backward()
        # The input, and what is between the layers; each weight is larger than both.
        assert offload.counts.left == 2
        assert offload.counts.left_bytes == 2 * 2 * WIDTH * 4


def test_a_graph_that_is_kept_is_gone_through_again(device):
    model, resident = Model().to(device), Model().to(device)
    loss = resident(batch(device)).square().sum()
    for _ in range(3):
        loss.backward(retain_graph=True)
    with offload_activations(model, LEAST, device_budget=2 * LEAST) as offload:
        kept = model(batch(device)).square().sum()
        for _ in range(3):
            kept.backward(retain_graph=True)
        assert offload.counts.returned > 2 * (offload.counts.left - 4) > 0, offload.counts
        assert_same(gradients(model), gradients(resident))
        del kept
        assert count_live(offload) == (0, 0, 0)


def test_a_gradient_of_a_gradient(device):
    def twice(model):
        x = batch(device)
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        return first.detach(), x.grad, gradients(model)

    model, resident = Model().to(device), Model().to(device)
    expected = twice(resident)
    with offload_activations(model, LEAST, device_budget=2 * LEAST) as offload:
        assert_same(twice(model), expected)
        assert offload.counts.returned > 4


def test_what_a_backward_inside_of_forward_saves_stays(device):
    def compute(parts, x):
        y = parts.layer(x).tanh()
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y * grad

    model = models.Parts(compute, layer=nn.Linear(WIDTH, WIDTH)).to(device)
    resident = copy.deepcopy(model)
    resident(batch(device)).square().sum().backward()
    with offload_activations(model, LEAST, device_budget=1) as offload:
        model(batch(device)).square().sum().backward()
        assert_same(gradients(model), gradients(resident))
        # The input, the result of tanh, and the gradient that is multiplied with it.
        assert offload.counts.left + offload.counts.stayed == 3 and offload.counts.left > 0


def test_a_model_that_calls_itself_is_no_second_offloader(device):
    def compute(parts, x, times=3):
        x = parts.layer(x).tanh()
        return parts(x, times - 1) if times else x

    model = models.Parts(compute, layer=nn.Linear(WIDTH, WIDTH)).to(device)
    resident = copy.deepcopy(model)
    resident(batch(device)).sum().backward()
    with offload_activations(model, LEAST) as offload:
        model(batch(device)).sum().backward()
        assert_same(gradients(model), gradients(resident))
        assert offload.counts.left + offload.counts.stayed == 5


@pytest.mark.parametrize("least", [LEAST, 1 << 30], ids=["left", "stayed"])
def test_a_write_in_place_raises_as_it_does_without(device, least):
    def compute(parts, x):
        parts.written = parts.layer(x)
        return parts.written.square()

    model = models.Parts(compute, layer=nn.Linear(WIDTH, WIDTH)).to(device)
    # So small a budget has the stream wait for the copy at once. Else the write races with it, and
    # the test would not see that: backward refuses the bytes.
    with offload_activations(model, least, device_budget=1) as offload:
        z = model(batch(device)).sum()
        assert (offload.counts.left > 0) == (least == LEAST)
        with torch.no_grad():
            model.written.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()
        model.written = None
        del z
    batch(device).sum().backward()  # torch's thread of a card has let go of the error behind this
    gc.collect()


def test_a_write_through_data_is_seen_by_nobody(device):
    """What has left has the first save's bytes, as the page says: no code compares the bytes."""

    def compute(parts, x, w):
        y = x * 1.0
        z = y * w
        y.data.mul_(3)
        return z + y * w

    model, found = models.Parts(compute), []
    for offload in (False, True):
        w = torch.ones(ROWS, WIDTH, device=device, requires_grad=True)
        with contextlib.ExitStack() as stack:
            if offload:
                stack.enter_context(
                    offload_activations(model, LEAST, device=device, device_budget=1)
                )
            model(torch.ones(ROWS, WIDTH, device=device), w).sum().backward()
        found.append(w.grad.mean().item())
    assert found == [3 + 3, 1 + 1]


class Breaks(nn.Module):
    """Raises once, in the pass that `where` names."""

    def __init__(self):
        super().__init__()
        self.error, self.where = None, None

    def forward(self, x):
        if self.where == "forward":
            self.where = None
            raise self.error
        y = x * 1.0
        if self.where == "backward":
            self.where = None
            y.register_hook(self.raises)
        return y

    def raises(self, grad):
        raise self.error


@pytest.mark.parametrize("error", [ValueError("planted"), KeyboardInterrupt()], ids=["error", "^C"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_breaks_off_leaves_nothing(device, manage, where, error):
    model = Model()
    model.insert(2, Breaks())
    breaks = model[2]
    resident = Model()
    resident.insert(2, Breaks())
    expected = losses(resident.to(device), device, steps=1)
    with manage(model, device), offload_activations(model, LEAST) as offload:
        for _ in range(2):
            breaks.error, breaks.where = error, where
            with pytest.raises(type(error)):
                model(batch(device)).square().mean().backward()
        error.__traceback__ = None
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert_same(losses(model, device, steps=1), expected)
        assert count_live(offload) == (0, 0, 0) and offload.counts.returned > 0


def interrupt(number, step):
    """Raise at the n-th instruction of the modules that move activations; where, if it came to it.

    Not at the begin or the end of a ``with``: there the interpreter looks for no interrupt.
    """
    files, where = {module.__file__, locked.__file__}, []

    def inside(frame, event, _):
        nonlocal number
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        number -= event == "opcode" and not line.lstrip().startswith("with ")
        if number == 0 and not where:
            where.append(f"{frame.f_code.co_name}, line {frame.f_lineno}")
            sys.settrace(None)
            raise KeyboardInterrupt
        return inside

    def enter(frame, event, _):
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    sys.settrace(enter)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            step()
    finally:
        sys.settrace(None)
    return where


def test_an_interrupt_anywhere_leaves_nothing():
    """At every third instruction: the next step ends what it cuts short, and has the same bits."""
    model = nn.Tanh()
    x = torch.randn(8, 8, requires_grad=True)

    def step():
        x.grad = None
        for _ in range(2):  # the second one ends what has gone with the first
            model(x).sum().backward()

    step()
    expected = x.grad.clone()
    number = 0
    with offload_activations(model, 256, device_budget=1) as offload:
        step()
        while where := interrupt(number := number + 3, step):
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, where
            step()
            assert_same(x.grad, expected)
            offload.after_step()
            held = len(offload._live), offload._held_bytes, len(offload._leaving)
            assert held == (0, 0, 0), where
        assert number > 1000 and offload.counts.returned > number // 3
    assert not open_states() and offload.host_bytes == 0


def test_a_buffer_serves_one_that_takes_half_of_it_or_more_and_nothing_smaller():
    """Though an interrupt may have it given back once more."""
    model = nn.Tanh()  # the offload ends with it
    with offload_activations(model, 256, device="cpu") as offload:
        pool = offload._pool
        buffer = pool.take(8192)
        for _ in range(2):
            pool.give(buffer)
        assert pool.take(4095) is not buffer
        assert pool.take(4096) is buffer is not pool.take(4096)


def test_a_graph_that_is_thrown_away_gives_its_memory_back(device):
    model = Model().to(device)
    with offload_activations(model, LEAST) as offload:
        for step in range(3):
            loss = model(batch(device, step)).sum()
            del loss
        has = offload.host_bytes
        model(batch(device)).sum().backward()
        assert offload.host_bytes == has > 0
        assert count_live(offload) == (0, 0, 0)


@pytest.mark.parametrize("holds", [False, True], ids=["thrown away", "held until the next"])
def test_forwards_without_a_backward_hide_no_order(device, holds):
    """They grow nothing, and the order of a step is known after them as before."""
    model = Branches().to(device)
    with offload_activations(model, LEAST, device_budget=6 * LEAST) as offload:
        for step in range(6):
            offload.after_step()
            late = offload.counts.late
            model.step(batch(device, step))
            assert step < 4 or offload.counts.late == late, "the order was forgotten"
            saved = len(offload._run.sizes)
            held: list[object] = []
            for _ in range(5):
                held[:] = model(batch(device, step))
                if not holds:
                    held.clear()
            held.clear()
            assert len(offload._run.sizes) <= 2 * saved


def test_a_thousand_steps_grow_nothing():
    model = nn.Sequential(*(nn.Tanh() for _ in range(2)))
    x = torch.randn(8, 8, requires_grad=True)
    with offload_activations(model, 256, device_budget=1) as offload:  # so that none stays
        engine = open_states()[0].engine

        def steps(number):
            for _ in range(number):
                model(x).sum().backward()
            return offload.host_bytes, engine.stats()["allocations"], len(offload._known)

        before = steps(50)
        gc.collect()
        has = len(gc.get_objects())
        assert steps(950) == before
        gc.collect()
        assert len(gc.get_objects()) - has < 500
        assert offload.counts.left == offload.counts.returned == 2000


def test_what_the_host_has_no_room_for_stays(device):
    model, resident = Model().to(device), Model().to(device)
    expected = losses(resident, device)
    with offload_activations(model, LEAST, host_budget=3 * LEAST) as offload:
        assert_same(losses(model, device), expected)
        counts = offload.counts
        assert 0 < offload.host_bytes <= 3 * LEAST and counts.left > 0
        assert counts.refused > 0 and counts.stayed >= counts.refused


def test_lengths_that_change_find_room(device):
    """Memory of a length that came before serves the next one, or makes room for it."""
    model, resident = Model().to(device), Model().to(device)

    def steps(offload, lengths):
        for rows in lengths:
            found = []
            for each in (model, resident):
                each.zero_grad()
                each(batch(device).repeat(9, 1)[:rows]).square().sum().backward()
                found.append(gradients(each))
            assert_same(*found)
        assert offload.counts.refused == 0
        return offload.host_bytes

    lengths = [ROWS + 8 * more for more in (0, 3, 1, 4, 9, 2, 7, 5, 8, 6)]
    with offload_activations(model, LEAST, device_budget=LEAST) as offload:
        needs = steps(offload, [max(lengths)])
        # Buffers that are at least half full suffice. Each length has its own without.
        assert steps(offload, lengths) <= 2 * needs
        has = steps(offload, lengths)
        locked = open_states()[0].engine.stats()["allocations"]
        assert steps(offload, lengths) == has
        assert open_states()[0].engine.stats()["allocations"] == locked
    with offload_activations(model, LEAST, device_budget=LEAST, host_budget=needs) as offload:
        for rows in (ROWS, max(lengths)) * 2:  # shorter ones than half serve nothing longer
            assert steps(offload, [rows]) <= needs
        assert offload.counts.left > 40
        has = offload.host_bytes
        kept = model(batch(device).repeat(9, 1))
        assert offload.counts.refused > 0 and offload.host_bytes <= has
        del kept


@pytest.mark.parametrize("quota", [0, 2, 5])
def test_a_host_that_locks_nothing_more_is_borne(sim, quota):
    """What had left by then comes back from locked memory, which is unlocked only after that."""
    model = Model()
    expected = losses(Model(), "cpu")
    with offload_activations(model, LEAST, device_budget=LEAST) as offload:
        engine = open_states()[0].engine
        with sim.lock_quota(engine.stats()["locked_bytes"] + quota * LEAST):
            assert_same(losses(model, "cpu"), expected)
        assert offload.counts.refused > 0
        assert (offload.counts.returned > 0) == (offload.counts.left > 0) == (quota > 0)
        assert count_live(offload) == (0, 0, 0) and offload.host_bytes == 0
        assert engine.stats()["locked_bytes"] == 0


def test_the_device_budget_bounds_what_is_held(device):
    for many in (2, 6):
        model = Model().to(device)
        most = []
        with offload_activations(model, LEAST, device_budget=many * LEAST) as offload:
            holds = offload._hold

            def hold(trip, storage, holds=holds, most=most, offload=offload):
                holds(trip, storage)
                most.append(offload._held_bytes)

            offload._hold = hold
            losses(model, device)
            # One more at the moment that it comes, before another has left.
            assert LEAST < max(most) <= (many + 2) * LEAST
            del offload._hold


def test_hooks_outside_see_everything_and_what_they_make_leaves(device):
    model, resident = Model().to(device), Model().to(device)
    expected = losses(resident, device, steps=1)
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor

    def unpack(kept):
        unpacked.append(kept.shape)
        return kept

    def outside():
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    with offload_activations(model, LEAST) as offload:
        assert_same(losses(model, device, steps=1, save=outside), expected)
        assert offload.counts.left > 0 and len(packed) == len(unpacked) > offload.counts.left


def test_a_checkpoint_around_the_model_keeps_what_it_keeps(device):
    model, resident = Model().to(device), Model().to(device)
    results = []
    with offload_activations(model, LEAST) as offload:
        for each in (resident, model):
            loss = checkpoint(each, batch(device), use_reentrant=False).square().sum()
            loss.backward()
            results.append((loss, gradients(each)))
        assert offload.counts.left == 0
    assert_same(*results)


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """Its functions are defined where torchtune defines those of its own."""

    def __init__(self):
        def pack(tensor):
            return tensor

        super().__init__(pack, pack)


@pytest.mark.parametrize("transform", ["vmap", "grad", "vjp", "jvp", "jacrev", "jacfwd"])
def test_a_transform_of_torch_func_is_refused_by_name(device, transform):
    model = Model().to(device)
    x = batch(device).detach()
    calls = {
        "grad": lambda f: f(lambda y: model(y).sum())(x),
        "vjp": lambda f: f(model, x),
        "jvp": lambda f: f(model, (x,), (x,)),
        "vmap": lambda f: f(model)(x[None]),
    }
    with offload_activations(model, LEAST) as offload:
        with pytest.raises(OffloadError, match=r"transform of torch\.func"):
            calls.get(transform, lambda f: f(model)(x))(getattr(torch.func, transform))
        # What hands weights over transforms nothing.
        weights = dict(model.named_parameters())
        torch.func.functional_call(model, weights, (batch(device),)).sum().backward()
        assert offload.counts.left > 0


@pytest.mark.slow
def test_what_is_traced_is_left_alone():
    model = Model()
    x = batch("cpu").detach()
    expected, _ = torch.func.linearize(model, x)
    with offload_activations(model, LEAST):  # what a tracer computes with has no memory
        found, _ = torch.func.linearize(model, x)
        assert_same(found, expected)


def test_a_second_offloader_is_refused_by_name(device):
    model = Model().to(device)
    x = batch(device)
    with offload_activations(model, LEAST):
        with pytest.raises(OffloadError, match="another offload_activations"):
            offload_activations(model, LEAST)
        with pytest.raises(OffloadError, match="another offload_activations"):
            offload_activations(nn.Sequential(model), LEAST)
        with (
            torch.autograd.graph.save_on_cpu(),
            pytest.raises(OffloadError, match=r"graph\.save_on_cpu"),
        ):
            model(x)
        with (
            OffloadActivations(),
            pytest.raises(OffloadError, match="torchtune's OffloadActivations"),
        ):
            model(x)

    # Above, the inner model was first, and the call for the outer found it; here it is last.
    outer = nn.Sequential(model)
    with (
        offload_activations(outer, LEAST),
        offload_activations(model, LEAST),
        pytest.raises(OffloadError, match="another offload_activations"),
    ):
        outer(x)

    class OffloadWrapper(nn.Module):
        pass

    with pytest.raises(OffloadError, match="offload_wrapper"):
        offload_activations(nn.Sequential(OffloadWrapper()))


def test_it_is_undone_without_a_trace(device):
    model = Model()
    offload = offload_activations(model, LEAST, device=device)
    assert "forward" in model.__dict__
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in (model, copied, pickled):
        each.to(device)
    loss = model(batch(device)).sum()
    left = offload.counts.left
    assert left > 0
    for other in (copied, pickled):
        assert other(batch(device)).shape == (ROWS, WIDTH) and offload.counts.left == left
        assert isinstance(other.forward, types.MethodType) and other.forward.__self__ is other
    offload.remove()
    assert "forward" not in model.__dict__ and open_states(), "its graph still needs the engine"
    loss.backward()
    assert offload.counts.returned > 0
    model(batch(device)).sum().backward()
    assert offload.counts.left == left
    assert not open_states()


@pytest.mark.parametrize("end", ["backward", "thrown away", "while a lock is held"])
def test_the_last_graph_closes_what_was_removed(device, end):
    model = Model().to(device)
    with offload_activations(model, LEAST) as offload:
        loss = model(batch(device)).sum()
        state = offload._state
    assert open_states() and offload.host_bytes > 0
    if end == "backward":
        loss.backward()
        assert offload.counts.returned > 0
    elif end == "thrown away":
        del loss
    else:
        with state.lock:
            del loss
        assert open_states()
        weight = nn.Parameter(torch.ones(1))
        torch.optim.SGD([weight]).step()
    gc.collect()
    assert not open_states() and offload.host_bytes == 0


@pytest.mark.parametrize("graph", [False, True], ids=["no graph", "a graph"])
def test_a_deleted_model_is_offloaded_no_more(device, graph):
    for step in range(2):
        model = Model().to(device)
        offload_activations(model, LEAST)
        loss = model(batch(device, step)).sum()
        if not graph:
            loss.backward()
            del loss
        del model
        gc.collect()
        if graph:
            assert open_states(), "its graph still needs the engine"
            loss.backward()
            del loss
        assert not open_states()


def test_what_was_removed_goes_before_its_model(device):
    model = Model().to(device)
    with offload_activations(model, LEAST) as offload:
        gone = weakref.ref(offload)
    del offload
    gc.collect()
    assert gone() is None


def test_a_forward_that_somebody_put_there_is_called_and_put_back(device):
    model = Model().to(device)
    called = []

    def own(x):
        called.append(x)
        return Model.forward(model, x)

    model.forward = own
    with offload_activations(model, LEAST) as offload:
        model(batch(device)).sum().backward()
        assert called and offload.counts.left > 0
    assert model.forward is own


def test_no_grad_costs_nothing(device):
    model = Model().to(device)
    with offload_activations(model, LEAST) as offload, torch.no_grad():
        model(batch(device))
        assert offload.counts == module.Counts()


def test_what_it_says(device):
    model = Model().to(device)
    with offload_activations(model, LEAST) as offload:
        model(batch(device)).sum().backward()
        text = repr(offload)
        assert text.startswith(f"ActivationOffload({offload.counts.left} left with ")
        assert offload.name == "Model"
    with pytest.raises(ValueError, match="least"):
        offload_activations(model, "much")
    with pytest.raises(ValueError, match="host_budget"):
        offload_activations(model, LEAST, host_budget="little")
    assert not open_states()


def test_what_compiled_code_saves_at_its_boundary_leaves(device, manage):
    torch.compiler.reset()
    expected = losses(torch.compile(Model().to(device), backend="aot_eager"), device)
    model = Model()
    with manage(model, device):
        compiled = torch.compile(model, backend="aot_eager")
        with offload_activations(compiled, LEAST, device_budget=2 * LEAST) as offload:
            assert_same(losses(compiled, device), expected)
            assert offload.counts.left >= 24 and offload.counts.returned >= 12, offload.counts
    torch.compiler.reset()


def test_the_summary_and_a_recording_have_rows_of_it():
    model = Model()
    with (
        attached(model, offload_percent=0.5),
        offload_activations(model, LEAST, device_budget=2 * LEAST) as offload,
        oracle_offload.record(timed_every=1) as recorder,
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(batch("cpu", step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        counts = offload.counts
        (device,) = oracle_offload.memory_summary().devices
        assert (device.left_bytes, device.left_copies) == (counts.left_bytes, counts.left)
        assert device.returned_bytes == counts.returned_bytes > 0
        assert device.returned_copies == counts.returned
        text = " ".join(str(oracle_offload.memory_summary()).split())
        assert (
            f"activations that left | {counts.left_bytes / 1024:.2f} KiB in {counts.left}" in text
        )
        assert f"and came back | {counts.returned_bytes / 1024:.2f} KiB in" in text
    recording = recorder.recording()
    of_no_unit = [event for event in recording.events if event.get("unit") == -1]
    back = [event for event in of_no_unit if event["event"] == "copy_to_device"]
    assert sum(event["bytes"] for event in back) == counts.returned_bytes
    home = [event for event in of_no_unit if event["event"] == "copy_to_host"]
    assert sum(event["bytes"] for event in home) > counts.left_bytes  # and the gradients
    assert all(event["layer"] == "" and event["seconds"] for event in back if event["step"] == 2)
    assert recording.pictures()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torchs_allocator_has_the_memory_back(device):
    hidden, blocks = 4 * WIDTH * 64 * ROWS, 12

    def peak(model):
        x = batch(device).repeat(64, 1).detach().requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).square().mean().backward()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / hidden

    peaks = {}
    for kind in ("plain", "not reentrant"):
        model = Model(kind, blocks).to(device)
        model(batch(device)).sum().backward()  # its gradients are there
        peaks[kind, "without"] = peak(model)
        with offload_activations(model, hidden, device_budget=4 * hidden) as offload:
            for _ in range(3):
                peaks[kind, "with"] = peak(model)
            assert offload.counts.returned > 0
    print({key: round(value, 1) for key, value in peaks.items()}, "hidden states")
    # Of a block: its input, the norm's result, twice two of the feed-forward's.
    assert peaks["plain", "without"] > 6 * blocks
    assert peaks["plain", "with"] < 0.3 * peaks["plain", "without"]
    assert peaks["not reentrant", "without"] > blocks
    assert peaks["not reentrant", "with"] < peaks["not reentrant", "without"] - blocks / 2
