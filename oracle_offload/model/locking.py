"""How much of the masters is page-locked: the rings first, up to a wall, and room for others.

Most systems lock whatever they are asked for. WSL2, Windows and containers have a wall, from some
hundred megabytes to half of the memory, which registration and allocation of page-locked memory
share. No call says where the wall is. So the rings, without which nothing else could be copied
well, are reserved first; when a piece is refused, the wall is found by trial. What is beyond the
wall less a headroom is given back: torch's own pinned memory (a DataLoader's) needs some as well.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from .._core import HostBuffer
from ..engine.engines import DeviceState
from ..host.sizes import MIB, format_size

logger = logging.getLogger("oracle_offload")

RING_BYTES = 16 * MIB  # of each ring, one to the device and one back
HEADROOM_BYTES, HEADROOM_SHARE = 256 * MIB, 20  # whichever is less: so much, or one in so many
WORTH_PROBING_BYTES = 64 * MIB  # below that its headroom is too small to look for


def headroom(wall: int) -> int:
    """Return how much of what may be locked is left to others."""
    return min(HEADROOM_BYTES, wall // HEADROOM_SHARE)


def whole_pages(nbytes: int) -> int:
    """Return what locking so many bytes locks."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Lockable(Protocol):
    """A piece of host memory whose beginning can be locked."""

    buffer: HostBuffer
    uses: int
    cuts: list[int]
    locked_bytes: int

    @property
    def is_known(self) -> bool:
        """Whether the engine knows it, and must forget it before its memory goes."""


class LockBudget:
    """What one attached model may lock.

    Parameters
    ----------
    state : DeviceState
        The device whose engine locks.
    name : str
        Of the model, for messages.
    limit : float
        Most bytes of its masters to lock; 0 for none.
    """

    def __init__(self, state: DeviceState, name: str, limit: float) -> None:
        self._state = state
        self._name = name
        self._limit = limit
        self._most = float("inf")  # bytes that the engine may have locked, once a wall was met
        self._refusal: str | None = None  # in the driver's words
        self._is_attached = False  # until then more pieces come
        self._told = False

    @property
    def locks_all(self) -> bool:
        """Whether the system alone limits it."""
        return self._limit == float("inf")

    def reserve_rings(self, managed_bytes: int) -> None:
        """Have both rings before any master is locked: later there may be nothing left."""
        engine = self._state.engine
        wanted = min(RING_BYTES, managed_bytes)
        if 2 * wanted <= engine.stats()["ring_bytes"]:
            return
        refused = engine.reserve_rings(wanted)
        if refused is not None:
            self._meet_wall(refused, HostBuffer(2 * wanted))
            self._fit_rings(wanted)

    def lock(self, piece: Lockable, others: Sequence[Lockable]) -> None:
        """Make a piece known to the engine, locked as far as limit and wall allow.

        Parameters
        ----------
        piece : Lockable
            New; nothing uses it yet.
        others : sequence of Lockable
            Those of the same model, oldest first; where the wall was overstepped, the newest that
            nothing uses yet are unlocked again.
        """
        refused = self.attempt(piece, others)
        if refused is not None:
            self._meet_wall(refused, piece.buffer)
            self._fit(others)
            # Where another program has locked memory meanwhile, the piece stays unchanged.
            if self.attempt(piece, others) is not None:
                self._lock(piece, 0)
        if self._is_attached:
            self._tell_refusal([piece])

    def attempt(self, piece: Lockable, others: Sequence[Lockable]) -> str | None:
        """As `lock`, but what the system refuses stays unknown; return why it does."""
        return self._lock(piece, self._limit - sum(other.locked_bytes for other in others))

    def unlock(self, piece: Lockable) -> None:
        """Let the engine forget a piece, as far as it knows it."""
        if piece.is_known:
            self._state.engine.unlock(piece.buffer)

    def leave_headroom(self, pieces: Sequence[Lockable]) -> None:
        """After the last piece: see that others can lock something still; drop idle rings."""
        engine = self._state.engine
        locked = self._locked_bytes()
        if self._refusal is None and locked >= WORTH_PROBING_BYTES:
            # With that much more, what is locked is 19 parts of 20, or the room is enough.
            scratch = HostBuffer(min(HEADROOM_BYTES, locked // (HEADROOM_SHARE - 1)))
            if engine.lockable(scratch) < scratch.nbytes:
                self._meet_wall("no headroom was left", scratch)
                self._fit(pieces)
        self._is_attached = True
        if self._refusal is None:
            engine.reserve_rings(0)
        self._tell_refusal(pieces)

    def allows(self, nbytes: int, masters: Sequence[Lockable]) -> bool:
        """Whether `nbytes` more may be locked: where all masters are, and no wall was met."""
        whole = sum(piece.buffer.nbytes for piece in masters)
        locked = sum(piece.locked_bytes for piece in masters)
        return self._refusal is None and locked >= whole and whole + nbytes <= self._limit

    # ---- the wall ----

    def _locked_bytes(self) -> int:
        return self._state.engine.stats()["locked_bytes"]

    def _room(self) -> float:
        return self._most - self._locked_bytes()

    def _meet_wall(self, refused: str, buffer: HostBuffer) -> None:
        """Find the wall with pages of `buffer`, which is not locked."""
        wall = self._locked_bytes() + self._state.engine.lockable(buffer)
        self._most = wall - headroom(wall)
        self._refusal = refused

    def _fit(self, pieces: Sequence[Lockable]) -> None:
        """Unlock what is beyond the wall, or in its headroom: the newest first, the rings last."""
        for piece in reversed(pieces):
            if piece.locked_bytes and not piece.uses and self._room() < 0:
                keep = piece.locked_bytes
                self.unlock(piece)
                if self._lock(piece, keep) is not None:
                    self._lock(piece, 0)
        if self._room() < 0:
            self._fit_rings(RING_BYTES)

    def _fit_rings(self, wanted: int) -> None:
        """Have rings of `wanted` bytes each, or as large as there is room for, perhaps none."""
        engine = self._state.engine
        room = self._room() + engine.stats()["ring_bytes"]
        engine.reserve_rings(max(min(wanted, int(room) // 2), 1))  # 0 would leave them to chance

    def _lock(self, piece: Lockable, limit: float) -> str | None:
        """Make a piece known, its beginning locked as far as there is room; return a refusal.

        What was refused is unknown to the engine again.
        """
        piece.locked_bytes = 0
        room = self._room()
        fitting = (cut for cut in piece.cuts if cut <= limit and whole_pages(cut) <= room)
        nbytes = max(fitting, default=0)
        refused = self._state.engine.lock(piece.buffer, nbytes)
        if refused is None:
            piece.locked_bytes = nbytes
        else:
            self.unlock(piece)
        return refused

    # ---- what is said ----

    def _tell_refusal(self, pieces: Sequence[Lockable]) -> None:
        """Say once what was refused, and how much of `pieces` is not locked for it."""
        if self._refusal is None or self._told:
            return
        self._told = True
        unlocked = sum(piece.buffer.nbytes - piece.locked_bytes for piece in pieces)
        if not unlocked or not self._limit:
            logger.warning(
                "%s: the system refused page-locked memory in addition to the weights (%s); copies "
                "that need some are slower.",
                self._name,
                self._refusal,
            )
            return
        logger.warning(
            "%s: the system does not page-lock %s of its weights (%s); what is not locked is "
            "copied through a small locked ring, which is slower. %s",
            self._name,
            format_size(unlocked),
            self._refusal,
            advice(),
        )


def advice() -> str:
    """Return what raises the wall on this system."""
    if sys.platform == "win32":
        return (
            "Windows (WDDM) locks about half of the memory at most, whatever the limits say: close "
            "what else holds locked memory, or train on Linux."
        )
    if os.path.exists("/dev/dxg"):
        return (
            "WSL2 hands page-locking to Windows (WDDM), which allows half a GiB to half of the "
            "memory, whatever ulimit says: raise memory= in .wslconfig, or train on Linux or "
            "Windows itself."
        )
    return (
        "Close what else holds locked memory, raise the limit (ulimit -l, or the container's), or "
        "set lock to what may be locked: attach(..., lock='8GiB')."
    )
