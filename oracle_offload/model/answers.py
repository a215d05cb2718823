"""What an attached model answers to code that knows nothing of us: where it is, what a copy is.

Its weights are on the host, the rest of it on the device. To other code it is *on the device*:
transformers' ``generate`` and diffusers' pipelines put what they make where ``model.device`` says,
which otherwise is the device of its first parameter. A deep copy is an ordinary model on the host.

The root, and parts with a property ``device``, become instances of a cached subclass of their class
with its name. Classes of managed modules (`oracle_offload.layers.swap`) are derived from that.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..layers.managed import HANDLE
from ..layers.swap import ANSWERS_FOR, base_class, made_by, reduced, resident_tensors, unanswered

_ANSWER = "_oracle_offload_device"  # on each module that answers: where the model computes
MANAGER = "_memory_manager"  # on the attached module; AI-Toolkit's name
_PLAIN = (Tensor, nn.Parameter)
_OWN = (_ANSWER, MANAGER, HANDLE)  # what a copy does not get


class Answers:
    """Lets a model answer, until `end`.

    Parameters
    ----------
    model : nn.Module
        The model; its modules' classes are those that the user knows.
    device : torch.device
        Where it computes.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._changed: list[weakref.ref[nn.Module]] = []
        for module in model.modules():
            if module is not model and not _has_device(type(module)):
                continue
            if isinstance(module, torch.jit.ScriptModule) or _ANSWER in vars(module):
                continue  # which has no class in Python, or belongs to another attached model
            module.__class__ = _class_for(cast("Any", type(module)))
            vars(module)[_ANSWER] = device
            self._changed.append(weakref.ref(module))

    def end(self) -> None:
        """Make their classes what they were; one that other code derived since stays."""
        for reference in self._changed:
            module = reference()
            if module is not None:
                vars(module).pop(_ANSWER, None)
                module.__class__ = unanswered(type(module))
        self._changed.clear()


def _has_device(kind: Any) -> bool:
    return isinstance(inspect.getattr_static(kind, "device", None), property)


def _copy_residents(model: nn.Module, memo: dict[int, Any]) -> None:
    """Copy to the host what is not there, as `copy.deepcopy` will find in `memo`."""
    for tensor in (tensor for module in model.modules() for tensor in resident_tensors(module)):
        if tensor is None or type(tensor) not in _PLAIN or tensor.device.type == "cpu":
            continue  # of another class: it knows how it is copied
        if id(tensor) not in memo and tensor.is_leaf:
            copied = tensor.detach().to("cpu").requires_grad_(tensor.requires_grad)
            if type(tensor) is nn.Parameter:
                copied = nn.Parameter(copied.detach(), tensor.requires_grad)
            memo[id(tensor)] = copied


class _State(dict[str, Any]):
    """The state of a module that answers, on its way into a copy or a pickle: there it is a dict.

    A deep copy begins with it.
    """

    model: nn.Module | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        if self.model is not None:
            _copy_residents(self.model, memo)
        return copy.deepcopy(dict(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


@functools.cache
def _class_for(base: Any) -> Any:
    """Return the subclass of `base` that answers; one per base, same name."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        answer = cast("Any", super(made, self)).__reduce_ex__(protocol)
        make, arguments, state, *rest = reduced(answer)
        if type(state) is dict:
            state = _State({key: value for key, value in state.items() if key not in _OWN})
            state.model = self if _ANSWER in vars(self) else None
        return *made_by(make, arguments, made, base), state, *rest

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if _ANSWER in vars(self):
            _copy_residents(self, memo)
        copied = base.__deepcopy__(self, memo)
        for name in _OWN:
            vars(copied).pop(name, None)
        copied.__class__ = base_class(copied)
        return copied

    members: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": __reduce_ex__,
        ANSWERS_FOR: base,
    }
    if hasattr(base, "__deepcopy__"):  # else it would be that of a wrapper that has `__getattr__`
        members["__deepcopy__"] = __deepcopy__
    if _has_device(base):
        own: property = inspect.getattr_static(base, "device")

        def device(self: Any) -> Any:
            answer = self.__dict__.get(_ANSWER)
            return cast("Any", own.fget)(self) if answer is None else answer

        members["device"] = property(device, own.fset, own.fdel, own.__doc__)
    made = type(base.__name__, (base,), members)
    return made
