"""oracle_offload in the place of AI-Toolkit's `toolkit/memory_management/manager_modules.py`.

It works under AI-Toolkit's own `manager.py` too. To go back: ``oracle-offload aitoolkit uninstall
PATH``, or ``git checkout`` of this file.
"""

from __future__ import annotations

from oracle_offload.aitoolkit.single_layers import (
    _DEVICE_STATE,
    BaseLayerMemoryManager,
    ConvLayerMemoryManager,
    LinearLayerMemoryManager,
    OstrisLinearLayerMemoryManager,
    _ensure_cpu_pinned,
    sync_grad_transfers,
)

RELEASE = "0.1.0"

__all__ = [
    "RELEASE",
    "_DEVICE_STATE",
    "BaseLayerMemoryManager",
    "ConvLayerMemoryManager",
    "LinearLayerMemoryManager",
    "OstrisLinearLayerMemoryManager",
    "_ensure_cpu_pinned",
    "sync_grad_transfers",
]
