"""Build what `make cuda-check` runs on, and have a virtual environment load it.

    python tests/cuda/build_driver.py .venv-cuda         # makes build/cuda
    python tests/cuda/build_driver.py .venv-aitoolkit    # build/aitoolkit, for its torch

Needs gcc, g++ and the headers of the CUDA toolkit, which come with nvcc or with the wheels
nvidia-cuda-runtime, that PyTorch's CUDA build brings, and nvidia-cuda-crt.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import c_build  # noqa: E402

VENV = Path(sys.argv[1]).absolute()
OUTPUT = ROOT / "build" / VENV.name.removeprefix(".venv-")  # as before_torch.py has it
PROGRAM = "oracle-offload-cuda-sim"  # the name under which torch finds what it loads at its import
C_FLAGS = ("-O1", "-g", "-fPIC", "-pthread", "-fno-common")
DRIVER_VERSION = 13000


def run(*command: str | Path) -> str:
    """Run a command; its output, or an exit with what it said."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def folder_of_torch() -> Path:
    """Return the folder of torch, without importing it."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(VENV / "bin" / "python", "-c", where).strip()) / "torch"


def toolkit_headers(torch: Path) -> Path:
    """Return the folder of cuda_runtime_api.h."""
    for folder in (torch.parent / "nvidia" / "cu13" / "include", Path("/usr/local/cuda/include")):
        if (folder / "crt" / "host_defines.h").is_file() and (folder / "cuda.h").is_file():
            return folder
    raise SystemExit("no headers of CUDA 13: they come with nvcc, or with nvidia-cuda-crt")


def imports(torch: Path, library: str) -> list[str]:
    """Return what torch's libraries ask of the runtime or of the driver."""
    found: set[str] = set()
    for path in sorted((torch / "lib").glob("lib*.so")):
        table = run("nm", "-D", "--undefined-only", path)
        wanted = {
            "runtime": r" U ((?:__)?cuda\w+)@libcudart",
            "driver": r" U (cu[A-Z]\w+)$",
        }[library]
        found |= set(re.findall(wanted, table, re.MULTILINE))
    if not found:
        raise SystemExit(f"{torch} asks nothing of CUDA: is it PyTorch's CUDA build?")
    return sorted(name for name in found if not name.startswith("cuFile"))


def exports(path: Path) -> set[str]:
    """Return the names that a library defines for others."""
    table = run("nm", "-D", "--defined-only", path)
    return {line.split()[-1].partition("@")[0] for line in table.splitlines()}


def stubs(names: list[str], target: Path, fails: str) -> None:
    """Write a function for each name: it fails, by its name."""
    lines = [
        f'__attribute__((visibility("default"))) int {name}(void);\n'
        f"int {name}(void) {{ {fails.format(name=name)} }}\n"
        for name in names
    ]
    target.write_text(
        "/* Made by tests/cuda/build_driver.py. */\n"
        "#include <stdio.h>\n"
        "int cuda_sim_missing(const char *name);\n" + "".join(lines),
        encoding="utf-8",
    )


def link_driver(target: Path, objects: list[Path]) -> None:
    script = OUTPUT / "driver.map"
    script.write_text("{ global: cu*; local: *; };\n", encoding="utf-8")
    run(
        *("gcc", "-shared", "-pthread", "-Wl,-Bsymbolic", f"-Wl,-soname,{target.name}"),
        *(f"-Wl,--version-script={script}", "-o", target, *objects, "-ldl", "-lm"),
    )


def driver(torch: Path) -> Path:
    """Link csrc/sim and driver.c to a libcuda.so.1 that exports cu* alone."""
    target = OUTPUT / "libcuda.so.1"
    objects = []
    for source in (*c_build.sources("simulator"), "tests/cuda/driver.c"):
        made = OUTPUT / (Path(source).stem + ".o")
        includes = [f"-I{ROOT / folder}" for folder in ("csrc/sim", "csrc/driver")]
        run(
            *("gcc", "-std=c11", *C_FLAGS, f"-DSIM_DRIVER_VERSION={DRIVER_VERSION}"),
            *(*includes, "-c", ROOT / source, "-o", made),
        )
        objects.append(made)
    link_driver(target, objects)
    lacking = [name for name in imports(torch, "driver") if name not in exports(target)]
    # What the driver cannot do it says by name on the error stream: its results are numbers.
    stubs(
        lacking,
        OUTPUT / "driver_stubs.c",
        'fprintf(stderr, "{name} is not there without a GPU\\n"); return 801;',
    )
    run("gcc", *C_FLAGS, "-c", OUTPUT / "driver_stubs.c", "-o", OUTPUT / "driver_stubs.o")
    link_driver(target, [*objects, OUTPUT / "driver_stubs.o"])
    return target


def runtime(torch: Path) -> Path:
    """Compile runtime.cpp, and stubs for what else torch imports."""
    target = OUTPUT / "libcudart.so.13"
    made, script = OUTPUT / "runtime.o", OUTPUT / "runtime.map"
    run(
        *("g++", "-std=c++17", *C_FLAGS, "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"),
        *(f"-isystem{toolkit_headers(torch)}", "-c", HERE / "runtime.cpp", "-o", made),
    )
    # torch calls it while the process ends, when destructors have run.
    ends = re.findall(r"__cxa_(?:thread_)?atexit", run("nm", "--undefined-only", made))
    if ends:
        raise SystemExit("an object of runtime.cpp has a destructor: torch may still use it then")
    defined = set(re.findall(r" T (\w+)$", run("nm", "--defined-only", made), re.MULTILINE))
    lacking = [name for name in imports(torch, "runtime") if name not in defined]
    stubs(lacking, OUTPUT / "runtime_stubs.c", 'return cuda_sim_missing("{name}");')
    run("gcc", *C_FLAGS, "-c", OUTPUT / "runtime_stubs.c", "-o", OUTPUT / "runtime_stubs.o")
    # Nothing of the C++ library: others in the process have their own.
    names = "global: cuda*; __cuda*; local: *;"
    script.write_text(f"libcudart.so.13 {{ {names} }};\n", encoding="utf-8")
    run(
        *("g++", "-shared", f"-Wl,-soname,{target.name}", f"-Wl,--version-script={script}"),
        *("-Wl,-z,defs", "-o", target, made, OUTPUT / "runtime_stubs.o"),
        *(f"-L{OUTPUT}", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"),
    )
    return target


def nvml() -> Path:
    """Compile nvml.c."""
    target = OUTPUT / "libnvidia-ml.so.1"
    run(
        *("gcc", "-std=c11", *C_FLAGS, "-shared", "-Wall", f"-Wl,-soname,{target.name}"),
        *("-o", target, HERE / "nvml.c", f"-L{OUTPUT}", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"),
    )
    return target


def operators(torch: Path) -> Path:
    """Compile operators.cpp over torch's own headers."""
    target = OUTPUT / "liboperators.so"
    headers = [torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
    run(
        *("g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"),
        *(f"-isystem{folder}" for folder in (*headers, toolkit_headers(torch))),
        *("-Wall", "-Werror", "-o", target, HERE / "operators.cpp"),
        *(f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"),
        *(f"-L{OUTPUT}", "-l:libcudart.so.13", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"),
        f"-Wl,-rpath,{torch / 'lib'}",
    )
    return target


def newer(target: Path, *sources: Path) -> bool:
    """Whether a target was made after the last change of all that it is made from."""
    return target.is_file() and all(s.stat().st_mtime <= target.stat().st_mtime for s in sources)


def enter_into_environment(torch: Path) -> None:
    """Have every Python of the environment load the driver before torch, and operators with it."""
    packages = torch.parent
    (packages / f"{PROGRAM}.pth").write_text(
        f"import sys; sys.path.append({str(HERE)!r}); import before_torch\n", encoding="utf-8"
    )
    named = packages / f"{PROGRAM.replace('-', '_')}-1.0.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {PROGRAM}\nVersion: 1.0\n", encoding="utf-8"
    )
    (named / "entry_points.txt").write_text(
        f"[torch.backends]\n{PROGRAM} = before_torch:after_torch\n", encoding="utf-8"
    )


def main() -> int:
    """Build what has changed."""
    torch = folder_of_torch()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    own = Path(__file__)
    sim = [ROOT / name for name in (*c_build.sources("simulator"), *c_build.headers())]
    made = {name: OUTPUT / name for name in ("libcuda.so.1", "libcudart.so.13", "liboperators.so")}
    if not newer(made["libcuda.so.1"], own, HERE / "driver.c", *sim):
        driver(torch)
    if not newer(made["libcudart.so.13"], own, HERE / "runtime.cpp"):
        runtime(torch)
    if not newer(OUTPUT / "libnvidia-ml.so.1", own, HERE / "nvml.c"):
        nvml()
    if not newer(made["liboperators.so"], own, HERE / "operators.cpp"):
        operators(torch)
    enter_into_environment(torch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
