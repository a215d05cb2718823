"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from ...host.sizes import format_size
from ...host.terminal import printable

# From the worst to the best; "unknown" says nothing about the machine and comes last.
VERDICTS = ("bad", "warn", "ok", "unknown")


@dataclass(frozen=True)
class Finding:
    """The answer of one check.

    Attributes
    ----------
    name : str
        The check.
    verdict : str
        "ok"; "warn": works, but slower or with less room than it could; "bad": will fail or waste
        most of the machine; "unknown": could not be seen.
    value : str
        What was found.
    why : str
        What it means, or why it could not be seen.
    fix : str
        What to do about it; empty when there is nothing to do.
    facts : mapping
        The numbers behind `value`: sizes in bytes under keys ending in `_bytes`.
    """

    name: str
    verdict: str
    value: str
    why: str = ""
    fix: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # These have names of devices and files and values of variables in them: nothing that a
        # terminal would obey gets from the machine into a report.
        for name in ("name", "value", "why", "fix"):
            object.__setattr__(self, name, printable(getattr(self, name)))


def worst(*verdicts: str) -> str:
    """Return the most serious verdict; "unknown" only when nothing else is known."""
    return min(verdicts, key=VERDICTS.index, default="unknown")


# Bytes for people, as coarse as a verdict needs them.
size = partial(format_size, digits=1, small_digits=0, smallest="KiB")
