"""The example notebook, executed by a real kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import nbformat
import notebook

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def book() -> Any:
    return notebook.executed()


def outputs(book: Any, source: str) -> list[Any]:
    (cell,) = [cell for cell in book.cells if cell.cell_type == "code" and source in cell.source]
    found: list[Any] = cell.outputs
    return found


def text(book: Any, source: str) -> str:
    return "".join(o.get("data", {}).get("text/plain", "") for o in outputs(book, source))


def test_each_cell_shows_what_is_committed(book: Any) -> None:
    committed = nbformat.read(notebook.NOTEBOOK, as_version=4)
    assert notebook.shown(book) == notebook.shown(committed)
    assert [cell.source for cell in book.cells] == [cell.source for cell in committed.cells]


def test_it_trains_watches_profiles_explains_and_detaches(book: Any) -> None:
    assert "copied to the device" in text(book, "%%oo_mem")
    assert "steps so far            8" in text(book, "%oo_watch --seconds"), "it was renewed"
    assert "oracle_offload memory summary" in text(book, "%oo_mem --abbreviated")
    assert "0.0 (backward)" in text(book, "profile(")
    assert text(book, "read_metrics") == "(8, [1, 2, 3, 4, 5, 6, 7])"
    error, report = outputs(book, "torch.empty(1 << 45)")
    assert error.output_type == "error"
    assert "What to change first" in report.data["text/plain"]
    assert text(book, "manager.detach()") == "[]"


def test_what_it_shows_needs_no_script(book: Any) -> None:
    pages = [
        output.data["text/html"]
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]
    assert len(pages) >= 4
    assert not any("<script" in page or "http" in page for page in pages)


def test_no_path_of_the_machine_that_wrote_it_is_committed() -> None:
    written = notebook.NOTEBOOK.read_text("utf-8")
    assert "/home/" not in written and "/tmp/" not in written


def test_it_is_linked_from_its_page() -> None:
    assert "(../examples/notebook.ipynb)" in (ROOT / "docs" / "notebook.md").read_text("utf-8")
