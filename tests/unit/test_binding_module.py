"""The extension module itself: its constants, and that a second one leaves nothing behind."""

from __future__ import annotations

import _imp
import gc
import importlib.util
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType

import pytest
from binding_life import LIBRARY

import oracle_offload
from oracle_offload import _core, errors

ROOT = Path(__file__).resolve().parents[2]
KEPT = (errors.OffloadError, errors.driver_error, errors.no_room_error)


def another() -> ModuleType:
    """The extension once more, with a state of its own."""
    spec = importlib.util.find_spec("oracle_offload._core")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_constants_are_those_of_the_engine() -> None:
    kinds = _core.FORWARD, _core.RECOMPUTE, _core.BACKWARD, _core.RECORDED
    assert kinds == (0, 1, 2, 3)
    assert _core.ALIGNMENT >= 16 and _core.ALIGNMENT & (_core.ALIGNMENT - 1) == 0
    assert _core.BUILD.startswith("C11")


def test_the_header_the_engine_and_the_package_have_one_version() -> None:
    header = ROOT / "csrc/include/oracle_offload.h"
    numbers = dict(re.findall(r"#define OO_VERSION_(\w+) (\d+)", header.read_text()))
    assert list(numbers) == ["MAJOR", "MINOR", "PATCH"]
    assert ".".join(numbers.values()) == _core.VERSION == oracle_offload.__version__


def test_the_collector_sees_what_it_holds() -> None:
    held = gc.get_referents(_core)
    for what in (_core.Engine, _core.HostBuffer, *KEPT):
        assert any(one is what for one in held), what


def test_a_second_module_has_types_of_its_own_and_goes_with_them() -> None:
    another()
    gc.collect()
    before = [sys.getrefcount(what) for what in KEPT]
    of_the_first = _core.live()
    module = another()
    types = [weakref.ref(module.Engine), weakref.ref(module.HostBuffer)]
    assert module.Engine is not _core.Engine
    buffer = module.HostBuffer(4096)
    assert module.live()["buffers"] == 1 and module.live()["buffer_bytes"] == 4096
    assert _core.live() == of_the_first
    engine = module.Engine(LIBRARY, 0)
    assert engine.lock(buffer) is None and module.live()["engines"] == 1
    del buffer, engine
    assert module.live() == {"engines": 0, "buffers": 0, "buffer_bytes": 0}
    del module
    gc.collect()
    assert [kind() for kind in types] == [None, None]
    assert [sys.getrefcount(what) for what in KEPT] == before


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="they run in this process")
def test_what_lets_allocations_fail_passes_in_a_process_of_its_own() -> None:
    files = [
        str(Path(__file__).with_name(f"test_binding_{name}.py")) for name in ("calls", "module")
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            "-k",
            "without_memory",
            *files,
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed", done.stdout), done.stdout


@pytest.mark.usefixtures("alone")
def test_a_module_without_memory_for_what_it_holds_is_none_and_keeps_nothing() -> None:
    """Each allocation fails in turn."""
    testing = pytest.importorskip("_testcapi")
    spec = importlib.util.find_spec("oracle_offload._core")
    gc.collect()
    before = [sys.getrefcount(what) for what in KEPT]
    gc.disable()  # a collection that has no memory prints so, and no code can catch it
    try:
        for nth in range(5000):
            module = _imp.create_dynamic(spec)
            testing.set_nomemory(nth, nth + 1)
            try:
                _imp.exec_dynamic(module)
                done = True
            except MemoryError:
                done = False
            except SystemError as error:  # Python itself says nothing of a type's name
                assert "without setting an exception" in str(error)
                done = False
            finally:
                testing.remove_mem_hooks()
            if done:
                break
    finally:
        gc.enable()
    assert nth > 30, "it needs no memory"
    assert {*vars(module)} == {*vars(_core)} - {"__file__"}
    del module
    gc.collect()
    assert [sys.getrefcount(what) for what in KEPT] == before
