"""The driver below torch answers as the simulated one does, which recordings of real ones judge."""

from __future__ import annotations

import before_torch
import conformance


def test_every_case_of_the_conformance_program_answers_as_the_simulated_driver(tmp_path, capsys):
    recording = tmp_path / "cuda.txt"
    assert conformance.record(recording, str(before_torch.FOLDER / "libcuda.so.1")) == 0
    assert conformance.main([str(recording)]) == 0
    assert "0 differences" in capsys.readouterr().out
