"""The pages on what a user has to do; test_commands_of_pages.py runs what they tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TASKS = (
    "it-does-not-fit.md",
    "it-got-slower.md",
    "killed-without-a-message.md",
    "my-ram-is-full.md",
    "resume.md",
    "two-models.md",
)
PAGES = (*TASKS, "train-lora.md", "bench-matrix.md")


@pytest.mark.parametrize("page", TASKS)
def test_the_page_ends_in_commands(page):
    text = (DOCS / page).read_text("utf-8")
    (last,) = re.findall(r"^```\n([^`]*)^```\n\Z", text, flags=re.M)
    assert last and all(line.startswith("oracle-offload ") for line in last.splitlines())


@pytest.mark.parametrize("page", PAGES)
def test_the_page_can_be_found_and_its_links_lead_somewhere(page):
    text = (DOCS / page).read_text("utf-8")
    assert f"(docs/{page})" in (DOCS.parent / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\(([a-z-]+\.md)", text):
        assert (DOCS / target).is_file(), target
