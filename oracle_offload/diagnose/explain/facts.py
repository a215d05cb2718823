"""Numbers read from a message: every one in bytes, every one with the line it came from.

A number the text does not state is absent, never zero and never guessed. Sums that follow from
stated numbers (`reserved = allocated + unallocated`) are kept apart by `derived`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from ...host.sizes import EIB, GIB, KIB, MIB, PIB, TIB, split_size
from ...host.sizes import format_size as _format_size

# PyTorch prints `GB` in old MPS messages and means 2^30 there too; kernel and scheduler logs print
# `kB` and mean 2^10. No message we read uses powers of ten.
UNITS = {
    "": 1, "b": 1, "byte": 1, "bytes": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB, "pib": PIB, "eib": EIB,
    "ki": KIB, "mi": MIB, "gi": GIB,
    "kb": KIB, "mb": MIB, "gb": GIB, "tb": TIB,
}  # fmt: skip

# A bounded number and a unit: no nested quantifier, so a search is linear in the text.
SIZE = r"(\d{1,20}(?:\.\d{0,4})? ?(?:bytes|[KMGTPE]iB|[kKMGT]B|[KMG]i\b|B\b))"

# What PyTorch prints where a size is "no limit" or "not known" (UINT64_MAX bytes).
UNLIMITED = 2**64 - 2**33

# Every fact a report can hold, with the words it is shown with.
FACT_TITLES = {
    "requested": "asked for",
    "total": "size of the card",
    "free": "free on the card",
    "cap": "allowed to this process",
    "allocated": "in use by tensors",
    "private_pools": "of it in private pools (CUDA graphs)",
    "unallocated": "cached but unused",
    "reserved": "held by the allocator",
    "this_process": "held by this process in all",
    "other_processes": "held by other processes",
    "other": "other allocations of this process",
    "limit": "limit that was set",
    "used": "in use when it was killed",
}


class Fact(NamedTuple):
    """One number of a message.

    Attributes
    ----------
    name : str
        A key of `FACT_TITLES`.
    value : int
        Bytes.
    quote : str
        The line of the text the number was read from, cut on both sides where it is long.
    line : int
        Its line number, from 1; 0 where the text had to be unwrapped first.
    derived : bool
        True where the number is a sum of printed ones rather than printed itself.
    """

    name: str
    value: int
    quote: str
    line: int
    derived: bool = False


@cache
def compiled(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Compile on first use: importing the package compiles nothing."""
    return re.compile(pattern.replace("{S}", SIZE), flags)


def parse_size(text: str) -> int | None:
    """Return the bytes of `"1.50 GiB"`, `"512 bytes"`, `"33554432kb"` or a bare count.

    Returns None for anything else and for PyTorch's "no limit" (UINT64_MAX).
    """
    number, unit = split_size(text) or (0, "?")
    if unit not in UNITS:
        return None
    value = number * UNITS[unit]
    return None if value >= UNLIMITED else round(value)


def format_size(value: int | None) -> str:
    """Return bytes for people: GiB from 0.1 GiB up, then MiB, KiB, bytes; None is "unknown"."""
    if value is None:
        return "unknown"
    return _format_size(value, gib_from=GIB // 10, smallest="bytes")
