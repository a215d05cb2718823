"""Load the operators in C++, if they were built for this torch and are wanted."""

from __future__ import annotations

import functools
import importlib.util
import logging
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

from ..host.owned import own_name
from . import files

logger = logging.getLogger("oracle_offload")

_NAME = "oracle_offload._ops"


def path_here() -> Path:
    """Return where the operators for this torch are, or would be."""
    abi = str(int(torch._C._GLIBCXX_USE_CXX11_ABI))
    return files.builds() / files.file_name(torch.__version__, abi)


def operators() -> Any:
    """Return the extension module; None where the loan in Python is to be used."""
    return None if files.is_switched_off() else _load(path_here())


@functools.cache
def _load(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        with own_name(path) as name:
            spec = importlib.util.spec_from_loader(_NAME, ExtensionFileLoader(_NAME, name))
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
        module.__file__ = str(path)
        return module
    except (ImportError, RuntimeError, OSError) as error:
        logger.warning(
            "the operators in C++ cannot be used, the loan in Python is: %s. `%s --force` builds "
            "them anew.",
            error,
            files.COMMAND,
        )
        return None
