"""Adapters that stand before a layer: objects whose method was put in ``module.forward``.

Such an object keeps the layer in ``org_module``, and what it found there in ``org_forward``. Most
call that, so that the layer computes as ever. Some (LyCORIS' LoHa and LoKr) compute with the
layer's weight instead: it has to be lent to them while the layer is called.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, cast

from torch import nn

from .bytecode import names_in

_MOST = 16  # adapters, one before the other


def wrapper_of(module: nn.Module) -> Any | None:
    """Return the object at the end of a chain of wrappers around ``module.forward``.

    The object returned is the one whose ``org_forward`` is the module's own.
    """
    forward = module.__dict__.get("forward")
    for _ in range(_MOST):
        owner = getattr(forward, "__self__", None)
        forward = getattr(owner, "org_forward", None)
        if isinstance(forward, types.MethodType) and forward.__self__ is module:
            return owner
    return None


def reader_of(module: nn.Module) -> Any | None:
    """Return the object in the chain that computes with the weight of `module` itself, if any.

    Or that replaces the weight while `module` is called, as diffusers' layerwise casting does.
    """
    casts = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {}).get("layerwise_casting")
    if casts is not None:
        return casts
    forward = module.__dict__.get("forward")
    for _ in range(_MOST):
        if not isinstance(forward, types.MethodType):
            return None
        owner = forward.__self__
        names = _names_reached(cast("Any", type(owner)), forward.__func__.__name__)
        if "org_forward" not in names:
            kept = getattr(owner, "org_module", None)
            is_ours = isinstance(kept, list | tuple) and any(part is module for part in kept)
            return owner if is_ours and "weight" in names else None
        forward = getattr(owner, "org_forward", None)
    return None


@functools.cache
def _names_reached(cls: type, method: str) -> frozenset[str]:
    """Return the names in a method's code, and in that of the methods which these names name."""
    found: set[str] = set()
    waiting = [method]
    done: set[str] = set()
    while waiting:
        name = waiting.pop()
        done.add(name)
        for base in cls.__mro__:
            function = inspect.unwrap(cast("Any", vars(base).get(name)))
            if isinstance(function, types.FunctionType):
                names = names_in(function.__code__)
                found |= names
                if "super" not in names:
                    break
        waiting = [name for name in found if name not in done]
    return frozenset(found)
