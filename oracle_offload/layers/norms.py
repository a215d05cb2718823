"""Norms of gradients with the device's bits: computed there, as the gradients leave for the host.

torch's clipping runs as it is, over stand-ins on the device for the gradients of managed weights,
and is given their norms: so it sums them in the order of a resident model. Each gradient is brought
to the device once more: no version and no sample tells surely of a write through ``.data``, and to
read all bytes takes longer than to copy them.

Of a weight whose optimizer is streamed the norm is computed as its gradient leaves: who streams it
says of such writes (`MemoryManager.writing`). It is known until a version, samples, or a norm that
is not finite tell of another write. Which norms are wanted the first call tells.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

from ..engine import step_scalars
from ..engine.engines import DeviceState, open_states, patch
from ..engine.geometry import is_dense, tensor_bytes

_SAMPLES = 64  # of a gradient, spread over it
_How = tuple[bool, Any]  # whether by torch's function of lists, and the order of the norm


class _Known(NamedTuple):
    """Norms of a gradient as it left, and how it was when it had come home."""

    gradient: weakref.ref[Tensor]
    version: int
    sample: Tensor
    norms: dict[_How, Tensor]

    def is_of(self, gradient: Tensor) -> bool:
        """Whether nothing was written to it since. Samples of zeros tell nothing."""
        return (
            self.gradient() is gradient
            and self.version == gradient._version
            and bool(self.sample.any())
            and torch.equal(self.sample, _sampled(gradient))
        )


def _sampled(gradient: Tensor) -> Tensor:
    count = gradient.numel()
    flat = gradient.detach().as_strided((count,), (1,), gradient.storage_offset())
    return flat[:: max(1, count // _SAMPLES)].clone()


def _norm(gradient: Tensor, how: _How) -> Tensor:
    is_of_lists, order = how
    if is_of_lists:
        return torch._foreach_norm([gradient], order)[0]
    norm: Tensor = torch.linalg.vector_norm(gradient, order)
    return norm


def as_it_leaves(
    state: DeviceState, master: Tensor, gradient: Tensor, is_scaled: bool
) -> dict[Any, Tensor]:
    """Return the norms that are wanted of a gradient on the device.

    None where nothing answers for all writes, or a `GradScaler` has scaled it: what undoes that
    bumps no version.
    """
    if not state.wanted_norms or is_scaled or not state.is_streamed(master):
        return {}
    with torch.no_grad():
        return {how: _on_device(state, gradient, how) for how in list(state.wanted_norms)}


def _on_device(state: DeviceState, gradient: Tensor, how: _How) -> Tensor:
    if state.simulated:
        seconds = state.time.kernel_seconds(0.0, tensor_bytes(gradient), gradient.dtype)
        state.time.pending_kernel_s += seconds
    return _norm(gradient, how)


def note(state: DeviceState, master: Tensor, norms: dict[Any, Tensor]) -> None:
    """Remember the norms of what ``.grad`` is from now on."""
    gradient = master.grad
    if norms and gradient is not None and not gradient.is_inference():  # which has no version
        known = _Known(weakref.ref(gradient), gradient._version, _sampled(gradient), norms)
        state.norms[id(master)] = known
    else:
        state.norms.pop(id(master), None)


# ---- the norms that torch's clipping is given ----


class _Gradient(NamedTuple):
    """A gradient on the host, the `id` of its master, and the device."""

    host: Tensor
    master: int
    state: DeviceState


class _Answers(TorchFunctionMode):
    """Gives the norms of gradients where torch asks for those of their stand-ins."""

    def __init__(self, stands_for: dict[int, _Gradient]) -> None:
        super().__init__()
        self._stands_for = stands_for
        self._known: dict[_How, dict[int, Tensor]] = {}  # norms to be given, by their masters
        self._coming: list[tuple[DeviceState, int, Tensor | None]] = []

    def end(self) -> None:
        """Wait until gradients that were brought have been read: code may write to them next."""
        last = {id(state): (state, ticket) for state, ticket, _ in self._coming}
        with contextlib.ExitStack() as ends:  # all of them, whichever fails
            for state, ticket, there in self._coming:
                ends.callback(state.end_trip, ticket, there)
            for state, ticket in last.values():  # they come one after the other
                state.engine.trip_await(ticket)

    def _norm(self, gradient: _Gradient, how: _How) -> Tensor:
        """Return a norm on the device, which as gradients leave is computed from now on."""
        state = gradient.state
        if how not in state.wanted_norms and how[1] == how[1]:
            patch(step_scalars.watch_scalers)
            state.wanted_norms.add(how)
        if how not in self._known:
            self._known[how] = self._look(how)
        found = self._known[how].get(gradient.master)
        if found is not None:
            return found
        return _on_device(state, self._brought(state, gradient.host), how)

    def _look(self, how: _How) -> dict[int, Tensor]:
        """Return the norms that are known and finite: the host waits once for those of a kind.

        Where one is not, code may have replaced the few elements that are not.
        """
        alike: dict[Any, dict[int, Tensor]] = {}
        for gradient in self._stands_for.values():
            known = gradient.state.norms.get(gradient.master)
            if known is not None and how in known.norms and known.is_of(gradient.host):
                norm = known.norms[how]
                alike.setdefault((norm.device, norm.dtype), {})[gradient.master] = norm
        found = {}
        for norms in alike.values():
            finite = torch.stack(list(norms.values())).isfinite().tolist()
            found.update({key: norms[key] for key, ok in zip(norms, finite, strict=True) if ok})
        return found

    def _brought(self, state: DeviceState, host: Tensor) -> Tensor:
        nbytes = tensor_bytes(host)
        if not state.engine.is_locked(host.data_ptr(), nbytes):
            return host.to(state.device, copy=True)
        there = torch.empty_strided(
            host.size(), host.stride(), dtype=host.dtype, device=state.device
        )
        stream = state.stream()
        state.time.flush(stream)
        ticket = state.engine.trip_in(there.data_ptr(), host.data_ptr(), nbytes, stream)
        self._coming.append((state, ticket, there))
        state.engine.trip_join(ticket, stream)
        self._coming[-1] = state, ticket, None  # its memory is free in the order of the stream
        return there

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._foreach_norm:
            return self._of_list(*args, **kwargs)
        if func is torch.linalg.vector_norm and id(args[0]) in self._stands_for:
            return self._of_one(*args, **kwargs)
        return func(*args, **kwargs)

    def _of_list(self, tensors: Iterable[Tensor], ord: Any = 2) -> list[Tensor]:
        tensors = list(tensors)
        others = [tensor for tensor in tensors if id(tensor) not in self._stands_for]
        norms = iter(torch._foreach_norm(others, ord) if others else ())
        return [
            self._norm(self._stands_for[id(tensor)], (True, ord))
            if id(tensor) in self._stands_for
            else next(norms)
            for tensor in tensors
        ]

    def _of_one(self, tensor: Tensor, ord: Any = 2) -> Tensor:
        return self._norm(self._stands_for[id(tensor)], (False, ord))


def watch_norms() -> Callable[[], None]:
    """Let torch's sum of norms ask here for those of managed gradients; return what undoes that."""
    total = getattr(clip_grad, "_get_total_norm", None)
    return rewrap(() if total is None else (total,), _told)


def rewrap(
    functions: Iterable[Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Let functions of torch's clipping run what `make` returns of them; return what undoes that.

    Code that has imported one has it under a name of its own. What each of them wraps is looked up
    when it is called.
    """
    replaced: list[tuple[Any, Any, Any]] = []
    for function in functions:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        cell = cells.get("func")
        if cell is not None:
            own = cell.cell_contents
            cell.cell_contents = made = make(own)
            replaced.append((cell, own, made))

    def undo() -> None:
        for cell, own, made in replaced:
            if cell.cell_contents is made:
                cell.cell_contents = own

    return undo


def _told(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # no tensor has a stand-in there
            return own(tensors, *args, **kwargs)
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        managed = _managed(tensors)
        if not managed:
            return own(tensors, *args, **kwargs)
        stands_for: dict[int, _Gradient] = {}
        given = []
        for tensor in tensors:
            gradient = managed.get(id(tensor))
            if gradient is not None:
                tensor = torch.empty(0, dtype=tensor.dtype, device=gradient.state.device)
                stands_for[id(tensor)] = gradient
            given.append(tensor)
        answers = _Answers(stands_for)
        try:
            with answers:
                return own(given, *args, **kwargs)
        finally:
            answers.end()

    return run


def _managed(tensors: Iterable[Tensor]) -> dict[int, _Gradient]:
    """Return those of the tensors that are gradients of managed weights, by their ids."""
    hosts = {
        id(tensor)
        for tensor in tensors
        if type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.numel()
        and is_dense(tensor)
    }
    found: dict[int, _Gradient] = {}
    for state in open_states() if hosts else ():
        for attachment in state.listeners:
            for layer in getattr(attachment, "layers", ()):
                for master in layer.masters.present:
                    gradient = master.grad
                    if gradient is not None and id(gradient) in hosts:
                        found[id(gradient)] = _Gradient(gradient, id(master), state)
    return found
