"""diffusers: pipelines that sample, and the training loops of its examples."""

from __future__ import annotations

import models
import pytest
import sides
import torch
from diffusers import (
    DDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    StableDiffusionPipeline,
)
from diffusers.training_utils import EMAModel
from sides import compare, values
from transformers import CLIPTextConfig, CLIPTextModel


def text_encoder():
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
        )
    ).eval()


def test_flux_pipeline_samples():
    def client(side):
        transformer, vae = models.flux().eval(), flux_autoencoder()
        pipe = FluxPipeline(
            FlowMatchEulerDiscreteScheduler(),
            vae,
            text_encoder=None,
            tokenizer=None,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=transformer,
        )
        pipe.set_progress_bar_config(disable=True)
        side.attach(transformer, at_least=50)
        side.attach(vae, at_least=20)
        arguments = dict(
            prompt_embeds=torch.randn(1, 8, 32),
            pooled_prompt_embeds=torch.randn(1, 24),
            height=16,
            width=16,
            num_inference_steps=3,
            output_type="pt",
            generator=torch.Generator().manual_seed(1),
        )
        with side.step():
            image = pipe(**arguments).images
        assert image.shape == (1, 3, 16, 16)
        return [image]

    compare(client)


def flux_autoencoder():
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        latent_channels=4,  # packed two by two: the 16 channels of the transformer
        norm_num_groups=8,
        sample_size=16,
        shift_factor=0.1,
        scaling_factor=0.4,
    ).eval()


def test_stable_diffusion_pipeline_samples():
    def client(side):
        unet, vae, encoder = models.unet().eval(), models.autoencoder().eval(), text_encoder()
        pipe = StableDiffusionPipeline(
            vae=vae,
            text_encoder=encoder,
            tokenizer=None,
            unet=unet,
            scheduler=DDPMScheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipe.set_progress_bar_config(disable=True)
        for model in (unet, vae, encoder):
            side.attach(model)
        with side.step(), torch.no_grad():
            embeddings = encoder(torch.randint(0, 100, (2, 7))).last_hidden_state
            image = pipe(
                prompt_embeds=embeddings[:1],
                negative_prompt_embeds=embeddings[1:],
                height=16,
                width=16,
                num_inference_steps=3,
                output_type="pt",
                generator=torch.Generator().manual_seed(1),
            ).images
        return [image]

    compare(client)


@pytest.mark.parametrize(
    ("checkpointing", "autocast"),
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["fp32", "checkpointing", "autocast", "autocast-checkpointing"],
)
def test_unet_training_loop(checkpointing, autocast):
    """As in train_text_to_image: frozen encoders, noise, clipping, EMA of the weights."""

    def client(side):
        unet, vae = models.unet().train(), models.autoencoder().requires_grad_(False)
        encoder = text_encoder().requires_grad_(False)
        if checkpointing:
            unet.enable_gradient_checkpointing()
        for model in (unet, vae, encoder):
            side.attach(model)
        ema = EMAModel(unet.parameters(), decay=0.5)
        optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
        scheduler = DDPMScheduler()
        losses = []
        for _ in range(3):
            with side.step():
                latents = vae.encode(torch.randn(2, 3, 16, 16)).latent_dist.sample()
                noise = torch.randn_like(latents)
                timesteps = torch.randint(0, 1000, (2,))
                noisy = scheduler.add_noise(latents, noise, timesteps)
                condition = encoder(torch.randint(0, 100, (2, 7)))[0]
                with torch.autocast(sides.DEVICE, torch.bfloat16, enabled=autocast):
                    predicted = unet(noisy, timesteps, condition).sample
                loss = (predicted.float() - noise).square().mean()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ema.step(unet.parameters())
            losses.append(loss.detach())
        ema.store(unet.parameters())
        ema.copy_to(unet.parameters())
        with side.step(), torch.no_grad():
            sampled = unet(noisy, timesteps, condition).sample
        ema.restore(unet.parameters())
        return [losses, sampled, values(unet)]

    compare(client)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_flux_lora_training_loop(autocast):
    """As in train_dreambooth_lora_flux: adapters through diffusers, saved and loaded again."""

    def client(side):
        from peft import LoraConfig, get_peft_model_state_dict

        transformer = models.flux().requires_grad_(False).train()
        side.attach(transformer, at_least=50)
        transformer.add_adapter(
            LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights="gaussian")
        )
        transformer.enable_gradient_checkpointing()
        trained = [p for p in transformer.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        losses = []
        for _ in range(3):
            with side.step(), torch.autocast(sides.DEVICE, torch.bfloat16, enabled=autocast):
                losses.append(models.flux_step(transformer)[0].detach())
            optimizer.step()
            optimizer.zero_grad()
        return [losses, values(transformer, True), get_peft_model_state_dict(transformer)]

    compare(client)
