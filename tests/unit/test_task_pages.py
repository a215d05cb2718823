"""Commands of the pages on what a user has to do: each is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from oracle_offload import cli

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "it-does-not-fit.md",
    "it-got-slower.md",
    "two-models.md",
    "train-lora.md",
    "bench-matrix.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_the_page_is_taken(page):
    text = (DOCS / page).read_text("utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("oracle-offload ")]
    assert commands, "the page has no command"
    for command in commands:
        parsed = cli.build_parser().parse_args(shlex.split(command)[1:])
        assert callable(parsed.run), command


@pytest.mark.parametrize("page", PAGES)
def test_the_page_can_be_found_and_its_links_lead_somewhere(page):
    text = (DOCS / page).read_text("utf-8")
    assert f"(docs/{page})" in (DOCS.parent / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\(([a-z-]+\.md)", text):
        assert (DOCS / target).is_file(), target
