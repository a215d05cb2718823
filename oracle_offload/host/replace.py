"""A file replaced whole or not at all, through a kill, a full disk and a loss of power."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable
from typing import Any

from .owned import create_own
from .processes import is_alive

_ABANDONED_S = 3600.0
_NO_FOLDERS = (errno.EINVAL, errno.ENOTSUP)  # of file systems that sync files alone


class Sink:
    """What a writer writes to: every call reaches the system at once, none raises.

    A library in C may end the process for an exception that comes out of `write`, or raise another
    one. So what failed first is kept, Ctrl-C too, what comes after it is dropped, and
    `replace_file` raises it.

    Attributes
    ----------
    failure : BaseException or None
        The first.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self.failure: BaseException | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest and self.failure is None:
                written = os.write(self._file, rest)
                if not written:
                    raise OSError(errno.ENOSPC, f"{len(rest)} of {size} bytes were not written")
                rest = rest[written:]
        except BaseException as error:
            self.failure = error
        return size

    def flush(self) -> None:
        """Do nothing: nothing is held back."""


def replace_file(path: str | os.PathLike[str], write: Callable[[Sink], object]) -> None:
    """Let `write` write a file that takes the place of what is at `path`.

    It is written in the same folder, brought to the disk, and renamed; then the rename is brought
    to the disk. Whatever ends the process or the machine, the path has the old file or the new one.

    Parameters
    ----------
    path : str or path
        The file; its folder exists.
    write : callable
        Takes a `Sink`.

    Raises
    ------
    OSError
        The system refused it: the old file is as it was, and nothing is left next to it. Where it
        could not bring the rename to the disk, the new file is there already.
    """
    path = os.fspath(path)
    _remove_left_overs(path)
    beside = f"{path}.{os.getpid()}.new"
    try:
        file = create_own(beside, 0o644)
        try:
            sink = Sink(file)
            write(sink)
            if sink.failure is not None:
                raise sink.failure
            # Before the rename: else the new name could be that of bytes that never arrived.
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    sync_folder(os.path.dirname(path) or ".")


def _remove_left_overs(path: str) -> None:
    """Delete what killed processes have begun to write next to `path`.

    A process id may be another machine's, where folders are shared: so nothing is deleted that was
    written to in the last hour.
    """
    folder, name = os.path.split(path)
    with contextlib.suppress(OSError):  # a user who may not list or delete leaves them there
        for other in os.listdir(folder or "."):
            match = re.fullmatch(re.escape(name) + r"\.(\d{1,9})\.new", other)
            if match is None or is_alive(int(match[1])) is not False:
                continue
            found = os.path.join(folder, other)
            if time.time() - os.stat(found).st_mtime > _ABANDONED_S:
                os.unlink(found)


def sync_folder(path: str) -> None:
    """Bring to the disk which names a folder has; Windows does so by itself."""
    if os.name == "nt":
        return
    try:
        folder = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except PermissionError:  # one may write there, and not read which names it has
        return
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDERS:
            raise
    finally:
        os.close(folder)
