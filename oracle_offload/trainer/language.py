"""A causal language model of transformers learns texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..recipes.long_sequences import chunks_of, declared, next_token_loss
from . import lora
from .data import read_samples
from .settings import Settings, SettingsError
from .tasks import Piece

_PADDING = -100


class Bytes:
    """A tokenizer for models without one: each byte of UTF-8 is a token."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes; what is none is replaced."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


class Language:
    """See `oracle_offload.trainer.tasks.Task`."""

    def __init__(self, settings: Settings) -> None:
        from transformers import AutoModelForCausalLM

        self._settings = settings
        self.notes: list[str] = []
        model: Any = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype="auto", local_files_only=True
        )
        self.model: nn.Module = model.train()
        self._tokenizer = self._load_tokenizer()
        head = model.get_output_embeddings()
        linear = [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        ]
        self._adapter = lora.inject(self.model, settings, linear)
        self._tokens = self._read(settings.dataset_file)
        self._eval_tokens = self._read(settings.eval_file) if settings.eval_file else []
        self.lengths = [len(tokens) for tokens in self._tokens]
        self.eval_lengths = [len(tokens) for tokens in self._eval_tokens]
        if settings.chunk_size:
            longest = max(self.lengths) - 1
            self.notes.append(declared(chunks_of(longest, settings.chunk_size, self._window())))

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._settings.model, local_files_only=True)
        except Exception as error:
            config: Any = self.model.config
            vocabulary = int(config.vocab_size)
            if vocabulary < 256:
                raise SettingsError(
                    f"{self._settings.model} has no tokenizer that loads "
                    f"({type(error).__name__}), and {vocabulary} tokens are too few for bytes"
                ) from error
            self.notes.append("the model has no tokenizer that loads: each byte is a token")
            return Bytes()

    def _read(self, path: str) -> list[Tensor]:
        most = self._settings.max_length
        found = []
        for sample in read_samples(path, images=False):
            tokens = torch.tensor(self._tokenizer.encode(sample.text)[:most], dtype=torch.int64)
            if len(tokens) > 1:
                found.append(tokens)
        if not found:
            raise SettingsError(f"{path}: no text has two tokens")
        return found

    def _window(self) -> int | None:
        return None if self._settings.window_size < 0 else self._settings.window_size

    def pieces(self, indices: Sequence[int], device: torch.device, evaluating: bool) -> list[Piece]:
        """Return the chunks of a padded batch."""
        source = self._eval_tokens if evaluating else self._tokens
        rows = [source[index] for index in indices]
        longest = max(map(len, rows))
        tokens = torch.full((len(rows), longest), _PADDING)
        for row, found in zip(tokens, rows, strict=True):
            row[: len(found)] = found
        wanted = tokens[:, 1:] >= 0
        tokens = tokens.to(device)
        chunk = self._settings.chunk_size or longest
        return [
            Piece(terms, partial(self._loss, tokens, part))
            for part in chunks_of(longest - 1, chunk, self._window())
            if (terms := int(wanted[:, part.begin : part.end].sum()))
        ]

    def _loss(self, tokens: Tensor, part: Any) -> Tensor:
        return next_token_loss(self.model, tokens, part)[0]

    def preview(self, folder: Path, step: int, device: torch.device) -> Path:
        """Write the likeliest continuation of the prompt."""
        settings = self._settings
        tokens = list(self._tokenizer.encode(settings.preview_prompt))
        begin = len(tokens)
        for _ in range(settings.preview_length):
            ids = torch.tensor([tokens[-settings.max_length :]], device=device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
        path = folder / f"step-{step:06}.txt"
        told = self._tokenizer.decode(tokens[begin:])
        path.write_text(f"{settings.preview_prompt}{told}\n", encoding="utf-8")
        return path

    def save(self, folder: Path) -> Path:
        """Write the adapters as ``PeftModel.from_pretrained`` reads them."""
        from safetensors.torch import save_file

        path = folder / "adapter_model.safetensors"
        found = {
            f"base_model.model.{name.replace('.default.', '.')}": value.contiguous()
            for name, value in lora.values(self.model).items()
        }
        save_file(found, path)
        self._adapter.task_type = "CAUSAL_LM"
        self._adapter.base_model_name_or_path = self._settings.model
        self._adapter.save_pretrained(str(folder))
        return path
