"""A weight that is not here: a tensor of its geometry, which borrows its bytes for each operator.

A `Handle` has size, strides, dtype and the compute device, and no memory. Code that computes with
it calls operators; each takes the leaf's slot, runs on the tensors there, and gives it back in the
same frame. autograd saves a handle as it would save the weight, so that in backward torch's own
formula, or that of whichever library wrote the operator, borrows again: no derivative is written
out here, and nothing is known of the library.

A view of a handle is a handle. So is, while the forward of its module runs, what elementwise
operators make of handles and small tensors: a weight is dequantised where a product needs it, in
forward and again in backward, and autograd keeps no dequantised copy.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.autograd import Function, profiler

from .._core import BACKWARD, FORWARD, Taken
from ..errors import OffloadError
from ..geometry import tensor_bytes
from ..gradients import note_trainable
from ..operators import operator_of, run_in_mode
from .leaf import Masters, Tensors, version_of
from .loan import Borrower, once_differentiable

_aten = torch.ops.aten
_VIEWS = frozenset({_aten._unsafe_view.default, _aten._reshape_alias.default})  # in all but name
_CASTS = frozenset({"dtype", "device"})
_LARGEST_CONSTANT = 4096  # bytes of a tensor that a computation which is put off may keep
_graph_task = torch._C._current_graph_task_id
_throws: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
_wraps: Callable[..., Any] = Tensor._make_wrapper_subclass


class WantsMemory(OffloadError):
    """Code asked a weight for its memory, which it has for one operator at a time alone."""


class WasWritten(OffloadError):
    """Code wrote to what was to be computed from a weight later."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.lent: dict[int, Tensors] = {}  # by the `id` of a leaf whose forward this thread is in
        self.ends = False  # such a forward: nothing is put off


_thread = _Thread()


class Handle(Tensor):
    """One tensor of a managed leaf, or what is to be made of it; see the module.

    Attributes
    ----------
    layer : Borrower
        The leaf.
    masters, version
        Of the leaf when it was made: backward must not meet others.
    place : int
        Of the tensor among the leaf's names.
    made_by : tuple, optional
        The operator that makes it, its arguments, and which of several results it is.
    like : Tensor
        One of the same geometry on the meta device.
    """

    layer: Borrower
    masters: Masters
    version: int
    place: int
    made_by: tuple[Any, tuple[Any, ...], dict[str, Any], int | None] | None
    like: Tensor

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
            return _put_off(found[0], func, args, kwargs)
        return _borrowing(found, func, args, kwargs, {})

    def of_kind(self, kind: type[Tensor]) -> Handle:
        """Return the same as an object of a library's class of Parameters."""
        return _made(self, self.like, self.made_by, _class_of(kind))

    def name(self) -> str:
        """Return the name of the tensor within the attached model."""
        return f"{self.layer.name}.{self.layer.names[self.place]}".lstrip(".")

    # ---- what needs memory ----

    def _want(self, what: str) -> NoReturn:
        raise WantsMemory(
            f"{what} of '{self.name()}': its weights are on the device for one operator at a time. "
            "Leave the layer resident with ignore_modules=[...]."
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
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, Handle):
            self._want("assignment to .data")
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        for name in ("like", "made_by", "layer", "masters", "version", "place"):
            self.__dict__[name] = value.__dict__[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._want("a copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._want("a pickle")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Handle('{self.name()}', shape={tuple(self.shape)}, dtype={self.dtype}, "
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
        made.__dict__.update(vars(kind(data.like, *args, **kwargs)))
        return made

    members = {"__new__": __new__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    names = "__torch_dispatch__", "__deepcopy__", "__reduce_ex__", "__repr__", "data"
    members |= {name: vars(Handle)[name] for name in names}
    return type(kind.__name__, (kind, Handle), members)


def _made(
    of: Handle | None,
    like: Tensor,
    made_by: Any,
    kind: type[Handle] = Handle,
    device: torch.device | None = None,
) -> Handle:
    made: Handle = _wraps(
        kind,
        like.size(),
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device if of is None else of.device,
    )
    _throws(made)
    made.like, made.made_by = like, made_by
    if of is not None:
        made.layer, made.masters, made.version = of.layer, of.masters, of.version
        made.place = of.place
    return made


def handles_of(layer: Borrower) -> Tensors:
    """Return a handle for each of a leaf's tensors, as they are now; None for those it lacks."""
    found: list[Handle | None] = []
    version = version_of(layer.masters.read)
    for place, (tensor, layout) in enumerate(
        zip(layer.masters.tensors, layer.masters.layout, strict=True)
    ):
        if tensor is None or layout is None:
            found.append(None)
            continue
        dtype, shape, stride = layout
        with torch.inference_mode(False):
            like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            handle = _made(None, like, None, device=layer.state.device)
        handle.layer, handle.masters, handle.place = layer, layer.masters, place
        handle.version = version
        found.append(handle)
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
        if written:
            for handle in _handles_in((value,)):
                raise WasWritten(
                    f"{func} writes to '{handle.name()}', or to what is made of it: its bytes are "
                    "on the device for one operator at a time, and what it writes would be lost. "
                    "Leave the layer resident with ignore_modules=[...]."
                )


def _may_be_put_off(
    func: Any, found: list[Handle], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether an operator can run where its result is used: its operands will be the same then."""
    layer = found[0].layer
    if id(layer) not in _thread.lent or not layer.puts_off or _thread.ends:
        return False
    if func is _aten._to_copy.default:
        return kwargs.keys() <= _CASTS and kwargs.get("device") in (None, found[0].device)
    if torch.Tag.pointwise not in func.tags:
        return False
    return all(
        (isinstance(value, Handle) and value.layer is layer)
        if isinstance(value, Handle)
        else not value.requires_grad and tensor_bytes(value) <= _LARGEST_CONSTANT
        for value in (*args, *kwargs.values())
        if isinstance(value, Tensor)
    )


def _put_off(of: Handle, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return handles of what an operator makes of handles and constants."""

    def meta(value: Any) -> Any:
        if isinstance(value, Handle):
            return value.like
        return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value

    def kept(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and type(value) is Tensor else value

    with torch.inference_mode(False):
        told = {key: meta(value) for key, value in kwargs.items() if key != "device"}
        like = func(*map(meta, args), **told)
        args, kwargs = tuple(map(kept, args)), {key: kept(v) for key, v in kwargs.items()}
        if isinstance(like, list | tuple):
            return [_made(of, one, (func, args, kwargs, at)) for at, one in enumerate(like)]
        return _made(of, like, (func, args, kwargs, None))


def _borrowing(
    found: list[Handle],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    slots: dict[int, Tensors],
) -> Any:
    """Run an operator on the tensors that its handles stand for, each leaf's in its slot."""
    for handle in found:
        layer = handle.layer
        if id(layer) in slots:
            continue
        here = _thread.lent.get(id(layer))
        if here is not None:
            slots[id(layer)] = here
            continue

        # Of two leaves, the second's slot is taken while the first's is held. An arena has room for
        # what one call of a model computes with.
        def go_on(tensors: Tensors, known: Borrower = layer) -> Any:
            return _borrowing(found, func, args, kwargs, {**slots, id(known): tensors})

        return _lend(handle, _seconds(layer, func, args, kwargs), go_on)
    return _run(func, args, kwargs, slots)


def _run(func: Any, args: Any, kwargs: dict[str, Any], slots: dict[int, Tensors]) -> Any:
    made: dict[int, Any] = {}

    def real(value: Any) -> Any:
        if isinstance(value, Handle):
            if id(value) not in made:
                made[id(value)] = _evaluated(value, real, slots)
            return made[id(value)]
        if type(value) in (list, tuple):
            return type(value)(map(real, value))
        return value

    given = tuple(map(real, args))
    result = run_in_mode(func, given, {key: real(value) for key, value in kwargs.items()})
    memory = {t.untyped_storage().data_ptr() for ts in slots.values() for t in ts if t is not None}
    return _apart(result, memory)


def _evaluated(handle: Handle, real: Callable[[Any], Any], slots: dict[int, Tensors]) -> Any:
    if handle.made_by is None:
        return slots[id(handle.layer)][handle.place]
    func, args, kwargs, at = handle.made_by
    made = run_in_mode(
        func, tuple(map(real, args)), {key: real(value) for key, value in kwargs.items()}
    )
    return made if at is None else made[at]


def _apart(result: Any, memory: set[int]) -> Any:
    """Return a result that outlives the loan: what is in a slot is copied."""
    if type(result) is Tensor:
        is_lent = result.layout is torch.strided and result.untyped_storage().data_ptr() in memory
        return result.clone() if is_lent else result
    if type(result) in (list, tuple):
        return type(result)(_apart(one, memory) for one in result)
    return result


def _lend(handle: Handle, seconds: float, compute: Callable[[Tensors], Any]) -> Any:
    layer, task = handle.layer, _graph_task()
    if layer.member < 0:
        layer.refuse_detached()
    layer.check_unchanged(layer.backward_reads, handle.masters, handle.version)
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
    tensors = [value for value in args if isinstance(value, Tensor)]
    moved = sum(value.numel() * value.element_size() for value in tensors)
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
