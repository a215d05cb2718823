"""The numbers of every step of a `transformers.Trainer`, and its micro-batches with one fetch."""

from __future__ import annotations

from typing import Any

import transformers

from ...errors import OffloadError
from ..micro_batches.accumulate import accumulate
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
        As for `oracle_offload.observe.Meter`.
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


class _Together:
    """Runs before a Trainer's micro-batches: the first one's turn runs all of a step.

    Parameters
    ----------
    trainer : transformers.Trainer
        That asks for the micro-batches of a step at once, and then for each one's loss.
    """

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._get, self._step = trainer.get_batch_samples, trainer.training_step
        self._batches: list[Any] = []
        self._losses: list[Any] = []

    def get_batch_samples(self, *arguments: Any, **named: Any) -> Any:
        """Return the micro-batches of a step, and keep in mind which they are."""
        found = self._get(*arguments, **named)
        self._batches, self._losses = list(found[0]), []
        return found

    def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        """Return the loss of one micro-batch; the first of a step computes those of all."""
        if self._batches and inputs is self._batches[0] and not self._losses:
            self._losses = accumulate(
                lambda batch: self._step(model, batch, *rest, **named), self._batches
            )
        if not self._losses:
            return self._step(model, inputs, *rest, **named)
        self._batches.pop(0)
        return self._losses.pop(0)


def accumulate_in(trainer: transformers.Trainer) -> transformers.Trainer:
    """Let a Trainer's `gradient_accumulation_steps` fetch each block once; return the Trainer.

    `Trainer.training_step`, its own or a subclass's, runs in `oracle_offload.accumulate`; see there
    for what is refused. Random numbers are those of `accumulate`, so with dropout the losses are
    not those of a Trainer without this.

    Parameters
    ----------
    trainer : transformers.Trainer
        Its model may be attached before or after.

    Raises
    ------
    OffloadError
        The Trainer runs in several processes: it asks for a step's first losses without their
        gradients being shared.
    """
    processes = trainer.accelerator.num_processes
    if processes > 1:
        raise OffloadError(
            f"accumulate_in was given a Trainer of {processes} processes, which shares no "
            "gradients in the first micro-batch of a step, and that one would compute all; leave "
            "it out."
        )
    together = _Together(trainer)
    trainer.get_batch_samples = together.get_batch_samples  # type: ignore[method-assign, unused-ignore]
    trainer.training_step = together.training_step  # type: ignore[method-assign, unused-ignore]
    return trainer
