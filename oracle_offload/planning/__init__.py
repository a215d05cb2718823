"""Will a training fit, and how fast would it be: answered before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .planner import Plan, plan

__all__ = ["Plan", "plan"]


def __getattr__(name: str) -> Any:
    """Import the planner, and so torch, where it is asked for: names of models need neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import planner

    return getattr(planner, name)
