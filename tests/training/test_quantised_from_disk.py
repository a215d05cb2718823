"""A model quantised while it is read is what the library makes of it when it is loaded first."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import models
import pytest
import torch
from equality import assert_models_agree, assert_same
from safetensors.torch import save_file
from torch import nn

import oracle_offload
from oracle_offload.disk.quantising import Quantiser
from oracle_offload.engine import simulator
from oracle_offload.engine.engines import open_states
from oracle_offload.layers.flatten import plain_tensors
from oracle_offload.layers.formats import _is_weight_only, format_of
from oracle_offload.model import loading, masters


def torchao_int8(module):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(module, Int8WeightOnlyConfig())


def torchao_of_attention(module):
    """By name, so that names have to be the model's."""
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    def wanted(inner, name):
        return isinstance(inner, nn.Linear) and ".self_attn." in name

    quantize_(module, Float8WeightOnlyConfig(), filter_fn=wanted)


def quanto_int8(module):
    from optimum.quanto import freeze, qint8, quantize

    quantize(module, weights=qint8, exclude=["lm_head"])
    freeze(module)


WAYS = [torchao_int8, torchao_of_attention, quanto_int8]


def saved(folder, **options):
    torch.manual_seed(0)
    model = models.llama(**options).to(torch.bfloat16).requires_grad_(False)
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


def without_values(**options):
    with oracle_offload.empty_weights():
        return models.llama(**options).to(torch.bfloat16).requires_grad_(False)


def step(model):
    embedded = torch.randn(1, 5, 64, dtype=torch.bfloat16).requires_grad_()
    y = model(inputs_embeds=embedded).logits
    y.float().square().mean().backward()
    return y.detach(), embedded.grad


def quantised(model):
    return {name: inner for name, inner in model.named_modules() if format_of(inner) is not None}


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("quantize", WAYS, ids=lambda way: way.__name__)
def test_it_is_what_the_library_makes_of_the_loaded_model(tmp_path, quantize, tied):
    resident = saved(tmp_path, tie_word_embeddings=tied)
    quantize(resident)
    managed = without_values(tie_word_embeddings=tied)
    manager = oracle_offload.attach(managed, "cpu", weights=tmp_path, quantize=quantize)
    expected, found = quantised(resident), quantised(managed)
    assert len(expected) >= 12 and found.keys() == expected.keys()
    assert {layer.name for layer in manager.layers} >= expected.keys()
    for name, inner in expected.items():
        ours, theirs = plain_tensors(found[name])[0], plain_tensors(inner)[0]
        assert ours.keys() == theirs.keys()
        for path, tensor in theirs.items():  # as bytes: float8 cannot be compared
            assert ours[path].dtype is tensor.dtype
            one, other = (t.detach().reshape(-1).view(torch.uint8) for t in (ours[path], tensor))
            assert torch.equal(one, other), (name, path)
    assert_models_agree(managed, resident, step, steps=1)
    manager.detach()


def test_one_layer_at_a_time_is_there_unquantised(tmp_path):
    """Everything that was read and quantised before has no other values any more."""
    saved(tmp_path)
    managed = without_values()
    originals = [m.weight for m in managed.modules() if isinstance(m, nn.Linear)]
    most = []

    def quantize(module):
        most.append(sum(w.untyped_storage().nbytes() for w in originals))
        torchao_int8(module)

    manager = oracle_offload.attach(managed, "cpu", weights=tmp_path, quantize=quantize)
    assert max(most) == max(64 * 128, 100 * 64) * 2
    assert sum(w.untyped_storage().nbytes() for w in originals) == 0
    manager.detach()


class Int8(nn.Module):
    """What replaces a Linear once it is quantised."""

    def __init__(self, inner):
        super().__init__()
        self.register_buffer("values", inner.weight.detach().to(torch.int8))


def test_what_is_quantised_is_the_modules_without_children_that_have_parameters():
    own = nn.Module()
    own.scale, own.inner = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)
    model = nn.Sequential(own, nn.ReLU(), nn.Linear(2, 2))
    assert [name for name, _ in Quantiser(model, print).modules()] == ["0.inner", "2"]


def test_a_quantiser_replaces_a_module_wherever_it_is_and_can_undo_it():
    shared, head, table = nn.Linear(2, 2), nn.Linear(2, 3, bias=False), nn.Embedding(3, 2)
    head.weight = table.weight
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared, "head": head, "table": table})
    names = []

    def quantize(module):
        names.append([name for name, _ in module.named_modules()])
        for parent in list(module.modules()):
            for key, child in parent._modules.items():
                if isinstance(child, nn.Linear):
                    parent._modules[key] = Int8(child)

    def parts():
        return {
            name: (inner, dict(inner._modules), dict(inner._parameters))
            for name, inner in model.named_modules(remove_duplicate=False)
        }

    before = parts()
    quantiser = Quantiser(model, quantize)
    for name, inner in quantiser.modules():
        quantiser.quantise(name, inner)
    assert names == [["", "a", "a.0"], ["", "head"], ["", "table"]]
    assert isinstance(model["b"], Int8) and model["a"][0] is model["b"]
    assert shared.weight.numel() == shared.bias.numel() == 0
    assert isinstance(model["head"], Int8) and table.weight.numel() == 6  # tied: still held
    quantiser.undo()
    assert parts() == before
    assert model["a"][0] is model["b"] is shared and model["head"] is head


@pytest.mark.parametrize(("batch_bytes", "trims"), [(1, 4), (96, 2), (97, 1), (1 << 20, 0)])
def test_the_heap_is_trimmed_once_enough_was_read(tmp_path, monkeypatch, batch_bytes, trims):
    path, calls = tmp_path / "x.safetensors", []
    resident = nn.Sequential(*(nn.Linear(3, 4, bias=False) for _ in range(4)))  # 48 bytes each
    save_file(resident.state_dict(), path)
    with oracle_offload.empty_weights():
        managed = nn.Sequential(*(nn.Linear(3, 4, bias=False) for _ in range(4)))
    monkeypatch.setattr(loading, "_BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(loading, "trim_heap", lambda: calls.append(1))
    with loading.Loading(managed, path, lambda module: None):
        assert len(calls) == trims
        assert_same(dict(managed.state_dict()), dict(resident.state_dict()))


def test_a_model_that_is_one_module_is_quantised_in_place():
    model = nn.Linear(2, 2)
    weight = model.weight

    def quantize(module):
        assert module is model
        module.__class__ = nn.Identity
        del module.weight

    quantiser = Quantiser(model, quantize)
    ((name, inner),) = quantiser.modules()
    quantiser.quantise(name, inner)
    assert name == "" and weight.numel() == 0 and model.bias.numel() == 2
    quantiser.undo()
    assert type(model) is nn.Linear and model.weight is weight


class Stop(BaseException):
    pass


@pytest.mark.parametrize("way", [torchao_int8, quanto_int8], ids=lambda way: way.__name__)
@pytest.mark.parametrize("when", ["first", "later", "after"])
def test_an_end_in_the_middle_leaves_the_model_as_it_was(tmp_path, monkeypatch, way, when):
    resident = saved(tmp_path)
    managed = without_values()
    before = [(name, type(inner), dict(vars(inner))) for name, inner in managed.named_modules()]
    parameters = dict(managed.named_parameters())
    calls = []

    def quantize(module):
        calls.append(module)
        if len(calls) == {"first": 1, "later": 9}.get(when):
            raise Stop
        way(module)

    with monkeypatch.context() as patch:
        if when == "after":

            def stop(*arguments, **options):
                raise Stop

            patch.setattr(masters.Pieces, "add", stop)
        with pytest.raises(Stop):
            oracle_offload.attach(managed, "cpu", weights=tmp_path, quantize=quantize)
    assert not open_states() and simulator.live().registrations == 0
    now = [(name, type(inner), dict(vars(inner))) for name, inner in managed.named_modules()]
    assert [row[:2] for row in now] == [row[:2] for row in before]
    assert all(one[2].keys() == other[2].keys() for one, other in zip(now, before, strict=True))
    assert all(p is parameters[name] and p.is_meta for name, p in managed.named_parameters())
    way(resident)
    manager = oracle_offload.attach(managed, "cpu", weights=tmp_path, quantize=way)
    assert_models_agree(managed, resident, step, steps=1)
    manager.detach()


def test_a_layer_that_is_the_model(tmp_path):
    torch.manual_seed(0)
    resident = nn.Linear(128, 128, dtype=torch.bfloat16).requires_grad_(False)
    save_file(resident.state_dict(), tmp_path / "one.safetensors")
    with oracle_offload.empty_weights():
        managed = nn.Linear(128, 128, dtype=torch.bfloat16).requires_grad_(False)
    torchao_int8(resident)
    manager = oracle_offload.attach(managed, "cpu", weights=tmp_path, quantize=torchao_int8)
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    assert_same(managed(x), copy.deepcopy(resident)(x))
    manager.detach()


def test_there_is_nothing_to_quantise_without_files():
    with pytest.raises(ValueError, match="quantize= is for weights that are read"):
        oracle_offload.attach(nn.Linear(128, 128), "cpu", quantize=torchao_int8)


@pytest.mark.parametrize(
    ("meta", "only"),
    [
        ({}, False),  # a kind that says nothing of its input may compute anything
        ({"block_size": 32}, False),
        ({"act_quant_kwargs": None}, True),
        ({"act_quant_kwargs": {"bits": 8}}, False),
        ({"activation_quantization": False}, True),
        ({"activation_quantization": True}, False),
        ({"act_quant_kwargs": None, "activation_quantization": True}, False),
    ],
)
def test_a_weight_alone_is_quantised_where_torchao_says_so(meta, only):
    weight = SimpleNamespace(__tensor_flatten__=lambda: (["data"], meta))
    assert _is_weight_only(weight) == only
    assert _is_weight_only(type("AffineQuantizedTensor", (), {})())
