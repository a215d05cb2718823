"""Build and run the C programs of tests/c: with sanitizers, or cross-compiled for Windows.

    python tools/c_programs.py run                                   # all, on the simulated driver
    python tools/c_programs.py run test_plan --sanitize address,undefined
    python tools/c_programs.py build --windows                       # with PyPI's ziglang

A program is tests/c/test_*.c, example.c or conformance.c, linked with the objects of csrc/base,
csrc/driver and csrc/core, and with the compiled kernels (csrc/kernels/fatbin.h). It finds the
simulated driver through ORACLE_OFFLOAD_DRIVER.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import c_flags
import kernels
from c_flags import ROOT

PROGRAM_FOLDER = "tests/c"
PROGRAM_PATTERNS = ("test_*.c", "example.c", "conformance.c")
TIMEOUT_S = 600


class BuildError(RuntimeError):
    """A compiler said no; carries what it said."""


@dataclass
class Toolchain:
    """One way to compile: a compiler, its flags, and how its programs are started."""

    name: str
    compiler: list[str]
    flags: list[str]
    link_flags: list[str]
    shared_flags: list[str]
    program_suffix: str
    simulator: str
    runner: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    why_not_run: str = ""


def host_toolchain(
    sanitize: Sequence[str] = (), *, coverage: bool = False, werror: bool = True
) -> Toolchain:
    """Return this machine's compiler, with `sanitize` ("address", "undefined", "thread")."""
    name = "-".join(["host", *sanitize, *(["coverage"] if coverage else [])])
    compiler = c_flags.c_compiler()
    flags = ["-O1", "-g", "-fPIC", "-pthread", "-fno-omit-frame-pointer"]
    environment = {}
    if sanitize:
        flags.append("-fsanitize=" + ",".join(sanitize))
        if "undefined" in sanitize:
            flags.append("-fno-sanitize-recover=undefined")
        environment = {
            "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:exitcode=66",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "TSAN_OPTIONS": "exitcode=66:halt_on_error=1:second_deadlock_stack=1",
        }
    if coverage:
        flags.append("--coverage")
    return Toolchain(
        name=name,
        compiler=compiler,
        flags=[*flags, *c_flags.warning_flags(compiler, core=True, werror=werror)],
        link_flags=[*flags, "-ldl", "-lm"],
        shared_flags=[*flags, "-shared", f"-Wl,-soname,{c_flags.SIMULATOR_SONAME}", "-ldl", "-lm"],
        program_suffix="",
        simulator="libsimcuda.so",
        environment=environment,
    )


def windows_toolchain() -> Toolchain:
    """Return zig's cross compiler for x86_64 Windows; its programs run where Wine is installed."""
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu"]
    wine = shutil.which("wine64") or shutil.which("wine")
    # zig adds UBSan traps to unoptimised code: this pass is about compiling and running.
    flags = ["-O2", "-g", "-fno-sanitize=undefined"]
    return Toolchain(
        name="windows",
        compiler=compiler,
        flags=[*flags, *c_flags.warning_flags(compiler, core=True, werror=True)],
        link_flags=flags,
        shared_flags=[*flags, "-shared"],
        program_suffix=".exe",
        simulator="simcuda.dll",
        runner=[wine] if wine else [],
        environment={"WINEDEBUG": "-all"},
        why_not_run="" if wine else "Wine is not installed",
    )


def programs(names: Sequence[str] = ()) -> list[Path]:
    """Return the sources of the C programs: all, or those named (without .c), or by their path."""
    folder = ROOT / PROGRAM_FOLDER
    elsewhere = [ROOT / name for name in names if name.endswith(".c")]
    names = [name for name in names if not name.endswith(".c")]
    if elsewhere and not names:
        return elsewhere
    found = sorted({p for pattern in PROGRAM_PATTERNS for p in folder.glob(pattern)})
    unknown = set(names) - {p.stem for p in found}
    if unknown:
        raise SystemExit(
            f"no such program: {', '.join(sorted(unknown))}; there are "
            f"{', '.join(p.stem for p in found)}"
        )
    return [p for p in found if not names or p.stem in names] + elsewhere


def threaded(paths: Sequence[Path]) -> list[Path]:
    """Return those programs that run on several threads: the others have no race to find.

    A host function runs on a thread of the simulated driver's own.
    """
    starts = re.compile(r"\b(oo__thread_start|sim_os_start|cuLaunchHostFunc)\b")
    return [path for path in paths if starts.search(path.read_text(encoding="utf-8"))]


@dataclass
class Built:
    """Where a toolchain put what it built."""

    simulator: Path
    programs: dict[str, Path]


def build(toolchain: Toolchain, names: Sequence[str] = (), folder: Path | None = None) -> Built:
    """Compile core, driver, simulator and the programs; only what changed since the last time.

    Raises
    ------
    BuildError
        With the compiler's words.
    """
    folder = folder or ROOT / "build" / "c" / toolchain.name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        return _build(toolchain, programs(names), folder)


def _build(toolchain: Toolchain, wanted: list[Path], folder: Path) -> Built:
    # Everything depends on every header, and on the flags that these two files hold.
    everywhere = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / PROGRAM_FOLDER).glob("*.h")]
    everywhere += [Path(__file__), Path(c_flags.__file__)]
    newest_header = max(path.stat().st_mtime for path in everywhere)
    includes = [*c_flags.include_flags(), "-Icsrc/sim", f"-I{PROGRAM_FOLDER}"]

    def compile_one(source: str) -> Path:
        target = folder / (source.replace("/", "__").removesuffix(".c") + ".o")
        newest = max(newest_header, (ROOT / source).stat().st_mtime)
        if not target.is_file() or target.stat().st_mtime < newest:
            command = [*toolchain.compiler, "-std=c11", *toolchain.flags, *includes]
            run_compiler([*command, "-c", source, "-o", str(target)])
        return target

    def link(target: Path, inputs: list[Path], flags: list[str]) -> Path:
        newest = max(path.stat().st_mtime for path in inputs)
        if not target.is_file() or target.stat().st_mtime < newest:
            run_compiler([*toolchain.compiler, *map(str, inputs), "-o", str(target), *flags])
        return target

    fatbin = kernels.build(os.environ.get("ORACLE_OFFLOAD_BUILD_KERNELS", "auto"), folder).source
    core = [*c_flags.sources(*c_flags.CORE_FOLDERS), str(fatbin)]
    simulator = c_flags.sources(*c_flags.SIMULATOR_FOLDERS)
    if not core or not simulator:
        raise BuildError("csrc/core or csrc/sim holds no C source: is this a whole source tree?")
    mains = [path.relative_to(ROOT).as_posix() for path in wanted]
    units = [*core, *simulator, *mains]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = dict(zip(units, pool.map(compile_one, units), strict=True))
        library = link(
            folder / toolchain.simulator, [objects[s] for s in simulator], toolchain.shared_flags
        )

        def link_program(main: str) -> Path:
            target = folder / (Path(main).stem + toolchain.program_suffix)
            return link(target, [objects[s] for s in (main, *core)], toolchain.link_flags)

        linked = zip(mains, pool.map(link_program, mains), strict=True)
        return Built(library, {Path(main).stem: path for main, path in linked})


def run(
    toolchain: Toolchain, built: Built, name: str, *, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run one program on the simulated driver; a hang is killed and answers 124."""
    environment = {**os.environ, **toolchain.environment}
    environment["ORACLE_OFFLOAD_DRIVER"] = str(built.simulator)
    command = [*toolchain.runner, str(built.programs[name])]
    # A file, not a pipe: processes that Wine leaves behind would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=timeout_s,
            )
            status, ending = done.returncode, ""
        except subprocess.TimeoutExpired:
            status, ending = 124, f"\nkilled after {timeout_s} s"
        output.seek(0)
        return subprocess.CompletedProcess(command, status, output.read() + ending, "")


def run_compiler(command: list[str]) -> None:
    """Run a compiler from the repository root; `BuildError` with its words when it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two builds into one folder wait for each other."""
    try:
        import fcntl
    except ImportError:  # Windows: no parallel builds there
        yield
        return
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Build, and unless asked not to, run each program; 0 when all of them ended with 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["build", "run"])
    parser.add_argument("names", nargs="*", help="programs without .c; default: all")
    parser.add_argument(
        "--sanitize",
        default="",
        help="address, undefined, thread (runs the programs that start threads); with commas",
    )
    parser.add_argument("--windows", action="store_true", help="cross-compile with ziglang")
    parser.add_argument("--verbose", action="store_true", help="show what programs that pass say")
    parser.add_argument("--coverage", action="store_true", help="instrument for gcov")
    args = parser.parse_intermixed_args(argv)
    sanitize = [s for s in args.sanitize.split(",") if s]
    names = args.names
    if "thread" in sanitize and not names:
        names = [path.stem for path in threaded(programs())]
    toolchain = (
        windows_toolchain() if args.windows else host_toolchain(sanitize, coverage=args.coverage)
    )
    try:
        built = build(toolchain, names)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{toolchain.name}: built {len(built.programs)} programs and {built.simulator.name}")
    if args.action == "build":
        return 0
    if toolchain.why_not_run:
        print(f"{toolchain.name}: not run: {toolchain.why_not_run}")
        return 0

    def timed(name: str) -> tuple[str, subprocess.CompletedProcess[str], float]:
        start = time.monotonic()
        return name, run(toolchain, built, name), time.monotonic() - start

    failed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, done, seconds in pool.map(timed, built.programs):
            how = "ok" if done.returncode == 0 else f"exit {done.returncode}"
            print(f"{name}: {how} ({seconds:.1f} s)", flush=True)
            if done.returncode != 0:
                # A sweep that fails says thousands of lines: the first ones tell the cause.
                lines = done.stdout.splitlines()
                print("\n".join([*lines[:40], "...", *lines[-10:]] if len(lines) > 50 else lines))
                failed.append(name)
            elif args.verbose:
                print(done.stdout)
    if failed:
        print(f"{toolchain.name}: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
