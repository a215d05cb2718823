"""What else could be done: cheaper things first, what changes the trained result last, marked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .fit import RESIDENT, Fit, Room, fit
from .optimizers import OPTIMIZERS
from .source import Source
from .storage import Recipe, Storage, storage_of

# What this library does not have, what it would give, and who has it.
ABSENT = (
    (
        "weights or states on NVMe",
        "models larger than the host's memory",
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
    verdict: str
    option: str


@dataclass(frozen=True)
class Shard:
    """Persistent bytes of one of several cards under DeepSpeed's ZeRO."""

    stage: int
    cards: int
    bytes: int


def ladder(
    source: Source, recipe: Recipe, room: Room, activations: int | None, found: Fit
) -> list[Rung]:
    """Return the alternatives to `found`, in order of what they cost."""
    rungs: list[Rung] = []

    def add(name: str, cost: str, option: str, changes_result: bool, changed: Recipe) -> None:
        other = fit(storage_of(source, changed), activations, room)
        saves_device = found.least_device_bytes - other.least_device_bytes
        saves_host = found.host_bytes - other.host_bytes
        if saves_device or saves_host:
            verdict = other.verdict
            rungs.append(
                Rung(name, cost, changes_result, saves_device, saves_host, verdict, option)
            )

    if found.verdict == RESIDENT:
        return rungs
    lighter = OPTIMIZERS.get(recipe.optimizer.lighter)
    while lighter is not None:
        add(
            f"optimizer {lighter.name}",
            "its state is coarser",
            f"optimizer={lighter.name!r}",
            True,
            replace(recipe, optimizer=lighter),
        )
        lighter = OPTIMIZERS.get(lighter.lighter)
    if recipe.train == "lora" and recipe.quantise is None:
        for quantise in ("int8", "nf4"):
            add(
                f"frozen weights in {quantise}",
                "the base model is rounded",
                f"quantise={quantise!r}",
                True,
                replace(recipe, quantise=quantise),
            )
    if recipe.train == "lora" and recipe.rank > 4:
        add(
            "half the rank",
            "the LoRA can say less",
            f"rank={recipe.rank // 2}",
            True,
            replace(recipe, rank=recipe.rank // 2),
        )
    if recipe.train == "full":
        add(
            "a LoRA in place of all weights",
            "another training: a correction of low rank",
            "train='lora'",
            True,
            replace(recipe, train="lora", master_dtype=None),
        )
    return rungs


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
