"""Coded masters: weights that the engine has in fewer bytes, and Python reads from a file.

The tensor's bytes are in a private mapping. A write to it, by whatever means, copies pages of the
mapping, which the system knows of; from then on it is no copy of what the engine has, and becomes a
master as all others are. What is no longer coded is copied from the file to memory in its place,
because a program that cuts a file off ends every process that reads it there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _core
from .._core import HostBuffer
from .geometry import tensor_bytes

_SAMPLES, _SAMPLE_BYTES = 64, 64  # where the system does not say


@dataclass(frozen=True)
class Prepared:
    """A tensor that becomes a coded master: its coded weights, and what it is read from.

    Attributes
    ----------
    coded : HostBuffer or None
        None where another rank has them, and fills them in.
    known : str
        How the cache calls them.
    """

    kind: int
    coded: HostBuffer | None
    nbytes: int
    readable: Tensor
    known: str


class CodedMaster:
    """The coded weights of one tensor.

    Parameters
    ----------
    tensor : Tensor
        Its bytes are in its mapping already.
    address, nbytes : int
        Where the coded weights are, in a piece of host memory.
    kind : int
        What they are; see `oracle_offload._core.encode`.

    Attributes
    ----------
    start, tensor_bytes : int
        Of the mapping's part that the tensor is.
    is_current : bool
        Whether the tensor is what was coded, as far as that is known.
    """

    # As long as a layer uses it, its address is no other tensor's.
    _kept: torch.UntypedStorage | None = None
    _uses = 0

    def __init__(self, tensor: Tensor, address: int, nbytes: int, kind: int) -> None:
        self.start, self.tensor_bytes = tensor.data_ptr(), tensor_bytes(tensor)
        self.address = address
        self.nbytes = nbytes
        self.kind = kind
        self.is_current = True
        self._storage = StorageWeakRef(tensor.untyped_storage())
        told = _core.pages_written(self.start, self.tensor_bytes)
        self._sample = self._sampled() if told is None else 0

    @property
    def uses(self) -> int:
        """How many layers use it."""
        return self._uses

    @uses.setter
    def uses(self, uses: int) -> None:
        self._uses = uses
        self._kept = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata) if uses else None

    def is_gone(self) -> bool:
        """Whether nothing holds the tensor's memory any more: another may have its address."""
        return self._mapped_storage() is None

    def _mapped_storage(self) -> torch.UntypedStorage | None:
        if self._storage.expired():
            return None
        # Sharing it with another process moves a storage to other memory.
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return storage if storage is not None and storage.data_ptr() == self.start else None

    def own(self) -> bool:
        """Copy the tensor from its file to ordinary memory at the same address: aliases follow.

        Returns
        -------
        bool
            False where there is no memory for that.
        """
        storage = self._mapped_storage()  # held for as long as it takes
        return storage is None or _core.pages_own(self.start, self.tensor_bytes)

    @property
    def extent(self) -> tuple[int, int, int, int]:
        """What the engine has to know of it."""
        return self.address, self.tensor_bytes, self.nbytes, self.kind

    def was_written(self) -> bool:
        """Whether the tensor was written since it was coded; then it is no longer current."""
        if self.is_current:
            told = _core.pages_written(self.start, self.tensor_bytes)
            changed = self._sampled() != self._sample if told is None else told
            self.is_current = not changed
        return not self.is_current

    def _sampled(self) -> int:
        """Return a hash of lines spread over the tensor."""
        step = max(1, (self.tensor_bytes - _SAMPLE_BYTES) // (_SAMPLES - 1))
        starts = range(self.start, self.start + self.tensor_bytes - _SAMPLE_BYTES + 1, step)
        return hash(tuple(_core.fingerprint(start, _SAMPLE_BYTES) for start in starts))
