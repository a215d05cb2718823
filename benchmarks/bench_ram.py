"""How much host memory there is, where a machine is given its memory as it uses it."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common

PIECE_BYTES = 16 * common.GIB  # touched at a time
WANTED_BYTES = 64 * common.GIB  # what the largest part needs
SPARED = 0.8  # of what is said to be available; touching more could end the process


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Touch memory and see whether what is said to be available grows by it.

    The last row has ``host_gib`` where it does.
    """
    if os.environ.get("GPU_CHECK_HOST_GIB"):
        yield {"name": "host memory", "skipped": "GPU_CHECK_HOST_GIB says it"}
        return
    shrink = 1024 if common.is_small(device) else 1
    before = meminfo()
    yield {"name": "before", **before}
    touched: list[mmap.mmap] = []
    most = before["available_bytes"]
    while most < WANTED_BYTES and common.left_s() > 5:
        piece = PIECE_BYTES // shrink
        if piece > SPARED * meminfo()["available_bytes"]:
            break
        begin = time.perf_counter()
        touched.append(touch(piece))
        now = meminfo()
        held = sum(len(one) for one in touched)
        grown = now["available_bytes"] + held > most + piece // 4
        most = max(most, now["available_bytes"] + held)
        yield {
            "name": f"{held / common.GIB:.3g} GiB touched",
            "held_bytes": held,
            "touch_s": time.perf_counter() - begin,
            **now,
        }
        if not grown:
            break
    for one in touched:
        one.close()
    row = {"name": "after", **meminfo()}
    if most > 1.25 * before["available_bytes"]:
        row["host_gib"] = round(most / common.GIB, 1)
    yield row


def meminfo() -> dict[str, int]:
    """Return what /proc/meminfo says of all memory and of what is available."""
    found = {"total_bytes": 0, "available_bytes": common.host_available_bytes()}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                found["total_bytes"] = int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return found


def touch(nbytes: int) -> mmap.mmap:
    """Return so much memory, every page of it written, by a thread for each processor."""
    held = mmap.mmap(-1, nbytes)
    start = ctypes.addressof(ctypes.c_char.from_buffer(held))
    threads = min(16, os.cpu_count() or 1)
    share = -(-nbytes // threads)

    def write(begin: int) -> None:
        ctypes.memset(start + begin, 1, min(share, nbytes - begin))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(0, nbytes, share)))
    return held
