"""Which of a planned model's weights ``compress="auto"`` compresses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ..compress.choice import Choice, Planned, choose
from .fit import NOWHERE, RESIDENT, fit_step
from .measure import Step
from .question import Question
from .speed import question as ask_replay
from .storage import Storage


def chosen(question: Question, storage: Storage, step: Step) -> tuple[Storage, Choice]:
    """Return what ``compress="auto"`` compresses of `storage`, of which all is that may be."""
    raw = replace(storage, coded={})
    step, found = fit_step(raw, step, question.micro_batches, question.room)
    if found.verdict == RESIDENT:
        return raw, Choice([], "all weights have room on the device")
    _, least = fit_step(storage, step, question.micro_batches, question.room)
    short: float = sum(raw.on_host().values()) - question.room.host
    if short <= 0:
        short = 0
    elif least.ram_budget is not None or least.verdict == NOWHERE:
        short = float("inf")

    def ask(planned: Sequence[Planned], coded: Collection[int]) -> dict[str, Any]:
        keys = {id(tensor) for number in coded for tensor in planned[number].coded}
        some = replace(raw, coded={key: n for key, n in storage.coded.items() if key in keys})
        return ask_replay(step, replace(found, storage=some), question.card, 0.5)

    known = not step.why and question.recipe.train != "full"
    choice = choose(
        raw.units,
        raw.sizes,
        found.arena_bytes,
        short,
        ask if known else None,
        question.source.expected,
    )
    keys = {id(tensor) for tensor in choice.tensors}
    coded = {key: nbytes for key, nbytes in storage.coded.items() if key in keys}
    return replace(storage, coded=coded), choice


def chosen_beside(question: Question, storage: Storage, step: Step, before: Storage) -> Storage:
    """Return `storage` as it is compressed in an alternative to a plan, whose storage is `before`.

    The same weights are compressed where they are the same: to choose again takes many replays.
    """
    there = {id(tensor) for unit in before.units for leaf in unit for tensor in leaf.tensors()}
    if storage.coded.keys() <= there:
        kept = {key: n for key, n in storage.coded.items() if key in before.coded}
        return replace(storage, coded=kept)
    return chosen(question, storage, step)[0]
