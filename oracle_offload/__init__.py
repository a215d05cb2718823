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
    "AdaptiveBatch": "train.survive.adaptive_batch",
    "Budget": "model.budget",
    "BatchResult": "train.survive.batch_size",
    "Checkpoint": "train.survive.checkpoint",
    "Cleanup": "train.survive.memory",
    "CopyCounter": "train.survive.copies",
    "DriverError": "errors",
    "FirstStepProof": "train.survive.proof",
    "Idle": "train.survive.idle",
    "IdleAlarm": "train.survive.idle",
    "MemoryManager": "manager",
    "MemoryReport": "observe.summary",
    "Meter": "observe.meter",
    "MetricsFile": "observe.metrics",
    "MetricsRun": "observe.metrics",
    "NoRoomError": "errors",
    "OffloadError": "errors",
    "OomReport": "diagnose.explain",
    "Plan": "planning",
    "PressureMonitor": "train.survive.pressure",
    "Recorder": "observe.recorder",
    "Recording": "observe.recording",
    "StaleWeightsError": "errors",
    "ThermalPause": "train.survive.thermal",
    "VramManager": "train.survive.vram_manager",
    "WorkerBudget": "train.survive.workers",
    "accumulate": "train.micro_batches.accumulate",
    "attach": "manager",
    "build_info": "host.build_record",
    "cleanup": "train.survive.memory",
    "configure_allocator": "diagnose.doctor.allocator",
    "emergency_minimal_operations": "train.survive.attempts",
    "empty_weights": "disk.empty",
    "explain_oom": "diagnose.explain",
    "explained_oom": "diagnose.explain",
    "find_batch_size": "train.survive.batch_size",
    "first_step_proof": "train.survive.proof",
    "from_pretrained": "train.pretrained",
    "get_detailed_memory_info": "train.survive.memory",
    "is_oom": "diagnose.explain",
    "memory_summary": "observe.summary",
    "phase": "observe.recorder",
    "plan": "planning",
    "read_metrics": "observe.metrics",
    "read_recording": "observe.recording",
    "record": "observe.recorder",
    "save_weights": "disk.saving",
    "set_memory_fraction": "train.survive.memory",
    "track_copies": "train.survive.copies",
    "worker_budgets": "train.survive.workers",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604

if TYPE_CHECKING:
    from .diagnose.doctor.allocator import configure_allocator as configure_allocator
    from .diagnose.explain import OomReport as OomReport
    from .diagnose.explain import explain_oom as explain_oom
    from .diagnose.explain import explained_oom as explained_oom
    from .diagnose.explain import is_oom as is_oom
    from .disk.empty import empty_weights as empty_weights
    from .disk.saving import save_weights as save_weights
    from .errors import DriverError as DriverError
    from .errors import NoRoomError as NoRoomError
    from .errors import OffloadError as OffloadError
    from .errors import StaleWeightsError as StaleWeightsError
    from .host.build_record import build_info as build_info
    from .manager import MemoryManager as MemoryManager
    from .manager import attach as attach
    from .model.budget import Budget as Budget
    from .observe.meter import Meter as Meter
    from .observe.metrics import MetricsFile as MetricsFile
    from .observe.metrics import MetricsRun as MetricsRun
    from .observe.metrics import read_metrics as read_metrics
    from .observe.recorder import Recorder as Recorder
    from .observe.recorder import phase as phase
    from .observe.recorder import record as record
    from .observe.recording import Recording as Recording
    from .observe.recording import read_recording as read_recording
    from .observe.summary import MemoryReport as MemoryReport
    from .observe.summary import memory_summary as memory_summary
    from .planning import Plan as Plan
    from .planning import plan as plan
    from .train.micro_batches.accumulate import accumulate as accumulate
    from .train.pretrained import from_pretrained as from_pretrained
    from .train.survive.adaptive_batch import AdaptiveBatch as AdaptiveBatch
    from .train.survive.attempts import emergency_minimal_operations as emergency_minimal_operations
    from .train.survive.batch_size import BatchResult as BatchResult
    from .train.survive.batch_size import find_batch_size as find_batch_size
    from .train.survive.checkpoint import Checkpoint as Checkpoint
    from .train.survive.copies import CopyCounter as CopyCounter
    from .train.survive.copies import track_copies as track_copies
    from .train.survive.idle import Idle as Idle
    from .train.survive.idle import IdleAlarm as IdleAlarm
    from .train.survive.memory import Cleanup as Cleanup
    from .train.survive.memory import cleanup as cleanup
    from .train.survive.memory import get_detailed_memory_info as get_detailed_memory_info
    from .train.survive.memory import set_memory_fraction as set_memory_fraction
    from .train.survive.pressure import PressureMonitor as PressureMonitor
    from .train.survive.proof import FirstStepProof as FirstStepProof
    from .train.survive.proof import first_step_proof as first_step_proof
    from .train.survive.thermal import ThermalPause as ThermalPause
    from .train.survive.vram_manager import VramManager as VramManager
    from .train.survive.workers import WorkerBudget as WorkerBudget
    from .train.survive.workers import worker_budgets as worker_budgets


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
    return sorted({*globals(), *_PUBLIC})
