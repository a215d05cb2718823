"""What the parser quotes, and which repeated messages it tells once."""

from __future__ import annotations

import pytest

from oracle_offload.diagnose.explain import explain_oom
from oracle_offload.diagnose.explain.parse import (
    FIRST_HITS,
    LAST_HITS,
    LINE_REACH,
    _hits,
    find,
    quote,
)

CUDA_ERROR = "RuntimeError: CUDA error: out of memory\n"


def names(text: str) -> list[str]:
    return [finding.template.name for finding in find(text)]


def test_a_long_line_is_cut_on_both_sides_of_what_is_quoted() -> None:
    line = "a" * 300 + "NUMBER" + "b" * 300
    text = f"before\n{line}\nafter\n"
    start = len("before\n") + 300
    assert quote(text, start, 6, 20, 30) == "…" + "a" * 20 + "NUMBER" + "b" * 30 + "…"
    assert quote(text, start, 6, 300, 300) == line
    assert quote(text, start, 6, 299, 300) == "…" + line[1:]
    assert quote(text, start, 6, 300, 299) == line[:-1] + "…"


def test_a_quote_ends_with_its_line_or_with_the_text() -> None:
    assert quote("one\ntwo three\nfour", 4, 3) == "two three"
    assert quote("one\ntwo three", 8, 5) == "two three"
    assert quote("one\x1b[1m two\x07\n", 0, 3) == "one two"


def test_an_endless_line_is_looked_at_near_the_number_only() -> None:
    text = "x" * 5000 + "NUMBER" + "y" * 5000
    found = quote(text, 5000, 6, 2000, 2000)
    # What is further away than a line may reach is not part of it.
    assert found == "x" * LINE_REACH + "NUMBER" + "y" * LINE_REACH


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("container exited with exit code 137\n", ["exit-137"]),
        ('"State": {"OOMKilled": false, "ExitCode": 137}\n', []),
        ("OOMKilled:false Exit Code: 137\n", []),
        ('"OOMKilled": true, "ExitCode": 137\n', ["exit-137"]),
        # What another container says, far away, is not about this one.
        ('"OOMKilled": false' + " " * 500 + "exit code 137\n", ["exit-137"]),
        ("exit code 137\n" + " " * 500 + '"OOMKilled": false', ["exit-137"]),
        ("exit code 137\n" + " " * 300 + '"OOMKilled": false', []),
    ],
)
def test_an_exit_code_that_the_container_says_was_no_kill_is_none(
    text: str, expected: list[str]
) -> None:
    assert [name for name in names(text) if name == "exit-137"] == expected


def test_a_message_without_figures_that_follows_itself_closely_is_told_once() -> None:
    assert names(CUDA_ERROR) == ["cuda-runtime-error"]
    assert names(2 * CUDA_ERROR) == ["cuda-runtime-error"]
    apart = CUDA_ERROR + "step\n" * 100 + CUDA_ERROR
    assert names(apart) == 2 * ["cuda-runtime-error"]


def test_a_message_with_figures_is_told_each_time() -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB (GPU 0; 24.00 GiB "
        "total capacity; 22.00 GiB already allocated; 0.50 GiB free; 22.50 GiB reserved in total "
        "by PyTorch)\n"
    )
    assert len(set(names(text))) == 1 and names(2 * text) == 2 * names(text)


def test_the_name_of_the_class_is_told_only_where_its_message_is_unknown() -> None:
    unknown = "torch.OutOfMemoryError: no more room for this\n"
    assert names(unknown) == ["out-of-memory-class"]
    assert names(unknown + "step\n" * 100 + CUDA_ERROR) == [
        "out-of-memory-class",
        "cuda-runtime-error",
    ]
    assert names("torch.OutOfMemoryError: CUDA error: out of memory\n") == ["cuda-runtime-error"]


def test_a_card_of_no_bytes_is_drawn_all_the_same() -> None:
    report = explain_oom(
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 0 bytes total capacity; 0 bytes "
        "already allocated; 0 bytes free; 0 bytes reserved in total by PyTorch)"
    )
    assert report.found and report.bar() and "[" in report.to_text()


@pytest.mark.parametrize("more", [-1, 0, 1, LAST_HITS, LAST_HITS + 5])
def test_of_many_places_the_first_and_the_last_are_looked_at(more: int) -> None:
    places = [7 + 10 * i for i in range(FIRST_HITS + more)]
    text = "." * 7 + "anchor...." * len(places)
    assert _hits(text, "anchor") == places[:FIRST_HITS] + places[FIRST_HITS:][-LAST_HITS:]
    assert _hits("nothing", "anchor") == []
