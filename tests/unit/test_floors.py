"""The code has floors: no circle among imports, includes or calls, and no arrow upwards."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
import floors  # noqa: E402

import oracle_offload  # noqa: E402

PACKAGE = ROOT / "oracle_offload"
BELOW_BINDING = ("csrc/base", "csrc/driver", "csrc/core")


def test_no_circle_among_imports():
    arrows = floors.python_arrows(PACKAGE)
    assert len(arrows) > 50
    assert "oracle_offload.host.sizes" in arrows["oracle_offload.manager"]  # it reads imports
    assert floors.circle(arrows) == []


def test_no_circle_among_packages():
    arrows = floors.python_arrows(PACKAGE)
    assert floors.circle(floors.by_folder(arrows, floors.python_packages(arrows))) == []


def test_no_circle_and_no_upward_arrow_among_includes():
    arrows = floors.include_arrows(ROOT)
    assert "csrc/core/plan.h" in arrows["csrc/core/plan.c"]
    assert floors.circle(arrows) == []
    assert floors.upward(arrows, floors.C_FLOORS) == []
    simulator = {file: needed for file, needed in arrows.items() if file.startswith("csrc/sim")}
    assert floors.upward(simulator, floors.SIMULATOR_FLOORS) == []


@pytest.fixture(scope="module")
def symbols():
    """Of each file below the binding, compiled once: a test compiles what it has changed."""
    return floors.symbols(ROOT, *BELOW_BINDING)


def test_no_circle_and_no_upward_arrow_among_calls(symbols):
    arrows = floors.arrows_of(symbols)
    assert "csrc/core/plan.c" in arrows["csrc/core/engine.c"]
    assert floors.circle(arrows) == []
    assert floors.upward(arrows, floors.C_FLOORS) == []


def test_the_top_of_the_package_has_twelve_rooms_and_six_files_and_no_name_twice():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert 8 < len(rooms) <= 12
    top = {"__init__", "__main__", "cli", "errors", "manager", "manager_modules"}
    assert files == top
    public = {*oracle_offload._PUBLIC}
    assert 8 < len(public) <= 18
    assert public & rooms == set()


def test_all_but_what_explains_imports_without_it(tmp_path):
    """Explanations and the doctor could be deleted whole."""
    pytest.importorskip("torch", reason="most modules import it")
    package = tmp_path / "oracle_offload"
    shutil.copytree(PACKAGE, package)  # with what is compiled of it
    shutil.rmtree(package / "diagnose")
    left = [name for name in floors.python_arrows(package) if not name.endswith("__main__")]
    needs = {"rich", "greenlet", "IPython", "accelerate", "lightning", "transformers"}
    code = f"""
import importlib, sys
for name in ("lightning", "transformers"):  # each takes longer than torch, for one module
    sys.modules[name] = None
for name in {left}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in {needs}:
            raise
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(left) > 100


# ---- what is planted is found ----


@pytest.mark.parametrize(
    "planted",
    [
        "from . import manager",
        "from .manager import attach",
        "import oracle_offload.manager",
        "def late():\n    from .manager import attach",
        "class C:\n    def method(self):\n        import oracle_offload.manager as m",
        "import importlib\nimportlib.import_module('oracle_offload.manager')",
        "from importlib import import_module\ngo = lambda: import_module('.manager', __package__)",
        "def late():\n    return __import__('oracle_offload.manager')",
        "from oracle_offload import attach",  # resolved when it is asked for
        "if TYPE_CHECKING:\n    pass\nelse:\n    from . import manager",
        "if TYPE_CHECKING:\n    from .manager import MemoryManager",
    ],
)
def test_an_import_that_closes_a_circle_is_found(planted, tmp_path):
    package = tmp_path / "oracle_offload"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    lowest = package / "errors.py"
    lowest.write_text(f"{lowest.read_text()}\n{planted}\n")
    found = floors.circle(floors.python_arrows(package))
    assert found[0] == found[-1]
    assert "oracle_offload.errors" in found


def test_an_import_that_cannot_be_read_is_an_error(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import importlib\nimportlib.import_module(NAME)\n")
    with pytest.raises(ValueError, match=r"package: what does import_module\(NAME\) import"):
        floors.python_arrows(package)


@pytest.fixture
def sources(tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    return tmp_path


def test_a_circle_of_headers_is_found(sources):
    header = sources / "csrc/core/arena.h"
    header.write_text(f'#include "plan.h"\n{header.read_text()}')
    found = floors.circle(floors.include_arrows(sources))
    assert {"csrc/core/arena.h", "csrc/core/plan.h"} <= set(found)


def test_an_include_that_goes_up_a_floor_is_found(sources):
    source = sources / "csrc/driver/driver.c"
    source.write_text(f'#include "../core/plan.h"\n{source.read_text()}')
    found = floors.upward(floors.include_arrows(sources), floors.C_FLOORS)
    assert found == ["csrc/driver/driver.c -> csrc/core/plan.h"]


@pytest.mark.parametrize("caller", ["csrc/core/arena.c", "csrc/driver/driver.c"])
def test_a_call_that_closes_a_circle_is_found(caller, sources, symbols):
    source = sources / caller
    source.write_text(
        f"{source.read_text()}\n"
        "int oo__planted(void); int oo__planted(void) { return oo_engine_destroy(0); }\n"
    )
    assert floors.circle(floors.arrows_of(symbols)) == []
    arrows = floors.arrows_of(symbols | floors.symbols(sources, caller))
    assert caller in floors.circle(arrows)


def test_a_call_within_a_macro_counts_where_the_macro_stands(sources, symbols):
    header = sources / "csrc/core/arena.h"
    header.write_text(f"{header.read_text()}\n#define UP oo_engine_destroy\n")
    source = sources / "csrc/core/arena.c"
    source.write_text(f"{source.read_text()}\nint oo__planted(void) {{ return UP(0); }}\n")
    changed = symbols | floors.symbols(sources, "csrc/core/arena.c")
    assert "csrc/core/arena.c" in floors.circle(floors.arrows_of(changed))
