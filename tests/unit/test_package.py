"""The package as it is installed: an sdist, a wheel built from it, and what the wheel can do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from importing import import_cost

ROOT = Path(__file__).resolve().parents[2]

needs_build = pytest.mark.skipif(
    sys.platform != "linux", reason="the wheel tests know Linux file names"
)


def call(command: list[str], cwd: Path, **environment: str) -> str:
    """Run a program outside the source tree; its output, or a failure that shows it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ORACLE_OFFLOAD"))}
    done = subprocess.run(
        command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_nothing_says_to_install_from_an_index_which_does_not_have_it() -> None:
    patterns = (
        "*.md Makefile docs/**/*.md docs/*.ipynb oracle_offload/**/*.py tools/*.py csrc/**/*.[ch]"
    )
    pages = [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
    assert len(pages) > 200
    for path in pages:
        found = re.search(r"pip install ['\"]?oracle[_-]offload", path.read_text(encoding="utf-8"))
        assert not found, f"{path.name}: {found and found[0]}"


@pytest.mark.parametrize("page", ["README.md", "docs/how-it-works.md"])
def test_where_bits_are_promised_determinism_is_named(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    promises = [part for part in re.split(r"\n\n|\n- ", prose) if "to the last bit" in part]
    assert promises
    for promise in promises:
        assert "deterministic" in promise, promise
        assert "#optimizers-and-where-equality-ends)" in promise, promise
    where = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    section = where.split("\n## Optimizers, and where equality ends\n")[1].split("\n## ")[0]
    assert "torch.use_deterministic_algorithms(True)" in section and "flash attention" in section


# ---- importing ----


@pytest.mark.parametrize("name", ["oracle_offload", "oracle_offload.cli"])
def test_importing_costs_little_and_loads_nothing_of_others(name: str) -> None:
    cost = import_cost(name)
    assert cost.foreign == set()  # neither torch nor numpy
    ours = {module for module in cost.modules if module.startswith("oracle_offload")}
    exits = {"oracle_offload.commands", "oracle_offload.commands.exits"}  # names of numbers
    assert ours == {"oracle_offload", name} | (exits if name == "oracle_offload.cli" else set())
    # A call or return costs well under a microsecond: milliseconds in all.
    assert cost.events < 5_000 and len(cost.modules) < 60, cost


@pytest.mark.parametrize("code", ["oracle_offload.attach", "from oracle_offload import _core"])
def test_in_a_source_tree_that_is_not_built_it_says_where_to_go(tmp_path: Path, code: str) -> None:
    """Python started in a clone finds its folder, and not the package that was installed."""
    pytest.importorskip("torch", reason="what the engine is asked from imports it")
    native = shutil.ignore_patterns("*.so", "*.pyd", "*.dll", "__pycache__")
    shutil.copytree(ROOT / "oracle_offload", tmp_path / "oracle_offload", ignore=native)
    command = [sys.executable, "-c", f"import oracle_offload; {code}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert said.startswith(f"ImportError: the engine is not built in {tmp_path}"), done.stderr
    assert "make build" in said


def test_every_public_name_is_found_where_the_table_says() -> None:
    pytest.importorskip("torch")
    import oracle_offload

    for name in oracle_offload.__all__:
        assert getattr(oracle_offload, name) is not None, name
        assert name in dir(oracle_offload)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = oracle_offload.no_such_name


# ---- sdist and wheel ----


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of the tree, and a wheel built from that sdist alone."""
    pytest.importorskip("build")
    output = tmp_path_factory.mktemp("dist")
    # A copy: a build leaves files behind, and other tests run in the tree.
    source = tmp_path_factory.mktemp("source") / "tree"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    call(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(source)],
        cwd=output,
        ORACLE_OFFLOAD_BUILD_KERNELS="off",
    )
    return output


def wheel_of(distributions: Path) -> Path:
    (wheel,) = distributions.glob("*.whl")
    return wheel


@needs_build
def test_the_wheel_is_one_for_every_python_and_holds_what_it_needs(distributions: Path) -> None:
    wheel = wheel_of(distributions)
    assert re.fullmatch(r"oracle_offload-[\d.]+-cp311-abi3-\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in ("_core.abi3.so", "libsimcuda.so", "_build_info.json", "_core.pyi", "py.typed"):
        assert f"oracle_offload/{name}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    outside = {name.split("/")[0] for name in names}
    assert {n for n in outside if not n.startswith("oracle_offload")} == set()
    # Every module of the source tree, and no file a build in place left there.
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "oracle_offload").rglob("*.py")}
    assert modules <= names
    assert len([n for n in names if n.endswith(".so")]) == 2


@needs_build
def test_the_sdist_holds_sources_and_nothing_built(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("setup.py", "Makefile", "tools/c_build.py", "csrc/include/oracle_offload.h"):
        assert name in names
    assert [n for n in names if n.endswith((".so", ".o", "_build_info.json"))] == []


def environment(folder: Path, *, with_this_ones_packages: bool) -> Path:
    """Return the python of a new virtual environment, empty or seeing this one's packages.

    Seeing them through a .pth file costs nothing; installing torch again would be 200 MB.
    """
    call([sys.executable, "-m", "venv", "--without-pip", str(folder)], cwd=folder.parent)
    python = folder / "bin" / "python"
    if with_this_ones_packages:
        (site,) = folder.glob("lib/python*/site-packages")
        paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        (site / "this_ones_packages.pth").write_text("\n".join(paths) + "\n")
    return python


def install(python: Path, *what: str) -> None:
    """Install with this environment's pip, from what is here alone."""
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    call(
        [*(sys.executable, "-m", "pip", "--python", str(python), "install"), *options, *what],
        cwd=python.parent,
        ORACLE_OFFLOAD_BUILD_KERNELS="off",
    )


EMPTY = """
import importlib.util, sys
assert importlib.util.find_spec("torch") is None, "this environment was to be empty"
import oracle_offload
info = oracle_offload.host.build_info()
assert info["built"] and info["torch"] is None, info
assert "site-packages" in info["folder"], info["folder"]

from oracle_offload import _core
from oracle_offload.host.build_record import simulator_path
version, devices = _core.driver_probe(str(simulator_path()))
assert version >= 12000 and devices == 1, (version, devices)
engine = _core.Engine(str(simulator_path()), 0)
assert engine.simulated
print(engine.device_name, engine.mem_info())
engine.close()

try:
    oracle_offload.attach
except ImportError as error:
    assert "torch" in str(error) and "pip install" in str(error), error
else:
    raise AssertionError("attach without torch must say how to get it")
"""


@needs_build
def test_the_wheel_in_an_empty_environment_has_build_info_and_the_simulator(
    distributions: Path, tmp_path: Path
) -> None:
    python = environment(tmp_path / "empty", with_this_ones_packages=False)
    install(python, str(wheel_of(distributions)))
    said = call([str(python), "-c", EMPTY], cwd=tmp_path)
    assert "RTX 4090" in said
    command = python.parent / "oracle-offload"
    assert call([str(command), "--version"], cwd=tmp_path).startswith("oracle_offload ")


TRAIN = """
import copy, torch
import oracle_offload
assert "site-packages" in oracle_offload.host.build_info()["folder"]
torch.manual_seed(0)
resident = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
managed = copy.deepcopy(resident)
manager = oracle_offload.attach(managed, "cpu", offload_percent=1.0)
assert manager.resident == {}, "every parameter is the engine's"
losses = []
for model in (resident, managed):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
assert losses[:3] == losses[3:], losses
assert losses[2] < losses[0], losses
for a, b in zip(resident.parameters(), managed.parameters(), strict=True):
    assert torch.equal(a, b)
oracle_offload.MemoryManager.detach(managed)
print("same bits")
"""


@needs_build
def test_the_wheel_beside_torch_trains_with_the_bits_of_the_resident_model(
    distributions: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    python = environment(tmp_path / "torch", with_this_ones_packages=True)
    install(python, str(wheel_of(distributions)))
    assert "same bits" in call([str(python), "-c", TRAIN], cwd=tmp_path)


@needs_build
def test_an_editable_installation_builds_into_the_source_tree(tmp_path: Path) -> None:
    source = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".*", "build", "tests", "*.so", "_build_info.json")
    shutil.copytree(ROOT, source, ignore=ignored)
    python = environment(tmp_path / "env", with_this_ones_packages=True)
    install(python, "--editable", str(source))
    code = "import oracle_offload, oracle_offload._core as c; print(c.__file__)"
    built = Path(call([str(python), "-c", code], cwd=tmp_path).strip())
    assert built == source / "oracle_offload" / "_core.abi3.so"
    assert (source / "oracle_offload" / "_build_info.json").is_file()
    assert (source / "oracle_offload" / "libsimcuda.so").is_file()
