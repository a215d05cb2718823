"""The kind of each use of the engine: a sample, training's forward, a recompute, a backward."""

from __future__ import annotations

import models
import pytest
import torch
from equality import attached
from torch import nn

from oracle_offload._core import BACKWARD, FORWARD, RECOMPUTE, RECORDED

pytestmark = pytest.mark.usefixtures("nothing_is_small")


class Product(nn.Module):
    """Is lent its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.weight


LAYERS = {
    "linear": lambda: nn.Linear(8, 8),
    "convolution": lambda: nn.Conv1d(4, 4, 1),
    "lent": Product,
}


def two(layer, reentrant=None):
    return models.Tower(*(LAYERS[layer]() for _ in range(2)), reentrant=reentrant)


class Told:
    """Answers the kinds of the visits since the last look."""

    def __init__(self, manager):
        self._visits = lambda: manager.state.engine.visits(manager.attachment.model)
        self._seen = 0

    def __call__(self):
        visits = self._visits()
        seen, self._seen = self._seen, len(visits)
        return [kind for _, kind in visits[seen:]]


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["", "checkpoint", "reentrant"])
@pytest.mark.parametrize("layer", LAYERS)
def test_training_and_samples(layer, reentrant, trained):
    model = two(layer, reentrant).requires_grad_(trained)
    x = torch.randn(2, 4, 8, requires_grad=True)
    with attached(model, "cpu", offload_percent=1.0) as manager:
        told = Told(manager)
        forward = FORWARD if reentrant else RECORDED  # a reentrant one is under no_grad
        for _ in range(2):
            model(x).sum().backward()
            found = told()
            assert found[:2] == [forward] * 2
            again = {RECOMPUTE} if reentrant is not None else set()
            assert BACKWARD in found[2:] and {*found[2:]} <= {BACKWARD} | again
            with torch.no_grad():
                model(x)
            assert told() == [FORWARD] * 2


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layer", LAYERS)
def test_compiled(layer, backend, trained):
    model = two(layer).requires_grad_(trained)
    x = torch.randn(2, 4, 8, requires_grad=True)
    called = torch.compile(model, backend=backend, fullgraph=True)
    with attached(model, "cpu", offload_percent=1.0) as manager:
        told = Told(manager)
        for _ in range(2):
            called(x).sum().backward()
            found = told()
            assert found[:2] == [RECORDED] * 2
            assert BACKWARD in found[2:] and {*found[2:]} <= {BACKWARD, RECOMPUTE}
            with torch.no_grad():
                called(x)
            assert told() == [FORWARD] * 2
    torch._dynamo.reset()
