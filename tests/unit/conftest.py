"""What the unit tests share."""

from __future__ import annotations

import gc
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
