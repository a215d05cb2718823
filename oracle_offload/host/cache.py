"""Folders in which this user's files are kept from one run to the next: ours, and the hub's."""

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


def hub_cache() -> Path:
    """Return the folder that the hub's libraries keep repositories in."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
