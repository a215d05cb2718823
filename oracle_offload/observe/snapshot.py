"""Torch's memory snapshot, taken when a GPU's memory runs out, with the names that we know.

Torch calls an observer where an allocation fails, before the exception frees what it unwinds. There
is no way to remove an observer. So one stays until the process ends; it calls the listeners of now.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..engine.engines import DeviceState
from ..engine.geometry import stored_bytes
from ..model.attachment import attachments_on
from ..model.residents import unmanaged_parameters
from .recording import write_whole
from .snapshot_file import KEY, SCHEMA

Told = Callable[[str, int, int], object]  # the device, the bytes asked for, and those free

_listeners: tuple[Told, ...] = ()  # replaced, never changed
_attached = False
_lock = threading.Lock()  # protects both; nothing is taken under it


def listen(told: Told) -> None:
    """Have `told` called, in the thread that allocates, whenever torch finds no memory on a GPU.

    It must not raise, and must wait for no lock: the thread may hold any.

    Raises
    ------
    RuntimeError
        The allocator has no observers: that of cudaMallocAsync, or one that was plugged in.
    """
    global _listeners, _attached
    with _lock:
        if not _attached:
            torch._C._cuda_attach_out_of_memory_observer(_ran_out)  # type: ignore[attr-defined]
            _attached = True
        _listeners = (*(other for other in _listeners if other != told), told)


def ignore(told: Told) -> None:
    """Undo `listen`, if it was done."""
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other != told)


def _ran_out(device: int, asked: int, allowed: int, free: int) -> None:
    for told in _listeners:
        told(f"cuda:{device}", asked, free)


def lines_are_noted() -> bool:
    """Whether other code has torch note lines already: then that code is to end it."""
    return bool(torch._C._cuda_isHistoryEnabled())


def note_lines(most: int | None) -> None:
    """Have torch note where in Python each allocation is made, the latest `most`; None: no more."""
    if most is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=most
        )


def take(state: DeviceState, asked: int, free: int) -> dict[str, Any]:
    """Return torch's snapshot, with what is known here of the device's addresses.

    No lock is taken but the engine's mutex, which is held across no call of torch's.
    """
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    named = [
        (segment.base, segment.storage.nbytes(), "arena", "oracle_offload")
        for segment in state.segments
    ]
    layers: dict[int, str] = {}
    for held in attachments_on(state):
        names = held.unit_layers().items()
        layers |= {unit: f"{held.name}: {inside}" for unit, inside in names}
        module = held.module()
        for *_, parameter in unmanaged_parameters(module) if module is not None else ():
            for kind, tensor in (("weights", parameter), ("gradients", parameter.grad)):
                if tensor is not None and tensor.device == state.device:
                    named.append((tensor.data_ptr(), stored_bytes(tensor), kind, held.name))
    resident = [
        (layers.get(unit, f"unit {unit}"), nbytes)
        for unit, _, nbytes, _ in state.engine.residents()
    ]
    snapshot[KEY] = {
        "schema": SCHEMA,
        "device": state.ordinal,
        "asked_bytes": asked,
        "free_bytes": free,
        "named": named,
        "arena": sorted(resident, key=lambda row: (-row[1], row[0])),
    }
    return snapshot


def write(snapshot: dict[str, Any], path: Path) -> None:
    """Write a snapshot as torch's own viewer and `snapshot_file.read_snapshot` read it.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    write_whole(path, pickle.dumps(snapshot, protocol=4))  # the viewer refuses protocol 5
