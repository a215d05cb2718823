"""A diffusers pipeline samples, with more weights than the GPU has room for.

    python examples/sample.py --model ./FLUX.1-dev --prompt "a fox in the snow" --output out

Every part streams: the text encoders, the transformer or UNet, the decoder. The image is that of
the resident pipeline, to the last bit. A LoRA of flux_lora_24gb.py: ``--lora run``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import shared
import torch
from torch import nn

PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "unet", "vae")


def sample(args: argparse.Namespace) -> Path:
    """Sample, and return the image's file."""
    from diffusers import DiffusionPipeline

    index = Path(args.model) / "model_index.json"
    if not index.is_file():
        raise shared.BadInput(f"--model {args.model} is no folder of a pipeline: it has no {index}")
    kinds = json.loads(index.read_text("utf-8"))
    dtype = getattr(torch, args.dtype)
    with contextlib.ExitStack() as stack:
        parts: dict[str, Any] = {}
        for name in PARTS:
            library, kind = kinds.get(name, (None, None))
            if library is None:
                continue
            model_class = getattr(import_module(library), kind)
            parts[name] = stack.enter_context(shared.loaded(model_class, args, dtype, name))
        load: Any = DiffusionPipeline.from_pretrained
        pipeline = load(args.model, local_files_only=True, **parts)
        for part in pipeline.components.values():
            if isinstance(part, nn.Module) and part not in parts.values():
                part.to(args.device, dtype)  # a safety checker, say
        if args.lora:
            pipeline.load_lora_weights(args.lora)
        image = pipeline(
            prompt=args.prompt,
            num_inference_steps=args.steps,
            generator=torch.Generator().manual_seed(args.seed),
            **({"height": args.side, "width": args.side} if args.side else {}),
        ).images[0]
    path = Path(args.output) / "sample.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = shared.placing(str(__doc__).partition("\n")[0])
    add = parser.add_argument
    add("--steps", metavar="N", type=shared.at_least(1), default=28, help="of denoising")
    add("--side", metavar="PIXELS", type=shared.at_least(8), help="by default the model's")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of all")
    add("--lora", metavar="FOLDER", help="adapters, as load_lora_weights reads them")
    return shared.run(sample, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
