"""What each call of an engine answers, and what it says where it cannot: by the extension alone."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from binding_life import LIBRARY, Life
from test_binding import ARGUMENTS, arguments_of

from oracle_offload import _core
from oracle_offload.engine import simulator
from oracle_offload.errors import DriverError, NoRoomError, OffloadError

KIB = 1024
OF_ENGINE = vars(_core.Engine).items()
WITHOUT_ARGUMENTS = [
    name for name, what in OF_ENGINE if getattr(what, "__text_signature__", "") == "($self, /)"
]
PROPERTIES = [name for name, what in OF_ENGINE if type(what).__name__ == "getset_descriptor"]


@pytest.fixture(autouse=True)
def fresh() -> None:
    simulator.reset()


def ask(life: Life, call: str) -> Callable[[], Any]:
    """Return a call of the engine with arguments that are right."""
    if call in PROPERTIES:
        return functools.partial(getattr, life.engine, call)
    arguments = tuple(arguments_of(life, call).values()) if call in ARGUMENTS else ()
    return functools.partial(getattr(life.engine, call), *arguments)


def test_a_closed_engine_refuses_every_call() -> None:
    life = Life()
    calls = {name: ask(life, name) for name in (*ARGUMENTS, *WITHOUT_ARGUMENTS, *PROPERTIES)}
    life.close_unused()
    assert calls.pop("close")() is None
    for name, call in calls.items():
        with pytest.raises(OffloadError, match="this engine is closed"):
            raise AssertionError(f"{name} answers {call()!r}")
    assert not life.buffer.locked


def test_a_fork_is_refused_every_call_that_asks_the_engine(tmp_path: Path) -> None:
    """What the engine refuses is raised, by each of its calls."""
    life = Life()
    calls = {name: ask(life, name) for name in (*ARGUMENTS, *WITHOUT_ARGUMENTS, *PROPERTIES)}
    child = os.fork()
    if child == 0:
        said = {}
        for name, call in calls.items():
            try:
                said[name] = repr(call())
            except BaseException as error:
                said[name] = f"{type(error).__name__}: {error}"
        (tmp_path / "said").write_text(json.dumps(said))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    said = json.loads((tmp_path / "said").read_text())
    asking = ("compute_stream", "learned_block_bytes")  # the others were noted when it was made
    kept = {name: said.pop(name) for name in PROPERTIES if name not in asking}
    assert kept == {name: repr(getattr(life.engine, name)) for name in kept}
    for name, answer in said.items():
        assert answer.startswith("OffloadError: this process is a fork of the one that"), name
    life.close_unused()


@pytest.mark.parametrize("call", [name for name in ARGUMENTS if name != "stats"])
def test_a_call_with_too_few_or_too_many_arguments_is_refused(call: str) -> None:
    life = Life()
    arguments = [*arguments_of(life, call).values()]
    least = 1 if call == "lock" else len(arguments)
    for given in (arguments[: least - 1], [*arguments, 1]):
        told = {
            f"{call}() takes {least} arguments, not {len(given)}",
            f"{call}() takes a HostBuffer and an optional size, not {len(given)} arguments",
            "expect_pace() takes a list of (unit, nanoseconds) and the link's bytes in a second",
        }
        with pytest.raises(TypeError) as raised:
            getattr(life.engine, call)(*given)
        ours = len(arguments) > 1 and call not in ("keep_in", "add_unit", "move_member")
        assert (str(raised.value) in told) is ours, raised.value
    life.close_unused()


def test_the_device_is_told_as_the_driver_has_it() -> None:
    life = Life()
    engine, device = life.engine, simulator.get_device()
    version, devices = _core.driver_probe(LIBRARY)
    assert engine.simulated is True and devices == 1
    assert (engine.device_name, engine.driver_version) == (device.name, version)
    assert (engine.pci_id, engine.numa_node) == ("0000:F0:00.0", -1)
    free, total = engine.mem_info()
    assert 0 < free < total == int(device.memory_bytes)
    assert engine.compute_stream == life.stream != 0
    life.close_unused()


def test_a_context_is_left_current_on_the_thread_that_asks() -> None:
    life = Life()
    driver, found = ctypes.CDLL(LIBRARY), []

    def current() -> None:
        for make in (lambda: None, life.engine.make_current):
            assert make() is None
            context = ctypes.c_void_p()
            assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
            found.append(context.value is not None)

    thread = threading.Thread(target=current)
    thread.start()
    thread.join()
    assert found == [False, True]
    life.close_unused()


# ---- memory ----


def test_memory_is_locked_as_far_as_it_is_asked() -> None:
    life = Life()
    engine = life.engine

    def locked() -> int:
        stats = engine.stats()
        return stats["locked_bytes"] - stats["ring_bytes"] - life.buffer.nbytes

    buffer = _core.HostBuffer(64 * KIB)
    assert engine.lockable(buffer) == 64 * KIB
    assert engine.lock(buffer, 5000) is None and buffer.locked
    assert locked() == 8 * KIB
    with pytest.raises(OffloadError, match="locked already"):
        engine.lockable(buffer)
    engine.unlock(buffer)
    assert locked() == 0 and (buffer.known, buffer.locked) == (False, False)
    assert engine.lock(buffer, 0) is None and (buffer.known, buffer.locked) == (True, False)
    engine.unlock(buffer)
    life.close_unused()


def test_a_refusal_to_lock_is_an_answer_and_the_memory_is_known() -> None:
    life = Life()
    engine, buffer = life.engine, _core.HostBuffer(64 * KIB)
    with simulator.lock_quota(life.buffer.nbytes + 16 * KIB):
        assert engine.lockable(buffer) <= 16 * KIB
        said = engine.lock(buffer)
        rings = engine.reserve_rings(1 << 20)
    assert said is not None and "CUDA_ERROR_OUT_OF_MEMORY (2)" in said and not buffer.locked
    assert rings is not None and "CUDA_ERROR_OUT_OF_MEMORY (2)" in rings
    with pytest.raises(OffloadError, match="know"):
        engine.lock(buffer)
    references = sys.getrefcount(engine)
    engine.unlock(buffer)
    assert sys.getrefcount(engine) == references - 1, "memory that it knows keeps it alive"
    assert engine.reserve_rings(1 << 20) is None and engine.stats()["ring_bytes"] == 2 << 20
    assert engine.reserve_rings(0) is None and engine.stats()["ring_bytes"] == 0
    life.close_unused()


def test_what_holds_no_host_memory_cannot_be_locked() -> None:
    life = Life()
    for call in (life.engine.lock, life.engine.lockable, life.engine.unlock):
        with pytest.raises(TypeError, match="a HostBuffer is needed"):
            call(bytearray(4096))  # type: ignore[operator]
    with pytest.raises(OffloadError):
        life.engine.unlock(_core.HostBuffer(4096))
    life.close_unused()


def test_what_the_driver_keeps_is_told_by_close() -> None:
    engine = _core.Engine(LIBRARY, 0)
    assert engine.compute_stream
    alive = _core.live()["engines"]
    with simulator.fault("cuStreamDestroy", result=701):
        said = engine.close()
    assert said is not None and "cuStreamDestroy" in said and "701" in said
    assert _core.live()["engines"] == alive - 1 and engine.close() is None
    simulator.clear_reports()


def test_more_memory_than_there_is_and_less_arena_than_a_unit_are_told_apart() -> None:
    life = Life()
    with pytest.raises(MemoryError, match="has no 4294967296"):
        _core.HostBuffer(2**62)
    _, [(member, _)] = life.engine.add_unit(life.model, [[(life.buffer.address, 128 * KIB)]], False)
    with pytest.raises(NoRoomError, match="131072"):
        life.engine.acquire(member, life.stream, 1, _core.FORWARD, -1, 0.0)
    with simulator.fault("cuMemcpyHtoDAsync", result=701), pytest.raises(DriverError) as raised:
        life.engine.acquire(next(iter(life.tensors)), life.stream, 1, _core.FORWARD, -1, 0.0)
    assert (raised.value.call, raised.value.code) == ("cuMemcpyHtoDAsync", 701)
    assert raised.value.name == "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
    life.close_unused()


# ---- units and uses ----


def resident(life: Life) -> set[int]:
    return {unit for unit, *_ in life.engine.residents()}


@pytest.mark.parametrize("trainable", [True, False])
def test_copies_of_what_is_trainable_are_dropped_while_masters_are_rewritten(
    trainable: bool,
) -> None:
    life = Life()
    engine, units = life.engine, list(life.units)
    engine.set_trainable(units[0], trainable)
    for unit in (units[0], units[-1]):  # the last one was added as one that is trainable
        life.use(life.units[unit][0], _core.FORWARD, -1)
        assert unit in resident(life)
        engine.hold()
        assert (unit in resident(life)) is (unit == units[0] and not trainable)
        engine.resume()
    life.close_unused()


def test_what_is_stale_is_copied_anew() -> None:
    life = Life()
    engine, member = life.engine, next(iter(life.tensors))
    other = engine.add_model()

    def copies() -> int:
        before = engine.stats(life.model)["h2d_copies"], engine.stats()["prefetches"]
        life.use(member, _core.FORWARD, -1)
        after = engine.stats(life.model)["h2d_copies"], engine.stats()["prefetches"]
        return after[0] - before[0] - (after[1] - before[1])

    assert [copies(), copies()] == [1, 0]
    engine.refresh(other)
    assert copies() == 0
    engine.refresh(life.model)
    assert [copies(), copies()] == [1, 0]
    engine.set_verify(True)
    life.view[4321] ^= 1  # and no stamp tells of it
    assert [copies(), copies()] == [1, 0]
    assert engine.stats(other)["h2d_copies"] == 0 < engine.stats(life.model)["h2d_copies"]
    engine.remove_model(other)
    with pytest.raises(ValueError, match=f"model {other} "):
        engine.stats(other)
    life.close_unused()


def test_what_is_removed_counts_no_more() -> None:
    life = Life()
    engine = life.engine
    counted = [engine.stats()[name] for name in ("arena_bytes", "units", "managed_bytes")]
    assert counted == [64 * KIB, 6, 6 * (2 * 11 * KIB)]
    member = next(iter(life.tensors))
    ticket, *_ = engine.acquire(member, life.stream, 1, _core.FORWARD, -1, 0.0)
    for call in (engine.remove_lease, engine.remove_model, engine.remove_member):
        with pytest.raises(OffloadError, match=r"computed with|computes with"):
            call({"lease": life.lease, "model": life.model, "member": member}[call.__name__[7:]])
    assert engine.release(ticket, life.stream) is not None
    with pytest.raises(OffloadError, match="released twice"):
        engine.release(ticket, life.stream)
    engine.remove_lease(life.lease)
    assert engine.stats()["arena_bytes"] == 0
    engine.remove_model(life.model)
    assert engine.stats()["units"] == engine.stats()["managed_bytes"] == 0
    engine.unlock(life.buffer)
    assert engine.close() is None


def test_a_stream_is_busy_for_as_long_as_it_spins() -> None:
    life = Life()
    began = simulator.now()
    life.engine.spin(life.stream, 3_000_000)
    assert not simulator.is_idle(life.stream)
    assert simulator.finish() - began == pytest.approx(3e-3, rel=0.01)
    assert simulator.is_idle(life.stream)
    life.close_unused()


def test_an_object_that_has_no_truth_says_why() -> None:
    life = Life()

    class Neither:
        def __bool__(self) -> bool:
            raise KeyError("neither")

    with pytest.raises(KeyError, match="neither"):
        life.engine.set_verify(Neither())  # type: ignore[arg-type]
    life.close_unused()


# ---- what happened ----


def bring_back(life: Life) -> None:
    """Copy something to the host."""
    gradient, target = (ctypes.create_string_buffer(5000) for _ in range(2))
    to, source = ctypes.addressof(target), ctypes.addressof(gradient)
    life.engine.download(to, source, 5000, life.stream)


def use_twice(life: Life) -> tuple[int, int]:
    """A use, a copy to the host, and the same use in a backward; return the member and its unit."""
    unit, [member, *_] = next(iter(life.units.items()))
    life.use(member, _core.FORWARD, -1)
    bring_back(life)
    life.use(member, _core.BACKWARD, 3)
    return member, unit


def test_a_journal_tells_what_was_done_in_order() -> None:
    life = Life()
    engine = life.engine
    for call in (lambda: engine.journal_read(0), engine.journal_stop):
        with pytest.raises(OffloadError, match="no journal"):
            call()
    engine.journal_start(6)
    assert engine.journal_read(0) == (0, simulator.now(), [])
    _, unit = use_twice(life)
    first, now_s, rows = engine.journal_read(0)
    used, waited, copied_in, copied_out = 0, 1, 2, 3  # see enum oo_deed
    home = {row[0]: (row[1], row[2]) for row in engine.residents()}
    ahead = next(other for other in home if other != unit)
    assert [(deed, of, nbytes, detail) for deed, of, _, nbytes, detail in rows] == [
        (copied_in, unit, 22456, home[unit][0]),
        (waited, unit, 0, 0),
        (used, unit, home[unit][1], _core.FORWARD),
        (copied_in, ahead, 22456, home[ahead][0]),
        (copied_out, -1, 5000, 0),
        (used, unit, home[unit][1], _core.BACKWARD),
    ]
    times = [row[2] for row in rows]
    assert first == 0 and times == sorted(times) and times[0] < times[-1] <= now_s
    assert now_s == simulator.now()
    assert engine.journal_read(4) == (4, now_s, rows[4:])
    assert engine.journal_read(99) == (6, now_s, [])
    life.use(life.units[unit][0], _core.BACKWARD, 3)
    first, _, later = engine.journal_read(0)
    assert first > 0 and later[: 6 - first] == rows[first:]
    with pytest.raises(OffloadError, match="a journal is being kept already"):
        engine.journal_start(8)
    engine.journal_stop()
    life.close_unused()


def test_a_timeline_tells_what_ran_and_when() -> None:
    life = Life()
    engine = life.engine
    with pytest.raises(OffloadError, match="no timeline"):
        engine.trace_stop()
    engine.trace_start()
    with pytest.raises(OffloadError, match="already"):
        engine.trace_start()
    _, unit = use_twice(life)
    rows = engine.trace_stop()
    fields = ["kind", "unit", "start_s", "end_s", "bytes"]
    assert all(list(row) == fields and 0 <= row["start_s"] < row["end_s"] for row in rows)
    assert [(row["kind"], row["unit"], row["bytes"]) for row in rows if row["unit"] <= unit] == [
        ("h2d", unit, 22456),
        ("stall", unit, 0),
        ("compute", unit, 0),
        ("d2h", -1, 5000),
        ("compute", unit, 0),
    ]
    assert [row["kind"] for row in rows if row["unit"] > unit] == ["h2d"]
    life.close_unused()


def test_the_arena_the_waits_and_the_uses_are_told_by_unit() -> None:
    life = Life()
    engine = life.engine
    member, unit = use_twice(life)
    ticket, address, _ = engine.acquire(member, life.stream, 1, _core.BACKWARD, 3, 0.0)
    rows = engine.residents()
    assert [(row[0], row[2], row[3]) for row in rows] == [(unit, 22528, 1), (unit + 1, 22528, 0)]
    assert [row[1] for row in rows] == [address, address + 22528]
    engine.release(ticket, life.stream)
    engine.trace_start()  # else one in 16 is measured, from the first on
    other = list(life.units)[4]
    life.use(life.units[other][0], _core.BACKWARD, 3)
    (stall,) = (row for row in engine.trace_stop() if row["kind"] == "stall")
    assert stall["unit"] == other and engine.unit_waits() == {unit: (1, 0, 0.0), other: (1, 0, 0.0)}
    assert engine.visits(life.model)[:2] == [(unit, _core.FORWARD), (unit, _core.BACKWARD)]
    stats = engine.stats()
    assert (stats["d2h_bytes"], stats["d2h_copies"], stats["units"]) == (5000, 1, 6)
    assert isinstance(stats["h2d_copies"], int) and isinstance(stats["h2d_seconds"], float)
    assert stats["resident_units"] == len(engine.residents())
    life.close_unused()


def test_many_rows_are_told_whole() -> None:
    """More of them than there is room for at first."""
    life = Life()
    engine = life.engine
    units = [unit for unit in life.units for _ in range(400)]
    engine.expect([(unit, _core.FORWARD) for unit in units])
    assert engine.visits(life.model) == 2 * [(unit, _core.FORWARD) for unit in units]
    paces = [(unit, 1000 + unit) for unit in life.units]
    engine.expect_pace(paces, 10**9)
    rows, link_bps = engine.pace(life.model)
    assert rows == paces and link_bps == pytest.approx(10**9)
    engine.journal_start(9000)
    member = next(iter(life.tensors))
    for _ in range(4100):
        engine.release(engine.acquire(member, life.stream, 1, 0, -1, 0.0)[0], life.stream)
    read, entries = 0, []
    while part := engine.journal_read(read)[2]:
        assert len(part) <= 4096
        read += len(part)
        entries += part
    assert sum(row[0] == 0 for row in entries) == 4100
    engine.journal_stop()
    life.close_unused()


# ---- without memory for the answer ----


NEED_MEMORY = (
    *(
        "HostBuffer",
        "Engine",
        "lock",
        "keep_in",
        "trace_stop",
        "add_unit",
        "move_member",
        "stamp",
        "stats",
    ),
    *("mem_info", "visits", "expect", "pace", "expect_pace", "journal_read", "residents"),
    *("unit_waits", "keep", "map", "compute_stream", "device_name", "pci_id"),
)


def asked_again(life: Life, name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a call, and what comes before it, so that it can be made any number of times."""
    engine, buffer = life.engine, _core.HostBuffer(4 * KIB)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "lock": (int, lambda: (engine.lock(buffer), engine.unlock(buffer))),
        "keep_in": (int, lambda: engine.keep_in(buffer, [])),
        "trace_stop": (lambda: (engine.trace_start(), bring_back(life)), engine.trace_stop),
        "HostBuffer": (int, lambda: _core.HostBuffer(4 * KIB)),
        "Engine": (int, lambda: _core.Engine(LIBRARY, 0)),
    }
    return calls.get(name) or (int, ask(life, name))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", NEED_MEMORY)
def test_a_call_without_memory_for_its_answer_says_so_and_keeps_nothing(name: str) -> None:
    """Each allocation fails in turn; what is not given back shows where that is done again."""
    testing = pytest.importorskip("_testcapi")
    times = 20
    life = Life()
    engine = life.engine
    engine.journal_start(64)
    use_twice(life)
    engine.expect_pace([(unit, 1000) for unit in life.units], 10**9)
    if name == "keep":
        member = next(iter(life.tensors))
        ticket, *_ = engine.acquire(member, life.stream, 1, _core.FORWARD, -1, 0.0)
    before, call = asked_again(life, name)
    pins = sum(row[3] for row in engine.residents())

    def attempt(nth: int) -> bool:
        before()
        testing.set_nomemory(nth, nth + 1)
        try:
            call()
        except MemoryError:
            return False
        finally:
            testing.remove_mem_hooks()
        return True

    for nth in range(1000):
        attempt(nth)
        blocks = sys.getallocatedblocks()
        answers = [attempt(nth) for _ in range(times)]
        assert sys.getallocatedblocks() - blocks < times, f"lost where allocation {nth} fails"
        if all(answers):
            break
    assert nth > 0, "it needs no memory"
    assert sum(row[3] for row in engine.residents()) == pins
    if name == "keep":
        engine.release(ticket, life.stream)
    life.close_unused()


class Lengthens:
    """A cycle whose finalizer lengthens a list."""

    def __init__(self, rows: list[Any], by: list[Any]) -> None:
        self.rows, self.by, self.me = rows, by, self

    def __del__(self) -> None:
        self.rows.extend(self.by)


@pytest.mark.parametrize("call", ["add_unit", "move_member"])
def test_a_list_that_a_finalizer_lengthens_is_read_as_it_was(call: str) -> None:
    """Reading rows allocates, and any allocation may collect garbage."""
    life = Life()
    row = (life.buffer.address, 256, 0, 0)  # as a coded one: it is read in slices
    member = next(iter(life.tensors))
    threshold = gc.get_threshold()
    for allocations in range(1, 30):
        tensors = [row] * 4
        gc.collect()
        gc.disable()
        Lengthens(tensors, [row] * 64)
        gc.set_threshold(allocations)
        gc.enable()
        try:
            if call == "add_unit":
                _, [(_, offsets)] = life.engine.add_unit(life.model, [tensors], False)
            else:
                _, offsets = life.engine.move_member(member, tensors)
        finally:
            gc.set_threshold(*threshold)
        assert len(offsets) in (4, 68)  # before it was lengthened, or after that
    life.close_unused()


def test_bytes_leave_for_locked_memory_and_come_back() -> None:
    life = Life()
    engine, stream = life.engine, life.stream
    buffer = _core.HostBuffer(5000)
    assert engine.lock(buffer) is None
    source, target = ctypes.create_string_buffer(b"\x05" * 5000), ctypes.create_string_buffer(5000)
    out = engine.trip_out(buffer.address, ctypes.addressof(source), 5000, stream)
    assert engine.trip_arrived(out) is False
    engine.trip_join(out, stream)
    ctypes.memset(source, 6, 5000)  # the next owner's
    back = engine.trip_back(out, ctypes.addressof(target), stream)
    assert back != out
    engine.trip_join(back, stream)
    assert target.raw == b"\x05" * 5000
    engine.trip_await(out)
    assert engine.trip_arrived(out) is True and bytes(buffer) == b"\x05" * 5000
    engine.trip_end(back)
    engine.trip_end(out)
    for call in (engine.trip_arrived, engine.trip_await, engine.trip_end):
        with pytest.raises(OffloadError, match="is of no trip: it has ended"):
            call(out)
    stats = engine.stats()
    assert (stats["left_bytes"], stats["returned_bytes"]) == (5000, 5000)
    assert (stats["left_copies"], stats["returned_copies"]) == (1, 1)
    assert stats["d2h_bytes"] == 0 and simulator.reports() == []
    engine.unlock(buffer)
    life.close_unused()


def test_bytes_go_home_to_stay_and_come_in_from_locked_memory() -> None:
    life = Life()
    engine, stream = life.engine, life.stream
    buffer = _core.HostBuffer(5000)
    assert not engine.is_locked(buffer.address, 5000)
    assert engine.lock(buffer) is None
    assert engine.is_locked(buffer.address, 5000)
    assert not engine.is_locked(buffer.address, buffer.nbytes + (1 << 20))
    source, target = ctypes.create_string_buffer(b"\x05" * 5000), ctypes.create_string_buffer(5000)
    home = engine.trip_home(buffer.address, ctypes.addressof(source), 5000, stream)
    engine.trip_await(home)
    assert bytes(buffer) == b"\x05" * 5000
    come = engine.trip_in(ctypes.addressof(target), buffer.address, 5000, stream)
    engine.trip_join(come, stream)
    assert target.raw == b"\x05" * 5000
    with pytest.raises(ValueError, match="that trip is one back itself"):
        engine.trip_back(come, ctypes.addressof(target), stream)
    with pytest.raises(OffloadError, match="are not page-locked"):
        engine.trip_in(ctypes.addressof(target), ctypes.addressof(source), 5000, stream)
    engine.trip_end(come)
    engine.trip_end(home)
    stats = engine.stats()
    assert (stats["d2h_bytes"], stats["d2h_copies"], stats["left_bytes"]) == (5000, 1, 0)
    assert (stats["brought_bytes"], stats["brought_copies"]) == (5000, 1)
    assert stats["host_waits"] == 1 and simulator.reports() == []
    engine.unlock(buffer)
    life.close_unused()


@pytest.mark.skipif(sys.platform not in ("linux", "win32"), reason="there are no sections")
def test_a_section_is_one_memory_for_all_who_take_and_map_it() -> None:
    section = _core.section_create(5000)
    taken = _core.section_take(os.getpid(), section)
    assert taken != section
    one, other = _core.HostBuffer(5000, file=section), _core.HostBuffer(5000, -1, taken, 0)
    assert not any(bytes(one))
    memoryview(one)[4999] = 7
    assert memoryview(other)[4999] == 7
    one.protect(False)
    memoryview(other)[0] = 8
    assert memoryview(one)[0] == 8
    _core.pages_show(other.address, 8192, taken, 0)  # its own from now on
    memoryview(other)[0] = 9
    assert (memoryview(one)[0], memoryview(other)[4999]) == (8, 7)
    _core.section_close(section)
    _core.section_close(taken)
    assert memoryview(one)[4999] == 7
    with pytest.raises(OSError):
        _core.section_take(os.getpid(), section)
    with pytest.raises(OffloadError, match="does not map 5000 bytes of shared memory"):
        _core.HostBuffer(5000, file=section)


@pytest.mark.skipif(sys.platform != "linux", reason="a section is no file there")
def test_a_section_that_the_system_refuses_is_an_error_with_its_reason() -> None:
    import resource

    section = _core.section_create(5000)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            _core.section_create(5000)
        with pytest.raises(OSError, match="Too many open files"):
            _core.section_take(os.getpid(), section)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    _core.section_close(section)
