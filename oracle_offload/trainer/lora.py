"""Adapters: into a model, and to a file that peft and diffusers read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .settings import Settings, SettingsError


def inject(model: nn.Module, settings: Settings, by_default: Sequence[str]) -> Any:
    """Freeze `model`, put adapters beside its layers, and return peft's configuration of them.

    The adapters are float32, whatever the weights are, and begin as the seed decides.

    Raises
    ------
    SettingsError
        No layer has such a name.
    """
    from peft import LoraConfig, inject_adapter_in_model

    ends = [end.strip() for end in settings.target_modules.split(",") if end.strip()]
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (name in by_default if not ends else _ends_with(name, ends))
    ]
    if not names:
        raise SettingsError(
            f"target_modules={settings.target_modules!r}: no linear layer has such a name"
        )
    alpha: Any = settings.alpha  # peft divides it by the rank: it need not be whole
    others = {name for name, _ in model.named_modules()} - {*names}
    only_these = "|".join(map(re.escape, names))  # a pattern of whole names
    # Of a list, peft takes the ends of names, too.
    target = only_these if any(_ends_with(name, names) for name in others) else names
    config = LoraConfig(r=settings.rank, lora_alpha=alpha, target_modules=target)
    torch.manual_seed(settings.seed)
    model.requires_grad_(False)
    inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return config


def _ends_with(name: str, ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def values(model: nn.Module) -> dict[str, Tensor]:
    """Return copies on the host of what is trained."""
    return {name: p.detach().cpu().clone() for name, p in trained(model).items()}
