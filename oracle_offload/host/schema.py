"""What is under ``"schema"`` in every JSON document of this project."""

from __future__ import annotations


def schema(name: str, version: int) -> str:
    """Return ``"oracle_offload/<name>/<version>"``.

    Parameters
    ----------
    name : str
        The kind of document: lower case, words joined by hyphens.
    version : int
        Goes up when a key is renamed or removed, or changes its meaning; not for a new key.
    """
    return f"oracle_offload/{name}/{version}"
