"""What a card measures of itself while it trains: watts, clocks, heat, the link; by NVML.

Reads only; a figure that a card does not answer is None, never 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .gpus import NOT_INSTALLED, ask, clock_reasons, number_within

_NO_MORE = 1 << 40  # no figure of a card comes near it


def _questions(nvml: Any, card: Any) -> dict[str, Callable[[], int | float]]:
    return {
        "power_w": lambda: number_within(nvml.nvmlDeviceGetPowerUsage(card), _NO_MORE) / 1e3,
        "temperature_c": lambda: number_within(
            nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU), 1000
        ),
        "sm_clock_mhz": lambda: number_within(
            nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM), _NO_MORE
        ),
        "memory_clock_mhz": lambda: number_within(
            nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM), _NO_MORE
        ),
        "performance_state": lambda: number_within(nvml.nvmlDeviceGetPerformanceState(card), 15),
        "clock_reasons": lambda: clock_reasons(nvml, card),
        "link_generation": lambda: number_within(
            nvml.nvmlDeviceGetCurrPcieLinkGeneration(card), 15, 1
        ),
        "link_width": lambda: number_within(nvml.nvmlDeviceGetCurrPcieLinkWidth(card), 63, 1),
    }


SENSORS = tuple(_questions(None, None))  # what `Sensors.read` answers


class Sensors:
    """The sensors of one card, asked again and again.

    Parameters
    ----------
    uuid : str or None
        The card, as the driver names it (``"GPU-..."``); None answers nothing.

    Attributes
    ----------
    uuid : str or None
        The card.
    why : str
        Why nothing is answered; empty where something is.
    missing : dict of str to str
        What the card did not answer last time, and why.
    """

    def __init__(self, uuid: str | None) -> None:
        self.uuid = uuid
        self._nvml: Any = None
        self._card: Any = None
        self.why = ""
        self.missing: dict[str, str] = {}
        if uuid is None:
            self.why = "the device is no NVIDIA card"
            return
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._card = nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = nvml  # initialised until the process ends, as every reading needs it
        except ImportError:
            self.why = NOT_INSTALLED
        except Exception as error:
            self.why = f"the NVIDIA driver does not answer: {error}"

    def read(self) -> dict[str, int | float | None]:
        """Return a figure for each of `SENSORS`, None where it is not answered. Never raises."""
        self.missing = {}
        if self._nvml is None:
            return dict.fromkeys(SENSORS)
        questions = _questions(self._nvml, self._card)
        return {name: ask(self.missing, name, question) for name, question in questions.items()}

    def energy_j(self) -> float | None:
        """Return the joules that the card has used since its driver was loaded; None if unknown."""
        if self._nvml is None:
            return None
        millijoules = ask(
            self.missing,
            "energy_j",
            lambda: number_within(
                self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card), 1 << 63
            ),
        )
        return None if millijoules is None else millijoules / 1e3
