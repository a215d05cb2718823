"""The corpus of real out-of-memory formats: its shape, and the split fixed before the parser."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from oracle_offload.diagnose.explain import explain_oom
from oracle_offload.diagnose.explain.parse import find
from oracle_offload.diagnose.explain.templates import TEMPLATES

DATA = Path(__file__).parents[1] / "data" / "oom"
SPLIT_SEED = 20261121  # chosen before the parser existed; the second half is only read here
FACTS = {
    "requested", "total", "free", "cap", "allocated", "private_pools", "unallocated", "reserved",
    "this_process", "other_processes", "other", "limit", "used",
}  # fmt: skip


def load(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


def halves() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (tuning half, held-out half): a shuffle of the sorted ids by the committed seed."""
    cases = sorted(load("corpus.jsonl"), key=lambda case: str(case["id"]))
    random.Random(SPLIT_SEED).shuffle(cases)
    middle = len(cases) // 2
    return cases[:middle], cases[middle:]


def test_the_corpus_is_large_unique_and_says_where_each_format_was_seen() -> None:
    cases = load("corpus.jsonl")
    assert len(cases) >= 120
    assert len({case["id"] for case in cases}) == len(cases)
    assert len({case["text"] for case in cases}) == len(cases)
    for case in cases:
        assert case["version"] and case["source"].startswith("https://"), case["id"]
        assert set(case["facts"]) <= FACTS, case["id"]
        assert all(type(value) is int and value >= 0 for value in case["facts"].values())


def test_the_lookalikes_are_many_and_unique() -> None:
    cases = load("lookalikes.jsonl")
    assert len(cases) >= 60
    assert len({case["text"] for case in cases}) == len(cases)


def test_the_split_is_even_and_does_not_overlap() -> None:
    tuning, held_out = halves()
    assert abs(len(tuning) - len(held_out)) <= 1
    assert not {case["id"] for case in tuning} & {case["id"] for case in held_out}


def misread(case: dict[str, Any]) -> list[str]:
    """Return what the parser gets wrong about one case: found, backend, device, facts, cause."""
    report = explain_oom(case["text"])
    if not report.found:
        return ["not found"]
    facts = {name: fact.value for name, fact in report.facts.items()}
    wrong = []
    for what, got, expected in (
        ("backend", report.backend, case["backend"]),
        ("device", report.device, case["device"]),
        ("facts", facts, case["facts"]),
        ("cause", report.cause.name, case["cause"]),
    ):
        if got != expected:
            wrong.append(f"{what}: {got!r} instead of {expected!r}")
    return wrong


@pytest.mark.parametrize("case", halves()[0], ids=lambda case: case["id"])
def test_every_message_of_the_tuning_half_is_read_right(case: dict[str, Any]) -> None:
    assert misread(case) == []


def test_the_held_out_half_is_read_right_at_95_percent(capsys: pytest.CaptureFixture[str]) -> None:
    held_out = halves()[1]
    missed = {case["id"]: misread(case) for case in held_out}
    missed = {name: wrong for name, wrong in missed.items() if wrong}
    with capsys.disabled():
        print(f"\nheld-out half: {len(held_out) - len(missed)} of {len(held_out)} right")
        for name, wrong in missed.items():
            print(f"  missed {name}: {'; '.join(wrong)}")
    assert len(missed) <= 0.05 * len(held_out)


@pytest.mark.parametrize("case", load("lookalikes.jsonl"), ids=lambda case: case["id"])
def test_a_lookalike_is_no_false_alarm(case: dict[str, Any]) -> None:
    report = explain_oom(case["text"])
    assert not report.found, report.template


# Formats read in source code or provoked in test_explain_real.py, absent from the corpus.
UNMET = json.loads((DATA / "unmet.json").read_text("utf-8"))


@pytest.mark.parametrize("name", UNMET)
def test_a_template_without_a_public_log_still_matches_its_format(name: str) -> None:
    assert [finding.template.name for finding in find(UNMET[name])] == [name]


def test_each_template_is_met_by_the_corpus_or_named_here() -> None:
    met = {finding.template.name for case in load("corpus.jsonl") for finding in find(case["text"])}
    assert {template.name for template in TEMPLATES} - met == set(UNMET)
