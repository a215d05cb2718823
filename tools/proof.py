"""Everything that proves the engine's order and its behaviour under faults, in one command.

    python tools/proof.py               # all parts, then one table; exit 3 if any fails
    python tools/proof.py --only faults # one part
    python tools/proof.py --list

Each part is a command of its own, so that what fails can be run again alone.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from c_build import ROOT

PYTEST = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Part:
    """One proof: its command (after the interpreter), and the figures to quote from its output."""

    name: str
    command: tuple[str, ...]
    figures: tuple[str, ...]
    timeout_s: float
    environment: tuple[tuple[str, str], ...] = ()


PARTS = (
    Part(
        "conformance",
        ("tools/conformance.py",),
        (r"(\d+ passed, \d+ failed)", r"(no recording)"),
        120,
    ),
    Part(
        "races",
        (
            *("tools/c_programs.py", "run", "--verbose"),
            *(
                "test_sim_order",
                "test_sim_fuzz",
                "test_order",
                "test_missing_waits",
                "test_threads",
            ),
        ),
        (r"(\d+ passed, \d+ failed)",),
        300,
    ),
    Part(
        "driver faults",
        ("tools/c_programs.py", "run", "test_faults", "--verbose"),
        (r"(\d+ calls in a life)", r"(faults: [^\n]*)"),
        600,
        (("ORACLE_OFFLOAD_TEST_FAULT_STRIDE", "all"),),
    ),
    Part(
        "training faults",
        (*PYTEST, "tests/fault/test_training_faults.py", "-m", "proof"),
        (r"(faults: [^\n]*)", r"(\d+ passed[^\n]*)"),
        900,
    ),
    Part("mutants", ("tools/mutate.py",), (r"(\d+ of \d+ mutants killed[^\n]*)",), 1200),
    Part(
        "python mutants",
        ("tools/mutate_python.py", "--count", "150"),
        (r"(\d+ of \d+ mutants killed[^\n]*)",),
        1800,
    ),
    Part(
        "planted bugs",
        (*PYTEST, "tests/mutation", "-m", "not gpu"),
        (r"(\d+ passed[^\n]*)",),
        300,
    ),
    Part("coverage", ("tools/c_coverage.py",), (r"(\w+\.c +\d+ of +\d+ branches[^\n]*)",), 300),
    Part(
        "fuzz",
        ("tools/fuzz.py", "--seconds", "30"),
        (r"(number_of_executed_units: *\d+)", r"(\d+ inputs[^\n]*)"),
        300,
    ),
    Part(
        "soak",
        (*PYTEST, "tests/fault/test_soak.py", "-m", "proof"),
        (r"(soak: RSS grows by -?\d+ bytes a step)",),
        300,
    ),
)


def run(part: Part) -> tuple[bool, str, float]:
    """Run one part; return whether it passed, its figures, and its seconds."""
    start = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(part.environment)}
    try:
        done = subprocess.run(
            [sys.executable, *part.command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=part.timeout_s,
            check=False,
        )
        output, passed = done.stdout + done.stderr, done.returncode == 0
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        output = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        output += f"\nended after {part.timeout_s:.0f} s"
        passed = False
    if not passed:
        print(output[-4000:])
    found = [text for pattern in part.figures for text in re.findall(pattern, output)]
    return passed, "; ".join(" ".join(text.split()) for text in found), time.monotonic() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; 0, or 3 when one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", help="parts to run, by name")
    parser.add_argument("--list", action="store_true", help="print the parts and their commands")
    args = parser.parse_args(argv)
    names = [part.name for part in PARTS]
    unknown = sorted(set(args.only or ()) - set(names))
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(names)}")
    rows = []
    for part in PARTS:
        if args.only and part.name not in args.only:
            continue
        if args.list:
            setting = "".join(f"{name}={value} " for name, value in part.environment)
            print(f"{part.name:16} {setting}python {' '.join(part.command)}")
            continue
        print(f"{part.name} ...", flush=True)
        rows.append((part.name, *run(part)))
    for name, passed, figures, seconds in rows:
        print(f"{'ok  ' if passed else 'FAIL'} {name:16} {seconds:5.0f} s  {figures}")
    return 0 if all(row[1] for row in rows) else 3


if __name__ == "__main__":
    sys.exit(main())
