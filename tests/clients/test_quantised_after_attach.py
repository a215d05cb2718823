"""Layers that are quantised after attach stream their quantised bytes from then on."""

from __future__ import annotations

import copy

import pytest
import sides
import torch
from equality import assert_models_agree, assert_same, attached
from quantised import (
    FORMATS,
    MODES,
    freeze,
    model_of,
    quantised_layers,
    step_of,
    unquantised_model_of,
)

from oracle_offload.aitoolkit import MemoryManager
from oracle_offload.model import masters

# The libraries that quantise the layers of a model where they are.
NAMES = [name for name in FORMATS if name.startswith(("torchao", "quanto"))]
X = torch.linspace(-2, 2, 2 * 5 * 64).sin().view(2, 5, 64).to(torch.bfloat16)


def quantise(model, name):
    freeze(FORMATS[name][2](model))


def host_bytes(manager):
    """Return what the masters take, all of which is locked."""
    nbytes = sum(buffer.nbytes for buffer in manager.attachment.buffers)
    assert manager.state.engine.stats()["locked_bytes"] >= nbytes
    return nbytes


@pytest.mark.parametrize("used", [False, True], ids=["at once", "after a step"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_quantised_after_attach_streams_and_trains_to_the_residents_bits(
    name, mode, used
):
    managed, resident = (unquantised_model_of(name, torch.bfloat16) for _ in range(2))
    step = step_of(X, mode)
    with attached(managed) as manager:
        before = [layer.name for layer in manager.layers]
        if used:
            assert_models_agree(managed, resident, step)
        for model in (managed, resident):
            model.zero_grad()
            quantise(model, name)
        moved = manager.state.engine.stats()["h2d_bytes"]
        assert_models_agree(managed, resident, step)
        layers = quantised_layers(manager)
        assert len(layers) == 6, manager.resident
        moved = manager.state.engine.stats()["h2d_bytes"] - moved
        assert moved >= sum(n for x in layers for _, n in x.extents())
        assert [layer.name for layer in manager.layers] == before
        assert not any("base" in key for key in manager.resident)
    assert type(managed[0].up.base) is type(resident[0].up.base)
    assert_same(step(managed.to(sides.DEVICE)), step(resident))


@pytest.mark.parametrize("name", NAMES)
def test_its_masters_are_those_of_a_model_that_was_quantised_before(name, monkeypatch):
    monkeypatch.setattr(masters, "PIECE_BYTES", 1)  # a piece for each unit
    found = []
    for after in (False, True):
        model = unquantised_model_of(name, torch.bfloat16) if after else None
        with attached(model or model_of(name, torch.bfloat16)) as manager:
            if model is not None:
                quantise(model, name)
                with torch.no_grad():
                    model[0](X.to(sides.DEVICE))
            found.append((host_bytes(manager), manager.attachment.weight_bytes))
    assert found[1] == found[0]


# quanto makes all layers again, with the same weights, before it quantises the first.
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("torchao")])
def test_old_masters_go_while_the_model_is_quantised(name, monkeypatch):
    """Not after it: else a host must hold the model twice, as it was and quantised."""
    monkeypatch.setattr(masters, "PIECE_BYTES", 1)
    model = unquantised_model_of(name, torch.bfloat16)
    with attached(model) as manager:
        before = manager.attachment.weight_bytes
        adapters = sum(p.nbytes for k, p in model.named_parameters() if "base" not in k)
        quantise(model, name)
        base = before - adapters
        assert host_bytes(manager) <= adapters + base / 3


def test_a_copy_of_it_is_an_ordinary_model():
    managed, resident = (unquantised_model_of("torchao-int8", torch.bfloat16) for _ in range(2))
    with attached(managed) as manager:
        for model in (managed, resident):
            quantise(model, "torchao-int8")
        step = step_of(X)
        assert_models_agree(managed, resident, step)
        assert len(quantised_layers(manager)) == 6
        assert_same(step(copy.deepcopy(managed).to(sides.DEVICE)), step(resident))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_was_quantised_after_attach_is_freed_while_an_output_is_alive(name):
    """As AI-Toolkit frees a text encoder once its prompts are cached; all of it moves to "meta"."""
    model = unquantised_model_of(name, torch.bfloat16)
    MemoryManager.attach(model, torch.device(sides.DEVICE))
    quantise(model, name)
    kept = step_of(X)(model)
    assert len(quantised_layers(model._memory_manager)) == 6
    MemoryManager.free(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert all(tensor.isfinite().all() for tensor in kept)
