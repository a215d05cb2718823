"""What training needs in addition to weights: batches that fit, guards, optimizers, activations."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Public name -> the module that defines it, imported where the name is first used.
_NAMES = {
    "ActivationOffload": "activations",
    "AdaptiveBatch": "survive.adaptive_batch",
    "BatchResult": "survive.batch_size",
    "Checkpoint": "survive.checkpoint",
    "Cleanup": "survive.memory",
    "CopyCounter": "survive.copies",
    "FirstStepProof": "survive.proof",
    "Idle": "survive.idle",
    "IdleAlarm": "survive.idle",
    "PressureMonitor": "survive.pressure",
    "ThermalPause": "survive.thermal",
    "VramManager": "survive.vram_manager",
    "WorkerBudget": "survive.workers",
    "cleanup": "survive.memory",
    "emergency_minimal_operations": "survive.attempts",
    "find_batch_size": "survive.batch_size",
    "first_step_proof": "survive.proof",
    "get_detailed_memory_info": "survive.memory",
    "offload_activations": "activations",
    "set_memory_fraction": "survive.memory",
    "stream_optimizer": "streaming",
    "track_copies": "survive.copies",
    "worker_budgets": "survive.workers",
}

__all__ = [*_NAMES]  # noqa: PLE0604

if TYPE_CHECKING:
    from .activations import ActivationOffload as ActivationOffload
    from .activations import offload_activations as offload_activations
    from .streaming import stream_optimizer as stream_optimizer
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


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
