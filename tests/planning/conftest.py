"""Plans and what they plan: real models, their optimizers, an engine on the simulated device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported

import pytest
import torch

_PATH = Path(__file__).parents[1] / "training" / "conftest.py"
_spec = importlib.util.spec_from_file_location("core_conftest", _PATH)
assert _spec is not None and _spec.loader is not None
_core = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_core)
sim = _core.sim  # a fresh simulated device for every test, and nothing left on it


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
