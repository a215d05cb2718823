"""Batch sizes that fitted, and that did not, kept from one run to the next."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...host.remembered import Rows
from ...host.schema import schema

SCHEMA = schema("sizes", 1)
_rows = Rows("sizes.json", SCHEMA, "sizes", "the batch size")
_MORE = 1.01  # times as much memory is not more
_CHECKPOINTED = "gradient_checkpointing"  # of modules of transformers and diffusers


class Known(NamedTuple):
    """The largest size that fitted and the smallest that did not; None where there is none."""

    good: int | None = None
    bad: int | None = None
    free: int | None = None  # bytes of the device in which they were found

    def within(self, free: int | None) -> Known:
        """Return what of it still holds: with more memory free, the size that fitted."""
        if free is None or (self.free is not None and free <= self.free * _MORE):
            return self
        return Known(self.good)


def key_of(model: nn.Module, device: torch.device, room: int | None, more: Sequence[object]) -> str:
    """Return what a size depends on, as a hash: model, device, torch, and what the caller names.

    Parameters
    ----------
    model : nn.Module
        Names, shapes, dtypes of its parameters, which are trained, and which modules checkpoint; no
        value of a weight.
    device : torch.device
        Its name and memory.
    room : int or None
        Bytes of the arena, where the model is attached.
    more : sequence
        Whatever else the caller's steps differ in: the optimizer, the resolution, the length.
    """
    parameters = [
        [name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()
    ]
    card: list[Any] = [device.type]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        card = [properties.name, properties.total_memory]
    checkpointed = [
        name for name, module in model.named_modules() if getattr(module, _CHECKPOINTED, False)
    ]
    known = [type(model).__name__, parameters, checkpointed, card, room, torch.__version__, *more]
    text = json.dumps(known)
    return hashlib.sha256(text.encode()).hexdigest()


def recall(key: str) -> Known:
    """Return what is known of a key; nothing where the file is missing or damaged."""
    row = _rows.get(key)
    known = Known(row.get("good"), row.get("bad"), row.get("free"))
    good, bad, _ = known
    if not all(map(_is_size, known)) or (good and bad and good >= bad):
        return Known()
    return known


def remember(key: str, known: Known, model: str) -> None:
    """Keep it; what the system refuses is logged, because no training fails for a file."""
    _rows.put(key, known._asdict() | {"model": model, "torch": torch.__version__})


def _is_size(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)
