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


def test_unlocked_memory_holds_its_engine_no_longer() -> None:
    before = _core.live()["engines"]
    engine, buffer = _core.Engine(LIBRARY, 0), _core.HostBuffer(4096)
    assert engine.lock(buffer) is None
    engine.unlock(buffer)
    assert _core.live()["engines"] == before + 1
    del engine
    assert _core.live()["engines"] == before and buffer.nbytes == 4096


@pytest.mark.parametrize("stamp", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_stamp_is_any_number_of_64_bits(stamp: int) -> None:
    life = Life()
    life.stamp = stamp
    member = next(iter(life.tensors))
    life.use(member, _core.FORWARD, -1)
    before = life.engine.stats()["stale"]
    life.use(member, _core.FORWARD, -1)
    assert life.engine.stats()["stale"] == before, "the same stamp is no other version"
    life.stamp ^= 1 << 63
    life.view[:4] = b"\x7f" * 4
    life.use(member, _core.FORWARD, -1)
    assert life.engine.stats()["stale"] == before + 1, "its highest bit counts"
    life.close()
