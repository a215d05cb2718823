"""The modules of an attached model, looked at again whenever one was added or replaced."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..engine.locks import Lock
from ..layers.any import find_wrappers, wrap
from ..layers.leaf import Leaf
from ..layers.managed import HANDLE
from ..layers.swap import ENTRY_METHODS
from . import admission, other_libraries
from .attachment import Attachment
from .residents import move_residents

_attached: weakref.WeakSet[Structure] = weakref.WeakSet()
_registration_hooks: list[Any] = []
_settle_hooks: list[Any] = []
_CALL = nn.Module._call_impl.__code__
# Of a frame that computes with its `self`. Not `forward`, which is called by these, nor `__call__`,
# as pipelines have: what is read of a frame's variables keeps what they hold, up to Python 3.12.
_CALLS = frozenset({nn.Module.__call__.__name__, *ENTRY_METHODS} - {"forward", "__call__"})
_OTHER_CALLS = re.compile(r"forward_.*|generate|get_\w+_features|(encode|decode)_.*")
_graph_task = torch._C._current_graph_task_id
# Each yields the innermost frames of calls that have been set aside: no thread is in them now.
frames_aside: list[Callable[[], Iterable[FrameType]]] = []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.on_device: dict[int, int] = {}  # depth, by the `id` of a structure


_thread = _Thread()


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
    when_settled : list of callables
        Called once everything new has been looked at, and is on the device.
    """

    def __init__(self, module: nn.Module, attachment: Attachment) -> None:
        self._module = weakref.ref(module)
        self._parts = frozenset(id(part) for part in module.modules())
        self._lock = Lock("structure")
        self.attachment = attachment
        self.device = attachment.state.device
        self.changed = False
        self.when_settled: list[Callable[[], object]] = []

    @property
    def module(self) -> nn.Module | None:
        """The model; None once it is deleted."""
        return self._module()

    def contains(self, module: nn.Module) -> bool:
        """Whether `module` is part of the model, as it was when it last settled."""
        return id(module) in self._parts and self._module() is not None

    def is_inside(self) -> bool:
        """Whether this thread computes with the model: in a call of it or of a part, in a backward.

        Asked where a weight is read, and seldom: so the frames tell, and calls need note nothing.
        """
        if _graph_task() != -1 or _thread.on_device.get(id(self)):
            return True
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if _is_call(code.co_name) and code.co_argcount:
                called = frame.f_locals.get(code.co_varnames[0])
                if isinstance(called, nn.Module) and self.contains(called):
                    return True
            frame = frame.f_back
        return False

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Let weights answer as inside a call, for a ``with`` block."""
        depths, key = _thread.on_device, id(self)
        depths[key] = depths.get(key, 0) + 1
        try:
            yield
        finally:
            depths[key] -= 1

    def watch(self) -> None:
        """Notice what is added to modules from now on: an adapter, a parametrisation."""
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
        """Notice no more additions: the model was detached."""
        _attached.discard(self)

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
                self._parts = frozenset(id(part) for part in module.modules())
                for told in self.when_settled:
                    told()
                self.changed = is_due
                attachment.pieces.give_back()


@functools.cache
def _is_call(name: str) -> bool:
    return name in _CALLS or _OTHER_CALLS.fullmatch(name) is not None


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
            structure.settle_soon()


def _settle_first(module: nn.Module, args: Any) -> None:
    # torch.compile's module is about to trace the calls of those below it, which cannot settle.
    traced = module.modules() if "_orig_mod" in module._modules else ()
    for structure in list(_attached):
        if structure.contains(module) or any(part is structure.module for part in traced):
            structure.settle(module)
    if not any(structure.changed for structure in list(_attached)):
        while _settle_hooks:
            _settle_hooks.pop().remove()
