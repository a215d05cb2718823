"""The command `cache`: all that this package keeps on the disk of its user, and an end of it."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from ..host.cache import folder
from ..host.owned import check_folder
from ..host.processes import is_alive
from ..host.sizes import format_size, parse_size
from ..host.terminal import FileError, naming, put
from ..observe.live import pid_of
from .exits import Exit

DESCRIPTION = """\
Show what this package keeps in the user's cache folder, and how much. All of it is made again when
it is wanted. A model that is attached goes on when it is removed. What is being written, and the
heartbeats of running trainings, stay.
"""
# What there is, and the names of its files below the cache folder.
KINDS = (
    ("compressed weights", ("coded/*.coded", "coded/*.raw", "coded/.*")),
    ("batch sizes", ("sizes.json", "sizes.json.*.new")),
    ("times of steps", ("steps.json", "steps.json.*.new")),
    ("heartbeats", ("heartbeat-*",)),
)
_WHOLE = (".coded", ".raw", ".json")
_ABANDONED_S = 3600  # after its last write, a file is not being written any more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `cache` takes."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--clear", action="store_true", help="remove all of it")
    what.add_argument(
        "--keep",
        metavar="SIZE",
        help="remove the compressed weights that were not used longest, beyond SIZE",
    )


def run(args: argparse.Namespace) -> Exit:
    """Run the command."""
    said = ""
    try:
        if args.clear:
            said = f"removed {clear()}\n"
        elif args.keep is not None:
            from ..compress.store import user_store

            removed = user_store().trim(parse_size(args.keep, name="--keep"))
            said = f"removed {format_size(removed)}\n"
        with naming("write", "standard output"):
            put(sys.stdout, said + listing())
            sys.stdout.flush()
    except (FileError, OSError, ValueError) as problem:
        print(f"cache: {problem}", file=sys.stderr)
        return Exit.ERROR
    return Exit.OK


def listing() -> str:
    """Return what there is, a line for each kind."""
    rows = [(what, _told(files(names))) for what, names in KINDS]
    rows.append(("in all", _told([path for _, names in KINDS for path in files(names)])))
    return f"{folder()}\n" + "".join(f"  {what:20}{told}\n" for what, told in rows)


def files(names: tuple[str, ...]) -> list[Path]:
    """Return the files of one kind."""
    found = (path for name in names for path in folder().glob(name))
    return sorted(path for path in found if path.is_symlink() or path.is_file())


def clear() -> str:
    """Remove all but what is being written; return how much that was.

    Raises
    ------
    OSError
        Others can write a folder, and so decide what in it is removed.
    """
    removed = []
    for _, names in KINDS:
        for path in files(names):
            check_folder(folder())
            check_folder(path.parent)
            with contextlib.suppress(OSError):  # it has gone, or Windows keeps it: it is open
                size = path.lstat().st_size
                if not _is_in_use(path):
                    path.unlink()
                    removed.append(size)
    for name in {name.rpartition("/")[0] for _, names in KINDS for name in names} - {""}:
        with contextlib.suppress(OSError):  # there is none, or something is left in it
            (folder() / name).rmdir()
    return _amount(removed)


def _is_in_use(path: Path) -> bool:
    if path.name.startswith("heartbeat-"):
        pid = pid_of(path)
        return pid is not None and is_alive(pid) is not False
    is_whole = path.suffix in _WHOLE and not path.name.startswith(".")
    return not is_whole and time.time() - path.lstat().st_mtime < _ABANDONED_S


def _told(paths: list[Path]) -> str:
    sizes = []
    for path in paths:
        with contextlib.suppress(OSError):  # it has gone meanwhile
            sizes.append(path.lstat().st_size)
    return _amount(sizes)


def _amount(sizes: list[int]) -> str:
    return f"{format_size(sum(sizes))} in {len(sizes)} {'file' if len(sizes) == 1 else 'files'}"
