"""What steps and forwards keep in attributes and globals: each micro-batch has its own.

The attributes of objects that the caller names are exchanged as a whole. Of all else it is found
out while the micro-batches compute: which attributes of modules are written, which of the globals,
closures and class attributes that the models' code reads, and what those and the modules hold in
lists, sets, dicts and objects. Such a one is exchanged from then on, too. But who sets it before
reading it, and who goes on from what the one before has left, looks the same from outside: so it is
refused, with its name, where the micro-batches leave it different.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from enum import Enum, EnumType
from functools import partial
from itertools import chain, islice
from operator import is_
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...engine.geometry import count_writes
from ...errors import OffloadError
from ...layers.swap import base_class

_MISSING: Any = type("Missing", (), {"__repr__": lambda self: "missing"})()
_CODE = types.FunctionType | type | types.ModuleType | types.BuiltinFunctionType
_CALLED = (types.FunctionType, types.MethodType, partial)
_PLAIN = bool | int | float | str | bytes | torch.dtype | torch.device
# What derives from a dict is asked and written as a dict, whatever it makes of that.
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
_EMPTY: dict[type, Any] = {dict: {}, list: [], set: set()}
_MOST_ITEMS = 1000  # of what holds more nothing is looked at: a vocabulary, say, or a table
_DEEPEST = 3  # containers and objects within each other
_OF_MODULES = vars(nn.Module()).keys()
# Whose objects and classes keep nothing that a forward reads, or do so on purpose for all.
_PASSED_OVER = (sys.stdlib_module_names - {"__main__"}) | {"torch", "oracle_offload"}


class Attributes(NamedTuple):
    """All of it at one moment."""

    named: list[tuple[dict[str, Any], dict[str, Any]]]  # dicts, each with what it held
    found: dict[tuple[int, str], Any]  # by the `id` of the dict, and the name
    variables: dict[ContextVar[Any], Any]  # of the context; none where another thread has noted it


class _Place(NamedTuple):
    """One attribute that was found to be written."""

    values: Any  # of which it is one: a dict, or what is asked like one
    name: str
    before: Any  # what it was before the first micro-batch wrote it
    owner: str

    def joined(self, of_each: Sequence[Any]) -> Any:
        """Return what each has added to a container, with what was there; or `_MISSING`."""
        return _joined(self.before, of_each) if isinstance(self.values, _Content) else _MISSING


class _Content:
    """What a container holds, like a dict of one entry; the same object as long as it is that."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.kind = next(kind for kind in _CONTAINERS if isinstance(held, kind))
        self.last = self._copy()

    def _copy(self) -> Any:
        if isinstance(self.held, dict):
            return dict(self.kind.items(self.held))
        return (set if self.kind is set else list)(self.kind.__iter__(self.held))

    def _is_last(self) -> bool:
        if self.kind.__len__(self.held) != len(self.last):
            return False
        if self.kind is set:
            return bool(self._copy() == self.last)
        of_keys = all(map(is_, self.kind.__iter__(self.held), self.last))
        if isinstance(self.held, dict):
            return of_keys and all(map(is_, self.kind.values(self.held), self.last.values()))
        return of_keys

    def get(self, _: str, __: Any = None) -> Any:
        if not self._is_last():
            self.last = self._copy()
        return self.last

    def __setitem__(self, _: str, value: Any) -> None:
        if self._is_last() and value is self.last:
            return
        self.kind.clear(self.held)
        if isinstance(self.held, dict):
            for key, one in value.items():
                self.kind.__setitem__(self.held, key, one)
        else:
            (set.update if self.kind is set else self.kind.extend)(self.held, value)
        self.last = value


class _Bytes:
    """What an array of numpy holds, or a bytearray, like a dict of one entry."""

    def __init__(self, held: Any) -> None:
        self._bytes = memoryview(held).cast("B")
        self._last = self._bytes.tobytes()

    def get(self, _: str, __: Any = None) -> bytes:
        if self._bytes != self._last:
            self._last = self._bytes.tobytes()
        return self._last

    def __setitem__(self, _: str, value: bytes) -> None:
        self._bytes[:] = self._last = value


class _Slots:
    """The attributes of an object that its classes have slots for, like a dict."""

    def __init__(self, one: object) -> None:
        self._one = one

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self._one, name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._one, name, value)

    def pop(self, name: str, *_: Any) -> None:
        if hasattr(self._one, name):
            object.__delattr__(self._one, name)


class _Trained:
    """Which parameters of a model require gradients, like a dict of one entry."""

    def __init__(self, model: nn.Module) -> None:
        # Weakly: some may be lent, in another thread too, and code that keeps those is refused.
        self._parameters = [weakref.ref(one) for one in model.parameters()]
        self._last: tuple[bool, ...] = ()
        self.get("")

    def get(self, _: str, __: Any = None) -> tuple[bool, ...]:
        found = (one() for one in self._parameters)
        now = tuple(one is not None and one.requires_grad for one in found)
        if now != self._last:
            self._last = now
        return self._last

    def __setitem__(self, _: str, value: tuple[bool, ...]) -> None:
        for parameter, trained in zip(self._parameters, value, strict=True):
            one = parameter()
            if one is not None and one.requires_grad is not trained:
                one.requires_grad_(trained)


class _Writes:
    """How often a tensor was written in place: its values are not exchanged, so it is refused."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get(self, _: str, __: Any = None) -> int:
        return count_writes(self._tensor)

    def __setitem__(self, _: str, value: int) -> None:
        pass


class _Cell:
    """A variable of a function around, like a dict of one entry."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, _: str, default: Any = None) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # it is empty
            return default

    def __setitem__(self, _: str, value: Any) -> None:
        self._cell.cell_contents = value

    def pop(self, *_: Any) -> None:
        del self._cell.cell_contents


class _OfClass:
    """The attributes of a class, like a dict."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def get(self, name: str, default: Any = None) -> Any:
        return vars(self._kind).get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._kind, name, value)

    def pop(self, name: str, *_: Any) -> None:
        if name in vars(self._kind):
            delattr(self._kind, name)


class Places:
    """Which attributes are exchanged.

    Parameters
    ----------
    own : sequence of object
        Those whose attributes are, with what they hold; or classes, or containers.
    """

    def __init__(self, own: Sequence[object] = ()) -> None:
        self._own = [one for one in own if type(getattr(one, "__dict__", None)) is dict]
        self._own_content = [one for one in own if all(one is not other for other in self._own)]
        self._found: dict[tuple[int, str], _Place] = {}
        self._watched: list[_Place] = []
        self._watched_of: dict[int, list[_Place]] = {}  # by the `id` of a block
        self._looks_at_all = False
        self._hooks: dict[int, _Content] = {}  # by the `id` of what modules keep them in
        self._may_differ: set[int] = set()  # the `id` of what somebody has named
        self._thread, self._variables = get_ident(), dict(copy_context())
        self._has_variables = False  # whether a micro-batch has set one

    def __bool__(self) -> bool:
        return bool(self._own or self._found or self._has_variables)

    def _named(self) -> list[dict[str, Any]]:
        found = [vars(one) for one in self._own]
        for one in self._own:
            if not isinstance(one, nn.Module | types.ModuleType):
                found += [value for value in vars(one).values() if type(value) is dict]
        return found

    def now(self) -> Attributes:
        """Return what they are."""
        self._look_at_watched()
        here = get_ident() == self._thread  # a backward of another thread has a context of its own
        variables = dict(copy_context()) if here else {}
        self._has_variables |= any(
            value is not self._variables.get(one, _MISSING) for one, value in variables.items()
        )
        return Attributes(
            [(values, dict(values)) for values in self._named()],
            {key: place.values.get(place.name, _MISSING) for key, place in self._found.items()},
            variables,
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
        if get_ident() == self._thread:
            now = dict(copy_context())
            for variable in now.keys() | attributes.variables.keys():
                wanted = attributes.variables.get(variable, _MISSING)
                if wanted is _MISSING:
                    wanted = self._variables.get(variable, now.get(variable))
                if wanted is not now.get(variable, _MISSING):
                    variable.set(wanted)

    def last(self, of_each: Sequence[Attributes]) -> Attributes:
        """Return what they are after all micro-batches: as the last has left them.

        But a container to which each has only added has what all have added, in their order; no
        micro-batch finds what another has added.
        """
        found = dict(of_each[-1].found)
        for key, place in self._found.items():
            joined = place.joined([one.found.get(key, place.before) for one in of_each])
            if joined is not _MISSING:
                found[key] = joined
        return of_each[-1]._replace(found=found, variables=self._variables)

    # ---- what is found out ----

    def watch(self, models: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        """Look from now on at the globals that the code of `models` reads, and what modules hold.

        What the modules of one block alone hold is looked at where the block has computed, and
        where a micro-batch sets out and ends: there are many of them.
        """
        own = {id(values) for values in self._named()}
        seen = set(own)
        named = list(self._within_own(seen))
        self._may_differ = {id(place.values) for place in named}
        shared = _held_by_several(blocks, seen)
        of_blocks = seen | shared
        self._watched_of = {id(block): list(_held_by([block], of_blocks)) for block in blocks}
        seen |= of_blocks - shared
        self._watched = [*named, *_held_by(models, seen)]
        self._watched += [p for p in _globals_read_by(models, seen) if id(p.values) not in own]
        for model in models:
            trained = _Trained(model)
            name = "requires_grad"
            self._watched.append(
                _Place(trained, name, trained.get(name), base_class(model).__name__)
            )

    def _within_own(self, seen: set[int]) -> Iterator[_Place]:
        for one in self._own_content:
            if isinstance(one, type):
                yield from _of_class(one, seen)
            else:
                yield from _within(one, "own", type(one).__name__, seen)
        for one in self._own:
            of_torch = _OF_MODULES if isinstance(one, nn.Module) else ()
            if not isinstance(one, types.ModuleType):
                for name in vars(one).keys() - of_torch:
                    yield from _within(vars(one)[name], name, type(one).__name__, seen)

    def look_at_all(self) -> None:
        """Look at what every module holds when it is next asked what is there."""
        self._looks_at_all = True

    def look_at(self, block: nn.Module) -> None:
        """Look at what the modules of a block hold, which has computed."""
        self._look(self._watched_of.get(id(block), ()))

    def _look_at_watched(self) -> None:
        self._look(self._watched)
        if self._looks_at_all:
            self._looks_at_all = False
            self._look(chain.from_iterable(self._watched_of.values()))

    def _look(self, places: Iterable[_Place]) -> None:
        for place in places:
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

    def hooked(self, hooks: Any) -> None:
        """Take the hooks of a module, to which a micro-batch is about to add one."""
        if isinstance(hooks, dict) and id(hooks) not in self._hooks:
            content = self._hooks[id(hooks)] = _Content(hooks)
            self._found[id(content), "hooks"] = _Place(content, "hooks", content.last, "a module")

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
            have become the same for all: it is computed once and kept. To a container each may
            have added: see `last`.
        """
        for key, place in self._found.items():
            first, *others = (one.found.get(key, place.before) for one in of_each)
            if id(place.values) in self._may_differ:
                continue
            new = place.before is _MISSING or place.before is None
            if all(are_same(first, other) for other in others) and (
                new or are_same(place.before, first)
            ):
                continue
            if place.joined([first, *others]) is not _MISSING:
                continue
            raise OffloadError(
                f"the steps leave different {place.name!r} of {place.owner}: what one micro-batch "
                "leaves there reaches the next in another order. If each sets it before it is "
                "read, give each its own: own=[...] with the object (or Python's module) that "
                "has it. Else pass interleave=False."
            )


def _joined(before: Any, of_each: Sequence[Any]) -> Any:
    """Return what was there before with what each has added, in their order; or `_MISSING`.

    Of entries of dicts that several have added, those that are containers are joined too.
    """
    if not any(
        isinstance(before, kind) and all(isinstance(one, kind) for one in of_each)
        for kind in _EMPTY
    ):
        return _MISSING
    if isinstance(before, set):
        return before.union(*of_each) if all(before <= one for one in of_each) else _MISSING
    if isinstance(before, list):
        have_before = all(len(one) >= len(before) and all(map(is_, before, one)) for one in of_each)
        added = chain.from_iterable(one[len(before) :] for one in of_each)
        return [*before, *added] if have_before else _MISSING
    if not all(before.keys() <= one.keys() for one in of_each):
        return _MISSING
    joined: dict[Any, Any] = {}
    for name in dict.fromkeys(chain(before, *of_each)):
        values = [one[name] for one in of_each if name in one]
        joined[name] = values[0]
        was = before.get(name)  # None is as good as missing: it is computed once and kept
        if not all(are_same(values[0] if was is None else was, value) for value in values):
            empty = None if name in before else _EMPTY.get(type(values[0]))
            joined[name] = _joined(empty, values)
            if joined[name] is _MISSING:
                return _MISSING
    return joined


def missing_or(values: dict[str, Any], name: str) -> Any:
    """Return what a dict has under a name, as `Places.written` gets it."""
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
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_same(one[name], other[name]) for name in one)
    if isinstance(one, set) and isinstance(other, set):
        return one == other
    return isinstance(one, _PLAIN) and isinstance(other, _PLAIN) and one == other


def _held_by(models: Iterable[nn.Module], seen: set[int]) -> Iterator[_Place]:
    """Yield what modules hold in containers and objects, but not those whose `id` is in `seen`."""
    for module in (module for model in models for module in model.modules()):
        for name in vars(module).keys() - _OF_MODULES:
            yield from _few(_within(vars(module)[name], name, base_class(module).__name__, seen))


def _few(places: Iterable[_Place]) -> list[_Place]:
    """Return them, or none where they are too many to be looked at in each turn."""
    found = list(islice(places, _MOST_ITEMS + 1))
    return found if len(found) <= _MOST_ITEMS else []


def _held_by_several(blocks: Iterable[nn.Module], seen: set[int]) -> set[int]:
    """Return the `id` of what more than one of them holds."""
    once: set[int] = set()
    several: set[int] = set()
    for block in blocks:
        of_block = set(seen)
        deque(_held_by([block], of_block), maxlen=0)
        several |= once & of_block
        once |= of_block - seen
    return several


def _within(value: Any, name: str, owner: str, seen: set[int], depth: int = 0) -> Iterator[_Place]:
    """Yield the containers and objects that `value` is, or holds, and tensors and arrays."""
    if isinstance(value, tuple):
        yield from _within_each(value, name, owner, seen, depth)
    elif isinstance(value, _CALLED):
        yield from _within_each(_held_by_call(value), name, owner, seen, depth)
    elif id(value) in seen or isinstance(value, nn.Module | nn.Parameter):
        return
    elif isinstance(value, Tensor):
        seen.add(id(value))
        yield _Place(writes := _Writes(value), name, writes.get(name), owner)
    elif _are_bytes(value):
        seen.add(id(value))
        yield _Place(held := _Bytes(value), name, held.get(name), owner)
    elif _is_container(value):
        if len(value) <= _MOST_ITEMS:
            seen.add(id(value))
            yield _Place(content := _Content(value), name, content.last, owner)
            inner = content.last
            each = inner.values() if isinstance(inner, dict) else inner
            yield from _within_each(each, name, owner, seen, depth)
        yield from _within_object(value, name, owner, seen, depth)
    elif isinstance(value, types.SimpleNamespace | UserDict) or _is_an_object(value):
        for kind in type(value).__mro__:
            yield from _of_class(kind, seen)
        yield from _within_object(value, name, owner, seen, depth)


def _is_container(value: Any) -> bool:
    """Whether each has its own; what derives from a list or a set is shared by all."""
    return isinstance(value, dict) or type(value) in _CONTAINERS


def _within_object(
    value: Any, name: str, owner: str, seen: set[int], depth: int
) -> Iterator[_Place]:
    """Yield what the attributes of an object are, and hold."""
    inner = getattr(value, "__dict__", None)
    if type(inner) is dict and id(inner) not in seen and len(inner) <= _MOST_ITEMS:
        seen.add(id(inner))
        yield _Place(content := _Content(inner), name, content.last, owner)
        if depth < _DEEPEST:
            for attribute, one in list(inner.items()):
                yield from _within(one, attribute, owner, seen, depth + 1)
    slots = _Slots(value)
    for attribute in _slots_of(type(value)):
        if (one := slots.get(attribute, _MISSING)) is not _MISSING:
            seen.add(id(value))
            yield _Place(slots, attribute, one, type(value).__name__)
            if depth < _DEEPEST:
                yield from _within(one, attribute, owner, seen, depth + 1)


def _slots_of(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        if not _is_passed_over(one):
            slots = vars(one).get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__"):
                    yield f"_{one.__name__.lstrip('_')}{name}" if _is_private(name) else name


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _are_bytes(value: Any) -> bool:
    if not isinstance(value, bytearray) and type(value).__module__ != "numpy":
        return False
    try:
        view = memoryview(value)
    except (TypeError, ValueError):
        return False
    return not view.readonly and view.c_contiguous and 0 < view.nbytes <= 8 * _MOST_ITEMS


def _held_by_call(value: Any) -> tuple[Any, ...]:
    """Return what is handed to a function at each call, and the function's attributes."""
    if isinstance(value, partial):
        return value.args, value.keywords, value.func
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    return value.__defaults__, value.__kwdefaults__, vars(value)


def _within_each(
    held: Iterable[Any], name: str, owner: str, seen: set[int], depth: int
) -> Iterator[_Place]:
    if depth < _DEEPEST:
        for one in list(held):
            yield from _within(one, name, owner, seen, depth + 1)


def _is_an_object(value: Any) -> bool:
    """Whether it is of a class whose objects keep what somebody has set."""
    if isinstance(value, nn.Module | Tensor | Enum | _CODE) or _is_passed_over(type(value)):
        return False
    has_slots = next(_slots_of(type(value)), None) is not None
    return has_slots or type(getattr(value, "__dict__", None)) is dict


def _of_class(kind: type, seen: set[int], names: Container[str] | None = None) -> Iterator[_Place]:
    """Yield the attributes of a class that are no code, or a forward: all, or those of `names`."""
    if id(kind) in seen or isinstance(kind, EnumType) or _is_passed_over(kind):
        return
    if names is None:
        seen.add(id(kind))
    values = _OfClass(kind)
    for name, value in list(vars(kind).items()):
        if names is not None and name not in names:
            continue
        if name == "forward" and issubclass(kind, nn.Module):
            yield _Place(values, name, value, kind.__name__)
        elif not name.startswith("__") and not isinstance(value, _CODE | nn.Module):
            if not hasattr(type(value), "__get__"):
                yield _Place(values, name, value, kind.__name__)
            yield from _within(value, name, kind.__name__, seen)


def _globals_read_by(models: Iterable[nn.Module], held: set[int]) -> Iterator[_Place]:
    """Yield what the code of `models` reads by name, in addition to its modules' attributes.

    Globals, variables of functions around, attributes of classes and of those that are objects or
    modules of Python, and what they hold; and what functions that it calls by name read so. Code of
    torch keeps nothing for a forward. `held` has the `id` of what is passed over.
    """
    for kind in {kind for model in models for m in model.modules() for kind in type(m).__mro__}:
        yield from _of_class(kind, held)
    yield from _Reading(held).of(_functions_of(models))


class _Reading:
    """What code reads by name.

    Parameters
    ----------
    held : set of int
        The `id` of what is passed over.
    """

    def __init__(self, held: set[int]) -> None:
        self._held = held
        self._seen: set[tuple[int, str]] = set()
        self._known: set[tuple[types.CodeType, int]] = set()
        self._waiting: list[tuple[types.FunctionType, Any]] = []

    def of(self, functions: Iterable[types.FunctionType]) -> Iterator[_Place]:
        """Yield what functions read, and those that they call."""
        for function in functions:
            self._call(function, None)
        while self._waiting:
            function, bound = self._waiting.pop()
            names, owner = list(_names(function.__code__)), function.__qualname__
            yield from self._around(function)
            yield from _within(function, function.__name__, owner, self._held, _DEEPEST - 2)
            values = function.__globals__
            yield from self._attributes(values, names, str(values.get("__name__")), 0)
            yield from self._look(bound, owner, names, owner, 0)

    def _call(self, value: Any, bound: Any) -> None:
        if isinstance(value, partial):
            self._call(value.func, None)
        elif isinstance(value, property):
            self._call(value.fget, bound)
        elif isinstance(value, types.MethodType):
            self._call(value.__func__, value.__self__)
        elif isinstance(value, classmethod | staticmethod):
            self._call(value.__func__, bound)
        elif isinstance(value, types.FunctionType) and not _is_passed_over(value):
            bound = None if isinstance(bound, nn.Module) else bound
            if (key := (value.__code__, id(bound))) not in self._known:
                self._known.add(key)
                self._waiting.append((value, bound))

    def _around(self, function: types.FunctionType) -> Iterator[_Place]:
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in closure:
            value = (around := _Cell(cell)).get(name, _MISSING)
            if id(cell) not in self._held and not isinstance(value, _CODE | nn.Module):
                self._held.add(id(cell))
                yield _Place(around, name, value, function.__qualname__)
                yield from _within(value, name, function.__qualname__, self._held, _DEEPEST - 1)

    def _attributes(
        self, values: dict[str, Any], names: list[str], owner: str, depth: int
    ) -> Iterator[_Place]:
        """Yield what a dict has of `names`, and what those are asked for."""
        for name in names:
            value = values.get(name, _MISSING)
            if value is _MISSING or (id(values), name) in self._seen:
                continue
            if not isinstance(value, _CODE | nn.Module):
                self._seen.add((id(values), name))
                yield _Place(values, name, value, owner)
                if _is_container(value) or isinstance(value, tuple | UserDict | Tensor):
                    yield from _few(_within(value, name, owner, self._held, _DEEPEST - 2))
                elif _are_bytes(value):
                    yield from _within(value, name, owner, self._held, _DEEPEST)
            yield from self._look(value, name, names, owner, depth)

    def _look(
        self, value: Any, name: str, names: list[str], owner: str, depth: int
    ) -> Iterator[_Place]:
        """Yield the attributes of an object or a class that code names, and follow its calls."""
        if value is None or isinstance(value, _PLAIN | nn.Module) or depth > _DEEPEST:
            return
        if isinstance(value, _CALLED):
            self._call(value, None)
            yield from _within(value, name, owner, self._held, _DEEPEST - 2)
            return
        if isinstance(value, types.ModuleType):
            if not _is_in_passed_over(value.__name__):
                yield from self._attributes(vars(value), names, value.__name__, depth + 1)
            return
        kind = value if isinstance(value, type) else type(value)
        if not _is_passed_over(kind):
            for one in kind.__mro__:
                for named in names:
                    self._call(vars(one).get(named), value)
        if isinstance(value, type):
            yield from _of_class(value, self._held, names)
            for inner in map(vars(value).get, names):
                if isinstance(inner, type):
                    yield from self._look(inner, inner.__name__, names, owner, depth + 1)
            return
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            yield from self._attributes(attributes, names, kind.__name__, depth + 1)
        slots = _Slots(value)
        for named in {*_slots_of(kind)} & {*names}:
            if (one := slots.get(named, _MISSING)) is not _MISSING:
                yield _Place(slots, named, one, kind.__name__)
                yield from self._look(one, named, names, owner, depth + 1)


def _is_passed_over(thing: type | types.FunctionType) -> bool:
    return _is_in_passed_over(str(thing.__module__))


def _is_in_passed_over(name: str) -> bool:
    return name.partition(".")[0] in _PASSED_OVER


def _functions_of(models: Iterable[nn.Module]) -> Iterator[types.FunctionType]:
    """Yield the functions of the modules' classes, and those that replace their ``forward``."""
    modules = [module for model in models for module in model.modules()]
    classes = {kind for module in modules for kind in type(module).__mro__}
    for kind in classes:
        if not _is_passed_over(kind):
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
