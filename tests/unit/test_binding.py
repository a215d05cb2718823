"""The extension module without torch: what its calls refuse, and that they leave nothing behind."""

from __future__ import annotations

import gc
import os
import sys

import pytest
from binding_life import drop_while_locked, fail_once, live_once

from oracle_offload import simulator

LIVES = 1000


@pytest.fixture(autouse=True)
def fresh() -> None:
    simulator.reset()


def test_an_engine_lives_and_reads_what_it_was_given() -> None:
    live_once()
    assert simulator.reports() == []


def test_wrong_arguments_are_refused_and_leave_a_usable_engine() -> None:
    fail_once()
    assert simulator.reports() == []


def test_memory_that_is_dropped_while_locked_is_given_back_with_its_engine() -> None:
    drop_while_locked()
    assert simulator.reports() == []


@pytest.mark.skipif(
    os.environ.get("PYTHONMALLOC", "").startswith("malloc"),
    reason="Python counts the blocks of its own allocator only",
)
def test_a_thousand_lives_leave_no_python_object_behind() -> None:
    def blocks_after(lives: int) -> int:
        for _ in range(lives):
            live_once()
            fail_once()
            drop_while_locked()
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after(20)
    grown = blocks_after(LIVES) - before
    # One object lost per life would be 1,000; caches of the interpreter come and go.
    assert grown < LIVES // 10, f"{grown} blocks more after {LIVES} lives"
