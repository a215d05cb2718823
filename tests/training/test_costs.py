"""What a managed layer costs: simulated time, bytes that travel, and driver calls."""

from __future__ import annotations

import threading
import types

import pytest
import torch
from equality import attached
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

LAYERS = {
    "linear": (lambda: nn.Linear(12, 20), (3, 5, 12)),
    "linear of one row": (lambda: nn.Linear(12, 20, bias=False), (12,)),
    "convolution": (lambda: nn.Conv2d(4, 6, (3, 5), padding=(1, 2)), (2, 4, 9, 11)),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 9, 11)),
    "one axis": (lambda: nn.Conv1d(4, 6, 5, stride=2, padding=2), (2, 4, 19)),
    "three axes": (lambda: nn.Conv3d(4, 6, (2, 3, 4), dilation=(1, 2, 1)), (2, 4, 5, 9, 7)),
    "strided": (lambda: nn.Conv2d(4, 6, 3, stride=(2, 3), dilation=(1, 2)), (2, 4, 16, 21)),
}


def counted(call):
    """Return the operations that torch's own counter finds in a call, and its result."""
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS)
def test_simulated_time_is_of_the_operations_that_torch_counts(build, shape, dtype, monkeypatch):
    resident = build().to(dtype)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    flops, y = counted(lambda: resident(x))
    both = 2 * flops  # the counter is wrong for the weight of a grouped convolution
    if getattr(resident, "groups", 1) == 1:
        assert counted(lambda: y.sum().backward())[0] == both
    model = nn.Sequential(build().to(dtype))
    asked = []
    with attached(model) as manager:
        time = manager.state.time
        monkeypatch.setattr(
            type(time), "kernel_seconds", lambda self, *given: asked.append(given) or 1e-9
        )

        def train(trains_weight, x_needs):
            asked.clear()
            model.zero_grad()  # to add to a gradient takes time as well
            model[0].weight.requires_grad_(trains_weight)
            model[0](x.detach().requires_grad_(x_needs)).sum().backward()
            return asked[:]

        forward, backward = train(True, True)
        assert [forward[0], backward[0]] == [flops, both]
        moved = (x.numel() + resident.weight.numel() + y.numel()) * dtype.itemsize
        assert forward[1:] == (moved, dtype)
        assert backward[2] is dtype and backward[1] >= 2 * resident.weight.nbytes
        half = backward[0] / 2, backward[1] / 2, dtype
        assert train(False, True)[1] == half, "one of two products"
        # Of a Linear, the gradient of the weight needs no weight, and no loan.
        convolves = not isinstance(resident, nn.Linear)
        assert train(True, False)[1:] == ([half] if convolves else [])
        asked.clear()
        with torch.no_grad():
            model(x)
        assert asked == [forward]


def test_layers_without_elements_take_no_time():
    model = nn.Sequential(nn.Linear(8, 8))
    with attached(model):
        stub = types.SimpleNamespace(masters=types.SimpleNamespace(present=[torch.empty(0, 0)]))
        kind = type(model[0]._layer_memory_manager)
        assert kind.forward_cost(stub, torch.empty(2, 0)) == (0, 0)
        assert kind.backward_cost(stub, torch.empty(2, 0), (True, False, False)) == (0, 0)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize("trains", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=["-", "b", "w", "wb"])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_every_gradient_of_a_parameter_travels_to_the_host_once(kind, trains, bias):
    layer = nn.Linear(12, 20, bias=bias) if kind == "linear" else nn.Conv2d(4, 6, 3, bias=bias)
    layer.weight.requires_grad_(bool(trains[0]))
    if bias:
        layer.bias.requires_grad_(bool(trains[1]))
    wanted = sum(p.nbytes for p in layer.parameters() if p.requires_grad)
    x = torch.randn(3, 12) if kind == "linear" else torch.randn(2, 4, 8, 8)
    model = nn.Sequential(layer)
    with attached(model) as manager:
        for number in (1, 2):
            model(x.requires_grad_()).sum().backward()
            assert manager.state.engine.stats()["d2h_bytes"] == number * wanted


COLUMN = {
    "rows": lambda: torch.randn(6, 4),
    "columns": lambda: torch.randn(4, 6).t(),
    "one row": lambda: torch.randn(1, 4),
    "one column": lambda: torch.randn(4, 1).t(),
    "batch": lambda: torch.randn(2, 6, 4),
    "batch of columns": lambda: torch.randn(2, 4, 6).transpose(1, 2),
    "batch first last": lambda: torch.randn(6, 2, 4).transpose(0, 1),
    "batch of one of columns": lambda: torch.randn(1, 4, 6).transpose(1, 2),
}


@pytest.mark.parametrize("build", COLUMN.values(), ids=COLUMN)
def test_the_gradient_of_an_input_has_the_layout_that_torch_gives_it(build):
    resident = nn.Linear(4, 3)
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].load_state_dict(resident.state_dict())
    for module in (resident, model[0]):
        module.requires_grad_(False)
    seen = []

    def run(layer, x):
        y = (x.detach().requires_grad_() * 1).as_strided(x.shape, x.stride())
        y.register_hook(lambda grad: seen.append((grad.stride(), grad.clone())))
        layer(y).square().sum().backward()

    x = build()
    with attached(model):
        run(model[0], x)
        run(resident, x)
    (stride, gradient), (expected_stride, expected) = seen
    assert torch.equal(gradient, expected) and stride == expected_stride


SHAPES = [(2, 5, 8, 8), (2, 1, 8, 8), (5, 8, 8), (5, 4, 8), (2, 2, 4, 8, 8), (4,), (4, 8), ()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "padding", [{"padding": 1}, {"padding": "same"}, {"padding": 1, "groups": 2}], ids=str
)
def test_a_wrong_shape_is_refused_before_anything_is_fetched(shape, padding):
    model = nn.Sequential(nn.Conv2d(4, 4, 3, **padding))
    with attached(model) as manager:
        with pytest.raises((RuntimeError, IndexError), match=r"channel|Expected 3D|out of range"):
            model(torch.randn(shape))
        assert manager.state.engine.stats()["acquires"] == 0
        model(torch.randn(2, 4, 8, 8))
        assert manager.state.engine.stats()["acquires"] == 1


@pytest.mark.parametrize(("streamed", "most"), [(0.0, 4.2), (1.0, 8.5)], ids=["hit", "streamed"])
@pytest.mark.parametrize("threaded", [False, True], ids=["main thread", "other thread"])
def test_driver_calls_of_a_use(sim, streamed, most, threaded):
    """As many as the engine alone makes where the context is current: no thread pays for it."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    x = torch.randn(1, 1024)
    counted = {}

    def run():
        with torch.no_grad():
            for _ in range(16):
                model(x)
            calls, before = sim.call_count(), manager.state.engine.stats()
            for _ in range(64):
                model(x)
        calls = sim.call_count() - calls
        after = manager.state.engine.stats()
        uses = after["acquires"] - before["acquires"]
        counted["calls"] = calls / uses
        counted["copies"] = (after["h2d_copies"] - before["h2d_copies"]) / uses

    with attached(model.requires_grad_(False), offload_percent=streamed) as manager:
        assert manager.state.engine.stats()["units"] == 6
        if threaded:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()
    assert counted["calls"] <= 4.2 + (most - 4.2) * counted["copies"]
    assert (counted["copies"] > 0.7) == bool(streamed)
