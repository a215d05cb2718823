"""The heartbeat of a training: a small file that `oracle-offload watch` reads from outside.

Once a second, at the end of an optimizer step, it is replaced by a new one. A process that ends in
order removes its file. One that is killed leaves the last it wrote, and a training that begins
later removes that.
`ORACLE_OFFLOAD_HEARTBEAT=0` keeps a process without one.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import os
import time
from dataclasses import asdict
from typing import Any

from torch.optim import optimizer as torch_optimizer

from ..engine.engines import DeviceState, open_states
from ..errors import OffloadError
from ..host import ranks
from ..host.cache import folder
from ..host.owned import check_folder, create_own, make_folder
from ..host.processes import is_alive, machine
from .live import SCHEMA, path_of, pid_of
from .memory import device_memory, host_memory
from .meter import Meter, uuid_of
from .summary import verdict_on

logger = logging.getLogger("oracle_offload")

EVERY_S = 1.0
AGAIN_S = 30.0  # after a write that failed twice
_DAY_S = 24 * 3600.0
_LONG_S = 30 * _DAY_S  # no training is without a step so long
_UNTOLD = ("weights", "gradients", "optimizer state", "activations")


def pulse(meter: Meter, /, **known: Any) -> dict[str, Any]:
    """Return what a watcher is shown now, as plain data; see `oracle_offload.observe.live`.

    Parameters
    ----------
    meter : Meter
        Its numbers are of the time since it was read last.
    **known
        As for `Meter.read`.
    """
    numbers = meter.read(**known)
    at = ranks.place()
    devices = [found for state in open_states() if (found := _device(state)) is not None]
    locked = sum(device["locked_bytes"] for device in devices)
    pageable = sum(device["pageable_bytes"] for device in devices)
    return {
        "schema": SCHEMA,
        "pid": os.getpid(),
        "machine": machine(),
        "time_s": time.time(),
        "place": None if at is None else {**at.as_row(), "job": ranks.job()},
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
        self._pid = os.getpid()
        self.path = path_of(self._pid)
        self._meter = Meter()
        self._due = time.monotonic()
        self._failed = 0  # writes in a row
        self._said = False

    @property
    def is_mine(self) -> bool:
        """Whether it is this process's, not that of the process it was forked from."""
        return os.getpid() == self._pid

    def after_step(self, *_: Any) -> None:
        """Write, if it is time; what fails is logged once, and tried again later."""
        now = time.monotonic()
        if now < self._due or not self.is_mine:
            return
        self._due = now + EVERY_S
        try:
            self.write()
        except Exception as error:  # no training fails for it
            self._note_failure(error)
        else:
            self._failed = 0

    def _note_failure(self, error: Exception) -> None:
        if not self._said:
            logger.info("the heartbeat of this process could not be written: %s", error)
            self._said = True
        self._failed += 1
        # On Windows a watcher that just reads the file keeps it from being replaced, so one failure
        # says nothing. After two the file goes: a watcher would take it for a standstill.
        if self._failed > 1:
            self.remove()
            self._due += AGAIN_S - EVERY_S

    def write(self) -> None:
        """Write the file in the place of what was there, at once or not at all.

        Raises
        ------
        OSError
            It cannot be written.
        """
        text = json.dumps(pulse(self._meter)).encode("ascii")
        make_folder(self.path.parent)
        beside = self.path.with_suffix(".new")
        try:
            file = create_own(beside)  # other users need not see who trains what
            try:
                written = os.write(file, text)
            finally:
                os.close(file)
            if written != len(text):  # on a disk that is almost full
                raise OSError(errno.ENOSPC, f"only {written} of {len(text)} bytes were written")
            os.replace(beside, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Take the file away, as the process that wrote it ends."""
        if self.is_mine:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)


_running: Heartbeat | None = None
_is_hooked = False


def start() -> Heartbeat | None:
    """Begin the heartbeat of this process, if it has none and may have one."""
    global _running, _is_hooked
    if os.environ.get("ORACLE_OFFLOAD_HEARTBEAT", "1") == "0":
        return None
    if _running is None or not _running.is_mine:
        try:
            _running = Heartbeat()
            prune()
        except Exception as error:  # no folder of the user's alone, or no platformdirs
            logger.info("there is no heartbeat of this process: %s", error)
            return None
    if not _is_hooked:  # a fork has its parent's hooks
        torch_optimizer.register_optimizer_step_post_hook(_after_step)
        atexit.register(_at_exit)
        _is_hooked = True
    return _running


def _after_step(*details: Any) -> None:
    if _running is not None:
        _running.after_step()


def _at_exit() -> None:
    if _running is not None:
        _running.remove()


def prune() -> None:
    """Remove what killed processes have left.

    Of this machine that is what is older than a day and whose process is gone. Processes of another
    machine, or of an earlier boot, cannot be looked up here: what is a month old is removed. A
    process that still runs writes its file again at its next step.
    """
    with contextlib.suppress(FileNotFoundError):
        check_folder(folder())
    for path in folder().glob("heartbeat-*"):
        with contextlib.suppress(OSError):  # it is gone, or another's
            age = time.time() - path.lstat().st_mtime
            pid = pid_of(path)
            is_gone = pid is not None and is_alive(pid) is False
            if age > (_DAY_S if is_gone else _LONG_S):
                path.unlink()
