"""Layers that AI-Toolkit's own `manager.py` hands over one by one; and its other names.

Where `manager_modules.py` alone is ours, the original attaches a model layer by layer, and nothing
says which is the last. So the layers wait, on the host, until a part of the model is called; then
all of them are attached at once, as they are by then. The original drops its manager at detach and
at free, before it looks at the layers: that is their end here.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .. import manager
from ..layers.kinds import layer_type
from ..layers.managed import HANDLE, is_managed
from ..layers.swap import swap_in, swap_out
from ..model import selection
from .memory_manager import mark, mark_layer, unmark

# AI-Toolkit's table of streams by device. There is none here to forget: engines are shared, and
# each closes with the last model on its device.
_DEVICE_STATE: dict[Any, Any] = {}


def sync_grad_transfers() -> None:
    """Do nothing: a gradient on the host is there only once all its bytes are."""


def _ensure_cpu_pinned(t: Tensor | None) -> Tensor | None:
    """Return a tensor on the CPU, page-locked where there is CUDA; None for None."""
    if t is None:
        return None
    t = t.to("cpu")
    return t.pin_memory() if torch.cuda.is_available() and type(t) is Tensor else t


class _Waiting:
    """In a layer's place until its model is attached; calling the layer attaches it."""

    lends_to_code = False
    names: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    waits = True  # so `.to()` moves the module as any other

    @classmethod
    def stands_below(cls, module_class: Any) -> None:
        """Return None: a call waits in the place of the whole forward."""

    def __init__(self, group: _Group, module: nn.Module) -> None:
        self.attachment = group
        self._module = weakref.ref(module)

    def read(self, module: nn.Module, key: str) -> None:
        """Return None: the module's own value is read."""

    traced_read = read

    def placed_again(self, value: Any) -> Any:
        """Return what is to be put under a name: `value`."""
        return value

    def is_lending(self) -> bool:
        """Whether device tensors are in the places of its Parameters: never."""
        return False

    def __call__(self, x: Tensor) -> Tensor:
        module: Any = self._module()
        self.attachment.attach()
        layer = module.__dict__.get(HANDLE)
        result: Tensor = type(module).forward(module, x) if layer is None else layer(x)
        return result


class _Group:
    """The layers that one of the original's managers has handed over."""

    def __init__(self, original: Any) -> None:
        self._original = weakref.ref(original)
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary(
            {part: name for name, part in original.module.named_modules()}
        )
        self._chosen: set[str] = set()  # by name: what is quantised meanwhile may be replaced
        self._waiting: list[weakref.ref[nn.Module]] = []
        self._manager: manager.MemoryManager | None = None
        # A layer that waits may be quantised, and so replaced: then it is no call of it that tells.
        hook = torch.compiler.disable(self._attach_first)
        self._hook = register_module_forward_pre_hook(hook)
        weakref.finalize(original, self._end).atexit = False

    def _attach_first(self, module: nn.Module, args: Any) -> None:
        # A layer that waits attaches by itself, unless an adapter wraps it.
        if (module._modules or "forward" in module.__dict__) and module in self._names:
            self.attach()

    def add(self, module: nn.Module) -> None:
        """Let a layer wait, its weights on the host."""
        with torch.no_grad():
            for parameter in module._parameters.values():
                if type(parameter) is nn.Parameter:
                    parameter.data = parameter.data.to("cpu")
        swap_in(module, _Waiting(self, module))  # type: ignore[arg-type]
        self._waiting.append(weakref.ref(module))
        self._chosen.add(self._names[module])

    def let_go_soon(self, layer: Any) -> None:
        """Another class or weight was put into a waiting layer: it is an ordinary one again."""
        module = layer._module()
        if module is not None:
            swap_out(module)

    def attach(self) -> None:
        """Attach the model, with no other layers managed than those that wait."""
        original = self._original()
        self._release()
        if original is None:
            return
        model, device = original.module, original.process_device
        others = [
            part
            for name, part in model.named_modules()
            if layer_type(part) and name not in self._chosen
        ]
        others += [part for part in model.modules() if is_managed(part)]
        del model.__dict__[manager.ATTRIBUTE]  # `attach` writes there; it is put back
        try:
            self._manager = manager.attach(model, device, ignore_modules=others)
            mark(self._manager)
        except selection.NothingToManage:
            pass
        finally:
            model.__dict__[manager.ATTRIBUTE] = original

    def _release(self) -> None:
        """Make the layers that wait ordinary ones again."""
        self._hook.remove()
        waiting = [module for found in self._waiting if (module := found()) is not None]
        waiting = [m for m in waiting if isinstance(m.__dict__.get(HANDLE), _Waiting)]
        for module in waiting:
            swap_out(module)

    def _end(self) -> None:
        """The original has let go of its manager: at detach, at free, or with the model."""
        self._release()
        found, self._manager = self._manager, None
        if found is not None and found.structure.module is not None:
            model = found.module
            found.detach()
            unmark(model)


_groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()


class BaseLayerMemoryManager:
    """Takes a layer from AI-Toolkit's own `manager.py`."""

    @classmethod
    def attach(cls, module: nn.Module, manager: Any) -> None:
        """Let a layer be managed from its model's next call on.

        Parameters
        ----------
        module : nn.Module
            The layer.
        manager : object
            The original's: it has the model as ``module`` and the device as ``process_device``.
        """
        if hasattr(module, HANDLE):
            return
        group = _groups.get(manager)
        if group is None:
            group = _groups[manager] = _Group(manager)
        group.add(module)
        mark_layer(module, manager.process_device)


class LinearLayerMemoryManager(BaseLayerMemoryManager):
    """Takes an ``nn.Linear``."""


class ConvLayerMemoryManager(BaseLayerMemoryManager):
    """Takes an ``nn.Conv2d``."""


class OstrisLinearLayerMemoryManager(BaseLayerMemoryManager):
    """Takes a layer that AI-Toolkit has quantised."""
