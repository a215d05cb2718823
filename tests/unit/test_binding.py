"""The extension module without torch: what its calls refuse, and that they leave nothing behind."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time

import pytest
from binding_life import drop_while_locked, fail_once, live_once

from oracle_offload import _core, simulator
from oracle_offload.errors import OffloadError

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


def test_an_engine_is_not_closed_under_a_call_of_another_thread() -> None:
    driver = ctypes.CDLL(str(simulator.library_path()))
    engine = _core.Engine(str(simulator.library_path()), 0)
    source, target = (ctypes.create_string_buffer(64) for _ in range(2))
    go_on = threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def wait(_: int | None) -> None:
        go_on.wait(5)

    stream, context = engine.compute_stream, ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    assert driver.cuLaunchHostFunc(ctypes.c_void_p(stream), wait, None) == 0
    assert driver.cuCtxPopCurrent_v2(None) == 0
    download = threading.Thread(
        target=engine.download,
        args=(ctypes.addressof(target), ctypes.addressof(source), 64, stream),
    )
    download.start()
    try:
        deadline = time.monotonic() + 5
        while not simulator.call_count("cuMemcpyDtoHAsync") and time.monotonic() < deadline:
            time.sleep(0.001)  # until the other thread is inside, where it waits for `wait`
        with pytest.raises(OffloadError, match="another thread is inside a call"):
            engine.close()
    finally:
        go_on.set()
        download.join()
        assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
    assert engine.close() is None
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
