"""Everything that proves the engine's order and its behaviour under faults, in one command.

    python tools/proof.py               # all parts, then one table; exit 3 if any fails
    python tools/proof.py --only soak   # one part
    python tools/proof.py --record      # and put the figures into docs/reliability.json and .md
    python tools/proof.py --list

Each part is a command of its own, so that what fails can be run again alone. It writes its figures
as JSON (pytest: as JUnit XML).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import reliability_page
from c_build import ROOT

PYTEST = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--junitxml={output}")
LEFT_OUT = ("schema", "outcomes", "survivors")  # of a part's JSON: no figures


@dataclass(frozen=True)
class Part:
    """One proof: its command, after the interpreter; {output} is the file for its figures."""

    name: str
    command: tuple[str, ...]
    timeout_s: float
    environment: tuple[tuple[str, str], ...] = ()
    python: str = sys.executable


PARTS = (
    Part("conformance", ("tools/conformance.py", "--output", "{output}"), 120),
    Part(
        "races",
        (
            *("tools/c_programs.py", "run", "--output", "{output}"),
            *(
                "test_sim_order",
                "test_sim_fuzz",
                "test_order",
                "test_missing_waits",
                "test_threads",
            ),
        ),
        300,
    ),
    Part(
        "driver faults",
        ("tools/c_programs.py", "run", "--output", "{output}", "test_faults", "test_memory"),
        900,
        (("ORACLE_OFFLOAD_TEST_FAULT_STRIDE", "all"),),
    ),
    # `make asan-check` and `make tsan-check` with all of their sweeps.
    Part(
        "sanitizers",
        ("tools/c_programs.py", "run", "--sanitize", "address,undefined", "--output", "{output}"),
        3600,
    ),
    Part(
        "thread sanitizer",
        ("tools/c_programs.py", "run", "--sanitize", "thread", "--output", "{output}"),
        3600,
    ),
    Part(
        "training faults",
        (*PYTEST, "tests/fault/test_training_faults.py", "-m", "proof"),
        900,
    ),
    Part("mutants", ("tools/mutate.py", "--output", "{output}"), 2400),
    Part("without the detector", ("tools/mutate.py", "--self-test", "--output", "{output}"), 900),
    Part(
        "python mutants",
        ("tools/mutate_python.py", "--count", "150", "--output", "{output}"),
        7200,
    ),
    # Goes on where it was stopped, while the package and its tests stay as they are.
    Part(
        "tiers of tests",
        (
            *("tools/mutate_python.py", "--tiers", "--count", "300", "--seed", "tiers", "--resume"),
            *("--output", "{output}"),
        ),
        14400,
    ),
    Part(
        "codec", (*PYTEST, "tests/kernels", "tests/training/test_compress.py", "-m", "slow"), 3600
    ),
    Part(
        "slow tests",  # that no other part runs
        (
            *(*PYTEST, "tests", "-m", "slow and not gpu and not proof"),
            *("--ignore=tests/kernels", "--ignore=tests/training/test_compress.py"),
        ),
        14400,
    ),
    Part(
        "slow tests, simgpu",
        (
            *(*PYTEST, "tests/training", "tests/clients"),
            *("--device", "simgpu", "-m", "slow and not proof"),
        ),
        7200,
    ),
    # Over PyTorch's CUDA build, in .venv-cuda: `make cuda-build`.
    Part("cuda", ("tools/cuda_check.py", "--output", "{output}"), 10800),
    Part("cuda waits", ("tools/cuda_mutants.py", "--output", "{output}"), 7200),
    # AI-Toolkit's own code in its own pins, in .venv-aitoolkit: `make aitoolkit-environment`.
    Part(
        "AI-Toolkit",
        (*PYTEST, "tests/toolkit", "-m", "not gpu"),
        3600,
        (("TOOLKIT", ".venv-aitoolkit/source"), ("CUDA_SIM", "0")),
        ".venv-aitoolkit/bin/python",
    ),
    Part("planted bugs", (*PYTEST, "tests/mutation", "-m", "not gpu"), 600),
    Part("coverage", ("tools/c_coverage.py", "--output", "{output}"), 300),
    Part("fuzz", ("tools/fuzz.py", "--seconds", "30", "--output", "{output}"), 300),
    # By zig, in .venv-wheels: `make wheels-environment`.
    Part("wheels", (*PYTEST, "tests/unit/test_wheels.py", "-m", "proof"), 1800),
    # Where Wine is not installed, nothing is run, and no figures say so.
    Part("windows", ("tools/c_programs.py", "run", "--windows", "--output", "{output}"), 3600),
    Part("lease", (*PYTEST, "tests/unit/test_gpu_tools.py", "-m", "proof"), 7200),
    Part("soak", (*PYTEST, "tests/fault/test_soak.py", "-m", "proof"), 300),
)


def read_figures(path: Path) -> dict[str, Any]:
    """Return the figures that a part wrote; nothing where it wrote none."""
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("<"):
        return read_junit(text)
    document = json.loads(text)
    return {key: value for key, value in document.items() if key not in LEFT_OUT}


def read_junit(text: str) -> dict[str, Any]:
    """Return the counts of a JUnit report, and what `record_property` put into it, by name."""
    root = ElementTree.fromstring(text)
    cases = list(root.iter("testcase"))
    bad = [case for case in cases for kind in ("failure", "error") if case.find(kind) is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    properties = defaultdict(list)
    for case in cases:
        for item in case.iter("property"):
            with suppress(ValueError):  # what is no JSON is for people
                value = json.loads(item.attrib["value"])
                if not isinstance(value, list):
                    properties[item.attrib["name"]].append(value)
    return {
        "tests": len(cases) - len(skipped),
        "failed": len(bad),
        "skipped": len(skipped),
        **properties,
    }


def run(part: Part) -> tuple[bool, dict[str, Any], float]:
    """Run one part; return whether it passed, its figures, and its seconds."""
    start = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(part.environment)}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures"
        command = [word.replace("{output}", str(output)) for word in part.command]
        try:
            done = subprocess.run(
                [part.python, *command],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=part.timeout_s,
                check=False,
            )
            said, passed = done.stdout + done.stderr, done.returncode == 0
        except subprocess.TimeoutExpired as error:
            raw = error.stdout or b""
            said = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
            said += f"\nended after {part.timeout_s:.0f} s"
            passed = False
        if not passed:
            print(said[-4000:])
        return passed, read_figures(output), time.monotonic() - start


def commit() -> str:
    """Return the commit of the tree, with a plus where more than the record has changed."""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    command = ["git", "diff", "--quiet", "HEAD", "--", ".", ":!docs/reliability.*"]
    changed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode
    return (done.stdout.strip() or "unknown") + ("+" if changed else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; 0, or 3 when one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", help="parts to run, by name")
    parser.add_argument("--list", action="store_true", help="print the parts and their commands")
    parser.add_argument("--record", action="store_true", help="put what passes into the docs")
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
            print(f"{part.name:20} {setting}python {' '.join(part.command)}")
            continue
        print(f"{part.name} ...", flush=True)
        passed, figures, seconds = run(part)
        rows.append((part.name, passed, figures, seconds))
        if args.record and passed:
            reliability_page.record(part.name, commit(), seconds, figures)
    for name, passed, figures, seconds in rows:
        shown = reliability_page.shown(name, figures) if passed else ""
        print(f"{'ok  ' if passed else 'FAIL'} {name:20} {seconds:5.0f} s  {shown}")
    return 0 if all(row[1] for row in rows) else 3


if __name__ == "__main__":
    sys.exit(main())
