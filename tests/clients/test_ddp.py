"""DistributedDataParallel on gloo: two processes of this machine, each with its own engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("ddp_training.py")


def test_two_ranks_train_as_two_resident_ranks(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, text) in enumerate(zip(ranks, said, strict=True)):
        assert rank.returncode == 0, text[-3000:]
        assert f"rank {number}: equal" in text
