"""Host memory for masters: what is filled in is what is there."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
from itertools import pairwise

import pytest

from oracle_offload import OffloadError, _core
from oracle_offload.engine import simulator

LIBRARY = str(simulator.library_path())
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


shared = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="on Linux alone")


@shared
def test_buffers_over_one_part_of_a_file_are_one_memory() -> None:
    file = os.memfd_create("of the test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, 3 * mmap.PAGESIZE)
        one = _core.HostBuffer(100, -1, file, mmap.PAGESIZE)
        other = _core.HostBuffer(nbytes=100, file=file, begin=mmap.PAGESIZE)
    finally:
        os.close(file)  # what is mapped stays
    memoryview(one)[3] = 7
    assert memoryview(other)[3] == 7
    other.protect(False)
    memoryview(one)[3] = 8
    assert memoryview(other)[3] == 8
    other.protect(True)
    memoryview(other)[3] = 9
    assert memoryview(one)[3] == 9


@shared
def test_memory_that_is_read_alone_ends_who_writes_it() -> None:
    code = (
        "import os\nfrom oracle_offload import _core\n"
        "file = os.memfd_create('of the test')\nos.ftruncate(file, 4096)\n"
        "buffer = _core.HostBuffer(4096, file=file)\nbuffer.protect(False)\n"
        "print(memoryview(buffer)[0], flush=True)\nmemoryview(buffer)[0] = 1\n"
    )
    # A sanitizer would make an exit of the signal.
    options = f"{os.environ.get('ASAN_OPTIONS', '')}:handle_segv=0"
    environment = {**os.environ, "ASAN_OPTIONS": options}
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert ended.returncode == -11 and ended.stdout == b"0\n"


@shared
def test_what_cannot_be_mapped_or_asked_is_an_error() -> None:
    with pytest.raises(OffloadError, match="does not map"):
        _core.HostBuffer(100, file=1 << 20)
    with pytest.raises(ValueError, match="begin"):
        _core.HostBuffer(100, file=0, begin=-1)


@pytest.mark.skipif(not os.access("/proc/self/pagemap", os.R_OK), reason="no file stays on disk")
def test_what_a_file_keeps_in_other_memory(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 64)
    with open(path, "rb") as file:
        shown = _core.HostBuffer(1, file=file.fileno(), path=os.fsencode(path))
    room = _core.HostBuffer(4096)
    assert shown.nbytes == 16384 and bytes(memoryview(shown)[:300]) == path.read_bytes()[:300]
    engine, other = _core.Engine(LIBRARY, 0), _core.HostBuffer(4096)
    with pytest.raises(ValueError, match="does not know the 4096 bytes"):
        engine.keep_in(room, [(shown.address, 4096, 0)])
    engine.lock(shown, 0)
    engine.keep_in(room, [(shown.address + 100, 4096, 0)])
    assert room.arrived == shown.arrived == 0
    for rows, why in (
        ([(shown.address + 4195, 1, 0)], "are kept already"),
        ([(shown.address, 50, 0), (shown.address + 40, 9, 60)], "are kept already"),
        ([(shown.address + 8192, 4096, 1)], "cannot be kept at 1 of other memory"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.keep_in(other, rows)
    engine.keep_in(other, [(shown.address, 50, 0)])  # of what failed nothing is kept
    engine.keep_in(room, [(shown.address + 8192, 4096, 0)])  # in place of what was
    engine.keep_in(other, [(shown.address + 100, 4096, 0)])
    for wrong in ((), (room,), (None, []), (room, ()), (room, [(1, 2)]), (room, [(1, 2, 3.5)])):
        with pytest.raises(TypeError):
            engine.keep_in(*wrong)
    with pytest.raises(ValueError, match="nbytes must be"):
        engine.keep_in(room, [(shown.address, -1, 0)])
    engine.keep_in(room, [])
    engine.unlock(shown)
    engine.close()
    shown.check(0, shown.nbytes)
    room.check(0, 4096)
    os.utime(path, ns=(0, 0))
    with pytest.raises(OffloadError, match="weights' was written since"):
        shown.check(0, 1)
    shown.fill(0, room.address, 4096)  # then its first page is this process's
    shown.check(0, 4096)
    with pytest.raises(ValueError, match="there are no 1 bytes at 16384"):
        shown.check(16384, 1)
    with pytest.raises(TypeError):
        _core.HostBuffer(1, path="text")
