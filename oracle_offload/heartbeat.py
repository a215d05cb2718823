"""The heartbeat of a training: a small file that `oracle-offload watch` reads from outside.

Once a second, at the end of an optimizer step, it is written anew in the place of what was there; a
process that ends in order takes its file away, one that is killed leaves what it said last.
`ORACLE_OFFLOAD_HEARTBEAT=0` keeps a process without one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import time
from dataclasses import asdict
from typing import Any

from torch.optim import optimizer as torch_optimizer

from .engines import DeviceState, open_states
from .errors import OffloadError
from .meter import Meter, uuid_of
from .views.live import SCHEMA, folder
from .views.memory import device_memory, host_memory
from .views.summary import verdict_on

logger = logging.getLogger("oracle_offload")

EVERY_S = 1.0
_UNTOLD = ("weights", "gradients", "optimizer state", "activations")


def pulse(meter: Meter, **known: Any) -> dict[str, Any]:
    """Return what a watcher is shown now, as plain data; see `oracle_offload.views.live`.

    Parameters
    ----------
    meter : Meter
        Its numbers are of the time since it was read last.
    **known
        As for `Meter.read`.
    """
    numbers = meter.read(**known)
    devices = [found for state in open_states() if (found := _device(state)) is not None]
    locked = sum(device["locked_bytes"] for device in devices)
    pageable = sum(device["pageable_bytes"] for device in devices)
    return {
        "schema": SCHEMA,
        "pid": os.getpid(),
        "time_s": time.time(),
        "numbers": numbers,
        "devices": devices,
        "host": asdict(host_memory(locked, pageable)),
    }


def _device(state: DeviceState) -> dict[str, Any] | None:
    try:
        stats = state.engine.stats()
        free, total = state.engine.mem_info()
    except OffloadError:  # closed meanwhile, or ended by an error
        return None
    if not state.listeners:
        return None
    label = f"{state.device} ({state.engine.device_name}{', simulated' if state.simulated else ''})"
    memory = device_memory(
        label,
        free,
        total,
        allocated=state.kind.allocated_bytes(),
        cached=state.kind.cached_bytes(),
        arena=stats["arena_bytes"],
        weights=0,
        gradients=0,
        optimizer=None,
    )
    verdict = verdict_on(state, stats)
    # To tell these apart takes too long for every second: `memory_summary` does.
    parts = {name: size for name, size in memory.parts.items() if name not in _UNTOLD}
    return {
        "device": str(state.device),
        "uuid": uuid_of(state.device),
        "simulated": state.simulated,
        "steps": state.pace.steps,
        "sentence": verdict.sentence(str(state.device)),
        "verdict": asdict(verdict),
        "locked_bytes": stats["locked_bytes"],
        "pageable_bytes": stats["pageable_bytes"],
        "memory": {"title": label, "total_bytes": total, "parts": parts},
    }


class Heartbeat:
    """Writes the file of this process, where a second has gone by.

    Attributes
    ----------
    path : Path
        The file.
    """

    def __init__(self) -> None:
        self.path = folder() / f"heartbeat-{os.getpid()}.json"
        self._pid = os.getpid()
        self._meter = Meter()
        self._due = time.monotonic()

    def after_step(self, *_: Any) -> None:
        """Write, if it is time; what fails is logged once, and ends it."""
        now = time.monotonic()
        if now < self._due or os.getpid() != self._pid:
            return
        self._due = now + EVERY_S
        try:
            self.write()
        except Exception as error:  # no training fails for it
            logger.info("there is no heartbeat of this process: %s", error)
            self._due = float("inf")

    def write(self) -> None:
        """Write the file in the place of what was there, at once or not at all.

        Raises
        ------
        OSError
            It cannot be written.
        """
        text = json.dumps(pulse(self._meter)).encode("ascii")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        # Who trains what is nobody else's matter.
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(file, text)
        finally:
            os.close(file)
        os.replace(beside, self.path)

    def remove(self) -> None:
        """Take the file away, as the process that wrote it ends."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)


_running: Heartbeat | None = None


def start() -> Heartbeat | None:
    """Begin the heartbeat of this process, if it has none and may have one."""
    global _running
    if os.environ.get("ORACLE_OFFLOAD_HEARTBEAT", "1") == "0":
        return None
    if _running is None:
        try:
            _running = Heartbeat()
        except Exception as error:  # no folder of the user's, or no platformdirs: no attach fails
            logger.info("there is no heartbeat of this process: %s", error)
            return None
        torch_optimizer.register_optimizer_step_post_hook(_after_step)
        atexit.register(_running.remove)
    return _running


def _after_step(*details: Any) -> None:
    if _running is not None:
        _running.after_step()
