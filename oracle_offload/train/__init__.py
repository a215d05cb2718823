"""What training needs beside the weights: activations that leave the device for a while."""

from .activations import ActivationOffload, offload_activations

__all__ = ["ActivationOffload", "offload_activations"]
