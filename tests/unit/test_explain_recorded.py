"""What `explain` reads in a recording, row by row; without torch."""

from __future__ import annotations

from typing import Any

from oracle_offload.diagnose.explain.recorded import history_of, pieces_in
from oracle_offload.observe.recording import SCHEMA

GIB = 1 << 30


def row(event: str, step: int = 0, device: str = "cuda:0", **more: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "device": device, "phase": "training", **more}


def header(**before: int | None) -> dict[str, Any]:
    devices = [{"device": name.replace("_", ":"), "steps_before": n} for name, n in before.items()]
    return {"schema": SCHEMA, "devices": [*devices, "no device"]}


def test_the_device_is_the_one_that_ran_out_else_the_one_that_computed_last() -> None:
    rows = [
        header(cuda_0=0, cuda_1=0),
        row("compute", kind="forward"),
        row("compute", 7, "cuda:1", kind="forward"),
        row("compute", 7, "cuda:1", kind="backward"),
        row("compute", 1, kind="backward"),
    ]
    mine = [{"phase": "forward", "step": 0}, {"phase": "backward", "step": 1}]
    theirs = [{"phase": "forward", "step": 7}, {"phase": "backward", "step": 7}]
    assert history_of(rows) == mine
    assert history_of([*rows, row("memory", device="cuda:1")]) == theirs
    assert history_of([*rows, row("compute", 9, "cuda:1"), row("memory")]) == mine


def test_steps_before_the_recording_count() -> None:
    rows = [row("compute", 2, kind="recompute"), row("optimizer", 2), row("step", 2)]
    assert history_of([header(cuda_0=3), *rows]) == [
        {"step": 0, "phase": "backward"},  # one of those that came before
        {"step": 5, "phase": "backward"},
        {"step": 5, "phase": "optimizer"},
        {"step": 6, "allocated_bytes": None, "peak_bytes": None},
    ]


def test_what_a_header_or_an_event_does_not_tell_is_left_out() -> None:
    use = row("compute", 4, kind="forward")
    for first in (header(), header(cuda_0=None), {"schema": SCHEMA}):
        assert history_of([first, use]) == [{"phase": "forward"}]
    del use["step"]
    assert history_of([header(cuda_0=0), use]) == [{"phase": "forward"}]


def test_a_phase_is_told_where_it_begins_and_the_first_has_no_name() -> None:
    rows = [
        row("phase", name="sampling"),
        row("phase", name="training"),
        row("batch", length=7),
        row("compute", kind="forward"),
        row("compute", kind="forward"),
        row("compute", phase="sampling"),
        row("wait"),
    ]
    assert history_of([header(cuda_0=0), *rows]) == [
        {"phase": "sampling", "step": 0},
        {"phase": "", "step": 0},
        {"length": 7, "step": 0},
        {"phase": "forward", "step": 0},
        {"phase": "sampling", "step": 0},
    ]


def test_pieces_of_no_known_size_are_none() -> None:
    def found(largest: int) -> list[str]:
        sizes = {"asked_bytes": GIB, "cached_bytes": 3 * GIB, "largest_cached_bytes": largest}
        return [sign.cause for sign in pieces_in([header(), row("memory", **sizes)])]

    assert found(0) == [] and found(1) == ["fragmentation"] and found(GIB) == []
    assert pieces_in([header()]) == []
