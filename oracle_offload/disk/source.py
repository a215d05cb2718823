"""Where the values of one tensor are in files: as a whole, or a part of it in each of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import OffloadError
from .checkpoint import Checkpoint, WeightFile
from .header import Stored
from .origin import Origin
from .reading import Part, Reader

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu


@dataclass(frozen=True)
class Fragment:
    """One tensor of a file, and which part of a model's tensor it is."""

    name: str
    file: WeightFile
    stored: Stored
    part_of: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Source:
    """What fills one tensor of a model, which has this shape."""

    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are read from files."""
        return sum(fragment.stored.nbytes for fragment in self.fragments)

    def check(self, tensor: Tensor, path: str) -> None:
        """Refuse a file whose shapes or kinds of numbers are not those of `tensor`."""
        fits = self.shape == tuple(tensor.shape)
        for fragment in self.fragments:
            stored = fragment.stored
            if not fits or tuple(fragment.part_of(tensor).shape) != stored.shape:
                raise OffloadError(
                    f"'{path}': '{fragment.name}' has shape {stored.shape}"
                    + (f", of {len(self.fragments)} in all" if len(self.fragments) > 1 else "")
                    + f", but the model's has {tuple(tensor.shape)}."
                )
            dtype = DTYPES.get(stored.dtype)
            if dtype is not tensor.dtype and not (
                dtype is not None and dtype.is_floating_point and tensor.is_floating_point()
            ):
                raise OffloadError(
                    f"'{path}': '{fragment.name}' is {stored.dtype}, which does not become "
                    f"{tensor.dtype}; only floating-point weights are converted."
                )

    def place(self, tensor: Tensor) -> tuple[WeightFile, int] | None:
        """Return the file that has the bytes of `tensor` unchanged, and where they begin."""
        (first, *rest) = self.fragments
        stored = first.stored
        if (
            rest
            or first.part_of is not whole
            or DTYPES.get(stored.dtype) is not tensor.dtype
            or not tensor.is_contiguous()
            or stored.begin % tensor.element_size()
        ):
            return None
        return first.file, stored.begin

    def origin(self, tensor: Tensor) -> Origin | None:
        """Return where the bytes of `tensor` are, if one file has them unchanged."""
        found = self.place(tensor)
        if found is None:
            return None
        file, begin = found
        try:
            return file.origin(begin, self.nbytes)
        except OSError:  # a file system that maps nothing
            return None

    def parts(self, reader: Reader, target: Tensor) -> Iterator[Part]:
        """Yield what fills `target`, a dense host tensor."""
        for fragment in self.fragments:
            stored = fragment.stored
            yield from reader.parts(
                fragment.file, stored.begin, DTYPES[stored.dtype], fragment.part_of(target)
            )


def whole(tensor: Tensor) -> Tensor:
    """Return `tensor`: the part that a plain one is."""
    return tensor


def plain_sources(checkpoint: Checkpoint) -> dict[str, Source]:
    """Return the sources of a checkpoint whose names are the model's."""
    return {
        name: Source(stored.shape, (Fragment(name, file, stored, whole),))
        for name, (file, stored) in checkpoint.tensors.items()
    }
