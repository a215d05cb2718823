"""Compile csrc/kernels/*.cu to one fatbin and write it as a C array: optional at build time."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "csrc" / "kernels"

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# PTX of the oldest architecture: a GPU that none of the binaries fits compiles it when it loads.
PTX_ARCHITECTURE = 80


class KernelBuildError(RuntimeError):
    """The kernels cannot be built; says why and what to do."""


@dataclass
class Kernels:
    """What became of the kernels: `why` is empty where they were built."""

    source: Path
    nbytes: int = 0
    why: str = ""
    nvcc_version: str = ""
    architectures: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def find_nvcc() -> str | None:
    """Return nvcc's path from CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda, or None."""
    executable = "nvcc.exe" if os.name == "nt" else "nvcc"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and (Path(home) / "bin" / executable).is_file():
            return str(Path(home) / "bin" / executable)
    default = Path("/usr/local/cuda/bin") / executable
    return shutil.which(executable) or (str(default) if default.is_file() else None)


def build(mode: str, folder: Path) -> Kernels:
    """Write `folder`/kernels_fatbin.c, with the fatbin or (size 0) without.

    Parameters
    ----------
    mode : str
        ``auto`` builds when nvcc is there and works, ``on`` insists, ``off`` never builds.
    folder : Path
        Where to write; is created.

    Raises
    ------
    KernelBuildError
        With ``on``, when nvcc is missing or fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "kernels_fatbin.c"
    result = Kernels(source)
    image = b""
    if mode == "off":
        result.why = "ORACLE_OFFLOAD_BUILD_KERNELS=off"
    else:
        try:
            image = _compile(folder, result)
        except KernelBuildError as error:
            if mode == "on":
                raise
            result.why = str(error)
    result.nbytes = len(image)
    _write_if_changed(source, _as_c(image, _toolkit(result.nvcc_version) if image else 0))
    return result


def _compile(folder: Path, result: Kernels) -> bytes:
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelBuildError(
            "nvcc not found (looked at CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda/bin)"
        )
    files = sorted(FOLDER.glob("*.cu"))
    version = _run([nvcc, "--version"])
    match = re.search(r"release \S+ V(\S+)", version)
    result.nvcc_version = match[1] if match else "unknown"
    known = _run([nvcc, "--list-gpu-arch"]).split()
    wanted = [a for a in ARCHITECTURES if f"compute_{a}" in known]
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in wanted]
    ptx = PTX_ARCHITECTURE if PTX_ARCHITECTURE in wanted else min(wanted, default=0)
    if not ptx:
        raise KernelBuildError(f"nvcc {result.nvcc_version} knows none of sm_{ARCHITECTURES}")
    gencode.append(f"-gencode=arch=compute_{ptx},code=compute_{ptx}")

    # nvcc makes one fatbin of one file: the kernels are independent, so one file includes all.
    unit = folder / "all_kernels.cu"
    unit.write_text("".join(f'#include "{path.as_posix()}"\n' for path in files))
    fatbin = folder / "all_kernels.fatbin"
    # How nvcc compresses differs between versions, and a driver older than it cannot read that.
    command = [nvcc, "-fatbin", "-std=c++17", "-O3", "--no-compress", "--threads=0", *gencode]
    # A build in place runs this each time: compile only what changed.
    text = "".join(path.read_text() for path in [*sorted(FOLDER.glob("*.h")), *files])
    key = hashlib.sha256(f"{version}{command}{text}".encode()).hexdigest()
    made = folder / "all_kernels.key"
    if not (fatbin.is_file() and made.is_file() and made.read_text() == key):
        _run([*command, "-o", str(fatbin), str(unit)])
        made.write_text(key)
    result.architectures = [f"sm_{a}" for a in wanted] + [f"compute_{ptx}"]
    pattern = re.compile(r"^OO_KERNEL (\w+)\(", re.MULTILINE)
    result.names = sorted(name for path in files for name in pattern.findall(path.read_text()))
    return fatbin.read_bytes()


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise KernelBuildError(f"{' '.join(command)} failed: {' | '.join(said[-5:])}")
    return done.stdout


def _toolkit(nvcc_version: str) -> int:
    """Return the CUDA version as drivers return theirs: 13000 of 13.0.88; 0 if not known."""
    match = re.match(r"(\d+)\.(\d+)", nvcc_version)
    return 1000 * int(match[1]) + 10 * int(match[2]) if match else 0


def _as_c(image: bytes, toolkit: int) -> str:
    rows = [
        ",".join(str(byte) for byte in image[start : start + 24])
        for start in range(0, len(image), 24)
    ]
    # The driver reads the fatbin in 8-byte words.
    body = ",\n".join(rows) or "0"
    return (
        "/* Written by tools/kernels.py from the .cu files of csrc/kernels. */\n"
        '#include "fatbin.h"\n\n'
        "#include <stdalign.h>\n\n"
        f"alignas(16) const unsigned char oo_kernels_fatbin[] = {{\n{body}\n}};\n"
        f"const size_t oo_kernels_fatbin_size = {len(image)};\n"
        f"const int oo_kernels_toolkit = {toolkit};\n"
    )


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
