"""What page-locking costs: filling, locking, unlocking, a fork meanwhile, and the exit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import common

SIZES = (1, 4, 24)  # GiB on a card
ATTACHED_GIB = 8  # of a model that attach takes over
SMALL_SHARE = 512  # how much less is locked where sizes are small
PIECE_BYTES = common.GIB  # as masters are made


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Lock as attach does: pieces of 1 GiB, filled with the engine's threads."""
    for where in ("device", "host"):
        yield from common.attempt(f"attach from the {where}", attached, device, where)
    largest = 2 * 2**20  # for the exit of a process that has locked next to nothing
    for gib in SIZES:
        nbytes = gib * common.GIB // (SMALL_SHARE if common.is_small(device) else 1)
        name = f"{gib} GiB" + (f" / {SMALL_SHARE}" if common.is_small(device) else "")
        # Twice: the model whose exit is timed is there before its masters are.
        why = common.does_not_fit(device, 2.1 * nbytes, 0)
        if not why and common.left_s() < gib:
            why = f"{common.left_s():.0f} s are left"
        if why:
            yield {"name": name, "skipped": why, "size_bytes": nbytes}
            continue
        yield from common.attempt(name, locked, device, nbytes)
        if gib == SIZES[0]:
            yield from common.attempt("process exit", exit_s, device, largest)
        largest = nbytes
    yield from common.attempt("process exit", exit_s, device, largest)


def attached(device: str, where: str) -> Iterator[dict[str, Any]]:
    """Yield the seconds in which attach takes a model over that is on the device or the host."""
    import torch

    import oracle_offload

    nbytes = ATTACHED_GIB * common.GIB // (SMALL_SHARE if common.is_small(device) else 1)
    name = f"attach, {nbytes / common.GIB:.3g} GiB on the {where}"
    why = common.does_not_fit(device, 2.1 * nbytes, 1.1 * nbytes)
    if why:
        yield {"name": name, "skipped": why, "size_bytes": nbytes}
        return
    first = model_of(2**21, "cpu")
    oracle_offload.attach(first, device).detach(first)  # what is imported and opened once
    model = model_of(nbytes, device if where == "device" else "cpu")
    common.synchronize(device)
    begin = time.perf_counter()
    manager = oracle_offload.attach(model, device)
    taken = time.perf_counter()
    locked_bytes = manager.state.engine.stats()["locked_bytes"]
    manager.detach(model)
    row = {"attach_s": taken - begin, "detach_s": time.perf_counter() - taken}
    row["attach_per_gib_s"] = row["attach_s"] * common.GIB / nbytes
    yield {"name": name, "size_bytes": nbytes, "locked_bytes": locked_bytes, **row}
    del model, manager
    if not common.is_simulated(device):
        torch.cuda.empty_cache()


def model_of(nbytes: int, device: str) -> Any:
    """Return frozen layers of so many bytes, without values of their own."""
    import torch

    width = 4096 if nbytes >= common.GIB else 1024
    layers = max(1, nbytes // (2 * width * width))
    with torch.device("meta"):
        model = torch.nn.Sequential(
            *(
                torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
                for _ in range(layers)
            )
        )
    return model.to_empty(device=device).requires_grad_(False)


def engine_of(device: str) -> Any:
    """Return an engine of the device, its context made as in a training program."""
    from oracle_offload import _core

    if not common.is_simulated(device):
        import torch

        torch.zeros(1, device=device)
    return _core.Engine(common.driver_path(device), 0)


def lock_all(engine: Any, nbytes: int) -> tuple[list[Any], dict[str, Any]]:
    """Fill and lock; return the pieces and the seconds."""
    from oracle_offload import _core

    source = _core.HostBuffer(min(nbytes, PIECE_BYTES))
    pieces: list[Any] = []
    times = {"map_s": 0.0, "fill_s": 0.0, "register_s": 0.0}
    refused = ""
    left = nbytes
    while left > 0:
        begin = time.perf_counter()
        piece = _core.HostBuffer(min(left, PIECE_BYTES))
        mapped = time.perf_counter()
        piece.fill(0, source.address, piece.nbytes)
        filled = time.perf_counter()
        refused = refused or engine.lock(piece) or ""
        end = time.perf_counter()
        times["map_s"] += mapped - begin
        times["fill_s"] += filled - mapped
        times["register_s"] += end - filled
        pieces.append(piece)
        left -= piece.nbytes
    row: dict[str, Any] = dict(times)
    row["locked_bytes"] = sum(piece.nbytes for piece in pieces if piece.locked)
    if refused:
        row["refused"] = refused
    return pieces, row


def locked(device: str, nbytes: int) -> dict[str, Any]:
    """Return the seconds of each, and of a fork while all is locked."""
    engine = engine_of(device)
    pieces, row = lock_all(engine, nbytes)
    if hasattr(os, "fork"):
        begin = time.perf_counter()
        child = os.fork()
        if child == 0:
            os._exit(0)
        row["fork_s"] = time.perf_counter() - begin
        os.waitpid(child, 0)
    begin = time.perf_counter()
    for piece in pieces:
        engine.unlock(piece)
    row["unregister_s"] = time.perf_counter() - begin
    begin = time.perf_counter()
    del pieces, piece
    row["unmap_s"] = time.perf_counter() - begin
    engine.close()
    for what in ("fill", "register", "unregister"):
        row[f"{what}_per_gib_s"] = row[f"{what}_s"] * common.GIB / nbytes
    return {"size_bytes": nbytes, **row}


def exit_s(device: str, nbytes: int) -> dict[str, Any]:
    """Return how long a process takes to end while so much is locked, finalizers included."""
    command = [sys.executable, __file__, device, str(nbytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ended = time.time()
    if done.returncode != 0:
        return {"error": (done.stderr.strip() or f"ended with {done.returncode}")[-300:]}
    return {"size_bytes": nbytes, "exit_s": ended - float(done.stdout.split()[-1])}


def main() -> None:
    """Attach a model of so many bytes, and end without detaching."""
    import oracle_offload

    device, nbytes = sys.argv[1], int(sys.argv[2])
    model = model_of(nbytes, "cpu")
    manager = oracle_offload.attach(model, device)
    locked_bytes = manager.state.engine.stats()["locked_bytes"]
    print(locked_bytes, time.time(), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(common.ROOT))
    main()
