"""The acceptance over AI-Toolkit's own code, in what it pins: ``make aitoolkit-check``.

Nothing of it is in this repository: without a checkout these tests are not collected. With
``--device cuda`` models train on a card, or over the simulated driver (`make cuda-check`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

from oracle_offload.train.micro_batches import kernel_flags

TOOLKIT = os.environ.get("TOOLKIT", "")
PINNED = (
    *("torch", "torchvision", "torchaudio", "torchcodec", "torchao", "optimum.quanto"),
    *("transformers", "diffusers", "peft", "lycoris", "av"),
)
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

    import equality

    import oracle_offload.aitoolkit

    oracle_offload.aitoolkit.install()

    _spec = importlib.util.spec_from_file_location("core_conftest", CORE / "conftest.py")
    _core = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_core)
    sim = _core.sim  # a fresh simulated device for every test, and nothing left on it


def pytest_configure(config):
    if TOOLKIT:
        equality.DEVICE = config.getoption("--device") or "cpu"


def pytest_report_header():
    """What of AI-Toolkit's requirements is here, and what of them cannot be loaded."""
    lines = []
    for name in PINNED if TOOLKIT else ():
        try:
            module = importlib.import_module(name)
            lines.append(f"{name} {getattr(module, '__version__', '')}")
        except Exception as error:
            lines.append(f"{name} cannot be loaded, so what needs it is not run: {first(error)}")
    return lines


def first(error):
    """Return the first line of what an error says."""
    return str(error).strip().split("\n")[0]


@pytest.fixture(autouse=True)
def precisions():
    """The pinned torchao sets torch's float32 precision whenever it quantises a model."""
    before = kernel_flags.now()
    yield
    kernel_flags.restore(before)


@pytest.fixture(autouse=True)
def made_there(request):
    """Let a test make tensors and models on a card. The trainer's own code takes care itself."""
    itself = request.module.__name__ in ("test_checkout", "test_trainer")
    with contextlib.nullcontext() if itself or equality.DEVICE == "cpu" else torch.device("cuda"):
        yield


@pytest.fixture
def toolkit():
    """The checkout."""
    return Path(TOOLKIT).resolve()
