"""`oracle-offload bench --matrix`: real trainings; here in this process, so that it is quick."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from oracle_offload import cli
from oracle_offload.trainer import matrix, training
from oracle_offload.trainer.matrix import CELLS, Cell, Row, run_matrix, to_json, to_text


def test_rows_are_of_real_trainings(in_this_process, tmp_path, capsys, monkeypatch):
    named = {cell.name: cell for cell in CELLS}
    wrong = Cell("refused", ("--rank", "0"), True)
    other = Cell("other", ("--learning-rate", "1"), True)
    cells = (named["resident"], named["managed"], wrong, named["Adafactor"], other)
    monkeypatch.setattr(matrix.run_matrix, "__defaults__", (cells,))
    page = tmp_path / "rows.json"
    code = cli.main(["bench", "--matrix", "--device", "cpu", "--steps", "2", "--json", str(page)])
    assert code == cli.EXIT_CHECK_FAILED, "the row named other has other bits, and must not"
    assert [flags[-3:-2] for flags in in_this_process] == [
        ["--resident"], ["cpu"], ["0"], ["adafactor"], ["1"],
    ]  # fmt: skip
    said = capsys.readouterr()
    assert "2/5: managed\n" in said.err
    assert "refused failed: train-lora: rank=0 must be at least 1\n" in said.out
    assert "other has other bits than resident, and must not\n" in said.out
    assert said.out.endswith("The device is simulated: seconds are those of this processor.\n")
    document = json.loads(page.read_text("utf-8"))
    assert document["schema"] == "oracle_offload/bench-matrix/1"
    resident, managed, refused, adafactor, _ = document["rows"]
    assert resident["h2d_bytes_per_step"] is None and managed["h2d_bytes_per_step"] > 0
    assert resident["h2d_gbps"] is resident["watts"] is None, "of a resident training nobody knows"
    assert resident["same_bits"] and managed["same_bits"] and not adafactor["same_bits"]
    assert managed["loss"] == resident["loss"] > 0
    assert adafactor["optimizer_bytes"] < managed["optimizer_bytes"] / 4
    assert managed["seconds_per_step"] > 0 and managed["host_peak_bytes"] > 1 << 26
    assert refused["loss"] is None and refused["same_bits"] is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system's own figure is told")
def test_the_peak_of_a_process_is_not_that_of_who_started_it():
    held = bytearray(b"x") * (1 << 30)
    code = "from oracle_offload.trainer.training import _host_peak; print(_host_peak())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert 1 << 26 < int(told.stdout) < len(held)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such module")
@pytest.mark.parametrize(
    ("platform", "unit"), [("linux", 1024), ("freebsd14", 1024), ("darwin", 1)]
)
def test_the_peak_is_the_systems_own_figure_where_there_is_no_proc(
    monkeypatch, tmp_path, platform, unit
):
    import resource

    monkeypatch.setattr(training, "Path", lambda name: tmp_path / "nothing")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3000))
    assert training._host_peak() == 3000 * unit
    monkeypatch.setitem(sys.modules, "resource", None)
    assert training._host_peak() is None


def test_a_library_that_the_sample_needs_is_named(monkeypatch, capsys):
    def missing(folder):
        raise ModuleNotFoundError("No module named 'transformers'")

    monkeypatch.setattr(matrix, "write_sample", missing)
    assert cli.main(["bench", "--matrix", "--device", "cpu"]) == cli.EXIT_ERROR
    assert capsys.readouterr().err == (
        "bench: No module named 'transformers'; pip install transformers\n"
    )


def test_where_nothing_or_resident_alone_could_be_trained_it_is_an_error(
    in_this_process, tmp_path, monkeypatch
):
    flags = ["bench", "--matrix", "--model", str(tmp_path), "--dataset-file", str(tmp_path)]
    monkeypatch.setattr(matrix.run_matrix, "__defaults__", (CELLS[:2],))
    assert cli.main([*flags, "--device", "cpu", "--", "--max-length", "64"]) == cli.EXIT_ERROR
    more = ["--steps", "8", "--device", "cpu", "--max-length", "64"]
    assert in_this_process[0][: 4 + len(more)] == [*flags[2:], *more]


def test_a_file_that_cannot_be_written_takes_no_table_along(
    in_this_process, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(matrix.run_matrix, "__defaults__", (CELLS[:1],))
    flags = ["--model", str(tmp_path), "--dataset-file", str(tmp_path), "--device", "cpu"]
    nowhere = tmp_path / "no" / "rows.json"
    assert cli.main(["bench", "--matrix", *flags, "--json", str(nowhere)]) == cli.EXIT_ERROR
    said = capsys.readouterr()
    assert "\nresident failed: train-lora: " in said.out and str(nowhere) in said.err


def test_a_model_without_data_is_refused(capsys):
    assert cli.main(["bench", "--matrix", "--model", "m"]) == cli.EXIT_USAGE
    assert "--model and --dataset-file go together" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench"])


def test_the_table_and_what_it_says_of_rows():
    row = Row(
        "managed", True, "", "no 8 bits", 0.5, 3 << 20, None, 2.0**21, 12.34, 81.6, 1024, 1.25, True
    )
    told = to_text([row, replace(row, same_bits=False, note=""), Row("none", True, "no room")])
    head, first, second, third, *rest = told.splitlines()
    assert (
        head.split() == "step device peak host peak link, a step GB/s W optimizer loss bits".split()
    )
    assert first == second.replace("other", "same")
    assert (
        first.split() == "managed 0.500 s 3.00 MiB - 2.00 MiB 12.3 82 1.00 KiB 1.2500 same".split()
    )
    assert third.split() == ["none", *"---------"]
    assert rest == [
        "none failed: no room",
        "managed: no 8 bits",
        "managed has other bits than resident, and must not",
    ]
    assert not Row("free", False, same_bits=False).is_wrong
    assert json.loads(to_json([row]))["rows"][0]["name"] == "managed"


def test_a_process_that_says_nothing_failed_by_its_code(monkeypatch, tmp_path):
    def killed(command, **options):
        return subprocess.CompletedProcess(command, -9, "", "")

    monkeypatch.setattr(matrix.subprocess, "run", killed)
    (row,) = run_matrix([], tmp_path, str, CELLS[:1])
    assert row.failed == "it ended with -9"


def test_a_row_is_what_its_training_has_written_beside_that_of_the_first(monkeypatch, tmp_path):
    """Where the first failed there is nothing to compare with."""
    result = {"steps_now": 4, "optimizer_note": "another", "seconds_per_step": 0.5, "watts": 80.0}
    result |= {"device_peak_bytes": 7, "host_peak_bytes": 8, "optimizer_bytes": 9, "loss_last": 1.5}
    started = []

    def run(command, **options):
        name, output = command[-3], Path(command[-1])
        started.append((command[:-3], output.name))
        if name == "fails":
            return subprocess.CompletedProcess(command, 1, "", "one line\nthe last line\n")
        output.mkdir()
        (output / "adapter").write_bytes(b"other" if name == "other" else b"same")
        link = {} if name == "resident" else {"h2d_bytes": 24, "h2d_gbps": 3.0}
        told = {**result, **link, "adapter": str(output / "adapter")}
        (output / "result.json").write_text(json.dumps(told), "utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(matrix.subprocess, "run", run)
    cells = [
        Cell(name, (name,), name != "other") for name in ("resident", "fails", "same", "other")
    ]
    said = []
    resident, fails, same, other = run_matrix(["--steps", "4"], tmp_path, said.append, cells)
    assert said == ["1/4: resident", "2/4: fails", "3/4: same", "4/4: other"]
    begin = [sys.executable, "-m", "oracle_offload", "train-lora", "--steps", "4"]
    assert started == [(begin, f"0{number}") for number in range(4)]
    assert same == Row("same", True, "", "another", 0.5, 7, 8, 6.0, 3.0, 80.0, 9, 1.5, True)
    assert other == replace(same, name="other", keeps_bits=False, same_bits=False)
    without = {"h2d_bytes_per_step": None, "h2d_gbps": None}
    assert resident == replace(same, name="resident", **without)
    assert fails == Row("fails", True, "the last line")
    (tmp_path / "again").mkdir()
    _, alone = run_matrix([], tmp_path / "again", str, cells[1:3])
    assert alone.same_bits is None and not alone.is_wrong
    assert [row.is_wrong for row in (resident, same, other)] == [False] * 3
    assert replace(other, keeps_bits=True).is_wrong


@pytest.mark.slow
def test_the_whole_matrix_in_processes_of_its_own(capsys):
    """`python -m pytest -m slow tests/clients/test_bench_matrix.py` runs it, in minutes."""
    assert cli.main(["bench", "--matrix", "--device", "cpu", "--steps", "2"]) == cli.EXIT_OK
    assert capsys.readouterr().out.count(" same\n") == 5


def test_the_sample_is_a_small_model_and_texts_of_several_lengths(tmp_path):
    flags = matrix.write_sample(tmp_path)
    assert flags[::2] == ["--model", "--dataset-file", "--batch-size"] and flags[5] == "2"
    texts = [json.loads(line)["text"] for line in Path(flags[3]).read_text("utf-8").splitlines()]
    assert len(texts) == 16 and texts[0] == "0 is one more than -1. " * 2
    sentences = [text.count("more than") for text in texts]
    assert set(sentences) == {2, 3, 4, 5, 6}
    config = json.loads((Path(flags[1]) / "config.json").read_text("utf-8"))
    assert config["num_hidden_layers"] == 4 and config["model_type"] == "llama"
    (tmp_path / "again").mkdir()
    again = matrix.write_sample(tmp_path / "again")
    weights = [(Path(one[1]) / "model.safetensors").read_bytes() for one in (flags, again)]
    assert weights[0] == weights[1], "the same whoever measures"
