"""The command line: `oracle-offload` or `python -m oracle_offload`, one module per subcommand.

Exit codes: 0 ok (or fits), 1 error, 2 usage, 3 does not fit or a check failed. Nothing heavy is
imported before a subcommand is known, so `--help` answers at once and needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from . import __version__
from .commands.exits import SAID, Exit

# What a command may end with.
_ALL = tuple(Exit)
_DONE = (Exit.OK, Exit.ERROR)
_CHECK = (*_DONE, Exit.CHECK_FAILED)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command; each subcommand sets `run(args) -> exit code`."""
    from .commands import aitoolkit, bench, cache, demo, doctor, explain, plan, report, watch

    table: tuple[tuple[str, ModuleType, str, tuple[Exit, ...]], ...] = (
        ("demo", demo, "train a Flux transformer offloaded and resident", _ALL),
        ("plan", plan, "will it fit, and how fast, before loading", _ALL),
        ("doctor", doctor, "check whether this machine is fit to train", _CHECK),
        ("explain", explain, "explain an out-of-memory error in a log", _CHECK),
        ("watch", watch, "show what a running training does now", _DONE),
        ("report", report, "show what a run has left, or compare two", _DONE),
        ("bench", bench, "what each option of a training saves and costs", _ALL),
        ("cache", cache, "what this package keeps on disk: how much, and remove it", _DONE),
        ("aitoolkit", aitoolkit, "offload layers in an AI-Toolkit checkout", _CHECK),
    )
    parser = argparse.ArgumentParser(
        prog="oracle-offload",
        description="Train PyTorch models whose weights do not fit the GPU.",
    )
    parser.add_argument("--version", action="version", version=f"oracle_offload {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command, told, codes in table:
        subparser = commands.add_parser(
            name,
            help=told,
            description=getattr(command, "DESCRIPTION", f"{told[0].upper()}{told[1:]}."),
            epilog="Exit code:\n"
            + "\n".join(f"  {SAID[code]}" for code in sorted({*codes, Exit.USAGE})),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has ended, and needs no more of it
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
