"""Optimizers by name: the library's own, on a managed model; and the fallback, with its reason."""

from __future__ import annotations

import builtins
import copy
import importlib
import logging
import sys
from types import SimpleNamespace

import pytest
import sides
import torch
from equality import assert_same, attached, gradients, resident_pair
from torch import nn

from oracle_offload.train.recipes import OPTIMIZERS, optimizers
from oracle_offload.train.recipes.checkpointing import set_checkpointing
from oracle_offload.train.recipes.optimizers import make_optimizer, state_bytes


def plain(name, parameters):
    """The optimizer as its library documents it."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    if name == "adafactor":
        return torch.optim.Adafactor(parameters, lr=1e-2, weight_decay=0.1)
    bitsandbytes = importlib.import_module("bitsandbytes")
    kinds = {"adamw8bit": "AdamW8bit", "paged-adamw8bit": "PagedAdamW8bit"}
    kind = getattr(bitsandbytes.optim, kinds.get(name, "PagedAdamW"))
    return kind(parameters, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_by_name_is_the_librarys_own(name, caplog):
    """Where this machine cannot run it, AdamW, and it is said.

    A managed model is stepped on the host, which may round otherwise than the device: so is a
    copy of the resident model, by the gradients that the resident model has on the device.
    """
    torch.manual_seed(0)
    managed, host = resident_pair(nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)]))
    resident, data = copy.deepcopy(host).to(sides.DEVICE), torch.ones(2, 128, device=sides.DEVICE)
    with attached(managed) as manager, caplog.at_level(logging.WARNING, "oracle_offload"):
        made = make_optimizer(name, managed.parameters(), 1e-2, 0.1)
        assert (made.name == name) is (made.why == "")
        if made.why:
            assert made.name == "adamw" and name in made.why and made.why in caplog.text
        expected = plain(made.name, host.parameters())
        assert type(made.optimizer) is type(expected)
        for _ in range(3):
            resident.load_state_dict(host.state_dict())
            for model in (managed, resident):
                model(data).square().mean().backward()
            assert_same(gradients(managed), gradients(resident), "gradient")
            for stepped, parameter in zip(host.parameters(), resident.parameters(), strict=True):
                stepped.grad = parameter.grad.cpu()
            for optimizer in (made.optimizer, expected):
                optimizer.step()
                optimizer.zero_grad()
            resident.zero_grad()
            assert_same(managed.state_dict(), host.state_dict(), "weights")
        assert len(manager.layers) == 4
        assert manager.state.engine.stats()["h2d_bytes"] > 0
    weights = sum(parameter.numel() for parameter in managed.parameters())
    if made.name == "adamw":
        assert 8 * weights <= state_bytes(made.optimizer) < 8.1 * weights
    if made.name in ("adafactor", "adamw8bit", "paged-adamw8bit"):
        assert 0 < state_bytes(made.optimizer) < 3 * weights


def test_a_library_that_is_missing_is_announced(monkeypatch, caplog):
    import_module = builtins.__import__

    def missing(name, *rest):
        if name.startswith("bitsandbytes"):
            raise ModuleNotFoundError("No module named 'bitsandbytes'\nand more")
        return import_module(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    with caplog.at_level(logging.WARNING, "oracle_offload"):
        made = make_optimizer("adamw8bit", [nn.Parameter(torch.zeros(2))], 1e-3)
    assert made.why == (
        "adamw8bit cannot be had (ModuleNotFoundError: No module named 'bitsandbytes'): AdamW "
        "with float32 states is taken"
    )
    assert isinstance(made.optimizer, torch.optim.AdamW)
    assert [record.message for record in caplog.records] == [made.why]


def test_kernels_that_fail_only_at_a_step_are_announced(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(optimizers, "_try", fail)
    made = make_optimizer("adamw8bit", [nn.Parameter(torch.zeros(2))], 1e-3)
    assert "RuntimeError: no kernel image" in made.why and made.name == "adamw"


def test_a_build_is_tried_with_a_step_of_its_own(monkeypatch):
    """With a gradient, which is what its kernels are for; the parameters that train see none."""

    class Built(torch.optim.AdamW):
        def step(self, closure=None):
            stepped.append([p for group in self.param_groups for p in group["params"]])
            if any(p.grad is not None for p in stepped[-1]):
                raise RuntimeError("no kernel image")

    stepped = []
    module = SimpleNamespace(AdamW8bit=Built)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", module)
    parameter = nn.Parameter(torch.zeros(2))
    made = make_optimizer("adamw8bit", [parameter], 1e-3)
    assert (made.name, type(made.optimizer)) == ("adamw", torch.optim.AdamW)
    assert "RuntimeError: no kernel image" in made.why
    assert len(stepped) == 1 and stepped[0][0] is not parameter
    module.AdamW8bit = torch.optim.AdamW
    assert make_optimizer("adamw8bit", [parameter], 1e-3).name == "adamw8bit"
    assert torch.equal(parameter, torch.zeros(2))


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="optimizer='adam': there are adamw, adamw8bit"):
        make_optimizer("adam", [], 1e-3)


def test_checkpointing_of_real_libraries_saves_and_changes_nothing():
    from diffusers import UNet2DModel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config).train()
    tokens = torch.randint(0, 64, (2, 12))
    unet = UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 32),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
    ).train()
    runs = {
        "llama": (model, lambda: model(input_ids=tokens, labels=tokens).loss),
        "unet": (unet, lambda: unet(torch.ones(1, 3, 8, 8), 3).sample.square().mean()),
    }
    for network, loss_of in runs.values():
        found = []
        for on in (False, True, False):
            assert set_checkpointing(network, on)
            assert network.is_gradient_checkpointing is on
            network.zero_grad()
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor, kept=kept: kept.append(tensor.nbytes) or tensor, lambda x: x
            ):
                loss = loss_of()
            loss.backward()
            gradients = [parameter.grad for parameter in network.parameters()]
            found.append((loss.detach(), gradients, sum(kept)))
        assert found[1][2] < found[0][2] / 2 and found[2][2] == found[0][2], "nothing is saved"
        assert_same(found[1][:2], found[0][:2])
