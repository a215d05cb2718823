"""oracle_offload in the place of AI-Toolkit's `toolkit/memory_management/manager.py`.

To go back: ``oracle-offload aitoolkit uninstall PATH``, or ``git checkout`` of this file and of
`manager_modules.py` next to it.
"""

from __future__ import annotations

from oracle_offload.aitoolkit.checkout import refuse_strange_neighbour
from oracle_offload.aitoolkit.memory_manager import MemoryManager

from . import manager_modules

RELEASE = "0.1.0"
refuse_strange_neighbour(RELEASE, getattr(manager_modules, "RELEASE", None), __file__)

__all__ = ["RELEASE", "MemoryManager"]
