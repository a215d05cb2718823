"""Models that `plan` knows by name: configs of public repositories, in models.json in this folder.

Each entry has the repository, where its config is from, and how many parameters the class makes of
it. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("models.json")
_MANY = 6


@dataclass(frozen=True)
class Known:
    """A model that is known by name.

    Attributes
    ----------
    name, repository : str
        Of the model, and where the hub has it: ``"owner/name"``.
    parameters : int
    source : str
        Where the config is from.
    config : dict
        As its library reads it.
    """

    name: str
    repository: str
    parameters: int
    source: str
    config: dict[str, Any]

    @property
    def kind(self) -> str:
        """The name of its class."""
        found: str = self.config.get("_class_name") or self.config["architectures"][0]
        return found


@functools.cache
def every() -> dict[str, Known]:
    """Return all of them by name."""
    models = json.loads(FILE.read_text("utf-8"))["models"]
    return {name: Known(name, **entry) for name, entry in models.items()}


def known(name: str) -> Known | None:
    """Return the model of a name, of its repository or without it; None where none is known.

    Capitals and the signs between words do not count: ``"flux1-dev"`` is FLUX.1-dev.
    """
    wanted = _squeezed(name)
    for model in every().values():
        if wanted in (_squeezed(model.name), _squeezed(model.repository)):
            return model
    return None


def similar(name: str) -> list[str]:
    """Return names of models that are spelled like this one, the most like first."""
    names = {_squeezed(model): model for model in every()}
    word = _squeezed(name.rpartition("/")[2])
    close = difflib.get_close_matches(word, names, _MANY, 0.5)
    return [names[found] for found in close]


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9/]", "", name.lower())
