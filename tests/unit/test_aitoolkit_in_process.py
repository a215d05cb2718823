"""The drop-in for one process: whose names are exchanged, and whose are left."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from oracle_offload import OffloadError, aitoolkit
from oracle_offload.aitoolkit import in_process

OURS = Path(aitoolkit.__file__).parent
NAME = "toolkit.memory_management"


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout of which nothing is imported yet; its folder."""
    folder = tmp_path / "toolkit" / "memory_management"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder.parent / "memory_management_more.py").write_text("MemoryManager = object()\n")
    (folder / "__init__.py").write_text(
        "from .manager import MemoryManager\nfrom .manager_modules import sync_grad_transfers\n"
    )
    (folder / "manager.py").write_text("class MemoryManager: ...\n")
    (folder / "manager_modules.py").write_text(
        "_DEVICE_STATE = {}\nMemoryManager = object()\ndef sync_grad_transfers(): ...\n"
    )
    (folder / "extra.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = {name: module for name, module in sys.modules.items() if is_theirs(name)}
    for name in before:
        del sys.modules[name]
    yield folder
    for name in [name for name in sys.modules if is_theirs(name)]:
        del sys.modules[name]
    sys.modules.update(before)


def is_theirs(name: str) -> bool:
    return name.split(".")[0] == "toolkit"


def test_the_package_is_found_under_the_name_and_nothing_else_is(toolkit: Path) -> None:
    others = [*sys.meta_path]
    in_process.install()
    in_process.install()
    assert len(sys.meta_path) == len(others) + 1
    spec = importlib.util.find_spec(NAME)
    assert spec is not None and spec.origin == str(OURS / "__init__.py")
    more = importlib.import_module("toolkit.memory_management_more")
    assert Path(str(more.__file__)).parent == toolkit.parent
    package = importlib.import_module(NAME)
    assert package.MemoryManager is aitoolkit.MemoryManager
    manager = importlib.import_module(f"{NAME}.manager")
    assert manager.MemoryManager is aitoolkit.MemoryManager


def test_whoever_has_the_originals_names_gets_ours(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, modules, extra, more = (
        importlib.import_module(name)
        for name in (NAME, f"{NAME}.manager_modules", f"{NAME}.extra", f"{NAME}_more")
    )
    trainer: Any = ModuleType("trainer")
    trainer.memory_management, trainer.Manager = package, package.MemoryManager
    trainer.modules, trainer.extra, trainer.other = modules, extra, (other := object())
    trainer.sync, trainer.odd = package.sync_grad_transfers, modules.MemoryManager
    odd = modules.MemoryManager
    for name, found in (("trainer", trainer), ("nothing", None), ("slots", object())):
        monkeypatch.setitem(sys.modules, name, found)
    in_process.install()
    assert trainer.Manager is aitoolkit.MemoryManager
    assert trainer.sync is aitoolkit.sync_grad_transfers
    assert trainer.memory_management is sys.modules[NAME] is not package
    assert trainer.modules is sys.modules[f"{NAME}.manager_modules"] is not modules
    assert trainer.modules.RELEASE
    assert trainer.extra is extra, "ours has no such module"
    assert trainer.odd is odd, "nor such a name there"
    assert trainer.other is other and sys.modules[f"{NAME}_more"] is more
    assert not isinstance(more.MemoryManager, type)


def test_models_that_the_original_holds_are_not_taken_from_it(toolkit: Path) -> None:
    modules = importlib.import_module(f"{NAME}.manager_modules")
    original, others = sys.modules[NAME].MemoryManager, [*sys.meta_path]
    modules._DEVICE_STATE["cuda:0"] = SimpleNamespace()
    with pytest.raises(OffloadError, match=r"models attached already; call .*first line of run"):
        in_process.install()
    assert sys.meta_path == others and sys.modules[NAME].MemoryManager is original
    del modules._DEVICE_STATE  # of a version without that table
    in_process.install()
    assert len(sys.meta_path) == len(others) + 1
    assert sys.modules[NAME].MemoryManager is aitoolkit.MemoryManager


def test_names_of_the_package_are_told_and_no_others(toolkit: Path) -> None:
    assert set(aitoolkit.__all__) < set(dir(aitoolkit))
    assert aitoolkit.install is in_process.install
    assert aitoolkit.uninstall is in_process.uninstall
    with pytest.raises(AttributeError, match="has no attribute 'attach'"):
        aitoolkit.attach  # noqa: B018


def test_it_is_taken_back_with_all_names_and_no_other_finder(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: Any = ModuleType("trainer")
    monkeypatch.setitem(sys.modules, "trainer", trainer)
    others = [*sys.meta_path]
    in_process.uninstall()  # of nothing
    assert sys.meta_path == others
    in_process.install()
    package = importlib.import_module(NAME)
    trainer.Manager, trainer.package = package.MemoryManager, package
    assert trainer.Manager is aitoolkit.MemoryManager
    in_process.uninstall()
    assert sys.meta_path == others
    assert trainer.package is sys.modules[NAME] is not package
    assert Path(str(trainer.package.__file__)) == toolkit / "__init__.py"
    assert trainer.Manager is trainer.package.MemoryManager is not aitoolkit.MemoryManager
    assert aitoolkit.MemoryManager.__module__ == "oracle_offload.aitoolkit.memory_manager"
    in_process.install()
    assert trainer.Manager is aitoolkit.MemoryManager


def test_a_module_with_its_own_names_beside_the_exchanged_ones_keeps_them(
    toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original's package of some day has no `sync_grad_transfers`."""
    (toolkit / "__init__.py").write_text("from .manager import MemoryManager\n")
    package = importlib.import_module(NAME)
    trainer: Any = ModuleType("trainer")
    trainer.Manager, trainer.missing = package.MemoryManager, None
    monkeypatch.setitem(sys.modules, "trainer", trainer)
    in_process.install()
    assert trainer.Manager is aitoolkit.MemoryManager and trainer.missing is None
