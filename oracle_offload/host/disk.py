"""How fast a disk reads: an existing large file, cold, by one thread and by several.

Nothing is written. The page cache is passed by (O_DIRECT, FILE_FLAG_NO_BUFFERING) or, where a file
system refuses that, asked to drop what was read.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from .cache import hub_cache
from .mounts import mount_of
from .sizes import GIB, MIB

_PAGE_BYTES = 4096  # buffers, places and lengths of a direct read are multiples of it
_LEAST_FILE_BYTES = 64 * MIB  # of a shorter one the first reads are all there is
# A disk that has not answered for so long after its time is taken for gone.
_PATIENCE_S = 10.0
_MOST_NAMES = 20_000  # that are looked at for a file to read
_REMOTE = 4  # DRIVE_REMOTE of Windows
_CLOSE = 0.05  # two rates this near each other are one


@dataclass(frozen=True)
class Reads:
    """How a file is read: by so many threads at once, each asking for so many bytes at a time."""

    threads: int
    nbytes: int


@dataclass(frozen=True)
class Rate:
    """What a way to read has reached."""

    reads: Reads
    gbps: float


@dataclass(frozen=True)
class DiskSpeed:
    """What was measured of a disk.

    Attributes
    ----------
    rates : tuple of Rate
        In the order in which they were asked for.
    direct : bool
        Whether the page cache was passed by; else it was asked to drop what was read.
    nbytes : int
        That were read.
    seconds : float
        It took.
    """

    rates: tuple[Rate, ...]
    direct: bool
    nbytes: int
    seconds: float

    @property
    def gbps(self) -> float:
        """That of `best`."""
        return self.best.gbps

    @property
    def best(self) -> Rate:
        """The fastest; of those within 5% of it the one of fewest threads and shortest reads."""
        most = max(rate.gbps for rate in self.rates)
        near = [rate for rate in self.rates if rate.gbps >= (1 - _CLOSE) * most]
        return min(near, key=lambda rate: (rate.reads.threads, rate.reads.nbytes))


@dataclass(frozen=True)
class DiskView:
    """The disk that models are read from, or why it was not measured.

    Attributes
    ----------
    path : str
        The file that was read, or the folder that was looked into.
    remote : str
        The kind of file system whose files another machine has; empty for a disk of this one.
    speed : DiskSpeed or None
        None where it was not measured.
    why : str
        Why it was not.
    """

    path: str = ""
    remote: str = ""
    speed: DiskSpeed | None = None
    why: str = ""


READS = tuple(Reads(threads, 4 * MIB) for threads in (1, 4, 8))


def measure(
    path: str | os.PathLike[str],
    reads: Sequence[Reads] = READS,
    *,
    most_bytes: int = GIB,
    most_s: float = 2.0,
) -> DiskSpeed:
    """Return how fast the disk below `path` reads one block after the other.

    Each way to read has a part of the file of its own, so that nothing is read twice, and its share
    of `most_bytes` and `most_s`.

    Parameters
    ----------
    path : path-like
        A file of 64 MiB or more.
    reads : sequence of Reads
        The ways that are tried; lengths are multiples of 4096.
    most_bytes : int
        In all.
    most_s : float
        In all; a read that has begun is waited for.

    Raises
    ------
    OSError
        The file cannot be read; it has become shorter meanwhile; or the disk has not answered
        (TimeoutError).
    ValueError
        The file is too small to say anything.

    Examples
    --------
    >>> speed = measure("model.safetensors")  # doctest: +SKIP
    >>> speed.best  # doctest: +SKIP
    Rate(reads=Reads(threads=4, nbytes=4194304), gbps=6.8)
    """
    size = os.stat(path).st_size
    if size < _LEAST_FILE_BYTES:
        raise ValueError(f"'{path}' has {size} bytes; {_LEAST_FILE_BYTES} or more say something")
    direct = _is_direct(path)
    part = size // len(reads)
    begun, nbytes, rates = time.perf_counter(), 0, []
    for number, one in enumerate(reads):
        first = number * part // _PAGE_BYTES * _PAGE_BYTES
        length = min(part, most_bytes // len(reads)) // one.nbytes * one.nbytes
        if not length:
            raise ValueError(f"'{path}' has {size} bytes; {len(reads)} ways need more")
        _forget(path)
        done, seconds = _Pass(path, one, first, length, direct).run(most_s / len(reads))
        nbytes += done
        rates.append(Rate(one, done / seconds / 1e9))
    seconds = time.perf_counter() - begun
    _forget(path)  # what the system has read ahead
    return DiskSpeed(tuple(rates), direct, nbytes, seconds)


def remote_kind(path: str | os.PathLike[str]) -> str:
    """Return the kind of file system that `path` is on where another machine has its files.

    Empty for a disk of this machine, and where the mount table is hidden.
    """
    found = os.path.realpath(path)
    if sys.platform == "win32":
        import ctypes

        root = os.path.splitdrive(found)[0] + "\\"
        return "network drive" if ctypes.windll.kernel32.GetDriveTypeW(root) == _REMOTE else ""
    mount = mount_of(found)
    return mount.kind if mount is not None and mount.is_network else ""


def read_disk(where: str | os.PathLike[str] | None = None) -> DiskView:
    """Measure the disk of `where`, by reads of a large file that is there. Never raises.

    Parameters
    ----------
    where : path-like, optional
        A file; or a folder, of whose safetensors files the largest is read. By default the hub's
        cache, or the current folder where that has none.
    """
    looked = ""
    try:
        folders = (hub_cache(), Path()) if where is None else (Path(where),)
        looked = os.path.realpath(folders[0])
        if where is not None:
            os.stat(looked)
        file = next(filter(None, map(_largest, folders)), None)
        looked = looked if file is None else os.path.realpath(file)
        if remote := remote_kind(looked):
            return DiskView(looked, remote, why="another machine has the files")
        if file is None:
            too = " or in the current folder" if where is None else ""
            least = f"{_LEAST_FILE_BYTES // MIB} MiB"
            return DiskView(looked, why=f"no safetensors file of {least} or more is there{too}")
        return DiskView(looked, speed=measure(looked))
    except OSError as error:
        return DiskView(looked, why=error.strerror or str(error))
    except (RuntimeError, ValueError) as error:  # a user without a home; too small a file
        return DiskView(looked, why=str(error))


def _largest(where: Path) -> Path | None:
    """Return the largest safetensors file of a folder that is large enough; a file as it is."""
    if where.is_file():
        return where
    sizes, seen = {}, 0
    for folder, _, names in os.walk(where):
        seen += len(names)
        for name in names:
            if name.endswith(".safetensors"):
                with suppress(OSError):  # a link that leads nowhere
                    path = Path(folder, name)
                    sizes[path] = path.stat().st_size
        if seen > _MOST_NAMES:
            break
    found = max(sizes, key=sizes.__getitem__, default=None)
    return found if found and sizes[found] >= _LEAST_FILE_BYTES else None


def _is_direct(path: str | os.PathLike[str]) -> bool:
    """Whether the file system lets reads pass the page cache by."""
    if sys.platform != "win32" and not hasattr(os, "O_DIRECT"):
        return False
    try:
        with _opened(path, True) as file, mmap.mmap(-1, _PAGE_BYTES) as page:
            file.readinto(page)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _opened(path: str | os.PathLike[str], direct: bool) -> FileIO:
    if sys.platform == "win32" and direct:
        import ctypes
        import msvcrt

        read, share_all, existing, no_buffering = 0x80000000, 7, 3, 0x20000000
        handle = ctypes.windll.kernel32.CreateFileW(
            os.fspath(path), read, share_all, None, existing, no_buffering, None
        )
        if handle == -1:
            raise ctypes.WinError()
        descriptor = msvcrt.open_osfhandle(handle, os.O_RDONLY | os.O_BINARY)
    else:
        flags = getattr(os, "O_DIRECT", 0) if direct else getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, os.O_RDONLY | flags)
    return open(descriptor, "rb", buffering=0)


class _Pass:
    """Threads that read a part of a file once, block after block."""

    def __init__(
        self, path: str | os.PathLike[str], reads: Reads, first: int, length: int, direct: bool
    ) -> None:
        self._path, self._reads, self._direct = path, reads, direct
        self._next, self._end = first, first + length
        self._until = 0.0
        self._lock = threading.Lock()  # of what follows, and of `_next`
        self._done = 0
        self._finished = 0.0
        self._problem: BaseException | None = None

    def run(self, most_s: float) -> tuple[int, float]:
        """Return the bytes that were read and the seconds it took."""
        # Daemons: a thread that waits for a disk which is gone does not keep the process.
        threads = [
            threading.Thread(target=self._read, name="oracle_offload-disk", daemon=True)
            for _ in range(self._reads.threads)
        ]
        begun = time.perf_counter()
        self._until = begun + most_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self._until + _PATIENCE_S - time.perf_counter()))
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(
                errno.ETIMEDOUT, f"no answer for {_PATIENCE_S:.0f} s", os.fspath(self._path)
            )
        if self._problem is not None:
            raise self._problem
        return self._done, self._finished - begun

    def _read(self) -> None:
        try:
            with _opened(self._path, self._direct) as file, mmap.mmap(-1, self._reads.nbytes) as at:
                self._blocks(file, at)
        except BaseException as error:
            with self._lock:
                self._problem = error

    def _blocks(self, file: FileIO, block: mmap.mmap) -> None:
        while (begin := self._take()) is not None:
            file.seek(begin)
            count = file.readinto(block)
            if not self._direct:
                _drop(file, begin, self._reads.nbytes)
            if not count:
                name = os.fspath(self._path)
                raise OSError(errno.EIO, f"it ended at byte {begin} meanwhile", name)
            with self._lock:
                self._done += count
                self._finished = time.perf_counter()

    def _take(self) -> int | None:
        """Return where the next block begins; the first is read however late it is."""
        with self._lock:
            begin = self._next
            late = time.perf_counter() >= self._until and self._done > 0
            if begin >= self._end or late or self._problem is not None:
                return None
            self._next += self._reads.nbytes
            return begin


def _forget(path: str | os.PathLike[str]) -> None:
    with _opened(path, False) as file:
        _drop(file, 0, 0)


def _drop(file: FileIO, begin: int, nbytes: int) -> None:
    """Have the page cache forget a part of a file; 0 bytes are all that follow."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # advice: a file system may have none of it
            os.posix_fadvise(file.fileno(), begin, nbytes, os.POSIX_FADV_DONTNEED)
