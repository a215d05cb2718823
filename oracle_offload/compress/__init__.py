"""Weights in fewer bytes, without loss: docs/lossless.md."""
