r"""A LoRA of FLUX.1-dev on one card of 24 GB: 12 billion parameters stream from page-locked RAM.

    python examples/flux_lora_24gb.py --model ./FLUX.1-dev --data ./pictures --steps 500 \
        --preview-every 100 --prompt "a photo of sks dog"
    python examples/flux_lora_24gb.py --model ./FLUX.1-dev --data ./pictures --steps 1000 --resume

``--model`` is the pipeline's folder, ``--data`` a folder of images with .txt captions next to them.
RAM: 24 GB for the transformer; the text encoder (10 GB) is gone before it is loaded. The adapters
are those of a resident training, to the last bit; ``pipeline.load_lora_weights`` reads them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import shared
import torch
from torch import Tensor, nn

DTYPE = torch.bfloat16
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


class Prompt(NamedTuple):
    """What the transformer is given of a text, on the host."""

    words: Tensor  # of T5, by token
    pooled: Tensor  # of CLIP


def read_pictures(path: str) -> list[tuple[Path, str]]:
    """Return the images of a folder with their captions."""
    folder = Path(path)
    files = sorted(f for f in folder.glob("*") if f.suffix.lower() in IMAGES)
    if not files:
        raise shared.BadInput(f"--data {path} holds no images ({', '.join(IMAGES)})")
    captions = [file.with_suffix(".txt") for file in files]
    texts = [c.read_text("utf-8-sig").strip() if c.exists() else "" for c in captions]
    return list(zip(files, texts, strict=True))


@torch.no_grad()
def encode_prompts(args: argparse.Namespace, texts: Sequence[str]) -> dict[str, Prompt]:
    """Encode each text; T5 streams, and both encoders are gone afterwards."""
    from diffusers import FluxPipeline
    from transformers import T5EncoderModel

    with shared.loaded(T5EncoderModel, args, DTYPE, "text_encoder_2") as t5:
        pipeline = FluxPipeline.from_pretrained(
            args.model, text_encoder_2=t5, transformer=None, vae=None, local_files_only=True
        )
        pipeline.text_encoder.to(args.device, DTYPE)
        found = {}
        for text in dict.fromkeys(texts):
            words, pooled, _ = pipeline.encode_prompt(
                text, text, device=args.device, max_sequence_length=args.caption_tokens
            )
            found[text] = Prompt(words[0].cpu(), pooled[0].cpu())
    return found


@torch.no_grad()
def encode_pictures(args: argparse.Namespace, vae: Any, files: Sequence[Path]) -> Tensor:
    """Return the latents of all images, packed as the transformer takes them, on the host."""
    import numpy
    from diffusers import FluxPipeline
    from PIL import Image, ImageOps

    torch.manual_seed(args.seed)
    found = []
    for file in files:
        try:
            with Image.open(file) as opened:
                picture = ImageOps.fit(opened.convert("RGB"), (args.side, args.side))
        except OSError as error:
            raise shared.BadInput(f"{file} cannot be read: {error}") from error
        pixels = torch.from_numpy(numpy.array(picture)).permute(2, 0, 1)[None] / 127.5 - 1
        drawn = vae.encode(pixels.to(args.device, DTYPE)).latent_dist.sample()
        latents = (drawn - vae.config.shift_factor) * vae.config.scaling_factor
        found.append(FluxPipeline._pack_latents(latents, *latents.shape).cpu())
    return torch.cat(found)


def train(args: argparse.Namespace) -> Path:
    """Train, and return the file of the adapters."""
    from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
    from peft import get_peft_model_state_dict

    pictures = read_pictures(args.data)
    prompts = encode_prompts(args, [*(caption for _, caption in pictures), args.prompt])
    captions = [prompts[caption] for _, caption in pictures]
    with (
        shared.loaded(AutoencoderKL, args, DTYPE, "vae") as vae,
        shared.loaded(FluxTransformer2DModel, args, DTYPE, "transformer") as transformer,
    ):
        latents = encode_pictures(args, vae, [file for file, _ in pictures])
        shared.adapted(transformer, args.rank, TARGETS, args.seed)
        pipeline = FluxPipeline.from_pretrained(
            args.model, transformer=transformer, vae=vae, text_encoder=None, tokenizer=None,
            text_encoder_2=None, tokenizer_2=None, local_files_only=True,
        )  # fmt: skip
        pipeline.set_progress_bar_config(disable=True)
        rows = round(latents.shape[1] ** 0.5)  # a square of latents, packed two by two
        places = pipeline._prepare_latent_image_ids(1, rows, rows, args.device, DTYPE)
        words = torch.zeros(len(captions[0].words), 3, device=args.device, dtype=DTYPE)

        def batch(step: int) -> dict[str, Tensor]:
            """Draw samples and how noisy they are; on the host, so the same on every device."""
            chosen = torch.randint(len(pictures), (args.batch_size,)).tolist()
            clean = latents[chosen].float()
            noise, sigma = torch.randn(clean.shape), torch.randn(len(chosen)).sigmoid()
            share = sigma.view(-1, 1, 1)
            drawn = {
                "noisy": ((1 - share) * clean + share * noise).to(DTYPE),
                "target": noise - clean,  # the direction from image to noise
                "sigma": sigma,
                "words": torch.stack([captions[index].words for index in chosen]),
                "pooled": torch.stack([captions[index].pooled for index in chosen]),
            }
            return {name: tensor.to(args.device) for name, tensor in drawn.items()}

        def mean_loss(part: dict[str, Tensor]) -> Tensor:
            guided = transformer.config.guidance_embeds
            found = transformer(
                hidden_states=part["noisy"],
                timestep=part["sigma"],
                guidance=torch.ones_like(part["sigma"]) if guided else None,
                pooled_projections=part["pooled"],
                encoder_hidden_states=part["words"],
                txt_ids=words,
                img_ids=places,
            ).sample
            return nn.functional.mse_loss(found.float(), part["target"])

        def preview(step: int) -> None:
            with training.sampling(f"step-{step:06}.png") as path:
                image = pipeline(
                    prompt_embeds=prompts[args.prompt].words[None].to(args.device),
                    pooled_prompt_embeds=prompts[args.prompt].pooled[None].to(args.device),
                    height=args.side,
                    width=args.side,
                    num_inference_steps=args.preview_size,
                    generator=torch.Generator().manual_seed(args.seed),
                ).images[0]
                image.save(path)

        with shared.Training(args, transformer, mean_loss) as training:
            for step in training.steps():
                training.step(step, [batch(step)])
                if training.is_due(step):
                    preview(step)
        adapters = get_peft_model_state_dict(transformer)
        FluxPipeline.save_lora_weights(args.output, transformer_lora_layers=adapters)
    return Path(args.output) / "pytorch_lora_weights.safetensors"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = shared.training(str(__doc__).partition("\n")[0], vram_budget="auto")
    add, at_least = parser.add_argument, shared.at_least
    add("--rank", metavar="N", type=at_least(1), default=16, help="of the LoRA")
    add("--side", metavar="PIXELS", type=at_least(16), default=1024, help="images are fitted to it")
    add("--caption-tokens", metavar="N", type=at_least(1), default=512, help="of T5")
    return shared.run(train, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
