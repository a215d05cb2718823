"""The memory of a device as torch has it: what is held, a cap on it, and what can be given back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import OffloadError
from ...host.cgroup import read_memory_limit
from ...host.memory import available_bytes, read_meminfo, total_bytes
from ...host.sizes import format_size
from .attempts import release_memory

logger = logging.getLogger("oracle_offload")

Info = dict[str, int | None]

_caps: dict[torch.device, float] = {}  # as they were set here


def card(device: Any = None) -> torch.device | None:
    """Return the CUDA device that is meant, with its number; None where there is none.

    Raises
    ------
    ValueError
        `device` is no device.
    """
    try:
        named = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device={device!r} is not a device; use 'cuda', 'cuda:0' or 'cpu'"
        ) from error
    if named.type != "cuda" or not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device() if named.index is None else named.index
    return torch.device("cuda", index) if index < torch.cuda.device_count() else None


def device_free_and_total(device: Any = None) -> tuple[int | None, int | None]:
    """Return the bytes of a card that are free, and all of them; None where neither is known.

    What torch caches counts as free: it gives it to the next allocation.
    """
    found = card(device)
    return (None, None) if found is None else card_free_and_total(found)


def card_free_and_total(found: torch.device) -> tuple[int, int]:
    """Return `device_free_and_total` of a card that is there."""
    free, total = torch.cuda.mem_get_info(found)
    cached = torch.cuda.memory_reserved(found) - torch.cuda.memory_allocated(found)
    return free + cached, total


def host_available_and_total(root: str = "/") -> tuple[int | None, int | None]:
    """Return what this process can still have of the host, and all it may have, in bytes.

    Within the limit on its control group, where there is one.

    Parameters
    ----------
    root : str
        The directory that holds `proc` and `sys`: "/" for the live system.
    """
    known = meminfo, limit = read_meminfo(root), read_memory_limit(root)  # read once
    sizes = [limit.limit_bytes, meminfo.get("MemTotal")]
    if root == "/":
        sizes.append(total_bytes())
    return available_bytes(root, known), min(
        (size for size in sizes if size is not None), default=None
    )


def get_detailed_memory_info(device: Any = None) -> Info:
    """Return what is known of the memory of a card and of the host, in bytes.

    Parameters
    ----------
    device : torch.device, str or int, optional
        The card; by default torch's current one.

    Returns
    -------
    dict of str to int or None
        ``allocated_bytes``, ``reserved_bytes``, ``cached_bytes`` (reserved, and free),
        ``peak_bytes``, ``free_bytes``, ``total_bytes``, ``other_bytes`` (held by others and by the
        driver), ``num_alloc_retries``, ``num_ooms``, ``host_available_bytes``,
        ``host_total_bytes``. None is unknown, never 0.

    Raises
    ------
    ValueError
        `device` is no device.
    """
    names = "allocated reserved cached peak free total other".split()
    info: Info = dict.fromkeys([f"{name}_bytes" for name in names])
    info |= {"num_alloc_retries": None, "num_ooms": None}
    found = card(device)
    if found is not None:
        stats = torch.cuda.memory_stats(found)
        free, total = torch.cuda.mem_get_info(found)
        allocated, reserved = torch.cuda.memory_allocated(found), torch.cuda.memory_reserved(found)
        info |= {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "cached_bytes": reserved - allocated,
            "peak_bytes": torch.cuda.max_memory_allocated(found),
            "free_bytes": free,
            "total_bytes": total,
            "other_bytes": max(0, total - free - reserved),
            "num_alloc_retries": stats.get("num_alloc_retries"),
            "num_ooms": stats.get("num_ooms"),
        }
    available, all_of_it = host_available_and_total()
    return info | {"host_available_bytes": available, "host_total_bytes": all_of_it}


def set_memory_fraction(fraction: float, device: Any = None) -> float:
    """Let torch take no more than a share of a card's memory; return the share that held before.

    Parameters
    ----------
    fraction : float
        In (0, 1].
    device : torch.device, str or int, optional
        The card; by default torch's current one.

    Raises
    ------
    ValueError
        `fraction` is none.
    OffloadError
        There is no such card: nothing else has a cap.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction!r} is not in (0, 1]")
    found = card(device)
    if found is None:
        raise OffloadError(
            f"device={str(device or 'cuda')!r} has no cap on its memory: only torch's allocator "
            f"of a CUDA card does, and there are {torch.cuda.device_count()}; on the host use a "
            "control group (systemd-run -p MemoryMax=)"
        )
    before = fraction_of(found)
    _caps[found] = float(fraction)
    torch.cuda.set_per_process_memory_fraction(float(fraction), found)
    return before


def fraction_of(found: torch.device) -> float:
    """Return the share of a card's memory that torch may take now, as it was set."""
    # Older torch does not say; nothing but `set_memory_fraction` sets it as a rule.
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", lambda it: _caps.get(it, 1.0))
    share = float(ask(found))
    # torch keeps whole bytes and divides them again: 0.65 comes back as 0.649999999984478. What was
    # set is the shortest number that is as near as a byte of 4 GiB.
    return next(
        (short for short in (round(share, n) for n in range(1, 11)) if abs(short - share) < 2**-32),
        share,
    )


@contextlib.contextmanager
def memory_fraction(fraction: float, device: Any = None) -> Iterator[None]:
    """`set_memory_fraction` for a ``with`` block; at its end what held before holds again."""
    before = set_memory_fraction(fraction, device)
    try:
        yield
    finally:
        set_memory_fraction(before, device)


@dataclass(frozen=True)
class Cleanup:
    """What a cleanup has brought.

    Attributes
    ----------
    device_bytes : int or None
        By how much what torch reserves on the card fell; None without a card.
    host_bytes : int or None
        By how much what the host can give grew, others' doing included; None where it is not known.
    """

    device_bytes: int | None
    host_bytes: int | None

    @property
    def useless(self) -> bool:
        """Whether the card got nothing back; without a card, the host."""
        returned = self.host_bytes if self.device_bytes is None else self.device_bytes
        return (returned or 0) <= 0

    def __str__(self) -> str:
        def shown(nbytes: int | None) -> str:
            return "unknown" if nbytes is None else format_size(nbytes)

        return (
            f"returned {shown(self.device_bytes)} to the card, {shown(self.host_bytes)} to the host"
        )


def cleanup(device: Any = None) -> Cleanup:
    """Collect what is garbage and give back what torch caches; say what that brought.

    It frees no tensor that somebody holds, and the next step asks for the cached memory again,
    which costs time: a warning says when it brought nothing.

    Parameters
    ----------
    device : torch.device, str or int, optional
        The card; by default torch's current one.
    """
    found = card(device)

    def reserved() -> int:
        return 0 if found is None else torch.cuda.memory_reserved(found)

    before, host_before = reserved(), available_bytes()
    release_memory()
    after, host_after = reserved(), available_bytes()
    result = Cleanup(
        None if found is None else before - after,
        None if host_before is None or host_after is None else host_after - host_before,
    )
    if result.useless:
        logger.warning(
            "a cleanup of memory brought nothing (%s): what is there is in use; doing it again "
            "only costs time",
            result,
        )
    else:
        logger.info("cleanup: %s", result)
    return result
