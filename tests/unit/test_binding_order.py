"""What the extension declares to the race detector."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
from binding_life import LIBRARY, Life

from oracle_offload import _core
from oracle_offload.engine import simulator
from oracle_offload.errors import OffloadError


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
    # One byte in the middle, ordered by nothing: any read of it races.
    simulator.launch(other.value, writes=[(address + offset + nbytes // 2, 1)])
    assert len(simulator.reports("race: write-after-read")) == 1, simulator.reports()
    simulator.clear_reports()
    assert driver.cuStreamDestroy_v2(other) == 0
    assert driver.cuCtxPopCurrent_v2(None) == 0
    assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
    life.fetched(life.engine.release(ticket, life.stream))
    life.view[:4] = b"\x7f" * 4
    life.close()


class DLTensor(ctypes.Structure):
    """A DLPack tensor, as far as the extension fills it in, and who deletes it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dimensions", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 2),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


def kept(life: Life, member: int, offset: int = 0, nbytes: int = 16) -> tuple[int, object]:
    """Keep a member beyond its use; return where it is, and the capsule."""
    ticket, address, units = life.engine.acquire(member, life.stream, 1, _core.FORWARD, -1, 1e-6)
    life.fetched(units)
    capsule = life.engine.keep(member, life.stream, offset, nbytes, 2, 7)
    life.fetched(life.engine.release(ticket, life.stream))
    return address, capsule


def pins(life: Life) -> int:
    return sum(row[3] for row in life.engine.residents())


def tensor_of(capsule: object) -> tuple[int, DLTensor]:
    """Return where the tensor of a capsule is, and the tensor."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    at = pointer_of(capsule, b"dltensor")
    assert at is not None
    return at, DLTensor.from_address(at)


def take(capsule: object) -> None:
    """Do what a consumer does: the tensor is its own from now on."""
    # The name is not copied.
    ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(capsule), b"used_dltensor")


def test_a_kept_use_is_a_tensor_of_bytes_in_the_slot_and_ends_with_it() -> None:
    life = Life()
    member = next(iter(life.tensors))
    _, nbytes, offset = life.tensors[member][1]
    address, capsule = kept(life, member, offset, nbytes)
    at, tensor = tensor_of(capsule)
    assert tensor.data == address + offset and list(tensor.device) == [2, 7]
    assert (tensor.dimensions, tensor.shape[0], tensor.strides) == (1, nbytes, None)
    assert (list(tensor.dtype), tensor.lanes, tensor.byte_offset) == ([1, 8], 1, 0)
    take(capsule)
    del capsule
    assert pins(life) == 1
    tensor.deleter(at)  # without the GIL
    assert pins(life) == 0
    life.view[:4] = b"\x7f" * 4
    life.close()


@pytest.mark.parametrize("taken", [False, True], ids=["not taken", "taken"])
def test_a_mapping_is_a_tensor_of_the_masters_and_ends_with_it(taken: bool) -> None:
    life = Life()
    member = next(iter(life.tensors))
    (host, nbytes, _), *_ = life.tensors[member]
    capsule = life.engine.map(member, life.stream, nbytes, 2, 7, 1e-3)
    at, tensor = tensor_of(capsule)
    assert ctypes.string_at(tensor.data, nbytes) == ctypes.string_at(host, nbytes)
    assert (tensor.shape[0], list(tensor.device)) == (nbytes, [2, 7])
    for _ in range(2):
        with pytest.raises(OffloadError, match=f"member {member} is removed while"):
            life.engine.remove_member(member)
        if taken:
            take(capsule)
    del capsule
    if taken:
        tensor.deleter(at)
    assert life.engine.stats()["h2d_bytes"] == 0 and pins(life) == 0
    assert simulator.finish() >= 1e-3, "the kernel computed for as long as it was said to"
    life.engine.remove_member(member)
    life.close_unused()


def test_masters_that_are_not_locked_are_mapped_nowhere() -> None:
    life = Life()
    buffer = _core.HostBuffer(8192)
    life.engine.lock(buffer, 4096)
    for at, is_mapped in ((0, True), (4096, False)):
        _, [(member, _)] = life.engine.add_unit(life.model, [[(buffer.address + at, 4096)]], False)
        capsule = life.engine.map(member, life.stream, 4096, 1, 0, 0.0)
        assert (capsule is not None) is is_mapped
        del capsule
        life.engine.remove_member(member)  # nothing is in use
    life.engine.unlock(buffer)
    life.close_unused()


def test_a_capsule_that_nobody_took_ends_its_use() -> None:
    life = Life()
    _, capsule = kept(life, next(iter(life.tensors)))
    assert pins(life) == 1
    with pytest.raises(OffloadError, match="being computed with"):
        life.engine.remove_model(life.model)
    del capsule
    assert pins(life) == 0
    life.view[:4] = b"\x7f" * 4
    life.close()


def test_unlocked_memory_holds_its_engine_no_longer() -> None:
    before = _core.live()["engines"]
    engine, buffer = _core.Engine(LIBRARY, 0), _core.HostBuffer(4096)
    assert engine.lock(buffer) is None
    with pytest.raises(OffloadError, match="know"):
        engine.lock(buffer)
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


@pytest.mark.parametrize("refused", [False, True])
def test_a_release_tells_of_copies_over_what_copy_threads_may_be_bringing(refused: bool) -> None:
    """These are started without the interpreter's lock, in a call of their own.

    Where that is refused they are given up, and the release is none the worse.
    """
    page, units, room = 4096, 200, 160
    engine, buffer = _core.Engine(LIBRARY, 0), _core.HostBuffer(page * units)
    engine.lock(buffer, 0)
    lease, model, stream = engine.add_lease(), engine.add_model(), engine.compute_stream
    block = ctypes.create_string_buffer(page * room + 2 * _core.ALIGNMENT)
    engine.add_segment(lease, ctypes.addressof(block), page * room + _core.ALIGNMENT, stream)
    members = []
    for at in range(buffer.address, buffer.address + buffer.nbytes, page):
        unit, rows = engine.add_unit(model, [[(at, page)]], False)
        assert unit == len(members)
        members.append(rows[0][0])

    def stamp(fetched: tuple[int, ...] | None) -> None:
        engine.stamp([(members[unit], 1) for unit in fetched or ()])

    def resident() -> set[int]:
        return {row[0] for row in engine.residents()}

    fed: set[int] = set()  # copied ahead, and not asked for
    driven_out = struck = 0
    for i in [*range(units), *range(units), *range(units), *range(10), *range(100, 120)]:
        ticket, _, fetched = engine.acquire(members[i], stream, 1, _core.FORWARD, -1, 1e-6)
        stamp(fetched)
        before = resident()
        fed = fed & before - {i}
        # The second time that the context is asked for is that of the call of their own.
        fault = simulator.fault("cuCtxPushCurrent", nth=2)
        asked = simulator.call_count("cuCtxPushCurrent")
        with fault if refused else contextlib.nullcontext():
            fetched = engine.release(ticket, stream)
        struck += refused and simulator.call_count("cuCtxPushCurrent") - asked >= 2
        stamp(fetched)
        assert resident() - before <= set(fetched or ()), "copied, and not reported"
        driven_out += len(fed - resident())
        fed = (fed | set(fetched or ())) & resident()
    # Where the machine is slow, the threads are done before: then the release itself drives out.
    assert driven_out or struck, "nothing was that may have been under way"
    engine.remove_lease(lease)
    engine.remove_model(model)
    engine.unlock(buffer)
    engine.close()
