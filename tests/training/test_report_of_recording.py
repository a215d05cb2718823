"""`report` of a real recording: each figure is an average of its steps."""

from __future__ import annotations

import json
import re
import statistics

import pytest
from equality import attached
from test_summary import train
from torch import nn

import oracle_offload
from oracle_offload.cli import main


@pytest.fixture
def recorded(tmp_path):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(6)))
    path = tmp_path / "run.jsonl"
    with attached(model, "cpu", offload_percent=0.9):
        with pytest.raises(RuntimeError, match="by hand"), oracle_offload.record(path) as recorder:
            train(model, 9)
            raise RuntimeError("by hand")
        yield path, recorder.recording()


def test_its_figures_are_averages_of_whole_steps(recorded, capsys, tmp_path):
    path, recording = recorded
    assert main(["report", str(path), "--json", "--html", str(tmp_path / "page.html")]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    whole = [s for s in recording.steps() if not s["label"] and not s["timed"]]
    assert len(whole) >= 3 and figures["steps"] == len(recording.steps()) == 9
    for name in ("h2d_bytes", "d2h_bytes"):
        mean = statistics.mean(step["counters"][name] for step in whole)
        assert figures[name] == pytest.approx(mean) and mean > 0
    assert figures["step_s"] == pytest.approx(statistics.mean(s["seconds"] for s in whole))
    share = [sum(step["counters"][name] for step in whole) for name in ("hits", "acquires")]
    assert figures["hit_share"] == pytest.approx(share[0] / share[1])
    assert (figures["runs"], figures["errors"]) == (1, 1)
    assert figures["loss_last"] is figures["peak_bytes"] is figures["growth_bytes"] is None
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<script" not in page and "oo-report" in page
    assert recording._repr_html_() in page, "the recording's own page follows"


def test_a_recording_is_compared_with_a_metrics_file(recorded, capsys, tmp_path):
    path, _ = recorded
    metrics = tmp_path / "metrics.jsonl"
    with oracle_offload.observe.MetricsFile(metrics) as file:
        file.append({"step": 1, "h2d_bytes": 1 << 20})
    assert main(["report", str(metrics), str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"to the device, per step +1\.00 MiB +[\d.]+ KiB  -[\d.]+ KiB \(-", out), out
