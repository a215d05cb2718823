"""Which task a model is for: by the files that lie in its folder."""

from __future__ import annotations

from pathlib import Path

from .settings import Settings, SettingsError
from .tasks import Task


def load_task(settings: Settings) -> Task:
    """Return the task that fits the model: language, or images.

    Raises
    ------
    SettingsError
        The model is of neither kind, or the data does not fit it.
    """
    if _has(settings.model, "model_index.json"):
        from .images import Images

        return Images(settings)
    if _has(settings.model, "config.json"):
        from .language import Language

        return Language(settings)
    raise SettingsError(
        f"model={settings.model!r} is neither the folder of a transformers model (config.json) nor "
        "of a diffusers pipeline (model_index.json), nor in the local hub cache; download it first"
    )


def _has(model: str, file: str) -> bool:
    if Path(model).is_dir():
        return (Path(model) / file).is_file()
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    try:
        return isinstance(try_to_load_from_cache(model, file), str)
    except ValueError:  # no name of a repository
        return False
