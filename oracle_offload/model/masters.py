"""Host masters: weights move, piece by piece, into page-locked memory of exact size.

A piece is one `HostBuffer` of about 1 GiB. It is touched and filled, the originals are dropped, and
it is locked while the next piece is filled, so that the process never holds more than the weights
and one or two pieces. Where the system does not lock all of it, its beginning is locked, up to a
cut: a page at which a unit begins, so that no tensor is locked by half. A `Parameter` keeps its
identity: only ``.data`` is re-pointed, to a tensor whose storage is exactly its own bytes. So
torch itself counts the references to a master, and a piece is given back, as a whole, when no
reference to any of it is left.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .._core import HostBuffer
from ..disk.origin import Origin
from ..disk.reading import Files
from ..engine.coded import CodedMaster, Prepared
from ..engine.devices import repoint
from ..engine.engines import DeviceState
from ..engine.geometry import (
    aligned,
    contiguous_stride,
    is_dense,
    memory_of,
    tensor_bytes,
    unit_bytes,
)
from ..errors import OffloadError
from ..host import memory
from ..host.progress import DelayedBar
from ..host.sizes import GIB, MIB
from .intake import Intake
from .locking import LockBudget, whole_pages

if TYPE_CHECKING:
    from .sharing import Share

logger = logging.getLogger("oracle_offload")

PIECE_BYTES = GIB
CUT_BYTES = 16 * MIB  # between cuts, unless a unit is larger


def split_pieces(
    units: Sequence[Sequence[Tensor]], piece_bytes: int | None = None
) -> Iterator[list[list[Tensor]]]:
    """Yield the units of one piece after another; no unit is cut.

    Parameters
    ----------
    units : sequence of sequences of Tensor
        The tensors that travel together, in model order; a tensor that occurs twice is placed once.
    piece_bytes : int, optional
        Size that a piece of several units does not exceed; `PIECE_BYTES`.
    """
    piece_bytes = PIECE_BYTES if piece_bytes is None else piece_bytes
    piece: list[list[Tensor]] = []
    size = 0
    placed: set[int] = set()
    for unit in units:
        distinct = {id(tensor): tensor for tensor in unit}
        fresh = [tensor for key, tensor in distinct.items() if key not in placed]
        placed.update(distinct)
        nbytes = unit_bytes(fresh)
        if piece and size + nbytes > piece_bytes:
            yield piece
            piece, size = [], 0
        if fresh:
            piece.append(fresh)
        size += nbytes
    if piece:
        yield piece


def lay_out(units: Sequence[Iterable[int]]) -> tuple[list[int], list[int]]:
    """Return the offset of each unit in a piece, and the cuts, of which the last is its size.

    Parameters
    ----------
    units : sequence of iterables of int
        Bytes of what is in each.
    """
    offsets, cuts = [], []
    offset = begun = 0
    for unit in units:
        nbytes = sum(map(aligned, unit))
        if offset > begun and offset + nbytes > begun + CUT_BYTES:
            offset = begun = whole_pages(offset)
            cuts.append(offset)
        offsets.append(offset)
        offset += nbytes
    return offsets, [*cuts, offset]


class Coder(Protocol):
    """What codes the tensors of one model: see `oracle_offload.compress.coder`."""

    def wants(self, tensor: Tensor) -> bool:
        """Whether it may become a coded master."""

    def may_want(self, tensor: Tensor) -> bool:
        """Whether it could, had nothing failed: all ranks answer alike."""

    def check_budget(self, nbytes: int) -> None:
        """Refuse masters of `nbytes`, where `ram_budget` has no room for so many."""

    def prepare(
        self, tensors: Sequence[tuple[Tensor, Tensor | Origin]], on_bytes: Callable[[int], object]
    ) -> dict[int, Prepared]:
        """Return those of `tensors` that get smaller, coded, by `id`."""

    def bring_together(
        self,
        tensors: Sequence[Tensor],
        prepared: dict[int, Prepared],
        files: Files | None,
        share: Share,
    ) -> dict[int, Prepared]:
        """Add to what this rank has prepared of `tensors` what the others have."""


class Piece:
    """One buffer of masters: known to the engine and given back as a whole.

    Parameters
    ----------
    units : sequence of sequences of Tensor
        Plain strided tensors on any device. Their ``.data`` is re-pointed into the new buffer and
        their old memory dropped. The buffer is ordinary memory still: nothing is locked here.
    on_bytes : callable, optional
        Called with how many bytes each tensor had, for a progress bar.
    node : int, optional
        NUMA node that the memory shall be on, as far as threads may run there; -1 for any.
    files : Files, optional
        Where the values of those tensors come from that have none yet.
    coder : Coder, optional
        What codes those tensors that it wants.
    intake : Intake, optional
        What takes tensors off the device.
    share : Share, optional
        The ranks of this machine whose memory it is, each of which fills a part of it.

    Attributes
    ----------
    is_shared : bool
        Whether other ranks have it as well.
    uses : int
        How many tensors of managed layers are in it.
    cuts : list of int
        Offsets up to which it can be locked; the last is its size.
    locked_bytes : int
        The one up to which it is.
    is_file : bool
        Whether its memory is a file, from which the engine reads what it copies.
    coded : dict of int to CodedMaster
        Those in it, by the address of the tensor that each is read by.
    """

    is_file = False

    def __init__(
        self,
        units: Sequence[Sequence[Tensor]],
        on_bytes: Callable[[int], object] | None = None,
        node: int = -1,
        files: Files | None = None,
        coder: Coder | None = None,
        intake: Intake | None = None,
        share: Share | None = None,
    ) -> None:
        on_bytes = on_bytes or (lambda nbytes: None)
        prepared = {} if coder is None else code(units, coder, files, on_bytes, share)
        offsets, self.cuts = lay_out(
            [
                [prepared[id(t)].nbytes if id(t) in prepared else tensor_bytes(t) for t in unit]
                for unit in units
            ]
        )
        self.is_shared = share is not None
        self.buffer = (
            HostBuffer(self.cuts[-1], node) if share is None else share.buffer(self.cuts, node)
        )
        self.start, self.end = self.buffer.address, self.buffer.address + self.buffer.nbytes
        self.uses = 0
        self.locked_bytes = 0
        self.coded: dict[int, CodedMaster] = {}
        try:
            self._fill(units, offsets, prepared, on_bytes, files, intake, share)
        except BaseException:
            if share is not None:  # what has moved already is this rank's own again
                share.part(self.buffer)
            raise
        self._storages = [
            StorageWeakRef(tensor.untyped_storage()) for unit in units for tensor in unit
        ]

    @property
    def is_known(self) -> bool:
        """Whether the engine knows it, also where an exception came just after that."""
        return self.buffer.known

    def _fill(
        self,
        units: Sequence[Sequence[Tensor]],
        offsets: Sequence[int],
        prepared: dict[int, Prepared],
        on_bytes: Callable[[int], object],
        files: Files | None,
        intake: Intake | None,
        share: Share | None,
    ) -> None:
        to_read: list[tuple[Tensor, Tensor]] = []
        to_fetch: list[tuple[Tensor, int]] = []
        others: list[tuple[Tensor, Tensor]] = []  # that other ranks fill
        for unit, offset in zip(units, offsets, strict=True):
            for tensor in unit:
                if id(tensor) in prepared:
                    found = prepared.pop(id(tensor))
                    self._take(tensor, found, offset)
                    offset += aligned(found.nbytes)
                    continue
                if share is not None and not share.fills(offset, self.cuts[-1]):
                    others.append((tensor, master_at(self.buffer, offset, tensor.detach())))
                    on_bytes(tensor_bytes(tensor))
                elif files is not None and files.have(tensor):
                    to_read.append((tensor, master_at(self.buffer, offset, tensor)))
                elif intake is not None and intake.takes(tensor):
                    to_fetch.append((tensor, offset))
                else:
                    move_into(tensor, self.buffer, offset)
                    on_bytes(tensor_bytes(tensor))
                offset += aligned(tensor_bytes(tensor))
        if to_fetch:
            assert intake is not None
            intake.fetch(to_fetch, self.buffer, on_bytes, self._point)
        if files is not None and to_read:
            files.read(to_read, on_bytes)
            for tensor, master in to_read:
                point_at(tensor, master)
        if share is not None:
            share.wait_until_filled(others, files)
            for tensor, master in others:
                point_at(tensor, master)

    def _point(self, tensor: Tensor, offset: int) -> None:
        point_at(tensor, master_at(self.buffer, offset, tensor.detach()))

    def _take(self, tensor: Tensor, found: Prepared, offset: int) -> None:
        """Make `tensor` a coded master at `offset`; what another rank has coded, it fills in."""
        if found.coded is not None:
            self.buffer.fill(offset, found.coded.address, found.nbytes)
        point_at(tensor, found.readable)
        coded = CodedMaster(tensor, self.start + offset, found.nbytes, found.kind)
        self.coded[coded.start] = coded

    def is_abandoned(self) -> bool:
        """Whether no layer uses it and no tensor anywhere points into it."""
        return self.uses == 0 and all(storage.expired() for storage in self._storages)


class FilePiece(Piece):
    """Masters that stay in their file, of which a private mapping is their memory.

    Parameters
    ----------
    buffer : HostBuffer
        See `WeightFile.memory`.
    tensors : sequence of (Tensor, int)
        What of the model is in the file, and where it begins; each is pointed there.
    coded : sequence of (Tensor, int, int, int)
        What is there in fewer bytes, of tensors that are in their places already: where that
        begins, its bytes, and its kind, see `oracle_offload._core.encode`.
    """

    is_file = True

    def __init__(
        self,
        buffer: HostBuffer,
        tensors: Sequence[tuple[Tensor, int]],
        coded: Sequence[tuple[Tensor, int, int, int]] = (),
    ) -> None:
        self.buffer = buffer
        self.start, self.end = buffer.address, buffer.address + buffer.nbytes
        self.is_shared = False
        self.uses = self.locked_bytes = 0
        self.cuts = [0]  # none of it is locked
        for tensor, begin in tensors:
            point_at(tensor, master_at(buffer, begin, tensor))
        masters = [CodedMaster(t, self.start + at, nbytes, kind) for t, at, nbytes, kind in coded]
        self.coded = {master.start: master for master in masters}
        there = [*(tensor for tensor, _ in tensors), *(tensor for tensor, *_ in coded)]
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in there]


# Of which file something is to be kept, where it begins there, and its bytes.
Row = tuple[FilePiece, int, int]


class Room(Piece):
    """Memory for masters that stay in their file, where the engine keeps what it reads of them.

    The tensors are not in it: their own memory is the file's. It is locked once all has arrived.

    Parameters
    ----------
    units : sequence of sequences of Row
        What is to be kept.
    node : int
        NUMA node that the memory shall be on; -1 for any.
    for_now : bool
        Whether it may be emptied before the model is detached.

    Attributes
    ----------
    kept : list of (int, int, int)
        For `_core.Engine.keep_in`.
    """

    def __init__(
        self, units: Sequence[Sequence[Row]], node: int = -1, for_now: bool = False
    ) -> None:
        self.for_now = for_now
        offsets, self._cuts = lay_out([[nbytes for _, _, nbytes in unit] for unit in units])
        self.buffer = HostBuffer(self._cuts[-1], node)
        self.start, self.end = self.buffer.address, self.buffer.address + self.buffer.nbytes
        self.is_shared = False
        self.uses = self.locked_bytes = 0
        self.cuts = [0]
        self.coded = {}
        self._files = list({id(file): file for unit in units for file, _, _ in unit}.values())
        self.kept: list[tuple[int, int, int]] = []
        for unit, offset in zip(units, offsets, strict=True):
            for file, begin, nbytes in unit:
                self.kept.append((file.start + begin, nbytes, offset))
                offset += aligned(nbytes)
        self._wanted, self._before = sum(nbytes for _, nbytes, _ in self.kept), 0

    def is_full(self) -> bool:
        """Whether all of it has arrived."""
        return self.buffer.arrived == self._wanted

    def may_be_locked(self, turned: bool) -> bool:
        """Whether all of it has arrived, or between two turns nothing more has."""
        arrived, enough = self.buffer.arrived, {self._wanted}
        if turned:
            enough.add(self._before)
            self._before = arrived
        if not arrived or arrived not in enough:
            return False
        self.cuts = self._cuts
        return True

    def is_abandoned(self) -> bool:
        """Whether nothing of a file is kept in it."""
        return not self.kept or all(not file.is_known for file in self._files)


def code(
    units: Sequence[Sequence[Tensor]],
    coder: Coder,
    files: Files | None,
    on_bytes: Callable[[int], object],
    share: Share | None = None,
) -> dict[int, Prepared]:
    """Return those tensors that become coded masters, by `id`.

    What files have and no mapping can show is read first, into memory that goes once it is coded.
    Where ranks share a piece, each codes a part, and has from the others what they have coded.
    """
    # All ranks have the same list, also where one of them cannot code any more.
    asked = coder.wants if share is None else coder.may_want
    candidates = [tensor for unit in units for tensor in unit if asked(tensor)]
    if share is not None:
        owns = share.codes(candidates)
        mine = [t for t, own in zip(candidates, owns, strict=True) if own and coder.wants(t)]
        prepared = _code(mine, coder, files, on_bytes)
        return coder.bring_together(candidates, prepared, files, share)
    return _code(candidates, coder, files, on_bytes)


def _code(
    candidates: Sequence[Tensor],
    coder: Coder,
    files: Files | None,
    on_bytes: Callable[[int], object],
) -> dict[int, Prepared]:
    wanted: list[tuple[Tensor, Tensor | Origin]] = []
    to_read: list[tuple[Tensor, Tensor]] = []
    for tensor in candidates:
        if files is None or not files.have(tensor):
            wanted.append((tensor, tensor))
        elif (origin := files.origin(tensor)) is not None:
            wanted.append((tensor, origin))
        else:
            with torch.inference_mode(False):
                host = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
            to_read.append((tensor, host))
            wanted.append((tensor, host))
    if files is not None and to_read:
        files.read(to_read, lambda nbytes: None)
        for tensor, host in to_read:
            point_at(tensor, host)
    prepared = coder.prepare(wanted, on_bytes)
    for tensor, values in wanted:
        if files is not None and isinstance(values, Origin) and id(tensor) in prepared:
            files.skip(tensor)
    return prepared


def master_at(buffer: HostBuffer, offset: int, tensor: Tensor) -> Tensor:
    """Return a tensor at `offset` of `buffer` with the shape, dtype and dense strides of another.

    It is no view, so that saving or sharing it sees one storage and no base.
    """
    stride = tensor.stride() if is_dense(tensor) else contiguous_stride(tensor.shape)
    with torch.inference_mode(False), torch.no_grad():
        flat = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(flat.untyped_storage(), 0, tensor.shape, stride)


def point_at(tensor: Tensor, master: Tensor) -> None:
    """Re-point ``tensor.data`` to `master`; a gradient comes to the host with it."""
    repoint(tensor, master)


def move_into(tensor: Tensor, buffer: HostBuffer, offset: int) -> None:
    """Re-point ``tensor.data`` to `offset` of `buffer`; values and dense strides stay."""
    source = tensor.detach()
    master = master_at(buffer, offset, source)
    if is_dense(source) and source.device.type == "cpu":
        buffer.fill(offset, source.data_ptr(), tensor_bytes(source))
    else:
        with torch.inference_mode(False), torch.no_grad():
            master.copy_(source)
    point_at(tensor, master)


def share_memory(master: Tensor, others: Iterable[Tensor]) -> None:
    """Re-point ``.data`` of `others`, which shared the old memory of `master`, to the new one."""
    for other in others:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            other.data = torch.empty(0, dtype=master.dtype, device="cpu").set_(
                master.untyped_storage(), master.storage_offset(), master.size(), master.stride()
            )


# A tensor that was moved into a piece, the device that it has left, and what shares its memory.
Moved = tuple[Tensor, torch.device, Sequence[Tensor]]


def move_back(moved: Iterable[Moved], set_data: Callable[[Tensor, Tensor], None]) -> None:
    """Undo the moves of an attach that failed: no weight stays where its model does not expect it.

    Parameters
    ----------
    moved : iterable of tuples
        See `Moved`; those that have not moved after all are left alone.
    set_data : callable
        See `oracle_offload.engine.devices.Device.set_data`.
    """
    for tensor, device, others in moved:
        if tensor.device == device:
            continue
        gradient = tensor.grad
        with torch.no_grad():
            set_data(tensor, tensor.detach().to(device))
            for other in others:
                set_data(other, tensor.detach())
            if gradient is not None:
                tensor.grad = gradient.to(device)


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
        self.budget = LockBudget(state, name, limit)
        self._pieces: dict[int, Piece] = {}  # by address, in the order they were made
        self._starts: list[int] = []  # their addresses, sorted
        self._coded: dict[int, CodedMaster] = {}  # by the address of the tensor
        self._mapped: list[CodedMaster] = []  # all that ever were, until `own`
        self._filling: list[Room] = []  # not locked yet
        self.share: Share | None = None  # the ranks that have some of them together

    @property
    def buffers(self) -> list[HostBuffer]:
        """The host memory of the masters."""
        return [piece.buffer for piece in self.in_order()]

    @property
    def node(self) -> int:
        """The NUMA node that they shall be on: the device's, -1 where it has none."""
        return self._state.engine.numa_node

    def add(self, piece: Piece) -> None:
        """Make a piece known to the engine, page-locked as far as the budget allows."""
        try:
            self.budget.lock(piece, self.in_order())
        finally:
            self.note(piece)

    def add_room(self, room: Room) -> None:
        """Let a room fill, which is locked once it is full: see `lock_arrived`."""
        self.add(room)
        self._filling.append(room)
        self._state.engine.keep_in(room.buffer, room.kept)

    def empty_rooms(self) -> None:
        """Keep nothing in the rooms that are for now, and give back their memory."""
        for room in list(self._pieces.values()):
            if isinstance(room, Room) and room.for_now:
                self._state.engine.keep_in(room.buffer, [])
                room.kept = []
        self.give_back()

    def waits_for(self, turned: bool) -> bool:
        """Whether `lock_arrived` may find something to lock; this takes no lock."""
        return any(turned or room.is_full() for room in self._filling)

    def lock_arrived(self, turned: bool) -> None:
        """Lock the rooms that have filled, as far as the budget allows.

        Where a whole step or sweep has passed since this was `turned` last, those too that it has
        brought nothing more of.
        """
        with self._state.lock:
            if not self._filling:  # another thread has locked them, or detached the model
                return
            for room in [room for room in self._filling if room.may_be_locked(turned)]:
                self.budget.unlock(room)
                others = [piece for piece in self.in_order() if piece is not room]
                self.budget.lock(room, others)
                self._filling.remove(room)
            if not self._filling:
                self.budget.leave_headroom(self.in_order())
                logger.info("%s: the weights that memory has room for have arrived", self._name)

    def note(self, piece: Piece) -> None:
        """Keep a piece that the engine knows, perhaps in spite of an exception."""
        if piece.is_known:
            with self._state.lock:
                self._pieces[piece.start] = piece
                bisect.insort(self._starts, piece.start)
                self._coded.update(piece.coded)
                if not piece.is_file:  # a model that is on disk stays there
                    self._mapped += piece.coded.values()

    def abandon(self, piece: Piece) -> None:
        """Have `own` copy what is in files of a piece that will not be passed to `note`."""
        self._mapped += piece.coded.values()
        if self.share is not None:
            self.share.part(piece.buffer)

    def share_with(self, share: Share | None) -> None:
        """Have masters to come, of what is frozen, together with the ranks of `share`."""
        self.share = share
        if share is not None:
            self._state.shares.append(share)

    def intake(self, tensors: Iterable[Tensor]) -> Intake:
        """Return what takes those of `tensors` off the device that are there, once entered."""
        there = sum(aligned(tensor_bytes(t)) for t in tensors if t.device == self._state.device)
        return Intake(self._state, there)

    def in_order(self) -> list[Piece]:
        """Return the pieces that are in memory, oldest first."""
        with self._state.lock:
            return [piece for piece in self._pieces.values() if not piece.is_file]

    def shared(self) -> list[HostBuffer]:
        """Return the memory that other ranks have as well, oldest first."""
        return [piece.buffer for piece in self.in_order() if piece.is_shared]

    def may_lock_beside(self, nbytes: int) -> bool:
        """Whether `nbytes` of something else may be locked."""
        return self.budget.allows(nbytes, self.in_order())

    def coded_at(self, address: int) -> CodedMaster | None:
        """Return the coded master of the tensor that is at `address`."""
        coded = self._coded.get(address)
        if coded is not None and coded.is_gone():
            with self._state.lock:
                self._coded.pop(address, None)
            return None
        return coded

    def forget_coded(self, coded: CodedMaster) -> None:
        """The tensor is a coded master no more; layers that use it have to follow."""
        with self._state.lock:
            piece = self.at(coded.start)
            if piece is not None and self._coded.pop(coded.start, None) is not None:
                piece.uses -= coded.uses
                coded.uses = 0

    @property
    def coded(self) -> list[CodedMaster]:
        """The coded masters, those too that are current no more."""
        with self._state.lock:
            return list(self._coded.values())

    def at(self, address: int) -> Piece | None:
        """Return the piece that the master of the tensor at `address` is in."""
        with self._state.lock:
            coded = self.coded_at(address)
            return self._piece_at(address if coded is None else coded.address)

    def count_uses(self, left: Iterable[int], entered: Iterable[int]) -> None:
        """Note which masters a layer has left and which it uses from now on, by address."""
        with self._state.lock:
            for addresses, change in ((left, -1), (entered, 1)):
                for address in addresses:
                    piece, coded = self.at(address), self.coded_at(address)
                    if piece is not None:
                        piece.uses += change
                    if coded is not None:
                        coded.uses += change

    def take_out(self, tensors: Iterable[Tensor | None]) -> None:
        """Move plain tensors that are in a piece into memory of their own."""
        for tensor in tensors:
            if tensor is None or type(tensor) is not nn.Parameter:
                continue
            if tensor.device.type == "cpu" and self.at(tensor.data_ptr()) is not None:
                with torch.inference_mode(False), torch.no_grad():
                    tensor.data = tensor.detach().clone()

    def give_back(self) -> None:
        """Unlock, and so free, the pieces that no layer uses and no tensor points into."""
        with self._state.lock:
            for start in [start for start, piece in self._pieces.items() if piece.is_abandoned()]:
                try:
                    self._unlock(start)
                except OffloadError as error:
                    why = str(error)  # whose frames would keep the piece alive in a kept record
                    logger.warning("%s: old weights are given back later: %s", self._name, why)
                    return

    def give_back_all(self) -> None:
        """Unlock all of it; what fails is there still."""
        with self._state.lock:
            while self._pieces:
                self._unlock(next(reversed(self._pieces)))
            if self.share is not None:
                self.share.close()
                self._state.shares.remove(self.share)
                self.share = None

    def shared_at(self, address: int) -> bool:
        """Whether the tensor at `address` is in memory that ranks share."""
        if self.share is None:
            return False
        piece = self._piece_at(address)
        return piece is not None and piece.is_shared

    def is_on_disk(self, address: int) -> bool:
        """Whether the tensor at `address` is in a file."""
        piece = self._piece_at(address)
        return piece is not None and piece.is_file

    def check_files(self, tensors: Iterable[Tensor]) -> None:
        """Refuse those of `tensors` whose memory shows a file that was written since.

        Raises
        ------
        OffloadError
            It names the file.
        """
        for tensor in tensors:
            start, end = memory_of(tensor)
            piece = self._piece_at(start)
            if piece is not None and piece.is_file:
                piece.buffer.check(start - piece.start, end - start)

    def _piece_at(self, address: int) -> Piece | None:
        with self._state.lock:
            index = bisect.bisect_right(self._starts, address) - 1
            piece = self._pieces[self._starts[index]] if index >= 0 else None
        return piece if piece is not None and address < piece.end else None

    def own(self) -> int:
        """Copy what is still in mapped files to memory, as far as the host has room.

        Returns
        -------
        int
            The bytes that stay in files.
        """
        mapped = [] if sys.platform != "linux" else [c for c in self._mapped if not c.is_gone()]
        left = 0
        with DelayedBar(sum(c.tensor_bytes for c in mapped), "oracle_offload: detach") as bar:
            for coded in mapped:
                available = memory.available_bytes()
                has_room = available is None or coded.tensor_bytes <= memory.SPARED * available
                if not has_room or not coded.own():
                    left += coded.tensor_bytes
                bar.update(coded.tensor_bytes)
        self._mapped.clear()
        return left

    def _unlock(self, start: int) -> None:
        self.budget.unlock(self._pieces[start])
        if self.share is not None:
            self.share.part(self._pieces[start].buffer)
        for address, coded in self._pieces[start].coded.items():
            if self._coded.get(address) is coded:
                self.forget_coded(coded)
        self._filling = [room for room in self._filling if room.start != start]
        del self._pieces[start]
        self._starts.remove(start)
