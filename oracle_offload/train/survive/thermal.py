"""A pause for a card that is too hot, before it slows down by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from ...host.sensors import Sensors
from ...observe.meter import uuid_of
from .memory import card

logger = logging.getLogger("oracle_offload")


class ThermalPause:
    """Lets the host wait between steps while the card is too hot. Only who makes one has it.

    Parameters
    ----------
    limit_c : float
        Degrees Celsius from which on it waits.
    resume_c : float
        Degrees at which training goes on.
    most_s : float
        Seconds of one pause at most.
    device : torch.device, str or int, optional
        The card; by default torch's current one.
    temperature : callable, optional
        Answers the card's degrees, or None; by default the card's sensor (NVML, nvidia-ml-py).
    clock, sleep : callable
        Answer seconds, and wait.

    Attributes
    ----------
    pauses : int
        So far.
    paused_s : float
        Seconds in all.
    why : str
        Why there is no temperature; empty where there is one.

    Raises
    ------
    ValueError
        `resume_c` is not below `limit_c`, or `most_s` not above zero.
    """

    def __init__(
        self,
        limit_c: float = 87.0,
        resume_c: float = 78.0,
        *,
        most_s: float = 300.0,
        device: Any = None,
        temperature: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if not resume_c < limit_c or not most_s > 0:
            raise ValueError(
                f"limit_c={limit_c}, resume_c={resume_c}, most_s={most_s}: training has to resume "
                "below the limit, after a time above zero"
            )
        self.pauses = 0
        self.paused_s = 0.0
        self.why = ""
        self._limit_c, self._resume_c, self._most_s = limit_c, resume_c, most_s
        self._clock, self._sleep = clock, sleep
        if temperature is None:
            sensors = Sensors(uuid_of(card(device)))
            self.why = sensors.why
            temperature = _temperature_of(sensors)
            if self.why:
                logger.warning("no thermal pause: %s", self.why)
        self._temperature = temperature

    def step(self) -> float:
        """Wait, if the card is too hot; return the seconds that it took."""
        degrees = self._temperature()
        if degrees is None or degrees < self._limit_c:
            return 0.0
        began = self._clock()
        logger.warning(
            "the card is at %.0f C: paused until it is at %.0f C", degrees, self._resume_c
        )
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # else it works on what is queued, and stays hot
        while self._clock() - began < self._most_s:
            self._sleep(1.0)
            degrees = self._temperature()
            if degrees is None or degrees <= self._resume_c:
                break
        waited = self._clock() - began
        self.pauses += 1
        self.paused_s += waited
        return waited


def _temperature_of(sensors: Sensors) -> Callable[[], float | None]:
    return lambda: sensors.read()["temperature_c"]
