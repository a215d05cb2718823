"""Coded weights on disk, from one attach to the next: a folder of files named after their content.

Of a tensor there may be two: the coded weights (``.coded``), and the weights as they are
(``.raw``), which a Parameter is read from. Those of a model that stays in its files are in one for
each of these: see `coded_files`. A file appears as a whole or not at all. One of a tensor is
compared with the weights before it is used: what is damaged is thrown away and made again.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from .._core import HostBuffer
from ..disk.origin import map_private
from ..host.cache import folder
from ..host.owned import ForeignError, check_folder, create_own, make_folder, open_own
from ..host.sizes import GIB, format_size

logger = logging.getLogger("oracle_offload")

CODED, RAW = ".coded", ".raw"
# What the names of files begin with that models are read from all the time: they are noticed to be
# written by the time of that.
OF_FILE = "file-"
SPARED_BYTES = GIB  # of the disk, for everything else
_ABANDONED_S = 3600  # after its last write, a file is not being written any more


class Store:
    """The folder.

    Parameters
    ----------
    folder : Path
        Made when the first file is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Return where the file of that name is, or would be."""
        return self.folder / name

    def read(self, name: str) -> HostBuffer | None:
        """Return the bytes of a file; None where there is none of this user's."""
        try:
            with open(open_own(self.path(name)), "rb", buffering=0) as file:
                nbytes = os.fstat(file.fileno()).st_size
                if not nbytes:
                    return None
                buffer = HostBuffer(nbytes)
                left = memoryview(buffer).cast("B")
                while left:
                    count = file.readinto(left)
                    if not count:
                        return None  # it was cut off meanwhile
                    left = left[count:]
                self._note_use(name)
                return buffer
        except (FileNotFoundError, ForeignError):
            return None

    def _note_use(self, name: str) -> None:
        with contextlib.suppress(OSError):  # of another user, say
            os.utime(self.path(name))

    def map(self, name: str, nbytes: int) -> mmap.mmap | None:
        """Return a file of so many bytes, privately mapped; None where there is none."""
        with (
            contextlib.suppress(FileNotFoundError, ForeignError),
            open(open_own(self.path(name)), "rb") as file,
        ):
            if os.fstat(file.fileno()).st_size == nbytes:
                self._note_use(name)
                return map_private(file.fileno(), 0, nbytes)[0]
        return None

    def write(self, name: str, content: memoryview) -> None:
        """Write a file.

        Raises
        ------
        OSError
            There is no room, or no right to write there.
        """
        os.close(self._write(name, content))

    def write_mapped(self, name: str, content: memoryview) -> mmap.mmap:
        """Write a file and return it mapped: it may be trimmed by then; see `write`."""
        nbytes = content.nbytes
        descriptor = self._write(name, content)
        try:
            return map_private(descriptor, 0, nbytes)[0]
        finally:
            os.close(descriptor)

    def _write(self, name: str, content: memoryview) -> int:
        """Write a file and return its open descriptor."""
        with contextlib.ExitStack() as failing:
            with self.making(name, content.nbytes) as descriptor:
                kept = os.dup(descriptor)
                failing.callback(os.close, kept)
                while content:
                    content = content[os.write(descriptor, content) :]
            failing.pop_all()
        return kept

    @contextlib.contextmanager
    def making(self, name: str, nbytes: int) -> Iterator[int]:
        """Yield the descriptor of a file to write, which has its name once the block has ended.

        Raises
        ------
        OSError
            There is no room for `nbytes`, or no right to write there.
        """
        make_folder(self.folder)
        free = shutil.disk_usage(self.folder).free
        if free < nbytes + SPARED_BYTES:
            raise OSError(
                f"the disk has {format_size(free)} left, and this takes up to "
                f"{format_size(nbytes)} and leaves {format_size(SPARED_BYTES)} to others"
            )
        made = self.path(f".{name}-{secrets.token_hex(6)}")
        descriptor = create_own(made)
        try:
            yield descriptor
            os.replace(made, self.path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(made)
            raise
        finally:
            os.close(descriptor)

    def drop(self, name: str, why: object) -> None:
        """Throw a damaged file away."""
        logger.warning("'%s' is damaged (%s); it is made again.", self.path(name), why)
        with contextlib.suppress(OSError):  # Windows keeps a file that is open
            os.unlink(self.path(name))

    def files(self) -> list[tuple[float, int, Path]]:
        """Return when each file was used last, its bytes, and where it is; the oldest first.

        What was left half written counts, too.
        """
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                if path.suffix in (CODED, RAW) or path.name.startswith("."):
                    with contextlib.suppress(OSError):
                        status = path.lstat()
                        of_file = path.name.startswith(OF_FILE)
                        used_s = status.st_atime if of_file else status.st_mtime
                        found.append((used_s, status.st_size, path))
        return sorted(found)

    def trim(self, most: int) -> int:
        """Remove files, those that were not used longest, until `most` bytes are left.

        A model that is attached goes on: the system keeps what it reads until it ends. So does one
        that is being attached: what it has not written whole yet stays.

        Returns
        -------
        int
            The bytes that were removed.

        Raises
        ------
        OSError
            Others can write the folder, and so decide what in it is removed.
        """
        with contextlib.suppress(FileNotFoundError):
            check_folder(self.folder)
        files = self.files()
        left = sum(size for _, size, _ in files)
        removed = 0
        for used_s, size, path in files:
            if left - removed <= most:
                break
            if path.name.startswith(".") and time.time() - used_s < _ABANDONED_S:
                continue
            with contextlib.suppress(OSError):  # Windows keeps a file that is open
                os.unlink(path)
                removed += size
        return removed


def user_store() -> Store:
    """Return the cache of this user."""
    return Store(folder() / "coded")
