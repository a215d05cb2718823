"""The loan: how a layer computes, forward and backward, with weights that it has only for a while.

Forward and backward each take the layer's tensors for one operator and give them back in the same
frame (`Layer.lend`), inside the autograd function: code after ``Function.apply`` or in a module
hook never runs for the last layer of a checkpoint that stops early. Backward asks by layer, never
by the address that forward saw.

Weights are not saved for backward (saved-tensor hooks would copy whole masters); their versions
are, so that a change between forward and backward raises as torch would.

A kind of layer is a subclass of `Layer` that says its operator, its derivative and their cost.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad, profiler

from .._core import BACKWARD, FORWARD, RECOMPUTE, RECORDED
from ..engine.exemption import exempt
from ..engine.geometry import is_dense, tensor_bytes
from ..errors import NoRoomError, OffloadError, StaleWeightsError, no_room_error
from .autocast import cast_dtype, cast_input, cast_tensors
from .gradients import (
    landing,
    note_backward,
    note_trainable,
    refuse_double_backward,
)
from .leaf import Leaf, Masters, Tensors, version_of
from .swap import is_exporting, refuse_tracing, untraced

_functorch_active = torch._C._are_functorch_transforms_active
_graph_task = torch._C._current_graph_task_id
_tracing_state = torch._C._get_tracing_state
_dispatch_mode = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY

Cast = torch.dtype | None  # what autocast computes in; None where it is off
Compute = Callable[[Tensors], Any]  # queues all work that uses a slot's tensors, keeps none
Needs = tuple[bool, ...]  # whether the input's gradient is wanted, and that of each named tensor


def forward_kind(task: int, training: bool) -> int:
    """Return the engine's kind of use for a forward in a graph task, -1 for none."""
    if task != -1:
        return RECOMPUTE
    return RECORDED if training else FORWARD


class Borrower(Leaf):
    """A leaf that something computes with, for as long as it has a slot."""

    puts_off = True  # see `handle`: until its code writes to what it makes of its weights
    data_writes = 0  # by code, through `.data`: torch counts none of them
    wants_memory = False  # its code asks a weight for its address, and not operators alone

    def lend(self, kind: int, task: int, seconds: float, dtype: Cast, compute: Compute) -> Any:
        """Return ``compute(tensors)`` of the tensors as they are in a slot.

        The whole life of a loan: what takes also gives back, whatever happens in between. Torch's
        stream waits for the copy, the host does not.

        Parameters
        ----------
        kind : int
            ``FORWARD``, ``RECORDED``: a forward under grad mode, ``RECOMPUTE``: a forward in a
            graph task, by a checkpoint, or ``BACKWARD``.
        task : int
            The running graph task, -1 for none.
        seconds : float
            How long the simulated device computes.
        dtype : torch.dtype or None
            What autocast computes in; None where it is off.
        compute : callable
            Queues all work that uses the tensors, and keeps none of them.

        Raises
        ------
        NoRoomError
            The arena has no room for the unit; it is a `torch.OutOfMemoryError`.
        """
        state = self.state
        if self.unit in state.rewritten:  # a copy of what is still being written would be torn
            state.await_rewrite(self.unit)
        stream = state.begin_use()
        stamp = version_of(self.masters.present)
        begun = False
        try:
            # No variable has what this block takes: an interrupt ends it, whenever that comes.
            with state.engine.use(
                self.member, stream, stamp, kind, task, seconds, state.stamp_units
            ) as address:
                begun = True
                if not self.moving:
                    tensors = self.views.get(address) or self.view_at(address)
                    if dtype is not None:
                        tensors = self.cast(kind, dtype, tensors)
                    result = compute(tensors)
                    if kind == BACKWARD and state.n_stepping:  # what was used is stepped next
                        state.keep_for_step(self)
                    return result
        except NoRoomError as error:
            if begun:
                raise
            if not state.give_up_copies():
                raise no_room_error(f"no room for layer '{self.name}': {error}") from error
            return self.lend(kind, task, seconds, dtype, compute)
        if kind == BACKWARD:
            raise StaleWeightsError(
                f"the weight of managed layer '{self.name}' was replaced by another thread while "
                "its backward began; change weights between steps."
            )
        with state.lock:  # another thread moves the masters; see `Leaf.follow`
            pass
        return self.lend(kind, task, seconds, dtype, compute)

    def cast(self, kind: int, dtype: torch.dtype, tensors: Tensors) -> Tensors:
        """Return what autocast makes of the tensors that a call of this kind reads."""
        names = self.backward_reads if kind == BACKWARD else self.names
        return cast_tensors(dtype, tensors, [name in names for name in self.names])

    def check_unchanged(self, names: Sequence[str], masters: Masters, expected: int) -> None:
        """Raise `StaleWeightsError` where a tensor that backward reads is not what forward used.

        Parameters
        ----------
        names : sequence of str
            Of those that backward reads.
        masters : Masters
            The layer's in forward.
        expected : int
            The `version_of` those that backward reads.
        """
        read, moved = [], False
        for name in names:
            tensor = self.parameters.get(name)
            if tensor is None:
                moved = True
                continue
            then, now = masters.addresses[name], tensor.data_ptr()
            moved |= now != then and not self.has_only_moved(then, now)
            read.append(tensor)
        version = version_of(read)
        if moved or version != expected:
            what = "was replaced through .data"
            if version != expected:
                what = f"is at version {version}; expected version {expected} instead"
            raise StaleWeightsError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: the {' or '.join(names)} of managed layer "
                f"'{self.name}' {what}. Change weights after backward, or leave the layer resident "
                "with ignore_modules=[...]."
            )
        if self.was_coded_written(masters, names):  # which torch does not know of, either
            self.leave_stale_codes()

    def leave_stale_codes(self) -> None:
        """Compute from here on with what was written, not with the codes of what was there.

        Raises
        ------
        OffloadError
            The engine still copies the codes: another call has them on the device.
        """
        self.attachment.leave_codes([self])
        if any(coded.was_written() for coded in self.coded):
            raise OffloadError(
                f"the weight of managed layer '{self.name}' was written while another call "
                "computes with it; change weights between steps."
            )

    def profiled(self, what: str = "") -> profiler.record_function:
        """Return a range of torch's profiler with the layer's name; a forward by default."""
        what = what or ("forward" if _graph_task() == -1 else "forward again")
        return profiler.record_function(f"{self.name} ({what})")

    def adopt(self, *, lasting: bool = False) -> bool:
        """Follow what is in the places of the masters now; see `Leaf.adopt`.

        Raises
        ------
        OffloadError
            That is what ``torch.export`` puts there.
        """
        if is_exporting():
            refuse_tracing("torch.export")
        return super().adopt(lasting=lasting)

    def look_again(self) -> None:
        """Before a use: see to what was added to the model since.

        Raises
        ------
        OffloadError
            A transform of torch.func is active, or something traces the layer.
        """
        if _tracing_state() is not None:
            refuse_tracing("torch.jit.trace")
        if _dispatch_mode(_PROXY) is not None:
            refuse_tracing("torch.export" if is_exporting() else "make_fx")
        if self.structure.changed:  # an adapter was added: look at it before computing
            self.structure.settle()
        if self.coded and self.has_stale_codes():  # in a recompute too: that is a forward
            self.leave_stale_codes()
        if _functorch_active():
            raise OffloadError(
                f"torch.func transforms over managed layer '{self.name}' are not supported; leave "
                "it resident with ignore_modules=[...] or detach the model first."
            )


class Layer(Borrower, ABC):
    """A leaf that computes; `x` is its one input.

    A kind says `names`, `required`, `backward_reads` and `node`, and the methods up to
    `backward_cost`. `tensors` has one for each of `names`, None for those that the module lacks.
    """

    base_forward: ClassVar[Callable[..., Tensor]]  # classes that compute with it are of this kind
    node: ClassVar[Any]  # `apply` of its `Loan`; see `node_of`

    # ---- what a kind says ----

    @classmethod
    def computes(cls, module_class: Any) -> bool:
        """Whether modules of this class compute as the base class of this kind does."""
        return module_class.forward is cls.base_forward

    @abstractmethod
    def base_call(self, module: Any, x: Tensor, tensors: Tensors) -> Tensor:
        """Compute what the base class's forward does, with the given tensors."""

    @abstractmethod
    def compute(self, x: Tensor, tensors: Tensors) -> Tensor:
        """Compute what torch does where autograd records nothing."""

    @abstractmethod
    def record(self, ctx: Any, x: Tensor, trained: Tensors, tensors: Tensors) -> Tensor:
        """Compute what torch does where autograd records, and keep in `ctx` what `derivative` uses.

        Parameters
        ----------
        ctx
            Of the autograd function, for ``ctx.save_for_backward`` and attributes.
        x : Tensor
            The input.
        trained : tuple
            For each tensor what represents it in the graph, None where it needs no gradient.
        tensors : tuple
            On the device; they must not be kept.
        """

    @abstractmethod
    def derivative(self, ctx: Any, grad: Tensor, needs: Needs) -> Tensors:
        """Return the gradients of the input and of each tensor, None where `needs` says so.

        What uses the tensors goes through `lend_backward`.
        """

    @abstractmethod
    def forward_cost(self, x: Tensor) -> tuple[float, int]:
        """Return the operations and the bytes of forward, for simulated time."""

    @abstractmethod
    def backward_cost(self, grad: Tensor, needs: Needs) -> tuple[float, int]:
        """Return the operations and the bytes of `derivative`, for simulated time."""

    # ---- the call ----

    def traced(self, module: Any, x: Tensor) -> Tensor:
        """Compute in compiled code, of which a layer of this kind is no part."""
        return cast("Tensor", untraced(self, x))

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer for `x`."""
        if not self.ready(x):
            return self.foreign(x)
        if x.is_cpu is not self.on_cpu:
            x = x.to(self.state.device)
        if profiler._is_profiler_enabled:
            with self.profiled():
                return self.call(x)
        return self.call(x)

    def ready(self, x: Tensor) -> bool:
        """Check everything a call depends on; False where it must run on foreign weights."""
        self.look_again()
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise OffloadError(
                f"forward-mode differentiation through managed layer '{self.name}' is not "
                "supported; leave it resident with ignore_modules=[...]."
            )
        return self.masters.are(self.parameters) or self.adopt()

    def foreign(self, x: Tensor) -> Tensor:
        """Compute with whatever the module's tensors are now, brought to the compute device.

        Reached when a parametrisation, ``functional_call`` or a hook put a computed tensor in the
        parameter's place, or user code moved the parameter to the device.
        """
        module: Any = self.module()
        with exempt():
            used = self.bring([self._now(module, name) for name in self.names])
            return self.base_call(module, x.to(self.state.device), used)

    def _now(self, module: Any, name: str) -> Tensor | None:
        found = self.parameters.get(name)
        return cast("Tensor | None", getattr(module, name) if found is None else found)

    def bring(self, used: Sequence[Tensor | None]) -> Tensors:
        """Return tensors that are no masters, on the device; count their bytes."""
        device = self.state.device
        own = dict(self.masters.named())
        self.attachment.traffic.note_computed(
            self.name,
            sum(
                tensor_bytes(tensor)
                for name, tensor in zip(self.names, used, strict=True)
                if tensor is not None and tensor.device.type == "cpu"
                if name in self.required or tensor is not own.get(name)
            ),
        )
        # What is on the host is copied, on the simulated device too; but a copy closes gaps.
        return tuple(
            [
                t if t is None else t.to(device, copy=t.device.type == "cpu" and is_dense(t))
                for t in used
            ]
        )

    def call(self, x: Tensor) -> Tensor:
        """Compute with borrowed tensors, for an input on the device."""
        dtype = cast_dtype(self.device_type)
        if dtype is not None:
            x = cast_input(x, dtype)
        return self.use(x, dtype)

    def use(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Compute with borrowed tensors, for an input that is cast as autocast would."""
        if torch.is_grad_enabled():
            for tensor in self.masters.present:
                if tensor.requires_grad:
                    return cast("Tensor", self.node(x, self, dtype, *self.trained(dtype)))
            if x.requires_grad:
                return cast("Tensor", self.node(x, self, dtype))
        return self.lend_unrecorded(x, dtype)

    def trained(self, dtype: torch.dtype | None) -> Tensors:
        """Return what gradients of each tensor go to; None where it needs none."""
        taking = [None if t is None or not t.requires_grad else t for t in self.masters.tensors]
        if dtype is None:
            return tuple([None if t is None else landing(self, t) for t in taking])
        stand_in = self.attachment.stand_ins.of
        return tuple([None if t is None else stand_in(t, landing(self, t), dtype) for t in taking])

    # ---- its loans ----

    def forward_seconds(self, x: Tensor) -> float:
        """Return how long the simulated device computes forward."""
        flops, moved = self.forward_cost(x)
        return self.state.time.kernel_seconds(flops, moved, x.dtype)

    def backward_seconds(self, grad: Tensor, needs: Needs) -> float:
        """Return how long the simulated device computes `derivative`."""
        flops, moved = self.backward_cost(grad, needs)
        return self.state.time.kernel_seconds(flops, moved, grad.dtype)

    def lend_unrecorded(
        self, x: Tensor, dtype: torch.dtype | None, training: bool | None = None
    ) -> Tensor:
        """`lend` in a forward of which autograd records nothing.

        `training`: whether it is part of one that is recorded; by grad mode, where that is None.
        """
        task, compute = _graph_task(), self.compute
        seconds = self.forward_seconds(x) if self.state.simulated else 0.0
        kind = forward_kind(task, torch.is_grad_enabled() if training is None else training)
        return cast("Tensor", self.lend(kind, task, seconds, dtype, lambda t: compute(x, t)))

    def lend_backward(
        self, ctx: Any, grad: Tensor, needs: Needs, compute: Callable[[Tensors], Any]
    ) -> Any:
        """`lend` in backward, where the tensors are what forward used."""
        _, dtype, _, masters, version = ctx.loan
        self.check_unchanged(self.backward_reads, masters, version)
        seconds = self.backward_seconds(grad, needs) if self.state.simulated else 0.0
        if profiler._is_profiler_enabled:
            with self.profiled("backward"):
                return self.lend(BACKWARD, _graph_task(), seconds, dtype, compute)
        return self.lend(BACKWARD, _graph_task(), seconds, dtype, compute)


def once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Any:
    """Run `backward` without grad; under ``create_graph=True`` its results refuse to go on."""

    @functools.wraps(backward)
    def run(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, grad)
        with torch.no_grad():
            gradients = backward(ctx, grad)
        return refuse_double_backward(gradients, grad)

    return staticmethod(run)


class Loan(Function):
    """A layer's operator in autograd's graph: ``apply(x, layer, cast, *trained)``.

    `cast` is the dtype of autocast, None where it is off. `trained` holds, for each tensor of the
    layer, what represents it in the graph, or None where it is not trainable; it is empty where
    none is. It only tells autograd where gradients go.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: Layer, cast: torch.dtype | None, *trained: Tensor | None
    ) -> Tensor:
        """Compute; see the class."""
        state = layer.state
        task = _graph_task()
        masters = layer.masters
        record, recorded = layer.record, trained or masters.none
        seconds = layer.forward_seconds(x) if state.simulated else 0.0
        kind = forward_kind(task, True)
        if state.turned and task == -1:
            state.begin_forward()
        y: Tensor = layer.lend(kind, task, seconds, cast, lambda t: record(ctx, x, recorded, t))
        ctx.loan = layer, cast, task, masters, version_of(masters.read)
        if trained:
            note_trainable(state, task)
        return y

    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients; those of weights go to their landing."""
        layer: Layer
        layer, _, task, *_ = ctx.loan
        state = layer.state
        state.turned = True
        if layer.member < 0:
            layer.refuse_detached()
        needs = ctx.needs_input_grad
        if len(needs) == 3:  # no tensor is trained
            return layer.derivative(ctx, grad, layer.masters.needs_of_input)[0], None, None
        needs = needs[0], *needs[3:]
        x_gradient, *others = layer.derivative(ctx, grad, needs)
        if True in needs[1:]:
            note_backward(state, task)
        return x_gradient, None, None, *others


def node_of(layer_name: str) -> Any:
    """Return ``apply`` of a `Loan` of its own, whose nodes in the graph have this name.

    Not ``Function.apply``, a Python method that asks functorch first: `Layer.ready` has asked.
    """
    made: Any = type(layer_name, (Loan,), {"__doc__": Loan.__doc__, "__module__": __name__})
    return staticmethod(super(Function, made).apply)
