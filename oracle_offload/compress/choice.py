"""Which weights of a model become coded masters, and what they need of the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _core
from ..geometry import aligned
from ..selection import Chosen
from .coder import Coder, kind_of
from .store import user_store

_PIECES = 4  # of the staging memory, each with room for a chunk
_CHUNK, _HEADER_BYTES = 4 << 20, 64  # weights of a chunk, see csrc/core/codec.h


def codable(units: Sequence[Sequence[Chosen]]) -> list[Tensor]:
    """Return the tensors that may be coded: frozen, streamed as a whole, of a dtype with a codec.

    A unit that has a trained tensor leaves the device with it, and is coded in no part.
    """
    found: dict[int, Tensor] = {}
    others: set[int] = set()
    for unit in units:
        trained = any(tensor.requires_grad for leaf in unit for tensor in leaf.tensors())
        for leaf in unit:
            for tensor in leaf.tensors():
                if trained or not leaf.kind.needs_place or kind_of(tensor) is None:
                    others.add(id(tensor))
                else:
                    found[id(tensor)] = tensor
    return [tensor for key, tensor in found.items() if key not in others]


def staging_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the device memory that the coded weights of `tensors` pass through."""
    largest = max(
        (min(tensor.numel(), _CHUNK) * tensor.element_size() for tensor in tensors), default=0
    )
    return min(_PIECES * aligned(largest + _HEADER_BYTES), _core.STAGING_BYTES) if largest else 0


def coder_for(tensors: Sequence[Tensor]) -> Coder | None:
    """Return what codes `tensors`; None where there are none."""
    return Coder(user_store(), {id(tensor) for tensor in tensors}) if tensors else None
