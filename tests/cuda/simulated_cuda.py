"""What tests on "cuda" share where the card is simulated: its simulator, and its verdict.

PyTorch's CUDA build runs over a simulated driver here, in a simulator of its own: what runs on
"cpu" in the same process uses the package's. `oracle_offload` takes it for a real driver. After
every test it must have reported no race, and nothing may be page-locked any more.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import importlib.util
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import before_torch
import pytest
import skip_lists

SKIPS = Path(__file__).with_name("skips.txt")

_CONCURRENT_KERNELS = 7  # SIM_CONCURRENT_KERNELS


class _Library:
    """The control calls of the simulator inside libcuda.so.1, as `simulator.library` has them."""

    def __init__(self) -> None:
        from oracle_offload.engine.simulator_abi import SIGNATURES

        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.cuda_sim_control.restype = ctypes.c_void_p
        for name, (result, arguments) in SIGNATURES.items():
            address = self._driver.cuda_sim_control(name.encode())
            setattr(self, name, ctypes.CFUNCTYPE(result, *arguments)(address))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)  # a cu* call


@functools.cache
def simulator() -> ModuleType:
    """Return `oracle_offload.engine.simulator` once more, for the simulator that torch runs
    over.
    """
    package = importlib.util.find_spec("oracle_offload.engine.simulator")
    assert package is not None and package.origin is not None
    spec = importlib.util.spec_from_file_location(
        "oracle_offload.engine.simulator_of_cuda", package.origin
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    library = _Library()
    module.library = lambda: library  # type: ignore[attr-defined]
    return module


def verdict() -> list[str]:
    """Return what the simulator has reported since the last call."""
    found: list[str] = simulator().reports()
    simulator().clear_reports()
    # The engine tells a simulator alone which of its copies are meant to be pageable.
    return [text for text in found if not text.startswith("lint: pageable")]


def as_at_first() -> None:
    """Let an error go that a test has planted, and the schedule that it chose."""
    of_cuda = simulator()
    of_cuda.clear_faults()
    of_cuda.set_lock_quota(None)
    of_cuda.refuse_registration(0)


@pytest.fixture(autouse=True)
def bitsandbytes_computes_as_it_is_written() -> None:
    """Let no compiler be asked for its operators.

    It asks at each call and computes without where that fails, as here, for want of Triton: the
    values are the same, seconds later.
    """
    for each in vars(sys.modules.get("bitsandbytes.backends.default.ops", object)).values():
        if hasattr(each, "__wrapped__"):
            importlib.import_module("torch._dynamo.decorators").skip(each.__wrapped__)


@pytest.fixture(autouse=True)
def nothing_races_on_the_card() -> Generator[None, None, None]:
    """Fail the test in which the simulator of the card has reported something."""
    import torch

    if not before_torch.ON or not torch.cuda.is_available():
        yield
        return
    verdict()
    locked = simulator().live().registered_bytes
    schedule = simulator().get_schedule()
    yield
    as_at_first()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    simulator().set_schedule(*schedule)
    if simulator().live().registered_bytes > locked:
        gc.collect()
    found = verdict()
    assert not found, "\n\n".join(found[:3])
    left = simulator().live().registered_bytes - locked
    assert left <= 0, f"{left} bytes are page-locked after the test"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU all the same; of another device the list names no test."""
    if before_torch.ON and config.getoption("--device") in (None, "cuda"):
        skip_lists.skip_listed(
            [one for one in items if skip_lists.device_of(one) in (None, "cuda")], SKIPS
        )
