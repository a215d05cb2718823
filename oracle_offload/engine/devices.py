"""The kinds of devices that models are attached to: what differs from one to the other.

A kind says which driver the engine of such a device runs over, on which stream torch computes
there, and how a tensor moves to it. Nothing else in the package asks for a device's type.
"""

from __future__ import annotations

import abc
import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import _core
from ..errors import OffloadError
from . import simulator

_TIMED_BYTES, _TIMED_COPIES = 32 << 20, 3  # that give the rate of a link


class Counted(NamedTuple):
    """What torch's allocator has counted on one device.

    Attributes
    ----------
    reserved_bytes : int
        It holds, the cache included.
    peak_bytes : int
        It has given out at most at once.
    failures : int
        How often it had to empty its cache for an allocation, or found no room at all.
    limit_bytes : int or None
        It may reserve at most, where that was set.
    """

    reserved_bytes: int
    peak_bytes: int
    failures: int
    limit_bytes: int | None


class CopiesAside(Protocol):
    """Copies from a device to page-locked memory that the host does not wait for at once."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` once all that this thread has queued so far has computed it.

        The caller keeps `source` and `target` unchanged until the copy has ended.
        """

    def mark(self) -> Callable[[], object]:
        """Return what waits until all copies that were begun so far have ended."""


class Device(abc.ABC):
    """What the package asks of a device, whatever its kind.

    Parameters
    ----------
    device : torch.device
        The device, as `find` returned it.
    """

    dlpack_type: ClassVar[int]  # DLDeviceType of its tensors

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    @abc.abstractmethod
    def find(device: torch.device) -> torch.device:
        """Return the device that the user named, as its tensors name it.

        Raises
        ------
        OffloadError
            It does not exist.
        """

    @abc.abstractmethod
    def open_engine(self) -> _core.Engine:
        """Return a new engine over the device's driver."""

    @abc.abstractmethod
    def stream_of(self, engine: _core.Engine) -> Callable[[], int]:
        """Return what answers the handle of the stream that torch computes on in this thread."""

    def allocated_bytes(self) -> int | None:
        """Bytes that torch has allocated there; None where torch does not count them."""
        return None

    def cached_bytes(self) -> int:
        """Bytes that torch's allocator has cached there, unused."""
        return 0

    def release_cached(self) -> None:
        """Give those back to the device."""
        return

    def allocated_and_peak(self) -> tuple[int, int] | tuple[None, None]:
        """Return bytes that torch has allocated there, now and at most; None if not counted.

        The peak is torch's own, since the process began or it was last reset.
        """
        return None, None

    def counted(self) -> Counted | None:
        """Return what torch's allocator has counted; None where torch counts nothing."""
        return None

    def begin_peak(self) -> None:
        """Begin torch's peak again, where it counts one."""
        return

    def peak_bytes(self) -> int | None:
        """Return the most that torch has allocated there, `begin_peak` or not; None if unknown."""
        return None

    def now_s(self) -> float:
        """Return the host's clock, in seconds since no matter when."""
        return time.perf_counter()

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Return the seconds that the device takes for what `work` queues."""
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    @property
    def model(self) -> simulator.Device | None:
        """The device as a simulation takes it; None where its link is unknown."""
        return None

    @abc.abstractmethod
    def is_idle(self, stream: int) -> bool:
        """Whether all that was queued on `stream` has ended; asking waits for nothing.

        `stream` is the one that torch computes on in this thread, as `stream_of` answers it.
        """

    @abc.abstractmethod
    def is_capturing(self, stream: int) -> bool:
        """Whether `stream`, as above, is part of a graph that is captured: nothing is allocated."""

    def copies_aside(self) -> CopiesAside | None:
        """Return what copies while the host works; None where no copy takes the host's time."""
        return None

    @staticmethod
    def set_data(tensor: Tensor, data: Tensor) -> None:
        """Let `tensor`, which others know by its identity, be `data` from now on."""
        tensor.data = data


class _Thread(threading.local):
    """Whether this thread has the context of one engine's device."""

    entered = False


class Simulated(Device):
    """The simulated driver; torch's tensors are in host memory."""

    dlpack_type = 1
    _has_clock = False

    @staticmethod
    def find(device: torch.device) -> torch.device:
        """Return the device without a number.

        Raises
        ------
        OffloadError
            A number above zero: there is one.
        """
        if device.index:
            raise OffloadError(
                f"device={str(device)!r}, but there is one simulated device; use {device.type!r}"
            )
        return torch.device(device.type)

    def open_engine(self) -> _core.Engine:
        """Return a new engine over the simulated driver."""
        engine = _core.Engine(str(simulator.library_path()), 0)
        self._has_clock = engine.simulated  # not so over a driver that only pretends, to measure us
        return engine

    def stream_of(self, engine: _core.Engine) -> Callable[[], int]:
        """Return what answers the engine's own stream: torch has none there.

        A thread that asks will compute. On a GPU the CUDA runtime then makes the device's context
        current there; here nothing else does.
        """
        stream = engine.compute_stream
        thread = _Thread()

        def answer() -> int:
            if not thread.entered:
                engine.make_current()
                thread.entered = True
            return stream

        return answer

    def now_s(self) -> float:
        """Return the host's virtual clock, in seconds: it moves only when the host waits."""
        return simulator.now() if self._has_clock else super().now_s()

    @property
    def model(self) -> simulator.Device | None:
        """The simulated device itself."""
        return simulator.get_device(0) if self._has_clock else None

    def is_idle(self, stream: int) -> bool:
        """Whether all that was queued on `stream` has ended by then."""
        return self._has_clock and simulator.is_idle(stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether `stream` is part of a graph that is captured."""
        return self._has_clock and simulator.is_capturing(stream)


class _CudaCopies:
    """On a stream of their own; see `CopiesAside`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        # The source is written on the stream that torch computes on.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], object]:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.synchronize


class Cuda(Device):
    """A GPU, by the system's CUDA driver or the one that ``ORACLE_OFFLOAD_DRIVER`` names."""

    dlpack_type = 2
    _peaks: ClassVar[dict[torch.device, int]] = {}  # until `begin_peak` was called last

    @staticmethod
    def find(device: torch.device) -> torch.device:
        """Return the device with its number.

        Raises
        ------
        OffloadError
            There is none, or not that many.
        """
        if not torch.cuda.is_available():
            raise OffloadError(
                f"device={str(device)!r}, but torch sees no CUDA device (torch "
                f"{torch.__version__}). Use device='cpu' for the simulated one, or install torch "
                "with CUDA and a driver."
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise OffloadError(
                f"device='cuda:{index}', but torch sees {torch.cuda.device_count()} CUDA device(s)"
            )
        return torch.device("cuda", index)

    def open_engine(self) -> _core.Engine:
        """Return a new engine over the system's driver."""
        torch.cuda.init()
        with torch.cuda.device(self.device.index):
            library = os.environ.get("ORACLE_OFFLOAD_DRIVER") or None
            return _core.Engine(library, self.device.index)

    def stream_of(self, engine: _core.Engine) -> Callable[[], int]:
        """Return what answers torch's current stream."""
        return functools.partial(torch._C._cuda_getCurrentRawStream, self.device.index)

    def allocated_bytes(self) -> int | None:
        """Bytes that torch has allocated there."""
        return torch.cuda.memory_allocated(self.device)

    def cached_bytes(self) -> int:
        """Bytes that torch's allocator has cached there, unused."""
        reserved = torch.cuda.memory_reserved(self.device)
        return reserved - torch.cuda.memory_allocated(self.device)

    def release_cached(self) -> None:
        """Give those back to the device."""
        torch.cuda.empty_cache()

    def allocated_and_peak(self) -> tuple[int, int] | tuple[None, None]:
        """Return bytes that torch has allocated there, now and at most."""
        # Nested: `torch.cuda.memory_stats` takes ten times as long to make its names.
        counted = torch.cuda.memory_stats_as_nested_dict(self.device).get("allocated_bytes")
        if counted is None:
            return 0, 0
        return counted["all"]["current"], counted["all"]["peak"]

    def counted(self) -> Counted:
        """Return what torch's allocator has counted."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        limit = None
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):  # torch 2.8
            share = torch.cuda.get_per_process_memory_fraction(self.device)
            if share < 1:
                limit = int(share * torch.cuda.get_device_properties(self.device).total_memory)
        if "allocated_bytes" not in stats:  # before the first allocation
            return Counted(0, 0, 0, limit)
        return Counted(
            stats["reserved_bytes"]["all"]["current"],
            stats["allocated_bytes"]["all"]["peak"],
            stats["num_ooms"] + stats["num_alloc_retries"],
            limit,
        )

    def copies_aside(self) -> CopiesAside:
        """Return copies on a stream of their own."""
        return _CudaCopies(self.device)

    def begin_peak(self) -> None:
        """Begin torch's peak again."""
        self._peaks[self.device] = self.peak_bytes()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """Return the most that torch has allocated there, `begin_peak` or not."""
        return max(self.counted().peak_bytes, self._peaks.get(self.device, 0))

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Return the seconds between an event before what `work` queues and one behind it."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self.device):
            begin.record()
            work()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    @property
    def model(self) -> simulator.Device | None:
        """A card with the link of this one: the fastest of a few copies gives its rate."""
        host = torch.empty(_TIMED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        there = torch.empty(_TIMED_BYTES, dtype=torch.uint8, device=self.device)
        copies = [
            self.seconds_of(lambda: there.copy_(host, non_blocking=True))
            for _ in range(_TIMED_COPIES)
        ]
        fastest_s = min(copies)
        return replace(simulator.preset("rtx4090"), link_gbps=_TIMED_BYTES / fastest_s / 1e9)

    def is_idle(self, stream: int) -> bool:
        """Whether all that was queued on `stream` has ended; False while a graph is captured."""
        if self.is_capturing(stream):  # a query would end the capture
            return False
        try:
            # By torch's own object: it makes none of handle 0, the default stream.
            return torch.cuda.current_stream(self.device).query()
        except RuntimeError:  # the context is lost: the next call that uses it says so
            return False

    def is_capturing(self, stream: int) -> bool:
        """Whether torch's stream is part of a graph that is captured, or its context is lost."""
        try:
            return torch.cuda.is_current_stream_capturing()
        except RuntimeError:
            return True


KINDS: dict[str, type[Device]] = {"cuda": Cuda, "cpu": Simulated}  # by torch's device type


def repoint(tensor: Tensor, data: Tensor) -> None:
    """Let `tensor`, which others know by its identity, be `data`, on another device perhaps.

    Its gradient goes with it.
    """
    types = {tensor.device.type, data.device.type} - {"cpu"}
    kind = KINDS.get(types.pop() if types else "cpu", Simulated)
    with torch.inference_mode(False), torch.no_grad():
        gradient = tensor.grad
        kind.set_data(tensor, data)
        if gradient is not None:
            tensor.grad = gradient.to(data.device)


def parse_device(device: Any) -> torch.device:
    """Return the device that `device` names, with an index for CUDA.

    Raises
    ------
    ValueError
        Not a device, or one that models cannot be attached to.
    OffloadError
        CUDA where there is none, or a device number that does not exist.
    """
    try:
        if isinstance(device, int) and not isinstance(device, bool):
            device = f"cuda:{device}"
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device={device!r} is not a device; use 'cuda', 'cuda:0' or 'cpu'"
        ) from error
    kind = KINDS.get(parsed.type)
    if kind is None:
        raise ValueError(
            f"device={device!r}: only 'cuda' and 'cpu' (the simulated device) are supported"
        )
    return kind.find(parsed)
