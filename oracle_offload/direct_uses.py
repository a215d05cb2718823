"""Weights that code uses without calling their layer, as far as its source shows.

Read are the methods that compute: those that ``forward`` reaches, of every class in the model.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from .layers import kinds
from .layers.bytecode import names_in
from .layers.swap import ENTRY_METHODS

_USUAL = frozenset({"weight", "bias"})
_HARMLESS = frozenset(
    {"dtype", "shape", "ndim", "size", "dim", "numel", "nelement", "requires_grad", "is_cuda"}
    | {"itemsize", "element_size", "stride", "layout", "is_floating_point", "is_meta", "is_sparse"}
    | {"grad", "__class__"}
)
_HARMLESS_CALLS = frozenset({"isinstance", "hasattr", "type", "id", "len", "callable"})


@dataclass(frozen=True)
class Use:
    """``self.<path>.<key>`` as a value, in a method that computes; `key` is a Parameter's.

    Attributes
    ----------
    path : tuple of str
        The attributes from ``self`` to the layer; ``"*"`` for an index.
    key : str
        Of the Parameter.
    where : str
        The class and the method.
    certain : bool
        Whether every call comes by: neither the use nor a call that leads to it stands in a branch.
    site : tuple of (str, int)
        File and line, as the frame that reads the attribute has them.
    """

    path: tuple[str, ...]
    key: str
    where: str
    certain: bool
    site: tuple[str, int]


Sites = dict[tuple[str, int], str]  # where a tensor is read as a value, each with its method


@dataclass
class Used:
    """How code uses a layer's tensors without calling the layer.

    Attributes
    ----------
    certain : bool
        Whether any use is.
    sites : dict
        Where all of them are.
    users : dict
        The modules whose code it is, where the use is certain, by `id`.
    """

    certain: bool
    sites: Sites
    users: dict[int, nn.Module]


def used_directly(modules: Iterable[nn.Module]) -> dict[int, Used]:
    """Find layers whose tensors are used without calling them, by `id`."""
    modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    names = frozenset(_kind_names()).union(*(module._parameters for module in modules))
    found: dict[int, Used] = {}
    for module in modules:
        for use in direct_uses(cast("Any", type(module)), names):
            for target in _resolve(module, use.path):
                if target is module or isinstance(target, torch.jit.ScriptModule):
                    continue
                if target._parameters.get(use.key) is None:
                    continue
                used = found.setdefault(id(target), Used(False, {}, {}))
                used.certain |= use.certain
                used.sites = {use.site: use.where, **used.sites}
                if use.certain:
                    used.users[id(module)] = module
    return found


def _kind_names() -> Iterator[str]:
    for kind in kinds.KINDS:
        yield from kind.names


def _resolve(module: nn.Module, path: tuple[str, ...]) -> Iterator[nn.Module]:
    while "base_layer" in module._modules and (not path or path[0] != "base_layer"):
        module = cast("nn.Module", module._modules["base_layer"])  # an adapter stands before it
    if not path:
        yield module
        return
    children = module._modules.values() if path[0] == "*" else [getattr(module, path[0], None)]
    for child in children:
        if isinstance(child, nn.Module):
            yield from _resolve(child, path[1:])


@functools.cache
def direct_uses(cls: Any, keys: frozenset[str] = _USUAL) -> tuple[Use, ...]:
    """Find direct uses of Parameters in the methods that compute; sources are read once.

    `keys` are those of the Parameters that are looked for.

    ``.weight.dtype``, ``.weight.shape``, ``isinstance`` and tests for ``None`` do no harm, nor does
    a statement that writes weights in place, on the host; ``.weight.device`` does (it would answer
    the host), and counts as a use.
    """
    methods: dict[str, list[Any]] = {}
    for base in itertools.takewhile(lambda base: base is not nn.Module, cls.__mro__):
        for name, value in vars(base).items():
            function = inspect.unwrap(getattr(value, "__func__", value))
            if isinstance(function, types.FunctionType):
                methods.setdefault(name, []).append(function)
    functions = itertools.chain.from_iterable(methods.values())
    if not any(keys & names_in(function.__code__) for function in functions):
        return ()
    reached = {name: True for name in ENTRY_METHODS if name in methods}
    readers: dict[str, list[_Reader]] = {}
    waiting = list(reached)
    while waiting:
        name = waiting.pop()
        if name not in readers:
            readers[name] = [_Reader(function, keys) for function in _chain(methods[name])]
        for reader in readers[name]:
            for called, certain in reader.calls.items():
                certain &= reached[name]
                if called in methods and (called not in reached or certain > reached[called]):
                    reached[called] = certain
                    waiting.append(called)
    return tuple(
        Use(path, key, f"{cls.__name__}.{name}", certain and reached[name], site)
        for name, found in readers.items()
        for reader in found
        for path, key, certain, site in reader.uses
    )


def _chain(functions: list[Any]) -> Iterator[Any]:
    """Yield a method and those that it overrides, as far as each asks for ``super()``."""
    for function in functions:
        yield function
        if "super" not in names_in(function.__code__):
            return


_CONDITIONAL = {  # the fields of a statement or expression that may not be reached
    ast.If: ("body", "orelse"),
    ast.IfExp: ("body", "orelse"),
    ast.BoolOp: ("values",),
    ast.Try: ("handlers",),
    ast.Match: ("cases",),
}


class _Reader:
    """One function's direct uses, and the names that it mentions: other methods, perhaps.

    Attributes
    ----------
    uses : list of (path, key, certain, site)
        See `Use`.
    calls : dict of str to bool
        Each name, and whether it is certain to be come by.
    """

    def __init__(self, function: types.FunctionType, keys: frozenset[str]) -> None:
        self._keys = keys
        self.uses: list[tuple[tuple[str, ...], str, bool, tuple[str, int]]] = []
        code = function.__code__
        self.calls = dict.fromkeys(names_in(code), False)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return
        self._file, self._line = code.co_filename, code.co_firstlineno - 1
        self._visit(tree, True)

    def _visit(self, node: ast.AST, certain: bool) -> None:
        if isinstance(node, ast.Attribute):
            self.calls[node.attr] = self.calls.get(node.attr, False) or certain
            path = _path_from_self(node.value) if node.attr in self._keys else ()
            if path and isinstance(node.ctx, ast.Load):
                line = self._line + cast("int", node.end_lineno)
                self.uses.append((path, node.attr, certain, (self._file, line)))
        if self._is_harmless(node):
            return
        for name, value in ast.iter_fields(node):
            unsure = name in _CONDITIONAL.get(type(node), ())
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST):
                    first = isinstance(node, ast.BoolOp) and index == 0
                    self._visit(child, certain and (first or not unsure))

    def _is_harmless(self, node: ast.AST) -> bool:
        """Whether the weights below `node` are asked for nothing that lies in their memory."""
        if isinstance(node, ast.Attribute):
            return node.attr in _HARMLESS and self._is_weight(node.value)
        if isinstance(node, ast.Compare):
            return any(map(self._is_weight, (node.left, *node.comparators))) and all(
                isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return node.func.id in _HARMLESS_CALLS and any(map(self._is_weight, node.args))
        if isinstance(node, ast.Expr):
            return self._writes_weight(node.value)
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return all(self._is_weight(_root(target)) for target in targets)
        return False

    def _is_weight(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr in self._keys
            and bool(_path_from_self(node.value))
        )

    def _writes_weight(self, node: ast.AST) -> bool:
        """Whether `node` is a chain of calls on a weight, the last of them in place."""
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr.endswith("_")
            and not node.func.attr.endswith("__")
            and self._is_weight(_root(node.func.value))
        )


def _root(node: ast.AST) -> ast.AST:
    """Return what ``.data``, indices and calls in place are applied to."""
    while True:
        if isinstance(node, ast.Subscript) or (
            isinstance(node, ast.Attribute) and node.attr == "data"
        ):
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr.endswith("_")
        ):
            node = node.func.value
        else:
            return node


def _path_from_self(node: ast.AST) -> tuple[str, ...]:
    """Return the attribute path of ``self.a.b[i].c``; empty where it does not begin at self."""
    path: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            path.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript):
            path.append("*")
            node = node.value
        elif isinstance(node, ast.Name) and node.id == "self":
            return tuple(reversed(path))
        else:
            return ()
