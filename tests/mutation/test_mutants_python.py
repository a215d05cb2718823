"""The mutants of the Python layer and of the binding are found by the rules that are stated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutants_binding  # noqa: E402
import mutants_python  # noqa: E402
from mutants import Mutant  # noqa: E402

PYTHON = '''"""What it is."""
import os

TOTAL = 2 * 3

def find(rows: list[int], limit: int) -> bool:
    """Say whether."""
    kept = [row for row in rows if row]
    log.debug("looking")
    try:
        if limit > 0 and (rows or
                          limit < -len(kept)):
            rows.append(1)
            limit += 1
    except ValueError as error:
        raise KeyError from error
    finally:
        rows.sort()
    return limit == len(rows)
'''


def changed(mutants: list[Mutant], source: str) -> dict[str, str]:
    return {
        mutant.kind: source[: mutant.begin] + mutant.text + source[mutant.end :]
        for mutant in mutants
    }


def test_every_operator_of_the_python_layer_is_there() -> None:
    mutants = mutants_python.mutants_of(Path("module.py"), PYTHON)
    texts = changed([*mutants], PYTHON)
    assert {kind.split(" (")[0] for kind in texts} == {
        *("negate", "drop term 1 of and", "drop term 2 of and"),
        *("drop term 1 of or", "drop term 2 of or", "drop minus"),
        *("> becomes <=", "< becomes >=", "== becomes !="),
        *("* becomes /", "+= becomes -=", "delete", "return True", "return False"),
        *("drop except", "drop finally"),
    }
    # The whole of it compiles, has as many lines as before, and is another program.
    for text in texts.values():
        assert text.count("\n") == PYTHON.count("\n")
        assert mutants_python.byte_code(text) != mutants_python.byte_code(PYTHON)
    deleted = [mutant.original for mutant in mutants if mutant.kind.startswith("delete")]
    assert deleted == ["rows.append(1)", "limit += 1", "raise KeyError from error", "rows.sort()"]
    assert "if True:\n        rows.sort()" in texts["drop finally"]
    assert "except ValueError as error:\n        raise\n" in texts["drop except"]
    assert len({mutant.key for mutant in mutants}) == len(mutants)


def test_a_mutant_is_covered_by_the_lines_of_its_statement() -> None:
    mutants = mutants_python.mutants_of(Path("module.py"), PYTHON)
    lines = {mutant.kind: (mutant.function, mutant.lines) for mutant in mutants}
    assert lines["* becomes /"] == ("", (4,))
    assert lines["drop term 1 of or"] == ("find", (11, 12))
    assert lines["drop except"] == ("find", (16,))
    assert lines["drop finally"] == ("find", (18,))


C = """#define LIMIT (1 + 2)
static const int table[] = {1 + 2};
static int find(struct row *rows, size_t count) {
    size_t found = 0;
    for (size_t i = 0; i < count; i++)
        if (!rows[i].name || (rows[i].size > LIMIT && rows[i].used))
            found += rows[i].size * 2;
    Py_DECREF(rows);
    return found == count;
}
"""


def test_every_operator_of_the_binding_is_there() -> None:
    mutants = mutants_binding.mutants_of(Path("file.c"), C)
    texts = changed(mutants, C)
    assert {kind.split(" in ")[0].split(" '")[0] for kind in texts} == {
        *("negate", "drop", "< becomes >=", "> becomes <=", "== becomes !="),
        *("+= becomes -=", "* becomes /", "++ becomes --", "delete", "return 0", "return -1"),
    }
    dropped = [kind for kind in texts if kind.startswith("drop")]
    assert [kind.split("'")[1] for kind in dropped] == [
        "!rows[i].name",
        "(rows[i].size > LIMIT && rows[i].used)",
        "rows[i].size > LIMIT",
        "rows[i].used",
    ]
    deleted = {mutant.original for mutant in mutants if mutant.kind.startswith("delete")}
    assert deleted == {"found += rows[i].size * 2;", "Py_DECREF(rows);"}


@pytest.mark.parametrize("find", [mutants_python.all_mutants, mutants_binding.all_mutants])
def test_each_mutant_has_a_key_of_its_own(find: object) -> None:
    keys = [mutant.key for mutant in find()]  # type: ignore[operator]
    assert len(set(keys)) == len(keys) > 300
