"""Read a log of any length, from whatever can be opened: a file, a pipe, `<(...)`, a device.

An error is where a log ends, and the program's start where it begins. So of a long log the first
`HEAD_BYTES` and the last `TAIL_BYTES` are kept. A file is sought; of what cannot be sought at most
`MOST_BYTES` are read, because a pipe need never end.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from typing import IO, NamedTuple

HEAD_BYTES = 8 << 20
TAIL_BYTES = 56 << 20
MOST_BYTES = 4 << 30

_PIECE = 1 << 20
_LONGEST_LINE = 1 << 16
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")
# Written where bytes were left out, on a line of its own.
GAP = "[not read]"


class Excerpt(NamedTuple):
    """The text that was read, and what of the input it is not.

    Attributes
    ----------
    text : str
        All of a short input, else its beginning, a line `GAP`, and its end.
    skipped : int
        Bytes left out between the two.
    unread : bool
        Whether reading stopped at `MOST_BYTES` although the input went on.
    """

    text: str
    skipped: int = 0
    unread: bool = False

    @property
    def note(self) -> str:
        """What of the input was not read; empty where all of it was."""
        notes = []
        if self.unread:
            notes.append(
                f"stopped after {MOST_BYTES >> 30} GiB of an input that goes on; for what comes "
                "later give the file itself, or the end of it: tail -c 64M LOG"
            )
        if self.skipped:
            notes.append(
                f"left out {self.skipped} bytes between the first {HEAD_BYTES >> 20} MiB and the "
                f"last {TAIL_BYTES >> 20} MiB; line numbers do not count them"
            )
        return "; ".join(notes)


def read_excerpt(log: IO[bytes]) -> Excerpt:
    """Return the beginning and the end of what `log` holds.

    Parameters
    ----------
    log : binary file
        Buffered, at its beginning; it may be a pipe and need not end.

    Raises
    ------
    OSError
        The input cannot be read.
    """
    head = log.read(HEAD_BYTES)
    skipped = 0
    status = os.fstat(log.fileno())
    # Sizes of other kinds (0 for a pipe and for files of /proc) say nothing about what comes.
    if stat.S_ISREG(status.st_mode) and status.st_size > HEAD_BYTES + TAIL_BYTES:
        skipped = log.seek(status.st_size - TAIL_BYTES) - len(head)
    pieces: deque[bytes] = deque()
    kept, taken, piece = 0, len(head), b""
    while taken < MOST_BYTES and (piece := log.read(_PIECE)):
        pieces.append(piece)
        kept += len(piece)
        taken += len(piece)
        while kept - len(pieces[0]) >= TAIL_BYTES:
            kept -= len(pieces[0])
            skipped += len(pieces.popleft())
    tail = b"".join(pieces)
    if skipped and len(tail) > TAIL_BYTES:
        skipped += len(tail) - TAIL_BYTES
        tail = tail[-TAIL_BYTES:]
    return Excerpt(_joined(head, tail, skipped), skipped, unread=bool(piece))


def _joined(head: bytes, tail: bytes, skipped: int) -> str:
    if not skipped:
        return decode(head + tail)
    mark = head[:2] if head.startswith(_BYTE_ORDER_MARKS) else b""
    if mark and skipped % 2:  # a character of UTF-16 has two bytes
        tail = tail[1:]
    before, after = decode(head), decode(mark + tail)
    # Whole lines, so that no message is read across the gap; a log of `\\r` alone has none.
    end = before.rfind("\n", max(0, len(before) - _LONGEST_LINE))
    start = after.find("\n", 0, _LONGEST_LINE) + 1
    return f"{before[: end if end >= 0 else len(before)]}\n{GAP}\n{after[start:]}"


def decode(raw: bytes) -> str:
    """Return a log as text: UTF-8, or UTF-16 where a byte order mark says so (PowerShell's `>`)."""
    if raw.startswith(_BYTE_ORDER_MARKS):
        return raw.decode("utf-16", "replace")
    return raw.decode("utf-8-sig", "replace")
