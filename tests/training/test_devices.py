"""What names a device, and which one it is; a machine with two GPUs is pretended."""

from __future__ import annotations

import pytest
import torch
from equality import attached
from torch import nn

import oracle_offload
from oracle_offload import OffloadError, simulator
from oracle_offload.devices import parse_device
from oracle_offload.engines import open_states


@pytest.fixture
def two_gpus(monkeypatch):
    """CUDA with two devices, of which the second is the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.parametrize(
    ("named", "index"),
    [("cuda", 1), ("cuda:0", 0), ("cuda:1", 1), (0, 0), (1, 1), (torch.device("cuda"), 1),
     (torch.device("cuda", 0), 0)],
    ids=str,
)  # fmt: skip
def test_a_gpu_has_a_number_and_without_one_it_is_the_current(two_gpus, named, index):
    assert parse_device(named) == torch.device("cuda", index)


@pytest.mark.parametrize("named", ["cuda:2", 2, 7], ids=str)
def test_a_gpu_that_is_not_there_is_refused_with_their_number(two_gpus, named):
    index = str(named).rpartition(":")[2]
    with pytest.raises(OffloadError, match=f"device='cuda:{index}', but there are 2"):
        parse_device(named)


@pytest.mark.parametrize("named", ["cpu", "cpu:0", torch.device("cpu", 0)], ids=str)
def test_the_simulated_device_has_no_number(named):
    assert parse_device(named) == torch.device("cpu")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("gpu", "device='gpu' is not a device; use 'cuda', 'cuda:0' or 'cpu'"),
        (True, "device=True is not a device"),
        (None, "device=None is not a device"),
        ("mps", "device='mps': only 'cuda' and 'cpu'"),
        ("meta", "device='meta': only 'cuda' and 'cpu'"),
    ],
    ids=str,
)
def test_what_is_no_device_to_attach_to_is_refused_with_its_value(named, said):
    with pytest.raises(ValueError, match=said):
        parse_device(named)


def test_an_engine_that_could_not_be_set_up_is_closed_at_once(monkeypatch):
    def fail(ordinal):
        raise OffloadError("the device does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(simulator, "get_device", fail)
        with pytest.raises(OffloadError, match="does not answer"):
            oracle_offload.attach(nn.Sequential(nn.Linear(8, 8)), "cpu")
    assert simulator.live().streams == 0


def test_an_engine_that_could_not_be_set_up_is_closed_once_the_driver_lets_it(monkeypatch):
    def fail(ordinal):
        simulator.set_fault(None, result=999, lasting=True)
        raise OffloadError("the device does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(simulator, "get_device", fail)
        with pytest.raises(OffloadError, match="does not answer"):
            oracle_offload.attach(nn.Sequential(nn.Linear(8, 8)), "cpu")
    assert not open_states() and simulator.live().streams > 0
    simulator.clear_faults()
    with attached(nn.Sequential(nn.Linear(8, 8))):
        assert len(open_states()) == 1
    assert simulator.live().streams == 0
