"""The law of `vram_budget="auto"`, over what torch's allocator gave out in recorded runs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from oracle_offload.model.auto_budget import MARGIN, AutoBudget, Reading

RECORDED = Path(__file__).parents[1] / "data" / "allocator"
FLOOR, MOST, GRAIN = 1 << 20, 1 << 30, 1 << 18
CALM = Reading(
    total_bytes=100 << 20, free_bytes=60 << 20, reserved_bytes=40 << 20, peak_bytes=30 << 20,
    failures=0,
)  # fmt: skip


def recorded(kind):
    """The rows of a recorded sequence; tests/data/allocator/record.py made it."""
    rows = [json.loads(line) for line in (RECORDED / f"{kind}.jsonl").read_text().splitlines()]
    assert len(rows) == 60
    return rows


class Card:
    """A device on which everything but the arena is allocated as it was recorded.

    `spills` says whether what does not fit is moved to shared memory, as on Windows, instead of
    failing.
    """

    def __init__(self, total, spills=False):
        self.total, self.spills = total, spills
        self.reserved = self.peak = self.failures = self.spilt = 0

    def step(self, row, arena):
        """Run a step with an arena of that size; return whether it got what it asked for."""
        room = self.total - row["others_bytes"]
        wanted = row["peak_bytes"] + arena
        if wanted > room:
            self.failures += not self.spills
            self.spilt += self.spills
            self.reserved = row["held_bytes"] + arena if not self.spills else wanted
            return False
        self.peak = max(self.peak, wanted)
        self.reserved = max(min(self.reserved, room), wanted)
        return True

    def reading(self, row):
        free = max(0, self.total - row["others_bytes"] - self.reserved)
        return Reading(self.total, free, self.reserved, self.peak, self.failures)


def follow(kind, total, spills=False):
    """Train on a card; return the size of the arena in each step, and whether the step fitted."""
    card, budget, arena = Card(total, spills), AutoBudget(), FLOOR
    steps = []
    for row in recorded(kind):
        steps.append((arena, card.step(row, arena)))
        reading = card.reading(row)
        change = budget.after_step(reading, arena, FLOOR, MOST, GRAIN)
        if budget.window == 1:
            card.peak = row["held_bytes"] + arena
        if change is None:
            continue
        assert change.bytes >= FLOOR
        if change.bytes > arena:
            cached = reading.reserved_bytes - row["held_bytes"] - arena
            assert change.bytes - arena <= reading.free_bytes + cached, "more than is free"
        arena = change.bytes
        card.reserved = card.peak = row["held_bytes"] + arena
        budget.changed(change, arena)
    return steps, card


def test_the_first_step_runs_on_the_floor_and_the_next_on_what_it_left():
    (first, *rest), _ = follow("leak", 40 << 20)
    assert first == (FLOOR, True)
    peak = recorded("leak")[0]["peak_bytes"]
    left = (40 << 20) * (1 - MARGIN) - peak
    assert left - 512 < rest[0][0] <= left


def test_a_leak_takes_from_the_arena_before_anything_fails():
    steps, card = follow("leak", 40 << 20)
    assert all(fitted for _, fitted in steps) and card.failures == 0
    assert steps[-1][0] < steps[2][0] - (2 << 20), "it has not shrunk"


def test_a_spike_fails_once_or_twice_and_then_has_its_room():
    steps, _ = follow("spike", 80 << 20)
    spikes = [fitted for number, (_, fitted) in enumerate(steps) if number % 9 == 8]
    assert not spikes[0], "it fitted at once: nothing was shown"
    assert sum(not fitted for fitted in spikes) <= 3
    assert all(spikes[-3:])
    assert steps[-1][0] > FLOOR, "calm has given nothing back"


def test_nothing_spills_where_another_process_takes_more_and_more():
    steps, card = follow("spill", 20 << 20, spills=True)
    assert card.spilt == 0 and all(fitted for _, fitted in steps)
    assert steps[45][0] <= steps[2][0] - (3 << 19), "it has not shrunk"


def test_what_is_spilt_is_no_room():
    """Torch holds more than the device has: the rest is in shared memory."""
    spilt = Reading(100 << 20, 0, 120 << 20, 120 << 20, 0)
    assert spilt.cap_bytes == 100 << 20
    change = AutoBudget().after_step(spilt, 50 << 20, FLOOR, MOST, GRAIN)
    assert change.bytes <= (100 - 70) << 20


def test_a_memory_fraction_is_the_cap():
    limited = Reading(100 << 20, 60 << 20, 40 << 20, 30 << 20, 0, limit_bytes=50 << 20)
    assert limited.cap_bytes == 50 << 20
    change = AutoBudget().after_step(limited, FLOOR, FLOOR, MOST, GRAIN)
    assert change.bytes == (int(50 * (1 << 20) * 0.95) - (29 << 20)) // 256 * 256


def test_a_failure_takes_half_of_what_is_beyond_the_floor_and_calm_gives_back():
    budget, size = AutoBudget(), 33 << 20
    failing = Reading(100 << 20, 0, 100 << 20, 95 << 20, 1)
    change = budget.after_step(failing, size, FLOOR, MOST, GRAIN)
    assert change.why == "torch ran out of device memory" and change.bytes == 17 << 20
    budget.changed(change, change.bytes)
    calm = Reading(100 << 20, 20 << 20, 80 << 20, 60 << 20, 1)
    for _ in range(64 + 63):
        budget.after_step(calm, 17 << 20, FLOOR, MOST, GRAIN)
    grown = budget.after_step(calm, 17 << 20, FLOOR, MOST, GRAIN)
    room = (95 << 20) - (43 << 20)
    assert grown.why == "a step left room"
    assert grown.bytes == ((17 << 20) + (room - (17 << 20)) // 2) // 256 * 256, "half of the way"


@pytest.mark.parametrize(("failures", "patience"), [(1, 8), (2, 16), (3, 32), (9, 512)])
def test_every_failure_doubles_the_calm_steps_before_it_grows_again(failures, patience):
    budget = AutoBudget()
    reading = Reading(100 << 20, 90 << 20, 10 << 20, 9 << 20, 0)
    for number in range(failures):
        failed = Reading(100 << 20, 90 << 20, 10 << 20, 9 << 20, number + 1)
        assert budget.after_step(failed, FLOOR, FLOOR, MOST, GRAIN) is None, (
            "no less than the floor"
        )
    reading = failed
    for _ in range(patience - 1):
        assert budget.after_step(reading, FLOOR, FLOOR, MOST, GRAIN) is None
    assert budget.after_step(reading, FLOOR, FLOOR, MOST, GRAIN).bytes > FLOOR


def test_failures_from_before_the_first_step_are_not_its_own():
    reading = Reading(100 << 20, 60 << 20, 40 << 20, 30 << 20, 7)
    assert AutoBudget(7).after_step(reading, FLOOR, FLOOR, MOST, GRAIN).bytes > FLOOR
    assert AutoBudget(6).after_step(reading, FLOOR, FLOOR, MOST, GRAIN) is None


def test_it_takes_no_more_than_the_model_can_use():
    assert AutoBudget().after_step(CALM, FLOOR, FLOOR, 20 << 20, GRAIN).bytes == 20 << 20
    near = (20 << 20) - 512  # less than a grain is missing
    assert AutoBudget().after_step(CALM, near, FLOOR, 20 << 20, GRAIN).bytes == 20 << 20
    assert AutoBudget().after_step(CALM, near, FLOOR, 20 << 20, GRAIN, sharing=2).bytes == 20 << 20
    assert AutoBudget().after_step(CALM, 20 << 20, FLOOR, 20 << 20, GRAIN) is None


def test_one_grain_beyond_the_floor_is_of_use():
    assert AutoBudget().after_step(CALM, FLOOR, FLOOR, FLOOR + GRAIN, GRAIN).bytes == FLOOR + GRAIN
    assert AutoBudget().after_step(CALM, FLOOR, FLOOR, FLOOR + GRAIN - 256, GRAIN) is None
    shared = AutoBudget().after_step(CALM, FLOOR, FLOOR, FLOOR + 2 * GRAIN, GRAIN, sharing=2)
    assert shared.bytes == FLOOR + GRAIN, "its half is a grain"


def test_changes_that_do_not_pay_are_left():
    size = 64 << 20
    for left, expected in ((4 << 20, True), ((4 << 20) - 512, False)):
        peak = (95 << 20) - left
        reading = Reading(100 << 20, 5 << 20, 95 << 20, peak, 0)
        change = AutoBudget().after_step(reading, size, FLOOR, MOST, GRAIN)
        assert (change is not None) is expected
    for peak, shrinks in ((97 << 20, False), (195 << 19, False), ((195 << 19) + 1, True)):
        reading = Reading(100 << 20, 5 << 20, 95 << 20, peak, 0)
        change = AutoBudget().after_step(reading, size, FLOOR, MOST, GRAIN)
        assert (change is not None) is shrinks, "half of the margin may be taken"


def test_several_arenas_share_what_is_left():
    alone = AutoBudget().after_step(CALM, FLOOR, FLOOR, MOST, GRAIN)
    shared = AutoBudget().after_step(CALM, FLOOR, FLOOR, MOST, GRAIN, sharing=3)
    assert shared.bytes - FLOOR == (alone.bytes - FLOOR) // 3 // 256 * 256


def test_a_peak_is_remembered_for_a_window_and_the_next():
    budget = AutoBudget()
    high = Reading(100 << 20, 60 << 20, 40 << 20, 90 << 20, 0)
    assert budget.after_step(high, FLOOR, FLOOR, MOST, GRAIN).bytes == 6 << 20
    for number in range(2, 129):
        found = budget.after_step(CALM, FLOOR, FLOOR, MOST, GRAIN)
        assert found.bytes == 6 << 20, number
        assert budget.window == (number - 1) % 64 + 1
    assert budget.after_step(CALM, FLOOR, FLOOR, MOST, GRAIN).bytes > 60 << 20
    budget = AutoBudget()
    budget.after_step(high, FLOOR, FLOOR, MOST, GRAIN)
    budget.begin_anew()
    assert budget.window == 0
    assert budget.after_step(CALM, FLOOR, FLOOR, MOST, GRAIN).bytes > 60 << 20


def test_less_than_was_asked_for_counts_as_a_failure():
    budget = AutoBudget()
    assert budget.last is None
    change = budget.after_step(CALM, FLOOR, FLOOR, MOST, GRAIN)
    budget.changed(change, change.bytes)
    assert budget.after_step(CALM, FLOOR, FLOOR, MOST, GRAIN) == change, "it got all of it"
    budget = AutoBudget()
    assert budget.after_step(CALM, FLOOR, FLOOR, MOST, GRAIN) == change
    budget.changed(change, FLOOR)
    assert budget.changes == 1 and budget.last.bytes == FLOOR
    found = [budget.after_step(CALM, FLOOR, FLOOR, MOST, GRAIN) for _ in range(8)]
    assert found[:7] == [None] * 7 and found[7].bytes > FLOOR


def test_no_reading_asks_for_more_than_the_device_has():
    """Any figures that a driver may tell; the seed is printed by the assertion."""
    for seed in range(2000):
        rng = random.Random(seed)
        total = rng.randrange(1 << 20, 1 << 36)
        reserved = rng.randrange(total)
        peak = rng.randrange(reserved + 1)
        capacity = rng.randrange(0, peak + 1)
        floor = rng.randrange(0, capacity + 1) // 256 * 256
        capacity = max(capacity // 256 * 256, floor)
        free = rng.randrange(total - reserved + 1)
        reading = Reading(total, free, reserved, peak, rng.randrange(2))
        change = AutoBudget().after_step(
            reading, capacity, floor, rng.randrange(capacity, total + 1), rng.randrange(1, 1 << 20)
        )
        if change is None:
            continue
        assert floor <= change.bytes and change.bytes % 256 == 0, seed
        if change.bytes > capacity:
            assert change.bytes - capacity <= free + reserved - peak, seed


def failed_once():
    """A budget after a failure, on its floor; then eight calm steps are due."""
    budget = AutoBudget()
    assert budget.after_step(failing(1), FLOOR, FLOOR, MOST, GRAIN) is None
    return budget


def failing(times):
    return Reading(100 << 20, 60 << 20, 40 << 20, 30 << 20, times)


def calm_steps(budget, count, times):
    for _ in range(count):
        assert budget.after_step(failing(times), FLOOR, FLOOR, MOST, GRAIN) is None


def test_calm_begins_anew_after_every_failure_and_every_lack_of_room():
    budget = failed_once()
    calm_steps(budget, 5, 1)
    calm_steps(budget, 16, 2)
    assert budget.after_step(failing(2), FLOOR, FLOOR, MOST, GRAIN).bytes > FLOOR
    budget = failed_once()
    calm_steps(budget, 7, 1)
    full = Reading(30 << 20, 0, 30 << 20, 30 << 20, 1)
    assert budget.after_step(full, FLOOR, FLOOR, MOST, GRAIN) is None, "it is on its floor"
    calm_steps(budget, 7, 1)
    assert budget.after_step(failing(1), FLOOR, FLOOR, MOST, GRAIN).bytes > FLOOR


@pytest.mark.parametrize(("sharing", "most"), [(1, MOST), (3, MOST), (1, 40 << 20)])
def test_after_a_failure_half_of_a_share_is_taken(sharing, most):
    """Also where all that the model can use would fit."""
    budget = failed_once()
    calm_steps(budget, 7, 1)
    grown = budget.after_step(failing(1), FLOOR, FLOOR, most, GRAIN, sharing)
    room = min((95 << 20) - (29 << 20), most)
    assert grown.bytes == FLOOR + (room - FLOOR) // (2 * sharing) // 256 * 256
