"""A drop-in for AI-Toolkit's layer offloading, its package `toolkit.memory_management`.

This file, `manager.py` and `manager_modules.py` carry AI-Toolkit's names and may be loaded under
its name for the package: they hold nothing of their own. Importing it imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["MemoryManager", "install", "sync_grad_transfers", "uninstall"]

if TYPE_CHECKING:
    from oracle_offload.aitoolkit.in_process import install as install
    from oracle_offload.aitoolkit.in_process import uninstall as uninstall
    from oracle_offload.aitoolkit.memory_manager import MemoryManager as MemoryManager
    from oracle_offload.aitoolkit.single_layers import sync_grad_transfers as sync_grad_transfers


def __getattr__(name: str) -> object:
    # By full names: a relative import would load a second copy under AI-Toolkit's name.
    if name == "MemoryManager":
        from oracle_offload.aitoolkit.memory_manager import MemoryManager

        return MemoryManager
    if name == "sync_grad_transfers":
        from oracle_offload.aitoolkit.single_layers import sync_grad_transfers

        return sync_grad_transfers
    if name in ("install", "uninstall"):
        from oracle_offload.aitoolkit import in_process

        return getattr(in_process, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
