"""The parser against unforeseen texts: it never raises, never invents, never slows down."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from importing import import_cost

from oracle_offload.diagnose.explain import explain_oom, is_oom
from oracle_offload.diagnose.explain.facts import SIZE, format_size, parse_size
from oracle_offload.diagnose.explain.parse import find, unwrap
from oracle_offload.diagnose.explain.report import OomReport

DATA = Path(__file__).parents[1] / "data" / "oom"
TEXTS = [
    json.loads(line)["text"]
    for name in ("corpus.jsonl", "lookalikes.jsonl")
    for line in (DATA / name).read_text("utf-8").splitlines()
]
MEGABYTE = 1 << 20

# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.50 GiB", 1610612736),
        ("512 bytes", 512),
        ("0 bytes", 0),
        ("448.00 KiB", 458752),
        ("10.58 MB", 11093934),
        ("33554432kb", 34359738368),
        ("48458972Ki", 49621987328),
        ("117. GiB", 125627793408),
        ("4294967296", 4294967296),
        ("17179869184.00 GiB", None),  # UINT64_MAX: "no limit"
        ("17179869176 GiB", None),  # as are the last few GiB below it, which rounding takes
        ("17179869175 GiB", (2**34 - 9) << 30),
        ("1.5.2 GiB", None),
        ("GiB", None),
        ("12 apples", None),
        ("-1 GiB", None),
        ("", None),
    ],
)
def test_a_size_is_read_in_bytes(text: str, expected: int | None) -> None:
    assert parse_size(text) == expected


def test_sizes_for_people_are_in_gib() -> None:
    shown = [format_size(n) for n in (None, 0, 512, 2048, 20 << 20, 200 << 20, 3 << 30)]
    assert shown == [
        "unknown", "0 bytes", "512 bytes", "2.00 KiB", "20.00 MiB", "0.20 GiB", "3.00 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("stated", "damaged", "unknown"),
    [
        ("24.00 GiB", f"1{'0' * 20}24.00 GiB", "total"),  # more digits than any size has
        ("22.50 GiB", f"1{'0' * 20}22.50 GiB", "reserved"),
        ("2.00 GiB", "2.00 GiB7", "requested"),
    ],
)
def test_a_size_that_further_digits_touch_is_not_read(
    stated: str, damaged: str, unknown: str
) -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 24.00 GiB total capacity; 22.00 "
        "GiB already allocated; 0.50 GiB free; 22.50 GiB reserved in total by PyTorch)"
    )
    facts = {"requested": 2.0, "total": 24.0, "allocated": 22.0, "free": 0.5, "reserved": 22.5}
    facts.pop(unknown)
    assert text.count(f" {stated}") == 1
    report = explain_oom(text.replace(f" {stated}", f" {damaged}"))
    found = {name: fact.value / 2**30 for name, fact in report.facts.items() if not fact.derived}
    assert found == facts


@pytest.mark.parametrize(("below", "known"), [(1, {"used", "limit"}), (0, {"used"})])
def test_a_number_of_kilobytes_that_means_no_limit_is_not_read(below: int, known: set[str]) -> None:
    limit = 2**54 - 2**23 - below  # as of bytes: the last 8 GiB below UINT64_MAX are none
    report = explain_oom(f"slurmstepd: error: Job 1 exceeded memory limit (12345 > {limit})")
    assert report.facts.keys() == known


# -- never raises, never invents -------------------------------------------------------------------


def assert_invents_nothing(text: str, report: OomReport) -> None:
    """Every number must be in the text, or be a sum of numbers that are."""
    joined = unwrap(text)
    sizes = {parse_size(found) for found in re.findall(SIZE, joined)}
    sizes |= {int(found) for found in re.findall(r"(?<!\d)\d{1,20}(?!\d)", joined)}
    units = {1, 1024, 1 << 20, 1 << 30}
    for name, fact in report.facts.items():
        assert fact.value >= 0
        if not fact.derived:
            stated = any(fact.value in {s * unit for s in sizes if s is not None} for unit in units)
            assert stated, (name, fact)


def assert_whole(report: OomReport) -> None:
    """Every face of a report can be made."""
    text = report.to_text(all_fixes=True)
    assert max(map(len, text.splitlines())) <= 100
    assert "<script" not in report.to_html().lower()
    assert json.loads(report.to_json())["found"] is report.found
    assert repr(report) and report._repr_html_()


def mutate(rng: random.Random, text: str) -> str:
    """Cut, double, splice or damage a real message."""
    for _ in range(rng.randint(1, 4)):
        i, j = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        other = rng.choice(TEXTS)
        k = rng.randint(0, len(other))
        kind = rng.randint(0, 6)
        if kind == 0:
            text = text[:i] + text[j:]
        elif kind == 1:
            text = text[:j] + text[i:j] + text[j:]
        elif kind == 2:
            text = text[:i] + other[k:] + text[j:]
        elif kind == 3:
            text = text[:i] + rng.choice("\n\r\x00 9.(){}[]<>\x1b[31m\u2028Ⅳ٣") + text[i:]
        elif kind == 4:
            text = text.replace(" ", rng.choice(["\n", "  ", "\t", ""]), rng.randint(1, 6))
        elif kind == 5:
            text = re.sub(r"\d+", lambda m: rng.choice([m[0], m[0] * 9, "0", "٣"]), text, count=5)
        else:
            text = text + "\n" + other
    return text


def try_one(seed: int, noise: str) -> None:
    rng = random.Random(seed)
    text = mutate(rng, rng.choice(TEXTS)) if rng.random() < 0.85 else noise
    if rng.random() < 0.2:
        text = noise + text
    report = explain_oom(text)
    assert_invents_nothing(text, report)
    for finding in find(text):  # the parser itself, not only the net below it
        assert finding.line >= 0
    if rng.random() < 0.05:
        assert_whole(report)


@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), noise=st.text(max_size=200))
def test_damaged_messages_never_raise_and_never_yield_a_number_of_their_own(
    seed: int, noise: str
) -> None:
    try_one(seed, noise)


def test_a_number_that_reaches_out_of_what_is_read_is_none() -> None:
    """The last digits that were looked at were taken for the whole."""
    limits = set()
    for length in range(100, 180):
        report = explain_oom(
            f"PBS: job killed: mem 9kb{' ' * length}, mem 9kb exceeded limit 1234567kb"
        )
        limits |= {fact.value for name, fact in report.facts.items() if name == "limit"}
    assert limits == {1234567 << 10}


@pytest.mark.slow
@settings(max_examples=100_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**48), noise=st.text(max_size=200))
def test_a_hundred_thousand_damaged_messages(seed: int, noise: str) -> None:
    try_one(seed, noise)


def test_odd_arguments_give_a_report_and_not_an_error() -> None:
    class Broken(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no text for you")

    loop = RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB.")
    loop.__cause__ = loop
    odd: list[object] = [None, "", b"\xff\xfe MemoryError", Broken(), loop, 7, object()]
    for value in odd:
        report = explain_oom(value)  # type: ignore[arg-type]
        assert isinstance(report, OomReport)
        assert isinstance(is_oom(value), bool)  # type: ignore[arg-type]
    assert not explain_oom("x", history="/nonexistent/history.jsonl").found


# -- speed -----------------------------------------------------------------------------------------

LOG_LINE = "step 118 | loss 1.2031 | lr 1.0e-04 | mem 21.3GiB | tok/s 4021\n"
HOSTILE = {
    "a plain log": LOG_LINE,
    "the phrase, over and over": "out of memory. ",
    "a message, over and over": TEXTS[60] + "\n",
    "half a message": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ",
    "one endless word": "a",
    "one endless number": "1",
    "one endless line of kills": "Killed ",
    "kills": "Killed\n",
    "exit codes": "exit code 137\n",
    "colours": "\x1b[31",
    "blank lines": "\n",
    "everything": "\n".join(TEXTS) + "\n",
    "line numbers": "line 1: ",
    "open brackets": "(" * 50 + "GPU 0; ",
    "memory errors": "MemoryError ",
}


def processor_time(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


@pytest.mark.parametrize("name", HOSTILE)
def test_a_megabyte_of_log_costs_hardly_more_than_to_find_its_words(name: str) -> None:
    """Both are measured in turn: a slow or busy machine is slow at both."""
    plain, text = (
        (line * (MEGABYTE // len(line) + 1))[:MEGABYTE] for line in (LOG_LINE, HOSTILE[name])
    )
    words = best = math.inf
    for _ in range(40):  # of each the least
        words = min(words, processor_time(lambda: re.findall(r"\w+", plain)))
        best = min(best, processor_time(lambda: explain_oom(text)))
        if best < 1.25 * words:
            break
    assert best < 1.25 * words, f"{best * 1000:.1f} ms, the words take {words * 1000:.1f} ms"


def test_the_cost_grows_in_proportion_to_the_text() -> None:
    def cost(size: int) -> float:
        text = (LOG_LINE * (size // len(LOG_LINE) + 1))[:size] + TEXTS[60]
        return min(processor_time(lambda: explain_oom(text)) for _ in range(5))

    assert cost(8 * MEGABYTE) < 3 * 8 * max(cost(MEGABYTE), 0.002)


# -- import ----------------------------------------------------------------------------------------


def test_importing_explain_costs_little_and_loads_nothing_of_others() -> None:
    cost = import_cost("oracle_offload.diagnose.explain")
    assert cost.foreign == set()  # neither torch nor numpy
    assert not {"json", "argparse", "traceback"} & cost.modules
    assert cost.events < 20_000 and len(cost.modules) < 80, cost


# -- is_oom ----------------------------------------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """Replaces torch.OutOfMemoryError where torch is absent."""


def test_is_oom_goes_by_class_by_text_and_by_chain() -> None:
    assert is_oom(OutOfMemoryError("anything"))
    assert is_oom(MemoryError())
    assert is_oom(RuntimeError("CUDA error: out of memory"))
    assert is_oom(RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)."))
    chained = RuntimeError("step failed")
    chained.__cause__ = OutOfMemoryError("inner")
    assert is_oom(chained)
    assert is_oom(ExceptionGroup("ranks", [ValueError(), MemoryError()]))


def test_is_oom_is_not_fooled() -> None:
    assert not is_oom(None)
    assert not is_oom(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_oom(ValueError("memory_format must be contiguous"))
    # a kill is a suspicion: explained, but not called an out-of-memory error
    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    assert not is_oom(killed)
    assert explain_oom(killed).suspected


def test_an_exception_is_explained_with_the_frames_it_passed() -> None:
    def evaluate() -> None:
        raise OutOfMemoryError("CUDA error: out of memory")

    try:
        evaluate()
    except OutOfMemoryError as error:
        report = explain_oom(error, env={})
    assert (report.backend, report.cause.name) == ("cuda", "evaluation")


def test_the_last_message_of_the_strongest_kind_is_explained() -> None:
    first, second = TEXTS[3], TEXTS[40]
    noise = "CUDA error: out of memory\n"
    assert explain_oom(first + "\n" + second).template == explain_oom(second).template
    report = explain_oom(second + "\n" + noise)  # without figures, so it does not win
    assert report.facts.keys() == explain_oom(second).facts.keys()
    assert len(report.findings) == 2
