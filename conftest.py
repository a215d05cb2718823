"""What every test shares. Here and not in tests/: that folder on sys.path would offer `tests/torch`
as a package named torch wherever the real one is missing.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Generator

import pytest

# Read when CUDA starts: without it cuBLAS may sum in another order each time, and strict
# determinism refuses to work.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@functools.cache
def why_no_card() -> str:
    """Return why the tests marked gpu cannot run here, or an empty string."""
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and why_no_card():
        pytest.skip(why_no_card())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a failed test say on which schedule of the simulated driver it ran."""
    report = yield
    simulator = sys.modules.get("oracle_offload.simulator")
    if report.failed and simulator is not None and simulator.library.cache_info().currsize:
        report.sections.append(("simulated driver", f"schedule: {simulator.schedule_text()}"))
    return report
