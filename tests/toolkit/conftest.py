"""The acceptance over AI-Toolkit's own code: ``make aitoolkit-check TOOLKIT=path``.

Nothing of it is in this repository. Without a checkout these tests are not collected; the make
target fails.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

TOOLKIT = os.environ.get("TOOLKIT", "")
CORE = Path(__file__).resolve().parents[1] / "training"

if not TOOLKIT:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may ask a network
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    sys.path.append(str(CORE))  # equality.py
    if not (Path(TOOLKIT) / "toolkit" / "memory_management").is_dir():
        raise pytest.UsageError(f"TOOLKIT={TOOLKIT} is no AI-Toolkit checkout")
    sys.path.insert(0, str(Path(TOOLKIT).resolve()))

    import oracle_offload.aitoolkit

    oracle_offload.aitoolkit.install()

    _spec = importlib.util.spec_from_file_location("core_conftest", CORE / "conftest.py")
    _core = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_core)
    sim = _core.sim  # a fresh simulated device for every test, and nothing left on it


@pytest.fixture
def toolkit():
    """The checkout."""
    return Path(TOOLKIT).resolve()
