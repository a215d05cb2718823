"""Models without weights: Parameters on the meta device, everything else computed as usual."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Put the Parameters of modules made inside on the meta device, where they take no memory.

    Everything else is computed as the classes do: buffers, tables, plain attributes. With
    ``torch.device("meta")`` these would be lost, and no file has them. For `attach` with
    ``weights=``. Only modules that this thread makes are affected.
    """
    thread = threading.get_ident()
    before: Any = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        is_here = not own.is_over and threading.get_ident() == thread
        if is_here and type(param) is nn.Parameter:
            _drop_values(param)
        before(self, name, param)

    own: Any = register
    own.is_over, own.before = False, before
    nn.Module.register_parameter = own  # type: ignore[method-assign]
    try:
        yield
    finally:
        own.is_over = True
        # Another thread's may be on top of it: then that one removes both.
        current: Any = nn.Module.register_parameter
        while getattr(current, "is_over", False):
            current = current.before
        nn.Module.register_parameter = current  # type: ignore[method-assign]


def _drop_values(parameter: nn.Parameter) -> None:
    """Make `parameter` one without values; it is the same object, so that tied ones stay tied."""
    if not parameter.is_meta:
        there = parameter.detach().to("meta")
        empty = nn.Parameter(there, requires_grad=parameter.requires_grad)
        empty.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, empty)
