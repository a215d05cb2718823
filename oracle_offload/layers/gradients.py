"""Gradients of trainable weights: summed on the device, then sent to the host, to their masters.

All uses of a master in a graph share one node, its landing, at which autograd sums their gradients
on the device. From there the bytes go to locked memory of the host while backward goes on, and the
host waits once, at the end of the graph task, before it sets ``.grad``. What has to see a gradient
sooner gets it once its bytes have arrived, and those waits are counted.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Function

from .._core import ALIGNMENT, HostBuffer
from ..engine import step_scalars
from ..engine.engines import DeviceState, patch
from ..engine.geometry import is_dense, tensor_bytes
from ..engine.locked import LockedPool
from ..errors import OffloadError
from . import norms

_HOST = torch.device("cpu")
_AT_ONCE = 2**64 - 1
LEAST_BYTES = 1 << 20  # of a gradient with locked memory of its own; smaller ones share some
MOST_LEAVING = 256 << 20  # bytes of gradients on the device that wait for their copy
MOST_COMING = 256 << 20  # bytes of sums that come before their gradients, or one of them
_AHEAD = 8  # of so many masters at most
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
    """A gradient on its way to `host`, which is the sum so far unless `is_new`; and its norms."""

    __slots__ = ("host", "is_new", "master", "norms", "ticket")

    def __init__(
        self, master: Tensor, host: Tensor, ticket: int, is_new: bool, of: dict[Any, Tensor]
    ) -> None:
        self.master, self.host, self.ticket, self.is_new = master, host, ticket, is_new
        self.norms = of


class _Coming:
    """A sum so far, `running`, on its way to `there`, before what is to be added to it."""

    __slots__ = ("running", "there", "ticket", "version")

    def __init__(self, running: Tensor, there: Tensor, ticket: int) -> None:
        self.running, self.version = running, running._version
        self.there, self.ticket = there, ticket


class Late:
    """The gradients of one graph task that are on their way.

    It lives as long as the graph task, which keeps what is called at its end. Where that ends by an
    exception, what was sent is waited for, so that nothing writes to memory that others have.
    Callers of its methods hold `DeviceState.gradients_lock`.

    Parameters
    ----------
    state : DeviceState
        The device.

    Attributes
    ----------
    is_watched : bool
        Whether some master has a hook. torch runs it while this thread goes on, and it may look at
        any gradient, and change it: then all of them arrive before they are set.
    latest : tuple
        Whose gradient was sent last: its `Gradients`, and the `id` of the master.
    keeps_graph : bool
        Whether it may be run through again (``retain_graph=True``).
    is_scaled : bool
        Whether a `GradScaler` has scaled what it differentiates.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        while state.unended:
            state.end_trip(*state.unended.pop())
        self.is_watched = any(map(_is_watched, _landed_on(state)))
        self.keeps_graph: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        self.is_scaled = step_scalars.is_scaled(_graph_task())
        self._steppers: list[Any] = []  # of weights whose gradients stay on the device
        self._flights: dict[int, _Flight] = {}  # by the `id` of the master; the latest is the last
        self._leaving: dict[int, tuple[Tensor, int]] = {}  # on the device still, by the ticket
        self._leaving_bytes = 0
        self._coming: dict[int, _Coming] = {}  # by the `id` of the master
        self.latest: tuple[object, int] = (None, 0)

    def has_room(self) -> bool:
        """Whether another sum may come before its gradient."""
        return sum(tensor_bytes(each.there) for each in self._coming.values()) < MOST_COMING

    def bring(self, master: Tensor, running: Tensor, stream: int) -> None:
        """Let the sum so far come to the device, unless it does already."""
        if id(master) in self._coming:
            return
        there = torch.empty_strided(
            running.size(), running.stride(), dtype=running.dtype, device=self._state.device
        )
        addresses = there.data_ptr(), running.data_ptr()
        ticket = self._state.engine.trip_in(*addresses, tensor_bytes(running), stream)
        self._coming[id(master)] = _Coming(running, there, ticket)

    def brought(self, master: Tensor, running: Tensor) -> Tensor | None:
        """Return the sum so far on the device; None where it did not come, or has changed since."""
        coming = self._coming.pop(id(master), None)
        if coming is None:
            return None
        self._state.end_trip(coming.ticket, coming)
        is_same = coming.running is running and coming.version == running._version
        return coming.there if is_same else None

    def flight_of(self, master: Tensor) -> _Flight | None:
        """Return what is on its way for `master`."""
        return self._flights.get(id(master))

    def send(self, master: Tensor, host: Tensor, source: Tensor, stream: int, is_new: bool) -> None:
        """Let `source` go to `host`; what of it is queued later on `stream` may be freed."""
        engine = self._state.engine
        nbytes = tensor_bytes(source)
        of = norms.as_it_leaves(self._state, master, source, self.is_scaled)
        self._state.time.flush(stream)
        ticket = engine.trip_home(host.data_ptr(), source.data_ptr(), nbytes, stream)
        before = self._flights.pop(id(master), None)
        self._flights[id(master)] = _Flight(master, host, ticket, is_new, of)
        self._leaving[ticket] = source, nbytes
        self._leaving_bytes += nbytes
        if before is not None:
            held, left = self._leaving.pop(before.ticket, (None, 0))
            self._leaving_bytes -= left
            self._state.end_trip(before.ticket, held)
        while self._leaving_bytes > MOST_LEAVING and len(self._leaving) > 1:
            oldest, (_, left) = next(iter(self._leaving.items()))
            engine.trip_join(oldest, stream)
            del self._leaving[oldest]
            self._leaving_bytes -= left

    def step(self, stepper: Any, master: Tensor, gradient: Tensor) -> None:
        """Let `stepper` step a master, now or until the graph task ends."""
        stepper.refuse(self, master, gradient)
        if stepper not in self._steppers:
            self._steppers.append(stepper)
            stepper.begin(self)
        stepper.take(master, gradient)

    def finish_steps(self) -> None:
        """Step what is left, and wait until it is home."""
        while self._steppers:
            self._steppers[-1].end()
            self._steppers.pop()

    def finish(self) -> None:
        """Wait, and set ``.grad`` of all masters."""
        flights, self._flights = list(self._flights.values()), {}
        if not flights:
            return
        engine = self._state.engine
        try:
            engine.trip_await(flights[-1].ticket)  # they arrive one after the other
        finally:
            leaving, self._leaving, self._leaving_bytes = self._leaving, {}, 0
            with contextlib.ExitStack() as ends:  # all of them, whichever fails
                for flight in flights:
                    held = leaving.get(flight.ticket)
                    ends.callback(self._state.end_trip, flight.ticket, held)
        for flight in flights:
            self._show(flight)

    def _show(self, flight: _Flight) -> None:
        master, host = flight.master, flight.host
        if not flight.is_new and master.grad is not host:
            return  # it was dropped, and what was added to it with it
        with torch.no_grad():
            if master.grad is None:
                master.grad = host
            elif flight.is_new:  # another has set it meanwhile
                master.grad.add_(host)
                flight.norms.clear()
        norms.note(self._state, master, flight.norms)

    def __del__(self) -> None:
        flights = list(self._flights.values())
        engine = self._state.engine
        with contextlib.suppress(Exception):  # the engine may be closed by now
            if flights:
                engine.trip_await(flights[-1].ticket)
        for coming in self._coming.values():  # for gradients that did not
            with contextlib.suppress(Exception):
                self._state.end_trip(coming.ticket, coming)
        for flight in flights:
            with contextlib.suppress(Exception):
                self._state.end_trip(flight.ticket, self._leaving.get(flight.ticket))
        for stepper in self._steppers:
            with contextlib.suppress(Exception):
                stepper.break_off()


class Gradients:
    """How gradients of one model's masters come to the host, and the memory they have there.

    They have page-locked memory, into which the device copies. That memory serves the next gradient
    of this size once no tensor points into it: as a rule one step later.

    Parameters
    ----------
    state : DeviceState
        The device they come from.
    may_lock : callable
        Whether so many bytes may be page-locked in addition to the masters.

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
        # By the `id` of a master: that of the one whose gradient came next, the last time.
        self._following: dict[int, int] = {}
        patch(norms.watch_norms)

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
            The gradient on the host, where code is to see it now. None: ``.grad`` is set at the
            end of the graph task.
        """
        accumulator = node.next_functions[0][0]
        master: Tensor = accumulator.variable
        with self._state.gradients_lock:
            late = self._late()
            stepper = self._state.steppers.get(id(master))
            if (
                late is not None
                and stepper is not None
                and not node.is_added_to
                and not _is_watched(node)
                and _is_only_for_grad(accumulator, master)
            ):
                late.step(stepper, master, self._laid_out(gradient, master))
                return None
            if late is not None:
                is_alone = self._finish_others(late, master)
                late.is_watched = late.is_watched or _is_watched(node)
                if (
                    may_be_late
                    and is_alone
                    and not late.is_watched
                    and not node.is_added_to
                    and _is_only_for_grad(accumulator, master)
                    and self._send(late, master, gradient)
                ):
                    node.sent_in = _graph_task()
                    return None
                late.finish()  # what is to be added first, and all that a hook may look at
        return self.to_host(gradient)

    def is_added_on_host(self, node: Any) -> None:
        """Code adds to a master's gradient on the host: torch does, now.

        What is on its way to the same place has to be there first, and from now on nothing is sent
        there by other graph tasks: see `_finish_others`.
        """
        if not self._state.listeners:  # the model is detached, and its landing not collected yet
            return
        master: Tensor = node.next_functions[0][0].variable
        with self._state.gradients_lock:
            late = self._late()
            if late is None:
                return
            stepper = self._state.steppers.get(id(master))
            if stepper is not None:
                stepper.refuse_more(master)
            self._finish_others(late, master)
            if late.flight_of(master) is not None:
                late.finish()
            # torch adds the two first, and the sum to what is there.
            node.is_added_to |= node.sent_in == _graph_task()

    def _late(self) -> Late | None:
        state, own = self._state, _graph_task()
        task, outermost = _here.tasks
        late: Late | None = state.late.get(outermost if task == own else own)
        if late is None:
            note_trainable(state, own)
            late = state.late.get(own)
        return late

    def _finish_others(self, late: Late, master: Tensor) -> bool:
        """Finish what other graph tasks have on its way to a master; return whether there are none.

        A task may run in another thread, or be around this one. What is sent is added to the sum
        that ``.grad`` was when it was sent, which is wrong if torch adds to that meanwhile, for
        another task. So while there are two tasks nothing is sent: torch adds, under its own lock.
        """
        is_alone = True
        for other in self._state.late.valuerefs():
            found = other()
            if found is not None and found is not late:
                is_alone = False
                if found.flight_of(master) is not None:
                    found.finish()
        return is_alone

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
        owner, before = late.latest
        if owner is self:
            self._following[before] = id(master)
        late.latest = self, id(master)
        flight = late.flight_of(master)
        running = master.grad if flight is None else flight.host
        if flight is not None and not flight.is_new and master.grad is not running:
            return False  # code has dropped it meanwhile
        if running is None:
            gradient = self._laid_out(gradient, master)
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
        state.time.flush(stream)
        if flight is None:
            there = late.brought(master, running)
            if there is None:
                late.bring(master, running, stream)
                there = cast("Tensor", late.brought(master, running))
        else:
            there = torch.empty_strided(
                running.size(), running.stride(), dtype=running.dtype, device=self.device
            )
            coming = state.engine.trip_back(flight.ticket, there.data_ptr(), stream)
            state.end_trip(coming, there)
        there.add_(gradient)
        if state.simulated:
            state.time.pending_kernel_s += state.time.kernel_seconds(0.0, 3 * nbytes, there.dtype)
            state.time.flush(stream)
        late.send(master, running, there, stream, is_new=flight is not None and flight.is_new)
        self._bring_ahead(late, master, stream)  # this one's own sum no more
        return True

    def _bring_ahead(self, late: Late, master: Tensor, stream: int) -> None:
        """Let those sums come that the gradients after this master's are added to.

        They come in the order of the last time, while gradients are computed: to bring each when
        its gradient is there would let the device wait for the link.
        """
        following = id(master)
        for _ in range(_AHEAD):
            following = self._following.get(following, 0)
            known = self._state.landings.get(following)
            if known is None or not late.has_room():
                return
            other: Any = accumulator_of(known.grad_fn).variable
            running = other.grad
            if (
                running is not None
                and late.flight_of(other) is None
                and self._may_be_added_to(running, other)
            ):
                late.bring(other, running, stream)

    def _laid_out(self, gradient: Tensor, master: Tensor) -> Tensor:
        """Return a gradient in the layout that torch gives ``.grad``."""
        if gradient.layout is not torch.strided or _is_kept_as_it_is(gradient, master):
            return gradient
        return torch.empty_like(master, device=self.device).copy_(gradient)

    def _may_be_added_to(self, running: Tensor, master: Tensor) -> bool:
        if (
            type(running) is not Tensor
            or running.layout is not torch.strided
            or running.device.type != "cpu"
            or running.dtype is not master.dtype
            or running.requires_grad
            or running.is_inference()  # has no version
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

    @property
    def locked_bytes(self) -> int:
        """Page-locked host memory for gradients, in use or free."""
        return self._pool.nbytes

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
        ctx.is_added_to, ctx.sent_in = False, -1
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
    """Return the tensor that represents a trained master in the graph."""
    for known in (layer.landings, layer.state.landings):
        found: Tensor | None = known.get(id(master))
        if found is None or found.dtype is not master.dtype:  # which ``.data`` may change
            continue
        # `torch.utils.swap_tensors` leaves the accumulation with what the master was.
        if accumulator_of(found.grad_fn).variable is master:
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
        landed = about()
        if gradients[0] is not None and landed is not None:
            landed.gradients.is_added_on_host(landed)

    ahead = accumulator.register_prehook(before).hooks_dict_ref()
    node.hooks = ahead, after


def _landed_on(state: DeviceState) -> Iterator[Any]:
    """Return the nodes of all landings of a device."""
    for about in state.landings.valuerefs():
        found = about()
        if found is not None:
            yield found.grad_fn


def _is_watched(node: Any) -> bool:
    """Whether a hook sees a master's gradient, or is called when it is set."""
    ahead, after = node.hooks
    master = node.next_functions[0][0].variable
    return bool(
        master._backward_hooks or master._post_accumulate_grad_hooks or len(ahead) > 1 or after
    )


def _is_only_for_grad(accumulator: Any, master: Any) -> bool:
    """Whether nothing sees a master's gradient before the graph task ends but ``.grad``."""
    if (
        getattr(master, "grad_dtype", master.dtype) is not master.dtype
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
    if task == -1 or task in state.late:
        return
    late = Late(state)
    state.late[task] = late  # and the graph task keeps it, by what it calls at its end

    def end_of_task() -> None:
        try:
            with state.gradients_lock:
                try:
                    late.finish_steps()
                    late.finish()
                finally:
                    state.late.pop(task, None)
        finally:
            state.rest()

    torch.autograd.Variable._execution_engine.queue_callback(end_of_task)


def note_backward(state: DeviceState, task: int) -> None:
    """The backward of a trainable layer runs, whose forward ran in graph task `task`, -1 for none.

    Where it ran in one, a checkpoint's, that is around the one of this backward.
    """
    own = _graph_task()
    around = task if task in state.late else own
    note_trainable(state, around)
    _here.tasks = own, around
