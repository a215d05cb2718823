"""Which classes of modules are managed, and how: one kind of layer for each base class."""

from __future__ import annotations

import torch
from torch import nn

from .conv import Conv1dLayer, Conv2dLayer, Conv3dLayer
from .embedding import EmbeddingLayer
from .formats import format_of
from .linear import LinearLayer
from .loan import Layer
from .quantised import QuantisedLayer
from .swap import unanswered

KINDS: list[type[Layer]] = [
    LinearLayer,
    Conv1dLayer,
    Conv2dLayer,
    Conv3dLayer,
    EmbeddingLayer,
]


def layer_type(module: nn.Module) -> type[Layer] | None:
    """Return how a module of this class is managed; None where it is not."""
    if isinstance(module, torch.jit.ScriptModule):
        return None  # compiled: its class has no forward
    if format_of(module) is not None:
        return QuantisedLayer
    found = next((kind for kind in KINDS if kind.computes(type(module))), None)
    if found is None or type(module).forward is found.base_forward:
        return found
    if unanswered(type(module)) is getattr(found, "base", None):
        return None  # other code has replaced torch's own forward
    # A forward of its own may compute with Parameters of its own: all are lent to it then.
    return found if module._parameters.keys() <= {*found.names} else None
