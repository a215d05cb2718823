"""What the extension declares to the race detector."""

from __future__ import annotations

import ctypes

import pytest
from binding_life import LIBRARY, Life

from oracle_offload import _core, simulator


@pytest.fixture(autouse=True)
def fresh() -> None:
    simulator.reset()


@pytest.mark.parametrize("tensor", [0, 1], ids=["weight", "bias"])
def test_an_acquire_declares_that_every_tensor_of_the_member_is_read(tensor: int) -> None:
    life = Life()
    member = next(iter(life.tensors))
    ticket, address, units = life.engine.acquire(member, life.stream, 1, _core.FORWARD, -1, 1e-6)
    life.fetched(units)
    assert simulator.reports() == []
    driver = ctypes.CDLL(LIBRARY)
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context := ctypes.c_void_p()), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    other = ctypes.c_void_p()
    assert driver.cuStreamCreateWithPriority(ctypes.byref(other), 1, 0) == 0
    assert other.value
    _, nbytes, offset = life.tensors[member][tensor]
    # One byte in the middle, by nobody's order: whoever reads it races.
    simulator.launch(other.value, writes=[(address + offset + nbytes // 2, 1)])
    assert len(simulator.reports("race: write-after-read")) == 1, simulator.reports()
    simulator.clear_reports()
    assert driver.cuStreamDestroy_v2(other) == 0
    assert driver.cuCtxPopCurrent_v2(None) == 0
    assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
    life.fetched(life.engine.release(ticket, life.stream))
    life.view[:4] = b"\x7f" * 4
    life.close()
