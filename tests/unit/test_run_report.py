"""`report`: each figure is one of the file's, or stated arithmetic of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_recording_page import HEADER
from test_recording_page import step as step_of

from oracle_offload import cli
from oracle_offload.commands import report as command
from oracle_offload.commands.exits import Exit
from oracle_offload.observe.metrics import SCHEMA as METRICS
from oracle_offload.observe.metrics import read_metrics
from oracle_offload.observe.recording import SCHEMA as RECORDING
from oracle_offload.observe.recording import Recording
from oracle_offload.observe.run_report import (
    Comparison,
    RunReport,
    line_svg,
    of_metrics,
    of_recording,
    show,
)

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "report"
GIB = 1 << 30


def write_metrics(path: Path, runs: int = 1, **changes: Any) -> Path:
    lines: list[dict[str, Any]] = []
    for run in range(runs):
        lines.append({"schema": METRICS, "started_s": 1.0, "pid": 7})
        for step in range(8):
            record = {
                "step": 8 * run + step,
                "loss": 4.0 - 0.25 * step,
                "step_s": 9.0 if step < 3 else 0.5,
                "allocated_bytes": (4 + step) * GIB,
                "peak_bytes": (5 + step) * GIB,
                "h2d_bytes": None if step == 0 else 2 * GIB,
                "d2h_bytes": 0,
                "stall_s": 0.125,
                "acquires": 10,
                "hits": 9,
            }
            lines.append({**record, **changes})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def report(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "oracle_offload", "report", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_metrics_file_is_summed_up_without_its_warm_up(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "metrics.jsonl", runs=2)
    found = json.loads(report(path, "--json").stdout)
    assert (found["schema"], found["kind"]) == ("oracle_offload/report/1", "metrics")
    assert found["figures"] == {
        "runs": 2,
        "steps": 16,
        "errors": None,
        "loss_first": 4.0,
        "loss_last": 2.25,
        "step_s": 0.5,
        "peak_bytes": 12 * GIB,
        "growth_bytes": 4 * GIB,
        "h2d_bytes": 2 * GIB,
        "d2h_bytes": 0,
        "stall_s": 0.125,
        "hit_share": 0.9,
    }
    text = report(path).stdout
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 100
    rows = dict(re.findall(r"^  (.{28})(.+)$", text, re.M))
    shown = {label.strip(): value for label, value in rows.items()}
    assert shown["time per step"] == "500.00 ms" and shown["errors"] == "unknown"
    assert shown["growth of torch's memory"] == "4.00 GiB" and shown["hits"] == "90.0%"


class Cause:
    """Why memory ran out, as a report shows it."""

    def to_dict(self) -> dict[str, Any]:
        return {"cause": "leak"}

    def to_text(self, *, width: int, color: bool) -> str:
        return f"a leak, {width} columns, {color}\n"

    def to_html(self, *, page: bool) -> str:
        return f"<p>a leak, {page}</p>\n"


NUMBERS = {
    "runs": 1, "steps": 20, "errors": 0, "loss_first": -4.0, "loss_last": 0.123456789,
    "step_s": 1.0, "peak_bytes": 3 * GIB, "growth_bytes": 0, "h2d_bytes": 2.5 * GIB,
    "d2h_bytes": None, "stall_s": 0.9994, "hit_share": 0.256,
}  # fmt: skip
LATER = {
    **NUMBERS, "runs": 2, "steps": 20, "errors": None, "loss_first": -3.0, "loss_last": 0.1,
    "step_s": 3.0, "peak_bytes": GIB, "growth_bytes": 1024, "d2h_bytes": 5, "stall_s": 0.0,
    "hit_share": 0.5,
}  # fmt: skip
SERIES = {"loss": [(1, 4.0), (2, 3.0)], "bytes to the device": []}
BEFORE = RunReport("run <1>", "recording", NUMBERS, SERIES, "<p>also</p>\n", Cause())
AFTER = RunReport("run\x1b[2J 2", "metrics", LATER, {})


def same_as(name: str, text: str) -> bool:
    """Whether the text is that of the file; OO_REWRITE_GOLDEN=1 after a deliberate change."""
    path = GOLDEN / name
    if os.environ.get("OO_REWRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    return text == path.read_text(encoding="utf-8")


def test_texts_and_pages_are_those_on_file() -> None:
    both = Comparison(BEFORE, AFTER)
    assert same_as("one.txt", BEFORE.to_text(width=80) + AFTER.to_text(color=True))
    assert same_as("one.html", BEFORE.to_html() + AFTER.to_html())
    assert same_as("two.txt", both.to_text(width=60) + both.to_text(color=True))
    assert same_as("two.html", both.to_html())


def test_json_has_the_figures_and_their_differences() -> None:
    found = json.loads(BEFORE.to_json())
    assert found == {
        "schema": "oracle_offload/report/1",
        "file": "run <1>",
        "kind": "recording",
        "figures": NUMBERS,
        "out_of_memory": {"cause": "leak"},
    }
    assert AFTER.to_dict()["out_of_memory"] is None
    found = json.loads(Comparison(BEFORE, AFTER).to_json())
    assert (found["before"], found["after"]) == (BEFORE.to_dict(), AFTER.to_dict())
    assert found["differences"] == {
        "runs": 1, "steps": 0, "errors": None, "loss_first": 1.0,
        "loss_last": 0.1 - 0.123456789, "step_s": 2.0, "peak_bytes": -2 * GIB,
        "growth_bytes": 1024, "h2d_bytes": 0, "d2h_bytes": None, "stall_s": -0.9994,
        "hit_share": 0.244,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "how", "shown"),
    [
        (None, "size", "unknown"),
        (1536, "size", "1.50 KiB"),
        (1.0, "time", "1.00 s"),
        (0.9994, "time", "999.40 ms"),
        (-2.0, "time", "-2.00 s"),
        (0.2564, "share", "25.6%"),
        (3.0, "count", "3"),
        (0.123456789, "number", "0.123457"),
    ],
)
def test_a_figure_is_written_as_people_do(value: float | None, how: str, shown: str) -> None:
    assert show(value, how) == shown


def test_figures_of_a_metrics_file_are_means_and_sums_of_its_lines(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "metrics.jsonl", runs=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        if "step" in line:
            line |= {"h2d_bytes": number, "acquires": 10 + number, "stall_s": number / 8}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = of_metrics("x", read_metrics(path)).figures
    # Lines 1 to 8 and 10 to 17 are steps, of which the first three of each are the warm-up.
    warm = [*range(4, 9), *range(13, 18)]
    assert found["h2d_bytes"] == sum(warm) / 10
    assert found["stall_s"] == sum(warm) / 80
    acquires = sum(range(11, 19)) + sum(range(20, 28))
    assert found["hit_share"] == pytest.approx(9 * 16 / acquires)


def test_figures_of_a_recording_are_of_its_first_device() -> None:
    counters = {
        "h2d_bytes": 100, "h2d_copies": 1, "evictions": 1, "late": 0, "d2h_bytes": 10, "hits": 3,
        "acquires": 4, "waits": 32, "timed_waits": 2, "stalls": 1, "stall_seconds": 0.25,
    }  # fmt: skip
    steps = [
        step_of(0, None, label="warm-up", counters=counters, allocated_bytes=1, peak_bytes=900),
        step_of(1, 0.5, counters=counters, allocated_bytes=40, peak_bytes=70),
        step_of(1, 0.1, counters=counters, allocated_bytes=7, peak_bytes=9999, device="cpu"),
        step_of(2, 0.25, counters=counters, allocated_bytes=55, peak_bytes=80),
    ]
    error = {"event": "error", "what": "ValueError"}
    found = of_recording("x", Recording(HEADER, [*steps, error]))
    assert found.figures == {
        "runs": 1, "steps": 3, "errors": 1, "loss_first": None, "loss_last": None,
        "step_s": 0.375, "peak_bytes": 900, "growth_bytes": 15, "h2d_bytes": 100,
        "d2h_bytes": 10, "stall_s": 4.0, "hit_share": 0.75,
    }  # fmt: skip
    assert found.kind == "recording" and found.explained is None
    assert found.body == Recording(HEADER, [*steps, error])._repr_html_()
    idle = {**counters, "acquires": 0, "timed_waits": 0}
    nothing = of_recording(
        "x", Recording(HEADER, [step_of(0, 0.5, counters=idle, allocated_bytes=5)])
    ).figures
    assert (nothing["hit_share"], nothing["stall_s"], nothing["growth_bytes"]) == (None,) * 3
    none = of_recording("x", Recording({"devices": []}, [])).figures
    assert {key: value for key, value in none.items() if value is not None} == {
        "runs": 1,
        "steps": 0,
        "errors": 0,
    }


def test_what_no_line_knows_is_unknown(tmp_path: Path) -> None:
    nothing = dict.fromkeys(
        "loss step_s allocated_bytes peak_bytes h2d_bytes d2h_bytes stall_s acquires hits".split()
    )
    path = write_metrics(tmp_path / "metrics.jsonl", **nothing)
    figures = of_metrics("x", read_metrics(path)).figures
    assert {key for key, value in figures.items() if value is not None} == {"runs", "steps"}
    assert of_metrics("x", []).figures["steps"] == 0


def test_a_short_run_has_its_warm_up_alone(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "metrics.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    figures = of_metrics("x", read_metrics(path)).figures
    assert (figures["steps"], figures["step_s"], figures["growth_bytes"]) == (2, 9.0, GIB)


def test_two_are_compared(tmp_path: Path) -> None:
    before = write_metrics(tmp_path / "a.jsonl")
    after = write_metrics(tmp_path / "b.jsonl", step_s=0.25, peak_bytes=None)
    text = report(before, after).stdout
    assert re.search(r"time per step +500\.00 ms +250\.00 ms +-250\.00 ms \(-50\.0%\)$", text, re.M)
    assert re.search(r"peak of torch's memory +12\.00 GiB +unknown +unknown$", text, re.M)
    assert re.search(r"hits +90\.0% +90\.0% +\+0\.0%$", text, re.M)
    assert max(map(len, text.splitlines())) <= 100
    found = json.loads(report(before, after, "--json").stdout)
    assert found["differences"]["step_s"] == -0.25
    assert found["differences"]["peak_bytes"] is None
    assert found["before"]["file"] == str(before)
    page = Comparison(*[of_metrics(str(p), read_metrics(p)) for p in (before, after)]).to_html()
    assert "-250.00 ms (-50.0%)" in page and "<script" not in page


def test_a_log_is_explained(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    done = report(log)
    assert done.stdout.startswith("Out of memory on CUDA")
    assert json.loads(report(log, "--json").stdout)["found"] is True
    done = report(log, write_metrics(tmp_path / "m.jsonl"))
    assert done.returncode == 1 and "nothing to compare" in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"schema": "oracle_offload/other/1"}\n', "it is of oracle_offload/other/1"),
        (f'{{"schema": "{RECORDING}", "devices": []}}\nhalf\n', "line 2: not JSON"),
    ],
)
def test_what_cannot_be_shown_is_said(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    done = report(path)
    assert (done.returncode, done.stdout) == (1, "") and says in done.stderr
    assert "Traceback" not in done.stderr
    done = report(tmp_path / "nothing")
    assert done.returncode == 1 and "No such file" in done.stderr


WHOLE = Recording(
    {"schema": RECORDING, "devices": [], "dropped": {}},
    [{"event": "error", "what": "x", "t_s": 0.0}],
)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.html", WHOLE.to_html(), "it is a page, which a browser shows"),
        ("other.htm", "\ufeff\n <HTML><body>", "it is a page, which a browser shows"),
        ("step.svg", '<svg xmlns="x"/>', "it is a picture"),
        ("run.json", WHOLE.to_chrome(), "it is a trace, which ui.perfetto.dev shows"),
        ("run.csv", WHOLE.to_csv(), "it is a table"),
        ("model.safetensors", "\x18\0\0\0\0\0\0\0{", "it is no text"),
        ("config.json", '{\n  "hidden_size": 64\n}\n', "it tells of no memory that ran out"),
        ("empty", "", "it tells of no memory that ran out"),
    ],
)
def test_another_file_is_told_what_is_wanted_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, says: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    page = tmp_path / "page.html"
    assert cli.main(["report", str(path), "--html", str(page)]) == 1
    said = capsys.readouterr()
    assert not said.out and not page.exists()
    assert said.err.startswith(f"cannot read {path}: ") and says in said.err
    assert "Wanted is a recording in .jsonl (recorder.export('run.jsonl'))" in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_command_says_whether_it_could_read_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    path = write_metrics(tmp_path / "metrics.jsonl")
    assert command.run(parser.parse_args([str(path), *flags])) == Exit.OK
    assert capsys.readouterr().out
    assert command.run(parser.parse_args([str(tmp_path / "no"), *flags])) == Exit.ERROR
    assert not capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_output_that_is_full_is_told(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
) -> None:
    path = write_metrics(tmp_path / "metrics.jsonl")
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    assert cli.main(["report", str(path), *flags]) == 1
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        full.close()
    assert "standard output" in capsys.readouterr().err


def test_the_page_draws_what_is_known(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "<b>.jsonl")
    assert report(path, "--html", tmp_path / "page.html").returncode == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count("<polyline") == 4 and "<b>" not in page and "http-equiv" not in page
    for label in ("loss", "seconds per step", "bytes allocated by torch", "bytes to the device"):
        assert f"<h3>{label}</h3>" in page


def scale(picture: str) -> list[str]:
    return re.findall(r'x="-8"[^>]*>([^<]*)<', picture)


def test_a_line_has_a_point_per_number_between_round_ones() -> None:
    picture = line_svg("loss", [(10, 4.0), (11, float("nan")), (12, 1.0), (14, 2.5)])
    (points,) = re.findall(r'points="([^"]+)"', picture)
    found = [tuple(map(float, point.split(","))) for point in points.split()]
    assert [x for x, _ in found] == [0, 500, 1000]
    assert [y for _, y in found] == [0, 120, 60]
    assert scale(picture) == ["1", "2", "3", "4"]
    assert re.findall(r">(step \d+)<", picture) == ["step 10", "step 12", "step 14"]
    flat = line_svg("bytes", [(1, 1 << 30)])
    assert scale(flat) == ["1 GiB"] and flat.count("step 1<") == 1
    assert line_svg("loss", [(1, float("inf"))]) == line_svg("loss", []) == ""


@pytest.mark.parametrize(
    ("label", "low", "top", "shown"),
    [
        ("bytes allocated", 18.2 * GIB, 19.1 * GIB, ["18 GiB", "18.5 GiB", "19 GiB", "19.5 GiB"]),
        ("bytes allocated", 0, 900, ["0 B", "500 B", "1000 B"]),
        ("bytes allocated", 0, 3 << 40, ["0 TiB", "1 TiB", "2 TiB", "3 TiB"]),
        ("bytes allocated", 5 << 20, 6 << 20, ["5 MiB", "5.5 MiB", "6 MiB"]),
        ("bytes allocated", 2 << 10, 3 << 10, ["2 KiB", "2.5 KiB", "3 KiB"]),
        ("seconds per step", 0.0812, 0.0934, ["80 ms", "85 ms", "90 ms", "95 ms"]),
        ("seconds per step", 0.5, 2.9, ["0 s", "1 s", "2 s", "3 s"]),
        ("loss", -0.21, 0.33, ["-0.4", "-0.2", "0", "0.2", "0.4"]),
    ],
)  # fmt: skip
def test_a_scale_holds_all_and_is_round(
    label: str, low: float, top: float, shown: list[str]
) -> None:
    picture = line_svg(label, [(1, low), (2, top)])
    assert scale(picture) == shown
    (points,) = re.findall(r'points="([^"]+)"', picture)
    assert all(0 <= float(point.split(",")[1]) <= 120 for point in points.split())


def test_what_is_slow_at_first_does_not_set_the_scale(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "metrics.jsonl", runs=2)
    series = of_metrics("x", read_metrics(path)).series
    assert [step for step, _ in series["seconds per step"]] == [*range(3, 8), *range(11, 16)]
    assert [step for step, _ in series["loss"]] == [*range(16)]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    series = of_metrics("x", read_metrics(path)).series
    assert [step for step, _ in series["seconds per step"]] == [0, 1], "there is nothing else"


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, oracle_offload.commands.report as r, oracle_offload.observe.run_report\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
