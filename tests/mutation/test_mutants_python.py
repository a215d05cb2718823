"""The mutants of the Python layer and of the binding are found by the rules that are stated."""

from __future__ import annotations

import argparse
import builtins
import json
import logging
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
import mutants_binding  # noqa: E402
import mutants_python  # noqa: E402
import mutate_python  # noqa: E402
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


def test_a_compiler_goes_by_a_mark_in_one_graph(tmp_path: Path) -> None:
    (tmp_path / "current").write_text("t")
    (tmp_path / "places").write_text("")
    source = "def doubled(x):\n    return x * 2\n"
    places = [(source.index("return"),) * 2, (source.index("x * 2"), source.index("\n", 20))]
    text = reached_places.marked(f"{reached_places.FIRST}\n", [], 0, str(tmp_path))
    text += reached_places.marked(source, places, 7, str(tmp_path))
    module = types.ModuleType("marked")
    try:
        exec(compile(text, "marked.py", "exec"), module.__dict__)
        compiled = torch.compile(module.doubled, backend="eager", fullgraph=True)
        assert compiled(torch.ones(())) == 2
    finally:
        delattr(builtins, reached_places.MARK)
    assert (tmp_path / "places").read_text() == "t\t7\nt\t8\n"


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


def gate_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcomes: list[str], proved: int = 0
) -> tuple[mutate_python.Gate, set[str]]:
    """Return a gate that has seen these outcomes, the last `proved` of them proved equivalent."""
    mutants = [
        Mutant("tools/mutants.py", n, f"kind {n}", 0, 0, "", "") for n in range(len(outcomes))
    ]
    proofs = {mutant.key: "it is" for mutant in mutants[len(mutants) - proved :]}
    monkeypatch.setattr(mutate_python, "STATE", tmp_path / "state.json")
    monkeypatch.setattr(mutate_python, "equivalents", lambda: proofs)
    args = argparse.Namespace(
        jobs=1, resume=True, verbose=False, near=True, remember=False, tiers=False, seed="7"
    )
    gate = mutate_python.Gate(args, mutants, tmp_path)
    counted = [gate.note(m, outcome, 1.0) for m, outcome in zip(mutants, outcomes, strict=True)]
    assert counted == [not outcome.startswith("none") for outcome in outcomes]
    return gate, {mutant.key for mutant in mutants}


@pytest.mark.parametrize(
    ("outcomes", "proved", "share", "passes"),
    [
        (["killed: x"] * 19 + ["survived"], 0, 0.95, True),
        (["killed: x"] * 18 + ["survived"], 0, 18 / 19, False),
        (["killed: x"] * 18 + ["survived: no test reaches it"], 0, 18 / 19, False),
        (["killed: x"] * 18 + ["none: same byte code", "survived"], 0, 18 / 19, False),
        (["killed: x"] * 18 + ["survived"], 1, 1.0, True),
        (["killed: x"] * 19, 1, 1.0, False),  # a proof of what is killed
        ([], 0, 0.0, False),
    ],
)
def test_the_gate_passes_from_95_percent_on(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    outcomes: list[str],
    proved: int,
    share: float,
    passes: bool,
) -> None:
    gate, keys = gate_after(monkeypatch, tmp_path, outcomes, proved)
    assert (gate.share(), gate.passes(keys)) == (share, passes)
    killed = sum(outcome.startswith("killed") for outcome in outcomes) - (proved and not passes)
    report = gate.report("7")
    assert (report["killed"], report["tried"]) == (killed, len(gate.real()))
    assert report["no_mutants"] == len(outcomes) - len(gate.real())


@pytest.mark.parametrize(
    ("by_tests", "more_by_ci", "passes"), [(85, 12, True), (84, 13, False), (90, 6, False)]
)
def test_each_tier_kills_its_share(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    by_tests: int,
    more_by_ci: int,
    passes: bool,
) -> None:
    rest = 100 - by_tests - more_by_ci
    life = more_by_ci // 2  # of the binding's mutants, by what runs in .ci/run alone
    killers = ["quick"] * by_tests + ["dear"] * (more_by_ci - life) + ["slow"] * rest
    outcomes = [f"killed: {test}\tsaid" for test in killers] + ["killed: life.py: leak"] * life
    gate, keys = gate_after(monkeypatch, tmp_path, [*outcomes, "survived"])
    gate.tiers = dict(zip(("quick", "dear", "slow"), mutate_python.tiers.TIERS, strict=True))
    killed = gate.report("7")["tiers"]
    assert list(killed.values()) == [by_tests, by_tests + more_by_ci, 100]
    assert gate.passes(keys) == passes


def test_a_mutant_meets_one_tier_after_the_other_until_one_kills_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate, _ = gate_after(monkeypatch, tmp_path, ["survived"] * 3)
    names = ["a::quick", "a::dear", "a::slow"]
    reach = mutate_python.Map([])
    reach.seconds = dict.fromkeys(names, 1.0)
    tests = dict(zip(mutate_python.tiers.TIERS, ([name, "gone"] for name in names), strict=True))
    monkeypatch.setattr(mutate_python, "make_map", lambda *_: reach)
    monkeypatch.setattr(mutate_python, "preload", lambda _: None)
    monkeypatch.setattr(mutate_python, "tiers_of_tests", lambda: tests)
    monkeypatch.setattr(mutate_python.Map, "tests_of", lambda part, mutant, _: part.seconds)
    met: list[tuple[int, list[str], bool]] = []

    def try_mutants(mutants: Any, count: int, tests_of: Any, last: bool) -> None:
        assert count == len(mutants)
        met.append((count, list(tests_of(mutants[0])), last))
        gate.note(mutants[0], f"killed: {names[len(met) - 1]}\tsaid", 1.0)

    monkeypatch.setattr(gate, "try_mutants", try_mutants)
    gate.try_tiers(3)
    assert met == [(3, names[:1], False), (2, names[1:2], False), (1, names[2:], True)]
    assert list(gate.killed_by_tier().values()) == [1, 2, 3]


def test_a_sample_is_another_where_package_or_tests_change_and_the_same_whatever_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutate_python, "ROOT", tmp_path)
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run([*git, "init", "-q"], check=True)
    seeds = []
    files = "oracle_offload/host/sizes.py", "csrc/a.c", "tests/mutation/proofs.toml", "README.md"
    for name in (*files, *files):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{len(seeds)}\n", encoding="utf-8")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", name], check=True)
        seeds.append(mutate_python.seed_of_tree())
    assert seeds[0] != seeds[1] == seeds[2] == seeds[3]
    assert seeds[3] != seeds[4] != seeds[5] == seeds[6] == seeds[7]
    assert all(len(seed) == 12 for seed in seeds)


def test_the_gate_fails_on_a_proof_whose_mutant_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate, keys = gate_after(monkeypatch, tmp_path, ["killed: x"] * 20 + ["survived"], 1)
    assert gate.passes(keys)
    (proof,) = gate.proofs
    assert gate.idle_proofs(keys - {proof}) == [proof] and not gate.passes(keys - {proof})


def test_what_was_killed_is_not_tried_again_until_its_file_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate, _ = gate_after(monkeypatch, tmp_path, ["killed: x", "survived", "none: no"])
    assert [gate.kept(mutant) for mutant in gate.mutants] == ["killed: x", "", "none: no"]
    again = mutate_python.Gate(gate.args, gate.mutants, tmp_path)
    assert again.kept(gate.mutants[0]) == "killed: x"
    again.digests["tools/mutants.py"] = "another"
    assert again.kept(gate.mutants[0]) == ""


def test_what_killed_a_mutant_is_remembered_and_meets_it_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    test = "tests/unit/test_cli.py::test_y[a: b]"
    outcomes = [f"killed: {test}\tsaid: no", "survived", "none: no", "killed: binding_life.py"]
    file = tmp_path / "killers.json"
    monkeypatch.setattr(mutate_python, "KILLERS", file)
    file.write_text('{"gone": "tests/a.py::b", "of another sample": "tests/c.py::d"}')
    gate, keys = gate_after(monkeypatch, tmp_path, outcomes)
    gate.remember(keys | {"of another sample"})
    gate.killers = json.loads(file.read_text())
    first = gate.mutants[0].key
    assert gate.killers == {first: test, "of another sample": "tests/c.py::d"}
    # A test whose file is gone would end pytest with an error, which is no kill.
    gate.killers[gate.mutants[1].key] = "tests/unit/test_gone.py::test_x"
    met = {}

    def try_mutants(mutants: object, count: int, tests_of: Any, last: bool) -> None:
        assert (mutants, count, last) == (gate.mutants, 4, False)
        met.update({mutant.key: tests_of(mutant) for mutant in gate.mutants})

    monkeypatch.setattr(gate, "try_mutants", try_mutants)
    gate.try_killers(gate.mutants, 4)
    assert met.pop(first) == {test: mutate_python.KILLER_S}
    assert list(met.values()) == [{}] * 3


def test_the_tests_near_a_mutant_killed_others_of_its_function_then_of_its_module() -> None:
    mutant = Mutant("a/b.py", 1, "f | negate", 0, 0, "", "x")  # file | function | kind | code
    unit = ("binding", "cli", "sizes", "coded", "build", "floors")
    binding, cli, sizes, coded, build, floors = (f"tests/unit/test_{name}.py" for name in unit)
    killers = {
        "a/b.py | f | delete | y": f"{cli}::test_1",
        "a/b.py | g | delete | y": f"{sizes}::test_1",
        "a/b.py | g | delete | z": f"{sizes}::test_2",
        "a/c.py | f | delete | y": f"{coded}::test_1",
        "a/c.py | f | delete | z": f"{coded}::test_2",
        "a/c.py | f | delete | w": f"{floors}::test_1",
        "a/b.py | f | delete | z": "tests/unit/test_gone.py::test_1",
        "d/b.py | f | delete | y": f"{binding}::test_1",
        "d/c.py | f | delete | y": f"{build}::test_1",
    }
    assert mutate_python.near(mutant, killers) == [cli, sizes, coded]
    far = Mutant("e/b.py", 1, "f | negate", 0, 0, "", "x")
    assert mutate_python.near(far, killers) == []


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("missed", [1, mutate_python.NEAR_MUTANTS, mutate_python.NEAR_MUTANTS + 1])
def test_continuous_integration_makes_no_map_of_all_tests(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    near: bool,
    missed: int,
) -> None:
    gate, _ = gate_after(monkeypatch, tmp_path, ["survived"] * missed + ["killed: x"] * 19)
    gate.args.near = near
    mapped: list[object] = []
    monkeypatch.setattr(gate, "try_killers", lambda *_: None)
    monkeypatch.setattr(mutate_python, "near", lambda mutant, _: [f"near {mutant.kind}"])
    monkeypatch.setattr(
        gate,
        "try_reached",
        lambda mutants, count, quick, files=(): mapped.append((len(mutants), quick, files)),
    )
    gate.args.quick = False
    gate.try_sample(missed + 19)
    few = 1 < missed <= mutate_python.NEAR_MUTANTS
    enough = [(missed, True, [f"near kind {n}" for n in range(missed)])] if few else []
    whole = [] if near or missed == 1 else [(missed, True, ()), (missed, False, ())]
    assert mapped == enough + whole
    said = "python tools/mutate_python.py --seed 7 --remember" in capsys.readouterr().out
    assert said == (near and missed > 1)


def test_named_tests_are_the_only_ones_a_mutant_meets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate, _ = gate_after(monkeypatch, tmp_path, ["survived"])
    mapped: list[object] = []
    monkeypatch.setattr(gate, "try_reached", lambda *_, **named: mapped.append(named))
    gate.args.tests = ["tests/unit/test_sizes.py"]
    gate.try_own(1)
    assert mapped == [{"quick": False, "files": gate.args.tests}]
    gate.args.tests = ["tests/unit/test_sizes.py", "tests/unit/test_size.py"]
    with pytest.raises(SystemExit, match=r"the gate knows: tests/unit/test_size\.py$"):
        gate.try_own(1)
    assert len(mapped) == 1


def test_the_tests_about_a_module_come_first_then_the_quick_ones_and_functions_in_turn() -> None:
    mutant = next(
        mutant
        for mutant in mutants_python.all_mutants()
        if mutant.file == "oracle_offload/model/masters.py" and mutant.function
    )
    first, places = mutate_python.places_of_package()[mutant.file]
    place = first + places.index(mutant.place)
    about, other = "tests/training/test_masters.py", "tests/training/test_matrix.py"
    seconds = {
        f"{other}::quick[a]": 0.01,
        f"{other}::quick[b]": 0.02,
        f"{other}::slow": 0.025,
        f"{about}::of_it": 0.1,
        f"{other}::elsewhere": 0.001,
        f"{about}::of_another_place": 0.001,
    }
    reached = {test: [place] for test in list(seconds)[:4]}
    reached[f"{about}::of_another_place"] = [place + 1 if place == first else first]
    part = {"passed": seconds, "failed": {}, "why": "", "modules": [], "places": reached}
    tests = mutate_python.Map([part]).tests_of(mutant, 20.0)
    assert [test.split("::")[1] for test in tests] == [
        *("of_it", "quick[a]", "slow", "quick[b]"),
        "of_another_place",  # what is done once in a process may show there
    ]
