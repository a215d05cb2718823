"""One host copy for all ranks of a machine: ``attach(..., share="node")``.

The first rank makes a file in memory that has no name. All ranks map it, so it is freed when the
last process that has it ends, however that ends. On Windows the first rank makes an unnamed section
for each piece, which is freed as well. Each rank fills a part of every piece of masters, and no
rank reads a piece before all have. What the others filled is compared with what this rank was
going to fill, or comes from the same files. Each locks what it maps for its own device. After that
only the first rank writes it, while all others wait (`MemoryManager.writing`).

Weights that are trained are never shared: each rank has its own.
"""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _core
from .._core import HostBuffer
from ..disk.reading import Files
from ..engine.geometry import aligned, is_dense, tensor_bytes
from ..errors import OffloadError, StaleWeightsError
from ..host.ranks import LocalRanks, meet, on_all
from .intake import flat_bytes
from .locking import whole_pages
from .selection import Unit

NODE = "node"
_shares: weakref.WeakSet[Share] = weakref.WeakSet()
_HEAD_BYTES = 4096  # of a page, which has the generation
_GENERATION = struct.Struct("=Q")


class Share:
    """The file that the masters of one attached model are in, and the ranks that have it.

    Parameters
    ----------
    ranks : LocalRanks
        All of this machine.

    Attributes
    ----------
    nbytes : int
        Of the masters in it.
    is_writing : bool
        Whether the first rank may write them now, and the others wait for it.
    merges : int
        Of adapters into what is shared, since that began.
    """

    def __init__(self, ranks: LocalRanks) -> None:
        self.ranks = ranks
        _shares.add(self)
        self.is_writing = False
        self.merges = 0
        self._file = -1
        self._sections: list[int] = []  # one of each piece, where a file cannot grow
        self._header: HostBuffer | None = None
        self._places: dict[int, tuple[int, int]] = {}  # file and offset, by a piece's address
        self._end = whole_pages(_HEAD_BYTES)
        self._names: dict[int, str] = {}  # of tensors, by `id`, for messages
        try:
            self._file = self._make(self._end)
            on_all(ranks, "sealed", self._check_seal)
            self._header = HostBuffer(_HEAD_BYTES, file=self._file)
        except BaseException:
            self.let_go()
            raise
        self._seen = self._generation()

    def _make(self, nbytes: int) -> int:
        """Return memory of `nbytes` that all ranks have; the first makes it."""
        made = -1

        def make() -> None:
            nonlocal made
            try:
                made = _core.section_create(nbytes) if self.ranks.is_first else -1
            except OSError as error:
                raise OffloadError(
                    f"share='node': the system makes no shared memory ({error}); attach without "
                    "it, and each rank has its own masters."
                ) from error

        try:
            # The others wait for it next: they learn first whether there is one.
            on_all(self.ranks, "made", make)
            return self.ranks.share_file(made if self.ranks.is_first else None)
        except BaseException:
            if made >= 0:
                _core.section_close(made)
            raise

    def _check_seal(self) -> None:
        if not self.ranks.passes_files:  # it comes from the system, and never changes its size
            return
        import fcntl

        with contextlib.suppress(OSError):  # it is no memory of that kind
            if fcntl.fcntl(self._file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                return
        raise OffloadError(
            f"what rank {self.ranks.at.local_rank} of this machine was passed is not memory as "
            "rank 0 makes it: another program is between them. Attach without share='node'."
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the masters in the file."""
        return self._end - whole_pages(_HEAD_BYTES)

    # ---- what all ranks have to be alike in ----

    def least(self, limit: int) -> int:
        """Return the least bytes that any rank takes its `ram_budget` for."""
        least: int = min(self.ranks.exchange("ram_budget", limit))
        return least

    def agree(
        self, units: Sequence[Unit], coded: Sequence[Tensor], files: list[list[int | str]]
    ) -> list[Tensor]:
        """Compare what is to be attached, and return the tensors that the first rank would code.

        Raises
        ------
        OffloadError
            Layers, their tensors, or the files that these come from, are others on some rank; or
            nothing is frozen.
        """
        rows: list[str] = []
        tensors: dict[str, Tensor] = {}
        for number, unit in enumerate(units):
            for leaf in unit:
                for key, tensor in leaf.kind.named_tensors(leaf.module).items():
                    name = f"{leaf.name}.{key}".lstrip(".")
                    tensors[name] = tensor
                    first = self._names.setdefault(id(tensor), name)
                    grows = "trained" if tensor.requires_grad else "frozen"
                    what = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.stride()} {grows}"
                    tied = "" if first == name else f", tied to '{first}'"
                    rows.append(f"'{name}' in unit {number}: {what}{tied}")
        chosen = {id(tensor) for tensor in coded}
        names = [name for name, tensor in tensors.items() if id(tensor) in chosen]
        said = self.ranks.exchange("layout", [rows, files, names])

        def compare() -> None:
            if not any(is_shared([t for leaf in unit for t in leaf.tensors()]) for unit in units):
                raise OffloadError(
                    "share='node' shares frozen weights, and each layer of this model has one that "
                    "needs gradients: call model.requires_grad_(False) before attach, and add "
                    "adapters to it, before or after."
                )
            for rank, (theirs, their_files, _) in enumerate(said):
                for kind, ours, others in (
                    ("layout", said[0][0], theirs),
                    ("files", said[0][1], their_files),
                ):
                    if ours != others:
                        raise _first_difference(kind, rank, ours, others)

        on_all(self.ranks, "compared layouts", compare)
        return [tensors[name] for name in said[0][2]]

    # ---- filling ----

    def buffer(self, cuts: Sequence[int], node: int) -> HostBuffer:
        """Return the next part of the file: all ranks ask for the same, in the same order.

        Raises
        ------
        OffloadError
            They do not: what one fills would be another weight to another rank.
        """
        said = self.ranks.exchange("cuts", list(cuts))
        for rank, theirs in enumerate(said):
            if theirs != said[0]:
                raise _first_difference("order of its weights", rank, said[0], theirs)
        nbytes = cuts[-1]
        begin, self._end = self._end, self._end + whole_pages(nbytes)
        if self.ranks.passes_files:
            file = self._file
            # The rank that is first makes it longer. Another rank that read the size before would
            # make it shorter, which the seal forbids.
            with contextlib.suppress(PermissionError):
                if os.fstat(file).st_size < self._end:
                    os.ftruncate(file, self._end)
        else:
            file, begin = self._make(nbytes), 0
            self._sections.append(file)
        made = HostBuffer(nbytes, node, file, begin)
        self._places[made.address] = file, begin
        return made

    def fills(self, offset: int, nbytes: int) -> bool:
        """Whether this rank fills what is at `offset` of `nbytes`."""
        at = self.ranks.at
        return offset * at.local_world // max(1, nbytes) == at.local_rank

    def codes(self, tensors: Sequence[Tensor]) -> list[bool]:
        """Return for each tensor whether this rank codes it: about as many bytes as the others."""
        sizes = [aligned(tensor_bytes(tensor)) for tensor in tensors]
        begins = [sum(sizes[:number]) for number in range(len(sizes))]
        return [self.fills(begin, sum(sizes)) for begin in begins]

    def wait_until_filled(
        self, others: Sequence[tuple[Tensor, Tensor]], files: Files | None
    ) -> None:
        """Return once all ranks have filled their parts of a piece, and `others` are there.

        Parameters
        ----------
        others : sequence of (Tensor, Tensor)
            What other ranks fill, as this one has it, and its master in the file.
        files : Files, optional
            Where those come from that have no values here.
        """
        # What is not filled yet reads as zeros.
        self.ranks.exchange("filled")

        def compare() -> None:
            for tensor, master in others:
                if files is not None and files.have(tensor):
                    files.skip(tensor)  # the same file, read by another rank
                elif not _same(tensor, master):
                    raise self.differs(tensor)

        on_all(self.ranks, "compared weights", compare)

    def differs(self, tensor: Tensor) -> OffloadError:
        """Return the error of ranks that have different values of one weight."""
        return OffloadError(
            f"rank {self.ranks.at.local_rank} of this machine has other values of "
            f"'{self._names.get(id(tensor), 'a weight')}' than the rank that fills it: ranks that "
            "share frozen weights have to load the same ones (from the same files, or made with "
            "the same seed)."
        )

    # ---- when they change ----

    @contextlib.contextmanager
    def writing(self, buffers: Sequence[HostBuffer]) -> Iterator[bool]:
        """Let the first rank write for a ``with`` block; yield whether this is the one.

        No copy of this rank may be under way, nor begin meanwhile. Where the block raises on one
        rank, the others raise that too, at their end of it; where that is the first rank, no rank
        can use what is half written.

        Raises
        ------
        OffloadError
            It is written already, or another rank has failed, or merged other adapters.
        """
        if self.is_writing:
            raise OffloadError(
                "writing() and refresh() are in a block of writing() of the same model, whose "
                "end would come too early: leave the block first, which refreshes by itself."
            )
        # Copies of the others may read what is written, until they say that none does.
        self.ranks.exchange("writing")
        self.is_writing, self.merges = True, 0
        try:
            if self.ranks.is_first:
                self._begin_generation()  # odd until all is written: `check_generation`
                _protect(buffers, True)
            yield self.ranks.is_first
            if self.ranks.is_first:
                _protect(buffers, False)
            if len({*self.ranks.exchange("merged", self.merges)}) > 1:
                raise OffloadError(
                    "some ranks have merged adapters into the weights that all share, and others "
                    "have not: in writing(), all of them call the merge, and each weight is "
                    "written once. Start again."
                )
        except BaseException as error:
            self.ranks.fail_with(error)  # the others wait for it
            with contextlib.suppress(OffloadError):
                _protect(buffers, False)
            raise
        finally:
            self.is_writing = False
        if self.ranks.is_first:
            self._begin_generation()
        # No rank copies what may still be written.
        self.ranks.exchange("written")
        self._seen = self._generation()

    def seal(self, buffers: Sequence[HostBuffer]) -> None:
        """Make them read-only, once all ranks have filled and locked theirs."""
        _protect(buffers, False)

    def check_generation(self) -> None:
        """Refuse to go on with device copies of weights that were written since.

        Raises
        ------
        StaleWeightsError
            The first rank has written them, and this one took no part.
        """
        if self._header is None or self.is_writing:  # parted; or a merge calls a layer
            return
        found = self._generation()
        if found != self._seen:
            raise StaleWeightsError(
                f"the weights that ranks share are at generation {found}, this rank's copies at "
                f"{self._seen}: "
                + (
                    "the rank that wrote them ended before it was done. Start again."
                    if found % 2
                    else "refresh() and writing() are calls that all ranks make together."
                )
            )

    def _generation(self) -> int:
        assert self._header is not None
        (found,) = _GENERATION.unpack_from(self._header)
        return int(found)

    def _begin_generation(self) -> None:
        begun = self._generation() + 1
        assert self._header is not None
        _GENERATION.pack_into(self._header, 0, begun)

    # ---- the end ----

    def part(self, buffer: HostBuffer) -> None:
        """Make a piece this process's own: a page that it writes is copied, others see nothing."""
        place = self._places.get(buffer.address)
        if place is not None and not buffer.locked:  # for another engine, which reads it
            _core.pages_show(buffer.address, whole_pages(buffer.nbytes), *place)
            del self._places[buffer.address]

    def close(self) -> None:
        """Let go of the file, and of the ranks; its contents stay as long as they are mapped."""
        self.ranks.close()
        self.let_go()

    def let_go(self) -> None:
        """Close what this process has open of it; a forked child has its mapping as well."""
        self._header = None
        for file in [*self._sections, *([self._file] if self._file >= 0 else [])]:
            _core.section_close(file)
        self._sections, self._file = [], -1


def is_shared(unit: Iterable[Tensor]) -> bool:
    """Whether what travels together is shared: where all of it is frozen."""
    return not any(tensor.requires_grad for tensor in unit)


@contextlib.contextmanager
def together(share: str | None) -> Iterator[Share | None]:
    """Attach in a ``with`` block as all ranks of this machine do, or fail as all of them do.

    Parameters
    ----------
    share : {None, "node"}
        The argument of `attach`. Where a machine has one rank, there is nothing to share.
    """
    if share is None:
        yield None
        return
    if share != NODE:
        raise ValueError(f"share={share!r} is neither None nor {NODE!r}")
    ranks = meet(_core.VERSION)
    if ranks.at.local_world == 1:
        ranks.close()
        yield None
        return
    made: Share | None = None
    try:
        made = Share(ranks)
        yield made
    except BaseException as error:
        ranks.fail_with(error)
        if made is not None and not made._places:  # else what has pieces yet closes it
            made.close()
        raise


def _leave_child() -> None:
    for share in list(_shares):
        share.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_child)


def _protect(buffers: Sequence[HostBuffer], writable: bool) -> None:
    for buffer in buffers:
        buffer.protect(writable)


def _same(tensor: Tensor, master: Tensor) -> bool:
    """Whether two tensors have the same bytes: NaNs too."""
    with torch.inference_mode(False), torch.no_grad():
        given = tensor.detach()
        given = given if is_dense(given) else given.contiguous()
        if given.is_conj() or given.is_neg():
            given = given.resolve_conj().resolve_neg()
        return torch.equal(flat_bytes(given), flat_bytes(master.to(given.device)))


def _first_difference(kind: str, rank: int, ours: list[Any], theirs: list[Any]) -> OffloadError:
    """Return the error that says in what rank 0 and another are different."""
    rows = [*zip(ours, theirs, strict=False)]
    found = next((row for row in rows if row[0] != row[1]), None)
    if found is None:
        many = f"{len(ours)} there, {len(theirs)} here"
        longer, at = max((ours, theirs), key=len), min(len(ours), len(theirs))
        found = (many, f"the first that one lacks is {longer[at]}")
    return OffloadError(
        f"rank {rank} of this machine has another {kind} than rank 0 ({found[0]}; {found[1]}): "
        "ranks that share frozen weights have to attach the same model, with the same arguments."
    )
