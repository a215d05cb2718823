"""The kernels that decode coded weights: every kind and pattern to the last bit, and GB/s."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import common

CHUNK = 4 << 20  # weights, as masters are coded
KINDS = ("bf16", "fp8", "int8")
PATTERNS = ("gaussian", "student 3", "half zeros", "all bits", "bursts", "one weight")


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Send each through an engine as training does; the timeline has the kernels' seconds."""
    import torch

    from oracle_offload import _core
    from oracle_offload.errors import OffloadError

    count = CHUNK // 64 + 77 if common.is_simulated(device) else 4 * CHUNK + 77
    if not common.is_simulated(device):
        torch.zeros(1, device=device)  # its context
    engine = _core.Engine(common.driver_path(device), 0)
    simulated = common.is_simulated(device)
    stream = engine.compute_stream if simulated else torch.cuda.current_stream().cuda_stream
    arena = torch.empty(2 * count + 512, dtype=torch.uint8, device=device)
    staging = torch.empty(_core.STAGING_BYTES + 512, dtype=torch.uint8, device=device)
    lease = engine.add_lease()
    engine.add_segment(lease, arena.data_ptr(), arena.numel(), stream)
    try:
        engine.add_staging(lease, staging.data_ptr(), staging.numel(), stream)
    except OffloadError as error:
        yield {"name": "decode", "skipped": str(error)}
        engine.remove_lease(lease)
        return
    generator = torch.Generator().manual_seed(7)
    for kind, name in enumerate(KINDS, 1):
        for pattern in PATTERNS:
            weights = draw(name, pattern, count, generator)
            what = f"{name}, {pattern}"
            yield from common.attempt(what, decode, engine, arena, kind, weights, stream)
    engine.remove_lease(lease)
    engine.close()


def draw(kind: str, pattern: str, count: int, generator: Any) -> Any:
    """Return `count` weights as their bytes."""
    import torch

    nbytes = 2 if kind == "bf16" else 1
    if pattern == "all bits":
        return torch.randint(0, 256, (nbytes * count,), dtype=torch.uint8, generator=generator)
    drawn = torch.randn(count, generator=generator) * 0.02
    if pattern == "student 3":
        chi = sum(torch.randn(count, generator=generator) ** 2 for _ in range(3))
        drawn /= torch.sqrt(torch.as_tensor(chi) / 3)
    elif pattern == "half zeros":
        drawn *= torch.rand(count, generator=generator) < 0.5
    elif pattern == "one weight":
        drawn[:] = 0.5
    if kind == "int8":
        weights = (drawn * 600).round().clamp(-128, 127).to(torch.int8).view(torch.uint8)
    else:
        cast = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
        weights = drawn.to(cast).view(torch.uint8)
    if pattern == "bursts":  # in a row, what no tier has
        for begin in range(0, weights.numel() - 64, 40_000):
            weights[begin : begin + 64] = torch.randint(0, 256, (64,), generator=generator).byte()
    return weights


def decode(engine: Any, arena: Any, kind: int, weights: Any, stream: int) -> dict[str, Any]:
    """Return whether the arena holds the weights after a use, and what the kernels reached."""
    import torch

    from oracle_offload import _core

    nbytes = weights.numel()
    count = nbytes // (2 if kind == _core.BF16 else 1)
    master = _core.HostBuffer(_core.coded_room(kind, count))
    coded = _core.encode(kind, master.address, master.nbytes, 0, weights.data_ptr(), count)
    engine.lock(master)
    model = engine.add_model()
    tensor = (master.address, nbytes, coded, kind)
    _, [(member, _)] = engine.add_unit(model, [[tensor]], False)
    before = engine.stats()
    engine.trace_start()
    equal = 0
    for _ in range(rounds := 2):
        ticket, address, _ = engine.acquire(member, stream, 0, _core.FORWARD, -1, 1e-6)
        begin = address - arena.data_ptr()
        equal += torch.equal(arena[begin : begin + nbytes].cpu(), weights)
        engine.release(ticket, stream)
        engine.refresh(model)
    rows = [row for row in engine.trace_stop() if row["kind"] == "decode"]
    after = engine.stats()
    engine.remove_model(model)
    engine.unlock(master)
    whole = [row["bytes"] / (row["end_s"] - row["start_s"]) / 1e9 for row in rows]
    found = {
        "weights_bytes": nbytes,
        "coded_bytes": coded,
        "h2d_bytes": after["h2d_bytes"] - before["h2d_bytes"],
        "decodes_count": after["decodes"] - before["decodes"],
        "equal_count": equal,
        "results_count": rounds,
    }
    if whole:
        found["decode_gbps"] = statistics.median(whole)
    if equal != rounds:
        found["error"] = "the device holds other weights than were coded"
    return found
