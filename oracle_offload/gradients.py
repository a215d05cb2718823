"""Gradients of trainable weights that lie on the host, and when their masters may be rewritten."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from .engines import DeviceState
from .geometry import is_dense, tensor_bytes
from .host.locked import LockedPool

_HOST = torch.device("cpu")
_MOST_TASKS = 64
LEAST_BYTES = 1 << 20  # of a gradient with locked memory of its own; the ring takes less in one go


class Gradients:
    """How gradients of one model's masters come to the host, and the memory they lie in there.

    A large one has page-locked memory, into which the device copies. That memory serves the next
    gradient of this size once no tensor points into it: as a rule one step later.

    Parameters
    ----------
    state : DeviceState
        The device they come from.
    may_lock : callable
        Whether so many bytes may be page-locked beside the masters.

    Attributes
    ----------
    device : torch.device
        Where they are computed.
    """

    def __init__(self, state: DeviceState, may_lock: Callable[[int], bool]) -> None:
        self.device = state.device
        self._state = state
        self._pool = LockedPool(state, may_lock)

    def to_host(self, gradient: Tensor | None) -> Tensor | None:
        """Return a host copy of a device gradient once its bytes have arrived.

        autograd adds, clones and shows gradients on the host as soon as they are returned, so this
        waits (the engine counts it).
        """
        if gradient is None:
            return None
        if is_legacy_batchedtensor(
            gradient
        ):  # several at once (``is_grads_batched``): it has no address
            return gradient.to(_HOST)
        if gradient.is_sparse:
            rows, values = self.to_host(gradient._indices()), self.to_host(gradient._values())
            return torch.sparse_coo_tensor(
                cast("Tensor", rows),
                cast("Tensor", values),
                gradient.shape,
                check_invariants=False,
                is_coalesced=gradient.is_coalesced(),
            )
        if not is_dense(gradient):
            gradient = gradient.contiguous()
        host = self._empty_like(gradient)
        nbytes = tensor_bytes(gradient)
        stream = self._state.stream()
        self._state.time.flush(stream)
        if nbytes:
            self._state.engine.download(host.data_ptr(), gradient.data_ptr(), nbytes, stream)
        return host

    def _empty_like(self, gradient: Tensor) -> Tensor:
        size, stride, dtype = gradient.size(), gradient.stride(), gradient.dtype
        nbytes = tensor_bytes(gradient)
        buffer = self._pool.take(nbytes) if nbytes >= LEAST_BYTES else None
        if buffer is None:  # it has to do with ordinary memory
            return torch.empty_strided(size, stride, dtype=dtype, device=_HOST)
        export = memoryview(buffer)  # torch keeps it for as long as a tensor points there
        weakref.finalize(export, self._pool.giver(nbytes), buffer).atexit = False
        flat = torch.frombuffer(export, dtype=dtype)
        empty = torch.empty(0, dtype=dtype, device="cpu")
        return empty.set_(flat.untyped_storage(), 0, size, stride)

    def give_back_all(self) -> None:
        """Unlock all of it; gradients that are there keep their memory, as ordinary memory."""
        self._pool.give_back_all()


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
