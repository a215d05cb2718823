"""The benchmark of activations that leave: a cell of it, against its bound."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
activations = pytest.importorskip("activations")


@pytest.mark.parametrize("mode", activations.MODES)
def test_a_step_is_near_the_bound_of_a_duplex_link(mode):
    row = activations.run("flux1", 512, activations.CARDS["4090"], mode)
    assert row["kernels_s"] < row["bound_s"] <= row["step_s"] <= activations.GOAL * row["bound_s"]
    assert (row["host_bytes"] > 0) == (mode != "checkpointing")


def test_what_leaves_is_held_no_more():
    card = activations.CARDS["4090"]
    kept, both = (activations.run("flux1", 512, card, mode) for mode in ("checkpointing", "both"))
    assert both["peak_bytes"] < 0.35 * kept["peak_bytes"]


def test_the_page_has_the_cells_that_are_run():
    page = (ROOT / "docs" / "activations.md").read_text(encoding="utf-8")
    for model, size, card in activations.CELLS:
        name = activations.NAMES[model].format(size)
        assert f"| {name}, {'H200' if card == 'h200' else 'RTX ' + card} |" in page
