"""Explain an out-of-memory error: what filled the memory, and what to change first.

Pure Python, standard library only; imports neither torch nor numpy. `explain_oom` never raises and
never invents a number: what the text does not say is unknown.
"""

from __future__ import annotations

from .cause import Cause
from .facts import Fact, format_size
from .fixes import Fix
from .hooks import (
    explained_oom,
    install,
    load_ipython_extension,
    uninstall,
    unload_ipython_extension,
)
from .pipeline import explain_oom, is_oom
from .report import OomReport

__all__ = [
    "Cause",
    "Fact",
    "Fix",
    "OomReport",
    "explain_oom",
    "explained_oom",
    "format_size",
    "install",
    "is_oom",
    "load_ipython_extension",
    "uninstall",
    "unload_ipython_extension",
]
