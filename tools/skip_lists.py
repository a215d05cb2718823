"""Files that list tests which cannot run somewhere: a pattern of their names, and why, on a line.

A line that names no test of a file which is there is an error, and so are lists that name more than
a quarter of all tests: a list must not hide more than it says.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def device_of(item: pytest.Item) -> object:
    """Return the device that a test is given; None where it is given none."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("device") if callspec else None


def skip_listed(items: Iterable[pytest.Item], path: Path) -> None:
    """Skip what the list names."""
    items = list(items)
    skipped: set[pytest.Item] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            pattern, reason = line.split(maxsplit=1)
            named = [item for item in items if fnmatch.fnmatch(item.nodeid.split("/")[-1], pattern)]
            file_is_there = any(item.path.name == pattern.split("::")[0] for item in items)
            if file_is_there and not named:
                raise pytest.UsageError(f"{path.name}: no test is named {pattern}")
            for item in named:
                item.add_marker(pytest.mark.skip(reason=reason))
            skipped.update(named)
    files = len({item.path for item in items})
    if files > 1 and len(skipped) > len(items) / 4:
        raise pytest.UsageError(f"{path.name} names {len(skipped)} of {len(items)} tests")
