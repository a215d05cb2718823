"""What is said at the edge of every rule, byte for byte, and of each recorded message as a whole.

The causes are written here, the words, fixes and gains in tests/data/oom/golden/told.json. After a
deliberate change rewrite them with ORACLE_OFFLOAD_UPDATE_GOLDEN=1, and read the difference.
"""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import pytest

from oracle_offload.diagnose.explain import OomReport, explain_oom, is_oom, pipeline
from oracle_offload.diagnose.explain.cause import rank
from oracle_offload.diagnose.explain.history import Sign, signs
from oracle_offload.diagnose.explain.parse import find

DATA = Path(__file__).parents[1] / "data" / "oom"
TOLD = DATA / "golden" / "told.json"
CASES = {
    case["id"]: case["text"]
    for case in map(json.loads, (DATA / "corpus.jsonl").read_text("utf-8").splitlines())
}
UPDATE = os.environ.get("ORACLE_OFFLOAD_UPDATE_GOLDEN") == "1"
MiB, GiB = 1 << 20, 1 << 30


def told(text: str, **kwargs: Any) -> dict[str, Any]:
    """Return what a report tells, without what follows from it."""
    report = explain_oom(text, **kwargs)
    return {
        "where": report.where,
        "verdict": report.verdict,
        "causes": [list(cause) for cause in report.causes],
        "shortfall": report.shortfall,
        "facts": {
            name: [fact.value, fact.line, fact.derived] for name, fact in report.facts.items()
        },
        "fixes": [fix.key for fix in report.fixes],
        "gains": {fix.key: fix.gain_bytes for fix in report.fixes if fix.gain_bytes is not None},
        "processes": [list(process) for process in report.to_dict()["processes"]],
        "messages": [[finding.template.name, finding.line] for finding in report.findings],
    }


def assert_told(case: str, found: dict[str, Any]) -> None:
    """What was said is what the golden file holds for the case."""
    golden = json.loads(TOLD.read_text(encoding="utf-8")) if TOLD.exists() else {}
    if UPDATE:
        golden[case] = found
        lines = (
            f"{json.dumps(key)}: {json.dumps(golden[key], ensure_ascii=False)}"
            for key in sorted(golden)
        )
        TOLD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    assert found == golden[case]


@pytest.mark.parametrize("name", CASES)
def test_what_is_told_of_each_recorded_message(name: str) -> None:
    assert_told(name, told(f"a line\n{CASES[name]}\n"))


# -- a card, to the byte --------------------------------------------------------------------------


def card(**figures: int | str) -> str:
    """Return a message of PyTorch 2.13 with figures in bytes; `None` leaves one out."""
    known: dict[str, Any] = {
        "asked": GiB, "total": 24 * GiB, "free": GiB // 4, "others": "", "cap": "",
        "mine": 23 * GiB, "allocated": 22 * GiB, "unused": 512 * MiB, **figures,
    }  # fmt: skip
    if known["cap"]:
        known["cap"] = f"{known['cap']} bytes allowed; "
    if known["others"]:
        known["others"] = f"Process 9 has {known['others']} bytes memory in use. "
    return (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} bytes. GPU 0 has a "
        "total capacity of {total} bytes of which {free} bytes is free. {others}Including "
        "non-PyTorch memory, this process has {mine} bytes memory in use. {cap}Of the allocated "
        "memory {allocated} bytes is allocated by PyTorch, and {unused} bytes is reserved by "
        "PyTorch but unallocated."
    ).format(**known)


ROOM = GiB + GiB // 20 + 64 * MiB  # what the driver may take for a GiB that is asked for
SMALL = 20 * MiB
CARDS: list[tuple[str, dict[str, int], str, str]] = [
    ("full", {}, "too_big", "high"),
    ("as large as the card", {"asked": 24 * GiB}, "too_big", "high"),
    ("larger than the card", {"asked": 24 * GiB + 1}, "too_big", "high"),
    ("half the card", {"asked": 12 * GiB}, "too_big", "high"),
    ("more than half the card", {"asked": 12 * GiB + 1}, "too_big", "high"),
    ("a petabyte", {"asked": 1 << 50}, "bad_size", "high"),
    ("less than a petabyte", {"asked": (1 << 50) - 1}, "too_big", "high"),
    ("capped, what is asked for is free", {"cap": 8 * GiB, "free": GiB}, "device_cap", "high"),
    ("capped, less is free", {"cap": 8 * GiB, "free": GiB - 1}, "too_big", "high"),
    ("capped at the whole card", {"cap": 24 * GiB, "free": GiB}, "too_big", "high"),
    ("capped a byte below the card", {"cap": 24 * GiB - 1, "free": GiB}, "device_cap", "high"),
    ("as much held as there is", {"allocated": 23 * GiB, "unused": GiB - 1}, "too_big", "high"),
    ("more held than there is",
     {"allocated": 24 * GiB, "unused": 1, "free": 0}, "spilled", "high"),
    ("free but refused", {"free": ROOM}, "driver_refusal", "medium"),
    ("hardly free", {"free": ROOM - 1}, "too_big", "high"),
    ("what is asked for is unused, a tenth of all",
     {"asked": 2 * GiB, "unused": 2 * GiB, "allocated": 18 * GiB}, "fragmentation", "high"),
    ("what is asked for is unused, less than a tenth",
     {"asked": 2 * GiB, "unused": 2 * GiB, "allocated": 18 * GiB + 1}, "fragmentation", "medium"),
    ("less is unused than asked for",
     {"asked": 2 * GiB, "unused": 2 * GiB - 1, "allocated": 18 * GiB}, "too_big", "high"),
    ("large, three hundredths unused",
     {"asked": 3 * MiB * 100, "unused": 3 * MiB * 100, "allocated": 97 * MiB * 100},
     "fragmentation", "medium"),
    ("large, less than three hundredths unused",
     {"asked": 3 * MiB * 100, "unused": 3 * MiB * 100, "allocated": 97 * MiB * 100 + 1},
     "too_big", "high"),
    ("in a shared segment, a tenth unused",
     {"asked": SMALL, "unused": GiB, "allocated": 9 * GiB, "free": 0}, "fragmentation", "high"),
    ("in a shared segment, less than a tenth unused",
     {"asked": SMALL, "unused": GiB, "allocated": 9 * GiB + 1, "free": 0}, "too_big", "high"),
    ("just above a shared segment, less than a tenth unused",
     {"asked": SMALL + 1, "unused": GiB, "allocated": 9 * GiB + 1, "free": 0},
     "fragmentation", "medium"),
    ("others hold a quarter", {"others": 6 * GiB}, "other_process", "high"),
    ("others hold less than a quarter", {"others": 6 * GiB - 1}, "other_process", "medium"),
    ("others hold 1 GiB", {"others": GiB}, "other_process", "medium"),
    ("others hold less than 1 GiB", {"others": GiB - 1, "asked": GiB // 2}, "too_big", "high"),
    ("others and what is free make up for it",
     {"others": 2 * GiB, "asked": 2 * GiB + GiB // 4}, "other_process", "medium"),
    ("others and what is free do not",
     {"others": 2 * GiB, "asked": 2 * GiB + GiB // 4 + 1}, "too_big", "high"),
    ("others, and it is not known what is free",
     {"others": 6 * GiB, "free": (1 << 64) - 1}, "other_process", "high"),
    ("half of it outside, where every process is listed",
     {"mine": 12 * GiB, "allocated": 11 * GiB}, "too_big", "high"),
    ("all of the card is held",
     {"asked": 2 * GiB, "allocated": 23 * GiB, "unused": GiB}, "too_big", "high"),
    ("nothing is held", {"allocated": 0, "unused": 0, "asked": 0, "free": 0}, "too_big", "high"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "figures", "cause", "confidence"), CARDS, ids=[row[0] for row in CARDS]
)
def test_the_rules_of_a_card_to_the_byte(
    case: str, figures: dict[str, int], cause: str, confidence: str
) -> None:
    text = card(**figures)
    assert explain_oom(text).cause[:2] == (cause, confidence), explain_oom(text).cause
    assert_told(f"card: {case}", told(text))


POOLS: list[tuple[dict[str, int], str, str]] = [
    ({}, "unknown", "low"),
    ({"Requested": GiB}, "unknown", "low"),
    ({"Device limit": 24 * GiB}, "unknown", "low"),
    ({"Requested": GiB, "Device limit": 24 * GiB}, "too_big", "medium"),
    ({"Requested": 25 * GiB, "Device limit": 24 * GiB}, "too_big", "high"),
    ({"Requested": GiB, "Device limit": 24 * GiB, "memory fraction)": 8 * GiB},
     "too_big", "medium"),
    ({"Requested": GiB, "Device limit": 24 * GiB, "memory fraction)": 8 * GiB,
      "Free (according to CUDA)": GiB}, "device_cap", "high"),
    ({"Requested": GiB, "Device limit": 24 * GiB, "Free (according to CUDA)": GiB // 2},
     "too_big", "medium"),
    ({"Requested": GiB, "Device limit": 24 * GiB, "Currently allocated": 22 * GiB},
     "too_big", "high"),
    ({"Requested": GiB, "Device limit": 24 * GiB, "Currently allocated": 24 * GiB + 1},
     "spilled", "high"),
]  # fmt: skip


@pytest.mark.parametrize(("figures", "cause", "confidence"), POOLS)
def test_a_pool_that_states_some_of_its_figures(
    figures: dict[str, int], cause: str, confidence: str
) -> None:
    lines = "".join(f"{name} : {value} bytes\n" for name, value in figures.items())
    text = f"Allocation on device 0 would exceed allowed memory. (out of memory)\n{lines}"
    assert explain_oom(text).cause[:2] == (cause, confidence), explain_oom(text).cause
    assert_told(f"pool: {figures}", told(text))


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ("MPS allocated: 6.00 GB, other allocations: 1.00 GB, max allowed: 9.00 GB",
         ("high", "7.00 GiB of the 9.00 GiB that Metal recommends were in use")),
        ("MPS allocated: 6.00 GB, max allowed: 9.00 GB",
         ("high", "6.00 GiB of the 9.00 GiB that Metal recommends were in use")),
        ("MPS allocated: 6.00 GB", ("medium", "Metal refused the allocation")),
        ("max allowed: 9.00 GB", ("medium", "Metal refused the allocation")),
    ],
)  # fmt: skip
def test_what_metal_says_it_holds(figures: str, said: tuple[str, str]) -> None:
    report = explain_oom(f"RuntimeError: MPS backend out of memory ({figures}).")
    assert report.cause == ("too_big", *said)


@pytest.mark.parametrize(
    ("text", "causes"),
    [
        (card(asked=GiB, unused=3 * GiB, allocated=20 * GiB), ["fragmentation", "leak"]),
        (card(), ["leak", "too_big", "fragmentation"]),
        ("MemoryError: Unable to allocate 2.00 GiB for an array", ["host_memory", "leak",
                                                                   "fragmentation"]),
    ],
)  # fmt: skip
def test_what_a_history_shows_comes_before_what_only_says_that_it_is_full(
    text: str, causes: list[str]
) -> None:
    (finding,) = find(text)
    history = [Sign("leak", "high", "it grew"), Sign("fragmentation", "high", "in pieces")]
    found = rank(finding, text, history)
    assert [cause.name for cause in found] == causes


# PyTorch before 2.1 names neither other processes nor this one.
UNNAMED = [
    ("a quarter", 24 * GiB, 17 * GiB, GiB, 2 * GiB, "other_process"),
    ("less than a quarter", 24 * GiB, 17 * GiB + 1, GiB, 2 * GiB, "too_big"),
    ("2 GiB of 4", 4 * GiB, GiB, GiB, GiB + 1, "other_process"),
    ("less than 2 GiB of 4", 4 * GiB, GiB + 1, GiB, GiB + 1, "too_big"),
    ("just enough", 24 * GiB, 13 * GiB, GiB, 11 * GiB, "other_process"),
    ("still too little", 24 * GiB, 13 * GiB, GiB, 11 * GiB + 1, "too_big"),
]


@pytest.mark.parametrize(
    ("case", "total", "held", "free", "asked", "cause"), UNNAMED, ids=[row[0] for row in UNNAMED]
)
def test_memory_that_nobody_is_named_for_is_somebody_elses_where_it_is_much(
    case: str, total: int, held: int, free: int, asked: int, cause: str
) -> None:
    text = (
        f"RuntimeError: CUDA out of memory. Tried to allocate {asked} bytes (GPU 0; {total} bytes "
        f"total capacity; {held} bytes already allocated; {free} bytes free; {held} bytes reserved "
        "in total by PyTorch)"
    )
    assert explain_oom(text).cause.name == cause, explain_oom(text).cause
    assert_told(f"unnamed: {case}", told(text))


# -- what comes before a message ------------------------------------------------------------------

TRACE = "Traceback (most recent call last):\n"
STEP = TRACE + '  File "t.py", line 9, in train\n    optimizer.step()\n'
BACKWARD = TRACE + '  File "t.py", line 8, in train\n    loss.backward()\n'
ENGINE = TRACE + '  File "g.py", line 8, in _engine_run_backward\n    return f()\n'
FORWARD = TRACE + '  File "t.py", line 7, in train\n    y = model(x)\n'


def bar(done: int, total: int, label: str = "") -> str:
    return f"{label} 10%|#   | {done}/{total} [00:01<00:10, 1.0it/s]\n"


BEFORE = [
    ("nothing", "", "too_big"),
    ("forward of the first step", bar(0, 10) + FORWARD, "too_big"),
    ("backward of the first step", bar(0, 10) + BACKWARD, "first_backward"),
    ("backward by the engine", bar(0, 10) + ENGINE, "first_backward"),
    ("a frame named backward", bar(0, 10) + TRACE + '  File "a.py", line 1, in backward\n',
     "first_backward"),
    ("backward of no steps at all", bar(0, 0) + BACKWARD, "too_big"),
    ("backward of a later step", bar(5, 10) + BACKWARD, "too_big"),
    ("backward without a bar", BACKWARD, "too_big"),
    ("optimizer of the first step", bar(0, 10) + STEP, "optimizer_state"),
    ("optimizer of a later step", bar(5, 10) + STEP, "too_big"),
    ("optimizer that makes its states", STEP + "    state = torch.zeros_like(p)\n",
     "optimizer_state"),
    ("optimizer by its group", bar(0, 10) + TRACE + '  File "a.py", line 1, in _init_group\n',
     "optimizer_state"),
    ("the second step of three", bar(1, 3) + FORWARD, "second_step"),
    ("the second step of two", bar(1, 2) + FORWARD, "too_big"),
    ("the third step", bar(2, 10) + FORWARD, "too_big"),
    ("a bar below the traceback", FORWARD + bar(1, 10), "too_big"),
    ("memory that was locked before", "x.pin_memory()\n", "too_big"),
    ("a bar of loading", bar(1, 10, "Loading checkpoint shards:") + FORWARD, "too_big"),
    ("a bar above that of loading",
     bar(1, 10) + bar(3, 4, "Loading checkpoint shards:") + FORWARD, "second_step"),
    ("a bar three lines up", bar(1, 10) + "a\nb\n" + FORWARD, "second_step"),
    ("a bar four lines up", bar(1, 10) + "a\nb\nc\n" + FORWARD, "too_big"),
    ("a bar that was drawn over", bar(0, 10).strip() + "\r" + bar(1, 10) + FORWARD, "second_step"),
    ("evaluation by its frame", TRACE + '  File "t.py", line 3, in evaluate\n', "evaluation"),
    ("a frame that only begins so", TRACE + '  File "t.py", line 3, in evaluation_set\n',
     "evaluation"),
    ("a frame that ends so", TRACE + '  File "t.py", line 3, in reevaluate\n', "too_big"),
    ("evaluation by its bar", bar(1, 10, "Evaluating:") + FORWARD, "evaluation"),
    ("validation by its mark", "epoch 3 (valid) 1/10 [\n" + FORWARD, "evaluation"),
    ("evaluation in an earlier traceback",
     TRACE + '  File "t.py", line 3, in evaluate\n' + FORWARD, "too_big"),
    ("growth", "".join(f"max mem: {1000 + 100 * i}\n" for i in range(20)), "leak"),
    ("a longer batch", "".join(f"seq_len = {n}\n" for n in (100, 90, 95, 200)), "longest_batch"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "before", "cause"), BEFORE, ids=[row[0] for row in BEFORE])
def test_what_stands_before_a_message_tells_when_it_came(
    case: str, before: str, cause: str
) -> None:
    found = told(before + card())
    assert found["causes"][0][0] == cause, found["causes"]
    assert_told(f"before: {case}", {"causes": found["causes"]})


def test_what_stands_before_a_message_of_no_device_comes_after_what_it_says() -> None:
    before = "Evaluating: 1/10 [\n" + TRACE
    for message, causes in (
        ("torch.OutOfMemoryError: ?", ["unknown", "evaluation"]),
        (card(), ["evaluation", "too_big"]),
    ):
        assert [cause[0] for cause in told(before + message)["causes"]] == causes


PINS = [
    ("x = x.pin_memory()\n", "locked_memory"),
    ("DataLoader(d, pin_memory=True)\n", "locked_memory"),
    ("in pin memory thread for device 0\n", "locked_memory"),
    ("cudaHostRegister(p)\n", "locked_memory"),
    ("pin_memory=False\n", "unknown"),
    ("x.pin_memory()\n" + TRACE, "unknown"),  # of an earlier call
    ("x.pin_memory()\n" + "x" * 1500, "unknown"),  # too far up, without a traceback
    (TRACE + "x.pin_memory()\n" + "x" * 3000, "locked_memory"),
    (TRACE + "x.pin_memory()\n" + "x" * 4000, "unknown"),
]


@pytest.mark.parametrize(("before", "cause"), PINS)
def test_a_runtime_error_while_memory_was_being_locked(before: str, cause: str) -> None:
    text = before + "RuntimeError: CUDA error: out of memory\n"
    assert explain_oom(text).cause.name == cause


@pytest.mark.parametrize(
    ("before", "confidence"),
    [
        ("", "low"),
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n", "high"),
        ("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments: True\n", "high"),
        ("os.environ['X'] = 'expandable_segments:True'\n", "high"),
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False\n", "low"),
        ("one could try expandable_segments:True\n", "low"),
    ],
)
def test_a_driver_error_under_expandable_segments(before: str, confidence: str) -> None:
    text = before + "RuntimeError: CUDA driver error: out of memory"
    assert explain_oom(text).cause[:2] == ("allocator_setting", confidence)
    assert explain_oom(text, env={}).cause.confidence == confidence


@pytest.mark.parametrize(
    ("name", "setting", "confidence"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "high"),
        ("PYTORCH_ALLOC_CONF", "Expandable_Segments: True", "high"),
        ("PYTORCH_HIP_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:true", "high"),
        ("PYTORCH_HIP_ALLOC_CONF", "expandable_segments:False", "low"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "expandable_segments:True", "low"),
    ],
)
def test_an_exception_is_of_this_process_and_a_text_of_any(
    name: str, setting: str, confidence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, setting)
    message = "CUDA driver error: out of memory"
    error = RuntimeError(message)
    assert explain_oom(error).cause.confidence == confidence
    assert explain_oom(error, env={}).cause.confidence == "low"
    text = f"RuntimeError: {message}"
    assert explain_oom(text).cause.confidence == "low"
    assert explain_oom(text, env=os.environ).cause.confidence == confidence


def test_what_says_nothing_is_out_of_memory_only_by_its_class() -> None:
    assert explain_oom(MemoryError()).found and explain_oom(MemoryError("of what")).found
    assert not explain_oom(RuntimeError()).found and not explain_oom(None).found
    error = MemoryError("Unable to allocate 2.00 GiB for an array with shape (1,)")
    assert explain_oom(error).value("requested") == 2 * GiB

    class Worse(Unspeakable, MemoryError):
        """Of a library that has its own."""

    assert explain_oom(Worse()).found and explain_oom(type("Odd", (MemoryError,), {})()).found


def test_anything_is_taken_by_what_it_says() -> None:
    class Said:
        def __str__(self) -> str:
            return CASES["cuda-2.5-in-backward"]

    found: Any = Said()
    expected = explain_oom(str(found)).to_dict()
    for said in (found, str(found).encode(), bytearray(str(found).encode())):
        assert explain_oom(said).to_dict() == expected


def test_sixteen_errors_of_a_chain_are_looked_through() -> None:
    error: BaseException = MemoryError()
    for length in range(2, 18):
        outer = RuntimeError("of no interest")
        outer.__context__ = error
        error = outer
        assert is_oom(error) is (length <= 16) is explain_oom(error).found


def test_a_message_is_judged_by_the_32_kib_before_it() -> None:
    near, far = "x" * (31 << 10), "x" * (33 << 10)
    for between, cause in ((near, "second_step"), (far, "too_big")):
        text = f"{bar(1, 10)}{FORWARD}{between}\n{card()}"
        assert explain_oom(text).cause.name == cause


@pytest.mark.parametrize(
    ("percent", "confidence"),
    [("89.9", "low"), ("90.0", "medium"), ("99", "medium"), (None, "low"), ("95%, 40", "low")],
)
def test_a_killed_launcher_is_suspected_more_where_memory_was_nearly_full(
    percent: str | None, confidence: str
) -> None:
    seen = "" if percent is None else "".join(f"percent = {p}%\n" for p in percent.split("%, "))
    report = explain_oom(seen + CASES["deepspeed-minus-9"])
    assert report.cause.confidence == confidence


# -- a history ------------------------------------------------------------------------------------


def climb(count: int, step: int = 100 * MiB, start: int = GiB) -> list[int]:
    return [start + step * nth for nth in range(count)]


HELD = [
    ("eight records after the warm-up", climb(11), True),
    ("seven records after the warm-up", climb(10), False),
    ("64 MiB in all", climb(20, 4 * MiB), True),
    ("less than 64 MiB in all", climb(20, 4 * MiB - 1), False),
    ("three hundredths of what is held",
     [*climb(19, 100 * MiB, 100 * GiB)[:3], *[97 * GiB + 3 * GiB * i // 10 for i in range(11)]],
     True),
    ("less than three hundredths",
     [*[97 * GiB] * 3, *[97 * GiB + (3 * GiB - 10) * i // 10 for i in range(11)]], False),
    ("falling", climb(20)[::-1], False),
    ("one jump", [GiB] * 12 + [2 * GiB] * 12, False),
    ("level", [GiB] * 30, False),
    ("a fall in four", [2 * GiB + 100 * MiB * i - 400 * MiB * (i % 4 == 3) for i in range(30)],
     False),
    ("a fall in eight", [2 * GiB + 100 * MiB * i - 200 * MiB * (i % 8 == 7) for i in range(30)],
     True),
    ("a stair", [GiB + 500 * MiB * (i // 5) for i in range(43)], False),
    ("a stair of two", [GiB + 500 * MiB * (i // 2) for i in range(43)], False),
    ("a stair that rests at each third", [GiB + 200 * MiB * (i - i // 3) for i in range(43)], True),
]  # fmt: skip


@pytest.mark.parametrize(("case", "values", "leaks"), HELD, ids=[row[0] for row in HELD])
@pytest.mark.parametrize("key", ["allocated_bytes", "peak_bytes"])
def test_which_growth_is_a_leak(key: str, case: str, values: list[int], leaks: bool) -> None:
    found = signs([{key: value} for value in values])
    assert [sign.cause for sign in found] == ["leak"] * leaks
    assert_told(f"history: {case}, {key}", {"signs": [list(sign) for sign in found]})


@pytest.mark.parametrize(
    ("lengths", "odd"),
    [
        ([100, 100, 100, 121], True),
        ([100, 100, 100, 120], False),
        ([100, 100, 121], False),
        ([100, 200, 100, 121], False),
    ],
)
def test_which_batch_is_longer_than_the_others(lengths: list[int], odd: bool) -> None:
    found = signs([{"length": length} for length in lengths])
    assert [sign.cause for sign in found] == ["longest_batch"] * odd
    assert_told(f"lengths: {lengths}", {"signs": [list(sign) for sign in found]})


def step(number: int, phase: str = "") -> dict[str, Any]:
    return {"step": number, "phase": phase}


@pytest.mark.parametrize(
    ("records", "cause"),
    [
        ([step(0, "forward"), step(0, "Optimizer")], "optimizer_state"),
        ([step(0, "optimizer"), step(5, "optimizer")], None),
        ([step(0, "forward"), step(1, "optimizer")], "optimizer_state"),
        ([step(0, "forward"), step(0, "BACKWARD")], "first_backward"),
        ([step(0, "forward"), step(1, "backward")], "second_step"),
        ([step(0, "backward"), step(0, "backward")], None),
        ([step(3, "forward"), step(4, "forward")], "second_step"),
        ([step(0), step(0), step(1)], "second_step"),
        ([step(0), step(2)], None),
        ([step(0), step(2), step(1)], None),
        ([step(0), step(1, "validation")], "evaluation"),
        ([step(0), step(1, "Sampling")], "evaluation"),
        ([step(0), step(1, "test")], "evaluation"),
        ([{"phase": "eval"}], "evaluation"),
        ([{"phase": "backward"}], None),
        ([step(0, "backward")], "first_backward"),
    ],
)
def test_what_the_last_record_of_a_history_shows(
    records: list[dict[str, Any]], cause: str | None
) -> None:
    found = signs(records)
    assert [sign.cause for sign in found] == ([cause] if cause else [])
    assert_told(f"records: {records}", {"signs": [list(sign) for sign in found]})


# -- cut off --------------------------------------------------------------------------------------

OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 24.00 GiB total "
    "capacity; 0.50 GiB free; 22.00 GiB already allocated; 22.50 GiB reserved in total by PyTorch)"
)


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuda"),
        ("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", "rocm"),
        ("OOM when allocating tensor with shape[9] on /job:a/device:GPU:0 by allocator b", "cuda"),
        ("OOM when allocating tensor with shape[9] on /job:a/device:CPU:0 by allocator b", "cpu"),
    ],
)
def test_whose_memory_it_was_is_told_by_the_library_and_by_the_device(
    text: str, backend: str
) -> None:
    (finding,) = explain_oom(f"RuntimeError: {text}").findings
    assert finding.backend == backend


@pytest.mark.parametrize("text", [OLD, card(others=3 * GiB), card(cap=8 * GiB)])
def test_a_message_that_was_cut_off_is_explained_as_far_as_it_goes(text: str) -> None:
    start = text.index("allocate") + len("allocate 2")
    seen = set()
    for end in range(start, len(text)):
        report = explain_oom(text[:end])
        assert report.found and report.cause.name in (
            "unknown", "too_big", "other_process", "device_cap", "driver_refusal",
        ), text[:end]  # fmt: skip
        seen.add(report.cause.why)
    assert "the message was cut off before its figures" in seen
    assert "the card was full" in seen


# ---- what is broken itself ----


class Unspeakable(Exception):
    """What cannot be printed, as some exceptions of C extensions."""

    def __str__(self) -> str:
        raise ValueError("broken")


def test_an_explanation_never_becomes_another_error(monkeypatch: pytest.MonkeyPatch) -> None:
    message = CASES["cuda-2.5-in-backward"]
    assert explain_oom(message).found and is_oom(MemoryError())
    with_cause = RuntimeError(message)
    with_cause.__cause__ = Unspeakable()
    assert explain_oom(with_cause).found and is_oom(with_cause)
    assert not explain_oom(Unspeakable()).found and not is_oom(Unspeakable())
    monkeypatch.setattr(traceback, "format_tb", lambda *_, **__: 1 / 0)
    assert explain_oom(with_cause).cause == explain_oom(message, env=os.environ).cause
    monkeypatch.setattr(pipeline, "find", lambda *_: 1 / 0)
    report = explain_oom(message)
    assert isinstance(report, OomReport) and not report.found
    assert is_oom(RuntimeError(message)) is False


def test_a_history_that_cannot_be_read_leaves_the_message(tmp_path: Path) -> None:
    message = CASES["cuda-2.5-in-backward"]
    assert explain_oom(message, history=tmp_path / "none").cause == explain_oom(message).cause


def test_a_chain_that_runs_in_a_circle_is_told_once() -> None:
    first, second = RuntimeError(CASES["cuda-2.5-in-backward"]), ValueError("the second")
    first.__cause__, second.__context__ = second, first
    both = ExceptionGroup("both", [first, second])
    for error in (first, second, both):
        assert pipeline._messages(error).count("the second") == 1
        assert len(explain_oom(error).findings) == 1


def test_a_tensor_larger_than_the_machine_is_told_so_and_not_to_use_fewer_workers() -> None:
    from oracle_offload.diagnose.explain.pipeline import explain

    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 42949672960 bytes."
    larger = explain(text, None, None, ram=32 << 30)
    assert larger.cause.name == "one_tensor" and larger.cause.confidence == "high"
    assert "exceeds your RAM" in str(larger) and "32.00 GiB of RAM" in str(larger)
    assert "workers" not in str(larger)
    for ram in (40 << 30, None):  # it would fit; or it is not known
        fits = explain(text, None, None, ram=ram)
        assert fits.cause.name == "host_memory" and "fewer data workers" in str(fits)
