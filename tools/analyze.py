"""Static analysis of the C sources: clang-tidy (.clang-tidy) and cppcheck. `make analyze`.

Covers the core, the driver loader, the simulator, the binding, the C tests and the fuzz targets.
Every finding fails; a false one is silenced at its line, with the reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import c_build
from c_build import ROOT
from lint import call, tool

PLAIN = (c_build.ENGINE, "simulator", "tests", "fuzz")

# gcc's headers of a processor's instructions are made of its own builtins, which clang-tidy lacks.
INSTRUCTIONS = "csrc/core/codec_x86.c"


def tidy(clang_tidy: str, source: str, flags: list[str]) -> str:
    """Return what clang-tidy finds in one file, or an empty string."""
    done = subprocess.run(
        [clang_tidy, "--quiet", source, "--", "-std=c11", "-pthread", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr if done.returncode else ""


def compiler_includes() -> list[str]:
    """Return the compiler's own headers (stddef.h): the clang-tidy wheel brings none."""
    done = subprocess.run(
        [*c_build.c_compiler(), "-print-file-name=include"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return []
    found = ["-isystem", done.stdout.strip()]
    # gcc's stdatomic.h gives its own builtins _Atomic types, which clang's of that name refuse.
    return found if c_build.is_clang(c_build.c_compiler()) else [*found, "-D_Atomic="]


def clang_tidy_passes() -> bool:
    """Run clang-tidy over every C source, several at a time; whether it found nothing."""
    clang_tidy = tool("clang-tidy")
    compiler = compiler_includes()
    left_out = () if c_build.is_clang(c_build.c_compiler()) else (INSTRUCTIONS,)
    jobs = [
        (source, [*c_build.preprocessor_flags(component), *compiler])
        for component in (*PLAIN, "binding")
        for source in c_build.sources(component)
        if source not in left_out
    ]
    # The largest first: the last one to end decides how long it takes.
    jobs.sort(key=lambda job: (ROOT / job[0]).stat().st_size, reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [text for text in pool.map(lambda job: tidy(clang_tidy, *job), jobs) if text]
    print("".join(found), end="", flush=True)
    return not found


def cppcheck_passes() -> bool:
    """Run cppcheck over all but the binding, which it misreads without Python's macros."""
    return call(
        *(tool("cppcheck"), "--std=c11", "--enable=warning,performance,portability"),
        *("--inline-suppr", "--error-exitcode=1", "--quiet", f"-j{os.cpu_count()}"),
        "--suppress=missingIncludeSystem",
        # `(void)a, (void)b;` is how unused parameters are named here.
        "--suppress=constStatement",
        # A test that gets no memory may crash; what the engine does is tests/c/test_memory.c's.
        "--suppress=nullPointerOutOfMemory:tests/*",
        "--suppress=nullPointerArithmeticOutOfMemory:tests/*",
        *c_build.preprocessor_flags("tests"),
        *c_build.sources(*PLAIN),
    )


def main() -> int:
    """Run both; 1 on a finding."""
    failed = []
    for name, check in (("clang-tidy", clang_tidy_passes), ("cppcheck", cppcheck_passes)):
        start = time.monotonic()
        good = check()
        seconds = time.monotonic() - start
        print(f"{name}: {'ok' if good else 'FAILED'} ({seconds:.1f} s)", flush=True)
        if not good:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
