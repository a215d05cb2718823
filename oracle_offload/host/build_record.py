"""What this installation was built with, and why anything is not there.

Not called build_info.py: importing a submodule of that name would replace the public function
`oracle_offload.host.build_info` by the module.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from .. import __version__
from .schema import schema

RECORD = "_build_info.json"  # setup.py writes it next to the extension


def build_info() -> dict[str, Any]:
    """Return what was built, with what, and why the rest was not.

    Neither torch nor the extension is imported, so this works in any environment.

    Returns
    -------
    dict
        ``schema``, ``version`` (of the package); ``built`` (False where the C part is missing; then
        ``why_not`` says what to do); ``date``, ``platform``, ``compiler``, ``built_with_python``;
        ``core``, ``simulator`` and ``kernels``, each a dict with ``built`` and, where that is
        False, ``why_not``; ``python`` and ``torch``, the versions here and now (``torch`` is None
        where it is not installed); ``folder``, where the package is.

    Examples
    --------
    >>> from oracle_offload.host import build_info
    >>> build_info()["schema"]
    'oracle_offload/build-info/1'
    """
    folder = Path(__file__).resolve().parents[1]
    here = {
        "python": platform.python_version(),
        "torch": _installed("torch"),
        "folder": str(folder),
    }
    try:
        recorded = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {
            "schema": schema("build-info", 1),
            "version": __version__,
            "built": False,
            "why_not": f"{folder / RECORD} is missing: the C part was never built here; run "
            "`make build` in a source tree, or install the package with pip",
            **here,
        }
    return {**recorded, "built": True, **here}


def simulator_path() -> Path:
    """Return the path of the simulated CUDA driver that comes with the package.

    Raises
    ------
    FileNotFoundError
        When the package was not built; says what to do.
    """
    info = build_info()
    if not info["built"]:
        raise FileNotFoundError(info["why_not"])
    path = Path(info["folder"], info["simulator"]["file"])
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing though it was built; install the package again")
    return path


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
