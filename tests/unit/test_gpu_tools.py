"""The GPU check where there is no GPU: it refuses, rehearses, files results, carries wheels."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_bits
import bench_ram
import bench_step
import bench_unet
import common
import gpu_check
import gpu_import
import gpu_wheels
import psutil
import pytest
import torch
import training

import oracle_offload

ROOT = Path(__file__).resolve().parents[2]


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


def test_a_file_of_tests_that_was_killed_is_counted_by_what_it_had_printed() -> None:
    found = gpu_check.count_lines(
        "collected 4 items\n"
        "tests/training/test_matrix.py::test_linear[cuda-a b] PASSED   [ 25%]\n"
        "tests/training/test_matrix.py::test_conv[cuda-x] FAILED       [ 50%]\n"
        "tests/training/test_matrix.py::test_skips SKIPPED (no card)   [ 75%]\n"
        "tests/training/test_matrix.py::test_hangs[cuda-forward pre] \n"
        "Fatal Python error: Aborted\n"
    )
    assert (found["passed_count"], found["failed_count"], found["skipped_count"]) == (1, 1, 1)
    assert found["failed"][0]["name"].endswith("test_conv[cuda-x]")
    assert found["last"] == "tests/training/test_matrix.py::test_hangs[cuda-forward pre]"


MEASURED = tuple(
    part.name
    for part in (*gpu_check.PREPARATION, *gpu_check.CLOCK)
    if not part.path and part.name != "conformance"
)
PARTS = (*MEASURED, "tests")


def stand_ins(folder: Path, **sources: str) -> Path:
    """Measurements that take no time, or do what `sources` says; the real runner runs them."""
    folder.mkdir()
    for name in MEASURED:
        (folder / f"bench_{name}.py").write_text(sources.get(name, QUICK))
    return folder


def rehearse(results: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Run without tests and conformance, which the whole rehearsal runs."""
    only = ",".join(MEASURED)
    done = gpu_check_command(
        *("--results", str(results), "--wheels", str(results / "none")),
        *([] if "--only" in arguments else ["--only", only]),
        *arguments,
        GPU_CHECK_DEVICE="sim",
        **environment,
    )
    assert (results / "results.json").is_file(), done.stdout + done.stderr
    return done.returncode, json.loads((results / "results.json").read_text())


QUICK = """
def benchmarks(device):
    yield {"name": "one", "took_s": 1.0}
"""
CRASH = """
import os, signal
def benchmarks(device):
    yield {"name": "before", "took_s": 1.0}
    os.kill(os.getpid(), signal.SIGSEGV)
"""
HANG = """
import signal, time
def benchmarks(device):
    yield {"name": "before", "took_s": 2.0}
    for number in (signal.SIGINT, signal.SIGTERM):  # as a call that never returns does
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)
"""
FAIL = """
def benchmarks(device):
    yield {"name": "before", "took_s": 3.0}
    raise OSError("no")
"""


@pytest.mark.slow
def test_a_part_that_crashes_or_hangs_or_fails_leaves_the_rest(tmp_path: Path) -> None:
    folder = stand_ins(tmp_path / "parts", link=CRASH, step=HANG, calls=FAIL)
    results = tmp_path / "out"
    code, report = rehearse(results, "--benchmarks", str(folder), "--part-limit-s", "5")
    assert code == gpu_check.EXIT_FAILED
    states = {name: report[name]["state"] for name in PARTS}
    assert states == {
        **dict.fromkeys(PARTS, "done"),
        "link": "crashed",
        "step": "timeout",
        "calls": "failed",
        "tests": "skipped",
    }
    assert "SIGSEGV" in report["link"]["why"] and "no" in report["calls"]["why"]
    # What each had found before is there.
    assert [report[name]["rows"][0]["took_s"] for name in ("link", "step", "calls")] == [1, 2, 3]
    assert "Segmentation fault" in (results / "log.txt").read_text()
    assert report["step"]["seconds"] < 5 + 3 * gpu_check.GRACE_S


@pytest.mark.slow
def test_a_resumed_run_runs_what_is_missing_and_keeps_the_rest(tmp_path: Path) -> None:
    first = tmp_path / "first"
    folder = stand_ins(tmp_path / "parts", link=CRASH)
    rehearse(first, "--benchmarks", str(folder), "--commit", "abc", "--only", "machine,link,step")
    marked = json.loads((first / "results.json").read_text())
    marked["machine"]["rows"][0]["took_s"] = 42.0
    (first / "results.json").write_text(json.dumps(marked))
    mended = stand_ins(tmp_path / "mended")
    again = ("--benchmarks", str(mended), "--resume", str(first / "results.json"))
    _, report = rehearse(tmp_path / "second", *again, "--commit", "abc")
    assert report["machine"]["rows"][0]["took_s"] == 42.0, "a part that had ended ran again"
    assert {report[name]["state"] for name in MEASURED} == {"done"}
    assert len(report["resumed"]) == 1

    done = gpu_check_command(
        *("--results", str(tmp_path / "third"), "--commit", "def", *again), GPU_CHECK_DEVICE="sim"
    )
    assert done.returncode == gpu_check.EXIT_CANNOT_RUN
    assert "its commit is 'abc', this run's is 'def'" in done.stderr
    assert not (tmp_path / "third").exists()


KILLS = 20


@pytest.mark.slow
def test_killed_at_any_time_it_leaves_a_valid_file_with_what_was_done(tmp_path: Path) -> None:
    """The real runner and parts, each cut to about a second, killed without warning."""
    times = random.Random(0)
    states: set[str] = set()
    for number in range(KILLS):
        results = tmp_path / str(number)
        output = tmp_path / f"{number}.txt"
        with output.open("w") as target:
            process = subprocess.Popen(
                [
                    *(sys.executable, str(ROOT / "tools" / "gpu_check.py")),
                    *("--results", str(results), "--wheels", str(tmp_path / "none")),
                    *("--part-limit-s", "1"),
                ],
                cwd=ROOT,
                env={**os.environ, "GPU_CHECK_DEVICE": "sim"},
                stdout=target,
                stderr=subprocess.STDOUT,
            )
            try:
                # From when the file is there; most of them once a part has begun.
                for _ in range(1200):
                    begun = "== machine" in output.read_text() or number % 4 == 0
                    if begun and (results / "results.json").is_file():
                        break
                    time.sleep(0.05)
                time.sleep(times.uniform(0.0, 8.0))
            finally:
                process.kill()
                process.wait()
        report = json.loads((results / "results.json").read_text())
        said = output.read_text()
        assert set(PARTS) <= set(report), f"kill {number}"
        for name in MEASURED:
            assert {"seconds", "state", "rows"} <= set(report[name])
            states.add(report[name]["state"])
            # What was said to have ended is in the file as it ended.
            for line in said.splitlines():
                if line.startswith(f"== {name}: ") and "at most" not in line:
                    assert report[name]["state"] == line.split(": ")[1].split(" ")[0], line
    assert {"done", "timeout", "running", "not reached"} & states >= {"not reached"}
    assert {"timeout", "done"} & states, "every kill came before the first part had ended"


@pytest.mark.slow
def test_a_signal_ends_it_in_order(tmp_path: Path) -> None:
    """SIGTERM, as a machine sends that is taken away: the part that runs is stopped and named."""
    folder = stand_ins(tmp_path / "parts", machine=HANG)
    results = tmp_path / "out"
    process = subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "tools" / "gpu_check.py")),
            *("--results", str(results), "--wheels", str(tmp_path / "none")),
            *("--benchmarks", str(folder)),
        ],
        cwd=ROOT,
        env={**os.environ, "GPU_CHECK_DEVICE": "sim"},
        stdout=subprocess.DEVNULL,
    )
    path = results / "results.json"
    for _ in range(1200):
        if path.is_file() and json.loads(path.read_text())["machine"]["rows"]:
            break
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == gpu_check.EXIT_FAILED
    report = json.loads(path.read_text())
    assert report["ended"] == "by a signal"
    assert report["machine"]["state"] == "timeout" and report["machine"]["rows"]
    assert report["link"]["state"] == "not reached"


def test_watts_are_told_for_each_part_by_the_samplers_own_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        f"#!{sys.executable}\n"
        "import datetime, time\n"
        "print('2020/01/01 00:00:00.000, 9, 1, 1, 1, 1, 1, 1', flush=True)\n"
        "for watts in (100, 200, 300):\n"
        "    now = datetime.datetime.now().strftime('%Y/%m/%d %H:%M:%S.%f')\n"
        "    print(f'{now}, {watts}.0, 1980, 3201, 41, 99, 5, [N/A]', flush=True)\n"
        "time.sleep(60)\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    begin = time.time() - 1
    power = gpu_check.Power("0000:01:00.0")
    for _ in range(400):
        if len(power.samples) == 4:
            break
        time.sleep(0.05)
    power.close()
    row = power.row("step", begin, time.time())
    assert row["power_w_mean"] == 200 and row["power_w_max"] == 300 and row["samples_count"] == 3
    assert row["link_gen_mean"] == 5 and "link_width_mean" not in row
    assert power.row("step", begin + 1000, begin + 2000) is None
    check = make_check(tmp_path)
    check.power = power
    check.report = gpu_check.empty_report(gpu_check.parse([]), check.device)
    contender = {"name": "ours", "step_s": 0.5, "epoch_s": [begin, time.time()]}
    check.report["rivals"]["rows"] = [contender, {"name": "musubi", "error": "not there"}]
    gpu_check.put_power(check)
    rows = {row["name"]: row for row in check.report["power"]["rows"]}
    assert list(rows) == ["rivals: ours"] and rows["rivals: ours"]["joules_per_step"] == 100


def test_the_page_has_each_part_in_its_order_with_its_limit() -> None:
    text = (ROOT / "docs" / "gpu-check.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\w[\w/]*) \| .* \| (\d+) \|$", text, re.MULTILINE))
    parts = [part for part in (*gpu_check.PREPARATION, *gpu_check.CLOCK) if part.name in rows]
    assert {part.name: rows[part.name] for part in parts} == {
        part.name: str(round(part.limit_s)) for part in parts
    }
    listed = [name for name in rows if name != "build"]
    assert [part.name for part in parts] == listed
    alone = {part.name for part in (*gpu_check.PREPARATION, *gpu_check.CLOCK) if not part.path}
    assert alone | {gpu_check.FIRST_TESTS.name} == set(listed)


def takes_a_device(path: Path) -> bool:
    """Whether a test of the file, or a fixture in it, is run on each device."""
    return "pytest.mark.gpu" in path.read_text(encoding="utf-8") or any(
        isinstance(node, ast.FunctionDef)
        and "device" in [argument.arg for argument in node.args.args]
        and (node.name.startswith("test_") or "fixture" in ast.dump(ast.List(node.decorator_list)))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def test_every_file_of_tests_that_takes_a_device_has_its_turn() -> None:
    paths = {path for part in gpu_check.CLOCK for path in part.path.split()}
    files = {
        f"tests/training/{path.name}"
        for path in (ROOT / "tests" / "training").glob("test_*.py")
        if takes_a_device(path) and path.stem not in ("test_demo_steps", "test_simgpu")
    }  # these two say of which devices
    assert paths - {"tests/gpu"} == files and len(files) > 40


# Seconds of the parts on an H200, about; what is not named takes 30.
TOOK_S = {"machine": 5, "ram": 5, "build": 16, "tests/gpu": 14, "rates": 4, "link": 4, "step": 80}
TOOK_S |= {"rivals": 220, "bits": 65, "tests/any": 54, "tests/matrix": 57, "calls": 2}


class FakeLease:
    """Calls of the check, on a clock of its own: each program takes the seconds it is given."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.tmp_path, self.started = 1000.0, tmp_path, list[str]()
        monkeypatch.setattr(gpu_check.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(gpu_check.os, "cpu_count", lambda: 2)  # one after the other
        monkeypatch.setattr(gpu_check, "initialised_device", lambda check: contextlib.nullcontext())
        monkeypatch.setattr(gpu_check, "conformance", self.conformance)
        monkeypatch.setattr(gpu_check.Check, "call", lambda check, *call, **_: self.program(*call))
        monkeypatch.setattr(gpu_check, "put_power", lambda check: None)
        self.broken: set[str] = set()

    def program(self, command: list[str], timeout_s: float, *_: Any) -> int | None:
        """Take the time of a program; None where it is more than it may take."""
        words = [word for word in command if word.startswith("tests/")]
        name = words[0].replace("training/test_", "").removesuffix(".py") if words else command[2]
        for word in command:
            if word.startswith("--junitxml="):
                Path(word.partition("=")[2]).write_text("<testsuites/>")
        return self.take("build" if name == "--quiet" else name, timeout_s)

    def conformance(self, check: Any, wanted: Any) -> None:
        with gpu_check.part(check, wanted.name, wanted.limit_s) as limit_s:
            if limit_s:
                self.take(wanted.name, limit_s)
                check.put(wanted.name, state="done", why="")

    def take(self, name: str, timeout_s: float) -> int | None:
        self.started.append(name)
        took_s = TOOK_S.get(name, 30)
        self.now += min(took_s, timeout_s)
        return None if took_s > timeout_s else int(name in self.broken)

    def call(self, seconds: float, *arguments: str) -> dict[str, Any]:
        """Call the check for so many seconds; it goes on where an earlier call has ended."""
        path = self.tmp_path / "results.json"
        device = gpu_check.Device("NVIDIA H200", "580.1", False)
        resume = ["--resume", str(path)] if path.exists() else []
        parsed = gpu_check.parse([*arguments, *resume, "--budget-s", str(seconds)])
        report = gpu_check.empty_report(parsed, device)
        if resume:
            report = gpu_check.resume(path, report)
        with (self.tmp_path / "log.txt").open("w") as log:
            check = gpu_check.Check(
                *(device, self.tmp_path, self.tmp_path, log, self.now + seconds, {}), report=report
            )
            check.started, check.only = self.now, parsed.only
            gpu_check.run(parsed, check)
            gpu_check.finish(check, "all parts had their turn")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def states_of(report: dict[str, Any]) -> dict[str, str]:
    """The state of each part of the clock; tests by their file."""
    rows = {row["name"]: row["state"] for row in report["tests"]["rows"]}
    return {
        part.name: rows.get(part.name, "not reached") if part.path else report[part.name]["state"]
        for part in gpu_check.CLOCK
    }


def test_by_the_clock_of_a_lease_what_counts_comes_first_and_a_second_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = FakeLease(tmp_path, monkeypatch)
    begun = lease.now
    first = states_of(lease.call(585))  # sh tools/lease.sh 600
    assert lease.now - begun <= 585
    names = list(first)
    reached = [name for name in names if first[name] != "not reached"]
    assert names[: len(reached)] == reached, "a part went before one of more value"
    assert {first[name] for name in ("step", "rivals", "bits", "tests/any")} <= {"done", "failed"}
    assert "not reached" in first.values()

    # sh tools/lease.sh 220, again and again: until nothing is left.
    state = first
    for _ in range(3):
        before, begun = len(lease.started), lease.now
        missing = [name for name in names if state[name] not in gpu_check.ENDED]
        ended = set(names) - set(missing)
        state = states_of(lease.call(205))
        assert lease.now - begun <= 205
        assert not set(lease.started[before:]) & ended, "a part that had ended ran again"
        new = [name for name in missing if state[name] in gpu_check.ENDED]
        assert new and new == missing[: len(new)], "a part went before one of more value"
    assert set(state.values()) <= set(gpu_check.ENDED)


def test_a_lease_called_twice_goes_on_and_leaves_copies(tmp_path: Path) -> None:
    folder = stand_ins(tmp_path / "parts", link=CRASH)
    copies = tmp_path / "copies"
    copies.mkdir()
    environment = {**os.environ, "GPU_CHECK_DEVICE": "sim", "PYTHON": sys.executable}
    environment |= {"RESULTS": str(tmp_path / "out"), "WHEELS": str(tmp_path / "none")}

    def lease(parts: str) -> dict[str, Any]:
        command = ["sh", str(ROOT / "tools" / "lease.sh"), "120", str(copies)]
        command += ["--benchmarks", str(folder), "--only", parts]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode in (gpu_check.EXIT_OK, gpu_check.EXIT_FAILED), done.stderr
        found: dict[str, Any] = json.loads((copies / "results.json").read_text())
        assert found["budget_s"] == 105, "it must end before the machine does"
        return found

    first = lease("rates,link")
    assert (first["rates"]["state"], first["link"]["state"]) == ("done", "crashed")
    (folder / "bench_rates.py").write_text(CRASH)
    (folder / "bench_link.py").write_text(QUICK)
    second = lease("rates,link")
    assert second["rates"] == first["rates"], "a part that had ended ran again"
    assert second["link"]["state"] == "done"


def test_nothing_follows_first_tests_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = FakeLease(tmp_path, monkeypatch)
    lease.broken = {"tests/gpu"}
    report = lease.call(585)
    assert "tests/gpu" in lease.started and "step" not in lease.started
    assert report["step"] | {"rows": []} == {
        "state": "not reached",
        "why": "tests/gpu failed",
        "seconds": 0.0,
        "rows": [],
    }
    (tmp_path / "results.json").unlink()
    lease.call(585, "--keep-going")
    assert "step" in lease.started


def busy_s() -> float:
    """Return the seconds that the processors of this machine have worked, for whomever."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


@pytest.mark.slow
def test_the_whole_rehearsal_on_the_simulator(tmp_path: Path) -> None:
    results = tmp_path / "out"
    before_s = busy_s()
    done = gpu_check_command(
        *("--results", str(results), "--wheels", str(tmp_path / "none"), "--commit", "abc123"),
        GPU_CHECK_DEVICE="sim",
    )
    all_s = busy_s() - before_s
    files = {path.name for path in results.iterdir()}
    assert files == set(gpu_check.FILES), done.stdout
    assert len(files) <= 8 and all(p.stat().st_size < 16 * 2**20 for p in results.iterdir())
    report = json.loads((results / "results.json").read_text())
    states = {name: report[name]["state"] for name in PARTS}
    assert states == dict.fromkeys(PARTS, "done"), done.stdout[-3000:]
    assert done.returncode == 0
    assert report["simulated"] is True and report["device"] == "simulated h200"
    assert report["commit"] == "abc123"
    # What the processors did, two parts at a time, says how long it takes alone. With much other
    # work at the same time it takes them longer.
    if all_s - report["processor_s"] < report["elapsed_s"] / 4:
        assert min(report["elapsed_s"], report["processor_s"] / 2) < 90
    assert len(report["conformance"]["rows"]) > 10
    rows = [*report["step"]["rows"], *report["unet"]["rows"]]
    offloads = [row["offload"] for row in rows if "offload" in row]
    assert sorted(set(offloads)) == [0.0, 0.5, 0.91, 1.0]
    predictions = {row["name"] for row in rows if row["name"].endswith(", predicted")}
    for row in rows:
        if "offload" in row and row["name"] not in predictions:
            assert f"{row['name']}, predicted" in predictions
            assert row["equal_losses_count"] == row["compared_steps_count"] > 0
            assert row["acquires_count"] > 0
            # The same simulator, the same calls: a prediction that differs predicts another thing.
            assert row["predicted_step_s"] == pytest.approx(row["step_s"], rel=0.05)
    bits = report["bits"]["rows"]
    assert all(row["equal_losses_count"] == row["steps_count"] for row in bits)
    assert [row["name"].endswith(", deterministic") for row in bits] == 4 * [False] + 3 * [True]
    assert len(report["decode"]["rows"]) == 18
    assert all(row["equal_count"] == 2 for row in report["decode"]["rows"])
    assert sum(row["decodes_count"] for row in report["decode"]["rows"]) >= 24
    formats = {row["name"]: row for row in report["formats"]["rows"]}
    assert formats["torchao int8"]["equal_count"] == formats["torchao int8"]["results_count"] == 2
    assert "skipped" in formats["MXFP4"] and "skipped" in formats["torchao int4, tile_packed_to_4d"]
    filed = gpu_import.file_results(results / "results.json", tmp_path / "filed")
    assert filed.parent.name == "simulated-h200"


# ---- what a part finds ----


def test_rows_of_a_step_survive_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that raises, and pictures that do: the other rows are there."""
    real = bench_step.measure
    begun: list[Any] = []

    def measure(runner: Any, device: str, manager: Any) -> Any:
        begun.append(manager)
        if len(begun) == 2:  # the first that is offloaded
            raise OSError("planted")
        return real(runner, device, manager)

    def draw(*_: Any) -> str:
        raise KeyError("planted, too")

    monkeypatch.setattr(bench_step, "measure", measure)
    monkeypatch.setattr(bench_step, "pictures", draw)
    shape = training.flux(width=64, head=32, layers=(1, 1), tokens=(4, 4), outside=16)
    with bench_step.clock("cpu"):
        rows = list(bench_step.rows_of(shape, (0.5, 1.0), "cpu", draw=True))
    found = {row["name"].removeprefix(f"{shape.name}, "): row for row in rows}
    ended = ["resident", "offload 0.5, predicted", "offload 1.0, predicted", "offload 1.0"]
    assert sorted(found) == sorted([*ended, "offload 0.5", "pictures"])
    names = [row["name"] for row in rows]
    for offload in (0.5, 1.0):
        of = [name for name in names if f"offload {offload}" in name]
        assert of[0].endswith(", predicted"), "a prediction came after what it predicts"
    assert found["offload 0.5"]["error"] == "OSError: planted"
    assert found["pictures"]["error"] == "KeyError: 'planted, too'"
    assert not any("error" in found[name] for name in ended)
    assert found["offload 1.0"]["acquires_count"] > 0


def test_a_prediction_has_the_rates_of_this_card_and_of_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(name: str, mib: int, gbps: float) -> dict[str, Any]:
        return {"name": name, "copy_bytes": mib << 20, "rate_gbps": gbps}

    link = [copy("registered_plain_h2d_4_KiB", 4, 99.0), copy("pageable_h2d_64_KiB", 64, 98.0)]
    link += [copy("registered_huge_h2d_64_KiB", 64, 55.0), copy("registered_x_d2h_1_KiB", 64, 97.0)]
    rates = [{"name": "matmul", "tflops": 700.0}, {"name": "copy", "memory_gbps": 4000.0}]
    step = {"name": "offload 0.91", "step_s": 0.1, "rate_gbps": 1.0, "tflops": 1.0, "launch_s": 1.0}
    report = {"link": {"rows": link}, "rates": {"rows": rates}, "step": {"rows": [step]}}
    path = tmp_path / "results.json"
    monkeypatch.setenv("GPU_CHECK_RESULTS", str(path))
    path.write_text(json.dumps(report))
    assert common.measured_rates() == {}, "the time from kernel to kernel is a step's"
    rates.append({"name": "launch", "launch_s": 2e-6})
    path.write_text(json.dumps(report))
    assert common.measured_rates() == {
        "link_gbps": 55.0,
        "tflops": 700.0,
        "memory_gbps": 4000.0,
        "launch_s": 2e-6,
    }


class OnceBroken:
    """Raises at its first call, and from then on calls what it replaces."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real, self.calls = real, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise OSError("planted")
        return self.real(*args, **options)


def one_row(*_: Any) -> dict[str, Any]:
    return {"took_s": 1.0}


@pytest.mark.parametrize(
    ("part", "broken", "quick", "expected"),
    [
        ("machine", "versions", {}, ["versions", "host"]),
        ("memory", "at_the_cap", {"many_steps": one_row}, ["at 97% of the cap", "short steps"]),
        ("decode", "decode", {"KINDS": ("bf16",), "decode": one_row}, ["bf16, gaussian"]),
        ("lock", "locked", {"exit_s": one_row, "attached": one_row, "locked": one_row}, ["1 GiB"]),
        ("formats", "compare", {"compare": one_row}, ["torchao int8"]),
        ("rates", "matmul", {"traffic": one_row, "launches": one_row}, ["matmul", "traffic"]),
    ],
)
def test_rows_of_other_parts_survive_each_other(
    part: str,
    broken: str,
    quick: dict[str, Any],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # one of them sets it for its process
    bench = importlib.import_module(f"bench_{part}")
    for name, stands in quick.items():
        monkeypatch.setattr(bench, name, stands)
    monkeypatch.setattr(bench, broken, OnceBroken(getattr(bench, broken)))
    threads = torch.get_num_threads()
    try:
        rows = list(bench.benchmarks("cpu"))
    finally:
        torch.set_num_threads(threads)
    errors = [row for row in rows if "error" in row]
    assert [row["error"] for row in errors] == ["OSError: planted"]
    assert errors[0]["name"].startswith(expected[0])
    assert rows.index(errors[0]) < len(rows) - 1, "nothing came after it"
    names = [row["name"] for row in rows]
    assert all(any(name.startswith(wanted) for name in names) for wanted in expected)


def test_bits_of_one_share_survive_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(command: Any, **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 0, stdout="")

    threads = torch.get_num_threads()
    monkeypatch.setattr(bench_bits.subprocess, "run", no_process)
    monkeypatch.setattr(oracle_offload, "attach", OnceBroken(oracle_offload.attach))
    try:
        rows = {row["name"]: row for row in bench_bits.benchmarks("cpu")}
    finally:
        torch.set_num_threads(threads)
    assert rows["managed against resident, offload 1.0"]["error"] == "OSError: planted"
    row = rows["managed against resident, offload 0.5"]
    assert row["equal_losses_count"] == row["steps_count"] and row["acquires_count"] > 0


def test_models_of_a_part_survive_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows_of(shape: Any, *_: Any) -> Iterator[dict[str, Any]]:
        yield {"name": shape.name, "step_s": 1.0}

    threads = torch.get_num_threads()
    monkeypatch.setattr(bench_step, "rows_of", OnceBroken(rows_of))
    try:
        broken, whole = bench_unet.benchmarks("cpu")
    finally:
        torch.set_num_threads(threads)
    assert broken["error"] == "OSError: planted" and whole["step_s"] == 1.0
    assert broken["name"] != whole["name"]


@pytest.mark.parametrize("grows", [True, False])
def test_memory_that_a_machine_is_given_as_it_uses_it_is_found_by_touching_it(
    grows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[Any] = []
    real = bench_ram.touch

    def touch(nbytes: int) -> Any:
        touched.append(nbytes)
        return real(nbytes)

    def available() -> int:
        return (24 << 20) - (0 if grows else sum(touched))

    monkeypatch.delenv("GPU_CHECK_HOST_GIB", raising=False)
    monkeypatch.setattr(bench_ram, "touch", touch)
    monkeypatch.setattr(bench_ram, "WANTED_BYTES", 1 << 27)
    with monkeypatch.context() as patched:
        patched.setattr(common, "host_available_bytes", available)
        rows = list(bench_ram.benchmarks("cpu"))
    assert [row.get("host_gib") for row in rows[:-1]] == [None] * (len(rows) - 1)
    assert touched[0] == bench_ram.PIECE_BYTES // 1024
    assert ("host_gib" in rows[-1]) is grows and len(touched) == (7 if grows else 1)
    check = make_check(tmp_path)
    check.report = {"ram": {"rows": rows}}
    check.environment.pop("GPU_CHECK_HOST_GIB", None)
    gpu_check.use_ram(check)
    said = check.environment.get("GPU_CHECK_HOST_GIB")
    assert said == (str(rows[-1]["host_gib"]) if grows else None)
    if said:
        monkeypatch.setenv("GPU_CHECK_HOST_GIB", said)
        assert common.host_available_bytes() == int(float(said) * common.GIB)
        assert "skipped" in next(bench_ram.benchmarks("cpu"))


def test_a_search_path_that_was_exported_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    assert gpu_check.search_path(Path("/ours")) == f"/ours{os.pathsep}/theirs"
    monkeypatch.delenv("PYTHONPATH")
    assert gpu_check.search_path(Path("/ours"), Path("/more")) == f"/ours{os.pathsep}/more"


# ---- the real lease, killed ----

CUDA_PARTS = ("machine", "tests/gpu", "conformance", "link", "calls")  # a CPU ends them in time


def cuda_environment() -> dict[str, str] | None:
    """What PyTorch's CUDA build over the simulated driver needs; None where it is not built."""
    venv = (ROOT / ".venv-cuda").resolve()
    python, libraries = venv / "bin" / "python", venv.parent / "build" / "cuda"
    if not python.is_file() or not (libraries / "liboperators.so").is_file():
        return None
    # What is no Python, as the conformance program, finds the driver there.
    return {"PYTHON": str(python), "LD_LIBRARY_PATH": str(libraries)}


def ended_parts(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The parts that have ended, and files of tests."""
    rows = {name: report[name] for name in gpu_check.OBJECTS if name not in ("tests", "power")}
    rows |= {row["name"]: row for row in report["tests"]["rows"]}
    return {name: row for name, row in rows.items() if row["state"] in gpu_check.ENDED}


def shape_of(report: dict[str, Any]) -> dict[str, Any]:
    """Names of parts and rows, and what each row tells; no figure."""

    def tells(row: Any) -> Any:
        return (row["name"], *sorted(row)) if isinstance(row, dict) else "line"

    # How much memory there is to touch differs from one moment to the next.
    names = set(gpu_check.OBJECTS) - {"tests", "ram"}
    rows = {name: report[name]["rows"] for name in names}
    found = {name: sorted(map(tells, of_part)) for name, of_part in rows.items()}
    return found | {row["name"]: row["state"] for row in report["tests"]["rows"]}


def has_ended(count: int) -> Callable[[dict[str, Any]], bool]:
    """Whether so many parts have ended, and at least the build has begun."""

    def is_time(report: dict[str, Any]) -> bool:
        begun = bool(report) and report["build"]["state"] != "not reached"
        return begun and len(ended_parts(report)) >= count

    return is_time


class RealLease:
    """tools/lease.sh as users with a card call it, again and again over the same results."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path = folder / "results.json"
        over = cuda_environment()
        self.over = "the simulated device" if over is None else "CUDA's torch"
        self.parts = CUDA_PARTS if over else ()
        given = {"RESULTS": str(folder), "WHEELS": str(folder / "none"), "COMMIT": "abc123"}
        given |= over or {"GPU_CHECK_DEVICE": "sim", "PYTHON": sys.executable}
        self.environment = {**os.environ, **given}

    def report(self) -> dict[str, Any]:
        """The results; a file that is no JSON fails."""
        found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.is_file() else {}
        return found

    def call(self, until: Callable[[dict[str, Any]], bool] | None = None) -> dict[str, Any]:
        """Run it to its end, or until the results are such that it is killed, without a warning."""
        # A busy machine takes longer than a lease lasts.
        command = ["sh", str(ROOT / "tools" / "lease.sh"), "7200", "", "--patience", "10"]
        command += ["--only", ",".join(self.parts)] if self.parts else []
        with self.path.with_name("output").open("a") as output:
            process = subprocess.Popen(
                command,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what is taken away with a machine is all of it
            )
            try:
                while process.poll() is None and not (until and until(self.report())):
                    time.sleep(0.05)
                assert (process.poll() is None) == (until is not None), "it ended by itself"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return self.report()


@pytest.mark.slow
@pytest.mark.proof
def test_a_lease_that_is_killed_three_times_comes_home_whole(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The real parts, on the simulated device or over CUDA's torch where that is."""
    whole = RealLease(tmp_path / "whole").call()
    lease = RealLease(tmp_path / "killed")
    ran = (row["name"] for row in whole["tests"]["rows"])
    asked = lease.parts or (*gpu_check.OBJECTS, *ran)
    parts = {"build", *asked} - {"tests", "power"}
    ended: dict[str, dict[str, Any]] = {}
    for kill in range(3):
        report = lease.call(has_ended(max(len(parts) * kill // 3, len(ended))))
        found = ended_parts(report)
        assert ended == {name: found[name] for name in ended}, "a part that had ended ran again"
        ended = {name: row for name, row in found.items() if name != "build"}
    report = lease.call()
    found = ended_parts(report)
    assert ended == {name: found[name] for name in ended}, "a part that had ended ran again"
    assert len(report["resumed"]) == 3
    states = {name: row["state"] for name, row in found.items()}
    assert states == dict.fromkeys(parts, "done"), {name: found[name]["why"] for name in found}
    assert shape_of(report) == shape_of(whole)
    said = {"kills": 3, "parts": len(parts), "over": lease.over}
    record_property("lease", json.dumps(said))


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
        **{name: {"state": "done", "seconds": 1.0, "rows": []} for name in gpu_check.OBJECTS},
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


def test_import_writes_what_was_measured_into_the_pages(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "docs/measured.md", "docs/performance.md", "csrc/sim/control.c"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    step = {"name": "small, offload 0.5", "offload": 0.5, "step_s": 1.2, "predicted_step_s": 1.0}
    step |= {"peak_reserved_bytes": 2**31, "over_x_min_ratio": 1.01}
    step |= {"over_predicted_ratio": 1.2, "predicted_kernels_s": 0.5, "h2d_bytes": 2e9}
    step |= {"predicted_h2d_bytes": 1e9, "equal_losses_count": 3, "compared_steps_count": 3}
    resident = {"name": "small, resident", "step_s": 0.5}
    rows = [resident | {"weights_bytes": 2**32, "peak_reserved_bytes": 2**33}, step]
    part = {"step": {"state": "done", "seconds": 1.0, "rows": rows}}
    path = results_file(tmp_path, system="Linux", cpus_count=2, **part)
    command = [sys.executable, str(root / "tools" / "gpu_import.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    filed = "benchmarks/results/nvidia-h200/2026-01-31-0123456789ab.json"
    assert (root / filed).read_text() == path.read_text() and filed in done.stdout
    measured, simulated = ((root / f"docs/{n}.md").read_text() for n in ("measured", "performance"))
    assert "small, offload 0.5: 1.20 of the prediction: the bytes 2 GB instead of 1" in measured
    row = "| small, 50% offloaded, train | 1.000 | 1.200 | 1.200 | 1.0 | 2.0 |"
    assert row in simulated and row in done.stdout
    assert "flux width" not in simulated, "of the results that are not there"
    readme = (root / "README.md").read_text()
    assert "| The same, 50% of them in host memory | 1.200 s, 2.0 GiB of the GPU |" in readme
    assert "AI-Toolkit 0." not in readme, "of the results that are not there"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "schema is 'list'"),
        ("{}", "schema is None"),
        ("not json", "Expecting value"),
        (json.dumps({"schema": "oracle_offload/gpu-check/3"}), "lacks command, date"),
        (json.dumps({"schema": "oracle_offload/gpu-check/1"}), "not a GPU check's results"),
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


def test_the_wheels_have_what_the_formats_are_computed_with() -> None:
    pins = (ROOT / "tools" / "requirements-gpu.txt").read_text(encoding="utf-8")
    carried = {line.partition("==")[0] for line in pins.splitlines() if "==" in line}
    source = (ROOT / "benchmarks" / "bench_formats.py").read_text(encoding="utf-8")
    asked = set(re.findall(r'import_module\("([\w.]+)"\)', source))
    packages = {"torchao.quantization": "torchao", "optimum.quanto": "optimum-quanto"}
    assert packages.keys() <= asked
    assert set(packages.values()) <= carried


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
        "def benchmarks(device):\n"
        "    return [{'name': 'speed', 'value': 3}, {'name': 'next', 'took_s': 1.0}]\n"
    )
    found = run.files(folder=tmp_path)
    monkeypatch.setattr(run, "files", lambda only=(), folder=None: found)
    output = tmp_path / "out.json"
    assert run.main(["--output", str(output), "--device", "cpu"]) == 1
    report = json.loads(output.read_text())
    assert report["schema"] == "oracle_offload/benchmarks/1"
    rows = {row["file"]: row for row in report["benchmarks"] if row["name"] != "next"}
    assert report["benchmarks"][-1]["name"] == "next", "a vague row cost the one after it"
    assert rows["good"]["rate_gbps"] == 12.5 and rows["good"]["device"] == "cpu"
    assert rows["broken"]["error"] == "OSError: no disk"
    assert "has no figure" in rows["vague"]["error"]


def test_an_unknown_benchmark_is_named_with_those_that_exist(tmp_path: Path) -> None:
    (tmp_path / "bench_link.py").write_text("")
    with pytest.raises(SystemExit, match="no benchmark lnk; there are link"):
        runner().files(["lnk"], tmp_path)
