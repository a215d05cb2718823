"""The checks, in the order in which a report names them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .checks_disk import check_disk
from .checks_gpu import check_clocks, check_driver, check_link, check_other_processes
from .checks_host import (
    check_huge_pages,
    check_locked_memory,
    check_memory_limit,
    check_place,
    check_ram,
    check_shared_memory,
    check_swap,
)
from .checks_software import check_aitoolkit, check_allocator, check_switches, check_torch
from .finding import Finding
from .system import System

_log = logging.getLogger("oracle_offload")

CHECKS: dict[str, Callable[[System], Finding]] = {
    "driver": check_driver,
    "torch": check_torch,
    "allocator": check_allocator,
    "switches": check_switches,
    "link": check_link,
    "clocks": check_clocks,
    "other processes": check_other_processes,
    "place": check_place,
    "ram": check_ram,
    "memory limit": check_memory_limit,
    "swap": check_swap,
    "locked memory": check_locked_memory,
    "huge pages": check_huge_pages,
    "/dev/shm": check_shared_memory,
    "disk": check_disk,
    "AI-Toolkit": check_aitoolkit,
}


def run_checks(system: System) -> tuple[Finding, ...]:
    """Run every check; one that fails says so in its own line and never stops the others."""
    return tuple(_run(name, check, system) for name, check in CHECKS.items())


def _run(name: str, check: Callable[[System], Finding], system: System) -> Finding:
    try:
        return check(system)
    except Exception as error:
        _log.debug("the check %r failed", name, exc_info=True)
        why = f"the check itself failed: {type(error).__name__}: {error}"
        return Finding(name, "unknown", "not examined", why, "report this as a bug")
