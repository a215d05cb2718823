"""What the site has of the API and of the errors: complete."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import errors_page
import pytest

import oracle_offload

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_listed_once_and_is_there() -> None:
    """The site has an entry of each name of the list: docs/conf.py."""
    pytest.importorskip("torch", reason="the names are those of modules that import torch")
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    listed = re.findall(r"^- `([\w.]+)`: ", page, re.M)
    assert len(listed) == len(set(listed)) == len(re.findall(r"^- ", page, re.M))
    assert set(oracle_offload.__all__) - {"__version__"} <= set(listed)
    for path in listed:
        module, _, name = f"oracle_offload.{path}".rpartition(".")
        assert getattr(importlib.import_module(module), name).__doc__, path


def test_every_error_is_on_the_site() -> None:
    shown = " ".join(errors_page.printed().split())
    for site in errors_page.sites():
        assert " ".join(f"{site.kind}: {site.message}".split()) in shown


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
