"""What `make cuda-check` makes of its parts: counts, and going on without what has passed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import bill
import common
import cuda_check
import cuda_mutants
import mutants
import pytest
from cuda_check import Part

NOTES = "from pathlib import Path; path = Path({path!r}); path.write_text(path.read_text() + 'x')"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a letter for each time that the part ran."""
    monkeypatch.setattr(cuda_check, "OUTPUT", tmp_path / "out")
    path = tmp_path / "runs"
    path.write_text("")
    return path


def test_what_has_passed_does_not_run_again_unless_it_is_to(runs: Path) -> None:
    part = Part("one part", ("-c", NOTES.format(path=str(runs))))
    for resume, times in ((True, 1), (True, 1), (False, 2)):
        passed, counts, _ = cuda_check.run(part, resume)
        assert passed
        assert counts == {"passed": 1, "failed": 0}
        assert len(runs.read_text()) == times


def test_what_fails_runs_again_and_is_forgotten_as_passed(runs: Path) -> None:
    noted = NOTES.format(path=str(runs))
    assert cuda_check.run(Part("one part", ("-c", noted)), True)[0]
    failing = Part("one part", ("-c", f"{noted}; raise SystemExit(2)"))
    assert cuda_check.run(failing)[:2] == (False, {"passed": 0, "failed": 1})
    assert not cuda_check.run(failing, True)[0]
    assert len(runs.read_text()) == 3


def test_a_run_of_tests_that_leaves_no_report_counts_as_one_failure(tmp_path: Path) -> None:
    assert cuda_check.counted(tmp_path / "none.xml")["failed"] == 1


def test_tests_that_were_all_skipped_have_not_passed(runs: Path) -> None:
    """As they are where torch sees no card."""
    report = '<testsuite><testcase name="one"><skipped/></testcase></testsuite>'
    script = f"import sys; open(sys.argv[1].split('=')[1], 'w').write({report!r})"
    passed, counts, _ = cuda_check.run(Part("one part", ("-c", script, "--junitxml={junit}")))
    assert not passed and counts == {"passed": 0, "failed": 0, "skipped": 1}
    assert not list((runs.parent / "out").glob("*.passed.json"))


def test_a_limit_is_longer_by_the_patience_that_is_asked_for(runs: Path) -> None:
    sleeping = Part("one part", ("-c", "import time; time.sleep(3600)"), limit_s=0.01)
    assert cuda_check.run(sleeping, patience=10)[1] == {"passed": 0, "failed": 1}
    assert "ended after 0 s" in (runs.parent / "out" / "one-part.log").read_text()
    assert cuda_check.run(Part("one part", ("-c", ""), limit_s=0.1), patience=3000)[0]


def test_without_the_simulated_driver_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_SIM", "0")
    with pytest.raises(SystemExit, match="CUDA_SIM=0 leaves out the driver"):
        cuda_check.main(["demo"])


@pytest.mark.parametrize(("asked", "ends"), [("1", 2), ("0", 0)])
def test_ci_fails_with_this_unless_the_machine_is_said_to_have_no_room(
    asked: str, ends: int, tmp_path: Path
) -> None:
    """Where `make` does all but this, in a tree of its own, where it writes what each part took."""
    called = tmp_path / "called"
    script = tmp_path / ".ci" / "run"
    script.parent.mkdir()
    shutil.copy(cuda_check.ROOT / ".ci" / "run", script)
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$1" >> {called}\n[ "$1" != cuda-core ] || exit 2\n')
    make.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script)],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        | {"ORACLE_OFFLOAD_CI_CUDA": asked},
        capture_output=True,
        check=False,
    )
    assert done.returncode == ends
    assert ("cuda-core" in called.read_text().split()) is (asked == "1")
    assert "test-all" in called.read_text().split()
    took = bill.parts_page((tmp_path / "out" / "ci.txt").read_text().splitlines())
    assert "| `make test-all` | 0 | 0 |" in took
    assert ("ci-bill" in called.read_text().split()) is (ends == 0)


def test_a_part_that_lacks_something_says_what_and_fails_only_who_names_it(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = runs.parent / "gone"
    noted = ("-c", NOTES.format(path=str(runs)))
    parts = (Part("plain", noted), Part("more", noted, needs=(runs, gone)))
    monkeypatch.setattr(cuda_check, "PARTS", parts)
    monkeypatch.setattr(cuda_check, "continue_in_environment", lambda: None)
    for named, ends, ran in (([], 0, 1), (["more"], 1, 1), (["plain"], 0, 2)):
        assert cuda_check.main(named) == ends
        assert len(runs.read_text()) == ran
        said = capsys.readouterr().out
        assert ("none more" in said and str(gone) in said) is (named != ["plain"])
    gone.touch()
    assert cuda_check.main(["more"]) == 0 and len(runs.read_text()) == 3


def test_every_test_file_that_a_part_names_is_there() -> None:
    """And no name is used twice: what a part says is in a file of its name."""
    named = [word for part in (*cuda_check.PARTS, *cuda_check.CORE) for word in part.command]
    paths = {word for word in named if word.startswith("tests/") and "," not in word}
    assert paths
    assert not [path for path in paths if not (cuda_check.ROOT / path).exists()]
    names = [part.name for part in (*cuda_check.PARTS, *cuda_check.CORE)]
    assert len(names) == len(set(names))


def test_what_a_card_measures_is_small_where_processors_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a card's sizes the products of matrices alone took longer than their part's limit."""
    monkeypatch.delenv("GPU_CHECK_SIZES", raising=False)
    assert common.is_small("cpu") and not common.is_small("cuda")
    parts = [p for p in (*cuda_check.PARTS, *cuda_check.CORE) if "tools/gpu_check.py" in p.command]
    assert len(parts) == 2
    for part in parts:
        monkeypatch.setenv("GPU_CHECK_SIZES", dict(part.environment)["GPU_CHECK_SIZES"])
        assert common.is_small("cuda") and not common.is_simulated("cuda")


def test_each_unseen_wait_is_one_place_of_the_engine() -> None:
    waits = cuda_mutants.waits()
    assert len({(mutant.file, mutant.begin) for mutant in waits.values()}) == len(waits)
    assert cuda_mutants.listed() < set(waits)


def test_a_wait_keeps_its_name_when_other_lines_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names its function, and which of the same words there it is."""
    path = tmp_path / "uses.c"
    monkeypatch.setattr(cuda_mutants, "engine_sources", lambda: [str(path)])
    monkeypatch.setattr(cuda_mutants, "all_mutants", lambda: list(mutants.mutants_of(path)))
    wait = "    oo__await_reads(engine);\n"
    for more in ("", "static int other(int x)\n{\n    return x;\n}\n\n"):
        body = f"void one(int *engine)\n{{\n{wait}    more();\n{wait}}}\n\n"
        path.write_text(f"{more}{body}void two(int *engine)\n{{\n{wait}}}\n")
        assert list(cuda_mutants.waits()) == [
            "uses.c | one | oo__await_reads(engine)",
            "uses.c | one | oo__await_reads(engine) | 2",
            "uses.c | two | oo__await_reads(engine)",
        ]


def test_what_was_tried_of_a_wait_counts_while_no_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_mutants, "TRIED", tmp_path / "tried.json")
    sources = cuda_mutants.digest()
    assert cuda_mutants.tried(sources) == {}
    cuda_mutants.TRIED.write_text(json.dumps({"sources": sources, "seen": {"uses.c:7": "race"}}))
    assert cuda_mutants.tried(cuda_mutants.digest()) == {"uses.c:7": "race"}
    assert cuda_mutants.tried("of others") == {}
