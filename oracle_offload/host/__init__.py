"""The host as the system shows it: its files, its memory, and the limits on it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Public name -> the module that defines it, imported where the name is first used.
_NAMES = {
    "build_info": "build_record",
}

__all__ = [*_NAMES]  # noqa: PLE0604

if TYPE_CHECKING:
    from .build_record import build_info as build_info


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
