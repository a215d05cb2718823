"""What an engine lives through, by the calls of `oracle_offload._core` alone, without torch.

`make asan-python` runs it under AddressSanitizer with leak check, and `test_binding.py` counts what
1,000 of these lives leave behind.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from oracle_offload import _core
from oracle_offload.engine import simulator
from oracle_offload.errors import DriverError, OffloadError

LIBRARY = str(simulator.library_path())
KIB = 1024
TENSOR_BYTES = (8 * KIB, 3000)  # of each member
ARENA_BYTES = 64 * KIB  # three of six units


class Life:
    """An engine on the simulated driver, one model of six units, and the memory they are in."""

    def __init__(self) -> None:
        self.engine = _core.Engine(LIBRARY, 0)
        self.stream = self.engine.compute_stream
        self.buffer = _core.HostBuffer(160 * KIB)
        self.view = memoryview(self.buffer)
        for at in range(0, len(self.view), 4 * KIB):
            self.view[at : at + 4 * KIB] = bytes([1 + at // (4 * KIB)]) * (4 * KIB)
        assert self.engine.lock(self.buffer) is None and self.buffer.locked
        self.lease = self.engine.add_lease()
        self.model = self.engine.add_model()
        self.block = ctypes.create_string_buffer(ARENA_BYTES + _core.ALIGNMENT)
        start = ctypes.addressof(self.block)
        self.arena = start + -start % _core.ALIGNMENT
        self.engine.add_segment(self.lease, self.arena, ARENA_BYTES, self.stream)
        self.units: dict[int, list[int]] = {}
        self.tensors: dict[int, list[tuple[int, int, int]]] = {}  # host, bytes, offset
        at = self.buffer.address
        for i in range(6):
            members = []
            for _ in range(2):
                members.append([(at, TENSOR_BYTES[0]), (at + TENSOR_BYTES[0], TENSOR_BYTES[1])])
                at += TENSOR_BYTES[0] + 3 * KIB
            self.add_unit(members, trainable=i == 5)
        self.stamp = 1

    def add_unit(self, members: list[list[tuple[int, int]]], trainable: bool) -> None:
        unit, rows = self.engine.add_unit(self.model, members, trainable)
        self.units[unit] = [member for member, _ in rows]
        for (member, offsets), tensors in zip(rows, members, strict=True):
            self.tensors[member] = [(*t, o) for t, o in zip(tensors, offsets, strict=True)]

    def fetched(self, units: tuple[int, ...] | None) -> None:
        members = (member for unit in units or () for member in self.units[unit])
        self.engine.stamp([(member, self.stamp) for member in members])

    def use(self, member: int, kind: int, task: int) -> None:
        """One layer: acquire, compare what the kernel would read, release."""
        ticket, address, units = self.engine.acquire(
            member, self.stream, self.stamp, kind, task, 1e-6
        )
        self.fetched(units)
        for host, nbytes, offset in self.tensors[member]:
            assert ctypes.string_at(address + offset, nbytes) == ctypes.string_at(host, nbytes)
        self.fetched(self.engine.release(ticket, self.stream))

    def step(self, task: int) -> None:
        members = [member for unit in self.units.values() for member in unit]
        for member in members:
            self.use(member, _core.FORWARD, -1)
        assert len(self.engine.residents()) > 0
        for member in reversed(members):
            self.use(member, _core.BACKWARD, task)
        gradient = ctypes.create_string_buffer(b"\x03" * 5000, 5000)
        target = ctypes.create_string_buffer(5000)
        source, to = ctypes.addressof(gradient), ctypes.addressof(target)
        self.engine.download(to, source, 5000, self.stream)
        assert target.raw == b"\x03" * 5000
        self.engine.hold()
        self.view[:4] = b"\x7f" * 4
        self.stamp += 1
        self.engine.resume()
        self.engine.refresh(self.model)

    def look(self) -> None:
        """Everything that only reports."""
        engine = self.engine
        assert engine.simulated and engine.device_name and engine.pci_id and engine.driver_version
        assert engine.stats()["managed_bytes"] == engine.stats(model=self.model)["managed_bytes"]
        assert engine.learned_block_bytes == engine.stats()["learned_block_bytes"]
        assert engine.mem_info()[1] > 0
        engine.make_current()
        assert self.buffer.nbytes == len(self.view)
        assert len(engine.journal_read(0)[2]) > 8 and engine.numa_node >= -1
        engine.journal_stop()
        assert engine.unit_waits().keys() <= self.units.keys()
        assert engine.pace(self.model)[0]

    def expect(self, times: int) -> None:
        """Pass what an earlier run has learned, and read it again."""
        unit, other = list(self.units)[:2]
        self.engine.expect_pace([(unit, 1000), (other, 2000)], 10**9)
        self.engine.expect([(unit, _core.FORWARD), (other, _core.FORWARD)] * times)
        assert len(self.engine.visits(self.model)) == 4 * times

    def lend(self) -> None:
        """Slot memory that outlasts its use, masters read in place, and memory for both."""
        member, [(_, nbytes, offset), *_] = next(iter(self.tensors.items()))
        ticket, *_ = self.engine.acquire(member, self.stream, self.stamp, _core.FORWARD, -1, 1e-6)
        kept = self.engine.keep(member, self.stream, offset, nbytes, 2, 0)
        self.fetched(self.engine.release(ticket, self.stream))
        mapped = self.engine.map(member, self.stream, nbytes, 1, 0, 1e-6)
        assert kept is not None and mapped is not None
        del kept, mapped
        other = _core.HostBuffer(8 * KIB)
        assert self.engine.lockable(other) == 8 * KIB
        assert self.engine.reserve_rings(64 * KIB) is None
        assert self.engine.lock(other, 0) is None
        _, [(member, _)] = self.engine.add_unit(self.model, [[(other.address, 4 * KIB)]], False)
        assert self.engine.map(member, self.stream, 16, 1, 0, 0.0) is None, "it is not locked"
        self.engine.remove_member(member)
        self.engine.unlock(other)
        self.engine.spin(self.stream, 1000)

    def move(self) -> None:
        """A member's tensors elsewhere, which makes it a unit of its own, and back."""
        other = _core.HostBuffer(16 * KIB)
        self.engine.lock(other)
        source = ctypes.create_string_buffer(b"\x05" * 5000, 5000)
        other.fill(100, ctypes.addressof(source), 5000)
        unit = next(iter(self.units))
        member = self.units[unit].pop()
        home = self.tensors[member]
        for place in ([(other.address, 8 * KIB)], [(host, nbytes) for host, nbytes, _ in home]):
            unit, offsets = self.engine.move_member(member, place)
            self.units[unit] = [member]
            self.tensors[member] = [(*t, o) for t, o in zip(place, offsets, strict=True)]
            self.use(member, _core.FORWARD, -1)
            del self.units[unit]
        self.units[unit] = [member]
        self.engine.unlock(other)

    def close_unused(self) -> None:
        """The end of a life that took no step."""
        self.engine.remove_lease(self.lease)
        self.engine.remove_model(self.model)
        self.engine.unlock(self.buffer)
        self.engine.close()

    def close(self) -> None:
        member = next(iter(self.units.values())).pop()
        self.engine.remove_member(member)
        fails(ValueError, self.engine.remove_member, member)
        self.engine.remove_lease(self.lease)
        self.engine.remove_model(self.model)
        self.engine.unlock(self.buffer)
        self.engine.close()
        self.engine.close()
        assert self.view[0] == 0x7F, "host memory lives as long as its last view"
        assert bytes(memoryview(self.buffer)[:4]) == b"\x7f" * 4


def live_once() -> None:
    """Attach, two steps under a trace, a member that moves, detach."""
    life = Life()
    life.expect(2)
    life.engine.journal_start(32)
    life.engine.set_verify(True)
    life.engine.trace_start()
    life.step(1)
    life.engine.set_verify(False)
    life.step(2)
    assert {row["kind"] for row in life.engine.trace_stop()} >= {"compute", "h2d", "d2h"}
    life.look()
    life.lend()
    life.move()
    life.engine.set_trainable(next(iter(life.units)), True)
    life.close()


def tell_much() -> None:
    """More rows than a table of the wrong size has room for."""
    life = Life()
    life.expect(600)
    life.view[:4] = b"\x7f" * 4
    life.close()


def drop_while_locked() -> None:
    """Locked memory keeps its engine; without a close, the last reference gives all back."""
    before = _core.live()
    engine = _core.Engine(LIBRARY, 0)
    buffer = _core.HostBuffer(4 * KIB)
    engine.lock(buffer)
    del engine
    view = memoryview(buffer)
    del buffer
    view[0] = 1
    assert {name: n - before[name] for name, n in _core.live().items()} == {
        "engines": 1,
        "buffers": 1,
        "buffer_bytes": 4 * KIB,
    }
    view.release()
    assert _core.live() == before, f"still alive: {_core.live()}, before: {before}"


def share_memory() -> None:
    """Two engines lock one memory; it keeps both alive until they let go, or it goes."""
    before = _core.live()
    for unlocked in (0, 1, None):
        engines = [_core.Engine(LIBRARY, 0) for _ in range(2)]
        buffer = _core.HostBuffer(4 * KIB)
        for engine in engines:
            assert engine.lock(buffer) is None
            fails(OffloadError, engine.lock, buffer)
        if unlocked is not None:
            engines[unlocked].unlock(buffer)
            engines[unlocked].close()
            fails(OffloadError, engines[unlocked].lock, buffer)
        del engine, engines
        assert buffer.locked
        assert _core.live()["engines"] == before["engines"] + (2 if unlocked is None else 1)
        del buffer
        assert _core.live() == before, f"still alive: {_core.live()}, before: {before}"


def fails(error: Any, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """The call raises `error`."""
    try:
        call(*arguments, **named)
    except error:
        return
    raise AssertionError(f"{call} takes {arguments} {named}")


class Sly:
    """An integer whose conversion does something else first."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action

    def __index__(self) -> int:
        self.action()
        return 8

    def __bool__(self) -> bool:
        self.action()
        return True


def fail_once() -> None:
    """Every call with arguments that it must refuse, and after close."""
    fails(ValueError, _core.HostBuffer, 0)
    fails(TypeError, _core.HostBuffer, "8")
    fails(OffloadError, _core.Engine, "/no/such/library.so", 0)
    fails(TypeError, _core.Engine, 1, 2, 3)
    fails(OffloadError, _core.Engine, LIBRARY, 99)
    life = Life()
    engine, member = life.engine, next(iter(life.tensors))
    unit = next(iter(life.units))
    host = life.tensors[member][0][0]
    for name, arguments in (
        ("lock", ()),
        ("lock", (3,)),
        ("unlock", (3,)),
        ("keep_in", (life.buffer, [(1, 2)])),
        ("keep_in", (life.buffer, [(1, 2, Sly(life.engine.hold))])),
        ("remove_model", ("x",)),
        ("remove_lease", ("x",)),
        ("add_segment", (life.lease, life.arena)),
        ("add_segment", (life.lease, life.arena, "many", 0)),
        ("add_unit", (life.model, [3], False)),
        ("add_unit", (life.model, [[(1, "x")]], False)),
        ("add_unit", (life.model, [[1]], False)),
        ("add_unit", (life.model, [[(host, Sly(life.engine.hold))]], False)),
        ("add_unit", (life.model, [[(host, 8), (host, "x")]], False)),
        ("add_unit", (life.model, [[(host, 8, 8)]], False)),
        ("add_unit", (life.model, [[(host, 8, 8, "bf16")]], False)),
        ("add_unit", (life.model, [[(host, 8, Sly(life.engine.hold), 1)]], False)),
        ("move_member", (member, [(1, None)])),
        ("remove_member", ("x",)),
        ("set_trainable", (unit,)),
        ("acquire", (member, life.stream)),
        ("acquire", (member, "stream", 0, 0, 0, 0.0)),
        ("acquire", (member, life.stream, 0, 0, 0, "slow")),
        ("use", (member, life.stream, 0, 0, -1, 0.0)),
        ("use", (member, life.stream, 0, 0, -1, "slow", list)),
        ("stamp", ()),
        ("stamp", (member, 1)),
        ("stamp", (((member, 1),),)),
        ("stamp", ([member],)),
        ("stamp", ([(member,)],)),
        ("stamp", ([(member, 1), (member, None)],)),
        ("stamp", ([(member, Sly(life.engine.hold))],)),
        ("release", (1,)),
        ("download", (0, 0, 0)),
        ("spin", (0,)),
        ("refresh", (None,)),
        ("stats", ("x",)),
    ):
        fails(TypeError, getattr(engine, name), *arguments)
    for name, arguments in (
        ("acquire", (member, life.stream, 0, 4, -1, 0.0)),
        ("acquire", (9999, life.stream, 0, 0, -1, 0.0)),
        ("use", (9999, life.stream, 0, 0, -1, 0.0, list)),
        ("add_unit", (life.model, [], False)),
        ("add_unit", (life.model, [[]], False)),
        ("add_unit", (9, [[(host, 8)]], False)),
        ("add_unit", (life.model, [[(host, 8, 8, 4)]], False)),
        ("add_unit", (life.model, [[(host, 8, 8, 1)]], False)),
        ("move_member", (9999, [(host, 8)])),
        ("remove_member", (9999,)),
        ("keep", (9999, life.stream, 0, 16, 1, 0)),
        ("map", (9999, life.stream, 16, 1, 0, 0.0)),
        ("stamp", ([(member, 1), (9999, 1)],)),
        ("set_trainable", (9999, True)),
        ("keep_in", (life.buffer, [(1, 2, 3)])),
        ("remove_model", (9,)),
        ("remove_lease", (9,)),
        ("add_segment", (life.lease, life.arena, 0, life.stream)),
    ):
        fails((ValueError, OffloadError), getattr(engine, name), *arguments)
    fails(OffloadError, engine.release, 12345, life.stream)
    fails(OffloadError, engine.close)
    with simulator.fault("cuStreamWaitEvent", result=701):
        fails(DriverError, engine.acquire, member, life.stream, 1, _core.FORWARD, -1, 0.0)
    life.view[:4] = b"\x7f" * 4
    life.close()
    for name, arguments in (
        ("acquire", (member, life.stream, 0, 0, -1, 0.0)),
        ("add_model", ()),
        ("add_lease", ()),
        ("stats", ()),
        ("stamp", ([],)),
        ("residents", ()),
        ("unit_waits", ()),
        ("trace_stop", ()),
        ("lock", (life.buffer,)),
    ):
        fails(OffloadError, getattr(engine, name), *arguments)
    for name, arguments in (
        ("lock", (life.buffer, None)),
        ("set_verify", (None,)),
        ("stats", (None,)),
        ("acquire", (None, 0, 0, 0, -1, 0.0)),
        ("add_unit", (0, [], None)),
        ("move_member", (None, [(host, 8)])),
    ):
        # Closed while its arguments are being read.
        again = _core.Engine(LIBRARY, 0)
        closing = Sly(again.close)
        given = [closing if value is None else value for value in arguments]
        fails(OffloadError, getattr(again, name), *given)


def main() -> int:
    for _ in range(5):
        live_once()
        tell_much()
        fail_once()
        drop_while_locked()
        share_memory()
    left = _core.live()
    assert not any(left.values()), left
    assert simulator.reports() == [], simulator.reports()
    print("alive after five lives:", left)
    return 0


if __name__ == "__main__":
    sys.exit(main())
