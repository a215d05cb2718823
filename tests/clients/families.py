"""Every family of models that the documentation names, in small: how it is made and called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import models
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 64
HEADS = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
TEXT = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, use_cache=False)
DENSE = dict(**TEXT, **HEADS, intermediate_size=48)
ROUTED = dict(num_experts_per_tok=2, moe_intermediate_size=24, intermediate_size=24)
LOCAL = dict(num_experts_per_tok=2, num_local_experts=4)
GROUPED = dict(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, **ROUTED)


@dataclass(frozen=True)
class Family:
    """One family of models.

    Parameters
    ----------
    make : callable
        Returns a small model; its weights follow torch's seed.
    call : callable
        Of the model: its result, and what the gradient of the input is to be read from.
    adapted : list of str
        Modules that get LoRA, as peft finds them.
    stacks : list of str
        Parameters that get it through ``target_parameters``.
    checkpoints : bool
        Whether the library checkpoints the model.
    repeats : bool
        Whether modules are called several times in a forward.
    """

    make: Callable[[], nn.Module]
    call: Callable[..., tuple[Tensor, Tensor]]
    adapted: tuple[str, ...]
    stacks: tuple[str, ...] = ()
    checkpoints: bool = True
    repeats: bool = False


def with_experts(model: Any) -> Any:
    """Return the model, whose experts the libraries leave very small, or as memory was."""
    for name, parameter in model.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def language(kind: str, auto: str = "AutoModelForCausalLM", **sizes: Any) -> Any:
    def make() -> Any:
        config = transformers.CONFIG_MAPPING[kind](**sizes)
        return with_experts(getattr(transformers, auto).from_config(config))

    return make


def encoder(kind: str) -> Any:
    sizes = dict(vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
    return language(kind, "AutoModelForTextEncoding", **sizes)


def read(model: Any) -> tuple[Tensor, Tensor]:
    """Call a language model with token ids; the embedded tokens are the input."""
    ids = torch.arange(14).view(2, 7) * 5 % VOCABULARY
    embedded: list[Tensor] = []

    def note(module: nn.Module, arguments: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.retain_grad()
        embedded.append(output.requires_grad_())

    embedding = getattr(model, "encoder", model).get_input_embeddings()
    hook = embedding.register_forward_hook(note)
    try:
        output = model(input_ids=ids)
    finally:
        hook.remove()
    return output[0], embedded[0]


def diffusion(name: str, **sizes: Any) -> Any:
    def make() -> Any:
        return with_experts(getattr(diffusers, name)(**sizes))

    return make


def call_with(shape: tuple[int, ...], **others: Any) -> Any:
    """Return a call with a random first input and what `others` make for each name.

    The call takes another shape for the input, and others for `others`.
    """

    def call(model: Any, size: Any = shape, **changed: Any) -> tuple[Tensor, Tensor]:
        x = torch.randn(size).requires_grad_()
        given = {
            name: make() if callable(make) else make for name, make in {**others, **changed}.items()
        }
        return model(x, **given).sample, x

    return call


def noise(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def at(step: float) -> Callable[[], Tensor]:
    return lambda: torch.tensor([step])


def call_flux(model: Any, size: int = 16) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(size, 3)
    ids[:, 1], ids[:, 2] = torch.arange(size) // 4, torch.arange(size) % 4
    others = dict(encoder_hidden_states=noise(1, 8, 32), pooled_projections=noise(1, 24))
    places = dict(img_ids=ids, txt_ids=torch.zeros(8, 3), guidance=at(3.5), timestep=at(0.5))
    found: tuple[Tensor, Tensor] = call_with((1, size, 16), **others, **places)(model)
    return found


def call_sdxl(model: Any) -> tuple[Tensor, Tensor]:
    conditions = {"text_embeds": torch.randn(1, 8), "time_ids": torch.zeros(1, 6)}
    given = dict(encoder_hidden_states=noise(1, 7, 32), added_cond_kwargs=conditions)
    found: tuple[Tensor, Tensor] = call_with((1, 4, 8, 8), timestep=at(3.0), **given)(model)
    return found


def sdxl() -> nn.Module:
    made: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(2, 4),
        cross_attention_dim=32,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=56,
        norm_num_groups=8,
    )
    return made


ATTENTION = ("q_proj", "v_proj")
PROJECTED = ("to_q", "to_v")
STACKS = ("experts.gate_up_proj", "experts.down_proj")
JOINT = dict(num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16)
IMAGE = dict(encoder_hidden_states=noise(1, 5, 16), timestep=at(0.5), img_shapes=[(1, 2, 2)])
FAMILIES = {
    "Qwen3-MoE": Family(
        language("qwen3_moe", **TEXT, **HEADS, **ROUTED, num_experts=4), read, ATTENTION, STACKS
    ),
    "Mixtral": Family(language("mixtral", **DENSE, **LOCAL), read, ATTENTION, STACKS),
    "gpt-oss": Family(language("gpt_oss", **DENSE, **LOCAL), read, ATTENTION, STACKS),
    "DeepSeek-V3": Family(
        language(
            "deepseek_v3",
            **TEXT,
            **GROUPED,
            num_attention_heads=2,
            num_key_value_heads=2,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        read,
        ("q_b_proj", "o_proj"),
        STACKS,
    ),
    "GLM MoE": Family(
        language("glm4_moe", **TEXT, **HEADS, **GROUPED, first_k_dense_replace=1),
        read,
        ATTENTION,
        STACKS,
    ),
    "Llama": Family(language("llama", **DENSE), read, ATTENTION),
    "Gemma": Family(language("gemma3_text", **DENSE), read, ATTENTION),
    "T5": Family(encoder("t5"), read, ("q", "wo")),
    "UMT5": Family(encoder("umt5"), read, ("q", "wo")),
    "Flux": Family(models.flux, call_flux, PROJECTED),
    "Qwen-Image": Family(
        diffusion(
            "QwenImageTransformer2DModel",
            **JOINT,
            in_channels=16,
            out_channels=4,
            axes_dims_rope=(4, 6, 6),
        ),
        call_with((1, 4, 16), **IMAGE),
        PROJECTED,
    ),
    "Nucleus-MoE-Image": Family(
        diffusion(
            "NucleusMoEImageTransformer2DModel",
            **JOINT,
            in_channels=16,
            out_channels=4,
            axes_dims_rope=(4, 6, 6),
            dense_moe_strategy="all_moe",
            num_experts=4,
            moe_intermediate_dim=24,
            capacity_factors=2.0,
        ),
        call_with((1, 4, 16), **IMAGE),
        PROJECTED,
        STACKS,
    ),
    "Wan": Family(
        diffusion(
            "WanTransformer3DModel",
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=16,
            ffn_dim=48,
            num_layers=2,
            rope_max_seq_len=32,
        ),
        call_with((1, 4, 2, 4, 4), timestep=at(3.0), encoder_hidden_states=noise(1, 5, 32)),
        PROJECTED,
    ),
    "SDXL": Family(sdxl, call_sdxl, PROJECTED),
    "autoencoder of Wan": Family(
        diffusion("AutoencoderKLWan", base_dim=8, z_dim=4, num_res_blocks=1),
        call_with((1, 3, 5, 16, 16)),
        ("to_qkv",),
        checkpoints=False,
        repeats=True,
    ),
    "autoencoder of HunyuanVideo": Family(
        diffusion(
            "AutoencoderKLHunyuanVideo",
            latent_channels=4,
            block_out_channels=(8, 8, 16, 16),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        call_with((1, 3, 5, 16, 16)),
        PROJECTED,
    ),
}


def enable_checkpointing(model: Any, reentrant: bool) -> None:
    """Let the library checkpoint the model's blocks."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    else:
        model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=reentrant))
