"""Values kept on the host, and put back in place: what an attempt at a step must leave as it was.

Tensors keep their identity and their memory, by which optimizers and masters know them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.exemption import exempt
from ...engine.geometry import copied_to
from .random_state import RandomState

Restore = Callable[[], Any]
_Known = dict[int, Restore]


def keep(value: Any, known: _Known) -> Restore:
    """Return a function that brings a value back, and whatever it is made of, in place.

    Parameters
    ----------
    value : tensor, mapping, list, tuple, or plain value
        What to keep; what is in it is kept too. Anything else is copied as `copy.deepcopy` does.
    known : dict of int to function
        By identity: what is kept already, or is not to be.
    """
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Tensor):
        host = copied_to(value.detach(), torch.device("cpu"))

        def restore() -> Any:
            with torch.no_grad(), exempt():
                value.copy_(host)
            return value

        known[id(value)] = restore
        return restore
    if isinstance(value, MutableMapping):
        kept = {key: keep(each, known) for key, each in value.items()}

        def refill() -> Any:
            found = {key: each() for key, each in kept.items()}
            value.clear()
            value.update(found)
            return value

        return refill
    if isinstance(value, list | tuple):
        parts = [keep(each, known) for each in value]

        def rebuild() -> Any:
            found = [each() for each in parts]
            if isinstance(value, tuple):
                return tuple(found)
            value[:] = found
            return value

        return rebuild
    copied = copy.deepcopy(value)
    return lambda: copy.deepcopy(copied)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that `keep` would copy, those that are there twice, twice."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, MutableMapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


class TrainingState:
    """All that a training step changes: what is kept of it now, and put back by `restore`.

    Gradients are set aside, not copied: until `restore` every parameter has none.

    Parameters
    ----------
    model : nn.Module
        Its trainable parameters and its buffers; no code may change frozen parameters.
    optimizers : iterable of torch.optim.Optimizer
        Their states, groups, and the parameters that they hold.
    scaler : torch.amp.GradScaler, optional
        With what it has noted of a step that is not over.
    parts : iterable
        Whatever else has ``state_dict`` and ``load_state_dict``: schedulers, data loaders.
    generators : iterable of torch.Generator
        As for `RandomState`.

    Attributes
    ----------
    value_bytes : int
        What copies of parameters and optimizer states take.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Any] = (),
        scaler: Any = None,
        parts: Iterable[Any] = (),
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        self._optimizers = list(optimizers)
        self._scaler = scaler
        self._parts = list(parts)
        self._generators = tuple(generators)
        self._buffers = list(model.buffers())
        held = [p for p in model.parameters() if p.requires_grad]
        self._values = list(
            {
                id(tensor): tensor
                for tensor in [*held, *tensors_in([[o.param_groups, o.state] for o in optimizers])]
            }.values()
        )
        self._parameters = [
            *model.parameters(),
            *(p for o in self._optimizers for g in o.param_groups for p in g["params"]),
        ]
        self.value_bytes = sum(each.numel() * each.element_size() for each in self._values)

    def keep(self, *, values: bool) -> None:
        """Keep it all; without `values` neither parameters nor optimizer states."""
        known: _Known = {}
        if not values:  # as they are: no code writes to them, but a scheduler to a learning rate
            large = [each for each in self._values if each.numel() > 1]
            known = {id(each): lambda each=each: each for each in large}  # type: ignore[misc]
        wholes: list[Any] = [self._buffers, self._values]
        for optimizer in self._optimizers:
            wholes += [optimizer.param_groups, optimizer.state]
        if self._scaler is not None:
            wholes.append(self._scaler.__dict__)
        self._restore: list[Restore] = [keep(each, known) for each in wholes]
        for part in self._parts:
            state = copy.deepcopy(part.state_dict())
            self._restore.append(
                lambda part=part, state=state: part.load_state_dict(copy.deepcopy(state))  # type: ignore[misc]
            )
        self._restore.append(RandomState(self._generators).restore)
        self._gradients = [(parameter, parameter.grad) for parameter in self._parameters]
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Let no parameter have a gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def restore(self) -> None:
        """Put everything back as it was when it was kept; again and again."""
        for each in self._restore:
            each()
        self.drop_gradients()

    def end(self) -> None:
        """Put everything back, gradients too, and let go of the copies."""
        self.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._restore, self._gradients = [], []
