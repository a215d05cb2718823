"""The mutation gate of the Python layer and its binding: break one place, see that a test notices.

    python tools/mutate_python.py --count 40             # a sample, by package and tests
    python tools/mutate_python.py --count 150 --seed 7
    python tools/mutate_python.py --seed gate --near       # no map of all tests: minutes
    python tools/mutate_python.py --seed gate --remember
    python tools/mutate_python.py --all --resume         # every mutant; go on where it was stopped
    python tools/mutate_python.py --tiers --count 300 --seed tiers   # which tier kills each
    python tools/mutate_python.py --only oracle_offload/manager.py:210
    python tools/mutate_python.py --only oracle_offload/host/sizes.py --tests
    tests/unit/test_sizes.py python tools/mutate_python.py --list

tools/mutants_python.py and tools/mutants_binding.py find the mutants, mechanically. First the tests
run once, of a parametrized one the first, the middle and the last case, and the others while they
take no more than CASES_S together, with marks that show which places of the package each reaches.
That map is kept in build/mutation for as long as neither the package nor the test changes. Each
mutant then runs the tests that reach its place until one fails, the quick ones first and at most
QUICK_S of them, in a fork of a process that has imported torch and not the package, on a copy of
the tree that processes started by a test see as well. A test that runs over its time notices too. A
test counts only if it passes on the unchanged tree when it runs alone.

Where that leaves too many survivors (and always with --all and --only), what survived meets all the
cases, under the marks once more: what no test reaches has survived.

A sample begins with less: each mutant meets the one test that is remembered as its killer
(tests/mutation/killers_python.json). Where that leaves too many, and they are few (NEAR_MUTANTS),
they meet the files of tests near by: those that are remembered for other mutants of their function
and module. Only what survives these needs the map of all tests, and never with --near, which fails
instead: continuous integration makes no map. --remember tries until the map, and writes what killed
the sample in addition to what is remembered of others.

A mutant of the binding is compiled and linked, and runs the tests that drive the extension; what
they let live runs tests/unit/binding_life.py under AddressSanitizer with leak check.

--tests asks, in seconds, what the tests of a module itself notice: no others run. With --resume
only what lived the last time meets them again.

--tiers asks what each tier of tests (tools/tiers.py) is worth: a mutant meets those of `make test`
that reach it, then what .ci/run has beyond them, then the rest. The first tier that kills it
counts. It fails where .ci/run has less than TIER_SHARES of what all kill, or `make test`. A test on
"cpu" counts for its twin on another type of device; no test that is marked slow by hand is in it.

Survivors that cannot change behaviour are listed with the proof in
tests/mutation/equivalent_python.toml; they are no mutants. The gate fails, with exit code 3, where
less than 95% are killed, and where a proof has lost its mutant.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import copy
import functools
import gc
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import mutants_binding
import mutants_python
import pytest
import reached_places
import sanitized_python
import tiers
from binding_builds import LIBRARY, BindingBuilds, plain_and_sanitized
from c_build import ROOT, BuildError
from mutants import Mutant
from mutants_python import PythonMutant, byte_code

CACHE = ROOT / "build/mutation"
STATE = CACHE / "state.json"
EQUIVALENT = ROOT / "tests/mutation/equivalent_python.toml"
KILLERS = ROOT / "tests/mutation/killers_python.json"  # key of a mutant -> the test that killed it
KILLED_AT_LEAST = 0.95
# Of the mutants that are killed at all, the share that a tier kills at least.
TIER_SHARES = dict(zip(tiers.TIERS, (0.85, 0.97, 1.0), strict=True))
TEST_FOLDERS = (
    *("tests/unit", "tests/training", "tests/fault"),
    *("tests/planning", "tests/clients"),
)
# They build, install or call other programs; none runs a line of the package in place.
WITHOUT = ("test_conformance", "test_gpu_tools", "test_package", "test_soak")
# What drives the extension module by itself; the rest of the tests of a binding's mutant train.
BINDING_TESTS = tuple(
    f"tests/unit/test_{name}" for name in ("binding", "coded", "driver_messages", "host_buffer")
)
BINDING_USER = "oracle_offload/engine/engines.py"
LIFE = "tests/unit/binding_life.py"
LIFE_S = 60.0
COLLECTION_S = 60.0  # in which the tests must be found
MAP_TEST_S = 60.0  # that a test is thought to take while the map is made
TEST_S = 10.0  # that a test may take beyond five times what it took in the map
QUICK_S, ALL_S = 20.0, 60.0  # what outlives tests that take so long together has survived
LEAST_TESTS = 30  # that run however long they take: the machine may be busy
BATCH_S = 2.0  # the tests that run first; most mutants die of them
FILE_S = 0.3  # that a file of tests costs in addition to its tests
ABOUT = 20.0  # times as dear may a test be that is about the module of a mutant
BEGIN_CHARS = 2000  # of a file of tests: what it is about, and what it imports
KILLER_S = 4.0  # that a test is thought to take that killed a mutant before
NEAR_MUTANTS, NEAR_FILES = 6, 3  # so many may meet the tests near by, of so many files each
CASES, CASES_S = 3, 1.0  # of a parametrized test that are quick: so many, or as take so long
MISSED = """Too many outlive the tests that are remembered for them and those near by. Let them meet
all tests, write the tests that are missing, and commit what this writes:
    python tools/mutate_python.py --seed {seed} --remember"""
ADDRESS_SPACE_BYTES = 8 << 30  # beyond what the process has when it starts


# ---- one worker: a tree of its own, and the processes that run tests in it ----


@dataclass
class Outcome:
    """What a run of tests did: seconds of each test that passed, what failed first, and why."""

    passed: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    why: str = ""  # where the process itself failed


class Reporter:
    """The pytest plugin of the child: selects the tests, and reports each to the parent."""

    def __init__(self, pipe: int, tests: Sequence[str], places: Path | None, quick: bool) -> None:
        self.pipe = pipe
        self.order = {test: nth for nth, test in enumerate(tests)}
        self.places = places
        self.quick = quick
        self.seconds = 0.0
        self.error = ""
        self.needed: set[str] = set()  # of the quick tests: those that run in any case
        self.spent: dict[str, float] = defaultdict(float)  # by the cases of each test

    def tell(self, **what: object) -> None:
        os.write(self.pipe, json.dumps(what).encode() + b"\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        chosen = items[:]
        if self.order:
            chosen = [item for item in items if item.nodeid in self.order]
            chosen.sort(key=lambda item: self.order[item.nodeid])
        elif self.quick:
            cases: dict[str, list[Any]] = defaultdict(list)
            for item in items:
                cases[item.nodeid.split("[")[0]].append(item)
            self.needed = {item.nodeid for same in cases.values() for item in spread(same)}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self.places is not None:
            self.tell(modules=[name for name in sys.modules if "oracle_offload" not in name])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        enough = self.spent[item.nodeid.split("[")[0]] > CASES_S
        if self.quick and enough and item.nodeid not in self.needed:
            pytest.skip("enough cases of this test were run")

    def switch(self, test: str) -> None:
        if self.places is not None:
            (self.places / "current").write_text(test, encoding="utf-8")
            reached: Any = getattr(builtins, reached_places.MARK, None)
            if reached is not None:
                reached.switch(test)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seconds, self.error = 0.0, ""
        self.tell(start=nodeid)
        self.switch(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        self.spent[report.nodeid.split("[")[0]] += report.duration
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.error = self.error or (crash.message if crash else str(report.longrepr))
        elif report.skipped:
            self.error = self.error or "skipped"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.switch("")
        self.tell(end=nodeid, seconds=self.seconds, error=self.error[:300])


def spread(cases: list[Any]) -> list[Any]:
    """Return the first, the middle and the last."""
    last = len(cases) - 1
    return [cases[at] for at in sorted({last * nth // (CASES - 1) for nth in range(CASES)})]


class Tree:
    """A copy of the repository in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / str(os.getpid())
        self.serial = 0
        self.known: dict[str, bool] = {}  # test -> whether it passes alone on the unchanged tree
        for name in tracked_files():
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)

    @contextlib.contextmanager
    def changed(self, file: str, content: bytes) -> Iterator[None]:
        """Let `file` hold something else for a while."""
        path = self.folder / file
        whole = path.read_bytes()
        try:
            self.write(path, content)
            yield
        finally:
            self.write(path, whole)

    def write(self, path: Path, content: bytes) -> None:
        # A new file, as a library is mapped; a time of its own, as byte code goes by time and size.
        self.serial += 1
        path.unlink()
        path.write_bytes(content)
        os.utime(path, (10**9 + self.serial, 10**9 + self.serial))

    def run(
        self,
        files: Sequence[str],
        tests: dict[str, float],
        places: Path | None = None,
        quick: bool = False,
    ) -> tuple[Outcome, list[str]]:
        """Run `tests` (seconds that each takes), all of `files` where none is named.

        Without a folder for `places` it stops at the first test that fails. Returns the modules
        that the tests import as well.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            status = 70
            try:
                status = self.child(files, Reporter(writing, list(tests), places, quick))
            finally:
                os._exit(status)
        os.close(writing)
        outcome = Outcome()
        modules: list[str] = []
        current, deadline = "", time.monotonic() + COLLECTION_S
        text, status, ended = b"", 0, False
        while True:
            # Not until the pipe ends: a process that a test left behind holds it open.
            said = b""
            if select.select([reading], [], [], 0.0 if ended else 0.05)[0]:
                said = os.read(reading, 1 << 20)
            *rows, text = (text + said).split(b"\n")
            for row in map(json.loads, rows):
                now = time.monotonic()
                if "start" in row:
                    current = row["start"]
                    deadline = now + TEST_S + 5 * tests.get(current, MAP_TEST_S)
                elif "end" in row:
                    if row["error"]:
                        outcome.failed[current] = row["error"]
                    else:
                        outcome.passed[current] = row["seconds"]
                    current, deadline = "", now + COLLECTION_S
                else:
                    modules = row["modules"]
            if said:
                continue
            if ended:
                break
            found, code = os.waitpid(child, os.WNOHANG)
            if not found and time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                found, code = os.waitpid(child, 0)
                outcome.why = f"{current or 'collection'} hangs"
            if found:
                status, ended = os.waitstatus_to_exitcode(code), True
            elif select.select([reading], [], [], 0.0)[0]:
                time.sleep(0.01)  # the end of the pipe, shortly before that of the process
        os.close(reading)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # what its tests left
        nothing = status == pytest.ExitCode.NO_TESTS_COLLECTED
        if status != 0 and not nothing and not outcome.why and (status != 1 or not outcome.failed):
            outcome.why = f"{current or 'pytest'} ends the process, status {status}"
        if current and outcome.why:
            outcome.failed.setdefault(current, outcome.why)
        return outcome, modules

    def child(self, files: Sequence[str], reporter: Reporter) -> int:
        """Run pytest in this process, which is a fork and ends afterwards."""
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
        log = os.open(self.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        limit = ADDRESS_SPACE_BYTES + address_space()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(self.folder)
        os.environ["PYTHONPATH"] = str(self.folder)
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(str(ROOT / "tools")):
                del sys.modules[name]
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.path[:] = [str(self.folder), *(p for p in sys.path if p != str(ROOT / "tools"))]
        with contextlib.suppress(ImportError):
            import hypothesis

            hypothesis.settings.register_profile("gate", derandomize=True, database=None)
            hypothesis.settings.load_profile("gate")
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={self.folder}.tmp"]
        if reporter.places is None:
            options.append("-x")
        if reporter.order:
            options += ["-m", "not gpu"]  # what is named runs, of whichever tier it is
        return int(pytest.main([*options, *files], plugins=[reporter]))

    # ---- the map ----

    def map(self, file: str, quick: bool) -> dict[str, Any]:
        """Run one file of tests on a tree with marks."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        for name in ("current", "places"):
            (folder / name).write_text("")
            (folder / name).chmod(0o666)  # some tests run as another user
        folder.chmod(0o755)
        with contextlib.ExitStack() as stack:
            for name, (first, places) in places_of_package().items():
                source = (self.folder / name).read_text(encoding="utf-8")
                text = reached_places.marked(source, places, first, str(folder))
                stack.enter_context(self.changed(name, text.encode()))
            outcome, modules = self.run([file], {}, folder, quick)
        reached: dict[str, set[int]] = defaultdict(set)
        for row in (folder / "places").read_text(encoding="utf-8").splitlines():
            test, place = row.split("\t")
            reached[test].add(int(place))
        shutil.rmtree(folder)
        return {
            "passed": outcome.passed,
            "failed": outcome.failed,
            "why": f"{file}: {outcome.why}" if outcome.why else "",
            "places": {test: sorted(places) for test, places in reached.items()},
            "modules": modules,
        }

    # ---- one mutant ----

    def try_mutant(self, mutant: Mutant, tests: dict[str, float]) -> str:
        """Return "survived", "killed: " and by what, or "none: " and why it is no mutant."""
        source = (self.folder / mutant.file).read_text(encoding="utf-8")
        text = source[: mutant.begin] + mutant.text + source[mutant.end :]
        if isinstance(mutant, PythonMutant):
            try:
                same = byte_code(text) == byte_code(source)
            except SyntaxError:
                return "none: does not compile"
            return "none: same byte code" if same else self.tests(mutant.file, text.encode(), tests)
        assert BUILDS is not None
        plain, sanitized = BUILDS
        try:
            library = plain.library(self.folder, mutant.file, text)
        except BuildError:
            return "none: does not compile"
        if library is None:
            return "none: same object code"
        outcome = self.tests(LIBRARY, library, tests)
        if outcome.startswith("survived"):
            library = sanitized.library(self.folder, mutant.file, text)
            assert library is not None
            return self.life(library)
        return outcome

    def tests(self, file: str, content: bytes, tests: dict[str, float]) -> str:
        """Run tests on a changed tree until one fails that passes on the unchanged one."""
        left = dict(tests)
        while left:
            batch = first_batch(left)
            with self.changed(file, content):
                outcome, _ = self.run(test_files(batch), batch)
            if not outcome.failed:
                test = next(iter(batch))
                if outcome.why and self.sound(test, tests[test]):
                    return f"killed: {test}\t{outcome.why}"
                for seen in batch:
                    del left[seen]
                continue
            test, error = next(iter(outcome.failed.items()))
            if self.sound(test, tests[test]):
                return f"killed: {test}\t{' '.join(error.split())[:160]}"
            for seen in (*outcome.passed, test):
                left.pop(seen, None)
        return "survived" if tests else "survived: no test reaches it"

    def life(self, library: bytes) -> str:
        """Run the binding's life under the sanitizers."""
        environment = sanitized_python.environment(leaks=True, folder=self.folder)
        with self.changed(LIBRARY, library):
            try:
                done = subprocess.run(
                    [sys.executable, LIFE], cwd=self.folder, env=environment, timeout=LIFE_S,
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"killed: {LIFE} hangs under AddressSanitizer"
        said = (done.stderr.strip().splitlines() or [""])[-1]
        return f"killed: {LIFE}: {said[:160]}" if done.returncode else "survived"

    def sound(self, test: str, seconds: float) -> bool:
        """Whether a test passes alone on the unchanged tree."""
        if test not in self.known:
            outcome, _ = self.run(test_files([test]), {test: seconds})
            self.known[test] = test in outcome.passed
        return self.known[test]


def first_batch(tests: dict[str, float]) -> dict[str, float]:
    """Return the tests to run in one process: the quick ones of few files, or all that are left."""
    if sum(tests.values()) <= 2 * BATCH_S:
        return tests.copy()
    functions: dict[str, set[str]] = defaultdict(set)
    for test in tests:
        functions[test.split("::")[0]].add(test.split("[")[0])
    files = sorted(functions, key=lambda file: -len(functions[file]))[:2]
    batch, seconds = {}, 0.0
    for test, takes in tests.items():
        if test.split("::")[0] in files and seconds + takes <= BATCH_S:
            batch[test] = takes
            seconds += takes
    return batch or tests.copy()


def test_files(tests: Sequence[str] | dict[str, float]) -> list[str]:
    return list(dict.fromkeys(test.split("::")[0] for test in tests))


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def tracked_files() -> list[str]:
    """Return what a tree needs: the sources, and what was built in place."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    places = "oracle_offload/*.so", "oracle_offload/_build_info.json"
    built = [path.relative_to(ROOT).as_posix() for place in places for path in ROOT.glob(place)]
    return [name for name in (*said.splitlines(), *built) if (ROOT / name).is_file()]


TREE: Tree | None = None  # of a worker
BUILDS: tuple[BindingBuilds, BindingBuilds] | None = None  # of all workers


def start_worker(folder: Path) -> None:
    global TREE
    TREE = Tree(folder)


def map_file(file: str, quick: bool) -> tuple[str, dict[str, Any]]:
    assert TREE is not None
    return file, TREE.map(file, quick)


def try_mutant(mutant: Mutant, tests: dict[str, float]) -> tuple[Mutant, str, float]:
    assert TREE is not None
    start = time.monotonic()
    outcome = TREE.try_mutant(mutant, tests)
    return mutant, outcome, time.monotonic() - start


# ---- the map of the whole ----


@functools.cache
def places_of_package() -> dict[str, tuple[int, list[tuple[int, int]]]]:
    """Return the places of each module's mutants, and the number of the first."""
    found: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for mutant in mutants_python.all_mutants():
        found[mutant.file].add(mutant.place)
    result, first = {}, 0
    for name, places in found.items():
        result[name] = first, sorted(places)
        first += len(places)
    return result


class Map:
    """Which tests reach which places, how long they take, and what they import."""

    def __init__(self, parts: Sequence[dict[str, Any]]) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.modules: set[str] = set()
        self.reached: dict[int, set[str]] = defaultdict(set)  # place -> tests
        for part in parts:
            self.seconds.update(part["passed"])
            self.failed.update({t: e for t, e in part["failed"].items() if e != "skipped"})
            if part["why"]:
                self.failed[part["why"]] = part["why"]
            self.modules.update(part["modules"])
            for test, places in part["places"].items():
                for place in places:
                    self.reached[place].add(test)

    def of_tests(self, tests: Collection[str]) -> Map:
        """Return the map of some tests alone."""
        part = copy.copy(self)
        part.seconds = {test: self.seconds[test] for test in tests if test in self.seconds}
        return part

    def users(self, file: str) -> set[str]:
        """Return the tests that reach any place of a module."""
        first, places = places_of_package().get(file, (0, []))
        reached = (self.reached.get(first + nth, set()) for nth in range(len(places)))
        return {test for tests in reached for test in tests if test in self.seconds}

    def tests_of(self, mutant: Mutant, at_most_s: float) -> dict[str, float]:
        """Return the tests for a mutant in the order in which they should run; none reaches it: {}.

        Those that reach it come first; what is done once in a process, by the first test that needs
        it, may show in others that use the same module.
        """
        if isinstance(mutant, PythonMutant):
            users = self.users(mutant.file)
            first_place, places = places_of_package()[mutant.file]
            at = self.reached.get(first_place + places.index(mutant.place), set())
            first = {test for test in at if test in self.seconds}
            if not mutant.function or "" in at:
                first = set(users)
            elif not first:
                return {}
        else:
            users = self.users(BINDING_USER)
            first = {test for test in self.seconds if test.startswith(BINDING_TESTS)}
        module = Path(mutant.file).stem
        order = [*self.in_turn(first, module), *self.in_turn(set(users) - first, module)]
        result: dict[str, float] = {}
        files: set[str] = set()
        for test in order:
            file = test.split("::")[0]
            at_most_s -= self.seconds[test] + (0.0 if file in files else FILE_S)
            if len(result) >= LEAST_TESTS and at_most_s < 0:
                break
            files.add(file)
            result[test] = self.seconds[test]
        return result

    def in_turn(self, tests: Iterable[str], module: str) -> list[str]:
        """Return the quick ones first, sooner still those about this module, the functions in turn.

        What one function of a test is blind for, another sees.
        """
        cost = {
            test: self.seconds[test] / (ABOUT if is_about(test.split("::")[0], module) else 1)
            for test in tests
        }
        spent: dict[str, float] = defaultdict(float)
        turns = {}
        for test in sorted(cost, key=lambda test: (cost[test], test)):
            function = test.split("[")[0]
            spent[function] += cost[test]
            turns[test] = spent[function]
        return sorted(turns, key=turns.__getitem__)


@functools.cache
def is_about(file: str, module: str) -> bool:
    """Whether a file of tests has the name of a module in its own, or in its first lines."""
    begin = (
        (ROOT / file).read_text(encoding="utf-8")[:BEGIN_CHARS] if (ROOT / file).is_file() else ""
    )
    return re.search(rf"(\b|_){module}(\b|_)", f"{Path(file).stem} {begin}") is not None


def tiers_of_tests() -> dict[str, list[str]]:
    """Return the tests that each tier has beyond the one before it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiers.json"
        options = ["--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, "-p", "tiers", f"--tiers={path}"]
        subprocess.run([*command, *TEST_FOLDERS], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        found: dict[str, list[str]] = {tier: [] for tier in tiers.TIERS}
        for test, tier in json.loads(path.read_text(encoding="utf-8")).items():
            found[tier].append(test)
    return found


def digest(*parts: bytes | str) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode() if isinstance(part, str) else part)
        whole.update(b"\0")
    return whole.hexdigest()[:20]


def files_of_tests() -> list[str]:
    return [
        path.relative_to(ROOT).as_posix()
        for folder in TEST_FOLDERS
        for path in sorted((ROOT / folder).glob("test_*.py"))
        if path.stem not in WITHOUT
    ]


def near(mutant: Mutant, killers: dict[str, str]) -> list[str]:
    """Return the files whose tests kill what is nearest to a mutant, the best first."""
    score: dict[str, tuple[int, ...]] = {}
    file, place, *_ = mutant.key.split(" | ")
    for other, test in killers.items():
        other_file, other_place, *_ = other.split(" | ")
        alike = (file == other_file and place == other_place, file == other_file,
                 Path(file).parent == Path(other_file).parent)  # fmt: skip
        tests = test.split("::")[0]
        before = score.get(tests, (0, 0, 0))
        score[tests] = tuple(a + b for a, b in zip(alike, before, strict=True))
    there = [tests for tests in files_of_tests() if any(score.get(tests, ()))]
    return sorted(there, key=lambda tests: score[tests], reverse=True)[:NEAR_FILES]


def make_map(pool_of: Any, files: Sequence[str], quick: bool, verbose: bool) -> Map:
    """Read the map of each file of tests, or make it where something changed."""
    rules = ("conftest.py", "tools/mutants_python.py", "tools/reached_places.py")
    shared = [
        name
        for name in tracked_files()
        if name.startswith(("csrc/", "oracle_offload/", "tests/data/", *TEST_FOLDERS, *rules))
        and not name.endswith((".so", "_build_info.json"))
        and not Path(name).name.startswith("test_")
    ]
    kind = "quick" if quick else "all"
    common = digest(*(p for name in shared for p in (name, (ROOT / name).read_bytes())))
    paths = {
        file: CACHE / f"{kind}-{digest(common, file, (ROOT / file).read_bytes())}.json"
        for file in files
    }
    missing = [file for file in files if not paths[file].is_file()]
    if missing:
        start = time.monotonic()
        with pool_of() as pool:
            # The largest first, so that the workers end together.
            missing.sort(key=lambda file: -(ROOT / file).stat().st_size)
            for done in as_completed([pool.submit(map_file, file, quick) for file in missing]):
                file, part = done.result()
                if verbose:
                    seconds = sum(part["passed"].values())
                    print(f"{file}: {len(part['passed'])} tests, {seconds:.0f} s", flush=True)
                paths[file].write_text(json.dumps(part))
        seconds = time.monotonic() - start
        print(f"what {len(missing)} files of tests reach ({kind}): {seconds:.0f} s", flush=True)
    return Map([json.loads(paths[file].read_text()) for file in files])


# ---- the gate ----


def equivalents() -> dict[str, str]:
    """Return the mutants proved to change nothing: key of the mutant -> proof."""
    if not EQUIVALENT.exists():
        return {}
    rows = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    keys = ("file", "function", "kind", "code")
    return {" | ".join(row[key] for key in keys if key in row): row["proof"] for row in rows}


def seed_of_tree() -> str:
    """Return what names the package and its tests at HEAD, and not the proofs.

    It is the same sample wherever the same commit is tried, and whatever is proved of it.
    """
    command = ["git", "ls-tree", "HEAD", "oracle_offload", "csrc", "tests/"]
    rows = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return digest(*(row for row in rows.splitlines() if not row.endswith("\ttests/mutation")))[:12]


def preload(modules: set[str]) -> None:
    """Import what the tests import, so that no fork has to; never the package itself."""
    paths, sys.path = sys.path, [path for path in sys.path if path != str(ROOT / "tools")]
    for name in sorted(modules):
        if name not in sys.modules and not name.startswith(("test_", "conftest", "tests", "__")):
            with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
                importlib.import_module(name)
    sys.path = paths
    assert not any(name.startswith("oracle_offload") for name in sys.modules)
    gc.collect()
    gc.freeze()  # what is not touched stays shared


class Gate:
    """Tries mutants, and keeps what became of each for `--resume`."""

    def __init__(self, args: argparse.Namespace, mutants: Sequence[Mutant], folder: Path) -> None:
        self.args = args
        self.mutants = mutants
        self.folder = folder
        self.proofs = equivalents()
        self.outcomes: dict[Mutant, str] = {}
        self.tiers: dict[str, str] = {}  # with --tiers, of each test
        tests = seed_of_tree() if args.tiers else ""
        self.digests = {m.file: digest((ROOT / m.file).read_bytes(), tests) for m in mutants}
        self.file = STATE.with_stem("tiers") if args.tiers else STATE
        self.state = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.killers: dict[str, str] = json.loads(KILLERS.read_text(encoding="utf-8"))
        self.start = time.monotonic()

    def took(self) -> str:
        return f"{time.monotonic() - self.start:.0f} s"

    def pool(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("fork")
        return ProcessPoolExecutor(self.args.jobs, context, start_worker, (self.folder,))

    def note(self, mutant: Mutant, outcome: str, seconds: float, last: bool = True) -> bool:
        """Keep an outcome, and return whether it counts; a survivor may meet more: not `last`."""
        self.outcomes[mutant] = outcome
        self.state[mutant.key] = {"file": self.digests[mutant.file], "outcome": outcome}
        self.file.write_text(json.dumps(self.state, indent=0))
        if outcome.startswith("survived") and last:
            said = "proved equivalent" if mutant.key in self.proofs else outcome.upper()
            print(f"{said}: {mutant.name} ({seconds:.0f} s)\n    {mutant.key}", flush=True)
        elif self.args.verbose:
            print(f"{mutant.name}: {outcome} ({seconds:.1f} s)", flush=True)
        if seconds and len(self.outcomes) % 25 == 0:
            took = time.monotonic() - self.start
            print(f"... {len(self.outcomes)} in {took:.0f} s", flush=True)
        return not outcome.startswith("none")

    def kept(self, mutant: Mutant) -> str:
        """Return what `--resume` knows of a mutant; empty where it must be tried."""
        known = self.state.get(mutant.key, {"file": "", "outcome": ""})
        same = self.args.resume and known["file"] == self.digests[mutant.file]
        return known["outcome"] if same and not known["outcome"].startswith("survived") else ""

    def try_killers(self, mutants: Sequence[Mutant], count: int) -> None:
        """Let each mutant meet the test that killed it before."""

        def tests_of(mutant: Mutant) -> dict[str, float]:
            test = self.killers.get(mutant.key, "")
            return {test: KILLER_S} if (ROOT / test.split("::")[0]).is_file() else {}

        self.try_mutants(mutants, count, tests_of, last=False)
        left = len(self.survivors())
        print(f"{left} are not killed by what killed them before ({self.took()})", flush=True)

    def try_near(self, mutants: Sequence[Mutant]) -> None:
        """Let a few mutants meet the files of tests near by."""
        if len(mutants) <= NEAR_MUTANTS:
            files = sorted({file for mutant in mutants for file in near(mutant, self.killers)})
            self.try_reached(mutants, len(mutants), quick=True, files=files)

    def try_reached(
        self, mutants: Sequence[Mutant], count: int, quick: bool, files: Sequence[str] = ()
    ) -> None:
        """Let each mutant meet the tests that reach it, of all files unless some are named."""
        reach = make_map(self.pool, files or files_of_tests(), quick, self.args.verbose)
        for test, error in reach.failed.items():
            print(f"fails on the tree with the marks, and is left out: {test}: {error[:200]}")
        preload(reach.modules)
        self.try_mutants(mutants, count, lambda m: reach.tests_of(m, QUICK_S if quick else ALL_S))

    def try_mutants(
        self,
        mutants: Sequence[Mutant],
        count: int,
        tests_of: Callable[[Mutant], dict[str, float]],
        last: bool = True,
    ) -> None:
        """Try mutants in turn until `count` of them are none that are no mutants."""
        with self.pool() as pool:
            running: set[Future[tuple[Mutant, str, float]]] = set()
            tried = 0
            for mutant in mutants:
                # No more than are needed, though some turn out to be none.
                while tried < count and len(running) >= min(self.args.jobs, count - tried):
                    done = next(as_completed(running))
                    running.remove(done)
                    tried += self.note(*done.result(), last)
                if tried == count:
                    break
                if outcome := self.kept(mutant):
                    tried += self.note(mutant, outcome, 0.0, last)
                else:
                    running.add(pool.submit(try_mutant, mutant, tests_of(mutant)))
            for done in as_completed(running):
                self.note(*done.result(), last)

    def try_sample(self, count: int) -> None:
        """Try the first mutants, with no more tests than enough of them need to die."""
        self.try_killers(self.mutants, count)
        if self.needs_more():
            self.try_near(self.survivors())
        if self.args.near:
            if self.needs_more():
                print(MISSED.format(seed=self.args.seed), flush=True)
            return
        if self.needs_more():
            self.try_reached(self.survivors(), len(self.mutants), quick=True)
        if self.needs_more():
            self.try_all_cases()

    def needs_more(self) -> bool:
        """Whether what lives must meet more tests; to remember a killer it must in any case."""
        return bool(self.survivors()) and (self.args.remember or self.share() < KILLED_AT_LEAST)

    def try_whole(self, count: int) -> None:
        """Try every mutant, with every test that reaches it."""
        self.try_reached(self.mutants, count, quick=True)
        self.try_all_cases()

    def try_tiers(self, count: int) -> None:
        """Let each mutant meet the tests of one tier after the other, until one kills it."""
        reach = make_map(self.pool, files_of_tests(), True, self.args.verbose)
        preload(reach.modules)
        mutants = self.mutants
        for tier, tests in tiers_of_tests().items():
            part = reach.of_tests(tests)

            def tests_of(mutant: Mutant, part: Map = part) -> dict[str, float]:
                return part.tests_of(mutant, QUICK_S)

            self.try_mutants(mutants, count, tests_of, last=tier == tiers.TIERS[-1])
            mutants = self.survivors()
            count = len(mutants)
            self.tiers.update(dict.fromkeys(tests, tier))
            print(f"{count} outlive {tier} ({self.took()})", flush=True)

    def killed_by_tier(self) -> dict[str, int]:
        """Return how many each tier kills, with those before it."""
        killers = (
            outcome.removeprefix("killed: ").split("\t")
            for outcome in self.real().values()
            if outcome.startswith("killed")
        )
        # Without a test it was the binding's life under the sanitizer, which is in .ci/run.
        first = Counter(self.tiers[test] if said else tiers.TIERS[1] for test, *said in killers)
        return dict(zip(tiers.TIERS, accumulate(first[tier] for tier in tiers.TIERS), strict=True))

    def try_own(self, count: int) -> None:
        """Try every mutant with the named tests alone."""
        unknown = sorted(set(self.args.tests) - set(files_of_tests()))
        if unknown:
            raise SystemExit(f"no file of tests that the gate knows: {', '.join(unknown)}")
        self.try_reached(self.mutants, count, quick=False, files=self.args.tests)

    def try_all_cases(self) -> None:
        """Let what lives meet all cases of the tests."""
        left = self.survivors()
        if left and not self.args.quick:
            print(f"{len(left)} survive the first cases of the tests; now all cases", flush=True)
            self.try_reached(left, len(left), quick=False)

    def real(self) -> dict[Mutant, str]:
        """Return what became of the mutants that change something."""
        return {
            mutant: outcome
            for mutant, outcome in self.outcomes.items()
            if not outcome.startswith("none") and mutant.key not in self.proofs
        }

    def survivors(self) -> list[Mutant]:
        """Return what lives, but what is proved to change nothing."""
        return [m for m, outcome in self.real().items() if outcome.startswith("survived")]

    def share(self) -> float:
        """Return which part of the mutants is killed."""
        outcomes = self.real().values()
        return sum(o.startswith("killed") for o in outcomes) / max(1, len(outcomes))

    def remember(self, keys: set[str]) -> None:
        """Write which test killed each mutant, and what is known of others that there are."""
        known = {key: test for key, test in self.killers.items() if key in keys}
        killers = known | {
            mutant.key: outcome.removeprefix("killed: ").split("\t")[0]
            for mutant, outcome in self.real().items()
            if "\t" in outcome
        }
        KILLERS.write_text(json.dumps(dict(sorted(killers.items())), indent=1) + "\n")

    def idle_proofs(self, keys: set[str]) -> list[str]:
        """Return the proofs whose mutant is gone, or was killed."""
        gone = [key for key in self.proofs if key not in keys]
        killed = {m.key for m, outcome in self.outcomes.items() if outcome.startswith("killed")}
        return [*gone, *(key for key in self.proofs if key in killed)]

    def passes(self, keys: set[str]) -> bool:
        """Whether enough are killed, and every proof has its survivor.

        Of tiers it is what each kills of those that any does: some cases of each test are run, so
        that some mutants live which all cases kill.
        """
        killed = self.killed_by_tier() if self.tiers else {}
        whole = max(killed.values(), default=0)
        enough = all(n >= TIER_SHARES[tier] * whole for tier, n in killed.items())
        are_killed = bool(self.tiers) or self.share() >= KILLED_AT_LEAST
        return are_killed and enough and not self.idle_proofs(keys)

    def report(self, seed: str) -> dict[str, Any]:
        """Return the figures of a run."""
        real = self.real()
        return {
            "schema": "oracle_offload/mutation-python/1",
            "tried": len(real),
            "killed": sum(outcome.startswith("killed") for outcome in real.values()),
            "no_mutants": len(self.outcomes) - len(real),
            "candidates": len(self.mutants),
            "seed": seed,
            **({"tiers": self.killed_by_tier()} if self.tiers else {}),
        }


def main() -> int:
    """Run the gate; exit code 0, or 3 when it fails."""
    global BUILDS
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--only", default="", help="mutants whose name begins so")
    parser.add_argument("--tests", nargs="+", default=[], help="files: no others are run")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--count", type=int, default=40, help="size of the sample")
    parser.add_argument("--seed", default="", help="of the sample; the tree of HEAD by itself")
    parser.add_argument("--remember", action="store_true", help="write which tests kill the sample")
    parser.add_argument("--near", action="store_true", help="make no map of all tests")
    parser.add_argument("--quick", action="store_true", help="some cases of each test are enough")
    parser.add_argument("--tiers", action="store_true", help="which tier of tests kills each")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what was killed in files that have not changed since; try the rest",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true", help="say of every mutant what killed it")
    args = parser.parse_args()
    mutants: list[Mutant] = [*mutants_python.all_mutants(), *mutants_binding.all_mutants()]
    keys = {mutant.key for mutant in mutants}
    seed = args.seed = args.seed or seed_of_tree()
    if args.only:
        mutants = [mutant for mutant in mutants if mutant.name.startswith(args.only)]
    whole = args.all or bool(args.only)
    # By themselves, so that the sample stays as it is where other code changes.
    mutants.sort(key=lambda mutant: digest(seed, mutant.key))
    count = len(mutants) if whole else min(args.count, len(mutants))
    if args.list:
        for mutant in sorted(mutants, key=lambda m: (m.file, m.begin)):
            print(f"{mutant.name}\n    {' '.join(mutant.original.split())[:110]}")
        print(f"{len(mutants)} mutants")
        return 0
    print(f"{count} of {len(mutants)} mutants, seed {seed}", flush=True)

    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # some tests run as another user
        if any(not isinstance(mutant, PythonMutant) for mutant in mutants[: 2 * count]):
            BUILDS = plain_and_sanitized(Path(name))
        # Before numpy and torch are imported: what is forked may have one thread.
        os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
        preload({"torch", "numpy", "hypothesis"})
        gate = Gate(args, mutants, Path(name))
        if args.tests:
            gate.try_own(count)
        elif args.tiers:
            gate.try_tiers(count)
        else:
            gate.try_whole(count) if whole else gate.try_sample(count)
    if args.remember:
        gate.remember(keys)
    for key in gate.idle_proofs(keys):
        print(f"equivalent_python.toml proves what does not survive: {key}")
    report = gate.report(seed)
    print(
        f"{report['killed']} of {report['tried']} mutants killed ({gate.share():.1%}) in "
        f"{time.monotonic() - gate.start:.0f} s, seed {seed}; "
        f"{report['tried'] - report['killed']} survive; "
        f"{report['no_mutants']} candidates are no mutants"
    )
    if gate.tiers:
        print("killed: " + ", ".join(f"{n} by {tier}" for tier, n in report["tiers"].items()))
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if gate.passes(keys) else 3


if __name__ == "__main__":
    sys.exit(main())
