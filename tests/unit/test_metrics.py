"""The metrics file: what is written is read, torn lines are passed over, a kill loses one line."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from oracle_offload.diagnose.explain.history import MOST_RECORDS
from oracle_offload.diagnose.explain.reading import HEAD_BYTES, TAIL_BYTES
from oracle_offload.observe.metrics import SCHEMA, MetricsFile, read_metrics

ROOT = Path(__file__).resolve().parents[2]


def test_a_line_per_step_holds_what_was_known_and_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for step in range(3):
            written = metrics.log(step, loss=1 / (step + 1), lr=0.5)
            assert written["host_available_bytes"] is not None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["schema"] == SCHEMA == "oracle_offload/metrics/1"
    assert lines[0]["pid"] == os.getpid()
    assert [(line["step"], line["loss"], line["lr"]) for line in lines[1:]] == [
        (0, 1.0, 0.5),
        (1, 0.5, 0.5),
        (2, 1 / 3, 0.5),
    ]
    assert lines[3]["host_available_bytes"] == written["host_available_bytes"]
    assert lines[1]["h2d_bytes"] is None, "no model is attached"
    assert lines[0]["started_s"] <= lines[1]["time_s"] <= lines[3]["time_s"]
    (run,) = read_metrics(path)
    assert (run.pid, run.started_s) == (os.getpid(), lines[0]["started_s"])
    assert run.records == lines[1:]
    assert run.series("loss") == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    assert run.series("h2d_bytes") == run.series("nothing of that name") == []


def test_a_run_that_is_resumed_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for first in (0, 10):
        with MetricsFile(path) as metrics:
            metrics.log(first, loss=float(first))
    assert [[record["step"] for record in run.records] for run in read_metrics(path)] == [[0], [10]]
    assert path.read_bytes().count(b"\n") == 4
    with pytest.raises(OSError):
        metrics.append({"step": 11})


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_torn_last_line_is_passed_over_and_not_continued(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.log(0, loss=0.0)
        metrics.log(1, loss=1.0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    (torn,) = read_metrics(path)
    lost = cut > 1  # of the first only the end of the line is missing
    assert [record["step"] for record in torn.records] == ([0] if lost else [0, 1])
    with MetricsFile(path) as metrics:
        metrics.log(2, loss=2.0)
    first, second = read_metrics(path)
    assert first == torn
    assert [record["step"] for record in second.records] == [2]
    assert path.read_bytes().startswith(whole[:-cut] + b"\n{")


def test_lines_of_others_are_kept_in_a_run_without_a_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 7, "loss": 1.0}\n{"loss": 2.0}\n[1]\n"x"\nnothing\n')
    (run,) = read_metrics(path)
    assert (run.pid, run.started_s) == (None, None)
    assert run.records == [{"step": 7, "loss": 1.0}, {"loss": 2.0}]
    assert run.series("loss") == [(7, 1.0)]
    path.write_bytes(b"")
    assert read_metrics(path) == []


def test_all_of_a_long_file_is_read(tmp_path: Path) -> None:
    """Longer than the beginning and end that a log is read of, and more lines than it keeps."""
    path, filling, count = tmp_path / "metrics.jsonl", "x" * 320, MOST_RECORDS + 1000
    with MetricsFile(path):
        pass
    with path.open("a") as file:
        file.writelines(f'{{"step": {step}, "filling": "{filling}"}}\n' for step in range(count))
    assert path.stat().st_size > HEAD_BYTES + TAIL_BYTES
    (run,) = read_metrics(path)
    assert run.pid == os.getpid()
    assert [record["step"] for record in run.records] == list(range(count))


def test_a_loss_that_is_no_number_stays_readable_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for step, loss in enumerate((math.nan, math.inf, -math.inf)):
            metrics.log(step, loss=loss)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    (run,) = read_metrics(path)
    losses = [loss for _, loss in run.series("loss")]
    assert math.isnan(losses[0]) and losses[1:] == [math.inf, -math.inf]


def test_numbers_read_elsewhere_can_be_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.append({"step": 3, "loss": 0.5, "h2d_bytes": None})
    (run,) = read_metrics(path)
    assert run.records[0].keys() == {"time_s", "step", "loss", "h2d_bytes"}
    assert (run.records[0]["step"], run.records[0]["h2d_bytes"]) == (3, None)


def test_it_is_closed_once_and_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.close()
    metrics.close()
    with pytest.raises(OSError):
        metrics.append({"step": 1})
    with pytest.raises(OSError):
        MetricsFile(tmp_path / "no such folder" / "metrics.jsonl")
    with pytest.raises(OSError):
        read_metrics(tmp_path / "no such file")


def test_a_write_that_was_cut_short_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        sizes: list[int] = []

        def write(file: int, data: bytes) -> int:
            sizes.append(len(data))
            return real(file, data[:5] if len(sizes) == 1 else data)

        monkeypatch.setattr(os, "write", write)
        metrics.append({"a": 1})
        assert len(sizes) == 2 and sizes[1] == sizes[0] - 5
        monkeypatch.undo()
        metrics.append({"a": 2})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line).get("a") for line in text.splitlines()] == [None, 1, 2]


def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = os.write, []
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        monkeypatch.setattr(os, "write", lambda *told: written.append(told) or real(*told))
        metrics.append({"a": 1})
        monkeypatch.undo()
    assert [data[-1:] for _, data in written] == [b"\n"]


@pytest.mark.skipif(sys.platform == "win32", reason="a file gets the lowest free number")
def test_a_file_is_closed_where_the_standard_input_was_closed_before(tmp_path: Path) -> None:
    kept = os.dup(0)
    os.close(0)
    try:
        MetricsFile(tmp_path / "metrics.jsonl").close()
        with pytest.raises(OSError):
            os.fstat(0)
    finally:
        os.dup2(kept, 0)
        os.close(kept)


@pytest.mark.parametrize("raises", [True, False], ids=["raised", "cut short"])
def test_a_line_that_a_full_disk_tore_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    real, path = os.write, tmp_path / "metrics.jsonl"
    calls: list[int] = []

    def full(file: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(file, data[:20])
        if raises:
            raise OSError(28, "no space left")
        return real(file, data[:1])

    with MetricsFile(path) as metrics:
        metrics.log(0)
        monkeypatch.setattr(os, "write", full)
        if raises:
            with pytest.raises(OSError, match="no space"):
                metrics.log(1)
        else:
            metrics.log(1)
        monkeypatch.undo()
        for step in (2, 3):
            metrics.log(step)
    assert len(calls) == 2
    (run,) = read_metrics(path)
    assert [record["step"] for record in run.records] == [0, 2, 3]
    assert path.read_bytes().count(b"\n") == 5, "only the torn line was ended"


def test_a_header_that_fails_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    real = os.close

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "no space left")

    def close(file: int) -> None:
        closed.append(file)
        real(file)

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(OSError, match="no space"):
        MetricsFile(tmp_path / "metrics.jsonl")
    assert len(closed) == 1


KILLED = """
import sys
from oracle_offload.observe.metrics import MetricsFile
metrics = MetricsFile(sys.argv[1])
for step in range(10**9):
    metrics.append({"step": step, "filling": "x" * 200})
    print(step, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_run_that_is_killed_loses_at_most_the_line_it_was_writing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 300:
            pass
    finally:
        process.kill()
    done = [int(line) for line in process.stdout.read().splitlines() if line]
    process.wait(timeout=60)
    last = max(done, default=300)
    (run,) = read_metrics(path)
    steps = [record["step"] for record in run.records]
    assert steps == list(range(len(steps))) and len(steps) >= last + 1


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; import oracle_offload.observe.metrics; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0
