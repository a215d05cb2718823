"""Places that the numbers of `Meter.read` go to: TensorBoard, Weights & Biases, a tqdm bar.

A sink is whatever can be called with the numbers; `MetricsFile.append` is one too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ...host.sizes import format_size
from ...observe.meter import Meter, Numbers, number_of

logger = logging.getLogger("oracle_offload")

Sink = Callable[[Numbers], object]


def known(numbers: Numbers, prefix: str = "") -> dict[str, int | float]:
    """Return the numbers that are known, under their names behind `prefix`; without ``step``."""
    return {
        f"{prefix}{name}": value
        for name, value in numbers.items()
        if value is not None and name != "step"
    }


class Feed:
    """Reads the numbers of each step and hands them to sinks; what the callbacks have in common.

    Parameters
    ----------
    *sinks : callable
        Each is called with the numbers. What one raises is logged the first time.
    device, sensors
        As for `Meter`.
    """

    def __init__(self, *sinks: Sink, device: Any = None, sensors: bool = False) -> None:
        self._meter = Meter(device, sensors=sensors)
        self.sinks = sinks
        self._failed: set[int] = set()

    def restart(self) -> None:
        """Let the next numbers be of what happens from now on."""
        self._meter.read()

    def __call__(self, step: int | None, /, **more: Any) -> Numbers:
        """Read, and pass on with what of `more` is a number; a `step` replaces one in `more`."""
        known = _numbers_among(more if step is None else {**more, "step": step})
        numbers = self._meter.read(**known)
        for place, sink in enumerate(self.sinks):
            try:
                sink(numbers)
            except Exception as error:  # a full disk ends no training
                if place not in self._failed:
                    logger.warning("%r lost the numbers of a step: %r", sink, error)
                self._failed.add(place)
        return numbers


def _numbers_among(values: Mapping[str, Any]) -> Numbers:
    """Return what `Meter.read` takes of that which a trainer logs: it also logs text and tables."""
    numbers: Numbers = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError):
            numbers[name] = number_of(name, value)
    return numbers


def tensorboard(writer: Any, prefix: str = "oracle_offload/") -> Sink:
    """Return a sink that adds the known numbers as scalars.

    Parameters
    ----------
    writer : torch.utils.tensorboard.SummaryWriter
        Or whatever has its ``add_scalar(tag, value, step)``, as tensorboardX's has.
    prefix : str
        Before each name.
    """

    def add(numbers: Numbers) -> None:
        for tag, value in known(numbers, prefix).items():
            writer.add_scalar(tag, value, numbers.get("step"))

    return add


def wandb(run: Any, prefix: str = "oracle_offload/") -> Sink:
    """Return a sink that logs the known numbers in a run of Weights & Biases.

    Parameters
    ----------
    run : wandb.Run
        What ``wandb.init()`` returned.
    prefix : str
        Before each name.
    """

    def log(numbers: Numbers) -> None:
        run.log(known(numbers, prefix), step=numbers.get("step"))

    return log


def postfix(bar: Any) -> Sink:
    """Return a sink that shows the numbers that matter behind a tqdm bar.

    Parameters
    ----------
    bar : tqdm.tqdm
        The bar of the training loop.
    """

    def show(numbers: Numbers) -> None:
        bar.set_postfix(shown(numbers), refresh=False)

    return show


def shown(numbers: Numbers) -> dict[str, str]:
    """Return the numbers that matter, as people write them; what is unknown is left out."""
    texts: dict[str, str] = {}
    if (loss := numbers.get("loss")) is not None:
        texts["loss"] = f"{loss:.4g}"
    if (step_s := numbers.get("step_s")) is not None:
        texts["step"] = f"{step_s:.2f} s" if step_s >= 1 else f"{step_s * 1e3:.1f} ms"
    for name, key in (("arena", "in_arena_bytes"), ("torch", "allocated_bytes")):
        if (size := numbers.get(key)) is not None:
            texts[name] = format_size(size)
    if (rate := numbers.get("h2d_gbps")) is not None:
        texts["copies"] = f"{rate:.1f} GB/s"
    stall_s, interval_s = numbers.get("stall_s"), numbers.get("interval_s")
    if stall_s is not None and interval_s:
        texts["stalled"] = f"{100 * stall_s / interval_s:.0f}%"
    if (watts := numbers.get("power_w")) is not None:
        texts["power"] = f"{watts:.0f} W"
    return texts
