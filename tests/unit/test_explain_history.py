"""Causes that only a history of steps shows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from test_explain_command import FULL

from oracle_offload.diagnose.explain import explain_oom, history
from oracle_offload.diagnose.explain.history import read_history, signs
from oracle_offload.observe.recording import SCHEMA

GiB = 1 << 30


def steps(**series: list[Any]) -> list[dict[str, Any]]:
    """Turn columns into records."""
    count = len(next(iter(series.values())))
    return [{name: values[i] for name, values in series.items()} for i in range(count)]


def cause(records: list[dict[str, Any]]) -> str:
    return explain_oom(FULL, history=records).cause.name


def test_truth_values_are_no_numbers() -> None:
    """As a flag of the same name in a user's records."""
    memory = [(4 + i) * GiB for i in range(40)]
    plain = steps(allocated_bytes=memory)
    flagged = [{"allocated_bytes": True}] * 5 + plain
    assert signs(plain)[0].nbytes == signs(flagged)[0].nbytes


@pytest.mark.parametrize("seed", range(20))
def test_noise_around_a_plateau_is_no_leak(seed: int) -> None:
    rng = random.Random(seed)
    held = [20 * GiB + rng.randint(-GiB, GiB) for _ in range(60)]
    assert cause(steps(step=list(range(60)), allocated_bytes=held)) == "too_big", f"seed {seed}"


@pytest.mark.parametrize(("last", "found"), [(15, "leak"), (16, "too_big")])
def test_growth_is_a_leak_where_a_line_explains_four_fifths_of_it(last: int, found: str) -> None:
    """With 15 at the end it explains 0.8 exactly."""
    held = [14 * GiB + i * GiB // 4 for i in (0, 0, 0, 0, 1, 2, 2, 4, 4, 12, last)]
    assert cause(steps(step=list(range(len(held))), allocated_bytes=held)) == found


def test_the_history_does_not_overrule_what_the_message_proves() -> None:
    capped = FULL.replace("of which 100.00 MiB is free. ", "of which 14.00 GiB is free. ").replace(
        "Of the allocated", "9.00 GiB allowed; Of the allocated"
    )
    report = explain_oom(capped, history=[{"step": 0, "phase": "backward"}])
    assert [c.name for c in report.causes] == ["device_cap", "first_backward"]


def test_a_file_with_half_a_line_and_odd_values_is_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = [json.dumps({"step": i, "allocated_bytes": i << 30}) for i in range(12)]
    odd = [
        '{"step": true, "allocated_bytes": "many"}',
        "[1, 2]",
        "null",
        '{"allocated_bytes": 1e999}',
    ]
    path.write_text("\n".join([*lines, *odd, '{"step": 12, "alloc']), encoding="utf-8")
    records = read_history(path)
    assert len(records) == 14
    assert signs(records)[0].cause == "leak"


def test_of_a_long_history_the_end_is_kept_and_of_a_recording_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_RECORDS", 3)
    rows: list[Any] = [{"step": number} for number in range(5)]
    assert read_history(rows) == read_history(iter([*rows, "no mapping"][1:5])) == rows[2:]
    recording = [{"schema": SCHEMA}, *rows]
    assert read_history(recording) == recording and read_history([]) == []
    for begin in ({"schema": "another/1"}, {"step": 0}):
        assert read_history([begin, *rows]) == rows[2:]
    for file, kept in (("a", recording), ("b", rows[2:])):
        lines = recording if file == "a" else rows
        (tmp_path / file).write_text("\n".join(map(json.dumps, lines)))
        assert read_history(tmp_path / file) == read_history(str(tmp_path / file)) == kept


def test_signs_of_nothing_are_none_and_a_number_ends_below_2_to_the_63() -> None:
    assert signs([]) == [] and signs([{}]) == []
    lengths = [{"length": value} for value in (1, 1, 1, (1 << 63) - 1)]
    assert [sign.cause for sign in signs(lengths)] == ["longest_batch"]
    assert signs([*lengths[:3], {"length": 1 << 63}]) == []
    later = [{"step": step, "phase": phase} for step, phase in ((0, "forward"), (2, "backward"))]
    assert signs(later) == []


def test_signs_never_raise_on_odd_records() -> None:
    rng = random.Random(5)
    values: list[Any] = [None, -1, 2**70, float("nan"), float("inf"), "x", [], True, 3.5, 7 << 30]
    for _ in range(500):
        keys = ["step", "phase", "allocated_bytes", "peak_bytes", "length"]
        records = [{key: rng.choice(values) for key in keys} for _ in range(rng.randint(0, 30))]
        assert isinstance(signs(records), list)
