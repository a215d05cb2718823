"""The numbers of a training, as logs, pictures and progress bars take them: one flat dictionary.

Whatever shows numbers while training goes (the metrics file, TensorBoard, tqdm, the callbacks of
trainers, a notebook, the heartbeat) shows those that `Meter.read` returns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..engine.devices import parse_device
from ..engine.engines import DeviceState, open_states
from ..errors import OffloadError
from ..host.memory import available_bytes
from ..host.sensors import Sensors
from ..layers.traffic import stalls_of

if TYPE_CHECKING:
    from ..engine.pace import Pace

Numbers = dict[str, int | float | None]

# What the system and the driver answer slowly is asked no more often than this.
_ASK_AGAIN_S = 1.0
# Counters of the engine that are shown as what they grew by.
_GROWING = (
    "h2d_bytes d2h_bytes disk_read_bytes acquires hits late stale evictions host_waits".split()
)
# What is now, and the counter of it.
_NOW = {
    "arena_bytes": "arena_bytes",
    "in_arena_bytes": "resident_bytes",
    "locked_bytes": "locked_bytes",
    "pageable_bytes": "pageable_bytes",
    "disk_bytes": "disk_bytes",
    "disk_kept_bytes": "disk_kept_bytes",
    "disk_arrived_bytes": "disk_arrived_bytes",
}


class Meter:
    """Numbers of one device and of its training since the last reading.

    Parameters
    ----------
    device : torch.device or str, optional
        One with attached models; by default the first that has some when it is read.
    sensors : bool
        Also ask the card for watts, clocks, temperature and link (NVML, at most once a second);
        needs nvidia-ml-py, and without it these numbers are unknown.

    Raises
    ------
    ValueError, OffloadError
        No such device.

    Examples
    --------
    >>> meter = Meter()
    >>> numbers = meter.read(step=1, loss=0.5)
    >>> numbers["loss"]
    0.5
    """

    def __init__(self, device: Any = None, *, sensors: bool = False) -> None:
        self._device = None if device is None else str(parse_device(device))
        self._wants_sensors = sensors
        self._sensors: Sensors | None = None
        self._last: _Reading | None = None
        self._slow: Numbers = {}
        self._energy_j: float | None = None
        self._ask_at = 0.0

    def read(self, /, **known: Any) -> Numbers:
        """Return the numbers now.

        Parameters
        ----------
        **known : int, float, Tensor of one element, or None
            What the caller knows, to be part of the dictionary: ``step``, ``loss``, ``lr``. A
            tensor on a GPU is waited for.

        Returns
        -------
        dict of str to int, float or None
            What is now, and what moved, was used and waited since the last reading; the keys are
            in docs/numbers.md. None is unknown, never 0; so is what grew at the first reading, and
            across an attach or detach.

        Raises
        ------
        TypeError, ValueError
            Something known is no number.
        """
        numbers: Numbers = {name: number_of(name, value) for name, value in known.items()}
        state = self._state()
        reading = None if state is None else _Reading.of(state)
        numbers |= _grown(self._last, reading)
        self._last = reading
        numbers |= _held_by_torch(self._shown(state))
        now = None if reading is None else reading.counters
        numbers |= {name: None if now is None else now[of] for name, of in _NOW.items()}
        self._ask_slowly(state)
        numbers |= self._slow
        if self._wants_sensors:
            numbers |= self._energy(numbers["steps"])
        return numbers

    def reset_peak(self) -> None:
        """Reset torch's peak of the device, where `read` shows one.

        While no model is attached and no device is named, that is the peak of each card: which one
        the next reading is of is not known yet.
        """
        if not torch.cuda.is_initialized():
            return
        state = self._state()
        devices = [self._shown(state)]
        if state is None and self._device is None:
            devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        for device in devices:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)

    def _shown(self, state: DeviceState | None) -> torch.device:
        """Return the device whose memory is shown."""
        return torch.device(self._device or "cuda") if state is None else state.device

    def _state(self) -> DeviceState | None:
        for state in open_states():
            if state.listeners and self._device in (None, str(state.device)):
                return state
        return None

    def _ask_slowly(self, state: DeviceState | None) -> None:
        if time.monotonic() < self._ask_at:
            return
        self._slow = {"host_available_bytes": available_bytes()}
        if self._wants_sensors:
            self._slow |= self._sensors_of(state).read()
        self._ask_at = time.monotonic() + _ASK_AGAIN_S

    def _sensors_of(self, state: DeviceState | None) -> Sensors:
        """Return those of the card of `state`; while no model is attached, those asked before."""
        uuid = uuid_of(state.device if state is not None else None)
        if self._sensors is None or uuid not in (None, self._sensors.uuid):
            self._sensors = Sensors(uuid)
            self._energy_j = None  # from one card's figure to another's is no energy
        return self._sensors

    def _energy(self, steps: int | float | None) -> Numbers:
        """Ask for the one figure that adds up: of it every interval has its part."""
        before = self._energy_j
        self._energy_j = now = None if self._sensors is None else self._sensors.energy_j()
        used = None if now is None or before is None or now < before else now - before
        return {
            "energy_j": used,
            "energy_per_step_j": used / steps if used is not None and steps else None,
        }


class _Reading:
    """Counters and clock of one engine at one moment."""

    def __init__(self, pace: Pace, now_s: float, counters: Mapping[str, Any]) -> None:
        self.pace = pace
        self.steps = pace.steps
        self.now_s = now_s
        self.counters = counters

    @staticmethod
    def of(state: DeviceState) -> _Reading | None:
        try:
            return _Reading(state.pace, state.kind.now_s(), state.engine.stats())
        except OffloadError:  # it was closed meanwhile
            return None


def _grown(before: _Reading | None, after: _Reading | None) -> Numbers:
    """Return what happened between two readings."""
    numbers: Numbers = dict.fromkeys(
        ["steps", "interval_s", "step_s", *_GROWING, "h2d_gbps", "d2h_gbps", "stalls", "stall_s"]
    )
    # Of another engine, or of one that models left since, a difference says nothing.
    if before is None or after is None or before.pace is not after.pace:
        return numbers
    grown = {name: now - before.counters[name] for name, now in after.counters.items()}
    if before.counters["units"] != after.counters["units"]:
        return numbers
    steps, seconds = after.steps - before.steps, after.now_s - before.now_s
    stalls, stall_s = stalls_of(grown)
    is_measured = grown["timed_waits"] or not grown["waits"]
    return numbers | {
        "steps": steps,
        "interval_s": seconds,
        "step_s": seconds / steps if steps else None,
        **{name: grown[name] for name in _GROWING},
        "h2d_gbps": _gbps(grown["h2d_timed_bytes"], grown["h2d_seconds"]),
        "d2h_gbps": _gbps(grown["d2h_timed_bytes"], grown["d2h_seconds"]),
        "stalls": stalls if is_measured else None,
        "stall_s": stall_s if is_measured else None,
    }


def _gbps(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds / 1e9 if seconds > 0 else None


def _held_by_torch(device: torch.device) -> Numbers:
    numbers: Numbers = dict.fromkeys(["allocated_bytes", "reserved_bytes", "peak_bytes"])
    if device.type == "cuda" and torch.cuda.is_initialized():
        numbers["allocated_bytes"] = torch.cuda.memory_allocated(device)
        numbers["reserved_bytes"] = torch.cuda.memory_reserved(device)
        numbers["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return numbers


def uuid_of(device: torch.device | None) -> str | None:
    """Return the driver's name of a card, by which NVML finds it; None where there is none."""
    if device is None or device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def number_of(name: str, value: Any) -> int | float | None:
    """Return a number, or the only element of a tensor, or None; raise TypeError for the rest."""
    if value is None or type(value) in (int, float):
        return value  # type: ignore[no-any-return]
    if isinstance(value, str):
        raise TypeError(f"{name}={value!r} is no number")
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is a {type(value).__name__}, not a number: {error}") from error
