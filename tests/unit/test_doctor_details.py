"""What the doctor adds to a finding where it runs in a container, and whom it asks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oracle_offload.diagnose.doctor import System
from oracle_offload.diagnose.doctor.checks_gpu import check_other_processes
from oracle_offload.diagnose.doctor.torch_build import TorchView
from oracle_offload.host.gpus import Gpu, GpuProcess, GpuView

GIB = 1 << 30


def others(root: Path, *processes: GpuProcess) -> str:
    card = Gpu(0, total_bytes=24 * GIB, used_bytes=20 * GIB, processes=processes)
    gpus = GpuView(gpus=(card,))
    found = check_other_processes(System(str(root), environ={}, platform="linux", gpus=gpus))
    assert found.verdict == "bad" and "missing for training" in found.why
    return found.why


def test_in_a_container_the_process_numbers_are_those_of_the_host(tmp_path: Path) -> None:
    busy = GpuProcess(11, 20 * GIB)
    assert "numbers are those of the host" not in others(tmp_path, busy)
    (tmp_path / ".dockerenv").touch()
    assert "numbers are those of the host" in others(tmp_path, busy)
    assert "does not name who holds it" in others(tmp_path)


def test_a_torch_that_is_imported_answers_for_its_own_variables_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    here, elsewhere = TorchView(why="this process"), TorchView(why="a new process")

    def ask(_: object, environ: object) -> TorchView:
        asked.append(environ)
        return elsewhere

    monkeypatch.setattr("oracle_offload.diagnose.doctor.system.imported_torch", lambda: here)
    monkeypatch.setattr("oracle_offload.diagnose.doctor.system.ask_torch", ask)
    assert System().torch is here and asked == []
    assert System(environ=os.environ).torch is here and asked == []
    other = {**os.environ}
    assert System(environ=other).torch is elsewhere and asked == [other]
    monkeypatch.setattr("oracle_offload.diagnose.doctor.system.imported_torch", lambda: None)
    assert System().torch is elsewhere and asked == [other, os.environ]
