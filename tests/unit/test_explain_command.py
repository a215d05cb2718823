"""`python -m oracle_offload explain`: files, standard input, following, JSON, exit codes."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from oracle_offload import cli
from oracle_offload.diagnose.explain import OomReport, command, explain_oom, reading
from oracle_offload.diagnose.explain.command import KEEP_CHARS, Follower

FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total "
    "capacity of 24.00 GiB of which 100.00 MiB is free. Including non-PyTorch memory, this process "
    "has 23.90 GiB memory in use. Of the allocated memory 23.20 GiB is allocated by PyTorch, and "
    "200.00 MiB is reserved by PyTorch but unallocated."
)
COMMAND = [sys.executable, "-m", "oracle_offload", "explain"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(f"epoch 3\n{FULL}\n", encoding="utf-8")
    return path


def run(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, timeout=60, **kwargs)


def test_colours_on_a_terminal_only_and_not_with_no_color(
    log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.main(["explain", str(log)]) == 0
    assert "\x1b[1m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["explain", str(log)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_stream_that_cannot_show_a_character_gets_a_question_mark(log: Path) -> None:
    log.write_text(f"трейн {FULL}\n", encoding="utf-8")
    ended = run(str(log), env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert ended.returncode == 0 and b"Traceback" not in ended.stderr


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command here; its exit code, and what it writes."""
    code = cli.main(["explain", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def standard_input() -> Iterator[Callable[[bytes], None]]:
    """Put bytes where standard input is read."""
    kept = os.dup(0)

    def put(data: bytes) -> None:
        reading, writing = os.pipe()
        os.write(writing, data)
        os.close(writing)
        os.dup2(reading, 0)
        os.close(reading)

    yield put
    os.dup2(kept, 0)
    os.close(kept)


def test_what_is_shown_is_the_report_and_nothing_else(
    log: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    standard_input: Callable[[bytes], None],
) -> None:
    report = explain_oom(log.read_text("utf-8"))
    page = tmp_path / "page.html"
    text = report.to_text()
    assert told(capsys, str(log)) == (0, text, "")
    assert told(capsys, str(log), "--all") == (0, report.to_text(all_fixes=True), "")
    assert told(capsys, str(log), "--json") == (0, report.to_json(indent=2) + "\n", "")
    assert told(capsys, str(log), "--html", str(page)) == (0, text, "")
    assert page.read_text("utf-8") == report.to_html()
    standard_input(log.read_bytes())
    assert told(capsys, "-") == (0, text, "")
    nothing = "No out-of-memory error found\n"
    log.write_text("all is well\n")
    assert told(capsys, str(log)) == (3, nothing, "")
    standard_input(b"")
    assert told(capsys, "-") == (3, nothing, "")


def test_what_was_not_read_is_said_beside_the_report(
    small_limits: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("a line\n" * 3000 + f"{FULL}\n")
    code, out, err = told(capsys, str(log))
    assert code == 0 and out.startswith("Out of memory on CUDA device 0")
    left = log.stat().st_size - 4096 - 8192
    assert err.startswith(f"{log}: left out {left} bytes between the first ")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
@pytest.mark.parametrize("how", ["", "--json"])
def test_a_pipe_that_is_followed_is_told_report_by_report(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = explain_oom(f"{FULL}\n")
    pipe = _pipe(tmp_path / "log")
    writer = _write(pipe, f"{FULL}\n")
    options = [how] if how else []
    text = report.to_json(indent=None) if how else report.to_text()
    assert told(capsys, "--follow", *options, str(pipe)) == (0, text + "\n", "")
    writer.join(60)
    writer = _write(pipe, "all is well\n")
    assert told(capsys, "--follow", *options, str(pipe)) == (3, "", "")
    writer.join(60)


def options(log: str, **changed: Any) -> argparse.Namespace:
    known = dict(log=log, follow=False, history=None, html=None, json=True, all=False)
    return argparse.Namespace(**{**known, **changed})


def test_an_interrupt_ends_what_is_followed_and_nothing_else(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*reports: OomReport) -> Iterator[OomReport]:
        yield from reports
        raise KeyboardInterrupt

    full = explain_oom(FULL)
    for reports, found in (((), False), ((full,), True), ((full, OomReport()), True)):
        monkeypatch.setattr(command, "_followed", lambda *_, some=reports: interrupted(*some))
        assert command.run(options(str(log), follow=True)) is found
        assert capsys.readouterr().out.count("\n") == len(reports)
    monkeypatch.setattr(command, "_once", lambda *_: interrupted())
    with pytest.raises(KeyboardInterrupt):
        command.run(options(str(log)))


def test_a_history_that_grows_is_read_anew_for_each_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = tmp_path / "steps.jsonl"
    steps.write_text("")
    phases = iter(["backward", "optimizer"])

    def pieces(path: str) -> Iterator[bytes | None]:
        yield f"{FULL}\n".encode()
        for phase in phases:
            with steps.open("a") as file:
                file.write(json.dumps({"step": 0, "phase": phase}) + "\n")
            yield b""
            yield f"{FULL}\n".encode()
        yield None

    monkeypatch.setattr(command, "_pieces", pieces)
    monkeypatch.setattr(command, "QUIET_S", 0.0)
    causes = []
    for history in (steps, None):
        given = options("any", follow=True, history=None if history is None else str(history))
        assert command.run(given)
        lines = capsys.readouterr().out.splitlines()
        causes.append([json.loads(line)["cause"]["name"] for line in lines])
    assert causes[0] == ["too_big", "first_backward", "optimizer_state"]
    assert set(causes[1]) == {"too_big"}


@pytest.mark.parametrize(
    ("arrive", "told_at"),
    [
        ([(0.0, FULL), (0.25, ""), (9.0, "")], [0.25]),
        ([(0.0, FULL), (0.125, ""), (9.0, "")], [9.125]),
        ([(0.0, FULL), (0.125, None)], [0.125]),
        ([(0.0, ""), (0.0, None)], []),
        ([(1.0, FULL), *[(0.125, "step ")] * 20], [3.0]),
        ([(1.0, FULL), *[(0.125, "step ")] * 20, (0.25, "")], [3.0]),
        ([(1.0, FULL), (0.25, ""), (1.0, "all is well\n"), (0.25, "")], [1.25]),
        ([(1.0, FULL), (0.25, ""), (1.0, FULL), (0.125, ""), (0.125, "")], [1.25, 2.5]),
        # In two pieces: once it is whole.
        ([(0.0, FULL[:120]), (0.125, ""), (0.125, FULL[120:]), (0.125, ""), (0.125, "")], [0.5]),
    ],
)
def test_when_a_message_is_told(
    arrive: list[tuple[float, str | None]], told_at: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def pieces(path: str) -> Iterator[bytes | None]:
        for seconds, piece in arrive:
            now[0] += seconds
            yield None if piece is None else piece.encode()

    monkeypatch.setattr(command, "QUIET_S", 0.25)
    monkeypatch.setattr(command, "LONGEST_WAIT_S", 2.0)
    monkeypatch.setattr(command, "_pieces", pieces)
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    assert [now[0] for _ in command._followed("any", None)] == told_at


def test_the_oldest_text_is_forgotten_and_what_was_explained_stays_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "KEEP_CHARS", 500)
    follower = Follower()
    follower.feed(FULL)
    assert follower.report() is not None and follower.explained == len(FULL)
    follower.feed("x" * (1000 - len(FULL)))
    assert len(follower.text) == 1000 and follower.explained == len(FULL)
    assert follower.report() is None and follower.explained == 1000
    follower.feed("y" * 100 + "\nMemoryError\n")
    assert len(follower.text) == 500 and follower.text.endswith("\nMemoryError\n")
    assert follower.explained == 500 - 113
    report = follower.report()
    assert report is not None and report.template == "memory-error"


class Following:
    """A running `explain --follow`; reports are read as they come."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "--follow", "--json", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Tests that run in the background ignore SIGINT, and so would this child.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def report(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_follow_reports_what_is_written_later_and_after_rotation(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("epoch 1\n")
    following = Following(path)
    try:
        with path.open("a") as log:
            log.write(FULL + "\n")
        first = following.report()
        assert first["facts"]["free_bytes"] == 100 << 20
        with path.open("a") as log:
            log.write("DataLoader worker (pid 7) is killed by signal: Killed. \n")
        assert following.report()["template"] == "dataloader-killed"
        path.rename(tmp_path / "train.log.1")
        path.write_text("MemoryError\n")
        assert following.report()["template"] == "memory-error"
    finally:
        assert following.stop() == 0


def test_following_standard_input_ends_with_it(log: Path) -> None:
    ended = run("--follow", "--json", "-", input=log.read_bytes())
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["found"] is True
    assert run("--follow", "-", input=b"nothing\n").returncode == 3


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
@pytest.mark.parametrize("options", ["", "--follow", "--follow --json", "--history <(echo '{}')"])
def test_process_substitution_is_read_to_its_end(log: Path, options: str) -> None:
    ended = subprocess.run(
        ["bash", "-c", f'{" ".join(COMMAND)} <(cat "$1") {options}', "bash", str(log)],
        capture_output=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"device 0" in ended.stdout or b'"device": 0' in ended.stdout


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _write(path: Path, *texts: str) -> threading.Thread:
    def write() -> None:
        with path.open("w") as pipe:
            pipe.writelines(texts)

    writer = threading.Thread(target=write)
    writer.start()
    return writer


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_a_named_pipe_is_read_to_its_end_and_its_history_once(tmp_path: Path) -> None:
    pipe, steps = _pipe(tmp_path / "log"), _pipe(tmp_path / "steps")
    writers = [
        _write(pipe, f"epoch 3\n{FULL}\n"),
        _write(steps, '{"step": 0, "phase": "forward"}\n{"step": 0, "phase": "backward"}\n'),
    ]
    ended = run(str(pipe), "--history", str(steps), "--json")
    for writer in writers:
        writer.join(60)
    assert json.loads(ended.stdout)["cause"]["name"] == "first_backward"


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_the_history_of_what_is_followed_is_read_once_where_it_is_a_pipe(
    tmp_path: Path, log: Path
) -> None:
    steps = _pipe(tmp_path / "steps")
    writer = _write(steps, '{"step": 0, "phase": "forward"}\n{"step": 0, "phase": "backward"}\n')
    command = [*COMMAND, "--follow", "--json", "--history", str(steps), "-"]
    with log.open("rb") as given:
        ended = subprocess.run(command, stdin=given, capture_output=True, text=True, timeout=60)
    writer.join(60)
    assert json.loads(ended.stdout)["cause"]["name"] == "first_backward"


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_following_a_pipe_explains_while_the_writer_is_silent(tmp_path: Path) -> None:
    path = _pipe(tmp_path / "log")
    following = Following(path)
    with path.open("w") as pipe:
        pipe.write(f"{FULL}\n")
        pipe.flush()
        assert following.report()["device"] == 0  # the pipe is still open
        pipe.write("MemoryError\n")
    assert following.report()["template"] == "memory-error"
    following.process.communicate(timeout=60)
    assert following.process.returncode == 0  # a pipe ends, a file need not


@pytest.mark.skipif(sys.platform == "win32", reason="shell and errno of POSIX")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("no.log", "cannot read no.log: No such file or directory (ENOENT, errno 2)"),
        ("''", "cannot read '': No such file or directory (ENOENT, errno 2)"),
        (".", "cannot read .: Is a directory (EISDIR, errno 21)"),
        ("x.log/y", "cannot read x.log/y: Not a directory (ENOTDIR, errno 20)"),
        ("$'a\\e[2Jb\\n'", "cannot read ab : No such file or directory (ENOENT, errno 2)"),
        ("- <&-", "cannot read standard input: Bad file descriptor (EBADF, errno 9)"),
        (
            "--follow - <&-",
            "cannot read standard input: Bad file descriptor (EBADF, errno 9)",
        ),
        ("--follow no.log", "cannot read no.log: No such file or directory (ENOENT, errno 2)"),
        ("--follow .", "cannot read .: Is a directory (EISDIR, errno 21)"),
        ("x.log --history h", "cannot read h: No such file or directory (ENOENT, errno 2)"),
        ("x.log --history .", "cannot read .: Is a directory (EISDIR, errno 21)"),
        ("x.log --html .", "cannot write .: Is a directory (EISDIR, errno 21)"),
        (
            "x.log >/dev/full",
            "cannot write standard output: No space left on device (ENOSPC, errno 28)",
        ),
    ],
)
def test_a_file_that_fails_is_named_with_its_errno(
    tmp_path: Path, arguments: str, said: str
) -> None:
    (tmp_path / "x.log").write_text(f"{FULL}\n")
    ended = subprocess.run(
        ["bash", "-c", f"{' '.join(COMMAND)} {arguments}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", f"{said}\n")


@pytest.mark.skipif(sys.platform == "win32", reason="a directory cannot be opened there")
def test_a_stream_that_fails_while_it_is_followed_says_so(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            for piece in command._streamed(descriptor):
                assert piece == b"", "nothing was read"
    finally:
        os.close(descriptor)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
@pytest.mark.parametrize("options", ["", "--json"])
def test_a_reader_that_goes_away_is_no_error(log: Path, options: str) -> None:
    ended = subprocess.run(
        ["bash", "-c", f'{" ".join(COMMAND)} {log} {options} | true; echo "${{PIPESTATUS[0]}}"'],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.stdout, ended.stderr) == ("0\n", "")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero")
def test_an_endless_input_ends_at_the_stated_limit() -> None:
    ended = run("/dev/zero")
    assert (ended.returncode, ended.stdout) == (3, b"No out-of-memory error found\n")
    assert b"/dev/zero: stopped after 4 GiB of an input that goes on" in ended.stderr


def test_a_log_that_is_replaced_cut_short_or_gone_for_a_while_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "POLL_S", 0.0)
    path = tmp_path / "log"
    path.write_text("one\n")
    pieces = command._pieces(str(path))
    assert [next(pieces), next(pieces)] == [b"one\n", b""]
    with path.open("a") as log:
        path.unlink()
        assert next(pieces) == b""
        log.write("two\n")
    assert [next(pieces), next(pieces)] == [b"two\n", b""]  # what is open may still grow
    path.write_text("new\n")
    assert [next(pieces), next(pieces), next(pieces)] == [b"", b"new\n", b""]
    path.write_text("x\n")  # shorter than what was read
    assert [next(pieces), next(pieces), next(pieces)] == [b"", b"x\n", b""]
    (tmp_path / "next").write_text("longer than before\n")
    (tmp_path / "next").rename(path)
    assert [next(pieces), next(pieces)] == [b"", b"longer than before\n"]
    pieces.close()


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "HEAD_BYTES", 4096)
    monkeypatch.setattr(reading, "TAIL_BYTES", 8192)
    monkeypatch.setattr(reading, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(reading, "_PIECE", 1000)


def excerpt_of(data: bytes, tmp_path: Path, kind: str) -> reading.Excerpt:
    path = tmp_path / "input"
    if kind == "file":
        path.write_bytes(data)
    else:
        _pipe(path)

        def write() -> None:
            with suppress(BrokenPipeError), path.open("wb") as pipe:
                pipe.write(data)

        threading.Thread(target=write).start()
    with path.open("rb") as log:
        return reading.read_excerpt(log)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="an input without an end")
def test_no_more_is_read_than_a_limit(small_limits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(io.BufferedReader):
        taken = 0

        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            self.taken += len(found)
            return found

    monkeypatch.setattr(reading, "MOST_BYTES", 4096 + 20 * 1000)
    with Counted(io.FileIO("/dev/zero")) as log:
        assert reading.read_excerpt(log).unread
        assert log.taken == reading.MOST_BYTES


@pytest.mark.parametrize("kind", ["file", "pipe"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("lines", [0, 1, 50, 2000, 3001, 9001])
def test_the_beginning_and_the_end_of_a_long_input_are_kept(
    small_limits: None, tmp_path: Path, kind: str, encoding: str, lines: int
) -> None:
    if kind == "pipe" and sys.platform == "win32":
        pytest.skip("pipes of POSIX")
    text = "".join(f"step {step} é\n" for step in range(lines))
    data = text.encode(encoding)
    excerpt = excerpt_of(data, tmp_path, kind)
    assert not excerpt.unread
    if len(data) <= 4096 + 8192:
        assert (excerpt.text, excerpt.skipped, excerpt.note) == (text, 0, "")
        return
    before, _, after = excerpt.text.partition(f"\n{reading.GAP}\n")
    assert text.startswith(before) and text.endswith(after)  # whole lines, none of them twice
    assert excerpt.skipped == len(data) - 4096 - 8192
    assert 4096 - 64 <= len(before.encode(encoding)) <= 4096
    assert 8192 - 64 <= len(after.encode(encoding)) <= 8192 + 2
    assert f"left out {excerpt.skipped} bytes" in excerpt.note


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_the_end_of_what_was_read_of_an_endless_input_is_kept(
    small_limits: None, tmp_path: Path
) -> None:
    data = b"begin\n" + b"." * (2 << 20) + b"\nnever seen"
    excerpt = excerpt_of(data, tmp_path, "pipe")
    assert excerpt.unread and "stopped after" in excerpt.note
    assert excerpt.text.startswith("begin") and excerpt.text.endswith("." * 8000)
    assert "never" not in excerpt.text


def test_a_log_without_line_ends_keeps_its_end(small_limits: None, tmp_path: Path) -> None:
    data = b"\r".join(b"%d%%" % step for step in range(9000)) + FULL.encode()
    assert excerpt_of(data, tmp_path, "file").text.endswith(f"8999%{FULL}")


HOSTILE = "\x1b[31m\x1b]0;owned\x07\x9b2J\u202e\x00\x08"


@pytest.mark.parametrize("options", [[], ["--json"], ["--all"]])
def test_control_sequences_of_a_log_are_not_passed_on(log: Path, options: list[str]) -> None:
    log.write_text(f"{HOSTILE}{FULL}{HOSTILE}\n", encoding="utf-8")
    ended = run(str(log), *options, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    shown = ended.stdout.decode()
    assert ended.returncode == 0 and "CUDA out of memory" in shown and "owned" not in shown
    assert [char for char in shown if not char.isprintable() and char != "\n"] == []


def test_a_follower_keeps_context_and_forgets_the_distant_past() -> None:
    follower = Follower()
    follower.feed("Evaluation  [1/9]  eta: 0\n")
    assert follower.report() is None
    follower.feed("RuntimeError: CUDA error: out of memory\n")
    report = follower.report()
    assert report is not None and report.cause.name == "evaluation"  # from the earlier piece
    assert follower.report() is None
    for _ in range(20):
        follower.feed("x" * (KEEP_CHARS // 4))
    assert len(follower.text) <= 2 * KEEP_CHARS
    assert follower.report() is None


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_silence_of_a_stream_is_told_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "POLL_S", 0.02)
    reading, writing = os.pipe()
    try:
        stream = command._streamed(reading)
        assert next(stream) == b""
        os.write(writing, b"a")
        assert next(piece for piece in stream if piece) == b"a"
        assert [next(stream), next(stream)] == [b"", b""]
        os.close(writing)
        assert next(piece for piece in stream if piece != b"") is None
        assert list(stream) == []
    finally:
        os.close(reading)


def test_a_log_that_is_followed_no_longer_is_closed(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    honest = command._opened

    def note(path: str) -> Any:
        opened.append(honest(path))
        return opened[-1]

    monkeypatch.setattr(command, "_opened", note)
    pieces = command._pieces(str(log))
    assert next(pieces) == log.read_bytes()
    assert not opened[0].closed
    pieces.close()  # type: ignore[attr-defined]
    assert opened[0].closed
    pieces = command._pieces(str(log))
    assert next(pieces) and not opened[1].closed
    (log.parent / "next").write_text("new\n")
    (log.parent / "next").rename(log)
    assert next(pieces) == b"" and opened[1].closed
    pieces.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("skipped", [4, 5])
@pytest.mark.parametrize("order", ["le", "be"])
def test_the_rest_of_a_log_of_two_bytes_a_character_begins_with_a_whole_one(
    order: str, skipped: int
) -> None:
    mark = "\ufeff".encode(f"utf-16-{order}")
    head, tail = (text.encode(f"utf-16-{order}") for text in ("one\ntwo\n", "cut\nthree\n"))
    joined = reading._joined(mark + head, b"?" * (skipped % 2) + tail, skipped)
    assert joined == f"one\ntwo\n{reading.GAP}\nthree\n"
