"""`MemoryManager` as AI-Toolkit calls it: its names, its arguments and its manners.

A second attach, a model with nothing to manage, and detach of what was never attached do nothing;
attach returns None. `oracle_offload.attach` refuses these, with the reason.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

from .. import manager
from ..engine.optimizer_states import note_moved
from ..layers.kinds import layer_type
from ..layers.managed import is_managed
from ..model import selection
from ..model.attachment import Attachment
from ..model.budget import OFFLOADED
from ..model.masters import trim_heap
from ..model.residents import move_residents
from .run_folder import find_run_folder, find_trainer
from .self_streaming import keep_in_place, let_move
from .together import follow_setting

_DEVICE = "_memory_management_device"  # on a managed module: where it computes
_MANAGED = "_is_memory_managed"  # on its Parameters
SHARE = "layer_offloading_share"  # of the section `model`: who has the frozen weights together
_ADAPTER = "ara_lora_ref"  # on a module whose accuracy is mended by a LoRA: its weak reference


class _DetachMethod:
    """`detach` of a model, as AI-Toolkit calls it, and of a manager, without an argument."""

    def __get__(
        self, found: MemoryManager | None, owner: type[MemoryManager]
    ) -> Callable[..., nn.Module | None]:
        def detach(module: nn.Module | None = None, unpin_cpu_tensors: bool = True) -> Any:
            """Make a model an ordinary one again, all of it on the CPU; see `MemoryManager`."""
            if module is None and found is None:
                raise TypeError("MemoryManager.detach() needs the attached module")
            module = module if module is not None else cast("MemoryManager", found).module
            if _end(module):
                move_residents(module.modules(), torch.device("cpu"), leave_meta=True)
                note_moved(module.parameters())
            return None

        return detach


class MemoryManager(manager.MemoryManager):
    """Streams the weights of one model; on it as ``model._memory_manager``.

    ``MemoryManager.attach(model, device)`` begins it. ``MemoryManager.detach(model)`` makes an
    ordinary model of it, all of it on the CPU; its weights stay in the memory they are in, which is
    page-locked no more, whatever ``unpin_cpu_tensors`` says: unlocking copies nothing.

    Attributes
    ----------
    module : nn.Module
        The attached model.
    process_device : torch.device
        Where it computes.
    unmanaged_modules : list of nn.Module
        Those of its modules that stay on the device.
    """

    detach = _DetachMethod()
    adapters: nn.ModuleList | None = None  # attached with it

    @classmethod
    def attach(  # type: ignore[override]
        cls,
        module: nn.Module,
        device: Any,
        offload_percent: float = 1.0,
        ignore_modules: Iterable[Any] = (),
    ) -> None:
        """Keep the weights of `module` in page-locked host memory, and stream them.

        A LoRA that mends a layer's accuracy (``ara_lora_ref``) is attached with its layer. Parts
        that are attached already stay with their own manager. The learned order of use is kept in
        the folder that the trainer saves to, if it is a trainer that attaches. Where its setting
        says so, all processes of this machine have the weights in one copy.

        Parameters
        ----------
        module : nn.Module
            The model.
        device : torch.device or str
            Where it computes.
        offload_percent : float
            Share in [0, 1] of the managed bytes that has no room on the device: the host holds
            these alone. The others stay there, spread evenly over the model.
        ignore_modules : iterable of nn.Module, Tensor or str
            What stays on the device.

        Raises
        ------
        ValueError, OffloadError, torch.OutOfMemoryError, MemoryError
            See `oracle_offload.attach`.
        """
        if getattr(module, manager.ATTRIBUTE, None) is not None:
            return
        follow_setting()
        keep_in_place(module)
        ignored = selection.as_entries(ignore_modules)
        ignored += [part for part in module.modules() if is_managed(part)]
        adapters = _adapters_of(module, ignored)
        try:
            found = manager.attach(
                module,
                device,
                offload_percent=offload_percent,
                ram_budget=OFFLOADED,
                ignore_modules=ignored,
                order_file=find_run_folder(),
                share=_share_of(module),
            )
        except selection.NothingToManage:
            return
        found.__class__ = cls  # the same object, under AI-Toolkit's names
        mark(found)
        if adapters:
            container = nn.ModuleList(adapters)
            cls.attach(container, device)
            cast("MemoryManager", found).adapters = container

    @classmethod
    def free(cls, module: nn.Module) -> None:
        """Detach `module`, if it is attached, and destroy its weights: they go to "meta".

        Their host memory goes back to the system at once.
        """
        masters = [
            tensor
            for found in _managers_of(module)
            for layer in found.layers
            for tensor in layer.tensors()
        ]
        _end(module)
        # Not module.to(), which a trainer may have replaced by one that does nothing.
        nn.Module.to(module, "meta")
        known = [weakref.ref(tensor) for tensor in masters]  # not before: torch may swap tensors
        masters.clear()
        gc.collect()
        for master in known:
            held = master()  # by an optimizer, say: it alone must not keep a whole piece of memory
            if held is not None:
                held.data = held.data.clone()
        cls.release_cached_memory()

    @classmethod
    def release_cached_memory(cls) -> None:
        """Give memory that is free back to the system: torch's caches, and the heap's."""
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
            if empty_host_cache is not None:
                empty_host_cache()
        trim_heap()

    @property
    def process_device(self) -> torch.device:
        """Where the model computes."""
        return self.device

    @property
    def unmanaged_modules(self) -> list[nn.Module]:
        """The modules with tensors that stay on the device."""
        return [
            part
            for part in self.module.modules()
            if not is_managed(part) and (part._parameters or part._buffers)
        ]


def _share_of(module: nn.Module) -> str | None:
    """Return who has the frozen weights of `module` together, by the trainer's setting.

    What is loaded is frozen for it here already: a trainer freezes it next, and lets train what it
    trains. Its network is its own.
    """
    trainer = find_trainer()
    share: str | None = None if trainer is None else (trainer.config.get("model") or {}).get(SHARE)
    if share is None or module is getattr(trainer, "network", None):
        return None
    module.requires_grad_(False)
    return share


def _adapters_of(module: nn.Module, ignored: list[Any]) -> list[nn.Module]:
    """Return the LoRAs that mend layers of `module`, but for those of ignored layers."""
    left_out = {
        id(part) for entry in ignored if isinstance(entry, nn.Module) for part in entry.modules()
    }
    found: dict[int, nn.Module] = {}
    for part in module.modules():
        adapter = getattr(part, _ADAPTER, lambda: None)()
        if adapter is not None and layer_type(part) and id(part) not in left_out:
            found[id(adapter)] = adapter
    return list(found.values())


def mark(found: manager.MemoryManager) -> None:
    """Set what AI-Toolkit's code reads on managed modules and their Parameters, then and later."""
    marks = _Marks(found.attachment)
    marks.structure_settled()
    found.structure.when_settled.append(marks.structure_settled)


class _Marks:
    """Marks layers again that were replaced, quantised say, after attach."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def structure_settled(self) -> None:
        """Mark the layers that are managed now."""
        for layer in list(self._attachment.layers):
            module = layer.module()
            if module is not None:
                mark_layer(module, self._attachment.state.device)


def mark_layer(module: nn.Module, device: torch.device) -> None:
    """`mark` one module."""
    module.__dict__[_DEVICE] = device
    for parameter in module._parameters.values():
        if parameter is not None:
            setattr(parameter, _MANAGED, True)


def unmark(model: nn.Module) -> None:
    """Undo `mark`."""
    for part in model.modules():
        part.__dict__.pop(_DEVICE, None)
        for parameter in part._parameters.values():
            if parameter is not None:
                parameter.__dict__.pop(_MANAGED, None)


def _managers_of(module: nn.Module) -> list[manager.MemoryManager]:
    """Return the managers of a model and of its parts."""
    return [
        found
        for part in module.modules()
        if isinstance(found := part.__dict__.get(manager.ATTRIBUTE), manager.MemoryManager)
    ]


def _end(module: nn.Module) -> bool:
    """Detach a model, its parts that have managers of their own, and the adapters.

    Returns
    -------
    bool
        Whether anything was attached.
    """
    managers = _managers_of(module)
    for found in managers:
        adapters = getattr(found, "adapters", None)
        if adapters is not None:
            _end(adapters)
        found._end()
    if managers:
        unmark(module)
    let_move(module)
    return bool(managers)
