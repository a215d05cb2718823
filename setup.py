"""Builds what pyproject.toml cannot describe: the C extension, the simulated driver, the kernels.

Needs a C compiler alone. Environment:

ORACLE_OFFLOAD_BUILD_KERNELS=auto|on|off
    The .cu files (nvcc): ``auto`` where nvcc is found and works, ``on`` fails without it.
ORACLE_OFFLOAD_BUILD_WERROR=1
    Compiler warnings are errors, as in CI.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import c_build  # noqa: E402
import kernels  # noqa: E402

PACKAGE = "oracle_offload"
WINDOWS = sys.platform == "win32"
LIMITED_API = c_build.LIMITED_API
MODES = ("auto", "on", "off")


def switch(name: str) -> str:
    """Return the value of a tri-state switch of the environment."""
    value = os.environ.get(name, "auto").strip().lower() or "auto"
    if value not in MODES:
        raise SystemExit(f"{name}={value!r}: use one of {', '.join(MODES)}")
    return value


class SimulatedDriver(Extension):
    """A plain shared library in the package: no Python in it, a name of its own."""

    def __init__(self) -> None:
        super().__init__(
            f"{PACKAGE}.simcuda",
            sources=c_build.sources("simulator"),
            include_dirs=c_build.include_folders("simulator"),
        )

    @property
    def filename(self) -> str:
        """Its path below the folder that holds the package."""
        return os.path.join(PACKAGE, "simcuda.dll" if WINDOWS else "libsimcuda.so")


def core_extension() -> Extension:
    """Return the extension module `_core`: engine, driver loader and binding in one object."""
    return Extension(
        f"{PACKAGE}._core",
        sources=c_build.sources(c_build.ENGINE, "binding"),
        include_dirs=c_build.include_folders("binding"),
        define_macros=c_build.macros("binding"),
        py_limited_api=LIMITED_API,
    )


class BuildExt(build_ext):
    """build_ext that also embeds the kernels, names the simulator and records what it did."""

    def get_ext_filename(self, fullname: str) -> str:
        # setuptools asks with the full name or with its last part.
        for extension in self.extensions:
            if isinstance(extension, SimulatedDriver):
                if fullname == extension.name:
                    return extension.filename
                if fullname == extension.name.rpartition(".")[2]:
                    return os.path.basename(extension.filename)
        return super().get_ext_filename(fullname)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return [] if isinstance(ext, SimulatedDriver) else super().get_export_symbols(ext)

    def run(self) -> None:
        """Build, then record next to it what was built."""
        super().run()
        self._write_build_info()

    def build_extensions(self) -> None:
        """Set each extension's flags for this compiler, then compile."""
        for extension in self.extensions:
            if not extension.sources:
                raise SystemExit(f"no C sources for {extension.name}: is this a whole source tree?")
        try:
            self.kernels = kernels.build(
                switch("ORACLE_OFFLOAD_BUILD_KERNELS"), Path(self.build_temp) / "kernels"
            )
        except kernels.KernelBuildError as error:
            raise SystemExit(f"ORACLE_OFFLOAD_BUILD_KERNELS=on: {error}") from error
        if self.kernels.why:
            print(f"kernels not built: {self.kernels.why}", file=sys.stderr)

        # The run path of the Python that builds has no business in a library that needs libc alone.
        if self.compiler.compiler_type == "unix":
            self.compiler.set_executables(
                linker_so=[
                    word for word in self.compiler.linker_so if not word.startswith("-Wl,-rpath")
                ]
            )
        self.compiler_text = self._compiler_text()
        for extension in self.extensions:
            self._set_flags(extension)
        core = next(e for e in self.extensions if not isinstance(e, SimulatedDriver))
        core.sources = [*core.sources, str(self.kernels.source)]
        stamp = self._stamp()
        for extension in self.extensions:
            extension.depends = [*c_build.headers(), "setup.py", str(stamp)]
        super().build_extensions()

    def get_outputs(self) -> list[str]:
        record = os.path.join(self.build_lib, PACKAGE, "_build_info.json")
        return [*super().get_outputs(), record]

    def _set_flags(self, extension: Extension) -> None:
        if self.compiler.compiler_type == "msvc":
            extension.extra_compile_args = [*c_build.MSVC_FLAGS]
            return
        werror = os.environ.get("ORACLE_OFFLOAD_BUILD_WERROR", "") not in ("", "0")
        variant = c_build.package(
            warnings="errors" if werror else "shown", compiler=self.compiler.compiler_so[:1]
        )
        extension.extra_compile_args = [
            *variant.options("binding"),
            *c_build.python_includes(),
        ]
        if sys.platform == "darwin":
            return
        extension.extra_link_args = ["-Wl,--as-needed", "-ldl", "-lpthread", "-lm"]
        if isinstance(extension, SimulatedDriver):
            extension.extra_link_args += [*c_build.SIMULATOR_LINK, "-Wl,--no-undefined"]

    def _compiler_text(self) -> str:
        if self.compiler.compiler_type == "msvc":
            return platform.python_compiler()
        command = [*self.compiler.compiler_so[:1], "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return said.splitlines()[0] if said else str(command[0])

    def _stamp(self) -> Path:
        """A file that changes when the flags do: objects made with others are then rebuilt."""
        path = Path(self.build_temp) / "flags.json"
        flags = [
            [e.name, e.sources, e.extra_compile_args, e.extra_link_args, e.define_macros]
            for e in self.extensions
        ]
        text = json.dumps([flags, sys.version, self.kernels.nbytes], indent=1)
        if not path.is_file() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return path

    def _write_build_info(self) -> None:
        seconds = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
        built = self.kernels
        info = {
            "schema": "oracle_offload/build-info/1",
            "version": self.distribution.get_version(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)),
            "platform": sysconfig.get_platform(),
            "compiler": self.compiler_text,
            "built_with_python": platform.python_version(),
            "core": {"built": True, "abi": "abi3 cp311" if LIMITED_API else "version-specific"},
            "simulator": {
                "built": True,
                "file": next(
                    os.path.basename(e.filename)
                    for e in self.extensions
                    if isinstance(e, SimulatedDriver)
                ),
            },
            "kernels": {
                "built": not built.why,
                "why_not": built.why or None,
                "names": built.names,
                "architectures": built.architectures if not built.why else [],
                "nvcc": built.nvcc_version or None,
                "size_bytes": built.nbytes,
            },
        }
        text = json.dumps(info, indent=2) + "\n"
        folders = [Path(self.build_lib) / PACKAGE]
        if self.inplace:
            folders.append(ROOT / PACKAGE)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "_build_info.json").write_text(text, encoding="utf-8")


class SourceDist(sdist):
    """An sdist that never carries what a build in place left in the tree."""

    def prune_file_list(self) -> None:
        super().prune_file_list()
        built = re.compile(r"(\.so|\.pyd|\.dll|_build_info\.json)$")
        self.filelist.exclude_pattern(built, is_regex=True)


setup(
    ext_modules=[core_extension(), SimulatedDriver()],
    cmdclass={"build_ext": BuildExt, "sdist": SourceDist},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
