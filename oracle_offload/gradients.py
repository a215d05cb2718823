"""Gradients of trainable weights that lie on the host, and when their masters may be rewritten."""

from __future__ import annotations

import torch
from torch import Tensor

from .engines import DeviceState
from .geometry import is_dense, tensor_bytes

_HOST = torch.device("cpu")
_MOST_TASKS = 64


def to_host(state: DeviceState, gradient: Tensor | None) -> Tensor | None:
    """Return a host copy of a device gradient once its bytes have arrived.

    autograd adds, clones and shows gradients on the host as soon as they are returned, so this
    waits (the engine counts it).
    """
    if gradient is None:
        return None
    if not is_dense(gradient):
        gradient = gradient.contiguous()
    host = torch.empty_strided(
        gradient.size(), gradient.stride(), dtype=gradient.dtype, device=_HOST
    )
    nbytes = tensor_bytes(gradient)
    stream = state.stream()
    state.time.flush(stream)
    if nbytes:
        state.engine.download(host.data_ptr(), gradient.data_ptr(), nbytes, stream)
    return host


def note_trainable(state: DeviceState, task: int) -> None:
    """A trainable layer took part in graph task `task`: at its end masters may be rewritten."""
    tasks = state.tasks_with_gradients
    if task == -1 or task in tasks:
        return
    if len(tasks) > _MOST_TASKS:  # tasks that ended by an exception
        tasks.clear()
    tasks.add(task)

    def end_of_task() -> None:
        tasks.discard(task)
        state.engine.hold()

    torch.autograd.Variable._execution_engine.queue_callback(end_of_task)
