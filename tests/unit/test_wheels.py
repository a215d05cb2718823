"""The wheels of a release: what they need, what they hold, and that they install and train."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import c_build
import c_programs
import pytest
import wheels
from test_package import EMPTY, TRAIN, call, environment, install

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(c_build.ZIG[0])

SEEN: dict[str, Any] = {
    "sdist": "oracle_offload-1.2.3.tar.gz",
    "linux": {
        "file": "oracle_offload-1.2.3-cp311-abi3-manylinux_2_28_x86_64.whl",
        "tags": ["cp311-abi3-manylinux_2_28_x86_64"],
        "fits": "manylinux_2_28_x86_64",
    },
    "windows": {
        "file": "oracle_offload-1.2.3-cp311-abi3-win_amd64.whl",
        "tags": ["cp311-abi3-win_amd64"],
        "_core.pyd": {"": ["PyInit__core"], "python3.dll": ["PyLong_FromLong"], "kernel32.dll": []},
        "simcuda.dll": {"": ["cuInit"], "api-ms-win-crt-heap-l1-1-0.dll": ["malloc"]},
    },
}


def test_wheels_that_are_as_they_should_be_are_not_complained_of() -> None:
    assert [*wheels.complaints(SEEN)] == []


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("linux/fits", "manylinux_2_34_x86_64", "needs manylinux_2_34_x86_64"),
        ("linux/fits", "linux_x86_64", "needs linux_x86_64"),
        ("linux/tags", ["cp311-cp311-manylinux_2_28_x86_64"], "is tagged"),
        ("windows/file", "oracle_offload-1.2.3-cp311-abi3-manylinux_2_28_x86_64.whl", "is tagged"),
        ("windows/_core.pyd/python311.dll", ["PyLong_FromLong"], "_core.pyd needs python311.dll"),
        ("windows/_core.pyd/libwinpthread-1.dll", [], "_core.pyd needs libwinpthread-1.dll"),
        ("windows/_core.pyd/", ["PyInit__core", "oo_open"], "_core.pyd exports PyInit__core, oo"),
        ("windows/simcuda.dll/python3.dll", [], "simcuda.dll needs python3.dll"),
        ("windows/simcuda.dll/vcruntime140.dll", [], "simcuda.dll needs vcruntime140.dll"),
    ],
)
def test_what_a_wheel_may_not_need_is_complained_of(where: str, value: Any, said: str) -> None:
    seen = copy.deepcopy(SEEN)
    *path, last = where.split("/")
    inside = seen
    for name in path:
        inside = inside[name]
    inside[last] = value
    (found,) = wheels.complaints(seen)
    assert said in found


def test_the_classifiers_name_what_the_wheels_are_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    versions = [
        tuple(map(int, found[1].split(".")))
        for line in project["classifiers"]
        if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))
    ]
    assert project["requires-python"] == ">={}.{}".format(*wheels.PYTHON_ABI)
    assert versions[0] == wheels.PYTHON_ABI and versions == sorted(versions)
    macros = dict(c_build.macros("binding"))
    assert macros.get("Py_LIMITED_API") in (None, "0x{:02X}{:02X}0000".format(*wheels.PYTHON_ABI))
    for system in ("Microsoft :: Windows", "POSIX :: Linux"):
        assert f"Operating System :: {system}" in project["classifiers"]


# ---- built ----


class Made(NamedTuple):
    """The three files, and what other tools say of them."""

    sdist: Path
    linux: Path
    windows: Path
    seen: dict[str, Any]


def make(folder: Path) -> Made:
    assert PYTHON.is_file(), "there is no .venv-wheels: make wheels-environment"
    report = folder / "report.json"
    tool = [str(PYTHON), str(ROOT / "tools" / "wheels.py")]
    call([*tool, "--output", str(folder), "--report", str(report)], cwd=ROOT)
    seen = json.loads(report.read_text(encoding="utf-8"))
    names = (seen["sdist"], seen["linux"]["file"], seen["windows"]["file"])
    return Made(*(folder / name for name in names), seen)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("wheels"))


@pytest.mark.slow
@pytest.mark.proof
class TestBuilt:
    def test_they_need_what_they_may(self, made: Made) -> None:
        core, simulator = (made.seen["windows"][name] for name in ("_core.pyd", "simcuda.dll"))
        assert "PyModuleDef_Init" in core["python3.dll"]
        assert {"cuInit", "cuGetProcAddress_v2", "simLaunch"} <= set(simulator[""])
        assert {name for name in simulator[""] if not name.startswith(("cu", "sim"))} == set()
        assert [*wheels.complaints(made.seen)] == []

    def test_both_hold_the_same_package_but_for_what_is_compiled(self, made: Made) -> None:
        def content(path: Path) -> dict[str, str]:
            with zipfile.ZipFile(path) as archive:
                return {
                    name: hashlib.sha256(archive.read(name)).hexdigest()
                    for name in archive.namelist()
                    if not name.endswith(("/WHEEL", "/RECORD", "/_build_info.json", "/"))
                }

        linux, windows = content(made.linux), content(made.windows)
        inside = "oracle_offload/"
        assert linux.keys() - windows.keys() == {inside + "_core.abi3.so", inside + "libsimcuda.so"}
        assert windows.keys() - linux.keys() == {inside + "_core.pyd", inside + "simcuda.dll"}
        assert all(windows[name] == linux[name] for name in linux.keys() & windows.keys())
        with zipfile.ZipFile(made.windows) as archive:
            info = json.loads(archive.read(inside + "_build_info.json"))
        assert info["platform"] == "win-amd64" and info["simulator"]["file"] == "simcuda.dll"

    def test_the_sdist_is_what_git_knows_and_no_file_more(self, made: Made) -> None:
        with tarfile.open(made.sdist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames() if "." in name}
        known = set(call(["git", "ls-files"], cwd=ROOT).split())
        own = re.compile(r"PKG-INFO|setup\.cfg|oracle_offload\.egg-info/.*")
        files = {name for name in names if (ROOT / name).is_file() and not own.fullmatch(name)}
        assert files <= known
        assert {"setup.py", "csrc/include/oracle_offload.h", "tools/wheels.py"} <= files

    def test_two_builds_are_equal(self, made: Made, tmp_path: Path) -> None:
        again = make(tmp_path)
        for one, other in zip(made[:3], again[:3], strict=True):
            assert one.read_bytes() == other.read_bytes(), one.name

    def test_the_simulator_for_windows_runs_a_life_of_the_engine_under_wine(
        self, made: Made, tmp_path: Path
    ) -> None:
        variant = c_build.windows()
        if variant.why_not_run:
            pytest.skip(variant.why_not_run)
        with zipfile.ZipFile(made.windows) as archive:
            simulator = Path(archive.extract("oracle_offload/simcuda.dll", tmp_path))
        names = ["example", "test_sim_calls", "test_units"]
        programs = c_programs.build(variant, names).programs
        for name in names:
            done = c_programs.run(variant, c_programs.Built(simulator, programs), name)
            assert done.returncode == 0, done.stdout

    def test_the_wheel_in_an_empty_environment_has_the_simulator(
        self, made: Made, tmp_path: Path
    ) -> None:
        python = environment(tmp_path / "empty", with_this_ones_packages=False)
        install(python, str(made.linux))
        assert "RTX 4090" in call([str(python), "-c", EMPTY], cwd=tmp_path)

    def test_the_wheel_beside_torch_trains_with_the_bits_of_the_resident_model(
        self, made: Made, tmp_path: Path
    ) -> None:
        python = environment(tmp_path / "torch", with_this_ones_packages=True)
        install(python, str(made.linux))
        assert "same bits" in call([str(python), "-c", TRAIN], cwd=tmp_path)
