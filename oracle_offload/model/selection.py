"""Which layers are managed, and in which units they travel.

A leaf whose class computes with exactly the forward of one of `oracle_offload.layers.kinds` is
managed with its own operator, if its tensors are plain floating parameters of its own or quantised
in a way that is known (`oracle_offload.layers.formats`). Every other plain floating parameter is
lent to the forward that computes with it (`oracle_offload.layers.any`), unless it is small. What
stays resident: small tensors, adapters, what is tied to a tensor that is not managed.

Code that uses a weight without calling its layer reads it while the model computes, and gets what
borrows it (`oracle_offload.layers.handle`): it has no say here.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core import ALIGNMENT
from ..engine.geometry import memory_of, tensor_bytes, unit_bytes
from ..engine.operators import tensors_in
from ..errors import OffloadError
from ..host.sizes import KIB, MIB, format_size
from ..layers.any import AnyLayer, any_kind
from ..layers.formats import held_tensors
from ..layers.kinds import layer_type
from ..layers.leaf import Leaf, unfit_tensor
from ..layers.managed import HANDLE, casts_layerwise, is_managed
from ..layers.quantised import QuantisedLayer

SMALL_BYTES = 64 * KIB  # a tensor without an operator of its own stays resident below that
# But together they do not take more of the device than this share of the model (or the first size,
# where the model is small), and never more than the second.
_SMALL_SHARE = 0.01
SMALL_TOGETHER = MIB, 64 * MIB


class NothingToManage(OffloadError):
    """The model has no layer to manage."""


@dataclass(frozen=True)
class Chosen:
    """A module to be managed: its dotted name, its kind and the block it belongs to."""

    name: str
    module: nn.Module
    kind: type[Leaf]
    block: str

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are to be on the host."""
        return list(self.kind.named_tensors(self.module).values())


Unit = list[Chosen]


@dataclass(frozen=True)
class Selection:
    """The leaves to manage, in module order.

    Why others stay resident: layers of a kind that has an operator, by name, and other parameters.
    """

    leaves: list[Chosen]
    resident: dict[str, str]
    parameters: dict[str, str]


def select(root: nn.Module, ignore_modules: Iterable[Any] = ()) -> Selection:
    """Decide which leaves of `root` are managed.

    Parameters
    ----------
    root : nn.Module
        The model.
    ignore_modules : iterable of nn.Module, Tensor or str
        What stays resident: modules (with everything below them) and single parameters, by object
        or by dotted name, which may have the wildcards of `fnmatch` (``"blocks.*.attn"``). A module
        that is managed already stays so, by its own manager.

    Raises
    ------
    OffloadError
        Meta parameters, a model that is attached already, nothing to manage.
    ValueError
        An `ignore_modules` entry or pattern that names nothing in the model.
    """
    modules = dict(root.named_modules())
    _refuse_meta(modules)
    ignored_modules, _ = _ignored(modules, ignore_modules)
    managed = [
        name or type(root).__name__
        for name, module in modules.items()
        if is_managed(module) and id(module) not in ignored_modules
    ]
    if managed:
        raise OffloadError(
            f"{listed(managed)}: attached already, as part of another attach; detach that first "
            "(its manager.detach()), then attach the whole model once."
        )
    return choose(root, ignore_modules)


def choose(root: nn.Module, ignore_modules: Iterable[Any] = ()) -> Selection:
    """Decide as `select` does, of a model on the meta device, too."""
    modules = dict(root.named_modules())
    ignored_modules, ignored_tensors = _ignored(modules, ignore_modules)
    resident: dict[str, str] = {}
    leaves: list[Chosen] = []
    adapters = _below_adapters(modules)
    lenders = _Lenders(modules)
    parameters: dict[str, str] = {}
    others: list[tuple[str, nn.Module, str]] = []
    for name, module in modules.items():
        kind = layer_type(module)
        reason = (
            "named in ignore_modules" if id(module) in ignored_modules else ""
        ) or adapters.get(id(module), "")
        if kind is None or (kind is not QuantisedLayer and lenders.takes_from(module)):
            others.append((name, module, reason))
            continue
        reason = reason or _unfit(kind, module, ignored_tensors)
        if reason:
            resident[name] = reason
            continue
        leaves.append(Chosen(name, module, kind, _block_of(name, modules)))
    lent = lenders.lend(others, ignored_tensors, parameters)
    _keep_small(root, lent, parameters)
    leaves.extend(_lending_leaves(lent, modules))
    order = {name: number for number, name in enumerate(modules)}
    leaves.sort(key=lambda leaf: order[leaf.name])
    leaves = _drop_shared(modules, leaves, resident, parameters)
    for name, reason in list(parameters.items()):  # of a layer that a parent takes them from
        owner = _owner_of(name, modules)
        if layer_type(modules[owner]) is not None:
            resident.setdefault(owner, reason)
            del parameters[name]
    if not leaves:
        by_reason: dict[str, list[str]] = {}
        for name, reason in {**resident, **parameters}.items():
            by_reason.setdefault(reason, []).append(name or type(root).__name__)
        why = "; ".join(f"{listed(names, 3)}: {reason}" for reason, names in by_reason.items())
        raise NothingToManage(
            f"{type(root).__name__} has no layer to manage: no Linear, convolution or embedding "
            "with plain floating-point weights" + (f" ({why})" if why else "") + "."
        )
    return Selection(leaves, resident, parameters)


def choose_again(root: nn.Module, lost: Mapping[str, weakref.ref[nn.Module]]) -> list[Chosen]:
    """Return what replaced layers that were let go, as far as `attach` would manage it.

    Parameters
    ----------
    root : nn.Module
        The attached model.
    lost : dict of str to weak references
        The layers, by name; where they are gone, others may have their names.
    """
    if not lost:
        return []
    modules = dict(root.named_modules())
    names = {id(module): name for name, module in modules.items()}
    wanted = {names.get(id(reference()), name) for name, reference in lost.items()}
    kinds = {
        name: kind
        for name, module in modules.items()
        if HANDLE not in module.__dict__ and (kind := layer_type(module)) is not None
    }
    wanted = {name for name in wanted if name in kinds and not kinds[name].unfit(modules[name])}
    if not wanted:
        return []
    others = [modules[name] for name in kinds if name not in wanted]
    try:
        return [leaf for leaf in choose(root, others).leaves if leaf.name in wanted]
    except NothingToManage:
        return []


@dataclass(frozen=True)
class _Lent:
    """A Parameter to be lent: its full name, the module in whose forward that happens, and why."""

    name: str
    tensor: Tensor
    lender: str
    why: str


class _Lenders:
    """Which module's forward computes with a Parameter that has no operator of its own."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._names = {id(module): name for name, module in modules.items()}

    def takes_from(self, module: nn.Module) -> bool:
        """Whether the tensors of `module` are lent for the call of another, or around its own."""
        return self._attention_over(module) is not None or casts_layerwise(module)

    def _attention_over(self, module: nn.Module) -> str | None:
        """Return the ``nn.MultiheadAttention`` that `module` is part of, by name."""
        name = self._names[id(module)]
        while name:
            name = name.rpartition(".")[0]
            if isinstance(self._modules[name], nn.MultiheadAttention):
                return name
        return None

    def lend(
        self,
        others: list[tuple[str, nn.Module, str]],
        ignored_tensors: set[int],
        resident: dict[str, str],
    ) -> list[_Lent]:
        """Return what can be lent, and add to `resident` why the rest cannot."""
        lent = []
        for name, module, stays in others:
            own = {**module._parameters, **held_tensors(module)}
            lender, reason, why_lent = ("", stays, "") if stays else self._lender_of(name, module)
            for key, tensor in own.items():
                if tensor is None:
                    continue
                full = f"{name}.{key}" if name else key
                plain = nn.Parameter if key in module._parameters else Tensor
                why = reason or _unfit_tensor(key, tensor, plain, ignored_tensors)
                if why:
                    resident[full] = why
                else:
                    lent.append(_Lent(full, tensor, lender, why_lent))
        return lent

    def _lender_of(self, name: str, module: nn.Module) -> tuple[str, str, str]:
        """Return in whose forward `module` has its tensors, why in none, and why it is lent."""
        if isinstance(module, torch.jit.ScriptModule):
            return "", f"{name or 'the model'} is compiled TorchScript", ""
        why = f"{type(module).__name__} has no operator of its own here"
        lender: str = name
        if casts_layerwise(module):
            why = "layerwise casting replaces its weight around each call"
        elif (attention := self._attention_over(module)) is not None:
            why = _part_of(attention)
            lender = attention
        if getattr(module, "max_norm", None) is not None:
            return "", "max_norm writes its weight in forward", ""
        while type(self._modules[lender]).forward is nn.Module.forward:
            if not lender:
                return "", "no module that it is part of has a forward", ""
            lender = lender.rpartition(".")[0]
        return lender, "", why


def _part_of(attention: str) -> str:
    return f"part of MultiheadAttention '{attention}', which computes with it"


def _keep_small(root: nn.Module, lent: list[_Lent], resident: dict[str, str]) -> None:
    """Take from `lent` what is small, as long as all that is small is little together.

    Parameters alone: tensors that a kernel's object holds would stay where they are, even on host.
    """
    model = {id(p): tensor_bytes(p) for p in root.parameters() if p.layout is torch.strided}
    most = min(max(_SMALL_SHARE * sum(model.values()), SMALL_TOGETHER[0]), SMALL_TOGETHER[1])
    parameters = [row for row in lent if type(row.tensor) is nn.Parameter]
    small = {id(row.tensor): row for row in parameters if tensor_bytes(row.tensor) < SMALL_BYTES}
    kept, together = set(), 0
    for key, row in sorted(small.items(), key=lambda item: tensor_bytes(item[1].tensor)):
        together += tensor_bytes(row.tensor)
        if together <= most:
            kept.add(key)
    for row in [row for row in lent if id(row.tensor) in kept]:
        lent.remove(row)
        size = format_size(tensor_bytes(row.tensor))
        resident[row.name] = f"{row.why}, and {size} are too small to stream"


def _lending_leaves(lent: list[_Lent], modules: dict[str, nn.Module]) -> list[Chosen]:
    """Return one leaf for each module that tensors are lent to."""
    by_lender: dict[str, list[str]] = {}
    for row in lent:
        start = len(row.lender) + 1 if row.lender else 0
        by_lender.setdefault(row.lender, []).append(row.name[start:])
    return [
        Chosen(
            lender,
            modules[lender],
            any_kind(tuple(names), around_call=casts_layerwise(modules[lender])),
            _block_of(lender, modules),
        )
        for lender, names in by_lender.items()
    ]


def place_bytes(unit: Sequence[Chosen], all_locked: bool) -> int:
    """Return the bytes that a unit takes in the arena; 0 where it is read from locked memory."""
    if all_locked and not any(leaf.kind.needs_place for leaf in unit):
        return 0
    return unit_bytes([tensor for leaf in unit for tensor in leaf.tensors()])


def least_bytes(units: Sequence[Sequence[Chosen]], all_locked: bool = False) -> int:
    """Return the least bytes that an arena for these units must have.

    Two of the largest: one is computed with while the next arrives. What is lent to a module stays
    while everything below it computes, and each unit that stays splits the rest, so that one place
    more is needed for the largest.
    """
    sizes = [place_bytes(unit, all_locked) for unit in units]
    largest = max(sizes)
    staying: dict[str, int] = {
        leaf.name: number
        for number, unit in enumerate(units)
        for leaf in unit
        if leaf.kind.lends_to_code
    }
    most = ALIGNMENT
    for leaf in (leaf for unit in units for leaf in unit):
        above, name = set(), leaf.name
        while name:
            name = name.rpartition(".")[0]
            if name in staying:
                above.add(staying[name])
        places = max(2, len(above) + 1)
        most = max(most, places * largest + sum(sizes[number] for number in above))
    return most


def group_units(leaves: Sequence[Chosen]) -> list[list[Chosen]]:
    """Group consecutive small leaves of one block into units.

    Trainable and frozen ones stay apart, and those that need no place in the arena.

    A unit of several leaves does not exceed 4 MiB or 1/256 of the managed bytes, whichever is
    smaller, but may always reach 64 KiB: below that a copy's latency outweighs its bytes.
    """
    total = sum(unit_bytes(leaf.tensors()) for leaf in leaves)
    limit = min(4 * MIB, max(total // 256, 64 * KIB))
    units: list[list[Chosen]] = []
    size, key = 0, None
    for leaf in leaves:
        nbytes = unit_bytes(leaf.tensors())
        trains = any(tensor.requires_grad for tensor in leaf.tensors())
        leaf_key = leaf.block, trains, leaf.kind.needs_place
        if leaf_key == key and size + nbytes <= limit:
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


def as_entries(ignore_modules: Any) -> list[Any]:
    """Return what was given as `ignore_modules`, one entry or several, as a list."""
    if isinstance(ignore_modules, nn.Module | Tensor | str):
        return [ignore_modules]
    return list(ignore_modules or ())


def _ignored(modules: dict[str, nn.Module], entries: Any) -> tuple[set[int], set[int]]:
    ids: set[int] = set()
    tensors: set[int] = set()
    for entry in as_entries(entries):
        if isinstance(entry, str):
            named = [name for name in modules if fnmatch.fnmatchcase(name, entry)]
            own = [] if named else _named_parameters(modules, entry)
            tensors.update(map(id, own))
            if not named and not own:
                words = [*modules, *(name.rpartition(".")[2] for name in modules)]
                near = difflib.get_close_matches(entry, sorted(set(words) - {""}))
                near += [name for name in modules if name.endswith(f".{entry}")][:3]
                raise ValueError(
                    f"ignore_modules: the model has no module or parameter named {entry!r}"
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


def _named_parameters(modules: dict[str, nn.Module], pattern: str) -> list[Tensor]:
    return [
        parameter
        for name, module in modules.items()
        for key, parameter in module._parameters.items()
        if parameter is not None
        if fnmatch.fnmatchcase(f"{name}.{key}" if name else key, pattern)
    ]


def _below_adapters(modules: dict[str, nn.Module]) -> dict[int, str]:
    """Find what belongs to adapters."""
    found: dict[int, str] = {}
    for name, module in modules.items():
        if "base_layer" in module._modules:
            for key, child in module._modules.items():
                if key != "base_layer" and child is not None:
                    for inner in child.modules():
                        found[id(inner)] = f"adapter of '{name}'"
    return found


def _unfit(kind: type[Leaf], module: nn.Module, ignored_tensors: set[int]) -> str:
    """Say why the module's own state keeps it from being managed; empty where nothing does."""
    reason = kind.unfit(module)
    if reason:
        return reason
    for key, tensor in [*module._parameters.items(), *kind.named_tensors(module).items()]:
        if id(tensor) in ignored_tensors:
            return f"'{key}' is named in ignore_modules"
    if kind is QuantisedLayer and casts_layerwise(module):
        return "layerwise casting replaces its weight around each call"
    return ""


def _unfit_tensor(key: str, tensor: Any, plain: type[Tensor], ignored_tensors: set[int]) -> str:
    if why := unfit_tensor(key, tensor, AnyLayer.floating, plain):
        return why
    if id(tensor) in ignored_tensors:
        return f"'{key}' is named in ignore_modules"
    return ""


def _drop_shared(
    modules: dict[str, nn.Module],
    leaves: list[Chosen],
    resident: dict[str, str],
    parameters: dict[str, str],
) -> list[Chosen]:
    """Leave resident what shares memory with something that is not managed.

    Two leaves may share a Parameter (each copies the one master); two Parameters in overlapping
    memory may not, because each is re-pointed to memory of its own.
    """
    places: dict[int, list[str]] = {}  # of each tensor, by full name
    spans: list[tuple[int, int, int]] = []
    operators = {leaf.name: leaf.kind for leaf in leaves if not leaf.kind.lends_to_code}
    for name, module in modules.items():
        kind = operators.get(name)
        own = [*module._parameters.items(), *module._buffers.items(), *held_tensors(module).items()]
        found = (
            [(key, part) for key, tensor in own for part in tensors_in(tensor)]
            if kind is None
            else kind.named_tensors(module).items()
        )
        for key, tensor in found:
            before = places.setdefault(id(tensor), [])
            before.append(f"{name}.{key}" if name else key)
            start, end = memory_of(tensor)
            if len(before) == 1:
                spans.append((start, end, id(tensor)))
    overlapping: set[int] = set()
    furthest, reached = 0, 0  # the end of what began before, and whose it is
    for start, end, tensor_id in sorted(spans):
        if start < furthest:
            overlapping.update((reached, tensor_id))
        if end > furthest:
            furthest, reached = end, tensor_id
    changed = True
    while changed:
        changed = False
        covered = {
            f"{leaf.name}.{key}" if leaf.name else key
            for leaf in leaves
            for key in leaf.kind.named_tensors(leaf.module)
        }
        for leaf in list(leaves):
            dropped: dict[str, str] = {}
            for key, tensor in leaf.kind.named_tensors(leaf.module).items():
                others = [place for place in places[id(tensor)] if place not in covered]
                if others:
                    owner = _owner_of(others[0], modules)
                    dropped[key] = f"its weight is tied to '{owner}', which is not managed"
                elif id(tensor) in overlapping:
                    dropped[key] = "its memory overlaps another parameter's"
            if not dropped:
                continue
            changed = True
            number = leaves.index(leaf)
            if not leaf.kind.lends_to_code:
                resident[leaf.name] = next(iter(dropped.values()))
                del leaves[number]
                continue
            for key, reason in dropped.items():
                parameters[f"{leaf.name}.{key}" if leaf.name else key] = reason
            left = tuple(key for key in leaf.kind.names if key not in dropped)
            leaves[number : number + 1] = (
                [dataclasses.replace(leaf, kind=any_kind(left))] if left else []
            )
    return leaves


def _owner_of(full_name: str, modules: dict[str, nn.Module]) -> str:
    """Return the module that a tensor belongs to; what it is made of has dotted names, too."""
    name = full_name.rpartition(".")[0]
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def _block_of(name: str, modules: dict[str, nn.Module]) -> str:
    """Return the nearest proper ancestor that is an element of a ModuleList or Sequential."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        parent = modules.get(".".join(parts[: length - 1]))
        if isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            return ".".join(parts[:length])
    return ""
