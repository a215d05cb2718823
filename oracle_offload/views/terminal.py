"""What the commands write to a terminal, and what they say when a file fails.

Names of files and devices, values of variables and lines of logs come from elsewhere: shown as they
are, they could steer the terminal.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

# What a terminal obeys: CSI (colours, cursor) and OSC (title, links), with their 8-bit forms.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\|\x9c)"
)


class FileError(Exception):
    """A file failed; the text names the file, the reason and the errno."""


def printable(text: str) -> str:
    """Return `text` without control sequences, a space for each character that is not printable."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " for char in _SEQUENCE.sub("", text))


@contextmanager
def naming(verb: str, name: str) -> Iterator[None]:
    """Turn an `OSError` into a `FileError`: "cannot `verb` `name`: reason (EXXX, errno N)".

    A broken pipe passes: whoever read the output has gone, which is no error.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, a closed stream
        number = error.errno if isinstance(error, OSError) else None
        reason = str(error) if number is None else os.strerror(number)
        code = "" if number is None else f" ({errno.errorcode.get(number, '?')}, errno {number})"
        raise FileError(f"cannot {verb} {printable(name) or repr(name)}: {reason}{code}") from error


def wants_color(stream: IO[str]) -> bool:
    """Return whether to colour what is written to `stream`: a terminal, and no NO_COLOR."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def put(stream: IO[str], text: str) -> None:
    """Write `text` to a stream, with question marks for what its encoding cannot hold."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding))
