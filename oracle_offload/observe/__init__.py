"""What people see: the terminal, pages, the summary, the timeline. Nothing here trains."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Public name -> the module that defines it, imported where the name is first used.
_NAMES = {
    "MemoryReport": "summary",
    "Meter": "meter",
    "MetricsFile": "metrics",
    "MetricsRun": "metrics",
    "Recorder": "recorder",
    "Recording": "recording",
    "phase": "recorder",
    "read_metrics": "metrics",
    "read_recording": "recording",
}

__all__ = [*_NAMES]  # noqa: PLE0604

if TYPE_CHECKING:
    from .meter import Meter as Meter
    from .metrics import MetricsFile as MetricsFile
    from .metrics import MetricsRun as MetricsRun
    from .metrics import read_metrics as read_metrics
    from .recorder import Recorder as Recorder
    from .recorder import phase as phase
    from .recording import Recording as Recording
    from .recording import read_recording as read_recording
    from .summary import MemoryReport as MemoryReport


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
