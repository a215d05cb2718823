"""What each test costs, by file and by phase: a plugin of pytest (`make test-bill`).

    python -m pytest -p bill --bill out/bill.json        # measure: seconds of processors
    python tools/bill.py out/bill.json                   # print the table
    python tools/bill.py out/bill.json --write           # and put it into docs/development.md;
                                                         # tests/dear.txt has what is dear
    python tools/bill.py --parts out/ci.txt --write      # what .ci/run took for each of its parts

Seconds of processors, not of the clock: they hardly depend on what else the machine does. What
processes that a test started took is counted where the test waited for them. With xdist every
worker imports every file of tests, and all of that is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiers import DEAR, LONG_S, TOGETHER_S

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "development.md"
BEGIN, END = "<!-- bill: make test-bill -->\n", "<!-- end of the bill -->"
PARTS_BEGIN = "<!-- parts: .ci/run, then make ci-bill ARGS=--write -->\n"
PARTS_END = "<!-- end of the parts -->"
ADDED = ("site", "gpu-rehearsal", "cuda-core")  # parts of .ci/run that are no check of a change
PHASES = ("import", "set-up", "call", "processes")
FILES_SHOWN, FUNCTIONS_SHOWN = 25, 30
WHEN = {"setup": "set-up", "call": "call", "teardown": "set-up"}

# Of a test, or of a file that is imported: a Counter of seconds by phase.
Costs = dict[str, Any]


def spent() -> tuple[float, float]:
    """Return the seconds of processors of this process, and of those that it has waited for."""
    times = os.times()
    forks = getattr(sys.modules.get("forks"), "spent_s", 0.0)  # tests/training/forks.py
    return time.process_time(), times.children_user + times.children_system + forks


class Bill:
    """Seconds of processors by test and phase, of this process and, with xdist, of its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.costs: Costs = defaultdict(Counter)

    def add(self, name: str, phase: str, since: tuple[float, float]) -> None:
        own, others = spent()
        self.costs[name][phase] += own - since[0]
        if others > since[1]:
            self.costs[name]["processes"] += others - since[1]

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        start = spent()
        report = yield
        if isinstance(collector, pytest.Module):
            self.add(collector.nodeid, "import", start)
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        yield from self.phase(item, "set-up")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        yield from self.phase(item, "call")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        yield from self.phase(item, "set-up")

    def phase(self, item: pytest.Item, name: str) -> Generator[None, None, None]:
        start = spent()
        try:
            return (yield)
        finally:
            self.add(item.nodeid, name, start)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker of xdist has counted."""
        for name, costs in getattr(node, "workeroutput", {}).get("bill", {}).items():
            self.costs[name].update(costs)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        costs = {name: dict(one) for name, one in self.costs.items()}
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["bill"] = costs
            return
        path = Path(self.config.getoption("--bill"))
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"schema": "oracle_offload/test-bill/1", "seconds": costs}
        path.write_text(json.dumps(document, indent=0) + "\n", encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add where the bill goes."""
    parser.addoption("--bill", default="out/bill.json", help="where to write what each test costs")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count."""
    config.pluginmanager.register(Bill(config), "bill of this run")


# ---- the page ----


def read(paths: Sequence[Path]) -> Costs:
    """Return the costs of several runs as if they were one."""
    costs: Costs = defaultdict(Counter)
    for path in paths:
        for name, one in json.loads(path.read_text(encoding="utf-8"))["seconds"].items():
            costs[name].update(one)
    return costs


def table(rows: Sequence[tuple[str, Counter[str], int]]) -> list[str]:
    """Return a table of costs: a name, its phases, and how many tests are summed there."""
    lines = [
        f"| | tests | {' | '.join(PHASES)} | together |",
        f"| --- | ---: |{' ---: |' * (len(PHASES) + 1)}",
    ]
    for name, costs, tests in rows:
        cells = [f"{costs[phase]:.0f}" for phase in PHASES]
        lines.append(f"| {name} | {tests:,} | {' | '.join(cells)} | {costs.total():.0f} |")
    return lines


def page(costs: Costs) -> str:
    """Return what development.md says of a bill."""
    groups: dict[str, Costs] = {key: defaultdict(Counter) for key in ("folder", "file", "function")}
    counts: dict[str, Counter[str]] = {key: Counter() for key in groups}
    for test, one in costs.items():
        file, _, inside = test.partition("::")
        names = {
            "folder": file.rpartition("/")[0],
            "file": file,
            "function": f"{file}::{inside.partition('[')[0]}",
        }
        for key, name in names.items():
            groups[key][name].update(one)
            counts[key][name] += bool(inside)

    def dearest(key: str, most: int) -> list[str]:
        found = sorted(groups[key].items(), key=lambda row: -row[1].total())
        rows = [(name, one, counts[key][name]) for name, one in found if counts[key][name]]
        return table([(f"`{name}`", one, n) for name, one, n in rows[:most]])

    whole: Counter[str] = Counter()
    for one in costs.values():
        whole.update(one)
    tests = sum(counts["folder"].values())
    return "\n".join(
        [
            *table([("all", whole, tests)]),
            *dearest("folder", len(groups["folder"]))[2:],
            "",
            f"The {FILES_SHOWN} dearest files:",
            "",
            *dearest("file", FILES_SHOWN),
            "",
            f"The {FUNCTIONS_SHOWN} dearest functions:",
            "",
            *dearest("function", FUNCTIONS_SHOWN),
        ]
    )


def dear(costs: Costs) -> dict[str, float]:
    """Return the tests, without parameters, that are dear, and what a case takes on average.

    A case takes LONG_S, or the cases take half of TOGETHER_S: what is left of a test of which some
    were left out for that takes more.
    """
    cases: dict[str, list[float]] = defaultdict(list)
    for test, one in costs.items():
        if "::" in test:
            cases[test.partition("[")[0]].append(one.total())
    means = {test: sum(each) / len(each) for test, each in sorted(cases.items())}
    return {
        test: mean
        for test, mean in means.items()
        if mean >= LONG_S or sum(cases[test]) >= TOGETHER_S / 2
    }


def parts_page(lines: Sequence[str]) -> str:
    """Return the table of what `.ci/run` took, from the lines of its out/ci.txt."""
    parts = {name: (int(wall), int(cpu)) for wall, _, cpu, _, name in map(str.split, lines)}

    def row(what: str, names: Sequence[str]) -> str:
        wall, cpu = (sum(parts[name][n] for name in names) for n in (0, 1))
        return f"| {what} | {wall} | {cpu} |"

    own = [name for name in parts if name not in ADDED]
    added = [name for name in parts if name in ADDED]
    return "\n".join(
        [
            "| | clock | processors |",
            "| --- | ---: | ---: |",
            *(row(f"`make {name}`", [name]) for name in own),
            row("together", own),
            *(row(f"`make {name}`", [name]) for name in added),
            row("all", [*parts]),
        ]
    )


def put(begin: str, end: str, text: str) -> None:
    """Write a table into the page, between its two comments."""
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    PAGE.write_text(f"{before}{begin}\n{text}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the bill, or write it into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bills", nargs="*", type=Path, help="what runs of pytest wrote (--bill)")
    parser.add_argument("--parts", type=Path, help="what .ci/run wrote: out/ci.txt")
    parser.add_argument(
        "--write", action="store_true", help="into docs/development.md and tests/dear.txt"
    )
    args = parser.parse_args(argv)
    if args.parts:
        text = parts_page(args.parts.read_text(encoding="utf-8").splitlines())
        print(text)
        if args.write:
            put(PARTS_BEGIN, PARTS_END, text)
    if not args.bills:
        return 0
    costs = read(args.bills)
    text = page(costs)
    print(text)
    if args.write:
        rows = (f"{test} {seconds:.2f}\n" for test, seconds in dear(costs).items())
        DEAR.write_text("".join(rows), encoding="utf-8")
        put(BEGIN, END, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
