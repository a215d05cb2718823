"""The arena: lent where the weights were, grown by the difference, given back."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import ctypes
import weakref
from types import SimpleNamespace

import models
import pytest
import torch
from equality import Through, assert_models_agree, assert_same, attached, resident_pair, step_of
from tiers import in_turn
from torch import nn

import oracle_offload
from oracle_offload import OffloadError, _core
from oracle_offload import manager as managers
from oracle_offload.engine import devices, engines
from oracle_offload.host.sizes import format_size
from oracle_offload.model import arena as arena_module
from oracle_offload.model import masters


def tower_step(model):
    return step_of(torch.ones(2, model[0][0].in_features))(model)


@pytest.mark.parametrize("percent", [1.0, 0.7])
@pytest.mark.parametrize(("kind", "trainable"), [("linear", False), ("conv2d", True)])
def test_the_arena_grows_by_what_a_block_needs_beyond_the_floor(kind, percent, trainable):
    """Also where convolutions are all that is managed."""

    def make():
        return nn.Linear(128, 128) if kind == "linear" else nn.Conv2d(128, 128, 1)

    blocks = [
        nn.Sequential(*[part for _ in range(4) for part in (make(), nn.Tanh())]) for _ in range(4)
    ]
    managed, resident = resident_pair(models.Tower(*blocks).requires_grad_(trainable))

    step = step_of(torch.ones((4, 128) if kind == "linear" else (4, 128, 1, 1)))
    with attached(managed, "cpu", offload_percent=percent) as manager:
        arena, engine = manager.attachment.arena, manager.state.engine
        assert len(manager.layers) == 16
        before, floor = arena.capacity_bytes, 2 * engine.stats()["largest_unit_bytes"]
        rest = (1 - percent) * engine.stats()["managed_bytes"]
        assert floor + rest <= before < floor + rest + _core.ALIGNMENT
        assert_models_agree(managed, resident, step, steps=3)
        learned = engine.stats()["learned_block_bytes"]
        assert learned > floor, "a block needs no more than the floor: nothing was shown"
        assert arena.capacity_bytes == before + learned - floor
        assert engine.stats()["arena_bytes"] == arena.capacity_bytes
        assert sum(segment.nbytes for segment in arena.segments) == arena.capacity_bytes


@pytest.mark.parametrize("pinned", [False, True], ids=["between layers", "inside a layer"])
def test_the_arena_grows_while_another_thread_computes(pinned):
    """The other thread may be given the new memory at once, and may still hold some of the old."""
    managed, resident = resident_pair(models.tower().requires_grad_(False))
    with attached(managed, "cpu") as manager, contextlib.ExitStack() as held:
        attachment, state, engine = manager.attachment, manager.state, manager.state.engine
        arena = attachment.arena
        before, (old,) = arena.capacity_bytes, arena.segments
        for _ in range(6):
            tower_step(managed)
            if engine.stats()["learned_block_bytes"] > before:
                break
        assert arena.capacity_bytes == before

        def hold(layer):
            ticket, address, _ = engine.acquire(
                layer.member, state.stream(), layer.stamp(), _core.FORWARD, -1, 0.0
            )
            held.callback(engine.release, ticket, state.stream())
            return address

        class Meanwhile(Through):
            """What another thread does while this one is inside `add_segment`."""

            grown = False

            def add_segment(self, *arguments):
                engine.add_segment(*arguments)
                self.grown = True
                if pinned:
                    hold(attachment.layers[-1])
                x = torch.ones(2, 128)
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    found = pool.submit(torch.no_grad()(managed), x).result()
                assert_same(found, resident(x))

        if pinned:
            hold(attachment.layers[0])
        state.engine = Meanwhile(engine)
        assert_models_agree(managed, resident, tower_step, steps=1)
        assert state.engine.grown
        state.engine = engine
        held.close()
        assert_models_agree(managed, resident, tower_step)
        assert arena.capacity_bytes > before
        assert engine.stats()["arena_bytes"] == arena.capacity_bytes
        assert arena.segments[0] is old and len(arena.segments) == 2, "next to the one in use"
        assert sorted(arena.segments, key=lambda s: s.address) == list(state.segments)
        seen = [address for layer in attachment.layers for address in layer.views]
        grown = arena.segments[1]
        assert any(grown.address <= a < grown.address + grown.nbytes for a in seen), "never used"


class DeviceBytes:
    """Bytes on the device from now on: weights that have not left it, and segments of arenas."""

    def __init__(self, monkeypatch, weights=()):
        self.weights = {id(tensor): tensor.nbytes for tensor in weights}
        self.segments = {}
        self.peak = self.now()

        def lend(nbytes, device):
            segment = engines.Segment(nbytes, device)
            self.segments[id(segment)] = segment.tensor.nbytes
            weakref.finalize(segment, self.segments.pop, id(segment))
            self.look()
            return segment

        def move_into(tensor, *arguments):
            masters_move(tensor, *arguments)
            self.weights.pop(id(tensor), None)

        masters_move = masters.move_into
        monkeypatch.setattr(arena_module, "Segment", lend)
        monkeypatch.setattr(masters, "move_into", move_into)

    def now(self):
        return sum(self.weights.values()) + sum(self.segments.values())

    def look(self):
        self.peak = max(self.peak, self.now())


def steady_bytes(model, manager):
    """Bytes to the device in a step, once all has settled."""
    for _ in range(5):
        tower_step(model)
    before = manager.state.engine.stats()["h2d_bytes"]
    for _ in range(4):
        tower_step(model)
    return (manager.state.engine.stats()["h2d_bytes"] - before) / 4


@in_turn("percent,leaves", [1.0, 0.8, 0.5, 0.2], [3, 4, 9])
def test_growing_takes_the_difference_alone(percent, leaves, monkeypatch):
    """And the two segments stream nearly as well as one of their size."""
    counted = DeviceBytes(monkeypatch)
    managed, resident = resident_pair(models.tower(6, leaves, 256).requires_grad_(False))
    with attached(managed, "cpu", offload_percent=percent) as manager:
        arena, engine = manager.attachment.arena, manager.state.engine
        begun, largest = arena.capacity_bytes, engine.stats()["largest_unit_bytes"]
        assert_models_agree(managed, resident, tower_step, steps=4)
        grown = arena.capacity_bytes
        needed = engine.stats()["learned_block_bytes"] - 2 * largest
        most = engine.stats()["managed_bytes"]
        assert needed > 0
        assert grown - begun == max(min(needed, most - begun), 2 * largest)
        assert [segment.nbytes for segment in arena.segments] == [begun, grown - begun]
        assert counted.peak <= 1.02 * grown
        moved = steady_bytes(managed, manager)
        assert_models_agree(managed, resident, tower_step)
    with attached(managed, "cpu", vram_budget=grown) as manager:
        (whole,) = manager.attachment.arena.segments
        assert whole.nbytes == min(grown, most + 2 * largest)
        assert moved <= steady_bytes(managed, manager) + 2 * largest


@pytest.mark.parametrize("percent", [1.0, 0.5, 0.0])
def test_attach_takes_the_place_that_the_weights_leave(percent, monkeypatch):
    """A model that is on the device already, and would not fit next to its arena."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
    weights = list(model.parameters())
    before = sum(tensor.nbytes for tensor in weights)
    counted = DeviceBytes(monkeypatch, weights)
    with attached(model, "cpu", offload_percent=percent) as manager:
        assert not counted.weights
        after = manager.attachment.arena.capacity_bytes
        assert before <= counted.peak <= 1.02 * max(before, after)


@pytest.mark.gpu
def test_attach_on_a_gpu_takes_the_place_that_the_weights_leave():
    """The same, as torch counts it."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16))).cuda()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with attached(model, "cuda", offload_percent=0.5):
        after = torch.cuda.memory_allocated()
        assert torch.cuda.max_memory_allocated() <= 1.02 * max(before, after)
        assert torch.cuda.max_memory_reserved() <= 1.05 * max(before, after)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_attach_without_room_changes_nothing(error, device, monkeypatch):
    """The weights have left the device by then: they return, with their gradients."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    expected = copy.deepcopy(model).state_dict()
    identities = list(map(id, model.parameters()))
    model[0].weight.grad = torch.ones(64, 64, device=device)

    def refuse(*arguments):
        raise error("no room")

    monkeypatch.setattr(arena_module, "Segment", refuse)
    with pytest.raises(error, match="no room"):
        oracle_offload.attach(model, device)
    assert list(map(id, model.parameters())) == identities
    where = next(nn.Linear(1, 1).to(device).parameters()).device
    for name, tensor in model.state_dict().items():
        assert tensor.device == where
        assert_same(tensor, expected[name])
    assert model[0].weight.grad.device == where
    assert not engines.open_states()


def test_weights_that_share_memory_move_back_together(device):
    """To the device that an attach which failed has moved them from."""
    kind = devices.KINDS[torch.device(device).type]
    where = torch.empty(0).to(device).device
    tensor = nn.Parameter(torch.arange(6.0))
    other, stayed = tensor.detach(), nn.Parameter(torch.ones(2))
    tensor.grad = torch.ones(6)
    set_data = kind(where).set_data
    cpu = torch.device("cpu")
    masters.move_back([(tensor, where, [other]), (stayed, cpu, [])], set_data)
    assert tensor.device == tensor.grad.device == where
    assert_same(tensor, torch.arange(6.0))
    assert stayed.device == cpu
    if where != cpu:
        assert other.device == where and other.data_ptr() == tensor.data_ptr()


def test_what_torch_holds_for_nobody_counts_as_free(sim, monkeypatch):
    """The arena of a model that was detached is in torch's cache, and can be had again."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 << 20)
    assert devices.Cuda(torch.device("cuda", 0)).cached_bytes() == 600 << 20
    sim.change(memory_bytes=6 << 20)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(16)])
    optimizer = torch.optim.SGD(model.requires_grad_(False).parameters(), lr=0.0)
    for cached in (0, 512 << 10):
        with (
            attached(model, vram_budget="auto") as manager,
            contextlib.ExitStack() as held,
            monkeypatch.context() as patched,
        ):
            free, _ = manager.state.engine.mem_info()
            if cached:
                held.enter_context(taken(sim, manager, free - cached))
            patched.setattr(devices.Simulated, "cached_bytes", lambda kind, n=cached: n)
            patched.setattr(
                devices.Simulated, "release_cached", lambda kind, held=held: held.close()
            )
            assert manager.state.free_bytes() == free == (4 << 20)
            model(torch.ones(1, 512, requires_grad=True)).sum().backward()
            optimizer.step()
            assert manager.attachment.arena.capacity_bytes == int(0.95 * (6 << 20)) // 256 * 256


@contextlib.contextmanager
def taken(sim, manager, left):
    """Somebody else has all of the simulated device but `left` bytes."""
    address = ctypes.c_void_p()
    nbytes = ctypes.c_size_t(manager.state.engine.mem_info()[0] - left)
    with sim._context() as library:
        assert library.cuMemAlloc_v2(ctypes.byref(address), nbytes) == 0
        try:
            yield
        finally:
            assert library.cuMemFree_v2(address) == 0


def test_an_arena_that_finds_no_room_to_grow_tries_again_once_there_is(sim, caplog, monkeypatch):
    managed, resident = resident_pair(models.tower().requires_grad_(False))
    sim.change(memory_bytes=8 << 20)
    with attached(managed) as manager:
        arena = manager.attachment.arena
        begun, tried = arena.capacity_bytes, []
        lend = arena.lend
        monkeypatch.setattr(arena, "lend", lambda nbytes: tried.append(nbytes) or lend(nbytes))

        def tries(left):
            tried.clear()
            with taken(sim, manager, left):
                assert_models_agree(managed, resident, tower_step, steps=3)
            return len(tried)

        with caplog.at_level("WARNING", "oracle_offload"):
            assert tries(4096) == 1, "refused once, not in every step"
            (difference,) = tried
            assert tries(4095 + difference) == 0, "not that much more is free"
            sim.set_fault("simAdopt", 1, 701)
            assert tries(4096 + difference) == 1, "refused again"
        assert len([r for r in caplog.records if "the arena stays" in r.message]) == 1
        assert arena.capacity_bytes == begun == manager.state.engine.stats()["arena_bytes"]
        assert list(manager.state.segments) == arena.segments
        assert tries(4095 + 2 * difference) == 0
        assert tries(4096 + 2 * difference) == 1
        assert arena.capacity_bytes == begun + difference
        assert tries(4 << 20) == 0, "it has grown"


@pytest.fixture
def arena():
    """The arena of 16 layers at its floor, which is two of the largest; and all that they take."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(16))).requires_grad_(False)
    with attached(model, "cpu", offload_percent=1.0) as manager:
        yield SimpleNamespace(
            its=manager.attachment.arena,
            most=manager.attachment.managed_bytes,
            largest=manager.attachment.arena.floor_bytes // 2,
        )


def test_an_arena_that_has_grown_grows_again_for_a_larger_block(arena):
    found = [arena.its.capacity_bytes]
    for units in (4, 4, 3, 7, 7):  # of the blocks that the engine has learned
        arena.its.grow(units * arena.largest, arena.largest, arena.most)
        found.append(arena.its.capacity_bytes)
        assert arena.its.floor_bytes >= units * arena.largest
    begun = found[0]
    assert found[1:4] == [begun + 2 * arena.largest] * 3
    assert found[4:] == [begun + 5 * arena.largest] * 2


def test_an_arena_that_was_resized_grows_only_beyond_its_size(arena):
    its, largest, most = arena.its, arena.largest, arena.most
    size = its.capacity_bytes + 4 * largest
    its.resize(size)
    for block, floor in ((3 * largest, 3 * largest), (2 * largest, 3 * largest), (size, size)):
        its.grow(block, largest, most)
        assert (its.capacity_bytes, its.floor_bytes) == (size, floor)
    its.grow(size + largest, largest, most)
    assert its.capacity_bytes == size + 2 * largest


def test_an_arena_that_holds_all_that_its_model_can_use_does_not_grow(arena):
    its, size, floor = arena.its, arena.its.capacity_bytes, arena.its.floor_bytes
    its.grow(2 * floor, floor // 2, size)
    assert (its.capacity_bytes, its.floor_bytes) == (size, floor)
    its.grow(2 * floor, floor // 2, size + 1)
    assert its.capacity_bytes > size and its.floor_bytes > floor


def test_a_capture_is_refused_before_anything_is_lent(sim):
    """Memory that is allocated while a graph is captured would belong to the graph."""
    managed = models.tower().requires_grad_(False)
    with attached(managed) as manager, sim._context() as library:
        for _ in range(2):
            tower_step(managed)
            learned = manager.state.engine.stats()["learned_block_bytes"]
            if learned > manager.attachment.arena.floor_bytes:
                break
        assert manager.state.turned, "the next forward would grow the arena"
        (before,) = manager.attachment.arena.segments
        stream, graph = ctypes.c_void_p(manager.state.stream()), ctypes.c_void_p()
        assert library.cuStreamBeginCapture_v2(stream, 0) == 0
        with pytest.raises(OffloadError, match="CUDA graph"):
            managed(torch.ones(2, 128, requires_grad=True))
        assert library.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0, "it was broken"
        library.cuGraphDestroy(graph)
        assert manager.attachment.arena.segments == [before]
        tower_step(managed)
        assert len(manager.attachment.arena.segments) == 2


def test_an_address_outside_of_every_segment_is_an_error_of_ours():
    with attached(nn.Sequential(nn.Linear(64, 64))) as manager:
        (segment,) = manager.state.segments
        for address in (segment.address - 1, segment.address + segment.nbytes):
            with pytest.raises(OffloadError, match=f"{address:#x}, which is in no segment"):
                manager.state.storage_at(address)
        assert manager.state.storage_at(segment.address)[0].data_ptr() == segment.base


def test_units_that_come_later_have_room_made_or_are_refused():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    with oracle_offload.attach(model, "cpu", vram_budget="100KiB") as manager:
        arena = manager.attachment.arena
        capacity, floor = arena.capacity_bytes, arena.floor_bytes
        arena.make_room(capacity)
        assert (arena.capacity_bytes, arena.floor_bytes) == (capacity, max(floor, capacity))
        with pytest.raises(OffloadError) as raised:
            arena.make_room(120 << 10)
        assert str(raised.value) == (
            f"they need an arena of 120.00 KiB, and vram_budget allows {format_size(capacity)}; "
            "raise it"
        )
        assert (arena.capacity_bytes, arena.floor_bytes) == (capacity, max(floor, capacity))
        arena.may_grow = True
        before = len(arena.segments)
        arena.make_room((120 << 10) - 1)
        assert arena.capacity_bytes == capacity + (120 << 10) and len(arena.segments) == before + 1
        assert arena.floor_bytes == (120 << 10) - 1
        assert manager.state.engine.stats()["arena_bytes"] == arena.capacity_bytes


def test_what_is_lent_beside_goes_back_with_its_size():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    with oracle_offload.attach(model, "cpu", vram_budget="100KiB") as manager:
        arena, engine = manager.attachment.arena, manager.state.engine
        capacity, segments = arena.capacity_bytes, arena.segments
        for size in (capacity + 4096, capacity + 8192, capacity, capacity - 4096, capacity + 256):
            arena.resize(size)
            assert arena.capacity_bytes == engine.stats()["arena_bytes"] == max(size, capacity)
            assert arena.segments[: len(segments)] == segments
            assert len(arena.segments) == len(segments) + (size > capacity)
        assert model(torch.randn(2, 64)).shape == (2, 64)
        arena.lend_staging(1 << 16)
        assert arena.staging_bytes == 1 << 16
    assert arena.segments == [] and arena.staging_bytes == 0


def test_what_is_free_is_counted_without_what_is_still_to_come():
    """Nine tenths of what is free, less what is kept there for good and what codes pass through."""
    kept = SimpleNamespace(bytes=3 << 20, bytes_to_come=lambda device: 1 << 20)
    for simulated, to_come in ((True, 3 << 20), (False, 1 << 20)):
        engine = SimpleNamespace(mem_info=lambda: (10 << 20, 16 << 20))
        state = SimpleNamespace(
            simulated=simulated, device="a card", engine=engine, free_bytes=lambda: 10 << 20
        )
        budget = oracle_offload.Budget(vram_budget="auto")
        placed = managers._Placed(budget, budget, {}, [], kept, [1 << 30], 1 << 20, *6 * (None,))
        found = managers._capacity(state, placed, 2 << 20)
        expected = int(0.9 * ((10 << 20) - to_come - (2 << 20)))
        assert expected - _core.ALIGNMENT < found <= expected


def test_what_torch_holds_for_nobody_goes_back_before_an_arena_is_resized(monkeypatch):
    """Only a segment of its very size could be lent of it."""
    order = []
    monkeypatch.setattr(
        devices.Simulated, "release_cached", lambda kind: order.append(len(arena.segments))
    )
    with attached(nn.Sequential(nn.Linear(64, 64)), "cpu") as manager:
        arena = manager.attachment.arena
        order.clear()
        for size in (64 << 10, 128 << 10):
            arena.resize(arena.capacity_bytes + size)
            assert len(arena.segments) == 2
        assert order == [1, 1]
