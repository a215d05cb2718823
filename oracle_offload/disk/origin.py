"""Weights that are read where they lie in a file: a private mapping, whose writes reach no file."""

from __future__ import annotations

import mmap
import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Where the bytes of a tensor lie in a file, as they are.

    Attributes
    ----------
    memory : mmap
        The whole file, see `map_private`.
    identity : str
        See `identity_of`.
    begin : int
        Byte at which they begin.
    """

    memory: mmap.mmap
    identity: str
    begin: int


def map_private(descriptor: int) -> mmap.mmap:
    """Map a file so that writes stay in this process, and claim no memory for them in advance."""
    if sys.platform != "linux":
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return mmap.mmap(descriptor, 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)


def identity_of(descriptor: int) -> str:
    """Return what changes when an open file is replaced or written to, but through a mapping."""
    found = os.fstat(descriptor)
    return f"{found.st_dev}-{found.st_ino}-{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}"
