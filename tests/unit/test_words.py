"""The list of words that have a plainer one: what is read for them, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import words


def found(folder: Path, name: str, text: str) -> list[tuple[int, str]]:
    path = folder / name
    path.write_text(text)
    return list(words.places(path))


@pytest.mark.parametrize(
    ("name", "text", "places"),
    [
        ("a.py", '"""Where it lies."""\nx = 1  # told\n', [(1, "lies"), (2, "told")]),
        ("a.py", 'raise ValueError("two\\n"\n    "of them lie there")\n', [(2, "lie")]),
        ("a.py", 'told = beside["lies"]\n', []),  # names, and a key alone
        ("a.py", '"""`told` is what ``lies`` is, in a.lies or told=."""\n', []),
        ("a.py", 'f"{told} and {beside!r}"\n', []),
        ("a.c", 'int told; /* nobody\n * stands */ char *s = "it lies";\n', None),
        ("a.md", "Nobody\n```\ntold\n```\nheard `told`\n", [(1, "Nobody"), (5, "heard")]),
        ("a.sh", "told=1 # anew\n", [(1, "anew")]),
    ],
)
def test_prose_is_read_and_code_is_not(
    tmp_path: Path, name: str, text: str, places: list[tuple[int, str]] | None
) -> None:
    if places is None:
        places = [(1, "nobody"), (2, "stands"), (2, "lies")]
    assert found(tmp_path, name, text) == places


def test_each_word_has_another_that_is_not_on_the_list() -> None:
    for instead in words.INSTEAD.values():
        assert not set(instead.replace(",", "").split()) & set(words.INSTEAD)
