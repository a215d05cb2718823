"""Style, types and compiler warnings (`make lint`); with --fix the formatters (`make format`).

The type stub of the extension is compared with the built one, so the package is built first.

Every check runs, whatever another said, two at a time, as the types take as long as all the others
together; the exit status is 1 if any failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import c_build
from c_build import ROOT

PYTHON_PATHS = (
    "oracle_offload",
    "tools",
    "tests",
    "benchmarks",
    "docs",
    "examples",
    "setup.py",
    "conftest.py",
)


def c_files() -> list[str]:
    """Return every C source, header and kernel of the repository."""
    folders = ("csrc", "tests/c", "tests/cuda", "tests/fuzz")
    return sorted(
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".c", ".h", ".cu", ".cpp")
    )


def tool(name: str) -> str:
    """Return the path of a command that was installed with this Python, or from PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if not found:
        raise SystemExit(
            f"{name} is not installed; make lint PYTHON=... needs tools/requirements-lint.txt"
        )
    return found


def call(*command: str, **variables: str) -> bool:
    """Run a command from the repository root, and print what it says; whether it ended with 0."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    sys.stdout.buffer.write(done.stdout)
    sys.stdout.flush()
    return done.returncode == 0


def stubtest() -> bool:
    """Compare _core.pyi with the extension as it was built."""
    command = [sys.executable, "-m", "mypy.stubtest", "oracle_offload._core", "--concise"]
    # Python 3.11 has no __buffer__ that could be seen; later versions have.
    allowed = ("--allowlist", "tools/stubtest-allowlist.txt", "--ignore-unused-allowlist")
    # A package that holds the stub alone: of the real one mypy would read everything, and torch.
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "oracle_offload"
        package.mkdir()
        (package / "__init__.pyi").touch()
        shutil.copy(ROOT / "oracle_offload" / "_core.pyi", package)
        return call(*command, *allowed, "--mypy-config-file", "pyproject.toml", MYPYPATH=folder)


def c_warnings(*compiler: str) -> bool:
    """Compile every C source with all warnings as errors, as the C tests are compiled."""
    build = c_build.Build(c_build.checked(compiler=compiler))
    components = (c_build.ENGINE, *c_build.FOLDERS.values())

    def check(source: str) -> str:
        try:
            build.object(source)
        except c_build.BuildError as error:
            return str(error)
        return ""

    with build.locked(), ThreadPoolExecutor(os.cpu_count()) as pool:
        said = [text for text in pool.map(check, c_build.sources(*components)) if text]
    print("".join(said), end="", file=sys.stderr)
    return not said


def checks(fix: bool) -> list[tuple[str, Callable[[], bool]]]:
    """Return (name, check) in the order in which they begin; formatters run by themselves."""
    ruff, clang_format = tool("ruff"), tool("clang-format")
    if fix:
        return [
            ("ruff check --fix", lambda: call(ruff, "check", "--fix", *PYTHON_PATHS)),
            ("ruff format", lambda: call(ruff, "format", *PYTHON_PATHS)),
            ("clang-format", lambda: call(clang_format, "-i", *c_files())),
        ]
    found: list[tuple[str, Callable[[], bool]]] = [
        ("mypy --strict", lambda: call(sys.executable, "-m", "mypy")),
        ("ruff check", lambda: call(ruff, "check", *PYTHON_PATHS)),
        ("ruff format", lambda: call(ruff, "format", "--check", *PYTHON_PATHS)),
        ("clang-format", lambda: call(clang_format, "--dry-run", "--Werror", *c_files())),
        ("plain words", lambda: call(sys.executable, "tools/words.py")),
        ("stubtest", stubtest),
        ("C warnings", c_warnings),
    ]
    if shutil.which("clang") and not c_build.is_clang(c_build.c_compiler()):
        found.append(("C warnings, clang", lambda: c_warnings("clang")))
    return found


def main() -> int:
    """Run the checks; 1 if any failed."""
    fix = "--fix" in sys.argv[1:]

    def run(row: tuple[str, Callable[[], bool]]) -> tuple[str, bool]:
        name, check = row
        start = time.monotonic()
        good = check()
        seconds = time.monotonic() - start
        print(f"{name}: {'ok' if good else 'FAILED'} ({seconds:.1f} s)", flush=True)
        return name, good

    with ThreadPoolExecutor(1 if fix else 2) as pool:
        failed = [name for name, good in pool.map(run, checks(fix)) if not good]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
