"""The exit codes of the command line, and what each one says."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a command ends with."""

    OK = 0
    ERROR = 1
    USAGE = 2
    CHECK_FAILED = 3


SAID = {
    Exit.OK: "0 ok, or it fits",
    Exit.ERROR: "1 an error",
    Exit.USAGE: "2 arguments that make no sense",
    Exit.CHECK_FAILED: "3 it does not fit, a check failed, or nothing was found",
}
