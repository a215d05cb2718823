"""What the unit tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest


def alive() -> dict[str, int]:
    """Engines and host memory of the extension, once something has imported it."""
    core = sys.modules.get("oracle_offload._core")
    return core.live() if core else {}


@pytest.fixture(autouse=True)
def nothing_of_the_extension_stays_alive() -> Iterator[None]:
    """No test leaves an engine or host memory behind."""
    before = alive()
    yield
    if any(count > before.get(name, 0) for name, count in alive().items()):
        gc.collect()  # a model that is only waiting to be collected
    left = {name: n - before.get(name, 0) for name, n in alive().items() if n > before.get(name, 0)}
    assert not left, f"still alive after the test: {left}"


@pytest.fixture
def alone() -> None:
    """Leave a test that lets allocations fail to a process without xdist.

    They fail for every thread. The one that brings xdist's worker its tests would end, and the
    whole run with it.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("test_binding_module.py runs it in a process of its own")
