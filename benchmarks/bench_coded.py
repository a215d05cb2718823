"""The codec of whole tensors: GB/s of the host's clock by one thread and by two, best of ten.

And what an attach takes by it: the first, which encodes and writes, and those that find it done.
"""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

WEIGHTS = 32 << 20  # of bf16: 8 chunks
ROUNDS = 10
LAYERS, FEATURES, ATTACHES = 16, 4096, 3


def drawn() -> bytearray:
    """Return Gaussian weights of bf16, the same block of 64 Ki over and over."""
    import struct

    source = random.Random(1)
    block = [struct.pack("<f", source.gauss(0, 0.02))[2:] for _ in range(1 << 16)]
    return bytearray(b"".join(block) * (WEIGHTS >> 16))


def best_gbps(work: Callable[[], object]) -> float:
    """Return the weights' bytes by the seconds of the fastest round."""
    fastest = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * WEIGHTS / fastest / 1e9


def load() -> dict[str, float | int | None]:
    """Return how many processes want a processor, where the system says, and how many there are.

    A rate under a load near the number of processors is not the codec's.
    """
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"load_count": average, "processors_count": os.cpu_count()}


def works(
    nbytes: int, room: int, threads: int, weights: int, coded: int, decoded: int
) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name; the last three are addresses."""
    from oracle_offload import _core

    kind, count = _core.BF16, WEIGHTS
    return {
        "encode": lambda: _core.encode(kind, coded, room, threads, weights, count),
        "decode": lambda: _core.decode(kind, coded, nbytes, threads, decoded, count),
        "compare": lambda: _core.compare_coded(kind, coded, nbytes, threads, weights, count),
        "check": lambda: _core.check_coded(kind, coded, nbytes, threads, 0, count),
    }


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Encode, decode, compare and check as attach does."""
    from oracle_offload import _core

    weights = drawn()
    room = _core.coded_room(_core.BF16, WEIGHTS)
    coded, decoded = bytearray(room), bytearray(2 * WEIGHTS)
    at, there, back = (
        ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (weights, coded, decoded)
    )
    nbytes = _core.encode(_core.BF16, there, room, 2, at, WEIGHTS)
    others = load()
    yield {
        "name": "a hash of the weights, one thread",
        "hash_gbps": best_gbps(lambda: _core.fingerprint(at, 2 * WEIGHTS)),
        **others,
    }
    for threads in (1, 2):
        found = works(nbytes, room, threads, at, there, back)
        rates = {f"{name}_gbps": best_gbps(work) for name, work in found.items()}
        yield {"name": f"whole tensors, threads: {threads}", **rates, **others}
    assert decoded == weights
    yield from attaches()


def attaches() -> Iterator[dict[str, Any]]:
    """Attach 512 MiB without compression, with it, and with it once more: the median of three.

    Between rounds the cache is emptied. The seconds of processors are those of all threads.
    """
    import torch

    layers = [
        torch.nn.utils.skip_init(
            torch.nn.Linear, FEATURES, FEATURES, bias=False, dtype=torch.bfloat16
        )
        for _ in range(LAYERS)
    ]
    for layer in layers:
        torch.nn.init.normal_(layer.weight, 0, 0.02)
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(1 + ATTACHES):
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(os.environ, ORACLE_OFFLOAD_CACHE_DIR=folder),
        ):
            for name in ("plain", "first", "cached"):
                took = one_attach(model, None if name == "plain" else "lossless")
                if number:  # before that, memory is fresh
                    found.setdefault(name, []).append(took)
    for name, rows in found.items():
        wall_s, processors_s = (statistics.median(column) for column in zip(*rows, strict=True))
        yield {
            "name": f"attach, {name}",
            "attach_s": wall_s,
            "processors_s": processors_s,
            "attach_gbps": nbytes / wall_s / 1e9,
            "model_bytes": nbytes,
            **load(),
        }


def one_attach(model: Any, compress: str | None) -> tuple[float, float]:
    """Return the seconds of the host's clock, and of its processors, that an attach takes."""
    import oracle_offload

    began, used = time.perf_counter(), time.process_time()
    manager = oracle_offload.attach(model, "cpu", compress=compress)
    took = time.perf_counter() - began, time.process_time() - used
    assert len(manager.layers) == LAYERS
    assert all(bool(layer.coded) == (compress is not None) for layer in manager.layers)
    manager.detach()
    return took
