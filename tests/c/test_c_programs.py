"""Every C program of this folder compiles without a warning; each of its cases passes."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import c_build
import c_programs
import pytest

ROOT = Path(__file__).resolve().parents[2]


PROGRAMS = {path.stem: c_programs.cases(path) for path in c_programs.programs()}
# A program without cases is one case. Marked: what .ci/run has under sanitizers (`make
# asan-check`), all but the first case of each program that is not long.
CASES = [
    pytest.param(name, case, marks=pytest.mark.elsewhere if nth or name in c_programs.LONG else ())
    for name, cases in PROGRAMS.items()
    for nth, case in enumerate(cases or [""])
]


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


@pytest.fixture(scope="session")
def listed(built: tuple[Any, Any]) -> Any:
    """What each program says its cases are: some are not compiled on every system."""
    variant, result = built
    return functools.cache(
        lambda name: c_programs.run(variant, result, name, ["--list"]).stdout.split()
    )


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda text: text or "whole")
def test_case_passes_on_the_simulated_driver(
    built: tuple[Any, Any], listed: Any, name: str, case: str
) -> None:
    variant, result = built
    arguments = [case] if case else []
    if name == "conformance":
        arguments = [str(result.simulator), case]
    elif case and case not in listed(name):
        pytest.skip("is not compiled on this system")
    done = c_programs.run(variant, result, name, arguments)
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout}"


def test_every_case_is_found_in_its_source_in_the_order_that_they_run_in(listed: Any) -> None:
    """A function that looks like a case and is none would never run."""
    for path in c_programs.programs():
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"^static void test_\w+\(void\) \{", text, re.MULTILINE), path.name
        if path.stem not in ("example", "conformance"):
            there = set(listed(path.stem))
            assert listed(path.stem) == [c for c in PROGRAMS[path.stem] if c in there] != []


def test_an_unknown_case_is_refused_and_a_named_one_runs_alone(built: tuple[Any, Any]) -> None:
    variant, result = built
    done = c_programs.run(variant, result, "test_plan", ["test_the_trace_wraps"])
    assert done.stdout.startswith("test_the_trace_wraps: ok\n") and done.stdout.count("\n") == 2
    done = c_programs.run(variant, result, "test_plan", ["test_nothing"])
    assert done.returncode == 2 and "no case test_nothing" in done.stdout


def test_a_check_that_fails_fails_its_case_and_its_program(tmp_path: Path) -> None:
    source = tmp_path / "test_fails.c"
    source.write_text(
        '#include "check.h"\n'
        'CASE(bad) { CHECK(1 == 2, "one is %d", 1); }\n'
        'CASE(good) { CHECK(1, "never"); }\n'
        "CHECK_MAIN(NULL)\n"
    )
    build = c_build.Build(c_build.checked(), tmp_path)
    main = build.object(str(source), "tests")
    built = c_programs.Built(tmp_path, {"test_fails": build.link(tmp_path / "test_fails", [main])})
    done = c_programs.run(build.variant, built, "test_fails")
    assert done.returncode == 1
    assert "bad: FAILED\ngood: ok\n1 passed, 1 failed" in done.stdout
    assert "one is 1" in done.stdout
    assert c_programs.run(build.variant, built, "test_fails", ["good"]).returncode == 0


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
