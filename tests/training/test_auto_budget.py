"""`vram_budget="auto"`: the arena follows what each step leaves; bits stay the same.

What is not the arena's is held as it was recorded (tests/data/allocator/record.py), in the memory
of the simulated driver, so that an arena above what is free would be refused there.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import logging
from pathlib import Path

import pytest
import torch
from equality import assert_same, attached, is_simulated, resident_pair
from torch import nn
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.engine import devices
from oracle_offload.engine.devices import Counted
from oracle_offload.model import arena as arena_module
from oracle_offload.model.witness import Witness

RECORDED = Path(__file__).parents[1] / "data" / "allocator"
SCALES = {"spike": 8, "leak": 2, "spill": 2}  # what is outside the arena is so small here


class Net(nn.Module):
    """12 MiB of weights, each block checkpointed, and a head that is trained."""

    def __init__(self, depth=12):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(depth)
        )
        self.head = nn.Linear(256, 8)
        self.blocks.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def train(model, steps, device, each=None, optimizer=None):
    """Train; return the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 256, generator=generator)
        if each is not None:
            each(step)
        loss = model(x.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return losses


class Beside:
    """What is on the simulated device outside the arena, and what torch counts of it all."""

    def __init__(self, sim, monkeypatch, kind, scale, total):
        lines = (RECORDED / f"{kind}.jsonl").read_text().splitlines()
        self.rows = [{k: v // scale for k, v in json.loads(line).items()} for line in lines]
        sim.change(memory_bytes=total)
        self.sim, self.total, self.manager = sim, total, None
        self.address = None
        self.row = self.rows[0]
        self.peak = self.failures = 0
        self.arenas = []
        monkeypatch.setattr(devices.Simulated, "counted", lambda kind: self.counted())
        monkeypatch.setattr(devices.Simulated, "begin_peak", lambda kind: self.begin_peak())

    def arena(self):
        return 0 if self.manager is None else self.manager.attachment.arena.capacity_bytes

    def counted(self):
        """What torch holds: the arena and what is outside it at the end of a step."""
        held = self.arena() + self.row["held_bytes"]
        return Counted(held, max(self.peak, held), self.failures, None)

    def begin_peak(self):
        self.peak = 0

    def step(self, number):
        """The next step begins: what it holds outside the arena takes its place on the device."""
        self.row = self.rows[number % len(self.rows)]
        self.arenas.append(self.arena())
        wanted = self.row["peak_bytes"] + self.arena()
        if wanted + self.row["others_bytes"] > self.total:
            self.failures += 1
        else:
            self.peak = max(self.peak, wanted)
        self.hold(self.row["held_bytes"] + self.row["others_bytes"])

    def hold(self, nbytes):
        self.let_go()
        self.address = ctypes.c_void_p()
        with self.sim._context() as library:
            assert library.cuMemAlloc_v2(ctypes.byref(self.address), ctypes.c_size_t(nbytes)) == 0

    def let_go(self):
        if self.address is not None:
            with self.sim._context() as library:
                assert library.cuMemFree_v2(self.address) == 0
        self.address = None


@contextlib.contextmanager
def beside(sim, monkeypatch, kind, scale=None, total=12 << 20):
    held = Beside(sim, monkeypatch, kind, scale or SCALES[kind], total)
    try:
        yield held
    finally:
        held.let_go()


@pytest.mark.parametrize("witnessed", [False, True], ids=["alone", "witness"])
@pytest.mark.parametrize("kind", ["spike", "leak", "spill"])
def test_the_bits_of_a_training_stay_the_same(sim, monkeypatch, device, kind, witnessed):
    if not is_simulated(device):
        pytest.skip("what is outside the arena is held in the simulated driver")
    managed, resident = resident_pair(Net())
    expected = train(resident, 24, "cpu")
    with (
        beside(sim, monkeypatch, kind) as held,
        attached(managed, device, vram_budget="auto") as manager,
    ):
        held.manager = manager
        assert len(manager.layers) == 25
        floor = manager.attachment.arena.floor_bytes
        with Witness() if witnessed else contextlib.nullcontext():
            losses = train(managed, 24, device, held.step)
        assert manager.state.engine.stats()["h2d_bytes"] > 0
        changes = manager.attachment.auto_budget.changes
        held.let_go()
    assert_same([loss.cpu() for loss in losses], expected)
    assert_same(managed.head.weight.data.cpu(), resident.head.weight.data)
    assert held.arenas[0] == floor < held.arenas[1], "the first step ran on the floor"
    assert changes >= 2, "the arena has never gone down, or up again"
    for number, arena in enumerate(held.arenas):
        row = held.rows[number]
        assert arena + row["held_bytes"] + row["others_bytes"] <= held.total, number


def test_changes_are_reported(sim, monkeypatch, caplog, tmp_path):
    model = Net()
    with beside(sim, monkeypatch, "leak") as held, attached(model, vram_budget="auto") as manager:
        held.manager = manager
        text = str(manager.memory_summary())
        assert "auto budget, changed               | 0 times" in text
        assert "the last time because" not in text
        with (
            caplog.at_level(logging.INFO, "oracle_offload"),
            oracle_offload.record(tmp_path / "run.jsonl") as recorder,
        ):
            train(model, 24, "cpu", held.step)
        held.let_go()
        usage = manager.memory_summary().devices[0].models[0]
        text = str(manager.memory_summary())
        largest = manager.state.engine.stats()["largest_unit_bytes"]
        arena = manager.attachment.arena
    events = recorder.recording().of("arena")
    assert len(events) == usage.budget_changes >= 2
    assert [event["step"] for event in events] == sorted(event["step"] for event in events)
    assert events[0]["model"] == "Net" and events[0]["device"] == "cpu"
    assert events[0]["step"] == 0 and events[0]["phase"] == "training"
    assert events[0]["before_bytes"] == held.arenas[0]
    assert events[0]["capacity_bytes"] == held.arenas[1]
    for one, other in itertools.pairwise(events):
        assert one["capacity_bytes"] == other["before_bytes"]
    assert events[0]["what"] == "a step left room"
    assert {event["what"] for event in events[1:]} == {"the device has less room"}
    assert usage.budget_reason == events[-1]["what"]
    assert usage.look_ahead_units == arena.capacity_bytes // largest - 1
    assert f"{len(events)} times; looks {usage.look_ahead_units} units ahead" in text
    assert "the last time because              | the device has less room" in text
    logged = [record.message for record in caplog.records if "the arena is" in record.message]
    assert len(logged) == len(events) and "look-ahead is" in logged[0]
    found = oracle_offload.observe.read_recording(tmp_path / "run.jsonl")
    assert found.of("arena") == events
    assert "sizes of arenas" in str(found) and found.header["devices"][0]["dropped_arenas"] == 0
    found.export(tmp_path / "run.json")
    found.export(tmp_path / "run.csv")
    assert '"cat": "arena"' in (tmp_path / "run.json").read_text()


def test_look_ahead_shortens_under_pressure_and_returns(sim, monkeypatch):
    """A failure halves what is beyond the floor; after calm steps it grows again."""
    model = Net()
    with (
        beside(sim, monkeypatch, "leak", 16) as held,
        attached(model, vram_budget="auto") as manager,
    ):
        held.rows = held.rows[:1]
        held.manager = manager
        ahead = []

        def each(step):
            held.step(step)
            held.failures += step == 3
            ahead.append(manager.memory_summary().devices[0].models[0].look_ahead_units)

        train(model, 16, "cpu", each)
        held.let_go()
        arena = manager.attachment.arena
        assert ahead[0] < ahead[1] == ahead[2] == ahead[3]
        assert ahead[0] <= ahead[4] < ahead[3]
        assert ahead[4:12] == ahead[4:5] * 8
        assert ahead[4] < ahead[12] < ahead[3]
        assert len(arena.segments) == 2, "what is added is one segment"
        assert manager.state.engine.stats()["arena_bytes"] == arena.capacity_bytes


def test_without_counts_the_kept_units_are_fixed_and_the_rest_is_taken(sim):
    """The simulated driver counts no tensors: of those, the kept units are known."""
    model = Net()
    sim.change(memory_bytes=12 << 20)
    with attached(model, vram_budget="auto", ram_budget=6 << 20) as manager:
        kept = manager.attachment.kept_bytes
        assert kept > 5 << 20
        train(model, 2, "cpu")
        most = int(0.95 * (12 << 20)) - kept
        assert most - 512 < manager.attachment.arena.capacity_bytes <= most


def test_a_second_optimizer_is_no_second_step(sim, monkeypatch):
    model = Net()
    with (
        beside(sim, monkeypatch, "leak", 16) as held,
        attached(model, vram_budget="auto") as manager,
    ):
        held.manager = manager
        seen = []
        budget = manager.attachment.auto_budget
        after_step = budget.after_step
        monkeypatch.setattr(budget, "after_step", lambda *a: seen.append(a) or after_step(*a))
        others = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        train(model, 3, "cpu", lambda step: (others.step(), held.step(step)))
        held.let_go()
        assert len(seen) == 3


def test_two_models_share_what_is_left(sim):
    """And one that changes lets the other forget the peaks that it was part of."""
    one, other = Net(), Net()
    sim.change(memory_bytes=16 << 20)
    with (
        attached(one, vram_budget="auto") as first,
        attached(other, vram_budget="auto") as second,
    ):
        optimizer = torch.optim.SGD([*one.head.parameters(), *other.head.parameters()], lr=0.1)
        for _ in range(12):
            for model in (one, other):
                model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
        sizes = [manager.attachment.arena.capacity_bytes for manager in (first, second)]
        assert sum(sizes) <= 0.95 * (16 << 20)
        assert sum(sizes) > 0.8 * (16 << 20)
        assert min(sizes) > 4 << 20


def test_a_segment_in_use_stays_and_a_refusal_is_survived(sim, monkeypatch):
    """The training goes on with what there is, and grows once there is room again."""
    managed, resident = resident_pair(Net())
    expected = train(resident, 14, "cpu")
    with beside(sim, monkeypatch, "leak", 16) as held:
        held.rows = held.rows[:1]
        with attached(managed, vram_budget="auto") as manager:
            held.manager = manager
            arena, lend = manager.attachment.arena, arena_module.Arena._lend

            def refuse(*arguments):
                raise torch.OutOfMemoryError("no room")

            monkeypatch.setattr(arena_module.Arena, "_lend", refuse)
            sizes = []

            def each(step):
                held.step(step)
                sizes.append(arena.capacity_bytes)
                if step == 1:
                    monkeypatch.setattr(arena_module.Arena, "_lend", lend)

            assert_same(train(managed, 14, "cpu", each), expected)
            held.let_go()
    assert sizes[:9] == sizes[:1] * 9, "it is tried again after eight calm steps"
    assert sizes[-1] > sizes[0]


def test_a_size_that_is_in_use_is_left_as_it_is(monkeypatch):
    model = Net()
    with attached(model, vram_budget="auto") as manager:
        train(model, 2, "cpu")
        arena, engine = manager.attachment.arena, manager.state.engine
        before, added = arena.segments, arena.segments[1]
        train(model, 1, "cpu")
        member = None
        for layer in manager.layers:
            ticket, address, _ = engine.acquire(
                layer.member, manager.state.stream(), layer.stamp(), 0, -1, 0.0
            )
            if added.address <= address < added.address + added.nbytes:
                member = layer
                break
            engine.release(ticket, manager.state.stream())
        assert member is not None, "nothing is in the added segment"
        with pytest.raises(OffloadError):
            arena.resize(arena.floor_bytes)
        assert arena.segments == before
        assert engine.stats()["arena_bytes"] == arena.capacity_bytes
        engine.release(ticket, manager.state.stream())
        arena.resize(arena.floor_bytes)
        assert len(arena.segments) == 1
        assert engine.stats()["arena_bytes"] == arena.capacity_bytes == arena.floor_bytes


def test_what_torch_counts_on_a_card(monkeypatch):
    """Peaks, retries and refusals, and the share that torch may reserve."""
    told = {
        "reserved_bytes": {"all": {"current": 700}},
        "allocated_bytes": {"all": {"peak": 600}},
        "num_ooms": 2,
        "num_alloc_retries": 3,
    }
    share = [1.0]
    begun = []
    card = devices.Cuda(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: told)
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda device: share[0], raising=False
    )
    properties = type("Properties", (), {"total_memory": 1000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", begun.append)
    assert card.counted() == (700, 600, 5, None)
    share[0] = 0.75
    assert card.counted() == (700, 600, 5, 750)
    monkeypatch.setattr(devices.Cuda, "_peaks", {})
    card.begin_peak()
    assert begun == [torch.device("cuda", 0)]
    told["allocated_bytes"]["all"]["peak"] = 400  # the peak was reset
    other = devices.Cuda(torch.device("cuda", 0))
    assert other.counted().peak_bytes == 400 and other.peak_bytes() == 600
    card.begin_peak()
    assert other.peak_bytes() == 600
    told["allocated_bytes"]["all"]["peak"] = 900
    assert other.peak_bytes() == 900
    told.clear()
    assert card.counted() == (0, 0, 0, 750)
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert card.counted() == (0, 0, 0, None)
