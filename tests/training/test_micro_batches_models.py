"""`accumulate` over small versions of real models: bits, and the bytes of one micro-batch."""

from __future__ import annotations

import models
import pytest
import torch
from equality import assert_models_agree, attached, resident_pair

from oracle_offload import accumulate
from oracle_offload.engine.engines import open_states

pytest.importorskip("greenlet")
MICRO_BATCHES = 4


def qwen_image():
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        patch_size=1,
        in_channels=16,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )


def qwen_image_step(model):
    device = models.compute_device(model)
    y = model(
        hidden_states=torch.randn(1, 16, 16).to(device),
        encoder_hidden_states=torch.randn(1, 7, 32).to(device),
        encoder_hidden_states_mask=torch.ones(1, 7, dtype=torch.long, device=device),
        timestep=torch.tensor([0.5], device=device),
        img_shapes=[[(1, 4, 4)]],
    ).sample
    y.float().square().mean().backward()
    return [y]


def llama():
    return models.llama(attention_dropout=0.1)


# With each: the modules that get adapters, and the most bytes, as a share of the plain loop's.
BUILDS = {
    "llama": (llama, models.language_step, ["q_proj", "v_proj", "down_proj"], 0.27),
    "flux": (models.flux, models.flux_step, ["to_q", "to_v", "proj_out"], 0.30),
    "qwen-image": (qwen_image, qwen_image_step, ["to_q", "to_v"], 0.30),
    "unet": (models.unet, models.unet_step, ["to_q", "to_v"], 0.30),
}


@pytest.mark.parametrize(
    ("name", "full", "autocast"),
    [
        *((name, False, False) for name in BUILDS),
        *((name, True, True) for name in ("llama", "unet")),
        *(
            pytest.param(name, True, True, marks=pytest.mark.slow)
            for name in ("flux", "qwen-image")
        ),
        *(pytest.param(name, False, True, marks=pytest.mark.slow) for name in BUILDS),
        *(pytest.param(name, True, False, marks=pytest.mark.slow) for name in BUILDS),
    ],
)
def test_a_real_model_has_the_bits_of_one_micro_batch_after_another(name, full, autocast):
    build, step, targets, most = BUILDS[name]
    torch.manual_seed(0)
    model = build().train()
    if not full:
        models.lora(model, targets)
    managed, resident = resident_pair(model)
    models.enable_checkpointing(managed)
    models.enable_checkpointing(resident)
    moved = {}

    def both(model, interleave=True):
        losses = []

        def one(_):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses.extend(y.detach() for y in step(model))

        interleave = interleave and "_memory_manager" in model.__dict__
        accumulate(one, range(MICRO_BATCHES), interleave=interleave)
        return []

    with attached(managed, "cpu", offload_percent=0.9):
        assert_models_agree(managed, resident, both, steps=1)
        if full or autocast:
            return
        for interleave in (False, True):
            for _ in range(3):
                managed.zero_grad()
                before = sum(state.engine.stats()["h2d_bytes"] for state in open_states())
                both(managed, interleave)
                after = sum(state.engine.stats()["h2d_bytes"] for state in open_states())
                moved[interleave] = after - before
        assert moved[True] <= most * moved[False]
