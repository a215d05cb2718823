"""`python -m oracle_offload explain`: files, standard input, following, JSON, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from oracle_offload import cli
from oracle_offload.explain.command import KEEP_CHARS, Follower

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


def test_a_file_is_explained_in_text_of_at_most_100_columns(log: Path) -> None:
    ended = run(str(log))
    lines = ended.stdout.decode().splitlines()
    assert ended.returncode == 0
    assert (
        lines[0] == "Out of memory on CUDA device 0: The work needs more memory than the card has"
    )
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in ended.stdout.decode()  # not a terminal
    assert sum(line.startswith(("  1. ", "  2. ", "  3. ", "  4. ")) for line in lines) == 3


def test_json_states_every_fact_and_null_for_the_unknown(log: Path) -> None:
    data = json.loads(run(str(log), "--json").stdout)
    assert data["schema"] == "oracle_offload.oom/1"
    assert data["facts"]["requested_bytes"] == 1 << 30
    assert data["facts"]["cap_bytes"] is None
    assert data["quotes"]["requested"]["line"] == 2
    assert any(fix["changes_result"] for fix in data["fixes"])


def test_standard_input_and_a_utf16_log_of_powershell(log: Path) -> None:
    ended = run("-", input=log.read_bytes())
    assert ended.returncode == 0 and b"CUDA device 0" in ended.stdout
    log.write_bytes(FULL.encode("utf-16"))
    assert run(str(log)).returncode == 0


def test_exit_codes_for_nothing_found_and_for_a_missing_file(log: Path, tmp_path: Path) -> None:
    log.write_text("all is well\n")
    ended = run(str(log))
    assert (ended.returncode, ended.stdout) == (3, b"No out-of-memory error found\n")
    missing = run(str(tmp_path / "no.log"))
    assert missing.returncode == 1
    assert b"no.log" in missing.stderr and b"Traceback" not in missing.stderr
    assert run(str(log), "--history", str(tmp_path / "no.jsonl")).returncode == 1
    assert run().returncode == 2


def test_all_fixes_html_and_history(log: Path, tmp_path: Path) -> None:
    page, steps = tmp_path / "report.html", tmp_path / "steps.jsonl"
    steps.write_text('{"step": 0, "phase": "forward"}\n{"step": 0, "phase": "backward"}\n')
    ended = run(str(log), "--all", "--html", str(page), "--history", str(steps))
    assert ended.returncode == 0
    assert b"The first backward pass" in ended.stdout.splitlines()[0]
    assert b"changes the result of training" in ended.stdout
    assert "<script" not in page.read_text("utf-8")
    assert run(str(log), "--html", str(tmp_path / "no" / "x.html")).returncode == 1


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


class Following:
    """A running `explain --follow`; reports are read as they come."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "--follow", "--json", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Whoever runs the tests in the background lets them, and so this child, ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def report(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=20)
        return self.process.returncode


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_follow_reports_what_is_written_later_in_pieces_and_after_rotation(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("epoch 1\n")
    following = Following(path)
    try:
        with path.open("a") as log:
            log.write(FULL[:120])
            log.flush()
            time.sleep(0.05)
            log.write(FULL[120:] + "\n")
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
