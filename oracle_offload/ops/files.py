"""Where the source of the operators lies, and what was built of it; neither imports torch."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import sysconfig
from pathlib import Path
from typing import Any

from ..host.owned import own_name
from ..views.live import folder

SWITCH = "ORACLE_OFFLOAD_OPS"
COMMAND = "oracle-offload build-ops"
_PACKAGE = Path(__file__).resolve().parent
# In a source tree, and where setup.py puts it for a wheel.
_SOURCES = (
    *(f"torch/{name}" for name in ("ops.cpp", "backward.h", "convolution.h", "dispatcher.h")),
    *(f"torch/{name}" for name in ("forward.h", "linear.h", "loan.h", "objects.h")),
    *("python/handover.h", "include/oracle_offload.h"),
)
SHIPPED = "source"


def sources() -> list[Path]:
    """Return the source, and the headers that it includes."""
    tree = _PACKAGE.parents[1] / "csrc"
    in_tree = [tree / name for name in _SOURCES]
    if in_tree[0].is_file():
        return in_tree
    return [_PACKAGE / SHIPPED / path.name for path in in_tree]


def is_switched_off() -> bool:
    """Whether the user wants the loan in Python.

    Raises
    ------
    ValueError
        The switch has another value than ``auto`` and ``off``.
    """
    value = os.environ.get(SWITCH, "").strip().lower() or "auto"
    if value not in ("auto", "off"):
        raise ValueError(f"{SWITCH}={value!r}: use auto or off")
    return value == "off"


def builds() -> Path:
    """Return the folder of what was built."""
    return folder() / "ops"


def file_name(torch_version: str, abi: str) -> str:
    """Return what a build is called: whatever decides whether it can be used is in the name.

    Parameters
    ----------
    torch_version : str
        ``torch.__version__``.
    abi : str
        Which of the two C++ libraries torch was compiled for, "0" or "1".
    """
    return f"ops-{torch_version}-{sysconfig.get_config_var('SOABI')}-abi{abi}-{_source_hash()}.so"


@functools.cache
def _source_hash() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources())).hexdigest()[:16]


def installed_torch() -> str | None:
    """Return ``torch.__version__`` without importing torch; None where there is none.

    What the package index calls a version may lack the part behind the plus.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '(.+)'", text, re.MULTILINE)
    return None if version is None else version[1]


def record() -> dict[str, Any]:
    """Return what `build_info` says of the operators: ``built``, ``file``, ``why_not``."""
    version = installed_torch()
    if version is None:
        return {"built": False, "why_not": "torch is not installed"}
    found = [path for abi in "10" if (path := builds() / file_name(version, abi)).is_file()]
    if not found:
        return {
            "built": False,
            "why_not": f"not built for torch {version} and this Python; `{COMMAND}` does it",
        }
    said = {"built": True, "file": str(found[0])}
    if is_switched_off():
        return {**said, "why_not": f"{SWITCH}=off: not used"}
    try:
        with own_name(found[0]):
            return said
    except OSError as error:
        return {**said, "why_not": f"not used: {error}"}
