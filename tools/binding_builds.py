"""Build extension modules that differ in one file of the binding: for tools/mutate_python.py."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import c_build
import kernels
import sanitized_python
from c_build import ROOT, Build

LIBRARY = "oracle_offload/_core.abi3.so"


class BindingBuilds:
    """Objects of the unchanged sources, and what it takes to link one changed file with them."""

    def __init__(self, folder: Path, *sanitizers: str) -> None:
        variant = c_build.package(*sanitizers)
        headers = "-iquotecsrc/python"  # a changed file is in another folder
        self.build = Build(replace(variant, flags=[*variant.flags, headers]), folder)
        # Not embedded: the kernels' path is tested where nvcc is.
        engine = self.build.engine(str(kernels.build("off", folder).source))
        names = c_build.sources("binding")
        binding = self.build.objects(names)
        self.engine = engine
        self.binding = {Path(name).name: made for name, made in zip(names, binding, strict=True)}
        self.seen = {name: self.digest(made) for name, made in self.binding.items()}

    @staticmethod
    def digest(path: Path) -> bytes:
        return hashlib.sha256(path.read_bytes()).digest()

    def library(self, folder: Path, file: str, text: str) -> bytes | None:
        """Return the library with `text` as one file; None where the object stays the same.

        Raises
        ------
        c_build.BuildError
            When it does not compile.
        """
        source = folder / Path(file).name
        source.write_text(text)
        made = self.build.object(str(source), "binding", source.with_suffix(".o"))
        if self.digest(made) == self.seen[source.name]:
            return None
        objects = [*self.engine, *{**self.binding, source.name: made}.values()]
        return self.build.link(folder / "_core.so", objects, ["-shared"]).read_bytes()


def plain_and_sanitized(folder: Path) -> tuple[BindingBuilds, BindingBuilds]:
    """Return the builds that the tests use, and those that AddressSanitizer watches."""
    plain = BindingBuilds(folder / "plain")
    # Else no mutant would compile, or each would count as another program.
    for name in c_build.sources("binding"):
        if plain.library(folder, name, (ROOT / name).read_text()) is not None:
            raise AssertionError(f"{name}: another object, though nothing is changed")
    return plain, BindingBuilds(folder / "sanitized", *sanitized_python.SANITIZERS)
