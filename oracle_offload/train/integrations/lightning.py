"""The numbers of every step of a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning

from .sinks import Feed, Sink, known


class LightningCallback(lightning.Callback):  # type: ignore[misc,unused-ignore]
    """Hands the numbers of each optimizer step to sinks, and to the Trainer's own loggers.

    Parameters
    ----------
    *sinks : callable
        `MetricsFile.append`, `tensorboard`, `wandb`, `postfix`, or whatever takes the numbers.
    device, sensors
        As for `oracle_offload.observe.Meter`.
    """

    def __init__(self, *sinks: Sink, device: Any = None, sensors: bool = False) -> None:
        self._feed = Feed(*sinks, device=device, sensors=sensors)
        self._seen: int  # steps

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count: what came before belongs to no step."""
        self._seen = trainer.global_step
        self._feed.restart()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch has ended, and with it perhaps a step."""
        if trainer.global_step == self._seen:  # gradients are being accumulated
            return
        self._seen = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if pl_module.automatic_optimization and loss is not None:
            loss = loss * trainer.accumulate_grad_batches  # by which Lightning has divided it
        numbers = self._feed(self._seen, loss=loss)
        for logger in trainer.loggers:
            logger.log_metrics(known(numbers, "oracle_offload/"), step=self._seen)
