"""Machines that refuse to page-lock: training there, what is locked of the weights, what is said.

The wall is the simulated driver's quota, on which registration and allocation draw together.
"""

from __future__ import annotations

import copy
import logging
import mmap
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from equality import assert_same, attached, gradients
from torch import nn

import oracle_offload
from oracle_offload import _core
from oracle_offload.engine import simulator
from oracle_offload.host.sizes import MIB
from oracle_offload.model import locking, masters
from oracle_offload.model.locking import headroom

WIDTH = 1024  # 4 MiB a layer, in float32
SLACK = 64 * MIB  # what may stay unlocked though there is room


class Tower(nn.Module):
    """So many layers that their weights have `nbytes`; four of them are trained."""

    def __init__(self, nbytes: int, width: int = WIDTH) -> None:
        super().__init__()
        count = nbytes // (4 * width * width)
        base = torch.randn(width, width) / width**0.5  # drawing each one takes most of the time
        self.width = width
        self.layers = nn.ModuleList()
        for number in range(count):
            layer = nn.utils.skip_init(nn.Linear, width, width, bias=False)
            layer.weight.data.copy_(base.roll(number, 0))
            self.layers.append(layer.requires_grad_(number % max(1, count // 4) == 0))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x)) if number % 2 else torch.tanh(layer(x))
        return x


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def build(nbytes, width=WIDTH):
    """Return a model, what three resident steps give, and the weights they lead to."""
    torch.manual_seed(0)
    model = Tower(nbytes, width)
    start = copy.deepcopy([p.detach() for p in trained(model)])
    expected = train(model)
    after = [p.detach().clone() for p in trained(model)]
    for parameter, value in zip(trained(model), start, strict=True):
        parameter.data.copy_(value)
    return model, expected, after


def train(model, steps=3):
    """Train for some steps; return losses and gradients."""
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    seen = []
    for number in range(steps):
        torch.manual_seed(number)
        loss = model(torch.randn(2, model.width)).square().sum()
        loss.backward()
        seen.append((loss.detach().clone(), copy.deepcopy(gradients(model))))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return seen


def assert_trains_alike(wall, nbytes, width=WIDTH, **options):
    model, expected, after = build(nbytes, width)
    with simulator.lock_quota(wall), attached(model, "cpu", **options) as manager:
        managed = manager.attachment.weight_bytes
        assert managed == nbytes and len(manager.layers) == len(model.layers)
        stats = manager.state.engine.stats()
        live = simulator.live()
        assert stats["locked_bytes"] == live.registered_bytes + live.host_alloc_bytes
        assert_same(train(model), expected)
        assert_same(trained(model), after)
        # Nothing more was locked on the way, and the driver agrees.
        live = simulator.live()
        assert stats["locked_bytes"] == live.registered_bytes + live.host_alloc_bytes
        assert manager.state.engine.stats()["locked_bytes"] == stats["locked_bytes"]
    return stats


def assert_within(stats, wall):
    assert stats["locked_bytes"] <= wall - headroom(wall)
    assert stats["locked_bytes"] >= max(0, wall - headroom(wall) - SLACK)


@pytest.mark.parametrize(
    ("wall", "nbytes"),
    [
        (0, 64 * MIB),
        (16 * MIB, 64 * MIB),
        (56 * MIB, 72 * MIB),
        (56 * MIB, 112 * MIB),  # of which half is locked, less the headroom
        (102 * MIB, 68 * MIB),  # and two rings make 100: the headroom is left all the same
    ],
)
def test_a_model_trains_behind_a_wall_with_the_same_bits(wall, nbytes):
    stats = assert_trains_alike(wall, nbytes)
    assert_within(stats, wall)
    assert (stats["ring_bytes"] == 0) == (wall == 0)
    assert stats["pageable_bytes"] >= max(1, nbytes - wall)
    assert stats["locked_bytes"] > stats["ring_bytes"] or nbytes != 2 * wall


@pytest.mark.slow
@pytest.mark.parametrize("wall", [128 * MIB, 256 * MIB, 768 * MIB])
def test_a_large_model_trains_behind_a_wall_with_the_same_bits(wall):
    stats = assert_trains_alike(wall, 5 * wall // 4, width=2048)
    assert_within(stats, wall)


def test_pieces_that_were_locked_before_the_wall_was_met_leave_their_headroom(monkeypatch):
    """The wall is met by the fourth piece, when 5% of it are taken already."""
    monkeypatch.setattr(masters, "PIECE_BYTES", 16 * MIB)
    wall = 81 * MIB
    stats = assert_trains_alike(wall, 112 * MIB)
    assert_within(stats, wall)
    assert stats["locked_bytes"] > stats["ring_bytes"] == 32 * MIB


@pytest.mark.parametrize("wall", [None, 120 * MIB])
def test_where_all_fits_with_room_to_spare_all_is_locked_and_no_ring_is_left(wall):
    model = Tower(68 * MIB)
    with simulator.lock_quota(2**40 if wall is None else wall), attached(model) as manager:
        stats = manager.state.engine.stats()
        assert stats["locked_bytes"] == 68 * MIB
        assert stats["pageable_bytes"] == stats["ring_bytes"] == 0


class Keeps(nn.Module):
    """Keeps what it is lent, so that its model cannot be closed."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(512, 512), requires_grad=False)

    def forward(self, x):
        self.__dict__["kept"] = self.table
        return x @ self.table


def test_an_end_that_is_refused_stops_what_is_copied():
    """At the exit of the interpreter, say: copy threads would outlive the arena."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)), Keeps()).requires_grad_(False)
    with torch.no_grad():
        manager = oracle_offload.attach(model, "cpu", lock="never", offload_percent=0.0)
        engine, attachment = manager.state.engine, manager.attachment
        model[-1](torch.ones(2, 512))
        model[0](torch.ones(2, 512))
    assert len(engine.residents()) > 2, "nothing was copied ahead"
    manager.finalizer()  # what exit, and the end of the model, call
    assert attachment.is_attached and [pins for *_, pins in engine.residents()] == [1]
    del model[-1].__dict__["kept"]
    attachment.close_if_left()
    assert not attachment.is_attached


def test_nothing_is_locked_that_must_never_be_but_a_ring():
    stats = assert_trains_alike(2**40, 16 * MIB, lock="never")
    assert stats["pageable_bytes"] == 16 * MIB
    assert stats["locked_bytes"] == stats["ring_bytes"] > 0


@pytest.mark.parametrize("lock", ["always", None, True])
def test_a_lock_that_is_none_is_refused_with_its_value(lock):
    with pytest.raises(ValueError, match=f"lock={lock!r} is neither 'auto' nor 'never'"):
        oracle_offload.attach(nn.Sequential(nn.Linear(8, 8)), "cpu", lock=lock)


def test_two_models_share_the_wall():
    """The second finds it taken: it trains through the ring that the first reserved."""
    wall = 64 * MIB
    first, second = Tower(80 * MIB), Tower(32 * MIB)
    torch.manual_seed(1)
    x = torch.randn(2, WIDTH)
    expected = first(x), second(x)
    with simulator.lock_quota(wall), attached(first) as one:
        before = one.state.engine.stats()["locked_bytes"]
        assert wall - headroom(wall) - SLACK <= before <= wall - headroom(wall)
        with attached(second):
            assert one.state.engine.stats()["locked_bytes"] <= wall - headroom(wall)
            assert_same((first(x), second(x)), expected)


def test_weights_that_replace_others_keep_within_the_wall():
    wall = 64 * MIB
    model = Tower(80 * MIB)
    with simulator.lock_quota(wall), attached(model) as manager:
        for layer in list(model.layers)[:6]:
            layer.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        manager.refresh()
        stats = manager.state.engine.stats()
        assert stats["locked_bytes"] <= wall - headroom(wall)
        assert len(manager.layers) == len(model.layers)


# ---- what is said ----


@pytest.mark.parametrize(
    ("wall", "way"), [(0, "the driver"), (2 * MIB, "rings of 1.88 MiB"), (None, None)]
)
def test_the_summary_says_what_is_locked_and_how_fast_the_rest_is(wall, way):
    model = Tower(8 * MIB)
    with simulator.lock_quota(2**40 if wall is None else wall), attached(model) as manager:
        usage = manager.memory_summary().devices[0]
        assert usage.unlocked_h2d_gbps is None
        model(torch.randn(2, WIDTH))
        usage = manager.memory_summary().devices[0]
        stats, text = manager.state.engine.stats(), str(manager.memory_summary())
    assert usage.locked_bytes == stats["locked_bytes"] and usage.ring_bytes == stats["ring_bytes"]
    if way is None:
        assert "which is copied through" not in text and usage.unlocked_h2d_gbps is None
        assert stats["unlocked_h2d_bytes"] == 0
    else:
        assert f"which is copied through | {way}, " in " ".join(text.split()) and " GB/s" in text
        assert stats["unlocked_h2d_bytes"] == stats["h2d_bytes"] > 0
        seconds = stats["unlocked_h2d_seconds"]
        assert usage.unlocked_h2d_gbps == stats["unlocked_h2d_bytes"] / seconds / 1e9


@pytest.mark.parametrize(
    ("platform", "dxg", "words"),
    [
        ("win32", False, ("Windows (WDDM)", "half of the memory")),
        ("linux", True, ("WSL2", "WDDM", ".wslconfig")),
        ("linux", False, ("ulimit -l", "attach(..., lock=")),
    ],
)
def test_a_warning_names_what_locks_so_little(monkeypatch, caplog, platform, dxg, words):
    real = locking.os.path.exists
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(
        locking.os.path, "exists", lambda path: dxg if path == "/dev/dxg" else real(path)
    )
    said = locking.advice()
    monkeypatch.undo()
    assert all(word in said for word in words)
    monkeypatch.setattr(locking, "advice", lambda: said)
    with simulator.lock_quota(0), caplog.at_level(logging.WARNING), attached(Tower(8 * MIB)):
        (record,) = [r for r in caplog.records if "page-lock" in r.getMessage()]
    assert record.getMessage().endswith(said)
    assert "Tower: the system does not page-lock 8.00 MiB of its weights (cuMemHostAlloc: " in (
        record.getMessage()
    )


def test_what_is_unlocked_again_for_the_headroom_is_told(caplog):
    with (
        simulator.lock_quota(102 * MIB),
        caplog.at_level(logging.WARNING),
        attached(Tower(68 * MIB)) as manager,
    ):
        unlocked = manager.state.engine.stats()["pageable_bytes"]
    (record,) = [r for r in caplog.records if "page-lock" in r.getMessage()]
    assert f"{unlocked / MIB:.2f} MiB of its weights (no headroom was left)" in record.getMessage()


def test_a_ring_that_is_refused_is_told(caplog):
    refused = simulator.fault("cuMemHostAlloc", result=2)
    with (
        caplog.at_level(logging.WARNING),
        refused,
        attached(Tower(8 * MIB), lock="never") as manager,
    ):
        assert "refusals to page-lock some" in str(manager.memory_summary())
    (record,) = [r for r in caplog.records if "page-lock" in r.getMessage()]
    assert "page-locked memory in addition to the weights (cuMemHostAlloc: " in record.getMessage()


# ---- the end of a process whose copy threads are alive ----

LIFE = """
import os, sys
import torch
from torch import nn
import oracle_offload
from oracle_offload.engine import simulator

model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
manager = oracle_offload.attach(model, "cpu", lock="never")
model(torch.randn(2, 512)).sum().backward()
assert manager.state.engine.stats()["unlocked_h2d_bytes"] > 0
if sys.argv[1] == "leaked":  # nothing is closed: as if a reference cycle had kept it from being so
    import gc, weakref
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    gc.disable()
    sys.modules["kept"] = manager
elif sys.argv[1] == "forked":
    child = os.fork()
    if child == 0:
        sys.exit(3)  # with all that Python does at an end
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    model(torch.randn(2, 512)).sum().backward()
print(len(simulator.reports()))
"""


@pytest.mark.parametrize(
    "how",
    [
        "finalised",
        "leaked",
        pytest.param("forked", marks=pytest.mark.skipif(sys.platform == "win32", reason="no fork")),
    ],
)
def test_a_process_ends_while_copy_threads_are_alive(how):
    done = subprocess.run(
        [sys.executable, "-c", LIFE, how], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


# ---- the law, in small: pieces of 256 KiB that can be cut at each 64 KiB ----

CUT = 64 << 10


class Lockable(SimpleNamespace):
    @property
    def is_known(self):
        return self.buffer.known


def piece_of(cuts=4, uses=0):
    buffer = _core.HostBuffer(cuts * CUT)
    return Lockable(
        buffer=buffer,
        uses=uses,
        cuts=[number * CUT for number in range(cuts + 1)],
        locked_bytes=0,
    )


@pytest.fixture
def state():
    """A device with an engine that has locked next to nothing."""
    with attached(nn.Linear(64, 64), "cpu", lock="never") as manager:
        yield manager.state


def locked_bytes(state):
    return state.engine.stats()["locked_bytes"]


def test_a_piece_is_locked_as_far_as_the_limit_allows(state):
    before = locked_bytes(state)
    budget = locking.LockBudget(state, "it", 6 * CUT + 100)
    pieces = [piece_of() for _ in range(3)]
    for number, piece in enumerate(pieces):
        budget.lock(piece, pieces[:number])
    assert [piece.locked_bytes // CUT for piece in pieces] == [4, 2, 0]
    assert all(piece.is_known for piece in pieces)
    assert locked_bytes(state) - before == 6 * CUT
    for piece in pieces:
        budget.unlock(piece)
        budget.unlock(piece)  # which is forgotten already
    assert not any(piece.is_known for piece in pieces) and locked_bytes(state) == before


@pytest.mark.parametrize(("limit", "locked"), [(0, 0), (CUT - 1, 0), (CUT, 1), (4 * CUT, 4)])
def test_a_cut_is_taken_up_to_the_limit_itself(state, limit, locked):
    piece = piece_of()
    locking.LockBudget(state, "it", limit).lock(piece, [])
    assert piece.locked_bytes == locked * CUT and piece.is_known
    state.engine.unlock(piece.buffer)


@pytest.mark.parametrize("used", [False, True])
def test_beyond_the_wall_the_newest_that_is_not_used_is_unlocked(state, used, caplog):
    before = locked_bytes(state)
    budget = locking.LockBudget(state, "it", float("inf"))
    pieces = [piece_of(), piece_of(uses=int(used)), piece_of()]
    with simulator.lock_quota(before + 8 * CUT):
        for number, piece in enumerate(pieces):
            budget.lock(piece, pieces[:number])
    # The wall is met by the third; a twentieth of it is left to others.
    most = before + 8 * CUT - headroom(before + 8 * CUT)
    locked = [piece.locked_bytes // CUT for piece in pieces]
    assert locked == ([3, 4, 0] if used else [4, 3, 0])
    assert locked_bytes(state) == before + 7 * CUT <= most < before + 8 * CUT
    assert all(piece.is_known for piece in pieces)
    assert not budget.allows(0, pieces[:1])
    with caplog.at_level(logging.WARNING):
        budget.leave_headroom(pieces)
        budget.leave_headroom(pieces)
    (said,) = caplog.messages
    assert said.startswith("it: the system does not page-lock 320.00 KiB of its weights (")
    for piece in pieces:
        budget.unlock(piece)


def test_more_may_be_locked_beside_masters_that_all_are():
    budget = locking.LockBudget(None, "it", 100)

    def masters_of(*locked):
        return [SimpleNamespace(buffer=SimpleNamespace(nbytes=30), locked_bytes=n) for n in locked]

    assert budget.allows(40, masters_of(30, 30)) and not budget.allows(41, masters_of(30, 30))
    assert not budget.allows(0, masters_of(30, 29)) and budget.allows(100, [])


def test_a_twentieth_is_headroom_and_whole_pages_are_locked():
    assert [headroom(wall) for wall in (0, 19, 20, 40 * MIB, 1 << 40)] == [
        0, 0, 1, 2 * MIB, 256 * MIB,
    ]  # fmt: skip
    page = mmap.PAGESIZE
    assert [locking.whole_pages(n) for n in (0, 1, page, page + 1)] == [0, page, page, 2 * page]


class Watched:
    """An engine that notes what it unlocks; then others may lock all that is left."""

    def __init__(self, state, others_are_quick):
        self._engine, self._others_are_quick = state.engine, others_are_quick
        self.unlocked = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def unlock(self, buffer):
        self._engine.unlock(buffer)
        self.unlocked.append(buffer)
        if self._others_are_quick:
            simulator.set_lock_quota(self._engine.stats()["locked_bytes"])


@pytest.mark.parametrize("others_are_quick", [False, True])
def test_what_is_unlocked_for_the_wall_and_cannot_be_locked_again_is_known_still(
    state, monkeypatch, others_are_quick
):
    budget = locking.LockBudget(state, "it", float("inf"))
    pieces = [piece_of() for _ in range(3)]
    engine = Watched(state, others_are_quick)
    with simulator.lock_quota(locked_bytes(state) + 8 * CUT), monkeypatch.context() as patch:
        patch.setattr(state, "engine", engine)
        for number, piece in enumerate(pieces):
            budget.lock(piece, pieces[:number])
    assert [piece.locked_bytes // CUT for piece in pieces] == [4, 0 if others_are_quick else 3, 0]
    assert all(piece.is_known for piece in pieces)
    assert pieces[0].buffer not in engine.unlocked, "there was no need"
    for piece in pieces:
        budget.unlock(piece)


@pytest.mark.parametrize("missing", [0, mmap.PAGESIZE])
def test_a_twentieth_of_what_may_be_locked_is_room_enough(state, monkeypatch, caplog, missing):
    budget = locking.LockBudget(state, "it", float("inf"))
    pieces = [piece_of(19), piece_of(19)]
    for number, piece in enumerate(pieces):
        budget.lock(piece, pieces[:number])
    locked = locked_bytes(state)
    monkeypatch.setattr(locking, "WORTH_PROBING_BYTES", locked)
    room = locking.whole_pages(locked // 19) - missing
    with simulator.lock_quota(locked + room), caplog.at_level(logging.WARNING):
        budget.leave_headroom(pieces)
    assert pieces[0].locked_bytes == 19 * CUT
    assert (pieces[1].locked_bytes < 19 * CUT) == bool(missing)
    assert ["(no headroom was left)" in said for said in caplog.messages] == [True] * bool(missing)
    for piece in pieces:
        budget.unlock(piece)


def test_a_wall_that_was_met_is_not_looked_for_again(state, monkeypatch, caplog):
    """What others lock of the headroom is theirs."""
    monkeypatch.setattr(locking, "WORTH_PROBING_BYTES", 1)
    budget = locking.LockBudget(state, "it", float("inf"))
    pieces = [piece_of() for _ in range(3)]
    with simulator.lock_quota(locked_bytes(state) + 8 * CUT):
        for number, piece in enumerate(pieces):
            budget.lock(piece, pieces[:number])
    before = [piece.locked_bytes for piece in pieces]
    with simulator.lock_quota(locked_bytes(state)), caplog.at_level(logging.WARNING):
        budget.leave_headroom(pieces)
    assert [piece.locked_bytes for piece in pieces] == before
    (said,) = caplog.messages
    assert "CUDA_ERROR_OUT_OF_MEMORY" in said
    for piece in pieces:
        budget.unlock(piece)


def test_rings_grow_for_a_larger_model_and_stay_for_a_smaller_one(state):
    budget = locking.LockBudget(state, "it", float("inf"))

    def ring_bytes():
        return state.engine.stats()["ring_bytes"]

    budget.reserve_rings(4 * CUT)
    assert ring_bytes() == 8 * CUT
    with simulator.lock_quota(0):
        for wanted in (1, CUT, 4 * CUT):
            budget.reserve_rings(wanted)
            assert ring_bytes() == 8 * CUT
    assert budget.allows(0, []), "nothing was refused"
    budget.reserve_rings(5 * CUT)
    assert ring_bytes() == 10 * CUT


def test_rings_give_way_last_where_nothing_else_is_beyond_the_wall(state):
    budget = locking.LockBudget(state, "it", float("inf"))
    budget.reserve_rings(4 * CUT)
    wall = locked_bytes(state)
    assert wall == 8 * CUT
    piece = piece_of()
    with simulator.lock_quota(wall):
        budget.lock(piece, [])
        assert piece.is_known and piece.locked_bytes == 0
        assert 0.8 * wall < locked_bytes(state) <= wall - headroom(wall)
    budget.unlock(piece)


def test_a_piece_that_comes_after_attach_and_is_refused_is_told(state, caplog):
    budget = locking.LockBudget(state, "it", float("inf"))
    budget.leave_headroom([])
    piece = piece_of()
    with simulator.lock_quota(locked_bytes(state)), caplog.at_level(logging.WARNING):
        budget.lock(piece, [])
    (said,) = caplog.messages
    assert said.startswith("it: the system does not page-lock 256.00 KiB of its weights (")
    budget.unlock(piece)
