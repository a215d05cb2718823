"""Real models of transformers, diffusers and peft, in small: bits, witness, race detector."""

from __future__ import annotations

import copy

import models
import pytest
import torch
from equality import assert_models_agree, attached, resident_pair
from tiers import in_turn

import oracle_offload
from oracle_offload.layers.kinds import layer_type

BUILDS = {
    "llama": (models.llama, models.language_step),
    "llama-tied": (lambda: models.llama(tie_word_embeddings=True), models.language_step),
    "mixtral": (models.mixtral, models.language_step),
    "qwen2-moe": (models.qwen2_moe, models.language_step),
    "flux": (models.flux, models.flux_step),
    "unet": (models.unet, models.unet_step),
    "autoencoder": (models.autoencoder, models.autoencoder_step),
}


@in_turn("name,checkpointing", BUILDS, [False, True])
def test_full_training(device, name, checkpointing):
    build, step = BUILDS[name]
    torch.manual_seed(0)
    managed, resident = resident_pair(build().train())
    with attached(managed, device, offload_percent=0.9) as manager:
        if checkpointing:
            for model in (managed, resident):
                models.enable_checkpointing(model)
        assert len(manager.layers) > 5
        assert_models_agree(managed, resident, step, device=device)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", ["q_proj", "v_proj", "down_proj"]), ("flux", ["to_q", "to_v", "proj_out"])],
    ids=["llama", "flux"],
)
def test_lora_before_and_after_attach(device, name, targets, when):
    """Adapters stay resident and train alike, whether they came before attach or after it."""
    build, step = BUILDS[name]
    torch.manual_seed(0)
    managed, resident = resident_pair(build().train())
    models.lora(resident, targets)
    if when == "before":
        models.lora(managed, targets)
    manager = oracle_offload.attach(managed, device, offload_percent=0.8)
    if when == "after":
        models.lora(managed, targets)
    for model in (managed, resident):
        models.enable_checkpointing(model)
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for model in (managed, resident)
    ]
    resident.to(device)
    for _ in range(3):
        assert_models_agree(managed, resident, step, steps=1, device=device)
        for optimizer in optimizers:
            optimizer.step()
    adapters = [p for n, p in managed.named_parameters() if "lora_" in n]
    assert adapters
    assert all(p.device.type == torch.device(device).type for p in adapters)
    assert not any("lora_" in layer.name for layer in manager.layers)
    manager.detach()


def test_two_models_share_one_engine(device):
    torch.manual_seed(0)
    transformer, encoder = models.flux().requires_grad_(False), models.llama().requires_grad_(False)
    pairs = [resident_pair(transformer), resident_pair(encoder)]
    managers = [oracle_offload.attach(managed, device) for managed, _ in pairs]
    assert managers[0].state is managers[1].state

    def encode(model):
        with torch.no_grad():
            return [model(torch.randint(0, 100, (1, 7)).to(models.compute_device(model))).logits]

    for _ in range(2):
        assert_models_agree(*pairs[0], models.flux_step, steps=1, device=device)
        assert_models_agree(*pairs[1], encode, steps=1, device=device)
    managers[1].detach()
    assert_models_agree(*pairs[0], models.flux_step, device=device)
    managers[0].detach()


def test_nothing_of_the_real_models_is_left_out(device):
    """A rule that is too careful would leave layers resident in silence: these have a reason."""
    for build, _ in BUILDS.values():
        model = build()
        with attached(model, device) as manager:
            layers = {
                f"{name}.{key}"
                for name, module in model.named_modules()
                if layer_type(module) is not None
                for key in module._parameters
            }
            assert manager.layers
            left = {name: why for name, why in manager.resident.items() if name in layers}
            assert all("tied" in reason for reason in left.values()), left


def test_a_copy_computes_with_its_own_weights(device):
    model = models.flux()
    with attached(model, device):
        clone = copy.deepcopy(model)
        for parameter in clone.parameters():
            parameter.data.zero_()
        assert clone.__dict__.get("_memory_manager") is None
        if device == "cpu":
            assert models.flux_step(clone)[0].abs().max() == 0
        assert models.flux_step(model)[0].abs().max() > 0
