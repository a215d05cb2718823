"""One engine per device: its stamps, which listeners it calls, and how long it is open."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch
from equality import Through, attached
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint

from oracle_offload import OffloadError
from oracle_offload.engine import engines, phases
from oracle_offload.engine.engines import DeviceState, Layout, Segment

CPU = torch.device("cpu")


@pytest.fixture
def state():
    with engines.opened(CPU) as opened:
        yield opened


def step():
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()


def test_torch_is_told_of_the_hooks_once(state):
    hooks = torch_optimizer._global_optimizer_pre_hooks
    before = len(hooks)
    engines._install_hooks()  # as where the engine of another device is opened
    assert len(hooks) == before


# ---- what it knows ----


def test_each_member_of_a_fetched_unit_is_stamped(state, monkeypatch):
    stamped = []

    class Engine(Through):
        def stamp(self, rows):
            stamped.append(rows)

    monkeypatch.setattr(state, "engine", Engine(state.engine))
    for unit, member in ((1, 10), (1, 11), (2, 20)):
        state.add_member(unit, member, lambda member=member: 7 * member)
    row = state.stamps[1]
    state.stamp_units((2, 3, 1))
    assert stamped.pop() == [(20, 140), (10, 70), (11, 77)]
    state.forget_member(2, 20)
    state.forget_member(1, 10)
    state.forget_member(1, 99)
    state.forget_member(4, 10)
    assert {unit: [*row] for unit, row in state.stamps.items()} == {1: [11]}
    assert [*row] == [10, 11], "a row that somebody reads is not changed"


def test_a_member_that_another_thread_lets_go_of_is_not_stamped():
    """Between a copy and its stamp. The engine stamps the others: see tests/c/test_units.c."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).requires_grad_(False)
    with attached(model, "cpu") as manager:
        model(torch.ones(2, 16))
        state = manager.state
        first, second = manager.layers[:2]
        units = tuple({first.unit, second.unit})
        state.engine.remove_member(first.member)
        with pytest.raises(OffloadError, match=rf"member {first.member} is not attached"):
            state.stamp_units(units)  # the thread that lets go of it has the lock

        def stamp_meanwhile():
            state.forget_member(first.unit, first.member)
            return 12345

        state.add_member(second.unit, second.member, stamp_meanwhile)
        state.stamp_units(units)
        assert all(first.member not in row for row in state.stamps.values())


def test_memory_of_the_arena_is_found_by_its_addresses(state):
    assert Segment(1024, CPU).address % 256 == 0
    made = sorted((Segment(1024, CPU) for _ in range(3)), key=lambda segment: segment.address)
    for segment in made:
        assert segment.base <= segment.address
        assert segment.address + 1024 <= segment.base + segment.storage.nbytes()
    version, forgot = Layout.version, []
    state.join(listener := Hears(forgot))
    state.exchange_segments([], [made[2], made[0], made[1]])
    assert state.segments == tuple(made) and Layout.version == version + 1 and not forgot
    for segment in made:
        for address in (segment.address, segment.address + 1023):
            storage, base = state.storage_at(address)
            assert storage.data_ptr() == base == segment.base
    for address in (made[0].address - 1, made[2].address + 1024, 0):
        with pytest.raises(OffloadError) as refused:
            state.storage_at(address)
        assert str(refused.value) == (
            f"the engine answered {address:#x}, which is in no segment of the arena"
        )
    state.exchange_segments(made[:2], [])
    assert state.segments == (made[2],) and Layout.version == version + 2
    assert forgot == ["forget_views"]
    state.exchange_segments(made[2:], [])
    state.leave(listener)


def test_the_clock_stands_beside_the_counters(state):
    before = state.kind.now_s()
    found = state.counters()
    assert before <= found.pop("now_s") <= state.kind.now_s()
    assert found == state.engine.stats()
    assert [*state.counters({"waits": 3})] == ["waits", "now_s"]


@pytest.mark.parametrize(("value", "verified"), [(None, 0), ("", 0), ("0", 0), ("1", 1)])
def test_weights_are_verified_where_that_is_asked_for(monkeypatch, value, verified):
    monkeypatch.delenv("ORACLE_OFFLOAD_VERIFY", raising=False)
    if value is not None:
        monkeypatch.setenv("ORACLE_OFFLOAD_VERIFY", value)
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    nbytes = model[0].weight.nbytes
    with attached(model, offload_percent=0.0) as manager, torch.no_grad():
        for moved in (nbytes, nbytes * (1 + verified)):
            model(torch.ones(1, 512))
            assert manager.state.engine.stats()["h2d_bytes"] == moved
            model[0].weight.detach().numpy()[7, 13] += 8.0  # torch does not see it


def test_what_torch_holds_for_nobody_is_free(state, monkeypatch):
    free, _ = state.engine.mem_info()
    monkeypatch.setattr(state.kind, "cached_bytes", lambda: 4096)
    assert state.free_bytes() == free + 4096


def test_a_use_flushes_the_kernels_before_it_and_of_29_one_looks_whether_the_device_is_idle(
    state, monkeypatch
):
    looks, flushed = [], []
    monkeypatch.setattr(
        state.kind, "is_idle", lambda stream: looks.append(state.pace.uses) is not None
    )
    monkeypatch.setattr(state.time, "flush", flushed.append)
    for use in range(1, 61):
        state.time.pending_kernel_s = 0.5 if use == 7 else 0.0
        assert state.begin_use() == state.stream()
        assert flushed == [state.stream()] * (use >= 7)
    assert looks == [1, 30, 59]


# ---- which listeners and observers are called ----


class Hears:
    """A listener, or an observer, that notes each of its calls."""

    def __init__(self, heard, trains=False, name=""):
        self.heard, self.trains, self.name = heard, trains, name

    def __getattr__(self, what):
        def hear(*arguments):
            self.heard.append(f"{self.name}{what}")
            if what == "before_step":
                return self.trains
            if what == "ended_step" and self.name:
                return lambda: self.heard.append(f"{self.name}afterwards")
            return None

        return hear


def test_listeners_hear_of_forwards_and_steps_until_they_leave(state):
    heard, other = [], []
    first, second = Hears(heard), Hears(other)
    for listener in (first, second, first):
        state.join(listener)
    assert state.listeners == (first, second)
    state.turned, passes = True, state.pace.passes
    state.begin_forward()
    assert heard == other == ["before_forward"]
    assert not state.turned and state.pace.passes == passes + 1
    step()
    assert heard == other == ["before_forward", "before_step", "after_step"]
    state.leave(first)
    step()
    assert len(heard) == 3 and other[3:] == ["before_step", "after_step"]
    state.leave(second)
    assert state.listeners == ()


@pytest.mark.parametrize("trains", [False, True])
def test_masters_are_held_over_the_step_that_trains_one(state, monkeypatch, trains):
    calls = []

    class Engine(Through):
        def __getattr__(self, name):
            if name in ("hold", "resume"):
                calls.append(name)
            return super().__getattr__(name)

    monkeypatch.setattr(state, "engine", Engine(state.engine))
    step()
    assert calls == [], "no listener is there"
    listeners = Hears([]), Hears([], trains)
    for listener in listeners:
        state.join(listener)
    step()
    assert calls == ["hold"] * trains + ["resume"]
    for listener in listeners:
        state.leave(listener)


class Squared(nn.Module):
    """No kind of its own: lent as a whole."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, 128) / 12, requires_grad=False)

    def forward(self, x):
        return x @ self.weight @ self.weight


@pytest.mark.parametrize("kind", ["linear", "any", "compiled"])
def test_the_arena_grows_before_a_forward_takes_its_first_weight(kind):
    """Else the units that the first one fetches are where others have their places by then."""
    layers = [Squared() if kind == "any" else nn.Linear(128, 128) for _ in range(8)]
    blocks = nn.ModuleList(
        nn.Sequential(*[part for layer in layers[at : at + 4] for part in (layer, nn.Tanh())])
        for at in (0, 4)
    )
    blocks.requires_grad_(False)

    def forward():
        x = torch.ones(2, 128, requires_grad=True)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.sum()

    with attached(blocks, offload_percent=1.0) as manager:
        arena, state = manager.attachment.arena, manager.state
        run = torch.compile(forward, backend="aot_eager") if kind == "compiled" else forward
        before, grown = arena.capacity_bytes, []
        run().backward()
        assert arena.capacity_bytes == before

        class Engine(Through):
            def use(self, *arguments):
                grown.append(arena.capacity_bytes)
                return self.real.use(*arguments)

        state.engine = Engine(state.engine)
        run()
        state.engine = state.engine.real
        assert len(grown) == 8 and min(grown) > before


def test_no_arena_grows_in_a_capture(state, monkeypatch):
    heard = []
    monkeypatch.setattr(
        state, "listeners", [SimpleNamespace(before_forward=lambda: heard.append(1))]
    )
    for capturing in (True, False):
        monkeypatch.setattr(state.kind, "is_capturing", lambda stream, now=capturing: now)
        state.turned = True
        state.begin_forward()
        assert (state.turned, heard) == ((True, []) if capturing else (False, [1]))


def test_observers_hear_of_devices_and_of_steps_from_the_first_use_on():
    heard, model = [], nn.Sequential(nn.Linear(8, 8))
    first, second = Hears(heard, name="1: "), Hears(heard)
    assert engines.observe(first) == [] and engines.observe(second) == []
    with attached(model) as manager:
        assert heard == ["1: opened", "opened"]
        engines.ignore(second)
        assert engines.observe(second) == [manager.state] == engines.open_states()
        heard.clear()
        model(torch.ones(1, 8)).sum().backward()
        step()
        assert heard == [
            *("1: begins_step", "begins_step"),
            *("1: ended_step", "ended_step", "1: afterwards"),
        ]
        heard.clear()
        step()
        assert heard == ["1: begins_step", "begins_step"], "another optimizer of the same step"
        heard.clear()
    assert heard == ["1: leaving", "leaving", "1: closing", "closing"]
    engines.ignore(first)
    heard.clear()
    with engines.opened(CPU):
        step()
    assert heard == ["opened", "closing"], "a step calls no observer where no listener is"
    engines.ignore(second)
    assert engines.observers == ()


def test_a_phase_begins_where_somebody_listens(state):
    assert engines.phase_now() == phases.FIRST
    listener = Hears([])
    try:
        engines.begin_phase("sampling")
        assert engines.phase_now() == "sampling"
        assert [*state.phases.counted(state.counters())] == [phases.FIRST], "no listener is there"
        state.join(listener)
        engines.begin_phase("evaluation")
        assert [*state.phases.counted(state.counters())] == [phases.FIRST, "evaluation"]
    finally:
        engines.begin_phase(phases.FIRST)
        state.leave(listener)


# ---- for how long ----


def test_an_engine_is_open_while_somebody_needs_it():
    with engines.opened(CPU) as state:
        assert engines.open_state(CPU) is state and state.openings == 1
        with engines.opened(CPU) as again:
            assert again is state and state.openings == 2
        assert engines.open_states() == [state]
        state.join(listener := Hears([]))
    assert engines.open_states() == [state] and state.openings == 0
    engines.close_if_unused(state)
    assert engines.open_states() == [state]
    state.leave(listener)
    engines.close_if_unused(state)
    assert engines.open_states() == []
    engines.close_if_unused(state)
    with engines.opened(CPU) as anew:
        assert anew is not state and isinstance(anew, DeviceState)
        engines.close_if_unused(state)
        assert engines.open_states() == [anew], "the state of before has no say in it"


def test_a_child_knows_that_models_are_attached_in_its_parent():
    assert engines.parent_process() is None

    def in_a_child(ask):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.write(writing, repr(ask()).encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(pid, 0)
        with os.fdopen(reading) as pipe:
            return pipe.read()

    with attached(nn.Sequential(nn.Linear(8, 8))) as manager:
        assert engines.parent_process() is None
        assert in_a_child(engines.parent_process) == repr(os.getpid())
        assert in_a_child(engines.open_states) == "[]"
        held = manager.attachment
        assert in_a_child(lambda: (held.close(), held.is_attached)) == "(None, True)"

        def refused():
            for use in (lambda: engines.open_state(CPU), manager.state.check_process):
                with pytest.raises(OffloadError, match="used in a forked child"):
                    use()
            return "refused"

        assert in_a_child(refused) == "'refused'"
    assert engines.parent_process() is None
    assert in_a_child(engines.parent_process) == "None"
