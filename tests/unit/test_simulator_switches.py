"""What the simulator's switches do, what ends with their blocks, and what their errors name."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from test_simulator import NBYTES, Driver

from oracle_offload.engine import simulator
from oracle_offload.engine.simulator import Schedule
from oracle_offload.errors import DriverError, OffloadError

_called: list[object] = []  # host functions, for good


@pytest.fixture
def driver() -> Iterator[Driver]:
    simulator.reset()
    driver = Driver()
    yield driver
    simulator.clear_reports()
    driver.close()
    simulator.reset()


def test_a_trace_holds_what_was_still_under_way_and_ends_with_its_block(driver: Driver) -> None:
    stream = driver.stream()
    with simulator.trace() as rows:
        simulator.launch(stream, seconds=0.5)
        assert rows == []
    (row,) = rows
    assert (row.kind, row.stream, row.end_s - row.start_s) == ("kernel", stream, 0.5)
    simulator.launch(stream, seconds=0.5)
    simulator.finish()
    assert simulator.library().simTraceCount() == 1
    with simulator.trace() as rows:
        pass
    assert rows == []
    with pytest.raises(KeyError), simulator.trace():
        raise KeyError
    simulator.launch(stream)
    simulator.finish()
    assert simulator.library().simTraceCount() == 0


def test_late_submission_waits_for_a_query(driver: Driver) -> None:
    for late in (True, False):
        simulator.late_submission(late)
        stream = driver.stream()
        slot, master = driver.device_bytes(NBYTES), driver.host_bytes(NBYTES)
        before = simulator.stats().h2d_busy_s
        driver.copy_in(slot, master, NBYTES, stream)
        simulator.library().simAdvance(1.0)
        assert (simulator.stats().h2d_busy_s == before) is late
        driver.library.cuStreamQuery(ctypes.c_size_t(stream))
        simulator.library().simAdvance(1.0)
        assert simulator.stats().h2d_busy_s > before


def test_without_poison_memory_stays_as_it_was(driver: Driver) -> None:
    block = ctypes.create_string_buffer(b"\x02" * NBYTES, NBYTES)
    simulator.poison(False)
    simulator.adopt(ctypes.addressof(block), NBYTES)
    assert block.raw == b"\x02" * NBYTES
    simulator.drop(ctypes.addressof(block))
    simulator.poison(True)
    simulator.adopt(ctypes.addressof(block), NBYTES, keep=True)
    assert block.raw == b"\x02" * NBYTES
    simulator.drop(ctypes.addressof(block))


@pytest.mark.parametrize("nothing", [False, True])
def test_a_broken_driver_copies_nothing(driver: Driver, nothing: bool) -> None:
    stream = driver.stream()
    slot, master = driver.device_bytes(NBYTES), driver.host_bytes(NBYTES)
    ctypes.memset(master, 1, NBYTES)
    simulator.copy_nothing(nothing)
    driver.copy_in(slot, master, NBYTES, stream)
    driver.synchronize(stream)
    assert (ctypes.string_at(slot, NBYTES) == b"\x01" * NBYTES) is not nothing
    simulator.copy_nothing(False)


@pytest.mark.parametrize("on", [False, True])
def test_races_are_reported_while_they_are_looked_for(driver: Driver, on: bool) -> None:
    copies, compute = driver.stream(), driver.stream()
    slot, master = driver.device_bytes(NBYTES), driver.host_bytes(NBYTES)
    simulator.detect_races(on)
    driver.copy_in(slot, master, NBYTES, copies)
    simulator.launch(compute, reads=[(slot, NBYTES)])
    assert bool(simulator.reports("race")) is on
    assert simulator.reports("lint") == simulator.reports("deadlock") == []
    simulator.detect_races(True)


def test_what_a_block_changed_is_back_after_an_error() -> None:
    simulator.reset()
    schedule, device = simulator.get_schedule(), simulator.get_device()
    with pytest.raises(KeyError), simulator.schedule(Schedule.RANDOM, 9):
        assert simulator.get_schedule() == (Schedule.RANDOM, 9)
        raise KeyError
    assert simulator.get_schedule() == schedule
    with pytest.raises(KeyError), simulator.device(device, tflops=1.0) as changed:
        assert changed.tflops == simulator.get_device().tflops == 1.0
        raise KeyError
    assert simulator.get_device() == device
    with pytest.raises(KeyError), simulator.fault("cuInit", result=701, lasting=True):
        assert simulator.library().cuInit(0) == 701
        raise KeyError
    assert simulator.library().cuInit(0) == 0


def test_calls_are_counted_by_name_and_together(driver: Driver) -> None:
    before, inits = simulator.call_count(), simulator.call_count("cuInit")
    simulator.library().cuInit(0)
    assert (simulator.call_count(), simulator.call_count("cuInit")) == (before + 1, inits + 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: simulator.get_device(8), "simGetDevice: .*device 8"),
        (lambda: simulator.set_device_count(9), "simSetDeviceCount: .*9 devices"),
        (lambda: simulator.drop(0x1230), "simDrop: .*at 0x1230"),
        (lambda: simulator.advance(-1.0), r"simAdvance: .*-1\.0 s"),
        (lambda: simulator.hold(0x77), "simHold: .*stream 0x77"),
        (lambda: simulator.is_idle(0x77), "simIdle: .*stream 0x77"),
        (lambda: simulator.is_capturing(0x77), "simCapturing: .*stream 0x77"),
        (lambda: simulator.label_stream(0x77, "x"), "simLabelStream: .*0x77"),
        (lambda: simulator.launch(0x77, seconds=-1.0), r"simLaunch: .*stream 0x77.*-1\.0 s"),
    ],
)
def test_an_error_names_the_call_and_what_it_was_given(
    call: Callable[[], object], words: str
) -> None:
    with pytest.raises(DriverError, match=words) as caught:
        call()
    assert caught.value.code != 0 and caught.value.name.startswith("CUDA_ERROR")
    assert caught.value.call == words.split(":")[0]


def test_a_stream_says_whether_it_is_captured(driver: Driver) -> None:
    stream, relaxed = driver.stream(), 2
    assert simulator.is_capturing(stream) is False
    driver.call("cuStreamBeginCapture_v2", ctypes.c_size_t(stream), relaxed)
    assert simulator.is_capturing(stream) is True
    graph = ctypes.c_void_p()
    driver.call("cuStreamEndCapture", ctypes.c_size_t(stream), ctypes.byref(graph))
    driver.call("cuGraphDestroy", graph)
    assert simulator.is_capturing(stream) is False


@pytest.mark.parametrize(
    ("variable", "value", "fits"),
    [
        ("SIM_DEVICE", "", True),
        ("SIM_DEVICE", "h200", True),
        ("SIM_DEVICE", "H200", False),
        ("SIM_SEED", "", True),
        ("SIM_SEED", "0", True),
        ("SIM_SEED", str(2**64 - 1), True),
        ("SIM_SEED", str(2**64), False),
        ("SIM_SEED", "delayed", True),
        ("SIM_SEED", "delayed:41", True),
        ("SIM_SEED", f"delayed:{2**64 - 1}", True),
        ("SIM_SEED", f"delayed:{2**64}", False),
        ("SIM_SEED", "delayed:", False),
        ("SIM_SEED", "sometimes", False),
        ("SIM_SEED", "sometimes:3", False),
        ("SIM_SEED", "-1", False),
        ("SIM_SEED", "1" * 21, False),
    ],
)
def test_a_variable_that_the_library_would_refuse_is_named_with_its_value(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, fits: bool
) -> None:
    monkeypatch.setenv(f"ORACLE_OFFLOAD_{variable}", value)
    if fits:
        assert simulator.library_path().is_file()
        return
    expected = rf"ORACLE_OFFLOAD_{variable}='{value}' is no .*; unset it, or use .*(h200|delayed)"
    with pytest.raises(OffloadError, match=expected):
        simulator.library_path()


def test_as_many_devices_exist_as_were_asked_for() -> None:
    simulator.reset()
    library, count = simulator.library(), ctypes.c_int()
    library.cuInit(0)
    for devices in (3, 8, 0, 1):
        simulator.set_device_count(devices)
        assert library.cuDeviceGetCount(ctypes.byref(count)) == 0
        assert count.value == devices
    simulator.reset()


def test_the_name_of_a_device_takes_63_bytes() -> None:
    simulator.reset()
    before = simulator.get_device()
    for name, bytes_ in (("x" * 63, 63), ("é" * 31, 62), ("x" * 64, 64), ("é" * 32, 64)):
        named = replace(before, name=name)
        if bytes_ <= 63:
            simulator.set_device(0, named)
            assert simulator.get_device().name == name
        else:
            with pytest.raises(ValueError, match=f"at most 63 bytes, not {bytes_}: '{name}'"):
                simulator.set_device(0, named)
    simulator.set_device(0, before)


def test_the_schedule_says_how_to_replay_it() -> None:
    simulator.reset()
    with simulator.schedule(Schedule.DELAYED, 41):
        text = simulator.schedule_text()
    assert text == "delayed, seed 41; replay with ORACLE_OFFLOAD_SIM_SEED=delayed:41"


@pytest.mark.parametrize("lasting", [False, True])
def test_a_fault_strikes_the_nth_call_and_the_later_ones_if_it_lasts(lasting: bool) -> None:
    simulator.reset()
    call = simulator.library().cuInit
    with simulator.fault("cuInit", nth=2, result=701, lasting=lasting):
        assert [call(0) for _ in range(3)] == [0, 701, 701 if lasting else 0]
    assert call(0) == 0
    simulator.set_fault("cuInit", result=701, lasting=lasting)
    assert [call(0) for _ in range(2)] == [701, 701 if lasting else 0]
    simulator.clear_faults()
    assert call(0) == 0
    simulator.set_fault("cuInit")
    assert call(0) == 2, "out of memory, unless something else was asked for"
    simulator.clear_faults()


def test_a_wait_bears_as_long_as_it_was_told(driver: Driver) -> None:
    stream = driver.stream()
    simulator.hold(stream)
    simulator.launch(stream)
    for milliseconds in (0, 5):
        simulator.patience(milliseconds)
        assert simulator.library().cuStreamSynchronize(ctypes.c_void_p(stream)) != 0
        assert simulator.reports("deadlock")
        simulator.clear_reports()
    simulator.hold(stream, on=False)
    driver.synchronize(stream)


def test_a_wait_for_a_host_function_says_how_long_it_was(driver: Driver) -> None:
    stream, go_on = driver.stream(), threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def wait(_: int | None) -> None:
        go_on.wait(60)

    _called.append(wait)  # the driver's thread may be in it after this test
    driver.call("cuLaunchHostFunc", ctypes.c_size_t(stream), wait, None)
    simulator.patience(5)
    try:
        assert simulator.library().cuStreamSynchronize(ctypes.c_void_p(stream)) != 0
        (report,) = simulator.reports("deadlock")
        assert "which has not returned after 5 ms" in report
    finally:
        go_on.set()


def test_a_result_without_a_name_is_told_by_its_number() -> None:
    with pytest.raises(DriverError, match=r"^simReset: unknown CUresult \(12345\): why$"):
        simulator._check("simReset", 12345, "why")


@pytest.mark.parametrize("strict", [True, False])
def test_a_thread_with_its_own_clock_has_not_waited_for_what_another_waited_for(
    driver: Driver, strict: bool
) -> None:
    simulator.strict_threads(strict)
    stream, memory = driver.stream(), driver.device_bytes(NBYTES)
    simulator.launch(stream, [], [(memory, NBYTES)], 1e-6)

    def wait() -> None:
        context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        driver.call("cuCtxPushCurrent_v2", context)
        driver.synchronize(stream)
        driver.call("cuDevicePrimaryCtxRelease_v2", 0)

    waits = threading.Thread(target=wait)
    waits.start()
    waits.join()
    simulator.host_access(memory, NBYTES, False)
    assert len(simulator.reports("race")) == strict
    simulator.strict_threads(False)
