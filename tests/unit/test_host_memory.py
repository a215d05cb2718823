"""What the host has of memory, read from a recorded machine and from this one."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oracle_offload.host.files import NO_SIZE, parse_count
from oracle_offload.host.memory import (
    available_bytes,
    private_bytes,
    read_meminfo,
    total_bytes,
)

MIB = 1 << 20
LIMIT, USAGE, CACHE = 900 * MIB, 300 * MIB, 100 * MIB


def machine(tmp_path: Path, files: dict[str, str]) -> str:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return str(tmp_path)


FREE = {"proc/meminfo": "MemTotal: 4096000 kB\nMemAvailable: 1024000 kB\nHugePages_Free: 3\n"}
GROUP = {
    "proc/self/cgroup": "0::/job\n",
    "proc/self/mountinfo": "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "sys/fs/cgroup/job/memory.max": f"{LIMIT}\n",
    "sys/fs/cgroup/job/memory.current": f"{USAGE}\n",
    "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {CACHE}\n",
}


def test_what_is_available_is_what_the_system_says(tmp_path: Path) -> None:
    root = machine(tmp_path, FREE)
    assert available_bytes(root) == 1024000 << 10
    assert read_meminfo(root)["HugePages_Free"] == 3


def test_a_size_that_no_machine_has_is_none(tmp_path: Path) -> None:
    lines = [
        f"Most: {(NO_SIZE >> 10) - 1} kB",
        f"More: {NO_SIZE >> 10} kB",
        "Odd: many kB",
        "None:",
    ]
    root = machine(tmp_path, {"proc/meminfo": "\n".join(lines)})
    assert read_meminfo(root) == {"Most": NO_SIZE - 1024}


def test_a_limit_of_the_control_group_bounds_it(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, {**FREE, **GROUP})) == LIMIT - USAGE + CACHE


def test_a_group_with_more_room_than_the_machine_bounds_nothing(tmp_path: Path) -> None:
    wide = {**GROUP, "sys/fs/cgroup/job/memory.max": f"{1 << 40}\n"}
    assert available_bytes(machine(tmp_path, {**FREE, **wide})) == 1024000 << 10


def test_a_machine_that_does_not_tell(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, {})) is None


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (" 0\n", 0),
        (str(NO_SIZE - 1), NO_SIZE - 1),
        (str(NO_SIZE), None),
        ("9" * 20, None),
        ("max", None),
        ("-1", None),
        ("1 2", None),
        ("", None),
        (None, None),
    ],
)
def test_a_count_is_a_whole_number_that_a_machine_can_have(
    text: str | None, count: int | None
) -> None:
    assert parse_count(text) == count


MAPS = """
00001000-00003000 rw-p 00000000 00:00 0
00003000-00005000 r--p 00000000 08:01 77 /data/model file.safetensors
00007000-00009000 rw-p 00000000 00:00 0 [heap]
0000a000-0000b000 rw-s 00000000 00:05 12 /dev/shm/x
0000c000-0000d000
"""


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([(0x1000, 0x2000)], 0x1000),
        ([(0x2FF0, 0x3000), (0x3000, 0x3100)], 0x10),
        ([(0x4000, 0x4800)], 0),
        ([(0x7000, 0x9000), (0xA000, 0xA100)], 0x2000),
        ([(0x5000, 0x5100)], 0),
        ([(0x9000, 0x9100)], 0),  # behind the heap
        ([(0x8FFF, 0x9000)], 1),
        ([(0x10, 0x20), (0xC000, 0xC100), (0, 0)], 0),
        ([], 0),
    ],
)
def test_pages_of_files_do_not_come_back(
    tmp_path: Path, ranges: list[tuple[int, int]], expected: int
) -> None:
    root = machine(tmp_path, {"proc/self/maps": MAPS.strip()})
    assert private_bytes(ranges, root) == expected


def test_where_nothing_tells_none_come_back(tmp_path: Path) -> None:
    assert private_bytes([(0x1000, 0x2000)], machine(tmp_path, {})) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_on_this_machine(tmp_path: Path) -> None:
    import ctypes

    available = available_bytes()
    assert available is not None and 0 < available <= total_bytes()
    assert total_bytes() == read_meminfo()["MemTotal"]

    def place(pages: mmap.mmap) -> tuple[int, int]:
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        return start, start + len(pages)

    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), MIB, access=mmap.ACCESS_COPY)
    anonymous = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert private_bytes([place(anonymous)]) == MIB
    assert private_bytes([place(mapped)]) == 0
    assert os.sysconf("SC_PAGE_SIZE") == mmap.PAGESIZE


@pytest.mark.skipif(sys.platform == "win32", reason="imitates Windows")
def test_windows_is_asked_for_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(status: Any) -> int:
        assert status._obj.length == ctypes.sizeof(status._obj) == 64
        status._obj.total, status._obj.available = 300, 200
        return 1

    kernel32 = SimpleNamespace(GlobalMemoryStatusEx=answer)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    assert (total_bytes(), available_bytes()) == (300, 200)
    # What was recorded of a machine is read as it is, wherever.
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1 kB\n")
    assert available_bytes(str(tmp_path)) == 1024
