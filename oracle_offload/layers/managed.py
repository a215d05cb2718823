"""How one sees that a module is managed: by its class, and by the layer that it holds."""

from __future__ import annotations

from typing import Any

from torch import nn

HANDLE = "_layer_memory_manager"  # the attribute of a managed module that holds its layer
BASE = "_oracle_offload_base"  # that of its class: the class it had before attach


def is_managed(module: nn.Module) -> bool:
    """Whether the weights are on the host: not once the class was replaced."""
    layer: Any = module.__dict__.get(HANDLE)
    return hasattr(type(module), BASE) and layer is not None and not layer.waits


def casts_layerwise(module: nn.Module) -> bool:
    """Whether diffusers' layerwise casting replaces the weights of `module` around each call."""
    hooks = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
    return hooks.get("layerwise_casting") is not None
