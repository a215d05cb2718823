"""Sizes as people write them: ``8GiB``, ``"8GB"``, bytes, a fraction of a device, ``"auto"``."""

from __future__ import annotations

import math
import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1 << (10 * power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([a-zA-Z]*)\s*")


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
        match = _PATTERN.fullmatch(value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{name}={value!r} is not a size; write it like '8GiB' or '500MiB'")
        number = float(match[1])
        if match[2] or number >= 1:
            return _positive(number * unit, value, name)
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


def format_size(number: float) -> str:
    """Return bytes for people, in binary units: ``"1.50 GiB"``."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(number) >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number:.0f} B"
