"""Every C program of this folder compiles without a warning and passes on the simulated driver."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    folder = str(ROOT / "tools")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


c_build = load("c_build")
c_programs = load("c_programs")
PROGRAMS = [path.stem for path in c_programs.programs()]


@pytest.fixture(scope="session")
def built() -> tuple[Any, Any]:
    variant = c_build.checked()
    return variant, c_programs.build(variant)


def test_the_example_and_the_conformance_suite_are_there() -> None:
    assert {"example", "conformance"} <= set(PROGRAMS)


def test_thread_sanitizer_runs_what_starts_threads() -> None:
    found = {path.stem for path in c_programs.threaded(c_programs.programs())}
    assert {"test_threads", "test_sim_scale", "test_sim_calls"} <= found
    assert "test_plan" not in found


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_passes_on_the_simulated_driver(built: tuple[Any, Any], name: str) -> None:
    variant, result = built
    done = c_programs.run(variant, result, name)
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout}"


def test_a_warning_in_a_c_program_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "test_warns.c"
    source.write_text("int main(void) { int never_used; return 0; }\n")
    with pytest.raises(c_build.BuildError, match="never_used"):
        c_build.Build(c_build.checked(), tmp_path).object(str(source), "tests")


def test_a_program_that_hangs_is_killed_and_fails(tmp_path: Path) -> None:
    build = c_build.Build(c_build.checked(), tmp_path)
    source = tmp_path / "test_hangs.c"
    source.write_text("int main(void) {\n    for (;;) {\n    }\n}\n")
    built = c_programs.Built(tmp_path / "none", {"test_hangs": build.program(str(source), [])})
    done = c_programs.run(build.variant, built, "test_hangs", timeout_s=0.5)
    assert done.returncode == 124
    assert "killed" in done.stdout
