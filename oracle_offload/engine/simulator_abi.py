"""The control calls of the simulated driver as ctypes sees them: csrc/sim/sim.h, row by row."""

from __future__ import annotations

import ctypes


class RawDevice(ctypes.Structure):
    """A device, ``struct sim_device``; units as `oracle_offload.engine.simulator.Device`."""

    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("link_gbps", ctypes.c_double),
        ("copy_latency_s", ctypes.c_double),
        ("memory_bytes", ctypes.c_double),
        ("tflops", ctypes.c_double),
        ("memory_gbps", ctypes.c_double),
        ("launch_s", ctypes.c_double),
        ("compute_major", ctypes.c_int),
        ("compute_minor", ctypes.c_int),
        ("upstream", ctypes.c_int),
        ("upstream_gbps", ctypes.c_double),
        ("duplex_share", ctypes.c_double),
        ("disk_gbps", ctypes.c_double),
        ("disk_latency_s", ctypes.c_double),
    )


class RawStats(ctypes.Structure):
    """Work done, ``struct sim_stats``."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("h2d_bytes", "h2d_copies")),
        *((name, ctypes.c_uint64) for name in ("d2h_bytes", "d2h_copies")),
        *((name, ctypes.c_uint64) for name in ("kernels", "host_waits")),
        *((name, ctypes.c_double) for name in ("h2d_busy_s", "d2h_busy_s", "compute_busy_s")),
    )


class RawLive(ctypes.Structure):
    """What exists, ``struct sim_live``."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "streams",
            "events",
            "contexts",
            "modules",
            "registrations",
            "registered_bytes",
            "host_alloc_bytes",
            "device_bytes",
            "adopted_bytes",
            "queued",
            "device_peak_bytes",
            "history",
        )
    )


class RawTraceRow(ctypes.Structure):
    """One operation that has ended, ``struct sim_trace_row``."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("stream", ctypes.c_uint64),
        ("start_s", ctypes.c_double),
        ("end_s", ctypes.c_double),
        ("bytes", ctypes.c_uint64),
        ("device_ptr", ctypes.c_size_t),
    )


class RawRange(ctypes.Structure):
    """A pointer and its bytes, as `simLaunch` takes them."""

    _fields_ = (("ptr", ctypes.c_size_t), ("bytes", ctypes.c_size_t))


SIGNATURES: dict[str, tuple[type | None, tuple[object, ...]]] = {
    "simAdopt": (
        ctypes.c_int,
        (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint, ctypes.c_size_t),
    ),
    "simDrop": (ctypes.c_int, (ctypes.c_size_t,)),
    "simLaunch": (
        ctypes.c_int,
        (
            ctypes.c_size_t,
            ctypes.POINTER(RawRange),
            ctypes.c_size_t,
            ctypes.POINTER(RawRange),
            ctypes.c_size_t,
            ctypes.c_double,
        ),
    ),
    "simHostAccess": (ctypes.c_int, (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)),
    "simPreset": (ctypes.c_int, (ctypes.c_char_p, ctypes.POINTER(RawDevice))),
    "simGetDevice": (ctypes.c_int, (ctypes.c_int, ctypes.POINTER(RawDevice))),
    "simSetDevice": (ctypes.c_int, (ctypes.c_int, ctypes.POINTER(RawDevice))),
    "simSetDeviceCount": (ctypes.c_int, (ctypes.c_int,)),
    "simSetSchedule": (ctypes.c_int, (ctypes.c_int, ctypes.c_uint64)),
    "simGetSchedule": (
        ctypes.c_int,
        (ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_uint64)),
    ),
    "simScheduleText": (ctypes.c_int, (ctypes.c_char_p, ctypes.c_size_t)),
    "simSwitch": (ctypes.c_int, (ctypes.c_int, ctypes.c_int)),
    "simRefuseRegistration": (ctypes.c_int, (ctypes.c_uint64,)),
    "simLockQuota": (ctypes.c_int, (ctypes.c_uint64,)),
    "simFault": (
        ctypes.c_int,
        (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int),
    ),
    "simFaultClear": (ctypes.c_int, ()),
    "simHold": (ctypes.c_int, (ctypes.c_size_t, ctypes.c_int)),
    "simIdle": (ctypes.c_int, (ctypes.c_size_t, ctypes.POINTER(ctypes.c_int))),
    "simCapturing": (ctypes.c_int, (ctypes.c_size_t, ctypes.POINTER(ctypes.c_int))),
    "simPatience": (ctypes.c_int, (ctypes.c_uint,)),
    "simCallCount": (ctypes.c_uint64, (ctypes.c_char_p,)),
    "simGetStats": (ctypes.c_int, (ctypes.POINTER(RawStats),)),
    "simGetLive": (ctypes.c_int, (ctypes.POINTER(RawLive),)),
    "simNow": (ctypes.c_double, ()),
    "simClock": (ctypes.c_int, (ctypes.POINTER(ctypes.c_double),)),
    "simAdvance": (ctypes.c_int, (ctypes.c_double,)),
    "simFinish": (ctypes.c_int, (ctypes.POINTER(ctypes.c_double),)),
    "simReportCount": (ctypes.c_uint64, ()),
    "simReport": (ctypes.c_int, (ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t)),
    "simReportsClear": (ctypes.c_int, ()),
    "simLabelRange": (ctypes.c_int, (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_char_p)),
    "simLabelStream": (ctypes.c_int, (ctypes.c_size_t, ctypes.c_char_p)),
    "simTraceCount": (ctypes.c_uint64, ()),
    "simTraceRow": (ctypes.c_int, (ctypes.c_uint64, ctypes.POINTER(RawTraceRow))),
    "simTraceClear": (ctypes.c_int, ()),
    "simReset": (ctypes.c_int, ()),
    "cuGetErrorName": (ctypes.c_int, (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))),
}
