"""Virtual time of operators: torch runs them at once, the simulated device takes its time.

Kernel time is the larger of arithmetic and memory traffic, and a launch.
"""

from __future__ import annotations

import torch

from . import simulator


class SimulatedTime:
    """What operators cost a simulated device; on a real one nothing is ever charged.

    Parameters
    ----------
    device : simulator.Device or None
        Whose rates count; None for a real device.

    Attributes
    ----------
    pending_kernel_s : float
        Seconds of operators that are not queued yet; see `flush`.
    witnesses : int
        How many witnesses charge every operator, and so the managed ones too.
    """

    def __init__(self, device: simulator.Device | None) -> None:
        # Operations and bytes in a second at full rate, and seconds of a launch.
        self._flops, self._bytes, self._launch_s = float("inf"), float("inf"), 0.0
        self._link_bytes = float("inf")
        if device is not None:
            self._flops, self._bytes = device.tflops * 1e12, device.memory_gbps * 1e9
            self._link_bytes, self._launch_s = device.link_gbps * 1e9, device.launch_s
        self.pending_kernel_s = 0.0
        self.witnesses = 0

    def kernel_seconds(self, flops: float, moved_bytes: float, dtype: torch.dtype) -> float:
        """Return `operator_seconds` of a managed layer, 0 where a witness charges it already."""
        return 0.0 if self.witnesses else self.operator_seconds(flops, moved_bytes, dtype)

    def operator_seconds(self, flops: float, moved_bytes: float, dtype: torch.dtype) -> float:
        """Return the seconds that the simulated device takes for an operator.

        Parameters
        ----------
        flops : float
            Floating-point operations, as ``torch.utils.flop_counter`` counts them.
        moved_bytes : float
            Bytes of operands and result.
        dtype : torch.dtype
            Of the operands: the device's rate is that of bf16, wider types run at half.
        """
        if dtype.itemsize > 2:
            flops *= 2
        return max(flops / self._flops, moved_bytes / self._bytes) + self._launch_s

    def link_seconds(self, moved_bytes: float) -> float:
        """Return the seconds of a kernel that reads so many bytes of the host's memory."""
        return moved_bytes / self._link_bytes + self._launch_s

    def flush(self, stream: int) -> None:
        """Queue what is pending on `stream`.

        Called before anything whose order on the stream matters: an acquire, a release, a download.
        """
        if self.pending_kernel_s:
            seconds, self.pending_kernel_s = self.pending_kernel_s, 0.0
            simulator.launch(stream, (), (), seconds)
