"""Hooks of other libraries that move weights: attach names them, and the call that removes them."""

from __future__ import annotations

import re

import models
import pytest
import sides
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import HookRegistry, apply_group_offloading
from equality import assert_models_agree, assert_same, attached, resident_pair

import oracle_offload
from oracle_offload import OffloadError


def offloaded(model):
    cpu_offload(model, "cpu")
    return model


def dispatched(model):
    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


@pytest.mark.parametrize("put", [offloaded, dispatched])
def test_accelerate_hooks_are_named_with_the_call_that_removes_them(put):
    torch.manual_seed(0)
    managed, resident = resident_pair(models.llama().train())
    put(managed)
    with pytest.raises(OffloadError) as refused:
        oracle_offload.attach(managed, sides.DEVICE)
    message = str(refused.value)
    assert "accelerate's AlignDevicesHook" in message
    assert "remove_hook_from_module(model, recurse=True)" in message
    remove_hook_from_module(managed, recurse=True)
    with attached(managed) as manager:
        assert len(manager.layers) == 23, manager.resident
        assert_models_agree(managed, resident, models.language_step)
    assert_models_are_equal_resident(managed, resident)


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_group_offloading_is_named_with_the_call_that_removes_it(kind):
    torch.manual_seed(0)
    managed, resident = resident_pair(models.flux().train())
    where = torch.device("cpu")
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    apply_group_offloading(
        managed, onload_device=where, offload_device=where, offload_type=kind, **blocks
    )
    with pytest.raises(OffloadError, match="diffusers' group_offloading") as refused:
        oracle_offload.attach(managed, sides.DEVICE)
    calls = re.findall(r"diffusers\.hooks\.(HookRegistry\S+\))", str(refused.value))
    assert calls
    for call in calls:
        eval(call, {"HookRegistry": HookRegistry, "model": managed})
    with attached(managed) as manager:
        assert len(manager.layers) > 50, manager.resident
        assert_models_agree(managed, resident, models.flux_step)


def test_all_offenders_are_named_at_once():
    model = torch.nn.ModuleList([models.llama(), models.flux()])
    offloaded(model[0])
    where = torch.device("cpu")
    apply_group_offloading(
        model[1], onload_device=where, offload_device=where, offload_type="leaf_level"
    )
    with pytest.raises(OffloadError) as refused:
        oracle_offload.attach(model, sides.DEVICE)
    assert "accelerate's AlignDevicesHook on '0'" in str(refused.value)
    assert "diffusers' group_offloading on '1." in str(refused.value)


def test_a_hook_put_on_after_attach_calls_the_managed_layer():
    """What accelerate puts around a managed forward keeps it, also when it is taken off again."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Counting(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Counting.calls += 1
            return args, kwargs

    torch.manual_seed(0)
    managed, resident = resident_pair(models.llama().train())
    with attached(managed):
        layer = managed.model.layers[0].mlp.up_proj
        add_hook_to_module(layer, Counting())
        assert_models_agree(managed, resident, models.language_step)
        assert Counting.calls
        remove_hook_from_module(layer)
        assert_models_agree(managed, resident, models.language_step)
        add_hook_to_module(layer, Counting())
    remove_hook_from_module(layer)
    with attached(managed) as manager:
        assert len(manager.layers) == 23, "the hook left traces that keep the layer resident"
        assert_models_agree(managed, resident, models.language_step)
    assert_models_are_equal_resident(managed, resident)


def assert_models_are_equal_resident(one, other):
    torch.manual_seed(5)
    found = models.language_step(one.to(sides.DEVICE))
    torch.manual_seed(5)
    assert_same(found, models.language_step(other))
