"""What guards cost the thread that trains, at the end of each step.

The model has as many layers as the largest that are trained so; its size does not matter. The share
is of a step of 100 ms, which is a short one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import oracle_offload

LAYERS, CALLS, STEP_S = 500, 200, 0.1


def benchmarks(device: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each guard."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128)) for _ in range(LAYERS)))
    model.requires_grad_(False)
    beside = nn.ParameterList(nn.Parameter(torch.zeros(8, 8)) for _ in range(LAYERS)).to(device)
    manager = oracle_offload.attach(model, device)
    alarm, pause = oracle_offload.train.IdleAlarm(beside), oracle_offload.train.ThermalPause()
    guards: dict[str, Callable[[int], object]] = {
        "pressure_monitor": oracle_offload.train.PressureMonitor().step,
        "vram_manager": oracle_offload.train.VramManager().step,
        "thermal_pause": lambda step: pause.step(),
        "idle_alarm": lambda step: alarm.step(),
    }
    try:
        for parameter in beside:
            parameter.grad = torch.ones_like(parameter)
        for name, call in guards.items():
            seconds = []
            for step in range(1, CALLS + 1):
                begin = time.thread_time()
                call(step)
                seconds.append(time.thread_time() - begin)
            cost_s = statistics.median(seconds)
            yield {
                "name": f"guard_{name}",
                "step_us": cost_s * 1e6,
                "share_of_100_ms_percent": 100 * cost_s / STEP_S,
            }
    finally:
        alarm.close()
        manager.detach()
