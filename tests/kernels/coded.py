"""Coded weights from the codec of csrc/core, as a library of its own: ctypes."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import c_build
import kernels
import numpy as np
from numpy.typing import NDArray

BF16, FP8, INT8 = 1, 2, 3
TIERS = 2
HEADER, BLOCK = 64, 1024


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = c_build.Build(c_build.optimised(), folder)
        objects = build.engine(str(kernels.build("off", folder).source))
        library = ctypes.CDLL(str(build.link(folder / "libengine.so", objects, ["-shared"])))
    library.oo_codec_best.restype = ctypes.c_void_p
    library.oo_codec_room.restype = ctypes.c_size_t
    library.oo_error_message.restype = ctypes.c_char_p
    return library


@dataclass(frozen=True)
class Chunk:
    """A chunk of coded weights, and what its header says."""

    data: NDArray[np.uint8]
    kind: int
    mode: int
    low_bits: int
    count: int
    tail_words: int
    palette: bytes


def encode(kind: int, weights: NDArray[np.uint8] | NDArray[np.uint16]) -> Chunk:
    """Code weights: uint16 for bf16, else uint8."""
    library = _library()
    room = np.zeros(library.oo_codec_room(kind, ctypes.c_size_t(weights.size)), np.uint8)
    nbytes = ctypes.c_size_t()
    status = library.oo_codec_encode(
        ctypes.c_void_p(library.oo_codec_best()),
        kind,
        ctypes.c_void_p(weights.ctypes.data),
        ctypes.c_size_t(weights.size),
        ctypes.c_void_p(room.ctypes.data),
        ctypes.byref(nbytes),
    )
    assert status == 0, library.oo_error_message()
    data = room[: nbytes.value].copy()
    words = data[:16].view(np.uint32)
    return Chunk(
        data, int(data[4]), int(data[5]), int(data[6]), int(words[2]), int(words[3]),
        data[16:32].tobytes(),
    )  # fmt: skip
