"""torch.compile over quantised layers: each is one operator of the captured graph."""

from __future__ import annotations

import copy
import itertools

import pytest
import quantised
import sides
import torch
from capturing import BACKENDS, Backend, uses
from equality import RUNS, assert_models_agree, assert_same, attached
from tiers import in_turn
from torch import nn
from torch._dynamo.utils import counters

from oracle_offload import OffloadError
from oracle_offload.layers.quantised import QuantisedLayer

pytestmark = pytest.mark.usefixtures("from_the_start")


@in_turn("kind,name", quantised.FORMATS, BACKENDS)
def test_each_quantised_layer_is_one_operator(kind, name):
    mode = {"eager": "plain", "aot_eager": "not-reentrant"}[name]
    x = torch.randn(3, 64, device=sides.DEVICE, dtype=torch.bfloat16)
    managed, resident = (quantised.model_of(kind, torch.bfloat16) for _ in range(2))
    for name_of, parameter in [*managed.named_parameters(), *resident.named_parameters()]:
        if name_of.endswith("bias"):  # else bitsandbytes casts each in its first call
            parameter.data = parameter.data.to(torch.bfloat16)
    backend = Backend(name)
    with attached(managed) as manager:
        layers = quantised.quantised_layers(manager)
        assert len(layers) == 6
        for block in managed:
            block.compile(backend=backend, fullgraph=True)
        assert_models_agree(managed, quantised.on_device(resident), quantised.step_of(x, mode))
        again = mode == "not-reentrant"  # its recompute runs the graph again
        assert backend.count("quantised") == RUNS * 2 * (len(layers) * (1 + again) + 2)
        assert backend.graphs <= 3  # one serves all blocks: with gradients, without, in a recompute
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    assert not counters["graph_break"]


@pytest.mark.parametrize("kind", ["torchao-int8", "quanto-qint4", "bitsandbytes-fp4", "gguf-q8_0"])
def test_quantised_layers_keep_order_and_bytes(kind):
    def call(called):
        for rows in (4, 7, 9):  # of any number, by one graph
            x = torch.randn(rows, 64, device=sides.DEVICE, requires_grad=True)
            called(x).square().sum().backward()

    (order, brought), (found, found_brought) = (
        uses(nn.Sequential(*quantised.model_of(kind, torch.float32)), backend, call)
        for backend in (None, "aot_eager")
    )
    assert brought > 0
    # In eager backward each operator on a weight borrows it.
    order, found = ([name for name, _ in itertools.groupby(names)] for names in (order, found))
    assert found == order
    assert found_brought == brought


@in_turn("kind,name", ["torchao-float8", "quanto-qint8", "bitsandbytes-nf4-nested"], BACKENDS)
def test_autocast_is_that_of_the_call(kind, name):
    x = torch.randn(3, 64, device=sides.DEVICE)
    managed, resident = (quantised.model_of(kind, torch.float32) for _ in range(2))
    backend = Backend(name)
    with attached(managed) as manager:
        for block in managed:
            block.compile(backend=backend, fullgraph=True)
        assert_models_agree(
            managed, quantised.on_device(resident), quantised.step_of(x, "autocast")
        )
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    assert backend.count("quantised") > 0


@pytest.mark.parametrize("kind", ["torchao-int8", "bitsandbytes-int8", "quanto-qint8"])
def test_a_trained_bias_gets_its_gradient(kind):
    x = torch.randn(3, 64, device=sides.DEVICE)
    managed, resident = (quantised.model_of(kind, torch.float32) for _ in range(2))
    for model in (managed, resident):
        for block in model:
            block.down.base.bias.requires_grad_()
    backend = Backend("aot_eager")
    with attached(managed):
        for block in managed:
            block.compile(backend=backend, fullgraph=True)
        assert_models_agree(managed, quantised.on_device(resident), quantised.step_of(x))
    assert backend.count("quantised") > 0
    assert managed[0].down.base.bias.grad is not None


def test_inductor_computes_what_eager_does(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what it wrote before is no proof
    managed, resident = (
        nn.Sequential(*quantised.model_of("torchao-int8", torch.float32)) for _ in range(2)
    )
    resident.to(sides.DEVICE)
    expected = torch.randn(3, 64, device=sides.DEVICE, requires_grad=True)
    found = expected.detach().clone().requires_grad_()
    resident(expected).square().sum().backward()
    with attached(managed) as manager:
        torch.compile(managed, fullgraph=True)(found).square().sum().backward()
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("kind", ["torchao-int8", "bitsandbytes-nf4-nested"])
def test_no_input_is_kept_that_eager_does_not_keep(kind):
    model = nn.Sequential(*quantised.model_of(kind, torch.float32)).requires_grad_(False)
    x = torch.randn(64, 64, device=sides.DEVICE, requires_grad=True)

    def held_bytes(called):
        held = {}

        def keep(tensor):
            if tensor.untyped_storage().data_ptr() not in own:
                held[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            called(x)
        return sum(tensor.nbytes for tensor in held.values())

    with attached(model) as manager:
        own = {t.untyped_storage().data_ptr() for leaf in manager.layers for t in leaf.tensors()}
        called = torch.compile(model, backend="aot_eager", fullgraph=True)
        called(x)
        assert 0 < held_bytes(called) <= 1.05 * held_bytes(model)


@in_turn("kind,name", ["torchao-int8", "bitsandbytes-nf4-nested"], BACKENDS)
def test_a_write_between_forward_and_backward_is_refused(kind, name):
    model = nn.Sequential(*quantised.model_of(kind, torch.float32))
    with attached(model) as manager:
        called = torch.compile(model, backend=name, fullgraph=True)
        y = called(torch.randn(3, 64, device=sides.DEVICE, requires_grad=True))
        quantised.quantised_layers(manager)[0].masters.present[0].add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_bias_that_compiled_code_writes(name):
    """Under ``eager`` the write is there; else the operator is given what the bias will be."""
    managed, resident = (quantised.model_of("torchao-int8", torch.float32)[0].up for _ in range(2))
    x = torch.randn(3, 64, device=sides.DEVICE)

    def write(model):
        model.base.bias.add_(1)
        return model.base(x)

    resident.to(sides.DEVICE)
    with attached(managed), torch.no_grad():
        called = torch.compile(write, backend=name)
        if name == "eager":
            assert_same(called(managed), write(resident))
        else:
            with pytest.raises(OffloadError, match="'base' has a computed weight"):
                called(managed)


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_result_of_another_dtype_than_told_is_refused(name, monkeypatch):
    @torch.compiler.assume_constant_result
    def result_of(self, look, dtype, autocast):
        return torch.float16

    monkeypatch.setattr(QuantisedLayer, "result_of", result_of)
    model = quantised.model_of("torchao-int8", torch.float32)[0].up
    x = torch.randn(3, 64, device=sides.DEVICE)
    expected = copy.deepcopy(model).to(sides.DEVICE)(x)
    with attached(model), torch.no_grad():
        called = torch.compile(lambda x: model.base(x).float(), backend=name)
        for _ in range(2):  # and no slot stays held
            with pytest.raises(OffloadError, match=r"'base' returns 128 features of torch.float32"):
                called(x)
        assert_same(model(x), expected)


@in_turn("kind,name", ["torchao-int8", "gguf-q8_0"], BACKENDS)
def test_a_quantised_weight_that_a_call_is_given_is_used(kind, name):
    managed, resident = (quantised.model_of(kind, torch.float32) for _ in range(2))
    managed, resident = managed[0].up.base, resident[0].up.base
    other = quantised.model_of(kind, torch.float32)[1].up.base.weight
    x = torch.randn(3, 64, device=sides.DEVICE)

    def given(module, weight):
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    managed, whole = nn.Sequential(managed), nn.Sequential(resident).to(sides.DEVICE)
    other = nn.Parameter(other.to(sides.DEVICE), requires_grad=False)
    with attached(managed), torch.no_grad():
        called = torch.compile(given, backend=name)
        assert_same(called(managed[0], other), given(whole[0], other))
        assert_same(managed(x), whole(x))


class OfSquares(nn.Module):
    """A class of ComfyUI's, which may read its input in backward: this one does."""

    def __init__(self):
        super().__init__()
        self.in_features = self.out_features = 64
        weight = torch.randint(-9, 9, (64, 64), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Buffer(torch.rand(64) / 64)
        self.comfy_quant = nn.Buffer(torch.zeros(1, dtype=torch.uint8))

    def forward(self, x):
        return (x * x) @ self.weight.to(x.dtype).t() * self.weight_scale


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_an_input_that_backward_reads_is_kept(name):
    resident = nn.Sequential(OfSquares(), nn.ReLU(), OfSquares())
    managed = copy.deepcopy(resident)
    expected = torch.randn(3, 64, device=sides.DEVICE, requires_grad=True)
    found = expected.detach().clone().requires_grad_()
    resident.to(sides.DEVICE)(expected).sum().backward()
    with attached(managed) as manager:
        assert len(quantised.quantised_layers(manager)) == 2
        backend = Backend(name)
        torch.compile(managed, backend=backend, fullgraph=True)(found).sum().backward()
        assert backend.count("quantised") > 0
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    assert expected.grad.any()
    assert_same(found.grad, expected.grad)
