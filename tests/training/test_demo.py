"""The demonstration, for a few steps: the main job on real input."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import xml.etree.ElementTree

import pytest
import torch
from diffusers.utils import logging as diffusers_logging

from oracle_offload import cli
from oracle_offload.commands import demo
from oracle_offload.engine.engines import open_states
from oracle_offload.host.sizes import format_size, parse_size
from oracle_offload.observe.timeline import timeline_svg


def test_demo_trains_alike_and_draws_its_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("ORACLE_OFFLOAD_SIM_DEVICE", "rtx3090")
    diffusers_logging.set_verbosity_warning()
    svg = tmp_path / "deep" / "step.svg"
    options = ["--device", "cpu", "--steps", "3", "--preset", "rtx4090", "--json"]
    began = time.perf_counter()
    code = cli.main(["demo", *options, "--svg", str(svg)])
    took = time.perf_counter() - began
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert code == 0
    for noise in ("Failed to load", "Warning", "torchao", "_pytree"):
        assert noise not in said.err, "other libraries are quiet"
    assert "training: 100%" in said.err and "same=yes" in said.err and "same=NO" not in said.err
    assert os.environ["ORACLE_OFFLOAD_SIM_DEVICE"] == "rtx4090"
    assert diffusers_logging.get_verbosity() == logging.WARNING, "as before"
    assert 0 < result["wall_s"] <= took
    assert result["schema"] == "oracle_offload/demo/1"
    assert result["simulated"] is True
    assert result["losses"] == result["resident_losses"]
    assert len(result["losses"]) == result["equal_steps"] == 3
    assert len(set(result["losses"])) == 3, "the loss moves"
    assert result["weights_equal"] is True
    (device,) = result["summary"]["devices"]
    told = device["verdict"]["step_s"]
    assert told == pytest.approx(result["step_s"], rel=0.01), "one step, one time"
    assert result["step_s"] > (1 - 1e-9) * result["resident_step_s"] > 0
    assert 0 < result["peak_in_arena_bytes"] <= result["arena_bytes"] < result["managed_bytes"] / 5
    assert result["step_h2d_bytes"] >= result["x_min_bytes"] > 0
    assert threads == [1, 3], "one thread for small matrices, then as many as before"
    with torch.device("meta"):
        model = demo.build_model(128, 0)
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert result["weight_bytes"] == 2 * result["parameters"] == sum(tensor_bytes(model))
    assert not torch.are_deterministic_algorithms_enabled()
    assert not open_states(), "the demonstration detaches"
    drawn = xml.etree.ElementTree.parse(svg).getroot()
    assert "simulated" in "".join(drawn.itertext())
    assert "transformer_blocks.0" in "".join(drawn.itertext()), "layers have their names"
    part = xml.etree.ElementTree.parse(svg.with_name("step-part.svg")).getroot()
    svg_name = "{http://www.w3.org/2000/svg}"
    (lane,) = (g for g in part.iter(f"{svg_name}g") if g.attrib["class"] == "oo-compute")
    uses = [10 * float(box.attrib["x"].rstrip("%")) for box in lane.iter(f"{svg_name}rect")]
    assert 40 < len({round(x) for x in uses}) == len(uses), "each use has a place of its own"
    most = result["peak_in_arena_bytes"]
    for picture, least in ((drawn, most), (part, 0.9 * most)):  # of a part it is the part's own
        said = [str(text.text) for text in picture.iter(f"{svg_name}text")]
        (arena,) = (number for number, text in enumerate(said) if text.startswith("arena: "))
        peak = said[arena + 1]
        assert parse_size(format_size(int(least))) <= parse_size(peak)
        assert parse_size(peak) <= parse_size(format_size(most))
        assert {"managed layers compute", "copies to the device: weights"} < set(said)


def tensor_bytes(model):
    return (p.numel() * p.element_size() for p in model.parameters())


NONSENSE = [
    ["--width", "100"],
    ["--steps", "0"],
    ["--offload-percent", "91"],
    ["--offload-percent", "2"],
    ["--offload-percent", "nan"],
    ["--offload-percent=-0.5"],
    ["--seed=-1"],
    ["--device", "gpu"],
    ["--svg", "."],
]


@pytest.mark.parametrize("arguments", NONSENSE, ids=" ".join)
def test_demo_refuses_nonsense(arguments, capsys):
    assert cli.main(["demo", "--device", "cpu", *arguments]) == 2
    name, _, value = "=".join(arguments).partition("=")
    said = capsys.readouterr().err
    assert name.strip("-") + "=" in said and value in said


def test_demo_refuses_nonsense_before_it_imports_anything_heavy():
    code = (
        "import sys\n"
        "from oracle_offload import cli\n"
        "code = cli.main(['demo', '--offload-percent', '2'])\n"
        "heavy = {'torch', 'diffusers', 'peft', 'numpy'} & set(sys.modules)\n"
        "sys.exit(code if not heavy else 99)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 2


def test_a_timeline_without_rows_is_still_a_picture():
    xml.etree.ElementTree.fromstring(timeline_svg([], "nothing <happened> & so on"))


def test_a_timeline_merges_what_nobody_could_see():
    rows = [
        {"kind": "h2d", "unit": n, "start_s": n * 1e-6, "end_s": (n + 0.9) * 1e-6, "bytes": 10}
        for n in range(20_000)
    ]
    text = timeline_svg(rows, "many", max_boxes=500)
    assert text.count("<rect") < 520
    assert "195.31 KiB" in text
