"""AI-Toolkit's `gradient_accumulation` with one fetch of each block for all micro-batches.

Its trainer asks for the loss of one batch after the other; the first turn computes all of them, in
`oracle_offload.accumulate`. The trainer is changed as an object, and no file is.
"""

from __future__ import annotations

from typing import Any

from ..errors import OffloadError
from ..train.micro_batches.accumulate import accumulate
from .run_folder import find_trainer

SETTING = "layer_offloading_accumulate"  # of the section `model`
# What keeps, below its own attributes, what belongs to one batch.
_STATEFUL = ("adapter", "assistant_adapter")


def follow_setting() -> None:
    """Change the trainer that attaches a model now, if its configuration asks for it.

    Raises
    ------
    OffloadError
        That trainer does not ask for the loss of a batch by `train_single_accumulation`.
    """
    trainer = find_trainer()
    if trainer is None or not (trainer.config.get("model") or {}).get(SETTING):
        return
    if "train_single_accumulation" in vars(trainer):
        return  # at an earlier attach
    if not hasattr(trainer, "train_single_accumulation"):
        raise OffloadError(
            f"model.{SETTING} is set, but {type(trainer).__name__} computes the batches of a step "
            "in a loop of its own, not by train_single_accumulation; take the setting out."
        )
    together = _Together(trainer)
    trainer.hook_train_loop = together.hook_train_loop
    trainer.train_single_accumulation = together.train_single_accumulation


class _Together:
    """Replaces the methods of a trainer that take the batches of a step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._hook, self._loss = trainer.hook_train_loop, trainer.train_single_accumulation
        self._batches: list[Any] = []
        self._losses: list[Any] = []

    def hook_train_loop(self, batch: Any) -> Any:
        """Run a step, and keep in mind which batches it has."""
        self._batches, self._losses = list(batch) if isinstance(batch, list) else [batch], []
        return self._hook(batch)

    def train_single_accumulation(self, batch: Any) -> Any:
        """Return the loss of one batch; the first of a step computes those of all."""
        if len(self._batches) < 2:
            return self._loss(batch)
        if not self._losses:
            self._losses = self._all()
        return self._losses.pop(0)

    def _all(self) -> list[Any]:
        trainer = self._trainer
        self._refuse()
        sd = trainer.sd
        own = (trainer, trainer.timer, trainer.network, sd, getattr(sd, "noise_scheduler", None))
        return accumulate(
            self._loss,
            self._batches,
            own=[one for one in own if one is not None],
        )

    def _refuse(self) -> None:
        trainer = self._trainer
        processes = trainer.accelerator.num_processes
        stateful = [name for name in _STATEFUL if getattr(trainer, name, None) is not None]
        if processes > 1:
            what = f"{processes} processes, which share gradients at the end of each backward"
        elif getattr(trainer.sd, "is_multistage", False):
            what = "a model of several stages, which change from batch to batch"
        elif stateful:
            what = f"{stateful[0]}={type(getattr(trainer, stateful[0])).__name__}, which keeps a "
            what += "batch's inputs where the next batch finds them"
        else:
            return
        raise OffloadError(f"model.{SETTING} is set for a training with {what}; take it out.")
