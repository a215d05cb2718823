"""A model that is larger than memory in virtual time: over disks, against the bound.

    python benchmarks/disk_cells.py            # twelve cells, some minutes
    python benchmarks/disk_cells.py --page     # ... into docs/from-disk.md

A cell is the engine as it is, over the simulated driver and its disk: true sizes, eight threads
that read pieces of 2 MiB, copies that move no byte, kernels that take what `model_traces` says.
What `attach` would have in memory is there; the rest is read each time it travels.

Bytes are compared with the least. What stays in the arena from sweep to sweep leaves room for any
unit that does not: a kernel needs all of it there. So sampling reads M - R - C and at least the
largest unit of those in memory; training leaves that room to the next turn, and reads
2 (M - R - C). Seconds are compared with the longest chain of intervals
(`plans.interval_bound_s`), each the longest of what its reads, copies and kernels take, as the
arena can hold no more ahead; and with what `plan` adds up: forward and backward each take the
longest of the three.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER), str(FOLDER.parent / "tools")]

import plans  # noqa: E402 - the folder must be findable first
import simulated  # noqa: E402
from model_traces import CARDS, FORWARD, RECORDED, Card, Trace, Visit, trace_of  # noqa: E402

PAGE = FOLDER.parent / "docs" / "from-disk.md"
BEGIN, END = "<!-- cells: python benchmarks/disk_cells.py --page -->", "<!-- end of cells -->"
CARD = "4090"
# Bytes in memory, and of the arena, of models with 12 and 32 billion weights in bf16.
MODELS = {("flux1", 1024): (8e9, 5e9), ("flux2", 1024): (24e9, 14e9)}
DISKS_GBPS = (1.0, 3.5, 7.0)
LATENCY_S = 100e-6  # of one read; assumed
RING_BYTES = 8 * 2**21  # that the engine's threads read into
ROUNDS = {"train": 4, "sample": 14}
LAST = {"train": 2, "sample": 4}  # of the rounds, which are measured
TIME_GOAL, BYTES_GOAL = 1.05, 1.02

Cell = tuple[str, int, str, float]  # model, size, phase, disk


def grid() -> list[Cell]:
    """Return all cells."""
    return [(*model, phase, gbps) for model in MODELS for phase in ROUNDS for gbps in DISKS_GBPS]


def run_engine(
    trace: Trace,
    rounds: Sequence[Sequence[Visit]],
    capacity: int,
    card: Card,
    in_memory: Collection[int],
    disk_bps: float,
) -> list[plans.Outcome]:
    """Return what the engine takes for each round but the first, and reads from the disk.

    `in_memory` are the units that are not on it.
    """
    import numpy as np

    from oracle_offload import _core
    from oracle_offload.engine import simulator

    device = simulator.get_device(0)
    device.link_gbps, device.copy_latency_s = card.link_bps / 1e9, plans.COPY_LATENCY_S
    device.launch_s, device.memory_bytes = 0.0, float(2**48)
    device.disk_gbps, device.disk_latency_s = disk_bps / 1e9, LATENCY_S
    before = simulator.get_device(0)
    simulator.set_device(0, device)
    simulator.poison(False)
    simulator.copy_nothing(True)
    simulator.detect_races(False)
    engine = _core.Engine(str(simulator.library_path()), 0)
    space = mmap.mmap(-1, capacity, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    nbytes = -(-max(trace.unit_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    masters = _core.HostBuffer(nbytes)
    lease, model = engine.add_lease(), engine.add_model()
    try:
        with tempfile.NamedTemporaryFile() as stays:
            stays.truncate(nbytes)  # a hole: nothing of it is read
            files, kept = (
                _core.HostBuffer(nbytes, file=stays.fileno(), path=os.fsencode(stays.name))
                for _ in range(2)
            )
            stream = engine.compute_stream
            address = np.frombuffer(space, "b").ctypes.data
            engine.add_segment(lease, -(-address // 256) * 256, capacity, stream)
            engine.lock(masters)
            engine.lock(files, 0)
            engine.lock(kept, 0)
            engine.keep_in(masters, [(kept.address, nbytes, 0)])
            members = []
            for number, size in enumerate(trace.unit_bytes):
                place = (kept if number in in_memory else files).address
                _, added = engine.add_unit(model, [[(place, size)]], False)
                members.append(added[0][0])
            read = [0]
            with simulator.trace() as timeline:
                for number, visits in enumerate(rounds):
                    simulated._play(engine, visits, members, number)
                    read.append(engine.stats(model)["disk_read_bytes"])
                simulator.finish()
            engine.remove_lease(lease)
            engine.remove_model(model)
            engine.unlock(kept)
            engine.unlock(files)
            engine.unlock(masters)
    finally:
        simulator.finish()
        engine.close()
        simulator.poison(True)
        simulator.copy_nothing(False)
        simulator.detect_races(True)
        simulator.set_device(0, before)
    kernels = sorted(row.end_s for row in timeline if row.kind == "kernel")
    counts = list(itertools.accumulate(2 * len(visits) for visits in rounds))
    ends = [kernels[count - 1] for count in counts]
    return [
        plans.Outcome(ends[i] - ends[i - 1], read[i + 1] - read[i]) for i in range(1, len(rounds))
    ]


def measure(cell: Cell) -> dict[str, Any]:
    """Run one cell; return its row."""
    model, size, phase, gbps = cell
    memory, arena = MODELS[model, size]
    return {
        "cell": list(cell),
        **measure_trace(
            trace_of(model, size, CARDS[CARD], "bf16"), phase, int(memory), int(arena), gbps
        ),
    }


def measure_trace(trace: Trace, phase: str, memory: int, arena: int, gbps: float) -> dict[str, Any]:
    """Run a phase of a model over a disk; return seconds, bytes and their yardsticks."""
    from oracle_offload.model.on_disk import between, largest

    card, disk_bps = CARDS[CARD], 1e9 * gbps
    visits = trace.train if phase == "train" else trace.sample
    capacity = arena // 256 * 256
    if phase == "train":
        in_memory = between(trace.unit_bytes, memory, capacity)
    else:
        in_memory = largest(trace.unit_bytes, memory)
    held = sum(trace.unit_bytes[number] for number in in_memory)
    outcomes = run_engine(trace, [visits] * ROUNDS[phase], capacity, card, in_memory, disk_bps)
    ours = outcomes[-LAST[phase] :]
    sweeps = 2 if phase == "train" else 1
    missing = trace.total_bytes - capacity
    forward_s = sum(one.seconds for one in visits if one.kind in (FORWARD, RECORDED))
    kernels_s = [forward_s, sum(one.seconds for one in visits) - forward_s][:sweeps]
    link_s, disk_s = missing / card.link_bps, (missing - held) / disk_bps
    passes = [trace.unit_bytes[number] for number in in_memory] if phase == "sample" else []
    least = sweeps * (missing - held) + max(passes, default=0)
    left = set(range(len(trace.unit_bytes))) - in_memory
    interval_s = plans.interval_bound_s(
        trace.unit_bytes, visits, capacity, card.link_bps, disk=(left, disk_bps, RING_BYTES)
    )
    return {
        "weights_bytes": trace.total_bytes,
        "memory_bytes": held,
        "arena_bytes": capacity,
        "step_s": sum(one.seconds for one in ours) / len(ours),
        "read_bytes": sum(one.nbytes for one in ours) / len(ours),
        "kernels_s": sum(kernels_s),
        "link_s": sweeps * link_s,
        "disk_s": least / disk_bps,
        "bound_s": max(interval_s, least / disk_bps),
        "plan_s": sum(max(one, link_s, disk_s) for one in kernels_s),
        "least_bytes": least,
    }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table as Markdown."""
    lines = [
        "| | disk, GB/s | s | of the disk | of the link | of kernels | / bound | / `plan`'s "
        "| bytes read / least |",
        f"| --- |{' ---: |' * 8}",
    ]
    for row in rows:
        model, size, phase, gbps = row["cell"]
        figures = [f"{row[name]:.2f}" for name in ("step_s", "disk_s", "link_s", "kernels_s")]
        ratios = [
            row["step_s"] / row["bound_s"],
            row["step_s"] / row["plan_s"],
            row["read_bytes"] / row["least_bytes"],
        ]
        figures += [f"{ratio:.3f}" for ratio in ratios]
        lines.append(f"| {model} {size}, {phase} | {gbps:g} | {' | '.join(figures)} |")
    return lines


def sentences(rows: Sequence[dict[str, Any]]) -> str:
    """Return what the table is of."""
    sizes = {
        row["cell"][0]: f"{row['cell'][0]} has {row['weights_bytes'] / 1e9:.1f} GB, "
        f"{row['memory_bytes'] / 1e9:.1f} in memory and an arena of {row['arena_bytes'] / 1e9:.1f}"
        for row in rows
    }
    return f"Simulated, on a {CARD}: {'; '.join(sizes.values())}."


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; with ``--page`` write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write docs/from-disk.md")
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args(argv)
    rows = []
    # A process for each: it has a simulator of its own.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(measure, grid()):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    printed = "\n".join([sentences(rows), "", *table(rows)])
    print(printed)
    if args.json:
        args.json.write_text(json.dumps(rows), encoding="utf-8")
    if args.page:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        tail = rest.partition(END)[2] or "\n"
        PAGE.write_text(f"{head.rstrip()}\n\n{BEGIN}\n\n{printed}\n\n{END}{tail}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
