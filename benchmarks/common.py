"""What the benchmarks of the GPU check share: time, places, memory that is free, C programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

GIB = 2**30

_until = float("inf")
_artifacts: Path | None = None


def begin(limit_s: float, artifacts: Path | None) -> None:
    """Say how long the benchmarks may take from now, and where their pictures go."""
    global _until, _artifacts
    _until, _artifacts = time.monotonic() + limit_s, artifacts


def left_s() -> float:
    """Seconds that are left to this process."""
    return _until - time.monotonic()


def artifact(name: str) -> Path | None:
    """Return where to write a file for people, None when none was asked for."""
    return _artifacts / name if _artifacts else None


Row = dict[str, Any]


def attempt(
    name: str, function: Callable[..., Row | Iterable[Row]], *arguments: Any
) -> Iterator[Row]:
    """Yield the rows of a function; what it raises becomes a row, and the rows after it still come.

    Parameters
    ----------
    name : str
        Of the row that says ``error``, and of one that is returned without a name.
    function : callable
        Returns a row, or yields rows.
    """
    try:
        found = function(*arguments)
        yield from [{"name": name, **found}] if isinstance(found, dict) else found
    except Exception as error:  # the next row may be well
        traceback.print_exc()
        yield {"name": name, "error": f"{type(error).__name__}: {error}"[:600]}


def measured_rates() -> dict[str, Any]:
    """Return what the check has measured of this card, for
    `oracle_offload.engine.simulator.Device`.

    ``link_gbps`` is the fastest copy to the device of 16 MiB or more from registered memory;
    ``tflops``, ``memory_gbps`` and ``launch_s`` are the rows of `bench_rates`. Of the results at
    ``GPU_CHECK_RESULTS`` no other row is read. Empty where one of the four is missing.
    """
    path = os.environ.get("GPU_CHECK_RESULTS", "")
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    link = [
        row["rate_gbps"]
        for row in report.get("link", {}).get("rows", [])
        if re.match(r"registered_\w+_h2d_", row.get("name", "")) and row["copy_bytes"] >= 2**24
    ]
    rates = {"link_gbps": max(link)} if link else {}
    for row in report.get("rates", {}).get("rows", []):
        rates |= {key: row[key] for key in ("tflops", "memory_gbps", "launch_s") if key in row}
    return rates if len(rates) == 4 else {}


def is_simulated(device: str) -> bool:
    """Whether `device` is the simulated one."""
    return device == "cpu"


def is_small(device: str) -> bool:
    """Whether sizes are small: the host's processors compute, of the simulated device or of a card.

    Of a card where ``GPU_CHECK_SIZES`` is "small": PyTorch's CUDA build runs without a GPU there.
    """
    return is_simulated(device) or os.environ.get("GPU_CHECK_SIZES") == "small"


def driver_path(device: str) -> str | None:
    """Return the driver library of `device`, None for the system's."""
    if is_simulated(device):
        from oracle_offload.engine import simulator

        return str(simulator.library_path())
    return os.environ.get("ORACLE_OFFLOAD_DRIVER") or None


def host_available_bytes() -> int:
    """Return the host memory that can be had: MemAvailable, less where a control group has less.

    ``GPU_CHECK_HOST_GIB`` takes its place where MemAvailable is wrong: on machines that are given
    their memory as they use it.
    """
    said = os.environ.get("GPU_CHECK_HOST_GIB")
    if said:
        return int(float(said) * GIB)
    free = 0
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:  # not Linux
        return 8 * GIB
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            most, now = Path(limit).read_text().strip(), int(Path(used).read_text())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            free = min(free, int(most) - now)
    return max(0, free)


def device_free_bytes(device: str) -> int:
    """Return the device memory that torch can still get (of the simulated one: host memory)."""
    if is_simulated(device):
        return host_available_bytes()
    import torch

    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def does_not_fit(device: str, host_bytes: float, device_bytes: float) -> str:
    """Return why so many bytes cannot be had here, or an empty string."""
    if is_simulated(device):  # both are host memory
        host_bytes, device_bytes = host_bytes + device_bytes, 0
    for what, needed, free in (
        ("host", host_bytes, host_available_bytes()),
        ("device", device_bytes, device_free_bytes(device)),
    ):
        if needed > 0.9 * free:
            return (
                f"needs {needed / GIB:.1f} GiB of {what} memory; {free / GIB:.1f} GiB are free "
                "(a tenth of it is left alone)"
            )
    return ""


def synchronize(device: str) -> None:
    """Wait for all work of the device."""
    if is_simulated(device):
        from oracle_offload.engine import simulator

        simulator.finish()
    else:
        import torch

        torch.cuda.synchronize()


def c_rows(device: str, source: str, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Build a C program of this folder and yield the JSON lines it prints, as it prints them."""
    # Not for the whole process: `kernels` there would hide the package of that name.
    sys.path.insert(0, str(ROOT / "tools"))
    import c_build
    import c_programs

    built = c_programs.build(c_build.checked(warnings="shown"), [f"benchmarks/{source}"])
    # Empty: the system's driver.
    driver = str(built.simulator) if is_simulated(device) else ""
    environment = {**os.environ, "ORACLE_OFFLOAD_DRIVER": driver}
    process = subprocess.Popen(
        [str(built.programs[Path(source).stem]), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode != 0:
        raise RuntimeError(f"{source} ended with {process.returncode}; see the log")
