"""The parameters of a model that are not managed: why, how large they are, and where they are."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.devices import repoint
from ..engine.geometry import copied_to, memory_of, stored_bytes, tensor_bytes
from ..layers.flatten import tensors_beside
from ..layers.formats import holders_beside
from ..layers.managed import is_managed
from ..layers.swap import apply_to_residents, list_weights, managed_keys, resident_tensors
from . import masters

logger = logging.getLogger("oracle_offload")


class Resident(str):
    """Why a parameter is not managed: a string, with the `bytes` it takes on the device."""

    bytes: int

    def __new__(cls, reason: str, nbytes: int) -> Resident:
        """Make one of a reason and a size."""
        made = super().__new__(cls, reason)
        made.bytes = nbytes
        return made


def unmanaged_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield ``(layer, its module, key, parameter)`` of everything that is not managed."""
    for name, inner in module.named_modules():
        managed = managed_keys(inner)
        for key, parameter in inner._parameters.items():
            if parameter is not None and key not in managed:
                yield name, inner, key, parameter


def list_residents(module: nn.Module, reasons: dict[str, str]) -> dict[str, Resident]:
    """List what is not managed, by name; `reasons` are those known of layers and parameters."""
    found = {}
    for name, _, key, parameter in unmanaged_parameters(module):
        full = f"{name}.{key}" if name else key
        reason = reasons.get(full) or reasons.get(name) or "it was added after attach"
        found[full] = Resident(reason, stored_bytes(parameter))
    return found


def resident_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters that are not managed; a shared one counts once."""
    distinct = {id(parameter): parameter for *_, parameter in unmanaged_parameters(module)}
    return sum(stored_bytes(parameter) for parameter in distinct.values())


def resident_gradient_bytes(module: nn.Module) -> int:
    """Return the bytes of the gradients of all parameters that are not managed."""
    distinct = {id(parameter): parameter for *_, parameter in unmanaged_parameters(module)}
    gradients = (parameter.grad for parameter in distinct.values())
    return sum(stored_bytes(gradient) for gradient in gradients if gradient is not None)


def move_residents(
    modules: Iterable[nn.Module],
    device: torch.device,
    pieces: masters.Pieces | None = None,
    leave_meta: bool = False,
) -> None:
    """Move the tensors of `modules` themselves, except masters, to `device`, dtypes untouched.

    Shared tensors stay shared: a Parameter keeps its identity, a buffer that several modules hold
    is moved once. What a layer that was let go left among the masters in `pieces` leaves them. The
    heap keeps what small tensors leave: after each piece of it, it is given back to the system.
    What a quantised layer keeps apart from its tensors goes with them, and shares what it shared.
    """
    modules = list(modules)
    left: list[int] = []  # bytes, since then
    places = collections.Counter(id(t) for inner in modules for t in resident_tensors(inner))
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # of what has several; the rest is gone at once
    replaced: dict[int, tuple[Tensor, nn.Parameter]] = {}

    def stays(tensor: Tensor) -> bool:
        if tensor.device != device:
            return leave_meta and tensor.is_meta
        return pieces is None or pieces.at(memory_of(tensor)[0]) is None

    def move(tensor: Tensor) -> Tensor:
        if stays(tensor):
            return tensor
        if id(tensor) in moved:
            return moved[id(tensor)][1]
        there = copied_to(tensor, device)
        if tensor.device.type == "cpu":
            left.append(tensor_bytes(tensor))
        if places[id(tensor)] > 1:
            moved[id(tensor)] = tensor, there
        return there

    with torch.inference_mode(False):
        for inner in modules:
            own, beside = resident_tensors(inner), _beside(inner)
            all_of_it = (*own, *(tensor for *_, tensor in beside))
            if any(tensor is not None and not stays(tensor) for tensor in all_of_it):
                same = _same_memory(inner, beside)
                try:
                    apply_to_residents(inner, move)
                except RuntimeError as error:
                    if "swap" not in str(error):
                        raise
                    _move_each(inner, move, replaced)
                for owner, name, tensor in _beside(inner):  # a library's `to` may have moved it
                    key = same.get(id(tensor), "")
                    with_it = inner._parameters.get(key)
                    setattr(owner, name, move(tensor) if with_it is None else with_it.data)
            if sum(left) >= masters.PIECE_BYTES:
                left.clear()
                masters.trim_heap()
    if left:
        masters.trim_heap()


def _beside(module: nn.Module) -> list[tuple[Any, str, Tensor]]:
    """Return what a quantised layer that is not managed keeps apart from its tensors, and where."""
    holders = frozenset() if is_managed(module) else holders_beside(module)
    return list(tensors_beside(module, holders)) if holders else []


def _same_memory(module: nn.Module, beside: Iterable[tuple[Any, str, Tensor]]) -> dict[int, str]:
    """Return which Parameter has the bytes of what is apart from it, by the latter's `id`."""
    found = {}
    for *_, tensor in beside:
        where = memory_of(tensor)
        for key, other in module._parameters.items():
            if other is None or not where[0] or memory_of(other) != where:
                continue
            if _geometry(other) == _geometry(tensor):
                found[id(tensor)] = key
    return found


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _move_each(
    module: nn.Module,
    move: Callable[[Tensor], Tensor],
    replaced: dict[int, tuple[Tensor, nn.Parameter]],
) -> None:
    """Move what `module` has, except masters, where torch would swap tensors, and cannot.

    It swaps those of libraries' classes, and none that something else refers to. What cannot even
    be re-pointed, because a graph holds it, is replaced, unless it is trained: an optimizer would
    go on with the one that it knows.
    """
    managed = managed_keys(module)
    for key, parameter in module._parameters.items():
        if parameter is None or key in managed:
            continue
        if id(parameter) in replaced:
            module._parameters[key] = replaced[id(parameter)][1]
            continue
        with torch.no_grad():
            there = move(parameter)
        if there is parameter:
            continue
        try:
            repoint(parameter, there)
        except RuntimeError as error:
            if parameter.requires_grad:
                logger.warning(
                    "%s.%s stays on %s: it is trained, and something holds it, as a graph does "
                    "that awaits its backward (%s). Let go of that, then move the model.",
                    type(module).__name__,
                    key,
                    parameter.device,
                    error,
                )
            else:
                now = there  # a library's own `to` makes a Parameter of its class
                if not isinstance(now, nn.Parameter):
                    now = nn.Parameter(there, requires_grad=False)
                module._parameters[key] = now
                replaced[id(parameter)] = parameter, now
    for key, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[key] = move(buffer)
    if isinstance(module, nn.RNNBase):
        list_weights(module)
