"""Files and folders that nobody but this user can write.

Whoever else could write a library that is loaded would run code in this process; whoever else could
write or cut off a file that weights are read from would change what is computed, or end it; and a
link that another user has planted would lead what is written here to some file of this user's.

Root may do all of that anyway, so what is root's passes. On Windows nothing is asked: the cache
lies in the user's profile, which no other user can write, links are made by administrators, and the
operators in C++ do not exist there.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_ROOT = 0
_slashes = itertools.count(1)  # in a name, which needs one


class ForeignError(OSError):
    """A file or folder is another user's, or others can write it; the text says which and how."""


def check_folder(path: Path) -> None:
    """Refuse a folder that others could put something into.

    Raises
    ------
    ForeignError
        They could; or the folder is reached by a link of theirs.
    OSError
        There is none.
    """
    _check(os.lstat(path), path, is_link_fine=True)  # who may set a link decides where it leads
    _check(os.stat(path), path)


def make_folder(path: Path) -> None:
    """Make a folder, and those it lies in, for this user alone; one that is there is checked.

    Raises
    ------
    ForeignError
        As for `check_folder`.
    OSError
        It cannot be made.
    """
    _make(path)
    check_folder(path)


def _make(path: Path) -> None:
    if not path.parent.is_dir() and path.parent != path:
        _make(path.parent)
    try:
        os.mkdir(path, 0o700)
    except OSError:  # another thread was first; or a disk that cannot be written has one
        if not path.is_dir():
            raise


def open_own(path: Path, folder: int | None = None) -> int:
    """Return a descriptor of a file to read, whose content is by nobody else.

    Parameters
    ----------
    path : Path
        The file.
    folder : int, optional
        A descriptor of the folder it lies in, if that is open.

    Raises
    ------
    ForeignError
        Others could have written it, or it is a link or no file.
    OSError
        It cannot be read.
    """
    # What is asked is asked of what was opened, so that nobody can exchange it in between; and a
    # pipe in the place of a file does not make anybody wait.
    flags = os.O_RDONLY | _NO_LINKS | _BINARY | getattr(os, "O_NONBLOCK", 0)
    try:
        file = os.open(path if folder is None else path.name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise ForeignError(f"'{path}' is a link") from error
        raise
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ForeignError(f"'{path}' is no file")
        _check(status, path)
    except BaseException:
        os.close(file)
        raise
    return file


def create_own(path: str | os.PathLike[str], mode: int = 0o600) -> int:
    """Return a descriptor of a new file to write, in the place of what is there.

    Nothing is written through a link: what has that name goes, and a name that comes back is an
    error.

    Raises
    ------
    OSError
        It cannot be made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINKS | _BINARY
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, mode)


@contextlib.contextmanager
def own_name(path: Path) -> Iterator[str]:
    """Yield a name of a file of this user's, for who can only be given a name (on Linux).

    Whatever is renamed meanwhile, it leads to the file that was looked at: it begins at the folder
    that is open, into which nobody else can put another. No name comes twice in a process, whatever
    number the folder's descriptor has: Python and the system's loader give out again what they have
    loaded by the same name.

    Raises
    ------
    ForeignError
        Others could have written the file, or could replace it.
    OSError
        There is none.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check(os.fstat(folder), path.parent)
        os.close(open_own(path, folder))
        yield f"/proc/self/fd/{folder}{'/' * next(_slashes)}{path.name}"
    finally:
        os.close(folder)


def _check(status: os.stat_result, path: Path, is_link_fine: bool = False) -> None:
    if sys.platform == "win32":
        return
    me = os.geteuid()
    if status.st_uid not in (me, _ROOT):
        raise ForeignError(f"'{path}' belongs to user {status.st_uid}, this process to user {me}")
    is_link = is_link_fine and stat.S_ISLNK(status.st_mode)  # the mode of a link means nothing
    if not is_link and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ForeignError(
            f"'{path}' can be written by other users (mode {stat.S_IMODE(status.st_mode):o}): "
            "make it yours alone by chmod go-w"
        )
