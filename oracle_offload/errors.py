"""The exceptions this package raises.

Running out of device memory stays `torch.OutOfMemoryError`, which training loops already catch.
"""

from __future__ import annotations


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
        return type(self), (str(self), self.call, self.code, self.name)


class StaleWeightsError(OffloadError):
    """A managed weight was changed between the forward that used it and its backward."""
