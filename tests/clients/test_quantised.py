"""Quantised weights travel as they are, and give the bits of the resident model."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from equality import Recorder, assert_models_agree, assert_same, attached
from quantised import FORMATS, model_of
from torch.utils.checkpoint import checkpoint

from oracle_offload.layers.quantised import QuantisedLayer

MODES = ["plain", "reentrant", "not-reentrant", "autocast"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def quantised_layers(manager):
    return [layer for layer in manager.layers if isinstance(layer, QuantisedLayer)]


def step_of(x, mode):
    """Return a training step of a model, and a sample of its first block."""

    def step(model):
        y = given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            for block in model:
                if mode in ("plain", "autocast"):
                    y = block(y)
                else:
                    y = checkpoint(block, y, use_reentrant=mode == "reentrant")
        y.float().square().mean().backward()
        with torch.no_grad():
            return y, given.grad, model[0](x)

    return step


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_model_trains_its_adapters_to_the_residents_bits(name, mode, dtype):
    managed, resident = (model_of(name, DTYPES[dtype]) for _ in range(2))
    x = torch.randn(2, 5, 64).to(DTYPES[dtype])
    with attached(managed) as manager:
        assert len(quantised_layers(manager)) == 6, manager.resident
        assert_models_agree(managed, resident, step_of(x, mode))
        again = manager.attachment.traffic.runs_again
        assert again == (24 if mode == "autocast" else 0)
        assert ("forward again in backward" in str(manager.memory_summary())) == bool(again)


INPUTS = {
    "matrix": lambda: torch.randn(6, 64),
    "row": lambda: torch.randn(1, 64),
    "vector": lambda: torch.randn(64),
    "columns": lambda: torch.randn(64, 6).t(),
    "batch": lambda: torch.randn(2, 3, 64),
    "four": lambda: torch.randn(2, 1, 3, 64),
    "transposed": lambda: torch.randn(3, 2, 64).transpose(0, 1),
    "channels-last": lambda: torch.randn(2, 64, 3).transpose(1, 2),
    "empty": lambda: torch.randn(0, 64),
}


def gradient_of(layer, x, dtype):
    """Return the result and the input's gradient; None where the library refuses such an input."""
    given = torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x).requires_grad_()
    assert given.stride() == x.stride()
    try:
        y = layer(given)
        y.backward(torch.linspace(-1, 1, max(1, y.numel())).to(y.dtype)[: y.numel()].view(y.shape))
    except (RuntimeError, ValueError, IndexError) as error:
        return None, str(error)
    return y.detach(), given.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", INPUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_gradient_of_an_input_of_any_geometry(name, geometry, dtype):
    managed, resident = (model_of(name, DTYPES[dtype], depth=1) for _ in range(2))
    x = INPUTS[geometry]()
    with attached(managed) as manager:
        found = gradient_of(managed[0].up.base, x, DTYPES[dtype])
        expected = gradient_of(resident[0].up.base, x, DTYPES[dtype])
        assert manager.attachment.traffic.runs_again == 0 or geometry == "empty"
    if expected[0] is None:
        assert (name, geometry) == ("quanto-qint8", "columns"), expected[1]
        assert found[0] is None, f"the resident layer refuses this: {expected[1]}"
    else:
        assert_same(found, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_what_travels_is_the_quantised_bytes(name):
    bits = FORMATS[name][0]
    model = model_of(name, torch.bfloat16, width=256, depth=2)
    with attached(model) as manager, torch.no_grad():
        layers = quantised_layers(manager)
        assert len(layers) == 4
        weights = 2 * 2 * 256 * 512 * bits // 8
        x = torch.randn(1, 256).to(torch.bfloat16)

        def run():
            model[0](x)
            model[1](x)

        run()  # bitsandbytes makes a layer's tensors anew in its first call
        assert weights <= sum(n for layer in layers for _, n in layer.extents()) <= 1.3 * weights
        exact, padded = Counter(), Counter()
        for layer in manager.layers:
            exact[layer.unit] += sum(n for _, n in layer.extents())
            padded[layer.unit] += sum(-(-n // 256) * 256 for _, n in layer.extents())
        state = manager.state
        state.engine = recorder = Recorder(state.engine)
        before = recorder.stats()["h2d_bytes"]
        run()
        copied, state.engine = recorder.stats()["h2d_bytes"] - before, recorder._engine
        low, high = (sum(sizes[unit] for unit in recorder.fetched) for sizes in (exact, padded))
        assert recorder.fetched and low <= copied <= high
