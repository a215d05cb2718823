"""Quantised weights travel as they are, and give the bits of the resident model."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import sides
import torch
from equality import Recorder, assert_models_agree, assert_same, attached
from optimum import quanto
from quantised import FORMATS, MODES, model_of, on_device, quantised_layers, step_of
from torch import nn

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_model_trains_its_adapters_to_the_residents_bits(name, mode, dtype):
    managed, resident = (model_of(name, DTYPES[dtype]) for _ in range(2))
    x = torch.randn(2, 5, 64).to(DTYPES[dtype])
    with attached(managed) as manager:
        assert len(quantised_layers(manager)) == 6, manager.resident
        assert_models_agree(managed, on_device(resident), step_of(x, mode))
        assert manager.attachment.traffic.runs_again == 0


CONVOLUTIONS = {"qint8": quanto.qint8, "qint4": quanto.qint4, "qfloat8": quanto.qfloat8}


def convolutions(kind):
    """Two of quanto's convolutions, and an adapter that is trained; always the same."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 1)
    ).to(torch.bfloat16)
    quanto.quantize(model, weights=CONVOLUTIONS[kind], exclude="3")
    quanto.freeze(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("3."))
    return nn.ModuleList([model])


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_a_quantised_convolution_trains_what_follows_it_to_the_residents_bits(kind, mode):
    managed, resident = (convolutions(kind) for _ in range(2))
    x = torch.randn(2, 4, 8, 8).to(torch.bfloat16)
    with attached(managed) as manager:
        found = [type(layer.module()).__name__ for layer in quantised_layers(manager)]
        assert found == ["QConv2d", "QConv2d"], manager.resident
        assert_models_agree(managed, resident, step_of(x, mode))
        assert manager.attachment.traffic.runs_again == 0


INPUTS = {
    "matrix": lambda: torch.randn(6, 64),
    "row": lambda: torch.randn(1, 64),
    "vector": lambda: torch.randn(64),
    "columns": lambda: torch.randn(64, 6).t(),
    "batch": lambda: torch.randn(2, 3, 64),
    "four": lambda: torch.randn(2, 1, 3, 64),
    "transposed": lambda: torch.randn(3, 2, 64).transpose(0, 1),
    "of one row": lambda: torch.randn(1, 3, 64).transpose(0, 1),
    "channels-last": lambda: torch.randn(2, 64, 3).transpose(1, 2),
    "empty": lambda: torch.randn(0, 64),
}


def refuses(name, geometry):
    """Whether the library itself refuses such an input, on the device of the tests."""
    if sides.DEVICE == "cuda" and name.startswith("bitsandbytes-int8"):
        return geometry in ("vector", "four")  # its product wants two dimensions, or three
    return (name, geometry) == ("quanto-qint8", "columns")


def gradient_of(layer, x, dtype):
    """Return the result and the input's gradient; None where the library refuses such an input."""
    given = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=sides.DEVICE)
    given = given.copy_(x).requires_grad_()
    assert given.stride() == x.stride()
    try:
        y = layer(given)
        weights = torch.linspace(-1, 1, max(1, y.numel())).to(y)[: y.numel()]
        y.backward(weights.view(y.shape))
    except (RuntimeError, ValueError, IndexError) as error:
        return None, str(error)
    return y.detach(), given.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", INPUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_gradient_of_an_input_of_any_geometry(name, geometry, dtype):
    managed, resident = (model_of(name, DTYPES[dtype], depth=1) for _ in range(2))
    on_device(resident)
    x = INPUTS[geometry]()
    with attached(managed) as manager:
        found = gradient_of(managed[0].up.base, x, DTYPES[dtype])
        expected = gradient_of(resident[0].up.base, x, DTYPES[dtype])
        assert manager.attachment.traffic.runs_again == 0
    if expected[0] is None:
        assert refuses(name, geometry), expected[1]
        assert found[0] is None, f"the resident layer refuses this: {expected[1]}"
    else:
        assert_same(found, expected)


def pass_over(model):
    """Sample once, through every block; weights of two matrices of 256 x 512 in each of two."""
    with torch.no_grad():
        x = torch.linspace(-1, 1, 256)[None].to(sides.DEVICE, torch.bfloat16)
        for block in model:
            block(x)


@contextlib.contextmanager
def recorded(manager):
    """Record what the engine fetches, and how many bytes it copies, in ``recorder.copied``."""
    state = manager.state
    state.engine = recorder = Recorder(state.engine)
    before = recorder.stats()["h2d_bytes"]
    try:
        yield recorder
    finally:
        state.engine = recorder._engine
        recorder.copied = state.engine.stats()["h2d_bytes"] - before


@pytest.mark.parametrize("name", FORMATS)
def test_what_travels_is_the_quantised_bytes(name):
    weights = 2 * 2 * 256 * 512 * FORMATS[name][0] // 8
    model = model_of(name, torch.bfloat16, width=256, depth=2)
    for key, parameter in model.named_parameters():
        if key.endswith("base.bias"):  # to which bitsandbytes casts it, else
            parameter.data = parameter.data.to(torch.bfloat16)
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    with attached(model) as manager:
        layers = quantised_layers(manager)
        assert len(layers) == 4
        assert weights <= sum(n for layer in layers for _, n in layer.extents()) <= 1.3 * weights
        exact, padded = Counter(), Counter()
        for layer in manager.layers:
            exact[layer.unit] += sum(n for _, n in layer.extents())
            padded[layer.unit] += sum(-(-n // 256) * 256 for _, n in layer.extents())
        passes = []
        for _ in range(3):
            with recorded(manager) as recorder:
                pass_over(model)
            low, high = (sum(sizes[unit] for unit in recorder.fetched) for sizes in (exact, padded))
            assert recorder.fetched and low <= recorder.copied <= high
            passes.append(recorder.copied)
        # The second pass also copies what the third begins with.
        assert weights <= passes[0] - adapters <= 1.3 * weights
        assert sum(passes) <= 3 * (1.3 * weights + adapters)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("bitsandbytes")])
def test_a_bias_that_bitsandbytes_casts_in_the_first_pass_costs_copies_there_alone(name):
    """The first input decides its dtype; a layer that has been fetched by then is fetched again."""
    model = model_of(name, torch.bfloat16, width=256, depth=2)
    assert model[0].up.base.bias.dtype is torch.float32
    with attached(model) as manager:
        layers = quantised_layers(manager)
        before = [layer.unit for layer in layers]
        with recorded(manager) as recorder:
            pass_over(model)
        assert model[0].up.base.bias.dtype is torch.bfloat16
        assert not {*before} & {layer.unit for layer in layers}
        # The first was not fetched ahead, nor was the last, for want of room.
        assert [unit for unit in recorder.fetched if unit in before] == before[1:3]
        for _ in range(2):
            with recorded(manager) as recorder:
                pass_over(model)
            assert not {*before} & {*recorder.fetched}


def test_a_layer_costs_its_operations_and_the_bytes_that_it_reads_and_writes():
    model = model_of("torchao-int8", torch.bfloat16, depth=1)
    with attached(model) as manager:
        for layer in quantised_layers(manager):
            module = layer.module()
            assert layer.why_lost() == ""
            held = sum(tensor.nbytes for tensor in layer.masters.present)
            assert held > module.in_features * module.out_features  # a byte each, and scales
            for shape, rows in (((2, 3, 64), 6), ((64,), 1), ((0, 64), 0)):
                shape = (*shape[:-1], module.in_features)
                x = torch.zeros(shape, dtype=torch.bfloat16)
                work, moved = layer.forward_cost(x)
                assert work == 2 * rows * module.in_features * module.out_features
                assert moved == held + 2 * rows * (module.in_features + module.out_features)
                # Compiled code runs the operator again in backward.
                assert layer.backward_cost(x, (True, False)) == (2 * work, 2 * moved)
