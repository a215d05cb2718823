"""benchmarks/disk_cells.py: the engine over a disk in virtual time, against bytes and the bound."""

from __future__ import annotations

import sys

import disk_cells
import pytest
from model_traces import BACKWARD, FORWARD, RECOMPUTE, RECORDED, Trace, Visit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="weights stay in files on Linux")

MIB = 1 << 20
UNITS, BLOCK = 360, 4
NBYTES = 4 * MIB


def trace_of_blocks(seconds: float, times: float = 1.0) -> Trace:
    """Return a model of units alike, in checkpointed blocks.

    A forward of one takes `seconds`, of one in the second half so many `times` as long.
    """
    trace = Trace()
    of = [seconds * (times if 2 * number >= UNITS else 1) for number in range(UNITS)]
    trace.unit_bytes += [NBYTES] * UNITS
    blocks = [list(range(first, first + BLOCK)) for first in range(0, UNITS, BLOCK)]
    trace.blocks += blocks
    trace.sample += [Visit(number, FORWARD, of[number]) for number in range(UNITS)]
    trace.train += [Visit(number, RECORDED, of[number]) for number in range(UNITS)]
    for block in reversed(blocks):
        trace.train += [Visit(number, RECOMPUTE, of[number]) for number in block]
        trace.train += [Visit(number, BACKWARD, 2 * of[number]) for number in reversed(block)]
    return trace


# So small units stream through so little memory that at 3.5 GB/s samples wait for each read's
# latency.
@pytest.mark.parametrize(("phase", "gbps"), [("train", 1.0), ("train", 3.5), ("sample", 1.0)])
def test_a_step_takes_as_long_as_the_disk_does(phase: str, gbps: float) -> None:
    # Kernels take half of the disk's time: what the arena has at a turn is soon used.
    seconds = NBYTES / gbps / 1e9 / 6
    row = disk_cells.measure_trace(trace_of_blocks(seconds), phase, 60 * NBYTES, 80 * NBYTES, gbps)
    assert 1 <= row["bound_s"] / row["disk_s"] <= 1.01 and row["disk_s"] > 1.5 * row["kernels_s"]
    assert 1 <= row["step_s"] / row["bound_s"] <= 1.05
    assert 1 <= row["read_bytes"] / row["least_bytes"] <= 1.02
    line = disk_cells.table([{"cell": ["alike", 1, phase, gbps], **row}])[-1]
    assert line.startswith(f"| alike 1, {phase} | {gbps:g} | {row['step_s']:.2f} |")


def test_the_disk_reads_ahead_while_kernels_take_the_time() -> None:
    # In half of the model they take longer than its reads, and in the other half next to nothing:
    # a backward begins with those, and the arena holds what is read meanwhile.
    seconds = NBYTES / 3.5e9 / 12
    trace = trace_of_blocks(seconds, times=6.0)
    row = disk_cells.measure_trace(trace, "train", 60 * NBYTES, 80 * NBYTES, 3.5)
    assert 0.9 * row["disk_s"] <= row["kernels_s"] <= row["disk_s"]
    assert 1 <= row["step_s"] / row["bound_s"] <= 1.045
    assert 1 <= row["read_bytes"] / row["least_bytes"] <= 1.005
