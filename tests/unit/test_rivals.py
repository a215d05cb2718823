"""The benchmark against rivals: what is collected, that rows are independent, equal work."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import bench_rivals
import common
import contender
import measured_page
import pytest
import rivals
import run
import torch

WORKER = """
import json, os, sys, time
who, less = sys.argv[1], "--less-gib" in sys.argv
if who == "aitoolkit":
    raise RuntimeError("broke")
if who == "musubi":
    time.sleep(60)
if who == "ours" and not less:
    print(json.dumps({"error": "OutOfMemoryError: too much", "out_of_memory": True}))
else:
    print("a library said something")
    print(json.dumps({"step_s": 1.0}), flush=True)
if who == "resident":
    time.sleep(60)
if who == "fsdp2":
    os._exit(7)
"""


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def upstream(tmp_path: Path) -> tuple[Path, str]:
    """A repository whose newest commit is not the one that is named."""
    folder = tmp_path / "upstream"
    (folder / "package").mkdir(parents=True)
    git(folder, "init", "--quiet")
    for text in ("old", "new"):
        (folder / "package" / "part.py").write_text(text)
        (folder / "secret.py").write_text("not asked for")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", text)
    return folder, git(folder, "rev-parse", "HEAD~1")


@pytest.mark.parametrize("by", ["path", "url"])
def test_named_files_of_a_named_commit_are_collected(
    tmp_path: Path, upstream: tuple[Path, str], by: str
) -> None:
    folder, commit = upstream
    place = folder.as_uri() if by == "url" else str(folder)
    wanted = rivals.Repository("one", place, commit, {"package/part.py": "other/part.py"})
    gone = rivals.Repository("gone", str(folder), "0" * 40, {"package/part.py": "gone.py"})
    into = tmp_path / "into"
    assert list(rivals.collect(into, {}, [gone, wanted], [])) == ["gone"]
    assert (into / "other" / "part.py").read_text() == "old"
    assert {path.name for path in into.rglob("*") if path.is_file()} == {"part.py", rivals.LIST}
    listed = json.loads((into / rivals.LIST).read_text())
    assert listed == {"one": {"version": commit, "files": ["other/part.py"], "size_bytes": 3}}


@pytest.mark.parametrize("by", ["path", "url"])
def test_the_whole_source_of_a_named_commit_is_checked_out_and_the_mirror_left_alone(
    tmp_path: Path, upstream: tuple[Path, str], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, commit = upstream
    place = folder.as_uri() if by == "url" else str(folder)
    wanted = rivals.Repository("one", place, commit, {})
    monkeypatch.setattr(rivals, "REPOSITORIES", (wanted,))
    into = tmp_path / "into"
    before = (folder / ".git" / "index").read_bytes()
    assert rivals.main(["--checkout", "one", "--into", str(into)]) == 0
    found = {path.relative_to(into).as_posix() for path in into.rglob("*") if path.is_file()}
    assert found == {"package/part.py", "secret.py"}
    assert (into / "package" / "part.py").read_text() == "old"
    assert (folder / ".git" / "index").read_bytes() == before
    gone = rivals.Repository("one", str(folder), "0" * 40, {})
    monkeypatch.setattr(rivals, "REPOSITORIES", (gone,))
    assert rivals.main(["--checkout", "one", "--into", str(into)]) == 1


def test_named_files_of_a_wheel_are_archived_only_if_it_is_the_one_that_is_named(
    tmp_path: Path,
) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing/__init__.py", "raise RuntimeError('imports more than is there')")
        archive.writestr("thing/part.py", "from .other import value")
        archive.writestr("thing/other.py", "value = 5")
        archive.writestr("thing/unused.py", "x = 1")
    files = ["thing/part.py", "thing/other.py"]
    right = rivals.Package("thing", "1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), files)
    wrong = rivals.Package("thing", "1.0", "0" * 64, files)
    into = tmp_path / "into"
    place = {"thing": str(tmp_path)}
    assert "not " + "0" * 64 in rivals.collect(into, place, [], [wrong])["thing"]
    assert bench_rivals.collected(into) == {}
    assert rivals.collect(into, place, [], [right]) == {}
    assert bench_rivals.collected(into)["thing"]["version"] == "1.0"
    with zipfile.ZipFile(into / "thing.zip") as made:
        assert made.namelist() == ["thing/", *files]
    program = "import sys; sys.path.insert(0, sys.argv[1]); import thing.part as t; print(t.value)"
    command = [sys.executable, "-c", program, str(into / "thing.zip")]
    assert subprocess.run(command, capture_output=True, check=True).stdout.strip() == b"5"


def test_more_than_may_travel_is_an_error(
    tmp_path: Path, upstream: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, commit = upstream
    wanted = rivals.Repository("one", str(folder), commit, {"package/part.py": "part.py"})
    monkeypatch.setattr(
        rivals, "collect", functools.partial(rivals.collect, repositories=[wanted], packages=[])
    )
    assert rivals.main(["--into", str(tmp_path / "into")]) == 0
    (tmp_path / "into" / "part.pyc").write_bytes(b"of Python's own")
    assert rivals.size_bytes(tmp_path / "into") == sum(
        (tmp_path / "into" / name).stat().st_size for name in ("part.py", rivals.LIST)
    )
    monkeypatch.setattr(rivals, "LIMIT_BYTES", rivals.size_bytes(tmp_path / "into") - 1)
    assert rivals.main(["--into", str(tmp_path / "into")]) == 1


def test_rows_of_contenders_survive_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One breaks, one hangs, one has no room at first; two end badly once they have measured."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    listed = {"ai-toolkit": {"version": "a1"}, "musubi-tuner": {"version": "b2"}}
    (tmp_path / "rivals.json").write_text(json.dumps(listed))
    runs = bench_rivals.RUNS[:3] + bench_rivals.MORE_RUNS[:3]
    real = bench_rivals.run

    def limited(command: list[str], limit_s: float) -> dict[str, Any]:
        return real(command, {"musubi": 1.0, "resident": 4.0}.get(command[2], limit_s))

    monkeypatch.setattr(bench_rivals, "run", limited)
    found = list(bench_rivals.benchmarks("cuda", runs, tmp_path, worker))
    for row in found:
        run.check_row(row)
    rows = {row["contender"]: row for row in found}
    assert list(rows) == ["ours", "aitoolkit", "musubi", "resident", "fsdp2", "ramtorch"]
    assert rows["ours"]["step_s"] == 1.0
    assert rows["ours"]["first_error"] == "OutOfMemoryError: too much"
    assert rows["aitoolkit"]["error"] == "ended with 1: RuntimeError: broke"
    assert rows["aitoolkit"]["version"] == "a1"
    assert "not done after 1 s" in rows["musubi"]["error"]
    assert rows["resident"]["step_s"] == rows["fsdp2"]["step_s"] == 1.0
    assert rows["resident"]["profile_error"] == "not done after 4 s"
    assert rows["fsdp2"]["profile_error"] == "ended with 7"
    assert "no ramtorch" in rows["ramtorch"]["skipped"]


def test_without_time_left_a_contender_is_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "left_s", lambda: 3.0)
    rows = list(bench_rivals.benchmarks("cuda", rivals=tmp_path, worker=tmp_path / "never started"))
    assert len(rows) == len(bench_rivals.RUNS)
    assert rows[0]["skipped"] == "not run: 3 s are left"


def test_on_the_simulator_ours_and_resident_have_equal_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()

    def here(command: list[str], limit_s: float) -> dict[str, Any]:
        contender.main(command[2:])
        row: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return row

    monkeypatch.setattr(bench_rivals, "run", here)
    try:
        runs = bench_rivals.RUNS + bench_rivals.MORE_RUNS
        found = list(bench_rivals.benchmarks("cpu", runs, tmp_path))
        rows = {row["contender"]: row for row in found}
    finally:
        torch.set_num_threads(threads)
    assert {who for who, row in rows.items() if "skipped" in row} == {
        *("aitoolkit", "musubi", "fsdp2", "ramtorch")
    }
    losses = rows["ours"]["losses"]
    assert losses == rows["resident"]["losses"]
    assert losses[-1] < losses[0] - 1e-3  # the adapters learn: else any weights would do
    assert rows["ours"]["managed_bytes"] == rows["ours"]["weights_bytes"]
    assert rows["ours"]["arena_bytes"] < rows["ours"]["managed_bytes"]
    assert rows["ours"]["h2d_bytes"] > 0


def test_the_share_for_aitoolkit_is_the_least_whose_layers_fit() -> None:
    sizes = [57, 132, 94] * 20

    def stay(share: float) -> int:
        random.seed(7)
        # As its attach decides: one draw for each layer.
        return sum(size for size in sizes if random.random() > share)

    for room in (0, 50, 1000, 3000, sum(sizes) - 1, sum(sizes)):
        share = contender.least_share(sizes, room, 7)
        assert stay(share) <= room
        if share:
            assert stay(share - 1e-9) > room


def test_what_cards_have_measured_of_rivals_is_equal_work_below_one_cap() -> None:
    """Of each cap the first losses, up to what flash attention's backward scatters."""
    compared = 0
    for reports in measured_page.read(measured_page.RESULTS).values():
        rows = [row for row in measured_page.rows_of(reports, "rivals") if "step_s" in row]
        for row in rows:
            assert row["peak_reserved_bytes"] <= row["cap_bytes"], row["name"]
            assert {"h2d_bytes", "locked_bytes", "busy_ratio", "epoch_s"} <= row.keys()
            others = [other for other in rows if other["cap_bytes"] == row["cap_bytes"]]
            assert {other["weights_bytes"] for other in others} == {row["weights_bytes"]}
            assert row["losses"] == pytest.approx(others[0]["losses"], rel=1e-3)
            compared += row is not others[0]
    assert compared >= 3


def test_device_figures_count_copies_by_their_way_and_overlapping_kernels_once() -> None:
    def event(cat: str, name: str, ts: float, dur: float, nbytes: int = 0) -> dict[str, Any]:
        entry = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}
        return entry | {"args": {"bytes": nbytes}}

    found = contender.device_figures(
        [
            event("kernel", "a", 0, 10),
            event("kernel", "b", 5, 10),
            event("kernel", "c", 100, 1),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 20, 40_000),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 20, 7),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 20, 9),
            event("cuda_runtime", "cudaLaunchKernel", 0, 1000),
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert found["kernels_s"] == pytest.approx(16e-6)
    assert (found["profiled_h2d_bytes"], found["profiled_d2h_bytes"]) == (40_000, 7)
    assert found["copy_rate_gbps"] == pytest.approx(2.0)
