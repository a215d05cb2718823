"""What moved for one attached model, step by step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..host.sizes import format_size

logger = logging.getLogger("oracle_offload")


def stalls_of(counters: Mapping[str, Any]) -> tuple[float, float]:
    """Return how many waits for a copy were stalls, and their seconds, in all.

    Parameters
    ----------
    counters : mapping
        ``waits``, ``timed_waits``, ``stalls`` and ``stall_seconds`` of the engine, or what they
        grew by. Of the waits a sample is timed; what is returned is in proportion.
    """
    if not counters["timed_waits"]:
        return 0.0, 0.0
    share = counters["waits"] / counters["timed_waits"]
    return counters["stalls"] * share, counters["stall_seconds"] * share


def stalls_text(stalls: int, seconds: float, timed_waits: int, waits: int) -> str:
    """Return stalls for people, with what they were measured of."""
    text = f"{stalls}, {seconds * 1e3:.2f} ms"
    return f"{text}, by {timed_waits} of {waits} waits" if timed_waits < waits else text


class Traffic:
    """Bytes of the last optimizer step, and of weights that are computed on the host.

    Parameters
    ----------
    name : str
        Of the model, for messages.

    Attributes
    ----------
    steps : int
        How many optimizer steps have ended.
    step_h2d_bytes, step_d2h_bytes : int or None
        Bytes that moved to and from the device in the last of them.
    computed_bytes : dict of str to int
        Host bytes that a layer, by name, computes with in the place of its own weights.
    runs_again, flops_again : int, float
        How often backward ran a forward operator again, and the operations of that.
    rows_read, rows_bytes : int
        How often rows of a table were read in host memory, and their bytes.
    derived_bytes : dict of str to int
        Bytes computed from the weights of a layer, by name, that autograd keeps on the device until
        backward: casts, sums.
    beside_bytes : dict of str to int
        Bytes of a layer, by name, that had no room in the arena for an operator on many weights.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.steps = 0
        self.step_h2d_bytes: int | None = None
        self.step_d2h_bytes: int | None = None
        self.computed_bytes: dict[str, int] = {}
        self.runs_again = 0
        self.flops_again = 0.0
        self.rows_read = 0
        self.rows_bytes = 0
        self.derived_bytes: dict[str, int] = {}
        self.beside_bytes: dict[str, int] = {}
        self._before = (0, 0)

    def end_step(self, h2d_bytes: int, d2h_bytes: int) -> None:
        """Take what moved since the last step from the engine's counters."""
        self.step_h2d_bytes = h2d_bytes - self._before[0]
        self.step_d2h_bytes = d2h_bytes - self._before[1]
        self._before = h2d_bytes, d2h_bytes
        self.steps += 1

    def note_computed(self, layer: str, nbytes: int) -> None:
        """Count host bytes that a layer computes with in the place of its own; warn once."""
        if nbytes and not self.computed_bytes:
            logger.warning(
                "%s: layer '%s' is called with a weight that is computed on the host, or replaces "
                "its own for a while. The results are right, but each call copies %s to the "
                "device, outside the arena. memory_summary() counts all such layers.",
                self._name,
                layer,
                format_size(nbytes),
            )
        if nbytes:
            self.computed_bytes[layer] = nbytes

    def note_beside(self, layer: str, nbytes: int) -> None:
        """Count weights that are copied outside the arena, for one operator; warn once."""
        if not self.beside_bytes:
            logger.warning(
                "%s: code reads the weight of '%s' together with more than the arena holds, or "
                "takes its address: %s are copied outside the arena for that, each time.",
                self._name,
                layer,
                format_size(nbytes),
            )
        self.beside_bytes[layer] = nbytes

    def note_run_again(self, flops: float) -> None:
        """Count a forward operator that backward has run again."""
        self.runs_again += 1
        self.flops_again += flops

    def note_rows(self, nbytes: int) -> None:
        """Count rows that a kernel reads over the link."""
        self.rows_read += 1
        self.rows_bytes += nbytes

    def note_derived(self, layer: str, nbytes: int) -> None:
        """Count bytes computed from a layer's weights that wait for backward on the device."""
        self.derived_bytes[layer] = max(nbytes, self.derived_bytes.get(layer, 0))
