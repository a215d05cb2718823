"""What is measured of a disk, and which file system a path is on."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oracle_offload.host import disk
from oracle_offload.host.disk import (
    READS,
    DiskSpeed,
    DiskView,
    Rate,
    Reads,
    measure,
    read_disk,
    remote_kind,
)
from oracle_offload.host.mounts import Mount, is_rotational, mount_of, parse_mounts

MIB = 1 << 20
LONG_S = 300.0  # so that bytes alone are the bound, however busy the disk is


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of 96 MiB that takes no room."""
    path = tmp_path / "model.safetensors"
    path.touch()
    os.truncate(path, 96 * MIB)
    return path


@pytest.fixture(params=["direct", "buffered"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "buffered":
        monkeypatch.setattr(disk, "_is_direct", lambda path: False)
    return request.param


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """Record where each read begins, how long it is, and which thread asks."""
    found: list[tuple[int, int, int]] = []
    opened = disk._opened

    class Watched:
        def __init__(self, real: Any) -> None:
            self._real, self.seek, self.fileno = real, real.seek, real.fileno

        def __enter__(self) -> Watched:
            return self

        def __exit__(self, *details: object) -> None:
            self._real.close()

        def readinto(self, block: Any) -> int:
            begin = self._real.tell()
            count: int = self._real.readinto(block)
            found.append((begin, count, threading.get_ident()))
            return count

    monkeypatch.setattr(disk, "_opened", lambda *args: Watched(opened(*args)))
    return found


def test_each_way_reads_a_part_of_its_own_once(
    file: Path, way: str, read: list[tuple[int, int, int]]
) -> None:
    speed = measure(file, most_s=LONG_S)
    blocks = [row for row in read if row[1] == READS[0].nbytes]  # a page is read to learn the way
    begins = [begin for begin, _, _ in blocks]
    assert len(set(begins)) == len(begins) == 3 * 8
    assert speed.nbytes == len(begins) * 4 * MIB and not any(begin % 4096 for begin in begins)
    assert [rate.reads for rate in speed.rates] == list(READS)
    assert all(rate.gbps > 0 for rate in speed.rates) and speed.best in speed.rates
    parts = [[begin for begin in begins if begin // (32 * MIB) == n] for n in range(3)]
    assert [len(part) for part in parts] == [8, 8, 8] and parts[0] == sorted(parts[0])
    alone = {thread for begin, _, thread in blocks if begin in parts[0]}
    assert len(alone) == 1


def test_no_more_is_read_than_was_allowed(file: Path, read: list[tuple[int, int, int]]) -> None:
    assert measure(file, most_bytes=30 * MIB, most_s=LONG_S).nbytes == 3 * 8 * MIB
    read.clear()
    assert measure(file, most_s=0.0).nbytes >= 3 * 4 * MIB  # what has begun counts
    assert len(read) <= 1 + sum(one.threads for one in READS)


def resident_pages(path: Path) -> int:
    """How many pages of a file are in the page cache."""
    size = path.stat().st_size
    with open(path, "r+b") as opened, mmap.mmap(opened.fileno(), size) as mapped:
        told = (ctypes.c_ubyte * (size // 4096))()
        held = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        address, length = ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(size)
        assert libc.mincore(address, length, told) == 0
        del held
    return sum(page & 1 for page in told)


def test_the_page_cache_has_nothing_of_the_file_afterwards(tmp_path: Path, way: str) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(MIB) * 64)
    with open(path, "r+b") as opened:
        os.fsync(opened.fileno())  # a page that is still to be written stays
    mount = mount_of(os.path.realpath(path))
    if mount is None or mount.is_memory or resident_pages(path) == 0:
        pytest.skip("the folder of tests is on no disk")
    assert measure(path, most_bytes=64 * MIB, most_s=LONG_S).nbytes == 60 * MIB
    assert resident_pages(path) == 0


def test_the_best_is_the_least_that_is_as_fast() -> None:
    def speed(*gbps: float) -> DiskSpeed:
        ways = [Reads(threads, size) for threads in (1, 4) for size in (1, 8)]
        rates = [Rate(*pair) for pair in zip(ways, gbps, strict=True)]
        return DiskSpeed(tuple(rates), True, 1, 1.0)

    assert speed(1.0, 1.0, 1.0, 1.0).best.reads == Reads(1, 1)
    assert speed(1.0, 2.0, 2.05, 2.1).best.reads == Reads(1, 8)
    assert speed(1.0, 1.9, 2.05, 2.1).best.reads == Reads(4, 1)


def test_a_file_that_says_nothing_is_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(FileNotFoundError):
        measure(tmp_path / "none")
    with pytest.raises(ValueError, match="has 100663296 bytes; 2 ways need more"):
        measure(file, [Reads(1, 64 * MIB), Reads(4, 64 * MIB)])
    os.truncate(file, 64 * MIB - 1)
    with pytest.raises(ValueError, match="has 67108863 bytes; 67108864 or more say"):
        measure(file)


def test_a_file_that_gets_shorter_meanwhile_is_told(
    file: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    run = disk._Pass.run

    def cut(self: Any, most_s: float) -> Any:
        os.truncate(file, 8 * MIB)
        return run(self, most_s)

    monkeypatch.setattr(disk._Pass, "run", cut)
    with pytest.raises(OSError, match=r"it ended at byte \d+ meanwhile: '.*model.safetensors'"):
        measure(file)


def test_a_disk_that_never_answers_ends_the_measurement(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = threading.Event()
    monkeypatch.setattr(disk, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(disk._Pass, "_blocks", lambda *_: gone.wait(60))
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer for 0 s"):
        measure(file, most_s=0.1)
    gone.set()
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("code", [22, 95])
def test_a_file_system_that_refuses_direct_reads_is_read_through_the_cache(
    file: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    opened = disk._opened

    def refuse(path: Any, direct: bool) -> Any:
        if direct:
            raise OSError(code, "refused")
        return opened(path, direct)

    monkeypatch.setattr(disk, "_opened", refuse)
    speed = measure(file, most_s=LONG_S)
    assert not speed.direct and speed.nbytes == 96 * MIB


def test_of_a_folder_the_largest_weights_are_read(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger, smaller = tmp_path / "a" / "b.safetensors", tmp_path / "small.safetensors"
    larger.parent.mkdir()
    for path, size in ((larger, 97), (smaller, 63), (tmp_path / "more.bin", 200)):
        path.touch()
        os.truncate(path, size * MIB)
    (tmp_path / "nowhere.safetensors").symlink_to(tmp_path / "none")
    found = read_disk(tmp_path)
    assert (found.path, found.remote, found.why) == (str(larger), "", "")
    assert found.speed is not None and found.speed.gbps == found.speed.best.gbps > 0
    assert read_disk(file).path == str(file)  # a file of any name is read where it is given
    assert read_disk(tmp_path / "more.bin").speed is not None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "a"))
    assert read_disk().path == str(larger)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    assert read_disk().path == str(larger)


def test_what_cannot_be_measured_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = str(tmp_path / "none")
    assert read_disk(none) == DiskView(none, why="No such file or directory")
    least = "no safetensors file of 64 MiB or more is there"
    assert read_disk(tmp_path) == DiskView(str(tmp_path), why=least)
    monkeypatch.setenv("HF_HUB_CACHE", none)
    monkeypatch.chdir(tmp_path)
    assert read_disk() == DiskView(none, why=f"{least} or in the current folder")
    small = tmp_path / "small"
    small.write_bytes(b"x")
    assert read_disk(small).why == f"'{small}' has 1 bytes; 67108864 or more say something"
    monkeypatch.setattr(disk, "hub_cache", refuse_home)
    assert read_disk() == DiskView("", why="Could not determine home directory.")


def refuse_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_the_disk_of_another_machine_is_named_and_not_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "mount_of", lambda path: Mount("/", "/", "nfs4", "server:/x"))
    monkeypatch.setattr(disk, "measure", lambda path: pytest.fail("it was read"))
    assert read_disk(file) == DiskView(str(file), "nfs4", why="another machine has the files")
    assert remote_kind(file) == "nfs4"
    monkeypatch.setattr(disk, "mount_of", lambda path: Mount("/", "/", "ext4", "/dev/sda1"))
    assert remote_kind(file) == ""


# --- The mount table ---------------------------------------------------------------------------

TABLE = """\
27 1 254:0 / / rw,relatime - ext4 /dev/nvme0n1p2 rw
30 27 0:30 / /home rw - nfs4 server:/export/home rw,vers=4.2
31 27 8:1 / /home/a/b\\040c rw - xfs /dev/sda1 rw
32 27 0:31 / /shm rw - tmpfs tmpfs rw
33 27 0:32 / /mnt rw - fuse.sshfs me@there: rw
34 27 253:0 / /mnt rw - ext4 /dev/mapper/vg-root rw
35 27 0:33 / /cut rw
"""


@pytest.fixture
def machine(tmp_path: Path) -> str:
    for name, text in {
        "proc/self/mountinfo": TABLE,
        "sys/block/nvme0n1/queue/rotational": "0\n",
        "sys/block/nvme0n1/nvme0n1p2/size": "1",
        "sys/block/sda/queue/rotational": "1\n",
        "sys/block/sda/sda1/size": "1",
        "sys/block/vda/queue/rotational": "1\n",
        "sys/block/sdb/size": "1",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("path", "kind", "source"),
    [
        ("/", "ext4", "/dev/nvme0n1p2"),
        ("/homestead/x", "ext4", "/dev/nvme0n1p2"),
        ("/home", "nfs4", "server:/export/home"),
        ("/home/a/b", "nfs4", "server:/export/home"),
        ("/home/a/b c/d", "xfs", "/dev/sda1"),
        ("/shm/x", "tmpfs", "tmpfs"),
        ("/mnt/x", "ext4", "/dev/mapper/vg-root"),  # mounted over the other
        ("/cut/x", "ext4", "/dev/nvme0n1p2"),
    ],
)
def test_a_path_is_on_the_innermost_mount(machine: str, path: str, kind: str, source: str) -> None:
    found = mount_of(path, machine)
    assert found is not None and (found.kind, found.source) == (kind, source)
    assert found.is_network == (kind == "nfs4") and found.is_memory == (kind == "tmpfs")


def test_where_the_mount_table_is_hidden_nothing_is_said(tmp_path: Path) -> None:
    assert mount_of("/home", str(tmp_path)) is None


def test_file_systems_of_other_machines_are_known() -> None:
    kinds = {mount.kind for mount in parse_mounts(TABLE) if mount.is_network}
    assert kinds == {"nfs4", "fuse.sshfs"}
    assert all(Mount("/", "/", kind).is_network for kind in ("nfs", "cifs", "smb3", "9p", "lustre"))
    assert not any(Mount("/", "/", kind).is_network for kind in ("ext4", "zfs", "overlay", "fuse"))


@pytest.mark.parametrize(
    ("source", "turns"),
    [
        ("/dev/nvme0n1p2", False),
        ("/dev/nvme0n1", False),
        ("/dev/sda1", True),
        ("/dev/sda", True),
        ("/dev/vda", None),  # a virtual one says so of any disk
        ("/dev/sdb", None),
        ("/dev/sdc1", None),
        ("overlay", None),
        ("sda", None),
    ],
)
def test_a_disk_with_platters_is_told_by_its_queue(
    machine: str, source: str, turns: bool | None
) -> None:
    assert is_rotational(Mount("/", "/", "ext4", source), machine) is turns
