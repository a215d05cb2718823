"""What a model computes with in a step: from shapes that were given, or from its kind."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .source import DTYPES

_TEXT_TOKENS = 512  # of a diffusion transformer's prompt
_CLIP_TOKENS = 77
_DTYPES = {**DTYPES, "int64": torch.int64, "int32": torch.int32, "bool": torch.bool}
_TOKENS, _PIXELS = 2048, (1024, 1024)  # where no sample is given


class UnknownSample(Exception):
    """It is not known what the model takes; the message says what to give."""


def parse_sample(text: str) -> Any:
    """Return what ``--sample`` says: ``2048``, ``1024x768``, or ``name=4096x64:bf16,...``.

    Raises
    ------
    ValueError
        It says nothing of these.
    """
    if text.isdigit():
        return int(text)
    if match := re.fullmatch(r"(\d+)x(\d+)", text):
        return int(match[1]), int(match[2])
    found: dict[str, Any] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\w+)=((?:\d+(?:x\d+)*)?)(?::(\w+))?", part)
        if match is None or (match[3] or "bf16") not in _DTYPES:
            raise ValueError(
                f"sample={text!r}: {part!r} is not NAME=SIZExSIZE, with :dtype behind it if need "
                "be; nor is it a number of tokens, or HEIGHTxWIDTH in pixels"
            )
        shape = tuple(int(size) for size in match[2].split("x") if size)
        found[match[1]] = (shape, match[3]) if match[3] else shape
    return found


def inputs(module: nn.Module, sample: Any, batch: int) -> tuple[dict[str, Tensor], str]:
    """Return the arguments of a forward, and what was taken for granted.

    Parameters
    ----------
    module : nn.Module
        The model, with tensors on the device that it computes on.
    sample : int, tuple of int, mapping or None
        Tokens; height and width in pixels; or the shape of each argument without the batch, with a
        dtype added where that is not the model's.
    batch : int
        Samples in a micro-batch.

    Raises
    ------
    UnknownSample
        The kind of model is not known, and no shapes were given.
    ValueError
        A shape that is none.
    """
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    if isinstance(sample, Mapping):
        try:
            return {name: _of_shape(value, batch, dtype) for name, value in sample.items()}, ""
        except (TypeError, KeyError, RuntimeError) as error:
            raise ValueError(
                f"sample={sample!r}: a shape is like (4096, 64), or with a dtype ((77,), 'int64'): "
                f"{error}"
            ) from error
    names = set(inspect.signature(module.forward).parameters)
    config: Any = getattr(module, "config", None)
    if "input_ids" in names and (sample is None or isinstance(sample, int)):
        most = getattr(config, "max_position_embeddings", None) or _TOKENS
        tokens = sample or min(_TOKENS, most)
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        found = {"input_ids": ids}
        if "labels" in names:
            found["labels"] = ids.clone()
        return found, "" if sample else f"a sample of {tokens} tokens"
    kind = next((k.__name__ for k in type(module).__mro__ if k.__name__ in _OF_PIXELS), "")
    if not kind or isinstance(sample, int):
        raise UnknownSample(
            f"what {type(module).__name__} takes is not known: give sample= as a mapping from the "
            "arguments of its forward to their shapes, without the batch"
        )
    height, width = sample or _PIXELS
    found = _OF_PIXELS[kind](config, batch, (height // 8, width // 8), dtype)
    return found, "" if sample else f"a sample of {height} x {width} pixels"


def _of_shape(value: Any, batch: int, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    shape, kept = value, dtype
    if len(value) == 2 and isinstance(value[0], tuple | list):
        shape, named = value
        kept = _DTYPES[named] if isinstance(named, str) else named
    return torch.zeros(batch, *shape, dtype=kept)


def _flux(config: Any, batch: int, latent: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    tokens = (latent[0] // 2) * (latent[1] // 2)
    return {
        "hidden_states": torch.zeros(batch, tokens, config.in_channels, dtype=dtype),
        "encoder_hidden_states": torch.zeros(
            batch, _TEXT_TOKENS, config.joint_attention_dim, dtype=dtype
        ),
        "pooled_projections": torch.zeros(batch, config.pooled_projection_dim, dtype=dtype),
        "timestep": torch.zeros(batch, dtype=dtype),
        **({"guidance": torch.zeros(batch, dtype=dtype)} if config.guidance_embeds else {}),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(_TEXT_TOKENS, 3),
    }


def _sd3(config: Any, batch: int, latent: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_states": torch.zeros(batch, config.in_channels, *latent, dtype=dtype),
        "encoder_hidden_states": torch.zeros(
            batch, _CLIP_TOKENS + 256, config.joint_attention_dim, dtype=dtype
        ),
        "pooled_projections": torch.zeros(batch, config.pooled_projection_dim, dtype=dtype),
        "timestep": torch.zeros(batch, dtype=dtype),
    }


def _unet(config: Any, batch: int, latent: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "sample": torch.zeros(batch, config.in_channels, *latent, dtype=dtype),
        "timestep": torch.zeros(batch, dtype=torch.int64),
        "encoder_hidden_states": torch.zeros(
            batch, _CLIP_TOKENS, config.cross_attention_dim, dtype=dtype
        ),
    }


_OF_PIXELS = {
    "FluxTransformer2DModel": _flux,
    "SD3Transformer2DModel": _sd3,
    "UNet2DConditionModel": _unet,
}
