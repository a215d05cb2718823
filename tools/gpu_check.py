"""What `make gpu-check` runs on a machine with a GPU: GPU tests, benchmarks, driver conformance.

Needs no network and no git, and uses the torch of the Python that runs it. Builds in place, then
runs the conformance program on the real driver, `pytest -m gpu` and the benchmarks, all within nine
minutes, and writes at most four files: results.json, conformance.txt, junit.xml and log.txt.
What cannot run is named in results.json under "skipped".

Without a GPU it says so and exits 1. GPU_CHECK_DEVICE=sim rehearses everything on the simulated
driver; its results say that they are simulated.

Exit codes: 0 all passed, 1 cannot run here, 3 something failed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = "oracle_offload/gpu_check-1"
BUDGET_S = 530.0  # nine minutes less the time to stop what still runs
BENCHMARK_SHARE_S = 150.0  # kept for the benchmarks when the tests are slow
GRACE_S = 10.0  # between asking a program to stop and killing it

EXIT_OK, EXIT_CANNOT_RUN, EXIT_FAILED = 0, 1, 3


class CannotRunError(RuntimeError):
    """The check cannot run on this machine; says why and what to do."""


@dataclass
class Device:
    """The device under test."""

    name: str
    driver: str
    simulated: bool


@dataclass
class Check:
    """State of one run: where things are, how much time is left, what was found."""

    device: Device
    results: Path
    scratch: Path
    log: TextIO
    deadline: float
    environment: dict[str, str]
    skipped: list[dict[str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print a line and log it."""
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def skip(self, what: str, why: str) -> None:
        """Name something that did not run."""
        self.say(f"skipped {what}: {why}")
        self.skipped.append({"what": what, "why": why})

    def fail(self, what: str, why: str) -> None:
        """Name something that failed."""
        self.say(f"FAILED {what}: {why}")
        self.failed.append(f"{what}: {why}")

    def left_s(self, reserve_s: float = 0.0) -> float:
        """Seconds until the deadline, less a reserve."""
        return self.deadline - time.monotonic() - reserve_s

    def call(
        self, command: Sequence[str], timeout_s: float, output: Path | None = None
    ) -> int | None:
        """Run a program, its output to the log (and `output`); None when it ran out of time.

        It is asked to stop first (SIGINT), so that pytest still writes its report.
        """
        self.say(f"$ {shlex.join(command)}")
        target = (output or self.scratch / "output.txt").open("w+", errors="replace")
        with target:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment,
                stdout=target,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=heed_interrupts if os.name == "posix" else None,
            )
            try:
                status: int | None = process.wait(max(timeout_s, 1.0))
            except subprocess.TimeoutExpired:
                status = None
                stop(process)
            target.seek(0)
            said = target.read()
        # The end says how it went; a log of megabytes helps nobody.
        self.say(said[-20_000:].rstrip())
        return status


def heed_interrupts() -> None:
    """In a child: a shell that starts jobs in the background lets them ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: first politely, then surely."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(GRACE_S)
            return
        except subprocess.TimeoutExpired:
            continue


def find_device() -> Device:
    """Return the first CUDA device, or the simulated one when GPU_CHECK_DEVICE=sim.

    Raises
    ------
    CannotRunError
        Without a driver or a device.
    """
    asked = os.environ.get("GPU_CHECK_DEVICE", "cuda")
    if asked == "sim":
        preset = os.environ.get("ORACLE_OFFLOAD_SIM_DEVICE", "rtx4090")
        return Device(f"simulated {preset}", "simulated", simulated=True)
    if asked != "cuda":
        raise CannotRunError(f"GPU_CHECK_DEVICE={asked!r}: use cuda (the default) or sim")
    name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(name)
    except OSError as error:
        raise CannotRunError(f"no GPU on this machine: {error}") from error
    status = cuda.cuInit(0)
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    if status == 0:
        cuda.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        raise CannotRunError(
            f"no GPU on this machine: cuInit answers {status}, {count.value} devices; check "
            "nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    cuda.cuDriverGetVersion(ctypes.byref(version))
    text = ctypes.create_string_buffer(256)
    handle = ctypes.c_int(0)
    cuda.cuDeviceGet(ctypes.byref(handle), 0)
    cuda.cuDeviceGetName(text, len(text), handle)
    api = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return Device(text.value.decode(), f"{kernel_driver()} ({api})".strip(), simulated=False)


def kernel_driver() -> str:
    """Return the version of the NVIDIA driver as nvidia-smi prints it, or ''."""
    smi = shutil.which("nvidia-smi")
    if not smi:
        return ""
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else ""


TORCH_PROBE = """
import json, torch
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda,
                  "available": torch.cuda.is_available()}))
"""


def find_torch(device: Device) -> dict[str, Any]:
    """Return {"torch", "cuda", "available"} of this Python's torch.

    Raises
    ------
    CannotRunError
        When there is none, or it cannot use the GPU.
    """
    done = subprocess.run(
        [sys.executable, "-c", TORCH_PROBE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise CannotRunError(
            f"{sys.executable} cannot import torch ({done.stderr.strip().splitlines()[-1:]}); name "
            "a Python that can: make gpu-check PYTHON=/path/to/python"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not device.simulated and not found["available"]:
        raise CannotRunError(
            f"torch {found['torch']} of {sys.executable} cannot use the GPU (CUDA "
            f"{found['cuda']}); name a Python whose torch can: make gpu-check PYTHON=..."
        )
    return found


def install_wheels(check: Check, wheels: Path) -> None:
    """Install the carried wheels into a folder of their own, ahead of what the machine has."""
    files = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if not files:
        check.say(f"no wheels in {wheels}: using what the machine has")
        return
    site = check.scratch / "site"
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
        *("--no-compile", "--no-cache-dir", "--disable-pip-version-check", "--no-warn-conflicts"),
        *("--target", str(site), *map(str, files)),
    ]
    if check.call(command, timeout_s=90) != 0:
        # A machine without pip, or one wheel for another Python: take those that fit.
        check.say("pip refused; unpacking the wheels that fit this Python")
        shutil.rmtree(site, ignore_errors=True)
        unpack(check, files, site)
    check.environment["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT)])


def unpack(check: Check, files: Sequence[Path], site: Path) -> None:
    """Unzip wheels: enough for packages that are imported, not installed as commands."""
    site.mkdir(parents=True, exist_ok=True)
    this = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in files:
        python_tag, abi_tag = wheel.stem.split("-")[-3:-1]
        if abi_tag not in ("none", "abi3") and this not in python_tag.split("."):
            check.skip(wheel.name, f"not for Python {platform.python_version()}")
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def build(check: Check) -> bool:
    """Build the package in place; whether that worked."""
    status = check.call(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        timeout_s=min(180.0, check.left_s()),
    )
    if status != 0:
        check.fail("build", f"setup.py ended with {status}")
    return status == 0


def conformance(check: Check) -> None:
    """Run the conformance program on the driver under test; its lines go to conformance.txt."""
    sys.path.insert(0, str(ROOT / "tools"))
    import c_programs

    toolchain = c_programs.host_toolchain(werror=False)
    try:
        built = c_programs.build(toolchain, ["conformance"], check.scratch / "c")
    except (c_programs.BuildError, SystemExit) as error:
        check.fail("conformance", f"does not build: {error}")
        return
    saved = check.environment.pop("ORACLE_OFFLOAD_DRIVER", None)
    if check.device.simulated:
        check.environment["ORACLE_OFFLOAD_DRIVER"] = str(built.simulator)
    output = check.results / "conformance.txt"
    status = check.call([str(built.programs["conformance"])], min(60.0, check.left_s()), output)
    check.environment.pop("ORACLE_OFFLOAD_DRIVER", None)
    if saved is not None:
        check.environment["ORACLE_OFFLOAD_DRIVER"] = saved
    if status != 0:
        check.fail("conformance", "out of time" if status is None else f"ended with {status}")


def tests(check: Check) -> dict[str, int]:
    """Run `pytest -m gpu`; return its counts and name each skipped test."""
    counts = {"passed_count": 0, "failed_count": 0, "skipped_count": 0}
    if (
        subprocess.run(
            [sys.executable, "-c", "import pytest"],
            env=check.environment,
            capture_output=True,
            check=False,
        ).returncode
        != 0
    ):
        check.skip("tests", "pytest is not installed and not among the wheels")
        return counts
    report = check.results / "junit.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    status = check.call(command, check.left_s(BENCHMARK_SHARE_S))
    if status is None:
        check.fail("tests", "out of time; those that had ended are in junit.xml")
    elif status not in (0, 5):  # 5: no test is marked gpu
        check.fail("tests", f"pytest ended with {status}")
    if not report.is_file():
        return counts
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        if skipped is not None:
            counts["skipped_count"] += 1
            check.skipped.append({"what": name, "why": skipped.get("message", "")})
        elif case.find("failure") is not None or case.find("error") is not None:
            counts["failed_count"] += 1
            check.failed.append(name)
        else:
            counts["passed_count"] += 1
    return counts


def benchmarks(check: Check) -> list[dict[str, Any]]:
    """Run the benchmarks and return their rows, those that ended before the time was up."""
    output = check.scratch / "benchmarks.json"
    device = "cpu" if check.device.simulated else "cuda"
    command = [sys.executable, "benchmarks/run.py", "--device", device, "--output", str(output)]
    status = check.call(command, check.left_s())
    if status != 0:
        check.fail("benchmarks", "out of time" if status is None else f"ended with {status}")
    if not output.is_file():
        return []
    rows: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))["benchmarks"]
    check.skipped += [
        {"what": f"benchmark {row['name']}", "why": str(row["skipped"])}
        for row in rows
        if "skipped" in row
    ]
    return rows


def build_record() -> dict[str, Any]:
    """Return what the build in place recorded."""
    path = ROOT / "oracle_offload" / "_build_info.json"
    if not path.is_file():
        return {}
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def run(arguments: argparse.Namespace, device: Device, torch: dict[str, Any]) -> int:
    """Run every part that can run and write the results."""
    results: Path = arguments.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    for name in ("results.json", "conformance.txt", "junit.xml", "log.txt"):
        (results / name).unlink(missing_ok=True)  # of an earlier run: never mixed with this one's
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch,
        (results / "log.txt").open("w", encoding="utf-8") as log,
    ):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        check = Check(
            device, results, Path(scratch), log, started + arguments.budget_s, environment
        )
        check.say(f"{device.name}, driver {device.driver}, torch {torch['torch']}")
        install_wheels(check, arguments.wheels)
        counts: dict[str, int] = {}
        rows: list[dict[str, Any]] = []
        if build(check):
            conformance(check)
            counts = tests(check)
            rows = benchmarks(check)
        text = results / "conformance.txt"
        report = {
            "schema": SCHEMA,
            "command": shlex.join(["python", "tools/gpu_check.py", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": arguments.commit or "unknown",
            "device": device.name,
            "simulated": device.simulated,
            "driver": device.driver,
            "torch": torch["torch"],
            "cuda": torch["cuda"],
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
            "cpus_count": os.cpu_count(),
            "build": build_record(),
            "elapsed_s": round(time.monotonic() - started, 1),
            "tests": counts,
            "conformance": text.read_text(errors="replace").splitlines() if text.is_file() else [],
            "benchmarks": rows,
            "skipped": check.skipped,
            "failed": check.failed,
        }
        (results / "results.json").write_text(json.dumps(report, indent=1) + "\n")
        check.say(
            f"{counts.get('passed_count', 0)} tests passed, {len(check.failed)} failures, "
            f"{len(check.skipped)} skipped, {len(rows)} benchmark rows, "
            f"{time.monotonic() - started:.0f} s; results in {results}"
        )
        return EXIT_FAILED if check.failed else EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Check the machine, then run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheels", type=Path, default=Path(".whl"))
    parser.add_argument("--results", type=Path, default=Path("out/gpu-check"))
    parser.add_argument("--commit", default="", help="recorded in the results")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if sys.version_info < (3, 11):  # noqa: UP036 - the machine's own Python may be any
        print(f"gpu-check: Python {platform.python_version()}; 3.11 is needed", file=sys.stderr)
        return EXIT_CANNOT_RUN
    try:
        device = find_device()
        torch = find_torch(device)
    except CannotRunError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    return run(arguments, device, torch)


if __name__ == "__main__":
    sys.exit(main())
