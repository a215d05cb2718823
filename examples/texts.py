"""Texts for a language model: read, cut into tokens, batched by length, learnt in chunks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from shared import BadInput, Training
from torch import Tensor

from oracle_offload.train.recipes.lengths import LengthBuckets
from oracle_offload.train.recipes.long_sequences import Chunk, chunks_of, declared, next_token_loss

PADDING = -100


def add_flags(parser: argparse.ArgumentParser, at_least: Callable[[int], Any]) -> None:
    """Add what decides how texts are cut up."""
    add = parser.add_argument
    add("--max-length", metavar="N", type=at_least(2), default=1024, help="tokens of a text")
    add(
        "--chunk-size", metavar="N", type=at_least(0), default=0,
        help="tokens that are learnt from at once, 0: all; their context is computed again",
    )  # fmt: skip
    add(
        "--window-size", metavar="N", type=at_least(0),
        help="context of a chunk, by default all: what comes before it is not seen",
    )  # fmt: skip
    add(
        "--bucket-pool", metavar="N", type=at_least(0), default=50,
        help="batches that are sorted by length together, 0: none",
    )  # fmt: skip


def read(path: str) -> list[str]:
    """Return the texts of a folder of .txt files, or of a JSONL file of {"text": "..."}."""
    where = Path(path)
    try:
        if where.is_dir():
            found = [file.read_text("utf-8-sig") for file in sorted(where.glob("*.txt"))]
        else:
            # Not splitlines: it would also end a line at U+2028, which a JSON text may have in it.
            lines = where.read_text("utf-8-sig").split("\n")
            found = [json.loads(line)["text"] for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f'--data {path}: it is not like {{"text": "..."}}: {error!r}') from error
    if not found:
        raise BadInput(f"--data {path} holds no texts")
    return found


class Texts:
    """The tokens of all texts, in batches that follow from the number of a step alone."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any) -> None:
        cut = [tokenizer.encode(text)[: args.max_length] for text in read(args.data)]
        self.tokens = [torch.tensor(row) for row in cut if len(row) > 1]
        if not self.tokens:
            raise BadInput(f"--data {args.data}: no text has two tokens")
        lengths = [len(row) for row in self.tokens]
        self._buckets = LengthBuckets(lengths, args.batch_size, args.seed, args.bucket_pool)
        self._args = args
        self.note = declared(self._chunks(max(lengths))) if args.chunk_size else ""

    def __getitem__(self, step: int) -> Tensor:
        epoch, at = divmod(step - 1, len(self._buckets))
        rows = [self.tokens[index] for index in self._buckets.batches(epoch)[at]]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)

    def chunked(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield the batch of a step chunk by chunk, each with its share of the step's tokens."""
        tokens = self[step]
        total = int((tokens[:, 1:] >= 0).sum())
        for chunk in self._chunks(tokens.shape[1]):
            part = {"tokens": tokens.to(self._args.device), "chunk": chunk}
            if terms := terms_of(part):
                yield {**part, "share": terms / total}

    def _chunks(self, length: int) -> list[Chunk]:
        return chunks_of(length - 1, self._args.chunk_size or length, self._args.window_size)


def terms_of(part: dict[str, Any]) -> int:
    """Return how many tokens a part of a chunk is learnt from."""
    chunk = part["chunk"]
    return int((part["tokens"][:, chunk.begin + 1 : chunk.end + 1] >= 0).sum())


def preview(training: Training, tokenizer: Any, step: int) -> None:
    """Write the likeliest continuation of the prompt."""
    args = training.args
    with training.sampling(f"step-{step:06}.txt") as path:
        ids = torch.tensor([tokenizer.encode(args.prompt)], device=args.device)
        for _ in range(args.preview_size):
            logits = training.model(input_ids=ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        path.write_text(f"{tokenizer.decode(ids[0])}\n", encoding="utf-8")


def learn(args: argparse.Namespace, model: Any, tokenizer: Any, texts: Texts) -> None:
    """Train for all steps: a loop of one's own, with chunks where a text is long."""

    def mean_loss(part: dict[str, Any]) -> Tensor:
        loss, terms = next_token_loss(model, part["tokens"], part["chunk"])
        mean: Tensor = loss / terms * part["share"]
        return mean

    with Training(args, model, mean_loss, terms_of) as training:
        for step in training.steps():
            training.step(step, texts.chunked(step))
            if training.is_due(step):
                preview(training, tokenizer, step)
