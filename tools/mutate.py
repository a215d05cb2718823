"""The mutation gate: break the engine in one place at a time and see that the proof suite notices.

    python tools/mutate.py                # all mutants; exit 3 when too many survive
    python tools/mutate.py --list         # what would be tried
    python tools/mutate.py --only engine.c:210
    python tools/mutate.py --near         # those near the change, and a sample of the others
    python tools/mutate.py --near --since v0.1.0
    python tools/mutate.py --remember     # and write which test killed each, for the next run
    python tools/mutate.py --self-test    # without the race detector, survivors must appear

tools/mutants.py finds the mutants, mechanically. Each one compiles one file, links the engine as a
shared library and runs the engine's programs of tests/c on the simulated driver against it, the
quick ones first; a program that hangs (for 10 s, and five times what it takes) is killed and counts
as noticed. A mutant of the codec meets the codec's programs first, then one of them under
AddressSanitizer: a bound that is off by one may show nowhere else. What the programs let live runs
with several threads under ThreadSanitizer (test_threads), and goes into an extension module of the
package that trains with torch (tests/mutation/torch_training.py).

Before all that a mutant meets the one test that is remembered as its killer
(tests/mutation/killers.json), a single case of a program where that is enough. What survives it
takes the way above: what is remembered decides how long the gate takes, and never what it says.

--near is what continuous integration runs, and `make proof` all: the mutants within NEAR_LINES of a
line of code that changed, and those whose remembered killer is a program that changed, NEAR_MOST in
all; and of the others NEAR_SAMPLE, those whose keys' digest comes first. A change is what the
working tree has since HEAD left the main branch, or on that branch itself since NEAR_COMMITS
commits ago.

A mutant that does not compile is none, nor is one whose object code (-O2, no debug information)
equals the original's or another mutant's. Survivors that cannot change behaviour are listed with
the proof in tests/mutation/equivalent.toml; a proof without its survivor is an error as well.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import c_build
import c_programs
from c_build import ROOT, Build, BuildError
from mutants import CALCULATING, Mutant, all_mutants

THREADS_TEST = "test_threads"
# How outcomes call what is no program by itself; the first not as the plain program, whose address
# space is limited.
THREADS = f"{THREADS_TEST} under ThreadSanitizer"
TORCH_TEST = ROOT / "tests/mutation/torch_training.py"
CODEC_TESTS = ("test_codec", "test_coded", "test_decode_kernel")
MEMORY = f"{CODEC_TESTS[0]} under AddressSanitizer"
# What test_codec needs of the engine.
CODEC = ("codec.c", "codec_portable.c", "codec_x86.c", "fingerprint.c", "status.c")
EQUIVALENT = ROOT / "tests/mutation/equivalent.toml"
KILLERS = ROOT / "tests/mutation/killers.json"  # key of a mutant -> the test that killed it
TIMEOUT_S = 10.0
SLOW_TIMEOUT_S = 120.0  # of the two that only survivors of the rest meet
SURVIVORS_ALLOWED = 0.03
FAULT_STRIDE = 6  # of the sample of faults every sixth: the sweep is a test of its own
NEAR_LINES, NEAR_COMMITS, NEAR_MOST, NEAR_SAMPLE = 3, 10, 60, 30
ADDRESS_SPACE_KIB = 8 << 20  # a mutant that allocates without end
# A header without kernels, so that loading it can be tested: the simulated driver asks no more.
FATBIN = """#include "fatbin.h"
const unsigned char oo_kernels_fatbin[16] = {0x50, 0xED, 0x55, 0xBA, 1, 0, 16};
const size_t oo_kernels_fatbin_size = sizeof oo_kernels_fatbin;
const int oo_kernels_toolkit = 13000;
"""


class Gate:
    """Objects of the unchanged sources, and what it takes to try a mutant against them."""

    def __init__(
        self,
        folder: Path,
        *,
        races: bool,
        slow: bool,
        killers: Mapping[str, str] | None = None,
        remember: bool = False,
    ) -> None:
        self.folder = folder
        self.slow = slow
        self.killers = killers or {}
        self.remember = remember
        self.environment = {
            **os.environ,
            "ORACLE_OFFLOAD_DRIVER": str(folder / "libsimcuda.so"),
            "ORACLE_OFFLOAD_TEST_FAULT_STRIDE": str(FAULT_STRIDE),
            "ORACLE_OFFLOAD_TEST_FAIL_FAST": "1",
            "MALLOC_PERTURB_": "165",  # freed memory does not look as if it were still alive
            **c_build.SANITIZER_ENVIRONMENT,
            "OMP_NUM_THREADS": "1",
        }
        if not races:
            self.environment["ORACLE_OFFLOAD_TEST_RACES_OFF"] = "1"
        self.lock = threading.Lock()
        # Read once: a mutant is a place in the text as it was when the mutants were found.
        names = c_build.sources(c_build.ENGINE)
        self.sources = {Path(name).name: (ROOT / name).read_text() for name in names}
        (folder / "fatbin.c").write_text(FATBIN)
        fatbin = str(folder / "fatbin.c")
        self.build = Build(c_build.optimised(), folder)
        made = self.build.engine(fatbin)
        self.objects = dict(zip((*self.sources, "fatbin.c"), made, strict=True))
        # file and hash of its object -> mutant
        self.seen = {(name, self.digest(path)): "original" for name, path in self.objects.items()}
        self.build.simulator()
        self.link_engine(folder, {})
        # Those first that take least on the engine as it is: they kill most per second.
        self.programs = c_programs.engine_tests()
        self.cases = {
            path.stem: c_programs.cases(path) for path in c_programs.programs(self.programs)
        }
        self.alone: dict[str, bool] = {}  # a case -> whether it passes alone on the engine as it is
        for program in self.programs:
            main = self.build.object(f"tests/c/{program}.c")
            self.build.link(folder / program, [main], [f"-L{folder}", "-lengine"])
        self.asan = Build(c_build.optimised("address", "undefined"), folder / "asan")
        self.asan_objects = {
            Path(name).name: self.asan.object(name) for name in names if Path(name).name in CODEC
        }
        self.asan_main = self.asan.object(f"tests/c/{CODEC_TESTS[0]}.c")
        self.bindings: list[Path] = []
        if slow:
            self.tsan = Build(c_build.optimised("thread"), folder / "tsan")
            self.tsan.simulator()
            made = self.tsan.engine(fatbin)
            self.tsan_objects = dict(zip(self.objects, made, strict=True))
            self.tsan_main = self.tsan.object(f"tests/c/{THREADS_TEST}.c")
            self.bindings = self.build.objects(c_build.sources("binding"))
        self.patience_s: dict[str, float] = {}

        def timed(program: str) -> tuple[str, float]:
            start = time.monotonic()
            return self.program_test(program, folder), time.monotonic() - start

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            outcomes = dict(zip(self.programs, pool.map(timed, self.programs), strict=True))
        for outcome, _ in outcomes.values():
            if outcome != "survived":
                raise SystemExit(f"the tests fail without any mutation: {outcome}")
        seconds = {program: took for program, (_, took) in outcomes.items()}
        self.programs.sort(key=lambda program: seconds[program])
        # A machine that has other work is no mutant that hangs.
        self.patience_s = {name: max(TIMEOUT_S, 5 * took) for name, took in seconds.items()}
        outcome = self.memory_test(folder, None)
        if outcome == "survived":
            outcome = self.slow_tests(folder, {}, None)
        if outcome != "survived":
            raise SystemExit(f"the tests fail without any mutation: {outcome}")

    @staticmethod
    def digest(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def link_engine(self, folder: Path, changed: dict[str, Path]) -> None:
        objects = {**self.objects, **changed}.values()
        self.build.link(folder / "libengine.so", [*objects], ["-shared"])

    def link_package(self, folder: Path, changed: dict[str, Path]) -> None:
        """Make a package whose extension module holds the mutant."""
        package = folder / "oracle_offload"
        package.mkdir()
        for path in (ROOT / "oracle_offload").iterdir():
            if not path.name.startswith("_core.") or path.suffix == ".pyi":
                (package / path.name).symlink_to(path)
        objects = [*{**self.objects, **changed}.values(), *self.bindings]
        self.build.link(package / "_core.abi3.so", objects, ["-shared"])

    def test(self, name: str, command: list[str], timeout_s: float, **environment: str) -> str:
        """Run one test; a killer's name ends at the first ": " of what is returned."""
        cases = self.cases.get(name, [])
        limited = f"ulimit -v {ADDRESS_SPACE_KIB}; " if cases else ""
        with subprocess.Popen(
            ["sh", "-c", limited + 'exec "$0" "$@"', *command],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
                said = f"exit {process.returncode}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, errors = process.communicate()
                said = "hangs"
        if process.returncode == 0:
            return "survived"
        lines = errors.decode(errors="replace").strip().splitlines()
        if lines and said != "hangs":
            said = lines[0 if cases else -1][:200]
        # The first case that the program did not report.
        asked = command[1:] or cases
        told = len(re.findall(rb"^\w+: ok$", output, re.MULTILINE))
        case = f"::{asked[told]}" if cases and told < len(asked) else ""
        return f"killed: {name}{case}: {said}"

    def threads_test(self, folder: Path, mutated: Path | None) -> str:
        changed = {}
        if mutated:
            changed[mutated.name] = self.tsan.object(
                str(mutated), target=mutated.with_suffix(".tsan.o")
            )
        program = folder / f"tsan_{THREADS_TEST}"  # next to the plain one
        objects = [self.tsan_main, *{**self.tsan_objects, **changed}.values()]
        self.tsan.link(program, objects)
        driver = str(self.tsan.folder / "libsimcuda.so")
        return self.test(THREADS, [str(program)], SLOW_TIMEOUT_S, ORACLE_OFFLOAD_DRIVER=driver)

    def memory_test(self, folder: Path, mutated: Path | None) -> str:
        """Run the codec's program in a build that sees reads and writes outside."""
        changed = {}
        if mutated:
            changed[mutated.name] = self.asan.object(
                str(mutated), target=mutated.with_suffix(".asan.o")
            )
        program = folder / f"asan_{CODEC_TESTS[0]}"
        objects = [self.asan_main, *{**self.asan_objects, **changed}.values()]
        self.asan.link(program, objects)
        return self.test(MEMORY, [str(program)], SLOW_TIMEOUT_S)

    def torch_test(self, folder: Path, changed: dict[str, Path]) -> str:
        if not (folder / "oracle_offload").exists():
            self.link_package(folder, changed)
        command = [sys.executable, str(TORCH_TEST)]
        environment = {"PYTHONPATH": str(folder), "MALLOC_PERTURB_": "0"}
        return self.test(TORCH_TEST.name, command, SLOW_TIMEOUT_S, **environment)

    def killer_test(
        self, killer: str, folder: Path, changed: dict[str, Path], mutated: Path
    ) -> str:
        """Run the one test that is remembered of a mutant, as long as there is such a test."""
        program, _, case = killer.partition("::")
        if program in self.programs and (not case or self.passes_alone(program, case)):
            return self.program_test(program, folder, case)
        if killer == MEMORY and mutated.name in CODEC:
            return self.memory_test(folder, mutated)
        if killer == THREADS and self.slow:
            return self.threads_test(folder, mutated)
        if killer == TORCH_TEST.name and self.slow:
            return self.torch_test(folder, changed)
        return "survived"

    def passes_alone(self, program: str, case: str) -> bool:
        """Whether a case that the program has passes by itself, without any mutation."""
        name = f"{program}::{case}"
        if name not in self.alone:
            there = case in self.cases[program]
            self.alone[name] = there and (
                self.program_test(program, self.folder, case) == "survived"
            )
        return self.alone[name]

    def tests(self, folder: Path, changed: dict[str, Path], mutated: Path) -> str:
        rest = self.programs
        if mutated.name in CALCULATING:
            rest = [program for program in rest if program not in CODEC_TESTS]
            for program in CODEC_TESTS:
                outcome = self.program_test(program, folder)
                if outcome != "survived":
                    return outcome
            outcome = self.memory_test(folder, mutated)
            if outcome != "survived":
                return outcome
        for program in rest:
            outcome = self.program_test(program, folder)
            if outcome != "survived":
                return outcome
        return self.slow_tests(folder, changed, mutated)

    def program_test(self, program: str, folder: Path, case: str = "") -> str:
        command = [str(self.folder / program), *([case] if case else [])]
        patience_s = self.patience_s.get(program, SLOW_TIMEOUT_S)
        return self.test(program, command, patience_s, LD_LIBRARY_PATH=str(folder))

    def slow_tests(self, folder: Path, changed: dict[str, Path], mutated: Path | None) -> str:
        """Run what survivors of the programs meet, unless the gate is to be fast."""
        if not self.slow:
            return "survived"
        outcome = self.threads_test(folder, mutated)
        return outcome if outcome != "survived" else self.torch_test(folder, changed)

    def try_mutant(self, mutant: Mutant) -> str:
        """Return "survived", "killed: " and by what, or "none: " and why it is no mutant."""
        source = self.sources[mutant.file]
        text = source[: mutant.begin] + mutant.text + source[mutant.end :]
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            path = folder / mutant.file
            path.write_text(text)
            try:
                changed = {mutant.file: self.build.object(str(path), target=path.with_suffix(".o"))}
            except BuildError:
                return "none: does not compile"
            key = (mutant.file, self.digest(changed[mutant.file]))
            with self.lock:
                twin = self.seen.setdefault(key, mutant.name)
            if twin != mutant.name:
                return f"none: same object code as {twin}"
            self.link_engine(folder, changed)
            outcome = self.killer_test(self.killers.get(mutant.key, ""), folder, changed, path)
            if outcome == "survived":
                outcome = self.tests(folder, changed, path)
            killer = killer_of(outcome)
            if self.remember and "::" in killer:
                alone = self.killer_test(killer, folder, changed, path)
                if alone == "survived":  # what earlier cases left behind is needed as well
                    outcome = outcome.replace(killer, killer.partition("::")[0], 1)
            return outcome


def killer_of(outcome: str) -> str:
    """Return the name of the test that killed a mutant; empty for one that was not killed."""
    verdict, _, rest = outcome.partition(": ")
    return rest.partition(": ")[0] if verdict == "killed" else ""


def write_killers(rows: Sequence[tuple[Mutant, str]], known: Mapping[str, str]) -> None:
    """Keep which test killed each mutant, and what is known of others that there are."""
    keys = {mutant.key for mutant in all_mutants()}
    killers = {key: test for key, test in known.items() if key in keys}
    killers |= {mutant.key: killer for mutant, how in rows if (killer := killer_of(how))}
    KILLERS.write_text(json.dumps(dict(sorted(killers.items())), indent=1) + "\n")


# ---- what is near a change ----


def git(*arguments: str, root: Path = ROOT) -> str:
    """Return what git says; empty where it fails, as without a repository or such a commit."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def begin_of_change(root: Path = ROOT) -> str:
    """Return the commit that a change began at; empty where there is no earlier one."""
    head = git("rev-parse", "HEAD", root=root)
    main = git("merge-base", "HEAD", "origin/HEAD", root=root)
    if main and main != head:
        return main
    earlier = git(
        "rev-list", f"--max-count={NEAR_COMMITS + 1}", "--first-parent", "HEAD", root=root
    )
    return "" if earlier.count("\n") < 1 else earlier.split("\n")[-1]


_COMMENT_OR_TEXT = re.compile(
    r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL
)


def code_lines(text: str) -> list[str]:
    """Return the lines of a C source without its comments; a line of a comment is empty."""

    def without(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n") if found[0].startswith("/") else found[0]

    return [" ".join(line.split()) for line in _COMMENT_OR_TEXT.sub(without, text).split("\n")]


def changed_lines(since: str, root: Path = ROOT) -> dict[str, set[int]]:
    """Return the lines, and those about them, that the working tree has otherwise, by file name.

    Of C sources alone, and of their code; where lines are gone, those around the place.
    """
    found: dict[str, set[int]] = {}
    names = git("diff", "--name-only", since, "--", "csrc", "tests/c", root=root) if since else ""
    for name in names.split("\n"):
        path = root / name
        if not name or not path.is_file():
            continue
        before, now = (
            code_lines(git("show", f"{since}:{name}", root=root)),
            code_lines(path.read_text(encoding="utf-8")),
        )
        matcher = difflib.SequenceMatcher(None, before, now, autojunk=False)
        for kind, a, b, first, end in matcher.get_opcodes():
            if kind != "equal" and any([*before[a:b], *now[first:end]]):
                around = range(first + 1 - NEAR_LINES, max(end, first + 1) + 1 + NEAR_LINES)
                found.setdefault(path.name, set()).update(around)
    return found


def near(
    mutants: Sequence[Mutant], lines: Mapping[str, set[int]], killers: Mapping[str, str]
) -> list[Mutant]:
    """Return the mutants that a change of these lines may concern, and a sample of the others.

    Of more than NEAR_MOST those whose keys' digest comes first: `make proof` tries all.
    """

    def concerned(mutant: Mutant) -> bool:
        program = re.split(r"::| under ", killers.get(mutant.key, ""))[0]
        return mutant.line in lines.get(mutant.file, ()) or f"{program}.c" in lines

    def digest(mutant: Mutant) -> bytes:
        return hashlib.sha256(mutant.key.encode()).digest()

    close = [mutant for mutant in mutants if concerned(mutant)]
    chosen = set(sorted(close, key=digest)[:NEAR_MOST])
    others = sorted({*mutants} - {*close}, key=digest)
    chosen.update(others[:NEAR_SAMPLE])
    return [mutant for mutant in mutants if mutant in chosen]


def equivalents() -> dict[str, str]:
    """Return the mutants proved to change nothing: key of the mutant -> proof."""
    if not EQUIVALENT.exists():
        return {}
    rows = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    return {f"{row['file']} | {row['kind']} | {row['code']}": row["proof"] for row in rows}


def main() -> int:
    """Run the gate; exit code 0, or 3 when it fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--only", default="", help="mutants whose name holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="write the outcome as JSON")
    parser.add_argument(
        "--fast", action="store_true", help="without ThreadSanitizer and torch for the survivors"
    )
    parser.add_argument("--near", action="store_true", help="those near the change, and a sample")
    parser.add_argument("--since", default="", help="the commit that the change began at")
    parser.add_argument("--verbose", action="store_true", help="say of every mutant what killed it")
    parser.add_argument("--remember", action="store_true", help="write which test killed each")
    parser.add_argument(
        "--self-test", action="store_true", help="switch race detection off: survivors must appear"
    )
    args = parser.parse_args()
    mutants = [m for m in all_mutants() if args.only in m.name]
    if args.self_test:  # the waits and records are what the race detector is for
        mutants = [m for m in mutants if "WaitEvent" in m.kind or "Record" in m.kind]
    killers: dict[str, str] = json.loads(KILLERS.read_text(encoding="utf-8"))
    if args.near:
        since = args.since or begin_of_change()
        mutants = near(mutants, changed_lines(since), killers)
        print(f"{len(mutants)} mutants near what changed since {since or 'no commit'}, and others")
    if args.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {' '.join(mutant.original.split())[:110]}")
        print(f"{len(mutants)} mutants")
        return 0
    start = time.monotonic()
    proofs = equivalents()
    rows: list[tuple[Mutant, str]] = []
    slow = not (args.fast or args.self_test)
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(
            Path(folder),
            races=not args.self_test,
            slow=slow,
            killers=killers,
            remember=args.remember,
        )
        print(f"the tests pass unchanged; {len(mutants)} mutants to try", flush=True)
        with ThreadPoolExecutor(args.jobs) as pool:
            for mutant, outcome in zip(mutants, pool.map(gate.try_mutant, mutants), strict=True):
                rows.append((mutant, outcome))
                if outcome == "survived":
                    note = "proved equivalent" if mutant.key in proofs else "SURVIVED"
                    print(f"{note}: {mutant.name}\n    {mutant.key}", flush=True)
                elif args.verbose:
                    print(f"{mutant.name}: {outcome}", flush=True)
                if len(rows) % 25 == 0:
                    seconds = time.monotonic() - start
                    print(f"... {len(rows)} of {len(mutants)} in {seconds:.0f} s", flush=True)
        alive = {mutant.key for mutant, outcome in rows if outcome == "survived"}
        for number, (mutant, outcome) in enumerate(rows):
            # On a busy machine a test may fail by itself: what is proved is tried again, alone.
            if mutant.key in proofs.keys() - alive and not outcome.startswith("none"):
                print(f"{mutant.name}: proved equivalent, but {outcome}; once more", flush=True)
                rows[number] = mutant, gate.try_mutant(mutant)
    if args.remember:
        write_killers(rows, killers)
    tried = [row for row in rows if not row[1].startswith("none")]
    survivors = [mutant for mutant, outcome in tried if outcome == "survived"]
    unproved = [m for m in survivors if m.key not in proofs]
    keys = {m.key for m in survivors}
    whole = not (args.only or args.fast or args.self_test or args.near)
    idle = [key for key in proofs if whole and key not in keys]
    share = len(survivors) / max(1, len(tried))
    seconds = time.monotonic() - start
    print(
        f"{len(tried) - len(survivors)} of {len(tried)} mutants killed in {seconds:.0f} s; "
        f"{len(survivors)} survive ({share:.1%}), {len(unproved)} of them without a proof; "
        f"{len(rows) - len(tried)} candidates are no mutants (do not compile, or same object code)"
    )
    for key in idle:
        print(f"equivalent.toml proves what does not survive: {key}")
    if args.output:
        report = {
            "schema": "oracle_offload/mutation/1",
            "tried": len(tried),
            "killed": len(tried) - len(survivors),
            "no_mutants": len(rows) - len(tried),
            "survivors": [{"name": m.name, "proof": proofs.get(m.key, "")} for m in survivors],
            "outcomes": {mutant.name: outcome for mutant, outcome in rows},
            "duration_s": seconds,
        }
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    if args.self_test:
        if not survivors:
            print("the gate proves nothing: no mutant survives without the race detector")
        return 0 if survivors else 3
    if args.near:  # a share of few says little
        return 3 if unproved else 0
    return 3 if unproved or idle or share > SURVIVORS_ALLOWED else 0


if __name__ == "__main__":
    sys.exit(main())
