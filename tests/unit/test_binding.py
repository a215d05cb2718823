"""The extension module without torch: what its calls refuse, and that they leave nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from binding_life import LIBRARY, Life, drop_while_locked, fail_once, live_once, share_memory

from oracle_offload import _core
from oracle_offload.engine import simulator
from oracle_offload.errors import DriverError, OffloadError

LIVES = 1000


@pytest.fixture(scope="module", autouse=True)
def nothing_of_others_goes_meanwhile() -> None:
    gc.collect()


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


def test_memory_that_two_engines_lock_keeps_both_until_they_let_go() -> None:
    share_memory()
    assert simulator.reports() == []


ID = (0, 2**32 - 2)
ADDRESS = (0, 2**64 - 1)
NUMBER = (0, 2**64 - 1)
BYTES = (0, 2**63 - 1)
# Every call, its arguments in order, and what an integer may be. A name alone is no integer.
ARGUMENTS: dict[str, dict[str, tuple[int, int] | None]] = {
    "lock": {"buffer": None, "nbytes": BYTES},
    "lockable": {"buffer": None},
    "reserve_rings": {"nbytes": BYTES},
    "unlock": {"buffer": None},
    "keep_in": {"buffer": None, "kept": None},
    "remove_model": {"model": ID},
    "remove_lease": {"lease": ID},
    "add_segment": {"lease": ID, "address": ADDRESS, "nbytes": BYTES, "stream": ADDRESS},
    "add_staging": {"lease": ID, "address": ADDRESS, "nbytes": BYTES, "stream": ADDRESS},
    "add_unit": {"model": ID, "members": None, "trainable": None},
    "move_member": {"member": ID, "tensors": None},
    "remove_member": {"member": ID},
    "set_trainable": {"unit": ID, "trainable": (0, 1)},
    "acquire": {
        "member": ID,
        "stream": ADDRESS,
        "stamp": NUMBER,
        "kind": (0, 3),
        "task": (-1, 2**63 - 1),
        "seconds": None,
    },
    "use": {
        "member": ID,
        "stream": ADDRESS,
        "stamp": NUMBER,
        "kind": (0, 3),
        "task": (-1, 2**63 - 1),
        "seconds": None,
        "stamp_units": None,
    },
    "keep": {
        "member": ID,
        "stream": ADDRESS,
        "offset": BYTES,
        "nbytes": BYTES,
        "device_type": (1, 2**31 - 1),
        "device_index": (0, 2**31 - 1),
    },
    "map": {
        "member": ID,
        "stream": ADDRESS,
        "nbytes": BYTES,
        "device_type": (1, 2**31 - 1),
        "device_index": (0, 2**31 - 1),
        "seconds": None,
    },
    "stamp": {"stamps": None},
    "rewrite": {"unit": ID, "stream": ADDRESS, "stamps": None},
    "written": {"unit": ID, "stream": ADDRESS},
    "rewritten": {"unit": ID, "stream": ADDRESS, "stamps": None},
    "release": {"ticket": NUMBER, "stream": ADDRESS},
    "download": {"target": ADDRESS, "source": ADDRESS, "nbytes": BYTES, "stream": ADDRESS},
    "trip_out": {"target": ADDRESS, "source": ADDRESS, "nbytes": BYTES, "stream": ADDRESS},
    "trip_home": {"target": ADDRESS, "source": ADDRESS, "nbytes": BYTES, "stream": ADDRESS},
    "trip_in": {"target": ADDRESS, "source": ADDRESS, "nbytes": BYTES, "stream": ADDRESS},
    "is_locked": {"memory": ADDRESS, "nbytes": BYTES},
    "trip_back": {"ticket": NUMBER, "target": ADDRESS, "stream": ADDRESS},
    "trip_join": {"ticket": NUMBER, "stream": ADDRESS},
    "trip_arrived": {"ticket": NUMBER},
    "trip_await": {"ticket": NUMBER},
    "trip_end": {"ticket": NUMBER},
    "spin": {"stream": ADDRESS, "nanoseconds": (0, 10**10)},
    "refresh": {"model": ID},
    "set_verify": {"on": None},
    "stats": {"model": (-1, 2**32 - 2)},
    "visits": {"model": ID},
    "expect": {"visits": None},
    "pace": {"model": ID},
    "expect_pace": {"pace": None, "link_bps": NUMBER},
    "journal_start": {"entries": BYTES},
    "journal_read": {"first": NUMBER},
}
INTEGERS = [(call, name) for call, given in ARGUMENTS.items() for name in given if given[name]]


def arguments_of(life: Life, call: str) -> dict[str, Any]:
    """Return what the call takes, where nothing is wrong with it but one argument."""
    member, tensors = next(iter(life.tensors.items()))
    known = {
        "buffer": life.buffer,
        "kept": [],
        "model": life.model,
        "lease": life.lease,
        "address": life.arena,
        "source": tensors[0][0],
        "target": tensors[0][0],
        "memory": tensors[0][0],
        "nbytes": 16,
        "offset": 0,
        "device_type": 1,
        "device_index": 0,
        "stream": life.stream,
        "members": [[tensors[0][:2]]],
        "tensors": [tensors[0][:2]],
        "trainable": True,
        "unit": next(iter(life.units)),
        "member": member,
        "stamp": 1,
        "stamps": [(member, 1)],
        "stamp_units": list,
        "visits": [(next(iter(life.units)), _core.FORWARD)],
        "pace": [(next(iter(life.units)), 1000)],
        "link_bps": 10**9,
        "kind": _core.FORWARD,
        "task": -1,
        "seconds": 1e-6,
        "ticket": 0,
        "nanoseconds": 10,
        "on": False,
        "entries": 8,
        "first": 0,
    }
    return {name: known[name] for name in ARGUMENTS[call]}


def test_every_call_and_argument_of_the_engine_is_in_the_table() -> None:
    signatures = {
        name: [p.strip() for p in method.__text_signature__.strip("()").split(",")]
        for name, method in vars(_core.Engine).items()
        if getattr(method, "__text_signature__", None) and not name.startswith("_")
    }
    found = {
        name: [p.split("=")[0] for p in parameters if p not in ("$self", "/")]
        for name, parameters in signatures.items()
    }
    assert {name: names for name, names in found.items() if names} == {
        name: list(parameters) for name, parameters in ARGUMENTS.items()
    }


@pytest.mark.parametrize(("call", "name"), INTEGERS)
def test_an_integer_out_of_range_is_refused_by_name_and_value(call: str, name: str) -> None:
    least, most = ARGUMENTS[call][name] or (0, 0)
    life = Life()
    before = life.engine.stats()
    for value in (least - 1, most + 1, -(2**32), -(2**63), 2**64, 2**64 + 1, 2**200):
        with pytest.raises(ValueError, match=rf"{call}\(\): {name} must be .* not {value}\b"):
            getattr(life.engine, call)(*{**arguments_of(life, call), name: value}.values())
    for what in ("8", 1.5, None, b"8", [8]):
        with pytest.raises(TypeError):
            getattr(life.engine, call)(*{**arguments_of(life, call), name: what}.values())
    assert life.engine.stats() == before
    life.close_unused()


@pytest.mark.parametrize("at", [0, 1], ids=["address", "nbytes"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-1, ValueError),
        (2**64, ValueError),
        (2**200, ValueError),
        ("8", TypeError),
        (1.5, TypeError),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", ["add_unit", "move_member"])
def test_a_tensor_of_impossible_numbers_is_refused(
    call: str, at: int, value: Any, error: type[Exception]
) -> None:
    life = Life()
    arguments = arguments_of(life, call)
    tensor = [life.buffer.address, 16]
    tensor[at] = value
    rows = [(life.buffer.address, 16), tuple(tensor)]
    arguments["members" if call == "add_unit" else "tensors"] = (
        [rows] if call == "add_unit" else rows
    )
    with pytest.raises(error, match=str(value) if error is ValueError else "address, nbytes"):
        getattr(life.engine, call)(*arguments.values())
    life.close_unused()


@pytest.mark.parametrize(
    "wrong",
    [(-1, 1), (2**32 - 1, 1), (2**32, 1), (2**200, 1), (0, -(2**63) - 1), (0, 2**64), (0, 2**200)],
    ids=str,
)
def test_a_stamp_of_impossible_numbers_is_refused_and_none_is_given(wrong: tuple[int, int]) -> None:
    life = Life()
    member = next(iter(life.tensors))
    life.use(member, _core.FORWARD, -1)
    with pytest.raises(ValueError, match=r"a stamp\(\): (member|stamp) must be"):
        life.engine.stamp([(member, life.stamp + 1), wrong])
    before = life.engine.stats()["stale"]
    life.use(member, _core.FORWARD, -1)
    assert life.engine.stats()["stale"] == before, "the first of the two was stamped"
    life.close_unused()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ([(0, 4)], ValueError),
        ([(0, -1)], ValueError),
        ([(-1, 0)], ValueError),
        ([(2**32 - 1, 0)], ValueError),
        ([(0, 2**200)], ValueError),
        ([(9999, 0)], ValueError),
        ([], ValueError),
        ([(0, 0)] * 40000, ValueError),
        ([(0,)], TypeError),
        ([0], TypeError),
        ([("a", 0)], TypeError),
        (((0, 0),), TypeError),
        (None, TypeError),
    ],
    ids=lambda value: str(value)[:20],
)
def test_uses_that_cannot_be_expected_are_refused(wrong: Any, error: type[Exception]) -> None:
    life = Life()
    with pytest.raises(error):
        life.engine.expect(wrong)
    assert life.engine.visits(life.model) == []
    life.close_unused()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (([(9999, 1)], 1), ValueError),
        (([(2**32 - 1, 1)], 1), ValueError),
        (([(0, -1)], 1), ValueError),
        (([(0, 2**64)], 1), ValueError),
        (([(0, 1), (0,)], 1), TypeError),
        (([(0, 0.5)], 1), TypeError),
        (([0], 1), TypeError),
        ((((0, 1),), 1), TypeError),
        (([(0, 1)],), TypeError),
        (([(0, 1)], 1, 1), TypeError),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_pace_that_cannot_be_expected_is_refused(wrong: Any, error: type[Exception]) -> None:
    life = Life()
    with pytest.raises(error):
        life.engine.expect_pace(*wrong)
    assert life.engine.pace(life.model) == ([], 0)
    life.close_unused()


def test_a_pace_is_told_and_expected() -> None:
    life = Life()
    unit, other = list(life.units)[:2]
    life.engine.expect_pace([(unit, 2000), (other, 0)], 10**9)
    rows, link_bps = life.engine.pace(life.model)
    assert rows == [(unit, 2000)] and link_bps == pytest.approx(10**9)
    life.close_unused()
    for call in (lambda: life.engine.pace(life.model), lambda: life.engine.expect_pace([], 0)):
        with pytest.raises(OffloadError):
            call()


def test_uses_are_told_and_expected() -> None:
    life = Life()
    assert life.engine.visits(life.model) == []
    unit, members = next(iter(life.units.items()))
    life.use(members[0], _core.FORWARD, -1)
    life.use(members[0], _core.BACKWARD, 1)
    seen = [(unit, _core.FORWARD), (unit, _core.BACKWARD)]
    assert life.engine.visits(life.model) == seen
    life.engine.expect(seen)
    assert life.engine.visits(life.model) == 3 * seen
    life.close_unused()
    for call in (lambda: life.engine.visits(life.model), lambda: life.engine.expect(seen)):
        with pytest.raises(OffloadError):
            call()


@pytest.mark.parametrize("value", [-1, 2**64 - 1, 2**64, "8", None, 1.5], ids=repr)
@pytest.mark.parametrize("name", ["offset", "source", "nbytes"])
def test_a_fill_of_a_wrong_range_or_type_is_refused(name: str, value: Any) -> None:
    buffer = _core.HostBuffer(64)
    source = ctypes.create_string_buffer(64)
    given = {"offset": 0, "source": ctypes.addressof(source), "nbytes": 8, name: value}
    with pytest.raises(ValueError if isinstance(value, int) else TypeError) as raised:
        buffer.fill(*given.values())
    assert not isinstance(value, int) or re.search(rf"{value}|{value:#x}", str(raised.value))
    assert bytes(buffer) == bytes(64)


@pytest.mark.parametrize("value", [-1, 0, 2**63, 2**64 - 1, 2**200])
def test_host_memory_of_an_impossible_size_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=rf"nbytes must be from 1 to .* not {value}\b"):
        _core.HostBuffer(value)


@pytest.mark.parametrize("value", [-1, 2**31, 2**32, 2**64])
def test_a_device_number_of_none_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=rf"device must be from 0 to .* not {value}\b"):
        _core.Engine(LIBRARY, value)


@contextlib.contextmanager
def a_stream_that_waits(stream: int) -> Iterator[threading.Event]:
    """What is queued on the stream comes after the event is set, and Python has run on a thread."""
    driver = ctypes.CDLL(str(simulator.library_path()))
    go_on = threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def wait(_: int | None) -> None:
        go_on.wait(60)

    context = ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    assert driver.cuLaunchHostFunc(ctypes.c_void_p(stream), wait, None) == 0
    try:
        yield go_on
    finally:
        go_on.set()
        assert driver.cuStreamSynchronize(ctypes.c_void_p(stream)) == 0
        assert driver.cuCtxPopCurrent_v2(None) == 0
        assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0


@contextlib.contextmanager
def a_thread_inside(engine: Any) -> Iterator[threading.Event]:
    """Another thread is in a download, until the event is set and Python runs there."""
    source, target = (ctypes.create_string_buffer(64) for _ in range(2))
    stream = engine.compute_stream
    download = threading.Thread(
        target=engine.download,
        args=(ctypes.addressof(target), ctypes.addressof(source), 64, stream),
    )
    with a_stream_that_waits(stream) as go_on:
        before = simulator.call_count("cuMemcpyDtoHAsync")
        download.start()
        try:
            deadline = time.monotonic() + 60
            while simulator.call_count("cuMemcpyDtoHAsync") == before:
                assert time.monotonic() < deadline
                time.sleep(0.001)  # until the other thread is inside, where it waits for `wait`
            yield go_on
        finally:
            go_on.set()
            download.join()


def test_an_engine_is_not_closed_under_a_call_of_another_thread() -> None:
    engine = _core.Engine(str(simulator.library_path()), 0)
    with (
        a_thread_inside(engine),
        pytest.raises(OffloadError, match="another thread is inside a call"),
    ):
        engine.close()
    assert engine.close() is None
    assert simulator.reports() == []


def test_an_engine_is_closed_to_other_threads_while_it_is_being_closed() -> None:
    """What a download left queued, when even waiting failed, is waited for at the end."""
    engine = _core.Engine(LIBRARY, 0)
    driver = ctypes.CDLL(LIBRARY)
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    assert driver.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
    source, target = (ctypes.create_string_buffer(64) for _ in range(2))
    with a_stream_that_waits(stream.value or 0) as go_on:
        with (
            simulator.fault("cuEventSynchronize", result=701),
            simulator.fault("cuStreamSynchronize", result=701),
            pytest.raises(DriverError, match="cuEventSynchronize"),
        ):
            addresses = ctypes.addressof(target), ctypes.addressof(source)
            engine.download(*addresses, 64, stream.value or 0)
        before = simulator.call_count("cuStreamSynchronize")
        closing = threading.Thread(target=engine.close)
        closing.start()
        deadline = time.monotonic() + 60
        while simulator.call_count("cuStreamSynchronize") == before:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        late = threading.Timer(5, go_on.set)  # for a call that would wait for the engine
        late.start()
        for call in (engine.stats, engine.add_model, lambda: engine.device_name):
            with pytest.raises(OffloadError, match="this engine is closed"):
                call()
        assert engine.close() is None and closing.is_alive()
        late.cancel()
        go_on.set()
        closing.join()
    assert driver.cuStreamDestroy_v2(stream) == 0
    assert driver.cuCtxPopCurrent_v2(None) == 0
    assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
    assert simulator.reports() == []


@pytest.mark.parametrize("call", ["stamp", "acquire", "keep", "map", "release"])
def test_a_call_waits_for_another_thread_without_the_interpreter_s_lock(call: str) -> None:
    """What the other thread waits for is Python: with the lock kept, it would never come."""
    life = Life()
    member = next(iter(life.tensors))
    ticket, *_ = life.engine.acquire(member, life.stream, 1, _core.FORWARD, -1, 0.0)
    arguments = {**arguments_of(life, call), **({"ticket": ticket} if call == "release" else {})}
    with a_thread_inside(life.engine) as go_on:
        timer = threading.Timer(0.05, go_on.set)
        timer.start()
        answer = getattr(life.engine, call)(*arguments.values())
        assert go_on.is_set()
        timer.join()
    pins = {"keep": 2, "map": 2, "acquire": 2, "release": 0}
    assert sum(row[3] for row in life.engine.residents()) == pins.get(call, 1)
    if call == "acquire":
        life.engine.release(answer[0], life.stream)
    if call != "release":
        life.engine.release(ticket, life.stream)
    del answer
    life.close_unused()


def test_a_copy_that_finds_the_driver_s_queue_full_waits_without_the_interpreter_s_lock() -> None:
    """What the device waits for is Python: with the lock kept, no room would ever come."""
    parts = 1100  # the simulated driver's queue has 1,024 entries
    engine = _core.Engine(LIBRARY, 0)
    buffer = _core.HostBuffer(2 * parts * _core.ALIGNMENT)
    assert engine.lock(buffer) is None
    lease, model = engine.add_lease(), engine.add_model()
    nbytes = parts * _core.ALIGNMENT
    block = ctypes.create_string_buffer(nbytes + _core.ALIGNMENT)
    engine.add_segment(lease, ctypes.addressof(block), len(block), engine.compute_stream)
    # In the opposite order no two of them are one copy.
    tensors = [(buffer.address + i * _core.ALIGNMENT, _core.ALIGNMENT) for i in range(parts)]
    many, [(member, _)] = engine.add_unit(model, [tensors[::-1]], False)
    _, [(other, _)] = engine.add_unit(model, [[(buffer.address + nbytes, nbytes)]], False)

    def acquire(which: int) -> int:
        ticket: int = engine.acquire(which, engine.compute_stream, 1, _core.FORWARD, -1, 0.0)[0]
        return ticket

    for _ in range(4):  # there is room for one of them
        engine.release(acquire(member), engine.compute_stream)
        engine.release(acquire(other), engine.compute_stream)
    engine.release(acquire(member), engine.compute_stream)
    ticket = acquire(other)
    copies = engine.stats()["h2d_copies"]
    with a_stream_that_waits(engine.compute_stream) as go_on:
        timer = threading.Timer(0.05, go_on.set)
        timer.start()
        assert engine.release(ticket, engine.compute_stream) == (many,)
        assert engine.stats()["h2d_copies"] == copies + parts
        assert go_on.is_set()
        timer.join()
    engine.remove_model(model)
    engine.remove_lease(lease)
    engine.unlock(buffer)
    assert engine.close() is None
    assert simulator.reports() == []


def test_an_acquire_that_waits_lets_other_threads_run() -> None:
    """It waits for a use that this thread ends: with the lock of the interpreter kept, never."""
    life = Life()
    member = next(iter(life.tensors))
    arguments = member, life.stream, 1, _core.FORWARD, -1, 0.0
    ticket, _, _ = life.engine.acquire(*arguments)
    life.engine.refresh(life.model)
    answers: list[Any] = []

    def wait() -> None:
        try:
            answers.append(life.engine.acquire(*arguments))
            life.engine.release(answers[0][0], life.stream)
        except OffloadError as error:
            answers.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    assert not answers, answers
    life.engine.release(ticket, life.stream)
    thread.join()
    assert isinstance(answers[0], tuple), answers
    life.close_unused()


def test_an_engine_that_dies_while_an_error_is_raised_leaves_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the driver refused is reported separately; the error that was raised before goes on."""
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: told.append(what.exc_value))

    def fail() -> None:
        simulator.set_fault("cuStreamDestroy", 1, 701)
        raise KeyError("on its way")

    def both(*_: Any) -> None:
        raise AssertionError

    with pytest.raises(KeyError, match="on its way"):
        both(_core.Engine(LIBRARY, 0), fail())  # type: ignore[func-returns-value]
    gc.collect()
    assert len(told) == 1 and isinstance(told[0], DriverError), told
    assert told[0].code == 701 and "cuStreamDestroy" in str(told[0])
    assert _core.live()["engines"] == 0
    simulator.clear_reports()


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
            share_memory()
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after(20)
    grown = blocks_after(LIVES) - before
    # One object lost per life would be 1,000; caches of the interpreter come and go.
    assert grown < LIVES // 10, f"{grown} blocks more after {LIVES} lives"


# ---- what is taken for the length of a with block ----


def used(life: Life, told: list[Any], fails: bool = False) -> Any:
    def stamp_units(units: tuple[int, ...]) -> None:
        told.append(units)
        if fails:
            raise KeyboardInterrupt

    member = next(iter(life.tensors))
    return life.engine.use(member, life.stream, 1, _core.FORWARD, -1, 0.0, stamp_units)


def pins_of(life: Life) -> int:
    return sum(row[3] for row in life.engine.residents())


def test_a_use_lasts_as_long_as_its_block() -> None:
    life = Life()
    told: list[Any] = []
    for error in (None, RuntimeError("inside")):
        with contextlib.suppress(RuntimeError), used(life, told) as address:
            assert pins_of(life) == 1
            assert address == next(row[1] for row in life.engine.residents() if row[3])
            if error:
                raise error
        assert pins_of(life) == 0
    assert told and all(isinstance(units, tuple) for units in told)
    life.close_unused()


def test_a_use_that_is_let_go_ends_and_what_it_fetched_is_not_trusted() -> None:
    life = Life()
    told: list[Any] = []
    with pytest.raises(KeyboardInterrupt):  # before the block, and at its end
        used(life, told, fails=True)
    assert told and pins_of(life) == 0
    stale = life.engine.stats()["stale"]
    used(life, told)
    assert pins_of(life) == 0
    assert life.engine.stats()["stale"] == stale + 1
    life.engine.refresh(life.model)
    block = used(life, told)
    assert pins_of(life) == 1
    with block:
        pass
    with block:  # which has ended
        assert pins_of(life) == 0
    del block
    assert pins_of(life) == 0
    life.close_unused()


@pytest.mark.parametrize("at_its_begin", [True, False])
def test_what_is_not_trusted_waits_without_the_interpreter_s_lock(at_its_begin: bool) -> None:
    """An interrupt, while another thread is in a call of the engine that waits for Python."""
    life = Life()
    members = list(life.tensors)
    calls: list[tuple[int, ...]] = []
    with contextlib.ExitStack() as stack:

        def interrupted(units: tuple[int, ...]) -> None:
            calls.append(units)
            if len(calls) == (1 if at_its_begin else 2):
                timer = threading.Timer(0.05, stack.enter_context(a_thread_inside(life.engine)).set)
                timer.start()
                stack.callback(timer.join)
                raise KeyboardInterrupt

        for task in range(3):  # learn, so that a release copies ahead
            life.step(task)
        life.engine.refresh(life.model)
        use = life.engine.use
        with (
            pytest.raises(KeyboardInterrupt),
            use(members[0], life.stream, life.stamp, _core.FORWARD, -1, 0.0, interrupted),
        ):
            assert len(calls) == 1
    assert len(calls) == (1 if at_its_begin else 2)
    stale = life.engine.stats()["stale"]
    member = life.units[calls[-1][0]][0]
    life.use(member, _core.FORWARD, -1)
    assert life.engine.stats()["stale"] == stale + 1
    life.close()


def test_what_is_taken_is_given_back_once() -> None:
    calls: list[str] = []

    def take() -> str:
        calls.append("take")
        return "taken"

    def give() -> None:
        calls.append("give")
        if len(calls) == cut_at:
            raise KeyboardInterrupt

    cut_at = 0
    with _core.Taken(take, give) as found:
        assert found == "taken" and calls == ["take"]
    assert calls == ["take", "give"]
    with contextlib.suppress(RuntimeError), _core.Taken(take, give):
        raise RuntimeError
    assert calls == ["take", "give"] * 2
    calls.clear()
    _core.Taken(take, give).__enter__()  # let go on the way to the block
    assert calls == ["take", "give"]
    calls.clear()
    with _core.Taken(lambda: False, give) as none:
        assert none is False
    assert calls == []
    _core.Taken(take, give)
    assert calls == []
    with pytest.raises(ZeroDivisionError), _core.Taken(lambda: 1 / 0, give):
        pass
    assert calls == []
    cut_at = 2
    with pytest.raises(KeyboardInterrupt), _core.Taken(take, give):
        pass
    assert calls == ["take", "give", "give"]


class Owner:
    """Holds what it has taken, and gives it back: a circle of references."""

    def __init__(self, given: list[str]) -> None:
        self.given = given
        self.block = _core.Taken(lambda: True, self.give)

    def give(self) -> None:
        self.given.append("back")


@pytest.mark.parametrize("is_taken", [False, True])
def test_what_is_taken_by_a_circle_is_given_back_before_that_is_taken_apart(is_taken: bool) -> None:
    given: list[str] = []
    owner = Owner(given)
    if is_taken:
        owner.block.__enter__()
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    assert given == ["back"] * is_taken
