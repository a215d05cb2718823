"""docs/reliability.md holds the figures of docs/reliability.json, and no typed ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import c_programs
import proof
import reliability_page as page

ROOT = Path(__file__).resolve().parents[2]


WRITTEN = (ROOT / "docs" / "reliability.md").read_text("utf-8")

FIGURES = {
    "conformance": {"cases": 7, "passed": 7, "recordings": 0},
    "races": {"programs": {"test_order": {"cases": 3, "passed": 4000, "failed": 0}}},
    "driver faults": {
        "programs": {
            "test_faults": {
                "calls_in_a_life": 1234,
                "faults": [{"injected": 5678, "of": 5678, "what": "calls fail once"}],
            },
            "test_memory": {"allocations_failed": 12, "allocations_in_a_life": 34},
        }
    },
    "sanitizers": {"programs": {"test_disk": {"cases": 8, "passed": 5000, "failed": 0}}},
    "thread sanitizer": {"programs": {"test_feed": {"cases": 9, "passed": 9000, "failed": 0}}},
    "training faults": {
        "faults": [{"injected": 91, "of": 910, "what": "once", "calls_in_a_life": 55}]
    },
    "mutants": {"tried": 200, "killed": 199, "no_mutants": 3},
    "without the detector": {"tried": 95, "killed": 76, "no_mutants": 0},
    "python mutants": {"tried": 150, "killed": 147, "no_mutants": 9},
    "tiers of tests": {
        "tried": 300,
        "killed": 288,
        "tiers": {"make test": 252, ".ci/run": 286, "make proof": 288},
    },
    "codec": {
        "tests": 7,
        "failed": 0,
        "mutants": [
            {"kernel": "decode_bf16", "tried": 300, "killed": 290},
            {"kernel": "decode_bytes", "tried": 100, "killed": 98},
        ],
        "weights_decoded": [100000000],
        "flips_noticed": [10000],
        "locked": [{"weights": "student", "share": 0.685}],
    },
    "slow tests": {"tests": 900, "failed": 0},
    "slow tests, simgpu": {"tests": 800, "failed": 0},
    "cuda": {"tests": 600, "passed": 600, "failed": 0, "skipped": 40},
    "cuda waits": {"tried": 50, "killed": 20},
    "AI-Toolkit": {"tests": 70, "failed": 0},
    "planted bugs": {"tests": 18, "failed": 0},
    "coverage": {"files": {"plan.c": {"taken": 95, "branches": 100}}},
    "fuzz": {"targets": {"plan": {"inputs": 1000, "seconds": 30}}},
    "wheels": {"tests": 6, "failed": 0},
    "windows": {"programs": {"test_order": {"cases": 5, "passed": 6000, "failed": 0}}},
    "lease": {"lease": [{"kills": 3, "parts": 24, "over": "the simulated device"}]},
    "soak": {"rss_bytes_per_step": [78.4]},
}
PARTS = {
    name: {"commit": "0123456789", "duration_s": 1.5, "cpus": 2, "figures": figures}
    for name, figures in FIGURES.items()
}


def test_the_page_holds_what_the_record_gives() -> None:
    parts = page.read_record()["parts"]
    assert page.page(WRITTEN, parts) == WRITTEN, "run: python tools/reliability_page.py"


def test_every_block_is_in_the_page_and_every_part_in_a_block() -> None:
    assert [name for _, name, _ in page.BLOCK.findall(WRITTEN)] == list(page.BLOCKS)
    assert list(page.SHOWN) == [part.name for part in proof.PARTS] == list(FIGURES)
    assert set(page.read_record()["parts"]) <= set(page.SHOWN)


def test_another_record_gives_another_page() -> None:
    shown = page.page(WRITTEN, PARTS)
    for words in (
        "7 of 7 cases on the simulator; no recording",
        "3 cases of 1 programs, 4,000 checks",
        "6 of 6 tests pass",
        "5 cases of 1 programs, 6,000 checks",
        "5,678 faults, every one of 1,234 calls, in 1 ways",
        "| calls fail once | 5,678 of 5,678 |",
        "| allocations fail once | 12 of 34 |",
        "91 faults, a sample of the calls, in 1 ways",
        "| engine | 199 of 200 | 1 (0.5%) | 3 | 2 |",
        "288 of 300 killed (96.0%); of these `make test` 87.5%, `.ci/run` 99.3%",
        "| `.ci/run` | 286 | 99.3% |",
        "19 of 95 mutants of waits and records survive",
        "388 of 400 mutants of the kernels' PTX killed (97.0%), 100,000,000 weights decoded, "
        "10,000 flips noticed; of 1 GiB of weights locked: 0.685 (student); 7 of 7 tests pass",
        "18 of 18 tests pass",
        "| `plan.c` | 95 of 100 | 95.0% |",
        "1,000 inputs of plan",
        "grows by 78 bytes a step",
        "Seconds on 2 processors",
    ):
        assert words in shown, words
    assert page.page(shown, {}).count("Not recorded yet.") == len(page.BLOCKS)


def test_no_figure_stands_outside_the_blocks() -> None:
    """Shares and counts of something: what holds by definition is written otherwise."""
    prose = page.BLOCK.sub("", WRITTEN)
    assert re.findall(r"[0-9][0-9,.]* of [0-9][0-9,.]*", prose) == []
    readme = (ROOT / "README.md").read_text("utf-8")
    assert re.findall(r"[0-9]+ passed", readme) == []


def test_a_record_is_merged_part_by_part(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(page, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(WRITTEN)
    page.record("soak", "abc", 8.04, FIGURES["soak"])
    page.record("conformance", "def", 2, FIGURES["conformance"])
    saved = json.loads((tmp_path / "record.json").read_text())
    assert saved["schema"] == "oracle_offload/proof/1"
    assert list(saved["parts"]) == ["conformance", "soak"]
    assert saved["parts"]["soak"]["duration_s"] == 8.0
    assert "78 bytes" in (tmp_path / "page.md").read_text()


def test_figures_are_read_from_json_and_from_junit(tmp_path: Path) -> None:
    path = tmp_path / "figures"
    assert proof.read_figures(path) == {}
    path.write_text(json.dumps({"schema": "x", "outcomes": {"a": 1}, "tried": 2}))
    assert proof.read_figures(path) == {"tried": 2}
    path.write_text(
        '<testsuites><testsuite><testcase name="a"><properties>'
        '<property name="faults" value="{&quot;of&quot;: 3}"/>'
        '<property name="seen" value="(1, 2)"/><property name="rss" value="[1]"/>'
        '</properties></testcase><testcase name="b"><failure/></testcase>'
        '<testcase name="c"><skipped/></testcase><testcase name="d"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    assert proof.read_figures(path) == {
        "tests": 3, "failed": 2, "skipped": 1, "faults": [{"of": 3}],
    }  # fmt: skip


def test_what_a_c_program_counted_is_read_from_its_words() -> None:
    said = (
        "1017 calls in a life\nfaults: 12 of 34 calls fail once, 6 codes\n"
        "a_call_fails_once: ok\nb: FAILED\n99 passed, 1 failed\n"
        "584 allocations in a life; 328 of them failed\n"
        "100007936 weights decoded by the kernel\n10000 flips noticed in a full chunk\n"
    )
    assert c_programs.figures(said) == {
        "cases": 1, "passed": 99, "failed": 1, "calls_in_a_life": 1017,
        "allocations_in_a_life": 584, "allocations_failed": 328,
        "weights_decoded": 100007936, "flips_noticed": 10000,
        "faults": [{"injected": 12, "of": 34, "what": "calls fail once, 6 codes"}],
    }  # fmt: skip
