"""Branch coverage of the core by the C programs, by gcov; exit 3 below the floor.

    python tools/c_coverage.py                    # run all C programs, print a table
    python tools/c_coverage.py --missed plan.c    # and the branches of one file that were not taken

Counts branches of the code that this machine's compiler was given: what is compiled for Windows
alone is not among them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import c_build
import c_programs
from c_build import ROOT

FLOORS = {
    "plan.c": 0.9,
    "forecast.c": 0.9,
    "stays.c": 0.9,
    "places.c": 0.9,
    "fetch.c": 0.9,
    "arena.c": 0.9,
    "engine.c": 0.9,
    "uses.c": 0.9,
    "copies.c": 0.9,
    "gradient.c": 0.9,
    "call.c": 0.9,
    "device.c": 0.9,
    "timing.c": 0.9,
    "host.c": 0.9,
    "masters.c": 0.9,
    "feed.c": 0.9,
}


def branches_of(notes: Path) -> list[tuple[int, int]]:
    """Return (line, times taken) of every branch of the source that `notes` belongs to."""
    done = subprocess.run(
        ["gcov", "--branch-probabilities", "--json-format", "--stdout", str(notes)],
        capture_output=True,
        check=True,
        cwd=ROOT,
    )
    found = []
    for file in json.loads(done.stdout)["files"]:
        if Path(file["file"]).suffix != ".c":
            continue
        for line in file["lines"]:
            found += [(line["line_number"], branch["count"]) for branch in line["branches"]]
    return found


def main() -> int:
    """Measure; 0, or 3 when a file is below its floor."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--missed", default="", help="print this file's branches never taken")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    if not shutil.which("gcov"):
        raise SystemExit("gcov is not installed: it comes with gcc")
    start = time.monotonic()
    # Of the sample of faults every third: the whole sweep adds no branch.
    os.environ.setdefault("ORACLE_OFFLOAD_TEST_FAULT_STRIDE", "3")
    programs = c_programs.engine_tests()
    variant = c_build.checked(coverage=True)
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = c_programs.build(variant, programs, folder)
        print(f"built; running {len(programs)} programs", flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            runs = pool.map(lambda name: c_programs.run(variant, built, name), programs)
            for program, done in zip(programs, runs, strict=True):
                print(f"{program}: exit {done.returncode}", flush=True)
                if done.returncode != 0:
                    failed.append(program)
        rows = {}
        paths = {Path(source).name: source for source in c_build.sources(c_build.ENGINE)}
        for file in sorted(paths, key=lambda name: (name not in FLOORS, name)):
            notes = c_build.Build(variant, folder).object_path(paths[file]).with_suffix(".gcda")
            branches = branches_of(notes)
            if not branches:
                continue
            taken = sum(count > 0 for _, count in branches)
            rows[file] = (taken, len(branches))
            if file == args.missed:
                lines = sorted({line for line, count in branches if count == 0})
                print(f"{file}: branches not taken in lines {', '.join(map(str, lines))}")
    below = [f"{file} has a floor and is gone" for file in FLOORS if file not in rows]
    for file, (taken, total) in rows.items():
        share = taken / max(1, total)
        floor = FLOORS.get(file)
        print(f"{file:14} {taken:4} of {total:4} branches  {share:6.1%}")
        if floor and share < floor:
            below.append(f"{file} is at {share:.1%}, below {floor:.0%}")
    print(f"in {time.monotonic() - start:.0f} s")
    if args.output:
        figures = {
            file: {"taken": taken, "branches": total} for file, (taken, total) in rows.items()
        }
        report = {"schema": "oracle_offload/coverage/1", "files": figures}
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    for line in [*below, *(f"{program} failed" for program in failed)]:
        print(line)
    return 3 if below or failed else 0


if __name__ == "__main__":
    sys.exit(main())
