"""AI-Toolkit's name for the module of its managed layers; they stand in `oracle_offload.layers`."""

from .layers.leaf import HANDLE, Layer, is_managed, layer_type

__all__ = ["HANDLE", "Layer", "is_managed", "layer_type"]
