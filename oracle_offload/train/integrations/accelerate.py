"""The numbers of every step that `accelerate` logs."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

from .sinks import Feed, Sink


class AccelerateTracker(GeneralTracker):  # type: ignore[misc,unused-ignore]
    """Hands what ``accelerator.log`` is given, together with the numbers, to sinks.

    ``Accelerator(log_with=[AccelerateTracker(metrics.append)])``; accelerate takes a tracker only
    once ``accelerator.init_trackers(name)`` has been called. Values that are
    neither numbers nor tensors of one element are left out.

    Parameters
    ----------
    *sinks : callable
        `MetricsFile.append`, `tensorboard`, `wandb`, `postfix`, or whatever takes the numbers.
    device, sensors
        As for `oracle_offload.observe.Meter`.
    """

    name = "oracle_offload"
    requires_logging_directory = False

    def __init__(self, *sinks: Sink, device: Any = None, sensors: bool = False) -> None:
        super().__init__()
        self._feed = Feed(*sinks, device=device, sensors=sensors)

    @property
    def tracker(self) -> tuple[Sink, ...]:
        """The sinks."""
        return self._feed.sinks

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Read the numbers and hand them on with `values`."""
        self._feed(step, **values)
