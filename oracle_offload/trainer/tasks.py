"""What a task tells the loop: its model, its samples, and what to learn from some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn


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
