"""The folder that this user's files are kept in from one run to the next."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """Return where this user's files are: ``ORACLE_OFFLOAD_CACHE_DIR``, or the system's place."""
    named = os.environ.get("ORACLE_OFFLOAD_CACHE_DIR")
    if named:
        return Path(named)
    from platformdirs import user_cache_path

    return user_cache_path("oracle_offload", appauthor=False)
