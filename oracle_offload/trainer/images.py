"""The UNet of a diffusers pipeline learns images: Stable Diffusion 1 and 2, or plain DDPM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import lora
from .data import Sample, read_samples
from .settings import Settings, SettingsError
from .tasks import Piece

_GUIDANCE = 5.0
_LEARNED = ("epsilon", "v_prediction")
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


class Images:
    """See `oracle_offload.trainer.tasks.Task`.

    Latents and captions are encoded once, on the host, and kept there: encoders and decoder take no
    device memory while the model is trained.
    """

    def __init__(self, settings: Settings) -> None:
        from diffusers import DiffusionPipeline

        self._settings = settings
        self.notes: list[str] = []
        load: Any = DiffusionPipeline.from_pretrained
        self._pipeline: Any = load(settings.model, local_files_only=True)
        parts = self._pipeline.components
        unet = parts.get("unet")
        if unet is None or "text_encoder_2" in parts:
            raise SettingsError(
                f"model={settings.model!r} is a {type(self._pipeline).__name__}: this trainer "
                "knows pipelines of a UNet with at most one text encoder"
            )
        learned = self._pipeline.scheduler.config.get("prediction_type", "epsilon")
        if learned not in _LEARNED:
            raise SettingsError(
                f"model={settings.model!r} predicts {learned!r}: this trainer knows "
                f"{' and '.join(_LEARNED)}"
            )
        if settings.chunk_size:
            raise SettingsError(f"chunk_size={settings.chunk_size} is for texts, not for images")
        self.model: nn.Module = unet
        self.model.train()
        self._vae: Any = parts.get("vae")
        self._encoder: Any = parts.get("text_encoder")
        for part in (self._vae, self._encoder):
            if part is not None:
                part.requires_grad_(False).eval()
        names = [name for name, _ in unet.named_modules() if name.endswith(_ATTENTION)]
        self._adapter = lora.inject(unet, settings, names)
        scale = 1 if self._vae is None else 2 ** (len(self._vae.config.block_out_channels) - 1)
        self._side = settings.resolution or int(unet.config.sample_size) * scale
        if self._side % scale:
            raise SettingsError(f"resolution={self._side} is no multiple of {scale}")
        self._data = self._encode_all(settings.dataset_file)
        self._eval_data = self._encode_all(settings.eval_file) if settings.eval_file else []
        self.lengths = [1] * len(self._data)
        self.eval_lengths = [1] * len(self._eval_data)
        self._empty = self._encode_text("")

    @torch.no_grad()
    def _encode_all(self, path: str) -> list[tuple[Tensor, Tensor | None]]:
        torch.manual_seed(self._settings.seed)
        return [
            (self._encode_image(sample), self._encode_text(sample.text))
            for sample in read_samples(path, images=True)
        ]

    def _encode_image(self, sample: Sample) -> Tensor:
        import numpy
        from PIL import Image

        assert sample.image is not None
        try:
            with Image.open(sample.image) as opened:
                side = self._side
                picture = opened.convert("RGB").resize((side, side), Image.Resampling.LANCZOS)
        except OSError as error:
            raise SettingsError(f"{sample.image} cannot be read: {error}") from error
        pixels = torch.from_numpy(numpy.array(picture)).permute(2, 0, 1).float() / 127.5 - 1
        if self._vae is None:
            return pixels
        encoded = self._vae.encode(pixels[None].to(self._vae.dtype)).latent_dist
        latents: Tensor = encoded.sample()[0] * self._vae.config.scaling_factor
        return latents

    @torch.no_grad()
    def _encode_text(self, text: str) -> Tensor | None:
        if self._encoder is None:
            return None
        tokenizer = self._pipeline.tokenizer
        ids = tokenizer(
            text,
            padding="max_length",
            truncation=True,
            max_length=min(
                tokenizer.model_max_length, self._encoder.config.max_position_embeddings
            ),
            return_tensors="pt",
        ).input_ids
        found: Tensor = self._encoder(ids)[0][0]
        return found

    def pieces(self, indices: Sequence[int], device: torch.device, evaluating: bool) -> list[Piece]:
        """Return the batch as it is."""
        source = self._eval_data if evaluating else self._data
        rows = [source[index] for index in indices]
        latents = torch.stack([latent for latent, _ in rows])
        scheduler = self._pipeline.scheduler
        # By the host's generator, which the step has seeded: the same noise on every device.
        noise = torch.randn(latents.shape)
        times = torch.randint(0, scheduler.config.num_train_timesteps, (len(rows),))
        noisy = scheduler.add_noise(latents, noise, times)
        target = noise
        if scheduler.config.prediction_type == "v_prediction":
            target = scheduler.get_velocity(latents, noise, times)
        captions = [caption for _, caption in rows if caption is not None]
        caption = torch.stack(captions).to(device) if captions else None
        compute = partial(
            self._loss, noisy.to(device), times.to(device), caption, target.to(device)
        )
        return [Piece(target.numel(), compute)]

    def _loss(self, noisy: Tensor, times: Tensor, caption: Tensor | None, target: Tensor) -> Tensor:
        found = self._denoise(noisy, times, caption)
        return nn.functional.mse_loss(found.float(), target.float(), reduction="sum")

    def _denoise(self, noisy: Tensor, times: Tensor, caption: Tensor | None) -> Tensor:
        dtype = next(self.model.parameters()).dtype
        more = {} if caption is None else {"encoder_hidden_states": caption.to(dtype)}
        found: Tensor = self.model(noisy.to(dtype), times, **more).sample
        return found

    def preview(self, folder: Path, step: int, device: torch.device) -> Path:
        """Write an image of the prompt, denoised from the seed's noise."""
        from PIL import Image

        settings, scheduler = self._settings, self._pipeline.scheduler
        caption = self._encode_text(settings.preview_prompt)
        both = None
        if caption is not None and self._empty is not None:
            both = torch.stack([self._empty, caption]).to(device)
        generator = torch.Generator().manual_seed(settings.seed)
        shape = self._data[0][0].shape
        sampler = type(scheduler).from_config(scheduler.config)
        sampler.set_timesteps(settings.preview_length)
        latents = torch.randn(1, *shape, generator=generator) * sampler.init_noise_sigma
        for time in sampler.timesteps:
            seen = sampler.scale_model_input(latents, time)
            if both is None:
                found = self._denoise(seen.to(device), time.to(device), None).float().cpu()
            else:
                pair = self._denoise(seen.repeat(2, 1, 1, 1).to(device), time.to(device), both)
                without, with_prompt = pair.float().cpu().chunk(2)
                found = without + _GUIDANCE * (with_prompt - without)
            latents = sampler.step(found, time, latents).prev_sample
        pixels = latents
        if self._vae is not None:
            scaled = latents / self._vae.config.scaling_factor
            pixels = self._vae.decode(scaled.to(self._vae.dtype)).sample.float()
        bytes_ = ((pixels[0].clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        path = folder / f"step-{step:06}.png"
        Image.fromarray(bytes_.permute(1, 2, 0).numpy()).save(path)
        return path

    def save(self, folder: Path) -> Path:
        """Write the adapters as ``pipeline.load_lora_weights`` reads them."""
        from safetensors.torch import save_file

        path = folder / "pytorch_lora_weights.safetensors"
        found = {
            f"unet.{name.replace('.default.', '.')}": value.contiguous()
            for name, value in lora.values(self.model).items()
        }
        save_file(found, path)
        return path
