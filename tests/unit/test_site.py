"""The pages of docs/ and what leads to them: none is an orphan, and every link works in a clone.

`make site` checks the same of the site, and of what is printed into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = (DOCS / "index.md").read_text("utf-8")
PAGES = sorted(DOCS.glob("*.md"))
READ = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
CODE = ("oracle_offload", "csrc", "tools", "tests", "benchmarks")
SUFFIXES = (".py", ".pyi", ".c", ".h", ".cpp", ".cu")
# A page as code and messages name it, with a heading of it or without.
NAMED = re.compile(r"(?<![\w/.-])docs/([\w-]+\.md)(?:#([\w-]+))?")


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page is called, as GitHub and the site have it."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#{1,4} (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def named() -> Iterator[tuple[str, str, str]]:
    """Every page that code, a message or the change log names: by whom, the page, the heading."""
    files = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*"))]
    for path in (*files, ROOT / "Makefile", ROOT / "CHANGELOG.md"):
        if path.suffix in (*SUFFIXES, "", ".md") and path.is_file() and "data" not in path.parts:
            text = path.read_text("utf-8", errors="replace")
            for page, heading in NAMED.findall(text):
                yield path.relative_to(ROOT).as_posix(), page, heading


def test_every_page_stands_once_in_the_order_of_the_site() -> None:
    sections = re.split(r"^## ", INDEX, flags=re.M)[1:]
    assert [part.partition("\n")[0] for part in sections] == [
        "Start",
        "How-to",
        "Reference",
        "Inside",
    ]
    listed = re.findall(r"^- \[[^]]+\]\(([\w-]+\.md)\): ", INDEX, re.M)
    assert sorted(listed) == sorted(page.name for page in PAGES if page.name != "index.md")


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target, heading in re.findall(
        r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", prose(page.read_text("utf-8"))
    ):
        led_to = page.parent / target if target else page
        assert led_to.exists(), target
        if heading:
            assert heading in anchors(led_to), f"{target}#{heading}"


def test_every_page_that_code_or_a_message_names_is_in_a_clone() -> None:
    found = list(named())
    by_package = {page for path, page, _ in found if path.startswith("oracle_offload/")}
    assert len(found) > 50 and "compile.md" in by_package  # what a message of layers/swap.py says
    for path, page, heading in found:
        assert (DOCS / page).is_file(), f"{path}: {page}"
        assert not heading or heading in anchors(DOCS / page), f"{path}: {page}#{heading}"


def test_a_page_is_read_without_what_only_the_site_understands() -> None:
    """On a page as it lies in the repository no directive of Sphinx is text."""
    for page in READ:
        assert not re.search(r"^(```|:::) *\{|^\.\. |\{\w+\}`", page.read_text("utf-8"), re.M), page
