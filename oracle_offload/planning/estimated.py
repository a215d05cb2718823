"""What compressed weights would take: by parts of them if they are there, else by their dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..compress.choice import Expected
from ..engine.geometry import tensor_bytes

# Of the weights' bytes, as docs/lossless.md has it of drawn weights like trained ones: estimated.
SHARES = {
    torch.bfloat16: 0.68,
    torch.float8_e4m3fn: 0.84,
    torch.float8_e5m2: 0.84,
    torch.float8_e4m3fnuz: 0.84,
    torch.float8_e5m2fnuz: 0.84,
    torch.int8: 0.89,
}


class Estimated:
    """About how many bytes each tensor of a planned module takes coded.

    Parameters
    ----------
    copied : tuple of nn.Module, optional
        The planned module, on the meta device; and the one that it is a copy of, which may have the
        weights.
    """

    def __init__(self, copied: tuple[nn.Module, nn.Module] | None = None) -> None:
        self._expected = Expected(None)
        self._real: dict[int, Tensor] = {}
        if copied is not None:
            planned, real = (module.parameters() for module in copied)
            for tensor, found in zip(planned, real, strict=True):
                if not found.is_meta and found.dtype == tensor.dtype:
                    self._real[id(tensor)] = found

    def bytes_of(self, tensor: Tensor) -> int:
        """Return them for a tensor that is `codable`."""
        real = self._real.get(id(tensor))
        if real is not None:
            return self._expected.bytes_of(real)
        return int(SHARES[tensor.dtype] * tensor_bytes(tensor))

    def said(self, coded: Iterable[int]) -> str:
        """Return in words where the figures of these tensors, by `id`, are from."""
        if self._real.keys() >= set(coded):
            return "compressed weights take what encoding parts of them tells: estimated"
        shares = f"{SHARES[torch.bfloat16]:g} of bf16, {SHARES[torch.float8_e4m3fn]:g} of fp8, "
        shares += f"{SHARES[torch.int8]:g} of int8"
        return f"compressed weights take {shares}, as drawn ones do: estimated"
