"""How much memory the host has, and how much of it can be spared."""

from __future__ import annotations

import bisect
import ctypes
import os
import sys
from collections.abc import Iterable

from .cgroup import MemoryLimit, read_memory_limit
from .files import NO_SIZE, parse_count, read_text

SPARED = 0.9  # of `available_bytes`, to be taken: files are read and written meanwhile


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    )


def _windows_status() -> _MemoryStatus:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    kernel32 = ctypes.windll.kernel32  # type: ignore[attr-defined,unused-ignore]
    kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return status


def total_bytes() -> int:
    """Return the bytes of the machine's memory."""
    if sys.platform == "win32":
        return int(_windows_status().total)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes(
    root: str = "/", known: tuple[dict[str, int], MemoryLimit] | None = None
) -> int | None:
    """Return the bytes that this process can still have; None where the system does not say.

    That is what is free, or can be made so without swapping, within the limit on its control group.

    Parameters
    ----------
    root : str
        The directory that holds `proc` and `sys`: "/" for the live system.
    known : tuple, optional
        What `read_meminfo` and `read_memory_limit` answered just now.
    """
    if sys.platform == "win32" and root == "/":
        return int(_windows_status().available)
    meminfo, limit = (read_meminfo(root), read_memory_limit(root)) if known is None else known
    found = (meminfo.get("MemAvailable"), limit.headroom_bytes)
    return min((size for size in found if size is not None), default=None)


def read_meminfo(root: str = "/") -> dict[str, int]:
    """Return /proc/meminfo in bytes, page counts as they are; empty when it is hidden."""
    table = {}
    for line in (read_text(root, "/proc/meminfo").text or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        number = parse_count(words[0]) if words else None
        factor = 1024 if words[1:] == ["kB"] else 1
        if number is not None and number * factor < NO_SIZE:
            table[name] = number * factor
    return table


def private_bytes(ranges: Iterable[tuple[int, int]], root: str = "/") -> int:
    """Return how many bytes of `ranges` go back to the system when they are freed.

    Pages of a mapped file do not: `available_bytes` counts them already, because the system can
    drop them at any time. Where it does not say which pages are a file's, all are taken for such.

    Parameters
    ----------
    ranges : iterable of (int, int)
        Addresses of this process, first and one past the last; a range is in one mapping.
    root : str
        As in `available_bytes`.
    """
    mappings = []  # in the order of their addresses, as the system lists them
    for line in (read_text(root, "/proc/self/maps").text or "").splitlines():
        fields = line.split()  # addresses, permissions, offset, device, inode, the file's path
        if len(fields) >= 5:
            first, _, last = fields[0].partition("-")
            mappings.append((int(first, 16), int(last, 16), fields[4] == "0"))
    starts = [start for start, _, _ in mappings]
    private = 0
    for start, end in ranges:
        index = bisect.bisect_right(starts, start) - 1
        if index >= 0 and start < mappings[index][1] and mappings[index][2]:
            private += end - start
    return private
