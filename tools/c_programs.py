"""Build and run the C programs of tests/c: with sanitizers, or cross-compiled for Windows.

    python tools/c_programs.py run                                   # all, on the simulated driver
    python tools/c_programs.py run test_plan --sanitize address,undefined
    python tools/c_programs.py run test_plan::test_the_trace_wraps   # one case
    python tools/c_programs.py build --windows      # by zig: make wheels-environment

A program is tests/c/test_*.c, example.c or conformance.c, linked with the engine. It finds the
simulated driver through ORACLE_OFFLOAD_DRIVER.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import c_build
from c_build import ROOT, Build, BuildError, Variant

PROGRAM_FOLDER = "tests/c"
PROGRAM_PATTERNS = ("test_*.c", "example.c", "conformance.c")
TIMEOUT_S = 600
# Sweeps of minutes under a sanitizer: their cases run side by side, before all else.
LONG = ("test_faults",)


def programs(names: Sequence[str] = ()) -> list[Path]:
    """Return the sources of the C programs: all, or those named (without .c), or by their path."""
    folder = ROOT / PROGRAM_FOLDER
    elsewhere = [ROOT / name for name in names if name.endswith(".c")]
    names = [name for name in names if not name.endswith(".c")]
    if elsewhere and not names:
        return elsewhere
    found = sorted({p for pattern in PROGRAM_PATTERNS for p in folder.glob(pattern)})
    unknown = set(names) - {p.stem for p in found}
    if unknown:
        raise SystemExit(
            f"no such program: {', '.join(sorted(unknown))}; there are "
            f"{', '.join(p.stem for p in found)}"
        )
    return [p for p in found if not names or p.stem in names] + elsewhere


def threaded(paths: Sequence[Path]) -> list[Path]:
    """Return those programs that run on several threads: the others have no race to find.

    A host function runs on a thread of the simulated driver's own, and what is not page-locked is
    copied by threads of the engine's. test_missing_waits takes away what orders them: its races are
    for the simulator's detector to find.
    """
    starts = re.compile(
        r"\b(oo__thread_start|sim_os_start|cuLaunchHostFunc|simRefuseRegistration|simLockQuota)\b"
    )
    return [
        path
        for path in paths
        if path.stem != "test_missing_waits" and starts.search(path.read_text(encoding="utf-8"))
    ]


def cases(path: Path) -> list[str]:
    """Return the cases of a program, in the order of its source (tests/c/check.h)."""
    return re.findall(r"(?<!define )\bCASE\((\w+)[,)]", path.read_text(encoding="utf-8"))


def parts(name: str, chosen: Sequence[str] | None) -> list[list[str]]:
    """Return what a program is to run, process by process; an empty list means all its cases."""
    if chosen or name not in LONG:
        return [[*(chosen or ())]]
    return [[case] for case in cases(ROOT / PROGRAM_FOLDER / f"{name}.c")]


def engine_tests() -> list[str]:
    """Return the programs that test the engine (not the simulator, nor the declarations)."""
    others = ("test_sim_", "test_cu_abi")
    return [
        p.stem for p in programs() if re.match("test_", p.stem) and not p.stem.startswith(others)
    ]


@dataclass
class Built:
    """Where a variant's simulator and programs are."""

    simulator: Path
    programs: dict[str, Path]


def build(variant: Variant, names: Sequence[str] = (), folder: Path | None = None) -> Built:
    """Build the engine, the simulator and the programs; only what changed since the last time.

    Raises
    ------
    c_build.BuildError
        With the compiler's words.
    """
    wanted = [path.relative_to(ROOT).as_posix() for path in programs(names)]
    build = Build(variant, folder)
    with build.locked():
        return Built(build.simulator(), build.programs(wanted, build.engine()))


def run(
    variant: Variant,
    built: Built,
    name: str,
    arguments: Sequence[str] = (),
    *,
    timeout_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run one program on the simulated driver; a hang is killed and answers 124."""
    environment = {**os.environ, **variant.environment}
    environment["ORACLE_OFFLOAD_DRIVER"] = str(built.simulator)
    command = [*variant.runner, str(built.programs[name]), *arguments]
    # A file, not a pipe: processes that Wine leaves behind would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=timeout_s,
            )
            status, ending = done.returncode, ""
        except subprocess.TimeoutExpired:
            status, ending = 124, f"\nkilled after {timeout_s} s"
        output.seek(0)
        return subprocess.CompletedProcess(command, status, output.read() + ending, "")


def figures(output: str) -> dict[str, Any]:
    """Return what a program counted: its cases, checks, faults injected, weights and flips.

    Of one that ran more than once, a part of its cases each time, all that was said.
    """
    ended = re.findall(r"^(\d+) passed, (\d+) failed$", output, re.MULTILINE)
    found: dict[str, Any] = {
        "cases": len(re.findall(r"^\w+: ok$", output, re.MULTILINE)),
        "passed": sum(int(passed) for passed, _ in ended),
        "failed": sum(int(failed) for _, failed in ended),
    }
    for what in ("calls", "allocations"):
        life = re.search(rf"^(\d+) {what} in a life", output, re.MULTILINE)
        if life:
            found[f"{what}_in_a_life"] = int(life[1])
    struck = re.search(r"in a life; (\d+) of them failed", output)
    if struck:
        found["allocations_failed"] = int(struck[1])
    codec = re.findall(r"^(\d+) (weights decoded|flips noticed)", output, re.MULTILINE)
    found |= {what.replace(" ", "_"): int(count) for count, what in codec}
    faults = re.findall(r"^faults: (\d+) of (\d+) (.*)$", output, re.MULTILINE)
    if faults:
        found["faults"] = [
            {"injected": int(count), "of": int(of), "what": what} for count, of, what in faults
        ]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Build, and unless asked not to, run each program; 0 when all of them ended with 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["build", "run"])
    parser.add_argument(
        "names", nargs="*", help="programs without .c, or PROGRAM::CASE; default: all"
    )
    parser.add_argument(
        "--sanitize",
        default="",
        help="address, undefined, thread (runs the programs that start threads); with commas",
    )
    parser.add_argument("--windows", action="store_true", help="cross-compile with ziglang")
    parser.add_argument("--verbose", action="store_true", help="show what programs that pass say")
    parser.add_argument("--coverage", action="store_true", help="instrument for gcov")
    parser.add_argument("--output", type=Path, help="write what each program counted, as JSON")
    args = parser.parse_intermixed_args(argv)
    sanitize = [s for s in args.sanitize.split(",") if s]
    chosen: dict[str, list[str]] = {}
    for text in args.names:
        name, _, case = text.partition("::")
        chosen.setdefault(name, []).extend([case] if case else [])
    names = [*chosen]
    if "thread" in sanitize and not names:
        names = [path.stem for path in threaded(programs())]
    variant = (
        c_build.windows() if args.windows else c_build.checked(*sanitize, coverage=args.coverage)
    )
    try:
        built = build(variant, names)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{variant.name}: built {len(built.programs)} programs and {built.simulator.name}")
    if args.action == "build":
        return 0
    if variant.why_not_run:
        print(f"{variant.name}: not run: {variant.why_not_run}")
        return 0

    def timed(job: tuple[str, list[str]]) -> tuple[subprocess.CompletedProcess[str], float]:
        start = time.monotonic()
        done = run(variant, built, *job)
        return done, time.monotonic() - start

    jobs = [(name, cases) for name in built.programs for cases in parts(name, chosen.get(name))]
    jobs.sort(key=lambda job: job[0] not in LONG)
    failed = []
    counted = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = [(name, pool.submit(timed, (name, cases))) for name, cases in jobs]
        for name in built.programs:
            rows = [job.result() for which, job in running if which == name]
            status = max((done.returncode for done, _ in rows), key=abs)
            output = "".join(done.stdout for done, _ in rows)
            seconds = sum(seconds for _, seconds in rows)
            how = "ok" if status == 0 else f"exit {status}"
            print(f"{name}: {how} ({seconds:.1f} s)", flush=True)
            counted[name] = {"exit": status, "duration_s": seconds, **figures(output)}
            if status != 0:
                # A sweep that fails says thousands of lines: the first ones show the cause.
                lines = output.splitlines()
                print("\n".join([*lines[:40], "...", *lines[-10:]] if len(lines) > 50 else lines))
                failed.append(name)
            elif args.verbose:
                print(output)
    if args.output:
        report = {"schema": "oracle_offload/c-programs/1", "programs": counted}
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if failed:
        print(f"{variant.name}: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
