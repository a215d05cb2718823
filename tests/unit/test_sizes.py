"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from oracle_offload.host.sizes import GIB, MIB, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1000, 1000),
        ("8GiB", 8 << 30),
        ("8 GB", 8 * 10**9),
        ("500MiB", 500 << 20),
        ("1.5kib", 1536),
        ("1e9", 10**9),
        (0.5, 500),
        ("0.25", 250),
        ("0.5GB", 5 * 10**8),
        ("0.5KiB", 512),
        ("2TiB", 2 << 40),
        ("1500.5", 1500),
        (1.0, 1),
        ("1", 1),
    ],
    ids=str,
)
def test_sizes_that_are_accepted(text, expected):
    assert parse_size(text, total=1000) == expected


@pytest.mark.parametrize(
    "text", ["", ".", "8 parsecs", "GiB", "e9", "1/2", -1, 0, "0", True, None, [1]], ids=str
)
def test_sizes_that_are_refused(text):
    with pytest.raises(ValueError, match="budget"):
        parse_size(text, total=1000, name="budget")


@pytest.mark.parametrize("size", [float("inf"), float("nan"), "1e999", "9e400GiB"], ids=str)
def test_sizes_that_are_not_finite_are_refused_with_their_value(size):
    with pytest.raises(ValueError, match=f"budget={size!r}") as refused:
        parse_size(size, total=1000, name="budget")
    assert "finite" in str(refused.value)


def test_a_size_beyond_any_memory_is_a_size():
    assert parse_size(10**400) == 10**400


def test_a_fraction_needs_a_device():
    with pytest.raises(ValueError, match="fraction"):
        parse_size(0.5)
    with pytest.raises(ValueError, match=r"^size=0 must be above zero$"):
        parse_size(0)


def test_formatting():
    assert [format_size(n) for n in (0, 1023, 1024, 3 << 20, 3 << 29)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "3.00 MiB",
        "1.50 GiB",
    ]


@pytest.mark.parametrize(
    ("number", "options", "shown"),
    [
        (GIB, {}, "1.00 GiB"),
        (GIB - 1, {}, "1024.00 MiB"),
        (-GIB, {}, "-1.00 GiB"),
        (MIB, {}, "1.00 MiB"),
        (MIB - 1, {}, "1024.00 KiB"),
        (0, {"smallest": "KiB"}, "0.00 KiB"),
        (1023, {"smallest": "KiB", "digits": 0}, "1 KiB"),
        (1023, {"smallest": "bytes"}, "1023 bytes"),
        (GIB // 10, {"gib_from": GIB // 10}, "0.10 GiB"),
        (GIB // 10 - 1, {"gib_from": GIB // 10}, "102.40 MiB"),
        (3 * GIB // 2, {"digits": 1, "small_digits": 0}, "1.5 GiB"),
        (3 * MIB // 2, {"digits": 1, "small_digits": 0}, "2 MiB"),
        (3 * MIB // 2, {"digits": 1}, "1.5 MiB"),
    ],
)
def test_sizes_as_a_page_wants_them(number: int, options: dict[str, Any], shown: str) -> None:
    assert format_size(number, **options) == shown
