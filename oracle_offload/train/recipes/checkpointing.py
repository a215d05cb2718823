"""Gradient checkpointing, by whatever name a model has it."""

from __future__ import annotations

from typing import Any

from torch import nn


def set_checkpointing(model: nn.Module, on: bool = True) -> bool:
    """Turn gradient checkpointing on or off in a model of transformers or diffusers.

    Non-reentrant, and without the cache of keys and values, which a checkpoint cannot fill twice.

    Parameters
    ----------
    model : nn.Module
        The model; one that peft wraps, too.
    on : bool
        On or off.

    Returns
    -------
    bool
        Whether the model has it: where it does not, nothing was done.
    """
    config: Any = getattr(model, "config", None)
    transformers = getattr(model, "gradient_checkpointing_enable", None)
    diffusers = getattr(model, "enable_gradient_checkpointing", None)
    if transformers is not None and getattr(model, "supports_gradient_checkpointing", True):
        if on:
            transformers(gradient_checkpointing_kwargs={"use_reentrant": False})
            if hasattr(config, "use_cache"):
                config.use_cache = False
        else:
            model.gradient_checkpointing_disable()  # type: ignore[operator]
        return True
    if diffusers is not None and getattr(model, "_supports_gradient_checkpointing", True):
        if on:
            diffusers()
        else:
            model.disable_gradient_checkpointing()  # type: ignore[operator]
        return True
    return False
