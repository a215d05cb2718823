"""Plans of models larger than the host's memory: what stays in files, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import oracle_offload
from oracle_offload import Budget
from oracle_offload._core import BACKWARD, FORWARD
from oracle_offload.host.sizes import GIB
from oracle_offload.model.budget import OFFLOADED
from oracle_offload.planning.cards import DISK_GBPS, card_of, disk_of
from oracle_offload.planning.fit import Fit, Room, fit, fit_step
from oracle_offload.planning.measure import Step
from oracle_offload.planning.speed import Speed, speed_of

LAYER = 2 * 512 * 512
CARD = card_of(24, link_gbps=20.0, memory_gbps=1000.0, tflops=100.0, launch_s=1e-5)
DISK = Budget(offload_percent=1.0, disk=True)


def net(layers: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))


def planned(host: int, model: nn.Module | None = None, **options: Any) -> Any:
    """The plan of four layers for a host with room for so many bytes; the arena has two layers."""
    given: dict[str, Any] = dict(
        dtype="bf16", rank=1, optimizer="sgd", vram="1GiB", margin=0, measure=False, budget=DISK
    )
    return oracle_offload.plan(model or net(), ram=-(-host * 10 // 9), **given | options)


@pytest.mark.parametrize(
    ("host", "in_files", "read"),
    [
        (4 * LAYER, 0, 0),
        (4 * LAYER - 256, 256, 0),
        (2 * LAYER, 2 * LAYER, 0),  # which the arena has
        (LAYER, 3 * LAYER, LAYER),
        (1024, 4 * LAYER - 1024, 2 * LAYER - 1024),
    ],
)
def test_what_host_and_arena_do_not_hold_is_read_in_each_sweep(
    host: int, in_files: int, read: int
) -> None:
    found = planned(host)
    assert found.fit.verdict == "fits streamed" and found.fit.arena_bytes == 2 * LAYER
    assert found.fit.host == {"weights": 4 * LAYER - in_files}
    assert (found.fit.disk_bytes, found.fit.read_bytes) == (in_files, (read, read))
    assert found.fit.storage.kept_bytes == 0 and found.fit.x_min_bytes == 4 * LAYER
    assert found.fit.ram_budget == (host if in_files else None)
    assert found.speed.disk_bytes == 2 * read
    assert replace(found.fit, verdict="does not fit").read_bytes == (0, 0)


def test_of_what_a_sweep_does_not_use_nothing_is_read() -> None:
    found = planned(1024).fit
    half = replace(found, sweep_bytes=(4 * LAYER, 3 * LAYER))
    assert half.read_bytes == (2 * LAYER - 1024, LAYER - 1024)
    assert replace(found, sweep_bytes=(4 * LAYER, LAYER)).read_bytes[1] == 0


def test_a_table_whose_rows_are_read_in_place_has_to_be_in_memory() -> None:
    model = nn.Sequential(nn.Embedding(512, 512), *net())
    found = planned(LAYER + 256, model, targets="1")
    assert found.fit.verdict == "fits streamed"
    assert found.fit.disk_bytes == 4 * LAYER - 256 and found.fit.read_bytes[0] == 2 * LAYER - 256
    short = planned(LAYER - 256, model, targets="1")
    assert (short.verdict, short.fit.missing_host) == ("does not fit", 256)
    assert short.fit.why == "the host: it has no room for what is not read from files"


def test_a_number_of_parameters_is_divided_alike() -> None:
    found = oracle_offload.plan("32B", card=24, ram=32, budget=Budget(disk=True))
    room = found.question.room
    assert found.fit.verdict == "fits streamed"
    assert found.fit.host == {"weights": room.host} and found.fit.ram_budget == room.host
    assert found.fit.disk_bytes == 64 * 10**9 - room.host
    assert found.fit.read_bytes == (found.fit.disk_bytes - found.fit.arena_bytes,) * 2
    asked = found.on(24, ram=32, budget=Budget(disk=True, ram_budget="8GiB"))
    assert asked.fit.host == {"weights": 8 * GIB}
    enough = oracle_offload.plan("32B", card=24, ram=128, budget=Budget(disk=True))
    assert (enough.fit.disk_bytes, enough.fit.ram_budget) == (0, None)


# ---- seconds ----


def by_hand(host: int, flops: float) -> tuple[Step, Fit]:
    """A step that uses four layers forward and backward, each by so many operations."""
    question = planned(host).question
    step = Step(numbers={str(n): n for n in range(4)})
    for n, kind in (*((n, FORWARD) for n in range(4)), *((n, BACKWARD) for n in (3, 2, 1, 0))):
        ticket = len(step.events) + 1
        work = [(flops * (1 + 2 * (kind == BACKWARD)), 1000, torch.bfloat16, False)]
        step.events += [("acquire", n, kind, ticket), ("work", work), ("release", ticket)]
    return fit_step(planned(host).storage, step, 1, question.room)


@pytest.mark.parametrize(
    ("flops", "paces", "bottleneck"),
    [(1e6, "both", "disk"), (5e9, "forward", "compute"), (5e10, "", "compute")],
)
def test_each_sweep_takes_as_long_as_its_kernels_its_copies_or_its_reads(
    flops: float, paces: str, bottleneck: str
) -> None:
    step, found = by_hand(LAYER, flops)
    assert found.read_bytes == (LAYER, LAYER)
    without = speed_of(step, replace(found, disk_bytes=0), CARD)
    speed = speed_of(step, found, CARD, disk_of(2.0))
    assert (without.disk_bytes, without.disk_s, without.disk_paces) == (0, 0, "")
    read_s = LAYER / 2e9
    kernels = [4 * (flops * n / 1e14 + 1e-5) for n in (1, 3)]
    copies = 2 * LAYER / 20e9
    waits = [read_s - max(kernel_s, copies) for kernel_s in kernels]
    assert (speed.disk_paces, speed.bottleneck) == (paces, bottleneck)
    assert speed.disk_bytes == 2 * LAYER and speed.disk_s == pytest.approx(2 * read_s)
    assert without.step_s is not None and speed.step_s is not None
    expected = without.step_s + sum(max(0.0, wait) for wait in waits)
    assert speed.step_s == pytest.approx(expected)
    for name, share in (("low_s", 1.05), ("high_s", 0.95), ("bound_s", 1.05)):
        before, after = getattr(without, name), getattr(speed, name)
        ends = [4 * (flops * n / (1e14 * share) + 1e-5 * (2 - share)) for n in (1, 3)]
        more = [LAYER / (2e9 * share) - max(kernel_s, copies / share) for kernel_s in ends]
        assert after - before == pytest.approx(sum(max(0.0, s) for s in more), rel=1e-3), name
    count = sum(wait > 0 for wait in waits)
    assert speed.ram_gib_saves_s == pytest.approx(count * GIB / 2e9)
    enough = LAYER + max(waits) * 2e9 if count else 0
    assert speed.ram_enough_bytes == pytest.approx(enough, rel=1e-6)


@pytest.mark.parametrize("flops", [1e6, 2e9, 5e9])
def test_more_memory_saves_what_was_said_and_from_enough_on_nothing_waits(flops: float) -> None:
    def at(host: int) -> Speed:
        return speed_of(*by_hand(host, flops), CARD, disk_of(2.0))

    before, more = at(LAYER // 4), at(LAYER // 4 + 4096)
    assert before.step_s is not None and more.step_s is not None and before.disk_paces
    assert before.step_s - more.step_s == pytest.approx(before.ram_gib_saves_s * 4096 / GIB, 1e-3)
    enough = before.ram_enough_bytes
    assert LAYER // 4 < enough < 4 * LAYER
    assert at(enough + 4096).disk_paces == "" != at(enough - 4096).disk_paces


def test_where_computing_is_unknown_the_disk_is_compared_with_the_copies() -> None:
    unknown, found = Step(why="it was not measured"), planned(LAYER).fit
    slow = speed_of(unknown, found, CARD, disk_of(2.0))
    assert (slow.step_s, slow.why) == (None, "it was not measured")
    assert (slow.disk_paces, slow.bottleneck) == ("both", "unknown")
    assert slow.ram_enough_bytes == pytest.approx(2 * LAYER - 2e9 * (2 * LAYER / 20e9), rel=1e-6)
    fast = speed_of(unknown, found, CARD, disk_of(50.0))
    assert (fast.disk_bytes, fast.disk_paces, fast.ram_enough_bytes) == (2 * LAYER, "", 0)


# ---- what is said ----


def told(plan: Any) -> str:
    return " ".join(str(plan).split())


def test_a_model_that_exceeds_the_memory_is_told_of_its_files() -> None:
    found = oracle_offload.plan("32B", card=24, ram=32)
    assert found.verdict == "does not fit"
    (rung,) = (r for r in found.alternatives if r.option == "budget=Budget(disk=True)")
    other = oracle_offload.plan("32B", card=24, ram=32, budget=Budget(disk=True))
    assert found.alternatives.index(rung) == 0 and not rung.changes_result
    assert rung.verdict == other.fit.verdict == "fits streamed"
    assert rung.saves_host == found.fit.host_bytes - other.fit.host_bytes > 0
    assert rung.saves_disk == -other.fit.disk_bytes
    text = told(found)
    assert "missing; with budget=Budget(disk=True): weights fit streamed (below)." in text
    assert "saves 30.80 GiB of the host and leaves 30.80 GiB in files, then" in text
    # Nothing of it where memory is enough, where it is asked for, or where it would not do.
    for ram, budget in (
        (128, Budget()),
        (32, Budget(disk=True)),
        (32, Budget(ram_budget=OFFLOADED)),
    ):
        rungs = oracle_offload.plan("32B", card=24, ram=ram, budget=budget).alternatives
        assert not [r for r in rungs if r.option == rung.option], (ram, budget)
    full = oracle_offload.plan("4B", train="full", card=24, ram="8GB")
    assert full.verdict == "does not fit" and "disk=True" not in told(full)


def test_units_that_would_stay_on_the_device_can_stay_in_files() -> None:
    found = planned(3 * LAYER, budget=Budget(offload_percent=1.0))
    assert found.fit.storage.kept_bytes == LAYER and found.fit.disk_bytes == 0
    (rung,) = (r for r in found.alternatives if "disk=True" in r.option)
    assert (rung.saves_device, rung.saves_host, rung.saves_disk) == (LAYER, 0, -LAYER)
    assert "(below)" not in told(found), "it fits as it is"


def test_an_alternative_that_no_file_has_is_planned_without_them() -> None:
    found = planned(LAYER)
    (rung,) = (r for r in found.alternatives if r.option == "quantize='int8'")
    plain = planned(LAYER, quantize="int8", budget=Budget(offload_percent=1.0))
    assert rung.verdict == plain.fit.verdict == "fits streamed"
    assert rung.saves_disk == found.fit.disk_bytes == 3 * LAYER
    assert "leaves 1.50 MiB less in files" in told(found)


def test_the_pace_of_the_disk_is_told_and_what_memory_saves() -> None:
    found = planned(LAYER, disk_gbps=2.0)
    text = told(found)
    assert "1.50 MiB left in their files, at least" in text
    assert "A step reads 1.00 MiB from disk, which takes" in text
    assert "a sweep of sampling reads 512.00 KiB. The disk sets the pace: one more GiB" in text
    assert "from where on copies take longer." in text
    known = replace(found.speed, low_s=1.0, step_s=1.0, high_s=1.0, bound_s=1.0)
    forward = told(replace(found, speed=replace(known, disk_paces="forward")))
    assert "The disk sets the pace of forward: one more GiB" in forward
    assert "from where on computing and copies take longer." in forward
    fast = told(planned(LAYER, disk_gbps=500.0))
    assert "The disk does not set the pace: copies take longer." in fast
    held = told(planned(2 * LAYER))
    assert "What stays in files is in the arena from the second step on: none of it" in held
    needless = told(planned(4 * LAYER))
    assert "No weight stays in its file: the host has room for all." in needless
    assert "from disk" not in needless and "No weight stays" not in told(found)
    usual = told(planned(4 * LAYER, budget=Budget(offload_percent=1.0)))
    assert "No weight stays" not in usual


def test_a_rate_that_was_not_measured_is_called_so() -> None:
    said = "the disk reads 2 to 7 GB/s, as NVMe disks do: not measured"
    assert said in told(planned(LAYER)) and said not in told(planned(LAYER, disk_gbps=3.0))
    assert said not in told(planned(4 * LAYER)), "nothing is read"
    question = planned(LAYER, disk_gbps=3.0).question
    assert question.room.disk_gbps == pytest.approx((2.85, 3.15))
    assert planned(LAYER).question.room.disk_gbps == DISK_GBPS == Room(1, 1, 0).disk_gbps
    elsewhere = planned(LAYER).on(24, ram="1MiB", budget=DISK, disk_gbps=3.0)
    assert elsewhere.question.room.disk_gbps == question.room.disk_gbps


def test_what_is_pasted_names_the_files() -> None:
    found = planned(LAYER).to_dict()
    assert 'ram_budget="512KiB", weights=folder, disk=True)' in found["python"]
    assert "made inside oracle_offload.empty_weights()" in found["python"]
    assert found["aitoolkit"] == "" and found["disk_bytes"] == 3 * LAYER
    held = planned(4 * LAYER).to_dict()
    assert "disk=True" not in held["python"] and held["aitoolkit"] and held["disk_bytes"] == 0


def test_an_unknown_room_is_a_room_all_the_same() -> None:
    storage = planned(LAYER).storage
    none = fit(storage, None, Room(1 << 30, 1 << 30, 0.0, DISK))
    assert (none.disk_bytes, none.read_bytes) == (0, (0, 0))
