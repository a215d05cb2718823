"""Small versions of real models, and one training step for each."""

from __future__ import annotations

import functools
import warnings

import torch
import torch.utils.checkpoint
from torch import nn

warnings.filterwarnings("ignore", category=UserWarning)


def checkpointed(module, *given, reentrant):
    """Call a module in one of torch's two checkpoints, or in none (None)."""
    if reentrant is None:
        return module(*given)
    return torch.utils.checkpoint.checkpoint(module, *given, use_reentrant=reentrant)


class Tower(nn.Sequential):
    """Blocks that are checkpointed one by one, in one of torch's two ways, or not at all (None)."""

    def __init__(self, *blocks, reentrant=False):
        super().__init__(*blocks)
        self.reentrant = reentrant

    def forward(self, x):
        for block in self:
            x = checkpointed(block, x, reentrant=self.reentrant)
        return x


def tower(depth=4, leaves=4, width=128, ratio=1):
    """Return a tower of blocks of so many layers, each `ratio` times as wide as the one before."""
    widths = [width, ratio * width]
    return Tower(
        *(
            nn.Sequential(
                *(
                    part
                    for n in range(leaves)
                    for part in (nn.Linear(widths[n % 2], widths[1 - n % 2]), nn.Tanh())
                )
            )
            for _ in range(depth)
        )
    )


def enable_checkpointing(model, **options) -> None:
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(**options)
    else:
        model.enable_gradient_checkpointing()


def checkpoint_blocks(model, use_reentrant: bool) -> None:
    """Checkpoint in one of torch's two ways, whatever the library's default is."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return
    model.enable_gradient_checkpointing(
        functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=use_reentrant)
    )


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    return LlamaForCausalLM(
        LlamaConfig(
            **sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False, **options
        )
    )


def gpt2():
    """Of Embedding, transformers' Conv1D and a Linear."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        vocab_size=100, n_positions=32, n_embd=32, n_layer=3, n_head=4, num_labels=8, pad_token_id=0
    )
    return GPT2ForSequenceClassification(config)


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = dict(vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    return MixtralForCausalLM(
        MixtralConfig(
            **sizes,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            use_cache=False,
        )
    )


def qwen2_moe():
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = dict(vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **sizes,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            use_cache=False,
        )
    )


def language_step(model):
    ids = torch.randint(0, 100, (2, 9)).to(compute_device(model))
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return [output.loss, output.logits]


def flux(layers=2, single=3):
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=layers,
        num_single_layers=single,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=24,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )


def flux_step(model):
    device = compute_device(model)
    ids = torch.zeros(16, 3, device=device)
    ids[:, 1] = torch.arange(16, device=device) // 4
    ids[:, 2] = torch.arange(16, device=device) % 4
    x = torch.randn(1, 16, 16).to(device).requires_grad_()
    y = model(
        hidden_states=x,
        encoder_hidden_states=torch.randn(1, 8, 32).to(device),
        pooled_projections=torch.randn(1, 24).to(device),
        timestep=torch.tensor([0.5], device=device),
        img_ids=ids,
        txt_ids=torch.zeros(8, 3, device=device),
        guidance=torch.tensor([3.5], device=device),
    ).sample
    y.square().mean().backward()
    return [y]


def unet():
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def unet_step(model):
    device = compute_device(model)
    x = torch.randn(2, 4, 8, 8).to(device).requires_grad_()
    y = model(x, torch.tensor([3, 5], device=device), torch.randn(2, 7, 32).to(device)).sample
    y.square().mean().backward()
    return [y]


def autoencoder():
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        sample_size=16,
    )


def autoencoder_step(model):
    x = torch.randn(2, 3, 16, 16).to(compute_device(model)).requires_grad_()
    y = model(x).sample
    y.square().mean().backward()
    return [y]


def compute_device(model):
    manager = model.__dict__.get("_memory_manager")
    if manager is not None:
        return manager.device
    return next(model.parameters()).device


def lora(model, targets, rank=4):
    """Put LoRA adapters on `model` with peft and give B values, so that they matter."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(7)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets, init_lora_weights=False
    )
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


class LoRA(nn.Module):
    """As AI-Toolkit's: it replaces the layer's forward, and keeps what it has replaced."""

    def __init__(self, module, rank=4):
        super().__init__()
        self.down = nn.Linear(module.in_features, rank, bias=False)
        self.up = nn.Linear(rank, module.out_features, bias=False)
        self.org_module = [module]
        self.org_forward, module.forward = module.forward, self.forward

    def forward(self, x):
        return self.org_forward(x) + self.up(self.down(x))


class Parts(nn.Module):
    """A module of these parts, and a function that computes with them as it likes."""

    def __init__(self, compute, **parts):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *given):
        return self.compute(self, *given)
