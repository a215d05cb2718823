"""A progress bar for what may take long, shown only once it does."""

from __future__ import annotations

import time
from typing import Any


class DelayedBar:
    """A tqdm bar on standard error that appears after `delay_s`; short work shows nothing.

    tqdm is imported, and its monitor thread started, only when the bar appears.

    Parameters
    ----------
    total : int
        Bytes of the whole work.
    description : str
        Shown before the bar.
    delay_s : float
        Seconds after which it is shown.
    """

    def __init__(self, total: int, description: str, delay_s: float = 2.0) -> None:
        self._total = total
        self._description = description
        self._due = time.monotonic() + delay_s
        self._done = 0
        self._bar: Any = None

    def __enter__(self) -> DelayedBar:
        return self

    def __exit__(self, *details: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, nbytes: int) -> None:
        """Count `nbytes` more as done."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        elif time.monotonic() >= self._due:
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total,
                initial=self._done,
                desc=self._description,
                unit="B",
                unit_scale=True,
                leave=False,
            )
