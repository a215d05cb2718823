"""The order of `oracle_offload.engine.locks` is kept by threads that do all at once."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import threading

import models
import pytest
import torch
from equality import assert_same
from torch import nn

import oracle_offload
from oracle_offload.engine import engines
from oracle_offload.engine.locks import Lock
from oracle_offload.model import arena, attachment, masters, selection
from oracle_offload.model.witness import Witness

LINES = ("turn", "structure", "activations", "gradients", "device", "registry", "engine")
ROUNDS = 3
LIMIT_S = 120.0


class Observer:
    """Sees which lock a thread waits for while it holds which, and what is changed without one."""

    def __init__(self):
        self.waits = set()  # (line held, line waited for)
        self._turns = set()  # (turn held, turn waited for)
        self.faults = []
        self._thread = threading.local()

    @property
    def held(self):
        """The locks of this thread, and the engine whose call it is in."""
        if not hasattr(self._thread, "held"):
            self._thread.held = []
        return self._thread.held

    def wait(self, line, lock):
        """This thread is about to wait for `lock`, unless it holds it already."""
        if any(other is lock for _, other in self.held):
            return
        for before, other in list(self.held):
            if before == line == "turn":  # from the outside in, in every thread
                self._turns.add((other, lock))
                if (lock, other) in self._turns:
                    self.waits.add((before, line))
            else:
                self.waits.add((before, line))

    def inversions(self):
        """The waits that the order forbids."""
        return {pair for pair in self.waits if LINES.index(pair[0]) >= LINES.index(pair[1])}

    def check(self, lock, what):
        """Something that `lock` protects is changed, or read in more than one step."""
        if not lock.is_held():
            self.faults.append(f"{what} without the {lock.line} lock")


def guarded(base, names):
    """Return a kind of `base` whose methods `names` are for a thread that holds a lock alone."""

    def __init__(self, content, observer, lock, name):
        base.__init__(self, content)
        self.check = functools.partial(observer.check, lock)
        self.name = name

    def checked(name):
        def method(self, *arguments):
            self.check(f"{self.name}.{name}")
            return getattr(base, name)(self, *arguments)

        return method

    methods = {name: checked(name) for name in names.split()}
    return type(f"Guarded_{base.__name__}", (base,), {"__init__": __init__, **methods})


# Changes, and reads of more than one entry.
GuardedDict = guarded(
    dict,
    "__setitem__ __delitem__ __iter__ __reversed__ __or__ __ior__ pop popitem setdefault clear "
    "update keys values items copy",
)
# Changes: `list(guarded)` is one step.
GuardedList = guarded(
    list,
    "__setitem__ __delitem__ __iadd__ __imul__ append extend insert remove pop clear sort reverse",
)


class WatchedEngine:
    """Wraps an engine: each call takes its mutex."""

    def __init__(self, engine, observer):
        self._engine, self._observer = engine, observer

    def __getattr__(self, name):
        found = getattr(self._engine, name)
        if not callable(found):
            return found

        def call(*arguments):
            self._observer.wait("engine", self)
            self._observer.held.append(("engine", self))
            try:
                return found(*arguments)
            finally:
                self._observer.held.pop()

        return call


@pytest.fixture
def observer(monkeypatch, caplog):
    """Everything in the package that is locked, or protected by a lock, is observed."""
    # A captured error keeps the frames of a thread alive, and so the models that they had.
    caplog.set_level(logging.CRITICAL, logger="oracle_offload")
    observer = Observer()
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)
    base = Lock.__base__

    def acquire(lock, blocking=True, timeout=-1):
        if blocking:
            observer.wait(lock.line, lock)
        taken = base.acquire(lock, blocking, timeout)
        if taken:
            observer.held.append((lock.line, lock))
        return taken

    def release(lock, *details):
        assert observer.held.pop() == (lock.line, lock), "locks are given back in turn"
        base.release(lock)

    monkeypatch.setattr(Lock, "acquire", acquire)
    monkeypatch.setattr(Lock, "release", release)
    monkeypatch.setattr(Lock, "__enter__", acquire, raising=False)
    monkeypatch.setattr(Lock, "__exit__", release, raising=False)

    def guard(kind, change):
        create = kind.__init__

        def created(self, *arguments, **options):
            create(self, *arguments, **options)
            change(self)

        monkeypatch.setattr(kind, "__init__", created)

    def state_made(state):
        state.engine = WatchedEngine(state.engine, observer)
        state.stamps = GuardedDict(state.stamps, observer, state.lock, "stamps")

    def assigned(state, name, value):
        if name in ("segments", "listeners") and name in state.__dict__:
            assert isinstance(value, tuple), "a list could be changed while it is read"
            observer.check(state.lock, f"{name} assigned")
        object.__setattr__(state, name, value)

    def pieces_made(pieces):
        lock = pieces._state.lock
        pieces._pieces = GuardedDict(pieces._pieces, observer, lock, "pieces")
        pieces._starts = GuardedList(pieces._starts, observer, lock, "starts")

    def arena_made(made):
        made._lent = GuardedList(made._lent, observer, made._state.lock, "segments of an arena")

    def attachment_made(made):
        made.layers = GuardedList(made.layers, observer, made.state.lock, "layers")

    guard(engines.DeviceState, state_made)
    monkeypatch.setattr(engines.DeviceState, "__setattr__", assigned)
    guard(masters.Pieces, pieces_made)
    guard(arena.Arena, arena_made)
    guard(attachment.Attachment, attachment_made)
    registry = GuardedDict({}, observer, engines._registry_lock, "registry")
    monkeypatch.setattr(engines, "_registry", registry)
    yield observer
    for state in engines.open_states():  # a test has failed: another registry knows nothing of it
        for held in list(state.listeners):
            held.close()


# ---- what threads do ----


@contextlib.contextmanager
def attached(model):
    """Attach for a while, and detach while threads compute in what was lent."""
    manager = oracle_offload.attach(model, "cpu")
    yield manager
    manager.detach()


def same(managed, resident, step):
    """Both models do the same, to the last bit."""
    assert_same(step(managed), step(resident))


def step_of(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad]


def train():
    """Attach, train with an optimizer, detach."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    resident = copy.deepcopy(model)
    with attached(model):
        for each in (model, resident):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(ROUNDS):
                optimizer.zero_grad()
                each(torch.ones(4, 16)).square().mean().backward()
                optimizer.step()
    assert_same(list(model.parameters()), list(resident.parameters()))


def grow():
    """Let the arena grow to a checkpointed block, and look at the summary."""
    model = models.tower().requires_grad_(False)
    resident = copy.deepcopy(model)
    with attached(model) as manager:
        arena = manager.attachment.arena
        # Another thread's forward may let it grow before this one has looked at it.
        at_first = 2 * max(
            sum(each.nbytes for each in module.parameters(recurse=False))
            for module in resident.modules()
        )
        for _ in range(100):  # what other threads compute meanwhile hides the order of this one
            same(model, resident, lambda each: step_of(each, torch.ones(4, 128)))
            if arena.capacity_bytes > at_first:
                break
        assert arena.capacity_bytes > at_first, "the arena did not grow"
        assert "Tower" in str(oracle_offload.memory_summary("cpu"))


def change():
    """Replace weights, refresh and add modules, under a witness."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).requires_grad_(False)
    resident = copy.deepcopy(model)
    with attached(model) as manager, Witness():
        for number in range(ROUNDS):
            for each in (model, resident):
                each[0].weight.data = torch.full((16, 16), 0.1 * number)
                each[1].weight = nn.Parameter(torch.full((16, 16), 0.2 * number), False)
                each.append(nn.Linear(16, 16).requires_grad_(False))
                nn.init.constant_(each[-1].weight, 0.5)
                nn.init.constant_(each[-1].bias, 0.5)
            manager.refresh()
            same(model, resident, lambda each: step_of(each, torch.ones(2, 16)))


def delete():
    """Attach models that are deleted without a detach, some of them by the garbage collector."""
    for number in range(ROUNDS):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        if number % 2:
            model.itself = [model]
        oracle_offload.attach(model, "cpu")
        model(torch.ones(2, 16))
        del model
        gc.collect()


class Outer(nn.Module):
    """Computes with weights that it is lent, and calls a module that is lent others."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.full((16, 16), 0.3)) for _ in range(2)])
        self.inner = nn.GRU(16, 16)

    def forward(self, x):
        return self.inner(x @ self.scales[0])[0] @ self.scales[1]


def take_turns():
    """Two threads compute in one model, whose modules lend to their own forwards, and it changes.

    Their weights count as large ones: see `observer`.
    """
    model = nn.Sequential(Outer(), nn.Linear(16, 16)).requires_grad_(False)
    resident = copy.deepcopy(model)
    with attached(model) as manager:
        kinds = {type(layer).__name__ for layer in manager.layers}
        assert kinds == {"AnyLayer", "LinearLayer"}, kinds

        def compute():
            for _ in range(ROUNDS):
                same(model, resident, lambda each: step_of(each, torch.ones(2, 16)))

        run((compute, compute))
        manager.refresh()
        run((compute, compute))


JOBS = (train, grow, change, delete, take_turns)


def run(jobs):
    """Do the jobs at once, each in a thread, all of them over an engine that stays open or not."""
    errors = []

    def work(job):
        try:
            with torch.random.fork_rng(devices=()):
                job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "threads wait for one another"
    for error in errors:
        raise error


def closed():
    """Close what a deleted model may have left because a lock was held."""
    gc.collect()
    for state in engines.open_states():
        attachment.close_leftovers(state)


@pytest.mark.parametrize("keeps_open", [True, False], ids=["one engine", "engines come and go"])
def test_threads_that_do_all_at_once_keep_the_order_of_locks(observer, keeps_open):
    torch.manual_seed(0)
    keeper = nn.Linear(8, 8)
    with attached(keeper) if keeps_open else contextlib.nullcontext():
        run((*JOBS, *JOBS) if keeps_open else JOBS)
    closed()
    left = [vars(held) for state in engines.open_states() for held in state.listeners]
    assert not left, f"still attached: {left}"
    assert not engines.open_states(), "an engine is open that nothing uses"
    assert not observer.faults, observer.faults[:5]
    assert not observer.inversions(), observer.inversions()
    seen = {("structure", "device"), ("device", "engine")}
    seen |= {("turn", "engine"), ("turn", "device")}
    assert seen <= observer.waits, f"not seen: {seen - observer.waits}"
    assert ("registry", "engine") in observer.waits


# ---- what is planted is found ----


def test_a_planted_inversion_is_found(observer, monkeypatch):
    """One thread takes the registry's lock before the device's: it is found without any wait."""
    honest = engines.open_states

    def planted():
        with engines._registry_lock:
            for state in honest():
                with state.lock:
                    pass
            return honest()

    monkeypatch.setattr(engines, "open_states", planted)
    run((train,))
    assert observer.inversions() == {("registry", "device")}


def test_turns_taken_in_two_orders_are_found(observer):
    one, other = Lock("turn"), Lock("turn")
    for first, second in ((one, other), (one, other), (other, one)):
        assert not observer.inversions()
        with first.within(1) as taken, second:
            assert taken
    assert observer.inversions() == {("turn", "turn")}


def test_two_devices_locked_by_one_thread_are_found(observer):
    with Lock("device"), Lock("device"):
        pass
    assert observer.inversions() == {("device", "device")}


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (engines.DeviceState, "join", "listeners"),
        (arena.Arena, "lend", "segments"),
        (arena.Arena, "lend", "segments of an arena"),
        (masters.Pieces, "add", "pieces"),
        (attachment.Attachment, "close_patiently", "layers"),
        (attachment.Attachment, "close_patiently", "stamps"),
    ],
)
def test_a_change_without_the_lock_is_found(observer, monkeypatch, owner, name, what):
    honest = getattr(owner, name)

    class Open:
        """A lock that locks nothing."""

        line = "device"

        def __enter__(self):
            pass

        def __exit__(self, *details):
            pass

        def is_held(self):
            return False

    def planted(self, *arguments):
        state = getattr(self, "state", None) or getattr(self, "_state", None) or self
        lock, state.lock = state.lock, Open()
        try:
            return honest(self, *arguments)
        finally:
            state.lock = lock

    monkeypatch.setattr(owner, name, planted)
    run((train,))
    assert any(fault.startswith(what) for fault in observer.faults), observer.faults


# ---- the end of a deleted model ----


@pytest.mark.parametrize("whose", ["this thread's", "another thread's"])
def test_a_model_deleted_while_a_lock_is_held_waits_for_nothing_and_goes_later(whose):
    keeper, model = nn.Linear(8, 8), nn.Linear(8, 8)
    manager = oracle_offload.attach(keeper, "cpu")
    other = oracle_offload.attach(model, "cpu").attachment
    state = manager.state
    taken, done = threading.Event(), threading.Event()

    def hold():
        with state.lock:
            taken.set()
            assert done.wait(LIMIT_S)

    if whose == "another thread's":
        thread = threading.Thread(target=hold)
        thread.start()
        assert taken.wait(LIMIT_S)
        del model  # a deadlock here is a failure by the time limit of the test
        done.set()
        thread.join(LIMIT_S)
    else:
        with state.lock:
            segments = state.segments
            del model
            assert state.segments is segments, "what is being changed was changed by another end"
    assert other in state.listeners
    manager.detach()
    assert other not in state.listeners
    assert not engines.open_states()


def test_a_model_deleted_while_no_lock_is_held_goes_at_once():
    model = nn.Linear(8, 8)
    oracle_offload.attach(model, "cpu")
    del model
    assert not engines.open_states()


# ---- attaching while others train ----


def test_an_attach_under_way_keeps_the_engine_open():
    with engines.opened(torch.device("cpu")) as state:
        engines.close_if_unused(state)
        assert engines.open_states() == [state]
    assert not engines.open_states()


def test_a_forward_grows_nothing_that_is_being_lent(monkeypatch):
    """Another thread's forward looks at the arena while an attach lends it."""
    lend = arena.Segment
    threads = []

    def meanwhile(*arguments):
        (state,) = engines.open_states()
        threads.append(threading.Thread(target=state.begin_forward))
        threads[-1].start()
        threads[-1].join(0.2)  # it has looked by then, or waits
        return lend(*arguments)

    monkeypatch.setattr(arena, "Segment", meanwhile)
    model = nn.Linear(8, 8).requires_grad_(False)
    resident = copy.deepcopy(model)
    with attached(model) as manager:
        threads[0].join(LIMIT_S)
        assert len(threads) == len(manager.attachment.arena.segments) == 1
        same(model, resident, lambda each: step_of(each, torch.ones(2, 8)))


def test_a_lock_that_was_free_is_given_back_whatever_happens():
    lock = Lock("device")
    with pytest.raises(RuntimeError), lock.if_free() as taken:
        assert taken and lock.is_held()
        raise RuntimeError
    assert not lock.is_held()
    with lock.if_free() as taken:
        assert taken
