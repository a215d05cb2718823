"""A LoRA of a language model whose weights do not fit the GPU: by Trainer, or a loop of one's own.

    python examples/llm_lora.py --model ./llama --data texts.jsonl --steps 200
    python examples/llm_lora.py --model ./llama --data texts.jsonl --steps 400 --resume
    python examples/llm_lora.py --model ./llama --data texts.jsonl --loop trainer --output run-2

Weights stay in page-locked host memory and stream to the GPU; the adapters are those of the
resident training, to the last bit. A model of 8 billion parameters takes 16 GB of RAM. For texts
that are too long for the card: ``--chunk-size 512``. Chunks and previews are of the loop alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shared
import texts
import torch

import oracle_offload
from oracle_offload.train.integrations import TrainerCallback, accumulate_in
from oracle_offload.train.recipes.optimizers import make_optimizer


def train(args: argparse.Namespace) -> Path:
    """Train, and return the file of the adapters, as peft reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if args.loop == "trainer":
        check_for_trainer(args)
    with shared.loaded(AutoModelForCausalLM, args) as model:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
        data = texts.Texts(args, tokenizer)
        if data.note:
            shared.say(f"note: {data.note}")
        targets = args.targets or "all-linear"
        model = shared.adapted(model, args.rank, targets, args.seed, "CAUSAL_LM")
        if args.loop == "plain":
            texts.learn(args, model, tokenizer, data)
        else:
            by_trainer(args, model, data)
        model.save_pretrained(args.output)
    return Path(args.output) / "adapter_model.safetensors"


def check_for_trainer(args: argparse.Namespace) -> None:
    """Refuse what a Trainer would pass over in silence."""
    for name in ("chunk_size", "window_size", "preview_every", "record", "attention"):
        if getattr(args, name):
            raise shared.BadInput(f"--{name.replace('_', '-')} needs --loop plain")
    if args.batch_size % (args.at_once or args.batch_size):
        raise shared.BadInput(
            f"--batch-size {args.batch_size} is no multiple of --at-once {args.at_once}"
        )


def by_trainer(args: argparse.Namespace, model: Any, data: texts.Texts) -> None:
    """Let transformers' Trainer train: checkpoints, precision and order are its own."""
    from transformers import Trainer, TrainingArguments

    model.train()
    at_once = args.at_once or args.batch_size
    trained = [p for p in model.parameters() if p.requires_grad]
    made = make_optimizer(args.optimizer, trained, args.learning_rate)
    if made.why:
        shared.say(f"note: {made.why}")
    options = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=args.batch_size // at_once,
        lr_scheduler_type="constant",
        max_grad_norm=args.max_grad_norm,
        bf16=args.amp,
        gradient_checkpointing=args.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if args.checkpointing else None,
        save_steps=args.save_every,
        logging_steps=1,
        seed=args.seed,
        report_to=[],
        disable_tqdm=True,
        use_cpu=args.device == "cpu",
    )

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        tokens = torch.nn.utils.rnn.pad_sequence(
            [row["labels"] for row in rows], batch_first=True, padding_value=texts.PADDING
        )
        return {"input_ids": tokens.clamp(min=0), "labels": tokens}

    metrics = oracle_offload.observe.MetricsFile(
        Path(args.output) / "metrics.jsonl", device=args.device
    )
    with metrics:
        trainer = Trainer(
            model,
            options,
            train_dataset=[{"input_ids": row, "labels": row} for row in data.tokens],
            data_collator=collate,
            optimizers=(made.optimizer, None),
            callbacks=[TrainerCallback(metrics.append)],
        )
        if options.gradient_accumulation_steps > 1 and not args.resident:
            accumulate_in(trainer)  # each block is fetched once for all micro-batches of a step
        trainer.train(resume_from_checkpoint=args.resume or None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = shared.training(str(__doc__).partition("\n")[0])
    parser.add_argument("--loop", choices=("plain", "trainer"), default="plain", help="whose")
    parser.add_argument("--rank", metavar="N", type=shared.at_least(1), default=16, help="of LoRA")
    parser.add_argument(
        "--targets", metavar="NAME", nargs="*", help="layers; by default all linear"
    )
    texts.add_flags(parser, shared.at_least)
    return shared.run(train, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
