"""What training needs beside the weights: activations that leave, optimizers that are streamed.

Torch is imported when a name is first used, and not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Public name -> the module that defines it.
_NAMES = {
    "ActivationOffload": "activations",
    "offload_activations": "activations",
    "stream_optimizer": "streaming",
}

__all__ = ["ActivationOffload", "offload_activations", "stream_optimizer"]

if TYPE_CHECKING:
    from .activations import ActivationOffload as ActivationOffload
    from .activations import offload_activations as offload_activations
    from .streaming import stream_optimizer as stream_optimizer


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
