"""The header of a safetensors file: read with suspicion, because anyone may have written it.

A file is eight bytes with the length of the header, the header in JSON, and the bytes of all
tensors without gap or overlap (https://github.com/huggingface/safetensors). Nothing is believed
before it was compared with the size of the file. Needs neither torch nor safetensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..errors import OffloadError

LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000  # as the safetensors library allows
_MOST_DIMENSIONS = 64  # as torch's operators take
_MOST_ELEMENTS = 2**62  # as torch counts
METADATA = "__metadata__"
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: its dtype in the file's words, its shape, and where its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    begin: int  # from the beginning of the file
    nbytes: int


def read_header(file: BinaryIO, path: str) -> dict[str, Stored]:
    """Return the tensors of a safetensors file, by name.

    Parameters
    ----------
    file : binary file
        Open for reading; only its header is read.
    path : str
        For messages.

    Raises
    ------
    OffloadError
        The file is no safetensors file, is damaged, or is cut off.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    length_field = file.read(LENGTH_BYTES)
    if len(length_field) < LENGTH_BYTES:
        raise OffloadError(
            f"'{path}' has {size} bytes, which is too short for a safetensors file; copy or "
            "download it again."
        )
    (length,) = struct.unpack("<Q", length_field)
    start = LENGTH_BYTES + length
    if length > MOST_HEADER_BYTES or start > size:
        raise OffloadError(
            f"'{path}' is no safetensors file, or is cut off: its first bytes promise a header of "
            f"{length} bytes in a file of {size}."
        )
    try:
        table = json.loads(file.read(length).decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise OffloadError(f"'{path}' has a damaged header, which is no JSON: {error}") from error
    if not isinstance(table, dict):
        raise OffloadError(f"'{path}' has a damaged header: it names no tensors")
    table.pop(METADATA, None)
    found = {name: _stored(name, row, start, path) for name, row in table.items()}
    _refuse_gaps(found, start, size, path)
    return found


def write_header(tensors: Mapping[str, tuple[str, Sequence[int]]], least: int = 0) -> bytes:
    """Return the first bytes of a safetensors file, up to the first tensor's.

    Parameters
    ----------
    tensors : mapping
        By name, in the order in which their bytes follow: dtype in the file's words, and shape.
    least : int
        Bytes that they are filled up to, a multiple of 8.
    """
    table: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * max(-len(text) % LENGTH_BYTES, least - LENGTH_BYTES - len(text))
    return struct.pack("<Q", len(text)) + text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("it has a name twice")
    return table


def _stored(name: str, row: Any, start: int, path: str) -> Stored:
    fields: dict[str, Any] = row if isinstance(row, dict) else {}
    dtype: Any
    shape: Any
    offsets: Any
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (
        _are_sizes(shape)
        and _are_sizes(offsets)
        and len(offsets) == 2
        and len(shape) <= _MOST_DIMENSIONS  # the product of a million takes hours
    ):
        raise OffloadError(f"'{path}' has a damaged header: '{name}' has no proper shape or place")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise OffloadError(
            f"'{path}': '{name}' has dtype {dtype!r}, which is not known here; known are "
            f"{', '.join(ITEM_BYTES)}."
        )
    begin, end = offsets
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != nbytes:
        raise OffloadError(
            f"'{path}' has a damaged header: '{name}' of {dtype} and shape {tuple(shape)} takes "
            f"{nbytes} bytes, but its place has {end - begin}."
        )
    if math.prod(size or 1 for size in shape) > _MOST_ELEMENTS:  # with a 0 nothing bounds the rest
        raise OffloadError(f"'{path}' has a damaged header: '{name}' has shape {tuple(shape)}")
    return Stored(dtype, tuple(shape), start + begin, nbytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _refuse_gaps(found: Mapping[str, Stored], start: int, size: int, path: str) -> None:
    """Refuse tensors that overlap, leave bytes out, or are beyond the end of the file."""
    end = start
    for name, stored in sorted(found.items(), key=lambda row: (row[1].begin, row[1].nbytes)):
        if stored.begin != end:
            raise OffloadError(
                f"'{path}' has a damaged header: the bytes of '{name}' overlap others or leave a "
                "gap."
            )
        end += stored.nbytes
    what = "has bytes that belong to no tensor" if end < size else ""
    if end > size:
        what = "is cut off"
    if what:
        raise OffloadError(
            f"'{path}' {what}: its tensors end at byte {end}, the file at {size}; copy or download "
            "it again."
        )
