"""The exceptions this package raises.

Running out of device memory stays `torch.OutOfMemoryError`, which training loops already catch.
"""

from __future__ import annotations

import functools
import sys
from typing import TypeVar

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class OffloadError(RuntimeError):
    """Base of every error of this package; says what was wrong, the value, and what to do."""


class DriverError(OffloadError):
    """A CUDA driver call failed.

    Attributes
    ----------
    call : str
        Name of the driver call, such as ``"cuMemHostRegister"``.
    code : int
        The ``CUresult``.
    name : str
        Name of the ``CUresult``, such as ``"CUDA_ERROR_OUT_OF_MEMORY"``.
    """

    def __init__(self, message: str, call: str = "", code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        return driver_error, (str(self), self.call, self.code, self.name)


class NoRoomError(OffloadError):
    """The arena on the device has no room for a layer; torch's out of memory as well.

    Exhausted host memory is Python's `MemoryError` instead: its remedies are others.
    """

    def __reduce__(self) -> tuple[object, ...]:
        return no_room_error, (str(self),)


def driver_error(message: str, call: str, code: int, name: str) -> DriverError:
    """Return the exception of a failed driver call; out of memory is torch's error as well."""
    kind = out_of_memory(DriverError) if code == _OUT_OF_MEMORY else DriverError
    return kind(message, call, code, name)


def no_room_error(message: str) -> NoRoomError:
    """Return the exception of an arena that has no room."""
    return out_of_memory(NoRoomError)(message)


_Ours = TypeVar("_Ours", bound=OffloadError)


def out_of_memory(ours: type[_Ours]) -> type[_Ours]:
    """Return the subclass of `ours` that is torch's out of memory too; `ours` without torch."""
    torch = sys.modules.get("torch")
    return ours if torch is None else _both(ours, torch.OutOfMemoryError)  # type: ignore[arg-type]


@functools.cache
def _both(ours: type[_Ours], theirs: type[Exception]) -> type[_Ours]:
    return type("OutOfMemoryError", (ours, theirs), {"__module__": __name__})


class StaleWeightsError(OffloadError):
    """A managed weight was changed between the forward that used it and its backward."""
