"""The mutation gate of the Python layer and its binding: break one place, see that a test notices.

    python tools/mutate_python.py --count 40             # a sample, by the seed of the tree
    python tools/mutate_python.py --count 150 --seed 7
    python tools/mutate_python.py --all --resume         # every mutant; go on where it was stopped
    python tools/mutate_python.py --only oracle_offload/manager.py:210
    python tools/mutate_python.py --list

tools/mutants_python.py and tools/mutants_binding.py find the mutants, mechanically. First every
test runs once, under a trace that tells which lines of the package it reaches; that map is kept in
build/mutation for as long as neither the package nor the test changes. Each mutant then runs the
tests that reach its lines until one fails, the quick ones first and at most a minute of them, in a
fork of a process that has imported torch and not the package, on a copy of the tree that processes
started by a test see as well. A test that runs over its time notices too. A test counts only if it
passes on the unchanged tree when it runs alone.

A mutant of the binding is compiled and linked, and runs the tests that drive the extension; what
they let live runs tests/unit/binding_life.py under AddressSanitizer with leak check.

A mutant whose lines no test reaches survives. Survivors that cannot change behaviour are listed
with the proof in tests/mutation/equivalent_python.toml; they are no mutants. The gate fails, with
exit code 3, where less than 95% are killed, and where a proof has lost its mutant.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import gc
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import random
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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import mutants_binding
import mutants_python
import pytest
import sanitized_python
from binding_builds import LIBRARY, BindingBuilds, plain_and_sanitized
from c_build import ROOT, BuildError
from mutants import Mutant
from mutants_python import PythonMutant, byte_code

CACHE = ROOT / "build/mutation"
STATE = CACHE / "state.json"
EQUIVALENT = ROOT / "tests/mutation/equivalent_python.toml"
KILLED_AT_LEAST = 0.95
TEST_FOLDERS = ("tests/unit", "tests/torch", "tests/fault")
# They build, install or call other programs; none runs a line of the package in place.
WITHOUT = ("test_conformance", "test_gpu_tools", "test_package", "test_soak")
# What drives the extension module by itself; the rest of the tests of a binding's mutant train.
BINDING_TESTS = ("tests/unit/test_binding", "tests/unit/test_driver_messages")
BINDING_USER = "oracle_offload/engines.py"
LIFE = "tests/unit/binding_life.py"
LIFE_S = 60.0
COLLECTION_S = 60.0  # in which the tests must be found
MAP_TEST_S = 60.0  # that a test is thought to take while the map is made
TEST_S = 10.0  # that a test may take beyond five times what it took in the map
TESTS_S = 60.0  # what outlives tests that take so long together has survived
ADDRESS_SPACE_BYTES = 8 << 30  # beyond what the process has when it starts
TRACER = "\nexec(compile(open({path!r}).read(), {path!r}, 'exec'), {names!r})\n"


# ---- one worker: a tree of its own, and the processes that run tests in it ----


@dataclass
class Outcome:
    """What a run of tests did: seconds of each test that passed, what failed first, and why."""

    passed: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    why: str = ""  # where the process itself failed


class Reporter:
    """The pytest plugin of the child: selects the tests, and tells the parent of each."""

    def __init__(self, pipe: int, tests: Sequence[str], lines: Path | None) -> None:
        self.pipe = pipe
        self.order = {test: nth for nth, test in enumerate(tests)}
        self.lines = lines
        self.seconds = 0.0
        self.error = ""

    def tell(self, **what: object) -> None:
        os.write(self.pipe, json.dumps(what).encode() + b"\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        if self.order:
            left = [item for item in items if item.nodeid not in self.order]
            items[:] = [item for item in items if item.nodeid in self.order]
            items.sort(key=lambda item: self.order[item.nodeid])
            config.hook.pytest_deselected(items=left)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self.lines is not None:
            self.tell(modules=[name for name in sys.modules if "oracle_offload" not in name])

    def switch(self, test: str) -> None:
        if self.lines is not None:
            (self.lines / "current").write_text(test, encoding="utf-8")
            tracer: Any = getattr(sys, "_oracle_offload_lines", None)
            if tracer is not None:
                tracer.switch(test)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seconds, self.error = 0.0, ""
        self.tell(start=nodeid)
        self.switch(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.error = self.error or (crash.message if crash else str(report.longrepr))
        elif report.skipped:
            self.error = self.error or "skipped"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.switch("")
        self.tell(end=nodeid, seconds=self.seconds, error=self.error[:300])

    def pytest_sessionfinish(self) -> None:
        tracer: Any = getattr(sys, "_oracle_offload_lines", None)
        if tracer is not None:
            tracer.write()


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
        self, files: Sequence[str], tests: dict[str, float], lines: Path | None = None
    ) -> tuple[Outcome, list[str]]:
        """Run `tests` (seconds that each takes), all of `files` where none is named.

        Without a folder for `lines` it stops at the first test that fails. Returns the modules that
        the tests import besides.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            status = 70
            try:
                status = self.child(files, Reporter(writing, list(tests), lines))
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
        if status != 0 and not outcome.why and (status != 1 or not outcome.failed):
            outcome.why = f"{current or 'pytest'} ends the process, status {status}"
        if current and outcome.why:
            outcome.failed.setdefault(current, outcome.why)
        return outcome, modules

    def child(self, files: Sequence[str], reporter: Reporter) -> int:
        """Run pytest in this process, which is a fork and ends afterwards."""
        os.setsid()
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
        if reporter.lines is None:
            options.append("-x")
        return int(pytest.main([*options, *files], plugins=[reporter]))

    # ---- the map ----

    def map(self, file: str) -> dict[str, Any]:
        """Run one file of tests under the trace."""
        lines = Path(tempfile.mkdtemp(dir=self.folder))
        (lines / "current").write_text("")
        lines.chmod(0o777)  # some tests run as another user
        names = {"PACKAGE": str(self.folder / "oracle_offload"), "FOLDER": str(lines)}
        code = TRACER.format(path=str(self.folder / "tools/line_tracer.py"), names=names)
        init = "oracle_offload/__init__.py"
        with self.changed(init, (self.folder / init).read_bytes() + code.encode()):
            outcome, modules = self.run([file], {}, lines)
        reached: dict[str, dict[str, list[int]]] = defaultdict(dict)
        for path in lines.glob("*.lines"):
            for row in path.read_text(encoding="utf-8").splitlines():
                test, name, found = row.split("\t")
                known = reached[test].get(name, [])
                reached[test][name] = sorted({*known, *map(int, found.split())})
        shutil.rmtree(lines)
        return {
            "passed": outcome.passed,
            "failed": outcome.failed,
            "why": outcome.why,
            "lines": reached,
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
        if outcome == "survived":
            library = sanitized.library(self.folder, mutant.file, text)
            assert library is not None
            return self.life(library)
        return outcome

    def tests(self, file: str, content: bytes, tests: dict[str, float]) -> str:
        """Run tests on a changed tree until one fails that passes on the unchanged one."""
        left = dict(tests)
        while left:
            with self.changed(file, content):
                outcome, _ = self.run(test_files(left), left)
            if not outcome.failed:
                return f"killed: {outcome.why}" if outcome.why else "survived"
            test, error = next(iter(outcome.failed.items()))
            if self.sound(test, tests[test]):
                return f"killed: {test}: {' '.join(error.split())[:160]}"
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


def test_files(tests: Sequence[str] | dict[str, float]) -> list[str]:
    return list(dict.fromkeys(test.split("::")[0] for test in tests))


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def tracked_files() -> list[str]:
    """Return what a tree needs: the sources, and what was built in place."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    built = [path.relative_to(ROOT).as_posix() for path in (ROOT / "oracle_offload").glob("*.so")]
    info = "oracle_offload/_build_info.json"
    return [name for name in (*said.splitlines(), *built, info) if (ROOT / name).is_file()]


TREE: Tree | None = None  # of a worker
BUILDS: tuple[BindingBuilds, BindingBuilds] | None = None  # of all workers


def start_worker(folder: Path) -> None:
    global TREE
    TREE = Tree(folder)


def map_file(file: str) -> tuple[str, dict[str, Any]]:
    assert TREE is not None
    return file, TREE.map(file)


def try_mutant(mutant: Mutant, tests: dict[str, float]) -> tuple[Mutant, str, float]:
    assert TREE is not None
    start = time.monotonic()
    outcome = TREE.try_mutant(mutant, tests)
    return mutant, outcome, time.monotonic() - start


# ---- the map of the whole ----


class Map:
    """Which tests reach which lines, how long they take, and what they import."""

    def __init__(self, parts: Sequence[dict[str, Any]]) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.modules: set[str] = set()
        self.reached: dict[str, dict[str, set[int]]] = defaultdict(dict)  # file -> test -> lines
        self.imported: dict[str, set[int]] = defaultdict(set)  # reached by what imports
        for part in parts:
            self.seconds.update(part["passed"])
            self.failed.update({t: e for t, e in part["failed"].items() if e != "skipped"})
            if part["why"]:
                self.failed[part["why"]] = part["why"]
            self.modules.update(part["modules"])
        for part in parts:
            for test, files in part["lines"].items():
                for name, lines in files.items():
                    file = f"oracle_offload/{name}"
                    if test == "":
                        self.imported[file].update(lines)
                    elif test in self.seconds:
                        self.reached[file][test] = set(lines)

    def tests_of(self, mutant: Mutant) -> dict[str, float]:
        """Return the tests for a mutant in the order in which they should run; none reaches it: {}.

        Those that reach it come first; what is done once in a process, by whoever comes first, may
        show in others that use the same module.
        """
        if isinstance(mutant, PythonMutant):
            users = self.reached.get(mutant.file, {})
            wanted = set(mutant.lines)
            first = {test for test, lines in users.items() if lines & wanted}
            if not mutant.function or wanted & self.imported[mutant.file]:
                first = set(users)
            elif not first:
                return {}
        else:
            users = self.reached[BINDING_USER]
            first = {test for test in self.seconds if test.startswith(BINDING_TESTS)}
        order = [*self.in_turn(first), *self.in_turn(set(users) - first)]
        total = list(accumulate(self.seconds[test] for test in order))
        return {test: self.seconds[test] for test in order[: max(1, bisect.bisect(total, TESTS_S))]}

    def in_turn(self, tests: Iterable[str]) -> list[str]:
        """Return the quick ones first and the functions in turn.

        What one function of a test is blind for, another sees.
        """
        spent: dict[str, float] = defaultdict(float)
        turns = {}
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            function = test.split("[")[0]
            spent[function] += self.seconds[test]
            turns[test] = spent[function]
        return sorted(turns, key=turns.__getitem__)


def digest(*parts: bytes | str) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode() if isinstance(part, str) else part)
        whole.update(b"\0")
    return whole.hexdigest()[:20]


def make_map(pool_of: Any, verbose: bool) -> Map:
    """Read the map of each file of tests, or make it where something changed."""
    files = [
        path.relative_to(ROOT).as_posix()
        for folder in TEST_FOLDERS
        for path in sorted((ROOT / folder).glob("test_*.py"))
        if path.stem not in WITHOUT
    ]
    shared = [
        name
        for name in tracked_files()
        if name.startswith(("csrc/", "oracle_offload/", "tests/data/", *TEST_FOLDERS))
        and not name.endswith((".so", "_build_info.json"))
        and not Path(name).name.startswith("test_")
    ]
    common = digest(*(p for name in shared for p in (name, (ROOT / name).read_bytes())))
    paths = {
        file: CACHE / f"lines-{digest(common, file, (ROOT / file).read_bytes())}.json"
        for file in files
    }
    missing = [file for file in files if not paths[file].is_file()]
    if missing:
        start = time.monotonic()
        with pool_of() as pool:
            # The largest first, so that the workers end together.
            missing.sort(key=lambda file: -(ROOT / file).stat().st_size)
            for done in as_completed([pool.submit(map_file, file) for file in missing]):
                file, part = done.result()
                if verbose:
                    seconds = sum(part["passed"].values())
                    print(f"{file}: {len(part['passed'])} tests, {seconds:.0f} s", flush=True)
                paths[file].write_text(json.dumps(part))
        seconds = time.monotonic() - start
        print(f"the lines that {len(missing)} files of tests reach: {seconds:.0f} s", flush=True)
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
    """Return the tree of HEAD: the same sample wherever the same commit is tried."""
    command = ["git", "rev-parse", "--short=12", "HEAD^{tree}"]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


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


def main() -> int:
    """Run the gate; exit code 0, or 3 when it fails."""
    global BUILDS
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--only", default="", help="mutants whose name begins so")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--count", type=int, default=40, help="size of the sample")
    parser.add_argument("--seed", default="", help="of the sample; the tree of HEAD by itself")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what was killed in files that have not changed since; try the rest",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true", help="say of every mutant what killed it")
    args = parser.parse_args()
    mutants = [*mutants_python.all_mutants(), *mutants_binding.all_mutants()]
    keys = {mutant.key for mutant in mutants}
    proofs = equivalents()
    idle = [key for key in proofs if key not in keys]
    seed = args.seed or seed_of_tree()
    if args.only:
        mutants = [mutant for mutant in mutants if mutant.name.startswith(args.only)]
    random.Random(seed).shuffle(mutants)
    count = len(mutants) if args.all or args.only else min(args.count, len(mutants))
    if args.list:
        for mutant in sorted(mutants, key=lambda m: (m.file, m.begin)):
            print(f"{mutant.name}\n    {' '.join(mutant.original.split())[:110]}")
        print(f"{len(mutants)} mutants")
        return 0
    if not args.only:
        print(f"{count} of {len(mutants)} mutants, seed {seed}", flush=True)

    start = time.monotonic()
    CACHE.mkdir(parents=True, exist_ok=True)
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    files = {mutant.file: digest((ROOT / mutant.file).read_bytes()) for mutant in mutants}
    rows: list[tuple[Mutant, str]] = []
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # some tests run as another user

        def pool_of() -> ProcessPoolExecutor:
            context = multiprocessing.get_context("fork")
            return ProcessPoolExecutor(args.jobs, context, start_worker, (Path(name),))

        # Before numpy and torch are imported: what is forked may have one thread.
        os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
        preload({"torch", "numpy", "hypothesis"})
        reach = make_map(pool_of, args.verbose)
        for test, error in reach.failed.items():
            print(f"fails without any mutation, and is left out: {test}: {error[:200]}")
        preload(reach.modules)
        if any(not isinstance(mutant, PythonMutant) for mutant in mutants[: 2 * count]):
            BUILDS = plain_and_sanitized(Path(name))

        def note(mutant: Mutant, outcome: str, seconds: float) -> bool:
            """Keep an outcome, and return whether it counts."""
            rows.append((mutant, outcome))
            state[mutant.key] = {"file": files[mutant.file], "outcome": outcome}
            if outcome.startswith("survived"):
                said = "proved equivalent" if mutant.key in proofs else outcome.upper()
                print(f"{said}: {mutant.name} ({seconds:.0f} s)\n    {mutant.key}", flush=True)
            elif args.verbose:
                print(f"{mutant.name}: {outcome} ({seconds:.1f} s)", flush=True)
            if seconds and len(rows) % 25 == 0:
                print(f"... {len(rows)} in {time.monotonic() - start:.0f} s", flush=True)
            STATE.write_text(json.dumps(state, indent=0))
            return not outcome.startswith("none")

        with pool_of() as pool:
            running: set[Future[tuple[Mutant, str, float]]] = set()
            tried = 0
            for mutant in mutants:
                # No more than are needed, though some turn out to be none.
                while len(running) >= min(args.jobs, count - tried):
                    if tried == count:
                        break
                    done = next(as_completed(running))
                    running.remove(done)
                    tried += note(*done.result())
                if tried == count:
                    break
                known = state.get(mutant.key, {"file": "", "outcome": ""})
                kept = args.resume and not known["outcome"].startswith("survived")
                if kept and known["file"] == files[mutant.file]:
                    tried += note(mutant, known["outcome"], 0.0)
                else:
                    running.add(pool.submit(try_mutant, mutant, reach.tests_of(mutant)))
            for done in as_completed(running):
                note(*done.result())
    real = [row for row in rows if not row[1].startswith("none") and row[0].key not in proofs]
    killed = [row for row in real if row[1].startswith("killed")]
    idle += [
        mutant.key for mutant, said in rows if mutant.key in proofs and said.startswith("killed")
    ]
    share = len(killed) / max(1, len(real))
    print(
        f"{len(killed)} of {len(real)} mutants killed ({share:.1%}) in "
        f"{time.monotonic() - start:.0f} s, seed {seed}; {len(real) - len(killed)} survive; "
        f"{len(rows) - len(real)} candidates are no mutants"
    )
    for key in idle:
        print(f"equivalent_python.toml proves what does not survive: {key}")
    return 3 if idle or share < KILLED_AT_LEAST else 0


if __name__ == "__main__":
    sys.exit(main())
