"""The tables of docs/lossless.md: their places, and what is in their cells."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("codec_page", ROOT / "tools" / "codec_page.py")
assert _spec is not None and _spec.loader is not None
page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(page)


def test_each_kind_of_weights_has_its_row_and_what_is_not_there_a_dash() -> None:
    rows = [
        {"name": "a, b, portable", "size_ratio": 0.5, "encode_gbps": 1, "decode_gbps": 2.345},
        {"name": "a, b, zstd -1", "size_ratio": 0.75, "encode_gbps": 3, "decode_gbps": 4},
        {"name": "zstd -1", "skipped": "libzstd is not on this machine"},
    ]
    lines = page.table(rows, "a machine").splitlines()
    assert lines[2] == "| a, b | 0.500 | 0.750 |"
    assert "a machine" in lines[4]
    assert lines[-1] == "| a, b | 1.00 / 2.35 | - / - | - / - | 3.00 / 4.00 |"


def test_the_page_has_one_place_for_the_tables_and_they_are_there() -> None:
    text = page.PAGE.read_text("utf-8")
    found = page.TABLE.findall(text)
    assert len(found) == 1
    for weights in ("bf16, Gaussian 0.02", "bf16, Student 3", "int8, amax 20 sigma"):
        assert text.count(f"| {weights} | ") == 2


def test_the_machine_has_a_name() -> None:
    assert page.machine()
