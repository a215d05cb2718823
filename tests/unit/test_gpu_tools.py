"""The GPU check where there is no GPU: it refuses, rehearses, files results, carries wheels."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    folder = str(ROOT / "tools")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


gpu_check = tool("gpu_check")
gpu_import = tool("gpu_import")
gpu_wheels = tool("gpu_wheels")


# ---- gpu-check ----


def gpu_check_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gpu_check.py"), *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_without_a_gpu_it_says_so_exits_1_and_writes_nothing(tmp_path: Path) -> None:
    # Hides the devices of a machine that has some.
    done = gpu_check_command(
        "--results", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="-1", GPU_CHECK_DEVICE="cuda"
    )
    assert done.returncode == 1
    assert "no GPU on this machine" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_unknown_device_is_refused() -> None:
    done = gpu_check_command(GPU_CHECK_DEVICE="tpu")
    assert done.returncode == 1
    assert "GPU_CHECK_DEVICE='tpu'" in done.stderr


def make_check(tmp_path: Path) -> Any:
    device = gpu_check.Device("simulated rtx4090", "simulated", True)
    log = (tmp_path / "log.txt").open("w")
    return gpu_check.Check(device, tmp_path, tmp_path, log, time.monotonic() + 60, {**os.environ})


def wait_for(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1200):  # bounded, and as long as a busy machine takes
        if condition():
            return
        time.sleep(0.05)
    pytest.fail(f"{what}, even after a minute")


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the program writes when it is where the test wants it: its time begins then."""
    path = tmp_path / "marker"

    class Patient(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            wait_for(lambda: path.exists() and bool(path.read_text()), "the program is not there")
            return super().wait(timeout)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", Patient)
    return path


def test_a_program_that_overruns_is_stopped_with_its_children(tmp_path: Path, marker: Path) -> None:
    check = make_check(tmp_path)
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('started', flush=True)\n"
        f"open({str(marker)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    assert check.call([sys.executable, "-c", code], timeout_s=1.0) is None
    assert "started" in (tmp_path / "log.txt").read_text()
    child = int(marker.read_text())
    state = Path(f"/proc/{child}/stat")

    def ended() -> bool:
        try:
            return state.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:  # gone, or going while it is read
            return True

    wait_for(ended, f"the child {child} still runs")


def test_tests_that_run_out_of_time_still_leave_their_report(tmp_path: Path, marker: Path) -> None:
    suite = tmp_path / "test_slow.py"
    suite.write_text(
        "import time, pytest\n"
        "def test_quick(): pass\n"
        "@pytest.mark.skip(reason='no second card')\n"
        "def test_skipped(): pass\n"
        "def test_endless():\n"
        f"    open({str(marker)!r}, 'w').write('here')\n"
        "    time.sleep(600)\n"
    )
    check = make_check(tmp_path)
    report = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={tmp_path}"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", str(suite)]
    assert check.call(command, timeout_s=1.0) is None
    text = report.read_text()
    assert "test_quick" in text and "no second card" in text


@pytest.mark.slow
def test_the_rehearsal_on_the_simulator_writes_the_four_files(tmp_path: Path) -> None:
    results = tmp_path / "out"
    done = gpu_check_command(
        *("--results", str(results), "--wheels", str(tmp_path / "none"), "--commit", "abc123"),
        GPU_CHECK_DEVICE="sim",
    )
    files = {path.name for path in results.iterdir()}
    assert files == {"results.json", "conformance.txt", "junit.xml", "log.txt"}, done.stdout
    report = json.loads((results / "results.json").read_text())
    assert done.returncode == 0, (report["failed"], done.stdout[-3000:])
    assert report["simulated"] is True and report["device"] == "simulated rtx4090"
    assert report["commit"] == "abc123"
    assert report["elapsed_s"] < 540
    assert len(report["conformance"]) > 10
    assert {"torch", "driver", "date", "command", "benchmarks", "skipped"} <= set(report)
    filed = gpu_import.file_results(results / "results.json", tmp_path / "filed")
    assert filed.parent.name == "simulated-rtx4090"


# ---- gpu-import ----


def results_file(tmp_path: Path, **changes: Any) -> Path:
    report = {
        "schema": gpu_check.SCHEMA,
        "command": "make gpu-check",
        "date": "2026-01-31T12:00:00Z",
        "commit": "0123456789abcdef",
        "device": "NVIDIA H200",
        "simulated": False,
        "driver": "580.1 (CUDA 13.0)",
        "torch": "2.11.0+cu130",
        "benchmarks": [],
        **changes,
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps(report))
    return path


def test_import_files_by_device_date_and_commit_and_never_overwrites(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    first = gpu_import.file_results(results_file(tmp_path), folder)
    assert first == folder / "nvidia-h200" / "2026-01-31-0123456789ab.json"
    kept = first.read_text()
    assert gpu_import.file_results(results_file(tmp_path), folder) == first  # the same file again
    second = gpu_import.file_results(results_file(tmp_path, torch="2.13.0"), folder)
    assert second.name == "2026-01-31-0123456789ab-2.json"
    assert first.read_text() == kept
    assert len(list(folder.rglob("*.json"))) == 2


def test_import_never_files_a_simulated_run_beside_a_card(tmp_path: Path) -> None:
    filed = gpu_import.file_results(results_file(tmp_path, simulated=True), tmp_path / "r")
    assert filed.parent.name == "simulated-nvidia-h200"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "schema is 'list'"),
        ("{}", "schema is None"),
        ("not json", "Expecting value"),
        (json.dumps({"schema": "oracle_offload/gpu_check-1"}), "lacks command, date"),
    ],
)
def test_import_refuses_what_is_not_a_result(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(gpu_import.ImportRefusedError, match=said):
        gpu_import.file_results(path, tmp_path / "results")
    assert not (tmp_path / "results").exists()


# ---- gpu-wheels ----


def test_wheels_beyond_the_limit_or_shadowing_torch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no wheel"):
        gpu_wheels.check(tmp_path)
    (tmp_path / "peft-1-py3-none-any.whl").write_bytes(b"x" * 1000)
    assert gpu_wheels.check(tmp_path) == 1000
    with pytest.raises(ValueError, match=r"the largest is peft-1-py3-none-any\.whl"):
        gpu_wheels.check(tmp_path, limit_bytes=999)
    (tmp_path / "torch-2.13.0-cp312-cp312-linux_x86_64.whl").write_bytes(b"x")
    with pytest.raises(ValueError, match="would replace the GPU machine's own"):
        gpu_wheels.check(tmp_path)
    assert gpu_wheels.LIMIT_BYTES == 60 * 2**20


def test_wheels_of_other_versions_are_removed(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# pins\nhf-xet==1.8.0\npeft==0.21.2\n")
    for name in ("hf_xet-1.8.0", "hf_xet-1.7.0", "peft-0.21.2", "other-1.0"):
        (tmp_path / f"{name}-py3-none-any.whl").write_bytes(b"")
    gpu_wheels.remove_others(tmp_path, requirements)
    assert {p.name.removesuffix("-py3-none-any.whl") for p in tmp_path.glob("*.whl")} == {
        "hf_xet-1.8.0",
        "peft-0.21.2",
    }


# ---- the benchmark runner ----


def runner() -> ModuleType:
    path = ROOT / "benchmarks" / "run.py"
    spec = importlib.util.spec_from_file_location("benchmarks_run", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_runner_keeps_the_figures_of_good_benchmarks_beside_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner()
    (tmp_path / "bench_good.py").write_text(
        "def benchmarks(device): return [{'name': 'copy', 'rate_gbps': 12.5, 'device': device}]\n"
    )
    (tmp_path / "bench_broken.py").write_text("def benchmarks(device): raise OSError('no disk')\n")
    (tmp_path / "bench_vague.py").write_text(
        "def benchmarks(device): return [{'name': 'speed', 'value': 3}]\n"
    )
    found = run.files(folder=tmp_path)
    monkeypatch.setattr(run, "files", lambda only=(): found)
    output = tmp_path / "out.json"
    assert run.main(["--output", str(output), "--device", "cpu"]) == 1
    report = json.loads(output.read_text())
    assert report["schema"] == "oracle_offload/benchmarks-1"
    rows = {row["file"]: row for row in report["benchmarks"]}
    assert rows["good"]["rate_gbps"] == 12.5 and rows["good"]["device"] == "cpu"
    assert rows["broken"]["error"] == "OSError: no disk"
    assert "has no figure" in rows["vague"]["error"]


def test_an_unknown_benchmark_is_named_with_those_that_exist(tmp_path: Path) -> None:
    (tmp_path / "bench_link.py").write_text("")
    with pytest.raises(SystemExit, match="no benchmark lnk; there are link"):
        runner().files(["lnk"], tmp_path)
