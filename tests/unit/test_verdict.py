"""The arithmetic of a verdict, and the steps that it is of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from oracle_offload.engine.pace import SAMPLED_ONE_IN, WARM_UP_STEPS, Pace, Window
from oracle_offload.host.sizes import GIB
from oracle_offload.observe.verdict import Load, Verdict, judge

COUNTERS: dict[str, Any] = {
    "h2d_bytes": 80 * GIB,
    "h2d_timed_bytes": 8 * GIB,
    "h2d_seconds": 2.0,
    "d2h_bytes": 0,
    "d2h_timed_bytes": 0,
    "d2h_seconds": 0.0,
    "waits": 320,
    "timed_waits": 20,
    "stalls": 10,
    "stall_seconds": 0.5,
    "feed_wait_seconds": 0.0,
}
# Ten steps of 3 s: 8 GiB each at 4 GiB/s are 2 s of copies, of which 0.8 s are waited for.
WINDOW = Window(10, 30.0, 10, 40, 0, 0.0, COUNTERS)
LOADS = [Load(6 * GIB, 2 * GIB, 8 * GIB)]


def found(window: Window = WINDOW, loads: Any = None, **more: Any) -> Verdict:
    options = {"pageable_bytes": 0, "unlocked_rate": None, **more}
    return judge(window, 12, LOADS if loads is None else loads, **options)


def grown(**changes: Any) -> Window:
    return replace(WINDOW, counters={**COUNTERS, **changes})


def test_a_step_is_split_into_stalls_idle_time_and_computing() -> None:
    verdict = found()
    assert (verdict.bound, verdict.steps, verdict.step_s) == ("link", 10, 3.0)
    assert verdict.stall_s == pytest.approx(0.8) and verdict.idle_s == 0
    assert verdict.compute_s == pytest.approx(2.2) and verdict.link_s == 2.0
    assert verdict.overlap == pytest.approx(0.6)
    assert found(grown(stall_seconds=2.5)).overlap == 0
    assert verdict.bound_s == pytest.approx(2.2), "computing takes longer than 2 x 4 GiB"
    assert verdict.arena_gib_s == verdict.ram_gib_s == 0
    idle = found(replace(WINDOW, idle_looks=20, batch_s=4.0))
    # 0.4 s a step before its batch is there, and of the 1.8 s that are left half.
    assert idle.idle_s == pytest.approx(0.4 + 0.9) and idle.bound == "host"
    assert idle.compute_s == pytest.approx(0.9) and idle.bound_s == pytest.approx(2.0)
    assert found(replace(WINDOW, looks=0)).idle_s == 0


def test_computing_for_nine_tenths_of_a_step_is_the_bound() -> None:
    assert found(grown(stall_seconds=0.18)).bound == "compute"
    assert found(grown(stall_seconds=0.19)).bound == "link"


def test_a_host_that_waits_for_copy_threads_leaves_open_what_the_device_did() -> None:
    """The wait is over before the device is asked anything, and no stall."""
    computes = {"stall_seconds": 0.0, "feed_wait_seconds": 3.1}
    verdict = found(grown(**computes), unlocked_rate=1.0 * GIB)
    assert verdict.bound == "unknown" and "for 310.00 ms of a step the host" in verdict.why
    assert found(grown(**{**computes, "feed_wait_seconds": 2.9}), unlocked_rate=GIB).bound == (
        "compute"
    )
    # The simulated device has another clock than the threads.
    assert found(grown(**computes), unlocked_rate=None).bound == "compute"
    waits = found(grown(feed_wait_seconds=3.1), unlocked_rate=1.0 * GIB)
    assert waits.bound == "link", "that the device waits is known"


def test_more_arena_saves_twice_its_bytes_until_computing_is_the_bound() -> None:
    slow = replace(WINDOW, seconds=50.0, counters={**COUNTERS, "stall_seconds": 2.5})
    verdict = found(slow)  # computes 1 s of 5
    assert verdict.compute_s == pytest.approx(1.0) and verdict.bound_s == pytest.approx(2.0)
    assert verdict.arena_gib_s == pytest.approx(0.5), "2 GiB less at 4 GiB/s"
    small = found(slow, [Load(6 * GIB, 5 * GIB + GIB // 2, 8 * GIB)])
    assert small.bound_s == pytest.approx(1.0) and small.arena_gib_s == 0
    twice = found(replace(slow, passes=20))
    assert twice.bound_s == pytest.approx(2.0), "no more than it moves"
    assert twice.arena_gib_s == 0
    moved = found(replace(slow, passes=20), [Load(6 * GIB, 2 * GIB, 99 * GIB)])
    assert moved.bound_s == pytest.approx(4.0)
    two = found(slow, [*LOADS, Load(2 * GIB, GIB, 8 * GIB)])
    assert two.bound_s == pytest.approx(2.5)
    assert two.arena_gib_s == pytest.approx(1.0), "each of the two models could have it"


def test_a_step_takes_no_less_than_it_could_at_best() -> None:
    """Whatever the link was measured at: the copies of this one took 1.2 times its step."""
    slow = replace(WINDOW, seconds=16.6)
    verdict = found(slow, [Load(12 * GIB, 2 * GIB, 8 * GIB)])
    assert verdict.link_s == 2.0 and verdict.bound_s == verdict.step_s < 2.0
    assert "(now 1.00 times that)" in verdict.sentence("cpu")


def test_page_locking_saves_the_difference_of_the_rates() -> None:
    verdict = found(pageable_bytes=3 * GIB, unlocked_rate=2.0 * GIB)
    # One of 6 GiB travels with 8 / 6 GiB a step, at 4 GiB/s instead of 2.
    assert verdict.ram_gib_s == pytest.approx(8 / 6 / 2 - 8 / 6 / 4)
    half = found(pageable_bytes=GIB // 2, unlocked_rate=2.0 * GIB)
    assert half.ram_gib_s == pytest.approx((8 / 6 / 2 - 8 / 6 / 4) / 2)
    assert found(pageable_bytes=GIB, unlocked_rate=5.0 * GIB).ram_gib_s == 0
    assert found(pageable_bytes=GIB).ram_gib_s is None
    computes = grown(stall_seconds=0.0)
    assert found(computes, pageable_bytes=GIB, unlocked_rate=1.0).ram_gib_s == 0


def test_gradients_that_travel_while_the_device_idles_are_the_links_doing() -> None:
    back = {"d2h_bytes": 20 * GIB, "d2h_timed_bytes": GIB, "d2h_seconds": 0.5}
    verdict = found(replace(grown(**back), idle_looks=40))  # 1 s each step, idle for 2.2 s
    assert verdict.stall_s == pytest.approx(1.8) and verdict.idle_s == pytest.approx(1.2)
    assert verdict.bound == "link" and verdict.compute_s == pytest.approx(0.0)
    busy = found(grown(**back))
    assert busy.stall_s == pytest.approx(0.8), "they were computed over"


def test_figures_that_exceed_the_step_are_cut_to_it() -> None:
    stalls = found(grown(stall_seconds=4.0))  # 6.4 s a step, of 3
    assert (stalls.stall_s, stalls.compute_s, stalls.bound) == (3.0, 0.0, "link")
    short = found(replace(grown(stall_seconds=4.0), seconds=16.0))
    assert short.overlap == pytest.approx(0.2), "copies of 2 s for a step of 1.6 s"
    batch = found(replace(WINDOW, batch_s=100.0))  # 10 s a step, of the 2.2 that are left
    assert batch.idle_s == pytest.approx(2.2) and batch.compute_s == pytest.approx(0.0)


def test_where_two_bounds_are_equal_it_is_computing_then_the_link() -> None:
    nine_tenths = replace(grown(stall_seconds=0.625), seconds=100.0)
    assert found(nine_tenths).stall_s == 1.0 and found(nine_tenths).bound == "compute"
    alike = found(replace(WINDOW, batch_s=8.0))
    assert alike.stall_s == alike.idle_s == 0.8 and alike.bound == "link"


def test_the_clock_is_believed_up_to_a_quarter_more_of_copies_than_of_time() -> None:
    assert found(replace(WINDOW, seconds=16.0)).bound_s is not None
    assert "the clock did not wait" in found(replace(WINDOW, seconds=15.9)).why
    nothing = replace(grown(h2d_bytes=0, stalls=0, stall_seconds=0.0), seconds=0.0)
    assert "the clock did not wait" in found(nothing).why


def test_what_page_locking_saves_is_unknown_without_copies_and_nothing_without_weights() -> None:
    slow: dict[str, Any] = {"pageable_bytes": GIB, "unlocked_rate": 2.0 * GIB}
    assert found(loads=[], **slow).ram_gib_s == 0.0
    none = {"h2d_bytes": 0, "h2d_timed_bytes": 0, "h2d_seconds": 0.0, "stall_seconds": 0.0}
    back = {"d2h_bytes": 40 * GIB, "d2h_timed_bytes": GIB, "d2h_seconds": 0.5}
    verdict = found(replace(grown(**none, **back), idle_looks=40), **slow)
    assert (verdict.bound, verdict.overlap, verdict.ram_gib_s) == ("link", None, None)


def test_a_sentence_needs_the_bound_and_the_step() -> None:
    whole = Verdict("compute", "", 4, 1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 1.0, 5e-6, 4.9e-6)
    assert whole.sentence("cpu") == (
        "cpu is compute-bound: of the 1.00 s of a step it computes 1.00 s; a step could take "
        "1.00 s at best (now 1.00 times that); one more GiB of arena would save 0.01 ms, one more "
        "GiB of page-locked RAM nothing."
    )
    for part in (replace(whole, bound_s=None), replace(whole, step_s=None)):
        odd = replace(part, why="so")
        assert odd.sentence("cpu") == "cpu: what bounds a step is unknown: so."
    assert whole.copies() and not replace(whole, bound_s=None).copies()
    assert not replace(whole, overlap=None).copies()


def test_what_is_not_known_is_said() -> None:
    none = judge(None, 1, LOADS, 0, None)
    assert none.sentence("cpu") == (
        "cpu: what bounds a step is unknown: it takes 3 optimizer steps to tell; 1 so far."
    )
    assert "no copy to the device was timed" in found(grown(h2d_seconds=0.0)).why
    still = found(grown(h2d_seconds=0.0, h2d_bytes=0))
    assert still.bound == "link" and still.overlap is None, "it waited all the same"
    assert "did not wait" in found(replace(WINDOW, seconds=0.0), []).why


def test_the_sentence() -> None:
    verdict = Verdict("link", "", 4, 1.5, 0.5, 0.1, 0.9, 1.2, 0.584, 1.25, 0.0125, 0.0)
    assert verdict.sentence("cuda:0") == (
        "cuda:0 is link-bound: of the 1.50 s of a step it waits 500.00 ms for copies; a step could "
        "take 1.25 s at best (now 1.20 times that); one more GiB of arena would save 12.50 ms, one "
        "more GiB of page-locked RAM nothing."
    )
    assert verdict.copies() == (
        "Copies to the device take 1.20 s of a step, of which 58% held nothing up (mean of 4 "
        "steps)."
    )
    assert replace(verdict, overlap=None).copies() == ""
    assert judge(None, 0, [], 0, None).copies() == ""
    host = replace(verdict, bound="host", arena_gib_s=4.9e-6, ram_gib_s=None).sentence("cpu")
    assert "host-bound: of the 1.50 s of a step it has nothing to do for 100.00 ms;" in host
    assert host.endswith(
        "arena would save nothing, one more GiB of page-locked RAM an unknown time."
    )
    compute = replace(verdict, bound="compute", bound_s=0.0, step_s=0.25).sentence("cpu")
    assert (
        "of the 250.00 ms of a step it computes 900.00 ms; a step could take 0.00 ms at best;"
        in compute
    )


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_steps_are_put_down_after_the_warm_up() -> None:
    clock = Clock()
    pace = Pace(clock)
    counters = {"units": 4, "acquires": 0, "h2d_bytes": 0}
    for step in range(1, 41):
        clock.seconds += 2.0
        counters = {**counters, "acquires": 8 * step, "h2d_bytes": 3 * step}
        pace.uses += 8
        pace.passes += 2
        pace.end_step(counters)
        pace.end_step(counters)  # of another optimizer
        assert pace.ended == step
        window = pace.window()
        if step <= WARM_UP_STEPS:
            assert window is None
            continue
        assert window is not None
        steps = min(step - WARM_UP_STEPS, 16)
        assert (window.steps, window.seconds, window.passes) == (steps, 2.0 * steps, 2 * steps)
        assert window.counters["h2d_bytes"] == 3 * steps
    pace.end_step({**counters, "units": 5})
    assert pace.ended == 1 and pace.window() is None


def test_one_use_in_29_looks_and_the_first_of_a_step_measures_what_was_before_it() -> None:
    clock = Clock()
    pace = Pace(clock)
    looks = []
    for use in range(1, 80):
        pace.uses += 1
        if pace.uses >= pace.next_look:
            looks.append(use)
            pace.look(idle=len(looks) == 2)
    assert looks == [1, 1 + SAMPLED_ONE_IN, 1 + 2 * SAMPLED_ONE_IN]
    for step, idle in enumerate((False, True, False, True)):
        pace.end_step({"units": 1, "acquires": step + 1})
        assert pace.next_look == pace.uses + 1
        clock.seconds += 0.5 * step
        pace.uses += 1
        pace.look(idle)
        pace.uses += 1
        pace.look(idle)
    pace.end_step({"units": 1, "acquires": 9})
    window = pace.window()
    assert window is not None and window.steps == 3
    assert (window.looks, window.idle_looks) == (3, 2)
    assert window.batch_s == 0.5 + 1.5, "only where it had run out of work"


def test_in_steps_of_any_length_each_use_looks_as_often() -> None:
    for length in (2, 7, 24):
        pace, looked = Pace(Clock()), [0] * length
        for step in range(SAMPLED_ONE_IN * 20):
            for use in range(length):
                pace.uses += 1
                if pace.uses >= pace.next_look:
                    looked[use] += 1
                    pace.look(idle=False)
            pace.end_step({"units": 1, "acquires": step + 1})
        assert looked == [SAMPLED_ONE_IN * 20, *[20] * (length - 1)]
