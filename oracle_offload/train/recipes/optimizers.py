"""Optimizers by name, with small or paged states, and the reason where another one is taken."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import OPTIMIZERS

logger = logging.getLogger("oracle_offload")

_BITSANDBYTES = {
    "adamw8bit": "AdamW8bit",
    "paged-adamw8bit": "PagedAdamW8bit",
    "paged-adamw": "PagedAdamW",
}


@dataclass(frozen=True)
class Made:
    """An optimizer, and what became of what was asked for.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
        It.
    name : str
        Which of `oracle_offload.train.recipes.OPTIMIZERS` it is.
    why : str
        Why it is not the one that was asked for; empty where it is.
    """

    optimizer: torch.optim.Optimizer
    name: str
    why: str = ""


def make_optimizer(
    name: str, parameters: Iterable[Tensor], lr: float, weight_decay: float = 0.0
) -> Made:
    """Return the optimizer of that name; plain AdamW, with the reason, where it cannot be had.

    The fallback is announced as a warning of the log, too: its states are four times as large.

    Parameters
    ----------
    name : str
        One of `oracle_offload.train.recipes.OPTIMIZERS`. Those with "8bit" or "paged" are
        bitsandbytes'.
    parameters : iterable of Tensor
        What it trains.
    lr, weight_decay : float
        As in torch.

    Raises
    ------
    ValueError
        There is none of that name.
    """
    trained = list(parameters)
    if name == "adamw":
        return Made(torch.optim.AdamW(trained, lr=lr, weight_decay=weight_decay), name)
    if name == "adafactor":
        return Made(torch.optim.Adafactor(trained, lr=lr, weight_decay=weight_decay), name)
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer={name!r}: there are {', '.join(OPTIMIZERS)}")
    try:
        module: Any = importlib.import_module("bitsandbytes.optim")
        make: Callable[..., torch.optim.Optimizer] = getattr(module, _BITSANDBYTES[name])
        made = make(trained, lr=lr, weight_decay=weight_decay)
        _try(make, trained[0].device)
    except Exception as error:
        why = f"{name} cannot be had ({_first_line(error)}): AdamW with float32 states is taken"
        logger.warning("%s", why)
        return Made(torch.optim.AdamW(trained, lr=lr, weight_decay=weight_decay), "adamw", why)
    return Made(made, name)


def _try(make: Callable[..., torch.optim.Optimizer], device: torch.device) -> None:
    """Step once with a parameter of its own: many a build lacks its kernels only then."""
    parameter = torch.nn.Parameter(torch.zeros(8192, device=device))
    parameter.grad = torch.ones_like(parameter)
    make([parameter], lr=1e-3).step()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's states, as its tensors have them."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
