"""The table of first steps in docs/ai-toolkit.md: its places, and what it says holds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("fs_page", ROOT / "tools" / "first_step_page.py")
assert _spec is not None and _spec.loader is not None
page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(page)


def row(first: float, phased: float, steady: float, **changes: Any) -> dict[str, Any]:
    ratios = dict(zip(list(page.COLUMNS.values())[2:], (first, phased, steady, 1.0), strict=True))
    return {"share": 0.5, "balance": 2.0, **ratios, **changes}


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (row(1.1, 1.2, 1.2), "yes"),
        (row(1.101, 1.101, 1.2), "no step can"),
        (row(1.101, 1.1, 1.101), "no: nor is the steady step"),
        (row(1.101, 1.1, 1.1), "no"),
    ],
)
def test_what_holds_in_a_row(measured: dict[str, Any], expected: str) -> None:
    assert page.verdict(measured) == expected


def test_the_table_has_a_row_for_each_share_and_balance_in_order() -> None:
    rows = [row(1.0, 1.0, 1.0, share=1.0, balance=0.5), row(1.25, 1.0, 1.0)]
    lines = page.table(rows).splitlines()
    assert lines[0].startswith("| offloaded | copying / computing | first step / bound |")
    assert lines[2:] == [
        "| 50% | 2 | 1.250 | 1.000 | 1.000 | 1.000 | no |",
        "| 100% | 0.5 | 1.000 | 1.000 | 1.000 | 1.000 | yes |",
    ]


def test_the_page_has_the_table_of_this_format() -> None:
    text = page.PAGE.read_text("utf-8")
    (found,) = page.TABLE.findall(text)
    inside = page.TABLE.search(text)[0].splitlines()[1:-1]
    assert inside[:2] == page.table([]).splitlines() and len(inside) == 2 + 9, found
