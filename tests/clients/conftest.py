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
forks = _core.forks


WITHOUT_DEVICE = (
    *("test_commands_of_pages", "test_managed_share", "test_private_names"),  # compute nothing
    "test_compile_calls",  # what a compiler is given, before there is a device
    # Programs of their own, whose ranks talk by gloo: it refuses to reduce tensors of the type
    # ("unsupported device type simgpu"), and has no backend for it where none is named.
    *("test_ddp", "test_several"),
)
# Minutes of compiling: on the device type .ci/run has these tests of the files, and on "cpu" the
# others, which run there in `make proof`.
COMPILED = ("test_compile_families", "test_compile_fullgraph", "test_compile_lent")
COMPILED_THERE = (
    *("test_each_managed_layer_is_one_operator", "test_saved_activations_are_those_of_eager"),
    *("test_one_compiled_block_serves_all", "test_order_and_bytes_are_those_of_eager"),
    *(
        "test_each_call_of_a_lent_module_is_one_operator",
        "test_an_operator_declared_pure_is_caught",
    ),
    *("test_backward_makes_a_call_once_more", "test_experts_keep_order_and_bytes"),
)


def pytest_configure(config):
    sides.DEVICE = config.getoption("--device") or sides.DEVICE


def pytest_generate_tests(metafunc):
    """All tests of clients take a device: `as_it_was` asks for it."""
    given = [m.args[0] for m in metafunc.definition.iter_markers("parametrize")]
    if metafunc.module.__name__ in WITHOUT_DEVICE or "device" in str(given):
        return
    marks = pytest.mark.elsewhere if sides.DEVICE == "cpu" else ()  # in `make device-type`
    if metafunc.module.__name__ in COMPILED and metafunc.function.__name__ not in COMPILED_THERE:
        marks = pytest.mark.slow if sides.DEVICE == "simgpu" else ()
    metafunc.parametrize("device", [pytest.param(sides.DEVICE, marks=marks)])


@pytest.fixture
def device():
    return sides.DEVICE


@pytest.fixture
def nothing_is_small(monkeypatch):
    """Let tensors of any size be lent."""
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)
    monkeypatch.setattr(selection, "SMALL_TOGETHER", (0, 0))


@pytest.fixture(autouse=True)
def as_it_was(device, monkeypatch):
    """One thread, the models being small; and leave torch and the environment as they were.

    A Trainer tells accelerate by the environment that it compiles.
    """
    environment = dict(os.environ)
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    monkeypatch.setattr("equality.DEVICE", device)
    if sides.DEVICE != "cpu":
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"{sides.DEVICE}:0"
    if sides.DEVICE == "simgpu":  # its operators are in Python, which dynamo is not to compile
        torch._dynamo.trace_rules.add(sides.DEVICE)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(generator)
    torch._dynamo.reset()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def made_there(as_it_was):
    """Let the test make its tensors and models on the device."""
    with sides.default_device():
        yield


@pytest.fixture
def from_the_start(as_it_was):
    """Let dynamo know nothing, and count from 0."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


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
