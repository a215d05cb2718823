"""Scalars of an optimizer step that torch brings to the host and reads before they have arrived.

GradScaler and the fused optimizers give each device a copy of their scalars (the scale, whether a
gradient overflowed, a tensor ``lr``) by ``.to(device, non_blocking=True)``. Work on a CUDA device
is queued behind such a copy; the host does not wait for one that comes to it. A model that is on
the GPU never meets this. `attach` puts trainable weights on the host, and so has to see to it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp import grad_scaler

from ..errors import OffloadError

logger = logging.getLogger("oracle_offload")

_REPLICATOR = {"master", "_per_device_tensors"}  # attributes of torch's class for such copies
_scaled: set[int] = set()  # graph tasks whose result a GradScaler has scaled
_SCALES = ("grad_scale", "found_inf")  # attributes that GradScaler gives a fused optimizer


def make_scaler_wait() -> Callable[[], None]:
    """Let GradScaler wait for what it copies to the host; return what undoes that.

    Two of its scalars meet host gradients: what they are multiplied by, and what it remembers an
    overflow in. Without the wait the first is read too early, and the second overwritten too late.
    """
    replicator = getattr(grad_scaler, "_MultiDeviceReplicator", None)
    if replicator is None or vars(replicator(torch.zeros((), device="cpu"))).keys() != _REPLICATOR:
        logger.warning(
            "torch %s: its GradScaler is not one that this version of oracle_offload knows, and "
            "may read scales on the host before they have arrived. Train weights that are managed "
            "in bfloat16, without a GradScaler.",
            torch.__version__,
        )
        return lambda: None
    get = replicator.get

    @functools.wraps(get)
    def get_what_has_arrived(copies: Any, device: torch.device) -> Any:
        if device.type == "cpu" and device not in copies._per_device_tensors:
            copies._per_device_tensors[device] = copies.master.to(device, copy=True)
        return get(copies, device)

    replicator.get = get_what_has_arrived

    def undo() -> None:
        if replicator.get is get_what_has_arrived:  # else another wraps it, and calls it still
            replicator.get = get

    return undo


def watch_scalers() -> Callable[[], None]:
    """Let `is_scaled` know; return what undoes that."""
    scale = grad_scaler.GradScaler.scale

    @functools.wraps(scale)
    def scale_and_note(scaler: Any, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        if scaler.is_enabled():
            for each in scaled if isinstance(scaled, list | tuple) else (scaled,):
                if isinstance(each, Tensor) and each.grad_fn is not None:
                    each.grad_fn.register_prehook(_note_scaled)
        return scaled

    grad_scaler.GradScaler.scale = scale_and_note  # type: ignore[assignment]

    def undo() -> None:
        if grad_scaler.GradScaler.scale is scale_and_note:
            grad_scaler.GradScaler.scale = scale  # type: ignore[method-assign]

    return undo


def _note_scaled(gradients: Any) -> None:
    task = torch._C._current_graph_task_id()
    if task not in _scaled:
        _scaled.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _scaled.discard(task))


def is_scaled(task: int) -> bool:
    """Whether a `GradScaler` has scaled what a graph task differentiates; see `watch_scalers`."""
    return task in _scaled


def settle(optimizer: Any) -> None:
    """Bring to the host what `optimizer`, which is about to step, would not wait for.

    From the host, a CUDA device gets it in order. ``found_inf`` is the sum of what overflowed on
    each device, and the fused kernels skip a step only where it is 1.

    Raises
    ------
    OffloadError
        The optimizer would read a tensor ``lr`` or ``betas`` that is on the device.
    """
    for group in optimizer.param_groups:
        for name, value in _copied(group):
            if value.device.type != "cpu" and _trains_on_host(group):
                raise OffloadError(
                    f"{type(optimizer).__name__} has {name} in a tensor on {value.device} and "
                    "trains weights that are on the host, where torch would read it before it has "
                    f"arrived; give {name} as a number, or as a tensor on the host."
                )
    scales = {name: getattr(optimizer, name, None) for name in _SCALES}
    found = {name: scale for name, scale in scales.items() if isinstance(scale, Tensor)}
    if found and any(_trains_on_host(group) for group in optimizer.param_groups):
        for name, scale in found.items():
            scale = scale.to("cpu")
            setattr(optimizer, name, scale.clamp(max=1) if name == "found_inf" else scale)


def _copied(group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the hyperparameters that are tensors and that torch copies without waiting."""
    # Of the others a fused optimizer asks for the number, and so does a loop over parameters.
    name = "lr" if group.get("fused") else "betas"
    values = group.get(name)
    for value in values if isinstance(values, tuple | list) else (values,):
        if isinstance(value, Tensor):
            yield name, value


def _trains_on_host(group: dict[str, Any]) -> bool:
    return any(
        parameter.device.type == "cpu" and parameter.grad is not None
        for parameter in group["params"]
    )
