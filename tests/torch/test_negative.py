"""The suite's own checks must fail where the promise is broken; these stay for ever."""

from __future__ import annotations

import pytest
import torch
from equality import assert_models_agree, attached, resident_pair
from torch import nn

import oracle_offload
from oracle_offload import OffloadError, manager, witness
from oracle_offload.manager_modules import Layer


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))


def step(model):
    x = torch.randn(3, 32).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y, x.grad]


def test_an_attach_that_leaves_the_modules_unpatched_fails_the_suite(monkeypatch):
    """Results would be right, computed on the host masters: only the witness can tell."""
    monkeypatch.setattr(manager, "swap_in", lambda module, layer: None)
    monkeypatch.setattr(manager, "watch_first_forward", lambda manager: None)
    managed, resident = resident_pair(build())
    with attached(managed, "cpu"):
        with pytest.raises(OffloadError, match="reads the host master of '0"):
            assert_models_agree(managed, resident, step)
        monkeypatch.setattr(witness.Witness, "_master_touched", lambda *_: None)
        with pytest.raises(AssertionError, match="nothing was managed"):
            assert_models_agree(managed, resident, step)


def test_an_attach_that_manages_only_some_modules_fails_the_suite(monkeypatch):
    real = manager.swap_in
    left_out = []

    def all_but_one(module: nn.Module, layer: Layer) -> None:
        if layer.name == "2":
            left_out.append(layer.name)
        else:
            real(module, layer)

    monkeypatch.setattr(manager, "swap_in", all_but_one)
    managed, resident = resident_pair(build())
    with attached(managed, "cpu"), pytest.raises(OffloadError, match="host master of '2"):
        assert_models_agree(managed, resident, step)
    assert left_out == ["2"]


def test_a_driver_whose_copies_do_nothing_fails_the_suite(sim):
    managed, resident = resident_pair(build())
    sim.copy_nothing(True)
    with attached(managed, "cpu"), pytest.raises(AssertionError, match="differs from resident"):
        assert_models_agree(managed, resident, step)
    sim.copy_nothing(False)


def test_a_missing_wait_fails_the_suite(sim):
    """A compute stream that never waits for a copy reads poison, or the detector reports it."""
    managed, resident = resident_pair(build())
    manager_ = oracle_offload.attach(managed, "cpu")
    state = manager_.state
    other = sim.create_stream()
    real = state.engine.acquire

    class Unordered:
        def __getattr__(self, name):
            return getattr(engine, name)

        def acquire(self, member, stream, *rest):
            return real(member, other, *rest)

    engine = state.engine
    state.engine = Unordered()
    try:
        assert_models_agree(managed, resident, step)
        noticed = bool(sim.reports())
    except AssertionError:
        noticed = True
    state.engine = engine
    assert noticed
    sim.clear_reports()
    sim.destroy_stream(other)
    manager_.detach()
    sim.clear_reports()
