"""docs/measured.md: each figure is a filed row; a wrong prediction names what was false.

The cells that the simulator has, too, are in docs/performance.md next to what it predicted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_check
import gpu_import
import measured_page
import pytest


def report(date: str, **parts: Any) -> dict[str, Any]:
    found = {
        "schema": gpu_check.SCHEMA,
        "command": "make gpu-check",
        "date": f"2026-01-{date}T12:00:00Z",
        "commit": "0123456",
        "device": "NVIDIA H200",
        "simulated": False,
        "driver": "580.1 (CUDA 13.0)",
        "torch": "2.11.0",
        "system": "Linux 6",
        "cpus_count": 16,
        "file": "benchmarks/results/one.json",
        **{name: part(state="not reached") for name in gpu_check.OBJECTS},
    }
    return found | parts


def part(*rows: dict[str, Any], state: str = "done") -> dict[str, Any]:
    return {"state": state, "seconds": 1.0, "rows": list(rows)}


def step(over: float, **changes: Any) -> dict[str, Any]:
    return {
        "name": "flux width 3072, offload 0.91",
        "offload": 0.91,
        "step_s": 2.0 * over,
        "h2d_bytes": 40e9,
        "rate_gbps": 50.0,
        "predicted_step_s": 2.0,
        "predicted_kernels_s": 1.0,
        "predicted_h2d_bytes": 40e9,
        "over_predicted_ratio": over,
        "equal_losses_count": 3,
        "compared_steps_count": 3,
        **changes,
    }


RESIDENT = {"name": "flux width 3072, resident", "step_s": 1.0}
LINK = {"name": "registered_huge_pages_h2d_65536_KiB", "copy_bytes": 2**26, "rate_gbps": 50.0}


def test_the_page_is_what_the_filed_results_say() -> None:
    made = measured_page.page(measured_page.read(measured_page.RESULTS))
    assert measured_page.PAGE.read_text(encoding="utf-8") == made


def test_the_page_of_the_simulator_has_what_was_measured_beside_what_it_predicted() -> None:
    devices = measured_page.read(measured_page.RESULTS)
    made = measured_page.beside_simulated(devices)
    assert f"\n{made}\n" in measured_page.SIMULATED_PAGE.read_text(encoding="utf-8")
    for device, reports in devices.items():
        for row in measured_page.steps_of(reports):
            if "predicted_step_s" in row:
                assert f"| {row['predicted_step_s']:.3f} | {row['step_s']:.3f} |" in made, device
    assert made.count("\n| NVIDIA H200 |") >= 2


def test_what_is_filed_replaces_that_section_of_the_simulators_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report("01", step=part(RESIDENT, step(1.25), step(1.0, offload=1.0)))
    pages = tmp_path / "measured.md", tmp_path / "performance.md"
    monkeypatch.setattr(measured_page, "PAGE", pages[0])
    monkeypatch.setattr(measured_page, "SIMULATED_PAGE", pages[1])
    monkeypatch.setattr(measured_page, "RESULTS", tmp_path)
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "one.json").write_text(json.dumps(found))
    pages[1].write_text(f"# Before\n\n{measured_page.BESIDE}\n\nold\n\n## After\n\nkept\n")
    for _ in range(2):
        measured_page.main()
        text = pages[1].read_text()
        assert text.startswith("# Before\n\n## ") and text.endswith("|\n\n## After\n\nkept\n")
        assert "old" not in text
        assert "| flux width 3072, 91% offloaded, train | 2.000 | 2.500 | 1.250 | 40.0 |" in text
        assert "| flux width 3072, 100% offloaded, train | 2.000 | 2.000 | 1.000 | 40.0 |" in text
    assert "1.25 of the prediction" in pages[0].read_text()
    assert "No card has been measured yet." in measured_page.beside_simulated({})


@pytest.mark.parametrize(
    ("over", "changes", "expected"),
    [
        (1.04, {}, ""),
        (1.2, {"predicted_kernels_s": 0.8}, "the kernels (the resident step) 1 s instead of 0.8"),
        (0.9, {"h2d_bytes": 30e9}, "the bytes 30 GB instead of 40"),
        (1.2, {"rate_gbps": 40.0}, "the link 40 GB/s instead of 50"),
        (1.2, {}, "how they overlap"),
    ],
)
def test_a_wrong_prediction_names_the_assumption_that_is_false(
    over: float, changes: dict[str, Any], expected: str
) -> None:
    found = report("01", step=part(RESIDENT, step(over, **changes)), link=part(LINK))
    page = measured_page.page({"NVIDIA H200": [found]})
    assert ("Predictions that are off by more than 5%" in page) is bool(expected)
    assert expected in page


def test_the_newest_file_counts_in_which_a_part_has_ended_and_rehearsals_do_not(
    tmp_path: Path,
) -> None:
    def rates(tflops: float, state: str = "done") -> dict[str, Any]:
        return part({"name": "matmul", "tflops": tflops}, state=state)

    reports = {
        "a": report("01", rates=rates(100)),
        "b": report("02", rates=rates(200), link=part(LINK)),
        "c": report("03", rates=rates(300, state="crashed")),
        "d": report("04", rates=rates(400)) | {"simulated": True, "device": "simulated h200"},
    }
    for name, found in reports.items():
        folder = tmp_path / gpu_import.slug(found["device"])
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(found))
    devices = measured_page.read(tmp_path)
    assert list(devices) == ["NVIDIA H200"]
    page = measured_page.page(devices)
    assert "| matrix products, bf16 | TFLOP/s | 700 | 200 |" in page
    assert "| copies to the device | GB/s | 55.0 | 50.0 |" in page
    false = "copies to the device (0.91 of it), matrix products, bf16 (0.29 of it)"
    assert f"Assumptions that are off by more than 5%: {false}." in page
    assert "2026-01-03" in page, "the file itself is listed"


def test_without_results_the_page_says_so() -> None:
    assert "No card has been measured yet." in measured_page.page({})


def test_contenders_stand_in_the_order_of_their_steps_with_why_one_has_none() -> None:
    rows = [
        {"name": "musubi, 24 GiB, 4608 tokens", "contender": "musubi", "error": "a | b\nc"},
        {"name": "aitoolkit, 24 GiB, 4608 tokens", "contender": "aitoolkit", "step_s": 2.0}
        | {"version": "27a03a91ffff", "setting": "all"},
        {"name": "ours, 24 GiB, 4608 tokens", "contender": "ours", "step_s": 1.0},
        {"name": "ours, 12 GiB, 1536 tokens", "contender": "ours", "step_s": 0.5},
    ]
    power = {"name": "rivals: ours, 24 GiB, 4608 tokens", "joules_per_step": 512.0}
    found = report("01", rivals=part(*rows), power=part(power))
    lines = [line for line in measured_page.rivals([found]) if line.startswith("|")][2:]
    names = [line.split("|")[2].strip() for line in lines]
    assert names == ["ours", "aitoolkit 27a03a91", "musubi", "ours"]
    assert "| 512 |" in lines[0]
    assert lines[2].endswith("| a / b c |")
