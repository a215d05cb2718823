"""The code of the pages on keeping a training alive, run unchanged on the simulated device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from equality import attached
from torch import nn

ROOT = Path(__file__).parents[2]


def blocks(task: str) -> list[str]:
    page, _, section = task.partition("#")
    text = (ROOT / "docs" / page).read_text("utf-8")
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)


@pytest.mark.parametrize(
    "page",
    [
        "training-that-does-nothing.md",
        "batch-size.md",
        "resume.md",
        "guards.md",
        "memory.md#Two models",
    ],
)
def test_the_code_of_the_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with attached(model, "cpu"):
        batch = torch.randn(4, 8)
        names = {"model": model, "batch": batch, "loader": [batch] * 3}
        for block in blocks(page):
            exec(compile(block.replace('"cuda"', '"cpu"'), page, "exec"), names)
    assert blocks(page)
