"""Layers managed on trial: code that reads their weight as a value stands in a branch.

A branch that is never taken does no harm. If it is taken, the layer's attribute is read from a line
that `oracle_offload.direct_uses` has found, and before the reader gets it the Parameter moves to
the device, for good: ``.data`` is re-pointed, so that optimizers, ties and autograd know it as
before.

The layer's calls go through the same autograd function until the graph that is being built is gone,
on the weight as it lies on the device. A checkpoint compares what a recompute saves with what
forward saved, and must not meet another layer. Then the class is swapped back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..autocast import cast_input
from ..devices import repoint
from ..engines import Layout
from ..errors import OffloadError
from ..exemption import exempt
from ..optimizer_states import note_moved
from ..sizes import format_size
from .leaf import Leaf, Masters, Tensors
from .loan import Cast, Compute, Layer
from .swap import HANDLE, swap_out, watch_reads

if TYPE_CHECKING:
    from ..attachment import Attachment

logger = logging.getLogger("oracle_offload")

_FRAMES = 4  # between the layer and the reader may stand an adapter's property


class OnDevice(Layer):
    """Mixed into a layer's class: its tensors lie on the device, and its loans cost nothing."""

    def adopt(self, *, lasting: bool = False) -> bool:
        """Take whatever Parameters are there now."""
        for name in self.required:
            tensor = self.parameters.get(name)
            if tensor is None or tensor.device.type != self.device_type:
                return False
        self.masters = Masters(type(self), self.parameters)
        return True

    def lend(self, kind: int, task: int, seconds: float, dtype: Cast, compute: Compute) -> Any:
        """Return ``compute(tensors)`` of the Parameters' tensors: nothing is taken."""
        with torch.no_grad():
            tensors = tuple([None if t is None else t.detach() for t in self.masters.tensors])
        return compute(tensors if dtype is None else self.cast(kind, dtype, tensors))

    def trained(self, dtype: torch.dtype | None) -> Tensors:
        """Return the trainable tensors, under autocast the casts that torch keeps of them."""
        found = [None if t is None or not t.requires_grad else t for t in self.masters.tensors]
        if dtype is None:
            return tuple(found)
        return tuple([None if t is None else cast_input(t, dtype) for t in found])


@functools.cache
def _on_device(kind: Any) -> Any:
    return type(kind.__name__, (OnDevice, kind), {})


class Trial:
    """What is known of code that reads a layer's tensors as values, in branches.

    Parameters
    ----------
    lines : dict
        Where: the method, by file and line.
    """

    def __init__(self, lines: dict[tuple[str, int], str]) -> None:
        self.lines = lines

    def read(self, layer: Leaf, frame: FrameType | None) -> None:
        """Somebody reads a tensor of `layer`: move it if one of the lines does."""
        for _ in range(_FRAMES):
            if frame is None:
                return
            where = self.lines.get((frame.f_code.co_filename, frame.f_lineno))
            if where is not None:
                move_to_device(layer, where)
                return
            frame = frame.f_back


def put_on_trial(module: nn.Module, lines: dict[tuple[str, int], str]) -> None:
    """Look from now on who reads the tensors of a managed module; see `Trial`."""
    module.__dict__[HANDLE].trial = Trial(lines)
    watch_reads(module)


def move_to_device(layer: Leaf, where: str) -> None:
    """Leave `layer`, and what shares a Parameter with it, on the device from now on.

    Raises
    ------
    torch.OutOfMemoryError
        The device has no room; nothing has changed.
    """
    attachment = layer.attachment
    with layer.state.lock:
        if layer not in attachment.layers:
            return  # another thread was first
        mine = {id(tensor) for tensor in layer.tensors()}
        sharing = [other for other in attachment.layers if mine & {id(t) for t in other.tensors()}]
        group = [other for other in sharing if not other.lends_to_code]
        tensors = {id(t): t for other in group for t in other.tensors()}
        copies = _copies(layer, list(tensors.values()), where)
        memory = [tensor.untyped_storage() for tensor in tensors.values()]
        for key, tensor in tensors.items():
            _keep_earlier_gradients(tensor)
            repoint(tensor, copies[key])
        note_moved(tensors.values())
        for other in group:
            _leave(attachment, other, memory)
            attachment.reasons[other.name] = f"{where} uses its weight without calling it"
        for other in sharing:
            if other.lends_to_code:
                with contextlib.suppress(OffloadError):  # else it computes with what stands there
                    attachment.let_go(other, f"{where} uses the weight that it shares")
        Layout.version += 1
        del memory
        attachment.pieces.give_back()
    logger.warning(
        "%s: %s computes with the weight of layer '%s' instead of calling the layer; it lies on "
        "the device from now on (%s). manager.resident has it.",
        attachment.name,
        where,
        layer.name,
        format_size(sum(t.numel() * t.element_size() for t in tensors.values())),
    )


def _copies(layer: Leaf, tensors: list[Tensor], where: str) -> dict[int, Tensor]:
    """Return the tensors on the device, by `id` of the original."""
    state = layer.state
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    try:
        if state.simulated and nbytes > state.engine.mem_info()[0]:
            raise torch.OutOfMemoryError("the simulated device is full")
        with exempt(), torch.inference_mode(False), torch.no_grad():
            return {id(t): t.detach().to(state.device, copy=True) for t in tensors}
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{where} computes with the weight of managed layer '{layer.name}' instead of calling "
            f"the layer, and the device has no room for its {format_size(nbytes)} ({error}). "
            "Attach with a higher offload_percent or a smaller vram_budget, or leave the layer out "
            f"from the start: attach(..., ignore_modules=[{layer.name!r}])."
        ) from error


def _keep_earlier_gradients(parameter: Tensor) -> None:
    """Let gradients that a graph built so far brings to the host go on to where it lies then.

    Autograd refuses a hook that returns a gradient of another device, and adds none to it. So each
    stands alone on the host until it has come.
    """
    if not parameter.requires_grad:
        return
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    before: list[Tensor | None] = []

    def set_aside(gradients: Any) -> None:
        before.append(parameter.grad)
        parameter.grad = None

    def bring(*gradients: Any) -> None:
        come, there = parameter.grad, before.pop()
        if come is not None:
            come = come.to(parameter.device)
        parameter.grad = come if there is None else there if come is None else there.add_(come)

    node.register_prehook(set_aside)
    node.register_hook(bring)


def _leave(attachment: Attachment, layer: Leaf, memory: Sequence[torch.UntypedStorage]) -> None:
    """Make `layer`, whose Parameters have just moved, one that is `OnDevice`.

    Nodes of the graph hold `layer` itself, and bring gradients to the host, as they were made;
    calls from now on go through another object that leaves them on the device. A thread that has
    begun a loan goes on with the slot and the `memory` of the masters.
    """
    before, now = layer.masters, Masters(type(layer), layer.parameters)
    kind = _on_device(cast("Any", type(layer)))
    former = {at: before.addresses.get(name, at) for name, at in now.addresses.items()}
    later = object.__new__(kind)
    layer.__class__ = kind
    for each in (layer, later):
        each.__dict__.update(layer.__dict__, former=former, trial=None, masters=now)
    later.on_device = True
    later.kept = memory
    attachment.layers.remove(layer)
    attachment.leaving.append(later)
    attachment.pieces.count_uses(before.addresses.values(), ())
    module = layer.module()
    if module is not None and module.__dict__.get(HANDLE) is layer:
        module.__dict__[HANDLE] = later
    _leave_engine(later)


def _leave_engine(layer: Leaf) -> bool:
    """Take `layer` from the engine; False as long as a thread computes with its unit."""
    try:
        layer.state.engine.remove_member(layer.member)
    except OffloadError as error:
        logger.debug("layer '%s' keeps its copy in the arena: %s", layer.name, error)
        return False
    layer.state.forget_member(layer.unit, layer.member)
    layer.views.clear()
    layer.kept = ()
    return True


def finish(attachment: Attachment) -> None:
    """Swap the classes of layers that have left, once no graph holds them."""
    with attachment.state.lock:
        for layer in list(attachment.leaving):
            if layer.kept and not _leave_engine(layer):
                continue
            attachment.leaving.remove(layer)
            module = layer.module()
            if module is not None and module.__dict__.get(HANDLE) is layer:
                swap_out(module)
        attachment.pieces.give_back()
