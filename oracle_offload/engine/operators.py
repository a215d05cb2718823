"""What a dispatch mode has to know of an operator: which tensors it takes, writes and computes."""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

# Operators that ask a tensor for its geometry and read none of its bytes.
_GEOMETRY_ONLY = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
# Operators that launch no kernel: they allocate, or make a tensor of memory that is there.
_NO_KERNEL = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "set_", "resize_", "_unsafe_view", "_reshape_alias")
)
_VIEWS_IN_ALL_BUT_NAME = frozenset(
    {torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default}
)
# Types of arguments that hold no tensors.
_PLAIN = re.compile(
    r"(?:Optional\[|List\[)*(?:int|float|bool|str|number|SymInt|Device|Generator)\]*"
)


_AUTOCAST = ("cpu", "cuda")  # device types whose dispatch key for autocast has their name
_BELOW_AUTOCAST = ("aten", "prim", "prims")  # operators that autocast has seen already
# Those whose kernels call operators that autocast casts for, each with what calls it: into what
# autocast has cast for, as bilinear on CUDA, it does not look. What softmax calls in an attention
# computes in the attention's dtype.
_CALL_OPERATORS = {"aten::_trilinear": "aten::bilinear"} | {
    name: name
    for name in (
        *("aten::linalg_pinv", "aten::_native_multi_head_attention"),
        "aten::_transformer_encoder_layer_fwd",
    )
}
_NESTING = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)
_VIEWS = torch._C.DispatchKey.ADInplaceOrView
_thread = threading.local()


@contextlib.contextmanager
def autocast_reaches_kernels() -> Iterator[None]:
    """Let what a mode's handler calls in this thread compute under autocast as it is now.

    Torch runs a handler below autocast, where its state cannot be asked for. Kernels that call
    operators (`nn.Bilinear`'s, an encoder's fast path, those that a library wrote in Python) would
    compute otherwise under a mode than without one; under inference mode, where an operator that is
    made of others arrives whole, so would these. Where a region begins or ends meanwhile, nothing
    is known until this is called again: as each module is called that is watched.
    """
    before = getattr(_thread, "autocast", None)
    note_autocast()
    try:
        yield
    finally:
        _thread.autocast = before


def note_autocast() -> None:
    """Let kernels compute under autocast as it is now, as long as no region begins or ends."""
    enabled = torch._C._is_any_autocast_enabled()
    _thread.autocast = (_nesting(), _enabled_keys()) if enabled else None


def _nesting() -> int:
    """Return how many regions of autocast this thread is in; no interrupt comes in between."""
    return int(tuple(map(operator.call, _NESTING))[1])


def _enabled_keys() -> tuple[Any, ...]:
    other = torch._C._get_privateuse1_backend_name()
    named = [(kind, kind.upper()) for kind in _AUTOCAST]
    if hasattr(torch, other):  # else it is no device type here
        named.append((other, "PrivateUse1"))
    return tuple(
        getattr(torch._C.DispatchKey, f"Autocast{name}")
        for kind, name in named
        if torch.is_autocast_enabled(kind)
    )


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def run_in_mode(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operator from a mode's handler, so that it computes as it would without the mode."""
    known, inference = getattr(_thread, "autocast", None), torch.is_inference_mode_enabled()
    if not (known or inference) or not isinstance(func, torch._ops.OpOverload):
        return func(*args, **kwargs)
    # Of other operators torch has made what arrives whole under inference mode alone.
    name, composite = func.name(), "CompositeImplicitAutograd"
    is_whole = inference and _has_kernel(name, composite)
    nesting, keys = known or (0, ())
    if keys:
        is_top = func.namespace not in _BELOW_AUTOCAST or func._schema.name in _CALL_OPERATORS
        if not (is_top or is_whole) or _nesting() != nesting:
            keys = ()
        else:  # what autocast casts for, it does not look into
            called = _CALL_OPERATORS.get(func._schema.name, name)
            keys = tuple(key for key in keys if not _has_kernel(called, key.name))
    if is_whole:  # a view that it takes of a trained weight then requires grad
        keys = *keys, _VIEWS
    with contextlib.ExitStack() as stack:
        for key in keys:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        return func(*args, **kwargs)


class Operator:
    """What has to be known of one operator, read off its schema once."""

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        arguments = () if schema is None else schema.arguments
        written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        self.writes = any(written)
        self.is_view = func in _VIEWS_IN_ALL_BUT_NAME or getattr(func, "is_view", False)
        self.touches_bytes = not (
            schema is not None  # a higher-order operator may do anything with its arguments
            and (
                func.is_view
                or (schema.name.endswith(_GEOMETRY_ONLY) and not self.writes)
                or schema.name in _NO_KERNEL
            )
        )
        self.flops = flop_registry.get(getattr(func, "_overloadpacket", None))
        self.positional: list[bool] = written
        self.named = {a.name: w for a, w in zip(arguments, written, strict=True)}
        holds: Iterable[bool] = [not _PLAIN.fullmatch(str(a.type)) for a in arguments]
        self._may_hold = itertools.repeat(True) if schema is None else holds

    def holding(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Return those of the arguments that are tensors, or may have some in them."""
        return [*itertools.compress(args, self._may_hold), *kwargs.values()]

    def changed(
        self, change: Callable[[Tensor], Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with each tensor changed, and those in lists and tuples."""
        held = zip(args, self._may_hold, strict=False)
        return (
            [_changed(change, value) if holds else value for value, holds in held],
            {name: _changed(change, value) for name, value in kwargs.items()},
        )

    def tensors(self, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
        """Yield the tensors among the arguments, each with whether it is written."""
        for value, written in zip_longest(args, self.positional[: len(args)], fillvalue=False):
            for tensor in tensors_in(value):
                yield tensor, written
        for name, value in kwargs.items():
            for tensor in tensors_in(value):
                yield tensor, self.named.get(name, False)


def _changed(change: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)([_changed(change, one) for one in value])
    return value


_operators: dict[Any, Operator] = {}


def operator_of(func: Any) -> Operator:
    """Return what has to be known of `func`."""
    operator = _operators.get(func)
    if operator is None:
        operator = _operators[func] = Operator(func)
    return operator


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested list, of a wrapper subclass those that it is made of."""
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
            return
        for name in flatten()[0]:  # what a wrapper subclass is made of
            yield from tensors_in(getattr(value, name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
