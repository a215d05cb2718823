"""The mutants of the Python layer and of the binding are found by the rules that are stated."""

from __future__ import annotations

import builtins
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutants_binding  # noqa: E402
import mutants_python  # noqa: E402
import reached_places  # noqa: E402
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
        *("> becomes <=", "> becomes >=", "< becomes >=", "< becomes <=", "== becomes !="),
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


def test_a_mutant_shows_where_its_expression_is_evaluated_or_its_statement_begins() -> None:
    mutants = mutants_python.mutants_of(Path("module.py"), PYTHON)
    places = {mutant.kind: PYTHON[slice(*mutant.place)] for mutant in mutants}
    assert places["* becomes /"] == "2 * 3"
    assert places["> becomes >="] == "limit > 0"
    assert " ".join(places["drop term 1 of or"].split()) == "rows or limit < -len(kept)"
    begins = {mutant.kind: PYTHON[mutant.place[0] :].split("\n")[0] for mutant in mutants}
    assert begins["drop except"] == "raise KeyError from error"
    assert begins["drop finally"] == "rows.sort()"


def test_marks_tell_the_places_that_were_reached_and_change_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "current").write_text("the test")
    (tmp_path / "places").touch()
    places = sorted({mutant.place for mutant in mutants_python.mutants_of(Path("m.py"), PYTHON)})
    text = reached_places.marked(f"{reached_places.FIRST}\n", [], 0, str(tmp_path))
    text += reached_places.marked(PYTHON, places, 0, str(tmp_path))
    assert text.count("\n") == PYTHON.count("\n") + 1
    module: dict[str, Any] = {"log": logging}
    try:
        exec(compile(text, "module", "exec"), module)
        before = (tmp_path / "places").read_text()
        assert module["find"]([3, 0, 2], 1) is False
    finally:
        delattr(builtins, reached_places.MARK)
    shown = [PYTHON[begin:end] or PYTHON[begin:].split("\n")[0].strip() for begin, end in places]
    numbers = {row.split("\t")[1] for row in (tmp_path / "places").read_text().splitlines()}
    reached = {shown[int(number)] for number in numbers}
    assert before == f"the test\t{shown.index('2 * 3')}\n"
    assert {"limit > 0", "rows.append(1)", "rows.sort()", "limit == len(rows)"} <= reached
    assert not {"limit < -len(kept)", "raise KeyError from error"} & reached


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
        *("negate", "drop", "< becomes >=", "< becomes <=", "> becomes <="),
        *("> becomes >=", "== becomes !="),
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
