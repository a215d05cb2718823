"""The drop-in for one process: `toolkit.memory_management` is ours, and no file is touched."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import OffloadError

NAME = "toolkit.memory_management"
_HERE = Path(__file__).parent
_OURS = __name__.split(".")[0]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds this package under AI-Toolkit's name."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where the package is; its modules are found through it."""
        if fullname != NAME:
            return None
        return importlib.util.spec_from_file_location(
            NAME, _HERE / "__init__.py", submodule_search_locations=[str(_HERE)]
        )


def install() -> None:
    """Let ``toolkit.memory_management`` be this package, for this process.

    Call it before AI-Toolkit attaches a model; modules that have imported its names already get
    ours in their place. A second call does nothing.

    Raises
    ------
    OffloadError
        Models are attached by the original already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    before = _loaded()
    _refuse_attached(before)
    sys.meta_path.insert(0, _Finder())
    _exchange(before)


def uninstall() -> None:
    """Undo `install`; models that are attached stay so until they are detached."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        before = _loaded()
        sys.meta_path[:] = [other for other in sys.meta_path if not isinstance(other, _Finder)]
        _exchange(before)


def _loaded() -> dict[str, ModuleType]:
    """Return what is imported under AI-Toolkit's name, the package first."""
    return {
        name: module
        for name, module in sorted(sys.modules.items())
        if name == NAME or name.startswith(f"{NAME}.")
    }


def _refuse_attached(before: dict[str, ModuleType]) -> None:
    modules = before.get(f"{NAME}.manager_modules")
    if modules is not None and getattr(modules, "_DEVICE_STATE", None):
        raise OffloadError(
            "AI-Toolkit's own memory manager has models attached already; call "
            "oracle_offload.aitoolkit.install() before a model is loaded, as the first line of "
            "run.py."
        )


def _exchange(before: dict[str, ModuleType]) -> None:
    """Import again what is imported under the name; replace old names in modules by the new."""
    for name in before:
        del sys.modules[name]
    renamed: dict[int, Any] = {}
    for name, old in before.items():
        try:
            new = pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            continue  # the other package has no such module
        renamed[id(old)] = new
        for key in ("MemoryManager", "sync_grad_transfers"):
            if hasattr(old, key) and hasattr(new, key):
                renamed[id(getattr(old, key))] = getattr(new, key)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == _OURS:  # which has our names in any case
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):  # None has none
            if id(value) in renamed:
                setattr(module, key, renamed[id(value)])
