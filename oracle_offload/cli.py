"""The command line: `oracle-offload` or `python -m oracle_offload`, one function per subcommand.

Exit codes: 0 ok (or fits), 1 error, 2 usage, 3 does not fit or a check failed. Nothing heavy is
imported before a subcommand is known, so `--help` answers at once and needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_CHECK_FAILED = 0, 1, 2, 3


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command; each subcommand sets `run(args) -> exit code`."""
    parser = argparse.ArgumentParser(
        prog="oracle-offload",
        description="Train PyTorch models whose weights do not fit the GPU.",
    )
    parser.add_argument("--version", action="version", version=f"oracle_offload {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    del commands
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return EXIT_OK
