"""The parameters of a model that are not managed: why, how large they are, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .geometry import stored_bytes
from .layers.kinds import layer_type
from .layers.swap import is_managed
from .masters import Pieces


class Resident(str):
    """Why a parameter is not managed: a string, with the `bytes` it takes on the device."""

    bytes: int

    def __new__(cls, reason: str, nbytes: int) -> Resident:
        """Make one of a reason and a size."""
        made = super().__new__(cls, reason)
        made.bytes = nbytes
        return made


def unmanaged_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield ``(layer, its module, key, parameter)`` of everything outside the managed layers."""
    for name, inner in module.named_modules():
        if not is_managed(inner):
            for key, parameter in inner._parameters.items():
                if parameter is not None:
                    yield name, inner, key, parameter


def list_residents(module: nn.Module, reasons: dict[str, str]) -> dict[str, Resident]:
    """List what is not managed, by name; `reasons` are those known of layers."""
    found = {}
    for name, inner, key, parameter in unmanaged_parameters(module):
        if name in reasons:
            reason = reasons[name]
        elif layer_type(inner) is not None:
            reason = "it was added after attach"
        else:
            reason = f"{type(inner).__name__} is no kind of layer that is managed"
        found[f"{name}.{key}" if name else key] = Resident(reason, stored_bytes(parameter))
    return found


def resident_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters that are not managed; a shared one counts once."""
    distinct = {id(parameter): parameter for *_, parameter in unmanaged_parameters(module)}
    return sum(stored_bytes(parameter) for parameter in distinct.values())


def move_residents(module: nn.Module, device: torch.device, pieces: Pieces | None = None) -> None:
    """Move every parameter and buffer outside the managed layers to `device`, dtypes untouched.

    Shared tensors stay shared: a Parameter keeps its identity, a buffer that several modules hold
    is moved once. What a layer that was let go left among the masters in `pieces` leaves them.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def stays(tensor: Tensor) -> bool:
        if tensor.device != device or type(tensor) not in (Tensor, nn.Parameter):
            return tensor.device == device
        if pieces is None or device.type != "cpu":
            return True
        return pieces.at(tensor.data_ptr()) is None

    def move(tensor: Tensor) -> Tensor:
        if stays(tensor):
            return tensor
        known = moved.get(id(tensor))
        if known is None:
            known = tensor, tensor.to(device, copy=True)
            moved[id(tensor)] = known
        return known[1]

    with torch.inference_mode(False):
        for inner in module.modules():
            if is_managed(inner):
                continue
            own = (*inner._parameters.values(), *inner._buffers.values())
            if any(tensor is not None and not stays(tensor) for tensor in own):
                inner._apply(move, recurse=False)
