"""All weights of a language model are trained, with more of them than the GPU has room for.

    python examples/full_finetune.py --model ./llama --data texts.jsonl --steps 200

Weights, gradients and optimizer states are on the host, where the optimizer steps: only what a
layer needs is on the card while it computes. In float32, which sums small updates without loss,
that is 8 bytes of RAM for each parameter with Adafactor, 16 with AdamW. It computes in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import shared
import texts
import torch

import oracle_offload


def train(args: argparse.Namespace) -> Path:
    """Train, and return the file of the weights, as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with shared.loaded(AutoModelForCausalLM, args, torch.float32) as model:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
        data = texts.Texts(args, tokenizer)
        if data.note:
            shared.say(f"note: {data.note}")
        texts.learn(args, model.requires_grad_(True), tokenizer, data)
        path = Path(args.output) / "model.safetensors"
        oracle_offload.save_weights(model, path)  # from where they are stored: nothing is gathered
        model.config.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = shared.training(
        str(__doc__).partition("\n")[0], optimizer="adafactor", learning_rate=1e-5
    )
    texts.add_flags(parser, shared.at_least)
    return shared.run(train, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
