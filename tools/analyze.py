"""Static analysis of the C sources: clang-tidy (.clang-tidy) and cppcheck. `make analyze`."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import c_flags
from c_flags import ROOT
from lint import call, tool


def tidy(clang_tidy: str, source: str, includes: list[str]) -> str:
    """Return what clang-tidy finds in one file, or an empty string."""
    done = subprocess.run(
        [clang_tidy, "--quiet", source, "--", "-std=c11", *includes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr if done.returncode else ""


def gcc_includes() -> list[str]:
    """Return the compiler's own headers (stddef.h): the clang-tidy wheel brings none."""
    done = subprocess.run(
        [*c_flags.c_compiler(), "-print-file-name=include"],
        capture_output=True,
        text=True,
        check=False,
    )
    return ["-isystem", done.stdout.strip()] if done.returncode == 0 else []


def main() -> int:
    """Run both over the core, the driver loader, the simulator and the binding; 1 on a finding."""
    clang_tidy, cppcheck = tool("clang-tidy"), tool("cppcheck")
    plain = c_flags.sources(*c_flags.CORE_FOLDERS, *c_flags.SIMULATOR_FOLDERS)
    binding = c_flags.sources(*c_flags.BINDING_FOLDERS)
    includes = [*c_flags.include_flags(), "-Icsrc/sim", *gcc_includes()]
    python = ["-isystem", sysconfig.get_path("include"), "-DPy_LIMITED_API=0x030B0000"]
    jobs = [(source, includes) for source in plain]
    jobs += [(source, [*includes, *python]) for source in binding]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [text for text in pool.map(lambda job: tidy(clang_tidy, *job), jobs) if text]
    print("".join(found), end="")
    print(f"clang-tidy: {len(jobs)} files, {'FAILED' if found else 'ok'}", flush=True)
    good = call(
        *(cppcheck, "--std=c11", "--enable=warning,performance,portability", "--inline-suppr"),
        *(
            "--error-exitcode=1",
            "--quiet",
            f"-j{os.cpu_count()}",
            "--suppress=missingIncludeSystem",
        ),
        # `(void)a, (void)b;` is how unused parameters are named here.
        "--suppress=constStatement",
        *c_flags.include_flags(),
        # Not the binding: without Python's macros cppcheck misreads it.
        *plain,
    )
    print(f"cppcheck: {'ok' if good else 'FAILED'}")
    return 0 if good and not found else 1


if __name__ == "__main__":
    sys.exit(main())
