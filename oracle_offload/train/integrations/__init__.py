"""Where the numbers of `Meter.read` go, and who reads them step by step: thin, one file a library.

Each of these libraries is imported when its name is first used, and not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Public name -> the module that defines it, and the library that it needs.
_NAMES = {
    "AccelerateTracker": "accelerate",
    "LightningCallback": "lightning",
    "TrainerCallback": "transformers",
    "accumulate_in": "transformers",
    "postfix": "sinks",
    "tensorboard": "sinks",
    "wandb": "sinks",
}

__all__ = ["AccelerateTracker", "LightningCallback", "TrainerCallback", "postfix", "tensorboard"]
__all__ += ["accumulate_in", "wandb"]

if TYPE_CHECKING:
    from .accelerate import AccelerateTracker as AccelerateTracker
    from .lightning import LightningCallback as LightningCallback
    from .sinks import postfix as postfix
    from .sinks import tensorboard as tensorboard
    from .sinks import wandb as wandb
    from .transformers import TrainerCallback as TrainerCallback
    from .transformers import accumulate_in as accumulate_in


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        raise ModuleNotFoundError(
            f"oracle_offload.train.integrations.{name} needs {library}, which is not installed "
            f"here: pip install {library}",
            name=library,
        ) from error
