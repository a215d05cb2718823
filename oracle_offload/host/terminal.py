"""How reports reach a terminal: width, colour, encoding; and what is said when a file fails.

Names of files, modules, devices and processes, values of variables and lines of logs come from
elsewhere: shown as they are, they could steer the terminal, or show a line as another by turning
its direction. So what a `Text` takes is made printable there, and what a page takes in
`oracle_offload.observe.page`.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

# What a terminal obeys: CSI (colours, cursor) and OSC (title, links), with their 8-bit forms.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\|\x9c)"
)


WIDEST, NARROWEST = 100, 60
_VIRTUAL_TERMINAL = 0x4  # ENABLE_VIRTUAL_TERMINAL_PROCESSING
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
# What `Text.styled` writes for ESC, until the line is added: no name can have it.
_MARK = f"\x1b{os.urandom(8).hex()}"
_STYLE = re.compile(f"{_MARK}([0-9]{{1,2}});")


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

    A broken pipe passes: the program that read the output has gone, which is no error.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, a closed stream
        number = error.errno if isinstance(error, OSError) else None
        reason = printable(str(error)) if number is None else os.strerror(number)
        code = "" if number is None else f" ({errno.errorcode.get(number, '?')}, errno {number})"
        raise FileError(f"cannot {verb} {printable(name) or repr(name)}: {reason}{code}") from error


def wants_color(stream: IO[str]) -> bool:
    """Return whether to colour what is written to `stream`: a terminal, and no NO_COLOR."""
    return not os.environ.get("NO_COLOR") and obeys(stream)


def obeys(stream: IO[str]) -> bool:
    """Return whether a stream is a terminal that obeys control sequences."""
    if os.environ.get("TERM") == "dumb":
        return False
    try:
        is_terminal = stream.isatty()
    except (AttributeError, ValueError):
        return False
    if is_terminal and sys.platform == "win32":
        import ctypes
        import msvcrt

        try:
            console = msvcrt.get_osfhandle(stream.fileno())
        except (AttributeError, OSError, ValueError):  # no console: a notebook, an editor
            return True
        return _obeys_from_now_on(console, ctypes.windll.kernel32)
    return is_terminal


def _obeys_from_now_on(console: int, kernel32: Any) -> bool:
    """Have a console of Windows obey sequences; False for one that cannot."""
    import ctypes

    handle, mode = ctypes.c_void_p(console), ctypes.c_uint32()
    if not kernel32.GetConsoleMode(handle, ctypes.byref(mode)):
        return False
    return bool(kernel32.SetConsoleMode(handle, mode.value | _VIRTUAL_TERMINAL))


def put(stream: IO[str], text: str) -> None:
    """Write `text` to a stream, with question marks for what its encoding cannot hold."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding))


def columns(stream: IO[str]) -> int:
    """Return how wide to write: a terminal's width, else `WIDEST`."""
    from shutil import get_terminal_size

    return get_terminal_size((WIDEST, 24)).columns if stream.isatty() else WIDEST


def show(stream: IO[str], render: Callable[[int, bool], str]) -> None:
    """Write what ``render(width, color)`` returns to a stream, as it wants it, and flush."""
    put(stream, render(columns(stream), wants_color(stream)))
    stream.flush()


class Text:
    """The lines of a report.

    Parameters
    ----------
    width : int
        Columns; clamped to `narrowest` .. `WIDEST`.
    color : bool
        Whether `styled` does anything.
    narrowest : int
        Columns that the report needs.
    """

    def __init__(
        self, width: int = WIDEST, *, color: bool = False, narrowest: int = NARROWEST
    ) -> None:
        self.width = min(max(width, narrowest), WIDEST)
        self.color = color
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def styled(self, text: str, style: str) -> str:
        """Return `text` bold, dim, red, green or yellow, as part of what `line` takes."""
        text = printable(text)
        return f"{_MARK}{_CODES[style]};{text}{_MARK}0;" if self.color else text

    def wrapped(self, text: str, indent: str = "") -> list[str]:
        """Return `text` as lines that leave room for `indent`."""
        from textwrap import wrap

        # Paths and package names hold hyphens, and are copied from here.
        return wrap(printable(text), self.width - len(indent), break_on_hyphens=False)

    def line(self, text: str = "") -> None:
        """Add a line, of which parts may be `styled`."""
        parts = _STYLE.split(text)  # every second is a style
        parts[::2] = map(printable, parts[::2])
        parts[1::2] = (f"\x1b[{code}m" for code in parts[1::2])
        self._lines.append("".join(parts))

    def block(self, text: str, first: str = "", rest: str = "", style: str = "") -> None:
        """Add wrapped text, behind `first` on its first line and `rest` on the others."""
        from textwrap import wrap

        lines = wrap(
            printable(text),
            self.width,
            initial_indent=first,
            subsequent_indent=rest,
            break_on_hyphens=False,
        )
        for line in lines:
            self.line(self.styled(line, style) if style else line)
