"""What a report shows: golden texts and pages, the fixes and their order, marks and gains."""

from __future__ import annotations

import html
import html.parser
import json
import os
from pathlib import Path

import pytest

from oracle_offload.diagnose.explain import explain_oom
from oracle_offload.diagnose.explain.cause import TITLES, where
from oracle_offload.diagnose.explain.facts import FACT_TITLES
from oracle_offload.diagnose.explain.fixes import CATALOGUE, PLANS

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data" / "oom"
GOLDEN = DATA / "golden"
GiB, MiB = 1 << 30, 1 << 20
CASES = {
    case["id"]: case["text"]
    for case in map(json.loads, (DATA / "corpus.jsonl").read_text("utf-8").splitlines())
}
SHOWN = [
    "cuda-1.3-cached-warning-log", "cuda-2.8-ranks-share-card", "cuda-2.12-capped", "mps-2.6-gib",
    "cuda-err-pin-thread", "kernel-memcg-limit", "shm-mmap", "deepspeed-minus-9", "leak-in-log",
    "phase-first-backward", "cpu-1pib", "cublas-create",
]  # fmt: skip
# Set to write the golden files again; then read the difference before committing it.
UPDATE = os.environ.get("ORACLE_OFFLOAD_UPDATE_GOLDEN") == "1"


def device_text(**changed: str) -> str:
    """Return a message of PyTorch 2.13 with some of its figures changed."""
    figures = {
        "asked": "1.00 GiB", "total": "24.00 GiB", "free": "0.20 GiB", "others": "",
        "mine": "23.50 GiB", "cap": "", "allocated": "23.00 GiB", "unused": "0.30 GiB", **changed,
    }  # fmt: skip
    return (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total "
        "capacity of {total} of which {free} is free. {others}Including non-PyTorch memory, this "
        "process has {mine} memory in use. {cap}Of the allocated memory {allocated} is allocated "
        "by PyTorch, and {unused} is reserved by PyTorch but unallocated."
    ).format(**figures)


def keys(text: str, **kwargs: dict[str, str]) -> list[str]:
    return [fix.key for fix in explain_oom(text, **kwargs).fixes]


# -- golden files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["txt", "html"])
@pytest.mark.parametrize("name", SHOWN)
def test_the_report_is_what_it_was(name: str, suffix: str) -> None:
    report = explain_oom(CASES[name])
    shown = report.to_text() if suffix == "txt" else report.to_html()
    path = GOLDEN / f"{name}.{suffix}"
    if UPDATE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text("utf-8")


class Page(html.parser.HTMLParser):
    """Collects tags, and whether every one that was opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.open: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("page", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_html_is_closed_and_runs_and_fetches_nothing(name: str, page: bool) -> None:
    parser = Page()
    parser.feed(explain_oom(CASES[name]).to_html(page=page))
    assert parser.open == []
    assert not parser.seen & {"script", "link", "img", "iframe", "object"}
    assert not {a for a in parser.attributes if a.startswith("on") or a in ("src", "href")}


def test_text_of_the_log_is_escaped_in_html() -> None:
    report = explain_oom("<script>alert(1)</script> MemoryError: <b>\nMemoryError\n")
    assert "<script" not in report.to_html() and "<b>" not in report.to_html()


@pytest.mark.parametrize("width", [10, 60, 72, 100, 400])
@pytest.mark.parametrize("name", SHOWN)
def test_text_keeps_to_the_width(name: str, width: int) -> None:
    text = explain_oom(CASES[name]).to_text(width=width, all_fixes=True)
    assert max(map(len, text.splitlines())) <= min(max(width, 60), 100)


def test_colour_adds_nothing_but_colour() -> None:
    report = explain_oom(CASES[SHOWN[0]])
    plain, coloured = report.to_text(), report.to_text(color=True)
    for code in ("\x1b[1m", "\x1b[2m", "\x1b[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == plain


def test_json_has_every_fact_and_survives_a_round_trip() -> None:
    report = explain_oom(CASES["cuda-2.8-ranks-share-card"])
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert set(data["facts"]) == {f"{name}_bytes" for name in FACT_TITLES}
    assert data["facts"]["cap_bytes"] is None
    assert data["quotes"]["requested"]["line"] == report.facts["requested"].line
    assert [process["pid"] for process in data["processes"]] == [16746, 16747, 16748, 16749]
    assert [process["this_process"] for process in data["processes"]].count(True) == 1
    full = explain_oom(device_text())
    marks = [fix.changes_result for fix in full.fixes]
    assert any(marks) and [fix["changes_result"] for fix in full.to_dict()["fixes"]] == marks


def test_each_fact_points_to_the_line_it_came_from() -> None:
    text = "one\ntwo\n" + CASES["async-2.4"] + "\n"
    report = explain_oom(text)
    lines = text.splitlines()
    for name, fact in report.facts.items():
        assert fact.quote == lines[fact.line - 1].strip(), name


def test_a_quote_holds_the_number_it_is_given_for() -> None:
    # The same digits are there three times, once in a colour code and once across a line break.
    text = (
        "\x1b[20mCUDA out of memory. Tried to allocate 20.00 GiB (GPU 0; 40.00 GiB total capacity; "
        "20.00 GiB already\nallocated; 1.00 GiB free; 20.00\nGiB reserved in total by PyTorch)\n"
    )
    facts = explain_oom(text).facts
    assert {name: fact.line for name, fact in facts.items()} == {
        "requested": 1, "total": 1, "allocated": 1, "free": 2, "reserved": 2, "unallocated": 2,
    }  # fmt: skip
    assert facts["allocated"].quote.endswith("20.00 GiB already")
    assert facts["reserved"].quote == "allocated; 1.00 GiB free; 20.00"


def test_what_the_processes_hold_is_quoted_from_their_list() -> None:
    facts = explain_oom(CASES["cuda-2.8-ranks-share-card"]).facts
    for name in ("this_process", "other_processes"):
        assert "Process 16746 has 20.84 GiB memory in use" in facts[name].quote


# -- causes and fixes -----------------------------------------------------------------------------


def test_each_cause_has_a_title_a_plan_and_a_place() -> None:
    assert set(PLANS) == set(TITLES)
    assert set(CATALOGUE) == {key for plan in PLANS.values() for key in plan}
    for cause in TITLES:
        assert where(cause, "cuda") in {"device", "host", "limit", "setting", "program"}


@pytest.mark.parametrize("name", CASES)
def test_every_message_gets_a_fix_and_what_changes_the_result_comes_last(name: str) -> None:
    fixes = explain_oom(CASES[name]).fixes
    assert fixes
    marks = [fix.changes_result for fix in fixes]
    assert marks == sorted(marks)
    assert len({fix.key for fix in fixes}) == len(fixes)


def test_gains_come_from_the_figures_and_only_from_them() -> None:
    text = device_text(allocated="15.00 GiB", unused="6.00 GiB", mine="22.00 GiB")
    fragmented = explain_oom(text)
    assert fragmented.cause.name == "fragmentation"
    assert fragmented.fixes[0].key == "expandable_segments"
    assert fragmented.fixes[0].gain_bytes == 6 * GiB
    crowded = explain_oom(
        device_text(others="Process 9 has 12.00 GiB memory in use. ", mine="11.00 GiB",
                    allocated="10.50 GiB", unused="0.10 GiB")
    )  # fmt: skip
    assert (crowded.cause.name, crowded.fixes[0].key) == ("other_process", "stop_others")
    assert crowded.fixes[0].gain_bytes == 12 * GiB
    capped = explain_oom(device_text(cap="8.00 GiB allowed; ", free="15.00 GiB", mine="8.00 GiB",
                                     allocated="7.50 GiB"))  # fmt: skip
    assert (capped.cause.name, capped.fixes[0].key) == ("device_cap", "raise_cap")
    assert capped.fixes[0].gain_bytes == 15 * GiB  # 16 GiB of cap, of which 15 GiB are free
    full = explain_oom(device_text())
    assert full.shortfall == GiB - round(0.2 * GiB)
    assert all(fix.gain_bytes is None for fix in full.fixes)


def test_expandable_segments_are_not_advised_where_they_are_on() -> None:
    text = device_text(allocated="15.00 GiB", unused="6.00 GiB", mine="22.00 GiB")
    assert "expandable_segments" in keys(text)
    assert "expandable_segments" not in keys(text.replace("CUDA", "XPU"))
    on = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert "expandable_segments" not in keys(text, env=on)
    refused = device_text(free="1.50 GiB", mine="22.00 GiB")
    off = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
    assert keys(refused) == ["driver_reset", "no_expandable_segments", "stop_others"]
    assert keys(refused, env=off) == ["driver_reset", "stop_others"]
    assert explain_oom("RuntimeError: CUDA driver error: out of memory", env=on).cause == (
        "allocator_setting", "high", "expandable_segments was switched on",
    )  # fmt: skip


def test_one_giant_tensor_is_met_with_its_size_and_not_with_checkpointing() -> None:
    fixes = keys(device_text(asked="31.25 GiB"))
    assert fixes[:2] == ["chunk_attention", "check_size"]


@pytest.mark.parametrize("backend", ["xpu", "mps"])
def test_advice_for_cuda_alone_is_not_given_elsewhere(backend: str) -> None:
    name = {"xpu": "xpu-2.12", "mps": "mps-2.6-gib"}[backend]
    fixes = keys(CASES[name])
    assert not set(fixes) & {"offload_weights", "paged_optimizer", "expandable_segments"}
    assert ("mps_watermark" in fixes) == (backend == "mps")
    assert "stop_others" not in fixes


# -- the rules at their edges ---------------------------------------------------------------------


def test_a_process_list_without_this_process_is_read_as_from_a_container() -> None:
    text = device_text().replace("Including non-PyTorch memory, this process has", "Process 1 has")
    report = explain_oom(text)
    assert report.value("this_process") == round(23.5 * GiB)
    assert report.value("other_processes") is None  # none was listed: unknown, not zero
    assert report.cause.name == "too_big"


NCCL = (
    "[rank{0}]:[E ProcessGroupNCCL.cpp:563] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE) ran for 600084 milliseconds\n"
)
GLOO = (
    "[rank2]: RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting "
    "1800000ms for recv operation to complete\n"
)


def test_time_outs_of_other_ranks_follow_from_the_one_that_ran_out_of_memory() -> None:
    text = "start\n[rank1]: " + device_text() + "\n" + NCCL.format(0) + NCCL.format(3) + GLOO
    report = explain_oom(text)
    assert report.cause.name == "too_big" and report.rank == 1
    assert [(wait.rank, wait.line) for wait in report.waiting] == [(0, 3), (3, 4), (2, 5)]
    said = " ".join(report.to_text().split())
    assert "for ranks 0, 2, 3 (line 3) follows from this error of rank 1" in said
    assert report.collective in html.unescape(report.to_html())


def test_a_time_out_alone_is_no_error_of_memory_and_leads_to_the_other_ranks() -> None:
    report = explain_oom(NCCL.format(3))
    assert not report.found
    said = " ".join(report.to_text().split())
    assert "No out-of-memory error found" in said
    assert "for rank 3 (line 1)" in said and "in their own logs" in said
    assert report.collective in html.unescape(report.to_html())


def test_the_rank_that_ran_out_did_not_wait_for_itself() -> None:
    own = "[rank1]: " + device_text() + "\n" + NCCL.format(1)
    assert explain_oom(own).collective == ""
    assert "is gone: it was killed" in (ROOT / "oracle_offload/host/ranks.py").read_text("utf-8")
