"""The command `explain`: what it takes; `oracle_offload.diagnose.explain.command` runs it."""

from __future__ import annotations

import argparse
import sys

from ..host.terminal import FileError
from .exits import Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `explain` takes."""
    parser.add_argument("log", metavar="LOG", help="a log file, or - for standard input")
    parser.add_argument("--follow", action="store_true", help="wait for what is still written")
    parser.add_argument("--json", action="store_true", help="print JSON, one report per line")
    parser.add_argument("--all", action="store_true", help="list every fix, not the first three")
    parser.add_argument("--html", metavar="FILE", help="write the report to FILE as well")
    parser.add_argument("--history", metavar="FILE", help="a step history (JSON lines)")


def run(args: argparse.Namespace) -> Exit:
    """Run the command."""
    from ..diagnose.explain import command

    try:
        return Exit.OK if command.run(args) else Exit.CHECK_FAILED
    except FileError as problem:
        print(problem, file=sys.stderr)
        return Exit.ERROR
