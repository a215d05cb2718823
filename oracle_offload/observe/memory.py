"""Who holds the memory of a device and of the host: the parts of their bars.

The parts add up to the total, as long as the figures, which are read one after the other, agree.
What is unknown is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..host.cgroup import read_memory_limit
from ..host.memory import read_meminfo, total_bytes
from ..host.sizes import format_size


@dataclass(frozen=True)
class Memory:
    """One device's memory, or the host's.

    Attributes
    ----------
    title : str
        What it is.
    total_bytes : int or None
        All of it, or what a limit leaves.
    parts : dict of str to int or None
        Who holds it, and what is free, in bytes; None is unknown.
    notes : list of str
        What a reader has to know in addition.
    """

    title: str
    total_bytes: int | None
    parts: dict[str, int | None]
    notes: list[str] = field(default_factory=list)


def show_size(size: int | None) -> str:
    """Return bytes for people; None is "unknown"."""
    return "unknown" if size is None else format_size(size)


def device_memory(
    title: str,
    free: int | None,
    total: int | None,
    *,
    allocated: int | None,
    cached: int,
    arena: int,
    weights: int,
    gradients: int,
    optimizer: int | None,
) -> Memory:
    """Return who holds a device's memory. All arguments but the title are bytes.

    Parameters
    ----------
    title : str
        The device.
    free, total : int or None
        As the driver tells; None where it does not.
    allocated : int or None
        By torch; None on the simulated device, whose driver knows of the arena alone.
    cached : int
        Held by torch's allocator and not in use.
    arena, weights, gradients : int
        The arena, and of the attached models what is not managed.
    optimizer : int or None
        State of the optimizer that was given.
    """
    known = arena + weights + gradients + (optimizer or 0)
    notes = []
    activations = untold = None
    if allocated is None:
        others = None if free is None or total is None else max(0, total - free - arena)
        if free is not None:
            free = max(0, free - (known - arena))
            notes.append(
                "a simulated driver does not count torch's tensors: those that are known are "
                "taken off what is free"
            )
    else:
        rest = max(0, allocated - known)
        activations, untold = (None, rest) if optimizer is None else (rest, None)
        if free is None or total is None:
            others = None
        else:
            others = max(0, total - free - max(allocated, known) - cached)
    parts: dict[str, int | None] = {
        "weights": weights,
        "gradients": gradients,
        "optimizer state": optimizer,
        "activations": activations,
    }
    if untold is not None:
        parts["not distinguished"] = untold
        notes.append(
            "memory_summary(optimizer=...) tells the optimizer's state from activations and other "
            "tensors"
        )
    parts |= {"arena": arena, "cached": cached, "other processes": others, "free": free}
    return Memory(title, total, parts, notes)


def host_memory(locked: int, pageable: int, root: str = "/") -> Memory:
    """Return who holds the host's memory, within the limit on the control group.

    Parameters
    ----------
    locked, pageable : int
        Bytes of the engines' that are page-locked, and of masters that are not.
    root : str
        The directory that holds `proc` and `sys`: "/" for the live system.
    """
    table, limit = read_meminfo(root), read_memory_limit(root)
    total = table.get("MemTotal") or (total_bytes() if root == "/" else None)
    free = table.get("MemFree")
    cache = table["Buffers"] + table["Cached"] if {"Buffers", "Cached"} <= table.keys() else None
    notes = []
    if limit.limit_bytes is not None and (total is None or limit.limit_bytes < total):
        total, cache = limit.limit_bytes, limit.reclaimable_bytes
        used = limit.usage_bytes
        free = None if used is None else max(0, total - used)
        notes.append(
            f"the limit of control group {limit.limited_by} on {show_size(total)} holds here"
        )
    if free is None:
        notes.append("the system does not tell how much of it is free")
    others = None
    if free is not None and total is not None:
        others = max(0, total - free - (cache or 0) - locked - pageable)
    parts: dict[str, int | None] = {
        "page-locked": locked,
        "pageable": pageable,
        "page cache": cache,
        "everything else": others,
        "free": free,
    }
    return Memory("host memory", total, parts, notes)
