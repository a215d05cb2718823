"""docs/development.md names every source file as the file describes itself."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
import map_page  # noqa: E402


def test_the_map_is_what_the_files_say_of_themselves():
    text = map_page.PAGE.read_text(encoding="utf-8")
    assert map_page.page(text, map_page.render()) == text, "run: python tools/map_page.py"


def test_every_folder_of_sources_is_on_the_map():
    sources = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("oracle_offload", "csrc", "tools", "benchmarks", "examples")
        for path in (ROOT / top).rglob("*")
        if path.suffix in map_page.SOURCES
    }
    assert sources == set(map_page.FOLDERS)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.py", '"""Read sizes: as\nwritten. More.\n\nMore."""\n', "Read sizes: as written."),
        ("a.py", '"""Is it fit?\n\nMore."""\n', "Is it fit?"),
        ("a.c", "/* a.c - blocks, in\n * order; see a.h. More. */\n", "Blocks, in order; see a.h."),
        ("a.h", "/* a.h - pure. */\n", "Pure."),
        ("a.cu", "// a.cu - keep a stream\n// busy. More\nint x;\n", "Keep a stream busy."),
    ],
)  # fmt: skip
def test_the_first_sentence_of_a_file(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    assert map_page.first_sentence(tmp_path / name) == said


def test_a_file_that_says_nothing_is_named(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"a\.py: says nothing of itself"):
        map_page.first_sentence(tmp_path / "a.py")
