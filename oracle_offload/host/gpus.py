"""What the NVIDIA driver says about each card: read only, through nvidia-ml-py when installed.

Nothing here creates a CUDA context or changes a setting. Every question is asked alone, so one
that a card does not answer (a laptop without a power sensor, a MIG slice without a link) does not
affect the others.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .files import NO_SIZE

_T = TypeVar("_T")


@dataclass(frozen=True)
class GpuProcess:
    """A process with a context on a card; `used_bytes` is None where the driver hides it."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One card as the driver describes it. None: not answered, the reason is in `missing`.

    Attributes
    ----------
    index : int
        The driver's index, which CUDA_VISIBLE_DEVICES may renumber.
    total_bytes, used_bytes : int or None
        Device memory, that used by anyone included.
    link_generation, link_width : int or None
        The PCI Express link as it runs now; an idle card lowers its generation.
    max_link_generation : int or None
        The highest generation that card and slot agree on.
    card_link_generation : int or None
        The highest generation of the card alone.
    max_link_width : int or None
        Lanes of the card.
    performance_state : int or None
        0 (P0, fastest) to 15.
    clock_reasons : int or None
        Bits that say why the clocks are not higher, `CLOCK_REASONS`.
    processes : tuple of GpuProcess or None
        Compute and graphics processes.
    driver_model : str or None
        "WDDM", "TCC" or "MCDM" on Windows.
    """

    index: int
    name: str = "unknown GPU"
    bus_id: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    link_generation: int | None = None
    link_width: int | None = None
    max_link_generation: int | None = None
    card_link_generation: int | None = None
    max_link_width: int | None = None
    performance_state: int | None = None
    clock_reasons: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    driver_model: str | None = None
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuView:
    """All cards, or why none could be seen.

    `cuda_version` is the newest CUDA the driver supports, as (major, minor).
    """

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    cuda_version: tuple[int, int] | None = None
    why: str = ""


# nvmlClocksEventReason* of nvml.h: bit -> words.
CLOCK_REASONS = {
    0x001: "idle",
    0x002: "application clocks set",
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}

# NVML_DRIVER_* of nvml.h. NVML still calls TCC by its old name, WDM.
_DRIVER_MODELS = {0: "WDDM", 1: "TCC", 2: "MCDM"}
NOT_INSTALLED = "nvidia-ml-py is not installed (pip install nvidia-ml-py)"


def read_gpus() -> GpuView:
    """Ask the driver about every card; never raises."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return GpuView(why=NOT_INSTALLED)
    except Exception as error:
        return GpuView(why=f"nvidia-ml-py could not be imported: {error}")
    try:
        nvml.nvmlInit()
    except Exception as error:
        return GpuView(why=f"the NVIDIA driver does not answer: {error}")
    try:
        return _read_all(nvml)
    finally:
        with contextlib.suppress(Exception):  # the answers are in hand; nothing is left to undo
            nvml.nvmlShutdown()


def _read_all(nvml: Any) -> GpuView:
    missing: dict[str, str] = {}
    driver = ask(missing, "driver version", lambda: _text(nvml.nvmlSystemGetDriverVersion()))
    number = ask(missing, "CUDA version", lambda: _cuda_version(nvml))
    count = ask(missing, "count", lambda: number_within(nvml.nvmlDeviceGetCount(), 1 << 10)) or 0
    return GpuView(
        gpus=tuple(_read_one(nvml, index) for index in range(count)),
        driver_version=driver,
        cuda_version=number,
        why="; ".join(f"{what}: {why}" for what, why in missing.items()),
    )


def _read_one(nvml: Any, index: int) -> Gpu:
    missing: dict[str, str] = {}
    card = ask(missing, "handle", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if card is None:
        return Gpu(index, missing=missing)
    total, used = ask(missing, "memory", lambda: _memory(nvml, card)) or (None, None)
    return Gpu(
        index=index,
        name=ask(missing, "name", lambda: _text(nvml.nvmlDeviceGetName(card))) or "unknown GPU",
        bus_id=ask(missing, "bus", lambda: _text(nvml.nvmlDeviceGetPciInfo(card).busId)),
        total_bytes=total,
        used_bytes=used,
        link_generation=ask(
            missing,
            "link",
            lambda: number_within(nvml.nvmlDeviceGetCurrPcieLinkGeneration(card), 15, 1),
        ),
        link_width=ask(
            missing, "link", lambda: number_within(nvml.nvmlDeviceGetCurrPcieLinkWidth(card), 63, 1)
        ),
        max_link_generation=ask(
            missing,
            "link",
            lambda: number_within(nvml.nvmlDeviceGetMaxPcieLinkGeneration(card), 15, 1),
        ),
        card_link_generation=ask(
            {},
            "link",
            lambda: number_within(nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration(card), 15, 1),
        ),
        max_link_width=ask(
            missing, "link", lambda: number_within(nvml.nvmlDeviceGetMaxPcieLinkWidth(card), 63, 1)
        ),
        performance_state=ask(
            missing,
            "performance state",
            lambda: number_within(nvml.nvmlDeviceGetPerformanceState(card), 15),
        ),
        clock_reasons=ask(missing, "clock reasons", lambda: clock_reasons(nvml, card)),
        processes=ask(missing, "processes", lambda: _processes(nvml, card)),
        # Answered on Windows only, so an error here is nothing to report.
        driver_model=ask(
            {}, "model", lambda: _DRIVER_MODELS.get(nvml.nvmlDeviceGetCurrentDriverModel(card))
        ),
        missing=missing,
    )


def number_within(value: Any, most: int, least: int = 0) -> int:
    """Return `value` as an integer; ValueError when it is none from `least` to `most`."""
    number = int(value)
    if not least <= number <= most:
        raise ValueError(f"the driver says {number}, which cannot be")
    return number


def _memory(nvml: Any, card: Any) -> tuple[int, int]:
    memory = nvml.nvmlDeviceGetMemoryInfo(card)
    total = number_within(memory.total, NO_SIZE - 1, 1)
    return total, number_within(memory.used, total)


def _cuda_version(nvml: Any) -> tuple[int, int]:
    number = number_within(nvml.nvmlSystemGetCudaDriverVersion_v2(), 99_999, 1000)
    return number // 1000, number % 1000 // 10  # 12080 is CUDA 12.8


def clock_reasons(nvml: Any, card: Any) -> int:
    """Return the bits of `CLOCK_REASONS` that hold now."""
    # Renamed from "throttle" to "event" reasons: an older nvidia-ml-py lacks the new name, and a
    # newer one passes on that an older driver does.
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(card))
    except Exception as error:
        try:
            return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))
        except Exception:
            raise error from None


def _processes(nvml: Any, card: Any) -> tuple[GpuProcess, ...]:
    found: dict[int, GpuProcess] = {}
    for process in [
        *nvml.nvmlDeviceGetComputeRunningProcesses(card),
        # A process that draws and computes is in both lists with the same figure.
        *(ask({}, "", lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(card)) or ()),
    ]:
        used = process.usedGpuMemory
        # The driver hides it as None, or as the largest number that there is.
        known = ask({}, "", lambda: None if used is None else number_within(used, NO_SIZE - 1))  # noqa: B023
        found[process.pid] = GpuProcess(int(process.pid), known)
    return tuple(found[pid] for pid in sorted(found))


def ask(missing: dict[str, str], what: str, question: Callable[[], _T]) -> _T | None:
    """Return the answer, or None where there is none; `missing` then has the reason."""
    try:
        return question()
    except Exception as error:
        missing.setdefault(what, str(error) or type(error).__name__)
        return None


def _text(value: str | bytes) -> str:
    # Releases before 11.515 return bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
