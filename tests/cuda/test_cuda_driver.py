"""The driver below torch answers as the simulated one does, which recordings of real ones judge."""

from __future__ import annotations

import before_torch
import conformance
import simulated_cuda
import torch

import oracle_offload
from oracle_offload.engine import simulator


def test_every_case_of_the_conformance_program_answers_as_the_simulated_driver(tmp_path, capsys):
    recording = tmp_path / "cuda.txt"
    assert conformance.record(recording, str(before_torch.FOLDER / "libcuda.so.1")) == 0
    assert conformance.main([str(recording)]) == 0
    assert "0 differences" in capsys.readouterr().out


def test_what_runs_on_cpu_and_what_runs_on_cuda_have_a_simulator_each():
    """Also where the driver was loaded for all: the package's own calls stay within its library."""
    torch.manual_seed(0)
    x = torch.randn(2, 256)
    for device, mine, other in (
        ("cpu", simulator, simulated_cuda.simulator()),
        ("cuda", simulated_cuda.simulator(), simulator),
    ):
        model = torch.nn.Linear(256, 256).requires_grad_(False)
        expected = model(x)
        before = mine.stats().h2d_bytes, other.stats().h2d_bytes
        manager = oracle_offload.attach(model, device)
        assert torch.equal(model(x.to(device)).cpu(), expected)
        assert mine.stats().h2d_bytes - before[0] >= model.weight.nbytes
        assert other.stats().h2d_bytes == before[1]
        manager.detach()
