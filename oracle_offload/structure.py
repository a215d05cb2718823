"""The modules of an attached model, looked at again whenever one was added or replaced."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from . import admission, other_libraries
from .attachment import Attachment
from .direct_uses import used_directly
from .layers.any import find_wrappers, wrap
from .layers.leaf import Leaf
from .layers.swap import HANDLE
from .layers.trial import put_on_trial
from .locks import Lock
from .residents import move_residents

_attached: weakref.WeakSet[Structure] = weakref.WeakSet()
_registration_hooks: list[Any] = []
_settle_hooks: list[Any] = []
_CALL = nn.Module._call_impl.__code__
# Each yields the innermost frames of calls that have been set aside: no thread is in them now.
frames_aside: list[Callable[[], Iterable[FrameType]]] = []


class Listener(Protocol):
    """Who wants to hear of a model's structure."""

    def structure_changed(self) -> None:
        """Another kind of module, parameter or buffer was registered."""

    def structure_settled(self) -> None:
        """Everything new has been looked at, and lies on the device."""


class Structure:
    """The modules of one attached model, as they were when it last settled.

    Parameters
    ----------
    module : nn.Module
        The model; only a weak reference to it is kept.
    attachment : Attachment
        What it holds of its device.

    Attributes
    ----------
    device : torch.device
        Where everything goes that is not managed.
    changed : bool
        Whether `settle` has something to do.
    listeners : list of Listener
        Told of changes, and when the structure has settled.
    """

    def __init__(self, module: nn.Module, attachment: Attachment) -> None:
        self._module = weakref.ref(module)
        self._parts = frozenset(id(part) for part in module.modules())
        self._lock = Lock("structure")
        self.attachment = attachment
        self.device = attachment.state.device
        self.changed = False
        self.listeners: list[Listener] = []

    @property
    def module(self) -> nn.Module | None:
        """The model; None once it is deleted."""
        return self._module()

    def contains(self, module: nn.Module) -> bool:
        """Whether `module` is part of the model, as it was when it last settled."""
        return id(module) in self._parts and self._module() is not None

    def watch(self) -> None:
        """Hear of what is added to modules from now on: an adapter, a parametrisation."""
        if not _registration_hooks:
            modules = torch.nn.modules.module
            _registration_hooks.extend(
                (
                    modules.register_module_module_registration_hook(_module_added),
                    modules.register_module_parameter_registration_hook(_parameter_added),
                    modules.register_module_buffer_registration_hook(_buffer_added),
                )
            )
        _attached.add(self)

    def end(self) -> None:
        """Hear no more: the model was detached."""
        _attached.discard(self)

    def registered(self, before: Any, now: Any) -> None:
        """Look again later; tell the listeners unless like was only replaced by like."""
        self.changed = True
        if type(before) is not type(now):
            for listener in self.listeners:
                listener.structure_changed()

    def settle_soon(self) -> None:
        """Settle before the next call of any part of the model, managed or not."""
        self.changed = True
        if not _settle_hooks:
            hook = torch.compiler.disable(_settle_first)
            _settle_hooks.append(register_module_forward_pre_hook(hook))

    def settle(self, called: nn.Module | None = None) -> None:
        """Bring modules that were added since (an adapter) to the device.

        Parameters
        ----------
        called : nn.Module, optional
            One whose call has begun, with the forward that it has now: it stays what it is, as
            those do whose calls the frames of all threads show. Compiled code has no such frames.
        """
        if not self.changed:
            return
        with self._lock:
            module = self._module()
            if module is not None and self.changed:
                attachment = self.attachment
                for layer in list(attachment.layers):
                    attachment.let_go_if_lost(layer)
                for wrapper, layer in list(find_wrappers(module)):
                    wrap(wrapper, layer)
                is_due = admission.take_anew(self, module, [*_calls_begun(), called])
                if not is_due:  # else it is taken before its next call, as a rule
                    attachment.warn_of_lost()
                move_residents(module.modules(), self.device, attachment.pieces)
                other_libraries.bring_together()
                self._look_for_direct_uses(module)
                self._parts = frozenset(id(part) for part in module.modules())
                for listener in self.listeners:
                    listener.structure_settled()
                self.changed = is_due
                attachment.pieces.give_back()

    def _look_for_direct_uses(self, module: nn.Module) -> None:
        """Put layers on trial whose weight a module that came since may use directly."""
        found = used_directly(module.modules())
        for layer in list(self.attachment.layers):
            leaf = layer.module()
            if leaf is not None and id(leaf) in found and layer.may_be_tried:
                put_on_trial(leaf, found[id(leaf)].sites)


def _calls_begun() -> Iterator[nn.Module]:
    """Yield the modules that are being called: their forwards may have been looked up."""
    aside = (frame for frames in list(frames_aside) for frame in frames())
    for frame in (*sys._current_frames().values(), *aside):
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is _CALL:
                yield at.f_locals["self"]
            at = at.f_back


def _module_added(parent: nn.Module, name: str, child: Any) -> None:
    _registered(parent, parent._modules.get(name), child)


def _parameter_added(parent: nn.Module, name: str, parameter: Any) -> None:
    _registered(parent, parent._parameters.get(name), parameter)


def _buffer_added(parent: nn.Module, name: str, buffer: Any) -> None:
    _registered(parent, parent._buffers.get(name), buffer)


def _registered(parent: nn.Module, before: Any, now: Any) -> None:
    if before is now:
        return
    leaf: Leaf | None = parent.__dict__.get(HANDLE)
    if leaf is not None and leaf.is_lending():  # a parametrisation for the length of a forward
        return
    for structure in list(_attached):
        if structure.contains(parent):
            structure.registered(before, now)


def _settle_first(module: nn.Module, args: Any) -> None:
    for structure in list(_attached):
        if structure.contains(module):
            structure.settle(module)
    if not any(structure.changed for structure in list(_attached)):
        while _settle_hooks:
            _settle_hooks.pop().remove()
