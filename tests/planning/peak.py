"""What torch's CPU allocator gave out at once."""

from __future__ import annotations

from typing import Any

import torch


def peak_of(run: Any) -> int:
    """Most bytes that torch's CPU allocator gave out at once while `run` ran."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
