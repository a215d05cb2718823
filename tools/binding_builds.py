"""Build extension modules that differ in one file of the binding: for tools/mutate_python.py."""

from __future__ import annotations

import hashlib
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import c_flags
import sanitized_python
from c_flags import ROOT

LIBRARY = "oracle_offload/_core.abi3.so"
# Not embedded: the kernels' path is tested where nvcc is.
NO_KERNELS = """#include "fatbin.h"
const unsigned char oo_kernels_fatbin[1] = {0};
const size_t oo_kernels_fatbin_size = 0;
"""


class BindingBuilds:
    """Objects of the unchanged sources, and what it takes to link one changed file with them."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder = folder
        folder.mkdir()
        self.command = [
            *c_flags.c_compiler(), "-std=c11", "-O2", "-w", "-fPIC", "-fvisibility=hidden",
            "-pthread", *flags, *(f"-I{ROOT / name}" for name in c_flags.INCLUDES),
        ]  # fmt: skip
        python = [f"-I{sysconfig.get_paths()['include']}", "-DPy_LIMITED_API=0x030B0000"]
        self.python = [*python, f"-I{ROOT / c_flags.BINDING_FOLDERS[0]}"]
        (folder / "fatbin.c").write_text(NO_KERNELS)
        sources = [ROOT / n for n in c_flags.sources(*c_flags.CORE_FOLDERS)]
        sources += [folder / "fatbin.c"]
        binding = [ROOT / name for name in c_flags.sources(*c_flags.BINDING_FOLDERS)]
        work = [*((source, []) for source in sources), *((s, self.python) for s in binding)]
        with ThreadPoolExecutor() as pool:
            made = pool.map(lambda job: self.compile(job[0], folder, job[1]), work)
            self.objects = {job[0].name: made for job, made in zip(work, made, strict=True)}
        self.seen = {source.name: self.digest(self.objects[source.name]) for source in binding}

    @staticmethod
    def digest(path: Path) -> bytes:
        return hashlib.sha256(path.read_bytes()).digest()

    def compile(self, source: Path, folder: Path, flags: list[str]) -> Path:
        target = folder / f"{source.stem}.o"
        # By its bare name: an object holds the name that its source was given.
        command = [*self.command, *flags, "-c", source.name, "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True, cwd=source.parent)
        return target

    def library(self, folder: Path, file: str, text: str) -> bytes | None:
        """Return the library with `text` as one file; None where the object stays the same.

        Raises
        ------
        subprocess.CalledProcessError
            When it does not compile.
        """
        source = folder / Path(file).name
        source.write_text(text)
        made = self.compile(source, folder, self.python)
        if self.digest(made) == self.seen[source.name]:
            return None
        objects = [str(path) for path in {**self.objects, source.name: made}.values()]
        library = folder / "_core.so"
        command = [*self.command, "-shared", *objects, "-o", str(library), "-ldl", "-lm"]
        subprocess.run(command, check=True, capture_output=True)
        return library.read_bytes()


def plain_and_sanitized(folder: Path) -> tuple[BindingBuilds, BindingBuilds]:
    """Return the builds that the tests use, and those that AddressSanitizer watches."""
    sanitized = sanitized_python.FLAGS.split()
    return BindingBuilds(folder / "plain", []), BindingBuilds(folder / "sanitized", sanitized)
