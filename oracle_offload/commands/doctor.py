"""The command `doctor`: one page of checks of the machine, its settings and what is installed."""

from __future__ import annotations

import argparse
import sys

from ..host.terminal import FileError, naming, show
from .exits import Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `doctor` takes."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write the page to FILE as well")
    parser.add_argument("--aitoolkit", metavar="PATH", help="examine an AI-Toolkit checkout too")
    parser.add_argument(
        "--disk", metavar="PATH", help="a file or folder whose disk is measured (the hub's cache)"
    )


def run(args: argparse.Namespace) -> Exit:
    """Run the command."""
    from ..diagnose.doctor import examine

    if sys.stderr.isatty():
        print("examining, which imports torch once ...", end="\r", file=sys.stderr, flush=True)
    report = examine(aitoolkit=args.aitoolkit, disk=args.disk)
    if sys.stderr.isatty():
        print(" " * 40, end="\r", file=sys.stderr, flush=True)
    try:
        if args.html:
            with naming("write", args.html), open(args.html, "w", encoding="utf-8") as file:
                file.write(report.to_html())
        with naming("write", "standard output"):
            if args.json:
                print(report.to_json(), end="", flush=True)
            else:
                show(sys.stdout, lambda width, color: report.to_text(width=width, colour=color))
    except FileError as problem:
        print(problem, file=sys.stderr)
        return Exit.ERROR
    return Exit.CHECK_FAILED if report.verdict == "bad" else Exit.OK
