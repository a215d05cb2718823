"""The loop: it ties the recipes together, over a managed model or a resident one."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import Checkpoint, IdleAlarm, MetricsFile, attach, phase
from ..devices import KINDS, parse_device
from ..doctor.sensors import Sensors
from ..meter import uuid_of
from ..recipes.accumulation import backward_weighted, evaluate
from ..recipes.attention import AttentionBackends
from ..recipes.checkpointing import set_checkpointing
from ..recipes.lengths import LengthBuckets
from ..recipes.mixed_precision import MixedPrecision
from ..recipes.optimizers import make_optimizer, state_bytes
from . import lora, resuming
from .load import load_task
from .settings import Settings, SettingsError
from .tasks import Piece, Task

SCHEMA = "oracle_offload/train-lora/1"
_IDLE_STEPS = 20
_WARM_UP_STEPS = 2  # in which the engine learns the order


def train(settings: Settings, say: Callable[[str], object]) -> dict[str, Any]:
    """Train, and return what came of it; it is in ``result.json`` of the output folder, too.

    Parameters
    ----------
    settings : Settings
        What to do.
    say : callable
        Told what a user should see, line by line.

    Raises
    ------
    SettingsError
        The model or the data does not fit the settings.
    """
    with _settings_of_ours():
        device = parse_device(settings.device)
    folder = Path(settings.output)
    (folder / "previews").mkdir(parents=True, exist_ok=True)
    if settings.resume:
        resuming.refuse_another(folder, settings)
    else:
        resuming.note_settings(folder, settings)
    task = load_task(settings)
    for note in task.notes:
        say(f"note: {note}")
    checkpointed = settings.gradient_checkpointing and set_checkpointing(task.model)
    if settings.gradient_checkpointing and not checkpointed:
        say("note: the model has no gradient checkpointing")
    manager = None
    if settings.resident:
        task.model.to(device)
    else:
        with _settings_of_ours():
            manager = attach(
                task.model,
                device,
                offload_percent=settings.offload_percent,
                vram_budget=settings.vram_budget or None,
                ram_budget=settings.ram_budget or None,
                order_file=folder,
            )
        say(f"attached: {manager!r}")
    try:
        loop, sensors = _Loop(settings, task, device, say), Sensors(uuid_of(device))
        begin_s, begin_j = time.monotonic(), sensors.energy_j()
        result = loop.run()
        end_s, end_j = time.monotonic(), sensors.energy_j()
        result["watts"] = (
            None if begin_j is None or end_j is None else (end_j - begin_j) / (end_s - begin_s)
        )
        if manager is not None:
            counters = manager.state.engine.stats()
            timed_s = counters["h2d_seconds"]
            result |= {
                "managed_layers": len(manager.layers),
                "managed_bytes": manager.attachment.weight_bytes,
                "arena_bytes": manager.attachment.arena.capacity_bytes,
                "h2d_bytes": counters["h2d_bytes"],
                "d2h_bytes": counters["d2h_bytes"],
                "h2d_gbps": counters["h2d_timed_bytes"] / timed_s / 1e9 if timed_s else None,
            }
    finally:
        if manager is not None:
            manager.detach()
    result |= {"gradient_checkpointing": checkpointed, "host_peak_bytes": _host_peak()}
    result["device_peak_bytes"] = KINDS[device.type](device).peak_bytes()
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


@contextlib.contextmanager
def _settings_of_ours() -> Iterator[None]:
    """Let an argument that this package refuses be a setting that makes no sense."""
    try:
        yield
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _host_peak() -> int | None:
    """Return the most that this process had in memory; None where the system does not tell."""
    with contextlib.suppress(OSError, StopIteration):  # Linux: `ru_maxrss` counts a parent's, too
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _Loop:
    def __init__(
        self,
        settings: Settings,
        task: Task,
        device: torch.device,
        say: Callable[[str], object],
    ) -> None:
        self._settings, self._task, self._device, self._say = settings, task, device, say
        self._folder = Path(settings.output)
        self._parameters = list(lora.trained(task.model).values())
        self._made = make_optimizer(
            settings.optimizer_name, self._parameters, settings.learning_rate
        )
        if self._made.why:
            say(f"note: {self._made.why}")
        self._amp = MixedPrecision(device, settings.amp)
        self._checkpoint = Checkpoint(
            self._folder / resuming.STATE,
            task.model,
            optimizer=self._made.optimizer,
            scaler=self._amp.scaler,
            every=settings.save_every or settings.steps,
        )
        self._step = 0
        if settings.resume:
            self._step = self._checkpoint.load() or 0
            say(f"resumed after step {self._step}")
        self._buckets = LengthBuckets(
            task.lengths, settings.batch_size, settings.seed, settings.bucket_pool
        )
        self._attention, self._attention_seen = AttentionBackends(), False
        self._eval_loss: float | None = None

    def run(self) -> dict[str, Any]:
        """Train until the steps or the time are over."""
        settings = self._settings
        begin, begun_at = time.monotonic(), self._step
        losses: list[float] = []
        seconds: list[float] = []
        alarm = IdleAlarm(self._task.model, steps=_IDLE_STEPS, scaler=self._amp.scaler)
        with MetricsFile(settings.log_path, device=self._device) as metrics:
            while self._step < settings.steps:
                if time.monotonic() - begin >= settings.duration_s:
                    self._say(f"the time is over: {settings.duration}")
                    break
                before = time.monotonic()
                loss, terms = self._one_step()
                alarm.step()
                seconds.append(time.monotonic() - before)
                losses.append(loss)
                due = settings.eval_every and self._step % settings.eval_every == 0
                known: dict[str, Any] = {"lr": settings.learning_rate, "length": terms}
                if settings.eval_file and (due or self._step == settings.steps):
                    known["eval_loss"] = self._eval_loss = self._evaluate()
                metrics.log(self._step, loss=loss, **known)
                self._tell(loss, known)
                if settings.preview_every and self._step % settings.preview_every == 0:
                    self._preview()
                self._checkpoint.after_step(self._step)
        if self._checkpoint.saved != self._step:
            self._checkpoint.save(self._step, "the end")
        counted = seconds[_WARM_UP_STEPS:] or seconds
        return {
            "schema": SCHEMA,
            "steps": self._step,
            "steps_now": self._step - begun_at,
            "seconds_per_step": statistics.median(counted) if counted else None,
            "loss_first": losses[0] if losses else None,
            "loss_last": losses[-1] if losses else None,
            "eval_loss": self._eval_loss,
            "adapter": str(self._task.save(self._folder)),
            "optimizer": self._made.name,
            "optimizer_note": self._made.why,
            "optimizer_bytes": state_bytes(self._made.optimizer),
            "amp": None if self._amp.dtype is None else str(self._amp.dtype).removeprefix("torch."),
            "skipped_steps": self._amp.skipped,
            "attention": str(self._attention),
            "padding": self._buckets.padding(),
            "idle": sorted(alarm.idle),
            "notes": self._task.notes,
        }

    def _one_step(self) -> tuple[float, int]:
        """Train one step; the loss and the terms that it is the mean of."""
        # Every step begins with a seed of its own: a resumed run needs no generator's state.
        torch.manual_seed(self._settings.seed * 1_000_003 + self._step)
        pieces = [
            piece
            for indices in self._indices()
            for piece in self._task.pieces(indices, self._device, False)
        ]
        loss = backward_weighted(pieces, self._loss, lambda piece: piece.terms, self._amp.backward)
        norm = self._settings.max_grad_norm or None
        self._amp.step(self._made.optimizer, self._parameters, norm)
        self._made.optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return loss, sum(piece.terms for piece in pieces)

    def _indices(self) -> Iterator[list[int]]:
        """Yield the batches of the step: which they are follows from its number alone."""
        many = self._settings.gradient_accumulation_steps
        per_epoch = len(self._buckets)
        for number in range(self._step * many, (self._step + 1) * many):
            epoch, at = divmod(number, per_epoch)
            yield self._buckets.batches(epoch)[at]

    def _loss(self, piece: Piece) -> torch.Tensor:
        watched = contextlib.nullcontext() if self._attention_seen else self._attention
        self._attention_seen = True
        with self._amp.autocast(), watched:
            return piece.loss_sum()

    def _evaluate(self) -> float:
        torch.manual_seed(self._settings.seed)
        size = self._settings.batch_size
        count = len(self._task.eval_lengths)
        pieces = [
            piece
            for begin in range(0, count, size)
            for piece in self._task.pieces(
                range(begin, min(begin + size, count)), self._device, True
            )
        ]

        def compute(piece: Piece) -> tuple[torch.Tensor, int, None]:
            with self._amp.autocast():
                return piece.loss_sum(), piece.terms, None

        with phase("evaluation"):
            return evaluate(self._task.model, pieces, compute).loss

    def _preview(self) -> None:
        model = self._task.model
        model.eval()
        try:
            with phase("sampling"), torch.no_grad(), self._amp.autocast():
                path = self._task.preview(self._folder / "previews", self._step, self._device)
        finally:
            model.train()
        self._say(f"preview: {path}")

    def _tell(self, loss: float, known: dict[str, Any]) -> None:
        line = f"step {self._step}/{self._settings.steps}  loss {loss:.4f}"
        if "eval_loss" in known:
            line += f"  eval loss {known['eval_loss']:.4f}"
        self._say(line)
        if self._amp.hint:
            self._say(f"note: {self._amp.hint}")
            self._amp.hint = ""
