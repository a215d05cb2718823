"""What a manager says of itself and of a model that is gone."""

from __future__ import annotations

import gc

import pytest
import torch
from equality import attached
from torch import nn

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.sizes import format_size


def test_a_manager_says_what_it_holds():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    with attached(model, "cpu") as manager:
        said = repr(manager)
        arena = format_size(manager.attachment.arena.capacity_bytes)
        bytes_managed = format_size(manager.attachment.managed_bytes)
    assert said == (
        f"MemoryManager(Sequential on cpu: 2 layers, {bytes_managed} managed, arena {arena})"
    )


def test_detach_of_the_class_needs_a_model():
    with pytest.raises(TypeError, match="needs the attached module"):
        oracle_offload.MemoryManager.detach()


def test_a_manager_outlives_its_model_and_says_that_it_is_gone():
    model = nn.Sequential(nn.Linear(8, 8))
    model(torch.ones(1, 8))
    manager = oracle_offload.attach(model, "cpu")
    assert manager.module is model
    assert [layer.module() for layer in manager.layers] == [model[0]]
    assert manager.contains(model[0]) and not manager.contains(nn.Linear(8, 8))
    inner = model[0]
    del model
    gc.collect()
    with pytest.raises(OffloadError, match="has been deleted"):
        _ = manager.module
    assert not manager.contains(inner)
