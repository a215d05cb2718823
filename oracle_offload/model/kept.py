"""Units that always stay on the device, because the host is not to hold all weights.

What never leaves the device needs no master. Which units stay costs no bytes on the link: a step
moves what the device cannot hold, twice, whether the rest is cache or stays (`x_min_bytes`). They
are spread evenly over the order, so that copies and computing alternate as without them. To
everything else they are ordinary resident modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..engine.geometry import aligned, memory_of, tensor_bytes, unit_bytes
from ..errors import OffloadError
from ..host import memory
from ..host.sizes import format_size, parse_size
from .budget import AUTO, OFFLOADED, Budget, Size
from .residents import move_residents
from .selection import Unit

if TYPE_CHECKING:
    from .sharing import Share


class Kept:
    """The units of one model that stay on its device.

    Parameters
    ----------
    units : sequence of lists of Chosen
        In model order.
    reason : str
        Why they stay.

    Attributes
    ----------
    bytes : int
        That they take.
    """

    def __init__(self, units: Sequence[Unit] = (), reason: str = "") -> None:
        self._leaves = [leaf for unit in units for leaf in unit]
        self.reason = reason
        self.bytes = unit_bytes(distinct(units))

    def reasons(self) -> dict[str, str]:
        """Return why each stays: by the layer's name or, of what would be lent, the tensor's."""
        found = {}
        for leaf in self._leaves:
            names = [leaf.name]
            if leaf.kind.lends_to_code:
                names = [f"{leaf.name}.{key}".lstrip(".") for key in leaf.kind.names]
            found.update(dict.fromkeys(names, self.reason))
        return found

    def bytes_to_come(self, device: torch.device) -> int:
        """Return the bytes of those that are not on `device` yet."""
        tensors = distinct([self._leaves])
        return unit_bytes([tensor for tensor in tensors if tensor.device != device])

    def move_to(self, device: torch.device) -> None:
        """Move them to the device; where that fails, all of them back to where they were."""
        owners = self._owners()
        homes = [(owner, _device_of(owner)) for owner in owners]
        try:
            move_residents(owners, device)
        except BaseException:
            for owner, home in homes:
                move_residents([owner], home)
            raise

    def _owners(self) -> list[nn.Module]:
        """Return the modules that the tensors belong to."""
        owners: dict[int, nn.Module] = {}
        for leaf in self._leaves:
            paths = [""]
            if leaf.kind.lends_to_code:
                paths = [key.rpartition(".")[0] for key in leaf.kind.names]
            for path in paths:
                owner = leaf.module.get_submodule(path)
                owners[id(owner)] = owner
        return list(owners.values())


def keep(
    units: list[Unit],
    budget: Budget,
    bytes_of: Callable[[Tensor], int] = tensor_bytes,
) -> tuple[list[Unit], Kept]:
    """Part the units into those that stream and those that stay on the device.

    Parameters
    ----------
    units : list of lists of Chosen
        In model order.
    budget : Budget
    bytes_of : callable
        What a tensor takes of the host.

    Raises
    ------
    OffloadError
        Its `ram_budget` is too small for any unit, or the system does not tell what it can spare.
    """
    ram_budget, offload_percent = budget.ram_budget, budget.offloaded_share
    if ram_budget is None:
        return units, Kept()
    groups = _tied(units)
    sizes = [
        sum(aligned(bytes_of(tensor)) for tensor in distinct([units[n] for n in group]))
        for group in groups
    ]
    if ram_budget == OFFLOADED:
        staying = spread(sizes, int((1.0 - offload_percent) * sum(sizes)))
        if len(staying) == len(sizes):  # something has to stream
            staying.remove(min(staying, key=sizes.__getitem__))
        reason = f"offload_percent={offload_percent} asks no host memory for it"
    else:
        limit = host_limit(units, ram_budget)
        streaming = spread(sizes, limit)
        if not streaming:
            raise OffloadError(
                f"ram_budget={ram_budget!r} is {format_size(limit)}, but the smallest unit needs "
                f"{format_size(min(sizes))} of host memory; raise the budget to that, or use "
                "model.to(device) if the whole model fits there."
            )
        staying = set(range(len(sizes))) - streaming
        reason = f"ram_budget={ram_budget!r} has no room for it"
    numbers = {number for group in staying for number in groups[group]}
    kept = Kept(
        [unit for number, unit in enumerate(units) if number in numbers],
        f"kept on the device: {reason}",
    )
    return [unit for number, unit in enumerate(units) if number not in numbers], kept


def spread(sizes: Sequence[int], limit: int) -> set[int]:
    """Choose as many as fit `limit` together, spread evenly over their order.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each.
    limit : int
        Bytes that the chosen ones do not exceed together. Less than the largest of the others is
        left over.

    Returns
    -------
    set of int
        Their numbers.
    """
    total = sum(sizes)
    chosen: set[int] = set()
    taken = passed = 0
    for number, size in enumerate(sizes):
        passed += size
        if (taken + size) * total <= limit * passed:
            chosen.add(number)
            taken += size
    for number, size in enumerate(sizes):  # what is left over may be room for one more
        if number not in chosen and taken + size <= limit:
            chosen.add(number)
            taken += size
    return chosen


def host_limit(units: Sequence[Unit], ram_budget: Size) -> int:
    """Return the most bytes of masters."""
    if ram_budget != AUTO:
        return parse_size(ram_budget, total=memory.total_bytes(), name="ram_budget")
    available = memory.available_bytes()
    if available is None:
        raise OffloadError(
            "ram_budget='auto': the system does not tell how much memory is free; give a size."
        )
    on_host = {tensor.data_ptr(): tensor for tensor in distinct(units) if tensor.is_cpu}
    return int(memory.SPARED * (available + memory.private_bytes(map(memory_of, on_host.values()))))


def same_limit(units: Sequence[Unit], budget: Budget, share: Share) -> Budget:
    """Return `budget` with the least bytes that any rank takes its `ram_budget` for."""
    if budget.ram_budget is None or budget.ram_budget == OFFLOADED:
        return budget
    return replace(budget, ram_budget=share.least(host_limit(units, budget.ram_budget)))


def _tied(units: Sequence[Unit]) -> list[list[int]]:
    """Return the numbers of the units, those together that share a tensor."""
    group_of: dict[int, list[int]] = {}  # by the `id` of a tensor
    groups: list[list[int]] = []
    for number, unit in enumerate(units):
        tensors = {id(tensor) for leaf in unit for tensor in leaf.tensors()}
        shared = [group_of[tensor] for tensor in tensors if tensor in group_of]
        group = min(shared, default=[], key=lambda found: found[0])
        if not group:
            groups.append(group)
        for other in {id(found): found for found in shared if found is not group}.values():
            group += other
            groups.remove(other)
            group_of.update({key: group for key, found in group_of.items() if found is other})
        group.append(number)
        group_of.update(dict.fromkeys(tensors, group))
    return groups


def distinct(units: Iterable[Unit]) -> list[Tensor]:
    """Return the tensors of all units, each once."""
    tensors = (tensor for unit in units for leaf in unit for tensor in leaf.tensors())
    return list({id(tensor): tensor for tensor in tensors}.values())


def _device_of(owner: nn.Module) -> torch.device:
    """Return the device of the tensors of a module that has some."""
    own = itertools.chain(owner.parameters(recurse=False), owner.buffers(recurse=False))
    return next(own).device
