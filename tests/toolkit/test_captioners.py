"""The captioners' models, in small, as their loaders make them: tokens and a step of training."""

from __future__ import annotations

import pytest
import torch
from equality import gradients
from runs import compare
from torch import nn

from oracle_offload.model import selection

TEXT = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "patch_size": 16,
}  # fmt: skip
AUDIO = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "num_mel_bins": 16, "n_window": 50, "output_dim": 64, "max_source_positions": 1500,
}  # fmt: skip
IMAGE, VIDEO, START, END = 290, 291, 292, 293
TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START,
    "vision_end_token_id": END,
}  # fmt: skip
INTERLEAVED = {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"}


def seeing():
    """Return what a prompt with one picture of two by two patches is to a model."""
    ids = torch.tensor([[5, 6, START, IMAGE, END, 7, 8]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.randn(4, 3 * 2 * 16 * 16),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
    }


def qwen3_vl():
    """Qwen3-VL, with the patch of the captioner that no layer of which is called for."""
    from extensions_built_in.captioner.Qwen3VLCaptioner import patch_qwen_vl_patch_embed
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    text = TEXT | {"rope_parameters": INTERLEAVED | {"rope_theta": 10000.0}}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **TOKENS)
    model = Qwen3VLForConditionalGeneration(config)
    assert patch_qwen_vl_patch_embed(model) == 1
    return model, seeing()


def qwen3_omni():
    """The thinker of Qwen3-Omni; its expert banks stream themselves in `test_models.py`."""
    from extensions_built_in.captioner import Qwen3OmniCaptioner as captioner
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeThinkerConfig,
    )

    vision = VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    text = TEXT | {
        "rope_parameters": INTERLEAVED | {"rope_theta": 10000.0}, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 32,
    }  # fmt: skip
    config = Qwen3OmniMoeThinkerConfig(
        audio_config=AUDIO | {"downsample_hidden_size": 16}, vision_config=vision,
        text_config=text, **TOKENS,
    )  # fmt: skip
    model = captioner.OstrisQwen3OmniThinker(config)
    assert captioner.patch_qwen_vl_patch_embed(model) == 1
    given = seeing()
    del given["mm_token_type_ids"]
    return model, given


def ace_step():
    """The thinker of Qwen2.5-Omni, which takes sound."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
        Qwen2_5OmniThinkerConfig,
    )
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        Qwen2_5OmniThinkerForConditionalGeneration,
    )

    text = TEXT | {
        "rope_parameters": {
            "mrope_section": [6, 5, 5], "rope_type": "default", "rope_theta": 10000.0,
        },
    }  # fmt: skip
    config = Qwen2_5OmniThinkerConfig(
        audio_config=AUDIO, text_config=text, vision_config=VISION | {"fullatt_block_indexes": [0]},
        audio_token_index=294, image_token_index=IMAGE, video_token_index=VIDEO,
        vision_start_token_id=START, vision_end_token_id=END, audio_start_token_id=295,
        audio_end_token_id=296,
    )  # fmt: skip
    ids = torch.tensor([[5, 295, 294, 294, 296, 7]])
    return Qwen2_5OmniThinkerForConditionalGeneration(config), {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "input_features": torch.randn(1, 16, 8),
        "feature_attention_mask": torch.ones(1, 8, dtype=torch.long),
    }


# Ideogram4Captioner loads what Qwen3VLCaptioner does.
MADE = {
    "Qwen3VLCaptioner": qwen3_vl,
    "Qwen3OmniCaptioner": qwen3_omni,
    "AceStepCaptioner": ace_step,
}


@pytest.mark.parametrize("captioner", MADE)
def test_a_captioners_model_says_what_it_does_without_offloading(captioner, monkeypatch):
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)

    def run(offloaded):
        model, given = MADE[captioner]()
        model.eval().requires_grad_(False)
        table = model.get_input_embeddings().requires_grad_(True)
        layers = [m for m in model.modules() if type(m) in (nn.Linear, nn.Conv3d, nn.Conv1d)]
        offloaded.attach(model, len(layers))
        found = []
        for _ in range(2):
            logits = model(**given).logits
            logits.float().square().mean().backward()
            found += [logits.detach(), gradients(table)]
            table.zero_grad(set_to_none=True)
        assert found[1]["weight"].any()
        with torch.no_grad():
            said = model.generate(**given, max_new_tokens=3, do_sample=False)
        assert said.shape[1] > given["input_ids"].shape[1]
        return [*found, said]

    compare(run)
