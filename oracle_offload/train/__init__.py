"""What training needs beside the weights: activations that leave, optimizers that are streamed."""

from .activations import ActivationOffload, offload_activations
from .stepping import stream_optimizer

__all__ = ["ActivationOffload", "offload_activations", "stream_optimizer"]
