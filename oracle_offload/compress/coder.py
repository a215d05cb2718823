"""Weights of a model on their way into coded masters: what attach asks for piece by piece.

A coded master is two things. The engine has the coded weights, in a piece of host memory. Python
has a Parameter that is read from a file of the cache: a private mapping, of a file that no other
user can write and that is never written twice. It is not one of the checkpoint that the weights
came from, which may be overwritten at any time, by a program that saves the model where it was
loaded from, say. Reading it brings pages of the file to memory, which the system takes back when it
likes; writing it copies the page, which `oracle_offload.engine.coded` notices.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _core
from .._core import HostBuffer
from ..disk.origin import Origin
from ..disk.reading import Files, memory
from ..engine.coded import Prepared
from ..engine.geometry import contiguous_stride, is_dense, tensor_bytes
from ..errors import OffloadError
from ..host.ranks import on_all
from ..host.sizes import format_size
from .store import CODED, RAW, Store

if TYPE_CHECKING:
    from ..model.sharing import Share

logger = logging.getLogger("oracle_offload")

SMALLEST_BYTES = 1 << 16  # below that, a tensor stays as it is
LEAST_SAVED = 0.03  # of a tensor's bytes, or it stays as it is
_TENSORS_AT_ONCE = 2  # so that one is encoded while files of another are written

_KINDS = {
    torch.bfloat16: _core.BF16,
    torch.float8_e4m3fn: _core.FP8,
    torch.float8_e5m2: _core.FP8,
    torch.float8_e4m3fnuz: _core.FP8,
    torch.float8_e5m2fnuz: _core.FP8,
    torch.int8: _core.INT8,
}


def pays(coded_bytes: int, whole_bytes: int) -> bool:
    """Whether weights that get so small are worth it."""
    return coded_bytes <= (1 - LEAST_SAVED) * whole_bytes


def kind_of(tensor: Tensor) -> int | None:
    """Return how the codec calls a tensor's dtype; None for what it does not know, or is small."""
    return _KINDS.get(tensor.dtype) if tensor_bytes(tensor) >= SMALLEST_BYTES else None


class Coder:
    """Codes the tensors of one model, with the help of what is on disk.

    Parameters
    ----------
    store : Store
        The cache.
    wanted : collection of int
        By `id`, the tensors that may be coded.
    ram_budget : optional
        The argument of `attach`, where it has no room for the weights as they are.
    limit : float
        That argument in bytes.
    """

    def __init__(
        self,
        store: Store,
        wanted: Collection[int],
        ram_budget: int | float | str | None = None,
        limit: float = float("inf"),
    ) -> None:
        self._store = store
        self._wanted = wanted
        self._ram_budget = ram_budget
        self._limit = limit
        self._threads = os.cpu_count() or 1
        self._failed = False
        self._told = threading.Lock()  # taken once, and never released, by the thread that warns

    def wants(self, tensor: Tensor) -> bool:
        """Whether it may become a coded master."""
        return not self._failed and self.may_want(tensor)

    def may_want(self, tensor: Tensor) -> bool:
        """Whether it could, had nothing failed: all ranks answer alike."""
        return id(tensor) in self._wanted and kind_of(tensor) is not None

    def check_budget(self, nbytes: int) -> None:
        """Refuse masters of `nbytes`, where `ram_budget` has no room for so many.

        Raises
        ------
        OffloadError
            Weights get less small than the parts of them that were looked at before.
        """
        if nbytes > self._limit:
            raise OffloadError(
                f"ram_budget={self._ram_budget!r} is {format_size(int(self._limit))}, but the "
                f"weights take {format_size(nbytes)} of the host before all of them are there: "
                "they do not get as small as parts of them did. Raise the budget, or attach "
                "without compress=, which leaves on the device what has no room."
            )

    def prepare(
        self,
        tensors: Sequence[tuple[Tensor, Tensor | Origin]],
        on_bytes: Callable[[int], object],
    ) -> dict[int, Prepared]:
        """Return those of `tensors` that get smaller, coded, by `id`.

        Parameters
        ----------
        tensors : sequence of tuples
            Each with a dense tensor on any device that has its values, or their place in a file.
        on_bytes : callable
            Called with the number of bytes of each tensor that was coded.
        """
        with ThreadPoolExecutor(_TENSORS_AT_ONCE, "oracle_offload-code") as pool:
            found = {}
            rows = pool.map(lambda row: self._prepare(*row), tensors)
            for (tensor, _), prepared in zip(tensors, rows, strict=True):
                if prepared is not None:
                    found[id(tensor)] = prepared
                    on_bytes(tensor_bytes(tensor))
        return found

    def bring_together(
        self,
        tensors: Sequence[Tensor],
        prepared: dict[int, Prepared],
        files: Files | None,
        share: Share,
    ) -> dict[int, Prepared]:
        """Add to what this rank has prepared of `tensors` what the others have.

        Raises
        ------
        OffloadError
            A rank cannot read what another has written, or has other values.
        """
        rows = {
            str(number): [found.kind, found.nbytes, found.known]
            for number, tensor in enumerate(tensors)
            if (found := prepared.get(id(tensor))) is not None
        }
        everyone: dict[str, list[Any]] = {}
        for theirs in share.ranks.exchange("coded", rows):
            everyone.update(theirs)

        def take() -> None:
            for number in sorted(everyone.keys() - rows.keys(), key=int):
                kind, nbytes, known = everyone[number]
                tensor = tensors[int(number)]
                mapped = self._store.map(known + RAW, tensor_bytes(tensor))
                if mapped is None:
                    raise OffloadError(
                        f"rank {share.ranks.at.local_rank} of this machine finds no "
                        f"'{self._store.path(known + RAW)}', which another has written: all have "
                        "to have one cache (ORACLE_OFFLOAD_CACHE_DIR)."
                    )
                if files is not None and files.have(tensor):
                    files.skip(tensor)
                elif not _same(mapped, on_host(tensor.detach())):
                    raise share.differs(tensor)
                readable = tensor_over(mapped, 0, tensor)
                prepared[id(tensor)] = Prepared(kind, None, nbytes, readable, known)

        on_all(share.ranks, "compared codes", take)
        return prepared

    def _prepare(self, tensor: Tensor, values: Tensor | Origin) -> Prepared | None:
        kind = _KINDS[tensor.dtype]
        if self._failed:
            return None
        try:
            with torch.inference_mode(False), torch.no_grad():
                if isinstance(values, Origin):
                    host = tensor_over(values.memory, values.skipped, tensor)
                else:
                    host = on_host(values)
                return self._code(kind, tensor, host)
        except OSError as error:
            self._failed = True
            if self._ram_budget is not None:
                raise OffloadError(
                    f"ram_budget={self._ram_budget!r} has room for the weights only if they are "
                    f"compressed, but '{self._store.folder}' cannot be written: {error}. Let "
                    "ORACLE_OFFLOAD_CACHE_DIR name another place, raise the budget, or attach "
                    "without compress=."
                ) from error
            if self._told.acquire(blocking=False):
                logger.warning(
                    "weights are not compressed from here on, because '%s' cannot be written: %s. "
                    "ORACLE_OFFLOAD_CACHE_DIR names another place.",
                    self._store.folder,
                    error,
                )
            return None

    def _code(self, kind: int, tensor: Tensor, host: Tensor) -> Prepared | None:
        """Return what becomes of `tensor`, whose values `host` has: known in the cache by these."""
        count, nbytes = host.numel(), tensor_bytes(host)
        known = f"{kind}-{count:x}-{_core.fingerprint(host.data_ptr(), nbytes):016x}"
        name = known + CODED
        coded = self._store.read(name)
        if coded is not None:
            try:
                _core.compare_coded(
                    kind, coded.address, coded.nbytes, self._threads, host.data_ptr(), count
                )
                readable = self._readable(known, tensor, host)
                return Prepared(kind, coded, coded.nbytes, readable, known)
            except ValueError as error:
                self._store.drop(name, error)
        return self._encode(kind, host, known, lambda: self._readable(known, tensor, host))

    def _readable(self, known: str, tensor: Tensor, host: Tensor) -> Tensor:
        """Return a tensor over the file of the cache that has the bytes of `host`."""
        name, nbytes = known + RAW, tensor_bytes(host)
        mapped = self._store.map(name, nbytes)
        if mapped is None or not _same(mapped, host):
            if self._store.path(name).exists():
                self._store.drop(name, "it holds other weights")
            mapped = self._store.write_mapped(name, memory(host))
        return tensor_over(mapped, 0, tensor)

    def _encode(
        self, kind: int, values: Tensor, known: str, readable: Callable[[], Tensor]
    ) -> Prepared | None:
        """Encode the dense host tensor `values` and keep that as `known`, if it gets smaller."""
        count = values.numel()
        coded = HostBuffer(_core.coded_room(kind, count))
        nbytes = _core.encode(
            kind, coded.address, coded.nbytes, self._threads, values.data_ptr(), count
        )
        if not pays(nbytes, tensor_bytes(values)):
            return None
        self._store.write(known + CODED, memoryview(coded).cast("B")[:nbytes])
        return Prepared(kind, coded, nbytes, readable(), known)


def on_host(tensor: Tensor) -> Tensor:
    """Return `tensor` as a dense host tensor, in whatever order its elements are."""
    return tensor.cpu() if is_dense(tensor) else tensor.cpu().contiguous()


def tensor_over(mapped: mmap.mmap, begin: int, like: Tensor) -> Tensor:
    """Return a tensor whose bytes are in a mapping, with the shape, dtype and strides of another.

    Its storage is its own bytes, and ordinary memory to torch, which may be moved.
    """
    stride = like.stride() if is_dense(like) else contiguous_stride(like.shape)
    flat = torch.frombuffer(mapped, dtype=like.dtype, count=like.numel(), offset=begin)
    empty = torch.empty(0, dtype=like.dtype, device="cpu")
    return empty.set_(flat.untyped_storage(), 0, like.shape, stride)


def _same(mapped: mmap.mmap, host: Tensor) -> bool:
    flat = torch.as_strided(host, (host.numel(),), (1,)).view(torch.uint8)
    return torch.equal(torch.frombuffer(mapped, dtype=torch.uint8), flat)
