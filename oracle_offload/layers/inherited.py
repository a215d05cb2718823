"""Classes with a forward of their own that ask ``super()`` for what a kind computes.

Bart's and Gemma's embeddings scale the rows, Wan's causal convolution pads its input. Their forward
stays theirs: when it is managed, a class stands below theirs that answers the call.
"""

from __future__ import annotations

import dis
import functools
import types
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from .bytecode import every_code
from .swap import HANDLE, call
from .traced import Traced

_HARMLESS = frozenset({"dtype", "shape", "ndim", "requires_grad"})
_TENSORS = frozenset({"weight", "bias"})


@functools.cache
def asks_super(module_class: Any, base: Any) -> bool:
    """Whether each forward between a class and `base`, if it has any, asks ``super()`` to compute.

    Of weight and bias it asks at most what the host can answer as well.
    """
    for above in module_class.__mro__[: module_class.__mro__.index(base)]:
        forward = vars(above).get("forward")
        if forward is None:
            continue
        code = getattr(forward, "__code__", None)
        if code is None or not {"super", "forward"} <= set(code.co_names):
            return False
        if any(_reads_tensors(part) for part in every_code(code)):
            return False
    return True


def _reads_tensors(code: types.CodeType) -> bool:
    """Whether code reads more of weight and bias than the host can answer as well."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    return any(
        step.argval in _TENSORS and after.argval not in _HARMLESS for step, after in pairwise(steps)
    )


@functools.cache
def answering_class(base: Any) -> Any:
    """Return the class that stands between `base` and a managed class that asks ``super()``."""

    def forward(self: Any, input: Tensor) -> Tensor:
        layer = self.__dict__.get(HANDLE)
        if layer is None:
            return cast("Tensor", base.forward(self, input))
        if torch.compiler.is_dynamo_compiling():
            return cast("Tensor", layer.traced(self, input))
        return cast("Tensor", call(layer, input))

    functools.update_wrapper(forward, base.forward, assigned=("__doc__",), updated=())
    return type(base.__name__, (base,), {"forward": forward})


class WithInherited(Traced):
    """A kind of modules that may have a forward which asks ``super()``; `x` is what `base` gets."""

    base: ClassVar[Any]  # subclass of nn.Module
    has_buffers = True

    @classmethod
    def computes(cls, module_class: Any) -> bool:
        """Whether modules of this class compute as `base` does, or have it do so."""
        return issubclass(module_class, cls.base) and asks_super(module_class, cls.base)

    @classmethod
    def stands_below(cls, module_class: Any) -> Any:
        """Return the class that answers, where the module's class has a forward of its own."""
        inherits = module_class.forward is cls.base_forward
        return None if inherits else answering_class(cls.base)
