"""What the machine is: the card, its link, processors, memory, limits, versions."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

TEXT_CHARACTERS = 12_000  # of each program's output


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Ask programs, files and libraries; what is not there is named."""
    yield from (
        program(*command)
        for command in (
            ("nvidia-smi", "-q"),
            ("nvidia-smi", "topo", "-m"),
            ("lscpu",),
            ("nvcc", "--version"),
            ("ulimit -l",),
        )
    )
    for path in (
        "/proc/meminfo",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/kernel/mm/transparent_hugepage/defrag",
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/cpu.max",
        "/proc/version",
        "/proc/driver/nvidia/version",
    ):
        yield file(path)
    yield from common.attempt("host", host)
    yield from common.attempt("versions", versions, device)
    yield from common.attempt("driver", driver, device)


def program(*command: str) -> dict[str, Any]:
    """Return what a program says, its ``key : value`` lines parsed."""
    name = " ".join(command)
    if command[0] == "ulimit -l":
        words = ["sh", "-c", "ulimit -l"]
    else:
        found = shutil.which(command[0])
        if found is None:
            return {"name": name, "skipped": f"{command[0]} is not on PATH"}
        words = [found, *command[1:]]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"name": name, "skipped": str(error)}
    fields: dict[str, str] = {}
    section: list[tuple[int, str]] = []
    for line in done.stdout.splitlines():
        indent = len(line) - len(line.lstrip())
        section = [(depth, title) for depth, title in section if depth < indent]
        key, colon, value = line.strip().partition(":")
        if colon and value.strip():
            path = " / ".join([title for _, title in section] + [key.strip()])
            if len(fields) < 150:
                fields[path] = value.strip()
        elif line.strip():
            section.append((indent, line.strip()))
    return {
        "name": name,
        "status_count": done.returncode,
        "fields": fields,
        "text": (done.stdout + done.stderr)[-TEXT_CHARACTERS:],
    }


def file(path: str) -> dict[str, Any]:
    """Return what a small file holds."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError as error:
        return {"name": path, "skipped": str(error)}
    return {"name": path, "text_count": len(text), "text": text[:TEXT_CHARACTERS]}


def host() -> dict[str, Any]:
    """Return processors, memory that can be had, NUMA nodes and what may be locked."""
    row: dict[str, Any] = {
        "name": "host",
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpus_count": os.cpu_count() or 0,
        "usable_cpus_count": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else 0,
        "available_bytes": common.host_available_bytes(),
        "wsl": Path("/dev/dxg").exists(),
        "numa_nodes": {
            node.name: (node / "cpulist").read_text().strip()
            for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
        },
    }
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        row["memlock"] = [soft, hard]
    except ImportError:  # Windows
        pass
    return row


def versions(device: str) -> dict[str, Any]:
    """Return versions and settings of torch and its libraries, and of those the tests use."""
    import importlib.metadata

    import torch

    row: dict[str, Any] = {
        "name": "torch",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "config": torch.__config__.show(),
        "threads_count": torch.get_num_threads(),
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "settings": {
            key: value
            for key, value in os.environ.items()
            if re.match(r"CUDA|CUBLAS|CUDNN|NCCL|PYTORCH|TORCH|OMP_|MKL_|ORACLE_OFFLOAD", key)
        },
    }
    names = ["diffusers", "peft", "transformers", "accelerate", "numpy", "pytest", "hypothesis"]
    names += ["nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cuda-runtime", "triton"]
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    row["packages"] = found
    if not common.is_simulated(device):
        card = torch.cuda.get_device_properties(0)
        row |= {
            "card": str(card),
            "total_bytes": card.total_memory,
            "capability": list(torch.cuda.get_device_capability(0)),
            "architectures": torch.cuda.get_arch_list(),
            "allocator": torch.cuda.get_allocator_backend(),
            "bf16": torch.cuda.is_bf16_supported(),
        }
    return row


# CUdevice_attribute of cuda.h
ATTRIBUTES = {
    "multiprocessors_count": 16,
    "integrated_count": 18,
    "concurrent_kernels_count": 31,
    "copy_engines_count": 40,
    "unified_addressing_count": 41,
    "compute_major_count": 75,
    "compute_minor_count": 76,
    "stream_priorities_count": 78,
    "host_register_supported_count": 99,
    "pageable_memory_access_count": 88,
}


def driver(device: str) -> dict[str, Any]:
    """Return what the driver says of the device, by ctypes: nothing needs to be built yet."""
    import ctypes

    if common.is_simulated(device):
        path = str(common.ROOT / "oracle_offload" / "libsimcuda.so")
    else:
        path = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(path)
    except OSError as error:
        return {"name": "driver", "skipped": str(error)}
    version, value, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    text = ctypes.create_string_buffer(256)
    row: dict[str, Any] = {"name": "driver", "init_count": cuda.cuInit(0)}
    cuda.cuDriverGetVersion(ctypes.byref(version))
    row["version_count"] = version.value
    if cuda.cuDeviceGet(ctypes.byref(handle), 0) == 0:
        cuda.cuDeviceGetName(text, len(text), handle)
        row["device"] = text.value.decode()
        cuda.cuDeviceGetPCIBusId(text, len(text), handle)
        row["pci_id"] = text.value.decode()
        node = Path(f"/sys/bus/pci/devices/{row['pci_id'].lower()}/numa_node")
        row["numa_node"] = int(node.read_text()) if node.exists() else None
        for key, number in ATTRIBUTES.items():
            if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle) == 0:
                row[key] = value.value
    return row
