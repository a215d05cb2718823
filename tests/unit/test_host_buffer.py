"""Host memory for masters: what is filled in is what is there."""

from __future__ import annotations

import ctypes
import random
from itertools import pairwise

from oracle_offload import _core

MIB = 1 << 20


def test_fills_of_any_size_and_order_arrive_whole() -> None:
    """Across the stretches in which large buffers choose their pages."""
    draw = random.Random(0)
    source = draw.randbytes(100 * MIB + 12345)
    kept = ctypes.create_string_buffer(source, len(source))
    address = ctypes.addressof(kept)
    buffer = _core.HostBuffer(len(source))
    cuts = sorted({0, len(source), 32 * MIB, *(draw.randrange(len(source)) for _ in range(9))})
    parts = list(pairwise(cuts))
    draw.shuffle(parts)
    for begin, end in parts:
        buffer.fill(begin, address + begin, end - begin)
    assert memoryview(buffer)[: len(source)] == source
    whole = _core.HostBuffer(len(source))
    whole.fill(0, address, len(source))
    assert memoryview(whole)[: len(source)] == source
