"""`find_batch_size`: the largest batch that a training step can have, found by trying."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...engine.devices import Cuda
from ...errors import no_room_error
from ...host.memory import available_bytes
from ...host.sizes import format_size
from ...manager import ATTRIBUTE
from . import known_sizes
from .adaptive_batch import whole_number
from .attempts import attempt
from .keeping import TrainingState
from .known_sizes import Known
from .memory import card, card_free_and_total, device_free_and_total, fraction_of, memory_fraction

logger = logging.getLogger("oracle_offload")

_HOST_SHARE = 0.8  # of what the host can give: so much may the copies of the state take


@dataclass(frozen=True)
class BatchResult:
    """What `find_batch_size` has found; ``int(result)`` is the size.

    Attributes
    ----------
    size : int
        The largest that fitted.
    too_large : int or None
        The smallest that did not; None where the search ended at `maximum`.
    attempts : tuple of (int, bool)
        Every size that was tried, in order, and whether it fitted.
    stepped : bool
        Whether optimizers stepped in the attempts: not where the host has no memory to keep
        parameters and optimizer states.
    notes : tuple of str
        What a reader has to know.
    """

    size: int
    too_large: int | None
    attempts: tuple[tuple[int, bool], ...]
    stepped: bool
    notes: tuple[str, ...]

    def __int__(self) -> int:
        return self.size

    __index__ = __int__


def find_batch_size(
    step: Callable[[int], object],
    model: nn.Module,
    *,
    optimizer: Any = None,
    scaler: Any = None,
    parts: Iterable[Any] = (),
    generators: Iterable[torch.Generator] = (),
    start: int = 1,
    minimum: int = 1,
    maximum: int | None = None,
    steps: int = 2,
    margin: float = 0.05,
    device: Any = None,
    key: str = "",
    remember: bool = True,
) -> BatchResult:
    """Find the largest batch size whose training step fits, and leave everything as it was.

    Sizes are doubled from `start` until one does not fit, then bisected. After every attempt
    trainable parameters, buffers, optimizers, scaler, generators, `parts` and gradients are what
    they were, to the last bit; they are kept on the host meanwhile. Where the host has no memory
    for that, the result says so, and optimizers do not step in the attempts.

    Parameters
    ----------
    step : callable
        Takes a batch size; runs one whole training step with it: forward, backward,
        ``optimizer.step()``, ``zero_grad()``.
    model : nn.Module
        The model, attached or not.
    optimizer : torch.optim.Optimizer or iterable of them, optional
        Whatever steps in `step`.
    scaler : torch.amp.GradScaler, optional
        The one that `step` uses.
    parts : iterable
        Whatever else `step` changes and has ``state_dict`` and ``load_state_dict``: schedulers,
        data loaders that know their position.
    generators : iterable of torch.Generator
        Those that `step` draws from, in addition to the process's own.
    start, minimum : int
        The first size, and the smallest.
    maximum : int, optional
        The largest. Has to be given where no card refuses memory: a host does not refuse, it kills.
    steps : int
        Steps of each attempt: in the second one the optimizer's state is there.
    margin : float
        Share in [0, 1) of the card's free memory that has to stay free.
    device : torch.device, str or int, optional
        Where the step computes: by default that of the attached model, else of its parameters.
    key : str
        What else the sizes depend on, to be remembered apart: ``"1024x1024"``.
    remember : bool
        Begin with what an earlier run found for this model, device, torch and key, with the same
        optimizers and checkpointing; keep what is found. What was too large then is tried again
        where more of the card is free now.

    Raises
    ------
    ValueError
        An argument that makes no sense.
    OffloadError
        `device` is a card that is not there.
    NoRoomError
        Not even `minimum` fits; torch's out of memory as well.
    Exception
        Whatever `step` raises that is no lack of memory; all is as it was then, too.

    Examples
    --------
    >>> model = torch.nn.Linear(2, 2)
    >>> def step(size):
    ...     model(torch.ones(size, 2)).sum().backward()
    >>> int(find_batch_size(step, model, maximum=8, remember=False))
    8
    """
    whole_number("minimum", minimum)
    if whole_number("start", start) < minimum or (maximum is not None and start > maximum):
        raise ValueError(f"start={start} is outside [minimum={minimum}, maximum={maximum}]")
    whole_number("steps", steps)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < 1:
        raise ValueError(f"margin={margin!r} is not in [0, 1)")
    where = _device_of(model, device)
    if maximum is None and where.type != "cuda":
        raise ValueError(
            f"find_batch_size on {str(where)!r} needs maximum=: nothing refuses memory there, the "
            "system ends the process instead"
        )
    optimizers = [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer or ())
    state = TrainingState(model, optimizers, scaler, parts, generators)
    notes = []
    room = available_bytes()
    stepped = room is None or state.value_bytes <= room * _HOST_SHARE
    if not stepped:
        notes.append(
            f"parameters and optimizer states take {format_size(state.value_bytes)}, and the host "
            f"can spare {format_size(room or 0)}: optimizers did not step in the attempts, so what "
            "a first step adds to their states is not in the result"
        )
        logger.warning("find_batch_size: %s", notes[0])
    manager = model.__dict__.get(ATTRIBUTE)
    arena = None if manager is None else manager.attachment.arena.capacity_bytes
    kinds = [type(each).__name__ for each in optimizers]
    name = known_sizes.key_of(model, where, arena, (key, margin, steps, kinds, stepped))
    free, _ = device_free_and_total(where)
    search = _Search(minimum, maximum)
    known = known_sizes.recall(name).within(free) if remember else Known()
    state.keep(values=stepped)
    try:
        with contextlib.nullcontext() if stepped else _without_steps(optimizers):
            size: int | None = search.begin(start, known)
            while size is not None:
                fits, why = _fits(step, size, steps, state, where, margin)
                size = search.next(size, fits)
    finally:
        state.end()
    if remember:
        found = Known(search.good, search.bad, free)
        if known.good is not None and search.good == maximum is not None and known.good > maximum:
            found = known  # nothing larger was tried this time
        known_sizes.remember(name, found, type(model).__name__)
    if search.good is None:
        raise no_room_error(f"not even a batch of {minimum} fits: {why}")
    return BatchResult(search.good, search.bad, tuple(search.tried), stepped, tuple(notes))


class _Search:
    """Which size is tried next."""

    def __init__(self, minimum: int, maximum: int | None) -> None:
        self._minimum, self._maximum = minimum, maximum
        self.good: int | None = None
        self.bad: int | None = None
        self.tried: list[tuple[int, bool]] = []

    def begin(self, start: int, known: Known) -> int:
        """Return the first size: what fitted before, or just below what did not."""
        self._said = known.bad  # too large, as an earlier run found
        first = known.good or (start if known.bad is None else min(start, known.bad - 1))
        return self._within(first)

    def _within(self, size: int) -> int:
        return max(self._minimum, size if self._maximum is None else min(size, self._maximum))

    def next(self, size: int, fits: bool) -> int | None:
        """Return the next size after one that was tried; None at the end."""
        self.tried.append((size, fits))
        if fits:
            self.good = size
            if self.bad is None and self._said is not None and self._said > size:
                self.bad = self._said
        else:
            self.bad = size
        if self.good is None:
            return None if size <= self._minimum else self._within(size // 2)
        if self.bad is None:
            larger = self._within(2 * size)
            return larger if larger > size else None
        middle = self._within((self.good + self.bad) // 2)
        return middle if middle > self.good else None


def _fits(
    step: Callable[[int], object],
    size: int,
    steps: int,
    state: TrainingState,
    device: torch.device,
    margin: float,
) -> tuple[bool, str | None]:
    """Try a size; where memory runs out, too, the state is what it was afterwards."""

    def run() -> None:
        for _ in range(steps):
            step(size)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with _leaving_free(device, margin):
        _, why = attempt(run)
    state.restore()
    logger.info("a batch of %d %s", size, "fits" if why is None else f"does not fit: {why}")
    return why is None, why


def _leaving_free(device: torch.device, margin: float) -> contextlib.AbstractContextManager[None]:
    """Cap torch's memory so that a share of what is free now stays free; no cap is lifted."""
    found = card(device)
    if found is None or not margin:
        return contextlib.nullcontext()
    free, total = card_free_and_total(found)
    share = (torch.cuda.memory_allocated(found) + free * (1 - margin)) / total
    return memory_fraction(max(1e-6, min(fraction_of(found), share)), found)


@contextlib.contextmanager
def _without_steps(optimizers: list[Any]) -> Any:
    """Let no optimizer step."""
    before = [optimizer.__dict__.get("step") for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.step = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for optimizer, step in zip(optimizers, before, strict=True):
            del optimizer.step
            if step is not None:
                optimizer.step = step


def _device_of(model: nn.Module, device: Any) -> torch.device:
    if device is not None:
        named = card(device) or torch.device(device)
        return Cuda.find(named) if named.type == "cuda" else named
    manager = model.__dict__.get(ATTRIBUTE)
    if manager is not None:
        return torch.device(manager.device)
    return next((p.device for p in model.parameters()), torch.device("cpu"))
