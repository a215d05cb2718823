"""A weight that is not here: a tensor of its geometry, which borrows its bytes for each operator.

A `Handle` has size, strides, dtype and the compute device, and no memory. Code that computes with
it calls operators; each takes the leaf's slot, runs on the tensors there, and gives it back in the
same frame. autograd saves a handle as it would save the weight, so that in backward torch's own
formula, or that of whichever library wrote the operator, borrows again: no derivative is written
out here, and nothing is known of the library.

A view of a handle is a handle, and a cast of one. So is, while the forward of its module runs, what
torch's operators make of handles and small tensors alone: a weight is dequantised where a product
needs it, in forward and again in backward, and autograd keeps no dequantised copy.

Code that uses the weight of a managed layer without calling the layer gets a handle (`Readable`)
if it reads the weight while the model computes. What it writes to the handle goes to the master.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import zip_longest
from types import FrameType
from typing import Any, NoReturn, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Function, profiler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._core import BACKWARD, Taken
from ..engine.exemption import exempt
from ..engine.geometry import count_writes, tensor_bytes
from ..engine.operators import Operator, note_autocast, operator_of, run_in_mode, tensors_in
from ..errors import NoRoomError, OffloadError, StaleWeightsError
from .gradients import landing, note_backward, note_trainable
from .leaf import Masters, Structure, Tensors, version_of
from .loan import Borrower, forward_kind, once_differentiable

_aten = torch.ops.aten
_CASTS = frozenset({"dtype", "device"})
_LARGEST_CONSTANT = 4096  # bytes of a tensor that a computation which is put off may keep
_NOT_PUT_OFF = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}
_CHECKPOINT: Any = inspect.unwrap(torch.utils.checkpoint.checkpoint)
_STATE = "_oracle_offload_handle"  # a library's class may have attributes of any other name
_graph_task = torch._C._current_graph_task_id
_data: Any = Tensor.data
_grad: Any = Tensor.grad
_requires_grad: Any = Tensor.requires_grad
_throws: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
_wraps: Callable[..., Any] = Tensor._make_wrapper_subclass


class WantsMemory(OffloadError):
    """Code asked a weight for its memory, which it has for one operator at a time alone."""


class WasWritten(OffloadError):
    """Code wrote to a weight, or to what was to be computed from one later."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.lent: dict[int, Tensors] = {}  # by the `id` of a leaf whose forward this thread is in
        self.ends = False  # such a forward: nothing is put off


_thread = _Thread()


# Of layers that something was put off for, the values that have no memory yet, and the versions of
# the tensors that each is made of.
_put_off_values: weakref.WeakKeyDictionary[Borrower, weakref.WeakKeyDictionary[_Value, list[int]]]
_put_off_values = weakref.WeakKeyDictionary()
_step_hooks: list[Any] = []


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Value:
    """What a handle represents.

    Attributes
    ----------
    places : frozenset of int
        Of the leaf's tensors that it is made of.
    func, args, kwargs, at
        The operator that makes it, and which of its results it is; no operator for one of the
        leaf's tensors. Among the arguments are values, and constants.
    real : Tensor or None
        What it is since code wrote to it, or to what it is made of: that has memory of its own.
    """

    places: frozenset[int]
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    at: int | None = None
    real: Tensor | None = None

    def source(self) -> _Value:
        """Return what this is a view of; itself where it is none."""
        value = self
        while value.real is None and value.func is not None and operator_of(value.func).is_view:
            value = next(one for one in value.args if isinstance(one, _Value))
        return value

    def borrowed(self) -> frozenset[int]:
        """Return the places that it reads; those of what has memory of its own are none."""
        if self.real is not None:
            return frozenset()
        if self.func is None:
            return self.places
        return frozenset[int]().union(*map(_borrowed, (*self.args, *self.kwargs.values())))


def _borrowed(value: Any) -> frozenset[int]:
    if isinstance(value, _Value):
        return value.borrowed()
    if type(value) in (list, tuple):
        return frozenset[int]().union(*map(_borrowed, value))
    return frozenset()


@dataclass(slots=True)
class _State:
    """What is known of a handle.

    Attributes
    ----------
    layer : Borrower
        The leaf.
    masters, versions
        Of the leaf, and of its tensors, when the handle was made: backward must not meet others.
    value : _Value
        What it represents.
    like : Tensor
        One of the same geometry on the meta device.
    is_read : bool
        Whether it was read from a module, so that what is written to it goes to the master.
    is_data : bool
        Whether torch is to count no writes to the master, as where ``.data`` was asked for.
    """

    layer: Borrower
    masters: Masters
    versions: list[int]
    value: _Value
    like: Tensor
    is_read: bool = False
    is_data: bool = False

    def master(self) -> Tensor | None:
        """Return the Parameter that the handle was read as; None for what was made of it."""
        if not self.is_read or self.value.func is not None:
            return None
        (place,) = self.value.places
        return self.masters.tensors[place]

    def name(self) -> str:
        """Return the name of the (first) tensor within the attached model."""
        return f"{self.layer.name}.{self.layer.names[min(self.value.places)]}".lstrip(".")


def _state(handle: Tensor) -> _State:
    state: _State = handle.__dict__[_STATE]  # no `cast`, which is a call
    return state


class Handle(Tensor):
    """One tensor of a managed leaf, or what is to be made of it; see the module."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = operator_of(func)
        if operator.is_view and isinstance(args[0], Handle):
            return _put_off(args[0], func, args, kwargs)
        found = _handles_in(operator.holding(args, kwargs))
        if operator.writes and (written := _written_by(operator, args, kwargs)):
            return _write(written, found, func, args, kwargs)
        if _may_be_put_off(func, found, args, kwargs):
            with contextlib.suppress(
                NotImplementedError
            ):  # torch cannot tell the result's geometry
                return _put_off(found[0], func, args, kwargs)
        return _borrowing(found, functools.partial(_run, func, args, kwargs), func, args, kwargs)

    def of_kind(self, kind: type[Tensor] | None = None) -> Handle:
        """Return another for the same, which is an object of a library's class of Parameters."""
        return _handle(_state(self), self.device, Handle if kind is None else _class_of(kind))

    # ---- what needs memory ----

    def _want(self, what: str) -> NoReturn:
        state = _state(self)
        layer = state.layer
        # Who logs a weight once, outside of the model's code, says nothing of what that asks for.
        if id(layer) in _thread.lent or layer.structure.is_inside():
            layer.wants_memory = True
            then = (
                "From the next call on the layer's code gets tensors with memory; where that does "
                "not help, leave it resident with ignore_modules=[...]."
            )
        else:
            then = "Take it of a copy: .clone()."
        raise WantsMemory(
            f"{what} of '{state.name()}': its weights are on the device for one operator at a "
            f"time. {then}"
        )

    def data_ptr(self) -> int:
        """Refuse: a handle has no memory."""
        self._want("data_ptr()")

    def untyped_storage(self) -> torch.UntypedStorage:
        """Refuse: a handle has no memory."""
        self._want("the storage")

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse: a handle has no memory."""
        self._want("numpy()")

    def __dlpack__(self, **_: Any) -> Any:
        self._want("DLPack")

    def __array__(self, dtype: Any = None) -> Any:
        self._want("an array")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Refuse, with an error that `hasattr` does not hide."""
        self._want("the array interface")

    @property
    def data(self) -> Tensor:
        """The same, unknown to autograd."""
        state = dataclasses.replace(_state(self), is_data=True)
        return _handle(state, self.device)

    @data.setter
    def data(self, value: Tensor) -> None:
        state = _state(self)
        if (master := state.master()) is not None:
            value = _point_anew(state, master, value)
        if not isinstance(value, Handle):
            self._want("assignment to .data")
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.__dict__[_STATE] = _state(value)

    @property
    def grad(self) -> Tensor | None:
        """The master's, for a weight that was read."""
        master = _state(self).master()
        return cast("Tensor | None", _grad.__get__(self)) if master is None else master.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        master = _state(self).master()
        _grad.__set__(self if master is None else master, value)

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are computed; for a weight that was read it can be set, as torch's."""
        return cast("bool", _requires_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Handle:
        """Say of the master whether it is trained, for a weight that was read."""
        state = _state(self)
        master, layer = state.master(), state.layer
        if master is None or not isinstance(layer, Readable):
            return cast("Handle", super().requires_grad_(requires_grad))
        master.requires_grad_(requires_grad)
        if requires_grad and not self.requires_grad:
            layer.let_train(master, self)
        elif self.requires_grad and not requires_grad:
            self.detach_()
        return self

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register with the master, for a weight that was read: a handle is of one graph alone."""
        master = _state(self).master()
        register: Any = Tensor.register_hook
        return register(self if master is None else master, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register with the master, for a weight that was read."""
        master = _state(self).master()
        register: Any = Tensor.register_post_accumulate_grad_hook
        return register(self if master is None else master, hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._want("a copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._want("a pickle")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Handle('{_state(self).name()}', shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}')"
        )


class _Copy(Tensor):
    """A weight that was read with memory of its own; its leaf counts what is written to it."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def watch(self, layer: Readable, place: int) -> None:
        """Count writes from now on."""
        self.__dict__[_STATE] = layer, place, count_writes(self)
        layer.copies.append(weakref.ref(self))

    def was_written(self) -> bool:
        """Whether code has written to it since."""
        return _STATE in self.__dict__ and count_writes(self) != self.__dict__[_STATE][2]

    def _alias(self, alias: Tensor) -> Tensor:
        if _STATE not in self.__dict__:
            return alias
        made = Tensor._make_subclass(_Copy, alias)
        made.watch(*self.__dict__[_STATE][:2])
        return made

    def detach(self) -> Tensor:
        """Return the same, apart from autograd; what is written there is written here."""
        return self._alias(super().detach())

    @property
    def data(self) -> Tensor:
        """The same, unknown to autograd, which counts no writes to it."""
        return self._alias(_data.__get__(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        layer, place, _ = self.__dict__[_STATE]
        layer.lost = layer.names[place]
        layer.refuse_lost()

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register with the master: this is of one graph alone."""
        layer, place, _ = self.__dict__[_STATE]
        return layer.masters.tensors[place].register_hook(hook)

    def requires_grad_(self, requires_grad: bool = True) -> _Copy:
        """Say of the master whether it is trained."""
        layer, place, _ = self.__dict__[_STATE]
        master = layer.masters.tensors[place]
        master.requires_grad_(requires_grad)
        if requires_grad and not self.requires_grad:
            with torch.enable_grad():
                trained(master, layer, self)
        elif self.requires_grad and not requires_grad:
            self.detach_()
        return self

    def __del__(self) -> None:
        if self.was_written():
            layer, place, _ = self.__dict__[_STATE]
            layer.lost = layer.names[place]


@functools.cache
def _class_of(kind: type[Tensor]) -> type[Handle]:
    """Return the class of handles that are objects of `kind` as well, a class of Parameters.

    A library makes others by ``type(weight)(tensor, ...)``: what has memory becomes a `kind`, and a
    handle a handle with the attributes that `kind` gives to a tensor of its geometry.
    """

    def __new__(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, Handle):
            return kind(data, *args, **kwargs)
        made = data.of_kind(kind)
        made.__dict__.update(vars(kind(_state(data).like, *args, **kwargs)))
        return made

    members = {"__new__": __new__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    names = "__torch_dispatch__", "__deepcopy__", "__reduce_ex__", "__repr__", "data"
    members |= {name: vars(Handle)[name] for name in names}
    return type(kind.__name__, (kind, Handle), members)


def _handle(state: _State, device: torch.device, kind: type[Handle] = Handle) -> Handle:
    like = state.like
    made: Handle = _wraps(
        kind,
        like.size(),
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
    )
    _throws(made)
    made.__dict__[_STATE] = state
    return made


def handles_of(layer: Borrower) -> Tensors:
    """Return a handle for each of a leaf's tensors, as they are now; None for those it lacks."""
    versions = _versions_of(layer)
    return tuple(
        [
            None if layout is None else _handle_at(layer, place, versions)
            for place, layout in enumerate(layer.masters.layout)
        ]
    )


def _versions_of(layer: Borrower) -> list[int]:
    return [0 if t is None else version_of((t,)) for t in layer.masters.tensors]


def _handle_at(layer: Borrower, place: int, versions: list[int], is_read: bool = False) -> Handle:
    masters = layer.masters
    like = _like(*cast("Any", masters.layout[place]))
    with torch.inference_mode(False):
        value = _Value(frozenset({place}))
        state = _State(layer, masters, versions, value, like, is_read)
        return _handle(state, layer.state.device)


@functools.lru_cache(maxsize=256)
def _like(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a tensor without memory of this geometry, one for all that have it."""
    with torch._C._DisableTorchDispatch(), torch.inference_mode(False):
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def lent(layer: Borrower, tensors: Tensors) -> AbstractContextManager[object]:
    """Let the handles of `layer` represent `tensors`, in this thread, for a ``with`` block.

    After an interrupt, too, they represent no slot that was given back.
    """
    here, key = _thread.lent, id(layer)
    return Taken(
        functools.partial(here.__setitem__, key, tensors), functools.partial(here.pop, key, None)
    )


def with_memory(value: Any) -> Any:
    """Return the result of a forward, of which nothing is put off any more."""
    if isinstance(value, Handle):
        ends = functools.partial(setattr, _thread, "ends")
        with Taken(functools.partial(ends, True), functools.partial(ends, False)):
            return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(with_memory, value))
    return value


# ---- operators ----


def _handles_in(values: Sequence[Any]) -> list[Handle]:
    found: list[Handle] = []
    for value in values:
        if isinstance(value, Handle):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _handles_in(value)
    return found


def _written_by(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Handle]:
    """Return the handles that an operator writes."""
    rows = [*zip_longest(args, operator.positional[: len(args)], fillvalue=False)]
    rows += [(value, operator.named.get(name, False)) for name, value in kwargs.items()]
    return [each for value, written in rows if written for each in _handles_in((value,))]


def _may_be_put_off(
    func: Any, found: list[Handle], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether an operator can run where its result is used: its operands will be the same then."""
    layer = _state(found[0]).layer
    if func is _aten._to_copy.default:
        # What may be written once it is made is put off where views alone can be made of it.
        return (
            kwargs.keys() <= _CASTS
            and kwargs.get("device") in (None, found[0].device)
            and not _thread.ends
            and (_puts_off(layer) or _state(found[0]).value.source().func is None)
        )
    if not _puts_off(layer) or _thread.ends:
        return False
    if getattr(func, "namespace", "") != "aten" or _NOT_PUT_OFF & {*func.tags}:
        return False
    if func._schema.is_mutable or not all(map(_is_tensor, func._schema.returns)):
        return False
    return all(
        _state(tensor).layer is layer
        if isinstance(tensor, Handle)
        else not tensor.requires_grad and tensor_bytes(tensor) <= _LARGEST_CONSTANT
        for value in (*args, *kwargs.values())
        for tensor in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(tensor, Tensor)
    )


def _puts_off(layer: Borrower) -> bool:
    return id(layer) in _thread.lent and layer.puts_off


def _is_tensor(returned: Any) -> bool:
    return isinstance(returned.type, torch.TensorType)


def _put_off(of: Handle, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return handles of what an operator makes of handles and constants."""

    def told(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Handle):
            return _state(tensor).like
        return torch.empty_like(tensor, device="meta")

    def kept(tensor: Tensor) -> Any:  # as it is now
        return _state(tensor).value if isinstance(tensor, Handle) else tensor.detach().clone()

    state = _state(of)
    places = frozenset[int]().union(
        *(_state(handle).value.places for handle in _handles_in((*args, *kwargs.values())))
    )
    operator = operator_of(func)
    with torch.inference_mode(False):
        geometry = {key: value for key, value in kwargs.items() if key != "device"}
        likes, named = operator.changed(told, args, geometry)
        like = func(*likes, **named)
        made_of, named = operator.changed(kept, args, kwargs)
        if func is _aten.as_strided.default:  # where that begins in the memory of a tensor
            begin = like.storage_offset() - state.like.storage_offset()
            made_of, named = [*made_of[:3], begin], {}
        row = places, func, tuple(made_of), named
        alike = [
            _handle(dataclasses.replace(state, value=_Value(*row, at), like=one), of.device)
            for at, one in (enumerate(like) if isinstance(like, list | tuple) else ((None, like),))
        ]
    if not operator.is_view:
        _note_put_off(alike)
    return alike if isinstance(like, list | tuple) else alike[0]


def _note_put_off(made: Sequence[Handle]) -> None:
    """Know of what is put off: it is to be what it would be now, whatever is written later."""
    for handle in made:
        state = _state(handle)
        state.versions = [*state.versions]
        values = _put_off_values.get(state.layer)
        if values is None:
            values = _put_off_values.setdefault(state.layer, weakref.WeakKeyDictionary())
        values[state.value] = state.versions
    if not _step_hooks:
        _step_hooks.append(register_optimizer_step_pre_hook(_before_step))


def make_put_off(layer: Borrower, places: Container[int]) -> None:
    """Make what was put off, before a tensor that it is made of is written.

    Parameters
    ----------
    layer : Borrower
        The leaf.
    places : container of int
        Of the tensors that are about to be written.
    """
    values = _put_off_values.get(layer)
    if not values:
        return
    tensors = layer.masters.tensors
    due: list[_Value] = []
    for reference in values.keyrefs():  # a list: other threads add to them
        value = reference()
        reads = frozenset[int]() if value is None else value.borrowed()
        if value is None or not any(place in places for place in reads):
            continue
        if all(_is_at(tensors[place], values[value][place]) for place in reads):
            due.append(value)
    if not due:
        return
    needed = frozenset[int]().union(*(value.borrowed() for value in due))
    with exempt(), torch.inference_mode(False), torch.no_grad():
        device = layer.state.device
        there = tuple(
            [
                t.detach().to(device, copy=True) if t is not None and place in needed else None
                for place, t in enumerate(tensors)
            ]
        )
        made: dict[int, Any] = {}
        for value in due:
            found = _evaluated(value, there, made)
            value.real = found.clone()


def _is_at(tensor: Tensor | None, version: int) -> bool:
    return tensor is not None and version_of((tensor,)) == version


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Make what is put off before a step writes: torch counts no write of a fused one."""
    layers = [layer for each in _put_off_values.keyrefs() if (layer := each()) is not None]
    if not layers:
        return
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for layer in layers:
        places = [place for place, t in enumerate(layer.masters.tensors) if id(t) in own]
        make_put_off(layer, places)


def _borrowing(
    found: Sequence[Handle],
    run: Callable[[dict[int, Tensors]], Any],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return ``run(slots)``, given by the `id` of each leaf its tensors, in its slot."""
    here, by_leaf = _thread.lent, dict[int, list[_State]]()
    for handle in found:
        state = _state(handle)
        by_leaf.setdefault(id(state.layer), []).append(state)
    slots = {key: here[key] for key in by_leaf if key in here}
    waiting = [states for key, states in by_leaf.items() if key not in slots]
    # Slots of several leaves are taken in one order, whatever thread asks.
    waiting.sort(key=lambda states: states[0].layer.member, reverse=True)
    return _lend_in_turn(waiting, slots, run, func, args, kwargs)


# No function inside another calls itself: it would keep what it computes with until a collection.
def _lend_in_turn(
    waiting: list[list[_State]],
    slots: dict[int, Tensors],
    run: Callable[[dict[int, Tensors]], Any],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return ``run(slots)`` once the leaves of `waiting` are in their slots too."""
    if not waiting:
        return run(slots)
    states, begun = waiting.pop(), False
    layer = states[0].layer

    def go_on(tensors: Tensors) -> Any:
        nonlocal begun
        begun = True
        slots[id(layer)] = tensors
        return _lend_in_turn(waiting, slots, run, func, args, kwargs)

    _check(layer, states)
    try:
        return _lend(layer, func, _seconds(layer, func, args, kwargs), go_on)
    except NoRoomError:
        if begun:
            raise
        return go_on(_beside(layer))


def _run(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    slots: dict[int, Tensors],
    made: dict[int, Tensor] | None = None,
    given: dict[int, Handle] | None = None,
) -> Any:
    """Run an operator on the tensors that its handles represent.

    `made` has the tensors that were made for values already, by the value's `id`. In the result the
    handles of `given` replace the tensors they represent; they are found by the tensor's `id`.
    """
    made = {} if made is None else made
    written = () if given is None else [*given.values()]

    def real(tensor: Tensor) -> Any:
        if not isinstance(tensor, Handle):
            return tensor
        state = _state(tensor)
        found = _evaluated(state.value, slots[id(state.layer)], made)
        if given is not None and any(tensor is each for each in written):
            given[id(found)] = tensor
        return found

    result = run_in_mode(func, *operator_of(func).changed(real, args, kwargs))
    memory = {t.untyped_storage().data_ptr() for ts in slots.values() for t in ts if t is not None}
    return _apart(result, memory, given or {})


def _evaluated(value: Any, tensors: Tensors, made: dict[int, Any]) -> Any:
    if type(value) in (list, tuple):
        return [_evaluated(one, tensors, made) for one in value]
    if not isinstance(value, _Value):
        return value
    if value.real is not None:
        return value.real
    found = made.get(id(value))
    if found is None:
        if value.func is None:
            (place,) = value.places
            return tensors[place]
        args = tuple([_evaluated(one, tensors, made) for one in value.args])
        kwargs = {key: _evaluated(one, tensors, made) for key, one in value.kwargs.items()}
        if value.func is _aten.as_strided.default:
            args = *args[:3], args[3] + args[0].storage_offset()
        found = run_in_mode(value.func, args, kwargs)
        made[id(value)] = found = found if value.at is None else found[value.at]
    return found


def _apart(result: Any, memory: set[int], given: dict[int, Handle]) -> Any:
    """Return a result that outlives the loan: what is in a slot is copied."""
    if type(result) is Tensor:
        if id(result) in given:
            return given[id(result)]
        is_lent = result.layout is torch.strided and result.untyped_storage().data_ptr() in memory
        return result.clone() if is_lent else result
    if type(result) in (list, tuple):
        return type(result)(_apart(one, memory, given) for one in result)
    return result


def _check(layer: Borrower, states: Sequence[_State]) -> None:
    """Raise where what handles represent is not there any more."""
    if layer.member < 0:
        layer.refuse_detached()
    for each in states:
        places = sorted(each.value.borrowed())
        if not places:
            continue
        version = sum(each.versions[place] for place in places)
        names = [layer.names[place] for place in places]
        try:
            layer.check_unchanged(names, each.masters, version)
        except StaleWeightsError as error:
            if _graph_task() != -1:
                raise
            raise StaleWeightsError(
                f"'{each.name()}' was kept since it was read, and written meanwhile, or given "
                "other data; read it from its module again where it is used."
            ) from error


def _beside(layer: Borrower) -> Tensors:
    """Return copies on the device, where one operator takes more weights than the arena holds."""
    tensors = layer.masters.tensors
    layer.attachment.traffic.note_beside(layer.name, sum(map(tensor_bytes, layer.masters.present)))
    with exempt(), torch.no_grad():
        device = layer.state.device
        return tuple([None if t is None else t.detach().to(device, copy=True) for t in tensors])


def _lend(layer: Borrower, func: Any, seconds: float, compute: Callable[[Tensors], Any]) -> Any:
    # A table is read in host memory, for its rows alone.
    lend = (
        layer.lend if func is _aten.embedding.default else functools.partial(Borrower.lend, layer)
    )
    task, records = _graph_task(), torch.is_grad_enabled()
    kind, what = forward_kind(task, records), ""
    if task != -1:
        layer.state.turned = True
        if not records:  # else it is part of a recompute
            kind, what = BACKWARD, "backward"
    if profiler._is_profiler_enabled:
        with layer.profiled(what):
            return lend(kind, task, seconds, None, compute)
    return lend(kind, task, seconds, None, compute)


# ---- what code writes ----


def _write(
    written: Sequence[Handle],
    found: Sequence[Handle],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run an operator that writes: on copies of weights, which their masters then take over.

    What was made of a weight is the code's own, and has memory from then on.
    """
    for handle in written:
        state = _state(handle)
        source = state.value.source()
        if source.real is None and source.func is None:
            _refuse_second_write(state)
        if source.real is None and not _may_be_written(state, source):
            state.layer.puts_off = False
            raise WasWritten(
                f"{func} writes to '{state.name()}', or to what is made of it: its bytes are on "
                "the device for one operator at a time, and what it writes would be lost. "
                "Leave the layer resident with ignore_modules=[...]."
            )
        if (
            source.func is None
            and not state.is_data
            and torch.is_grad_enabled()
            and handle.requires_grad  # what was detached is the code's to write
        ):
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation: the "
                f"weight '{state.name()}'."
            )
    copies: dict[int, tuple[_State, _Value, Tensor]] = {}

    def run(slots: dict[int, Tensors]) -> Any:
        made: dict[int, Tensor] = {}
        slots = dict(slots)
        for state in map(_state, written):
            source = state.value.source()
            if source.real is not None:
                continue
            key = id(state.layer)
            tensors = slots[key]
            copied = _evaluated(source, tensors, {}).clone()
            if source.func is not None:
                source.real = copied
                continue
            (place,) = source.places
            if (key, place) in seen:
                continue
            seen.add((key, place))
            slots[key] = *tensors[:place], copied, *tensors[place + 1 :]
            copies[id(copied)] = state, source, copied
        return _run(func, args, kwargs, slots, made, {id(each): each for each in written})

    seen: set[tuple[int, int]] = set()
    for state in map(_state, written):
        if (source := state.value.source()).func is None:
            make_put_off(state.layer, source.places)
    result = _borrowing(found, run, func, args, kwargs)
    for state, source, copied in copies.values():
        _take_over(state, source, copied)
    return result


def _refuse_second_write(state: _State) -> None:
    """Raise in a checkpoint that runs its code once more, of which nothing that is borrowed tells.

    What a loan computes saves no weight, so such a checkpoint may see no need to run it again; and
    where it does, the weight is written twice, as the resident's is.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT.__code__ and frame.f_locals.get("use_reentrant") is False:
            raise WasWritten(
                f"'{state.name()}' is written inside a checkpoint with use_reentrant=False, whose "
                "second run would write it again, or would not. Write outside of the checkpoint, "
                "pass use_reentrant=True, or leave the layer resident with ignore_modules=[...]."
            )
        frame = frame.f_back


def _may_be_written(state: _State, source: _Value) -> bool:
    if source.func is None:
        return state.is_read
    of = source.args[0] if source.func is _aten._to_copy.default else None
    return of is not None and of.source().func is None and not _puts_off(state.layer)


def _master_of(state: _State, source: _Value) -> Tensor | None:
    (place,) = source.places
    return state.masters.tensors[place]


def _take_over(state: _State, source: _Value, copied: Tensor) -> None:
    """Write a tensor on the device to the master, once nothing copies from that any more."""
    layer, master = state.layer, cast("Tensor", _master_of(state, source))
    host = cast("Tensor", layer.attachment.gradients.to_host(copied))
    engine = layer.state.engine
    engine.settle()
    with exempt(), torch.no_grad():
        master.copy_(host)
    if state.is_data:  # of which torch counts no write
        engine.refresh(layer.attachment.model)
        layer.data_writes += 1
    else:  # which it does above what runs here
        torch.autograd.graph.increment_version(master)
    (place,) = source.places
    state.versions[place] = version_of((master,))


def _point_anew(state: _State, master: Tensor, value: Tensor) -> Handle:
    """Do to the master what ``weight.data = value`` does; return a handle of what it is then."""
    layer = state.layer
    _refuse_second_write(state)
    with torch.no_grad():
        if isinstance(value, Handle):
            _refuse_tie(state, _state(value))
            value = cast("Tensor", with_memory(value))
        there = value.device == layer.state.device
        layer.state.engine.settle()
        make_put_off(layer, state.value.places)
        with exempt():
            host = layer.attachment.gradients.to_host(value) if there else value
            master.data = cast("Tensor", host)
    layer.data_writes += 1
    (place,) = state.value.places
    if not layer.adopt():
        raise OffloadError(
            f"the weight '{state.name()}' of a managed layer cannot be a tensor like that "
            f"({value.dtype}, {tuple(value.shape)}, on {value.device}); give it another outside "
            "of the forward, or leave the layer resident with ignore_modules=[...]."
        )
    return _handle_at(layer, place, _versions_of(layer), is_read=True)


def _refuse_tie(to: _State, of: _State) -> None:
    """Raise where a weight is to share another's memory: here it would get a copy."""
    source = of.value.source()
    is_its_own = of.layer is to.layer and source.places == to.value.places
    if source.real is None and source.func is None and not is_its_own:
        raise OffloadError(
            f"'{to.name()}' is given the .data of '{of.name()}' inside a forward: two weights that "
            "share memory there cannot be followed. Give it a copy (.data.clone()), do it outside "
            "of the forward, or leave both resident with ignore_modules=[...]."
        )


def _seconds(layer: Borrower, func: Any, args: Any, kwargs: dict[str, Any]) -> float:
    """Return how long the simulated device takes for an operator."""
    if not layer.state.simulated:
        return 0.0
    formula, flops = operator_of(func).flops, 0
    if formula is not None:
        with contextlib.suppress(Exception):  # some ask for the result's shape
            flops = formula(*args, **kwargs, out_val=None)
    tensors = list(tensors_in([*args, *kwargs.values()]))
    moved = sum(map(tensor_bytes, tensors))
    return layer.state.time.kernel_seconds(float(flops), moved, tensors[0].dtype)


# ---- trained ----


class _Edge(Function):
    """Represents a trained master: its gradient goes to the master's landing."""

    @staticmethod
    def forward(ctx: Any, landing: Tensor, layer: Borrower, made: list[Tensor]) -> Tensor:
        ctx.layer, ctx.task = layer, _graph_task()
        return made[0]

    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradient as it is."""
        layer: Borrower = ctx.layer
        layer.state.turned = True
        if layer.member < 0:
            layer.refuse_detached()
        note_backward(layer.state, ctx.task)
        return grad, None, None


def trained(master: Tensor, layer: Borrower, made: Tensor) -> Tensor:
    """Return `made`, a handle or what is made of handles, whose gradient goes to `master`."""
    found = cast("Tensor", _edge(landing(layer, master), layer, [made]))
    found._is_param = True  # what isinstance(_, nn.Parameter) asks
    return found


_edge: Any = super(Function, _Edge).apply


# ---- read from a module ----


class Readable(Borrower):
    """A leaf whose weights anybody may read while the model computes: the answer is a handle."""

    # By name and micro-batch: the handle, its masters, and the graph that it is a node of.
    _answers: dict[tuple[str, int], tuple[Tensor, Masters, Any]] | None = None
    copies: list[weakref.ref[_Copy]]  # those that were read where code wants memory
    lost = ""  # the name of a tensor, to a copy of which code has written

    def __init__(self, module: nn.Module, name: str, structure: Structure) -> None:
        super().__init__(module, name, structure)
        self.copies = []

    def look_again(self) -> None:
        """Before a use: refuse where code has written to a copy, which would be lost."""
        if self.copies or self.lost:
            self.refuse_lost()
        super().look_again()

    def refuse_lost(self) -> None:
        """Raise `WasWritten` where code has written to a copy of a weight, once for each."""
        living = [copied for each in self.copies if (copied := each()) is not None]
        for copied in living:
            if copied.was_written():
                self.lost = self.names[copied.__dict__[_STATE][1]]
                copied.__dict__[_STATE] = *copied.__dict__[_STATE][:2], count_writes(copied)
        self.copies = [each for each in self.copies if each() is not None]
        if self.lost:
            name, self.lost = self.lost, ""
            raise WasWritten(
                f"code wrote to '{self.name}.{name}', of which it has a copy since it asked for "
                "its memory: the write is lost. Leave the layer resident with "
                "ignore_modules=[...]."
            )

    def read(self, module: nn.Module, key: str) -> Tensor | None:
        """Return what ``module.<key>`` is; None where that is what the module itself has there.

        The module itself has the master outside of forwards and backwards, a tensor that replaces
        it for a while, and what is no tensor of the leaf's.
        """
        name = self.name_of(module, key)
        # What is not there needs no answer, and `look_again` below may itself ask for it.
        if name is None or module._parameters.get(key) is None or not self.structure.is_inside():
            return None
        self.look_again()
        if not self.masters.are(self.parameters):
            self.adopt()
        place = self.names.index(name)
        master: Tensor | None = self.masters.tensors[place]
        standing: Any = module._parameters.get(key)
        if master is None or self.member < 0 or standing is not master:
            return None
        note_autocast()
        return self._answer(name, place, master)

    def placed_again(self, value: Any) -> Any:
        """Return the Parameter that a handle was read as; any other value as it is."""
        master = _state(value).master() if isinstance(value, Handle) else None
        return value if master is None else master

    def _answer(self, name: str, place: int, master: Tensor) -> Tensor:
        graph = None
        trains = master.requires_grad and not torch.is_inference_mode_enabled()
        if trains:  # all reads in a graph share one node, as those of the Parameter do
            graph = self._graph()
        answers = self._answers = self._answers or {}
        key = name, _micro_batch()
        found, masters, known = answers.get(key, (None, None, None))
        if (
            found is not None
            and masters is self.masters
            and known == graph
            and not self.wants_memory
            and _state(found).versions[place] == version_of((master,))
        ):
            return found
        with torch.enable_grad():
            made: Tensor
            if self.wants_memory:
                copied = cast("Tensor", _beside(self)[place])
                made = Tensor._make_subclass(_Copy, copied)
            else:
                made = _handle_at(self, place, _versions_of(self), is_read=True)
            if trains:
                made = trained(master, self, made)
        made._is_param = True
        if isinstance(made, _Copy):
            made.watch(self, place)
        else:
            self._answers = {k: v for k, v in answers.items() if k[0] != name or v[2] == graph}
            self._answers[key] = made, self.masters, graph
        return made

    def _graph(self) -> tuple[int, int]:
        """Return which graph a trained weight is read in now."""
        state, task = self.state, _graph_task()
        note_trainable(state, task)
        if state.turned and task == -1 and torch.is_grad_enabled():
            state.begin_forward()
        return task, state.pace.passes

    def let_train(self, master: Tensor, handle: Handle) -> None:
        """Let the gradient of what was read as a frozen weight go to its master from now on."""
        graph = self._graph()
        with torch.enable_grad():
            made = trained(master, self, handle)
        (place,) = _state(handle).value.places
        self._answers = self._answers or {}
        self._answers[self.names[place], _micro_batch()] = made, self.masters, graph

    def forget_masters(self) -> None:
        """Let go of the tensors, so that their memory can go; they are current no more."""
        super().forget_masters()
        self._answers = None


def _micro_batch() -> int:
    """Return what tells forwards apart that take turns in this thread: each has its own graph."""
    library = sys.modules.get("greenlet")
    return 0 if library is None else id(library.getcurrent())


# ---- under dispatch modes ----


def computes(types: Sequence[type], args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """Return what runs an operator on handles, or on tensors that are made of some.

    None where it is given none. A dispatch mode calls it with itself active again, so that it sees
    what runs on the tensors that were borrowed.
    """
    for kind in types:
        if issubclass(kind, Handle):
            return cast("Callable[..., Any]", kind.__torch_dispatch__)
    for value in (*args, *kwargs.values()):
        for each in value if isinstance(value, list | tuple) else (value,):
            if _is_made_of_handles(each):
                return cast("Callable[..., Any]", type(each).__torch_dispatch__)
    return None


def _is_made_of_handles(value: Any) -> bool:
    flatten = getattr(value, "__tensor_flatten__", None) if isinstance(value, Tensor) else None
    if flatten is None:
        return False
    inner = [getattr(value, name) for name in flatten()[0]]
    return any(isinstance(one, Handle) or _is_made_of_handles(one) for one in inner)
