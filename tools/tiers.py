"""Which tests run when: three tiers by two markers, which conftest.py puts on with this.

As a plugin (`pytest -p tiers --tiers FILE`) it writes down the tier of each test.

    make test     what has neither marker
    .ci/run       and what is marked ci
    make proof    and what is marked slow

A test that is no part of .ci/run is marked slow by hand, or by `in_turn`. What else is left out
goes by what a case was measured to take (tests/dear.txt, which `make test-bill` writes): `make
test` has no test whose cases take LONG_S, and of a test .ci/run has as many cases as take
TOGETHER_S together, as far apart as can be. Where parameters are multiplied, these are some of a
covering: of a product of three and more every pair of values is in one of its cases. `make proof`
has the rest. Of what is left `make test` runs the first, the middle and the last case. What takes a
device runs in .ci/run on the one that is not "cpu" (`make device-type`): the marker elsewhere; and
on "cpu" in its first case, or where the other skips it. The other cases of `make test` on "cpu" are
marked again. Elsewhere is also on the cases of the C programs that .ci/run has under the sanitizers
alone.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

FOLDERS = ("tests/training/", "tests/clients/", "tests/planning/")  # where a case is a training
PRODUCT = 8  # cases: a smaller product is left whole
FEW = 3  # cases of a test in `make test`
DEAR = Path(__file__).resolve().parent.parent / "tests" / "dear.txt"
SKIPPED = Path(__file__).resolve().parent.parent / "tests" / "training" / "simgpu_skips.txt"
# Seconds of processors that a case of a test takes which `make test` leaves out, and that all cases
# of a test may take in .ci/run.
LONG_S, TOGETHER_S = 1.0, 4.0


def covering(cases: Sequence[Mapping[str, int]]) -> list[int]:
    """Return which cases have every pair of values of two parameters that any case has.

    Parameters
    ----------
    cases : sequence of mappings
        The value of each parameter, by its number.

    Returns
    -------
    list of int
        Their numbers, in order; of cases with as many new pairs the first one is taken.
    """
    pairs = [set(itertools.combinations(sorted(case.items()), 2)) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda nth: len(pairs[nth] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def spread(count: int, chosen: int = FEW) -> set[int]:
    """Return `chosen` numbers below `count`: the first, the last, and as far apart as can be."""
    return {(count - 1) * nth // max(chosen - 1, 1) for nth in range(chosen)} if count else set()


def in_turn(names: str, rows: Iterable[Any], values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize by rows that take turns at some values, for a product that shows little more.

    Parameters
    ----------
    names : str
        Of the arguments, with commas between; the last one is what takes the values.
    rows : iterable
        What the other arguments are; a tuple where they are several.
    values : sequence
        What each row takes one of. With the others it runs in `make proof`.
    """
    cases = []
    for nth, row in enumerate(rows):
        given = row if isinstance(row, tuple) else (row,)
        for at, value in enumerate(values):
            marks = pytest.mark.slow if at != nth % len(values) else ()
            cases.append(pytest.param(*given, value, marks=marks))
    return pytest.mark.parametrize(names, cases)


def values_of(items: Sequence[Any]) -> list[dict[str, int]]:
    """Return each item's parameters, by the number of their value."""
    numbers: dict[str, dict[int, int]] = defaultdict(dict)
    return [
        {
            name: numbers[name].setdefault(id(value), len(numbers[name]))
            for name, value in item.callspec.params.items()
        }
        for item in items
    ]


def parameters(cases: Sequence[Mapping[str, int]]) -> int:
    """Return how many parameters vary by themselves: names of one decorator vary together."""
    columns = {tuple(case[name] for case in cases) for name in cases[0]}
    return sum(len(set(column)) > 1 for column in columns)


@functools.cache
def dear() -> dict[str, float]:
    """Return the tests, without parameters, that were measured to be dear: seconds of a case."""
    rows = map(str.split, DEAR.read_text(encoding="utf-8").splitlines())
    return {test: float(seconds) for test, seconds in rows}


@functools.cache
def skipped() -> list[str]:
    """Return the patterns of the tests that do not run on the other type of device."""
    lines = SKIPPED.read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


def has_twin(item: pytest.Item) -> bool:
    """Whether .ci/run has a test if it is left out on "cpu": where it takes no device, or both."""
    if item.get_closest_marker("elsewhere") is None:
        return True
    twin = item.nodeid.rpartition("/")[2].replace("[cpu", "[simgpu", 1)
    return not any(fnmatch.fnmatch(twin, pattern) for pattern in skipped())


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark the cases that `make test` or `.ci/run` leave out."""
    tests: dict[tuple[str, object], list[Any]] = defaultdict(list)
    for item in items:
        name = item.nodeid.partition("[")[0]
        callspec = getattr(item, "callspec", None)
        device = callspec.params.get("device") if callspec else None
        if device is None and item.get_closest_marker("elsewhere"):
            item.add_marker(pytest.mark.ci)  # another target of .ci/run has it
        elif dear().get(name, 0.0) >= LONG_S and has_twin(item):
            item.add_marker(pytest.mark.ci)
        if callspec is None or not item.nodeid.startswith(FOLDERS):
            continue
        if not any(item.get_closest_marker(marker) for marker in ("slow", "gpu")):
            tests[name, device].append(item)

    def leave(same: list[Any], chosen: Collection[int]) -> list[Any]:
        for nth in set(range(len(same))).difference(chosen):
            same[nth].add_marker(pytest.mark.slow)
        return [same[nth] for nth in sorted(chosen)]

    for (name, _), same in tests.items():
        cases = values_of(same)
        if len(same) >= PRODUCT and parameters(cases) >= 3:
            same = leave(same, covering(cases))
        for item in same[1:]:
            if item.get_closest_marker("elsewhere") and has_twin(item):
                item.add_marker(pytest.mark.again)
        if name in dear():
            same = leave(same, spread(len(same), max(1, int(TOGETHER_S / dear()[name]))))
        for nth in set(range(len(same))).difference(spread(len(same))):
            if has_twin(same[nth]):
                same[nth].add_marker(pytest.mark.ci)


# ---- the plugin ----

TIERS = ("make test", ".ci/run", "make proof")  # each has what the one before it has


def tier_of(item: pytest.Item) -> str:
    """Return the first tier that has a test, be it on another type of device."""
    if item.get_closest_marker("slow"):
        return TIERS[2]
    return TIERS[1] if item.get_closest_marker("ci") else TIERS[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add where the tiers go."""
    parser.addoption("--tiers", type=Path, help="write the tier of each test, as JSON")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write them."""
    tiers = {item.nodeid: tier_of(item) for item in session.items}
    session.config.getoption("--tiers").write_text(json.dumps(tiers), encoding="utf-8")
