"""The folder that AI-Toolkit's trainer saves its checkpoints to."""

from __future__ import annotations

import os
import sys
from types import FrameType


def find_run_folder() -> str | None:
    """Return the ``save_root`` of the process that loads a model now; None where there is none.

    The loaders that attach a model are not told where the run is saved. The trainer's process is,
    and it stands among their callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        folder = None if owner is None else getattr(owner, "__dict__", {}).get("save_root")
        if isinstance(folder, str) and os.path.isdir(folder):
            return folder
        frame = frame.f_back
    return None
