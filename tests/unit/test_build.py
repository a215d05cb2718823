"""What the build promises: names, links, exports, switches, and the record of it all."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import c_build
import check_environment
import kernels
import pytest

import oracle_offload
from oracle_offload.host.build_record import simulator_path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(oracle_offload.__file__).parent
LIBC = re.compile(r"^(libc|libm|libdl|libpthread|ld-linux[-\w]*)\.so\.\d+$")

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files with binutils")


def core_file() -> Path:
    from oracle_offload import _core

    assert _core.__file__ is not None
    return Path(_core.__file__)


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def dynamic(path: Path, tag: str) -> list[str]:
    lines = output("readelf", "-d", str(path)).splitlines()
    return [line.rpartition("[")[2].rstrip("]") for line in lines if f"({tag})" in line]


def exported(path: Path) -> set[str]:
    lines = output("nm", "-D", "--defined-only", str(path)).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


# ---- the two shared objects ----


@linux_only
def test_the_extension_is_abi3_and_exports_its_init_function_only() -> None:
    assert core_file().name == "_core.abi3.so"
    assert exported(core_file()) == {"PyInit__core"}


@linux_only
def test_both_libraries_link_the_c_library_only_and_carry_no_run_path() -> None:
    for path in (core_file(), simulator_path()):
        needed = dynamic(path, "NEEDED")
        assert "libc.so.6" in needed
        assert [name for name in needed if not LIBC.match(name)] == []
        assert dynamic(path, "RPATH") + dynamic(path, "RUNPATH") == []


@linux_only
def test_the_simulator_has_a_name_of_its_own_and_exports_driver_calls_only() -> None:
    path = simulator_path()
    assert dynamic(path, "SONAME") == ["liboracle_offload_simcuda.so.1"]
    names = exported(path)
    assert {"cuInit", "cuGetProcAddress_v2", "cuMemAlloc_v2", "simLaunch"} <= names
    assert {name for name in names if not name.startswith(("cu", "sim"))} == set()


@linux_only
def test_a_loaded_simulator_is_not_handed_out_as_the_cuda_driver() -> None:
    code = (
        "import ctypes, sys\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "try:\n"
        "    real = ctypes.CDLL('libcuda.so.1')\n"
        "except OSError:\n"
        "    sys.exit(0)\n"
        "sys.exit(1 if hasattr(real, 'simLaunch') else 0)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(simulator_path())]).returncode == 0


@linux_only
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_one_extension_loads_in_every_python(version: str) -> None:
    command = shutil.which(f"python{version}")
    if command is None or subprocess.run([command, "-c", ""], capture_output=True).returncode != 0:
        pytest.skip(f"no python{version} on this machine")
    code = "from oracle_offload import _core; print(_core.live())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONNOUSERSITE": "1"}
    done = subprocess.run([command, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'engines': 0" in done.stdout


# ---- build_info ----


def test_build_info_says_what_was_built_and_why_not_the_rest() -> None:
    info = oracle_offload.host.build_info()
    assert info["schema"] == "oracle_offload/build-info/1"
    assert info["built"] is True
    assert info["version"] == oracle_offload.__version__
    for part in ("core", "simulator", "kernels"):
        assert info[part]["built"] or info[part]["why_not"], part
    assert info["core"]["built"] and info["simulator"]["built"]
    assert info["kernels"]["built"] == (info["kernels"]["size_bytes"] > 0)
    json.dumps(info)


def test_build_info_without_a_build_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = importlib.import_module("oracle_offload.host.build_record")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "host" / "build_record.py"))
    info = module.build_info()
    assert info["built"] is False
    assert "make build" in info["why_not"]
    with pytest.raises(FileNotFoundError, match="make build"):
        module.simulator_path()


def test_a_build_whose_simulator_is_gone_says_to_install_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = importlib.import_module("oracle_offload.host.build_record")
    record = {"built": True, "folder": str(tmp_path), "simulator": {"file": "simulator.so"}}
    monkeypatch.setattr(module, "build_info", lambda: record)
    with pytest.raises(FileNotFoundError, match=r"simulator\.so is missing .* install the package"):
        module.simulator_path()
    (tmp_path / "simulator.so").touch()
    assert module.simulator_path() == tmp_path / "simulator.so"


def test_a_library_that_is_not_installed_has_no_version() -> None:
    module = importlib.import_module("oracle_offload.host.build_record")
    assert module._installed("no-such-distribution") is None
    assert module._installed("pytest") == pytest.__version__


# ---- switches ----


def test_kernels_off_embeds_nothing_and_says_so(tmp_path: Path) -> None:
    built = kernels.build("off", tmp_path)
    assert (built.nbytes, built.why) == (0, "ORACLE_OFFLOAD_BUILD_KERNELS=off")
    assert embedded(built.source, tmp_path) == b""


def test_kernels_without_nvcc_are_left_out_by_auto_and_refused_by_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "find_nvcc", lambda: None)
    built = kernels.build("auto", tmp_path)
    assert built.nbytes == 0
    assert "nvcc not found" in built.why
    with pytest.raises(kernels.KernelBuildError, match="nvcc not found"):
        kernels.build("on", tmp_path)


def test_a_broken_nvcc_is_recorded_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    broken = tmp_path / "bin" / "nvcc"
    broken.write_text("#!/bin/sh\necho 'no licence for today' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert kernels.find_nvcc() == str(broken)
    built = kernels.build("auto", tmp_path / "out")
    assert built.nbytes == 0
    assert "no licence for today" in built.why


@pytest.mark.skipif(kernels.find_nvcc() is None, reason="nvcc is not installed")
def test_kernels_hold_binaries_for_the_named_architectures_and_ptx(tmp_path: Path) -> None:
    built = kernels.build("on", tmp_path)
    assert "spin" in built.names
    assert "compute_80" in built.architectures and "sm_80" in built.architectures
    image = embedded(built.source, tmp_path)
    assert len(image) == built.nbytes > 0
    assert image[:4] == bytes.fromhex("50ed55ba")  # the fatbin's magic number
    # The newest driver alone reads what its own nvcc compresses.
    assert re.search(rb"\n\.version \d+\.\d+\n\.target sm_80\n", image), "the PTX is compressed"
    major, minor = built.nvcc_version.split(".")[:2]
    toolkit = f"oo_kernels_toolkit = {1000 * int(major) + 10 * int(minor)};"
    assert toolkit in built.source.read_text()
    inspect = Path(kernels.find_nvcc()).with_name("cuobjdump")
    if inspect.is_file():
        fatbin = tmp_path / "embedded.fatbin"
        fatbin.write_bytes(image)
        listed = output(str(inspect), "--list-elf", "--list-ptx", str(fatbin))
        for architecture in built.architectures:
            assert architecture.replace("compute", "sm") in listed


def embedded(source: Path, folder: Path) -> bytes:
    """Compile the generated C file and read the array back through it."""
    build = c_build.Build(c_build.checked(), folder)
    library = build.link(folder / "embedded.so", [build.object(str(source))], ["-shared"])
    loaded = ctypes.CDLL(str(library))
    size = ctypes.c_size_t.in_dll(loaded, "oo_kernels_fatbin_size").value
    return bytes((ctypes.c_ubyte * size).in_dll(loaded, "oo_kernels_fatbin"))


@pytest.mark.parametrize(
    ("switch", "value", "said"),
    [
        ("ORACLE_OFFLOAD_BUILD_KERNELS", "maybe", "use one of auto, on, off"),
    ],
)
def test_a_switch_that_cannot_be_met_fails_loudly(
    switch: str, value: str, said: str, tmp_path: Path
) -> None:
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "--quiet", "build_ext"]
    command += ["--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib")]
    environment = {**os.environ, switch: value}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert switch in done.stderr and said in done.stderr


# ---- the environment that PYTHON names ----


def test_a_missing_test_dependency_is_named_with_a_command_that_keeps_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have: dict[str, str | None] = {"torch": "2.11.0+cu130", "pytest": None}
    monkeypatch.setattr(check_environment, "installed", lambda name: have.get(name, "1.0"))
    said = check_environment.complaint("test")
    assert "lacks pytest" in said
    assert re.search(r"pip install pytest==\S+ torch==2\.11\.0\+cu130$", said)
    have["torch"] = None
    assert "has no torch" in check_environment.complaint("test")


def test_what_a_target_needs_is_pinned() -> None:
    for target, names in check_environment.NEEDED.items():
        assert set(names) <= set(check_environment.pins(target)), target


def test_every_requirement_is_pinned_exactly_and_torch_is_the_one_tested() -> None:
    for path in (ROOT / "tools").glob("requirements-*.txt"):
        for line in path.read_text().splitlines():
            if line and not line.startswith(("#", "-r ")):
                assert re.fullmatch(r"[A-Za-z0-9_.-]+={2,3}[0-9][A-Za-z0-9_.]*", line), (path, line)
    assert check_environment.pins("test")["torch"] == "2.13.0"


def find_python(*arguments: str, path: str) -> Any:
    shell = shutil.which("sh")
    assert shell is not None
    return subprocess.run(
        [shell, str(ROOT / "tools" / "find_python.sh"), *arguments],
        env={"PATH": path},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell script")
def test_find_python_prints_the_interpreter_behind_a_shell_shim(tmp_path: Path) -> None:
    shim = tmp_path / "python3"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    shim.chmod(0o755)
    done = find_python(path=f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert done.returncode == 0, done.stderr
    found = done.stdout.strip()
    assert found != str(shim)
    assert Path(found).resolve() == Path(sys.executable).resolve()


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell script")
def test_find_python_says_why_no_python_will_do(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 'version 3.8; 3.11 to 3.14 is needed' >&2\nexit 1\n")
    old.chmod(0o755)
    done = find_python("python3", path=f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert done.returncode == 1
    assert "python3: version 3.8" in done.stderr
    assert "make PYTHON=" in done.stderr
