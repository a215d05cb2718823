"""Which threads may touch host masters now: in an optimizer step, and in our own code."""

from __future__ import annotations

import functools
import sys
import threading
from contextlib import AbstractContextManager

from torch.optim import optimizer as torch_optimizer

from .._core import Taken


class _Thread(threading.local):
    def __init__(self) -> None:
        self.blocks: list[None] = []  # of `exempt`, one in the other


_exempt = _Thread()
_STEP_FILE = torch_optimizer.Optimizer.profile_hook_step.__code__.co_filename  # wraps each step()


def exempt() -> AbstractContextManager[object]:
    """Let operators of this thread touch masters: what an optimizer step may do.

    Both ends are calls of C, which no interrupt comes between.
    """
    blocks = _exempt.blocks
    return Taken(functools.partial(blocks.append, None), blocks.pop)


def depth() -> int:
    """Return how many `exempt` blocks this thread is in."""
    return len(_exempt.blocks)


def set_depth(value: int) -> None:
    """Say so: another micro-batch goes on in this thread."""
    _exempt.blocks[:] = [None] * value


def is_exempt() -> bool:
    """Whether this thread may touch masters now.

    An optimizer step is recognised by its frame: torch's hooks do not say when a step has failed.
    """
    if depth():
        return True
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == _STEP_FILE:
            return True
        frame = frame.f_back
    return False
