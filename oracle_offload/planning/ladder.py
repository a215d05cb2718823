"""What else could be done: cheaper things first, what changes the trained result last, marked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..model.budget import OFFLOADED
from .codes import chosen_beside
from .fit import RESIDENT, Fit, Room, fit_step
from .measure import Step
from .optimizers import OPTIMIZERS
from .question import Question
from .storage import Recipe, Storage, storage_of

FROM_DISK = "budget=Budget(disk=True)"
# What this library does not have, what it would give, and what has it.
ABSENT = (
    (
        "trained weights or states on NVMe",
        "a full training that is larger than the host's memory; it writes all of them in each step",
        "DeepSpeed ZeRO-Infinity",
    ),
    (
        "an optimizer for the host that steps during backward",
        "a shorter step of full fine-tuning: torch's own optimizers step host weights after it",
        "DeepSpeed ZeRO-Offload, torchao CPUOffloadOptimizer",
    ),
    (
        "sharding over several cards",
        "each card keeps a share, below",
        "PyTorch FSDP2, DeepSpeed ZeRO",
    ),
)


@dataclass(frozen=True)
class Rung:
    """One alternative.

    Attributes
    ----------
    name, cost : str
        What it is, and what it costs.
    changes_result : bool
        Whether other numbers are trained than without it.
    saves_device, saves_host : int
        Bytes less than what was asked about; negative where it needs more.
    saves_disk : int
        Bytes less that stay in files.
    verdict : str
        Of what was asked about, with it.
    option : str
        What `plan` takes for it.
    """

    name: str
    cost: str
    changes_result: bool
    saves_device: int
    saves_host: int
    saves_disk: int
    verdict: str
    option: str


@dataclass(frozen=True)
class Shard:
    """Persistent bytes of one of several cards under DeepSpeed's ZeRO."""

    stage: int
    cards: int
    bytes: int


def ladder(
    question: Question,
    step: Step,
    found: Fit,
    remeasured: Callable[..., Step],
) -> list[Rung]:
    """Return the alternatives to `found`, in order of what they cost.

    Parameters
    ----------
    question : Question
        What was asked.
    step : Step
        Of that.
    found : Fit
        The answer.
    remeasured : callable
        Returns the step of the question with some fields changed.
    """
    source, recipe, room = question.source, question.recipe, question.room
    if found.verdict == RESIDENT:
        return []
    rungs: list[Rung] = []

    def add(
        name: str,
        cost: str,
        option: str,
        changes_result: bool,
        changed: Recipe,
        other_step: Step = step,
        micro_batches: int = question.micro_batches,
        there: Room = room,
    ) -> None:
        storage = storage_of(source, changed)
        if changed.compress == "auto":
            asked = replace(question, recipe=changed, micro_batches=micro_batches)
            storage = chosen_beside(asked, storage, other_step, found.storage)
        if changed.quantize:  # which no file has
            there = replace(there, budget=replace(there.budget, disk=False))
        _, other = fit_step(storage, other_step, micro_batches, there)
        saves_device = found.least_device_bytes - other.least_device_bytes
        saves_host = found.host_bytes - other.host_bytes
        saves_disk = found.disk_bytes - other.disk_bytes
        saved = (saves_device, saves_host, saves_disk)
        if any(size > 0 for size in saved):
            rungs.append(Rung(name, cost, changes_result, *saved, other.verdict, option))

    known = step.activations is not None
    if known and not question.checkpointing:
        again = remeasured(checkpointing=True)
        cost = "each block is computed once more, about a third of a step"
        add("checkpointing", cost, "checkpointing=True", False, recipe, again)
    if step.together:
        cost = (
            f"{question.micro_batches} micro-batches for each step, each of which moves the weights"
        )
        add("accumulation in a loop", cost, "micro_batches=1", False, recipe, step, 1)
    if known and question.batch > 1:
        one = remeasured(batch=1)
        number = question.batch * question.micro_batches
        option = f"batch=1, micro_batches={number}"
        cost = "smaller kernels; the weights move once for all micro-batches"
        add("batch 1 and accumulate()", cost, option, False, recipe, one, number)
        cost = f"{number} micro-batches for each step, each of which moves the weights"
        add("batch 1 and accumulation", cost, "batch=1", False, recipe, one, 1)
    if (
        recipe.train == "full"
        and recipe.master_dtype is None
        and not recipe.during_backward
        and question.micro_batches == 1
    ):
        changed = replace(recipe, during_backward=True)
        cost = "no GradScaler, clipping or accumulation: gradients never come home"
        add("the optimizer in backward", cost, "during_backward=True", False, changed)
    if recipe.train == "lora" and room.budget.ram_budget != OFFLOADED:
        cost = "each step reads from disk what the host has no room for"
        from_disk = replace(room, budget=replace(room.budget, disk=True))
        add("frozen weights in their files", cost, FROM_DISK, False, recipe, there=from_disk)
    lighter = OPTIMIZERS.get(recipe.optimizer.lighter)
    while lighter is not None:
        option = f"optimizer={lighter.name!r}"
        changed = replace(recipe, optimizer=lighter)
        add(f"optimizer {lighter.name}", "its state is coarser", option, True, changed)
        lighter = OPTIMIZERS.get(lighter.lighter)
    if recipe.train == "lora":
        for quantize in ("int8", "nf4") if recipe.quantize is None else ():
            option = f"quantize={quantize!r}"
            changed = replace(recipe, quantize=quantize)
            name = f"frozen weights in {quantize}"
            add(name, "the base model is rounded", option, True, changed)
        if recipe.rank > 4:
            half = recipe.rank // 2
            cost = "the LoRA can say less"
            add("half the rank", cost, f"rank={half}", True, replace(recipe, rank=half))
    else:
        cost = "another training: a correction of low rank"
        changed = replace(recipe, train="lora", master_dtype=None, during_backward=False)
        with suppress(ValueError):  # no layer can have one
            add("a LoRA in place of all weights", cost, "train='lora'", True, changed)
    smaller = _half(question.sample)
    if known and smaller is not None:
        again = remeasured(sample=smaller)
        cost = "another training: it sees less at once"
        add("a shorter or smaller sample", cost, f"sample={smaller!r}", True, recipe, again)
    return rungs


def _half(sample: Any) -> Any:
    """Return a sample of half the length; None where it is not known which size that is."""
    if isinstance(sample, int) and sample > 1:
        return sample // 2
    if isinstance(sample, tuple):
        return tuple(size // 2 for size in sample)
    return None


def shards(storage: Storage, cards: tuple[int, ...] = (2, 4, 8)) -> list[Shard]:
    """Return what one card keeps under ZeRO 1, 2 and 3 (arXiv 1910.02054, section 5).

    Stage 1 shares out the optimizer's state and the master copies, stage 2 the gradients too, stage
    3 the weights too.
    """
    own = {row.name: row.bytes for row in storage.rows}
    shared = (
        ("optimizer state", "master copies"),
        ("optimizer state", "master copies", "gradients"),
        tuple(own),
    )
    return [
        Shard(
            stage,
            count,
            sum(-(-size // count) if name in names else size for name, size in own.items()),
        )
        for count in cards
        for stage, names in enumerate(shared, 1)
    ]
