"""The corpus of real out-of-memory formats: its shape, and the split fixed before the parser."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


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
