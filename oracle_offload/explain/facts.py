"""Numbers read from a message: every one in bytes, every one with the line it came from.

A number the text does not state is absent, never zero and never guessed. Sums that follow from
stated numbers (`reserved = allocated + unallocated`) are kept apart by `derived`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

KiB, MiB, GiB, TiB, PiB, EiB = (2 ** (10 * power) for power in range(1, 7))

# PyTorch prints `GB` in old MPS messages and means 2^30 there too; kernel and scheduler logs print
# `kB` and mean 2^10. No message we read uses powers of ten.
UNITS = {
    "b": 1, "byte": 1, "bytes": 1,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB, "pib": PiB, "eib": EiB,
    "ki": KiB, "mi": MiB, "gi": GiB,
    "kb": KiB, "mb": MiB, "gb": GiB, "tb": TiB,
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
    match = compiled(r"\s*(\d{1,20}(?:\.\d{0,4})?)\s*([A-Za-z]{0,5})\s*").fullmatch(text)
    if match is None:
        return None
    factor = UNITS.get(match[2].lower()) if match[2] else 1
    if factor is None:
        return None
    value = round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    return None if value >= UNLIMITED else value


def format_size(value: int | None) -> str:
    """Return bytes for people: GiB from 0.1 GiB up, then MiB, KiB, bytes; None is "unknown"."""
    if value is None:
        return "unknown"
    for unit, size in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if value >= size or (unit == "GiB" and value >= size // 10):
            return f"{value / size:.2f} {unit}"
    return "0 bytes" if value == 0 else f"{value} bytes"
