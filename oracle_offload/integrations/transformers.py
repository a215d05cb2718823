"""The numbers of every step of a `transformers.Trainer`."""

from __future__ import annotations

from typing import Any

import transformers

from .sinks import Feed, Sink


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Hands the numbers of each optimizer step to sinks: ``Trainer(..., callbacks=[...])``.

    Steps that the Trainer logs bring their loss (and what else it logs: ``learning_rate``,
    ``grad_norm``); ``logging_steps=1`` makes that all of them.

    Parameters
    ----------
    *sinks : callable
        `MetricsFile.append`, `tensorboard`, `wandb`, `postfix`, or whatever takes the numbers.
    device, sensors
        As for `oracle_offload.Meter`.
    """

    def __init__(self, *sinks: Sink, device: Any = None, sensors: bool = False) -> None:
        self._feed = Feed(*sinks, device=device, sensors=sensors)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count: what came before belongs to no step."""
        self._feed.restart()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step has ended; one that is about to be logged waits for its loss."""
        if not control.should_log:
            self._feed(state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """The Trainer logs: a step, or at the end the whole training, which is no step."""
        if logs and "loss" in logs:
            self._feed(state.global_step, **logs)
