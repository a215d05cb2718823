"""Files and folders that only this user can write.

A user who could write or cut off a file that weights are read from would change what is computed,
or end it; and a link that another user has planted would lead what is written here to some file of
this user's.

Root may do all of that anyway, so what is root's passes. On Windows nothing is asked: the cache is
in the user's profile, which no other user can write, and links are made by administrators.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_ROOT = 0


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
    _check(os.lstat(path), path, is_link_fine=True)  # its owner decides where a link leads
    _check(os.stat(path), path)


def make_folder(path: Path) -> None:
    """Make a folder, and those it is in, for this user alone; one that is there is checked.

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


def open_own(path: Path) -> int:
    """Return a descriptor of a file to read, whose content is this user's alone.

    Parameters
    ----------
    path : Path
        The file.

    Raises
    ------
    ForeignError
        Others could have written it, or it is a link or no file.
    OSError
        It cannot be read.
    """
    # What is asked is asked of what was opened, so that it cannot be exchanged in between; and a
    # pipe in the place of a file does not block the caller.
    flags = os.O_RDONLY | _NO_LINKS | _BINARY | getattr(os, "O_NONBLOCK", 0)
    try:
        file = os.open(path, flags)
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
