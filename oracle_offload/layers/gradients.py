"""Gradients of trainable weights: from the device, where they meet, to the host, where masters lie.

All uses of a master in a graph share one node, its landing, at which autograd sums their gradients
on the device. From there the bytes go to locked memory of the host while backward goes on, and the
host waits once, at the end of the graph task, before it sets ``.grad``. What has to see a gradient
sooner gets it once its bytes have arrived, and those waits are counted.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function

from .._core import ALIGNMENT, HostBuffer
from ..engine.engines import DeviceState
from ..engine.geometry import is_dense, tensor_bytes
from ..engine.locked import LockedPool
from ..errors import OffloadError

_HOST = torch.device("cpu")
_MOST_TASKS = 64
_AT_ONCE = 2**64 - 1
LEAST_BYTES = 1 << 20  # of a gradient with locked memory of its own; smaller ones share some
MOST_LEAVING = 256 << 20  # bytes of gradients on the device that wait for their copy
_graph_task = torch._C._current_graph_task_id
_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node


class _Thread(threading.local):
    tasks = (-1, -1)  # of the latest backward of a layer: its own, and the outermost one


_here = _Thread()


class _Piece:
    """Locked host memory for one gradient: `nbytes` from `offset` on."""

    __slots__ = ("buffer", "is_small", "nbytes", "offset")

    def __init__(self, buffer: HostBuffer, offset: int, nbytes: int, is_small: bool) -> None:
        self.buffer, self.offset, self.nbytes, self.is_small = buffer, offset, nbytes, is_small


class _Flight:
    """A gradient on its way to `host`, which is the sum so far unless `is_new`."""

    __slots__ = ("host", "is_new", "master", "ticket")

    def __init__(self, master: Tensor, host: Tensor, ticket: int, is_new: bool) -> None:
        self.master, self.host, self.ticket, self.is_new = master, host, ticket, is_new


class Late:
    """The gradients of one graph task that are on their way.

    It lives as long as the graph task, which keeps what is called at its end. Where that ends by an
    exception, what was sent is waited for, so that nothing writes to memory that others have.

    Parameters
    ----------
    state : DeviceState
        The device.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._flights: dict[int, _Flight] = {}  # by the `id` of the master
        self._leaving: deque[tuple[int, Tensor, int]] = deque()  # on the device still
        self._leaving_bytes = 0
        self._last: int | None = None

    def flight_of(self, master: Tensor) -> _Flight | None:
        """Return what is on its way for `master`."""
        return self._flights.get(id(master))

    def send(self, master: Tensor, host: Tensor, source: Tensor, stream: int, is_new: bool) -> None:
        """Let `source` go to `host`; what of it is queued later on `stream` may be freed."""
        engine = self._state.engine
        nbytes = tensor_bytes(source)
        with self._lock:
            ticket = engine.trip_home(host.data_ptr(), source.data_ptr(), nbytes, stream)
            before = self._flights.get(id(master))
            self._flights[id(master)] = _Flight(master, host, ticket, is_new)
            self._last = ticket
            self._leaving.append((ticket, source, nbytes))
            self._leaving_bytes += nbytes
            if before is not None:
                self._leaving = deque(row for row in self._leaving if row[0] != before.ticket)
                engine.trip_end(before.ticket)
            while self._leaving_bytes > MOST_LEAVING and len(self._leaving) > 1:
                oldest, _, left = self._leaving.popleft()
                self._leaving_bytes -= left
                engine.trip_join(oldest, stream)

    def finish(self, master: Tensor | None = None) -> None:
        """Wait, and set ``.grad`` of all masters, or of one."""
        with self._lock:
            if master is None:
                flights, last = list(self._flights.values()), self._last
                self._flights = {}
            else:
                flight = self._flights.pop(id(master), None)
                flights, last = [flight] if flight else [], flight.ticket if flight else None
            if not flights:
                return
            engine = self._state.engine
            try:
                if last is not None:
                    engine.trip_await(last)
            finally:
                if master is None:
                    self._leaving.clear()
                    self._leaving_bytes = 0
                    self._last = None
                elif last == self._last:
                    self._last = next(
                        (flight.ticket for flight in self._flights.values()), None
                    )  # any: see `_await`
                for flight in flights:
                    with contextlib.suppress(OffloadError):
                        engine.trip_end(flight.ticket)
        for flight in flights:
            self._show(flight)

    def _show(self, flight: _Flight) -> None:
        master, host = flight.master, flight.host
        with torch.no_grad():
            if flight.is_new and master.grad is not None:  # another has set it meanwhile
                master.grad.add_(host)
            elif flight.is_new:
                master.grad = host
        grad = cast("Tensor", master.grad)
        self._state.shown[id(master)] = grad.data_ptr(), grad._version

    def __del__(self) -> None:
        flights = list(self._flights.values())
        engine = self._state.engine
        with contextlib.suppress(Exception):  # the engine may be closed by now
            if self._last is not None:
                engine.trip_await(self._last)
        for flight in flights:
            with contextlib.suppress(Exception):
                engine.trip_end(flight.ticket)


class Gradients:
    """How gradients of one model's masters come to the host, and the memory they lie in there.

    They have page-locked memory, into which the device copies. That memory serves the next gradient
    of this size once no tensor points into it: as a rule one step later.

    Parameters
    ----------
    state : DeviceState
        The device they come from.
    may_lock : callable
        Whether so many bytes may be page-locked beside the masters.

    Attributes
    ----------
    device : torch.device
        Where they are computed.
    """

    def __init__(self, state: DeviceState, may_lock: Callable[[int], bool]) -> None:
        self.device = state.device
        self._state = state
        self._pool = LockedPool(state, may_lock)
        # Small ones share a buffer: what no tensor points into, by size, and what is left of it.
        self._small: dict[int, list[_Piece]] = {}
        self._shared: _Piece | None = None

    # ---- on their way ----

    def land(self, node: Any, gradient: Tensor, may_be_late: bool) -> Tensor | None:
        """Take the sum of a master's gradients in a graph task, where it is on the device.

        Parameters
        ----------
        node
            The landing's.
        gradient : Tensor
            The sum.
        may_be_late : bool
            Whether autograd asks for values alone (no ``create_graph``).

        Returns
        -------
        Tensor or None
            The gradient on the host, where somebody is to see it now. None: ``.grad`` is set at the
            end of the graph task.
        """
        accumulator = node.next_functions[0][0]
        master: Tensor = accumulator.variable
        late = self._late()
        if late is not None:
            if (
                may_be_late
                and not node.is_added_to
                and _is_only_for_grad(node, accumulator, master)
                and self._send(late, master, gradient)
            ):
                return None
            late.finish(master)  # what was to be added first
        return self.to_host(gradient)

    def _late(self) -> Late | None:
        own = _graph_task()
        task, outermost = _here.tasks
        return self._state.late.get(outermost if task == own else own)

    def _send(self, late: Late, master: Tensor, gradient: Tensor) -> bool:
        """Send a gradient to where ``.grad`` will be, added to what is there; False: it cannot."""
        if (
            gradient.layout is not torch.strided
            or gradient.dtype is not master.dtype
            or gradient.shape != master.shape
            or not tensor_bytes(gradient)
        ):
            return False
        state = self._state
        stream = state.stream()
        flight = late.flight_of(master)
        running = master.grad if flight is None else flight.host
        if running is None:
            if not _is_kept_as_it_is(gradient, master):
                gradient = torch.empty_like(master, device=self.device).copy_(gradient)
            host = self.locked_like(gradient)
            if host is None:
                return False
            state.time.flush(stream)
            late.send(master, host, gradient, stream, is_new=True)
            return True
        if not self._may_be_added_to(running, master):
            return False
        # torch adds to what is there; here it comes to the device for that.
        nbytes = tensor_bytes(running)
        there = torch.empty_strided(
            running.size(), running.stride(), dtype=running.dtype, device=self.device
        )
        state.time.flush(stream)
        if flight is None:
            coming = state.engine.trip_in(there.data_ptr(), running.data_ptr(), nbytes, stream)
        else:
            coming = state.engine.trip_back(flight.ticket, there.data_ptr(), stream)
        state.engine.trip_join(coming, stream)
        state.engine.trip_end(coming)
        there.add_(gradient)
        if state.simulated:
            state.time.pending_kernel_s += state.time.kernel_seconds(0.0, 3 * nbytes, there.dtype)
            state.time.flush(stream)
        late.send(master, running, there, stream, is_new=flight is not None and flight.is_new)
        return True

    def _may_be_added_to(self, running: Tensor, master: Tensor) -> bool:
        if (
            type(running) is not Tensor
            or running.layout is not torch.strided
            or running.device.type != "cpu"
            or running.dtype is not master.dtype
            or running.shape != master.shape
            or running.requires_grad
            or not is_dense(running)
        ):
            return False
        return self._state.engine.is_locked(running.data_ptr(), tensor_bytes(running))

    # ---- arrived ----

    def to_host(self, gradient: Tensor | None) -> Tensor | None:
        """Return a host copy of a device gradient once its bytes have arrived.

        autograd adds, clones and shows gradients on the host as soon as they are returned, so this
        waits (the engine counts it).
        """
        if gradient is None:
            return None
        if is_legacy_batchedtensor(
            gradient
        ):  # several at once (``is_grads_batched``): it has no address
            return gradient.to(_HOST)
        if gradient.is_sparse:
            rows, values = self.to_host(gradient._indices()), self.to_host(gradient._values())
            return torch.sparse_coo_tensor(
                cast("Tensor", rows),
                cast("Tensor", values),
                gradient.shape,
                check_invariants=False,
                is_coalesced=gradient.is_coalesced(),
            )
        if not is_dense(gradient):
            gradient = gradient.contiguous()
        nbytes = tensor_bytes(gradient)
        host = self.locked_like(gradient) if nbytes else None
        if host is None:
            host = torch.empty_strided(
                gradient.size(), gradient.stride(), dtype=gradient.dtype, device=_HOST
            )
        stream = self._state.stream()
        self._state.time.flush(stream)
        if nbytes:
            self._state.engine.download(host.data_ptr(), gradient.data_ptr(), nbytes, stream)
        return host

    # ---- the memory ----

    def locked_like(self, gradient: Tensor) -> Tensor | None:
        """Return locked memory for a dense gradient; None where there is none."""
        nbytes = tensor_bytes(gradient)
        piece = self._take(nbytes)
        if piece is None:
            return None
        export = memoryview(piece.buffer)[piece.offset : piece.offset + nbytes]
        # torch keeps the export for as long as a tensor points there
        if piece.is_small:
            give = self._small.setdefault(piece.nbytes, []).append
            weakref.finalize(export, give, piece).atexit = False
        else:
            weakref.finalize(export, self._pool.give, piece.buffer).atexit = False
        flat = torch.frombuffer(export, dtype=gradient.dtype)
        empty = torch.empty(0, dtype=gradient.dtype, device="cpu")
        return empty.set_(flat.untyped_storage(), 0, gradient.size(), gradient.stride())

    def _take(self, nbytes: int) -> _Piece | None:
        if nbytes >= LEAST_BYTES:
            buffer = self._pool.take(nbytes)
            return None if buffer is None else _Piece(buffer, 0, nbytes, is_small=False)
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with contextlib.suppress(IndexError):  # another thread may take the last one
            return self._small.setdefault(size, []).pop()
        with self._state.lock:
            shared = self._shared
            if shared is None or shared.nbytes < size:
                buffer = self._pool.take(max(LEAST_BYTES, size))
                if buffer is None:
                    return None
                shared = _Piece(buffer, 0, buffer.nbytes, is_small=True)
            begin = shared.offset + size
            self._shared = _Piece(shared.buffer, begin, shared.nbytes - size, is_small=True)
            return _Piece(shared.buffer, shared.offset, size, is_small=True)

    def give_back_all(self) -> None:
        """Unlock all of it; gradients that are there keep their memory, as ordinary memory."""
        with self._state.lock:
            self._small, self._shared = {}, None
            self._pool.give_back_all()


# ---- where they meet ----


class _Refuse(Function):
    """Identity whose backward refuses: gradients of managed layers are differentiable once."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *grad_outputs: Tensor) -> Tensor:
        """Compute; see the class."""
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise OffloadError(
            "double backward through a managed layer is not supported: its weights are gone from "
            "the device by then. Leave the layers that need it resident with ignore_modules=[...]."
        )


def refuse_double_backward(gradients: tuple[Any, ...], grad_output: Tensor) -> tuple[Any, ...]:
    """Tie `gradients` of a backward under ``create_graph=True`` to a node that refuses."""
    if not grad_output.requires_grad:
        grad_output = grad_output.detach().requires_grad_()
    refuse: Any = _Refuse.apply
    return tuple(
        refuse(gradient, grad_output) if isinstance(gradient, Tensor) else gradient
        for gradient in gradients
    )


class _Landing(Function):
    """The node at which all gradients of a master meet, on the device.

    Its result has the master's shape and dtype, the device, and no memory; it lives as long as a
    layer that has the master, so that every graph has the same node.
    """

    @staticmethod
    def forward(ctx: Any, master: Tensor, layer: Any) -> Tensor:
        ctx.gradients = layer.attachment.gradients
        ctx.is_added_to = False
        like = torch.empty((), dtype=master.dtype, device=ctx.gradients.device)
        return like.expand(master.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradient where the master is, or nothing; see `Gradients.land`."""
        (gradient,) = grad_outputs
        if not torch.is_grad_enabled():
            return ctx.gradients.land(ctx, gradient, True), None
        with torch.no_grad():
            found = ctx.gradients.land(ctx, gradient.detach(), False)
        return refuse_double_backward((found, None), gradient)


_landing: Any = super(Function, _Landing).apply


def landing(layer: Any, master: Tensor) -> Tensor:
    """Return what stands for a trained master in the graph."""
    for known in (layer.landings, layer.state.landings):
        found: Tensor | None = known.get(id(master))
        # `torch.utils.swap_tensors` leaves the accumulation with what the master was.
        if found is not None and accumulator_of(found.grad_fn).variable is master:
            if known is not layer.landings:
                layer.landings[id(master)] = found
            return found
    with torch.inference_mode(False), torch.enable_grad():
        made = cast("Tensor", _landing(master, layer))
    _watch(made.grad_fn)
    layer.state.landings[id(master)] = made
    layer.landings[id(master)] = made  # which keeps the master alive, and so the `id`
    return made


def accumulator_of(node: Any) -> Any:
    """Return the node behind a landing, which accumulates into the master; else the node."""
    is_landing = isinstance(node, cast("Any", _Landing)._backward_cls)
    return node.next_functions[0][0] if is_landing else node


def _watch(node: Any) -> None:
    """Have a landing run as soon as it can, and note what else its master's gradient goes to."""
    node._set_sequence_nr(_AT_ONCE)  # as torch's own accumulation: memory is free the sooner
    accumulator = node.next_functions[0][0]
    handle = accumulator.register_hook(lambda *_: None)
    after = handle.hooks_dict_ref()
    handle.remove()
    about = weakref.ref(node)

    def before(gradients: tuple[Tensor | None, ...]) -> None:
        # Code adds to the gradient of a master on the host: torch does, now. What is on its way to
        # the same place has to be there first.
        landed = about()
        if gradients[0] is None or landed is None:
            return
        late = landed.gradients._late()
        if late is not None and late.flight_of(landed.next_functions[0][0].variable) is not None:
            landed.is_added_to = True
            late.finish(landed.next_functions[0][0].variable)

    ahead = accumulator.register_prehook(before).hooks_dict_ref()
    node.hooks = ahead, after


def _is_only_for_grad(node: Any, accumulator: Any, master: Any) -> bool:
    """Whether nothing sees a master's gradient before the graph task ends but ``.grad``."""
    ahead, after = node.hooks
    if (
        master._backward_hooks
        or master._post_accumulate_grad_hooks
        or len(ahead) > 1
        or after
        or getattr(master, "grad_dtype", master.dtype) is not master.dtype
        or torch.is_anomaly_enabled()
        or (torch.distributed.is_available() and torch.distributed.is_initialized())
    ):
        return False
    try:
        return _will_run(accumulator)
    except RuntimeError:  # ``autograd.grad``
        return False


def _is_kept_as_it_is(gradient: Tensor, master: Tensor) -> bool:
    """Whether torch takes a first gradient as it is: else it copies it into the master's layout."""
    return is_dense(gradient) and all(
        of_gradient == of_master if size != 1 else of_gradient != 0
        for size, of_gradient, of_master in zip(
            gradient.size(), gradient.stride(), master.stride(), strict=True
        )
    )


# ---- graph tasks ----


def note_trainable(state: DeviceState, task: int) -> None:
    """A trainable layer took part in graph task `task`: at its end masters may be rewritten."""
    tasks = state.tasks_with_gradients
    if task == -1 or task in tasks:
        return
    if len(tasks) > _MOST_TASKS:  # tasks that ended by an exception
        tasks.clear()
    tasks.add(task)
    late = Late(state)
    state.late[task] = late

    def end_of_task() -> None:
        tasks.discard(task)
        try:
            late.finish()
        finally:
            state.rest()

    torch.autograd.Variable._execution_engine.queue_callback(end_of_task)


def note_backward(state: DeviceState, task: int) -> None:
    """The backward of a trainable layer runs, whose forward ran in graph task `task`, -1 for none.

    Where it ran in one, a checkpoint's, that is around the one of this backward.
    """
    own = _graph_task()
    if task == -1:
        note_trainable(state, own)
    _here.tasks = own, own if task == -1 else task
