"""Bytes of files into tensors, by several threads; converted on the way where dtypes differ."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch
from torch import Tensor

from ..engine.geometry import tensor_bytes
from ..host.sizes import MIB
from .checkpoint import WeightFile
from .origin import Origin

THREADS = 4
BLOCK_BYTES = 8 * MIB  # that a thread reads at once, and the most that one holds for a conversion

Part = tuple[int, Callable[[], None]]  # bytes of the file, and what brings them to their place


class Files(Protocol):
    """Where tensors that have no values yet have them from."""

    def have(self, tensor: Tensor) -> bool:
        """Whether `read` is to be asked for its values."""

    def origin(self, tensor: Tensor) -> Origin | None:
        """Return where its bytes are, if one file has them unchanged."""

    def skip(self, tensor: Tensor) -> None:
        """Read nothing for it: its bytes are those of the file that has its values."""

    def read(
        self, tensors: Sequence[tuple[Tensor, Tensor]], on_bytes: Callable[[int], object]
    ) -> None:
        """Fill the second of each pair with the values of the first."""


def memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor, which has to outlive what is returned."""
    view = (ctypes.c_ubyte * tensor_bytes(tensor)).from_address(tensor.data_ptr())
    return memoryview(view).cast("B")


class Reader:
    """Threads that fill tensors from files; `close` ends them.

    Several reads are under way at once: one thread seldom has all of a disk's speed, or, where the
    file is in the page cache, of the memory's.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="oracle_offload-read")
        self._staging = threading.local()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def run(self, parts: Iterable[Part], on_bytes: Callable[[int], object]) -> None:
        """Do all `parts`; when it returns or raises, no thread touches their tensors any more."""
        futures: dict[Future[None], int] = {}
        try:
            for nbytes, part in parts:
                futures[self._pool.submit(part)] = nbytes
            pending = set(futures)
            while pending:
                done, pending = wait(pending, 0.1, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                    on_bytes(futures[future])
        except BaseException:
            for future in futures:
                future.cancel()
            wait(futures)
            raise

    def parts(
        self, file: WeightFile, begin: int, dtype: torch.dtype, target: Tensor
    ) -> Iterator[Part]:
        """Yield what fills `target` with the elements that `file` has from `begin` on.

        Parameters
        ----------
        file : WeightFile
            Where they are of `dtype`, in row-major order.
        begin : int
            Byte at which they begin.
        dtype : torch.dtype
            Of the file's elements; where it is not the target's, they are converted as
            `Tensor.copy_` does.
        target : Tensor
            On the host; dense. It is written by other threads.
        """
        if not target.numel():
            return
        if target.is_contiguous():
            target = target.view(-1)  # so that it can be cut anywhere, a scalar too
        rows = max(1, BLOCK_BYTES // (target[:1].numel() * dtype.itemsize))
        as_it_is = dtype is target.dtype and target.is_contiguous()
        for block in target.split(rows):
            nbytes = block.numel() * dtype.itemsize
            if as_it_is:
                yield nbytes, _direct(file, begin, block)
            else:
                yield nbytes, self._converted(file, begin, dtype, block)
            begin += nbytes

    def _converted(
        self, file: WeightFile, begin: int, dtype: torch.dtype, block: Tensor
    ) -> Callable[[], None]:
        def part() -> None:
            nbytes = block.numel() * dtype.itemsize
            staging: Tensor | None = getattr(self._staging, "bytes", None)
            if staging is None or len(staging) < nbytes:
                staging = self._staging.bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            source = staging[:nbytes]
            file.read_into(memory(source), begin)
            with torch.no_grad():
                block.copy_(source.view(dtype).view(block.shape))

        return part


def _direct(file: WeightFile, begin: int, block: Tensor) -> Callable[[], None]:
    return lambda: file.read_into(memory(block), begin)
