"""JSON objects, one a line, as logs and metrics files hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def records_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among `lines`, one a line; other lines are passed over."""
    import json  # code that explains an error may not have needed it yet

    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record
