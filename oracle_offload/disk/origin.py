"""Weights read from a file without a copy: a private mapping, whose writes reach no file."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass

from .. import _core


@dataclass(frozen=True)
class Origin:
    """Where the bytes of a tensor are in a file, unchanged.

    Attributes
    ----------
    memory : mmap
        A part of the file, see `map_private`.
    skipped : int
        Bytes of it before theirs.
    """

    memory: mmap.mmap
    skipped: int


def map_private(descriptor: int, begin: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """Map part of a file so that writes stay in this process.

    On Linux no memory is claimed for them in advance, and the file need not stay open, of which a
    process may have few.

    Returns
    -------
    tuple
        What is mapped, and how many bytes of it are before `begin`.
    """
    skipped = begin % mmap.ALLOCATIONGRANULARITY
    first, length = begin - skipped, skipped + nbytes
    if sys.platform != "linux":
        return mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=first), skipped
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
    made = mmap.mmap(-1, length, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(made))
    _core.pages_show(address, length, descriptor, first)
    return made, skipped
