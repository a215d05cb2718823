"""What `make gpu-check` runs on a machine with a GPU: measurements, GPU tests, driver conformance.

Needs no network and no git, and uses the torch of the Python that runs it. The parts run in the
order of `CLOCK`: what a first quarter of an hour with a card must bring home comes first. Each has
a process of its own and a limit of its own. results.json is rewritten after each part and each row
of a part, so that a run that is cut short keeps what it has; a part that crashes or hangs ends
alone.
Only where the first tests fail does nothing follow: what they find makes the rest worthless.
`--resume results.json` runs what is missing there. What cannot run is named.

Without a GPU it says so and exits 1. GPU_CHECK_DEVICE=sim rehearses everything on the simulated
driver, with smaller sizes; its results say that they are simulated.

Exit codes: 0 all passed, 1 cannot run here, 3 something failed or was not reached.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = "oracle_offload/gpu-check/3"
BUDGET_S = 880.0
GRACE_S = 4.0  # between asking a program to stop and killing it
LOG_CHARACTERS = 40_000  # of one program's output: megabytes help no reader

EXIT_OK, EXIT_CANNOT_RUN, EXIT_FAILED = 0, 1, 3

# How a part can end. "running" stays only where the check itself was killed.
ENDED = ("done", "failed")


@dataclass(frozen=True)
class Part:
    """One part of the check: a file of benchmarks/, the conformance program, or tests.

    Parts whose `beside` is the same run at the same time. Tests prove, and time nothing; what is
    measured has the card for itself.
    """

    name: str
    limit_s: float
    path: str = ""  # of the tests; of several, with spaces between
    beside: str = ""


def _tests(beside: str, limit_s: float, *names: str) -> Part:
    """Return tests of tests/training that share a process; the first name is the part's."""
    paths = " ".join(f"tests/training/test_{name}.py" for name in names)
    return Part(f"tests/{names[0]}", limit_s, paths, beside)


PREPARATION = (Part("machine", 60), Part("ram", 30))
FIRST_TESTS = Part("tests/gpu", 90, "tests/gpu")
# By the clock of a lease of fifteen minutes. Limits are about twice what a part should take.
CLOCK = (
    FIRST_TESTS,
    Part("conformance", 90),  # it alone names the simulator's false assumption
    *(Part("rates", 30), Part("link", 45)),  # what a step is predicted from
    *(Part("step", 150), Part("rivals", 220), Part("bits", 90)),
    # What has never run: kernels that read the host's memory, modules of any class, convolutions.
    _tests("tests", 150, "any"),
    _tests("tests", 150, "convolutions"),
    _tests("tests", 150, "matrix"),
    _tests("tests", 150, "embedding", "reading_adapters", "kept", "handle"),
    _tests("tests", 150, "compress", "disk", "disk_coded"),  # by our own kernels; from files
    _tests("tests", 150, "autocast", "writes", "gradients", "late_gradients", "step_scalars"),
    _tests("tests", 150, "models", "micro_batches", "exceptions", "activations_leave", "budget"),
    _tests("tests", 150, "stepping", "in_backward", "clipping"),
    _tests("tests", 150, "recording", "aitoolkit", "from_disk", "first_step_proof", "taken_anew"),
    *(Part("unet", 60), Part("calls", 25), Part("layers", 40), Part("rivals_more", 200)),
    *(Part("lock", 40), Part("memory", 50), Part("faults", 60)),
    *(Part("decode", 40), Part("formats", 60)),
    # These watch or cap the memory of the whole card.
    _tests(
        *("", 120, "memory", "auto_budget", "find_batch_size", "adaptive_batch", "arena"),
        *("attempts", "guards", "idle", "recipes", "contract", "first_forward", "direct_uses"),
    ),
    # Few of each, of what others have proved before.
    _tests(
        *("", 150, "other_libraries", "micro_batch_attributes", "answers", "replaced_weights"),
        *("attachment", "summary", "saving", "masters", "checkpoint", "swap"),
        "module_list",
    ),
)
OBJECTS = (
    *("machine", "ram", "build", "conformance", "rates", "link", "step", "rivals", "bits"),
    *(
        "tests",
        "unet",
        "calls",
        "layers",
        "rivals_more",
        "lock",
        "memory",
        "faults",
        "decode",
        "formats",
        "power",
    ),
)


class CannotRunError(RuntimeError):
    """The check cannot run on this machine; says why and what to do."""


@dataclass
class Device:
    """The device under test."""

    name: str
    driver: str
    simulated: bool
    pci_id: str = ""


@dataclass
class Check:
    """State of one run: where things are, how much time is left, what was found."""

    device: Device
    results: Path
    scratch: Path
    log: TextIO
    deadline: float
    environment: dict[str, str]
    report: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    part_limit_s: float = float("inf")
    patience: float = 1.0  # by which each limit of a part is longer
    benchmarks: Path = ROOT / "benchmarks"
    started: float = field(default_factory=time.monotonic)
    lock: Any = field(default_factory=threading.RLock)
    running: set[Any] = field(default_factory=set)
    power: Power | None = None
    ended: bool = False  # by a signal

    def say(self, text: str) -> None:
        """Print a line and log it."""
        with self.lock:
            print(text, flush=True)
            self.log.write(text + "\n")
            self.log.flush()

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def write(self) -> None:
        """Rewrite results.json: whole, or as it was."""
        with self.lock:
            self.report["elapsed_s"] = round(time.monotonic() - self.started, 1)
            times = os.times()
            self.report["processor_s"] = round(sum(times[:4]), 1)  # of this and of what ended
            write_atomically(
                self.results / "results.json", json.dumps(self.report, indent=1) + "\n"
            )

    def put(self, name: str, **found: Any) -> dict[str, Any]:
        """Set what is known of a part, or of a file of tests (``tests/matrix``), and write."""
        with self.lock:
            if "/" in name:
                rows = self.report["tests"]["rows"]
                entry = next((row for row in rows if row["name"] == name), None)
                if entry is None:
                    entry = {"name": name}
                    rows.append(entry)
            else:
                entry = self.report[name]
            entry.update(found)
            self.write()
            return entry

    def call(
        self,
        command: Sequence[str],
        timeout_s: float,
        output: Path | None = None,
        watch: Callable[[], None] | None = None,
        environment: dict[str, str] | None = None,
    ) -> int | None:
        """Run a program, its output to the log (and `output`); None when it ran out of time.

        It is asked to stop first (SIGINT), so that pytest still writes its report. `watch` is
        called while it runs.
        """
        self.say(f"$ {shlex.join(command)}")
        # By its own name: parts run side by side.
        handle, path = tempfile.mkstemp(dir=self.scratch)
        os.close(handle)
        with (output or Path(path)).open("w+", errors="replace") as target:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self.environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=begin_child if os.name == "posix" else None,
            )
            with self.lock:
                self.running.add(process)
            try:
                status = wait(process, max(timeout_s, 1.0), watch)
            finally:
                if process.poll() is None:
                    stop(process)
                with self.lock:
                    self.running.discard(process)
            target.seek(0)
            said = target.read()
        self.say(said[-LOG_CHARACTERS:].rstrip())
        return None if self.ended else status

    def end(self, signal_number: int, frame: Any) -> None:
        """Turn SIGTERM and SIGINT into an orderly end: what runs is stopped, nothing begins."""
        self.ended = True
        self.deadline = min(self.deadline, time.monotonic())
        for process in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is whole or as it was before."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def begin_child() -> None:
    """In a child: heed SIGINT, which shells let background jobs ignore, and die with the check."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if LIBC is not None:
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def wait(
    process: subprocess.Popen[bytes], timeout_s: float, watch: Callable[[], None] | None = None
) -> int | None:
    """Return the exit status, None after `timeout_s`; calls `watch` every quarter of a second."""
    until = time.monotonic() + timeout_s
    while True:
        left = until - time.monotonic()
        try:
            return process.wait(max(0.01, min(0.25 if watch else left, left)))
        except subprocess.TimeoutExpired:
            if watch:
                watch()
            if time.monotonic() >= until:
                return None


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: first politely, then surely."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        # A process that hangs inside the driver may outlive SIGKILL for a while: not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            if number == signal.SIGINT:  # its children may not have heeded
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            return


def ending(status: int | None, limit_s: float) -> tuple[str, str]:
    """Return (state, why) of a program that ended with `status`, None when it was out of time."""
    if status is None:
        return "timeout", f"out of time after {limit_s:.0f} s"
    if status < 0 or status >= 128:
        number = -status if status < 0 else status - 128
        with contextlib.suppress(ValueError):
            return "crashed", f"ended by {signal.Signals(number).name}"
        return "crashed", f"ended with {status}"
    return ("done", "") if status == 0 else ("failed", f"ended with {status}")


# ---- the machine ----


def find_device() -> Device:
    """Return the first CUDA device, or the simulated one when GPU_CHECK_DEVICE=sim.

    Raises
    ------
    CannotRunError
        Without a driver or a device.
    """
    asked = os.environ.get("GPU_CHECK_DEVICE", "cuda")
    if asked == "sim":
        preset = os.environ.setdefault("ORACLE_OFFLOAD_SIM_DEVICE", "h200")
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
    text, pci_id = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    handle = ctypes.c_int(0)
    cuda.cuDeviceGet(ctypes.byref(handle), 0)
    cuda.cuDeviceGetName(text, len(text), handle)
    cuda.cuDeviceGetPCIBusId(pci_id, len(pci_id), handle)
    api = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return Device(
        text.value.decode(),
        f"{kernel_driver()} ({api})".strip(),
        simulated=False,
        pci_id=pci_id.value.decode(),
    )


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


def find_torch(device: Device, timeout_s: float) -> dict[str, Any]:
    """Return {"torch", "cuda", "available"} of this Python's torch.

    Raises
    ------
    CannotRunError
        When there is none, it cannot use the GPU, or its import takes longer than `timeout_s`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotRunError(
            f"import torch takes longer than {timeout_s:.0f} s in {sys.executable}: a cold disk? "
            "run it again"
        ) from error
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


class Power:
    """Watts, by nvidia-smi, from start to end of the check; a sample is (time, watts, ...)."""

    FIELDS = (
        *(
            "timestamp",
            "power.draw",
            "clocks.sm",
            "clocks.mem",
            "temperature.gpu",
            "utilization.gpu",
        ),
        *("pcie.link.gen.current", "pcie.link.width.current"),
    )
    KEYS = ("power_w", "sm_mhz", "memory_mhz", "celsius", "busy_percent", "link_gen", "link_width")

    def __init__(self, pci_id: str) -> None:
        self.samples: list[tuple[float, list[float | None]]] = []
        self.why_not = ""
        smi = shutil.which("nvidia-smi")
        self.process: subprocess.Popen[str] | None = None
        if smi is None:
            self.why_not = "nvidia-smi is not on PATH"
            return
        command = [smi, f"--query-gpu={','.join(self.FIELDS)}", "--format=csv,noheader,nounits"]
        command += ["--loop-ms=250", *(["-i", pci_id] if pci_id else [])]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                preexec_fn=begin_child if os.name == "posix" else None,
            )
        except OSError as error:
            self.why_not = str(error)
            return
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            # By its own clock: what goes through a pipe may arrive late.
            when, *words = line.split(",")
            values = [number(word) for word in words]
            at = local_time(when)
            if at is not None and len(values) == len(self.KEYS) and values[0] is not None:
                self.samples.append((at, values))
            elif not self.why_not:
                self.why_not = f"nvidia-smi says {line.strip()!r}"

    def row(self, name: str, begin: float, end: float) -> dict[str, Any] | None:
        """Return mean and largest of each field within [begin, end] (epoch seconds)."""
        inside = [values for at, values in list(self.samples) if begin <= at <= end]
        if not inside:
            return None
        row: dict[str, Any] = {"name": name, "samples_count": len(inside)}
        for key, column in zip(self.KEYS, zip(*inside, strict=True), strict=True):
            found = [value for value in column if value is not None]
            if found:
                row[f"{key}_mean"] = round(statistics.fmean(found), 1)
                row[f"{key}_max"] = max(found)
        return row

    def close(self) -> None:
        """End the sampler."""
        if self.process is not None:
            stop(self.process)  # type: ignore[arg-type]
            self.reader.join(GRACE_S)


def local_time(text: str) -> float | None:
    """Return epoch seconds of a time as nvidia-smi writes it, None for anything else."""
    with contextlib.suppress(ValueError):
        return datetime.datetime.strptime(text.strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp()
    return None


def number(text: str) -> float | None:
    """Return a figure of nvidia-smi, None for ``[N/A]``."""
    try:
        return float(text.strip())
    except ValueError:
        return None


def put_power(check: Check) -> None:
    """Put the watts of each part and of each of its rows that says when it ran."""
    power = check.power
    if power is None:
        return
    rows = []
    for name in OBJECTS:
        for entry in (check.report[name], *check.report[name].get("rows", ())):
            if "epoch_s" in entry:
                label = name if entry is check.report[name] else f"{name}: {entry['name']}"
                row = power.row(label, *entry["epoch_s"])
                if row and "step_s" in entry:
                    row["joules_per_step"] = round(row["power_w_mean"] * entry["step_s"], 1)
                rows += [row] if row else []
    if rows:
        check.put("power", state="done", why="", rows=rows)
    else:
        check.put("power", state="skipped", why=power.why_not or "no sample yet", rows=[])


HOLD_CONTEXT = """
import ctypes, sys
cuda, context = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
sys.stdin.read()
"""


@contextlib.contextmanager
def initialised_device(check: Check) -> Iterator[None]:
    """Keep the card initialised: without persistence mode each first cuInit takes seconds."""
    library = (
        ROOT / "oracle_offload" / "libsimcuda.so" if check.device.simulated else "libcuda.so.1"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_CONTEXT, str(library)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=begin_child if os.name == "posix" else None,
    )
    try:
        yield
    finally:
        stop(process)


# ---- the parts ----


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
    if check.call(command, timeout_s=min(90.0, check.left_s())) != 0:
        # A machine without pip, or one wheel for another Python: take those that fit.
        check.say("pip refused; unpacking the wheels that fit this Python")
        shutil.rmtree(site, ignore_errors=True)
        unpack(check, files, site)
    check.environment["PYTHONPATH"] = search_path(site, ROOT)


def search_path(*folders: Path) -> str:
    """Return a PYTHONPATH: these folders, then what the user has exported."""
    exported = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([exported] if exported else [])])


def unpack(check: Check, files: Sequence[Path], site: Path) -> None:
    """Unzip wheels: enough for packages that are imported, not installed as commands."""
    site.mkdir(parents=True, exist_ok=True)
    this = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in files:
        python_tag, abi_tag = wheel.stem.split("-")[-3:-1]
        if abi_tag not in ("none", "abi3") and this not in python_tag.split("."):
            check.say(f"skipped {wheel.name}: not for Python {platform.python_version()}")
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


@contextlib.contextmanager
def part(check: Check, name: str, limit_s: float) -> Iterator[float]:
    """Time a part within its limit; yields the seconds it may take. An error of ours ends it alone.

    A part that has ended in the resumed file, was not asked for, or has no time left yields 0.
    """
    at = (
        check.report
        if "/" not in name
        else {row["name"]: row for row in check.report["tests"]["rows"]}
    )
    if at.get(name, {}).get("state") in ENDED and name != "build":
        check.say(f"kept {name}: it has ended in the resumed file")
        yield 0.0
        return
    if check.only and not {name, name.split("/")[0]} & set(check.only) and name != "build":
        check.put(name, state="skipped", why="not asked for", seconds=0.0)
        yield 0.0
        return
    limit_s = min(limit_s * check.patience, check.part_limit_s, check.left_s() - GRACE_S)
    if limit_s < min(2.0, check.part_limit_s):
        check.put(name, state="not reached", why="the time was up", seconds=0.0)
        yield 0.0
        return
    started, epoch = time.monotonic(), time.time()
    check.say(f"== {name}: at most {limit_s:.0f} s of {check.left_s():.0f}")
    check.put(name, state="running", why="the check was ended meanwhile", seconds=0.0)
    try:
        yield limit_s
    except Exception as error:  # of the check itself: the other parts still count
        check.put(name, state="failed", why=f"{type(error).__name__}: {error}")
    finally:
        found = check.put(
            name,
            seconds=round(time.monotonic() - started, 2),
            epoch_s=[round(epoch, 2), round(time.time(), 2)],
        )
        check.say(f"== {name}: {found['state']} {found['why']} ({found['seconds']} s)")
        put_power(check)


def build(check: Check) -> bool:
    """Build the package in place; whether that worked."""
    status: int | None = 1
    with part(check, "build", 180.0) as limit_s:
        until = time.monotonic() + limit_s
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        # With the kernel that tests keep the card busy with; without it where nvcc is missing.
        wanted = ["auto"] if check.device.simulated else ["on", "auto"]
        why = ""
        for kernels in wanted:
            check.environment["ORACLE_OFFLOAD_BUILD_KERNELS"] = kernels
            status = check.call(command, until - time.monotonic())
            if status == 0:
                break
            why = f"kernels={kernels}: {ending(status, limit_s)[1]}; "
        state, said = ending(status, limit_s)
        path = ROOT / "oracle_offload" / "_build_info.json"
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        check.put("build", state=state, why=(why if state == "done" else why + said), record=record)
    return status == 0


def measure(check: Check, wanted: Part) -> None:
    """Run one file of benchmarks/ in a process of its own; its rows are kept as they come."""
    name = wanted.name
    with part(check, name, wanted.limit_s) as limit_s:
        if not limit_s:
            return
        output = check.scratch / f"{name}.json"
        seen = [b""]

        def take() -> None:
            text = output.read_bytes() if output.is_file() else b""
            if text != seen[0]:
                seen[0] = text
                check.put(name, rows=json.loads(text)["benchmarks"])

        device = "cpu" if check.device.simulated else "cuda"
        command = [sys.executable, "benchmarks/run.py", name, "--device", device]
        command += ["--output", str(output), "--folder", str(check.benchmarks)]
        # Less than the limit: a benchmark that knows its time leaves out rows by name.
        command += ["--limit-s", f"{0.9 * limit_s:.1f}", "--artifacts", str(check.results)]
        status = check.call(command, limit_s, watch=take)
        take()
        state, why = ending(status, limit_s)
        rows = check.report[name].get("rows", [])
        if state == "failed":
            why = (
                "; ".join(f"{row['name']}: {row['error']}" for row in rows if "error" in row) or why
            )
        elif state == "done" and rows and all("skipped" in row for row in rows):
            state, why = "skipped", str(rows[0]["skipped"])
        check.put(name, state=state, why=why)


def conformance(check: Check, wanted: Part) -> None:
    """Run the conformance program on the driver under test; its lines go to conformance.txt."""
    with part(check, wanted.name, wanted.limit_s) as limit_s:
        if not limit_s:
            return
        sys.path.insert(0, str(ROOT / "tools"))
        import c_build
        import c_programs

        variant = c_build.checked(warnings="shown")
        try:
            built = c_programs.build(variant, ["conformance"])
        except (c_build.BuildError, SystemExit) as error:
            check.put("conformance", state="failed", why=f"does not build: {error}")
            return
        # Empty: the system's driver, whatever the environment of the check says.
        driver = str(built.simulator) if check.device.simulated else ""
        output = check.results / "conformance.txt"
        status = check.call(
            [str(built.programs["conformance"])],
            limit_s,
            output,
            environment={"ORACLE_OFFLOAD_DRIVER": driver},
        )
        state, why = ending(status, limit_s)
        lines = output.read_text(errors="replace").splitlines()
        check.put("conformance", state=state, why=why, rows=lines)


def test_file(check: Check, wanted: Part) -> None:
    """Run the GPU tests of a part (files, or a folder) in a process of its own, and count them."""
    with part(check, wanted.name, wanted.limit_s) as limit_s:
        if not limit_s:
            return
        report = check.scratch / (wanted.name.replace("/", "-") + ".xml")
        command = [sys.executable, "-m", "pytest", *wanted.path.split(), "-m", "gpu", "-v"]
        command += ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
        command += [f"--junitxml={report}", "--durations=5"]
        output = check.scratch / (wanted.name.replace("/", "-") + ".txt")
        status = check.call(
            command,
            limit_s,
            output,
            environment={
                # The machine's own plugins are of other versions; the suite needs none.
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                # Read when CUDA starts; strict determinism refuses to work without it.
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            },
        )
        state, why = ending(0 if status == 5 else status, limit_s)  # 5: no test is marked gpu
        if not report.is_file() and state in ("done", "failed"):
            state, why = "failed", "pytest wrote no report: is it installed, or among the wheels?"
        counts = count_cases(report)
        if not report.is_file():
            counts |= count_lines(output.read_text(errors="replace"))
        check.put(wanted.name, **counts, state=state, why=why)
    with check.lock:
        merge_reports(check)


def count_cases(report: Path) -> dict[str, Any]:
    """Return the counts of a junit file, the failed tests by name, and why tests were skipped."""
    found: dict[str, Any] = {"passed_count": 0, "failed_count": 0, "skipped_count": 0}
    found |= {"failed": [], "skipped": {}}
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return found
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        if skipped is not None:
            found["skipped_count"] += 1
            why = skipped.get("message", "")
            found["skipped"][why] = found["skipped"].get(why, 0) + 1
        elif bad is not None:
            found["failed_count"] += 1
            found["failed"].append({"name": name, "message": bad.get("message", "")[:300]})
        else:
            found["passed_count"] += 1
    return found


def count_lines(text: str) -> dict[str, Any]:
    """Return the counts of what ``pytest -v`` printed before it was killed, and where it was."""
    ended = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", text, re.MULTILINE)
    begun = re.findall(r"^(tests/\S+::\S.*?)(?: [A-Z]+\b.*)?$", text, re.MULTILINE)
    words = [word for _, word in ended]
    return {
        "passed_count": words.count("PASSED"),
        "failed_count": words.count("FAILED") + words.count("ERROR"),
        "skipped_count": words.count("SKIPPED"),
        "failed": [{"name": name, "message": ""} for name, word in ended if word in BAD_WORDS],
        "last": begun[-1].strip() if begun else "",
    }


BAD_WORDS = ("FAILED", "ERROR")


def merge_reports(check: Check) -> None:
    """Write junit.xml: the suites of all files, those of a resumed run that were kept too."""
    merged = ElementTree.Element("testsuites")
    for path in sorted(check.scratch.glob("tests-*.xml")):
        with contextlib.suppress(ElementTree.ParseError):
            for suite in ElementTree.parse(path).iter("testsuite"):
                suite.set("name", path.stem)
                merged.append(suite)
    partial = check.results / "junit.xml.partial"
    ElementTree.ElementTree(merged).write(partial, encoding="utf-8", xml_declaration=True)
    partial.replace(check.results / "junit.xml")


def summarise_tests(check: Check) -> None:
    """Put the counts of all files of tests, and the state of the tests as a whole."""
    rows = check.report["tests"]["rows"]
    total = {
        key: sum(row.get(key, 0) for row in rows)
        for key in ("passed_count", "failed_count", "skipped_count", "seconds")
    }
    states = [row["state"] for row in rows]
    order = ("running", "crashed", "timeout", "failed", "not reached", "skipped", "done")
    state = next((state for state in order if state in states), "not reached")
    bad = [f"{row['name']}: {row['state']}" for row in rows if row["state"] != "done"]
    check.put("tests", **total, state=state, why="; ".join(bad))


# ---- the run ----


def empty_report(arguments: argparse.Namespace, device: Device) -> dict[str, Any]:
    """Return the report of a run that has done nothing yet."""
    return {
        "schema": SCHEMA,
        "command": shlex.join(["python", "tools/gpu_check.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": arguments.commit or "unknown",
        "device": device.name,
        "simulated": device.simulated,
        "driver": device.driver,
        "torch": "",
        "cuda": "",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpus_count": os.cpu_count(),
        "budget_s": arguments.budget_s,
        "elapsed_s": 0.0,
        **{
            name: {"state": "not reached", "why": "", "seconds": 0.0, "rows": []}
            for name in OBJECTS
        },
    }


def resume(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """Return `fresh` with the parts that have ended in the results at `path`.

    Raises
    ------
    CannotRunError
        The file is of another commit, device or driver, or is no result.
    """
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CannotRunError(f"cannot resume {path}: {error}") from error
    if not isinstance(old, dict):
        raise CannotRunError(f"cannot resume {path}: it holds a {type(old).__name__}")
    for key in ("schema", "commit", "device", "driver", "python", "simulated"):
        if old.get(key) != fresh[key]:
            raise CannotRunError(
                f"cannot resume {path}: its {key} is {old.get(key)!r}, this run's is "
                f"{fresh[key]!r}; "
                "figures of both would mix. Run without --resume (RESUME=)."
            )
    for name in OBJECTS:
        if name == "tests":
            rows = [row for row in old[name]["rows"] if row.get("state") in ENDED]
            fresh[name] = {**fresh[name], "rows": rows}
        elif old.get(name, {}).get("state") in ENDED:
            fresh[name] = old[name]
    fresh["resumed"] = [
        *old.get("resumed", []),
        {"date": old["date"], "elapsed_s": old["elapsed_s"]},
    ]
    return fresh


def run(arguments: argparse.Namespace, check: Check) -> None:
    """Run the parts by the clock."""
    # Of the three one needs processors, one the disk, and one the host's memory.
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(measure, check, wanted) for wanted in PREPARATION]
        built = build(check)
        for job in jobs:
            job.result()
    if not built:
        return
    use_ram(check)
    with initialised_device(check):
        for together in rounds(check):
            side_by_side(check, together)
            if not arguments.keep_going and first_tests_failed(check):
                check.say(f"{FIRST_TESTS.name} failed: nothing follows (--keep-going goes on)")
                for name in OBJECTS:
                    if check.report[name]["state"] == "not reached":
                        check.put(name, why=f"{FIRST_TESTS.name} failed")
                return
    summarise_tests(check)


def first_tests_failed(check: Check) -> bool:
    """Whether the first tests ran and did not end well."""
    rows = {row["name"]: row for row in check.report["tests"]["rows"]}
    return rows.get(FIRST_TESTS.name, {}).get("state") in ("failed", "crashed", "timeout")


def rounds(check: Check) -> list[list[Part]]:
    """Return the parts of the clock that run together, in order.

    What is measured has a card for itself. Simulated times do not depend on what else runs, and
    without a card tests are only found, skipped and counted: all but the first in one process.
    """
    if check.device.simulated:
        rest = list(CLOCK[1:])
        if not any("/" in name for name in check.only):  # no part of the tests is asked for
            tests = [part for part in rest if part.path]
            paths = " ".join(part.path for part in tests)
            joined = Part(tests[0].name, sum(part.limit_s for part in tests), paths)
            rest = [joined, *(part for part in rest if not part.path)]
        return [[FIRST_TESTS], rest]
    grouped = itertools.groupby(CLOCK, key=lambda part: part.beside or part.name)
    return [list(together) for _, together in grouped]


def side_by_side(check: Check, parts: Sequence[Part]) -> None:
    """Run parts that may share the card, as many as there are processors for."""
    workers = 2 if check.device.simulated else max(1, min(8, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(workers) as pool:
        for job in [pool.submit(run_part, check, wanted) for wanted in parts]:
            job.result()


def run_part(check: Check, wanted: Part) -> None:
    """Run one part, whatever kind it is."""
    if wanted.path:
        test_file(check, wanted)
    elif wanted.name == "conformance":
        conformance(check, wanted)
    else:
        measure(check, wanted)


def use_ram(check: Check) -> None:
    """Let the parts know how much host memory there is, where the machine's own word is wrong."""
    found = [row["host_gib"] for row in check.report["ram"].get("rows", []) if "host_gib" in row]
    if found:
        check.environment.setdefault("GPU_CHECK_HOST_GIB", str(found[-1]))


def finish(check: Check, why: str) -> int:
    """End what runs, write the results, print how it went; the exit code."""
    for process in list(check.running):
        stop(process)
    if check.power is not None:
        check.power.close()
        put_power(check)
    if check.report["tests"]["rows"]:
        summarise_tests(check)
    check.report["ended"] = why
    check.write()
    bad = []
    for name in OBJECTS:
        entry = check.report[name]
        check.say(f"{name:12} {entry['state']:12} {entry['seconds']:7.1f} s  {entry['why']}")
        if entry["state"] not in ("done", "skipped"):
            bad.append(name)
    tests = check.report["tests"]
    check.say(
        f"{tests.get('passed_count', 0)} tests passed, {tests.get('failed_count', 0)} failed, "
        f"{tests.get('skipped_count', 0)} skipped; {check.report['elapsed_s']:.0f} s; "
        f"results in {check.results}"
    )
    return EXIT_FAILED if bad else EXIT_OK


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheels", type=Path, default=Path(".whl"))
    parser.add_argument("--results", type=Path, default=Path("out/gpu-check"))
    parser.add_argument("--commit", default="", help="recorded in the results")
    parser.add_argument("--resume", default="", help="results.json of a run that was cut short")
    parser.add_argument("--only", default="", help="parts to run, with commas: link,step,tests")
    parser.add_argument(
        "--keep-going", action="store_true", help=f"also where {FIRST_TESTS.name} fails"
    )
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds in all")
    parser.add_argument("--part-limit-s", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--patience", type=float, default=1.0, help=argparse.SUPPRESS)
    parser.add_argument(
        "--benchmarks", type=Path, default=ROOT / "benchmarks", help=argparse.SUPPRESS
    )
    arguments = parser.parse_args(argv)
    arguments.only = tuple(filter(None, arguments.only.split(",")))
    known = dict.fromkeys((*OBJECTS, *(part.name for part in CLOCK)))
    unknown = set(arguments.only) - set(known)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Check the machine, then run."""
    started = time.monotonic()
    arguments = parse(argv)
    if sys.version_info < (3, 11):  # noqa: UP036 - the machine's own Python may be any
        print(f"gpu-check: Python {platform.python_version()}; 3.11 is needed", file=sys.stderr)
        return EXIT_CANNOT_RUN
    results: Path = arguments.results.resolve()
    try:
        device = find_device()
        report = empty_report(arguments, device)
        reports = None
        if arguments.resume:
            report = resume(Path(arguments.resume), report)
            beside = Path(arguments.resume).with_name("junit.xml")
            reports = beside.read_bytes() if beside.is_file() else None
        results.mkdir(parents=True, exist_ok=True)
        kept = bool(arguments.resume) and Path(arguments.resume).resolve().parent == results
        for name in FILES:  # of an earlier run: never mixed with this one's
            if not (kept and name in KEPT):
                (results / name).unlink(missing_ok=True)
    except CannotRunError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    environment = {
        **os.environ,
        "PYTHONPATH": search_path(ROOT),
        "GPU_CHECK_RESULTS": str(results / "results.json"),  # for what is predicted from others
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if device.simulated:  # its models are so small that a second thread only costs
        environment["OMP_NUM_THREADS"] = "1"
    with (
        tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as scratch,
        (results / "log.txt").open("a" if kept else "w", encoding="utf-8") as log,
    ):
        check = Check(
            device, results, Path(scratch), log, started + arguments.budget_s, environment, report
        )
        check.started = started
        check.only, check.part_limit_s = arguments.only, arguments.part_limit_s
        check.patience = arguments.patience
        check.benchmarks = arguments.benchmarks.resolve()
        check.write()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, check.end)
        try:
            # A cold disk takes its time for both.
            with ThreadPoolExecutor(1) as pool:
                wheels = pool.submit(install_wheels, check, arguments.wheels)
                torch = find_torch(device, max(1.0, min(120.0, check.left_s())))
                wheels.result()
            check.report |= {"torch": torch["torch"], "cuda": torch["cuda"]}
            check.write()
            check.say(f"{device.name}, driver {device.driver}, torch {torch['torch']}")
            if reports is not None:
                keep_reports(check, reports)
            check.power = Power(device.pci_id)
            run(arguments, check)
        except CannotRunError as error:
            check.report["ended"] = str(error)
            check.write()
            print(f"gpu-check: {error}", file=sys.stderr)
            return EXIT_CANNOT_RUN
        return finish(check, "by a signal" if check.ended else "all parts had their turn")


def keep_reports(check: Check, text: bytes) -> None:
    """Put the suites of a resumed run where those of this one go."""
    names = {row["name"].replace("/", "-") for row in check.report["tests"]["rows"]}
    with contextlib.suppress(ElementTree.ParseError):
        for suite in ElementTree.fromstring(text).iter("testsuite"):
            if suite.get("name") in names:
                path = check.scratch / f"{suite.get('name')}.xml"
                ElementTree.ElementTree(suite).write(path, encoding="utf-8")


FILES = (
    *("results.json", "conformance.txt", "junit.xml", "log.txt"),
    *("step-trace.json.gz", "step-timeline.svg"),
)
KEPT = FILES  # a resumed run in the same folder goes on with its files


if __name__ == "__main__":
    sys.exit(main())
