"""README.md: its figures are filed ones, its code runs, its commands exist, it stays short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import measured_page
import pytest
import readme_page

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
DEVICES = measured_page.read(measured_page.RESULTS)
PERFORMANCE = measured_page.SIMULATED_PAGE.read_text("utf-8")


def test_the_table_is_what_was_measured() -> None:
    assert readme_page.page(README, DEVICES, PERFORMANCE) == README, (
        "run: python tools/readme_page.py"
    )


def test_every_row_says_whether_hardware_or_the_simulator_measured_it() -> None:
    (block,) = re.findall(r"<!-- figures: .*? -->\n(.*?)<!-- end of", README, re.S)
    rows = block.splitlines()[2:]
    assert len(rows) >= 5
    assert all(re.search(r"\| (hardware: .+|simulated) \|$", row) for row in rows)
    assert {row.split("| ")[-1].partition(":")[0] for row in rows} >= {"hardware", "simulated |"}


def test_the_figures_are_those_of_the_rows_and_of_the_page() -> None:
    for reports in DEVICES.values():
        for step in measured_page.steps_of(reports)[:2]:
            assert f"| {step['step_s']:.3f} s, " in README
    text = PERFORMANCE.replace("on average 1.006 and", "on average 1.234 and")
    assert text != PERFORMANCE
    assert "1.234 on average" in readme_page.page(README, DEVICES, text)


def test_no_measured_figure_stands_outside_the_table() -> None:
    prose = re.sub(r"^```.*?^```$", "", readme_page.BLOCK.sub("", README), flags=re.M | re.S)
    assert re.findall(r"\d[\d.,]* ?(?:s|ms|GiB|GB/s|x|%)(?![\w.])", prose) == []


def test_its_first_code_trains_a_managed_model_and_prints_a_summary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch = pytest.importorskip("torch")
    code = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)[0]
    assert len(code.splitlines()) <= 15
    before, after = code.split("print(")
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(before, "README.md", "exec"), names)
    assert len(names["manager"].layers) == 8
    exec(compile("print(" + after, "README.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "8 layers in 8 units" in shown and "to the device, last step" in shown
    assert names["manager"] is not None and "_memory_manager" not in vars(names["model"])


def test_its_commands_are_targets_and_the_line_of_the_demo_is_the_demos() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
    said = re.findall(r"`RESULT: ([\w ]+)`", README)
    demo = "".join(path.read_text("utf-8") for path in (ROOT / "oracle_offload").rglob("*.py"))
    assert len(said) == 1 and said[0] in demo


def test_it_is_a_screen_and_a_half() -> None:
    assert len(README.splitlines()) <= 90
