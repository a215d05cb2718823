"""What a watched forward may do with masters: code that computes with them is found and named.

Code that computes with the weight of a managed layer, instead of calling the layer, gets a host
tensor where it expects a device tensor. `Watch` fails it, or `DirectUses` moves the weight to the
device before it. What works on the host alone is let pass: an EMA of the weights, clipping them in
place, a weight computed from a master that the layer is then called with. So is what an adapter in
front of a layer makes of the layer's weight (DoRA's norm, LoKr's product): it knows that it is not
called where the weight lies, and brings it there; where it forgot to, torch refuses on a real
device.
"""

from __future__ import annotations

import linecache
import sys
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .attachment import Attachment, attachments_on
from .engines import open_states
from .errors import OffloadError
from .exemption import is_exempt
from .geometry import memory_of
from .layers import trial
from .layers.leaf import Leaf
from .layers.swap import is_managed, resident_tensors
from .operators import Operator, run_in_mode, tensors_in
from .witness import Witness, refusal

_copy = torch.ops.aten.copy_.default
_get_device = torch.Tensor.device.__get__
_ARITHMETIC = frozenset(
    f"__{side}{name}__"
    for side in ("", "r")
    for name in ("add", "sub", "mul", "truediv", "matmul", "pow", "floordiv", "mod")
)


class Watch(Witness):
    """A witness that fails an operator in which a master, or what comes of one, meets the device.

    The simulated device's tensors are CPU tensors like the masters. So the watch keeps track of
    memory: on the device is what was given to forward, what resident modules hold, the arena, and
    what comes of them. Operators on masters and other host tensors alone do no harm.

    Parameters
    ----------
    model : nn.Module
        The model whose forward begins.
    inputs : object
        What it is called with, nested.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__(declare=False)
        self._on_device: dict[int, StorageWeakRef] = {}
        self._of_masters: dict[int, tuple[StorageWeakRef, str]] = {}
        self._adapted: set[str] = set()  # layers whose forward an adapter has replaced
        for name, module in model.named_modules():
            self._note(resident_tensors(module))
            if is_managed(module) and "forward" in module.__dict__:
                self._adapted.add(name)
        self._note(tree_leaves(inputs))

    def _observe(self, operator: Operator, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        meets_device = False
        verb, master = "", None
        targets: list[Tensor] = []
        for tensor, written in operator.tensors(args, kwargs):
            if written:
                targets.append(tensor)
            start, end = memory_of(tensor)
            name = next((name for *_, name in self._masters.touched(start, end)), None)
            if name is not None:
                verb, master = f"operator {func} {'writes' if written else 'reads'}", name
            elif any(True for _ in self._arena.touched(start, end)):
                meets_device = True
                if written:
                    self._refuse_write(func, start)
            else:
                key = _storage(tensor)
                if key in self._of_masters:
                    verb, master = f"operator {func} takes what comes of", self._of_masters[key][1]
                else:
                    meets_device |= key in self._on_device
        if master is not None and (is_exempt() or self._is_adapted(master)):
            # A managed layer, or its adapter, brings what it computes with to the device.
            meets_device = True
        elif master is not None and meets_device and func is not _copy:  # which crosses devices
            raise refusal(verb, master)
        result = run_in_mode(func, args, kwargs)
        if meets_device or master is not None:
            self._note([*targets, *tensors_in(result)], None if meets_device else master)
        return result

    def _is_adapted(self, master: str) -> bool:
        return bool(self._adapted) and master.rpartition(".")[0] in self._adapted

    def _refuse_write(self, func: Any, address: int) -> None:
        """Fail a write to what was lent: it would be lost, and the next forward would see it."""
        for state in open_states():
            found = {
                unit: address - at
                for unit, at, size, _ in state.engine.residents()
                if at <= address < at + size
            }
            for attachment in attachments_on(state):
                for layer in attachment.layers:
                    if layer.lends_to_code and _holds(layer, found.get(layer.unit, -1)):
                        state.engine.refresh(attachment.model)
                        named = [layer.name] if layer.name else [*layer.names]  # the model's own
                        raise OffloadError(
                            f"operator {func} writes to the weights of '{layer.name}' in its "
                            "forward. They lie on the host: what is written to the device's copy "
                            "would be lost. Leave the module resident: "
                            f"attach(..., ignore_modules={named})."
                        )

    def _note(self, values: Any, master: str | None = None) -> None:
        """Remember tensors as the device's, or as what comes of `master`."""
        for tensor in tensors_in(list(values)):
            key = _storage(tensor)
            if key is None or any(True for _ in self._masters.touched(*memory_of(tensor))):
                continue
            held = StorageWeakRef(tensor.untyped_storage())  # keeps the key, not the memory
            if master is None:
                self._of_masters.pop(key, None)
                self._on_device[key] = held
            elif key not in self._on_device:
                self._of_masters[key] = held, master

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in device memory, as far as this forward has shown."""
        if any(True for _ in self._arena.touched(*memory_of(tensor))):
            return True
        return _storage(tensor) in self._on_device


class DirectUses(TorchFunctionMode):
    """Moves the weight of a managed layer to the device where a watched forward uses it directly.

    What a reader of source did not see (peft's DoRA, a loss that takes ``lm_head.weight``) is found
    here, above autograd and autocast, which so know the weight on the device alone. The layer is
    resident from then on; see `oracle_offload.layers.trial`.

    Parameters
    ----------
    attachment : Attachment
        What the model holds.
    watch : Watch
        Knows what lies on the device.
    """

    def __init__(self, attachment: Attachment, watch: Watch) -> None:
        super().__init__()
        self._attachment = attachment
        self._watch = watch
        self._layers = self._find_layers()

    def _find_layers(self) -> dict[int, Leaf]:
        layers = [layer for layer in self._attachment.layers if layer.may_be_tried]
        return {id(tensor): layer for layer in layers for tensor in layer.tensors()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in([*args, *kwargs.values()]))
        masters = [tensor for tensor in given if id(tensor) in self._layers]
        if masters and not is_exempt() and self._needs_device(func, given, masters):
            where = _code_outside(sys._getframe(1))
            for tensor in masters:
                trial.move_to_device(self._layers[id(tensor)], where)
            self._layers = self._find_layers()
        return func(*args, **kwargs)

    def _needs_device(self, func: Any, given: list[Tensor], masters: list[Tensor]) -> bool:
        name = getattr(func, "__name__", "")
        if func == _get_device:
            # Whoever asks where the weight lies brings what it computes with there. A model's own
            # `device` asks any parameter, and not by that name.
            frame = sys._getframe(2)
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            return ".weight.device" in line or ".bias.device" in line
        if name.startswith("__") or (name.endswith("_") and given[0] is masters[0]):
            return name in _ARITHMETIC and self._meets(given)
        return self._meets(given)

    def _meets(self, given: list[Tensor]) -> bool:
        return any(
            self._watch.is_on_device(tensor) for tensor in given if id(tensor) not in self._layers
        )


def _holds(layer: Leaf, offset: int) -> bool:
    """Whether a tensor of `layer` lies at `offset` of its unit."""
    places = zip(layer.offsets, layer.extents(), strict=True)
    return any(begin <= offset < begin + nbytes for begin, (_, nbytes) in places)


def _code_outside(frame: FrameType | None) -> str:
    """Return the name of the function that uses a weight; torch's own frames are passed over."""
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("torch."):
            return frame.f_code.co_qualname
        frame = frame.f_back
    return "some code"


def _storage(tensor: Tensor) -> int | None:
    """Return what identifies the memory that views share; None for a tensor that has none."""
    try:
        return cast("int", tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None
