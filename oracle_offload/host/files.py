"""Reading small system files that may be absent, hidden or unreadable, and saying which it was."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

# A /proc or /sys file is a few KiB. The bound keeps a surprising one (a device node, a huge
# mount table) from being read whole.
_MAX_BYTES = 1 << 20
# No machine has 4 EiB of anything. A larger number is a fault, or means "no limit".
NO_SIZE = 1 << 62


@dataclass(frozen=True)
class Reading:
    """The text of a file, or why there is none.

    Attributes
    ----------
    text : str or None
        What the file held, undecodable bytes replaced; None when it could not be read.
    why : str
        Empty when `text` is given, else a reason for people ("/proc/meminfo: no such file").
    """

    text: str | None
    why: str = ""


def below(root: str, path: str) -> str:
    """Return the absolute `path` as seen under the tree at `root` ("/" is the live system)."""
    return path if root == "/" else os.path.join(root, path.lstrip("/"))


def read_text(root: str, path: str) -> Reading:
    """Read the system file `path` below `root`; never raises."""
    try:
        with open(below(root, path), "rb") as file:
            return Reading(file.read(_MAX_BYTES).decode("utf-8", "replace"))
    except FileNotFoundError:
        return Reading(None, f"{path}: no such file")
    except PermissionError:
        return Reading(None, f"{path}: permission denied")
    except (OSError, ValueError) as error:
        return Reading(None, f"{path}: {getattr(error, 'strerror', None) or error}")


def list_names(root: str, path: str) -> list[str]:
    """Return the sorted names in the directory `path` below `root`, none if it is unreadable."""
    try:
        return sorted(os.listdir(below(root, path)))
    except (OSError, ValueError):
        return []


def parse_count(text: str | None) -> int | None:
    """Return the size or count that `text` holds.

    None when it holds none: "max", "", garbage, a negative number, or one of `NO_SIZE` and more.
    """
    match = re.fullmatch(r"\s*([0-9]{1,19})\s*", text or "")
    return int(match[1]) if match and int(match[1]) < NO_SIZE else None
