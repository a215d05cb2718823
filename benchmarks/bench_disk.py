"""An attach from files against a plain read of the same files by as many threads.

The plain read opens the same files, reads blocks of the same size into memory of its own that was
not touched before, and does nothing else: no header is looked at, nothing is locked. Both find the
files in the page cache or not, as the system likes: they are read once before, rounds alternate,
and the figure is the median of their ratios. The goal is 0.9.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import common
from common import GIB

LAYERS, WIDTH, SHARDS = 16, 4096, 4  # 1 GiB of float32
MODEL_BYTES = LAYERS * 4 * WIDTH * WIDTH
ROUNDS = 5


def build() -> Any:
    """Return the model; without values where it is made so."""
    import torch

    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers).requires_grad_(False)


def read_plainly(paths: list[Path]) -> float:
    """Return the seconds that threads need for all bytes of the files."""
    from oracle_offload.disk.reading import BLOCK_BYTES, THREADS

    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))
        jobs = []
        for path in paths:
            file = stack.enter_context(open(path, "rb", buffering=0))
            target = memoryview(mmap.mmap(-1, path.stat().st_size))
            for at in range(0, len(target), BLOCK_BYTES):
                jobs.append(pool.submit(_read, file.fileno(), target[at : at + BLOCK_BYTES], at))
        for job in jobs:
            job.result()
    return time.perf_counter() - start


def _read(file: int, view: memoryview, at: int) -> None:
    while view:
        count = os.preadv(file, [view], at)
        view, at = view[count:], at + count


def attach(folder: Path) -> float:
    """Return the seconds of an attach from the folder."""
    import oracle_offload

    with oracle_offload.empty_weights():
        model = build()
    start = time.perf_counter()
    manager = oracle_offload.attach(model, "cpu", offload_percent=1.0, weights=folder)
    seconds = time.perf_counter() - start
    manager.detach()
    return seconds


@contextlib.contextmanager
def checkpoint() -> Iterator[Path]:
    """Write the shards, to be deleted at the end."""
    import oracle_offload

    folder = Path(tempfile.mkdtemp(prefix="oracle_offload-"))
    try:
        oracle_offload.save_weights(build(), folder, shard_bytes=MODEL_BYTES // SHARDS)
        yield folder
    finally:
        shutil.rmtree(folder)


def benchmarks(device: str) -> list[dict[str, Any]]:
    """Measure on the host alone: `device` makes no difference to this file."""
    from bench_host_cost import null_driver

    name = "attach_from_disk"
    if not hasattr(os, "preadv"):
        return [{"name": name, "skipped": "the plain read is written for preadv"}]
    needed, free = 4 * MODEL_BYTES, common.host_available_bytes()
    if free < needed:
        why = f"needs {needed / GIB:.0f} GiB of free memory, there are {free / GIB:.1f}"
        return [{"name": name, "skipped": why}]
    with checkpoint() as folder, null_driver():
        paths = sorted(folder.glob("*.safetensors"))
        rounds = [(attach(folder), read_plainly(paths)) for _ in range(1 + ROUNDS)][1:]
    ratios = [plain_s / attach_s for attach_s, plain_s in rounds]
    return [
        {
            "name": name,
            "attach_s": median(attach_s for attach_s, _ in rounds),
            "plain_read_s": median(plain_s for _, plain_s in rounds),
            "attach_gbps": median(MODEL_BYTES / attach_s / 1e9 for attach_s, _ in rounds),
            "model_bytes": MODEL_BYTES,
            "of_plain_read_ratio": median(ratios),
            **{f"round_{number}_ratio": ratio for number, ratio in enumerate(ratios, 1)},
            "processors_count": os.cpu_count(),
        }
    ]
