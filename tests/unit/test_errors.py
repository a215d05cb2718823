"""The exceptions of the package, without torch and with it."""

from __future__ import annotations

import pickle
import sys

import pytest

from oracle_offload.errors import (
    DriverError,
    NoRoomError,
    OffloadError,
    driver_error,
    no_room_error,
)

FIELDS = ("cuEventRecord: it failed", "cuEventRecord", 2, "CUDA_ERROR_OUT_OF_MEMORY")


def fields(error: DriverError) -> tuple[str, str, int, str]:
    return str(error), error.call, error.code, error.name


def test_a_driver_error_keeps_its_fields_through_pickle() -> None:
    error = DriverError("it failed", "cuInit", 100, "CUDA_ERROR_NO_DEVICE")
    assert isinstance(error, OffloadError) and isinstance(error, RuntimeError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is DriverError
    assert fields(again) == fields(error) == ("it failed", "cuInit", 100, "CUDA_ERROR_NO_DEVICE")
    assert fields(DriverError("it failed")) == ("it failed", "", 0, "")


def test_running_out_of_memory_is_torchs_error_as_well() -> None:
    torch = pytest.importorskip("torch")
    error = driver_error(*FIELDS)
    assert isinstance(error, DriverError) and isinstance(error, torch.OutOfMemoryError)
    assert fields(error) == FIELDS
    assert type(pickle.loads(pickle.dumps(error))) is type(error)
    assert type(error).__name__ == "OutOfMemoryError"
    assert type(error).__module__ == "oracle_offload.errors"
    other = driver_error("it failed", "cuInit", 3, "CUDA_ERROR_NOT_INITIALIZED")
    assert type(other) is DriverError


def test_without_torch_it_is_the_packages_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    error = driver_error(*FIELDS)
    assert type(error) is DriverError and fields(error) == FIELDS


def test_an_arena_without_room_is_torchs_error_where_torch_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    error = no_room_error("no room for a layer")
    assert isinstance(error, NoRoomError) and isinstance(error, torch.OutOfMemoryError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) == "no room for a layer"
    monkeypatch.delitem(sys.modules, "torch")
    assert type(no_room_error("no room")) is NoRoomError
