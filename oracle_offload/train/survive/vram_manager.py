"""`VramManager`: the pieces of this package under the words that memory guides use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .adaptive_batch import whole_number
from .copies import CopyCounter
from .memory import Cleanup, cleanup
from .pressure import _ANY, PressureMonitor, Reading, Size, limit_of

_MB = 1 << 20
_GB = 1_000_000_000


class VramManager:
    """Memory of the device from step to step: status, copies of models, cleanups, checkpoints.

    Parameters
    ----------
    enabled : bool
        Whether `step` cleans up. Off by default: a cleanup frees nothing that is in use, and the
        next step asks for the same memory again.
    every : int
        Once enabled, clean up after so many steps.
    above : float, int or str
        Once enabled, also clean up above this: bytes, ``"12GB"``, or a share of the memory.
    warn, critical : float, int or str
        Thresholds of the device's memory.
    checkpoint : callable, optional
        Saves: called with the step after every `checkpoint_every` steps, and when memory becomes
        critical, once until it no longer is.
    checkpoint_every : int
        See `checkpoint`.
    device : torch.device, str or int, optional
        As for `PressureMonitor`.
    root : str
        The directory that holds `proc` and `sys`: "/" for the live system.

    Attributes
    ----------
    cleanups : int
        So far.
    monitor : PressureMonitor
        What it asks.

    Raises
    ------
    ValueError
        A threshold or a number of steps makes no sense.

    Examples
    --------
    >>> manager = VramManager()
    >>> manager.should_cleanup(10)
    False
    """

    def __init__(
        self,
        *,
        enabled: bool = False,
        every: int = 10,
        above: Size = 12 * _GB,
        warn: Size = 10 * _GB,
        critical: Size = 14 * _GB,
        checkpoint: Callable[[int], object] | None = None,
        checkpoint_every: int = 50,
        device: Any = None,
        root: str = "/",
    ) -> None:
        limit_of(above, _ANY)  # what makes no sense is refused now
        self.enabled = enabled
        self.cleanups = 0
        self._every = whole_number("every", every)
        self._above = above
        self._checkpoint = checkpoint
        self._checkpoint_every = whole_number("checkpoint_every", checkpoint_every)
        self._saved: int | None = None
        self._device = device
        self._copies = CopyCounter()
        self.monitor = PressureMonitor(
            warn=warn,
            critical=critical,
            device=device,
            checkpoint=self._save,
            root=root,
        )

    @property
    def last_vram_mb(self) -> float | None:
        """MiB of the device that were in use when it was asked last; None where it is not known."""
        used = self.monitor.device.used_bytes
        return None if used is None else used / _MB

    @property
    def total_copies(self) -> int:
        """Deep copies of models that were counted."""
        return self._copies.copies

    def track_copies(self, model: nn.Module) -> None:
        """Count deep copies of `model` from now on; see `track_copies` of this package."""
        self._copies.track(model)

    def record_model_copy(self, made: nn.Module) -> None:
        """Count a copy of a model that was made in a way that is not seen."""
        self._copies.record(made)

    def should_cleanup(self, step: int) -> bool:
        """Whether it is time for a cleanup: once enabled, every so often, or above the limit."""
        if not self.enabled:
            return False
        device: Reading = self.monitor.device
        is_above = (
            device.used_bytes is not None
            and device.total_bytes is not None
            and device.used_bytes > limit_of(self._above, device.total_bytes)
        )
        return is_above or (step > 0 and step % self._every == 0)

    def force_cleanup(self) -> Cleanup:
        """Clean up now; return what it brought, which is logged, too."""
        self.cleanups += 1
        return cleanup(self._device)

    def step(self, step: int) -> str:
        """Look at the memory, clean up and save where it is time; return the level."""
        level = self.monitor.step(step)
        if self.should_cleanup(step):
            self.force_cleanup()
        if step > 0 and step % self._checkpoint_every == 0:
            self._save(step)
        return level

    def _save(self, step: int) -> None:
        if self._checkpoint is not None and self._saved != step:
            self._checkpoint(step)
            self._saved = step

    def phase(self, name: str) -> str:
        """Begin a phase; see `PressureMonitor.phase`."""
        return self.monitor.phase(name)

    def status_string(self) -> str:
        """Return ``VRAM: 8192 MB | Copies: 35 | Cleanups: 5``; MB are 2^20 bytes, as in guides."""
        used = self.last_vram_mb
        shown = "unknown" if used is None else f"{used:.0f} MB"
        return f"VRAM: {shown} | Copies: {self.total_copies} | Cleanups: {self.cleanups}"

    def close(self) -> None:
        """Count copies no more."""
        self._copies.close()
