"""What every test shares."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
from collections.abc import Generator
from pathlib import Path

import left_behind
import pytest
import skip_lists
import tiers

# Read when CUDA starts: without it cuBLAS may sum in another order each time, and strict
# determinism refuses to work.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Tests leave nothing in the user's folder; those of the heartbeat ask for one elsewhere.
os.environ["ORACLE_OFFLOAD_HEARTBEAT"] = "0"
# Processes side by side compute by one thread each, and so does what they start: threads that wait
# for one that has no core spin, and the same tests took ten times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# In an environment of `make cuda-check`: PyTorch's CUDA build over a simulated driver of its own.
pytest_plugins = ["simulated_cuda"] if "before_torch" in sys.modules else []


@functools.cache
def why_no_card() -> str:
    """Return why the tests marked gpu cannot run here, or an empty string."""
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "no CUDA device"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", help="run the tests that take a device, on this alone: cpu, cuda or simgpu"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "simgpu":  # before any test module asks for devices
        sys.path.insert(0, str(Path(__file__).parent / "tests" / "training"))
        import simgpu

        if not simgpu.is_available():
            pytest.exit("this torch does not let Python define a device type", returncode=0)
        simgpu.install()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --device, leave out what runs on none or on another; "simgpu" wants to be asked for."""
    tiers.mark(items)
    only = config.getoption("--device")
    left_out = [
        item
        for item in items
        if (not _runs_on(item, only) if only else skip_lists.device_of(item) == "simgpu")
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
    if only == "simgpu":
        import simgpu

        skip_lists.skip_listed(items, simgpu.SKIPS)


def pytest_collection_finish() -> None:
    """Have torch list now which functions `with torch.device(...)` is for.

    It lists them at the first call inside such a block, once. If that is in transformers'
    `from_pretrained`, where torch.linspace is another function, it is meant in no later test.
    """
    if "torch" in sys.modules:
        importlib.import_module("torch.utils._device")._device_constructors()


def _runs_on(item: pytest.Item, device: str) -> bool:
    """Whether a test runs on that device: of clients those do on a card, too, that take none."""
    if device == "cuda" and skip_lists.device_of(item) is None:
        return item.path.parent.name in ("clients", "toolkit")
    return skip_lists.device_of(item) == device


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and why_no_card():
        pytest.skip(why_no_card())


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Let the collections of a file's tests look at what is created in it, and not at all of torch.

    Hundreds of tests collect, some again and again; with every library loaded each would take about
    a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was() -> Generator[None, None, None]:
    """Fail the test that changes what others rely on, and not those that come after it."""
    before = left_behind.look()
    yield
    changed = left_behind.difference(before, left_behind.look(before))
    assert not changed, f"the test has left behind: {'; '.join(changed)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a failed test say on which schedule of the simulated driver it ran."""
    report = yield
    simulator = sys.modules.get("oracle_offload.engine.simulator")
    if report.failed and simulator is not None and simulator.library.cache_info().currsize:
        report.sections.append(("simulated driver", f"schedule: {simulator.schedule_text()}"))
    return report
