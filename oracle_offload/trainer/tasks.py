"""What a task tells the loop: its model, its samples, and what to learn from some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .settings import Settings, SettingsError


class Piece(NamedTuple):
    """What is computed at once: a batch, or one chunk of it."""

    terms: int  # of its summed loss
    loss_sum: Callable[[], Tensor]


class Task(Protocol):
    """A model and what it learns.

    Attributes
    ----------
    model : nn.Module
        With its adapters.
    lengths, eval_lengths : list of int
        Of the samples.
    notes : list of str
        What a user has to know.
    """

    model: nn.Module
    lengths: list[int]
    eval_lengths: list[int]
    notes: list[str]

    def pieces(self, indices: Sequence[int], device: torch.device, evaluating: bool) -> list[Piece]:
        """Return what to compute of one batch of samples."""

    def preview(self, folder: Path, step: int, device: torch.device) -> Path:
        """Write what the model makes of the prompt now, and return the file."""

    def save(self, folder: Path) -> Path:
        """Write the adapters, and return the file."""


def load_task(settings: Settings) -> Task:
    """Return the task that fits the model: language, or images.

    Raises
    ------
    SettingsError
        The model is of neither kind, or the data does not fit it.
    """
    if _has(settings.model, "model_index.json"):
        from .images import Images

        return Images(settings)
    if _has(settings.model, "config.json"):
        from .language import Language

        return Language(settings)
    raise SettingsError(
        f"model={settings.model!r} is neither the folder of a transformers model (config.json) nor "
        "of a diffusers pipeline (model_index.json), nor in the local hub cache; download it first"
    )


def _has(model: str, file: str) -> bool:
    if Path(model).is_dir():
        return (Path(model) / file).is_file()
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    try:
        return isinstance(try_to_load_from_cache(model, file), str)
    except ValueError:  # no name of a repository
        return False
