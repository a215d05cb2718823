"""The pages on what a user has to do; test_commands_of_pages.py runs what they tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TASKS = (
    "killed-without-a-message.md",
    "memory.md#It does not fit",
    "memory.md#It got slower",
    "memory.md#My RAM is full",
    "memory.md#Two models",
    "resume.md",
)


@pytest.mark.parametrize("task", TASKS)
def test_the_page_or_its_section_ends_in_commands(task):
    page, _, section = task.partition("#")
    text = (DOCS / page).read_text("utf-8")
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0].rstrip() + "\n"
    (last,) = re.findall(r"^```\n([^`]*)^```\n\Z", text, flags=re.M)
    assert last and all(
        line.startswith(("oracle-offload ", "python examples/")) for line in last.splitlines()
    )
