"""The process of AI-Toolkit's trainer, and the folder that it saves its checkpoints to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def find_run_folder() -> str | None:
    """Return the ``save_root`` of the process that loads a model now; None where there is none.

    The loaders that attach a model do not know where the run is saved. The trainer's process does,
    and it is among their callers.
    """
    for owner in _callers():
        if os.path.isdir(owner.save_root):
            folder: str = owner.save_root
            return folder
    return None


def find_trainer() -> Any:
    """Return the process that loads a model now, and has a configuration; else None."""
    return next((owner for owner in _callers() if "config" in vars(owner)), None)


def _callers() -> Iterator[Any]:
    """Return the objects with a ``save_root`` whose methods are being called, the inner first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(getattr(owner, "__dict__", {}).get("save_root"), str):
            yield owner
        frame = frame.f_back
