"""The exceptions this package raises.

Running out of device memory stays `torch.OutOfMemoryError`, which training loops already catch.
"""

from __future__ import annotations

import functools
import sys

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


def driver_error(message: str, call: str, code: int, name: str) -> DriverError:
    """Return the exception of a failed driver call; out of memory is torch's error as well."""
    torch = sys.modules.get("torch")
    if code == _OUT_OF_MEMORY and torch is not None:
        return _out_of_memory(torch.OutOfMemoryError)(message, call, code, name)
    return DriverError(message, call, code, name)


@functools.cache
def _out_of_memory(theirs: type[Exception]) -> type[DriverError]:
    return type("OutOfMemoryError", (DriverError, theirs), {"__module__": __name__})


class StaleWeightsError(OffloadError):
    """A managed weight was changed between the forward that used it and its backward."""
