"""The simulated driver through its Python wrapper and through ctypes, without torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oracle_offload.engine import simulator
from oracle_offload.engine.simulator import Schedule
from oracle_offload.errors import DriverError

try:
    simulator.library_path()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

NBYTES = 4096
MIB = 1 << 20


class Driver:
    """The few cu* calls that these tests need."""

    def __init__(self) -> None:
        self.library = simulator.library()
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxPushCurrent_v2", context)
        self.streams: list[int] = []
        self.events: list[int] = []
        self.host: list[int] = []
        self.device: list[int] = []

    def call(self, name: str, *arguments: object) -> None:
        result = getattr(self.library, name)(*arguments)
        assert result == 0, f"{name} returned {result}"

    def handle(self, name: str, *arguments: object) -> int:
        value = ctypes.c_size_t()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def stream(self) -> int:
        self.streams.append(self.handle("cuStreamCreateWithPriority", 1, 0))
        return self.streams[-1]

    def event(self) -> int:
        self.events.append(self.handle("cuEventCreate", 0))
        return self.events[-1]

    def host_bytes(self, nbytes: int) -> int:
        self.host.append(self.handle("cuMemHostAlloc", ctypes.c_size_t(nbytes), 0))
        return self.host[-1]

    def device_bytes(self, nbytes: int) -> int:
        self.device.append(self.handle("cuMemAlloc_v2", ctypes.c_size_t(nbytes)))
        return self.device[-1]

    def copy_in(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.call("cuMemcpyHtoDAsync_v2", *map(ctypes.c_size_t, (dst, src, nbytes, stream)))

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", ctypes.c_size_t(event), ctypes.c_size_t(stream))

    def wait(self, stream: int, event: int) -> None:
        self.call("cuStreamWaitEvent", ctypes.c_size_t(stream), ctypes.c_size_t(event), 0)

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", ctypes.c_size_t(stream))

    def close(self) -> None:
        for stream in self.streams:
            self.synchronize(stream)
            self.call("cuStreamDestroy_v2", ctypes.c_size_t(stream))
        for name, handles in (
            ("cuEventDestroy_v2", self.events),
            ("cuMemFreeHost", self.host),
            ("cuMemFree_v2", self.device),
        ):
            for handle in handles:
                self.call(name, ctypes.c_size_t(handle))
        self.call("cuCtxPopCurrent_v2", None)
        self.call("cuDevicePrimaryCtxRelease_v2", 0)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    simulator.reset()
    before = simulator.get_device()
    yield
    simulator.clear_faults()
    simulator.reset()
    simulator.set_device(0, before)


@pytest.fixture
def driver() -> Iterator[Driver]:
    opened = Driver()
    yield opened
    simulator.clear_faults()
    opened.close()
    live = simulator.live()
    assert (live.streams, live.events, live.contexts, live.device_bytes) == (0, 0, 0, 0)


def test_importing_it_loads_neither_torch_nor_numpy_nor_the_library() -> None:
    code = (
        "import sys; from oracle_offload.engine import simulator; "
        "assert not {'torch', 'numpy'} & set(sys.modules); "
        "assert simulator.library.cache_info().currsize == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_presets_are_those_of_the_documentation() -> None:
    rows = {name: simulator.preset(name) for name in simulator.PRESETS}
    assert {
        n: (d.link_gbps, d.memory_bytes / 2**30, d.tflops, d.memory_gbps) for n, d in rows.items()
    } == {
        "rtx3090": (24, 24, 60, 936),
        "rtx4090": (25, 24, 110, 1008),
        "rtx5090": (50, 32, 150, 1792),
        "h100": (55, 80, 700, 3350),
        "h200": (55, 141, 700, 4800),
    }
    assert {d.launch_s for d in rows.values()} == {5e-6}
    with pytest.raises(ValueError, match=r"voodoo2.*rtx3090"):
        simulator.preset("voodoo2")


@pytest.mark.parametrize(("name", "expected"), [("rtx5090", "RTX 5090"), ("", "RTX 4090")])
def test_the_environment_chooses_the_device(name: str, expected: str) -> None:
    code = "from oracle_offload.engine import simulator; print(simulator.get_device().name)"
    environment = {**os.environ, "ORACLE_OFFLOAD_SIM_DEVICE": name}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert expected in done.stdout, done


REFUSED = (
    "import ctypes; from oracle_offload import OffloadError\n"
    "from oracle_offload.engine import simulator\n"
    "from oracle_offload.host.build_record import simulator_path\n"
    "try: simulator.get_device(); print('accepted')\n"
    "except OffloadError as error: print(error)\n"
    "print(ctypes.CDLL(str(simulator_path())).cuInit(0))"
)


def refusal(**environment: str) -> tuple[str, int]:
    """What Python says of an environment, and the CUresult with which the library refuses it."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    said, code = done.stdout.splitlines()
    return said, int(code)


@pytest.mark.parametrize("name", ["voodoo2", "RTX4090", " ", "rtx4090 "])
def test_an_unknown_device_in_the_environment_is_refused_by_name(name: str) -> None:
    said, code = refusal(ORACLE_OFFLOAD_SIM_DEVICE=name)
    assert said.startswith(f"ORACLE_OFFLOAD_SIM_DEVICE={name!r} is no simulated device;")
    assert all(preset in said for preset in simulator.PRESETS)
    assert code == 101


@pytest.mark.parametrize(
    ("value", "kind", "seed"),
    [
        ("", Schedule.TIMED, 0),
        ("42", Schedule.RANDOM, 42),
        ("0", Schedule.RANDOM, 0),
        ("random:42", Schedule.RANDOM, 42),
        ("delayed:18446744073709551615", Schedule.DELAYED, 2**64 - 1),
        ("starve-copy", Schedule.STARVE_COPY, 0),
        ("starve-compute:1", Schedule.STARVE_COMPUTE, 1),
        ("eager:3", Schedule.EAGER, 3),
    ],
)
def test_the_environment_replays_a_schedule(value: str, kind: Schedule, seed: int) -> None:
    code = (
        "from oracle_offload.engine import simulator; kind, seed = simulator.get_schedule();"
        "print(kind.value, seed); print(simulator.schedule_text())"
    )
    environment = {**os.environ, "ORACLE_OFFLOAD_SIM_SEED": value}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    first, text = done.stdout.splitlines()
    assert first == f"{kind.value} {seed}", done
    # What is said replays the same.
    environment["ORACLE_OFFLOAD_SIM_SEED"] = text.rpartition("ORACLE_OFFLOAD_SIM_SEED=")[2]
    again = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert again.stdout == done.stdout, again


@pytest.mark.parametrize("value", ["fast", "random:", "41x", "-1", "delayed:-1", "timed 4", ":3"])
def test_a_seed_that_is_none_is_refused(value: str) -> None:
    said, code = refusal(ORACLE_OFFLOAD_SIM_SEED=value)
    assert said.startswith(f"ORACLE_OFFLOAD_SIM_SEED={value!r} is no schedule;")
    assert "random, starve-copy, starve-compute, eager, delayed" in said
    assert code == 1


@pytest.mark.parametrize("schedule", list(Schedule))
def test_what_python_accepts_the_library_accepts(schedule: Schedule) -> None:
    name = schedule.name.lower().replace("_", "-")
    for value in (name, f"{name}:{2**64 - 1}"):
        assert refusal(ORACLE_OFFLOAD_SIM_SEED=value) == ("accepted", 0)


def test_a_failed_test_says_how_to_replay_it(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "conftest.py").write_text((root / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(
        "from oracle_offload.engine import simulator\n"
        "def test_fails():\n"
        "    simulator.set_schedule(simulator.Schedule.DELAYED, 7)\n"
        "    assert simulator.now() < 0\n"
        "def test_passes():\n"
        "    assert simulator.now() == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tools'}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("ORACLE_OFFLOAD_SIM_SEED=delayed:7") == 1, done
    assert "1 failed, 1 passed" in done.stdout, done


def test_device_and_schedule_last_for_their_with_block(driver: Driver) -> None:
    with pytest.raises(DriverError, match=r"simSetDevice.*in use") as caught:
        simulator.set_device(0, simulator.preset("h200"))
    assert (caught.value.code, caught.value.name) == (401, "CUDA_ERROR_ILLEGAL_STATE")
    with simulator.schedule(Schedule.STARVE_COPY, 3):
        assert simulator.get_schedule() == (Schedule.STARVE_COPY, 3)
    assert simulator.get_schedule() == (Schedule.TIMED, 0)


def test_a_device_can_be_changed_while_nobody_uses_it() -> None:
    before = simulator.get_device()
    with simulator.device("rtx3090", link_gbps=0.5) as slow:
        assert simulator.get_device() == slow
        assert (slow.link_gbps, slow.tflops) == (0.5, 60)
    assert simulator.get_device() == before
    with pytest.raises(DriverError, match="not positive"):
        simulator.set_device(0, simulator.Device("x", -1, 0, 0, 1, 1, 0))


def test_a_two_layer_step_takes_the_time_worked_out_by_hand() -> None:
    nbytes, kernel_s = 10 * MIB, 0.3e-3
    with simulator.device("rtx4090"):
        card = simulator.get_device()
        copy_s = card.copy_latency_s + nbytes / (card.link_gbps * 1e9)
        driver = Driver()
        copies, compute = driver.stream(), driver.stream()
        slots, masters = driver.device_bytes(2 * nbytes), driver.host_bytes(2 * nbytes)
        events = [driver.event(), driver.event()]
        start = simulator.now()
        with simulator.trace() as rows:
            for i in (0, 1):
                driver.copy_in(slots + i * nbytes, masters + i * nbytes, nbytes, copies)
                driver.record(events[i], copies)
            for i in (0, 1):
                driver.wait(compute, events[i])
                simulator.launch(compute, [(slots + i * nbytes, nbytes)], [], kernel_s)
            assert simulator.now() == start
            driver.synchronize(compute)
        # The copies fill the link; the last kernel follows the last copy.
        assert copy_s > kernel_s
        assert simulator.now() - start == pytest.approx(2 * copy_s + kernel_s, abs=1e-9)
        assert [row.kind for row in rows] == ["h2d", "kernel", "h2d", "kernel"]
        assert rows[1].start_s - start == pytest.approx(copy_s, abs=1e-9)
        assert rows[2].end_s - start == pytest.approx(2 * copy_s, abs=1e-9)
        stats = simulator.stats()
        assert (stats.h2d_bytes, stats.h2d_copies, stats.kernels) == (2 * nbytes, 2, 2)
        driver.close()
    assert simulator.reports() == []


@pytest.mark.parametrize("kind", list(Schedule))
def test_a_missing_wait_is_reported_on_every_schedule(driver: Driver, kind: Schedule) -> None:
    with simulator.schedule(kind, 7):
        copies, compute, event = driver.stream(), driver.stream(), driver.event()
        slot, master = driver.device_bytes(NBYTES), driver.host_bytes(NBYTES)
        simulator.label_range(slot, NBYTES, "unit 3")
        simulator.label_stream(copies, "h2d")
        driver.copy_in(slot, master, NBYTES, copies)
        driver.record(event, copies)
        driver.wait(compute, event)
        simulator.launch(compute, [(slot, NBYTES)])
        assert simulator.reports() == []
        driver.copy_in(slot, master, NBYTES, copies)  # does not wait for the kernel
        (report,) = simulator.reports("race")
        assert "write-after-read" in report and '"unit 3"' in report and '"h2d"' in report
        assert kind.name.lower().replace("_", "-") in report and "seed" in report
        simulator.host_access(master, NBYTES, write=True)
        assert len(simulator.reports("race")) == 2
    simulator.clear_reports()
    assert simulator.reports() == []


def test_what_has_not_arrived_reads_as_nan(driver: Driver) -> None:
    copies, compute = driver.stream(), driver.stream()
    slot, master = driver.device_bytes(NBYTES), driver.host_bytes(NBYTES)
    ctypes.memset(master, 1, NBYTES)
    driver.copy_in(slot, master, NBYTES, copies)
    simulator.launch(compute)
    floats = (ctypes.c_float * (NBYTES // 4)).from_address(slot)
    assert all(value != value for value in floats)
    driver.synchronize(copies)
    assert ctypes.string_at(slot, NBYTES) == b"\x01" * NBYTES


def test_adopted_memory_counts_and_is_poisoned(driver: Driver) -> None:
    block = ctypes.create_string_buffer(b"\x02" * NBYTES, NBYTES)
    address = ctypes.addressof(block)
    simulator.adopt(address, NBYTES)
    assert block.raw == b"\xff" * NBYTES and simulator.live().adopted_bytes == NBYTES
    with pytest.raises(DriverError, match="simAdopt: CUDA_ERROR_INVALID_VALUE"):
        simulator.adopt(address + 1, 1)
    simulator.drop(address)
    assert simulator.live().adopted_bytes == 0
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        simulator.adopt(address, int(simulator.get_device().memory_bytes) + 1)


def test_faults_strike_where_they_are_set(driver: Driver) -> None:
    stream, event = driver.stream(), driver.event()
    record = driver.library.cuEventRecord
    arguments = ctypes.c_size_t(event), ctypes.c_size_t(stream)
    before = simulator.call_count("cuEventRecord")
    with simulator.fault("cuEventRecord", 2, 701):
        assert [record(*arguments) for _ in range(3)] == [0, 701, 0]
    with simulator.fault("cuEventRecord", 1, 2, lasting=True):
        assert [record(*arguments) for _ in range(3)] == [2, 2, 2]
    assert record(*arguments) == 0
    assert simulator.call_count("cuEventRecord") == before + 7
    with simulator.fault("async kernel", 1, 719):
        simulator.launch(stream)
        assert driver.library.cuStreamSynchronize(arguments[1]) == 719
        assert record(*arguments) == 719
    with pytest.raises(DriverError, match="cuNoSuchCall"):
        simulator.set_fault("cuNoSuchCall")


def test_registrations_are_refused_from_the_nth_on(driver: Driver) -> None:
    block = ctypes.create_string_buffer(3 * NBYTES)
    register = driver.library.cuMemHostRegister_v2
    simulator.refuse_registration(2)
    pieces = [ctypes.c_size_t(ctypes.addressof(block) + i * NBYTES) for i in range(3)]
    assert [register(piece, ctypes.c_size_t(NBYTES), 0) for piece in pieces] == [0, 2, 2]
    simulator.refuse_registration(0)
    driver.call("cuMemHostUnregister", pieces[0])


def test_page_locked_bytes_have_one_quota_until_their_block_ends(driver: Driver) -> None:
    block = ctypes.create_string_buffer(NBYTES)
    register = driver.library.cuMemHostRegister_v2
    piece, value = ctypes.c_size_t(ctypes.addressof(block)), ctypes.c_size_t()
    with pytest.raises(KeyError), simulator.lock_quota(2 * NBYTES - 1):
        driver.host_bytes(NBYTES)
        assert register(piece, ctypes.c_size_t(NBYTES), 0) == 2
        assert register(piece, ctypes.c_size_t(NBYTES - 1), 0) == 0
        assert driver.library.cuMemHostAlloc(ctypes.byref(value), ctypes.c_size_t(1), 0) == 2
        raise KeyError
    driver.host_bytes(NBYTES)
    driver.call("cuMemHostUnregister", piece)
    simulator.set_lock_quota(0)
    assert register(piece, ctypes.c_size_t(1), 0) == 2
    simulator.set_lock_quota(None)
    driver.host_bytes(NBYTES)


def test_a_hang_is_an_error_with_a_wait_graph(driver: Driver) -> None:
    stream, other, event = driver.stream(), driver.stream(), driver.event()
    simulator.label_stream(stream, "compute")
    simulator.hold(stream)
    simulator.launch(other)
    driver.record(event, stream)
    driver.wait(other, event)
    assert driver.library.cuStreamSynchronize(ctypes.c_size_t(other)) == 999
    (report,) = simulator.reports("deadlock")
    assert 'waits for stream "compute"' in report and "held" in report
    simulator.hold(stream, False)
    driver.synchronize(other)


def test_reset_is_refused_while_something_lives(driver: Driver) -> None:
    driver.stream()
    with pytest.raises(DriverError, match=r"simReset.*streams=1"):
        simulator.reset()


def test_time_passes_when_asked(driver: Driver) -> None:
    stream = driver.stream()
    start = simulator.now()
    simulator.launch(stream, seconds=0.5)
    assert simulator.now() == start
    simulator.advance(0.125)
    assert simulator.now() == start + 0.125
    assert simulator.finish() == simulator.now() == start + 0.5
