"""Train PyTorch models whose weights do not fit the GPU.

Weights live in page-locked host memory; a C engine streams them to the device just before each
layer needs them and keeps what is needed soonest. Importing this package imports neither torch
nor numpy: public names are resolved on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Public name -> the module that defines it. One line per name: this table is the public API.
_PUBLIC = {
    "AdaptiveBatch": "survive.adaptive_batch",
    "BatchResult": "survive.batch_size",
    "Checkpoint": "survive.checkpoint",
    "Cleanup": "survive.memory",
    "CopyCounter": "survive.copies",
    "DriverError": "errors",
    "FirstStepProof": "survive.proof",
    "Idle": "survive.idle",
    "IdleAlarm": "survive.idle",
    "MemoryManager": "manager",
    "MemoryReport": "views.summary",
    "Meter": "meter",
    "MetricsFile": "metrics",
    "MetricsRun": "metrics",
    "NoRoomError": "errors",
    "OffloadError": "errors",
    "OomReport": "explain",
    "Plan": "planning",
    "PressureMonitor": "survive.pressure",
    "Recorder": "recorder",
    "Recording": "views.recording",
    "StaleWeightsError": "errors",
    "ThermalPause": "survive.thermal",
    "VramManager": "survive.vram_manager",
    "WorkerBudget": "survive.workers",
    "accumulate": "micro_batches.accumulate",
    "attach": "manager",
    "build_info": "build_record",
    "cleanup": "survive.memory",
    "configure_allocator": "doctor.allocator",
    "emergency_minimal_operations": "survive.attempts",
    "empty_weights": "disk.empty",
    "explain_oom": "explain",
    "explained_oom": "explain",
    "find_batch_size": "survive.batch_size",
    "first_step_proof": "survive.proof",
    "from_pretrained": "disk.pretrained",
    "get_detailed_memory_info": "survive.memory",
    "is_oom": "explain",
    "memory_summary": "views.summary",
    "phase": "recorder",
    "plan": "planning",
    "read_metrics": "metrics",
    "read_recording": "views.recording",
    "record": "recorder",
    "save_weights": "disk.saving",
    "set_memory_fraction": "survive.memory",
    "track_copies": "survive.copies",
    "worker_budgets": "survive.workers",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604

if TYPE_CHECKING:
    from .build_record import build_info as build_info
    from .disk.empty import empty_weights as empty_weights
    from .disk.pretrained import from_pretrained as from_pretrained
    from .disk.saving import save_weights as save_weights
    from .doctor.allocator import configure_allocator as configure_allocator
    from .errors import DriverError as DriverError
    from .errors import NoRoomError as NoRoomError
    from .errors import OffloadError as OffloadError
    from .errors import StaleWeightsError as StaleWeightsError
    from .explain import OomReport as OomReport
    from .explain import explain_oom as explain_oom
    from .explain import explained_oom as explained_oom
    from .explain import is_oom as is_oom
    from .manager import MemoryManager as MemoryManager
    from .manager import attach as attach
    from .meter import Meter as Meter
    from .metrics import MetricsFile as MetricsFile
    from .metrics import MetricsRun as MetricsRun
    from .metrics import read_metrics as read_metrics
    from .micro_batches.accumulate import accumulate as accumulate
    from .planning import Plan as Plan
    from .planning import plan as plan
    from .recorder import Recorder as Recorder
    from .recorder import phase as phase
    from .recorder import record as record
    from .survive.adaptive_batch import AdaptiveBatch as AdaptiveBatch
    from .survive.attempts import emergency_minimal_operations as emergency_minimal_operations
    from .survive.batch_size import BatchResult as BatchResult
    from .survive.batch_size import find_batch_size as find_batch_size
    from .survive.checkpoint import Checkpoint as Checkpoint
    from .survive.copies import CopyCounter as CopyCounter
    from .survive.copies import track_copies as track_copies
    from .survive.idle import Idle as Idle
    from .survive.idle import IdleAlarm as IdleAlarm
    from .survive.memory import Cleanup as Cleanup
    from .survive.memory import cleanup as cleanup
    from .survive.memory import get_detailed_memory_info as get_detailed_memory_info
    from .survive.memory import set_memory_fraction as set_memory_fraction
    from .survive.pressure import PressureMonitor as PressureMonitor
    from .survive.proof import FirstStepProof as FirstStepProof
    from .survive.proof import first_step_proof as first_step_proof
    from .survive.thermal import ThermalPause as ThermalPause
    from .survive.vram_manager import VramManager as VramManager
    from .survive.workers import WorkerBudget as WorkerBudget
    from .survive.workers import worker_budgets as worker_budgets
    from .views.recording import Recording as Recording
    from .views.recording import read_recording as read_recording
    from .views.summary import MemoryReport as MemoryReport
    from .views.summary import memory_summary as memory_summary


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
    from . import notebook
    from .explain import hooks

    notebook.load(ipython)
    hooks.load_ipython_extension(ipython)


def unload_ipython_extension(ipython: object) -> None:
    """Undo `load_ipython_extension`."""
    from . import notebook
    from .explain import hooks

    notebook.unload(ipython)
    hooks.unload_ipython_extension(ipython)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
