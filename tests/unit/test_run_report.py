"""`report`: each figure is one of the file's, or stated arithmetic of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oracle_offload.metrics import SCHEMA as METRICS
from oracle_offload.metrics import read_metrics
from oracle_offload.views.recording import SCHEMA as RECORDING
from oracle_offload.views.run_report import Comparison, line_svg, of_metrics

ROOT = Path(__file__).resolve().parents[2]
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


def test_the_page_draws_what_is_known(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "<b>.jsonl")
    assert report(path, "--html", tmp_path / "page.html").returncode == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count("<polyline") == 4 and "<b>" not in page and "http-equiv" not in page
    for label in ("loss", "seconds per step", "bytes allocated by torch", "bytes to the device"):
        assert f"<h3>{label}</h3>" in page


def test_a_line_has_a_point_per_number_and_its_extremes_beside_it() -> None:
    picture = line_svg("loss", [(10, 4.0), (11, float("nan")), (12, 1.0), (14, 2.5)])
    (points,) = re.findall(r'points="([^"]+)"', picture)
    found = [tuple(map(float, point.split(","))) for point in points.split()]
    assert [x for x, _ in found] == [100.0, 425.0, 750.0]
    assert [y for _, y in found] == [15.0, 115.0, 65.0]
    assert ">4<" in picture and ">1<" in picture and "step 10" in picture and "step 14" in picture
    flat = line_svg("bytes", [(1, 1 << 30)])
    assert flat.count("1.00 GiB") == 1
    assert line_svg("loss", [(1, float("inf"))]) == line_svg("loss", []) == ""


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, oracle_offload.commands.report as r, oracle_offload.views.run_report\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
