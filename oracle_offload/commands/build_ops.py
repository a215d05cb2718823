"""The command `build-ops`: the operators in C++, compiled for the torch that is installed."""

from __future__ import annotations

import argparse
import sys

from ..views.terminal import FileError, naming, put

DESCRIPTION = """\
Compile the operators in C++ over the headers of the torch that is installed, into the user's cache
folder. Models that are attached from then on use them: frozen linear layers then cost the host less
than half as much, with the same bits. Needs a C++ compiler and Python's headers.
ORACLE_OFFLOAD_OPS=off switches them off.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `build-ops` takes."""
    parser.add_argument("--force", action="store_true", help="build even if they are there")


def run(args: argparse.Namespace, done: int, error: int) -> int:
    """Run the command; return one of the two exit codes given."""
    from ..errors import OffloadError

    try:
        from ..ops.compiling import build
        from ..ops.load import operators
    except ModuleNotFoundError as problem:
        print(f"build-ops: {problem}; install torch first", file=sys.stderr)
        return error
    try:
        path, seconds = build(force=args.force)
        how = f"compiled in {seconds:.0f} s" if seconds else "they were there already"
        if operators() is None:
            how += "; not used: ORACLE_OFFLOAD_OPS=off, or they do not load"
        with naming("write", "standard output"):
            put(sys.stdout, f"{path}\n{how}\n")
    except (FileError, OffloadError, OSError, ValueError) as problem:
        print(f"build-ops: {problem}", file=sys.stderr)
        return error
    return done
