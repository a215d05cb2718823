"""What is counted of steps, without an engine."""

from __future__ import annotations

from oracle_offload.engine.pace import WARM_UP_STEPS, Pace


def test_the_end_of_a_step_is_told_once_where_two_threads_look_at_once():
    """Both found the device idle: one since the step had ended, the other at any time."""
    now_s, meanwhile = 0.0, []

    def clock():
        while meanwhile:
            meanwhile.pop()()
        return now_s

    pace = Pace(clock)
    steps = WARM_UP_STEPS + 3
    for step in range(steps):
        pace.end_step({"units": 1, "acquires": step})
        now_s += 0.5
        meanwhile.append(lambda: pace.look(idle=True))
        pace.look(idle=True)
        assert not meanwhile
    window = pace.window()
    assert window is not None and window.steps == steps - WARM_UP_STEPS
    assert window.looks == window.idle_looks == window.steps
    assert window.batch_s == 0.5 * window.steps
