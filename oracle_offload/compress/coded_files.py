"""Coded weights of files that a model stays in: what ``disk=True`` reads, in fewer bytes.

Each weight file gets a second one in the cache, of the same format. It has the coded weights of
those tensors that get smaller, as bytes, under the names of `_name`. It is made once, and is
called after the file's identity and after what the model wants of it: the next attach reads headers
alone. A file that was written since has another identity, and is coded again. What is in it is
decoded as it is: ORACLE_OFFLOAD_VERIFY compares each chunk with its checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from .. import _core
from .._core import HostBuffer
from ..disk.checkpoint import WeightFile
from ..disk.header import Stored, write_header
from ..engine.geometry import tensor_bytes
from ..errors import OffloadError
from ..host.owned import ForeignError, open_own
from ..host.progress import DelayedBar
from ..model.on_disk import CodedPlace, Place
from .choice import codable
from .coder import kind_of, pays
from .store import CODED, OF_FILE, Store, user_store

if TYPE_CHECKING:
    from ..model.selection import Unit

logger = logging.getLogger("oracle_offload")

_VERSION = 1
_TRIES = 5  # to open a file that other processes make, or remove
_TICK_NS = 20_000_000  # longer than between two times that a file system tells apart


def coded_places(units: Sequence[Unit], places: dict[int, Place]) -> dict[int, CodedPlace]:
    """Return where the coded weights of tensors are in files, by `id`; what lacks is made.

    Where the cache cannot be written, weights are read as they are from there on, and a warning
    says so.

    Parameters
    ----------
    units : sequence of lists of Chosen
        In model order.
    places : dict of int to tuple
        By `id`: a tensor, its file, and where it begins there.

    Raises
    ------
    OffloadError
        A file was written while it was coded.
    """
    by_file: dict[int, list[Place]] = {}
    for tensor in codable(units):
        if id(tensor) in places:
            place = places[id(tensor)]
            by_file.setdefault(id(place[1]), []).append(place)
    store, found = user_store(), {}
    total = sum(tensor_bytes(tensor) for rows in by_file.values() for tensor, _, _ in rows)
    with DelayedBar(total, "oracle_offload: compress") as bar:
        for rows in by_file.values():
            try:
                memory, tensors = _coded_file(store, rows, bar.update)
            except OSError as error:
                logger.warning(
                    "weights are read from '%s' as they are, because '%s' cannot be written: %s. "
                    "ORACLE_OFFLOAD_CACHE_DIR names another place.",
                    rows[0][1].path,
                    store.folder,
                    error,
                )
                continue
            for tensor, _, begin in rows:
                stored = tensors.get(_name(tensor, begin))
                if stored is not None:
                    kind = kind_of(tensor)
                    assert kind is not None
                    found[id(tensor)] = CodedPlace(memory, stored.begin, stored.nbytes, kind)
    return found


def _name(tensor: Tensor, begin: int) -> str:
    """Return what the coded weights of a tensor that begins there are called in their file."""
    return f"{begin}.{tensor.dtype}"


def _coded_file(
    store: Store, rows: Sequence[Place], on_bytes: Callable[[int], object]
) -> tuple[HostBuffer, dict[str, Stored]]:
    """Return the file with the coded weights of these, which are in one file; it may be made.

    Another process may make it as well at this moment, or remove it: that one which is open counts,
    whatever becomes of its name.
    """
    file = rows[0][1]
    wanted = {(begin, tensor_bytes(t)): (t, begin) for t, _, begin in rows}  # once, if tied
    order = [wanted[key] for key in sorted(wanted)]
    _settle(file)
    # The name of the file tells nothing of what is in it.
    known = [_VERSION, file.identity()[1:], [_name(*row) for row in order]]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]
    name = f"{OF_FILE}{digest}{CODED}"
    for _ in range(_TRIES):
        try:
            coded = _open(store.path(name))
        except OffloadError as error:
            store.drop(name, error)
            coded = None
        if coded is None:
            _make(store, name, file, order, on_bytes)
            continue
        with contextlib.closing(coded), contextlib.suppress(OffloadError):  # it has gone, say
            found = coded.memory(), coded.tensors
            coded.note_use()
            return found
    raise OSError(f"'{store.path(name)}' is removed again and again")


def _settle(file: WeightFile) -> None:
    """Wait until a write would give the file another time than it has, which is a moment."""
    newest = max(file.times_ns())
    while 0 <= time.time_ns() - newest < _TICK_NS:
        time.sleep(1e-3)


def _open(path: Path) -> WeightFile | None:
    """Open a file of the cache that has coded weights; None where there is none of this user's.

    Raises
    ------
    OffloadError
        It is damaged.
    """
    with contextlib.suppress(FileNotFoundError, ForeignError):
        return WeightFile(path, opener=lambda name, _: open_own(Path(name)))
    return None


def _make(
    store: Store,
    name: str,
    file: WeightFile,
    order: Sequence[tuple[Tensor, int]],
    on_bytes: Callable[[int], object],
) -> None:
    """Write the coded weights of tensors, which begin there in `file`."""
    most = {_name(t, begin): ("U8", (tensor_bytes(t),)) for t, begin in order}
    first = len(write_header(most))
    threads = os.cpu_count() or 1
    sizes: dict[str, tuple[str, Sequence[int]]] = {}
    with store.making(name, first + sum(tensor_bytes(t) for t, _ in order)) as descriptor:
        os.lseek(descriptor, first, os.SEEK_SET)
        # While one is coded the next is read, and the one before it is written.
        with ThreadPoolExecutor(2, "oracle_offload-code") as pool:
            written: Future[None] | None = None
            for tensor, begin, values in _read_ahead(pool, file, order):
                kind, count, nbytes = kind_of(tensor), tensor.numel(), tensor_bytes(tensor)
                assert kind is not None
                coded = HostBuffer(_core.coded_room(kind, count))
                size = _core.encode(
                    kind, coded.address, coded.nbytes, threads, values.address, count
                )
                if pays(size, nbytes):
                    sizes[_name(tensor, begin)] = "U8", (size,)
                    if written is not None:
                        written.result()
                    written = pool.submit(_write, descriptor, memoryview(coded).cast("B")[:size])
                on_bytes(nbytes)
            if written is not None:
                written.result()
        file.check_unwritten()
        file.uncache()
        os.lseek(descriptor, 0, os.SEEK_SET)
        _write(descriptor, memoryview(write_header(sizes, first)))
        os.fsync(descriptor)  # the name must not be there before the bytes are


def _read_ahead(
    pool: ThreadPoolExecutor, file: WeightFile, order: Sequence[tuple[Tensor, int]]
) -> Iterable[tuple[Tensor, int, HostBuffer]]:
    def read(tensor: Tensor, begin: int) -> HostBuffer:
        values = HostBuffer(tensor_bytes(tensor))
        file.read_into(memoryview(values).cast("B"), begin)
        return values

    coming = pool.submit(read, *order[0])
    for number, (tensor, begin) in enumerate(order):
        values = coming.result()
        if number + 1 < len(order):
            coming = pool.submit(read, *order[number + 1])
        yield tensor, begin, values


def _write(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
