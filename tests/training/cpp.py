"""Models that compute by the operators in C++, and how often they did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from equality import attached
from torch import nn

FOLDER = Path(__file__).resolve().parents[2] / "build" / "tests-ops"  # a build for all tests


class Taken:
    """Counts the forwards and backwards that were computed in C++ since the last look."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self._before = native.counts()

    def __call__(self) -> tuple[int, int]:
        before, self._before = self._before, self._native.counts()
        return self._before[0] - before[0], self._before[1] - before[1]


@contextlib.contextmanager
def managed(
    model: nn.Module, mode: str = "auto", device: str = "cpu", **options: Any
) -> Iterator[Any]:
    """Attach for a while, with the operators or, by "off", without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORACLE_OFFLOAD_OPS", mode)
        with attached(model, device, **options) as manager:
            yield manager
