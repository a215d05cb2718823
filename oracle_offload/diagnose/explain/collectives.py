"""Time-outs of collectives: ranks that waited for one that had failed, and say so much later.

Where a rank runs out of memory, the others wait in a collective until its time-out, which is the
last entry of the log. It is no cause, but what follows from one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .facts import compiled

_MOST = 64  # of a text: a log has a few for each rank
# How NCCL, Gloo, the store and `share="node"` say that another rank did not answer.
_TOLD = (
    "Watchdog caught collective operation timeout",
    "NCCL watchdog thread terminated with exception",
    "for recv operation to complete",
    "for send operation to complete",
    "Connection closed by peer [",
    "failed to pass monitoredBarrier",
    "of this machine is gone: it was killed",
    "of this machine did not answer within",
)
_RANK = r"\[[Rr]ank ?(\d{1,5})\]"
_WAITS = r"while rank (\d{1,5}) waited"


class Wait(NamedTuple):
    """A rank that waited for another in vain: None where its line does not name it."""

    rank: int | None
    line: int
    quote: str


def waits(text: str) -> list[Wait]:
    """Return the ranks that a text says waited for another, each once, in its order."""
    found: dict[int | None, Wait] = {}
    places = sorted(place for told in _TOLD for place in _places(text, told))
    for place in places[:_MOST]:
        start = max(text.rfind("\n", 0, place) + 1, place - 600)
        end = text.find("\n", place, place + 600)
        line = text[start : end if end >= 0 else place + 600]
        named = compiled(_RANK).search(line) or compiled(_WAITS).search(line)
        rank = int(named[1]) if named else None
        if rank not in found:
            found[rank] = Wait(rank, text.count("\n", 0, start) + 1, line.strip()[:200])
    return list(found.values())


def _places(text: str, told: str) -> list[int]:
    places: list[int] = []
    at = text.find(told)
    while at >= 0 and len(places) < _MOST:
        places.append(at)
        at = text.find(told, at + len(told))
    return places


def rank_of(text: str, position: int) -> int | None:
    """Return the rank whose line of a log is at `position`, where the line begins with it."""
    start = max(text.rfind("\n", 0, position) + 1, position - 600)
    named = compiled(_RANK).match(text[start:position].lstrip())
    return int(named[1]) if named else None


def told(found: bool, of: int | None, waiting: Sequence[Wait]) -> str:
    """Return what is said of ranks that waited; "" where none did.

    Parameters
    ----------
    found : bool
        Whether something in the text is out of memory.
    of : int or None
        The rank that is, where that is known.
    waiting : sequence of Wait
        See `waits`.
    """
    others = [wait for wait in waiting if wait.rank is None or wait.rank != of]
    if not others:
        return ""
    numbers = sorted(wait.rank for wait in others if wait.rank is not None)
    plural = "s" if len(numbers) > 1 else ""
    who = f"rank{plural} {', '.join(map(str, numbers))}" if numbers else "another rank"
    where = f"line {others[0].line}"
    if found:
        failed = "" if of is None else f" of rank {of}"
        return (
            f"The collective that timed out, or broke off, for {who} ({where}) follows from this "
            f"error{failed}: the others waited for it. Put this right, and it goes."
        )
    return (
        f"A collective timed out, or broke off, for {who} ({where}): that is what a rank says "
        "which waited for another. Look for the first error of the other ranks, an out-of-memory "
        "error or a kill, in their own logs (torchrun --log-dir, --tee 3)."
    )
