"""Long sequences in chunks: what each chunk sees of those before it, and whether that is all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """A part of a sequence; positions count from its beginning.

    Attributes
    ----------
    begin, end : int
        What is computed for: [begin, end).
    context_begin : int
        Where what it sees begins: [context_begin, end).
    """

    begin: int
    end: int
    context_begin: int

    @property
    def is_truncated(self) -> bool:
        """Whether it does not see all that comes before it."""
        return self.context_begin > 0


def chunks_of(length: int, chunk: int, window: int | None = None) -> list[Chunk]:
    """Cut a sequence into chunks, each with the context that it is computed with.

    With all of the context (`window` None) the gradients of the chunks add up to those of the
    whole sequence, to rounding: the context is computed again for each. With a window they do not,
    wherever `Chunk.is_truncated`; say so.

    Parameters
    ----------
    length : int
        Of the sequence.
    chunk : int
        Most positions that are computed for at once.
    window : int, optional
        Most positions before them that they see; None for all.

    Raises
    ------
    ValueError
        A chunk without a position, a negative window.
    """
    if chunk < 1:
        raise ValueError(f"chunk_size={chunk} must be at least 1")
    if window is not None and window < 0:
        raise ValueError(f"window_size={window} must be 0 or more")
    return [
        Chunk(begin, min(begin + chunk, length), 0 if window is None else max(0, begin - window))
        for begin in range(0, length, chunk)
    ]


def declared(chunks: Sequence[Chunk]) -> str:
    """Return what the chunks see, in words for a log."""
    truncated = sum(chunk.is_truncated for chunk in chunks)
    if not truncated:
        return "context carried: every chunk sees all that comes before it"
    return (
        f"context truncated: {truncated} of {len(chunks)} chunks do not see all that comes before "
        "them, so this trains something else than the whole sequence would"
    )


def carried(
    step: Callable[[Tensor, Any], tuple[Tensor, Any]],
    inputs: Tensor,
    chunk: int,
    state: Any = None,
    *,
    dim: int = 1,
    detach: bool = False,
) -> Iterator[Tensor]:
    """Run a recurrent model chunk by chunk and carry its state: nothing is computed twice.

    Exact while the graph is carried with the state. With `detach` gradients end at the beginning of
    their chunk (truncated backpropagation): outputs are those of the whole, gradients are not.

    Parameters
    ----------
    step : callable
        Takes a chunk of `inputs` and the state (at first `state`), returns outputs and the state.
        An ``nn.LSTM`` or ``nn.GRU`` is one.
    inputs : Tensor
        The sequence.
    chunk : int
        Most positions at once.
    state : optional
        To begin with.
    dim : int
        Of the positions.
    detach : bool
        Whether gradients end there.

    Yields
    ------
    Tensor
        The outputs of a chunk.
    """
    for part in chunks_of(inputs.shape[dim], chunk):
        output, state = step(inputs.narrow(dim, part.begin, part.end - part.begin), state)
        yield output
        if detach:
            state = _detached(state)


def _detached(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach()
    if isinstance(state, tuple | list):
        return type(state)(_detached(part) for part in state)
    return state


def next_token_loss(
    model: Callable[..., Any], tokens: Tensor, chunk: Chunk, **inputs: Any
) -> tuple[Tensor, int]:
    """Return the summed loss of the tokens of one chunk, and how many they are.

    Parameters
    ----------
    model : callable
        A causal language model of transformers, or what takes ``input_ids`` and ``position_ids``
        and answers an object with ``logits``.
    tokens : Tensor
        Token ids, shape (batch, positions), int64; negative ones are padding.
    chunk : Chunk
        Which of them.
    **inputs
        For the model.

    Notes
    -----
    The loss of a position is that of the token after it, so the last position has none.
    """
    end = min(chunk.end, tokens.shape[1] - 1)
    positions = torch.arange(chunk.context_begin, end, device=tokens.device)
    seen = tokens[:, chunk.context_begin : end]
    logits = model(
        input_ids=seen.clamp(min=0),
        position_ids=positions.expand(tokens.shape[0], -1),
        use_cache=False,
        **inputs,
    ).logits
    wanted = tokens[:, chunk.begin + 1 : end + 1]
    given = logits[:, chunk.begin - chunk.context_begin :].float()
    loss = torch.nn.functional.cross_entropy(
        given.reshape(-1, given.shape[-1]),
        wanted.reshape(-1).where(wanted.reshape(-1) >= 0, -100),
        ignore_index=-100,
        reduction="sum",
    )
    return loss, int((wanted >= 0).sum())
