"""What reaches a terminal, and what is said of a file that fails."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oracle_offload.host.terminal import (
    FileError,
    Text,
    columns,
    naming,
    obeys,
    printable,
    put,
    show,
    wants_color,
)
from oracle_offload.observe.page import escape


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü 漢", "plain ü 漢"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x9b2Jgone", "gone"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;link\x1b\\after", "after"),
        ("\x9dtitle\x9cafter", "after"),
        ("a\x00b\x08c\u202ed\n", "a b c d "),
        ("\x1b", " "),
    ],
)
def test_control_sequences_go_and_other_characters_leave_a_space(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_file_that_fails_is_named_with_the_reason_and_the_errno(tmp_path: Path) -> None:
    path = tmp_path / "none" / "x"
    expected = f"cannot read {path}: No such file or directory \\(ENOENT, errno {errno.ENOENT}\\)"
    with pytest.raises(FileError, match=expected) as caught, naming("read", str(path)):
        path.read_text()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    nul, closed = (
        r"cannot write a b: embedded null byte$",
        r"cannot read '\\x1b\[31m': it is closed$",
    )
    with pytest.raises(FileError, match=nul), naming("write", "a\x00b"):
        open("a\x00b").close()
    with pytest.raises(FileError, match=closed), naming("read", "\x1b[31m"):
        raise ValueError("it is closed")
    with pytest.raises(FileError, match=r"\(\?, errno 99999\)"), naming("read", "x"):
        raise OSError(99999, "odd")


def test_a_reader_that_has_gone_and_other_errors_pass() -> None:
    with pytest.raises(BrokenPipeError), naming("write", "x"):
        raise BrokenPipeError
    with pytest.raises(KeyError), naming("write", "x"):
        raise KeyError
    with naming("write", "x"):
        pass


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(Screen()) is True and wants_color(io.StringIO()) is False
    closed = io.StringIO()
    closed.close()
    assert wants_color(closed) is False
    assert wants_color(object()) is False  # type: ignore[arg-type]
    monkeypatch.setenv("TERM", "dumb")
    assert wants_color(Screen()) is False
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert wants_color(Screen()) is False
    assert obeys(Screen()) is True, "a view may be drawn over without colours"
    monkeypatch.setenv("TERM", "dumb")
    assert obeys(Screen()) is False


class Console:
    """What Windows answers of one console."""

    def __init__(self, *, answers: bool = True, accepts: bool = True) -> None:
        self.answers, self.accepts, self.set = answers, accepts, list[tuple[object, int]]()

    def GetConsoleMode(self, handle: Any, mode: Any) -> int:
        mode._obj.value = 0x3
        return self.answers

    def SetConsoleMode(self, handle: Any, mode: int) -> int:
        self.set.append((handle.value, mode))
        return self.accepts


@pytest.mark.parametrize(
    ("answers", "accepts"), [(True, True), (True, False), (False, True)], ids=str
)
def test_on_windows_a_terminal_obeys_if_its_console_does(
    monkeypatch: pytest.MonkeyPatch, answers: bool, accepts: bool
) -> None:
    class Window(Screen):
        def fileno(self) -> int:
            return 3

    console = Console(answers=answers, accepts=accepts)
    monkeypatch.delenv("TERM", raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    handles = SimpleNamespace(get_osfhandle={3: 1 << 40}.__getitem__)
    monkeypatch.setitem(sys.modules, "msvcrt", handles)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=console), raising=False)
    assert obeys(Window()) is (answers and accepts)
    assert console.set == [(1 << 40, 0x7)] * answers
    assert obeys(Screen()) is True, "a notebook, which has no console"
    assert obeys(io.StringIO()) is False


def test_a_terminal_is_filled_and_whatever_else_has_the_widest_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = os.terminal_size((77, 20))
    monkeypatch.setattr(shutil, "get_terminal_size", lambda fallback: size)
    assert (columns(Screen()), columns(io.StringIO())) == (77, 100)


def test_what_is_shown_is_flushed() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")
    show(stream, lambda width, color: f"{width} {color}")
    assert raw.getvalue() == b"100 False"


def test_wrapped_lines_leave_room_for_what_stands_before_them() -> None:
    lines = Text(60).wrapped("word " * 30, " " * 20)
    assert {len(line) for line in lines[:-1]} == {39} and len(lines) == 4


def test_what_an_encoding_cannot_hold_becomes_a_question_mark() -> None:
    for encoding, shown in (("ascii", "na?ve ?"), ("latin-1", "naïve ?")):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
        put(stream, "naïve …\n")
        put(stream, "plain\n")
        assert raw.getvalue() == f"{shown}\nplain\n".encode(encoding)


def test_a_stream_that_does_not_tell_its_encoding_is_given_ascii() -> None:
    class Teletype(io.StringIO):
        def write(self, text: str) -> int:
            text.encode("ascii")
            return super().write(text)

    stream = Teletype()
    assert stream.encoding is None
    put(stream, "naïve …")
    assert stream.getvalue() == "na?ve ?"


STRANGE = "a\x1b[2J\x1b[8mb\u202ec\x07d\u2066e"
SHOWN = "ab c d e"


@pytest.mark.parametrize("color", [False, True])
def test_a_report_shows_nothing_that_steers_or_turns_what_is_shown(color: bool) -> None:
    text = Text(color=color)
    text.line(STRANGE)
    text.line(f"  {text.styled(STRANGE, 'red')} {STRANGE}")
    text.block(STRANGE, "  ", style="bold")
    text.line(*text.wrapped(STRANGE))
    red, bold, end = ("\x1b[31m", "\x1b[1m", "\x1b[0m") if color else ("", "", "")
    assert str(text).splitlines() == [
        SHOWN,
        f"  {red}{SHOWN}{end} {SHOWN}",
        f"{bold}  {SHOWN}{end}",
        SHOWN,
    ]


def test_a_page_shows_nothing_that_turns_what_is_shown() -> None:
    assert escape(f"<{STRANGE}>\n  {STRANGE}") == f"&lt;{SHOWN}&gt;\n  {SHOWN}"
