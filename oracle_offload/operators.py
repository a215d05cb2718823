"""What a dispatch mode has to know of an operator: which tensors it takes, writes and computes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
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


_AUTOCAST = ("cpu", "cuda")  # device types whose dispatch key for autocast has their name
_BELOW_AUTOCAST = ("aten", "prim", "prims")  # operators that autocast has seen already
_thread = threading.local()


@contextlib.contextmanager
def autocast_reaches_kernels(device_type: str) -> Iterator[None]:
    """Let the kernels of a library's operators see autocast as it is now, under a mode too.

    Torch runs a mode's handler below autocast. An operator's kernel that is itself written in
    Python, and calls torch, would therefore compute otherwise under a mode than without one.
    """
    before = getattr(_thread, "autocast", None)
    enabled = torch.is_autocast_enabled(device_type)
    name = f"Autocast{'PrivateUse1' if device_type not in _AUTOCAST else device_type.upper()}"
    _thread.autocast = getattr(torch._C.DispatchKey, name) if enabled else None
    try:
        yield
    finally:
        _thread.autocast = before


def run_in_mode(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operator from a mode's handler; see `autocast_reaches_kernels`."""
    key = getattr(_thread, "autocast", None)
    if key is None or getattr(func, "namespace", "aten") in _BELOW_AUTOCAST:
        return func(*args, **kwargs)
    with torch._C._SetExcludeDispatchKeyGuard(key, False):
        return func(*args, **kwargs)


class Operator:
    """What has to be known of one operator, read off its schema once."""

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        arguments = () if schema is None else schema.arguments
        written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        self.touches_bytes = not (
            schema is not None  # a higher-order operator may do anything with its arguments
            and (
                func.is_view
                or (schema.name.endswith(_GEOMETRY_ONLY) and not any(written))
                or schema.name in _NO_KERNEL
            )
        )
        self.flops = flop_registry.get(getattr(func, "_overloadpacket", None))
        self.positional: list[bool] = written
        self.named = {a.name: w for a, w in zip(arguments, written, strict=True)}

    def tensors(self, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
        """Yield the tensors among the arguments, each with whether it is written."""
        for value, written in zip_longest(args, self.positional[: len(args)], fillvalue=False):
            for tensor in tensors_in(value):
                yield tensor, written
        for name, value in kwargs.items():
            for tensor in tensors_in(value):
                yield tensor, self.named.get(name, False)


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
