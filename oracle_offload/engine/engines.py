"""One engine per device, shared by every model attached there.

`DeviceState` is the Python side of one engine: how the members of a unit are stamped, which tensors
are the arena's segments, on which stream torch computes, and when trainable masters may be
rewritten.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from .. import _core
from ..errors import OffloadError
from . import devices, optimizer_states, simulator, step_scalars
from .locks import Lock
from .pace import Pace
from .phases import FIRST, Phases
from .simulated_time import SimulatedTime

_graph_task = torch._C._current_graph_task_id
logger = logging.getLogger("oracle_offload")

_registry: dict[str, DeviceState] = {}
_opened_in: int | None = None  # the process that opened what is in it
_registry_lock = Lock("registry")  # protects _registry, _orphans and the creation of engines
_orphans: list[_core.Engine] = []  # could not be set up, nor closed yet: a fault lasts
_hooks_installed = False
_patches: dict[Callable[[], Callable[[], None]], Callable[[], None]] = {}  # and their undo
_phase = FIRST


class Layout:
    """Counts changes of where masters and segments are, for code that keeps a map of them."""

    version = 0


class Segment:
    """One piece of the arena: `nbytes` of device memory at `address`, inside a torch allocation."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # An allocator may align to less: to 64 bytes on the host, or a pluggable one on CUDA.
        size = nbytes + _core.ALIGNMENT
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        self.storage = self.tensor.untyped_storage()
        self.base = self.tensor.data_ptr()
        self.address = -(-self.base // _core.ALIGNMENT) * _core.ALIGNMENT
        self.nbytes = nbytes


def remove(call: Callable[[int], None], what: int) -> None:
    """Have an engine forget a lease, a model or a member that it gave the number `what`.

    Ctrl-C may come after the engine has forgotten it and before that was noted: asked again, this
    does nothing. The engine gives no number twice.
    """
    with contextlib.suppress(ValueError):  # it does not exist any more
        call(what)


class Shared(Protocol):
    """Masters that this process has together with others, which may have written them."""

    def check_generation(self) -> None:
        """Refuse to use copies of masters that were written since."""


class Listener(Protocol):
    """An object that holds something of a device, and is notified of what happens there."""

    def before_forward(self) -> None:
        """The first managed forward after a backward begins."""

    def during_forward(self) -> None:
        """A forward is about to use a weight, and some uses have passed since the last call."""

    def before_step(self) -> bool:
        """An optimizer is about to step; return whether it trains anything held here."""

    def before_frozen_write(self, tensors: Sequence[Tensor]) -> None:
        """A step may write these, which need no gradient; `before_step` does not count them."""

    def after_step(self) -> None:
        """An optimizer has stepped."""

    def forget_views(self) -> None:
        """Segments of the arena go back: let go of all views into it."""


class Observer(Protocol):
    """An object that is notified of every device, from now on; see `observers`."""

    def opened(self, state: DeviceState) -> None:
        """An engine was opened."""

    def begins_step(self, state: DeviceState) -> None:
        """An optimizer is about to step. Its device's lock is held."""

    def ended_step(
        self, state: DeviceState, counters: Mapping[str, Any]
    ) -> Callable[[], object] | None:
        """A training step has ended; `counters` are the engine's. Its device's lock is held.

        What is returned is called once every device goes on, without a lock.
        """

    def resized(self, state: DeviceState, model: str, before: int, after: int, why: str) -> None:
        """The arena of a model has another size, in bytes. Its device's lock is held."""

    def leaving(self, state: DeviceState) -> None:
        """A model is about to be forgotten. Its device's lock is held."""

    def closing(self, state: DeviceState) -> None:
        """An engine is about to be closed. Its device's lock is held."""


observers: tuple[Observer, ...] = ()  # replaced, never changed; the registry's lock protects it


def observe(observer: Observer) -> list[DeviceState]:
    """Notify `observer` from now on; return the devices that have an engine already."""
    global observers
    with _registry_lock:
        observers = (*observers, observer)
        return open_states()


def ignore(observer: Observer) -> None:
    """Undo `observe`."""
    global observers
    with _registry_lock:
        observers = tuple(other for other in observers if other is not observer)


class DeviceState:
    """The engine of one device and what torch has to know about it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ordinal = device.index or 0  # among those of its type
        self.pid = os.getpid()
        self.lock = Lock("device")  # see there what it protects
        # By unit: what answers the stamp of each member. A unit's row is replaced, never changed.
        self.stamps: dict[int, dict[int, Callable[[], int]]] = {}
        self.segments: tuple[Segment, ...] = ()  # by address
        self.listeners: tuple[Listener, ...] = ()
        self.openings = 0  # attaches under way; the registry's lock protects it
        # By graph task, the gradients on their way: see `oracle_offload.layers.gradients`.
        self.late: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # Of trips that the driver has failed to end: the ticket, and what keeps the memory.
        self.unended: list[tuple[int, object]] = []
        self.gradients_lock = Lock("gradients")  # protects those
        # Which norms are wanted of gradients as they leave, and those that are known, by the `id`
        # of the master: see `oracle_offload.layers.norms`.
        self.wanted_norms: set[tuple[bool, Any]] = set()
        self.norms: dict[int, Any] = {}
        # What replaces trained masters in graphs, by their `id`: see `gradients.landing`.
        self.landings: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        # By the `id` of a master, what steps it in backward: see `train.in_backward`.
        self.steppers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.kept_bytes = 0  # of copies that wait in the arena to be stepped in backward
        self.n_stepping = 0  # optimizers that step in a backward which runs
        # By unit, what rewrites its masters while backward goes on; a row is replaced.
        self.rewritten: dict[int, tuple[Any, ...]] = {}
        # By the `id` of a master, what alone rewrites it: see `cover`.
        self.streamed: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._n_streamed = 0
        # How each optimizer that `stream_optimizer` was given steps, in words.
        self.optimizers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.rests = False  # whether a step comes after the last backward is not known yet
        self.turned = False  # a managed backward has run since the last forward began
        self.shares: list[Shared] = []  # of models whose masters ranks have together
        self.kind = devices.KINDS[device.type](device)
        self.engine = self.kind.open_engine()
        try:
            self.simulated = self.engine.simulated
            self.stream = self.kind.stream_of(self.engine)
            self.pace = Pace(self.kind.now_s)
            self.phases = Phases(_phase, self.counters(), self.engine.unit_waits())
            self.time = SimulatedTime(simulator.get_device(0) if self.simulated else None)
            self.engine.set_verify(os.environ.get("ORACLE_OFFLOAD_VERIFY", "0") not in ("", "0"))
        except BaseException:
            _orphans.append(self.engine)
            _close_orphans()
            raise

    # ---- bookkeeping ----

    def check_process(self) -> None:
        """Raise in a forked child: masters and driver belong to the parent."""
        if os.getpid() != self.pid:
            raise OffloadError(
                "a model attached in the parent process was used in a forked child; its weights do "
                "not exist there. Use the model in the parent only, or start workers with 'spawn'."
            )

    def stamp_units(self, fetched: tuple[int, ...]) -> None:
        """Tell the engine the versions of the masters it has just begun to copy."""
        stamps = [
            (member, stamp())
            for unit in fetched
            for member, stamp in self.stamps.get(unit, {}).items()
        ]
        try:
            self.engine.stamp(stamps)
        except OffloadError:  # those that it knows are stamped
            with self.lock:
                left = {member for unit in fetched for member in self.stamps.get(unit, {})}
            if all(member in left for member, _ in stamps):
                raise  # no other thread has let go of one meanwhile

    def add_member(self, unit: int, member: int, stamp: Callable[[], int]) -> None:
        """Have `member` stamped by `stamp` whenever its unit is copied."""
        with self.lock:
            self.stamps[unit] = {**self.stamps.get(unit, {}), member: stamp}

    def forget_member(self, unit: int, member: int) -> None:
        """Undo `add_member`, if it was done."""
        with self.lock:
            row = self.stamps.get(unit, {})
            if row.keys() == {member}:
                del self.stamps[unit]
            elif member in row:
                self.stamps[unit] = {other: row[other] for other in row if other != member}

    def exchange_segments(self, gone: list[Segment], come: list[Segment]) -> None:
        """Make new segments findable by address, and forget those that were given back."""
        with self.lock:
            kept = [segment for segment in self.segments if segment not in gone]
            self.segments = tuple(sorted([*kept, *come], key=lambda segment: segment.address))
            Layout.version += 1
            if gone:
                for listener in self.listeners:
                    listener.forget_views()

    def storage_at(self, address: int) -> tuple[torch.UntypedStorage, int]:
        """Return the storage that holds device `address`, and the address it begins at."""
        segments = self.segments
        index = bisect.bisect_right(segments, address, key=lambda s: s.address) - 1
        if index >= 0 and address < segments[index].address + segments[index].nbytes:
            return segments[index].storage, segments[index].base
        raise OffloadError(f"the engine answered {address:#x}, which is in no segment of the arena")

    def arena_bytes(self) -> int:
        """Bytes of the arena, of all models."""
        return sum(segment.nbytes for segment in self.segments)

    def free_bytes(self) -> int:
        """Bytes of the device that can still be had: free, or cached by torch and in no use."""
        return self.engine.mem_info()[0] + self.kind.cached_bytes()

    def join(self, listener: Listener) -> None:
        """Keep the engine open for `listener`, and notify it."""
        with self.lock:
            if listener not in self.listeners:
                self.listeners = (*self.listeners, listener)

    def leave(self, listener: Listener) -> None:
        """Undo `join`."""
        with self.lock:
            self.listeners = tuple(other for other in self.listeners if other is not listener)
            self.norms.clear()

    def counters(self, stats: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the engine's counters, or `stats` that were asked of it, and "now_s"."""
        return {**(stats or self.engine.stats()), "now_s": self.kind.now_s()}

    def begin_use(self) -> int:
        """Return the stream that a use of weights is about to be queued on, with all before it."""
        for share in self.shares:
            share.check_generation()
        stream = self.stream()
        if self.time.pending_kernel_s:
            self.time.flush(stream)
        pace = self.pace
        pace.uses += 1
        if pace.uses >= pace.next_look:
            pace.look(self.kind.is_idle(stream))
            if _graph_task() == -1 and not self.kind.is_capturing(stream):
                for listener in self.listeners:
                    listener.during_forward()
        return stream

    def cover(self, steppers: Mapping[int, Any]) -> None:
        """From now on each of these rewrites a master, by its `id`, and notifies the engine.

        So a copy of such masters is trusted as one of frozen ones is: until a version, an address
        or a sample shows another write.
        """
        with self.lock:
            self.streamed.update(steppers)
            self._tell_trained()

    def is_streamed(self, master: Tensor) -> bool:
        """Whether something answers for all that is written to a master."""
        stepper = self.streamed.get(id(master))
        return stepper is not None and stepper.covers(master)

    def _tell_trained(self) -> None:
        self._n_streamed = len(self.streamed)
        for listener in self.listeners:
            tell = getattr(listener, "tell_trained", None)
            if tell is not None:
                tell()

    def _follow_streamed(self) -> None:
        """Stop trusting copies for which nothing answers: an optimizer may be gone."""
        if len(self.streamed) != self._n_streamed:
            with self.lock:
                self._tell_trained()

    def rest(self) -> None:
        """A backward with trainable weights has ended: they may be rewritten, or may not."""
        self._follow_streamed()
        self.rests = True
        self.engine.rest()

    def hold(self) -> None:
        """Trainable weights are rewritten from now on."""
        self.rests = False
        self.engine.hold()

    def keep_for_step(self, layer: Any) -> None:
        """Keep the copy of a layer that backward has just used, if it is stepped there."""
        for master in layer.masters.present:
            stepper = self.steppers.get(id(master))
            if stepper is not None:
                stepper.keep(layer, master)
                return

    def rewrite(self, unit: int, stepper: Any) -> None:
        """Masters of a unit are rewritten by what `stepper` sends home from now on."""
        with self.lock:
            others = self.rewritten.get(unit, ())
            if stepper not in others:
                self.rewritten[unit] = (*others, stepper)

    def await_rewrite(self, unit: int) -> None:
        """Wait until what was sent to masters of a unit is there: they are used again."""
        for stepper in self.rewritten.get(unit, ()):
            stepper.await_home(unit)

    def give_up_copies(self) -> bool:
        """Step no copy where it is from here on: a unit has no place; say whether there was one.

        What is to be stepped comes from the masters instead.
        """
        # Of all, before any is asked about: two may step one unit, which one ends for both.
        given_up = [stepper.give_up_copies() for stepper in set(self.steppers.values())]
        return any(given_up)

    def end_rewrites(self, stepper: Any) -> None:
        """All that `stepper` has sent is home."""
        with self.lock:
            for unit, steppers in list(self.rewritten.items()):
                left = tuple(other for other in steppers if other is not stepper)
                if left:
                    self.rewritten[unit] = left
                else:
                    del self.rewritten[unit]

    def end_trip(self, ticket: int, held: object) -> None:
        """End a trip. Where the driver fails, `held` stays: a copy may still use that memory."""
        try:
            self.engine.trip_end(ticket)
        except OffloadError:
            self.unended.append((ticket, held))
            raise

    def break_off_steps(self) -> None:
        """Let go of copies that a backward was to step whose exception is still at hand."""
        with self.gradients_lock:
            for stepper in set(self.steppers.values()):
                stepper.break_off()

    def begin_forward(self) -> None:
        """Before the first managed forward after a backward trained weights are copied again.

        Code may have written to them unseen: fingerprints are samples, and to read all bytes takes
        longer than to copy them. The arena may grow to what was learned then. It does so before any
        weight is fetched for that forward, for then the plan gives every weight a new place. In a
        capture of a graph, which refuses every loan, nothing is done.
        """
        if self.kind.is_capturing(self.stream()):
            return
        self._follow_streamed()
        if self.rests:
            with self.lock:
                self.hold()
        self.engine.resume()  # what runs first may be no use: rows of a table, or a checkpoint
        self.turned = False
        self.pace.passes += 1
        with self.lock:
            for listener in self.listeners:
                listener.before_forward()


# ---- the registry ----


def open_state(device: torch.device) -> DeviceState:
    """Return the device's state, opening its engine if it has none."""
    global _opened_in
    with _registry_lock:
        state = _registry.get(str(device))
        if state is None:
            _close_orphans()
            state = DeviceState(device)
            _registry[str(device)] = state
            _opened_in = state.pid
            _install_hooks()
            patch(step_scalars.make_scaler_wait)
            for observer in observers:
                observer.opened(state)
        state.check_process()
        return state


@contextlib.contextmanager
def opened(device: torch.device) -> Iterator[DeviceState]:
    """Keep the device's engine open for a ``with`` block, as an attach needs it."""
    with _registry_lock:
        state = open_state(device)
        state.openings += 1
    try:
        yield state
    finally:
        with _registry_lock:
            state.openings -= 1
        with contextlib.suppress(OffloadError):  # else at the next attach
            close_if_unused(state)


def registry_if_free() -> AbstractContextManager[bool]:
    """Take the registry's lock for a ``with`` block, if it is free; say whether."""
    return _registry_lock.if_free()


def _close_orphans() -> None:
    for engine in list(_orphans):
        with contextlib.suppress(OffloadError):
            _close_engine(engine)
            _orphans.remove(engine)


def _close_engine(engine: _core.Engine) -> None:
    lost = engine.close()
    if lost is not None:
        logger.warning("closing an engine: %s", lost)


def close_if_unused(state: DeviceState) -> None:
    """Close the engine once it holds nothing of any model."""
    global _opened_in
    with state.lock, _registry_lock:
        _close_orphans()
        if state.listeners or state.openings or _registry.get(str(state.device)) is not state:
            return
        for observer in observers:
            observer.closing(state)
        # After Ctrl-C in between no code finds it, and the next attach or detach closes it.
        _orphans.append(state.engine)
        del _registry[str(state.device)]
        try:
            _close_engine(state.engine)
        except OffloadError:
            _registry[str(state.device)] = state
            _orphans.remove(state.engine)
            raise
        _orphans.remove(state.engine)
        if not _registry:
            _opened_in = None
            while _patches:
                _, undo = _patches.popitem()
                undo()


def patch(make: Callable[[], Callable[[], None]]) -> None:
    """Let `make` replace functions of torch, once, until the last model has gone.

    Parameters
    ----------
    make : callable
        Returns what undoes it.
    """
    with _registry_lock:
        if make not in _patches:
            _patches[make] = make()


def open_states() -> list[DeviceState]:
    """Return the devices that have an engine in this process."""
    with _registry_lock:
        return [state for state in _registry.values() if state.pid == os.getpid()]


def phase_now() -> str:
    """Return the phase that the run is in."""
    return _phase


def begin_phase(name: str) -> None:
    """Begin a phase on every device, and on those to come."""
    global _phase
    _phase = name
    for state in open_states():
        with state.lock:
            if state.listeners:  # while there is a listener, the engine stays open
                state.phases.begin(name, state.counters(), state.engine.unit_waits())


def parent_process() -> int | None:
    """Return the process that this one was forked from, if models are attached there."""
    pid = _opened_in  # without the lock: a fork may have left it held for ever
    return None if pid == os.getpid() else pid


def _install_hooks() -> None:
    global _hooks_installed
    if not _hooks_installed:
        _hooks_installed = True
        torch_optimizer.register_optimizer_step_pre_hook(_before_step)
        torch_optimizer.register_optimizer_step_post_hook(_after_step)


def _frozen_in(optimizer: Any) -> list[Tensor]:
    """Return the tensors on the host that count as frozen, and that a step may write (MeZO).

    Those need no gradient, or a streamed optimizer answers for them, which is another one. Of an
    optimizer that has gradients, what has none is passed over: it was given the whole model.
    """
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    skips = type(optimizer).__module__.startswith("torch.optim.") or any(
        parameter.grad is not None for parameter in given
    )
    return [
        parameter
        for parameter in given
        if not parameter.requires_grad or _is_streamed_by_another(parameter, optimizer)
        if parameter.is_cpu and not (skips and parameter.grad is None)
    ]


def _is_streamed_by_another(parameter: Tensor, optimizer: Any) -> bool:
    steppers = [state.streamed.get(id(parameter)) for state in open_states()]
    return any(s is not None and s.covers(parameter) and not s.is_of(optimizer) for s in steppers)


def before_frozen_write(tensors: Sequence[Tensor]) -> None:
    """Wait for the copies of masters that are about to be written, though nothing trains them."""
    for state in open_states():
        with state.lock:
            for listener in state.listeners:
                listener.before_frozen_write(tensors)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Cover what the end of a graph task cannot: a backward that raised, gradients set by hand."""
    optimizer_states.follow(optimizer)
    step_scalars.settle(optimizer)
    if frozen := _frozen_in(optimizer):
        before_frozen_write(frozen)
    for state in open_states():
        with state.lock:  # while there is a listener, the engine stays open
            trained = [listener.before_step() for listener in state.listeners]
            if any(trained):
                state.hold()
            if state.listeners:
                for observer in observers:
                    observer.begins_step(state)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    afterwards: list[Callable[[], object] | None] = []
    for state in open_states():
        with state.lock:
            if state.listeners:
                state.engine.resume()
            for listener in state.listeners:
                listener.after_step()
            if state.listeners:
                counters = state.engine.stats()
                if state.pace.end_step(counters):
                    afterwards += [o.ended_step(state, counters) for o in observers]
    for call in afterwards:
        if call is not None:
            call()
