"""What `plan` was asked, with every default filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .cards import Card
from .fit import Room
from .source import Source
from .storage import Recipe


@dataclass(frozen=True)
class Question:
    """What `plan` was asked, with every default filled in."""

    source: Source
    recipe: Recipe
    card: Card
    room: Room
    batch: int
    checkpointing: bool
    sample: Any = None
    measured: bool = True
    micro_batches: int = 1
