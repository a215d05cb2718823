"""The sentence that says what holds a step up, on devices where that is known beforehand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from equality import attached
from torch import Tensor, nn

import oracle_offload
from oracle_offload.engine import simulator
from oracle_offload.observe.verdict import Verdict

WIDTH, BATCH = 96, 8
WEIGHT = 4 * WIDTH * WIDTH  # bytes of a layer
FLOPS = 2 * 2 * BATCH * WIDTH * WIDTH  # of a product: float32 counts twice, `SimulatedTime`
KERNEL_S = 1e-3


class Stack(nn.Module):
    """Layers in blocks of one, so that each is a unit; the host takes `host_s` before each."""

    def __init__(self, depth: int, host_s: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(depth)
        )
        self.host_s = host_s
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            simulator.advance(self.host_s)
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda grad: simulator.advance(self.host_s))
        return x


def train(model: nn.Module, steps: int, batch_s: float = 0.0, micro_batches: int = 1) -> None:
    """Train as loops do: each step ends when its loss has arrived on the host."""
    beside = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([beside], lr=0.1)
    for _ in range(steps):
        simulator.advance(batch_s)
        for _ in range(micro_batches):
            x = torch.randn(BATCH, WIDTH, requires_grad=True)
            (model(x).sum() + beside.sum()).backward()
        simulator.finish()
        optimizer.step()


def on_device(copy_s: float) -> Any:
    """A device on which a product takes `KERNEL_S` and the copy of a layer `copy_s`."""
    return simulator.device(
        "rtx4090",
        link_gbps=WEIGHT / copy_s * 1e-9,
        copy_latency_s=0.0,
        tflops=FLOPS / KERNEL_S * 1e-12,
        memory_gbps=1e6,
        launch_s=0.0,
    )


def verdict_on(
    depth: int, offload: float, copy_s: float, host_s: float = 0.0, **training: Any
) -> tuple[Verdict, Any]:
    with on_device(copy_s):
        model = Stack(depth, host_s)
        with attached(model, "cpu", offload_percent=offload) as manager:
            train(model, 12, **training)
            report = oracle_offload.memory_summary()
            found = report.devices[0].verdict
            assert len(manager.layers) == depth
            assert str(report).startswith(f"cpu is {found.bound}-bound: ")
            return found, report.devices[0].models[0]


def cells() -> Iterator[tuple[str, int, float, float, float]]:
    """Cells whose bound is plain: the largest of three times is twice the next, or more."""
    grid = itertools.product((12, 20), (1.0, 0.7), (0.1, 0.3, 4.0, 9.0), (0.0, 0.1, 5.0, 12.0))
    for depth, offload, copy, host in grid:
        arena = (1 - offload) * depth + 2  # the floor is two of the largest units
        times = {
            "compute": 2.0 * depth,
            "link": copy * 2 * (depth - arena),
            "host": host * 2 * depth,
        }
        ranked = sorted(times, key=times.__getitem__, reverse=True)
        if times[ranked[0]] >= 2 * times[ranked[1]]:
            yield ranked[0], depth, offload, copy * KERNEL_S, host * KERNEL_S


CELLS = list(cells())


def test_there_are_cells_of_each_kind() -> None:
    kinds = [cell[0] for cell in CELLS]
    assert len(CELLS) >= 30
    assert min(kinds.count(kind) for kind in ("link", "compute", "host")) >= 8


@pytest.mark.parametrize(("bound", "depth", "offload", "copy_s", "host_s"), CELLS)
def test_the_bound_is_the_one_that_the_cell_was_made_for(bound, depth, offload, copy_s, host_s):
    found, usage = verdict_on(depth, offload, copy_s, host_s)
    assert found.bound == bound
    # What is known of the cell: its kernels, and what the link needs for the least bytes.
    kernels_s = 2 * depth * KERNEL_S
    least_s = usage.x_min_bytes / WEIGHT * copy_s
    assert found.bound_s <= found.step_s * 1.001
    if bound == "compute":
        assert found.bound_s == pytest.approx(kernels_s, rel=0.15)
        assert found.arena_gib_s == found.ram_gib_s == 0
    elif bound == "link":
        assert found.bound_s == pytest.approx(max(least_s, kernels_s), rel=0.15)
        assert found.step_s >= least_s
        assert found.arena_gib_s == pytest.approx(found.bound_s - found.compute_s)
    else:
        assert found.idle_s == pytest.approx(found.step_s - kernels_s, rel=0.25)


def test_a_device_that_waits_for_the_next_batch_is_host_bound():
    found, _ = verdict_on(12, 1.0, 0.1e-3, batch_s=0.2)
    assert found.bound == "host"
    assert found.idle_s == pytest.approx(0.2, rel=0.05)
    assert found.bound_s == pytest.approx(24 * KERNEL_S, rel=0.15)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_least_bytes_count_each_forward_of_a_step(micro_batches):
    found, usage = verdict_on(12, 1.0, 9e-3, micro_batches=micro_batches)
    assert found.bound == "link"
    least_s = usage.x_min_bytes / WEIGHT * 9e-3 * micro_batches
    assert found.bound_s == pytest.approx(least_s, rel=0.05)


def test_gradients_on_their_way_to_the_host_are_the_links_doing():
    with on_device(5e-3):
        model = Stack(12, 0.0)
        model.requires_grad_(True)
        with attached(model, "cpu", offload_percent=0.0):
            train(model, 12)
            found = oracle_offload.memory_summary().devices[0].verdict
    assert found.bound == "link" and found.link_s == pytest.approx(12 * 5e-3)
    # What comes after backward is not waited for.
    assert found.stall_s == pytest.approx((1 - found.overlap) * found.link_s)
    assert found.stall_s > found.link_s / 2


def test_the_verdict_waits_for_steps_after_the_warm_up():
    with on_device(1e-3):
        model = Stack(6, 0.0)
        with attached(model, "cpu"):
            for ended in (0, 1, 2):
                found = oracle_offload.memory_summary().devices[0].verdict
                assert found.bound == "unknown" and f"{ended} so far" in found.why
                assert found.bound_s is None and found.step_s is None
                train(model, 1)
            assert oracle_offload.memory_summary().devices[0].verdict.steps == 1
            other = nn.Parameter(torch.zeros(1))
            torch.optim.SGD([other], lr=0.1).step()  # after it nothing was used
            assert oracle_offload.memory_summary().devices[0].verdict.steps == 1
            with attached(Stack(3, 0.0), "cpu"):  # all is learned again
                train(model, 1)
                found = oracle_offload.memory_summary().devices[0].verdict
                assert found.bound == "unknown" and "1 so far" in found.why


def test_a_clock_that_waited_for_nothing_is_not_believed():
    with on_device(4e-3):
        model = Stack(12, 0.0)
        beside = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([beside], lr=0.1)
        with attached(model, "cpu"):
            train(model, 8)  # in which copies are timed
            for _ in range(9):
                model(torch.randn(BATCH, WIDTH, requires_grad=True)).sum().backward()
                optimizer.step()
            found = oracle_offload.memory_summary().devices[0].verdict
            assert found.bound == "unknown" and "did not wait for the device" in found.why
