"""The comparison of the simulated driver with recordings of real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import c_build
import c_programs
import conformance
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def output() -> str:
    status, text = conformance.run_program(None)
    assert status == 0, text
    return str(text)


def test_the_simulator_passes_its_cases(output: str) -> None:
    cases = conformance.parse(output).cases
    assert len(cases) >= 60
    assert not [name for name, outcome in cases.items() if outcome.startswith("FAILED")]
    assert output.splitlines()[-1] == f"{len(cases)} passed, 0 failed"


def test_every_committed_recording_agrees() -> None:
    assert conformance.main([]) == 0


def test_without_a_recording_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conformance, "ROOT", tmp_path)
    monkeypatch.setattr(conformance, "FOLDER", tmp_path / "none")
    monkeypatch.setattr(conformance, "run_program", lambda _: (0, "a: ok\n1 passed, 0 failed\n"))
    assert conformance.main([]) == 0
    assert "no recording" in capsys.readouterr().out


def test_a_planted_difference_is_found(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "card.txt"
    recording.write_text("# device: a card\n" + output)
    assert conformance.main([str(recording)]) == 0
    assert "(a card): 0 differences, 0 remarks" in capsys.readouterr().out
    planted = output.replace("contexts_are_a_stack: ok", "contexts_are_a_stack: FAILED line 1: no")
    assert planted != output
    recording.write_text(planted)
    assert conformance.main([str(recording)]) == 3
    said = capsys.readouterr().out
    assert "contexts_are_a_stack: real FAILED line 1: no; simulated ok" in said


@pytest.mark.parametrize(
    ("real", "simulated", "differences", "remarks"),
    [
        ("a: ok", "a: ok", 0, 0),
        ("a: ok", "a: FAILED line 3: x is 1, not 0", 1, 0),
        ("a: FAILED line 3", "a: FAILED line 3", 1, 0),
        ("a: observed 201", "a: observed 0", 0, 1),
        ("a: observed 201", "a: ok", 1, 0),
        ("a: skipped: the driver lacks x", "a: ok", 0, 1),
        ("a: ok\nb: ok", "a: ok", 1, 0),
        ("a: ok", "a: ok\nb: ok", 0, 1),
    ],
)
def test_outcomes_are_compared(real: str, simulated: str, differences: int, remarks: int) -> None:
    found = conformance.compare(conformance.parse(real), conformance.parse(simulated))
    assert (len(found[0]), len(found[1])) == (differences, remarks)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("no CUDA driver of 12.0 or later\n")
    assert conformance.main([str(tmp_path / "empty.txt")]) == 1
    with pytest.raises(ValueError, match="twice"):
        conformance.parse("a: ok\na: ok\n")


def test_a_recording_names_its_device_and_agrees_with_itself(tmp_path: Path) -> None:
    built = c_programs.build(c_build.checked(warnings="shown"), ["conformance"])
    target = tmp_path / "deep" / "sim.txt"
    # In a process of its own: the simulated driver stays loaded.
    command = [sys.executable, "tools/conformance.py", "--record", str(target)]
    done = subprocess.run(
        [*command, "--driver", str(built.simulator)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    header = conformance.parse(target.read_text()).header
    assert header["simulated"] == "yes"
    assert header["device"] and header["cuda"].startswith("1")
    assert conformance.main([str(target)]) == 0


def test_without_a_driver_nothing_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--record", str(tmp_path / "x.txt"), "--driver", str(tmp_path / "none.so")]
    assert conformance.main(arguments) == 1
    assert "no driver to record" in capsys.readouterr().err
    assert not (tmp_path / "x.txt").exists()
