"""Three tiers of tests: what `.ci/run` and `make test` leave out is a sample, and never a test."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bill
import pytest
import tiers

ROOT = Path(__file__).resolve().parents[2]


def product(*sizes: int) -> list[dict[str, int]]:
    ranges = [range(size) for size in sizes]
    names = [f"p{nth}" for nth in range(len(sizes))]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*ranges)]


@pytest.mark.parametrize(
    ("sizes", "most"), [((2, 2, 2), 4), ((3, 2, 2, 3, 2), 12), ((7, 2, 2), 14), ((5, 4), 20)]
)
def test_a_covering_has_every_pair_of_values(sizes: tuple[int, ...], most: int) -> None:
    cases = product(*sizes)
    chosen = tiers.covering(cases)
    assert len(chosen) <= most

    def pairs(numbers: Any) -> set[Any]:
        rows = (itertools.combinations(sorted(cases[nth].items()), 2) for nth in numbers)
        return {pair for row in rows for pair in row}

    assert pairs(chosen) == pairs(range(len(cases)))


def test_parameters_of_one_decorator_vary_together() -> None:
    assert tiers.parameters(product(3, 2, 2)) == 3
    assert tiers.parameters([{**case, "same": case["p0"]} for case in product(3, 2)]) == 2
    assert tiers.parameters([{**case, "one": 1} for case in product(3, 2)]) == 2


def test_rows_take_turns_at_the_values() -> None:
    parametrized = tiers.in_turn("a,b,c", [(1, 2), (3, 4), (5, 6)], "xyz"[:2])
    names, cases = parametrized.args
    assert names == "a,b,c"
    assert [case.values for case in cases if not case.marks] == [
        (1, 2, "x"),
        (3, 4, "y"),
        (5, 6, "x"),
    ]
    assert [case.values for case in cases if case.marks] == [(1, 2, "y"), (3, 4, "x"), (5, 6, "y")]
    assert {mark.name for case in cases for mark in case.marks} == {"slow"}
    _, cases = tiers.in_turn("a,b", ["one"], [None, True]).args
    assert [(case.values, bool(case.marks)) for case in cases] == [
        (("one", None), False),
        (("one", True), True),
    ]


class Item(SimpleNamespace):
    """What is asked of an item of pytest."""

    def get_closest_marker(self, name: str) -> Any:
        return name if name in self.marks else None

    def add_marker(self, marker: Any) -> None:
        self.marks.add(marker.name)


def items(name: str, cases: list[dict[str, Any]], *marks: str) -> list[Any]:
    return [
        Item(
            nodeid=f"{name}[{case.get('device', '')}-{nth}]",
            callspec=SimpleNamespace(params=case),
            marks=set(marks),
        )
        for nth, case in enumerate(cases)
    ]


def marks(found: list[Any], marker: str) -> int:
    return sum(marker in item.marks for item in found)


def test_of_a_product_a_covering_is_left_and_of_that_three_cases() -> None:
    found = items("tests/training/test_a.py::test", product(3, 2, 2, 3, 2))
    chosen = len(tiers.covering(product(3, 2, 2, 3, 2)))
    tiers.mark(found)
    assert marks(found, "slow") == 72 - chosen
    assert marks(found, "ci") == chosen - 3
    assert not any({"ci", "slow"} <= item.marks for item in found)


def test_what_is_small_or_elsewhere_or_marked_is_left_whole() -> None:
    for found in (
        items("tests/training/test_a.py::test", product(3)),
        items("tests/unit/test_a.py::test", product(3, 3, 3)),
        items("tests/training/test_a.py::test", product(3, 3, 3), "gpu"),
    ):
        before = [set(item.marks) for item in found]
        tiers.mark(found)
        assert [item.marks for item in found] == before
    pairs = items("tests/clients/test_a.py::test", product(5, 4))
    tiers.mark(pairs)
    assert (marks(pairs, "slow"), marks(pairs, "ci")) == (0, 17)


def test_what_takes_no_device_and_runs_elsewhere_is_left_to_it() -> None:
    found = items("tests/c/test_c_programs.py::test_case", [{"name": "a"}], "elsewhere")
    tiers.mark(found)
    assert found[0].marks == {"elsewhere", "ci"}


def test_each_device_has_a_covering_of_its_own() -> None:
    cases = [{**case, "device": name} for name in ("cpu", "simgpu") for case in product(3, 2, 2)]
    found = items("tests/training/test_a.py::test", cases)
    tiers.mark(found)
    for half in (found[:12], found[12:]):
        assert marks(half, "slow") == 12 - len(tiers.covering(product(3, 2, 2))) > 0


def test_what_the_other_device_skips_is_not_left_to_it() -> None:
    name = "tests/training/test_any.py::test_an_activation_that_forward_changes_in_place"
    cases = [{"device": "cpu", "n": n} for n in range(9)]
    skipped, others = items(name, cases, "elsewhere"), items(f"{name[:30]}", cases, "elsewhere")
    tiers.mark(skipped)
    tiers.mark(others)
    assert (marks(skipped, "ci"), marks(others, "ci")) == (0, 6)


def test_what_the_other_device_runs_has_its_first_case_on_cpu_too() -> None:
    name = "tests/training/test_any.py::test_an_activation_that_forward_changes_in_place"
    cases = [{"device": "cpu", "n": n} for n in range(5)]
    skipped, others = items(name, cases, "elsewhere"), items(f"{name[:30]}", cases, "elsewhere")
    alone = items(name, cases)
    for found in (skipped, others, alone):
        tiers.mark(found)
    assert (marks(skipped, "again"), marks(alone, "again")) == (0, 0)
    assert ["again" in item.marks for item in others] == [False, True, True, True, True]


def test_every_dear_test_is_there_and_a_long_one_begins_the_middle_tier() -> None:
    assert tiers.dear()
    for name in tiers.dear():
        file, _, function = name.rpartition("::")
        source = (ROOT / file.partition("::")[0]).read_text(encoding="utf-8")
        assert re.search(rf"^ *def {function}\(", source, re.M), f"run make test-bill: {name}"
    for name, seconds in tiers.dear().items():
        (found,) = items(name, [{}])
        tiers.mark([found])
        assert found.marks == ({"ci"} if seconds >= tiers.LONG_S else set())


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        (9.0, [0]),
        (tiers.TOGETHER_S / 2, [0, 4]),
        (tiers.TOGETHER_S / 3.5, [0, 2, 4]),
        (tiers.TOGETHER_S / 5, [0, 1, 2, 3, 4]),
        (0.1, [0, 1, 2, 3, 4]),
    ],
)
def test_of_a_dear_test_each_device_has_as_many_cases_as_take_so_long(
    monkeypatch: pytest.MonkeyPatch, seconds: float, left: list[int]
) -> None:
    monkeypatch.setattr(tiers, "dear", lambda: {"tests/training/test_a.py::test": seconds})
    cases = [{"device": device, "n": n} for device in ("cpu", "simgpu") for n in range(5)]
    found = items("tests/training/test_a.py::test", cases)
    tiers.mark(found)
    chosen = [nth for nth, item in enumerate(found) if "slow" not in item.marks]
    assert chosen == [*left, *(5 + nth for nth in left)]


def run_with_plugin(folder: Path, plugin: str, *options: str) -> None:
    """Run the tests in a folder with one of our plugins."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", plugin, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_test_is_written_down_with_its_first_tier(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_plain(): pass\n"
        "@pytest.mark.ci\ndef test_more(): pass\n"
        "@pytest.mark.ci\n@pytest.mark.slow\ndef test_all(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    ci: a\n    slow: b\n")
    path = tmp_path / "tiers.json"
    run_with_plugin(tmp_path, "tiers", f"--tiers={path}")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert list(found.values()) == list(tiers.TIERS)


def test_a_bill_has_each_phase_of_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_costs.py").write_text(
        "import pytest, subprocess, sys, time\n"
        "def burn(seconds):\n"
        "    end = time.process_time() + seconds\n"
        "    while time.process_time() < end: pass\n"
        "burn(0.2)\n"
        "@pytest.fixture\n"
        "def dear():\n    burn(0.3)\n"
        "def test_set_up(dear): pass\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_call(n): burn(0.4)\n"
        "def test_process():\n"
        "    subprocess.run([sys.executable, '-c', 'for i in range(10**7): pass'])\n"
    )
    for more in ([], ["-n", "2"]):
        path = tmp_path / f"bill{len(more)}.json"
        run_with_plugin(tmp_path, "bill", "--bill", str(path), *more)
        costs = bill.read([path])
        assert costs["test_costs.py"]["import"] >= 0.2 * (1 if not more else 2)
        assert costs["test_costs.py::test_set_up"]["set-up"] >= 0.3
        assert costs["test_costs.py::test_call[2]"]["call"] >= 0.4
        assert costs["test_costs.py::test_process"]["processes"] > 0.05
        (row,) = re.findall(
            r"^\| `test_costs.py::test_call` \| 2 \|.* (\d+) \|$", bill.page(costs), re.M
        )
        assert int(row) == 1
        costs["a::cheap[1]"].update(call=0.1)
        costs["a::dear[1]"].update(call=2 * tiers.LONG_S)
        costs["a::dear[2]"].update(call=1.0)
        for nth in range(40):
            costs[f"a::many[{nth}]"].update(call=tiers.TOGETHER_S / 79)
            costs[f"a::few[{nth}]"].update(call=tiers.TOGETHER_S / 81)
        # Not those that ran: on a busy machine one of them may be dear.
        dear = {name: mean for name, mean in bill.dear(costs).items() if name.startswith("a::")}
        many = pytest.approx(tiers.TOGETHER_S / 79)
        assert dear == {"a::dear": tiers.LONG_S + 0.5, "a::many": many}


def test_what_the_parts_of_ci_took_is_added_up() -> None:
    lines = ["   120 s     200 s  lint", "    30 s      41 s  site", "     9 s      10 s  fuzz"]
    assert bill.parts_page(lines).splitlines()[2:] == [
        "| `make lint` | 120 | 200 |",
        "| `make fuzz` | 9 | 10 |",
        "| together | 129 | 210 |",
        "| `make site` | 30 | 41 |",
        "| all | 159 | 251 |",
    ]


def test_a_process_beside_others_computes_by_one_thread(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "test_threads.py").write_text(
        "import os\n"
        "def test_threads():\n"
        "    assert os.environ.get('OMP_NUM_THREADS') == os.environ['EXPECTED']\n"
    )
    for given, expected in (({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3")):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools"), "EXPECTED": expected}
        environment.pop("OMP_NUM_THREADS", None)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "1"],
            cwd=tmp_path,
            env={**environment, **given},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
