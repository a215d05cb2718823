"""The answer of `plan` as figures and words: what reports and comparisons are made of."""

from __future__ import annotations

from dataclasses import dataclass

from ..host.sizes import format_size
from .fit import NOWHERE, RESIDENT, STREAMED, Fit
from .ladder import FROM_DISK, Rung, Shard
from .measure import Step
from .question import Question
from .speed import Speed
from .storage import Storage


@dataclass(frozen=True)
class Answer:
    """What was asked, and where every byte would be; `Plan` shows it, and says what is what."""

    question: Question
    storage: Storage
    fit: Fit
    step: Step
    speed: Speed
    alternatives: list[Rung]
    shards: list[Shard]
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether what is known fits."""
        return self.fit.verdict != NOWHERE

    @property
    def unknown(self) -> tuple[str, ...]:
        """Name what is counted nowhere, of ``"activations"`` and ``"the LoRA"``."""
        no_lora = self.question.source.module is None and self.question.recipe.train == "lora"
        return (
            *(("activations",) if self.step.activations is None else ()),
            *(("the LoRA",) if no_lora else ()),
        )

    @property
    def verdict(self) -> str:
        """``"fits resident"``, ``"fits streamed"`` or ``"does not fit"``.

        Where something is counted nowhere, ``"weights fit resident; activations unknown"``.
        """
        unknown = " and ".join(self.unknown)
        said = self.said(self.fit.verdict)
        return f"{said}; {unknown} unknown" if unknown and self.fits else said

    def said(self, verdict: str) -> str:
        """Return a verdict on all that is needed as one on what is known."""
        if not self.unknown or verdict == NOWHERE:
            return verdict
        return f"weights {verdict.replace('fits', 'fit')}"

    @property
    def shares_arena(self) -> bool:
        """Whether the arena is all that the device has left, and activations are unknown."""
        is_counted = self.fit.verdict == STREAMED and not self.storage.units
        return is_counted and self.question.room.is_free

    def sentence(self) -> str:
        """Return the verdict as one sentence."""
        fit, room, name = self.fit, self.question.room, self.question.source.name
        card = f"{self.question.card.name} ({format_size(room.device_bytes, digits=0)})"
        host = f"{format_size(room.host_bytes, digits=0)} of RAM"
        if fit.verdict == NOWHERE:
            short = ((fit.missing_device, "device memory"), (fit.missing_host, "host memory"))
            missing = [f"{format_size(size)} of {where}" for size, where in short if size]
            said = f"{' and '.join(missing)} missing" if missing else fit.why
            for rung in self.alternatives:
                if rung.option == FROM_DISK and rung.verdict != NOWHERE:
                    said += f"; with {rung.option}: {self.said(rung.verdict)} (below)"
            return f"{name}: does not fit {card} with {host}: {said}."
        free = f"{format_size(fit.device_room - fit.device_bytes)} of the device stay free"
        unknown = " and ".join(self.unknown)
        if self.shares_arena:
            free = f"what {unknown} take, which are unknown, comes off the arena"
        elif unknown:
            free += f" for {unknown}, which are unknown"
        files = f"{format_size(fit.disk_bytes)} left in their files, " if fit.disk_bytes else ""
        said = self.said(fit.verdict)
        if fit.verdict == RESIDENT:
            need = "" if self.unknown else ", oracle_offload is not needed"
            return f"{name}: {said} on {card}{need}; {free}."
        return (
            f"{name}: {said} on {card} with {host}: an arena of "
            f"{format_size(fit.arena_bytes)}, {format_size(fit.host_bytes)} on the host, {files}at "
            f"least {format_size(fit.x_min_bytes)} to the device in a step"
            f"{'' if fit.sweep_bytes else ' that uses all of them forward and backward'}; {free}."
        )

    def anatomy(self) -> list[tuple[str, int, float]]:
        """Return each kind of persistent bytes: its name, bytes, and bytes a parameter."""
        count = self.storage.parameters
        return [(row.name, row.bytes, row.bytes / count) for row in self.storage.rows]
