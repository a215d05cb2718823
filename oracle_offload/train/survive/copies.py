"""Deep copies of models, counted: each takes the memory of a whole model."""

from __future__ import annotations

import copy
import logging
import weakref
from typing import Any

from torch import nn

from ...engine.geometry import stored_bytes
from ...host.sizes import format_size

logger = logging.getLogger("oracle_offload")

_HOOK = "__deepcopy__"


class CopyCounter:
    """Counts the deep copies of the models that it tracks, and their bytes.

    Attributes
    ----------
    copies : int
        So far.
    copied_bytes : int
        Of their parameters and buffers.
    """

    def __init__(self) -> None:
        self.copies = 0
        self.copied_bytes = 0
        self._tracked: dict[int, weakref.ref[nn.Module]] = {}

    def track(self, model: nn.Module) -> None:
        """Count copies of `model` from now on; `copy.deepcopy` finds a hook on the instance.

        Raises
        ------
        ValueError
            Its class copies itself, or somebody tracks it already.
        """
        if hasattr(type(model), _HOOK) or model.__dict__.get(_HOOK) is not None:
            raise ValueError(
                f"{type(model).__name__} has a __deepcopy__ already: its copies cannot be counted; "
                "call record() where it is copied"
            )
        model.__dict__[_HOOK] = _Hook(self, model)
        self._tracked[id(model)] = weakref.ref(model)

    def record(self, made: nn.Module) -> None:
        """Count a copy that was made in another way."""
        nbytes = bytes_of(made)
        self.copies += 1
        self.copied_bytes += nbytes
        logger.info(
            "copy %d of a %s: %s, %s in all",
            self.copies,
            type(made).__name__,
            format_size(nbytes),
            format_size(self.copied_bytes),
        )

    def close(self) -> None:
        """Count no more."""
        for reference in self._tracked.values():
            model = reference()
            if model is not None:
                model.__dict__.pop(_HOOK, None)
        self._tracked = {}


class _Hook:
    """What `copy.deepcopy` calls; of a pickled model there is nothing left to call."""

    def __init__(self, counter: CopyCounter, model: nn.Module) -> None:
        self._counter, self._model = counter, weakref.ref(model)

    def __call__(self, memo: dict[int, Any]) -> Any:
        model = self._model()
        assert model is not None  # somebody copies it
        hook = model.__dict__.pop(_HOOK)  # the copy is an ordinary one, without it
        try:
            made = copy.deepcopy(model, memo)
        finally:
            model.__dict__[_HOOK] = hook
        self._counter.record(made)
        return made

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    """Return None, which `copy.deepcopy` passes over."""


def track_copies(model: nn.Module) -> CopyCounter:
    """Count the deep copies of a model from now on.

    Parameters
    ----------
    model : nn.Module
        The model, attached or not.

    Examples
    --------
    >>> import copy, torch
    >>> model = torch.nn.Linear(2, 2)
    >>> counter = track_copies(model)
    >>> ema = copy.deepcopy(model)
    >>> counter.copies, counter.copied_bytes
    (1, 24)
    """
    counter = CopyCounter()
    counter.track(model)
    return counter


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(stored_bytes(tensor) for tensor in [*model.parameters(), *model.buffers()])
