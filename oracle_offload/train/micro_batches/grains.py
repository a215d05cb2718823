"""After which modules one micro-batch makes room for the next.

They are pieces of a model that the arena holds. What is between two such places is computed for
all micro-batches, one after the other, while its weights are on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ...layers.any import AnyLayer
from ...layers.managed import HANDLE
from ...model.attachment import Attachment

# A grain is at most this share of the arena: the rest holds what is fetched for the next ones.
_SHARE = 0.25


class Grains(NamedTuple):
    """Where micro-batches take turns in one model."""

    modules: list[nn.Module]  # after the forward of each, the next micro-batch goes on
    lending: list[AnyLayer]  # those whose forward such a module is part of, the outer ones first


def grains_of(attachment: Attachment) -> Grains:
    """Return the largest modules of an attached model that are small next to the arena.

    None, where the arena holds all managed weights: each is fetched once as it is.
    """
    found = Grains([], [])
    model = attachment.module()
    capacity = attachment.arena.capacity_bytes
    if model is not None and attachment.managed_bytes > capacity:
        nbytes: dict[int, int] = {}
        _add_up(model, attachment, nbytes)
        layer = model.__dict__.get(HANDLE)
        if isinstance(layer, AnyLayer):
            found.lending.append(layer)
        for child in _children(model):
            _collect(child, nbytes, capacity * _SHARE, found)
    return found


def _children(module: nn.Module) -> Iterator[nn.Module]:
    layer: Any = module.__dict__.get(HANDLE)
    if isinstance(layer, AnyLayer) and layer.wrappers:
        return iter(())  # a parametrisation replaces its weights while it computes
    return module.children()


def _collect(module: nn.Module, nbytes: dict[int, int], most: float, found: Grains) -> None:
    if not nbytes[id(module)]:
        return
    parts = [child for child in _children(module) if nbytes[id(child)]]
    is_called = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    is_whole = not parts or _is_compiled(module)  # hooks inside a compiled one may not run
    if is_called and (nbytes[id(module)] <= most or is_whole):
        found.modules.append(module)
        return
    layer = module.__dict__.get(HANDLE)
    if isinstance(layer, AnyLayer):
        found.lending.append(layer)
    for part in parts:
        _collect(part, nbytes, most, found)


def _add_up(model: nn.Module, attachment: Attachment, nbytes: dict[int, int]) -> None:
    """Note the managed bytes below each module, by its `id`; of a shared one in each place."""
    own: dict[int, int] = {}
    for leaf in list(attachment.layers):
        module = leaf.module()
        if module is not None and leaf.needs_place:
            own[id(module)] = sum(size for _, size in leaf.extents())

    def add_up(module: nn.Module) -> int:
        total = own.get(id(module), 0) + sum(map(add_up, module.children()))
        nbytes[id(module)] = total
        return total

    add_up(model)


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module.__dict__.get("_compiled_call_impl") is not None
