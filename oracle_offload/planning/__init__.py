"""Will a training fit, and how fast would it be: answered before anything is loaded."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Public name -> the module that defines it, imported where the name is first used.
_NAMES = {
    "Plan": "planner",
    "plan": "planner",
}

__all__ = [*_NAMES]  # noqa: PLE0604

if TYPE_CHECKING:
    from .planner import Plan as Plan
    from .planner import plan as plan


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
