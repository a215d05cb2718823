"""The command `explain`: a log file, a pipe or standard input, at once or while it is written."""

from __future__ import annotations

import codecs
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from ...host.terminal import naming, printable, put, show
from .history import read_history
from .pipeline import explain, machine_ram
from .reading import read_excerpt
from .report import OomReport

if TYPE_CHECKING:
    import argparse

    History = str | Iterable[Mapping[str, Any]] | None

# While following, this much of the past is kept as context.
KEEP_CHARS = 256 * 1024
POLL_S = 0.2
# A message of several lines may arrive in pieces: it is read once nothing came for this long.
QUIET_S = 0.3
LONGEST_WAIT_S = 2.0
_STDIN = "standard input"


def run(args: argparse.Namespace) -> bool:
    """Show every report; return whether an error was found.

    Raises
    ------
    FileError
        A file cannot be read or written.
    """
    history: History = args.history
    if args.history is not None:
        with naming("read", args.history):
            records = read_history(args.history)
            # A file that is followed grows; a pipe can be read but once.
            if not (args.follow and os.path.isfile(args.history)):
                history = records
    reports = _followed(args.log, history) if args.follow else _once(args.log, history)
    seen = False
    try:
        for report in reports:
            seen = seen or report.found
            _show(report, args)
    except KeyboardInterrupt:
        if not args.follow:
            raise
    return seen


def _once(path: str, history: History) -> Iterator[OomReport]:
    name = _STDIN if path == "-" else path
    with naming("read", name), _opened(path) as log:
        excerpt = read_excerpt(log)
    if excerpt.note:
        print(f"{printable(name)}: {excerpt.note}", file=sys.stderr)
    yield explain(excerpt.text, history, None, ram=machine_ram())


def _opened(path: str) -> IO[bytes]:
    # Closing the file object of standard input leaves the descriptor open.
    return open(0, "rb", closefd=False) if path == "-" else open(path, "rb")


def _show(report: OomReport, args: argparse.Namespace) -> None:
    if args.html:
        with naming("write", args.html), open(args.html, "w", encoding="utf-8") as page:
            page.write(report.to_html())
    with naming("write", "standard output"):
        if args.json:
            put(sys.stdout, report.to_json(indent=None if args.follow else 2) + "\n")
        else:
            show(
                sys.stdout,
                lambda width, color: report.to_text(width=width, color=color, all_fixes=args.all),
            )
            if args.follow:
                sys.stdout.write("\n")
        sys.stdout.flush()


class Follower:
    """Explain each new message of a text that arrives in pieces, once it has come to rest."""

    def __init__(self, history: History = None) -> None:
        self.history = history
        self.text = ""
        self.explained = 0  # an offset into `text`: what is before it is only context

    def feed(self, piece: str) -> None:
        """Take more text; the oldest is forgotten."""
        self.text += piece
        excess = len(self.text) - KEEP_CHARS
        if excess > KEEP_CHARS:
            self.text = self.text[excess:]
            self.explained = max(0, self.explained - excess)

    def report(self) -> OomReport | None:
        """Return a report on what came since the last one, or None where that holds no message."""
        report = explain(self.text, self.history, None, since=self.explained, ram=machine_ram())
        self.explained = len(self.text)
        return report if report.found else None


def _followed(path: str, history: History) -> Iterator[OomReport]:
    """Yield a report for each burst of messages; ends with a pipe, never for a file."""
    follower = Follower(history)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    first_new, last_new = None, 0.0
    for piece in _pieces(path):
        now = time.monotonic()
        if piece:
            follower.feed(decoder.decode(piece))
            last_new = now
            first_new = now if first_new is None else first_new
        if first_new is None:
            continue
        rested = now - last_new >= QUIET_S or now - first_new >= LONGEST_WAIT_S
        if piece is None or rested:
            report = follower.report()
            first_new = None
            if report is not None:
                yield report


def _pieces(path: str) -> Iterator[bytes | None]:
    """Yield bytes as they arrive, b"" while nothing comes, None at the end of a pipe."""
    with naming("read", _STDIN if path == "-" else path):
        log = _opened(path)
        try:
            if path == "-" or not stat.S_ISREG(os.fstat(log.fileno()).st_mode):
                yield from _streamed(log.fileno())
                return
            while True:
                if piece := log.read(1 << 20):
                    yield piece
                    continue
                log = _reopened(path, log)
                yield b""
                time.sleep(POLL_S)
        finally:
            log.close()


def _streamed(descriptor: int) -> Iterator[bytes | None]:
    """Read what cannot be polled on every system in a thread, so that silence is noticed."""
    arrived: queue.Queue[bytes | OSError] = queue.Queue(maxsize=4)

    def read() -> None:
        try:
            # The descriptor and not the buffered file: its lock would be held at exit.
            while piece := os.read(descriptor, 1 << 16):
                arrived.put(piece)
            arrived.put(b"")
        except OSError as error:
            arrived.put(error)

    threading.Thread(target=read, name="oracle_offload explain", daemon=True).start()
    while True:
        try:
            piece = arrived.get(timeout=POLL_S)
        except queue.Empty:
            yield b""
            continue
        if isinstance(piece, OSError):
            raise piece
        yield piece or None
        if not piece:
            return


def _reopened(path: str, log: IO[bytes]) -> IO[bytes]:
    """Return the log to read on: the same, or opened again if replaced, cut short or removed."""
    try:
        now = os.stat(path)
    except OSError:
        return log  # gone for the moment: what is open may still grow
    held = os.fstat(log.fileno())
    if (held.st_ino, held.st_dev) == (now.st_ino, now.st_dev) and now.st_size >= log.tell():
        return log
    log.close()
    return open(path, "rb")
