"""Real libraries, in small: each trains the resident and the managed model, to the same bits.

A library that is missing fails its tests: these say that the project works with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
from pathlib import Path

import pytest
import sides
import torch
from sides import CORE  # which puts the helpers of tests/training on the path

from oracle_offload.commands import bench
from oracle_offload.model import selection

_spec = importlib.util.spec_from_file_location("core_conftest", CORE / "conftest.py")
_core = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_core)
sim = _core.sim  # a fresh simulated device for every test, and nothing left on it


def pytest_configure(config):
    sides.DEVICE = config.getoption("--device") or sides.DEVICE


@pytest.fixture
def nothing_is_small(monkeypatch):
    """Let tensors of any size be lent."""
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)
    monkeypatch.setattr(selection, "SMALL_TOGETHER", (0, 0))


@pytest.fixture(autouse=True)
def as_it_was():
    """One thread, the models being small; and leave torch and the environment as they were.

    A Trainer tells accelerate by the environment that it compiles.
    """
    environment = dict(os.environ)
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    if sides.DEVICE != "cpu":
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"{sides.DEVICE}:0"
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(generator)
    torch._dynamo.reset()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def in_this_process(monkeypatch):
    """Run what `bench --matrix` would run in a process here: an example."""

    def started(command, **options):
        said, problem = io.StringIO(), io.StringIO()
        example = importlib.import_module(Path(command[1]).stem)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(problem):
            try:
                code = example.main(command[2:])
            except SystemExit as error:
                code = error.code
        return subprocess.CompletedProcess(command, code, said.getvalue(), problem.getvalue())

    monkeypatch.setattr(bench.subprocess, "run", started)
