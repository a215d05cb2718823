"""docs/operators.md holds the figures of docs/operators.json, and no typed ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("ops_page", ROOT / "tools" / "operators_page.py")
assert _spec is not None and _spec.loader is not None
page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(page)


def record(**changes: float) -> dict[str, Any]:
    row = {"load_count": 1.5, "least_s": 2e-6, "managed_s": 1e-6, "managed_over_least_ratio": 0.5}
    names = (f"{layer}_{way}" for layer in page.LAYERS for way in page.WAYS)
    rows = [{"name": name, **row} for name in names]
    rows[1] |= changes
    return {"torch": "2.13.0", "cpus_count": 2, "date": "2026-01-02T03:04:05Z", "benchmarks": rows}


def test_the_page_is_what_was_measured() -> None:
    written = page.PAGE.read_text("utf-8")
    recorded = json.loads(page.RECORD.read_text("utf-8"))
    assert page.page(written, recorded) == written, "run: python tools/operators_page.py"
    assert [row for row in recorded["benchmarks"] if "error" in row] == []


def test_the_table_of_ways_is_what_was_measured() -> None:
    written = page.PAGE.read_text("utf-8")
    recorded = json.loads(page.RECORD_OF_WAYS.read_text("utf-8"))
    assert page.page_with_ways(written, recorded) == written, "run: python tools/operators_page.py"
    rows = {row["name"]: row for row in recorded["benchmarks"]}
    assert {"linear", "conv2d"} <= {name.partition("_")[0] for name in rows} <= {*page.KINDS}
    for row in rows.values():  # a call is never slower than the ways that know nothing
        assert row["loan_s"] <= min(row["handle_s"], row["lent_s"])


def test_each_layer_has_its_rows_and_what_was_not_measured_a_dash() -> None:
    lines = page.table(record(toolkit_s=3e-6, toolkit_over_least_ratio=1.5)).splitlines()
    assert len(lines) == (2 + 12) + 3 + (2 + 12) + 2
    assert lines[2].endswith("nothing recorded | - | - | 2.0 | - | 1.0 (0.50) |")
    assert lines[3].endswith("frozen: forward | - | - | 2.0 | 3.0 (1.50) | 1.0 (0.50) |")


def test_what_a_compiler_makes_of_them_has_a_table_of_its_own() -> None:
    lines = page.table(record(compiled_managed_s=4e-6, compiled_managed_over_least_ratio=2.0))
    after = lines.splitlines()[17:]
    assert after[2].endswith("nothing recorded | - | - |")
    assert after[3].endswith("frozen: forward | - | 4.0 (2.00) |")


def test_the_machine_and_its_load_are_named() -> None:
    said = page.table(record(load_count=7.25)).splitlines()[-1]
    assert "torch 2.13.0, 2 processors" in said and "1.5 to 7.25" in said and "2026-01-02" in said


def test_a_page_without_a_place_is_refused() -> None:
    with pytest.raises(SystemExit, match="0 places"):
        page.page("no table", record())
