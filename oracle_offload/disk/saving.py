"""Weights from masters to safetensors files, tensor by tensor, with nothing gathered before."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.geometry import memory_of, tensor_bytes
from ..errors import OffloadError
from ..host.replace import Sink, replace_file
from ..host.sizes import parse_size
from .checkpoint import INDEX_SUFFIX, SUFFIX, read_index
from .header import write_header
from .reading import BLOCK_BYTES, memory
from .source import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save_weights(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    shard_bytes: int | str = "5GB",
    name: str = "model",
) -> None:
    """Write the weights of a model, attached or not, as `attach` and the libraries read them.

    Each tensor is written from where it is stored, a device's in blocks of 8 MiB. A file is written
    under another name in the same folder, brought to the disk and renamed: whatever ends the
    process, the old file is whole, or the new one. Of tied tensors the first name is written.

    Parameters
    ----------
    module : nn.Module
        The model.
    path : str or path
        A file (``*.safetensors``), or a folder, which is made if it is not there.
    shard_bytes : int or str
        In a folder: more than that become several files and an index. A tensor is never cut.
    name : str
        In a folder: what the files begin with; diffusers' own are called
        ``"diffusion_pytorch_model"``.

    Raises
    ------
    OffloadError
        A tensor that safetensors cannot hold: quantised by a library, or without values. One that
        stays in a file (``disk=True``) which was written since.
    ValueError
        `shard_bytes` is no size.
    OSError
        The system refused it.
    """
    tensors = _tensors(module)

    def check() -> None:  # weights that stay in files which were written meanwhile are refused
        module.state_dict(keep_vars=True)

    target = Path(path)
    most = parse_size(shard_bytes, name="shard_bytes")
    if target.name.endswith(SUFFIX):
        _write(target, tensors, check)
        return
    target.mkdir(parents=True, exist_ok=True)
    single, index = target / f"{name}{SUFFIX}", target / f"{name}{INDEX_SUFFIX}"
    shards = list(_shards(tensors, most))
    before: set[str] = set()
    replaces = index.is_file()
    if replaces:
        with contextlib.suppress(OffloadError):  # a damaged one does not prevent saving
            before = set(read_index(index).values())
    # An index may name any file: only weights are taken for what was saved here before.
    old = [file for file in sorted(before | {single.name}) if file.endswith(SUFFIX)]
    if len(shards) == 1:
        _write(single, tensors, check)
        # The index goes first: without it the new file alone is read.
        left = [index.name, *(file for file in old if file != single.name)] if replaces else []
    else:
        # Names that the index of now does not have: until it is replaced, it stays true.
        token = f"-{time.time_ns():x}" if replaces else ""
        files = [
            f"{name}-{number:05}-of-{len(shards):05}{token}{SUFFIX}"
            for number in range(1, len(shards) + 1)
        ]
        for file, shard in zip(files, shards, strict=True):
            _write(target / file, shard, check)
        weights = {key: file for file, shard in zip(files, shards, strict=True) for key in shard}
        total = sum(map(tensor_bytes, tensors.values()))
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2)
        replace_file(index, lambda sink: sink.write(text.encode()))
        left = old
    for file in left:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target / file)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return what is to be written, each memory once."""
    found: dict[str, Tensor] = {}
    places: set[Any] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype not in _NAMES:
            what = getattr(tensor, "dtype", "no tensor")
            raise OffloadError(
                f"'{name}' is {type(tensor).__name__} ({what}), which a safetensors file cannot "
                "hold; save quantised weights with the library that quantised them."
            )
        if tensor.is_meta:
            raise OffloadError(f"'{name}' is on the meta device, without values to save.")
        start, end = memory_of(tensor)
        place = (tensor.device, start, end, tensor.shape, tensor.stride()) if end else id(tensor)
        if place not in places:
            places.add(place)
            found[name] = tensor.detach()
    return found


def _shards(tensors: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor_bytes(tensor) > most:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor_bytes(tensor)
    yield shard


def _write(path: Path, tensors: Mapping[str, Tensor], check: Callable[[], object]) -> None:
    rows = {name: (_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}

    def write(sink: Sink) -> None:
        sink.write(write_header(rows))
        for tensor in tensors.values():
            for block in _blocks(tensor):
                sink.write(memory(block))
        check()

    replace_file(path, write)


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in order, as contiguous host tensors that are no larger than a block."""
    if not tensor.numel():
        return
    with torch.no_grad():
        if tensor.is_contiguous():
            tensor = tensor.view(-1)  # a scalar too
        rows = max(1, BLOCK_BYTES * len(tensor) // tensor_bytes(tensor))
        for block in tensor.split(rows):
            yield block.to("cpu").contiguous()
