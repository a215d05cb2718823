"""The benchmark of training all weights: cells of it, against their bounds, and its page."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
full_training = pytest.importorskip("full_training")
LLAMA, FLUX = full_training.CASES[0]._replace(rounds=3), full_training.CASES[3]


@pytest.mark.parametrize(("there", "home", "share", "seconds"), [
    (6.0, 2.0, 1.0, 6.0), (2.0, 6.0, 1.0, 6.0), (6.0, 2.0, 0.5, 8.0), (6.0, 2.0, 0.8, 6.5),
    (6.0, 2.0, 0.4, 8.0), (5.0, 0.0, 0.5, 5.0),
])  # fmt: skip
def test_the_link_takes_what_it_takes(there, home, share, seconds):
    """Both at once, each at its share, then the rest alone; where both are slower, in turn."""
    assert full_training.link_s(there, home, 1.0, share) == pytest.approx(seconds)


def test_the_least_bytes_are_those_of_the_page():
    m, s, c = 16.0, 32.0, 6.0
    there, home = full_training.least(m, s, c, 1).sums()
    assert (there, home) == (3 * (m - c) + m + s, m + s + (m - c))
    there, home = full_training.least(m, s, c, 34).sums()
    assert (there, home) == (69 * (m - c) + 34 * m + s, m + s + 33 * m + (m - c))
    assert full_training.least(m, s, 20.0, 1).sums() == (m + s, m + s)
    assert full_training.least(m, s, 0.0, 1).sums() == (
        full_training.least(m, s, 0.0, 1, is_sent=True).sums()
    )
    there, home = full_training.least(m, s, c, 2, is_sent=True).sums()
    assert (there, home) == (5 * (m - c) + 2 * m + s, m + s + 2 * m)
    assert full_training.least_early(m, s, c).sums() == (2 * (m - c) + s, m + s)


def test_what_goes_home_is_made_first():
    """Two units: the kernels until a gradient is made, and the link for it and those after it."""
    visits = [full_training.Visit(unit, full_training.BACKWARD, 2.0) for unit in (1, 0)]
    trace = types.SimpleNamespace(train=visits, unit_bytes=[6.0, 1.0])
    made_s = full_training.made_s
    assert made_s(trace, 1.0, 0.0, 1.0, 1.0) == 4.0 + 6.0
    assert made_s(trace, 0.1, 0.0, 1.0, 1.0) == 4.0 + 0.6
    trace.unit_bytes = [1.0, 6.0]
    assert made_s(trace, 1.0, 0.0, 1.0, 1.0) == 2.0 + 7.0
    assert made_s(trace, 1.0, 2.0, 1.0, 1.0, early=4.0) == 2.0 + 10.0


@pytest.mark.parametrize(("number", "card"), [(2, "4090"), (3, "5090")], ids=["FLUX.1", "Qwen"])
def test_a_step_in_backward_is_near_its_bound(number, card):
    """As near as where nothing has to wait for single batches: gradients come in bursts."""
    case = full_training.EARLY[number]
    row = full_training.run(case, full_training.ON[card], 1.0, steps=2)
    assert row["host_waits"] == 1, "one, where the backward ends"
    assert row["kernels_s"] < row["bound_s"] < row["step_s"]
    assert 1.0 <= row["time_ratio"] <= full_training.TIME_GOAL
    assert 1.0 <= row["bytes_ratio"] <= full_training.BYTES_GOAL
    weights, states = row["weights_bytes"], full_training.state_bytes(case, row["weights_bytes"])
    assert row["host_bytes"] == pytest.approx(weights + states, rel=0.01), "no gradient is there"


def test_a_step_is_near_the_bound_of_its_arena():
    run, on = full_training.run, full_training.ON
    rows = [run(FLUX, on["4090"], share, steps=2) for share in (1.0, 0.5)]
    rows.append(run(LLAMA, on["h100"], 0.5, steps=2))
    for row in rows:
        assert row["kernels_s"] < row["bound_s"] < row["step_s"]
        assert 1.0 <= row["time_sent_ratio"] <= full_training.TIME_GOAL
        assert 1.0 <= row["bytes_sent_ratio"] <= full_training.BYTES_GOAL
        rounds, weights = row["case"].rounds, row["weights_bytes"]
        assert row["host_waits"] == rounds + 1, "each backward once, and the step"
        home = weights * (rounds + 1) + full_training.state_bytes(row["case"], weights)
        assert row["d2h_bytes"] == pytest.approx(home, rel=1e-3)
    assert rows[1]["step_s"] > 1.2 * rows[0]["step_s"], "the link gives each direction all it has"


def test_the_page_has_the_cells_that_are_run():
    page = full_training.PAGE.read_text(encoding="utf-8")
    for begin, cases in full_training.PARTS:
        printed = page.partition(begin)[2].partition(full_training.END)[0]
        rows = [line for line in printed.splitlines() if line.startswith("|")][2:]
        assert len(rows) == len(cases) * len(full_training.ON)
        for number, case in enumerate(cases):
            first = rows[number * len(full_training.ON)]
            assert first.startswith(f"| {full_training.name_of(case)} |")
    assert f"row of {full_training.RIVAL_PART:,} tokens/s" in page
