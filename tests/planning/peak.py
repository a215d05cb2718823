"""What torch's CPU allocator gave out at once."""

from __future__ import annotations

from typing import Any

import torch


def peak_of(run: Any) -> int:
    """Most bytes that torch's CPU allocator gave out at once while `run` ran.

    `run` must free nothing that was allocated before: the profiler counts such a free only where
    an earlier profile, of any test, saw an allocation at that address.
    """
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
