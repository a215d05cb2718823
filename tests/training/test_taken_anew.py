"""Layers that are replaced after attach by what can be managed: they stream what they are now."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref

import pytest
import torch
from equality import (
    assert_models_agree,
    assert_same,
    attached,
    count_acquires,
    h2d_bytes,
    resident_pair,
)
from ostris import OstrisLinear, to_ostris
from test_reading_adapters import LoRA
from torch import nn
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload.layers.linear import LinearLayer
from oracle_offload.layers.managed import HANDLE
from oracle_offload.layers.quantised import QuantisedLayer
from oracle_offload.model import admission, masters
from oracle_offload.model.structure import _calls_begun
from oracle_offload.model.witness import Witness

WIDTH = 256  # each layer is a unit of its own


def chain(layers=4, bias=True):
    torch.manual_seed(0)
    made = [nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(layers)]
    return nn.Sequential(*made).requires_grad_(False)


def kinds(manager):
    return [type(layer) for layer in manager.layers]


def step_of(device, checkpointing=None, autocast=False):
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).sin().to(device)

    def step(model):
        given = x.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            if checkpointing is None:
                y = model(given)
            else:
                y = checkpoint(model, given, use_reentrant=checkpointing)
        y.float().square().mean().backward()
        with torch.no_grad():
            return y, given.grad, model(x)

    return step


def host_bytes(manager):
    return sum(buffer.nbytes for buffer in manager.attachment.buffers)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_layers_whose_class_is_replaced_stream_their_buffers(
    bias, checkpointing, autocast, device, monkeypatch
):
    monkeypatch.setattr(masters, "PIECE_BYTES", 1)  # a piece for each unit
    managed, resident = resident_pair(chain(bias=bias))
    step = step_of(device, checkpointing, autocast)
    with attached(managed, device) as manager:
        assert_models_agree(managed, resident, step, steps=1, device=device)
        plain = manager.attachment.weight_bytes
        for number in (0, 2, 3):
            for model in (managed, resident):
                to_ostris(model[number])
            assert HANDLE not in managed[number].__dict__
        assert host_bytes(manager) <= plain / 2, "before any forward, all but the last are gone"
        moved = h2d_bytes(device)
        assert_models_agree(managed, resident, step, device=device)
        assert kinds(manager) == [QuantisedLayer, LinearLayer, QuantisedLayer, QuantisedLayer]
        assert [layer.name for layer in manager.layers] == ["0", "1", "2", "3"]
        assert not manager.resident
        assert plain / 4 < host_bytes(manager) == manager.attachment.weight_bytes < plain / 2
        assert h2d_bytes(device) - moved >= manager.attachment.weight_bytes
        assert all(b.device.type == "cpu" for b in managed.buffers())
    assert [type(layer) for layer in managed] == [
        OstrisLinear, nn.Linear, OstrisLinear, OstrisLinear,
    ]  # fmt: skip


def test_a_layer_that_is_replaced_again_and_again():
    """By other buffers, by a plain module under its name; each time its memory goes."""
    managed, resident = resident_pair(chain())
    step = step_of("cpu")
    with attached(managed) as manager:
        expected = host_bytes(manager)
        for _ in range(3):
            for model in (managed, resident):
                to_ostris(model[1])
            assert_models_agree(managed, resident, step, steps=1)
            assert kinds(manager)[1] is QuantisedLayer
            for model in (managed, resident):
                torch.manual_seed(1)
                model[1] = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            assert_models_agree(managed, resident, step, steps=1)
            assert kinds(manager) == [LinearLayer] * 4
        gc.collect()
        manager.refresh()
        assert manager.attachment.weight_bytes == expected
        assert not manager.attachment.lost and not manager.attachment.reasons


def test_a_layer_that_is_called_first_of_all_is_taken_at_the_next_call(caplog):
    """Its forward was looked up before anybody could see that it is another."""
    managed, resident = resident_pair(chain())
    x = torch.randn(2, WIDTH)
    with attached(managed) as manager, torch.no_grad():
        for model in (managed, resident):
            to_ostris(model[1])
        assert_same(managed[1](x), resident[1](x))
        assert kinds(manager) == [LinearLayer] * 3
        assert_same(managed(x), resident(x))
        assert kinds(manager) == [LinearLayer, QuantisedLayer, LinearLayer, LinearLayer]
        before = count_acquires()
        assert_same(managed[1](x), resident[1](x))
        assert count_acquires() == before + 1
    assert "not managed any more" not in caplog.text


@pytest.mark.parametrize("where", ["waiting", "inside"])
def test_a_layer_that_another_thread_computes_in_is_taken_later(where):
    """Its forward, which was looked up already, would find host masters."""
    managed, resident = resident_pair(chain())
    x = torch.randn(2, WIDTH)
    entered, leave, found = threading.Event(), threading.Event(), []

    def compute():
        with torch.no_grad(), Witness():
            found.append(managed[1](x))
            entered.set()
            assert leave.wait(60)  # in no layer any more

    def pause(*_):
        if threading.current_thread() is other:
            entered.set()
            assert leave.wait(60)

    with attached(managed) as manager, torch.no_grad():
        structure = manager.structure
        other = threading.Thread(target=compute)
        for model in (managed, resident):
            to_ostris(model[1])
        if where == "inside":
            managed[1].register_forward_pre_hook(pause)
            other.start()
            assert entered.wait(60)
            assert_same(managed(x), resident(x))
        else:
            with structure._lock:
                other.start()
                while managed[1] not in _calls_begun():
                    time.sleep(1e-3)
                assert_same(managed(x), resident(x))
        assert kinds(manager) == [LinearLayer] * 3
        if where == "inside":  # one that has ended computes nowhere
            leave.set()
            other.join(60)
        assert entered.wait(60)
        assert_same(found, [resident[1](x)])
        assert_same(managed(x), resident(x))
        assert kinds(manager) == [LinearLayer, QuantisedLayer, LinearLayer, LinearLayer]
        leave.set()
        other.join(60)


def test_what_comes_later_leaves_the_rings_as_they_are():
    """The download ring is in use, and looking for room takes locked memory."""
    model = chain()
    with attached(model) as manager, torch.no_grad():
        manager.state.engine.reserve_rings(1 << 20)
        rings = manager.state.engine.stats()["ring_bytes"]
        to_ostris(model[1])
        model(torch.randn(2, WIDTH))
        assert QuantisedLayer in kinds(manager)
        assert manager.state.engine.stats()["ring_bytes"] == rings > 0


def test_a_layer_with_an_adapter_before_it():
    """The adapter calls what it has found: the forward of the class that the layer was of."""
    managed, resident = chain(), chain()
    lora, beside = (LoRA(model[1]).apply_to() for model in (managed, resident))
    found = lora.org_forward
    with attached(managed) as manager, torch.no_grad():
        x = torch.randn(2, WIDTH)
        assert_same(managed(x), resident(x))
        for model in (managed, resident):
            to_ostris(model[1])
        before = count_acquires()
        assert_same(managed(x), resident(x))
        assert count_acquires() >= before + 4
        assert QuantisedLayer in kinds(manager)
        lora.org_forward, beside.org_forward = (
            OstrisLinear.forward.__get__(model[1]) for model in (managed, resident)
        )
        assert_same(managed(x), resident(x))
        lora.org_forward = found
    assert lora.org_forward == found


def test_an_adapter_on_the_model_itself_does_not_keep_it_alive():
    model = nn.Linear(WIDTH, WIDTH)
    model.lora = [LoRA(model).apply_to()]
    gone = weakref.ref(model)
    manager = oracle_offload.attach(model, "cpu")
    assert len(manager.layers) == 1
    del model, manager
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), torch.OutOfMemoryError("no room"), TypeError("no room")]
)
@pytest.mark.parametrize("where", ["build_masters", "add_units"])
def test_without_memory_they_stay_on_the_device(error, where, monkeypatch, caplog):
    managed, resident = resident_pair(chain())
    step = step_of("cpu")

    def fail(*_):
        raise error

    with attached(managed) as manager:
        for model in (managed, resident):
            to_ostris(model[1])
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "oracle_offload"):
            patch.setattr(admission, where, fail)
            assert_models_agree(managed, resident, step, steps=1)
        assert kinds(manager) == [LinearLayer] * 3
        assert "OstrisLinear" in manager.resident["1.bias"]
        told = [text for text in caplog.messages if "stay on the device: no room" in text]
        assert len(told) == 1 and "1 layers" in told[0]
        assert len([text for text in caplog.messages if "not managed any more" in text]) == 1
        managed.register_buffer("other", torch.zeros(1))  # the structure changed: it is tried again
        assert_models_agree(managed, resident, step, steps=1)
        assert kinds(manager)[1] is QuantisedLayer and not manager.resident


def test_a_larger_layer_than_any_at_attach_finds_room():
    managed, resident = resident_pair(chain())
    for model in (managed, resident):
        for layer in model:
            to_ostris(layer)
    step = step_of("cpu")
    with attached(managed) as manager:
        arena = manager.attachment.arena.capacity_bytes
        for model in (managed, resident):
            torch.manual_seed(2)
            model[1] = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        assert_models_agree(managed, resident, step)
        assert kinds(manager)[1] is LinearLayer
        assert manager.attachment.arena.capacity_bytes > arena


@pytest.mark.parametrize("fits", [True, False])
def test_a_larger_layer_keeps_within_the_budget_that_was_asked_for(fits, caplog):
    """An arena with room for it does not grow, nor one that vram_budget bounds."""
    managed, resident = resident_pair(chain(layers=8))
    step = step_of("cpu")
    unit = (WIDTH + 1) * WIDTH * 4
    with (
        attached(managed, vram_budget=6 * unit if fits else 2 * unit + 4096) as manager,
        caplog.at_level(logging.WARNING),
    ):
        arena = manager.attachment.arena.capacity_bytes
        for model in (managed, resident):
            torch.manual_seed(2)
            model[1] = nn.Sequential()
            model[2] = wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            wide.requires_grad_(False).register_forward_pre_hook(lambda _, x: x[0].double())
            wide.register_forward_hook(lambda _, x, y: y.float())
        assert_models_agree(managed, resident, step)
        assert manager.attachment.arena.capacity_bytes == arena
        assert ("2" in [layer.name for layer in manager.layers]) == fits
    assert ("vram_budget allows" in caplog.text) == (not fits)


def test_what_was_ignored_or_is_an_adapter_is_not_taken():
    model = chain()
    with attached(model, ignore_modules=["1"]) as manager, torch.no_grad():
        to_ostris(model[0])
        to_ostris(model[1])
        model[2].extra = nn.Linear(8, 8)
        model(torch.randn(2, WIDTH))
        assert kinds(manager) == [QuantisedLayer, LinearLayer, LinearLayer]
        assert {"1.bias", "2.extra.weight"} <= manager.resident.keys()


def test_of_layers_that_were_replaced_those_are_counted_that_find_room_and_those_that_find_none(
    monkeypatch, caplog
):
    managed, add_units, asked = chain(), admission.add_units, []

    def add_one(*given):
        asked.append(given)
        if len(asked) > 1:
            raise MemoryError("no room")
        return add_units(*given)

    caplog.set_level(logging.INFO, "oracle_offload")
    with attached(managed) as manager:
        for number in (0, 1, 3):
            to_ostris(managed[number])
        with monkeypatch.context() as patch:
            patch.setattr(admission, "add_units", add_one)
            managed(torch.ones(1, WIDTH))
        assert [layer.name for layer in manager.layers] == ["0", "2"]
        (refused,) = [text for text in caplog.messages if "stay on the device: no room" in text]
        assert "2 layers that were replaced after attach" in refused
        assert "Sequential: 1 layers are managed again" in caplog.messages


def test_a_layer_that_was_let_go_as_it_is_is_managed_anew_at_the_next_call_of_a_part():
    """Though nothing was registered: it shares its weight, and so does what stays managed."""
    model = chain(2, bias=False)
    model[1].weight = model[0].weight
    with attached(model) as manager:
        manager.attachment.let_go(manager.layers[0], "a reason")
        assert [layer.name for layer in manager.layers] == ["1"]
        for _ in range(2):
            model[1](torch.ones(1, WIDTH))
        assert [layer.name for layer in manager.layers] == ["0", "1"]
        assert model[0].weight is model[1].weight and not manager.resident
