"""After any write to the masters, with no call to us, the next forward is the resident's."""

from __future__ import annotations

import copy

import models
import pytest
import torch
from equality import assert_models_agree, assert_same, attached, gradients
from torch import nn

import oracle_offload
from oracle_offload.witness import Witness


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8)
    )


def load_state(model):
    model.load_state_dict({k: v * 1.5 + 0.25 for k, v in copy.deepcopy(model.state_dict()).items()})


def load_assign(model):
    state = {k: v * 1.5 for k, v in copy.deepcopy(model.state_dict()).items()}
    model.load_state_dict(state, assign=True)


def data_copy(model):
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.5 + 1)


def data_add(model):
    for parameter in model.parameters():
        parameter.data += 0.125


def data_replace(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 2


def swap(model):
    """An EMA swap: other tensors in, then the old ones back."""
    kept = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 3
    model._kept = kept


def swap_back(model):
    for parameter, old in zip(model.parameters(), model.__dict__.pop("_kept"), strict=True):
        parameter.data = old


def numpy_write(model):
    for parameter in model.parameters():
        array = parameter.detach().numpy()
        array *= 0.75


def in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def prune(model):
    """The same address and strides, fewer rows."""
    for parameter in model[-1].parameters():
        parameter.data = parameter.data[: len(parameter) // 2]


WRITES = [
    load_state,
    load_assign,
    data_copy,
    data_add,
    data_replace,
    swap,
    numpy_write,
    in_place,
    prune,
]


def step(model):
    x = torch.randn(5, 64).to(models.compute_device(model)).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y, x.grad]


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("percent", [0.0, 1.0], ids=["cached", "streamed"])
def test_the_next_forward_sees_a_write(device, write, trainable, percent):
    managed = build().requires_grad_(trainable)
    resident = copy.deepcopy(managed)
    with attached(managed, device, offload_percent=percent):
        assert_models_agree(managed, resident, step, device=device)
        for _ in range(2):
            apply_to_both(write, managed, resident, device)
            assert_models_agree(managed, resident, step, device=device)
            if write is swap:
                apply_to_both(swap_back, managed, resident, device)
                assert_models_agree(managed, resident, step, device=device)


def apply_to_both(write, managed, resident, device):
    resident.to("cpu")
    write(managed)
    write(resident)
    resident.to(device)


def bitsandbytes_adamw(parameters):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-2, min_8bit_size=16)


OPTIMIZERS = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "single": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "bitsandbytes": bitsandbytes_adamw,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("percent", [0.0, 1.0], ids=["cached", "streamed"])
def test_optimizers_train_alike(device, make, percent):
    """The optimizer steps on the host masters; the next forward uses what it wrote."""
    managed = build()
    resident = copy.deepcopy(managed)
    optimizer = make(list(managed.parameters()))
    other = make(list(resident.parameters()))
    with attached(managed, device, offload_percent=percent):
        for number in range(4):
            torch.manual_seed(number)
            expected = step(resident)
            torch.manual_seed(number)
            with Witness(declare=device == "cpu"):
                found = step(managed)
                assert_same(found, expected, "result")
                assert_same(gradients(managed), gradients(resident), "gradient")
                optimizer.step()
            if device == "cpu":
                other.step()
            else:  # a CUDA optimizer rounds differently from the host's, which is the managed one
                resident.load_state_dict(managed.state_dict())
            optimizer.zero_grad()
            other.zero_grad()
            assert_same(list(managed.parameters()), list(resident.parameters()), "weights")


@pytest.mark.parametrize("safe", [False, True], ids=["unsafe", "safe"])
def test_peft_merges_and_unmerges(safe):
    """peft writes through .data, which bumps no version."""
    torch.manual_seed(0)
    managed = models.lora(models.flux(), ["to_q", "to_v", "proj_out"])
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu", offload_percent=0.0):
        assert_models_agree(managed, resident, frozen_step)
        for _ in range(2):
            for model in (managed, resident):
                for module in adapters(model):
                    module.merge(safe_merge=safe)
            assert_models_agree(managed, resident, frozen_step)
            for model in (managed, resident):
                for module in adapters(model):
                    module.unmerge()
            assert_models_agree(managed, resident, frozen_step)


def test_diffusers_fuses_and_unfuses_lora():
    torch.manual_seed(0)
    managed = models.lora(models.flux(), ["to_q", "to_v"])
    managed._hf_peft_config_loaded = True
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu", offload_percent=0.0):
        assert_models_agree(managed, resident, frozen_step)
        for model in (managed, resident):
            model.fuse_lora(lora_scale=0.5)
        assert_models_agree(managed, resident, frozen_step)
        for model in (managed, resident):
            model.unfuse_lora()
        assert_models_agree(managed, resident, frozen_step)


def adapters(model):
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def frozen_step(model):
    return models.flux_step(model)


def test_the_old_memory_is_left_alone():
    """``p.data = t`` must not write into what somebody else may still hold."""
    model = build()
    with attached(model, "cpu"):
        parameter = model[0].weight
        held = parameter.data
        before = held.clone()
        parameter.data = torch.ones_like(held)
        step(model)
        assert torch.equal(held, before)
        assert torch.equal(parameter.data, torch.ones_like(held))


def test_refresh_makes_any_write_visible():
    """A write that the sampled fingerprint cannot see: one element, through numpy."""
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(512, 512)).requires_grad_(False)
    resident = copy.deepcopy(managed)

    def forward(model):
        with torch.no_grad():
            return [model(torch.randn(4, 512))]

    with attached(managed, "cpu", offload_percent=0.0) as manager:
        assert_models_agree(managed, resident, forward)
        for model in (managed, resident):
            model[0].weight.detach().numpy()[7, 13] += 8.0
        manager.refresh()
        assert_models_agree(managed, resident, forward)


def test_verify_hashes_everything(monkeypatch):
    monkeypatch.setenv("ORACLE_OFFLOAD_VERIFY", "1")
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(512, 512)).requires_grad_(False)
    resident = copy.deepcopy(managed)

    def forward(model):
        with torch.no_grad():
            return [model(torch.randn(4, 512))]

    with attached(managed, "cpu", offload_percent=0.0):
        for row in range(3):
            assert_models_agree(managed, resident, forward)
            for model in (managed, resident):
                model[0].weight.detach().numpy()[row, 13] += 8.0


def test_an_in_place_change_before_backward_is_an_error(device):
    """In autograd's words: the input gradient needs the weight that forward used."""
    for write in (in_place, data_replace):
        model = build().requires_grad_(False)
        with attached(model, device):
            x = torch.randn(3, 64, device=device, requires_grad=True)
            loss = model(x).sum()
            write(model)
            with pytest.raises(oracle_offload.StaleWeightsError, match="inplace operation"):
                loss.backward()


@pytest.mark.parametrize("wants", ["input", "weight", "bias"])
def test_conv2d_refuses_whatever_gradient_after_an_in_place_change(wants):
    """As torch does, which keeps the weight for each: only Linear's own need it not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3)).requires_grad_(False)
    x = torch.randn(1, 2, 5, 5)
    {"input": x, "weight": model[0].weight, "bias": model[0].bias}[wants].requires_grad_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        backward_after(in_place, copy.deepcopy(model), x)
    with attached(model, "cpu"):
        for write in (in_place, data_replace):
            with pytest.raises(oracle_offload.StaleWeightsError, match="inplace operation"):
                backward_after(write, model, x)


def backward_after(write, model, x):
    loss = model(x).sum()
    write(model)
    loss.backward()
