"""Several processes on one card: what each may take of its memory, and of the processors."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...errors import no_room_error
from ...host.sizes import format_size, parse_size
from .adaptive_batch import whole_number


@dataclass(frozen=True)
class WorkerBudget:
    """What one process may take.

    Attributes
    ----------
    worker : int
        Its number, from 0.
    cpus : tuple of int
        Processors, for ``os.sched_setaffinity``; with more workers than processors they share.
    share : float
        Of the card's memory, for `set_memory_fraction`.
    nbytes : int
        The same in bytes; the context of the driver comes on top.
    """

    worker: int
    cpus: tuple[int, ...]
    share: float
    nbytes: int


def worker_budgets(
    workers: int,
    nbytes: int | float | str,
    capacity: int | float | str,
    *,
    context: int | float | str | None = None,
    margin: float = 0.0,
    cpus: int | None = None,
) -> list[WorkerBudget]:
    """Divide a card among processes, or refuse where it has no room for all of them.

    Parameters
    ----------
    workers : int
        How many processes.
    nbytes : int, float or str
        What each asks for: bytes, ``"1.5GB"``, or a share of the card.
    capacity : int, float or str
        All memory of the card, as the driver tells (``torch.cuda.mem_get_info()[1]``), because
        `share` is of it: bytes, or ``"7.67GB"``. What others hold belongs into `margin`.
    context : int, float or str, optional
        What the driver's context of each process takes in addition; none is counted by default.
    margin : float
        Share in [0, 1) of the card that stays free.
    cpus : int, optional
        Processors that are divided; by default those that this process may use.

    Returns
    -------
    list of WorkerBudget
        One for each.

    Raises
    ------
    ValueError
        An argument that makes no sense.
    NoRoomError
        They do not fit together; torch's out of memory as well.

    Examples
    --------
    >>> [budget.nbytes for budget in worker_budgets(3, "1.5GB", "7.67GB", cpus=4)]
    [1500000000, 1500000000, 1500000000]
    """
    whole_number("workers", workers)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < 1:
        raise ValueError(f"margin={margin!r} is not in [0, 1)")
    total = parse_size(capacity, name="capacity")
    each = parse_size(nbytes, total=total, name="nbytes")
    beside = 0 if context is None else parse_size(context, total=total, name="context")
    needed, room = workers * (each + beside), int(total * (1 - margin))
    if needed > room:
        raise no_room_error(
            f"{workers} workers with {format_size(each)} each, and {format_size(beside)} for each "
            f"context, need {format_size(needed)}; the card has {format_size(room)} of "
            f"{format_size(total)} for them. Take fewer workers, or give each less"
        )
    usable = _usable_cpus() if cpus is None else list(range(whole_number("cpus", cpus)))
    return [
        WorkerBudget(number, _part(usable, number, workers), each / total, each)
        for number in range(workers)
    ]


def _usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _part(cpus: list[int], number: int, workers: int) -> tuple[int, ...]:
    if workers >= len(cpus):
        return (cpus[number % len(cpus)],)
    first, last = number * len(cpus) // workers, (number + 1) * len(cpus) // workers
    return tuple(cpus[first:last])
