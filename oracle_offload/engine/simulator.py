"""Control of the simulated CUDA driver: device, schedule, faults, reports, virtual time.

The simulator is a shared library with the CUDA driver's entry points; engines on device ``cpu`` run
on it. This module is a thin wrapper over its control calls (csrc/sim/sim.h, docs/simulator.md). The
library is loaded at the first call, not at import. Its state is one per process. Times are virtual
seconds of the simulated device, never measurements.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from ..errors import DriverError, OffloadError
from .simulator_abi import SIGNATURES, RawDevice, RawLive, RawRange, RawStats, RawTraceRow

PRESETS = ("rtx3090", "rtx4090", "rtx5090", "h100", "h200")

_REPORT_BYTES = 4096  # longest report, see csrc/sim/control.c


class Schedule(enum.IntEnum):
    """What runs first among what may run. Races are found on every one of them."""

    TIMED = 0  #: in the order of virtual time
    RANDOM = 1  #: any legal order, chosen by the seed
    STARVE_COPY = 2  #: copies run only when something waits for them
    STARVE_COMPUTE = 3  #: copies run as soon as they are legal, kernels end as late as legal
    EAGER = 4  #: everything runs when it is queued, where legal
    DELAYED = 5  #: TIMED, but the seed makes some operations take far too long


# As ORACLE_OFFLOAD_SIM_SEED and the texts to replay a schedule name them.
_SCHEDULES = tuple(schedule.name.lower().replace("_", "-") for schedule in Schedule)


class _Switch(enum.IntEnum):
    RACES = 0
    POISON = 1
    COPY_NOTHING = 2
    TRACE = 3
    STRICT_THREADS = 4
    LATE_SUBMISSION = 5


@dataclass
class Device:
    """A simulated device.

    Attributes
    ----------
    name : str
        As ``cuDeviceGetName`` returns it; at most 63 bytes of UTF-8.
    link_gbps : float
        Rate of one copy engine, 1e9 bytes/s; there is one engine for each direction.
    copy_latency_s : float
        Added to every copy.
    memory_bytes : float
        Capacity; what does not fit is refused with ``CUDA_ERROR_OUT_OF_MEMORY``.
    tflops : float
        Dense bf16 rate, 1e12 FLOP/s.
    memory_gbps : float
        Device memory, 1e9 bytes/s.
    launch_s : float
        Launch latency of a kernel.
    compute_major, compute_minor : int
        Compute capability.
    upstream : int
        The switch or root port that its link goes through, 1 to 8; 0 for a link of its own.
    upstream_gbps : float
        What the devices of one upstream get together in each direction, 1e9 bytes/s; all of them
        have the same here.
    duplex_share : float
        What each direction has of `link_gbps` while both copy, above 0 and at most 1.
    disk_gbps : float
        Rate of the disk that weights in files are read from, all reads together, 1e9 bytes/s; 0:
        reads take no time.
    disk_latency_s : float
        What each read takes before its bytes come, while other reads go on.
    """

    name: str
    link_gbps: float
    copy_latency_s: float
    memory_bytes: float
    tflops: float
    memory_gbps: float
    launch_s: float
    compute_major: int = 8
    compute_minor: int = 9
    upstream: int = 0
    upstream_gbps: float = 0.0
    duplex_share: float = 1.0
    disk_gbps: float = 0.0
    disk_latency_s: float = 0.0


@dataclass(frozen=True)
class Stats:
    """Work since start or `reset`; counted when it is queued, busy seconds as it ends."""

    h2d_bytes: int
    h2d_copies: int
    d2h_bytes: int
    d2h_copies: int
    kernels: int
    host_waits: int
    h2d_busy_s: float
    d2h_busy_s: float
    compute_busy_s: float


@dataclass(frozen=True)
class Live:
    """What exists now; everything but `device_peak_bytes` and `history` is zero at a clean end."""

    streams: int
    events: int
    contexts: int
    modules: int
    registrations: int
    registered_bytes: int
    host_alloc_bytes: int
    device_bytes: int
    adopted_bytes: int
    queued: int
    device_peak_bytes: int
    history: int


@dataclass(frozen=True)
class TraceRow:
    """One operation that has ended, or a read from a disk, which is in no stream.

    `kind` is h2d, d2h, kernel, memset, host_function or read.
    """

    kind: str
    stream: int
    start_s: float
    end_s: float
    bytes: int
    device_ptr: int


_KINDS = ("h2d", "d2h", "kernel", "memset", "host_function", "read")
_T = TypeVar("_T", Stats, Live)


def library_path() -> Path:
    """Return the path of the shared library, inside the package.

    Raises
    ------
    FileNotFoundError
        When the package was not built; says what to do.
    OffloadError
        When ``ORACLE_OFFLOAD_SIM_DEVICE`` or ``ORACLE_OFFLOAD_SIM_SEED`` holds what the library
        would refuse; names the variable, its value and what is allowed.
    """
    from ..host.build_record import simulator_path

    # The library refuses too, in the words of cuInit, which have no room for a name.
    name = os.environ.get("ORACLE_OFFLOAD_SIM_DEVICE", "")
    if name and name not in PRESETS:
        raise OffloadError(
            f"ORACLE_OFFLOAD_SIM_DEVICE={name!r} is no simulated device; unset it, or use "
            f"{', '.join(PRESETS)}"
        )
    seed = os.environ.get("ORACLE_OFFLOAD_SIM_SEED", "")
    match = re.fullmatch(r"(?:([a-z-]+)(?::([0-9]{1,20}))?|([0-9]{1,20}))", seed)
    known = (
        match and (match[1] or "random") in _SCHEDULES and int(match[2] or match[3] or 0) < 2**64
    )
    if seed and not known:
        raise OffloadError(
            f"ORACLE_OFFLOAD_SIM_SEED={seed!r} is no schedule; unset it, or use a number below "
            f"2**64 (of the random schedule), or {', '.join(_SCHEDULES)}, also with a number: "
            "delayed:41"
        )
    return simulator_path()


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded library: the control calls are typed, the ``cu*`` calls are not."""
    loaded = ctypes.CDLL(str(library_path()))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded


def _check(call: str, result: int, hint: str = "") -> None:
    if result == 0:
        return
    text = ctypes.c_char_p()
    library().cuGetErrorName(result, ctypes.byref(text))
    name = (text.value or b"unknown CUresult").decode()
    message = f"{call}: {name} ({result})" + (f": {hint}" if hint else "")
    raise DriverError(message, call, result, name)


# ---- devices ----


def _to_device(raw: RawDevice) -> Device:
    return Device(
        **{
            field.name: getattr(raw, field.name) for field in fields(Device) if field.name != "name"
        },
        name=raw.name.decode(),
    )


def preset(name: str) -> Device:
    """Return a preset by name: one of `PRESETS`.

    Raises
    ------
    ValueError
        For another name.
    """
    raw = RawDevice()
    if library().simPreset(name.encode(), ctypes.byref(raw)):
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return _to_device(raw)


def get_device(ordinal: int = 0) -> Device:
    """Return a copy of device `ordinal`; pass it to `set_device` to change the device.

    Raises
    ------
    DriverError
        When `ordinal` is not in 0..7.
    """
    raw = RawDevice()
    _check("simGetDevice", library().simGetDevice(ordinal, ctypes.byref(raw)), f"device {ordinal}")
    return _to_device(raw)


def set_device(ordinal: int, new: Device) -> None:
    """Replace device `ordinal`.

    Raises
    ------
    DriverError
        While an engine uses the device, or for a rate that is not positive, or a share above 1.
    """
    values = {field.name: getattr(new, field.name) for field in fields(Device)}
    encoded = new.name.encode()
    if len(encoded) > 63:
        raise ValueError(
            f"a device's name takes at most 63 bytes, not {len(encoded)}: {new.name!r}"
        )
    raw = RawDevice(**{**values, "name": encoded})
    hint = f"device {ordinal} is in use by an engine, or a rate is not positive: {new}"
    _check("simSetDevice", library().simSetDevice(ordinal, ctypes.byref(raw)), hint)


def set_device_count(count: int) -> None:
    """Let `count` devices exist, 0 to 8 (1 by default)."""
    _check("simSetDeviceCount", library().simSetDeviceCount(count), f"{count} devices")


@contextlib.contextmanager
def device(
    name: str | Device = "rtx4090", *, ordinal: int = 0, **changes: float
) -> Iterator[Device]:
    """Use a preset, or a `Device`, with some fields changed, for the length of a ``with`` block.

    The device must not be in use by an engine at either end of the block.

    Examples
    --------
    >>> with device("rtx4090", link_gbps=0.1) as slow:
    ...     slow.link_gbps
    0.1
    """
    before = get_device(ordinal)
    new = replace(preset(name) if isinstance(name, str) else name, **changes)  # type: ignore[arg-type]
    set_device(ordinal, new)
    try:
        yield new
    finally:
        set_device(ordinal, before)


# ---- schedules, switches, faults ----


def set_schedule(kind: Schedule, seed: int = 0) -> None:
    """Choose what runs first; `seed` (0 to 2**64 - 1) matters to RANDOM and DELAYED."""
    _check("simSetSchedule", library().simSetSchedule(int(kind), seed), f"schedule {kind!r}")


def get_schedule() -> tuple[Schedule, int]:
    """Return the schedule and its seed."""
    kind, seed = ctypes.c_int(), ctypes.c_uint64()
    _check("simGetSchedule", library().simGetSchedule(ctypes.byref(kind), ctypes.byref(seed)))
    return Schedule(kind.value), seed.value


def schedule_text() -> str:
    """Return the schedule, its seed and how to replay it: what a failed test should say."""
    text = ctypes.create_string_buffer(160)
    _check("simScheduleText", library().simScheduleText(text, len(text)))
    return text.value.decode()


@contextlib.contextmanager
def schedule(kind: Schedule, seed: int = 0) -> Iterator[None]:
    """Use a schedule for the length of a ``with`` block."""
    before = get_schedule()
    set_schedule(kind, seed)
    try:
        yield
    finally:
        set_schedule(*before)


def _switch(which: _Switch, on: bool) -> None:
    _check("simSwitch", library().simSwitch(which, int(on)))


def detect_races(on: bool) -> None:
    """Detect races (the default) or not."""
    _switch(_Switch.RACES, on)


def poison(on: bool) -> None:
    """Fill fresh, freed and not yet arrived bytes with 0xFF, NaN in every float (the default)."""
    _switch(_Switch.POISON, on)


def copy_nothing(on: bool) -> None:
    """Let copies take their time and move no byte: a broken driver, which tests must notice."""
    _switch(_Switch.COPY_NOTHING, on)


def strict_threads(on: bool) -> None:
    """Give every host thread its own clock; by default they share one: locks are invisible."""
    _switch(_Switch.STRICT_THREADS, on)


def refuse_registration(from_nth: int = 1) -> None:
    """Refuse the `from_nth` page-locking from now on (1: the next) and all later; 0 ends it."""
    _check("simRefuseRegistration", library().simRefuseRegistration(from_nth))


def late_submission(on: bool) -> None:
    """Hand work to the device only when it is queried or waited for, as on Windows (WDDM)."""
    _switch(_Switch.LATE_SUBMISSION, on)


def set_lock_quota(nbytes: int | None) -> None:
    """Let at most `nbytes` of host memory be page-locked at a time; None: as many as are asked for.

    Registration (``cuMemHostRegister``) and allocation (``cuMemHostAlloc``) draw on it together, as
    under WSL2 and in containers; what exceeds it is refused with ``CUDA_ERROR_OUT_OF_MEMORY``.
    """
    quota = 2**64 - 1 if nbytes is None else nbytes
    _check("simLockQuota", library().simLockQuota(quota))


@contextlib.contextmanager
def lock_quota(nbytes: int) -> Iterator[None]:
    """Limit what can be page-locked for the length of a ``with`` block."""
    set_lock_quota(nbytes)
    try:
        yield
    finally:
        set_lock_quota(None)


def set_fault(call: str | None, nth: int = 1, result: int = 2, *, lasting: bool = False) -> None:
    """Let the `nth` call from now on (1: the next) fail with CUresult `result` and do nothing.

    Parameters
    ----------
    call : str or None
        Base name, such as ``"cuEventRecord"``; None for any ``cu*`` call; ``"async h2d"``,
        ``"async d2h"``, ``"async kernel"`` for an operation that fails while it runs.
    nth : int
        At least 1.
    result : int
        A ``CUresult``; 0 clears the fault of this call. 700, 719 and the like kill the context.
    lasting : bool
        Whether all later calls fail, too.

    Raises
    ------
    DriverError
        For a name that is no call or cannot fail.
    """
    encoded = None if call is None else call.encode()
    _check(
        "simFault", library().simFault(encoded, nth, result, int(lasting)), f"no fault at {call!r}"
    )


def clear_faults() -> None:
    """Clear all faults, refusals and a sticky error."""
    _check("simFaultClear", library().simFaultClear())


@contextlib.contextmanager
def fault(
    call: str | None, nth: int = 1, result: int = 2, *, lasting: bool = False
) -> Iterator[None]:
    """Set a fault for the length of a ``with`` block; all faults are cleared at its end."""
    set_fault(call, nth, result, lasting=lasting)
    try:
        yield
    finally:
        clear_faults()


def hold(stream: int, on: bool = True) -> None:
    """Stop a stream, as if its current operation hung, or let it go on."""
    _check("simHold", library().simHold(stream, int(on)), f"stream {stream:#x}")


def is_idle(stream: int) -> bool:
    """Whether all that was queued on a stream has ended by `now`; asking runs nothing."""
    idle = ctypes.c_int()
    _check("simIdle", library().simIdle(stream, ctypes.byref(idle)), f"stream {stream:#x}")
    return bool(idle.value)


def is_capturing(stream: int) -> bool:
    """Whether a graph is captured from a stream."""
    capturing = ctypes.c_int()
    status = library().simCapturing(stream, ctypes.byref(capturing))
    _check("simCapturing", status, f"stream {stream:#x}")
    return bool(capturing.value)


def patience(milliseconds: int) -> None:
    """Set how long a wait waits for a host function to return before it reports a deadlock."""
    _check("simPatience", library().simPatience(milliseconds))


def call_count(call: str | None = None) -> int:
    """How often `call` (None: any ``cu*`` call) was called since start or `reset`."""
    return int(library().simCallCount(None if call is None else call.encode()))


# ---- what torch declares ----


def adopt(ptr: int, nbytes: int, stream: int = 0, *, keep: bool = False) -> None:
    """Count host memory [`ptr`, `ptr` + `nbytes`) as device memory; poison it unless `keep`.

    It is lent as a caching allocator lends: to the race detector others have written it on `stream`
    until now, and will again after `drop`.
    """
    hint = f"{nbytes} bytes at {ptr:#x}, stream {stream:#x}"
    _check("simAdopt", library().simAdopt(ptr, nbytes, int(keep), stream), hint)


def drop(ptr: int) -> None:
    """End `adopt`; an error while copies that the host has not waited for touch the range."""
    _check("simDrop", library().simDrop(ptr), f"at {ptr:#x}")


def launch(
    stream: int,
    reads: Sequence[tuple[int, int]] = (),
    writes: Sequence[tuple[int, int]] = (),
    seconds: float = 0.0,
) -> None:
    """Declare a kernel on `stream`: (pointer, bytes) ranges read and written, virtual `seconds`.

    Everything ordered before it is executed before the call returns, and nothing else.
    """
    read_ranges = (RawRange * len(reads))(*(RawRange(*read) for read in reads))
    write_ranges = (RawRange * len(writes))(*(RawRange(*write) for write in writes))
    result = library().simLaunch(
        stream, read_ranges, len(reads), write_ranges, len(writes), seconds
    )
    if result:
        _check(
            "simLaunch", result, f"stream {stream:#x}, reads {reads}, writes {writes}, {seconds} s"
        )


def host_access(ptr: int, nbytes: int, write: bool) -> None:
    """Declare that the host reads or writes memory now; checked against queued work."""
    _check("simHostAccess", library().simHostAccess(ptr, nbytes, int(write)), f"at {ptr:#x}")


def label_range(ptr: int, nbytes: int, label: str) -> None:
    """Name memory in reports, such as ``"unit 12"``."""
    _check("simLabelRange", library().simLabelRange(ptr, nbytes, label.encode()))


def label_stream(stream: int, label: str) -> None:
    """Name a stream in reports and traces."""
    _check("simLabelStream", library().simLabelStream(stream, label.encode()), f"{stream:#x}")


# ---- observation ----


def _snapshot(kind: type[_T], raw: RawStats | RawLive) -> _T:
    return kind(**{field.name: getattr(raw, field.name) for field in fields(kind)})


def stats() -> Stats:
    """Bytes, copies, kernels, host waits since start or `reset`."""
    raw = RawStats()
    _check("simGetStats", library().simGetStats(ctypes.byref(raw)))
    return _snapshot(Stats, raw)


def live() -> Live:
    """Handles and bytes that exist now."""
    raw = RawLive()
    _check("simGetLive", library().simGetLive(ctypes.byref(raw)))
    return _snapshot(Live, raw)


def now() -> float:
    """The host's virtual clock, in seconds."""
    return float(library().simNow())


def advance(seconds: float) -> None:
    """Let virtual time pass, as if the host were busy with something else."""
    _check("simAdvance", library().simAdvance(seconds), f"{seconds} s")


def finish() -> float:
    """Execute all queued work; return the virtual time at which it has ended, and move there.

    Not a synchronisation: to the race detector the host knows no more than before.
    """
    seconds = ctypes.c_double()
    _check("simFinish", library().simFinish(ctypes.byref(seconds)))
    return seconds.value


def reports(kind: str = "") -> list[str]:
    """Return what was found since start, `clear_reports` or `reset`, at most 1,000 texts.

    Parameters
    ----------
    kind : str
        Only reports that begin so: ``"race"``, ``"in flight"``, ``"deadlock"``, ``"lint"``.
    """
    text = ctypes.create_string_buffer(_REPORT_BYTES)
    found = []
    for index in range(library().simReportCount()):
        if library().simReport(index, text, _REPORT_BYTES) == 0:
            found.append(text.value.decode(errors="replace"))
    return [report for report in found if report.startswith(kind)]


def clear_reports() -> None:
    """Forget the reports; what was reported may be reported again."""
    _check("simReportsClear", library().simReportsClear())


@contextlib.contextmanager
def trace() -> Iterator[list[TraceRow]]:
    """Collect the operations that end in a ``with`` block; the list is filled at its end.

    What is still under way then is finished first (`finish`), so that no row is missing.
    """
    rows: list[TraceRow] = []
    _check("simTraceClear", library().simTraceClear())
    _switch(_Switch.TRACE, True)
    try:
        yield rows
        finish()
        raw = RawTraceRow()
        for index in range(library().simTraceCount()):
            _check("simTraceRow", library().simTraceRow(index, ctypes.byref(raw)))
            rows.append(
                TraceRow(
                    kind=_KINDS[raw.kind],
                    stream=raw.stream,
                    start_s=raw.start_s,
                    end_s=raw.end_s,
                    bytes=raw.bytes,
                    device_ptr=raw.device_ptr,
                )
            )
    finally:
        _switch(_Switch.TRACE, False)


def reset() -> None:
    """Forget everything but the configuration of the devices; schedule and switches go to defaults.

    Raises
    ------
    DriverError
        While a stream, an event, a context, a registration or device memory is alive.
    """
    result = library().simReset()
    _check("simReset", result, f"still alive: {live()}" if result else "")
