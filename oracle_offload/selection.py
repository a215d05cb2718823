"""Which layers are managed, and in which units they travel.

Managed is a leaf whose class computes with exactly ``nn.Linear.forward`` or ``nn.Conv2d.forward``
and whose tensors are plain floating parameters of its own. Everything else stays resident: what a
parent's code uses the weight of without calling the layer, what is tied to a module that is not
managed, adapters, quantised tensors. Where such a use stands in a branch, which may never be taken,
the layer is managed on trial, see `oracle_offload.layers.trial`. What the rules cannot see (a
weight handed around in a variable) fails the watch over the first forward, see
`oracle_offload.first_forward`.
"""

from __future__ import annotations

import ast
import difflib
import fnmatch
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from .errors import OffloadError
from .geometry import is_dense, memory_of, unit_bytes
from .layers.leaf import has_own_forward, is_managed, layer_type
from .sizes import KIB, MIB

# Methods that compute: where a weight used by name is computed with. Setup methods (diffusers'
# fuse_projections, weight initialisation) are not reached from these.
_ENTRY_METHODS = ("forward", "__call__", "encode", "decode", "forward_features")
_HARMLESS = frozenset(
    {"dtype", "shape", "ndim", "size", "dim", "numel", "nelement", "requires_grad", "is_cuda"}
    | {"itemsize", "element_size", "stride", "layout", "is_floating_point", "is_meta", "is_sparse"}
    | {"grad", "__class__"}
)
_HARMLESS_CALLS = frozenset({"isinstance", "hasattr", "type", "id", "len", "callable"})


@dataclass(frozen=True)
class Leaf:
    """A module to be managed: its dotted name and the block it belongs to."""

    name: str
    module: nn.Module
    block: str
    doubtful: dict[tuple[str, int], str] = field(default_factory=dict)  # see `Layer.doubtful`

    def tensors(self) -> list[Tensor]:
        """Return weight and, where there is one, bias."""
        found = (self.module._parameters.get(name) for name in ("weight", "bias"))
        return [tensor for tensor in found if tensor is not None]


@dataclass(frozen=True)
class Selection:
    """The leaves to manage, in module order, and why other Linear and Conv2d stay resident."""

    leaves: list[Leaf]
    resident: dict[str, str]


def select(root: nn.Module, ignore_modules: Iterable[Any] = ()) -> Selection:
    """Decide which leaves of `root` are managed.

    Parameters
    ----------
    root : nn.Module
        The model.
    ignore_modules : iterable of nn.Module, Tensor or str
        What stays resident: modules (with everything below them), single parameters, or dotted
        names of modules, which may have the wildcards of `fnmatch` (``"blocks.*.attn"``).

    Raises
    ------
    OffloadError
        Meta parameters, a model that is attached already, nothing to manage.
    ValueError
        An `ignore_modules` entry or pattern that names nothing in the model.
    """
    modules = dict(root.named_modules())
    _refuse_meta(modules)
    managed = [
        name or type(root).__name__ for name, module in modules.items() if is_managed(module)
    ]
    if managed:
        raise OffloadError(
            f"{listed(managed)}: attached already, as part of another attach; detach that first "
            "(its manager.detach()), then attach the whole model once."
        )
    ignored_modules, ignored_tensors = _ignored(modules, ignore_modules)
    resident: dict[str, str] = {}
    candidates: dict[str, nn.Module] = {}
    adapters = _below_adapters(modules)
    used = used_directly(modules.values())
    for name, module in modules.items():
        if layer_type(module) is None:
            continue
        reason = (
            ("named in ignore_modules" if id(module) in ignored_modules else "")
            or adapters.get(id(module), "")
            or _certain_use(used.get(id(module)))
            or _unfit(module, ignored_tensors)
        )
        if reason:
            resident[name] = reason
        else:
            candidates[name] = module
    _drop_shared(modules, candidates, resident)
    if not candidates:
        by_reason: dict[str, list[str]] = {}
        for name, reason in resident.items():
            by_reason.setdefault(reason, []).append(name or type(root).__name__)
        why = "; ".join(f"{listed(names, 3)}: {reason}" for reason, names in by_reason.items())
        raise OffloadError(
            f"{type(root).__name__} has no layer to manage: no nn.Linear or nn.Conv2d with plain "
            "floating-point weights" + (f" ({why})" if why else "") + "."
        )
    leaves = [
        Leaf(name, module, _block_of(name, modules), used.get(id(module), (False, {}))[1])
        for name, module in candidates.items()
    ]
    return Selection(leaves, resident)


def group_units(leaves: Sequence[Leaf]) -> list[list[Leaf]]:
    """Group consecutive small leaves of one block, trainable and frozen apart, into units.

    A unit of several leaves does not exceed 4 MiB or 1/256 of the managed bytes, whichever is
    smaller, but may always reach 64 KiB: below that a copy's latency outweighs its bytes.
    """
    total = sum(unit_bytes(leaf.tensors()) for leaf in leaves)
    limit = min(4 * MIB, max(total // 256, 64 * KIB))
    units: list[list[Leaf]] = []
    size, key = 0, None
    for leaf in leaves:
        nbytes = unit_bytes(leaf.tensors())
        leaf_key = leaf.block, any(tensor.requires_grad for tensor in leaf.tensors())
        if units and leaf_key == key and size + nbytes <= limit:
            units[-1].append(leaf)
            size += nbytes
        else:
            units.append([leaf])
            size, key = nbytes, leaf_key
    return units


def _refuse_meta(modules: dict[str, nn.Module]) -> None:
    found = [
        f"{name}.{key}" if name else key
        for name, module in modules.items()
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None and tensor.is_meta
    ]
    if found:
        raise OffloadError(
            f"{listed(found)} {'is' if len(found) == 1 else 'are'} on the meta device, without "
            "values; load the weights (for example with to_empty() and load_state_dict()) before "
            "attaching."
        )


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more


def _ignored(modules: dict[str, nn.Module], entries: Iterable[Any]) -> tuple[set[int], set[int]]:
    ids: set[int] = set()
    tensors: set[int] = set()
    if isinstance(entries, nn.Module | Tensor | str):
        entries = (entries,)
    for entry in entries or ():
        if isinstance(entry, str):
            named = [name for name in modules if fnmatch.fnmatchcase(name, entry)]
            if not named:
                words = [*modules, *(name.rpartition(".")[2] for name in modules)]
                near = difflib.get_close_matches(entry, sorted(set(words) - {""}))
                near += [name for name in modules if entry and name.endswith(f".{entry}")][:3]
                raise ValueError(
                    f"ignore_modules: the model has no module named {entry!r}"
                    + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")
                    + " Names are dotted, with the wildcards of fnmatch: 'blocks.*.attn'."
                )
            for name in named:
                ids.update(id(module) for module in modules[name].modules())
        elif isinstance(entry, nn.Module):
            ids.update(id(module) for module in entry.modules())
        elif isinstance(entry, Tensor):
            tensors.add(id(entry))
        else:
            raise ValueError(
                f"ignore_modules: {entry!r} is neither a module, a parameter nor a module's name"
            )
    return ids, tensors


def _below_adapters(modules: dict[str, nn.Module]) -> dict[int, str]:
    """Find leaves of adapters and of modules that hand their children's weights to one operator."""
    found: dict[int, str] = {}
    for name, module in modules.items():
        if isinstance(module, nn.MultiheadAttention):
            for inner in module.modules():
                found[id(inner)] = f"part of MultiheadAttention '{name}', which computes with it"
        if "base_layer" in module._modules:
            for key, child in module._modules.items():
                if key != "base_layer" and child is not None:
                    for inner in child.modules():
                        found[id(inner)] = f"adapter of '{name}'"
    return found


def _certain_use(use: tuple[bool, Sites] | None) -> str:
    if use is None or not use[0]:
        return ""
    return f"{next(iter(use[1].values()))} uses its weight without calling it"


def _unfit(module: nn.Module, ignored_tensors: set[int]) -> str:
    """Say why the module's own state keeps it from being managed; empty where nothing does."""
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed (parametrised), not a parameter"
    for key, tensor in module._parameters.items():
        if tensor is None:
            continue
        if key not in ("weight", "bias"):
            return f"it has another parameter, '{key}'"
        if type(tensor) is not nn.Parameter or tensor.layout is not torch.strided:
            return f"'{key}' is a {type(tensor).__name__}, not a plain parameter"
        if not tensor.is_floating_point():
            return f"'{key}' is {tensor.dtype}"
        if tensor.numel() == 0:
            return f"'{key}' is empty"
        if not is_dense(tensor):
            return f"'{key}' has gaps or overlaps in memory (strides {tensor.stride()})"
        if id(tensor) in ignored_tensors:
            return f"'{key}' is named in ignore_modules"
    if module._parameters.get("bias") is None and getattr(module, "bias", None) is not None:
        return "its bias is computed, not a parameter"
    replaced = "forward" in module.__dict__ and not has_own_forward(module)
    if replaced and wrapper_of(module) is None:
        return "its forward was replaced"
    return ""


def wrapper_of(module: nn.Module) -> Any | None:
    """Return the object at the end of a chain of LoRA-style wrappers around ``module.forward``.

    Such a wrapper sets ``module.forward`` to its own method and keeps what was there in
    ``org_forward``. The object returned is the one whose ``org_forward`` is the module's own.
    """
    forward = module.__dict__.get("forward")
    for _ in range(16):
        owner = getattr(forward, "__self__", None)
        if owner is None or owner is module:
            return None
        forward = getattr(owner, "org_forward", None)
        if isinstance(forward, types.MethodType) and forward.__self__ is module:
            return owner
    return None


def _drop_shared(
    modules: dict[str, nn.Module], candidates: dict[str, nn.Module], resident: dict[str, str]
) -> None:
    """Leave resident what shares memory with something that is not managed.

    Two managed layers may share a Parameter (each copies the one master); two Parameters in
    overlapping memory may not, because each is re-pointed to memory of its own.
    """
    owners: dict[int, list[str]] = {}
    spans: dict[int, list[tuple[int, int, int, str]]] = {}
    seen: set[int] = set()
    for name, module in modules.items():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is None:
                continue
            owners.setdefault(id(tensor), []).append(name)
            start, end = memory_of(tensor)
            if id(tensor) in seen or start == end:
                continue
            seen.add(id(tensor))
            storage = tensor.untyped_storage().data_ptr()
            spans.setdefault(storage, []).append((start, end, id(tensor), name))
    overlapping: set[int] = set()
    for group in spans.values():
        group.sort()
        for (_, end, first, _), (start, _, second, _) in pairwise(group):
            if start < end:
                overlapping.update((first, second))
    changed = True
    while changed:
        changed = False
        for name, module in list(candidates.items()):
            for tensor in module._parameters.values():
                if tensor is None:
                    continue
                others = [owner for owner in owners[id(tensor)] if owner not in candidates]
                if others:
                    reason = f"its weight is tied to '{others[0]}', which is not managed"
                elif id(tensor) in overlapping:
                    reason = "its memory overlaps another parameter's"
                else:
                    continue
                resident[name] = reason
                del candidates[name]
                changed = True
                break


def _block_of(name: str, modules: dict[str, nn.Module]) -> str:
    """Return the nearest proper ancestor that is an element of a ModuleList or Sequential."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        parent = modules.get(".".join(parts[: length - 1]))
        if isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            return ".".join(parts[:length])
    return ""


# ---- weights used without calling their layer ----


@dataclass(frozen=True)
class Use:
    """``self.<path>.weight`` (or ``bias``) as a value, in a method that computes.

    Attributes
    ----------
    path : tuple of str
        The attributes from ``self`` to the layer; ``"*"`` for an index.
    where : str
        The class and the method.
    certain : bool
        Whether every call comes by: neither the use nor a call that leads to it stands in a branch.
    site : tuple of (str, int)
        File and line, as the frame that reads the attribute has them.
    """

    path: tuple[str, ...]
    where: str
    certain: bool
    site: tuple[str, int]


Sites = dict[tuple[str, int], str]  # where a weight is read as a value, each with its method


def used_directly(modules: Iterable[nn.Module]) -> dict[int, tuple[bool, Sites]]:
    """Find layers whose weight is used without calling them, by `id`.

    Returns
    -------
    dict
        ``(certain, sites)``: whether any use is certain, and where all of them are.
    """
    found: dict[int, tuple[bool, Sites]] = {}
    for module in modules:
        for use in direct_uses(cast("Any", type(module))):
            for target in _resolve(module, use.path):
                if is_managed(target) or layer_type(target) is not None:
                    certain, sites = found.get(id(target), (False, {}))
                    found[id(target)] = certain or use.certain, {use.site: use.where, **sites}
    return found


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
def direct_uses(cls: Any) -> tuple[Use, ...]:
    """Find direct uses of weights in the methods that compute; the class's sources are read once.

    ``.weight.dtype``, ``.weight.shape``, ``isinstance`` and tests for ``None`` do no harm, nor does
    a statement that writes weights in place, on the host; ``.weight.device`` does (it would answer
    the host), and counts as a use.
    """
    methods: dict[str, list[Any]] = {}
    for base in cls.__mro__:
        if base is nn.Module:
            break
        for name, value in vars(base).items():
            function = inspect.unwrap(getattr(value, "__func__", value))
            if isinstance(function, types.FunctionType):
                methods.setdefault(name, []).append(function)
    functions = itertools.chain.from_iterable(methods.values())
    if not any({"weight", "bias"} & _names(function.__code__) for function in functions):
        return ()
    reached = {name: True for name in _ENTRY_METHODS if name in methods}
    readers: dict[str, list[_Reader]] = {}
    waiting = list(reached)
    while waiting:
        name = waiting.pop()
        if name not in readers:
            readers[name] = [_Reader(function) for function in _chain(methods[name])]
        for reader in readers[name]:
            for called, certain in reader.calls.items():
                certain &= reached[name]
                if called in methods and (called not in reached or certain > reached[called]):
                    reached[called] = certain
                    waiting.append(called)
    return tuple(
        Use(path, f"{cls.__name__}.{name}", certain and reached[name], site)
        for name, found in readers.items()
        for reader in found
        for path, certain, site in reader.uses
    )


def _chain(functions: list[Any]) -> Iterator[Any]:
    """Yield a method and those that it overrides, as far as each asks for ``super()``."""
    for function in functions:
        yield function
        if "super" not in _names(function.__code__):
            return


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


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
    uses : list of (path, certain, site)
        See `Use`.
    calls : dict of str to bool
        Each name, and whether it is certain to be come by.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self.uses: list[tuple[tuple[str, ...], bool, tuple[str, int]]] = []
        self.calls: dict[str, bool] = {}
        code = function.__code__
        names = _names(code)
        self.calls = dict.fromkeys(names, False)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return
        self._file, self._line = code.co_filename, code.co_firstlineno - 1
        self._visit(tree, True)

    def _visit(self, node: ast.AST, certain: bool) -> None:
        if isinstance(node, ast.Attribute):
            self.calls[node.attr] = self.calls.get(node.attr, False) or certain
            path = _path_from_self(node.value) if node.attr in ("weight", "bias") else ()
            if path and isinstance(node.ctx, ast.Load):
                line = self._line + (node.end_lineno or node.lineno)
                self.uses.append((path, certain, (self._file, line)))
                return
        if _is_harmless(node):
            return
        for name, value in ast.iter_fields(node):
            unsure = name in _CONDITIONAL.get(type(node), ())
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST):
                    first = isinstance(node, ast.BoolOp) and index == 0
                    self._visit(child, certain and (first or not unsure))


def _is_harmless(node: ast.AST) -> bool:
    """Whether the weights below `node` are asked for nothing that lies in their memory."""
    if isinstance(node, ast.Attribute):
        return node.attr in _HARMLESS and _is_weight(node.value)
    if isinstance(node, ast.Compare):
        return any(map(_is_weight, (node.left, *node.comparators))) and all(
            isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in _HARMLESS_CALLS and any(map(_is_weight, node.args))
    if isinstance(node, ast.Expr):
        return _writes_weight(node.value)
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets) and all(
            _is_weight(_root(target)) for target in targets
        )
    return False


def _is_weight(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("weight", "bias")
        and bool(_path_from_self(node.value))
    )


def _writes_weight(node: ast.AST) -> bool:
    """Whether `node` is a chain of calls on a weight, the last of them in place."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.endswith("_")
        and not node.func.attr.endswith("__")
        and _is_weight(_root(node.func.value))
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
