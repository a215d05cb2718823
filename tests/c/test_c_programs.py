"""Every C program of this folder compiles without a warning and passes on the simulated driver."""

from __future__ import annotations

import importlib
import os
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


c_programs = load("c_programs")
PROGRAMS = [path.stem for path in c_programs.programs()]


@pytest.fixture(scope="session")
def built() -> tuple[Any, Any]:
    toolchain = c_programs.host_toolchain()
    return toolchain, c_programs.build(toolchain)


def test_the_example_and_the_conformance_suite_are_there() -> None:
    assert {"example", "conformance"} <= set(PROGRAMS)


def test_thread_sanitizer_runs_what_starts_threads() -> None:
    found = {path.stem for path in c_programs.threaded(c_programs.programs())}
    assert {"test_threads", "test_sim_scale", "test_sim_calls"} <= found
    assert "test_plan" not in found


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_passes_on_the_simulated_driver(built: tuple[Any, Any], name: str) -> None:
    toolchain, result = built
    done = c_programs.run(toolchain, result, name)
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout}"


def test_a_warning_in_a_c_program_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "test_warns.c"
    source.write_text("int main(void) { int never_used; return 0; }\n")
    toolchain = c_programs.host_toolchain()
    command = [*toolchain.compiler, *toolchain.flags, "-c", str(source), "-o", os.devnull]
    with pytest.raises(c_programs.BuildError, match="never_used"):
        c_programs.run_compiler(command)


def test_a_program_that_hangs_is_killed_and_fails(tmp_path: Path) -> None:
    toolchain = c_programs.host_toolchain()
    source = tmp_path / "test_hangs.c"
    source.write_text("int main(void) {\n    for (;;) {\n    }\n}\n")
    program = tmp_path / "test_hangs"
    c_programs.run_compiler([*toolchain.compiler, str(source), "-o", str(program)])
    built = c_programs.Built(tmp_path / "none", {"test_hangs": program})
    done = c_programs.run(toolchain, built, "test_hangs", timeout_s=0.5)
    assert done.returncode == 124
    assert "killed" in done.stdout
