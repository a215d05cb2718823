"""The state of a training in one file that is always whole: the old one, or the new one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from .settings import Settings, SettingsError

SCHEMA = "oracle_offload/train-lora-state/1"
NAME = "state.pt"


def save(folder: Path, state: dict[str, Any], settings: Settings) -> None:
    """Replace the state of a folder at once and whole, also where the machine stops meanwhile."""
    target = folder / NAME
    part = folder / f"{NAME}.part"
    with open(part, "wb") as file:
        torch.save({"schema": SCHEMA, "settings": settings.deciding(), **state}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, target)
    if os.name == "posix":  # the new name is on the disk only with its folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load(folder: Path, settings: Settings) -> dict[str, Any]:
    """Return the state of a folder.

    Raises
    ------
    SettingsError
        There is none, or it is of a training with other settings: which.
    """
    path = folder / NAME
    if not path.exists():
        raise SettingsError(f"there is nothing to resume: {path} does not exist")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if state.get("schema") != SCHEMA:
        raise SettingsError(f"{path} is of {state.get('schema')}, not of {SCHEMA}")
    now, then = settings.deciding(), state["settings"]
    other = [
        f"{name} was {then.get(name)!r}, is {value!r}"
        for name, value in now.items()
        if value != then.get(name)
    ]
    if other:
        raise SettingsError(f"{path} is of another training: {'; '.join(other)}")
    return state
