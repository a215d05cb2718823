"""Attempts that may run out of memory: how they are made, counted, and made smaller."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from ...errors import no_room_error
from ...host.sizes import format_size

logger = logging.getLogger("oracle_offload")

T = TypeVar("T")

_MB = 1_000_000
_START, _RISE, _FALL = 20, 20, 10  # percent of what is wanted


class Outcome(NamedTuple, Generic[T]):
    """What came of an attempt: its result, or why it ran out of memory."""

    value: T | None
    why: str | None


@dataclass
class Counts:
    """How many attempts there were, and how many of them ran out of memory.

    Attributes
    ----------
    successes, failures : int
        Attempts.
    last_failure : str
        What the last error said, in its first line.
    """

    successes: int = 0
    failures: int = 0
    last_failure: str = ""

    @property
    def success_rate(self) -> float | None:
        """The share of attempts that did not run out of memory; None before the first."""
        attempts = self.successes + self.failures
        return self.successes / attempts if attempts else None


def attempt(call: Callable[[], T], counts: Counts | None = None) -> Outcome[T]:
    """Call; where memory runs out, give back what can be, and say why.

    Recovery waits until the exception is gone: it holds the frames of the call, and these hold
    the tensors that filled the memory. Every other error passes.

    Parameters
    ----------
    call : callable
        Without arguments.
    counts : Counts, optional
        Where to count it.
    """
    from ...diagnose.explain import is_oom  # not where memory has run out: an import takes some

    why = None
    try:
        value = call()
    except Exception as error:
        if not is_oom(error):
            raise
        why = (str(error) or type(error).__name__).splitlines()[0]
    if why is None:
        if counts is not None:
            counts.successes += 1
        return Outcome(value, None)
    if counts is not None:
        counts.failures += 1
        counts.last_failure = why
    release_memory()
    return Outcome(None, why)


def release_memory() -> None:
    """Collect what is garbage, and give what torch caches back to the devices."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Shrink:
    """A law by which a size that did not fit is made smaller.

    Attributes
    ----------
    factor : float
        First the size is multiplied by it, and rounded down.
    minus : int
        Then this is taken off.
    floor : int
        No size is smaller; what is at the floor does not shrink.
    """

    factor: float = 1.0
    minus: int = 0
    floor: int = 1

    def __post_init__(self) -> None:
        if not 0.0 < self.factor <= 1.0 or self.minus < 0 or self.floor < 1:
            raise ValueError(f"{self}: use a factor in (0, 1], minus >= 0 and a floor >= 1")
        if self.factor == 1.0 and not self.minus:
            raise ValueError(f"{self} makes nothing smaller; give a factor below 1, or minus")

    def next_size(self, size: int) -> int | None:
        """Return the next smaller size; None at the floor."""
        if size <= self.floor:
            return None
        return max(self.floor, int(size * self.factor) - self.minus)


HALVE = Shrink(factor=0.5)  # a batch
MINUS_16 = Shrink(minus=16, floor=32)  # rows of a chunk
TIMES_07 = Shrink(factor=0.7, floor=256)  # the side of a matrix, tokens


def shrink_until_it_fits(
    operation: Callable[[int], T],
    size: int,
    law: Shrink = HALVE,
    *,
    counts: Counts | None = None,
) -> tuple[T, int]:
    """Call `operation` with a size, and with smaller ones while memory runs out.

    Parameters
    ----------
    operation : callable
        Takes the size; begins again each time.
    size : int
        The first one.
    law : Shrink
        `HALVE` to 1, `MINUS_16` to 32, `TIMES_07` to 256, or one of your own.
    counts : Counts, optional
        Where attempts are counted.

    Returns
    -------
    (object, int)
        The result, and the size that gave it.

    Raises
    ------
    NoRoomError
        Not even the law's floor fits; torch's out of memory as well.
    """
    while True:
        tried = size
        found = attempt(lambda tried=tried: operation(tried), counts)  # type: ignore[misc]
        if found.why is None:
            return found.value, size  # type: ignore[return-value]
        smaller = law.next_size(size)
        if smaller is None:
            raise no_room_error(
                f"size {size} does not fit, and it is the smallest allowed: {found.why}"
            )
        logger.warning("size %d does not fit, %d is tried: %s", size, smaller, found.why)
        size = smaller


def allocate_progressively(
    allocate: Callable[[int], T], nbytes: int, *, floor_bytes: int = 100 * _MB
) -> tuple[T, int]:
    """Allocate 20% of what is wanted, then 40%, 60%, 80% and all of it; step back by 10% a failure.

    What was had before is let go of before more is asked for, and asked for again where more was
    refused. The first failure ends the way up.

    Parameters
    ----------
    allocate : callable
        Takes bytes, and returns what holds them.
    nbytes : int
        Bytes that are wanted.
    floor_bytes : int
        Fewer are not asked for.

    Returns
    -------
    (object, int)
        What `allocate` returned, and its bytes.

    Raises
    ------
    ValueError
        `nbytes` is not above zero.
    NoRoomError
        Not even the floor fits; torch's out of memory as well.
    """
    if nbytes <= 0:
        raise ValueError(f"nbytes={nbytes!r} is not above zero")
    floor = min(floor_bytes, nbytes)
    share, rising = _START, True
    while True:
        size = max(floor, nbytes * share // 100)
        held: T | None = None  # else both would have to fit
        held, why = attempt(lambda size=size: allocate(size))  # type: ignore[misc]
        if why is None:
            if not rising or share == 100:
                return held, size  # type: ignore[return-value]
            share += _RISE
            continue
        rising = False
        if size == floor:
            raise no_room_error(f"not even {format_size(floor)} could be allocated: {why}")
        share -= _FALL


def emergency_minimal_operations(
    operation: Callable[[], T], minimal: Callable[[], T], *, counts: Counts | None = None
) -> T:
    """Do something; where memory runs out, give back what can be, and do the least instead.

    Parameters
    ----------
    operation : callable
        What is wanted.
    minimal : callable
        What will do: one sample, half the resolution, the same on the host. Its own errors pass.
    counts : Counts, optional
        Where attempts are counted.

    Examples
    --------
    >>> emergency_minimal_operations(lambda: "a batch of 64", lambda: "one sample")
    'a batch of 64'
    """
    found = attempt(operation, counts)
    if found.why is None:
        return found.value  # type: ignore[return-value]
    logger.warning("out of memory, the least is done instead: %s", found.why)
    return minimal()
