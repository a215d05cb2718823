"""Models of diffusers and transformers, from a local folder to a managed model in one line."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..disk.checkpoint import snapshot
from ..disk.empty import empty_weights
from ..errors import OffloadError
from ..manager import attach


def from_pretrained(
    model_class: Any,
    folder: str | os.PathLike[str],
    device: Any = "cuda",
    *,
    dtype: torch.dtype | None = None,
    subfolder: str = "",
    **arguments: Any,
) -> Any:
    """Do what ``model_class.from_pretrained(folder)`` does, and `attach` it, without the copy.

    Parameters
    ----------
    model_class : type
        A model's class of transformers (an ``AutoModel...``, too) or diffusers.
    folder : str or path
        That `save_pretrained` wrote, or a model's folder in the hub's cache.
    device : torch.device or str
        As of `attach`.
    dtype : torch.dtype, optional
        Of the weights; by default that of the configuration (transformers) or float32 (diffusers).
        What the class keeps in float32 stays so.
    subfolder : str
        Of a pipeline's folder: ``"transformer"``.
    **arguments
        To `attach`; `weights` replaces the folder's. With `share` or `disk` the weights come
        frozen.

    Returns
    -------
    nn.Module
        The model, attached, in evaluation mode; its manager is ``model._memory_manager``.

    Raises
    ------
    OffloadError
        Another class, a checkpoint that the library would quantise, or what `attach` raises.
    """
    path = snapshot(Path(folder)) / subfolder
    if not path.is_dir():  # the libraries would take it for a name of the hub, and ask there
        raise OffloadError(f"'{path}' is no folder; nothing is downloaded: fetch the model first.")
    library = _library_of(model_class)
    if library == "transformers":
        model, kept = _of_transformers(model_class, path, dtype)
    elif library == "diffusers":
        model, kept = _of_diffusers(model_class, path, dtype)
    else:
        raise OffloadError(
            f"{model_class!r} is no model's class of transformers or diffusers; make the model "
            "inside oracle_offload.empty_weights(), and attach it with weights=."
        )
    for name, parameter in model.named_parameters():
        if kept.search(name) and parameter.is_floating_point():
            parameter.data = parameter.data.float()
    budget = arguments.get("budget")
    on_disk = arguments.get("disk") or (budget is not None and budget.disk)
    # Of what may be trained each rank has its own, and no disk has it.
    if arguments.get("share") is not None or on_disk:
        model.requires_grad_(False)
    attach(model.eval(), device, **{"weights": path, **arguments})
    return model


def _library_of(model_class: Any) -> str:
    for kind in getattr(model_class, "__mro__", ()):
        if kind.__name__ in ("PreTrainedModel", "_BaseAutoModelClass", "ModelMixin"):
            return str(kind.__module__.partition(".")[0])
    return ""


def _refuse_quantised(config: Any, path: Path) -> None:
    if config:
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise OffloadError(
            f"'{path}' is quantised ({method}): its library makes other layers for it. Load it "
            "with from_pretrained, and attach that."
        )


def _of_transformers(
    model_class: Any, path: Path, dtype: torch.dtype | None
) -> tuple[nn.Module, re.Pattern[str]]:
    from transformers import AutoConfig, GenerationConfig

    own = getattr(model_class, "config_class", None)
    config = (own or AutoConfig).from_pretrained(path)
    _refuse_quantised(getattr(config, "quantization_config", None), path)
    make = getattr(model_class, "_from_config", None) or model_class.from_config
    with empty_weights():
        model = make(config, **({} if dtype is None else {"dtype": dtype}))
    if (path / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(path)
    model.config._name_or_path = str(path)
    kept = list(model._keep_in_fp32_modules_strict or ()) if model.dtype.itemsize == 2 else []
    if model.dtype is torch.float16:
        kept += model._keep_in_fp32_modules or ()
    return model, re.compile("|".join(kind.replace("*", ".*") for kind in kept) or "(?!)")


def _of_diffusers(
    model_class: Any, path: Path, dtype: torch.dtype | None
) -> tuple[nn.Module, re.Pattern[str]]:
    config = model_class.load_config(path)
    _refuse_quantised(config.get("quantization_config"), path)
    with empty_weights(), _default_dtype(dtype):
        model = model_class.from_config(config)
    for _, parameter in model.named_parameters():
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    model.register_to_config(_name_or_path=str(path))
    kept = (model_class._keep_in_fp32_modules or ()) if dtype is not None else ()
    kept = [kept] if isinstance(kept, str) else kept
    return model, re.compile("|".join(rf"(^|\.){re.escape(k)}($|\.)" for k in kept) or "(?!)")


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Let the class compute its buffers in `dtype`, as the library does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
