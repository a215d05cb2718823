"""Which layers are managed, and in which units they travel.

Managed is a leaf whose class computes with exactly ``nn.Linear.forward`` or ``nn.Conv2d.forward``
and whose tensors are plain floating parameters of its own, or whose weight is quantised in a way
that is known (`oracle_offload.layers.formats`). Everything else stays resident: what a parent's
code uses the weight of without calling the layer, what is tied to a module that is not managed,
adapters. Where such a use stands in a branch, which may never be taken,
the layer is managed on trial, see `oracle_offload.layers.trial`. What the rules cannot see (a
weight handed around in a variable) fails the watch over the first forward, see
`oracle_offload.first_forward`.
"""

from __future__ import annotations

import difflib
import fnmatch
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .direct_uses import Sites, used_directly
from .errors import OffloadError
from .geometry import memory_of, unit_bytes
from .layers.kinds import layer_type
from .layers.loan import Layer
from .layers.swap import has_own_forward, is_managed
from .operators import tensors_in
from .sizes import KIB, MIB


class NothingToManage(OffloadError):
    """The model has no layer to manage."""


@dataclass(frozen=True)
class Chosen:
    """A module to be managed: its dotted name, its kind and the block it belongs to."""

    name: str
    module: nn.Module
    kind: type[Layer]
    block: str
    doubtful: dict[tuple[str, int], str] = field(default_factory=dict)  # see `Trial`

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are to lie on the host."""
        return list(self.kind.named_tensors(self.module).values())


@dataclass(frozen=True)
class Selection:
    """The leaves to manage, in module order, and why other Linear and Conv2d stay resident."""

    leaves: list[Chosen]
    resident: dict[str, str]


def select(root: nn.Module, ignore_modules: Iterable[Any] = ()) -> Selection:
    """Decide which leaves of `root` are managed.

    Parameters
    ----------
    root : nn.Module
        The model.
    ignore_modules : iterable of nn.Module, Tensor or str
        What stays resident: modules (with everything below them), single parameters, or dotted
        names of modules, which may have the wildcards of `fnmatch` (``"blocks.*.attn"``). A module
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
    ignored_modules, ignored_tensors = _ignored(modules, ignore_modules)
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
    resident: dict[str, str] = {}
    candidates: dict[str, tuple[nn.Module, type[Layer]]] = {}
    adapters = _below_adapters(modules)
    used = used_directly(modules.values())
    for name, module in modules.items():
        kind = layer_type(module)
        if kind is None:
            continue
        reason = (
            ("named in ignore_modules" if id(module) in ignored_modules else "")
            or adapters.get(id(module), "")
            or _certain_use(used.get(id(module)), kind.may_be_tried)
            or _unfit(kind, module, ignored_tensors)
        )
        if reason:
            resident[name] = reason
        else:
            candidates[name] = module, kind
    _drop_shared(modules, candidates, resident)
    if not candidates:
        by_reason: dict[str, list[str]] = {}
        for name, reason in resident.items():
            by_reason.setdefault(reason, []).append(name or type(root).__name__)
        why = "; ".join(f"{listed(names, 3)}: {reason}" for reason, names in by_reason.items())
        raise NothingToManage(
            f"{type(root).__name__} has no layer to manage: no nn.Linear or nn.Conv2d with plain "
            "floating-point weights" + (f" ({why})" if why else "") + "."
        )
    leaves = [
        Chosen(name, module, kind, _block_of(name, modules), used.get(id(module), (False, {}))[1])
        for name, (module, kind) in candidates.items()
    ]
    return Selection(leaves, resident)


def group_units(leaves: Sequence[Chosen]) -> list[list[Chosen]]:
    """Group consecutive small leaves of one block, trainable and frozen apart, into units.

    A unit of several leaves does not exceed 4 MiB or 1/256 of the managed bytes, whichever is
    smaller, but may always reach 64 KiB: below that a copy's latency outweighs its bytes.
    """
    total = sum(unit_bytes(leaf.tensors()) for leaf in leaves)
    limit = min(4 * MIB, max(total // 256, 64 * KIB))
    units: list[list[Chosen]] = []
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


def _certain_use(use: tuple[bool, Sites] | None, may_be_tried: bool) -> str:
    if use is None or not (use[0] or (use[1] and not may_be_tried)):
        return ""
    return f"{next(iter(use[1].values()))} uses its weight without calling it"


def _unfit(kind: type[Layer], module: nn.Module, ignored_tensors: set[int]) -> str:
    """Say why the module's own state keeps it from being managed; empty where nothing does."""
    reason = kind.unfit(module)
    if reason:
        return reason
    for key, tensor in [*module._parameters.items(), *kind.named_tensors(module).items()]:
        if id(tensor) in ignored_tensors:
            return f"'{key}' is named in ignore_modules"
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
    modules: dict[str, nn.Module],
    candidates: dict[str, tuple[nn.Module, type[Layer]]],
    resident: dict[str, str],
) -> None:
    """Leave resident what shares memory with something that is not managed.

    Two managed layers may share a Parameter (each copies the one master); two Parameters in
    overlapping memory may not, because each is re-pointed to memory of its own.
    """
    owners: dict[int, list[str]] = {}
    spans: list[tuple[int, int, int]] = []
    seen: set[int] = set()
    tensors = {
        name: list(kind.named_tensors(module).values())
        for name, (module, kind) in candidates.items()
    }
    for name, module in modules.items():
        for tensor in tensors.get(name) or tensors_in(
            [*module._parameters.values(), *module._buffers.values()]
        ):
            owners.setdefault(id(tensor), []).append(name)
            start, end = memory_of(tensor)
            if id(tensor) in seen or start == end:
                continue
            seen.add(id(tensor))
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
        for name in list(candidates):
            for tensor in tensors[name]:
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
