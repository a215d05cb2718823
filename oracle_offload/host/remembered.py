"""What this library keeps from one run to the next, by a key: rows of a JSON file of the user's."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import Any

from .cache import folder
from .owned import make_folder, open_own
from .replace import replace_file

logger = logging.getLogger("oracle_offload")

_MOST_BYTES, _MOST_ROWS = 1 << 20, 1000  # the oldest go


class Rows:
    """Rows of one file in the user's folder.

    Parameters
    ----------
    file : str
        Its name.
    schema : str
        Written into it; a file of another is as none.
    title : str
        Of the rows, in the file.
    what : str
        What they say, in words for a log.
    """

    def __init__(self, file: str, schema: str, title: str, what: str) -> None:
        self._file, self._schema, self._title, self._what = file, schema, title, what

    def get(self, key: str) -> dict[str, Any]:
        """Return the row of a key: empty where there is none, or the file is none of ours."""
        row = self._read().get(key)
        return row if isinstance(row, dict) else {}

    def put(self, key: str, row: dict[str, Any]) -> None:
        """Write a row; what the system refuses is logged, because no training fails for a file."""
        rows = self._read()
        rows.pop(key, None)
        rows[key] = row
        newest = dict(list(rows.items())[-_MOST_ROWS:])
        text = json.dumps({"schema": self._schema, self._title: newest}).encode()
        try:
            make_folder(folder())
            replace_file(folder() / self._file, lambda sink: sink.write(text))
        except Exception as error:
            logger.info("%s could not be remembered: %s", self._what, error)

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(Exception):
            with open(open_own(folder() / self._file), "rb") as file:
                found = json.loads(file.read(_MOST_BYTES))
            if found.get("schema") == self._schema and isinstance(found[self._title], dict):
                return dict(found[self._title])
        return {}
