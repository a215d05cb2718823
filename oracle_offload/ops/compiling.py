"""Compile the operators over the headers of the torch that is installed."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from ..errors import OffloadError
from ..host.owned import make_folder, own_name
from . import files
from .load import path_here

_COMPILERS = ("c++", "g++", "clang++")
_LAST_LINES = 25
_SHOWN_AFTER_S = 2.0


def compiler() -> list[str]:
    """Return the command of a C++ compiler: ``$CXX``, or the first that PATH has.

    Raises
    ------
    OffloadError
        There is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]):
            return named
        raise OffloadError(f"CXX names {named[0]!r}, which is not a command here.")
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise OffloadError(
        f"no C++ compiler: looked for {', '.join(_COMPILERS)} in PATH and for $CXX. Install one "
        "that knows C++20 (Debian, Ubuntu: apt install g++), or use conda's gxx."
    )


def command(target: Path) -> list[str]:
    """Return the command that builds `target`.

    Raises
    ------
    OffloadError
        Something is missing for it.
    """
    if sys.platform != "linux":
        raise OffloadError("the operators in C++ are built on Linux alone.")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise OffloadError(
            f"{headers / 'Python.h'} is missing: install Python's headers (Debian, Ubuntu: apt "
            "install python3-dev)."
        )
    folder = Path(torch.__file__).parent
    source, *ours = files.sources()
    includes = [folder / "include", folder / "include/torch/csrc/api/include", headers]
    return [
        *compiler(),
        *"-std=c++20 -O2 -fPIC -shared -fvisibility=hidden".split(),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-isystem{path}" for path in includes),
        *(f"-I{path}" for path in dict.fromkeys(header.parent for header in ours)),
        str(source),
        *("-o", str(target), f"-L{folder / 'lib'}"),
        *"-ltorch_python -ltorch_cpu -lc10".split(),
    ]


def build(*, force: bool = False) -> tuple[Path, float]:
    """Build the operators, unless they are there.

    Returns
    -------
    tuple
        Where they are, and the seconds it took: 0 where they were there.

    Raises
    ------
    OffloadError
        There is no compiler, or it failed.
    """
    path = path_here()
    if not force:
        with contextlib.suppress(OSError), own_name(path):
            return path, 0.0
    start = time.monotonic()
    make_folder(path.parent)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        _run(command(partial), start)
        partial.chmod(0o700)  # whatever the umask: else it would not be loaded
        partial.replace(path)  # another process may do the same: it appears as a whole
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
    _forget_others(path)
    return path, time.monotonic() - start


def _run(words: list[str], start: float) -> None:
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            said = _wait(process, start)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        lines = said.decode(errors="replace").splitlines()[-_LAST_LINES:]
        raise OffloadError(
            f"{words[0]} could not compile the operators (exit status {process.returncode}); it "
            "needs C++20. Its last words:\n" + "\n".join(lines)
        )


def _wait(process: subprocess.Popen[bytes], start: float) -> bytes:
    """Return what a process says until it ends; show the seconds from the third on."""
    shown = False
    while True:
        try:
            return process.communicate(timeout=0.5)[0]
        except subprocess.TimeoutExpired:
            passed = time.monotonic() - start
            if passed > _SHOWN_AFTER_S and sys.stderr.isatty():
                shown = True
                print(f"\rcompiling: {passed:.0f} s", end="", file=sys.stderr, flush=True)
        finally:
            if shown and process.poll() is not None:
                print(file=sys.stderr)


def _forget_others(path: Path) -> None:
    """Remove builds of other sources for the same torch and Python."""
    kept = path.name.rpartition("-")[0]
    for other in path.parent.glob("ops-*.so"):
        if other != path and other.name.rpartition("-")[0] == kept:
            other.unlink(missing_ok=True)
