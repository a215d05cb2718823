"""What an optimizer keeps of a parameter goes where that went: attach and detach move parameters.

torch brings the state of a parameter beside it where a state dict is loaded, and never again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Trained parameters that have moved, by `id`: how often anything had. No references: torch swaps no
# tensor that somebody refers to weakly. Another one of that `id` is looked at for nothing.
_moved: dict[int, int] = {}
_moves = 0
_followed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def note_moved(parameters: Iterable[Tensor]) -> None:
    """Let the state of these follow before the next step."""
    global _moves
    _moves += 1
    for parameter in parameters:
        if parameter.requires_grad:
            _moved[id(parameter)] = _moves


def follow(optimizer: Any) -> None:
    """Bring the state of parameters that have moved to where they are.

    Tensors of the parameter's own shape: a counter of steps stays where torch wants it, and who
    keeps its state elsewhere on purpose keeps it in pages (bitsandbytes) or in another shape.
    """
    since = _followed.get(optimizer, 0)
    if since == _moves:
        return
    _followed[optimizer] = _moves
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _moved.get(id(parameter), 0) <= since:
                continue
            state = optimizer.state.get(parameter) or {}
            for name, value in state.items():
                if _is_left_behind(value, parameter):
                    with torch.no_grad():
                        state[name] = value.to(parameter.device)


def _is_left_behind(value: Any, parameter: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device != parameter.device
        and value.shape == parameter.shape
        and value.dim() > 0
        and not getattr(value, "is_paged", False)
    )
