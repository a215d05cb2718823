"""Is this machine fit to train? One page of checks, each with a verdict, the value, and a fix.

>>> from oracle_offload.diagnose.doctor import examine
>>> print(examine())  # doctest: +SKIP

Nothing is changed on the machine, nothing needs a GPU, torch or special rights, and what could
not be seen is reported as such. Start reading at `checks.py`, the table of checks; each is a
small function from a `System` to a `Finding`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checks import CHECKS as CHECKS
    from .finding import Finding as Finding
    from .report import DoctorReport as DoctorReport
    from .system import System as System

__all__ = ["CHECKS", "DoctorReport", "Finding", "System", "examine"]

# Loaded on first use: code that needs the allocator or the memory limit alone loads no more.
_LAZY = {"CHECKS": "checks", "DoctorReport": "report", "Finding": "finding", "System": "system"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def examine(
    system: System | None = None, *, aitoolkit: str | None = None, disk: str | None = None
) -> DoctorReport:
    """Examine a machine; never raises.

    Takes a few seconds where torch is installed and not yet imported: it is then imported in a
    process of its own to learn which allocator settings are in effect. Two more go to the disk, of
    which at most 1 GiB is read.

    Parameters
    ----------
    system : System, optional
        The machine; the one we run on by default.
    aitoolkit : str, optional
        Path of an AI-Toolkit checkout to examine too, when `system` is not given.
    disk : str, optional
        A file of 64 MiB or more, or a folder with safetensors files, whose disk is measured; by
        default the hub's cache, or the current folder.

    Returns
    -------
    DoctorReport
        One finding per check.
    """
    from .checks import run_checks
    from .report import DoctorReport
    from .system import System

    return DoctorReport(run_checks(system or System(aitoolkit=aitoolkit, models=disk)))
