"""The command `cache`: what compressed weights take of the disk, and an end of it."""

from __future__ import annotations

import argparse
import sys

from ..sizes import format_size, parse_size
from ..views.terminal import FileError, naming, put

DESCRIPTION = """\
attach(..., compress=...) keeps compressed weights on disk, and a copy of them as they are, which
their Parameters are read from. A model that is attached goes on when they are removed; the next
attach makes them anew.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `cache` takes."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--clear", action="store_true", help="remove all of it")
    what.add_argument(
        "--keep", metavar="SIZE", help="remove what was not used longest, beyond SIZE"
    )


def run(args: argparse.Namespace, done: int, error: int) -> int:
    """Run the command; return one of the two exit codes given."""
    from ..compress.store import user_store

    store = user_store()
    said = ""
    try:
        if args.clear or args.keep is not None:
            removed = store.trim(0 if args.clear else parse_size(args.keep, name="--keep"))
            said = f"removed {format_size(removed)}\n"
        left = sum(size for _, size, _ in store.files())
        said += f"{store.folder}: {format_size(left)} of compressed weights\n"
        with naming("write", "standard output"):
            put(sys.stdout, said)
    except (FileError, ValueError) as problem:
        print(problem, file=sys.stderr)
        return error
    return done
