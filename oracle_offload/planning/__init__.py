"""Will a training fit, and how fast would it be: answered before anything is loaded."""

from __future__ import annotations

from .planner import Plan, plan

__all__ = ["Plan", "plan"]
