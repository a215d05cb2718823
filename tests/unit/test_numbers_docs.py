"""The code of docs/numbers.md, run as it stands on the simulated device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "numbers.md").read_text("utf-8")


def blocks(section: str) -> list[str]:
    text = re.split(rf"^## {re.escape(section)}\n", PAGE, flags=re.M)[1]
    text = re.split(r"^## ", text, flags=re.M)[0]
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)


def run(code: list[str], **names: Any) -> dict[str, Any]:
    for block in code:
        exec(compile(block.replace('"cuda"', '"cpu"'), "docs/numbers.md", "exec"), names)
    return names


def test_the_metrics_file_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    loader = torch.randn(3, 2, 64)
    names = run(blocks("A file: loss and memory per step"), model=model, loader=loader)
    (metrics_run,) = names["runs"]
    assert [record["step"] for record in metrics_run.records] == [0, 1, 2]
    moved = metrics_run.series("h2d_bytes")
    assert [step for step, _ in moved] == [1, 2] and all(nbytes > 0 for _, nbytes in moved)
    losses, series = capsys.readouterr().out.splitlines()
    assert len(eval(losses)) == 3 and eval(series) == moved


def test_the_page_is_linked_from_the_readme() -> None:
    assert "(docs/numbers.md)" in (ROOT / "README.md").read_text("utf-8")


def test_every_number_is_in_the_table() -> None:
    from oracle_offload import Meter

    (table,) = re.findall(r"^\| keys \| \|\n(.*?)\n\n", PAGE, flags=re.M | re.S)
    listed = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\|(.+?)\|", table, re.M))))
    assert listed == {"step", "loss", *Meter(sensors=True).read()}
