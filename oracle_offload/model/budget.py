"""`Budget`: what weights may take of device and host. `place`: the arena that follows from it.

`oracle_offload.attach`, `MemoryManager.set_budget` and `oracle_offload.plan` take the same object,
and ask the same `place`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..engine.geometry import aligned, aligned_down
from ..host import memory
from ..host.sizes import parse_size

AUTO, NEVER, OFFLOADED = "auto", "never", "offloaded"
COMPRESS = (None, "lossless", AUTO)

Size = int | float | str


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the weights of a model may take of the device and of the host.

    `oracle_offload.attach` and `oracle_offload.plan` take it as ``budget=``. `attach` takes each
    field as an argument of its own, too.

    Attributes
    ----------
    offload_percent : float, optional
        Share in [0, 1] of the managed bytes that has no room on the device; the arena holds the
        rest, and a floor of two of the largest units. By default 1.0 in `attach`; in `plan` what
        activations leave free.
    vram_budget : int, float, str, optional
        What weights may take on the device: bytes (``"8GiB"``), a fraction of its memory, or
        ``"auto"`` for what the steps leave. It replaces what follows from `offload_percent`.
    ram_budget : int, float, str, optional
        Most host memory for weights: bytes, a fraction of the machine's memory, ``"auto"`` for 90%
        of what it can spare, or ``"offloaded"`` for the share that `offload_percent` names. Units
        beyond it always stay on the device.
    lock : {"auto", "never"}, int, float or str
        Page-lock the weights as far as the system allows, not at all, or no more than a size.
    compress : {"lossless", "auto"}, optional
        Keep frozen weights in fewer bytes: all that get smaller, or the least that helps.
    disk : bool
        Leave frozen weights for which `ram_budget` has no room in their files, and read them from
        there each time they travel (docs/from-disk.md).

    Raises
    ------
    ValueError
        A field that makes no sense; the message has its value.

    Examples
    --------
    >>> budget = oracle_offload.Budget(vram_budget="8GiB", ram_budget="auto")
    >>> oracle_offload.plan("12B", card=24, ram="64GB", budget=budget).fit.arena_bytes
    8589934592
    """

    offload_percent: float | None = None
    vram_budget: Size | None = None
    ram_budget: Size | None = None
    lock: Size = AUTO
    compress: str | None = None
    disk: bool = False

    def __post_init__(self) -> None:
        percent = self.offload_percent
        if percent is not None:
            if isinstance(percent, bool) or not isinstance(percent, int | float):
                raise ValueError(f"offload_percent={percent!r} is not a number in [0, 1]")
            if not 0.0 <= percent <= 1.0:
                hint = f"; did you mean {percent / 100}?" if 1 < percent <= 100 else ""
                raise ValueError(f"offload_percent={percent!r} is outside [0, 1]{hint}")
        if not isinstance(self.disk, bool):
            raise ValueError(f"disk={self.disk!r} is neither True nor False")
        if self.disk and self.ram_budget == OFFLOADED:
            raise ValueError(
                "ram_budget='offloaded' is for weights that stay on the device; next to disk=True "
                "give the bytes that weights may take of the host, or 'auto'"
            )
        if self.compress not in COMPRESS:
            named = ", ".join(map(repr, COMPRESS))
            raise ValueError(f"compress={self.compress!r} is none of {named}")
        if self.vram_budget not in (None, AUTO):
            parse_size(self.vram_budget, total=1 << 40, name="vram_budget")
        if self.ram_budget not in (None, AUTO, OFFLOADED):
            parse_size(self.ram_budget, total=1 << 40, name="ram_budget")
        self.most_locked_bytes()

    @property
    def offloaded_share(self) -> float:
        """`offload_percent`, as `attach` takes it."""
        return 1.0 if self.offload_percent is None else self.offload_percent

    @property
    def may_grow(self) -> bool:
        """Whether the arena may become larger than `place` says, where steps need it."""
        return self.vram_budget in (None, AUTO)

    def most_locked_bytes(self) -> float:
        """Return the most bytes to page-lock: infinite where the system alone limits it."""
        if self.lock == NEVER:
            return 0.0
        if self.lock == AUTO:
            return float("inf")
        try:
            return parse_size(self.lock, total=memory.total_bytes(), name="lock")
        except ValueError as error:
            raise ValueError(
                f"lock={self.lock!r} is neither 'auto' nor 'never', nor a size"
            ) from error


def budget_of(budget: Any, **given: Any) -> Budget:
    """Return the budget that a call asks for, as one object or field by field.

    Raises
    ------
    ValueError
        It is no `Budget`, or fields are given in addition to it.
    """
    if "offload_percent" in given and given["offload_percent"] is None:
        raise ValueError("offload_percent=None is not a number in [0, 1]")
    if budget is None:
        return Budget(**given)
    if not isinstance(budget, Budget):
        raise ValueError(f"budget={budget!r} is no oracle_offload.Budget")
    defaults = {one.name: one.default for one in fields(Budget)} | {"offload_percent": 1.0}
    beside = [f"{name}={value!r}" for name, value in given.items() if value != defaults[name]]
    if beside:
        raise ValueError(f"{', '.join(beside)} next to budget=: give each in the Budget alone")
    return budget


@dataclass(frozen=True)
class Weights:
    """What there is to place, in bytes on the device.

    Attributes
    ----------
    streamed : int
        Units that stream, as an arena holds them.
    floor : int
        The least that an arena for them must have.
    kept : int
        Units that always stay on the device.
    staging : int
        What compressed weights pass through.
    """

    streamed: int
    floor: int
    kept: int = 0
    staging: int = 0

    @property
    def most(self) -> int:
        """The largest arena that is of use: more would be memory lost to everything else."""
        return self.streamed + self.floor


def place(budget: Budget, weights: Weights, total: int, left: int) -> int:
    """Return the bytes of the arena; below the floor where the budget is too small for one.

    Parameters
    ----------
    budget : Budget
    weights : Weights
    total : int
        Bytes of the device, of which `Budget.vram_budget` may be a fraction.
    left : int
        What ``vram_budget="auto"`` may take.
    """
    if budget.vram_budget is None:
        on_device = aligned(int((1 - budget.offloaded_share) * (weights.streamed + weights.kept)))
        return max(on_device - weights.kept, 0) + weights.floor
    if budget.vram_budget == AUTO:
        size = left
    else:
        size = parse_size(budget.vram_budget, total=total, name="vram_budget")
        size -= weights.kept + weights.staging
    return aligned_down(max(0, min(size, weights.most)))
