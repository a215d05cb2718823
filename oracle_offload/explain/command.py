"""The command `explain`: a log file or standard input, at once or while it is written."""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from . import _explain, decode
from .report import OomReport, put, wants_color

if TYPE_CHECKING:
    import argparse

# Of a longer log only the end is read: an error stands where the log ends.
MOST_BYTES = 64 << 20
# While following, this much of the past is kept as context.
KEEP_CHARS = 256 * 1024
POLL_S = 0.2
# A message of several lines may arrive in pieces: it is read once nothing came for this long.
QUIET_S = 0.3
LONGEST_WAIT_S = 2.0


def run(args: argparse.Namespace, found: int, error: int, nothing: int) -> int:
    """Run the command; return one of the three exit codes given."""
    try:
        if args.history is not None:
            with open(args.history, "rb"):
                pass
        reports = _followed(args.log, args.history) if args.follow else _once(args)
        seen = False
        try:
            for report in reports:
                seen = seen or report.found
                _show(report, args)
        except KeyboardInterrupt:
            if not args.follow:
                raise
        return found if seen else nothing
    except BrokenPipeError:
        raise
    except OSError as problem:
        print(f"cannot read or write {problem.filename}: {problem.strerror}", file=sys.stderr)
        return error


def _once(args: argparse.Namespace) -> Iterator[OomReport]:
    if args.log == "-":
        text = decode(_read_end(sys.stdin.buffer))
    else:
        with open(args.log, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - MOST_BYTES))
            text = decode(log.read())
    yield _explain(text, args.history, None)


def _read_end(stream: IO[bytes]) -> bytes:
    """Return the last `MOST_BYTES` of a stream of any length."""
    kept = b""
    while piece := stream.read(1 << 20):
        kept += piece
        if len(kept) > 2 * MOST_BYTES:
            kept = kept[-MOST_BYTES:]
    return kept[-MOST_BYTES:]


def _show(report: OomReport, args: argparse.Namespace) -> None:
    if args.html:
        with open(args.html, "w", encoding="utf-8") as page:
            page.write(report.to_html())
    if args.json:
        put(sys.stdout, report.to_json(indent=None if args.follow else 2) + "\n")
    else:
        width = 100
        if sys.stdout.isatty():
            from shutil import get_terminal_size

            width = get_terminal_size().columns
        color = wants_color(sys.stdout)
        put(sys.stdout, report.to_text(width=width, color=color, all_fixes=args.all))
        if args.follow:
            sys.stdout.write("\n")
    sys.stdout.flush()


class Follower:
    """Explain each new message of a text that arrives in pieces, once it has come to rest."""

    def __init__(self, history: str | None = None) -> None:
        self.history = history
        self.text = ""
        self.explained = 0  # an offset into `text`: what stands before it is only context

    def feed(self, piece: str) -> None:
        """Take more text; the oldest is forgotten."""
        self.text += piece
        excess = len(self.text) - KEEP_CHARS
        if excess > KEEP_CHARS:
            self.text = self.text[excess:]
            self.explained = max(0, self.explained - excess)

    def report(self) -> OomReport | None:
        """Return a report on what came since the last one, or None where that holds no message."""
        report = _explain(self.text, self.history, None, since=self.explained)
        self.explained = len(self.text)
        return report if report.found else None


def _followed(path: str, history: str | None) -> Iterator[OomReport]:
    """Yield a report for each burst of messages; ends with the input, or never for a file."""
    follower = Follower(history)
    first_new = last_new = None
    for piece in _pieces(path):
        now = time.monotonic()
        if piece:
            follower.feed(piece)
            last_new = now
            first_new = first_new if first_new is not None else now
        ended = piece is None
        if first_new is not None and last_new is not None:
            rested = now - last_new >= QUIET_S or now - first_new >= LONGEST_WAIT_S
            if ended or rested:
                report = follower.report()
                first_new = last_new = None
                if report is not None:
                    yield report


def _pieces(path: str) -> Iterator[str | None]:
    """Yield text as it arrives, "" while nothing comes, None at the end of standard input."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    if path == "-":
        stream = sys.stdin.buffer
        while piece := getattr(stream, "read1", stream.read)(1 << 16):
            yield decoder.decode(piece)
        yield None
        return
    log: IO[bytes] | None = open(path, "rb")  # noqa: SIM115  (reopened when the log is rotated)
    try:
        while True:
            piece = log.read(1 << 20) if log is not None else b""
            if piece:
                yield decoder.decode(piece)
                continue
            log = _reopened(path, log)
            yield ""
            time.sleep(POLL_S)
    finally:
        if log is not None:
            log.close()


def _reopened(path: str, log: IO[bytes] | None) -> IO[bytes] | None:
    """Return the log to read on: the same, or anew where it was replaced, cut short or removed."""
    try:
        now = os.stat(path)
    except OSError:
        return log  # gone for the moment: what is open may still grow
    if log is not None:
        held = os.fstat(log.fileno())
        if (held.st_ino, held.st_dev) == (now.st_ino, now.st_dev) and now.st_size >= log.tell():
            return log
        log.close()
    return open(path, "rb")
