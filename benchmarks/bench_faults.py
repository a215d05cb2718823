"""Fault drills, each in a process of its own: what real machines do to a training."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common

LIMIT_S = 40.0


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Run each drill by its name."""
    planned: list[tuple[str, str, dict[str, str], tuple[str, ...]]]
    planned = [(name, name, {}, ()) for name in DRILLS]
    allocators = ("expandable_segments:True", "backend:cudaMallocAsync")
    for setting in () if common.is_simulated(device) else allocators:
        # The first name is read by every torch; the second one warns that it is the old one.
        settings = {"PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting}
        planned.append((setting, "attach and detach", settings, ()))
    checker = shutil.which("compute-sanitizer")
    if checker is not None:
        prefix = (checker, "--tool", "memcheck", "--error-exitcode", "9")
        planned.append(("compute-sanitizer", "one step", {}, prefix))
    # One after the other on a card, whose memory they fill; simulated ones share nothing.
    with ThreadPoolExecutor(2 if common.is_simulated(device) else 1) as pool:
        for (name, *_), row in zip(
            planned, pool.map(lambda plan: drill(device, *plan[1:]), planned), strict=True
        ):
            yield {"name": name, **row}
    if common.is_simulated(device):
        for setting in allocators:
            yield {"name": setting, "skipped": "a setting of torch's allocator for CUDA"}
    if checker is None:
        yield {"name": "compute-sanitizer", "skipped": "compute-sanitizer is not on PATH"}


def drill(
    device: str, name: str, settings: dict[str, str], prefix: tuple[str, ...]
) -> dict[str, Any]:
    """Run one drill; its row says ``error`` where it did not end well."""
    begin = time.perf_counter()
    limit_s = min(1.5 * LIMIT_S if prefix else LIMIT_S, common.left_s())
    if limit_s < 2:
        return {"skipped": "no time is left"}
    command = [*prefix, sys.executable, __file__, name, device]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **settings, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"took_s": time.perf_counter() - begin, "error": f"no end within {limit_s:.0f} s"}
    row: dict[str, Any] = {"took_s": time.perf_counter() - begin, "exit_status": done.returncode}
    print(done.stdout, done.stderr, flush=True)  # for the log
    if done.returncode != 0:
        row["error"] = " ".join((done.stderr + done.stdout).split())[-600:]
    else:
        # A checker writes around it.
        row |= json.loads([line for line in done.stdout.splitlines() if line[:1] == "{"][-1])
    return row


# ---- the drills: what follows runs in their processes ----


def model_and_twin(device: str) -> tuple[Any, Any]:
    """Return a model on the host and an equal one on the device."""
    import copy

    import torch

    width = 64 if common.is_simulated(device) else 2048
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6)))
    model.requires_grad_(False)
    return model, copy.deepcopy(model).to(device)


def same_steps(model: Any, resident: Any, device: str, steps: int = 3) -> int:
    """Step both, and return how many acquires that took; raises where they differ."""
    import torch

    engine = model._memory_manager.state.engine
    before = engine.stats()["acquires"]
    for number in range(steps):
        torch.manual_seed(number)
        x = torch.randn(16, model[0].in_features).to(device)
        results = []
        for one in (model, resident):
            inputs = x.clone().requires_grad_()
            y = one(inputs)
            y.square().mean().backward()
            results.append((y.detach(), inputs.grad))
        for found, expected in zip(*results, strict=True):
            assert torch.equal(found, expected), f"step {number} differs from the resident model"
    acquires = engine.stats()["acquires"] - before
    assert acquires, "no layer was managed"
    return int(acquires)


@contextlib.contextmanager
def full_device(device: str) -> Iterator[None]:
    """Leave the device less memory than the arena needs."""
    if common.is_simulated(device):
        from oracle_offload.engine import simulator

        with simulator.fault("cuEventRecord", 1, 2, lasting=True):
            yield
        return
    import torch

    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - 64 * 2**20, dtype=torch.uint8, device=device)
    yield
    del ballast
    torch.cuda.empty_cache()


def larger_than_free(device: str) -> dict[str, Any]:
    """An arena that does not fit is refused, and the model trains once it does."""
    import torch

    import oracle_offload

    model, resident = model_and_twin(device)
    said = ""
    with full_device(device):
        try:
            oracle_offload.attach(model, device, offload_percent=0.0)
        except torch.OutOfMemoryError as error:
            said = str(error)
    assert said, "attach took more memory than there was"
    assert model.__dict__.get("_memory_manager") is None
    manager = oracle_offload.attach(model, device, offload_percent=0.0)
    acquires = same_steps(model, resident, device)
    manager.detach(model)
    return {"acquires_count": acquires, "said": said[:300]}


def on_the_device_already(device: str) -> dict[str, Any]:
    """A model that is on the device is moved off it and gives its memory back."""
    import torch

    import oracle_offload

    model, resident = model_and_twin(device)
    model.to(device)
    row: dict[str, Any] = {}
    before = 0 if common.is_simulated(device) else torch.cuda.memory_allocated()
    if not common.is_simulated(device):
        torch.cuda.reset_peak_memory_stats()
    manager = oracle_offload.attach(model, device, offload_percent=1.0)
    if not common.is_simulated(device):
        row["allocated_growth_bytes"] = torch.cuda.memory_allocated() - before
        row["peak_growth_bytes"] = torch.cuda.max_memory_allocated() - before
    row["acquires_count"] = same_steps(model, resident, device)
    manager.detach(model)
    return row


def attach_and_detach(device: str) -> dict[str, Any]:
    """Ten times, and what is alive after the tenth is what was alive after the first."""
    import torch

    import oracle_offload

    model, resident = model_and_twin(device)
    alive, acquires = [], 0
    for number in range(10):
        manager = oracle_offload.attach(model, device, offload_percent=(number % 3) / 2)
        acquires += same_steps(model, resident, device, steps=1)
        manager.detach(model)
        common.synchronize(device)
        alive.append(0 if common.is_simulated(device) else torch.cuda.memory_allocated())
    assert alive[-1] <= alive[0], f"bytes alive after each detach: {alive}"
    row: dict[str, Any] = {"acquires_count": acquires, "alive_bytes": alive[-1]}
    if not common.is_simulated(device):
        row["allocator"] = torch.cuda.get_allocator_backend()
        if row["allocator"] == "native":  # the other one has no snapshot
            row["expandable_segments_count"] = sum(
                bool(segment.get("is_expandable")) for segment in torch.cuda.memory_snapshot()
            )
    return row


def one_step(device: str) -> dict[str, Any]:
    """Attach, step, detach: short enough for a checker that slows everything down."""
    import oracle_offload

    model, resident = model_and_twin(device)
    manager = oracle_offload.attach(model, device, offload_percent=1.0)
    acquires = same_steps(model, resident, device, steps=1)
    manager.detach(model)
    return {"acquires_count": acquires}


DRILLS: dict[str, Callable[[str], dict[str, Any]]] = {
    "arena larger than free memory": larger_than_free,
    "attach with the model on the device": on_the_device_already,
    "attach and detach": attach_and_detach,
}


def main() -> None:
    """Run the drill named by the first argument on the device named by the second."""
    import torch

    name, device = sys.argv[1:]
    if common.is_simulated(device):
        torch.set_num_threads(1)
    else:
        torch.use_deterministic_algorithms(True)
    found = {**DRILLS, "one step": one_step}[name](device)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(common.ROOT))
    main()
