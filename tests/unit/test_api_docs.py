"""The pages of the API and of the errors: current and complete."""

from __future__ import annotations

import re
from pathlib import Path

import api_page
import errors_page
import pytest

import oracle_offload

ROOT = Path(__file__).parents[2]


def test_the_page_of_the_api_is_what_its_tool_prints() -> None:
    pytest.importorskip("torch", reason="the signatures are those of modules that import torch")
    written = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert written == api_page.page(), "run: python tools/api_page.py"


def test_every_public_name_has_its_entry() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    entries = set(re.findall(r"^### (\S+)$", page, re.M))
    assert set(oracle_offload.__all__) - {"__version__"} <= entries


def test_the_page_of_errors_is_what_its_tool_prints() -> None:
    written = (ROOT / "docs" / "errors.md").read_text("utf-8")
    assert written == errors_page.page(), "run: python tools/errors_page.py"


def test_every_error_is_explained_and_every_explanation_belongs_to_one() -> None:
    sites = errors_page.sites()
    assert len(sites) > 60 and {site.path.partition("/")[0] for site in sites} == {
        "oracle_offload",
        "csrc",
    }
    assert [site for site in sites if errors_page.noted(site) is None] == []
    messages = [site.message for site in sites]
    fragments = [fragment for notes in errors_page.NOTES.values() for fragment in notes]
    assert [text for text in fragments if not any(text in message for message in messages)] == []


def test_every_place_that_raises_in_python_is_seen() -> None:
    """By another way: the lines that raise a class of ours, or return one, counted."""
    raising = re.compile(r"^\s*(?:raise|return) (?:OffloadError|StaleWeightsError)\(", re.M)
    lines = sum(
        len(raising.findall(path.read_text("utf-8")))
        for path in (ROOT / "oracle_offload").rglob("*.py")
    )
    seen = [
        s for s in errors_page.python_sites() if s.kind in ("OffloadError", "StaleWeightsError")
    ]
    assert len(seen) == lines
