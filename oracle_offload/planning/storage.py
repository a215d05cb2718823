"""What a training keeps from step to step, to the byte: weights, gradients, optimizer state.

A row is counted as its library lays it out; the units and the arena are those of `attach`, because
its own selection makes them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..compress.choice import ExpectedBytes, codable, staging_bytes
from ..engine.geometry import aligned, stored_bytes, tensor_bytes, unit_bytes
from ..model.budget import Budget
from ..model.kept import keep
from ..model.selection import (
    Chosen,
    NothingToManage,
    choose,
    group_units,
    least_bytes,
    listed,
    place_bytes,
)
from .optimizers import Optimizer
from .source import Source

_SCALES = 64  # weights that share a scale in bitsandbytes' 4 bits
_NESTED = 256  # scales that share one
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

Stored = tuple[Sequence[int], torch.dtype]  # shape and dtype of a tensor
Pair = tuple[tuple[int, ...], tuple[int, ...]]


def _nf4(weight: Tensor) -> list[tuple[int, torch.dtype]]:
    """Return the layout of bitsandbytes' Linear4bit with nested scales, its default."""
    count = weight.numel()
    scales = -(-count // _SCALES)
    return [
        (-(-count // 2), torch.uint8),
        (scales, torch.uint8),
        (16, torch.float32),
        (1, torch.float32),
        (-(-scales // _NESTED), torch.float32),
        (256, torch.float32),
    ]


def _int8(weight: Tensor) -> list[tuple[int, torch.dtype]]:
    """Return torchao's layout of Int8WeightOnlyConfig: a scale and a zero point per row."""
    rows = weight.shape[0]
    return [(weight.numel(), torch.int8), (rows, torch.float32), (rows, torch.int8)]


def _fp8(weight: Tensor) -> list[tuple[int, torch.dtype]]:
    """Return torchao's layout of Float8WeightOnlyConfig: a scale for each row."""
    return [(weight.numel(), torch.float8_e4m3fn), (weight.shape[0], torch.float32)]


def _qfloat8(weight: Tensor) -> list[tuple[int, torch.dtype]]:
    """Return the layout of optimum-quanto's qfloat8: a scale per row, two for activations."""
    rows = (weight.shape[0], weight.dtype)
    return [(weight.numel(), torch.float8_e4m3fn), rows, (1, weight.dtype), (1, weight.dtype)]


QUANTISED = {"int8": _int8, "fp8": _fp8, "qfloat8": _qfloat8, "nf4": _nf4}
# Bits of a weight, with its share of scales where those do not depend on the shape.
_BITS = {"int8": 8.0, "fp8": 8.0, "qfloat8": 8.0, "nf4": 4 + 8 / 64 + 32 / (64 * 256)}


@dataclass(frozen=True)
class Packed(Chosen):
    """A leaf as it would be quantised: the tensors that it would then be made of."""

    parts: tuple[Tensor, ...] = ()

    def tensors(self) -> list[Tensor]:
        """Return what would be on the host."""
        return list(self.parts)


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how it is kept.

    Attributes
    ----------
    train : str
        ``"lora"`` or ``"full"``.
    rank : int
        Of the LoRA.
    targets : tuple of str
        Layers that get one: names or their ends, as peft matches them; or ``("all-linear",)``.
    adapter_dtype : torch.dtype
        Of the LoRA's matrices.
    master_dtype : torch.dtype or None
        Of a second copy of trained weights, which the optimizer steps.
    quantize : str or None
        A key of `QUANTISED`.
    optimizer : Optimizer
    compress : str or None
        As `attach` takes it.
    during_backward : bool
        Whether weights that stream are stepped in backward: their gradients never come home.
    """

    train: str
    rank: int
    targets: tuple[str, ...]
    adapter_dtype: torch.dtype
    master_dtype: torch.dtype | None
    quantize: str | None
    optimizer: Optimizer
    compress: str | None = None
    during_backward: bool = False


@dataclass(frozen=True)
class Row:
    """One kind of persistent bytes."""

    name: str
    bytes: int


@dataclass
class Storage:
    """Persistent bytes of a training, and the units that its weights would travel in.

    Attributes
    ----------
    rows : list of Row
        Disjoint; their sum is what the training keeps.
    parameters, trained : int
        How many there are, and how many of these (or of the adapters) are trained.
    units : list of lists of Chosen
        As `attach` would make them; empty where nothing can be streamed.
    sizes : list of int
        Bytes that each takes in the arena.
    floor_bytes : int
        Least bytes of an arena for them; 0 where there are no units.
    weight_bytes : int
        Of managed weights that travel, without padding: W of X_min.
    host_rows : dict of str to int
        What of `rows` is on the host where the weights stream.
    kept_bytes : int
        Of units that are always on the device because the host has no room for them.
    why_not : str
        Why nothing can be streamed.
    adapters : dict of str to tuple
        Layers with a LoRA, and the shapes of its two matrices.
    coded : dict of int to int
        What each compressed tensor is expected to take of the host, by its `id`.
    """

    recipe: Recipe
    rows: list[Row]
    parameters: int
    trained: int
    units: list[list[Chosen]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    floor_bytes: int = 0
    weight_bytes: int = 0
    host_rows: dict[str, int] = field(default_factory=dict)
    kept_bytes: int = 0
    why_not: str = ""
    adapters: dict[str, Pair] = field(default_factory=dict)
    coded: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """All that the training keeps."""
        return sum(row.bytes for row in self.rows)

    @property
    def managed_bytes(self) -> int:
        """Bytes of all units on the device, each tensor aligned; what is tied counts in each."""
        return sum(unit_bytes([t for leaf in unit for t in leaf.tensors()]) for unit in self.units)

    @property
    def travelling_bytes(self) -> int:
        """What the weights take in an arena that holds all of them: not tables of rows."""
        return sum(self.sizes)

    @property
    def device_bytes(self) -> int:
        """What stays on the device in addition to the arena where the weights stream."""
        return self.bytes - sum(self.host_rows.values())

    def x_min_bytes(self, arena_bytes: int) -> int:
        """Return the least bytes that a step can move to the device, as `Attachment` has it."""
        return int(2 * self.link_share * max(0, self.weight_bytes - arena_bytes))

    def host_bytes_of(self, tensor: Tensor) -> int:
        """Return what a master takes of the host, and of the link."""
        return self.coded.get(id(tensor), tensor_bytes(tensor))

    def on_host(self) -> dict[str, int]:
        """Return what is on the host where the weights stream: `host_rows` and padding."""
        rows = self.host_rows
        if self.recipe.during_backward:
            rows = {name: size for name, size in rows.items() if name != "gradients"}
        if not self.units:
            return rows
        sizes = [self.host_bytes_of(tensor) for tensor in _distinct(self.units)]
        padding = sum(map(aligned, sizes)) - sum(sizes)
        return {**rows, "weights": sum(sizes), "padding": padding}

    @property
    def file_bytes(self) -> int:
        """What of the weights on the host could stay in files: tables of rows are read in place."""
        placed = [[leaf for leaf in unit if leaf.kind.needs_place] for unit in self.units]
        return sum(self.host_bytes_of(tensor) for tensor in _distinct(placed))

    @property
    def coded_bytes(self) -> tuple[int, int]:
        """The bytes of compressed weights: as they are, and on the host."""
        coded = [t for t in _distinct(self.units) if id(t) in self.coded]
        return sum(map(tensor_bytes, coded)), sum(map(self.host_bytes_of, coded))

    @property
    def link_share(self) -> float:
        """The bytes that travel, by those of the weights."""
        travels = [t for unit in self.units for leaf in unit for t in leaf.tensors()]
        saved = sum(tensor_bytes(t) - self.host_bytes_of(t) for t in travels)
        return 1 - saved / self.weight_bytes if self.coded else 1.0

    @property
    def staging_bytes(self) -> int:
        """What compressed weights pass through on the device."""
        return staging_bytes(
            [t for t in _distinct(self.units) if id(t) in self.coded] if self.coded else ()
        )

    def compressed(self, expected: ExpectedBytes) -> Storage:
        """Return the same with every weight compressed that may be and gets smaller."""
        coded = {id(tensor): expected.bytes_of(tensor) for tensor in codable(self.units)}
        whole = {id(tensor): tensor_bytes(tensor) for tensor in _distinct(self.units)}
        return replace(self, coded={key: n for key, n in coded.items() if n < whole[key]})

    def keeping(self, budget: Budget) -> Storage:
        """Return the same with units always on the device, as `attach` has it at this budget.

        Raises
        ------
        OffloadError
            No unit fits the host.
        """
        streaming, kept = keep(self.units, budget, self.host_bytes_of)
        return replace(self, kept_bytes=kept.bytes)._streaming(streaming)

    def _streaming(self, units: list[list[Chosen]]) -> Storage:
        """Return the same with these units, and no others, on the host."""
        sizes = [place_bytes(unit, all_locked=True) for unit in units]
        travels = [leaf for unit in units for leaf in unit if leaf.kind.needs_place]
        return replace(
            self,
            units=units,
            sizes=sizes,
            floor_bytes=least_bytes(units, all_locked=True),
            weight_bytes=sum(tensor_bytes(t) for leaf in travels for t in leaf.tensors()),
            host_rows=_rows_on_host(units, self.recipe),
        )


def storage_of(source: Source, recipe: Recipe) -> Storage:
    """Return what a training of this model keeps.

    The module of `source` is marked as trained or frozen.

    Raises
    ------
    ValueError
        A LoRA for layers that are not there, or a full training of quantised weights.
    """
    if recipe.train == "full" and recipe.quantize:
        raise ValueError(
            f"quantize={recipe.quantize!r} with train='full': quantised weights are not trained; "
            "use train='lora'"
        )
    if source.module is None:
        return _of_count(source.parameters, recipe)
    return _of_module(source, source.module, recipe)


def _of_count(count: int, recipe: Recipe) -> Storage:
    """Return the shares of a number of parameters, as if they were one tensor of bfloat16."""
    weights = 2 * count
    if recipe.quantize:
        weights = math.ceil(count * _BITS[recipe.quantize] / 8)
    rows = [Row("weights", weights)]
    trained = count if recipe.train == "full" else 0
    if trained:
        rows += _trained_rows([((trained,), torch.bfloat16)], recipe)
    on_host = {row.name: row.bytes for row in rows}
    why = "only a number of parameters is known"
    return Storage(
        recipe,
        [row for row in rows if row.bytes],
        count,
        trained,
        sizes=[weights],
        weight_bytes=weights,
        host_rows=on_host,
        why_not=why,
    )


def _of_module(source: Source, module: nn.Module, recipe: Recipe) -> Storage:
    full = recipe.train == "full"
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(full)
    packed = _packed(module, recipe.quantize)
    adapters = {} if full else _adapters(module, recipe)
    parameters = list(module.parameters())
    weights = sum(stored_bytes(tensor) for tensor in parameters if id(tensor) not in packed)
    weights += sum(tensor_bytes(part) for parts in packed.values() for part in parts)
    rows = [Row("weights", weights), Row("buffers", sum(map(tensor_bytes, module.buffers())))]
    trained: list[Stored] = [(t.shape, t.dtype) for t in parameters if t.requires_grad]
    if adapters:
        trained = [(shape, recipe.adapter_dtype) for pair in adapters.values() for shape in pair]
        rows.append(Row("adapters", _bytes_of(trained)))
    rows += _trained_rows(trained, recipe)
    storage = Storage(
        recipe,
        [row for row in rows if row.bytes],
        sum(tensor.numel() for tensor in parameters),
        sum(math.prod(shape) for shape, _ in trained),
        adapters=adapters,
    )
    try:
        leaves = choose(module).leaves
    except NothingToManage as error:
        storage.why_not = str(error)
        return storage
    storage = storage._streaming(group_units([_as_packed(leaf, packed) for leaf in leaves]))
    return storage if recipe.compress is None else storage.compressed(source.expected)


def _bytes_of(tensors: Sequence[Stored]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors)


def _trained_rows(tensors: Sequence[Stored], recipe: Recipe) -> list[Row]:
    """Return master copies, gradients and optimizer state of trained tensors."""
    master, copied = recipe.master_dtype, list[Stored]()
    if master is not None and recipe.train == "full":
        copied = [(shape, master) for shape, dtype in tensors if dtype.itemsize < master.itemsize]
        tensors = copied + [row for row in tensors if row[1].itemsize >= master.itemsize]
    return [
        Row("master copies", _bytes_of(copied)),
        Row("gradients", _bytes_of(tensors)),
        Row("optimizer state", recipe.optimizer.total(tensors)),
    ]


def _rows_on_host(units: Iterable[Sequence[Chosen]], recipe: Recipe) -> dict[str, int]:
    """Return what of each row goes to the host with the weights of `units`."""
    tensors = _distinct(units)
    trained: list[Stored] = [(t.shape, t.dtype) for t in tensors if t.requires_grad]
    rows = [Row("weights", sum(map(tensor_bytes, tensors))), *_trained_rows(trained, recipe)]
    return {row.name: row.bytes for row in rows if row.bytes}


def _distinct(units: Iterable[Sequence[Chosen]]) -> list[Tensor]:
    tensors = (tensor for unit in units for leaf in unit for tensor in leaf.tensors())
    return list({id(tensor): tensor for tensor in tensors}.values())


# ---- quantised weights ----


def _packed(module: nn.Module, quantize: str | None) -> dict[int, tuple[Tensor, ...]]:
    """Return what the weights of Linear layers would be made of, by the `id` of each.

    A weight that two modules share stays as it is, and so does what makes the output of a language
    model: their quantisers leave both alone.
    """
    if quantize is None:
        return {}
    users = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    output = _output_layer(module)
    found: dict[int, tuple[Tensor, ...]] = {}
    for child in module.modules():
        if not isinstance(child, nn.Linear) or child is output or users[id(child.weight)] > 1:
            continue
        found[id(child.weight)] = tuple(
            torch.empty(count, dtype=dtype, device="meta")
            for count, dtype in QUANTISED[quantize](child.weight)
        )
    return found


def _output_layer(module: nn.Module) -> nn.Module | None:
    ask = getattr(module, "get_output_embeddings", None)
    try:
        return ask() if callable(ask) else None
    except (AttributeError, NotImplementedError):
        return None


def _as_packed(leaf: Chosen, packed: dict[int, tuple[Tensor, ...]]) -> Chosen:
    tensors = leaf.tensors()
    if not any(id(tensor) in packed for tensor in tensors):
        return leaf
    parts = [part for tensor in tensors for part in packed.get(id(tensor), (tensor,))]
    return Packed(leaf.name, leaf.module, leaf.kind, leaf.block, tuple(parts))


# ---- LoRA ----


def _adapters(module: nn.Module, recipe: Recipe) -> dict[str, Pair]:
    """Return the layers that get a LoRA, and the shapes of its two matrices, as peft makes them.

    Raises
    ------
    ValueError
        No layer has one of these names.
    """
    every, output = recipe.targets == ("all-linear",), _output_layer(module)
    found: dict[str, Pair] = {}
    for name, child in module.named_modules():
        shapes = _pair(child, recipe.rank)
        if shapes is None or (every and (child is output or not _is_linear(child))):
            continue
        ends = any(name == end or name.endswith(f".{end}") for end in recipe.targets)
        if every or ends:
            found[name] = shapes
    if not found:
        named = {n.rpartition(".")[2] for n, m in module.named_modules() if _pair(m, 1) is not None}
        raise ValueError(
            f"targets={', '.join(recipe.targets)}: no layer of that name; the layers that can "
            f"have a LoRA are called {listed(sorted(named), 40)}"
        )
    return found


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is the Conv1D of transformers: a Linear with its weight transposed."""
    return any(kind.__module__ == "transformers.pytorch_utils" for kind in type(module).__mro__)


def _pair(module: nn.Module, rank: int) -> Pair | None:
    if not (isinstance(module, _CONVOLUTIONS) or _is_linear(module)):
        return None
    weight = module._parameters.get("weight")
    if weight is None:
        return None
    shape = tuple(reversed(weight.shape)) if _is_transposed(module) else tuple(weight.shape)
    ones = (1,) * (len(shape) - 2)
    return (rank, *shape[1:]), (shape[0], rank, *ones)
