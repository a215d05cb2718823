"""What an optimizer keeps of a parameter goes where that went: attach and detach move parameters.

torch brings the state of a parameter to its device where a state dict is loaded, and never again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Parameters that have moved, by `id`: how often anything had. No references: torch swaps no tensor
# that has a weak reference. Another one of that `id` is looked at for nothing.
_moved: dict[int, int] = {}
_moves = 0
_followed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def note_moved(parameters: Iterable[Tensor]) -> None:
    """Let the state of these follow before the next step."""
    global _moves
    _moves += 1
    for parameter in parameters:
        _moved[id(parameter)] = _moves


def follow(optimizer: Any) -> None:
    """Bring the state of parameters that have moved to where they are.

    As torch does where a state dict is loaded, but for what is in pages that the system moves
    (bitsandbytes).
    """
    since = _followed.get(optimizer, 0)
    if since == _moves:
        return
    _followed[optimizer] = _moves
    for group in optimizer.param_groups:
        counts_there = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            if _moved.get(id(parameter), 0) <= since:
                continue
            state = optimizer.state.get(parameter)
            for name, value in state.items() if isinstance(state, dict) else ():
                is_counter = name == "step" and not counts_there
                state[name] = _brought(value, parameter.device, is_counter)


def _brought(value: Any, device: torch.device, is_counter: bool = False) -> Any:
    """Return `value`, its tensors on `device`: a counter of steps only where the host counts."""
    if isinstance(value, Tensor):
        if value.device == device or (is_counter and value.device.type == "cpu"):
            return value
        if getattr(value, "is_paged", False):
            return value
        with torch.no_grad():
            return value.to("cpu" if is_counter else device)
    if isinstance(value, dict):
        return {key: _brought(one, device) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_brought(one, device) for one in value])
    return value
