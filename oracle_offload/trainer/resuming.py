"""Whether a training may go on from what its folder has: only with the settings that decide it."""

from __future__ import annotations

import json
from pathlib import Path

from ..host.replace import replace_file
from ..views.schema import schema
from .settings import Settings, SettingsError

SCHEMA = schema("train-lora-settings", 1)
STATE, _SETTINGS = "state.pt", "settings.json"


def note_settings(folder: Path, settings: Settings) -> None:
    """Write down, beside the checkpoint to come, what whoever resumes from it must share.

    Raises
    ------
    SettingsError
        A checkpoint is there already: it would be taken for one of these settings, and written over
        by the first save.
    """
    if (folder / STATE).exists():
        raise SettingsError(
            f"{folder} has the checkpoint of a training: go on with it (--resume), name another "
            f"--output, or delete {STATE} there"
        )
    document = {"schema": SCHEMA, **settings.deciding()}
    text = json.dumps(document, indent=2) + "\n"
    replace_file(folder / _SETTINGS, lambda sink: sink.write(text.encode("ascii")))


def refuse_another(folder: Path, settings: Settings) -> None:
    """Raise where there is no checkpoint, or one of other settings.

    Raises
    ------
    SettingsError
        Which ones.
    """
    for path in (folder / STATE, folder / _SETTINGS):
        if not path.exists():
            raise SettingsError(f"there is nothing to resume: {path} does not exist")
    try:
        then = json.loads((folder / _SETTINGS).read_text("ascii"))
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"{folder / _SETTINGS} is damaged ({error}): whether the checkpoint beside it is of "
            "this training cannot be told; name another --output"
        ) from None
    if not isinstance(then, dict) or "schema" not in then:
        raise SettingsError(f"{folder / _SETTINGS} is not of {SCHEMA}")
    if then["schema"] != SCHEMA:
        raise SettingsError(f"{folder / _SETTINGS} is of {then['schema']}, not of {SCHEMA}")
    other = [
        f"{name} was {then.get(name)!r}, is {value!r}"
        for name, value in settings.deciding().items()
        if value != then.get(name)
    ]
    if other:
        raise SettingsError(f"{folder} is of another training: {'; '.join(other)}")
