"""Train PyTorch models whose weights do not fit the GPU.

Weights live in page-locked host memory; a C engine streams them to the device just before each
layer needs them and keeps what is needed soonest. Importing this package imports neither torch
nor numpy: public names are resolved on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Public name -> the module that defines it. One line per name: this table is the public API, with
# the rooms below it, whose names are in their `__init__`.
_PUBLIC = {
    "Budget": "model.budget",
    "DriverError": "errors",
    "MemoryManager": "manager",
    "NoRoomError": "errors",
    "OffloadError": "errors",
    "StaleWeightsError": "errors",
    "accumulate": "train.micro_batches.accumulate",
    "attach": "manager",
    "empty_weights": "disk.empty",
    "explain_oom": "diagnose.explain",
    "explained_oom": "diagnose.explain",
    "from_pretrained": "train.pretrained",
    "memory_summary": "observe.summary",
    "plan": "planning",
    "record": "observe.recorder",
    "save_weights": "disk.saving",
}
_ROOMS = {
    "aitoolkit": "aitoolkit",
    "diagnose": "diagnose",
    "host": "host",
    "observe": "observe",
    "planning": "planning",
    "train": "train",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604

if TYPE_CHECKING:
    from . import aitoolkit as aitoolkit
    from . import diagnose as diagnose
    from . import host as host
    from . import observe as observe
    from . import planning as planning
    from . import train as train
    from .diagnose.explain import explain_oom as explain_oom
    from .diagnose.explain import explained_oom as explained_oom
    from .disk.empty import empty_weights as empty_weights
    from .disk.saving import save_weights as save_weights
    from .errors import DriverError as DriverError
    from .errors import NoRoomError as NoRoomError
    from .errors import OffloadError as OffloadError
    from .errors import StaleWeightsError as StaleWeightsError
    from .manager import MemoryManager as MemoryManager
    from .manager import attach as attach
    from .model.budget import Budget as Budget
    from .observe.recorder import record as record
    from .observe.summary import memory_summary as memory_summary
    from .planning import plan as plan
    from .train.micro_batches.accumulate import accumulate as accumulate
    from .train.pretrained import from_pretrained as from_pretrained


def _not_built() -> ImportError:
    return ImportError(
        f"the engine is not built in {__path__[0]}, which is a source tree: build it there "
        "(make build), or run from another folder to use the package that is installed",
        name=f"{__name__}._core",
    )


def __getattr__(name: str) -> object:
    try:
        if name == "_core":  # `from . import _core` asks here first
            return importlib.import_module("._core", __name__)
        if name in _ROOMS:
            return importlib.import_module(f"{__name__}.{_ROOMS[name]}")
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name == f"{__name__}._core":
            raise _not_built() from error
        if error.name not in ("torch", "numpy"):
            raise
        raise ModuleNotFoundError(
            f"oracle_offload.{name} needs {error.name}, which is not installed; install the build "
            "of PyTorch that fits this machine, or: pip install torch numpy",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def load_ipython_extension(ipython: object) -> None:
    """Make ``%load_ext oracle_offload`` bring the magics, and the explanation of errors of memory.

    See docs/notebook.md.
    """
    from .diagnose.explain import hooks
    from .observe import notebook

    notebook.load(ipython)
    hooks.load_ipython_extension(ipython)


def unload_ipython_extension(ipython: object) -> None:
    """Undo `load_ipython_extension`."""
    from .diagnose.explain import hooks
    from .observe import notebook

    notebook.unload(ipython)
    hooks.unload_ipython_extension(ipython)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_ROOMS})
