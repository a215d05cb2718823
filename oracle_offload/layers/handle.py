"""A weight that is not here: a tensor of its geometry, which borrows its bytes for each operator.

A `Handle` has size, strides, dtype and the compute device, and no memory. Code that computes with
it calls operators; each takes the leaf's slot, runs on the tensors there, and gives it back in the
same frame. autograd saves a handle as it would save the weight, so that in backward torch's own
formula, or that of whichever library wrote the operator, borrows again: no derivative is written
out here, and nothing is known of the library.

A view of a handle is a handle. So is, while the forward of its module runs, what torch's operators
make of handles and small tensors alone: a weight is dequantised where a product needs it, in
forward and again in backward, and autograd keeps no dequantised copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.autograd import Function, profiler

from .._core import BACKWARD, FORWARD, Taken
from ..errors import OffloadError
from ..geometry import tensor_bytes
from ..gradients import note_trainable
from ..operators import operator_of, run_in_mode, tensors_in
from .leaf import Masters, Tensors, version_of
from .loan import Borrower, once_differentiable

_aten = torch.ops.aten
_VIEWS = frozenset({_aten._unsafe_view.default, _aten._reshape_alias.default})  # in all but name
_CASTS = frozenset({"dtype", "device"})
_LARGEST_CONSTANT = 4096  # bytes of a tensor that a computation which is put off may keep
_NOT_PUT_OFF = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}
_STATE = "_oracle_offload_handle"  # a library's class may have attributes of any other name
_graph_task = torch._C._current_graph_task_id
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


@dataclass(frozen=True, eq=False, slots=True)
class _Value:
    """What a handle stands for; it never changes, whatever becomes of the handle.

    Attributes
    ----------
    places : frozenset of int
        Of the leaf's tensors that it is made of.
    func, args, kwargs, at
        The operator that makes it, and which of its results it is; no operator for one of the
        leaf's tensors. Among the arguments are values, and constants.
    """

    places: frozenset[int]
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    at: int | None = None


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
        What it stands for.
    like : Tensor
        One of the same geometry on the meta device.
    """

    layer: Borrower
    masters: Masters
    versions: tuple[int, ...]
    value: _Value
    like: Tensor

    def name(self) -> str:
        """Return the name of the (first) tensor within the attached model."""
        return f"{self.layer.name}.{self.layer.names[min(self.value.places)]}".lstrip(".")


def _state(handle: Tensor) -> _State:
    return cast("_State", handle.__dict__[_STATE])


class Handle(Tensor):
    """One tensor of a managed leaf, or what is to be made of it; see the module."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func) and isinstance(args[0], Handle):
            return _put_off(args[0], func, args, kwargs)
        found = list(_handles_in((*args, *kwargs.values())))
        _refuse_writes(func, args, kwargs)
        if _may_be_put_off(func, found, args, kwargs):
            with contextlib.suppress(
                NotImplementedError
            ):  # torch cannot tell the result's geometry
                return _put_off(found[0], func, args, kwargs)
        return _borrowing(found, func, args, kwargs, {})

    def of_kind(self, kind: type[Tensor] | None = None) -> Handle:
        """Return another for the same, which is an object of a library's class of Parameters."""
        return _handle(_state(self), self.device, Handle if kind is None else _class_of(kind))

    # ---- what needs memory ----

    def _want(self, what: str) -> NoReturn:
        state = _state(self)
        state.layer.wants_memory = True
        raise WantsMemory(
            f"{what} of '{state.name()}': its weights are on the device for one operator at a "
            "time. From the next call on the layer's code gets tensors with memory; where that "
            "does not help, leave it resident with ignore_modules=[...]."
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
        return self.of_kind()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, Handle):
            self._want("assignment to .data")
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.__dict__[_STATE] = _state(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._want("a copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._want("a pickle")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Handle('{_state(self).name()}', shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}')"
        )


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
    masters = layer.masters
    versions = tuple([0 if t is None else version_of((t,)) for t in masters.tensors])
    found: list[Handle | None] = []
    for place, layout in enumerate(masters.layout):
        if layout is None:
            found.append(None)
            continue
        dtype, shape, stride = layout
        with torch.inference_mode(False):
            like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            state = _State(layer, masters, versions, _Value(frozenset({place})), like)
            found.append(_handle(state, layer.state.device))
    return tuple(found)


def lent(layer: Borrower, tensors: Tensors) -> AbstractContextManager[object]:
    """Let the handles of `layer` stand for `tensors`, in this thread, for a ``with`` block.

    No interrupt leaves them standing for a slot that was given back.
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


def _is_view(func: Any) -> bool:
    return getattr(func, "is_view", False) or func in _VIEWS


def _handles_in(values: Sequence[Any]) -> Iterator[Handle]:
    for value in values:
        if isinstance(value, Handle):
            yield value
        elif isinstance(value, list | tuple):
            yield from _handles_in(value)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    operator = operator_of(func)
    rows = [*zip_longest(args, operator.positional[: len(args)], fillvalue=False)]
    rows += [(value, operator.named.get(name, False)) for name, value in kwargs.items()]
    for value, written in rows:
        for handle in _handles_in((value,)) if written else ():
            state = _state(handle)
            state.layer.puts_off = False
            raise WasWritten(
                f"{func} writes to '{state.name()}', or to what is made of it: its bytes are on "
                "the device for one operator at a time, and what it writes would be lost. "
                "Leave the layer resident with ignore_modules=[...]."
            )


def _may_be_put_off(
    func: Any, found: list[Handle], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether an operator can run where its result is used: its operands will be the same then."""
    layer = _state(found[0]).layer
    if id(layer) not in _thread.lent or not layer.puts_off or _thread.ends:
        return False
    if func is _aten._to_copy.default:
        return kwargs.keys() <= _CASTS and kwargs.get("device") in (None, found[0].device)
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


def _is_tensor(returned: Any) -> bool:
    return isinstance(returned.type, torch.TensorType)


def _put_off(of: Handle, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return handles of what an operator makes of handles and constants."""

    def told(value: Any) -> Any:
        if isinstance(value, Handle):
            return _state(value).like
        if isinstance(value, Tensor):
            return torch.empty_like(value, device="meta")
        return [told(one) for one in value] if type(value) in (list, tuple) else value

    def kept(value: Any) -> Any:
        if isinstance(value, Handle):
            return _state(value).value
        if isinstance(value, Tensor):
            return value.detach().clone()  # as it is now
        return [kept(one) for one in value] if type(value) in (list, tuple) else value

    state = _state(of)
    places = frozenset[int]().union(
        *(_state(handle).value.places for handle in _handles_in((*args, *kwargs.values())))
    )
    with torch.inference_mode(False):
        geometry = {key: told(value) for key, value in kwargs.items() if key != "device"}
        like = func(*map(told, args), **geometry)
        row = places, func, tuple(map(kept, args)), {key: kept(v) for key, v in kwargs.items()}
        if func is _aten.as_strided.default:  # where that begins in the memory of a tensor
            row = *row[:2], (*row[2][:3], like.storage_offset() - state.like.storage_offset()), {}
        alike = [
            _handle(dataclasses.replace(state, value=_Value(*row, at), like=one), of.device)
            for at, one in (enumerate(like) if isinstance(like, list | tuple) else ((None, like),))
        ]
    return alike if isinstance(like, list | tuple) else alike[0]


def _borrowing(
    found: list[Handle],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    slots: dict[int, Tensors],
) -> Any:
    """Run an operator on the tensors that its handles stand for, each leaf's in its slot."""
    # Slots of several leaves are taken in one order, whatever thread asks.
    for handle in sorted(found, key=lambda each: _state(each).layer.member):
        layer = _state(handle).layer
        if id(layer) in slots:
            continue
        here = _thread.lent.get(id(layer))
        if here is not None:
            slots[id(layer)] = here
            continue

        def go_on(tensors: Tensors, known: Borrower = layer) -> Any:
            return _borrowing(found, func, args, kwargs, {**slots, id(known): tensors})

        own = [each for each in found if _state(each).layer is layer]
        return _lend(own, _seconds(layer, func, args, kwargs), go_on)
    return _run(func, args, kwargs, slots)


def _run(func: Any, args: Any, kwargs: dict[str, Any], slots: dict[int, Tensors]) -> Any:
    made: dict[int, Any] = {}

    def real(value: Any) -> Any:
        if isinstance(value, Handle):
            state = _state(value)
            return _evaluated(state.value, slots[id(state.layer)], made)
        if type(value) in (list, tuple):
            return type(value)(map(real, value))
        return value

    given = tuple(map(real, args))
    result = run_in_mode(func, given, {key: real(value) for key, value in kwargs.items()})
    memory = {t.untyped_storage().data_ptr() for ts in slots.values() for t in ts if t is not None}
    return _apart(result, memory)


def _evaluated(value: Any, tensors: Tensors, made: dict[int, Any]) -> Any:
    if type(value) in (list, tuple):
        return [_evaluated(one, tensors, made) for one in value]
    if not isinstance(value, _Value):
        return value
    if value.func is None:
        (place,) = value.places
        return tensors[place]
    found = made.get(id(value))
    if found is None:
        args = tuple([_evaluated(one, tensors, made) for one in value.args])
        kwargs = {key: _evaluated(one, tensors, made) for key, one in value.kwargs.items()}
        if value.func is _aten.as_strided.default:
            args = *args[:3], args[3] + args[0].storage_offset()
        found = run_in_mode(value.func, args, kwargs)
        made[id(value)] = found = found if value.at is None else found[value.at]
    return found


def _apart(result: Any, memory: set[int]) -> Any:
    """Return a result that outlives the loan: what is in a slot is copied."""
    if type(result) is Tensor:
        is_lent = result.layout is torch.strided and result.untyped_storage().data_ptr() in memory
        return result.clone() if is_lent else result
    if type(result) in (list, tuple):
        return type(result)(_apart(one, memory) for one in result)
    return result


def _lend(handles: Sequence[Handle], seconds: float, compute: Callable[[Tensors], Any]) -> Any:
    state, task = _state(handles[0]), _graph_task()
    layer = state.layer
    if layer.member < 0:
        layer.refuse_detached()
    for each in map(_state, handles):
        places = sorted(each.value.places)
        version = sum(each.versions[place] for place in places)
        layer.check_unchanged([layer.names[place] for place in places], each.masters, version)
    kind = FORWARD
    if task != -1:
        layer.state.turned, kind = True, BACKWARD
    if profiler._is_profiler_enabled:
        with layer.profiled("backward"):
            return layer.lend(kind, task, seconds, None, compute)
    return layer.lend(kind, task, seconds, None, compute)


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
    """Stands for a trained master: its gradient goes to the master, on the host."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, layer: Borrower, made: list[Tensor]) -> Tensor:
        ctx.layer, ctx.task = layer, _graph_task()
        return made[0]

    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradient where the master is."""
        layer: Borrower = ctx.layer
        layer.state.turned = True
        if layer.member < 0:
            layer.refuse_detached()
        note_trainable(layer.state, _graph_task() if ctx.task == -1 else -1)
        if layer.on_device:
            return grad, None, None
        return layer.attachment.gradients.to_host(grad), None, None


def trained(master: Tensor, layer: Borrower, made: Tensor) -> Tensor:
    """Return `made`, a handle or what is made of handles, whose gradient goes to `master`."""
    found = cast("Tensor", _edge(master, layer, [made]))
    found._is_param = True  # what isinstance(_, nn.Parameter) asks
    return found


_edge: Any = super(Function, _Edge).apply


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
