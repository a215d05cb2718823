"""What every compilation of the C sources shares: folders, include paths, warnings.

`setup.py` builds the package with it, `c_programs.py` the C tests, `lint.py` the warning passes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CORE_FOLDERS = ("csrc/base", "csrc/driver", "csrc/core")
SIMULATOR_FOLDERS = ("csrc/sim",)
BINDING_FOLDERS = ("csrc/python",)
KERNEL_FOLDER = "csrc/kernels"
INCLUDES = ("csrc/include", "csrc/base", "csrc/core", "csrc/driver", "csrc/kernels")

SIMULATOR_SONAME = "liboracle_offload_simcuda.so.1"

WARNINGS = (
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wconversion",
    "-Wsign-conversion",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
    "-Wold-style-definition",
    "-Wcast-qual",
    "-Wpointer-arith",
    "-Wvla",
    "-Wundef",
    "-Wformat=2",
    "-Wnull-dereference",
    "-Wswitch-enum",
    "-Wwrite-strings",
)
WARNINGS_GCC_ONLY = ("-Wcast-align=strict", "-Wduplicated-cond", "-Wlogical-op")
WARNINGS_CLANG_ONLY = ("-Wcast-align",)
# Not on csrc/python: CPython's PyType_Slot puts function pointers into void *.
WARNINGS_CORE_ONLY = ("-Wpedantic",)

MSVC_FLAGS = ("/std:c11", "/experimental:c11atomics", "/W3", "/O2")


def sources(*folders: str) -> list[str]:
    """Return the .c files of `folders`, sorted, relative to the repository root."""
    found: list[str] = []
    for folder in folders:
        found += sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / folder).glob("*.c"))
    return found


def headers() -> list[str]:
    """Return every header below csrc/, sorted, relative to the repository root."""
    return sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*.h"))


def c_compiler() -> list[str]:
    """Return the C compiler's command: $CC, else cc, gcc, clang or what Python was built with."""
    named = os.environ.get("CC")
    if named:
        return shlex.split(named)
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return shlex.split(sysconfig.get_config_var("CC") or "cc")


def is_clang(compiler: list[str]) -> bool:
    """Whether the command is clang (zig cc is), which knows other warnings than gcc."""
    result = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return "clang" in (result.stdout + result.stderr).lower()


def warning_flags(compiler: list[str], *, core: bool, werror: bool) -> list[str]:
    """Return the warning set for a compiler.

    Parameters
    ----------
    compiler : list of str
        The command that compiles.
    core : bool
        Add what only the code without Python.h satisfies.
    werror : bool
        Make warnings errors.
    """
    flags = [*WARNINGS]
    flags += WARNINGS_CLANG_ONLY if is_clang(compiler) else WARNINGS_GCC_ONLY
    if core:
        flags += WARNINGS_CORE_ONLY
    if werror:
        flags.append("-Werror")
    return flags


def include_flags() -> list[str]:
    """Return one -I per include folder, relative to the repository root."""
    return [f"-I{folder}" for folder in INCLUDES]
