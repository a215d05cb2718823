"""What a compressed model takes of the host: in a process of its own, whose memory is its alone.

python tests/training/compressed_memory.py gaussian 128     # 1 GiB
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = {"gaussian": 0.69, "lognormal": 0.69, "student": 0.70}  # of the weights' bytes, locked
SIZE = 2048
LAYER_BYTES = 2 * SIZE * SIZE
SLACK_BYTES = 24 << 20  # of the heap, which keeps some of what was freed


def anonymous_bytes():
    """Return the memory of this process that is no file's."""
    with open("/proc/self/status") as file:
        rows = dict(line.split(":", 1) for line in file if ":" in line)
    return int(rows["RssAnon"].split()[0]) << 10


def drawn(kind):
    import torch

    weight = torch.empty(SIZE, SIZE).normal_(0, 0.02)
    if kind == "lognormal":
        weight *= torch.empty(SIZE, 1).log_normal_(0, 0.3)
    if kind == "student":
        weight /= (torch.empty(3, SIZE, SIZE).normal_() ** 2).mean(0).sqrt()
    return weight.bfloat16()


def measure(kind, depth):
    """Attach `depth` layers and return what was measured."""
    import torch
    from torch import nn

    import oracle_offload
    from oracle_offload.model.masters import trim_heap

    def build(layers):
        made = [nn.Linear(SIZE, SIZE, False, dtype=torch.bfloat16) for _ in range(layers)]
        for layer in made:
            layer.weight.data.copy_(drawn(kind))
        return nn.Sequential(*made).requires_grad_(False)

    with oracle_offload.attach(build(1), "cpu", compress="lossless"):
        pass  # imports and threads, which come once
    model = build(depth)
    trim_heap()
    before = anonymous_bytes()
    with oracle_offload.attach(model, "cpu", compress="lossless") as manager:
        arena = manager.attachment.arena
        trim_heap()  # what was freed is no copy, wherever threads had it
        attached = anonymous_bytes()
        for layer in model:
            assert layer.weight.data.view(torch.int16).max() != 0
        return {
            "coded": sum(bool(layer.coded) for layer in manager.layers),
            "locked_bytes": manager.state.engine.stats()["locked_bytes"],
            "device_bytes": arena.capacity_bytes + arena.staging_bytes,
            "before_bytes": before,
            "attached_bytes": attached,
            "read_bytes": anonymous_bytes(),
        }


def check(kind, depth):
    """Assert that locked memory falls, and that no copy of the weights stays elsewhere.

    Return what is locked, as share of the weights.
    """
    total = depth * LAYER_BYTES
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [sys.executable, __file__, kind, str(depth)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "ORACLE_OFFLOAD_CACHE_DIR": folder},
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
            check=True,
        )
    found = json.loads(ran.stdout)
    print(kind, found)
    assert found["coded"] == depth
    assert 0.5 * total < found["locked_bytes"] <= MOST[kind] * total
    # Anonymous memory other than the coded weights: the simulated device's.
    most = found["before_bytes"] - (1 - MOST[kind]) * total + found["device_bytes"] + SLACK_BYTES
    assert found["attached_bytes"] <= most
    assert found["read_bytes"] <= most, "reading brings a copy"
    return found["locked_bytes"] / total


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
