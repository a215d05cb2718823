"""The Python suite with an extension and a simulator under AddressSanitizer and UBSan.

    python tools/sanitized_python.py                   # leaks, units, one life with torch
    python tools/sanitized_python.py --only leaks
    python tools/sanitized_python.py --only unit -k simulator    # more arguments for pytest

The parts run side by side, what of tests/unit drives our C code as one process for each processor,
each to its end.

Works on a copy of the tree under build/sanitized, so that the build in place stays as it is.

leaks: tests/unit/binding_life.py, which drives the binding without torch, with leak check and no
suppressions. A suppression of the interpreter's frames would hide every leak, because every call
from Python has one. The rest runs without leak check: libraries keep memory until the end.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import c_build
from c_build import ROOT

FOLDER = ROOT / "build" / "sanitized"
FOLDERS = (".ci", "benchmarks", "csrc", "docs", "examples", "oracle_offload", "tests", "tools")
PATTERNS = ("*.py", "*.toml", "*.md", "*.in", "LICENSE", "Makefile")
SANITIZERS = ("address", "undefined")
# What a test that drives our C code imports: the extension, or a room of the package that does.
DRIVES = re.compile(
    r"\b_core\b|oracle_offload(\.| import )(engine|disk|compress)|^import simulator\b", re.MULTILINE
)
# These import torch, or run a compiler, pip, a notebook or a child with torch: minutes.
WITHOUT = ("test_build", "test_from_disk_docs", "test_package", "test_wheels")
PARTS = ("leaks", "unit", "torch")


def copy_tree(folder: Path = FOLDER) -> None:
    """Copy the sources to `folder`; what was built there and has not changed is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "_build_info.json")
    for name in FOLDERS:
        target = folder / name
        for old in sorted(target.rglob("*"), reverse=True):
            if old.is_file() and old.suffix not in (".so", ".json"):
                old.unlink()
        shutil.copytree(ROOT / name, target, ignore=ignored, dirs_exist_ok=True)
    for pattern in PATTERNS:
        for path in ROOT.glob(pattern):
            shutil.copy2(path, folder / path.name)


def build(folder: Path = FOLDER) -> None:
    """Build the extension and the simulator in the copy, with the sanitizers.

    Raises
    ------
    subprocess.CalledProcessError
        When it does not compile; the compiler's words are printed.
    """
    flags = " ".join(["-g", "-fno-omit-frame-pointer", *c_build.sanitizer_flags(*SANITIZERS)])
    environment = {**os.environ, "CFLAGS": flags, "LDFLAGS": flags}
    environment["ORACLE_OFFLOAD_BUILD_KERNELS"] = "off"
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, env=environment, check=True)


def runtime() -> str:
    """Return what must be loaded before the interpreter, for LD_PRELOAD.

    The sanitizers' runtime, and C++'s: the first looks for `__cxa_throw` once, when it is loaded,
    and ends the process at the first exception that torch throws where it found none.
    """
    paths = []
    for name in ("libasan.so", "libstdc++.so.6"):
        command = [*c_build.c_compiler(), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            raise SystemExit(f"{command[0]} has no {name}: gcc brings it; set CC=gcc")
        paths.append(path)
    return " ".join(paths)


def environment(*, leaks: bool, folder: Path = FOLDER) -> dict[str, str]:
    """Return what a Python under the sanitizers needs; it ends with 66 where they object."""
    return {
        **os.environ,
        "LD_PRELOAD": runtime(),
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        **c_build.SANITIZER_ENVIRONMENT,
        **({} if leaks else {"ASAN_OPTIONS": "detect_leaks=0:exitcode=66"}),
    }


def run(
    arguments: Sequence[str], *, leaks: bool, folder: Path = FOLDER
) -> subprocess.CompletedProcess[str]:
    """Run this Python in the copy under the sanitizers; exit 66 means that they found something.

    What they found is the end of the output: pytest would keep what they print, and end with them.
    """
    variables = environment(leaks=leaks, folder=folder)
    with tempfile.TemporaryDirectory(dir=folder) as found:
        variables["ASAN_OPTIONS"] += f":log_path={found}/report"
        # Not `python` from PATH: a shell shim in its place would be what the sanitizers watch.
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for report in sorted(Path(found).iterdir()):
            done.stdout += report.read_text(errors="replace")
    return done


def commands(more: Sequence[str]) -> list[tuple[str, list[str], bool]]:
    """Return what is run: the part, its command, and whether with leak check."""
    paths = [
        path
        for path in (ROOT / "tests/unit").glob("test_*.py")
        if path.stem not in WITHOUT and DRIVES.search(path.read_text(encoding="utf-8"))
    ]
    paths.sort(key=lambda path: (-path.stat().st_size, path))
    tests = [path.relative_to(ROOT).as_posix() for path in paths]
    # Not the tests that bound a time: everything takes two to three times as long here.
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not takes_less_than"]
    processes = os.cpu_count() or 1
    return [
        *(("unit", [*pytest, *tests[nth::processes], *more], False) for nth in range(processes)),
        ("leaks", ["tests/unit/binding_life.py"], True),
        ("torch", ["tests/mutation/torch_training.py"], False),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Build the copy and run the parts; 0 when all of them passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="parts to run")
    args, more = parser.parse_known_args(argv)
    start = time.monotonic()
    copy_tree()
    build()
    print(f"built in {time.monotonic() - start:.1f} s", flush=True)

    def passes(row: tuple[str, list[str], bool]) -> bool:
        part, command, leaks = row
        start = time.monotonic()
        done = run(command, leaks=leaks)
        # With `-k` a share of the tests may have none that are wanted.
        passed = done.returncode == 0 or (part == "unit" and more and done.returncode == 5)
        how = "ok" if passed else f"FAILED, exit {done.returncode}"
        print(f"{done.stdout}{part}: {how} ({time.monotonic() - start:.1f} s)", flush=True)
        return bool(passed)

    rows = [row for row in commands(more) if not args.only or row[0] in args.only]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return 0 if all([*pool.map(passes, rows)]) else 1


if __name__ == "__main__":
    sys.exit(main())
