"""What `make cuda-check` makes of its parts: counts, and going on without what has passed."""

from __future__ import annotations

from pathlib import Path

import common
import cuda_check
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


def test_every_test_file_that_a_part_names_is_there() -> None:
    """And no name is used twice: what a part says lies in a file of its name."""
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
    pytest.importorskip("torch")
    import training

    monkeypatch.delenv("GPU_CHECK_SIZES", raising=False)
    assert not common.is_small("cuda")
    assert training.flux_shape("cuda", 3072).sizes["width"] == 3072
    parts = [p for p in (*cuda_check.PARTS, *cuda_check.CORE) if "tools/gpu_check.py" in p.command]
    assert len(parts) == 2
    for part in parts:
        monkeypatch.setenv("GPU_CHECK_SIZES", dict(part.environment)["GPU_CHECK_SIZES"])
        assert common.is_small("cuda") and not common.is_simulated("cuda")
        assert training.flux_shape("cuda", 3072).sizes == training.flux_shape("cpu", 3072).sizes
