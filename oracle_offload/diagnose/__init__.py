"""What went wrong, and is this machine fit to train; could be deleted whole."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Public name -> the module that defines it, imported where the name is first used.
_NAMES = {
    "OomReport": "explain",
    "configure_allocator": "doctor.allocator",
    "is_oom": "explain",
}

__all__ = [*_NAMES]  # noqa: PLE0604

if TYPE_CHECKING:
    from .doctor.allocator import configure_allocator as configure_allocator
    from .explain import OomReport as OomReport
    from .explain import is_oom as is_oom


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
