"""Real architectures of diffusers and transformers, small, with their own configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Made = Callable[[], Any]


def of_diffusers() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return class name and config of each."""
    return {
        "flux": (
            "FluxTransformer2DModel",
            dict(
                patch_size=1,
                in_channels=4,
                num_layers=1,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=32,
                pooled_projection_dim=32,
                axes_dims_rope=(4, 4, 8),
            ),
        ),
        "sd3": (
            "SD3Transformer2DModel",
            dict(
                sample_size=32,
                patch_size=2,
                in_channels=4,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=4,
                joint_attention_dim=32,
                caption_projection_dim=32,
                pooled_projection_dim=64,
                out_channels=4,
            ),
        ),
        "unet": (
            "UNet2DConditionModel",
            dict(
                sample_size=16,
                block_out_channels=(16, 32),
                layers_per_block=1,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
                cross_attention_dim=32,
                attention_head_dim=8,
                norm_num_groups=8,
            ),
        ),
        "wan": (
            "WanTransformer3DModel",
            dict(
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=4,
                out_channels=4,
                text_dim=16,
                freq_dim=16,
                ffn_dim=32,
                num_layers=2,
                rope_max_seq_len=32,
            ),
        ),
        "qwen-image": (
            "QwenImageTransformer2DModel",
            dict(
                patch_size=2,
                in_channels=16,
                out_channels=4,
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=3,
                joint_attention_dim=16,
                axes_dims_rope=(8, 4, 4),
            ),
        ),
        "pixart": (
            "PixArtTransformer2DModel",
            dict(
                num_attention_heads=2,
                attention_head_dim=8,
                num_layers=2,
                sample_size=8,
                cross_attention_dim=16,
                caption_channels=16,
                norm_type="ada_norm_single",
            ),
        ),
        "vae": (
            "AutoencoderKL",
            dict(
                block_out_channels=(16, 32),
                norm_num_groups=8,
                layers_per_block=1,
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
            ),
        ),
    }


def of_transformers() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return class name and config of each."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=96)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    return {
        "llama": ("LlamaForCausalLM", {**sizes, **heads}),
        "llama-tied": ("LlamaForCausalLM", {**sizes, **heads, "tie_word_embeddings": True}),
        "qwen2": ("Qwen2ForCausalLM", {**sizes, **heads}),
        "mistral": ("MistralForCausalLM", {**sizes, **heads}),
        "gemma2": ("Gemma2ForCausalLM", {**sizes, **heads, "head_dim": 8}),
        "mixtral": ("MixtralForCausalLM", {**sizes, **heads, "num_local_experts": 4}),
        "gpt2": ("GPT2LMHeadModel", dict(n_embd=32, n_layer=2, n_head=4, vocab_size=96)),
        "t5": (
            "T5EncoderModel",
            dict(d_model=32, d_ff=64, num_layers=2, d_kv=8, num_heads=4, vocab_size=96),
        ),
        "clip-text": ("CLIPTextModel", {**sizes, "num_attention_heads": 4}),
        "bert": ("BertForMaskedLM", {**sizes, "num_attention_heads": 4}),
        "vit": (
            "ViTForImageClassification",
            {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 32,
                "patch_size": 8,
            },
        ),
    }


def class_and_config(name: str) -> tuple[Any, Any]:
    """Return the class and its config, of the kind that its library takes."""
    import diffusers
    import transformers

    if name in of_diffusers():
        kind, config = of_diffusers()[name]
        return getattr(diffusers, kind), config
    kind, config = of_transformers()[name]
    found = getattr(transformers, kind)
    return found, found.config_class(**config)


def real(name: str) -> Any:
    """Return the model itself, with weights, as its library makes it."""
    kind, config = class_and_config(name)
    return kind.from_config(config) if isinstance(config, dict) else kind(config)


NAMES = [*of_diffusers(), *of_transformers()]
