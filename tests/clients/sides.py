"""The runs of a client that are compared: resident, managed, and managed under the witness."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

# Read when the libraries are imported: nothing here may ask a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Inductor takes what the processor says it has, and compiles no program for each set of vector
# instructions to find out: ten seconds, in each folder of its own.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"

# Or that of --device: then the client makes its tensors there, and the resident model is there.
DEVICE = "cpu"
CORE = Path(__file__).resolve().parents[1] / "training"
sys.path.append(str(CORE))  # equality.py and models.py
sys.path.append(str(CORE.parent / "planning"))  # peak.py

import torch  # noqa: E402
from equality import assert_same, copied_bytes  # noqa: E402

import oracle_offload  # noqa: E402
from oracle_offload.model.witness import Witness  # noqa: E402


def default_device():
    """Return a context in which tensors are made on the device."""
    return contextlib.nullcontext() if DEVICE == "cpu" else torch.device(DEVICE)


class Rows(torch.utils.data.Dataset):
    """So many fixed sequences."""

    def __init__(self, count):
        self.ids = torch.randint(0, 100, (count, 9), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Side:
    """One of the runs of a client.

    Parameters
    ----------
    name : str
        "resident", "managed" where `attach` attaches, or "witnessed" where `step` puts a strict
        witness around what it encloses, too.
    """

    def __init__(self, name):
        self.name = name
        self.managed = name != "resident"
        self.witnessed = name == "witnessed"
        self.managers = []
        self.models = []  # alive until their engine's counters were read
        self.arena_reads = 0

    def attach(self, model, at_least=5, **options):
        """Attach where this side is managed; `at_least` so many layers must be."""
        if self.managed:
            manager = oracle_offload.attach(model, DEVICE, **options)
            self.managers.append(manager)
            self.models.append(model)
            assert len(manager.layers) >= at_least, manager.resident
        else:
            model.to(DEVICE)
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

    def run(self, client, by_library=False):
        """Run `client`; where managed, assert that weights were streamed.

        `by_library`: it leaves to a library which device its tensors are on.
        """
        torch.manual_seed(0)
        before = copied_bytes()
        try:
            with contextlib.nullcontext() if by_library else default_device():
                result = client(self)
            driver, engine = (now - then for now, then in zip(copied_bytes(), before, strict=True))
        finally:
            for manager in self.managers:
                manager.detach()
            self.models.clear()
        if self.managed:
            # A real driver counts nothing.
            assert engine > 0 and driver == (0 if DEVICE == "cuda" else engine), (driver, engine)
            assert self.arena_reads > 0 or not self.witnessed, "no operator read the arena"
        return result


def compare(client, by_library=False):
    """Assert that ``client(side)`` returns the same on all sides, to the bit; return it."""
    expected = Side("resident").run(client, by_library)
    for name in ("managed", "witnessed"):
        assert_same(Side(name).run(client, by_library), expected, name)
    return expected


def values(model, trained_only=False):
    """Return copies of the parameters by name."""
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or not trained_only
    }
