"""Bytes, copies, waits and memory: counted, bounded, given back."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import time
from collections import Counter
from itertools import pairwise

import models
import pytest
import torch
from equality import (
    Recorder,
    assert_models_agree,
    assert_same,
    attached,
    gradients,
    resident_pair,
)
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import oracle_offload
from oracle_offload import OffloadError, _core
from oracle_offload.model.witness import Witness


def tower(depth=16):
    """Blocks of two layers of 64 KiB and 128 KiB."""
    return models.tower(depth, 2, ratio=2)


def tower_step(model):
    x = torch.randn(4, 128).to(models.compute_device(model)).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y, x.grad]


def differences(before, after, *keys):
    return {key: after[key] - before[key] for key in keys}


@pytest.mark.parametrize("percent", [0.0, 0.5, 0.9, 1.0])
def test_steady_state_allocates_nothing_waits_for_nothing_and_moves_x_min(percent):
    torch.manual_seed(0)
    model = tower(depth=24).requires_grad_(False)
    with attached(model, "cpu", offload_percent=percent) as manager:
        engine = manager.state.engine
        for _ in range(6):
            tower_step(model)
        attachment = manager.attachment
        block = engine.stats()["learned_block_bytes"]
        assert block > 0, "the engine has learned what a checkpointed block is"
        assert attachment.arena.capacity_bytes >= block
        before = engine.stats()
        for _ in range(4):
            tower_step(model)
        moved = differences(before, engine.stats(), "h2d_bytes", "allocations", "host_waits")
        assert moved["allocations"] == 0
        assert moved["host_waits"] == 0
        assert moved["h2d_bytes"] / 4 <= 1.10 * attachment.x_min_bytes()


def test_real_depth_moves_x_min():
    """Flux at its real depth: leaves of very different sizes, adapters, recomputed blocks."""
    model = models.flux(layers=19, single=38).requires_grad_(False)
    with attached(model, "cpu", offload_percent=0.91) as manager:
        models.enable_checkpointing(model)
        for _ in range(3):
            models.flux_step(model)
        engine = manager.state.engine
        before = engine.stats()
        models.flux_step(model)
        moved = differences(before, engine.stats(), "h2d_bytes", "host_waits", "allocations")
        assert moved["host_waits"] == moved["allocations"] == 0
        assert moved["h2d_bytes"] <= 1.10 * manager.attachment.x_min_bytes()
        assert len(manager.attachment.arena.segments) == 2, "it grew by a difference, and once"


def test_bytes_the_simulator_copied_are_the_units_fetched(sim):
    """Two counts that know nothing of each other: the driver's and the engine's answers."""
    torch.manual_seed(0)
    model = tower(depth=6)
    manager = oracle_offload.attach(model, "cpu", offload_percent=0.7)
    state = manager.state
    recorder = Recorder(state.engine)
    state.engine = recorder
    sizes, exact = Counter(), Counter()
    for layer in manager.layers:
        sizes[layer.unit] += sum(-(-n // 256) * 256 for _, n in layer.extents())
        exact[layer.unit] += sum(n for _, n in layer.extents())
    unit_of = {layer.member: layer.unit for layer in manager.layers}
    before, counted = sim.stats(), state.engine.stats()
    for _ in range(3):
        tower_step(model)
    after, stats = sim.stats(), state.engine.stats()
    added_to = stats["brought_bytes"]  # gradients that a step adds to, on the device
    copied = after.h2d_bytes - before.h2d_bytes - added_to
    assert added_to and copied == stats["h2d_bytes"] - counted["h2d_bytes"]
    low = sum(exact[unit] for unit in recorder.fetched)
    high = sum(sizes[unit] for unit in recorder.fetched)
    assert low <= copied <= high
    visited = [unit_of[member] for member in recorder.acquired]
    hits = stats["hits"] - counted["hits"]
    assert 0 < hits < len(visited)
    assert set(visited) == set(unit_of.values()) == set(recorder.fetched)
    assert len(visited) - hits <= len(recorder.fetched) <= len(visited)
    state.engine = recorder._engine
    manager.detach()


@pytest.mark.parametrize(
    ("budget", "limit"),
    [("96KiB", 96 << 10), ("0.4MiB", 419_430), (200_000, 200_000), (400_001, 400_001)],
)
def test_a_cap_in_bytes_holds_beside_a_layer_ten_times_the_others(device, budget, limit):
    torch.manual_seed(0)
    sizes = [64, 64, 64, 96, 64, 64]
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(sizes)])
    big = nn.Linear(64, 640)
    model = nn.Sequential(*model, big, nn.Linear(640, 8, bias=False))
    managed, resident = resident_pair(model)

    def step(module):
        y = module(torch.randn(3, 64).to(device))
        y.sum().backward()
        return [y]

    largest = 640 * 64 * 4 + 640 * 4
    if limit < 2 * largest:
        with pytest.raises(OffloadError, match="two of the largest units"):
            oracle_offload.attach(managed, device, vram_budget=budget)
        return
    with attached(managed, device, vram_budget=budget) as manager:
        assert_models_agree(managed, resident, step, steps=3, device=device)
        stats = manager.state.engine.stats()
        assert limit - 256 < stats["arena_bytes"] <= limit
        assert stats["arena_bytes"] % 256 == 0
        assert stats["peak_resident_bytes"] <= limit


@pytest.mark.parametrize("budget", ["1GiB", 0.5, 1 << 40, "auto"])
def test_no_more_device_memory_is_taken_than_the_model_can_use(budget):
    torch.manual_seed(0)
    managed, resident = resident_pair(tower(depth=4))
    with attached(managed, "cpu", vram_budget=budget) as manager:
        engine = manager.state.engine
        if budget == "auto":  # the first step runs on the floor
            assert_models_agree(managed, resident, tower_step, steps=1)
            torch.optim.SGD([nn.Parameter(torch.zeros(1))]).step()
        stats = engine.stats()
        assert stats["arena_bytes"] <= stats["managed_bytes"] + 2 * stats["largest_unit_bytes"]
        for _ in range(4):
            assert_models_agree(managed, resident, tower_step, steps=1)
        before = engine.stats()
        assert_models_agree(
            managed.requires_grad_(False), resident.requires_grad_(False), tower_step
        )
        assert_models_agree(managed, resident, tower_step)
        assert stats["arena_bytes"] == engine.stats()["arena_bytes"]
        assert engine.stats()["evictions"] == before["evictions"], "everything has room"


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_registration_refused_from_the_kth_piece_on(sim, monkeypatch, nth):
    """The rest stays pageable, the bits stay the same, and the summary says so."""
    from oracle_offload.model import masters

    monkeypatch.setattr(masters, "PIECE_BYTES", 600_000)
    torch.manual_seed(0)
    managed, resident = resident_pair(tower(depth=8))
    pieces = list(masters.split_pieces([[t] for t in managed.parameters()], 600_000))
    assert len(pieces) >= 3
    sim.refuse_registration(nth)
    with attached(managed, "cpu", offload_percent=0.8) as manager:
        report = manager.memory_summary()
        usage = report.devices[0]
        buffers = manager.attachment.buffers
        # The last piece that was granted is given back: others shall find something to lock, too.
        assert [buffer.locked for buffer in buffers] == [
            number < nth - 2 for number in range(len(buffers))
        ]
        assert usage.pageable_bytes == sum(b.nbytes for b in buffers if not b.locked)
        assert "pageable" in str(report)
        assert_models_agree(managed, resident, tower_step, steps=3)


def test_lock_locks_no_more_than_it_says(monkeypatch):
    from oracle_offload.model import masters

    monkeypatch.setattr(masters, "PIECE_BYTES", 600_000)
    torch.manual_seed(0)
    managed, resident = resident_pair(tower(depth=8))
    with attached(managed, "cpu", lock="1MB") as manager:
        locked = sum(buffer.nbytes for buffer in manager.attachment.buffers if buffer.locked)
        assert 0 < locked <= 1_000_000
        assert manager.state.engine.stats()["pageable_bytes"] > 0
        assert_models_agree(managed, resident, tower_step)


def test_detach_right_after_backward_on_a_slow_link(sim):
    """Copies are still under way; the memory they use must not be reused before they end."""
    sim.slow_link()
    torch.manual_seed(0)
    managed, resident = resident_pair(tower(depth=8))
    manager = oracle_offload.attach(managed, "cpu", offload_percent=0.5)
    for _ in range(2):
        tower_step(managed)
    managed.zero_grad()
    torch.manual_seed(5)
    expected = tower_step(resident)
    torch.manual_seed(5)
    found = tower_step(managed)
    manager.detach()
    del manager
    gc.collect()
    junk = [torch.full((1 << 18,), float("nan")) for _ in range(8)]
    for parameter in managed.parameters():
        parameter.data.add_(1)
    assert_same(found, expected)
    assert_same(gradients(managed), gradients(resident))
    assert len(junk) == 8


def test_two_compute_streams_use_one_unit(sim):
    """A slot is overwritten only after the last use on each stream that used it."""
    torch.manual_seed(0)
    managed, resident = resident_pair(tower(depth=6).requires_grad_(False))
    with attached(managed, "cpu", offload_percent=0.8) as manager:
        state = manager.state
        first, second = state.stream(), sim.create_stream()
        calls = iter(range(10**6))
        state.stream = lambda: (first, second)[next(calls) % 2]
        with torch.no_grad():
            expected = [resident(torch.ones(2, 128))]
            for _ in range(4):
                with Witness(declare=False):
                    assert_same([managed(torch.ones(2, 128))], expected)
        state.stream = lambda: first
        sim.destroy_stream(second)


def test_two_threads_train_through_one_model():
    torch.manual_seed(0)
    managed, resident = resident_pair(tower(depth=4).requires_grad_(False))
    inputs = [torch.randn(3, 128) for _ in range(2)]
    expected = [resident(x).detach() for x in inputs]
    errors = []

    def train(number):
        try:
            for _ in range(30):
                x = inputs[number].clone().requires_grad_()
                y = managed(x)
                y.square().sum().backward()
                assert_same(y, expected[number])
        except BaseException as error:
            errors.append(error)

    with attached(managed, "cpu", offload_percent=0.6):
        managed(inputs[0])
        threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors


@pytest.mark.parametrize("trainable", [False, True], ids=["sampling", "training"])
@pytest.mark.parametrize("watched", [False, True], ids=["", "witness"])
def test_a_refresh_while_other_threads_compute_disturbs_none_of_them(trainable, watched):
    """It takes effect at their next use: no thread sees an error, or other bits."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(10)]).requires_grad_(False)
    managed, resident = resident_pair(model)
    inputs = [torch.randn(4, 32) for _ in range(4)]
    expected = []
    for x in inputs:
        y = resident(x.requires_grad_(trainable))
        expected.append((y.detach(), torch.autograd.grad(y.sum(), x)[0] if trainable else None))
    errors, finished = [], []

    def compute(number):
        witness = Witness() if watched else contextlib.nullcontext()
        y, gradient = expected[number]
        try:
            with witness:
                for _ in range(60):
                    x = inputs[number].detach().requires_grad_(trainable)
                    found = managed(x)
                    assert_same(found.detach(), y)
                    if trainable:
                        assert_same(torch.autograd.grad(found.sum(), x)[0], gradient)
        except BaseException as error:
            errors.append(error)
        finished.append(number)

    with attached(managed, "cpu") as manager:
        assert len(manager.layers) == 10
        managed(inputs[0])
        threads = [threading.Thread(target=compute, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        refreshes = 0
        while len(finished) < len(threads):
            manager.refresh()
            refreshes += 1
            time.sleep(1e-4)
        for thread in threads:
            thread.join()
        stale = manager.state.engine.stats()["stale"]
    assert not errors, (len(errors), errors[0])
    assert refreshes and stale, "no refresh met a use: nothing was shown"


class FailingOperator(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises instead of the n-th operator."""

    def __init__(self, at):
        super().__init__()
        self.count, self.at = 0, at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            raise RuntimeError("this operator fails")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_any_operator_may_fail(trainable):
    """Each one of a step: the slot is given back, and the next step has the resident's bits."""
    torch.manual_seed(0)
    model = models.Tower(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh()), nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    ).requires_grad_(trainable)
    managed, resident = resident_pair(model)

    def step(module):
        x = torch.ones(2, 2, 4, 8, requires_grad=True)
        y = module(x)
        y.square().sum().backward()
        with torch.no_grad():
            return [y, x.grad, module(x)]

    with attached(managed, "cpu") as manager:
        for at in itertools.count(1):
            failing = FailingOperator(at)
            try:
                with failing:
                    step(managed)
            except RuntimeError as error:
                assert "this operator fails" in str(error)
            residents = manager.state.engine.residents()
            assert all(pins == 0 for *_, pins in residents), f"operator {at} kept its slot"
            if at % 8 == 0:
                assert_models_agree(managed, resident, step, steps=1)
            if failing.count < at:
                break
        assert at > 40, "a step has more operators than that"


def test_reentrant_and_sequential_checkpointing():
    torch.manual_seed(0)

    class Chain(nn.Sequential):
        def forward(self, x):
            return checkpoint_sequential(list(self), 3, x, use_reentrant=True)

    chain = Chain(*[nn.Linear(64, 64) for _ in range(9)])
    managed, resident = resident_pair(chain)

    def step(model):
        x = torch.randn(3, 64).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        return [y, x.grad]

    with attached(managed, "cpu", offload_percent=0.6):
        assert_models_agree(managed, resident, step, steps=4)


def test_summary_says_what_was_counted():
    torch.manual_seed(0)
    model = tower(depth=8)
    optimizer = torch.optim.AdamW(model.parameters())
    with attached(model, "cpu", offload_percent=0.5) as manager:
        for _ in range(3):
            tower_step(model)
            optimizer.step()
        report = oracle_offload.memory_summary(optimizer=optimizer)
        stats = manager.state.engine.stats(manager.attachment.model)
        usage = report.devices[0].models[0]
        assert usage.h2d_bytes == stats["h2d_bytes"] > 0
        assert usage.d2h_bytes == stats["d2h_bytes"]
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        assert usage.d2h_bytes == 3 * weights, "each gradient travelled once per step"
        assert usage.steps == 3
        assert report.optimizer_bytes["cpu"] >= 2 * weights
        data = report.to_dict()
        assert data["schema"].startswith("oracle_offload/")
        assert data["devices"][0]["models"][0]["h2d_bytes"] == usage.h2d_bytes
        text = str(report)
        assert "X_min" in text and "host waits" in text and "Tower" in text
        assert all(len(line) <= 100 for line in text.splitlines())
        assert len(str(oracle_offload.memory_summary(abbreviated=True))) < len(text)
        shown = report._repr_html_()
        assert "X_min" in shown and "<script" not in shown and shown in report.to_html()
        assert repr(report) == text
    first, *_ = str(oracle_offload.memory_summary()).splitlines()
    assert first == "oracle_offload: no model is attached"


def test_attach_and_detach_leak_nothing():
    model = tower(depth=4)

    def cycle():
        manager = oracle_offload.attach(model, "cpu")
        tower_step(model)
        model.zero_grad(set_to_none=True)
        manager.detach()

    gc.collect()  # what other tests left to be collected is not counted here
    before = _core.live()
    for _ in range(5):
        cycle()
    gc.collect()
    live = _core.live()
    for _ in range(10):
        cycle()
    gc.collect()
    assert _core.live() == live
    assert live["engines"] == before["engines"]


# ---- processes ----

FORK = """
import ctypes, os, sys, time, torch, oracle_offload
from torch import nn
from torch.utils.data import DataLoader
from oracle_offload.model import masters

def layer():
    made = nn.utils.skip_init(nn.Linear, 4096, 4096, bias=False)
    made.weight.data.fill_(1e-4)
    return made

def pin(buffers):
    # io_uring registers (pins) buffers as a driver does; None where the kernel does not allow it.
    libc = ctypes.CDLL(None, use_errno=True)
    ring = libc.syscall(425, 4, (ctypes.c_char * 120)())
    if ring < 0:
        return None
    vectors = (ctypes.c_size_t * (2 * len(buffers)))()
    for number, buffer in enumerate(buffers):
        vectors[2 * number : 2 * number + 2] = buffer.address, buffer.nbytes
    done = libc.syscall(427, ring, 0, vectors, len(buffers))
    return ring if done == 0 else None

def private_bytes(pid):
    keys = ("Private_Clean", "Private_Dirty")
    lines = open(f"/proc/{pid}/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(keys))

def mapped_bytes(pid, buffers):
    ranges = [(b.address, b.address + b.nbytes) for b in buffers]
    total = 0
    for line in open(f"/proc/{pid}/maps"):
        low, high = (int(word, 16) for word in line.split()[0].split("-"))
        total += sum(max(0, min(high, end) - max(low, start)) for start, end in ranges)
    return total

masters.PIECE_BYTES = 1 << 28
model = nn.Sequential(*[layer() for _ in range(16)])
manager = oracle_offload.attach(model, "cpu", offload_percent=1.0)
slab = sum(buffer.nbytes for buffer in manager.attachment.buffers)
ring = pin(manager.attachment.buffers)
print("pinned", ring is not None)
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.read(reader, 1)
    try:
        model(torch.ones(1, 4096))
        os._exit(1)
    except oracle_offload.OffloadError as error:
        os._exit(0 if "fork" in str(error) else 2)
    except BaseException:
        os._exit(3)
print("share", private_bytes(child) / slab)
print("mapped", mapped_bytes(child, manager.attachment.buffers) / slab)
os.write(writer, b".")
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
loader = DataLoader(range(8), num_workers=2, multiprocessing_context="fork")
print("loaded", sum(int(batch) for batch in loader))
with torch.no_grad():
    print("sum", float(model(torch.zeros(1, 4096)).sum()))
if ring is not None:
    os.close(ring)
manager.detach()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, pins with io_uring")
def test_forked_workers_cost_nothing_and_are_refused(forks):
    """1 GiB of masters, pinned for real: a fork maps none of them and copies < 5% of their size."""
    found = dict(line.split() for line in forks.print(FORK).splitlines())
    assert found["child"] == "0", "the child must get our error, not a crash"
    assert found["loaded"] == "28"
    assert float(found["sum"]) == 0.0
    assert float(found["share"]) < 0.05
    assert float(found["mapped"]) == 0.0
    if found["pinned"] != "True":
        pytest.skip("io_uring may not pin here; the rest was checked with ordinary memory")


PEAK = """
import sys, torch, torch._dynamo, oracle_offload
from torch import nn
from oracle_offload import manager
from oracle_offload.model import masters
from oracle_offload.engine import simulator
simulator.library()
GIB = 1 << 30
masters.PIECE_BYTES = GIB // 4
def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024
torch.manual_seed(0)
empty = status("VmRSS")
layers = []
for _ in range(12):
    with torch.no_grad():
        layer = nn.utils.skip_init(nn.Linear, 8192, 8192, bias=False)
        layer.weight.fill_(1.0)
    layers.append(layer)
small = [nn.Linear(512, 512) for _ in range(256)]
model = nn.Sequential(*layers, *small)
weights = sum(p.numel() * p.element_size() for p in model.parameters())
def reset():
    open("/proc/self/clear_refs", "w").write("5")
reset()
begin = status("VmRSS")
manager = oracle_offload.attach(model, "cpu", vram_budget=2 * 8192 * 8192 * 4 + 4096)
arena = manager.attachment.arena.capacity_bytes
print("attach", weights + arena, status("VmHWM") - empty)
reset()
manager.detach()
print("detach", weights + arena, status("VmHWM") - empty)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_attach_and_detach(forks):
    """At most the weights and two pieces (and the simulated device's memory, which is RAM)."""
    piece = 1 << 28
    for line in forks.print(PEAK).splitlines():
        what, held, peak = line.split()
        assert int(held) >= 3 * (1 << 30)
        assert int(peak) <= int(held) + 2 * piece, (what, int(peak) - int(held))


def test_nothing_is_printed(capfd):
    model = tower(depth=2)
    with attached(model, "cpu"):
        tower_step(model)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""


@pytest.mark.parametrize("meanwhile", ["trains", "detaches", "attaches another"])
def test_a_model_detaches_while_another_computes_in_what_it_lent(device, meanwhile, caplog):
    (staying, resident), (other, other_resident) = (resident_pair(tower(4)) for _ in range(2))
    lending = tower(4)
    lender = oracle_offload.attach(lending, device, offload_percent=0.0)
    manager = oracle_offload.attach(staying, device, offload_percent=1.0)
    state, lent = manager.state, lender.attachment.arena.segments
    assert_models_agree(staying, resident, tower_step, steps=1, device=device)
    tickets = []
    for layer in manager.layers:
        ticket, address, _ = state.engine.acquire(
            layer.member, state.stream(), layer.stamp(), _core.FORWARD, -1, 0.0
        )
        tickets.append(ticket)
        if any(s.address <= address < s.address + s.nbytes for s in lent):
            break
    else:
        pytest.fail("nothing is in what the other model lent")
    lender.detach()
    assert set(lent) <= set(state.segments), "a call computes in it"
    assert lender.attachment.pieces.buffers == []
    with pytest.raises(OffloadError, match="detach when forward and backward have returned"):
        manager.detach()
    for ticket in tickets:
        state.engine.release(ticket, state.stream())
    if meanwhile == "trains":
        assert_models_agree(staying, resident, tower_step, device=device)
    elif meanwhile == "detaches":
        manager.detach()
    else:
        with attached(other, device):
            assert_models_agree(other, other_resident, tower_step, device=device)
    assert not set(lent) & set(state.segments)
    assert "not give back" not in caplog.text
    if meanwhile != "detaches":
        manager.detach()
