"""How C is compiled here: which sources belong together, with which flags, and what is up to date.

What compiles uses this module: setup.py (the package), c_programs.py (the C tests, sanitizers,
coverage, Windows), fuzz.py, mutate.py and mutate_python.py, lint.py, analyze.py, the benchmarks.

    python tools/c_build.py     # write compile_commands.json, for editors and analysers
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import kernels

ROOT = Path(__file__).resolve().parent.parent

# ---- what there is: a component is compiled alike ----

# Every other folder of csrc is the engine's, so that a file may move between them.
FOLDERS = {
    "csrc/sim": "simulator",
    "csrc/python": "binding",
    "tests/c": "tests",
    "tests/fuzz": "fuzz",
    "benchmarks": "benchmarks",
}
ENGINE = "engine"
# Sources outside csrc may include these in addition to the engine's headers.
TEST_INCLUDES = ("csrc/sim", "tests/c", "tests/fuzz")

SIMULATOR_LINK = (
    # Its own name: a library called libcuda.so.1 would be handed to torch later.
    "-Wl,-soname,liboracle_offload_simcuda.so.1",
    # Its own functions in its table of them, though a libcuda.so.1 may have been loaded for all.
    "-Wl,-Bsymbolic",
)
# The limited API is not there for free-threaded interpreters before 3.15: they get their own wheel.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")


def component_of(path: str) -> str:
    """Return the component of a file, which is named relative to the repository root."""
    inside = (name for folder, name in FOLDERS.items() if path.startswith(f"{folder}/"))
    return next(inside, ENGINE)


def sources(*components: str) -> list[str]:
    """Return the .c files of components, sorted, relative to the repository root."""
    found = []
    for component in components:
        folders = [folder for folder, name in FOLDERS.items() if name == component] or ["csrc"]
        paths = (path for folder in folders for path in (ROOT / folder).rglob("*.c"))
        names = sorted(path.relative_to(ROOT).as_posix() for path in paths)
        found += [name for name in names if component_of(name) == component]
    return found


def source(name: str) -> str:
    """Return the engine's source of that file name, relative to the repository root."""
    return next(path for path in sources(ENGINE) if Path(path).name == name)


def headers() -> list[str]:
    """Return every header below csrc/, sorted, relative to the repository root."""
    return sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*.h"))


def include_folders(component: str) -> list[str]:
    """Return the folders in which a component finds headers, relative to the repository root."""
    shared = {path.rpartition("/")[0] for path in headers() if component_of(path) == ENGINE}
    outside = component in ("tests", "fuzz", "benchmarks")
    return [*sorted(shared), *(TEST_INCLUDES if outside else ())]


def macros(component: str) -> list[tuple[str, str | None]]:
    """Return what is defined for a component: (name, value)."""
    return [("Py_LIMITED_API", "0x030B0000")] if component == "binding" and LIMITED_API else []


def python_includes() -> list[str]:
    """Return the folders of Python.h, as system headers: they do not pass our warnings."""
    paths = (sysconfig.get_path(name) for name in ("include", "platinclude"))
    return [f"-isystem{path}" for path in dict.fromkeys(path for path in paths if path)]


def preprocessor_flags(component: str) -> list[str]:
    """Return what a component is preprocessed with, seen from the repository root."""
    return [
        *(f"-I{folder}" for folder in include_folders(component)),
        *(f"-D{name}={value}" for name, value in macros(component)),
        *(python_includes() if component == "binding" else ()),
    ]


# ---- how: a variant is one way to compile all of it ----

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
# A constant of an enum times a double is meant: -Wextra of newer versions says so of it.
WARNINGS_CLANG_ONLY = ("-Wcast-align", "-Wno-enum-float-conversion")
# Not on the binding: CPython's PyType_Slot puts function pointers into void *.
WARNINGS_WITHOUT_PYTHON = ("-Wpedantic",)

MSVC_FLAGS = ("/std:c11", "/experimental:c11atomics", "/W3", "/O2")
# A compiler with headers and libraries of other systems, in the environment of `make wheels`.
ZIG = (str(ROOT / ".venv-wheels" / "bin" / "python"), "-m", "ziglang")
DEBUG_FLAGS = ("-O1", "-g", "-fPIC", "-pthread", "-fno-omit-frame-pointer")

# One setting for all that runs under a sanitizer; 66 is how it ends where one objects.
SANITIZER_ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:handle_abort=0:exitcode=66",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=66",
    "TSAN_OPTIONS": "exitcode=66:halt_on_error=1:second_deadlock_stack=1",
}


def c_compiler() -> list[str]:
    """Return the C compiler's command: $CC, else cc, gcc, clang or what Python was built with."""
    named = os.environ.get("CC")
    if named:
        return shlex.split(named)
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return shlex.split(sysconfig.get_config_var("CC") or "cc")


@functools.cache
def _is_clang(compiler: tuple[str, ...]) -> bool:
    result = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return "clang" in (result.stdout + result.stderr).lower()


def is_clang(compiler: Sequence[str]) -> bool:
    """Whether the command is clang (zig cc is), which knows other warnings than gcc."""
    return _is_clang(tuple(compiler))


def sanitizer_flags(*sanitizers: str) -> list[str]:
    """Return the flags of sanitizers: "address", "undefined", "thread"."""
    flags = ["-fsanitize=" + ",".join(sanitizers)] if sanitizers else []
    return [*flags, "-fno-sanitize-recover=undefined"] if "undefined" in sanitizers else flags


@dataclass(frozen=True)
class Variant:
    """One way to compile: a compiler, its flags, and how its programs are started.

    Parameters
    ----------
    name : str
        What the folder of its objects is called.
    compiler : list of str
        The command that compiles and links.
    flags : list of str
        For compiling and for linking.
    warnings : str
        "errors", "shown" or "off".
    component_flags : mapping
        More flags to compile one component with.
    program_flags : list of str
        More flags to link a program with.
    libraries : list of str
        What everything is linked with.
    program_suffix, simulator : str
        File names: the end of a program's, and the simulated driver's.
    runner : list of str
        What starts a program that this machine cannot start by itself.
    environment : mapping
        What its programs need.
    why_not_run : str
        Why its programs cannot be started here, or an empty string.
    """

    name: str
    compiler: list[str]
    flags: list[str]
    warnings: str = "errors"
    component_flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    program_flags: Sequence[str] = ()
    libraries: Sequence[str] = ("-ldl", "-lm")
    program_suffix: str = ""
    simulator: str = "libsimcuda.so"
    runner: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    why_not_run: str = ""

    def warning_flags(self, component: str) -> list[str]:
        """Return the warnings that a component is compiled with."""
        if self.warnings == "off":
            return ["-w"]
        clang = is_clang(self.compiler)
        flags = [*WARNINGS, *(WARNINGS_CLANG_ONLY if clang else WARNINGS_GCC_ONLY)]
        flags += WARNINGS_WITHOUT_PYTHON if component != "binding" else ()
        return [*flags, "-Werror"] if self.warnings == "errors" else flags

    def options(self, component: str) -> list[str]:
        """Return what a component is compiled with, without the flags of the preprocessor."""
        more = self.component_flags.get(component, ())
        return ["-std=c11", *self.flags, *more, *self.warning_flags(component)]

    def command(self, source: str, component: str = "") -> list[str]:
        """Return the command that compiles a source from the repository root, without its -o."""
        component = component or component_of(source)
        flags = [*self.options(component), *preprocessor_flags(component)]
        return [*self.compiler, *flags, "-c", source]


# The simulator's symbols stay inside: both it and the engine may be libraries of one process.
HIDDEN_SIMULATOR = {"simulator": ("-fvisibility=hidden",)}


def checked(
    *sanitizers: str,
    coverage: bool = False,
    warnings: str = "errors",
    compiler: Sequence[str] = (),
) -> Variant:
    """Return how the C tests are compiled: for finding faults, on this machine.

    Parameters
    ----------
    *sanitizers : str
        "address", "undefined", "thread".
    coverage : bool
        Count branches for gcov.
    warnings : str
        See `Variant`.
    compiler : sequence of str
        Not this machine's compiler (`c_compiler`) but another.
    """
    names = [*compiler, *sanitizers, *(["coverage"] if coverage else [])]
    flags = [*DEBUG_FLAGS, *sanitizer_flags(*sanitizers), *(["--coverage"] if coverage else [])]
    return Variant(
        name="-".join(["host", *names]),
        compiler=[*compiler] or c_compiler(),
        flags=flags,
        warnings=warnings,
        component_flags=HIDDEN_SIMULATOR,
        environment=SANITIZER_ENVIRONMENT if sanitizers else {},
    )


def fuzzed(*, libfuzzer: bool) -> Variant:
    """Return how the fuzz targets are compiled: under AddressSanitizer and UBSan."""
    # Small pieces: whatever is not page-locked passes through all of the ring, and around it.
    small = ("-DOO_RING_PIECE_BYTES=((size_t)3072)",)
    # The simulator's branches are not what inputs are chosen by.
    traced = ("-fsanitize=fuzzer-no-link",) if libfuzzer else ()
    return Variant(
        name="fuzz-libfuzzer" if libfuzzer else "fuzz",
        compiler=["clang"] if libfuzzer else c_compiler(),
        flags=[*DEBUG_FLAGS, *sanitizer_flags("address", "undefined")],
        component_flags={
            **HIDDEN_SIMULATOR,
            ENGINE: [*small, *traced],
            "fuzz": [*small, *traced, *(("-DFUZZ_LIBFUZZER",) if libfuzzer else ())],
        },
        program_flags=("-fsanitize=fuzzer",) if libfuzzer else (),
        environment=SANITIZER_ENVIRONMENT,
    )


def optimised(*sanitizers: str) -> Variant:
    """Return how the engine is compiled as a library for the mutation gate and for timing."""
    return Variant(
        name="-".join(["optimised", *sanitizers]),
        compiler=c_compiler(),
        flags=["-O2", "-fPIC", "-pthread", *sanitizer_flags(*sanitizers)],
        warnings="off",
        component_flags=HIDDEN_SIMULATOR,
        environment=SANITIZER_ENVIRONMENT if sanitizers else {},
    )


def package(*sanitizers: str, warnings: str = "off", compiler: Sequence[str] = ()) -> Variant:
    """Return how the package's extension and simulator are compiled, with gcc or clang."""
    flags = ["-O2", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-common"]
    watched = ["-g", "-fno-omit-frame-pointer"] if sanitizers else []
    return Variant(
        name="-".join(["package", *sanitizers]),
        compiler=[*compiler] or c_compiler(),
        flags=[*flags, *watched, *sanitizer_flags(*sanitizers)],
        warnings=warnings,
    )


def windows() -> Variant:
    """Return zig's cross compiler for x86_64 Windows; its programs run where Wine is installed."""
    # Debian's wine64 is in no folder of PATH.
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/lib/wine"))
    wine = shutil.which("wine64", path=places) or shutil.which("wine")
    return Variant(
        name="windows",
        compiler=[*ZIG, "cc", "-target", "x86_64-windows-gnu"],
        # zig adds UBSan traps to unoptimised code: this variant is about compiling and running.
        flags=["-O2", "-g", "-fno-sanitize=undefined"],
        libraries=(),
        program_suffix=".exe",
        simulator="simcuda.dll",
        runner=[wine] if wine else [],
        environment={"WINEDEBUG": "-all"},
        why_not_run="" if wine else "Wine is not installed",
    )


# ---- building: only what changed is compiled again ----


class BuildError(RuntimeError):
    """A compiler said no; carries what it said."""


def run_compiler(command: Sequence[str]) -> None:
    """Run a compiler from the repository root; `BuildError` with its words when it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


@functools.cache
def _content(path: str, changed_ns: int, nbytes: int) -> str:
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()


def _contents(paths: Iterable[str]) -> dict[str, str]:
    """Return a digest of each file; an empty string for one that is gone."""
    found = {}
    for path in paths:
        try:
            stat = (ROOT / path).stat()
        except OSError:
            found[path] = ""
        else:
            found[path] = _content(path, stat.st_mtime_ns, stat.st_size)
    return found


def _named_in(makefile: Path) -> list[str]:
    """Return the files that a compiler's -MMD found a target to depend on."""
    text = makefile.read_text(encoding="utf-8").replace("\\\n", " ").partition(": ")[2]
    return [name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", text.strip())]


class Build:
    """What one variant makes, in one folder (default: build/c/<variant>)."""

    def __init__(self, variant: Variant, folder: Path | None = None) -> None:
        self.variant = variant
        self.folder = folder or ROOT / "build" / "c" / variant.name
        self.folder.mkdir(parents=True, exist_ok=True)

    def object_path(self, source: str) -> Path:
        """Return where the object of a source is."""
        path = Path(source)
        named = path.name if path.is_absolute() else source.replace("/", "__")
        return self.folder / (named.removesuffix(".c") + ".o")

    def object(self, source: str, component: str = "", target: Path | None = None) -> Path:
        """Compile one source; `component` says how, where its path does not."""
        target = target or self.object_path(source)
        needs = target.with_suffix(".d")
        command = [*self.variant.command(source, component), "-MMD", "-MF", str(needs)]
        self._make(target, command, lambda: _named_in(needs))
        return target

    def objects(self, sources: Sequence[str]) -> list[Path]:
        """Compile several sources, side by side."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(self.object, sources))

    def engine(self, fatbin: str = "") -> list[Path]:
        """Compile the engine; return its objects, the embedded kernels' last.

        Parameters
        ----------
        fatbin : str
            The C source of the embedded kernels. Default: what `kernels.build` makes of them here.
        """
        mode = os.environ.get("ORACLE_OFFLOAD_BUILD_KERNELS", "auto")
        fatbin = fatbin or str(kernels.build(mode, self.folder).source)
        return self.objects([*_some(ENGINE), fatbin])

    def simulator(self) -> Path:
        """Build the simulated driver, a shared library."""
        target = self.folder / self.variant.simulator
        flags = ["-shared", *(SIMULATOR_LINK if target.suffix != ".dll" else ())]
        return self.link(target, self.objects(_some("simulator")), flags)

    def program(self, source: str, objects: Sequence[Path]) -> Path:
        """Build the program whose `main` is in a source, over these objects."""
        target = self.folder / (Path(source).stem + self.variant.program_suffix)
        return self.link(target, [self.object(source), *objects], self.variant.program_flags)

    def programs(self, sources: Sequence[str], objects: Sequence[Path]) -> dict[str, Path]:
        """Build several programs, side by side; return stem -> program."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = pool.map(lambda source: self.program(source, objects), sources)
            return {Path(source).stem: path for source, path in zip(sources, made, strict=True)}

    def link(self, target: Path, objects: Sequence[Path], flags: Sequence[str] = ()) -> Path:
        """Link objects to a program, or with "-shared" to a library."""
        inputs = [str(path) for path in objects]
        command = [*self.variant.compiler, *self.variant.flags, *inputs, *flags]
        self._make(target, [*command, *self.variant.libraries], lambda: inputs)
        return target

    def _make(self, target: Path, command: list[str], inputs: Callable[[], Iterable[str]]) -> None:
        """Run a command, unless its target was made by it from files of the same content."""
        record = target.with_name(target.name + ".made")
        if target.is_file() and record.is_file():
            made = json.loads(record.read_text(encoding="utf-8"))
            if made["command"] == command and made["from"] == _contents(made["from"]):
                return
        record.unlink(missing_ok=True)
        run_compiler([*command, "-o", str(target)])
        made = {"command": command, "from": _contents(inputs())}
        record.write_text(json.dumps(made), encoding="utf-8")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let two builds into one folder wait for each other."""
        try:
            import fcntl
        except ImportError:  # Windows: no parallel builds there
            yield
            return
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _some(component: str) -> list[str]:
    found = sources(component)
    if not found:
        raise BuildError(f"no C source of the {component}: is this a whole source tree?")
    return found


# ---- for editors and analysers ----


def compile_commands() -> list[dict[str, object]]:
    """Return the entries of compile_commands.json: how `checked` compiles each source."""
    variant = checked()
    everything = sources(ENGINE, *FOLDERS.values())
    return [
        {"directory": str(ROOT), "file": path, "arguments": variant.command(path)}
        for path in everything
    ]


def main() -> int:
    """Write compile_commands.json into the repository root."""
    path = ROOT / "compile_commands.json"
    entries = compile_commands()
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(entries)} sources")
    return 0


if __name__ == "__main__":
    sys.exit(main())
