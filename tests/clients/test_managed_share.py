"""How much of each published model is managed, counted on the meta device by names and sizes."""

from __future__ import annotations

import diffusers
import pytest
import torch
import transformers

from oracle_offload.model import selection

LEAST = 0.99


def transformers_model(kind, auto="AutoModelForCausalLM", **sizes):
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    return getattr(transformers, auto).from_config(config)


def diffusers_model(name, **sizes):
    return getattr(diffusers, name)(**sizes)


XXL = dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64)
GATED = dict(feed_forward_proj="gated-gelu")
SDXL = dict(
    sample_size=128,
    block_out_channels=(320, 640, 1280),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    transformer_layers_per_block=(1, 2, 10),
    attention_head_dim=(5, 10, 20),
    cross_attention_dim=2048,
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2816,
)
QWEN3 = dict(num_hidden_layers=48, hidden_size=2048, num_experts=128, moe_intermediate_size=768)
# What is built, and the least parameters, in 10^9, that a model of that name has.
MODELS = {
    "Qwen3-30B-A3B": (lambda: transformers_model("qwen3_moe", **QWEN3), 29),
    "Mixtral-8x7B": (lambda: transformers_model("mixtral"), 46),
    "gpt-oss-120b": (lambda: transformers_model("gpt_oss"), 115),
    "DeepSeek-V3": (lambda: transformers_model("deepseek_v3"), 650),
    "GLM-4.5-Air": (lambda: transformers_model("glm4_moe"), 100),
    "Llama-2-7B": (lambda: transformers_model("llama"), 6.5),
    "Gemma-3 text": (lambda: transformers_model("gemma3_text"), 2),
    "T5-XXL": (lambda: transformers_model("t5", "AutoModelForTextEncoding", **XXL, **GATED), 4.7),
    "UMT5-XXL": (
        lambda: transformers_model(
            "umt5", "AutoModelForTextEncoding", vocab_size=256384, **XXL, **GATED
        ),
        5.6,
    ),
    "FLUX.1": (lambda: diffusers_model("FluxTransformer2DModel"), 11.8),
    "Qwen-Image": (lambda: diffusers_model("QwenImageTransformer2DModel"), 20),
    "Wan 14B": (lambda: diffusers_model("WanTransformer3DModel"), 14),
    "SDXL": (lambda: diffusers_model("UNet2DConditionModel", **SDXL), 2.5),
    "Nucleus-MoE-Image": (lambda: diffusers_model("NucleusMoEImageTransformer2DModel"), 17),
    "VAE of Wan": (lambda: diffusers_model("AutoencoderKLWan"), 0.12),
    "VAE of HunyuanVideo": (lambda: diffusers_model("AutoencoderKLHunyuanVideo"), 0.24),
}


@pytest.mark.parametrize("name", MODELS)
def test_nearly_all_of_a_published_model_is_managed(name):
    make, billions = MODELS[name]
    with torch.device("meta"):
        model = make().to(torch.bfloat16)
    sizes = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    assert sum(sizes.values()) >= 2e9 * billions, "not the published size"
    chosen = selection.choose(model)
    managed = {id(t) for leaf in chosen.leaves for t in leaf.tensors()}
    share = sum(sizes[key] for key in managed) / sum(sizes.values())
    assert share >= LEAST, f"{share:.4%}; {sorted(set(chosen.parameters.values()))[:5]}"
    # Everything else is named, with a reason.
    left = {
        name for name, p in model.named_parameters(remove_duplicate=False) if id(p) not in managed
    }
    named = {*chosen.parameters}
    for layer in chosen.resident:
        named.update(f"{layer}.{key}" for key, _ in model.get_submodule(layer).named_parameters())
    assert left == named
