"""Checkpoints that a training resumes from with the same bits, whenever it was killed."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.exemption import exempt
from ...errors import OffloadError
from ...host.replace import replace_file
from ...host.schema import schema
from .adaptive_batch import whole_number
from .random_state import RandomState

logger = logging.getLogger("oracle_offload")

SCHEMA = schema("checkpoint", 1)
# What `torch.load` reads without running code.
_PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Checkpoint:
    """One file that always holds a whole checkpoint: the last, or the one before it.

    It has what is trained, buffers, optimizer, scaler, the random generators, and whatever else
    is named. It is written next to the old one, brought to the disk and renamed; nothing is
    allocated on the device for it.

    Parameters
    ----------
    path : str or path
        The file; its folder exists.
    model : nn.Module
        The model, attached or not.
    optimizer : torch.optim.Optimizer or iterable of them, optional
        Whatever steps.
    scaler : torch.amp.GradScaler, optional
        The scaler.
    every : int
        `after_step` saves after so many steps.
    frozen : bool
        Also save frozen parameters; by default they come from where the model came from.
    generators : iterable of torch.Generator
        Those that training draws from, in addition to the process's own.
    **parts
        Whatever else has ``state_dict`` and ``load_state_dict``, by name: ``scheduler=``,
        ``data=`` (a loader or sampler that knows its position), ``ema=``.

    Attributes
    ----------
    path : str
        The file.
    saved : int or None
        The step that was saved last by this object, or loaded.

    Examples
    --------
    In a loop::

        checkpoint = Checkpoint("run.pt", model, optimizer=optimizer, data=loader)
        first = (checkpoint.load() or 0) + 1
        for step in range(first, 1001):
            ...
            checkpoint.after_step(step)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        *,
        optimizer: Any = None,
        scaler: Any = None,
        every: int = 50,
        frozen: bool = False,
        generators: Iterable[torch.Generator] = (),
        **parts: Any,
    ) -> None:
        self.path = os.fspath(path)
        self.saved: int | None = None
        self._model = model
        optimizers = [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer or ())
        self._parts = {f"optimizer {index}": each for index, each in enumerate(optimizers)} | parts
        if scaler is not None:
            self._parts["scaler"] = scaler
        for name, part in self._parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise TypeError(
                    f"{name}={type(part).__name__} has no state_dict and load_state_dict; a "
                    "checkpoint cannot hold it"
                )
        self._every = whole_number("every", every)
        self._frozen = frozen
        self._generators = tuple(generators)

    def after_step(self, step: int) -> bool:
        """Save, if `step` is a multiple of `every`; return whether it did.

        Raises
        ------
        OSError, TypeError
            As for `save`.
        """
        if step % self._every:
            return False
        self.save(step)
        return True

    def save(self, step: int, reason: str = "periodic") -> None:
        """Write the state after `step`.

        Parameters
        ----------
        step : int
            How many steps are done.
        reason : str
            Kept in the file, for people.

        Raises
        ------
        OSError
            The system refused it (a full disk); the file that was there is as it was.
        TypeError
            A part's state has what cannot be loaded again without running code.
        """
        document = {
            "schema": SCHEMA,
            "step": step,
            "reason": reason,
            "model": {name: _on_host(tensor) for name, tensor in self._tensors().items()},
            "parts": {name: _on_host(part.state_dict()) for name, part in self._parts.items()},
            "random": RandomState(self._generators).state_dict(),
        }
        _refuse_code(document, "checkpoint")
        replace_file(self.path, lambda sink: torch.save(document, sink))  # type: ignore[arg-type]
        self.saved = step
        logger.info("checkpoint of step %d (%s): %s", step, reason, self.path)

    def load(self) -> int | None:
        """Bring everything back to where the file was written.

        Returns
        -------
        int or None
            The steps that were done; None where there is no file yet.

        Raises
        ------
        OffloadError
            It is no checkpoint of this model and these parts; nothing was changed.
        ValueError
            It has other random generators, or of more cards, than there are; nothing was changed.
        """
        try:
            file = open(self.path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return None
        with file:
            try:
                document = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:
                raise OffloadError(f"{self.path!r} holds no checkpoint: {error}") from error
        tensors = self._tensors()
        self._refuse_another(document, tensors)
        generators = RandomState(self._generators)
        generators.refuse_another(document["random"])
        with torch.no_grad(), exempt():
            for name, tensor in tensors.items():
                tensor.copy_(document["model"][name])
        for name, part in self._parts.items():
            part.load_state_dict(document["parts"][name])
            if isinstance(part, torch.optim.Optimizer):
                _undo_rounding(part, document["parts"][name])
        generators.load_state_dict(document["random"])
        self.saved = int(document["step"])
        return self.saved

    def _tensors(self) -> dict[str, Tensor]:
        buffers = (
            self._model.state_dict(keep_vars=True).keys()
            - dict(self._model.named_parameters(remove_duplicate=False)).keys()
        )
        return {
            name: tensor.detach()
            for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]
            if tensor.requires_grad or self._frozen or name in buffers
        }

    def _refuse_another(self, document: Any, tensors: dict[str, Tensor]) -> None:
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise OffloadError(f"{self.path!r} is no checkpoint of {SCHEMA}")
        for what, found, wanted in (
            ("tensors", document["model"].keys(), tensors.keys()),
            ("parts", document["parts"].keys(), self._parts.keys()),
        ):
            if found != wanted:
                raise OffloadError(
                    f"{self.path!r} is of another training: {what} missing there "
                    f"{sorted(wanted - found)[:4]}, unknown here {sorted(found - wanted)[:4]}"
                )
        for name, tensor in tensors.items():
            other = document["model"][name]
            if other.shape != tensor.shape or other.dtype != tensor.dtype:
                raise OffloadError(
                    f"{self.path!r} is of another training: '{name}' is {tuple(other.shape)} "
                    f"{other.dtype} there, {tuple(tensor.shape)} {tensor.dtype} here"
                )


def _on_host(value: Any) -> Any:
    """Return a state whose tensors are on the host, each in a storage of its own size."""
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        with contextlib.suppress(NotImplementedError):  # a subclass that is made of others
            if host.untyped_storage().nbytes() != host.numel() * host.element_size():
                host = host.clone()
        return host
    if isinstance(value, Mapping):
        return {key: _on_host(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_on_host(each) for each in value]
    if isinstance(value, float):  # numpy's float64 is one: a schedule by numpy makes them of rates
        return float(value)
    return value


def _undo_rounding(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give states the dtypes that they had: torch loads them in those of their parameters."""
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, held, strict=True):
        if parameter in optimizer.state:
            state, before = optimizer.state[parameter], saved["state"].get(index, {})
            optimizer.state[parameter] = _as_saved(state, before)


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Return what was loaded, at any depth, with the dtypes that were saved."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        for key, value in saved.items():
            if key in loaded:
                loaded[key] = _as_saved(loaded[key], value)
    elif type(loaded) in (list, tuple) and type(saved) in (list, tuple):
        return type(loaded)(map(_as_saved, loaded, saved))
    return loaded


def _refuse_code(value: Any, where: str) -> None:
    if type(value) in (*_PLAIN, Tensor, *torch.serialization.get_safe_globals()):
        return
    if type(value) is dict:
        for key, each in value.items():
            _refuse_code(key, where)
            _refuse_code(each, f"{where}[{key!r}]")
    elif type(value) is list:
        for index, each in enumerate(value):
            _refuse_code(each, f"{where}[{index}]")
    else:
        raise TypeError(
            f"{where} is a {type(value).__name__}, which cannot be loaded without running code; "
            "let state_dict return tensors, numbers, strings, and lists and dicts of them"
        )
