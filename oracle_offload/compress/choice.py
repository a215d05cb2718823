"""Which weights of a model become coded masters, and what they need of the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _core
from .._core import HostBuffer
from ..geometry import aligned, is_dense, tensor_bytes
from ..kept import OFFLOADED, Kept, Unit, keep
from ..masters import Files
from ..selection import Chosen
from .coder import Coder, kind_of
from .store import user_store

_PIECES = 4  # of the staging memory, each with room for a chunk
_SAMPLES, _SAMPLE = 16, 1 << 14  # weights of a tensor that tell how small it gets
_MARGIN = 1.02  # by which it may take more than they tell
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


def part(
    units: list[Unit],
    ram_budget: int | float | str | None,
    offload_percent: float,
    compress: str | None,
    files: Files | None,
) -> tuple[list[Unit], Kept, bool]:
    """`keep` for a model that may be compressed.

    Returns
    -------
    tuple
        Its result, and whether `ram_budget` has no room for the weights as they are.
    """
    streaming, kept = keep(units, ram_budget, offload_percent)
    if compress is None or ram_budget == OFFLOADED or not kept.bytes:
        return streaming, kept, False
    expected = {id(tensor): _expected_bytes(tensor, files) for tensor in codable(units)}
    return *keep(
        units, ram_budget, offload_percent, lambda t: expected.get(id(t), tensor_bytes(t))
    ), True


def _expected_bytes(tensor: Tensor, files: Files | None) -> int:
    """Return about how many bytes a tensor takes once it is coded, by parts of it."""
    kind = kind_of(tensor)
    assert kind is not None
    with torch.inference_mode(False), torch.no_grad():
        if files is None or not files.have(tensor):
            flat = tensor.detach()
            flat = flat.as_strided((flat.numel(),), (1,)) if is_dense(flat) else flat.reshape(-1)
        elif (origin := files.origin(tensor)) is not None:
            flat = torch.frombuffer(
                origin.memory, dtype=tensor.dtype, count=tensor.numel(), offset=origin.skipped
            )
        else:  # converted while it is read: nothing is known yet
            return tensor_bytes(tensor)
        step = max(_SAMPLE, flat.numel() // _SAMPLES)
        parts = [flat[at : at + _SAMPLE].cpu() for at in range(0, flat.numel(), step)]
        sample = torch.cat([part.view(torch.uint8) for part in parts])
    count = sample.numel() // tensor.element_size()
    coded = HostBuffer(_core.coded_room(kind, count))
    nbytes = _core.encode(kind, coded.address, coded.nbytes, 1, sample.data_ptr(), count)
    share = min(1.0, _MARGIN * nbytes / sample.numel())
    return int(share * tensor_bytes(tensor))


def staging_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the device memory that the coded weights of `tensors` pass through."""
    largest = max(
        (min(tensor.numel(), _CHUNK) * tensor.element_size() for tensor in tensors), default=0
    )
    return min(_PIECES * aligned(largest + _HEADER_BYTES), _core.STAGING_BYTES) if largest else 0


def coder_for(
    tensors: Sequence[Tensor], ram_budget: int | float | str | None = None
) -> Coder | None:
    """Return what codes `tensors`, None where there are none; see `Coder`."""
    if not tensors:
        return None
    return Coder(user_store(), {id(tensor) for tensor in tensors}, ram_budget)
