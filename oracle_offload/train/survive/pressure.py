"""How close the device and the host are to their limits: levels, and one line to show them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...engine.devices import parse_device
from ...engine.engines import open_states
from ...errors import OffloadError
from ...host.sizes import format_size, parse_size
from .adaptive_batch import whole_number
from .memory import device_free_and_total, host_available_and_total

logger = logging.getLogger("oracle_offload")

CALM, WARN, CRITICAL = "calm", "warn", "critical"
Size = int | float | str
_ANY = 1 << 62  # bytes, to see whether a threshold is one


@dataclass(frozen=True)
class Reading:
    """Memory of one place, at one moment.

    Attributes
    ----------
    place : str
        "device" or "host".
    used_bytes, total_bytes : int or None
        Without what can be had at once (torch's cache, the page cache); None is unknown.
    level : {"calm", "warn", "critical"}
        With hysteresis: see `PressureMonitor`.
    """

    place: str
    used_bytes: int | None
    total_bytes: int | None
    level: str = CALM

    def __str__(self) -> str:
        if self.used_bytes is None or self.total_bytes is None:
            return f"{self.place} unknown"
        share = self.used_bytes / self.total_bytes
        return f"{self.place} {format_size(self.used_bytes)} ({share:.0%}) {self.level}"


class _Place:
    """The level of one place: it rises at a threshold, and falls only well below it."""

    def __init__(self, name: str, warn: Size, critical: Size, hysteresis: float) -> None:
        self.name, self._hysteresis = name, hysteresis
        self._warn, self._critical = warn, critical
        self._level = CALM
        self.peak_bytes = 0

    def read(self, used: int | None, total: int | None) -> Reading:
        if used is not None and total:
            self.peak_bytes = max(self.peak_bytes, used)
            self._level = self._next(used, total)
        return Reading(self.name, used, total, self._level)

    def _next(self, used: int, total: int) -> str:
        slack = self._hysteresis * total
        critical = limit_of(self._critical, total)
        warn = limit_of(self._warn, total)
        if used >= critical - slack * (self._level == CRITICAL):
            return CRITICAL
        return WARN if used >= warn - slack * (self._level != CALM) else CALM


def limit_of(threshold: Size, total: int) -> int:
    """Return a threshold in bytes; 1.0 is all of `total`."""
    if threshold == 1.0 and isinstance(threshold, float):
        return total
    return parse_size(threshold, total=total, name="threshold")


class PressureMonitor:
    """Watches the memory of a device and of the host, from step to step.

    A level begins where its threshold is reached, and ends where memory has fallen by `hysteresis`
    below it, so that a value that swings around a threshold is reported once. Every rise is logged.

    Parameters
    ----------
    warn, critical : float, int or str
        Thresholds of the device: a share of its memory up to 1.0, bytes, or ``"10GB"``.
    host_warn, host_critical : float, int or str
        The same for the host, within the limit on its control group.
    hysteresis : float
        Share of all memory, in [0, 1).
    every : int
        `step` looks after so many steps.
    device : torch.device, str or int, optional
        Where: by default the first with attached models, else torch's current card.
    on_warn, on_critical : callable, optional
        Called with the `Reading` when that level begins.
    checkpoint : callable, optional
        Called with the step when either place becomes critical, once until neither is: such as
        ``lambda step: checkpoint.save(step, "critical")``. What it raises is logged.
    root : str
        The directory that holds `proc` and `sys`: "/" for the live system.

    Attributes
    ----------
    device, host : Reading
        As they were last.

    Raises
    ------
    ValueError
        A threshold, the hysteresis or `every` makes no sense.

    Examples
    --------
    >>> monitor = PressureMonitor()
    >>> monitor.step(1) in ("calm", "warn", "critical")
    True
    """

    def __init__(
        self,
        *,
        warn: Size = 0.85,
        critical: Size = 0.93,
        host_warn: Size = 0.85,
        host_critical: Size = 0.95,
        hysteresis: float = 0.05,
        every: int = 1,
        device: Any = None,
        on_warn: Callable[[Reading], object] | None = None,
        on_critical: Callable[[Reading], object] | None = None,
        checkpoint: Callable[[int], object] | None = None,
        root: str = "/",
    ) -> None:
        if isinstance(hysteresis, bool) or not 0 <= hysteresis < 1:
            raise ValueError(f"hysteresis={hysteresis!r} is not in [0, 1)")
        for low, high in ((warn, critical), (host_warn, host_critical)):
            limits = limit_of(low, _ANY), limit_of(high, _ANY)
            # A share and a size can be compared only once there is a memory to be a share of.
            if isinstance(low, float) == isinstance(high, float) and limits[0] > limits[1]:
                raise ValueError(
                    f"the threshold {low!r} to warn at is above {high!r}, the critical"
                )
        self._every = whole_number("every", every)
        self._asked = device
        self._name = None if device is None else _name_of(device)
        self._root = root
        self._calls = {WARN: on_warn, CRITICAL: on_critical}
        self._checkpoint = checkpoint
        self._in_excursion = False
        self._places = [
            _Place("device", warn, critical, hysteresis),
            _Place("host", host_warn, host_critical, hysteresis),
        ]
        self._phase: tuple[str, int | None] | None = None
        self.device, self.host = self._read()

    @property
    def level(self) -> str:
        """The higher one of both levels."""
        levels = {self.device.level, self.host.level}
        return next(level for level in (CRITICAL, WARN, CALM) if level in levels)

    def step(self, step: int) -> str:
        """Look, if it is time; return the higher one of both levels."""
        if step % self._every:
            return self.level
        before = {"device": self.device.level, "host": self.host.level}
        self.device, self.host = self._read()
        for reading in (self.device, self.host):
            self._tell(reading, before[reading.place])
        if self.level != CRITICAL:
            self._in_excursion = False
        elif not self._in_excursion:
            self._in_excursion = True
            self._save(step)
        return self.level

    def _tell(self, reading: Reading, before: str) -> None:
        order = (CALM, WARN, CRITICAL)
        if order.index(reading.level) <= order.index(before):
            return
        logger.warning("memory is at %r: %s", reading.level, reading)
        call = self._calls[reading.level]
        if call is not None:
            call(reading)

    def _save(self, step: int) -> None:
        if self._checkpoint is None:
            return
        try:
            self._checkpoint(step)
        except Exception:  # a full disk ends no training
            logger.exception("the emergency checkpoint of step %d failed", step)

    def phase(self, name: str) -> str:
        """Begin a phase; return one line on the memory of the one that ends, and log it.

        Parameters
        ----------
        name : str
            The phase that begins: ``"sampling"``.
        """
        self.device, self.host = self._read()
        place = self._places[0] if self.device.used_bytes is not None else self._places[1]
        now = self.device if self.device.used_bytes is not None else self.host
        line = f"phase {name!r} begins: {now}"
        if self._phase is not None and now.used_bytes is not None:
            ended, began = self._phase
            grown = now.used_bytes - (began or 0)
            sign = "-" if grown < 0 else "+"
            line = (
                f"phase {ended!r} -> {name!r}: {now.place} {sign}{format_size(abs(grown))}, peak "
                f"{format_size(place.peak_bytes)}"
            )
        place.peak_bytes = now.used_bytes or 0
        self._phase = (name, now.used_bytes)
        logger.info("%s", line)
        return line

    def status_line(self) -> str:
        """Return one line: ``device 7.50 GiB (94%) critical | host 20.00 GiB (31%) calm``."""
        return f"{self.device} | {self.host}"

    def _read(self) -> tuple[Reading, Reading]:
        free, total = self._device_memory()
        device = self._places[0].read(_used(free, total), total)
        available, all_of_it = host_available_and_total(self._root)
        return device, self._places[1].read(_used(available, all_of_it), all_of_it)

    def _device_memory(self) -> tuple[int | None, int | None]:
        for state in open_states():  # a simulated device has no card
            if state.listeners and self._name in (None, str(state.device)):
                try:
                    return state.free_bytes(), state.engine.mem_info()[1]
                except OffloadError:  # closed meanwhile, or ended by an error
                    break
        return device_free_and_total(self._asked)


def _name_of(device: Any) -> str:
    try:
        return str(parse_device(device))
    except OffloadError:  # there is no such card, so there is nothing to know of it
        return str(device)


def _used(free: int | None, total: int | None) -> int | None:
    return None if free is None or total is None else max(0, total - free)
