"""How leaves become managed: their masters, their units in the engine, and their classes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from ..engine.geometry import unit_bytes
from ..errors import OffloadError
from ..host.progress import DelayedBar
from ..layers.leaf import Leaf, Structure
from ..layers.swap import swap_in
from . import masters
from .intake import Intake
from .selection import Chosen, choose_again, group_units, least_bytes
from .sharing import is_shared

if TYPE_CHECKING:
    from .attachment import Attachment
    from .loading import Loading
    from .on_disk import InMemory, OnDisk
    from .sharing import Share

logger = logging.getLogger("oracle_offload")

_PLAIN = Tensor, nn.Parameter


def leave_inference_mode(module: nn.Module) -> None:
    """Make ordinary tensors, in their memory, of those that were made under inference mode.

    torch counts no writes to these, and goes on counting none where they take other memory, as
    masters and all that moves to a device do: from then on its own operators raise, outside
    inference mode.

    Raises
    ------
    OffloadError
        Something but Python holds such a tensor, which torch then exchanges for no other.
    """
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    for name, tensor in list(named):
        if not tensor.is_inference() or tensor.is_meta or type(tensor) not in _PLAIN:
            continue
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
                tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )
        made.requires_grad_(tensor.requires_grad)
        try:
            # Not `swap_tensors`, which refuses what Python code holds weakly, a GRU its weights.
            torch._C._swap_tensor_impl(tensor, made)
        except RuntimeError as error:
            raise OffloadError(
                f"'{name}' was made under torch.inference_mode(), and something in C++ holds it, "
                f"which keeps it from becoming an ordinary tensor ({error}): make the model "
                "outside inference mode."
            ) from error


def build_masters(
    pieces: masters.Pieces,
    units: Sequence[Sequence[Chosen]],
    moved: list[masters.Moved],
    loading: Loading | None = None,
    coder: masters.Coder | None = None,
    share: Share | None = None,
    on_disk: OnDisk | None = None,
) -> InMemory | None:
    """Move the weights into masters, and add to `moved` those that have left a device.

    With `loading`, their values come from its files. What `coder` wants and makes smaller becomes
    coded masters. What is frozen is in memory that the ranks of `share` have together. What is
    `on_disk` stays there; what memory keeps of that is returned.
    """
    aliases: dict[int, list[Tensor]] = {}
    for leaf in (leaf for unit in units for leaf in unit):
        leaf.kind.prepare(leaf.module)
        aliases.update(leaf.kind.aliases(leaf.module))
    tensors = [[t for leaf in unit for t in leaf.tensors()] for unit in units]
    of_files = None if loading is None else loading.bytes_of
    total = sum(
        unit_bytes(unit) if of_files is None else sum(map(of_files, unit)) for unit in tensors
    )
    staying = [] if on_disk is None else [t for unit in tensors for t in unit if on_disk.has(t)]
    tensors = [[t for t in unit if on_disk is None or not on_disk.has(t)] for unit in tensors]
    beside = {id(tensor): tensor for unit in tensors for tensor in unit}.values()
    host_bytes = sum(buffer.nbytes for buffer in pieces.buffers)
    in_memory = None
    with (
        DelayedBar(total, "oracle_offload: attach") as bar,
        pieces.intake(beside) as intake,
        _LockedBeside(pieces, intake) as locked,
    ):
        if on_disk is not None and loading is not None:
            in_memory = on_disk.put(pieces, loading, bar.update)
            for tensor in staying:
                masters.share_memory(tensor, aliases.get(id(tensor), ()))
        piece_bytes = None if loading is None else loading.piece_bytes
        for units_of_piece, of_ranks in _pieces(tensors, piece_bytes, share):
            of_piece = [tensor for unit in units_of_piece for tensor in unit]
            moved += [
                (tensor, tensor.device, aliases.get(id(tensor), []))
                for tensor in of_piece
                if tensor.device.type != "cpu"
            ]
            locked.begin()
            piece = masters.Piece(
                units_of_piece, bar.update, pieces.node, loading, coder, intake, of_ranks
            )
            locked.take(piece)
            for tensor in of_piece:
                masters.share_memory(tensor, aliases.get(id(tensor), ()))
            masters.trim_heap()
            locked.end()
            host_bytes += piece.buffer.nbytes
            if coder is not None:
                coder.check_budget(host_bytes)
    return in_memory


def _pieces(
    units: Sequence[Sequence[Tensor]], piece_bytes: int | None, share: Share | None
) -> Iterator[tuple[list[list[Tensor]], Share | None]]:
    """Yield the units of each piece, and the ranks that have it together."""
    shared = [] if share is None else [unit for unit in units if is_shared(unit)]
    own = list(units) if share is None else [unit for unit in units if not is_shared(unit)]
    for units_of_piece in masters.split_pieces(shared, piece_bytes):
        yield units_of_piece, share
    for units_of_piece in masters.split_pieces(own, piece_bytes):
        yield units_of_piece, None


class _LockedBeside:
    """Locks each piece while the next one is filled; a context manager.

    Parameters
    ----------
    pieces : Pieces
        Those that are locked, in the order in which they were taken.
    intake : Intake
        Closed where the system refuses to lock a piece, which may have its room.
    """

    def __init__(self, pieces: masters.Pieces, intake: Intake) -> None:
        self._pieces = pieces
        self._intake = intake
        self._pool = ThreadPoolExecutor(1, "oracle_offload-lock")
        self._filled: masters.Piece | None = None
        self._locking: tuple[masters.Piece, Future[str | None]] | None = None

    def __enter__(self) -> _LockedBeside:
        return self

    def take(self, piece: masters.Piece) -> None:
        """Lock `piece`, which is filled, at the next `begin` or at the end."""
        self._filled = piece

    def begin(self) -> None:
        """Begin to lock what was taken."""
        if self._filled is not None:
            attempt = self._pieces.budget.attempt
            future = self._pool.submit(attempt, self._filled, self._pieces.in_order())
            self._locking, self._filled = (self._filled, future), None

    def end(self) -> None:
        """Wait for what was begun.

        However often the wait is interrupted: what is locked by half could not be given back.
        """
        if self._locking is None:
            return
        (piece, future), interrupt = self._locking, None
        while not future.done():
            try:
                wait([future])
            except BaseException as error:
                interrupt = error
        self._locking = None
        self._pieces.note(piece)
        if interrupt is not None:
            raise interrupt
        if future.result() is not None:
            self._intake.close()
            self._pieces.add(piece)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        try:
            self.end()
            if kind is None and self._filled is not None:
                piece, self._filled = self._filled, None
                self._pieces.add(piece)
        except Exception:
            if kind is None:
                raise
        finally:
            if self._filled is not None:
                self._pieces.abandon(self._filled)
            self._pool.shutdown()


class Attached(Structure, Protocol):
    """The modules of one attached model: see `oracle_offload.model.structure`."""

    @property
    def attachment(self) -> Attachment:
        """What it holds of its device."""


def add_units(structure: Attached, units: Sequence[Sequence[Chosen]]) -> list[Leaf]:
    """Tell the engine of the units; return the layers of all of them."""
    with structure.attachment.state.lock:
        return [layer for unit in units for layer in _add_unit(structure, unit)]


def _add_unit(structure: Attached, unit: Sequence[Chosen]) -> list[Leaf]:
    attachment = structure.attachment
    layers = [leaf.kind(leaf.module, leaf.name, structure) for leaf in unit]
    trainable = any(tensor.requires_grad for leaf in unit for tensor in leaf.tensors())
    number, members = attachment.state.engine.add_unit(
        attachment.model, [layer.told(layer.masters) for layer in layers], trainable
    )
    for layer, (member, offsets) in zip(layers, members, strict=True):
        layer.placed(number, member, offsets)
        attachment.layers.append(layer)
        attachment.pieces.count_uses((), layer.masters.addresses.values())
    if trainable:
        attachment.trained_units.add(number)
        attachment.held_units.add(number)
    return layers


def take_over_calls(layers: Sequence[Leaf]) -> None:
    """Let the modules of `layers` compute with borrowed weights from now on."""
    for layer in layers:
        for part in layer.modules():
            swap_in(part, layer)


def take_anew(structure: Attached, root: nn.Module, called: Iterable[nn.Module | None]) -> bool:
    """Manage what replaced layers that were let go, as `attach` would: it was quantised, say.

    What cannot be managed, for want of memory too, is left as it is.

    Parameters
    ----------
    structure : Attached
        Of the attached model.
    root : nn.Module
        The model.
    called : iterable of nn.Module or None
        Left as they are, because their calls have begun.

    Returns
    -------
    bool
        Whether one of `called` is to be taken later.
    """
    attachment = structure.attachment
    chosen = choose_again(root, attachment.lost)
    begun = {id(module) for module in called}
    fresh = [leaf for leaf in chosen if id(leaf.module) not in begun]
    if not fresh:
        return bool(chosen)
    units = group_units(fresh)
    moved: list[masters.Moved] = []
    layers: list[Leaf] = []
    try:
        attachment.arena.make_room(least_bytes(units))
        build_masters(attachment.pieces, units, moved)
        for unit in units:
            layers += add_units(structure, [unit])
    except Exception as error:  # of a library's tensors, too
        logger.warning(
            "%s: %d layers that were replaced after attach stay on the device: %s",
            attachment.name,
            len(fresh) - len(layers),
            error,
        )
    take_over_calls(layers)
    with structure.attachment.state.lock:
        for layer in layers:
            attachment.lost.pop(layer.name, None)
            attachment.reasons.pop(layer.name, None)
        order = {name: number for number, (name, _) in enumerate(root.named_modules())}
        attachment.layers[:] = sorted(
            attachment.layers, key=lambda layer: order.get(layer.name, len(order))
        )
    logger.info("%s: %d layers are managed again", attachment.name, len(layers))
    return len(chosen) > len(fresh)
