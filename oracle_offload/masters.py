"""Host masters: weights move, piece by piece, into page-locked memory of exact size.

A piece is one `HostBuffer` of about 1 GiB. It is touched and filled, the originals are dropped, and
it is locked before the next piece begins, so that the process never holds more than the weights and
one or two pieces. A `Parameter` keeps its identity: only ``.data`` is re-pointed, to a tensor whose
storage is exactly its own bytes. So torch itself counts who holds a master, and a piece is given
back, as a whole, when nobody holds any of it.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ._core import HostBuffer
from .engines import DeviceState
from .errors import OffloadError
from .geometry import aligned, contiguous_stride, is_dense, tensor_bytes, unit_bytes
from .sizes import GIB, format_size

logger = logging.getLogger("oracle_offload")

PIECE_BYTES = GIB


def split_pieces(
    units: Sequence[Sequence[Tensor]], piece_bytes: int | None = None
) -> Iterator[list[Tensor]]:
    """Yield the tensors of one piece after another; no unit is cut.

    Parameters
    ----------
    units : sequence of sequences of Tensor
        The tensors that travel together, in model order; a tensor that occurs twice is placed once.
    piece_bytes : int, optional
        Size that a piece of several units does not exceed; `PIECE_BYTES`.
    """
    piece_bytes = PIECE_BYTES if piece_bytes is None else piece_bytes
    piece: list[Tensor] = []
    size = 0
    placed: set[int] = set()
    for unit in units:
        fresh = [tensor for tensor in unit if id(tensor) not in placed]
        placed.update(id(tensor) for tensor in fresh)
        nbytes = unit_bytes(fresh)
        if piece and size + nbytes > piece_bytes:
            yield piece
            piece, size = [], 0
        piece.extend(fresh)
        size += nbytes
    if piece:
        yield piece


class Piece:
    """One buffer of masters: locked, known to the engine and given back as a whole.

    Parameters
    ----------
    tensors : sequence of Tensor
        Plain strided tensors on any device. Their ``.data`` is re-pointed into the new buffer and
        their old memory dropped. The buffer is ordinary memory still: nothing is locked here.
    on_bytes : callable, optional
        Told how many bytes each tensor had, for a progress bar.

    Attributes
    ----------
    uses : int
        How many tensors of managed layers lie in it.
    """

    def __init__(
        self, tensors: Sequence[Tensor], on_bytes: Callable[[int], object] | None = None
    ) -> None:
        self.buffer = HostBuffer(unit_bytes(tensors))
        self.start, self.end = self.buffer.address, self.buffer.address + self.buffer.nbytes
        self.uses = 0
        offset = 0
        for tensor in tensors:
            move_into(tensor, self.buffer, offset)
            offset += aligned(tensor_bytes(tensor))
            if on_bytes is not None:
                on_bytes(tensor_bytes(tensor))
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    def is_abandoned(self) -> bool:
        """Whether no layer uses it and no tensor anywhere points into it."""
        return self.uses == 0 and all(storage.expired() for storage in self._storages)


def move_into(tensor: Tensor, buffer: HostBuffer, offset: int) -> None:
    """Re-point ``tensor.data`` to `offset` of `buffer`; values and dense strides stay."""
    source = tensor.detach()
    nbytes = tensor_bytes(source)
    dense = is_dense(source)
    with torch.inference_mode(False), torch.no_grad():
        flat = torch.frombuffer(buffer, dtype=source.dtype, count=source.numel(), offset=offset)
        stride = source.stride() if dense else contiguous_stride(source.shape)
        master = torch.as_strided(flat, source.shape, stride)
        if dense and source.device.type == "cpu":
            buffer.fill(offset, source.data_ptr(), nbytes)
        else:
            master.copy_(source)
        # A tensor that is not a view, so that saving or sharing it sees one storage and no base.
        tensor.data = torch.empty(0, dtype=source.dtype).set_(
            flat.untyped_storage(), 0, source.shape, stride
        )
        if tensor.grad is not None and tensor.grad.device.type != "cpu":
            tensor.grad = tensor.grad.to("cpu")


def share_memory(master: Tensor, others: Iterable[Tensor]) -> None:
    """Re-point ``.data`` of `others`, which lay where `master` was, to where it lies now."""
    for other in others:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            other.data = torch.empty(0, dtype=master.dtype).set_(
                master.untyped_storage(), master.storage_offset(), master.size(), master.stride()
            )


def trim_heap() -> None:
    """Give freed heap memory back to the system: small weights come from the heap."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class Pieces:
    """The masters of one attached model: its pieces, found by address.

    Parameters
    ----------
    state : DeviceState
        The device whose engine reads them.
    name : str
        Of the model, for messages.
    limit : float
        Most bytes to page-lock.
    """

    def __init__(self, state: DeviceState, name: str, limit: float) -> None:
        self._state = state
        self._name = name
        self._limit = limit
        self._pieces: dict[int, Piece] = {}  # by address, in the order they were made
        self._starts: list[int] = []  # their addresses, sorted
        self._lock_warning_shown = False

    @property
    def buffers(self) -> list[HostBuffer]:
        """The host memory of the masters."""
        with self._state.lock:
            return [piece.buffer for piece in self._pieces.values()]

    def add(self, piece: Piece) -> None:
        """Make a piece known to the engine, page-locked as far as the limit allows."""
        locked = sum(buffer.nbytes for buffer in self.buffers if buffer.locked)
        wanted = locked + piece.buffer.nbytes <= self._limit
        refused = self._state.engine.lock(piece.buffer, wanted)
        with self._state.lock:
            self._pieces[piece.start] = piece
            bisect.insort(self._starts, piece.start)
        if refused is not None and not self._lock_warning_shown:
            self._lock_warning_shown = True
            logger.warning(
                "%s: the system does not page-lock %s of its weights (%s); what is not locked is "
                "copied through a small locked ring, which is slower. Close what else holds locked "
                "memory, raise the limit (ulimit -l), or set ram_budget to what may be locked.",
                self._name,
                format_size(piece.buffer.nbytes),
                refused,
            )

    def at(self, address: int) -> Piece | None:
        """Return the piece that `address` lies in."""
        with self._state.lock:
            index = bisect.bisect_right(self._starts, address) - 1
            piece = self._pieces[self._starts[index]] if index >= 0 else None
        return piece if piece is not None and address < piece.end else None

    def count_uses(self, left: Iterable[int], entered: Iterable[int]) -> None:
        """Note which masters a layer has left and which it uses from now on, by address."""
        with self._state.lock:
            for addresses, change in ((left, -1), (entered, 1)):
                for address in addresses:
                    piece = self.at(address)
                    if piece is not None:
                        piece.uses += change

    def give_back(self) -> None:
        """Unlock, and so free, the pieces that no layer uses and no tensor points into."""
        with self._state.lock:
            for start in [start for start, piece in self._pieces.items() if piece.is_abandoned()]:
                try:
                    self._unlock(start)
                except OffloadError as error:
                    logger.warning("%s: old weights are given back later: %s", self._name, error)
                    return

    def give_back_all(self) -> None:
        """Unlock all of it; what fails is there still."""
        with self._state.lock:
            while self._pieces:
                self._unlock(next(reversed(self._pieces)))

    def _unlock(self, start: int) -> None:
        self._state.engine.unlock(self._pieces[start].buffer)
        del self._pieces[start]
        self._starts.remove(start)
