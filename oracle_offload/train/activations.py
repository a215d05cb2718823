"""Activations leave the device while later layers compute, and come back before their backward.

What autograd saves in a forward is packed by saved-tensor hooks. The memory of a large tensor, one
storage however many tensors are views of it, is copied to page-locked memory on the stream towards
the host. Torch's allocator has the device's bytes back once the compute stream waits for that copy,
which does so only when `device_budget` is full: by then the copy has long run. In backward
what is needed next is copied to new memory of torch's, in the order that the step before has
learned, as far ahead as the budget reaches.

The way back shares the stream that weights come by, in the order in which they are asked for. A
return is asked for a few tensors before its backward, a weight when its place in the arena is free:
so what is needed sooner goes first, and no weight waits for more than the budget's bytes.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import inspect
import os
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..engine.devices import parse_device
from ..engine.engines import DeviceState, close_if_unused, opened, registry_if_free
from ..engine.geometry import count_writes
from ..engine.locked import LockedPool
from ..engine.locks import Lock
from ..errors import OffloadError
from ..host.memory import SPARED, available_bytes, total_bytes
from ..host.sizes import format_size, parse_size
from ..layers.any import ChainedHooks
from ..layers.autocast import saving
from ..model.answers import MANAGER

if TYPE_CHECKING:
    from .._core import HostBuffer

_graph_task = torch._C._current_graph_task_id
_hooks_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_functorch_active = torch._C._are_functorch_transforms_active
_storage_at = torch.UntypedStorage._new_with_weak_ptr
_LARGEST_ON_DEVICE = 4  # largest storages that the device keeps, where the budget is "auto"
_RUNS_BELIEVED = 16  # after so many who holds what is found out again in any case
# Who else takes saved tensors off the device, by the class that its hooks are defined in.
_OTHERS = {
    "save_on_cpu": "torch.autograd.graph.save_on_cpu",
    "OffloadActivations": "torchtune's OffloadActivations",
    "_Hooks": "another offload_activations",
}
# The same as modules, which push their hooks inside.
_OTHER_MODULES = {"OffloadWrapper": "torch's offload_wrapper"}
# Those whose model's forward is under way: of micro-batches that take turns each has its own.
_inside: contextvars.ContextVar[tuple[ActivationOffload, ...]] = contextvars.ContextVar(
    "oracle_offload.activations", default=()
)
_active: weakref.WeakKeyDictionary[nn.Module, ActivationOffload] = weakref.WeakKeyDictionary()


class Counts(NamedTuple):
    """What became of saved tensors' memory since it began.

    Attributes
    ----------
    left, left_bytes : int
        Storages that were copied to the host.
    returned, returned_bytes : int
        Copies back. What was still on the device needed none.
    late : int
        Of these, those that were not asked for before backward needed them.
    stayed, stayed_bytes : int
        Storages that were kept on the device, as they come back first or the host had no room.
    refused : int
        Of these, those that the host had no page-locked memory for.
    """

    left: int = 0
    left_bytes: int = 0
    returned: int = 0
    returned_bytes: int = 0
    late: int = 0
    stayed: int = 0
    stayed_bytes: int = 0
    refused: int = 0


class _Run:
    """The storages that left from the first after a backward on, and the order of their return."""

    def __init__(self) -> None:
        self.trips: list[tuple[int, weakref.ref[_Trip]]] = []  # each with its bytes
        self.returned: list[int] = []
        self.alive: set[int] = set()  # that somebody else held until backward needed them
        self.order: Sequence[int] | None = None  # what is expected, once backward has begun
        self.at = 0  # in `order`

    @property
    def sizes(self) -> list[int]:
        """Bytes of each."""
        return [nbytes for nbytes, _ in self.trips]


class _Trip:
    """One storage that autograd has saved: where its bytes are."""

    def __init__(self, run: _Run, storage: torch.UntypedStorage) -> None:
        self.run, self.index = run, len(run.trips)
        self.nbytes = storage.nbytes()
        self.key = storage._cdata
        self.source = StorageWeakRef(storage)  # its key is its own
        self.known = self.source  # where the bytes may be alive on the device
        self.here: torch.UntypedStorage | None = None  # held on the device
        self.buffer: HostBuffer | None = None
        self.out: list[int] = []  # tickets: none, or one
        self.back: list[int] = []
        self.is_leaving = self.is_joined = self.is_back = False
        self.packs = self.uses = 0
        run.trips.append((self.nbytes, weakref.ref(self)))


class _Anchor:
    """Held by all that is packed of one storage: when it goes, the bytes are no longer needed."""

    __slots__ = ("__weakref__", "trip")

    def __init__(self, trip: _Trip) -> None:
        self.trip = trip


class _Saved:
    """What autograd keeps for a tensor whose memory has left."""

    __slots__ = ("anchor", "dtype", "offset", "shape", "stride", "version", "writes")

    def __init__(self, anchor: _Anchor, tensor: Tensor, writes: Tensor) -> None:
        self.anchor = anchor
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset()
        self.writes, self.version = writes, writes._version


def _write_counter(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the count of writes to `tensor`, and not its memory."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def _modified(shape: Sequence[int], version: int, expected: int) -> RuntimeError:
    """Return what torch raises: it compares no versions where there are hooks."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a saved tensor of shape {list(shape)} is at version {version}; expected "
        f"version {expected} instead."
    )


class _Hooks(ChainedHooks):
    """The saved-tensor hooks of one forward. What the pair outside makes of a tensor leaves."""

    def __init__(self, offload: ActivationOffload) -> None:
        super().__init__()
        self._offload = offload
        if self._outer is None:
            return
        own = type(getattr(self._outer[0], "__self__", None)).__name__
        inside = getattr(self._outer[0], "__qualname__", "").split(".")[0]
        for name in (own, inside):
            if name in _OTHERS:
                raise OffloadError(
                    f"{_OTHERS[name]} takes saved tensors off the device already, around a model "
                    "with offload_activations: leave one of them out"
                )

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps for `tensor`."""
        kept = tensor if self._outer is None else self._outer[0](tensor)
        storage = self._offload.storage_that_leaves(kept)
        if storage is not None:
            saved = self._offload.leave(kept, storage)
            if saved is not None:
                return saved
        return kept, count_writes(tensor) if kept is tensor else None

    def unpack(self, kept: Any) -> Tensor:
        """Return what was packed."""
        if isinstance(kept, _Saved):
            tensor = self._offload.bring(kept)
        else:
            tensor, version = kept
            if version is not None and count_writes(tensor) != version:
                raise _modified(tensor.shape, count_writes(tensor), version)
        if self._outer is not None:
            tensor = self._outer[1](tensor)
        return tensor


class _Forward:
    """Runs before a model's forward."""

    def __init__(self, offload: ActivationOffload, model: nn.Module) -> None:
        self.before = model.__dict__.get("forward")
        self._offload = offload
        self._of = weakref.ref(model)
        functools.update_wrapper(self, model.forward)
        del self.__dict__["__wrapped__"]  # it would keep the model alive
        # `inspect.signature` asks for it.
        self.__signature__ = inspect.signature(model.forward)

    def _forward(self) -> Callable[..., Any]:
        model = self._of()
        if self.before is not None:
            return cast("Callable[..., Any]", self.before)
        assert model is not None
        return types.MethodType(type(model).forward, model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._offload.call(self._forward(), args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain_forward(memo[id(self._of())], self.before)

    def __reduce__(self) -> Any:
        return _plain_forward, (self._of(), self.before)


def _plain_forward(model: nn.Module, before: Any) -> Any:
    """Return the forward of a copy, which offloads nothing."""
    return before if before is not None else types.MethodType(type(model).forward, model)


class ActivationOffload:
    """What `offload_activations` returns: usable in a ``with`` block, or until `remove`.

    Parameters
    ----------
    model : nn.Module
        Whose forward saves the tensors.
    state : DeviceState
        Of the device that computes.
    least_bytes : int
        Of a storage that leaves.
    device_bytes : int or None
        What the device may hold of them; None: a few of the largest.
    host_bytes : int
        Of page-locked memory, at most.
    may_lock : callable
        Whether so many bytes may be page-locked in addition to the model's masters.
    """

    def __init__(
        self,
        model: nn.Module,
        state: DeviceState,
        least_bytes: int,
        device_bytes: int | None,
        host_bytes: int,
        may_lock: Callable[[int], bool],
    ) -> None:
        self._model = weakref.ref(model)
        self._state = state
        self._least_bytes = least_bytes
        self._device_bytes = device_bytes
        self._largest = 0
        self._pool = LockedPool(state, lambda n: n <= host_bytes and may_lock(n))
        self._lock = Lock("activations")
        self._gone: collections.deque[_Trip] = collections.deque()  # that are no longer needed
        self._known: dict[int, tuple[weakref.ref[_Anchor], Tensor, int]] = {}  # by storage
        self._leaving: collections.deque[_Trip] = collections.deque()  # held until their copy ran
        self._leaving_bytes = self._held_bytes = 0  # of those; of all that the device holds
        self._live: set[_Trip] = set()  # that autograd may ask for
        self._run = _Run()
        # Of the last run: sizes, the order of return, and which need not leave.
        self._learned: tuple[list[int], list[int], set[int]] = [], [], set()
        self._alive: set[int] = set()  # of those, what somebody else holds anyway
        self._runs = 0
        self._weights: set[int] = set()
        self._slabs: list[tuple[int, int]] = []
        self.counts = Counts()
        self.is_active = True
        self._forward = model.__dict__["forward"] = _Forward(self, model)
        self._deletion = weakref.finalize(model, self._is_deleted)
        self._deletion.atexit = False
        state.join(self)

    # ---- what people ask, and do ----

    @property
    def device_budget(self) -> int:
        """Bytes that the device holds of them, at most, unless one alone needs more."""
        if self._device_bytes is not None:
            return self._device_bytes
        return _LARGEST_ON_DEVICE * max(self._largest, self._least_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked memory that it has now."""
        return self._pool.nbytes

    @property
    def name(self) -> str:
        """The model's, for reports."""
        return type(self._model()).__name__

    def __repr__(self) -> str:
        counts = self.counts
        return (
            f"ActivationOffload({counts.left} left with {format_size(counts.left_bytes)}, "
            f"{counts.returned} came back, {counts.late} of them late; {counts.stayed} stayed)"
        )

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(self, *details: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Let the model save tensors as before; what has left comes back when backward needs it."""
        self.is_active = False
        self._deletion.detach()  # it would keep this until the model goes
        model = self._model()
        if model is not None:
            if _active.get(model) is self:
                del _active[model]
            if model.__dict__.get("forward") is self._forward:
                if self._forward.before is None:
                    del model.__dict__["forward"]
                else:
                    model.__dict__["forward"] = self._forward.before
        with self._lock:
            self._reap()
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self.is_active or self._live or self not in self._state.listeners:
            return
        self._pool.give_back_all()
        self._state.leave(self)
        close_if_unused(self._state)

    def _close_if_free(self) -> None:
        """Close, as a finalizer may; where a thread holds a lock, it is left for the next step."""
        state = self._state
        if os.getpid() != state.pid:
            return
        with (
            self._lock.if_free() as own,
            state.lock.if_free() as device,
            registry_if_free() as registry,
            contextlib.suppress(OffloadError),
        ):
            if own and device and registry:
                self._reap()
                self._close_if_done()

    def _is_deleted(self) -> None:
        self.is_active = False
        self._close_if_free()

    def _has_gone(self, trip: _Trip) -> None:
        """Note, from a finalizer, that no graph needs a storage any longer."""
        self._gone.append(trip)
        if not self.is_active:  # no later call may come here
            self._close_if_free()

    # ---- as a listener of the device, whose lock is held ----

    def before_forward(self) -> None:
        """Change nothing."""

    def during_forward(self) -> None:
        """Change nothing."""

    def before_step(self) -> bool:
        """Train nothing."""
        return False

    def before_frozen_write(self, tensors: Sequence[Tensor]) -> None:
        """Change nothing: no master is held here."""

    def after_step(self) -> None:
        """Give back what no graph needs any more."""
        with self._lock.if_free() as free:
            if free:
                self._reap()
                with contextlib.suppress(OffloadError):  # else after the next
                    self._close_if_done()

    def forget_views(self) -> None:
        """Change nothing: no view into the arena is held."""

    # ---- a forward ----

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return ``forward(*args, **kwargs)``, whose saved tensors leave.

        Raises
        ------
        OffloadError
            A transform of torch.func is active, or something else offloads saved tensors.
        """
        around = _inside.get()
        if (
            not self.is_active
            or self in around
            or torch.compiler.is_dynamo_compiling()
            or not torch.is_grad_enabled()
            or _graph_task() != -1
        ):
            return forward(*args, **kwargs)
        if _functorch_active():
            raise OffloadError(
                "a transform of torch.func saves no tensors by hooks, so that none could leave: "
                "call remove() of what offload_activations returned, or use torch.autograd.grad"
            )
        if not _hooks_allowed():
            return forward(*args, **kwargs)
        with self._lock:
            self._reap()
            self._leave_out_forwards()
            self._look_at_weights()
        hooks = _Hooks(self)
        try:
            _inside.set((*around, self))
            with saving(hooks.pack, hooks.unpack):
                return forward(*args, **kwargs)
        finally:
            _inside.set(around)

    def _look_at_weights(self) -> None:
        """Note where parameters, buffers, masters and slots are: they are never copied."""
        model = self._model()
        found: set[int] = set()
        for tensor in (*model.parameters(), *model.buffers()) if model is not None else ():
            with contextlib.suppress(RuntimeError, NotImplementedError):  # without memory
                found.add(tensor.untyped_storage().data_ptr())
        self._weights = found
        slabs = [(s.address, s.address + s.nbytes) for s in self._state.segments]
        for listener in self._state.listeners:
            for buffer in getattr(listener, "buffers", ()):
                slabs.append((buffer.address, buffer.address + buffer.nbytes))
        self._slabs = slabs

    def storage_that_leaves(self, tensor: Any) -> torch.UntypedStorage | None:
        """Return the storage of what is saved; None where it is left alone."""
        if type(tensor) is not Tensor:  # a handle, or what another pair of hooks has made
            return None
        device = self._state.device
        if (
            tensor.device.type != device.type
            or (device.index is not None and tensor.device.index != device.index)
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
            or _graph_task() != -1  # a recompute: backward needs it at once
            or not self.is_active
        ):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._least_bytes:
            return None
        try:
            address = storage.data_ptr()
        except RuntimeError:  # a tracer's tensor, without memory
            return None
        if address in self._weights or any(a <= address < b for a, b in self._slabs):
            return None
        return storage

    # ---- out ----

    def leave(self, tensor: Tensor, storage: torch.UntypedStorage) -> _Saved | None:
        """Return what is kept of a tensor whose storage leaves; None while a graph is captured.

        A storage leaves once, however many tensors of it are saved.
        """
        with self._lock:
            self._reap()
            row = self._known.get(storage._cdata)
            anchor = None if row is None else row[0]()
            writes = _write_counter(tensor)
            if row is None or anchor is None or row[1]._version != row[2]:
                stream = self._state.stream()
                if self._state.kind.is_capturing(stream):
                    return None
                if self._run.order is not None:
                    self._begin_run()
                trip = _Trip(self._run, storage)
                anchor = _Anchor(trip)
                weakref.finalize(anchor, self._has_gone, trip).atexit = False
                self._live.add(trip)  # an interrupt before this leaves none that never goes
                self._depart(trip, storage, stream)
                self._known[trip.key] = weakref.ref(anchor), writes, writes._version
            anchor.trip.packs += 1
            return _Saved(anchor, tensor, writes)

    def _depart(self, trip: _Trip, storage: torch.UntypedStorage, stream: int) -> None:
        state, nbytes = self._state, trip.nbytes
        self._largest = max(self._largest, nbytes)
        sizes, _, stays = self._learned
        self._hold(trip, storage)
        if trip.index in stays and sizes[trip.index] == nbytes:
            self._count(stayed=1, stayed_bytes=nbytes)
            return
        trip.buffer = self._pool.take(nbytes)
        if trip.buffer is None:
            self._count(stayed=1, stayed_bytes=nbytes, refused=1)
            return
        self._leaving.append(trip)
        self._leaving_bytes += nbytes
        trip.is_leaving = True
        state.time.flush(stream)
        # In one call of C: no interrupt loses the ticket, by which the memory's reader is known.
        row = (trip.buffer.address,), (storage.data_ptr(),), (nbytes,), (stream,)
        trip.out.extend(map(state.engine.trip_out, *row))
        self._count(left=1, left_bytes=nbytes)
        # The memory goes back when the stream waits for its copy, which is late enough for the copy
        # to have run: it is the first of half of the budget.
        while self._leaving and self._leaving_bytes > self.device_budget // 2:
            self._let_go(self._leaving[0], stream)
            self._leaving.popleft()

    def _let_go(self, trip: _Trip, stream: int) -> None:
        if trip.is_leaving:
            self._join_out(trip, stream)
            self._drop(trip)

    def _join_out(self, trip: _Trip, stream: int) -> None:
        if trip.is_leaving:
            self._leaving_bytes -= trip.nbytes
            trip.is_leaving = False
        if trip.out and not trip.is_joined:
            self._state.time.flush(stream)
            self._state.engine.trip_join(trip.out[0], stream)
            trip.is_joined = True

    def _hold(self, trip: _Trip, storage: torch.UntypedStorage) -> None:
        trip.here = storage
        self._held_bytes += trip.nbytes

    def _drop(self, trip: _Trip) -> None:
        """Let go of the device's memory, which no copy reads or writes any more."""
        if trip.here is not None:
            self._held_bytes -= trip.nbytes
            trip.here = None

    # ---- back ----

    def bring(self, saved: _Saved) -> Tensor:
        """Return, for backward, what forward saved."""
        if saved.writes._version != saved.version:
            raise _modified(saved.shape, saved.writes._version, saved.version)
        trip = saved.anchor.trip
        with self._lock:
            self._reap()
            run = trip.run
            if run.order is None:
                self._expect(run)
            if trip.uses == 0:
                run.returned.append(trip.index)
            storage = self._on_device(trip)
            trip.uses += 1
            if trip.out and trip.uses % trip.packs == 0:
                self._end_stay(trip, storage)
            self._fetch_ahead(run)
        with torch.no_grad():
            empty = torch.empty(0, dtype=saved.dtype, device=self._state.device)
            return empty.set_(storage, saved.offset, saved.shape, saved.stride)

    def _on_device(self, trip: _Trip) -> torch.UntypedStorage:
        if trip.here is None:
            found: torch.UntypedStorage | None = _storage_at(trip.known.cdata)
            if found is not None:  # somebody else holds it
                if trip.uses == 0:
                    trip.run.alive.add(trip.index)
                return found
            self._start_back(trip)
            self._count(late=1)
        if trip.back and not trip.is_back:
            stream = self._state.stream()
            self._state.time.flush(stream)
            self._state.engine.trip_join(trip.back[0], stream)
            trip.is_back = True
        assert trip.here is not None
        return trip.here

    def _start_back(self, trip: _Trip) -> None:
        state = self._state
        stream = state.stream()
        with torch.no_grad():
            memory = torch.empty(trip.nbytes, dtype=torch.uint8, device=state.device)
        state.time.flush(stream)
        trip.is_back = False
        self._hold(trip, memory.untyped_storage())
        row = (trip.out[0],), (memory.data_ptr(),), (stream,)
        try:
            trip.back.extend(map(state.engine.trip_back, *row))
        finally:
            if not trip.back:
                self._drop(trip)
        self._count(returned=1, returned_bytes=trip.nbytes)

    def _end_stay(self, trip: _Trip, storage: torch.UntypedStorage) -> None:
        """End what has been used as often as it was saved; a graph that is kept may ask again."""
        self._join_out(trip, self._state.stream())
        trip.known = StorageWeakRef(storage)
        self._end(trip.back)
        self._drop(trip)

    def _end(self, tickets: list[int]) -> None:
        # In one call of C, which leaves those that could not be ended.
        tickets[:] = filter(None, map(self._state.engine.trip_end, tickets))

    def _fetch_ahead(self, run: _Run) -> None:
        """Start the copies of what comes next, as far as the budget reaches."""
        order = run.order or ()
        while run.at < len(order):
            trip = run.trips[order[run.at]][1]()
            if (
                trip is not None
                and trip.uses == 0
                and trip.here is None
                and trip.known.expired()  # else used where it is
            ):
                if self._held_bytes + trip.nbytes > self.device_budget:
                    return
                try:
                    self._start_back(trip)
                except torch.OutOfMemoryError:  # it comes when it is needed
                    return
            run.at += 1

    # ---- what is learned ----

    def _expect(self, run: _Run) -> None:
        """Backward begins: expect the order of the last run like it, or the reverse of forward."""
        sizes, order, _ = self._learned
        run.order = order if sizes == run.sizes else range(len(run.trips) - 1, -1, -1)

    def _begin_run(self) -> None:
        """Learn from the last one: what came back first, within half of the budget, stays."""
        run, sizes = self._run, self._run.sizes
        self._runs += 1
        is_alike = self._learned[0] == sizes and self._runs % _RUNS_BELIEVED
        self._alive = run.alive | (self._alive if is_alike else set())
        room, stays = self.device_budget // 2, set(self._alive)
        for index in run.returned:
            if index not in self._alive:
                room -= sizes[index]
                if room < 0:
                    break
                stays.add(index)
        self._learned = sizes, run.returned, stays
        self._run = _Run()

    def _leave_out_forwards(self) -> None:
        """Begin again, and learn nothing, where most of what was saved has gone without a backward.

        A validation that records a graph would else grow the run, and hide the order of a step.
        """
        run = self._run
        if run.order is None and 2 * len(self._live) <= len(run.trips):
            self._run = _Run()

    def _reap(self) -> None:
        """End the trips that are no longer needed: a finalizer calls no engine.

        What an interrupt cuts short is done once more: each line of it may run twice.
        """
        while self._gone:
            trip = self._gone[0]
            self._end(trip.back)
            self._end(trip.out)
            if trip.is_leaving:
                self._leaving_bytes -= trip.nbytes
                trip.is_leaving = False
            self._drop(trip)
            row = self._known.get(trip.key)
            if row is not None and row[0]() is None:
                del self._known[trip.key]
            if trip.buffer is not None:
                self._pool.give(trip.buffer)
                trip.buffer = None
            self._live.discard(trip)
            self._gone.popleft()
        self._pool.settle()
        while self._leaving and not self._leaving[0].is_leaving:
            self._leaving.popleft()
        if not self._live:  # whatever an interrupt left of them
            self._held_bytes = self._leaving_bytes = 0
            self._leaving.clear()

    def _count(self, **more: int) -> None:
        now = self.counts._asdict()
        self.counts = Counts(**{**now, **{name: now[name] + n for name, n in more.items()}})


def offload_activations(
    model: nn.Module,
    least: int | str = "1MiB",
    *,
    device: Any = None,
    device_budget: int | float | str = "auto",
    host_budget: int | float | str = "auto",
) -> ActivationOffload:
    """Let what autograd saves in `model`'s forward leave the device until backward needs it.

    Under a checkpoint these are the inputs that it keeps. Losses and gradients have the same bits
    as without. Weights never leave so: attach the model for them, before or after.

    Parameters
    ----------
    model : nn.Module
        Attached or not. A compiled model is what ``torch.compile`` has returned.
    least : int or str
        Bytes of a storage that leaves, such as ``"1MiB"``.
    device : torch.device or str, optional
        Where it computes; by default that of its attachment, or of its first parameter.
    device_budget : int, float or str
        What the device may hold of them: what comes back first and need not leave, what is on its
        way out, and what has come back ahead of its backward. ``"auto"``: four of the largest.
    host_budget : int, float or str
        Page-locked memory that they may take. ``"auto"``: what the host can spare now. What finds
        no room stays on the device.

    Returns
    -------
    ActivationOffload
        Ends at the exit of its ``with`` block, by `ActivationOffload.remove`, or with the model.

    Raises
    ------
    OffloadError
        The model, or a module of it, offloads saved tensors already.
    """
    for module in model.modules():
        other = _OTHER_MODULES.get(type(module).__name__)
        if module in _active or other is not None:
            raise OffloadError(
                f"{other or 'another offload_activations'} takes saved tensors of "
                f"{type(module).__name__} off the device already: leave one of them out"
            )
    attachment = getattr(model.__dict__.get(MANAGER), "attachment", None)
    if device is None:
        first = next(model.parameters(), None)
        device = attachment.state.device if attachment else "cpu" if first is None else first.device
    least_bytes = parse_size(least, name="least")
    with opened(parse_device(device)) as state:
        total = state.engine.mem_info()[1]
        device_bytes = (
            None
            if device_budget == "auto"
            else parse_size(device_budget, total=total, name="device_budget")
        )
        spared = available_bytes()
        host_bytes = (
            int(SPARED * (total_bytes() if spared is None else spared))
            if host_budget == "auto"
            else parse_size(host_budget, total=total_bytes(), name="host_budget")
        )
        may_lock = attachment.pieces.may_lock_beside if attachment else _always
        made = ActivationOffload(model, state, least_bytes, device_bytes, host_bytes, may_lock)
    _active[model] = made
    return made


def _always(nbytes: int) -> bool:
    return True
