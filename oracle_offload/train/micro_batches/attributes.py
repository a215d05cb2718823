"""What steps and forwards keep in attributes and globals: each micro-batch has its own.

The attributes of objects that the caller names are exchanged as a whole. Of all else it is found
out while the micro-batches compute: which attributes of modules are written, and which of the
globals that the models' code reads. Such a one is exchanged from then on, too. But who sets it
before reading it, and who goes on from what the one before has left, looks the same from outside:
so it is refused, with its name, where the micro-batches leave it different.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import OffloadError
from ...layers.swap import base_class

_MISSING: Any = type("Missing", (), {"__repr__": lambda self: "missing"})()
_CODE = types.FunctionType | type | types.ModuleType | types.BuiltinFunctionType
_PLAIN = bool | int | float | str | torch.dtype | torch.device


class Attributes(NamedTuple):
    """All of it at one moment."""

    named: list[tuple[dict[str, Any], dict[str, Any]]]  # dicts, each with what it held
    found: dict[tuple[int, str], Any]  # by the `id` of the dict, and the name


class _Place(NamedTuple):
    """One attribute that was found to be written."""

    values: dict[str, Any]  # of which it is one
    name: str
    before: Any  # what it was before the first micro-batch wrote it
    owner: str


class Places:
    """Which attributes are exchanged.

    Parameters
    ----------
    own : sequence of object
        Those whose attributes are, and what dicts there hold, unless it is a module.
    """

    def __init__(self, own: Sequence[object] = ()) -> None:
        self._own = own
        self._found: dict[tuple[int, str], _Place] = {}
        self._watched: list[_Place] = []

    def __bool__(self) -> bool:
        return bool(self._own or self._found)

    def _named(self) -> list[dict[str, Any]]:
        found = [vars(one) for one in self._own]
        for one in self._own:
            if not isinstance(one, nn.Module | types.ModuleType):
                found += [value for value in vars(one).values() if type(value) is dict]
        return found

    def now(self) -> Attributes:
        """Return what they are."""
        self._look_at_watched()
        return Attributes(
            [(values, dict(values)) for values in self._named()],
            {key: place.values.get(place.name, _MISSING) for key, place in self._found.items()},
        )

    def restore(self, attributes: Attributes) -> None:
        """Make them what they were; what was found since then is as before it was written."""
        for values, then in attributes.named:
            values.update(then)
            for name in values.keys() - then.keys():
                del values[name]
        for key, place in self._found.items():
            value = attributes.found.get(key, place.before)
            if value is not _MISSING:
                place.values[place.name] = value
            else:
                place.values.pop(place.name, None)

    # ---- what is found out ----

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Look from now on at the globals that the code of `models` reads."""
        own = {id(values) for values in self._named()}
        self._watched = [p for p in _globals_read_by(models) if id(p.values) not in own]

    def _look_at_watched(self) -> None:
        for place in self._watched:
            if place.values.get(place.name, _MISSING) is not place.before:
                self._found.setdefault((id(place.values), place.name), place)

    def written(self, module: nn.Module, name: str, before: Any) -> None:
        """Take an attribute of a module that a micro-batch has just written."""
        values = vars(module)
        key = id(values), name
        if key not in self._found and values.get(name, _MISSING) is not before:
            if any(one is module for one in self._own):
                return
            self._found[key] = _Place(values, name, before, base_class(module).__name__)

    def check(self, of_each: Sequence[Attributes]) -> None:
        """Raise where the order of the micro-batches would decide what one of them finds.

        Parameters
        ----------
        of_each : sequence
            As each micro-batch has left them, in their order.

        Raises
        ------
        OffloadError
            They are different, or no more what they were before. What was missing, or None, may
            have become the same for all: it is computed once and kept.
        """
        for key, place in self._found.items():
            first, *others = (one.found.get(key, place.before) for one in of_each)
            new = place.before is _MISSING or place.before is None
            if all(are_same(first, other) for other in others) and (
                new or are_same(place.before, first)
            ):
                continue
            raise OffloadError(
                f"the steps leave different {place.name!r} of {place.owner}: what one micro-batch "
                "leaves there reaches the next in another order. If each sets it before it is "
                "read, give each its own: own=[...] with the object (or Python's module) that "
                "has it. Else pass interleave=False."
            )


def missing_or(values: dict[str, Any], name: str) -> Any:
    """Return what a dict has under a name, as `Places.written` is told it."""
    return values.get(name, _MISSING)


def are_same(one: Any, other: Any) -> bool:
    """Whether two attributes are equal, as far as that can be seen; on whatever device."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        like = (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
        return like and torch.equal(one, other.to(one.device))
    if isinstance(one, tuple | list) and type(one) is type(other):
        return len(one) == len(other) and all(map(are_same, one, other))
    return isinstance(one, _PLAIN) and isinstance(other, _PLAIN) and one == other


def _globals_read_by(models: Iterable[nn.Module]) -> Iterator[_Place]:
    """Yield what the code of `models` reads by name beside its modules' attributes.

    Globals, and attributes of those that are objects or modules of Python; not functions and
    classes. Code of torch keeps nothing for a forward.
    """
    seen: set[tuple[int, str]] = set()
    waiting = list(_functions_of(models))
    known = {function.__code__ for function in waiting}
    while waiting:
        function = waiting.pop()
        values, names = function.__globals__, list(_names(function.__code__))
        for name in names:
            value = values.get(name, _MISSING)
            if isinstance(value, types.FunctionType) and not _is_torchs(value):
                if value.__code__ not in known:
                    known.add(value.__code__)
                    waiting.append(value)
            elif not isinstance(value, _CODE | type(_MISSING)) and (id(values), name) not in seen:
                seen.add((id(values), name))
                yield _Place(values, name, value, str(values.get("__name__")))
            inner = getattr(value, "__dict__", None)
            if type(inner) is not dict or isinstance(value, types.FunctionType | nn.Module):
                continue
            owner = value.__name__ if isinstance(value, types.ModuleType) else type(value).__name__
            for attribute in names:
                now = inner.get(attribute, _MISSING)
                key = id(inner), attribute
                if now is _MISSING or isinstance(now, _CODE) or key in seen:
                    continue
                seen.add(key)
                yield _Place(inner, attribute, now, owner)


def _is_torchs(thing: Any) -> bool:
    return str(thing.__module__).partition(".")[0] == "torch"


def _functions_of(models: Iterable[nn.Module]) -> Iterator[types.FunctionType]:
    """Yield the functions of the modules' classes, and what stands in their ``forward``."""
    modules = [module for model in models for module in model.modules()]
    classes = {kind for module in modules for kind in type(module).__mro__}
    for kind in classes:
        if not _is_torchs(kind):
            for value in vars(kind).values():
                function = getattr(value, "__func__", value)  # a class method's
                function = getattr(function, "__wrapped__", function)
                if isinstance(function, types.FunctionType):
                    yield function
    for module in modules:
        function = getattr(vars(module).get("forward"), "__func__", None)
        if isinstance(function, types.FunctionType):
            yield function


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code reads, and code inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
