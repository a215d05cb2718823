"""Modules that keep their weights in host memory and bring them to the device themselves.

AI-Toolkit's captioner for Qwen3-Omni has such: its expert banks, about 30 GB, of which a call takes
the rows of the experts that it is routed to. Such a module says where by ``offload_device``. It is
left where it is by `attach` and by ``.to()``: on the device the banks would fill it.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

_BASE = "_oracle_offload_in_place"


def keep_in_place(root: nn.Module) -> None:
    """Let ``.to()`` leave modules of `root` that stream themselves where they are."""
    for module in root.modules():
        if getattr(module, "offload_device", None) is not None and not _is_kept(module):
            module.__class__ = _kept_class(cast("Any", type(module)))


def let_move(root: nn.Module) -> None:
    """Undo `keep_in_place`."""
    for module in root.modules():
        if _is_kept(module):
            module.__class__ = vars(type(module))[_BASE]


def _is_kept(module: nn.Module) -> bool:
    return _BASE in vars(type(module))


@functools.cache
def _kept_class(base: Any) -> Any:
    """Return the subclass of `base` whose tensors ``.to()`` casts, but does not move."""

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def cast(tensor: Tensor) -> Tensor:
            dtype = fn(torch.zeros((), dtype=tensor.dtype, device="cpu")).dtype
            return tensor if dtype == tensor.dtype else tensor.to(dtype)

        return base._apply(self, cast, recurse)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # As in `oracle_offload.layers.swap`: a copy is of the class that the user knows.
        _, _, *state = cast("Any", super(made, self)).__reduce_ex__(2)
        return copyreg._reconstructor, (base, object, None), *state  # type: ignore[attr-defined]

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, _BASE: base}
    methods = {"_apply": _apply, "__reduce_ex__": __reduce_ex__, "__doc__": base.__doc__}
    made = type(base.__name__, (base,), {**names, **methods})
    return made
