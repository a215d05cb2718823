"""Which threads may touch host masters now: in an optimizer step, and in our own code."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import optimizer as torch_optimizer

_exempt = threading.local()
_STEP_FILE = torch_optimizer.Optimizer.profile_hook_step.__code__.co_filename  # wraps each step()


@contextmanager
def exempt() -> Iterator[None]:
    """Let operators of this thread touch masters: what an optimizer step may do."""
    before = depth()
    set_depth(before + 1)
    try:
        yield
    finally:
        set_depth(before)


def depth() -> int:
    """Return how many `exempt` blocks this thread is in."""
    found: int = getattr(_exempt, "depth", 0)
    return found


def set_depth(value: int) -> None:
    """Say so: another micro-batch goes on in this thread."""
    _exempt.depth = value


def is_exempt() -> bool:
    """Whether this thread may touch masters now.

    An optimizer step is told by its frame: torch's hooks do not say when a step has failed.
    """
    if depth():
        return True
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == _STEP_FILE:
            return True
        frame = frame.f_back
    return False
