"""Sizes in bytes: as people write them, as programs print them, and as we show them."""

from __future__ import annotations

import math
import re

KIB, MIB, GIB, TIB, PIB, EIB = (1 << (10 * power) for power in range(1, 7))

_WRITTEN = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1 << (10 * power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
# Bounded everywhere: a search is linear in the text. Compiled on first use, by `re` itself.
_SIZE = r"\s*([0-9]{0,40}\.?[0-9]{0,40}(?:[eE][0-9]{1,4})?)\s*([a-zA-Z]{0,8})\s*"


def split_size(text: str) -> tuple[int | float, str] | None:
    """Return the number of ``"1.50 GiB"`` and its unit in lower case; None for anything else."""
    match = re.fullmatch(_SIZE, text)
    if match is None:
        return None
    try:
        number = int(match[1]) if match[1].isdigit() else float(match[1])
    except ValueError:  # no digit
        return None
    return number, match[2].lower()


def parse_size(value: int | float | str, *, total: int | None = None, name: str = "size") -> int:
    """Return `value` in bytes.

    Parameters
    ----------
    value : int, float or str
        Bytes; a number with a unit (``"8GiB"`` is 2^33 bytes, ``"8GB"`` 8 x 10^9); or a fraction in
        (0, 1) of `total`.
    total : int, optional
        Bytes of the memory that a fraction refers to; fractions are refused without it.
    name : str
        What the value is, for messages.

    Raises
    ------
    ValueError
        Not a size, or not above zero.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(
            f"{name}={value!r} is not a size; use bytes, '8GiB' or a fraction in (0, 1)"
        )
    if isinstance(value, str):
        number, unit = split_size(value) or (0, "?")
        if unit not in _WRITTEN:
            raise ValueError(f"{name}={value!r} is not a size; write it like '8GiB' or '500MiB'")
        if unit or number >= 1:
            return _positive(number * _WRITTEN[unit], value, name)
        value = number
    if 0 < value < 1:
        if total is None:
            raise ValueError(f"{name}={value!r}: a fraction needs a device to be a fraction of")
        return _positive(value * total, value, name)
    return _positive(value, value, name)


def _positive(number: int | float, value: object, name: str) -> int:
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{name}={value!r} is not a finite number of bytes")
    number = int(number)
    if number <= 0:
        raise ValueError(f"{name}={value!r} must be above zero")
    return number


def written_size(number: int) -> str:
    """Return bytes as `parse_size` takes them, for people to paste: ``"17.95GiB"``.

    Two places behind the point, rounded up: by less than 0.01 GiB of what is a GiB and more.
    """
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if number >= scale:
            whole, hundredths = divmod(-(-100 * number // scale), 100)
            return f"{whole}.{hundredths:02}".rstrip("0").rstrip(".") + unit
    return str(number)


def format_size(
    number: float,
    *,
    digits: int = 2,
    small_digits: int | None = None,
    gib_from: int = GIB,
    smallest: str = "B",
) -> str:
    """Return bytes for people, in binary units: ``"1.50 GiB"``.

    Parameters
    ----------
    number : float
        Bytes.
    digits, small_digits : int
        Behind the point, of GiB and of what is smaller (the same, by default).
    gib_from : int
        Bytes from which on GiB are shown.
    smallest : str
        The smallest unit: "KiB", or what bytes are called.
    """
    small = digits if small_digits is None else small_digits
    for unit, scale, least, shown in (
        ("GiB", GIB, gib_from, digits),
        ("MiB", MIB, MIB, small),
        ("KiB", KIB, KIB, small),
    ):
        if abs(number) >= least or unit == smallest:
            return f"{number / scale:.{shown}f} {unit}"
    return f"{number:.0f} {smallest}"
