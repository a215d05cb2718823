"""Plain tensors inside a module: parameters, buffers and attributes, and what these are made of.

A quantised weight is seldom one tensor. A tensor subclass is made of inner tensors (of tensors
again, in some versions of a library), a Parameter carries its statistics as attributes, a module
keeps a state object. `plain_tensors` finds what holds bytes; `Copy` makes the same again over other
bytes, without a copy of any.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.geometry import memory_of, tensor_bytes

_PLAIN = (Tensor, nn.Parameter)


def is_wrapper(value: Any) -> bool:
    """Whether `value` is a tensor that is made of others and holds no bytes itself."""
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__")


def class_name(kind: type) -> str:
    """Return the full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return what a module, a tensor or an object of a library's own keeps under which name."""
    if isinstance(owner, nn.Module):
        return {**owner._parameters, **owner._buffers, **owner.__dict__}
    if is_wrapper(owner):
        return {name: getattr(owner, name) for name in owner.__tensor_flatten__()[0]}
    return dict(vars(owner))


def _holds_tensors(value: Any, holders: frozenset[str]) -> bool:
    return isinstance(value, Tensor) or class_name(type(value)) in holders


def _walk(owner: Any, path: str, holders: frozenset[str], met: set[int]) -> Iterator[Any]:
    """Yield ``(path, tensor)`` of the tensors below `owner` that hold bytes, each object once."""
    for name, value in attributes_of(owner).items():
        if not _holds_tensors(value, holders) or id(value) in met:
            continue
        met.add(id(value))
        below = f"{path}{name}"
        if isinstance(value, Tensor) and not is_wrapper(value):
            yield below, value
            if type(value) in _PLAIN:
                continue
        yield from _walk(value, f"{below}.", holders, met)


def plain_tensors(
    module: nn.Module, holders: frozenset[str] = frozenset()
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Return the tensors of a module that hold bytes, by path, and others over the same bytes.

    Parameters
    ----------
    module : nn.Module
        Without children.
    holders : frozenset of str
        Full names of the classes of objects that hold tensors.

    Returns
    -------
    tuple
        The tensors, and for a path what else is of the same geometry in the same memory. Empty
        tensors are left out.
    """
    found: dict[str, Tensor] = {}
    same: dict[str, list[Tensor]] = {}
    paths: dict[Any, str] = {}
    for path, tensor in _walk(module, "", holders, set()):
        if not tensor.numel():
            continue
        where = memory_of(tensor), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
        first = paths.setdefault(where, path)
        if first is path:
            found[path] = tensor
        else:
            same.setdefault(first, []).append(tensor)
    return found, same


def tensors_beside(module: nn.Module, holders: frozenset[str]) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield ``(owner, name, tensor)`` of what hangs on a Parameter or is in an object of `holders`.

    No ``module.to`` moves it, unless the library's own does.
    """
    for path, tensor in list(_walk(module, "", holders, set())):
        above, _, name = path.rpartition(".")
        owner = value_at(module, above)
        if above and not is_wrapper(owner):
            yield owner, name, tensor


def value_at(module: nn.Module, path: str) -> Any:
    """Return what is at a dotted path now: a tensor, an object that holds some, a module.

    The module itself where the path is empty; None where there is nothing.
    """
    value: Any = module
    for name in path.split(".") if path else ():
        if isinstance(value, nn.Module):
            places = value._parameters, value._buffers, value._modules, value.__dict__
            value = next((place[name] for place in places if name in place), None)
        else:
            value = getattr(value, name, None)
        if value is None:
            return None
    return value


def copy_tables(module: nn.Module, holders: frozenset[str], most_bytes: int) -> None:
    """Give each object that holds tensors copies of its own of the small ones."""
    for path, tensor in plain_tensors(module, holders)[0].items():
        above, _, name = path.rpartition(".")
        owner = value_at(module, above)
        if class_name(type(owner)) in holders and tensor_bytes(tensor) <= most_bytes:
            setattr(owner, name, tensor.detach().clone())


class Places:
    """The tensors that are at given paths of a module now: read like a dict of parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def get(self, path: str, default: Any = None) -> Any:
        """Return the tensor at `path`."""
        module = self._module()
        found = None if module is None else value_at(module, path)
        return default if found is None else found


class Copy:
    """A module made again over other bytes.

    What holds no tensor is shared with the original. Objects that hold tensors are made again for
    each copy, because the library's code may rewrite their attributes; tensors that are made of
    tensors are not rewritten, and `wrappers` keeps them for the next copy over the same bytes.

    Parameters
    ----------
    replaced : dict
        By `id` of each tensor that holds bytes: the one that takes its place.
    holders : frozenset of str
        See `plain_tensors`.
    wrappers : dict
        By `id` of each original that is made of tensors: the one that was made of it.
    """

    def __init__(
        self,
        replaced: Mapping[int, Tensor],
        holders: frozenset[str],
        wrappers: dict[int, Tensor],
    ) -> None:
        self._replaced = replaced
        self._holders = holders
        self._wrappers = wrappers
        self._device = next((tensor.device for tensor in replaced.values()), None)
        self._made: dict[int, Any] = {}

    def module(self, original: nn.Module, base: Any) -> Any:
        """Return a module of class `base` with the attributes of `original`."""
        made = object.__new__(base)
        made.__dict__.update(
            {name: self.of(value) for name, value in original.__dict__.items()},
            _parameters={name: self.of(value) for name, value in original._parameters.items()},
            _buffers={name: self.of(value) for name, value in original._buffers.items()},
        )
        return made

    def of(self, value: Any) -> Any:
        """Return what takes the place of `value`; itself where it holds no tensor."""
        if not _holds_tensors(value, self._holders):
            return value
        if id(value) not in self._made:
            make = self._object if not isinstance(value, Tensor) else self._tensor
            self._made[id(value)] = make(value)
        return self._made[id(value)]

    def _object(self, value: Any) -> Any:
        made = self._made[id(value)] = object.__new__(type(value))  # before what may lead back
        made.__dict__.update({name: self.of(inner) for name, inner in vars(value).items()})
        return made

    def _tensor(self, value: Tensor) -> Tensor:
        if is_wrapper(value):
            made = self._wrappers.get(id(value))
            if made is None:
                made = self._wrappers[id(value)] = self._wrapper(value)
            return made
        with torch._C.DisableTorchFunctionSubclass():
            taken = self._replaced.get(id(value))
            if taken is None:  # it has no elements, or came after attach
                taken = value.to(self._device)
            # Another for each copy, whose ``.data`` the code may re-point.
            of_kind = getattr(type(taken), "of_kind", None)  # of a `Handle`
            kind = None if type(value) in _PLAIN else type(value)
            copied: Tensor = taken.detach() if of_kind is None else of_kind(taken, kind)
            if kind is None:
                return copied
            if of_kind is None:
                copied = Tensor._make_subclass(kind, copied, False)
        for name, inner in vars(value).items():
            copied.__dict__[name] = self.of(inner)
        return copied

    def _wrapper(self, value: Any) -> Tensor:
        names, meta = value.__tensor_flatten__()
        inner = {name: self.of(getattr(value, name)) for name in names}
        made: Tensor = type(value).__tensor_unflatten__(inner, meta, value.size(), value.stride())
        for name, attribute in vars(value).items():
            if name not in vars(made) and not isinstance(attribute, Tensor):
                made.__dict__[name] = attribute  # what a loader noted on it
        return made
