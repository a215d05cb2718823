"""Quantised layers beyond a plain step: what trains, what is shared, cast, replaced or unknown."""

from __future__ import annotations

import gc
import logging
import weakref

import bitsandbytes
import pytest
import quantised
import sides
import torch
from equality import assert_models_agree, assert_same, attached
from models import compute_device
from quantised import FORMATS, model_of, on_device, quantised_layers, step_of, through
from torch import nn
from torchao import quantization as ao

from oracle_offload import StaleWeightsError
from oracle_offload.layers import quantised as quantised_module
from oracle_offload.layers.flatten import plain_tensors
from oracle_offload.layers.formats import format_of
from oracle_offload.layers.linear import LinearLayer
from oracle_offload.model.residents import move_residents
from oracle_offload.model.selection import select

X = torch.linspace(-2, 2, 2 * 5 * 64).sin().view(2, 5, 64).to(torch.bfloat16)
step = step_of(X)
IN_QUANTO = [name for name in FORMATS if name.startswith("quanto")]


def pair(name):
    managed, resident = (model_of(name, torch.bfloat16) for _ in range(2))
    return managed, on_device(resident)


def infer(model):
    with torch.no_grad():
        return (through(model, X.to(compute_device(model))),)


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_is_managed_where_none_is_small(name, nothing_is_small):
    managed, resident = pair(name)
    with attached(managed) as manager:
        assert manager.resident == {}
        ours = {id(tensor) for layer in manager.layers for tensor in layer.tensors()}
        for module in managed.modules():
            holders = frozenset() if (kind := format_of(module)) is None else kind.holders
            for path, tensor in plain_tensors(module, holders)[0].items():
                assert id(tensor) in ours, f"{path} of {type(module).__name__}"
        assert_models_agree(managed, on_device(resident), step)


@pytest.mark.parametrize("name", FORMATS)
def test_a_bias_beside_a_quantised_weight_trains(name):
    managed, resident = pair(name)
    for model in (managed, resident):
        for key, parameter in model.named_parameters():
            if key.endswith("base.bias"):
                parameter.requires_grad_()
    with attached(managed) as manager:
        assert len(quantised_layers(manager)) == 6
        assert_models_agree(managed, on_device(resident), step)
        assert managed[0].up.base.bias.grad.device.type == "cpu"


@pytest.mark.parametrize("name", IN_QUANTO)
def test_a_weight_that_freeze_left_trainable_gets_the_residents_gradient(name):
    managed, resident = pair(name)
    for model in (managed, resident):
        for key, parameter in model.named_parameters():
            if key.endswith("base.weight"):
                parameter.requires_grad_()
    with attached(managed) as manager:
        assert len(quantised_layers(manager)) == 6
        assert_models_agree(managed, on_device(resident), step)
        assert managed[0].up.base.weight.grad is not None


@pytest.mark.parametrize("name", FORMATS)
def test_evaluation_and_sampling(name):
    managed, resident = (model.eval() for model in pair(name))
    with attached(managed) as manager:
        assert len(quantised_layers(manager)) == 6
        if (
            "fp4" not in name and "nf4" not in name
        ):  # which the resident layer packs when it samples
            assert_models_agree(managed, on_device(resident), step)
        assert_models_agree(managed, on_device(resident), infer)


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_is_whole_again_after_detach(name):
    managed, resident = pair(name)
    with attached(managed):
        assert_same(step(managed), step(resident))
        assert managed.state_dict().keys() == resident.state_dict().keys()
        assert type(managed[0].up.base.weight) is type(resident[0].up.base.weight)
    assert type(managed[0].up.base) is type(resident[0].up.base)
    assert_same(step(on_device(managed)), step(resident))


def kept_of(model):
    """Return where the tensors are that a model's quantised layers are made of, and their bytes."""
    found = []
    for module in model.modules():
        if (kind := format_of(module)) is not None:
            found += plain_tensors(module, kind.holders)[0].values()
    return {tensor.device.type for tensor in found}, sum(tensor.nbytes for tensor in found)


@pytest.mark.parametrize("name", FORMATS)
def test_what_came_from_a_device_is_whole_there_after_detach(name):
    managed, resident = (on_device(model) for model in pair(name))
    expected, _ = step(resident), step(managed)  # the first call casts a bias
    whole = kept_of(managed)
    assert whole[0] == {torch.device(sides.DEVICE).type} and whole[1]
    with attached(managed) as manager:
        assert len(quantised_layers(manager)) == 6
        assert_same(step(managed), expected)
        assert kept_of(managed) == ({"cpu"}, whole[1])
    assert kept_of(managed) == whole
    assert_same(step(managed), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_for_which_the_host_has_no_room_computes_on_the_device(name):
    managed, resident = pair(name)
    options = {"offload_percent": 0.5, "ram_budget": "offloaded"}
    with attached(managed, **options) as manager:
        assert 0 < len(quantised_layers(manager)) < 6
        assert_models_agree(managed, on_device(resident), step)


class Another(bitsandbytes.nn.Linear8bitLt):
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize(
    "kind", [bitsandbytes.nn.Embedding8bit, Another], ids="{0.__name__}".format
)
def test_what_is_beside_a_weight_of_bitsandbytes_leaves_the_masters_in_any_layer(kind):
    layer = kind(64, 64)
    assert format_of(layer) is None
    with attached(nn.Linear(64, 64), "cpu") as manager:
        (master, *_) = manager.layers[0].tensors()
        pieces, bits = manager.attachment.pieces, master.detach().view(torch.int8).view(-1)
        data, statistics = bits[: 64 * 64].view(64, 64), bits[-4 * 64 :].view(torch.float32)
        weight = bitsandbytes.nn.Int8Params(data, False, CB=data.view(64, 64), SCB=statistics)
        weight.turned = data.t()  # in the same memory, and not the same
        layer.weight = weight
        expected = [tensor.clone() for tensor in (data, statistics, data.t())]
        move_residents([layer], torch.device("cpu"), pieces)
        assert layer.weight is weight and weight.CB.data_ptr() == weight.data_ptr()
        found = [weight.data, weight.SCB, weight.turned]
        assert pieces.at(data.data_ptr()) is not None
        assert not any(pieces.at(tensor.data_ptr()) for tensor in found)
        assert_same(found, expected)


def test_a_held_weight_of_bitsandbytes_is_replaced_by_what_its_own_move_makes(monkeypatch):
    """To the meta device: torch re-points no tensor of the host there, nor swaps what is held."""
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    layers = nn.ModuleList(bitsandbytes.nn.Embedding8bit(4, 4) for _ in range(2))
    data = torch.ones(4, 4, dtype=torch.int8)
    weight = bitsandbytes.nn.Int8Params(data, False, CB=data, SCB=torch.ones(4))
    layers[0].weight = layers[1].weight = weight
    held = weakref.ref(weight)
    move_residents(layers.modules(), torch.device("meta"))
    assert held() is weight and not weight.is_meta
    now = layers[0].weight
    assert layers[1].weight is now and type(now) is bitsandbytes.nn.Int8Params
    assert now.is_meta and now.SCB.is_meta and not now.requires_grad


@pytest.mark.parametrize("name", FORMATS)
def test_a_cast_of_the_model_does_what_it_does_to_the_resident(name):
    outcomes = []
    for model in reversed(pair(name)):
        with attached(model) if outcomes else torch.enable_grad():
            try:
                model.to(torch.float32)
                given = X.to(compute_device(model), torch.float32).requires_grad_()
                y = through(model, given)
                y.square().mean().backward()
                outcomes.append((y.detach(), given.grad))
            except (RuntimeError, ValueError) as error:
                outcomes.append((type(error), str(error)))
    (first, second), (found, other) = outcomes
    if isinstance(first, type):
        assert (first, second) == (found, other)
    else:
        assert_same((found, other), (first, second))


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_that_is_ignored_keeps_what_the_others_are_made_of(name):
    managed, resident = pair(name)
    with attached(managed, ignore_modules=["0.up.base"]) as manager:
        assert len(quantised_layers(manager)) == 5
        assert_models_agree(managed, on_device(resident), step)


# Resident, bitsandbytes' int8 layers that share a weight compute nonsense after the first.
@pytest.mark.parametrize("name", [name for name in FORMATS if "bytes-int8" not in name])
def test_a_weight_of_two_layers_lies_on_the_host_once(name):
    managed, resident = pair(name)
    for model in (managed, resident):
        model[1].up.base.weight = model[0].up.base.weight
    with attached(managed) as manager:
        first, second = (
            layer for layer in quantised_layers(manager) if layer.name in ("0.up.base", "1.up.base")
        )
        weights = [path for path in first.names if path.startswith("weight")]
        assert weights
        assert all(first.masters.addresses[p] == second.masters.addresses[p] for p in weights)
        assert_models_agree(managed, on_device(resident), step)


def test_dynamic_activations_compute_forward_and_give_the_input_what_the_resident_gives(
    monkeypatch,
):
    config = ao.Int8DynamicActivationInt8WeightConfig()
    monkeypatch.setitem(FORMATS, "dynamic", (8, *quantised.torchao(config)))
    managed, resident = pair("dynamic")
    with attached(managed) as manager:
        assert len(quantised_layers(manager)) == 6
        assert_models_agree(managed, on_device(resident), infer)
        assert_models_agree(managed, on_device(resident), step)  # what flows past the layers


class Foreign(torch.Tensor):
    """As a library's that is not known here."""


class Integers(nn.Module):
    def __init__(self):
        super().__init__()
        values = torch.arange(64 * 64).view(64, 64) % 251 - 125
        self.weight = nn.Parameter(values.to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ self.weight.to(x.dtype).t()


def test_a_class_that_is_not_known_stays_resident_and_is_named(caplog):
    model = model_of("torchao-int8", torch.bfloat16)
    foreign = nn.Linear(64, 64, bias=False)
    foreign.weight = nn.Parameter(torch.zeros(64, 64).as_subclass(Foreign), requires_grad=False)
    model.append(foreign)
    with caplog.at_level(logging.WARNING, "oracle_offload"), attached(model) as manager:
        assert len(quantised_layers(manager)) == 6
        assert "3.weight" in manager.resident
    (said,) = [text for text in caplog.messages if "no known format" in text]
    assert "test_quantised_life.Foreign in torch.nn.modules.linear.Linear, 16.00 KiB" in said


def test_plain_integers_are_lent_to_the_forward_that_knows_them(caplog, nothing_is_small):
    managed, resident = (nn.ModuleList([Integers(), Integers()]) for _ in range(2))
    with caplog.at_level(logging.WARNING, "oracle_offload"), attached(managed) as manager:
        assert manager.resident == {}
        assert_models_agree(managed, on_device(resident), step)
        assert managed.to(torch.float32)[0].weight.dtype is torch.int8
    assert not [text for text in caplog.messages if "no known format" in text]


def test_known_formats_are_not_named(caplog):
    with caplog.at_level(logging.WARNING, "oracle_offload"):
        for name in FORMATS:
            with attached(model_of(name, torch.bfloat16)):
                pass
    assert not [text for text in caplog.messages if "no known format" in text]


def with_gaps(layer):
    layer.weight.qdata = torch.cat([layer.weight.qdata] * 2, -1)[:, ::2]
    return f"'weight.qdata' has gaps or overlaps in memory (strides {layer.weight.qdata.stride()})"


def sparse(layer):
    layer.weight.scale = layer.weight.scale.to_sparse()
    return "'weight.scale' is torch.sparse_coo"


@pytest.mark.parametrize("change", [with_gaps, sparse])
def test_what_keeps_a_quantised_layer_on_the_device(change):
    model = model_of("torchao-int8", torch.bfloat16, depth=1)
    reason = change(model[0].up.base)
    chosen = select(model)
    assert chosen.resident == {"0.up.base": reason, **chosen.resident}
    assert "0.down.base" not in chosen.resident


class Other(nn.Linear):
    pass


def replaced_class(layer):
    layer.__class__ = Other
    return "its class was replaced after attach, by Other"


def without_weight(layer):
    layer._parameters["weight"] = plain_layer().weight
    return "its quantised weights were replaced after attach by others"


@pytest.mark.parametrize("change", [replaced_class, without_weight])
def test_a_quantised_layer_says_why_it_was_lost(change):
    model = model_of("torchao-int8", torch.bfloat16, depth=1)
    with attached(model) as manager:
        layer = {layer.name: layer for layer in manager.layers}["0.up.base"]
        assert layer.why_lost() == "" and layer.has_plain_masters()
        reason = change(layer.module())
        assert layer.why_lost() == reason
        assert layer.has_plain_masters() is (change is replaced_class)
        del model[0].up.base
        gc.collect()
        assert layer.why_lost() == "it was deleted" and not layer.has_plain_masters()


def test_a_quantised_layer_without_its_bias_is_another():
    model = model_of("torchao-int8", torch.bfloat16, depth=1)
    with attached(model) as manager:
        layer = {layer.name: layer for layer in manager.layers}["0.up.base"]
        assert "bias" in layer.names and layer.has_plain_masters()
        layer.module().bias = None
        assert not layer.has_plain_masters()


def plain_layer():
    plain = nn.Linear(64, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.copy_(torch.eye(128, 64))
        plain.bias.zero_()
    return plain.requires_grad_(False)


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_that_is_replaced_by_a_plain_one_is_managed_as_such(name):
    managed, resident = pair(name)
    with attached(managed) as manager:
        assert_same(step(managed), step(resident))
        for model in (managed, resident):
            model[1].up.base = plain_layer().to(sides.DEVICE)
        gc.collect()  # bitsandbytes' weights know their module
        assert_models_agree(managed, on_device(resident), step)
        assert_one_is_plain(manager)


def assert_one_is_plain(manager):
    assert len(quantised_layers(manager)) == 5
    (plain,) = (layer for layer in manager.layers if layer.name == "1.up.base")
    assert type(plain) is LinearLayer and "1.up.base.weight" not in manager.resident


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("torchao")])
def test_a_layer_whose_weight_is_replaced_by_a_plain_one_is_managed_as_such(name):
    managed, resident = pair(name)
    with attached(managed) as manager:
        assert_same(step(managed), step(resident))
        for model in (managed, resident):
            model[1].up.base.weight = plain_layer().to(sides.DEVICE).weight
        assert_models_agree(managed, on_device(resident), step)
        assert_one_is_plain(manager)


# Those of bitsandbytes are brought by its own code.
@pytest.mark.parametrize("name", [name for name in FORMATS if "bitsandbytes" not in name])
def test_a_layer_computes_with_whatever_stands_there_now(name, monkeypatch):
    managed, resident = pair(name)
    base, used = managed[0].up.base, []
    kind = type(base)
    forward = kind.forward

    def look(self, x):
        used.extend(plain_tensors(self, format_of(self).holders)[0].values())
        return forward(self, x)

    with attached(managed) as manager, torch.no_grad():
        layer = {layer.name: layer for layer in manager.layers}["0.up.base"]
        with monkeypatch.context() as patched:
            patched.setattr(kind, "forward", look)
            y = layer.foreign(X.to(sides.DEVICE))
        assert_same(y, resident[0].up.base(X.to(sides.DEVICE)))
        pieces = manager.attachment.pieces
        assert used and not any(pieces.at(tensor.data_ptr()) for tensor in used), "on the device"
        found = plain_tensors(base, format_of(base).holders)[0].values()
        nbytes = sum(tensor.nbytes for tensor in found)
        assert manager.attachment.traffic.computed_bytes == {"0.up.base": nbytes}
        manager.attachment.let_go(layer, "planted")
        base.to(sides.DEVICE)
        assert_same(layer.foreign(X.to(sides.DEVICE)), resident[0].up.base(X.to(sides.DEVICE)))
        assert manager.attachment.traffic.computed_bytes == {"0.up.base": nbytes}, "it is there"


@pytest.mark.parametrize("written", ["weight", "bias"])
def test_a_write_before_backward_is_refused_of_what_backward_reads(written):
    managed, _ = pair("torchao-int8")
    with attached(managed) as manager:
        layer = {layer.name: layer for layer in manager.layers}["1.up.base"]
        y = through(managed, X.to(sides.DEVICE).requires_grad_()).float().sum()
        for path, tensor in zip(layer.names, layer.tensors(), strict=True):
            if path.startswith(written):
                tensor.mul_(1)
        if written == "bias":
            y.backward()
        else:
            with pytest.raises(StaleWeightsError, match=r"1\.up\.base"):
                y.backward()


def test_a_clock_has_the_version_of_a_tensor_and_none_of_its_memory():
    tensor = torch.ones(2, dtype=torch.float16)
    clock = quantised_module._clock_of(tensor)
    tensor.add_(1)
    assert clock._version == tensor._version == 1
    with torch.inference_mode():
        other = quantised_module._clock_of(torch.ones(2, dtype=torch.float16))
    for made in (clock, other):
        assert made.numel() == made.untyped_storage().nbytes() == 0
        assert made.dtype is torch.float16 and not made.is_inference()
