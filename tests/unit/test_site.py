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
PAGES = sorted(DOCS.rglob("*.md"))
DECISIONS = DOCS / "decisions"
DECIDED = [page for page in PAGES if page.parent == DECISIONS and page.name != "index.md"]
READ = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
CODE = ("oracle_offload", "csrc", "tools", "tests", "benchmarks")
SUFFIXES = (".py", ".pyi", ".c", ".h", ".cpp", ".cu")
# A page as code and messages name it, with a heading of it or without.
NAMED = re.compile(r"(?<![\w/.-])docs/([\w/-]+\.md)(?:#([\w-]+))?")


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
    listed = re.findall(r"^- \[[^]]+\]\(([\w/-]+\.md)\): ", INDEX, re.M)
    pages = [page.name for page in DOCS.glob("*.md") if page.name != "index.md"]
    assert sorted(listed) == sorted([*pages, "decisions/index.md"])


def test_every_decision_is_listed_once_by_its_title_in_one_of_the_rooms() -> None:
    index = (DECISIONS / "index.md").read_text("utf-8")
    rooms = re.split(r"^## ", index, flags=re.M)[1:]
    assert [room.partition("\n")[0] for room in rooms] == [
        "Planner and arena",
        "Copies and waits",
        "Layers and autograd",
        "Train",
        "Memory and locking",
        "Disk and compression",
        "Diagnosis",
        "Tools",
    ]
    listed = re.findall(r"^- \[(.+)\]\(([\w-]+\.md)\)$", index, re.M)
    titles = [page.read_text("utf-8").partition("\n")[0].removeprefix("# ") for page in DECIDED]
    names = [page.name for page in DECIDED]
    assert sorted(listed) == sorted(zip(titles, names, strict=True))


@pytest.mark.parametrize("page", DECIDED, ids=lambda page: page.name)
def test_a_decision_says_what_why_what_was_measured_and_what_was_rejected(page: Path) -> None:
    text = page.read_text("utf-8")
    headings = re.findall(r"^## (.+)$", text, re.M)
    expected = ["What", "Why", "Measured", "Rejected"]
    assert headings == [name for name in expected if name in headings] and headings[:1] == ["What"]
    for part in re.split(r"^## .+$", text, flags=re.M)[1:]:
        assert part.strip(), f"{page.name}: an empty section"


@pytest.mark.parametrize("page", READ, ids=lambda page: page.relative_to(ROOT).as_posix())
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
    """On a page as it is in the repository no directive of Sphinx is text."""
    for page in READ:
        assert not re.search(r"^(```|:::) *\{|^\.\. |\{\w+\}`", page.read_text("utf-8"), re.M), page
