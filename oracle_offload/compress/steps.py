"""What steps of a model took, kept from one run to the next: ``compress="auto"`` decides by it.

How long a step computes follows from batches that attach does not know. So each run that was
attached with "auto" leaves what its last steps took, for the next one of this model on this device.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..engine import simulator
from ..engine.engines import DeviceState
from ..host.remembered import Rows
from ..host.schema import schema
from ..model.attachment import Attachment
from ..model.selection import Chosen
from ..observe.verdict import judge

logger = logging.getLogger("oracle_offload")

SCHEMA = schema("steps", 1)
_rows = Rows("steps.json", SCHEMA, "models", "what the steps took")
# Of a step of frozen weights: operators alike.
FORWARD_SHARE, FORWARD_CHECKPOINTED_SHARE = 1 / 2, 1 / 3


@dataclass(frozen=True)
class Pace:
    """What a forward and its backward take.

    Attributes
    ----------
    busy_s : float
        Seconds in which copies can hide: without those that the device waits for copies.
    forward_share : float
        Of them, forward's: estimated from whether blocks are computed again in backward.
    device : simulator.Device
        Its rates.
    """

    busy_s: float
    forward_share: float
    device: simulator.Device


def measure(attachment: Attachment) -> tuple[float, float] | None:
    """Return `busy_s` and `forward_share` of the last steps; None where they do not say.

    Those of several models on one device say nothing of any of them.
    """
    state = attachment.state
    window = state.pace.window()
    held = [other for other in state.listeners if type(other) is type(attachment)]
    if window is None or not window.passes or held != [attachment]:
        return None
    found = judge(window, state.pace.ended, (), 0, None)
    if found.step_s is None or found.stall_s is None:
        return None
    busy_s = (found.step_s - found.stall_s) * window.steps / window.passes
    checkpoints = state.engine.stats(attachment.model)["learned_block_bytes"]
    return busy_s, FORWARD_CHECKPOINTED_SHARE if checkpoints else FORWARD_SHARE


def key_of(units: Sequence[Sequence[Chosen]], state: DeviceState) -> str:
    """Return a hash of what is managed and where; no value of a weight is in it."""
    shapes = [
        [leaf.name, [[str(t.dtype), list(t.shape)] for t in leaf.tensors()]]
        for unit in units
        for leaf in unit
    ]
    device: list[Any] = [state.engine.device_name, state.engine.mem_info()[1]]
    if state.simulated:
        device.append(asdict(simulator.get_device(0)))
    return hashlib.sha256(json.dumps([shapes, device]).encode()).hexdigest()


class StepRecord:
    """What is known of one model's steps on one device.

    Parameters
    ----------
    key : str
        See `key_of`.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._steps = 0

    def recall(self, device: simulator.Device | None) -> Pace | None:
        """Return what a run before has left; None where there is nothing of use."""
        row = _rows.get(self._key)
        if device is None:
            return None
        busy_s, share = row.get("busy_s"), row.get("forward_share")
        if not isinstance(busy_s, float) or not isinstance(share, float):
            return None
        return Pace(busy_s, share, device) if 0 < busy_s < math.inf and 0 < share < 1 else None

    def after_step(self, attachment: Attachment) -> None:
        """Keep what was measured: looked for after 4, 8, 16, ... steps of an optimizer."""
        self._steps += 1
        if self._steps > 2 and self._steps & (self._steps - 1) == 0:
            self.keep(attachment)

    def keep(self, attachment: Attachment) -> None:
        """Write what was measured; what the system refuses is logged: no step fails for a file."""
        try:
            found = measure(attachment)
            if found is None:
                return
            _rows.put(self._key, dict(zip(("busy_s", "forward_share"), found, strict=True)))
        except Exception as error:
            logger.info("what the steps took could not be remembered: %s", error)
