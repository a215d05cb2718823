"""Activations that leave, in virtual time: checkpointing, offloading and both, and the bound.

    python benchmarks/activations.py           # the table
    python benchmarks/activations.py --page    # ... and docs/activations.md

The engine and `oracle_offload.train` as they are, over the simulated driver: true sizes, of which
addresses alone are taken; copies that move no byte; kernels that take what `model_traces` says; the
weights stream at the same time, 91% of them. Without checkpoints the device's budget is what two
blocks save, with them it is the default. Of a block's saved tensors the sizes are those of a bf16
model with fused attention, spread evenly over its layers.
"""

from __future__ import annotations

import argparse
import mmap
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER), str(FOLDER.parent / "tools")]

import plans  # noqa: E402 - the folder must be findable first
from model_traces import BACKWARD, CARDS, RECOMPUTE, Card, Trace, Visit, trace_of  # noqa: E402
from simulated import capacity_of  # noqa: E402

PAGE = FOLDER.parent / "docs" / "activations.md"
BEGIN, END = "<!-- printed by benchmarks/activations.py -->", "<!-- end of what it printed -->"
CELLS = [
    *(("llama-8b", size, "h200") for size in (8192, 32768, 131072)),
    *(("llama-8b", size, "4090") for size in (8192, 32768, 131072)),
    *(("flux1", size, "4090") for size in (512, 1024, 2048)),
]
MODES = ("checkpointing", "offloading", "both")
STEPS, LAST, GOAL, ARENA = 4, 2, 1.05, "91"
NAMES = {"llama-8b": "Llama 8B, {} tokens", "flux1": "FLUX.1, {0} x {0}"}

# Of a block, in units of tokens x hidden size x 2 bytes: what its layers save, in their order.
_LLAMA: tuple[float, ...] = (1, 1, 1, 0.25, 0.25, 1, 1, 1, 3.5, 3.5, 3.5, 3.5)
_DOUBLE: tuple[float, ...] = (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4, 4)
_SINGLE: tuple[float, ...] = (1, 1, 1, 1, 1, 1, 4, 4, 5)


def saved_bytes(model: str, size: int, block: int) -> tuple[list[int], int]:
    """Return what a block saves, and the input that a checkpoint of it keeps, in bytes."""
    if model == "llama-8b":
        unit, shares = 2 * size * 4096, _LLAMA
    else:
        unit, shares = 2 * ((size // 16) ** 2 + 512) * 3072, _DOUBLE if block < 19 else _SINGLE
    return [int(unit * share) for share in shares], unit


def visits_of(trace: Trace, mode: str) -> list[Visit]:
    """Return the visits of a step."""
    if mode != "offloading":
        return trace.train
    return [visit for visit in trace.train if visit.kind != RECOMPUTE]


def spread(trace: Trace, block: int, sizes: Sequence[int]) -> dict[int, list[int]]:
    """Return the sizes that each unit of a block saves."""
    units = trace.blocks[block]
    rows: dict[int, list[int]] = {unit: [] for unit in units}
    for number, nbytes in enumerate(sizes):
        rows[units[number * len(units) // len(sizes)]].append(nbytes)
    return rows


def run(model: str, size: int, card: Card, mode: str) -> dict[str, Any]:
    """Return what one cell takes."""
    import numpy as np
    import torch
    from torch import nn

    from oracle_offload import _core
    from oracle_offload.engine import simulator
    from oracle_offload.engine.engines import opened
    from oracle_offload.train import ActivationOffload

    trace = trace_of(model, size, card, "bf16")
    capacity = capacity_of(trace, card, ARENA)
    saved, blocks = {}, len(trace.blocks)
    for block in range(blocks):
        sizes, kept = saved_bytes(model, size, block)
        saved[block] = sizes if mode == "offloading" else [kept]
    rows: dict[int, list[int]] = {}
    for block in range(blocks):
        rows |= spread(trace, block, saved[block])
    largest = max(sum(saved_bytes(model, size, block)[0]) for block in range(blocks))
    room = (
        2 * largest if mode == "offloading" else None
    )  # so that the link has work all along a block
    device = simulator.get_device(0)
    device.link_gbps, device.copy_latency_s = card.link_bps / 1e9, plans.COPY_LATENCY_S
    device.launch_s, device.memory_bytes = 0.0, float(2**48)
    before = simulator.get_device(0)
    simulator.set_device(0, device)
    simulator.poison(False)
    simulator.copy_nothing(True)
    simulator.detect_races(False)
    space = mmap.mmap(-1, capacity, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    masters = _core.HostBuffer(max(trace.unit_bytes))
    leaves = mode != "checkpointing"
    peak = [0]
    with opened(torch.device("cpu")) as state:
        engine, stream = state.engine, state.stream()
        owner = nn.Identity()  # an offload ends with its model
        offload = ActivationOffload(owner, state, 1 << 20, room, 1 << 62, lambda n: True)
        lease, added = engine.add_lease(), engine.add_model()
        address = np.frombuffer(space, "b").ctypes.data
        engine.add_segment(lease, -(-address // 256) * 256, capacity, stream)
        engine.lock(masters)
        members = []
        for nbytes in trace.unit_bytes:
            _, rows_added = engine.add_unit(added, [[(masters.address, nbytes)]], False)
            members.append(rows_added[0][0])

        def use(visit: Visit, number: int) -> None:
            task = number if visit.kind in (RECOMPUTE, BACKWARD) else -1
            asked = engine.acquire(members[visit.unit], stream, 0, visit.kind, task, 0.0)
            if asked[-1]:
                engine.stamp([(members[unit], 0) for unit in asked[-1]])
            simulator.launch(stream, (), (), visit.seconds)
            fetched = engine.release(asked[0], stream)
            if fetched:
                engine.stamp([(members[unit], 0) for unit in fetched])

        def step(number: int) -> None:
            kept: dict[int, list[Any]] = {}
            done: set[int] = set()
            for visit in visits_of(trace, mode):
                first = visit.unit not in kept
                back = visit.kind in (RECOMPUTE, BACKWARD) and visit.unit not in done
                if back and leaves:
                    done.add(visit.unit)
                    for one in reversed(kept.pop(visit.unit, [])):
                        offload.bring(one)
                        del one
                    peak[0] = max(peak[0], offload._held_bytes)
                use(visit, number)
                if first and not back and visit.kind not in (RECOMPUTE, BACKWARD) and leaves:
                    for nbytes in rows[visit.unit]:
                        tensor = torch.empty(nbytes, dtype=torch.uint8)
                        one = offload.leave(tensor, tensor.untyped_storage())
                        kept.setdefault(visit.unit, []).append(one)
                        del tensor, one
                    peak[0] = max(peak[0], offload._held_bytes)

        ends = [simulator.finish()]
        left = []
        for number in range(STEPS):
            counts = offload.counts
            step(number)
            ends.append(simulator.finish())
            now = offload.counts
            left.append(
                (now.left_bytes - counts.left_bytes, now.returned_bytes - counts.returned_bytes)
            )
        budget = offload.device_budget
        late, host = offload.counts.late, offload.host_bytes
        offload.remove()
        engine.remove_lease(lease)
        engine.remove_model(added)
        engine.unlock(masters)
    simulator.poison(True)
    simulator.copy_nothing(False)
    simulator.detect_races(True)
    simulator.set_device(0, before)
    seconds = (ends[-1] - ends[-1 - LAST]) / LAST
    visits = visits_of(trace, mode)
    forward = sum(v.seconds for v in visits if v.kind not in (RECOMPUTE, BACKWARD))
    backward = sum(v.seconds for v in visits) - forward
    missing = trace.total_bytes - capacity
    out, back = left[-1] if leaves else (0, 0)
    # Each way has the link's rate. What the device holds at the turn, its budget at most, has not
    # left yet or is back already: so many bytes may travel on the other side of the turn.
    turn = min(
        max(forward, missing / card.link_bps, (out - late_out) / card.link_bps)
        + max(backward, (missing + back - (budget - late_out)) / card.link_bps)
        for late_out in (budget * share / 100 for share in range(101))
    )
    weights = plans.interval_bound_s(
        trace.unit_bytes, visits, capacity, card.link_bps, plans.COPY_LATENCY_S
    )
    bound = max(weights, turn)
    held = peak[0] if leaves else sum(saved_bytes(model, size, b)[1] for b in range(blocks))
    if mode != "offloading":
        held += largest  # what a recompute saves
    return {
        "peak_bytes": held,
        "host_bytes": host if leaves else 0,
        "step_s": seconds,
        "bound_s": bound,
        "kernels_s": forward + backward,
        "late": late,
    }


def cells() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Run all cells."""
    for model, size, card in CELLS:
        name = f"{NAMES[model].format(size)}, {card.upper() if card == 'h200' else 'RTX ' + card}"
        yield name, {mode: run(model, size, CARDS[card], mode) for mode in MODES}


def table(rows: Sequence[tuple[str, dict[str, dict[str, Any]]]]) -> list[str]:
    """Return the table as Markdown."""
    lines = [
        "| | | activations on the device at most, GiB | in host memory, GiB | kernels, s | step, s "
        "| bound, s | step / bound |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, modes in rows:
        for mode, row in modes.items():
            lines.append(
                f"| {name if mode == MODES[0] else ''} | {mode} | {row['peak_bytes'] / 2**30:.2f} "
                f"| {row['host_bytes'] / 2**30:.1f} | {row['kernels_s']:.2f} "
                f"| {row['step_s']:.2f} | {row['bound_s']:.2f} "
                f"| {row['step_s'] / row['bound_s']:.3f} |"
            )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 3 where a cell is above the goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write docs/activations.md")
    options = parser.parse_args(argv)
    rows = list(cells())
    printed = "\n".join(table(rows))
    print(printed)
    if options.page:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        tail = rest.partition(END)[2]
        PAGE.write_text(f"{head}{BEGIN}\n\n{printed}\n\n{END}{tail}", encoding="utf-8")
    worst = max(row["step_s"] / row["bound_s"] for _, modes in rows for row in modes.values())
    print(f"the worst cell takes {worst:.3f} of its bound")
    return 0 if worst <= GOAL else 3


if __name__ == "__main__":
    sys.exit(main())
