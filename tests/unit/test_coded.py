"""Whole tensors through the codec from Python: the same bits, and damage is an error."""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
import threading
from pathlib import Path

import pytest

from oracle_offload import _core

KINDS = {"bf16": (_core.BF16, 2), "fp8": (_core.FP8, 1), "int8": (_core.INT8, 1)}


def drawn(count: int, width: int, seed: int = 1) -> bytearray:
    """Weights whose upper bytes have a pattern."""
    source = random.Random(seed)
    low = source.randbytes(count)
    high = bytes(source.choices((0x3C, 0xBC, 0x3D, 0xBB, 0x3A), (40, 35, 15, 8, 2), k=count))
    if width == 1:
        return bytearray(high)
    return bytearray(byte for pair in zip(low, high, strict=True) for byte in pair)


def address_of(memory: bytearray | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def encoded(kind: int, weights: bytearray, count: int, threads: int = 2) -> bytearray:
    room = _core.coded_room(kind, count)
    coded = bytearray(room)
    nbytes = _core.encode(kind, address_of(coded), room, threads, address_of(weights), count)
    return coded[:nbytes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 1025, 300_000])
def test_weights_come_back_bit_for_bit(kind: str, count: int) -> None:
    number, width = KINDS[kind]
    weights = drawn(count, width)
    coded = encoded(number, weights, count)
    back = bytearray(len(weights))
    arguments = (number, address_of(coded), len(coded), 2)
    _core.decode(*arguments, address_of(back), count)
    assert back == weights
    _core.compare_coded(*arguments, address_of(weights), count)
    _core.check_coded(*arguments, 0, count)
    if count > 2000:
        assert len(coded) < 0.8 * len(weights)


def test_damage_is_told_with_its_place() -> None:
    weights = drawn(5000, 2)
    coded = encoded(_core.BF16, weights, 5000)
    coded[700] ^= 4
    back = bytearray(len(weights))
    arguments = (_core.BF16, address_of(coded), len(coded), 1)
    for call in (_core.decode, _core.compare_coded, _core.check_coded):
        with pytest.raises(ValueError, match=rf"checksum .* \(chunk at byte 0 of {len(coded)}\)"):
            call(*arguments, address_of(back), 5000)


def test_other_weights_are_told() -> None:
    weights = drawn(5000, 2)
    coded = encoded(_core.BF16, weights, 5000)
    weights[9999] ^= 1
    with pytest.raises(ValueError, match="other weights"):
        _core.compare_coded(_core.BF16, address_of(coded), len(coded), 1, address_of(weights), 5000)


def test_too_little_room_is_refused() -> None:
    weights, coded = drawn(5000, 2), bytearray(9000)
    with pytest.raises(ValueError, match=r"nbytes is 9000, but 5000 weights may need 10064"):
        _core.encode(_core.BF16, address_of(coded), 9000, 1, address_of(weights), 5000)


@pytest.mark.parametrize("kind", [0, 4])
def test_unknown_kinds_are_refused(kind: int) -> None:
    with pytest.raises(ValueError, match=f"kind must be from 1 to 3, not {kind}"):
        _core.coded_room(kind, 1)


def test_other_threads_run_while_weights_are_encoded() -> None:
    count = 1 << 21
    weights = drawn(1 << 16, 2) * 32
    ticks = 0
    done = threading.Event()

    def encode() -> None:
        for _ in range(100):  # on a busy machine one may be over before this thread goes on
            encoded(_core.BF16, weights, count, threads=1)
            if ticks > 2:
                break
        done.set()

    thread = threading.Thread(target=encode)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(100)  # so that only who gives the interpreter up lets others run
    try:
        thread.start()
        while not done.is_set():
            ticks += 1
            done.wait(0.0001)
    finally:
        sys.setswitchinterval(switch)
        thread.join()
    assert ticks > 2


def test_a_hash_reads_every_byte() -> None:
    memory = bytearray(100_003)
    seen = {_core.fingerprint(address_of(memory), len(memory))}
    for at in (0, 50_001, 100_002):
        memory[at] = 1
        seen.add(_core.fingerprint(address_of(memory), len(memory)))
    assert len(seen) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells")
def test_a_written_page_of_a_private_mapping_is_told(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    page, pages = mmap.PAGESIZE, 5000  # more than are asked of the system at once
    path.write_bytes(bytes(page) * pages)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = address_of(memory)
    assert _core.pages_written(start, len(memory)) is False  # nothing was read yet
    assert not any(memory[::page])
    assert _core.pages_written(start, len(memory)) is False  # reading is not writing
    for at in (0, 4000, pages - 1):
        memory[at * page + 17] = 0  # what was there: the page is a copy all the same
        assert _core.pages_written(start + at * page, page) is True
        assert _core.pages_written(start + at * page + 17, 1) is True
        assert _core.pages_written(start, len(memory)) is True
    assert _core.pages_written(start + page, 3999 * page) is False
    assert path.read_bytes() == bytes(page) * pages


@pytest.mark.skipif(sys.platform != "linux", reason="no other system does")
def test_pages_show_a_file_and_become_memory_of_their_own(tmp_path: Path) -> None:
    path, page = tmp_path / "weights", mmap.PAGESIZE
    content = random.Random(2).randbytes(3 * page)
    path.write_bytes(content)
    memory = mmap.mmap(-1, 2 * page)
    start = address_of(memory)
    with path.open("rb") as file:
        assert _core.pages_show(start, 2 * page, file.fileno(), page) is None
        with pytest.raises(OSError, match="Invalid argument"):
            _core.pages_show(start, page, file.fileno(), page + 1)
        closed = file.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        _core.pages_show(start, page, closed, 0)
    assert memory[:] == content[page:]
    memory[5] ^= 255
    shown = memory[:]
    assert path.read_bytes() == content, "what is written stays here"
    assert _core.pages_own(start, 2 * page) is True
    path.write_bytes(bytes(3 * page))
    assert memory[:] == shown, "it is the file's no more"
    assert _core.pages_own(start, 2**62) is False
    assert memory[:] == shown


# Of each function: its arguments, and what each may be.
NUMBER, ADDRESS, BYTES = (0, 2**64 - 1), (0, 2**64 - 1), (0, 2**63 - 1)
CODED = {
    "kind": (1, 3),
    "coded": ADDRESS,
    "nbytes": BYTES,
    "threads": NUMBER,
    "weights": ADDRESS,
    "count": (1, 2**61 - 1),
}
MEMORY = {"address": ADDRESS, "nbytes": BYTES}
FUNCTIONS = {
    "coded_room": {"kind": (1, 3), "count": (1, 2**61 - 1)},
    **dict.fromkeys(("encode", "decode", "compare_coded", "check_coded"), CODED),
    **dict.fromkeys(("fingerprint", "pages_written", "pages_own"), MEMORY),
    "pages_show": {**MEMORY, "descriptor": (0, 2**31 - 1), "begin": BYTES},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_of_memory_does_not_take_is_refused(name: str) -> None:
    function, takes = getattr(_core, name), FUNCTIONS[name]
    right = [least for least, _ in takes.values()]
    for given in (right[:-1], [*right, 0]):
        with pytest.raises(TypeError) as raised:
            function(*given)
        assert str(raised.value) == f"{name}() takes {len(takes)} arguments, not {len(given)}"
    for nth, (argument, (least, most)) in enumerate(takes.items()):
        for value in (least - 1, most + 1, 2**200):
            with pytest.raises(ValueError) as raised:
                function(*right[:nth], value, *right[nth + 1 :])
            assert str(raised.value) == (
                f"{name}(): {argument} must be from {least} to {most}, not {value}"
            )
        with pytest.raises(TypeError):
            function(*right[:nth], "8", *right[nth + 1 :])


def test_as_much_room_as_may_be_needed_is_enough_and_any_number_of_threads() -> None:
    weights = drawn(5000, 2)
    room = _core.coded_room(_core.BF16, 5000)
    assert room == 10064
    coded = bytearray(room)
    source, target = address_of(weights), address_of(coded)
    made = {
        (_core.encode(_core.BF16, target, room, threads, source, 5000), bytes(coded))
        for threads in (0, 1, 3, 2**32, 2**64 - 1)
    }
    assert len(made) == 1, "the bytes do not depend on the threads"
