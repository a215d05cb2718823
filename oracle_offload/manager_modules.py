"""AI-Toolkit's name for the module of its managed layers; they are in `oracle_offload.layers`."""

from .layers.kinds import layer_type
from .layers.loan import Layer
from .layers.managed import HANDLE, is_managed

__all__ = ["HANDLE", "Layer", "is_managed", "layer_type"]
