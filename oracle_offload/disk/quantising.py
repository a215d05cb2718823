"""Quantising a model while it is read, module by module: unquantised it never exists as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Quantize = Callable[[nn.Module], object]

_PLACES = ("_parameters", "_buffers", "_modules")


class Quantiser:
    """Lets a library's function quantise one module after the other.

    Parameters
    ----------
    module : nn.Module
        The model.
    quantize : callable
        Takes a module and quantises what it likes of those below it, in place.
    """

    def __init__(self, module: nn.Module, quantize: Quantize) -> None:
        self._module = module
        self._quantize = quantize
        self._before: list[tuple[nn.Module, type, dict[str, Any]]] = []
        named = [t for inner in self._leaves() for t in inner._parameters.values()]
        self._uses = Counter(map(id, named))

    def _leaves(self) -> Iterator[nn.Module]:
        return (inner for inner in self._module.modules() if not inner._modules)

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules without children that have Parameters, with their names."""
        for name, inner in list(self._module.named_modules()):
            if inner._parameters and not inner._modules:
                yield name, inner

    def quantise(self, name: str, inner: nn.Module) -> None:
        """Quantise one module, whose values are there, and drop what nothing holds then.

        The function finds it under its name, in a model that has nothing else.
        """
        self._remember(inner)
        before = [t for t in inner._parameters.values() if t is not None]
        if not name:
            self._quantize(inner)
            now = inner
        else:
            alone = _alone(name, inner)
            self._quantize(alone)
            now = alone.get_submodule(name)
        if now is not inner:
            for parent in self._module.modules():
                for key, child in parent._modules.items():
                    if child is inner:
                        self._remember(parent)
                        parent._modules[key] = now
        left = {id(t) for t in now._parameters.values()}
        for tensor in before:
            if id(tensor) not in left:
                self._uses[id(tensor)] -= 1
                if not self._uses[id(tensor)]:  # else tied to something that has it still
                    tensor.data = torch.empty(0, dtype=tensor.dtype, device="cpu")

    def _remember(self, inner: nn.Module) -> None:
        state = {
            name: dict(value) if name in _PLACES else value for name, value in vars(inner).items()
        }
        self._before.append((inner, type(inner), state))

    def undo(self) -> None:
        """Make all modules what they were; the values of their tensors are not there again."""
        while self._before:
            inner, kind, state = self._before.pop()
            inner.__class__ = kind
            inner.__dict__.clear()
            inner.__dict__.update(state)


def _alone(name: str, inner: nn.Module) -> nn.Module:
    """Return a model that has `inner` under its name, and nothing else."""
    *path, key = name.split(".")
    root = at = nn.Module()
    for part in path:
        at.add_module(part, nn.Module())
        at = at.get_submodule(part)
    at.add_module(key, inner)
    return root


def plain_tensors_of(inner: nn.Module) -> list[Tensor]:
    """Return the Parameters and buffers of a module itself."""
    own = [*inner._parameters.values(), *inner._buffers.values()]
    return [tensor for tensor in own if tensor is not None]
