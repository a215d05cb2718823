"""Real libraries, in small: each trains the resident and the managed model, to the same bits.

A library that is missing fails its tests: these say that the project works with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

# Read when the libraries are imported: nothing here may ask a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

CORE = Path(__file__).resolve().parents[1] / "torch"
sys.path.append(str(CORE))  # equality.py and models.py

import torch  # noqa: E402
from equality import assert_same, copied_bytes  # noqa: E402

import oracle_offload  # noqa: E402
from oracle_offload.witness import Witness  # noqa: E402

_spec = importlib.util.spec_from_file_location("core_conftest", CORE / "conftest.py")
_core = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_core)
sim = _core.sim  # a fresh simulated device for every test, and nothing left on it


class Side:
    """One of the two runs of a client: with the model resident, or managed.

    Parameters
    ----------
    managed : bool
        Whether `attach` attaches.
    witnessed : bool
        Whether `step` puts a strict witness around what it encloses.
    """

    def __init__(self, managed, witnessed):
        self.managed = managed
        self.witnessed = witnessed
        self.managers = []
        self.arena_reads = 0

    def attach(self, model, at_least=5, **options):
        """Attach where this side is managed; `at_least` so many layers must be."""
        if self.managed:
            manager = oracle_offload.attach(model, "cpu", **options)
            self.managers.append(manager)
            assert len(manager.layers) >= at_least, manager.resident
        return model

    @contextlib.contextmanager
    def step(self):
        """Enclose a forward and backward: no operator in it may touch a master."""
        if not (self.managed and self.witnessed):
            yield
            return
        with Witness() as witness:
            yield
        self.arena_reads += witness.arena_reads

    def run(self, client):
        """Run `client`; where managed, assert that weights were streamed."""
        torch.manual_seed(0)
        before = copied_bytes()
        result = client(self)
        if self.managed:
            driver, engine = (now - then for now, then in zip(copied_bytes(), before, strict=True))
            assert driver == engine > 0, (driver, engine)
            assert self.arena_reads > 0 or not self.witnessed, "no operator read the arena"
            for manager in self.managers:
                manager.detach()
        return result


@pytest.fixture(params=[False, True], ids=["plain", "witness"])
def compare(request):
    """``compare(client)``: what ``client(side)`` returns is the same on both sides, to the bit."""

    def compare(client):
        expected = Side(False, False).run(client)
        found = Side(True, request.param).run(client)
        assert_same(found, expected)
        return found

    return compare


def values(model, trained_only=False):
    """Return copies of the parameters by name."""
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or not trained_only
    }


@pytest.fixture(autouse=True)
def seeded():
    """Leave no dispatcher, thread pool or generator as a client set it."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    torch._dynamo.reset()
