"""The command `aitoolkit`: the drop-in into a checkout of AI-Toolkit, and out again."""

from __future__ import annotations

import argparse
import json
import sys

from ..aitoolkit import checkout
from ..host.schema import schema
from ..host.terminal import FileError, naming, printable
from .exits import Exit

SCHEMA = schema("aitoolkit-status", 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (
        ("install", "put our two files in the place of AI-Toolkit's, which are kept"),
        ("status", "say what is installed"),
        ("uninstall", "bring AI-Toolkit's own files back"),
        ("patch", "print what install changes, for git apply"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("path", metavar="PATH", help="the checkout: the folder of run.py")
        if name == "status":
            action.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Exit:
    """Run one action."""
    try:
        if args.action == "patch":
            with naming("write", "standard output"):
                sys.stdout.buffer.write(checkout.patch(args.path))
                sys.stdout.buffer.flush()
            return Exit.OK
        if args.action == "status":
            return _status(args.path, args.json)
        action = checkout.install if args.action == "install" else checkout.uninstall
        try:
            with naming("change", str(checkout.folder(args.path))):
                changed = action(args.path, _tell)
        except FileError:
            found = checkout.status(args.path)
            print(f"oracle_offload is {found}.{_again(found, args.path)}", file=sys.stderr)
            raise
        found = checkout.status(args.path)
        print(f"{changed} of {len(checkout.NAMES)} files changed; oracle_offload is {found}.")
        if changed and args.action == "install":
            print("Restart AI-Toolkit. Before 'git pull': uninstall, and install again after it.")
        return Exit.OK
    except (checkout.CheckoutError, FileError) as problem:
        print(problem, file=sys.stderr)
        return Exit.ERROR


def _status(path: str, as_json: bool) -> Exit:
    files = [
        (file, file.backup.name if file.backup.exists() else None)
        for file in reversed(checkout.read(path))
    ]
    found = checkout.status(path)
    if as_json:
        rows = [{"path": str(f.path), "is": f.describe(), "original": kept} for f, kept in files]
        print(json.dumps({"schema": SCHEMA, "status": found, "files": rows}, indent=2))
    else:
        for file, kept in files:
            told = f"; original kept as {kept}" if kept else ""
            _tell(f"{file.path}: {file.describe()}{told}")
        known = f"oracle_offload is {found}.{_again(found, path)}"
        print(known if found != "unknown" else "This version is not known.")
    return Exit.OK if found in ("installed", "not installed") else Exit.CHECK_FAILED


def _again(found: str, path: str) -> str:
    """Return what to do where one of two files is in its place; nothing elsewhere."""
    if found != "partly installed":
        return ""
    return (
        " The two files do not belong together: run 'oracle-offload aitoolkit install "
        f"{printable(path)}' again, or uninstall, as a user who may write there."
    )


def _tell(line: str) -> None:
    print(printable(line), flush=True)
