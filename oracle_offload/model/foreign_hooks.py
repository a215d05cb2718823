"""Hooks by which other libraries move a model's weights, and how their users take them off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import OffloadError

# accelerate's, by class; its SequentialHook holds several.
_ACCELERATE = ("AlignDevicesHook", "CpuOffload")
# diffusers', by the name in its registry.
_DIFFUSERS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")
_SHOWN = 3


def refuse_weight_movers(root: nn.Module) -> None:
    """Raise where hooks of another library move weights that attach would manage.

    Parameters
    ----------
    root : nn.Module
        The model.

    Raises
    ------
    OffloadError
        Its message names every such hook, the modules that carry it, and the call that removes it.
    """
    carriers: dict[tuple[str, str], list[str]] = {}
    for name, module in root.named_modules():
        for found in _movers(module):
            carriers.setdefault(found, []).append(name)
    if not carriers:
        return
    said = []
    for (what, remedy), names in carriers.items():
        shown = ", ".join(repr(name) for name in names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        said.append(f"{what} on {shown}{more}: take it off with {remedy}")
    raise OffloadError(
        f"{type(root).__name__} has hooks that move its weights themselves, which attach replaces. "
        + "; ".join(said)
        + ". Then attach again."
    )


def _movers(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield ``(whose hook, the call that removes it)`` for the hooks of one module."""
    pending = [module.__dict__.get("_hf_hook")]
    while pending:
        hook: Any = pending.pop()
        pending.extend(getattr(hook, "hooks", ()))
        for base in type(hook).__mro__:
            if base.__module__ == "accelerate.hooks" and base.__name__ in _ACCELERATE:
                yield (
                    f"accelerate's {base.__name__}",
                    "accelerate.hooks.remove_hook_from_module(model, recurse=True), or with "
                    "pipe.remove_all_hooks() where a pipeline put it there",
                )
    registry = module.__dict__.get("_diffusers_hook")
    for name in _DIFFUSERS:
        if name in getattr(registry, "hooks", ()):
            yield (
                f"diffusers' {name}",
                "diffusers.hooks.HookRegistry.check_if_exists_or_initialize(model)"
                f".remove_hook({name!r})",
            )
