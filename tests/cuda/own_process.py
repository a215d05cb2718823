"""Run a piece of a test in a process of its own: what CUDA reads once, when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

HEAD = """
import simulated_cuda, torch
def races():
    torch.cuda.synchronize()
    return simulated_cuda.verdict()
"""


def in_a_process(body: str, **environment: str) -> str:
    """Return what `body` prints; `torch`, `simulated_cuda` and `races` are there."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(body)],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
