"""The table of environment variables against the code that reads them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# An attribute of a module of that name is no variable.
NAME = re.compile(r"(?<![.\w])(?:ORACLE_OFFLOAD|AI_TOOLKIT)_[A-Z][A-Z_]*\b")
SUFFIXES = {".py", ".pyi", ".c", ".h", ".cu", ".cpp", ".sh", ""}


def sources() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.suffix in SUFFIXES and path.is_file()]


def test_every_variable_that_code_names_is_in_the_table_and_no_other() -> None:
    found: dict[str, str] = {}
    for path in sources():
        text = path.read_text("utf-8", errors="replace")
        for name in NAME.findall(re.sub(r"#\s*(?:ifndef|define|endif)\b.*", "", text)):
            found.setdefault(name, path.relative_to(ROOT).as_posix())
    page = (ROOT / "docs" / "environment.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", page, re.M)
    assert len(rows) >= 10
    listed = [name for name, _, _ in rows]
    assert sorted(listed) == sorted(set(listed))
    assert {name: place for name, place in found.items() if name not in listed} == {}
    assert set(listed) <= set(found)
