"""What the heartbeat costs the thread that trains: a write a second, a look at the clock a step.

The model has as many layers as the largest that are trained so; its size does not matter.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import oracle_offload
from oracle_offload.observe.heartbeat import EVERY_S, Heartbeat

LAYERS, WRITES, LOOKS = 500, 50, 100_000


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128)) for _ in range(LAYERS)))
    model.requires_grad_(False)
    manager = oracle_offload.attach(model, device)
    try:
        beside = nn.Parameter(torch.zeros(1, device=device))
        optimizer = torch.optim.SGD([beside], lr=0.1)
        for _ in range(4):
            x = torch.randn(3, 128, device=device, requires_grad=True)
            (model(x).sum() + beside.sum()).backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            os.environ["ORACLE_OFFLOAD_CACHE_DIR"] = folder
            heart = Heartbeat()
            seconds = []
            for _ in range(WRITES):
                begin = time.thread_time()
                heart.write()
                seconds.append(time.thread_time() - begin)
            heart.after_step()
            begin = time.thread_time()
            for _ in range(LOOKS):
                heart.after_step()
            look_s = (time.thread_time() - begin) / LOOKS
            del os.environ["ORACLE_OFFLOAD_CACHE_DIR"]
    finally:
        manager.detach()
    write_s = statistics.median(seconds)
    yield {
        "name": "heartbeat",
        "layers": LAYERS,
        "write_ms": write_s * 1e3,
        "look_ns": look_s * 1e9,
        "share_of_time_percent": 100 * write_s / EVERY_S,
    }
