"""Accumulation over batches of unlike sizes, and evaluation that keeps nothing on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

Batch = TypeVar("Batch")


def backward_weighted(
    batches: Sequence[Batch],
    loss_sum: Callable[[Batch], Tensor],
    weight: Callable[[Batch], int],
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> float:
    """Run backward of several batches as if they were one; return their mean loss.

    Each counts by its weight (tokens, samples), not as one of so many: a mean of means would give
    the tokens of short batches more say.

    Parameters
    ----------
    batches : sequence
        The batches of one optimizer step.
    loss_sum : callable
        Returns the *summed* loss of a batch.
    weight : callable
        Returns how many terms that sum has.
    backward : callable
        Takes the loss; `MixedPrecision.backward` is one.

    Raises
    ------
    ValueError
        There is nothing to learn from: the weights add up to 0.
    """
    total = sum(weight(batch) for batch in batches)
    if total <= 0:
        raise ValueError(f"the weights of {len(batches)} batches add up to {total}")
    mean = 0.0
    for batch in batches:
        loss = loss_sum(batch) / total
        backward(loss)
        mean += float(loss.detach())
    return mean


class Evaluation(NamedTuple):
    """What `evaluate` found.

    Attributes
    ----------
    loss : float
        Mean over all terms.
    terms : int
        How many.
    outputs : list
        On the host, in order, where they were asked for.
    """

    loss: float
    terms: int
    outputs: list[Tensor]


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    compute: Callable[[Any], tuple[Tensor, int, Tensor | None]],
    *,
    to_host_every: int = 1,
) -> Evaluation:
    """Evaluate without a graph, in eval mode, and with outputs kept on the host.

    Parameters
    ----------
    model : nn.Module
        It is in the modes it had, module by module, afterwards.
    batches : iterable
        What to evaluate.
    compute : callable
        Returns for a batch the summed loss, how many terms it has, and the output to keep or None.
    to_host_every : int
        After so many batches outputs move to the host: fewer waits for more device memory.

    Raises
    ------
    ValueError
        No batch has a term.
    """
    if to_host_every < 1:
        raise ValueError(f"to_host_every={to_host_every} must be at least 1")
    modes = [(module, module.training) for module in model.modules()]
    losses: list[Tensor] = []
    waiting: list[Tensor] = []
    outputs: list[Tensor] = []
    total, terms = 0.0, 0
    try:
        model.eval()
        with torch.no_grad():
            for number, batch in enumerate(batches, 1):
                loss, count, output = compute(batch)
                losses.append(loss)
                terms += count
                if output is not None:
                    waiting.append(output)
                if number % to_host_every == 0:
                    total += _drained(losses)
                    outputs += [output.cpu() for output in waiting]
                    waiting.clear()
    finally:
        for module, training in modes:
            module.training = training
    total += _drained(losses)
    outputs += [output.cpu() for output in waiting]
    if terms <= 0:
        raise ValueError("there is nothing to evaluate: no batch has a term")
    return Evaluation(total / terms, terms, outputs)


def _drained(losses: list[Tensor]) -> float:
    total = sum(float(loss) for loss in losses)
    losses.clear()
    return total
