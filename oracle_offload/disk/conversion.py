"""Names in a file that are not the model's: the library's own conversion, applied to places.

transformers keeps with a model how the names of older checkpoints become its own, and how several
tensors become one: the matrices of each expert, which are stored one by one in a file, are one
stack in the model. The rules are asked for here; what they would do to tensors is done to places,
so that every matrix is read into its place in the stack and no stack exists twice.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OffloadError
from .checkpoint import Checkpoint
from .source import Fragment, Source, plain_sources

Step = Callable[[Tensor], Tensor]


def find_sources(module: nn.Module, checkpoint: Checkpoint) -> dict[str, Source]:
    """Return what fills the tensors of `module`, by their names in its ``state_dict``.

    Raises
    ------
    OffloadError
        The library converts them in a way that is not known here.
    """
    plain = plain_sources(checkpoint)
    if _is_of(module, "transformers.modeling_utils", "PreTrainedModel"):
        return _of_transformers(module, plain, checkpoint.path)
    if _is_of(module, "diffusers.models.modeling_utils", "ModelMixin"):
        rename: Any = getattr(module, "_fix_state_dict_keys_on_load", None)
        if rename is not None:
            rename(plain)
    return plain


def ignored_patterns(module: nn.Module) -> list[str]:
    """Return which names a file may have and the model not, as the library sees it."""
    patterns = list(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    if _is_of(module, "transformers.modeling_utils", "PreTrainedModel"):
        buffers = [name for name, _ in module.named_buffers()]
        for end, pattern in (
            ("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"),
            ("position_ids", r"(^|\.)position_ids$"),
        ):
            patterns += [pattern] * any(name.endswith(end) for name in buffers)
    return patterns


def _is_of(module: nn.Module, library: str, name: str) -> bool:
    kind = getattr(sys.modules.get(library), name, None)
    return kind is not None and isinstance(module, kind)


# ---- transformers ----


def _of_transformers(module: Any, plain: dict[str, Source], path: str) -> dict[str, Source]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:  # before version 5 a file has the model's names
        return plain
    mapping = get_model_conversion_mapping(module)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    state = module.state_dict()
    found: dict[str, Source] = {}
    collected: dict[str, tuple[Any, dict[str, list[Source]]]] = {}
    for key in sorted(plain, key=dot_natural_key):
        names = renamings, converters, module.base_model_prefix, state
        name, pattern = rename_source_key(key, *names)
        if pattern is None or name not in state:
            found.setdefault(name if name in state else key, plain[key])
        else:
            row = collected.setdefault(name, (by_pattern[pattern], {}))
            row[1].setdefault(pattern, []).append(plain[key])
    for name, (converter, sources) in collected.items():
        found.update(_converted(name, converter, sources, module, path))
    return found


@dataclass(frozen=True)
class _Made:
    """A tensor on its way: its shape, and which steps lead from it to what is in a file."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Fragment, tuple[Step, ...]], ...]

    @classmethod
    def of(cls, source: Source) -> _Made:
        """Return that of a tensor that is in a file as a whole."""
        return cls(source.shape, tuple((fragment, ()) for fragment in source.fragments))

    def below(self, shape: Sequence[int], step: Step) -> _Made:
        """Return what it is in a tensor of `shape`, of which `step` makes this one."""
        parts = tuple((fragment, (step, *steps)) for fragment, steps in self.parts)
        return _Made(tuple(shape), parts)

    def source(self) -> Source:
        """Return what fills a tensor of the model with it."""
        fragments = [replace(fragment, part_of=_run(steps)) for fragment, steps in self.parts]
        return Source(self.shape, tuple(fragments))


def _run(steps: Iterable[Step]) -> Step:
    def part_of(tensor: Tensor) -> Tensor:
        for step in steps:
            tensor = step(tensor)
        return tensor

    return part_of


def _converted(
    name: str, converter: Any, sources: dict[str, list[Source]], module: Any, path: str
) -> dict[str, Source]:
    """Return the sources of the tensors that a converter makes; `name` is the first of them."""
    made: dict[str, list[_Made]] = {
        pattern: [_Made.of(source) for source in sources[pattern]]
        for pattern in converter.source_patterns
        if pattern in sources
    }
    targets = list(converter.target_patterns)
    expected = tuple(module.get_parameter_or_buffer(name).shape)
    try:
        for operation in converter.operations:
            made = _OPERATIONS[type(operation).__name__](operation, made, targets, expected)
        (first,) = (target for target in made if target in name)
        prefix, _, suffix = name.partition(first)
        return {f"{prefix}{target}{suffix}": one.source() for target, (one,) in made.items()}
    except (KeyError, ValueError, TypeError, IndexError) as error:
        operations = ", ".join(type(operation).__name__ for operation in converter.operations)
        files = [fragment.name for of in sources.values() for s in of for fragment in s.fragments]
        raise OffloadError(
            f"'{path}': transformers makes '{name}' of '{files[0]}' and {len(files) - 1} others by "
            f"{operations}, which cannot be done while they are read; load the model with "
            "from_pretrained and save it with save_pretrained(..., save_original_format=False), "
            "once, or attach what from_pretrained loads."
        ) from error


def _merge(
    operation: Any, made: dict[str, list[_Made]], targets: list[str], expected: tuple[int, ...]
) -> dict[str, list[_Made]]:
    """Stack the tensors of each pattern."""
    if len(made) == 1:
        made = {targets[0]: next(iter(made.values()))}
    return {pattern: [_stack(items, operation.dim)] for pattern, items in made.items()}


def _stack(items: list[_Made], dim: int) -> _Made:
    shape = [*items[0].shape[:dim], len(items), *items[0].shape[dim:]]
    parts = [
        part
        for number, item in enumerate(items)
        for part in item.below(shape, functools.partial(torch.select, dim=dim, index=number)).parts
    ]
    return _Made(tuple(shape), tuple(parts))


def _concatenate(
    operation: Any, made: dict[str, list[_Made]], targets: list[str], expected: tuple[int, ...]
) -> dict[str, list[_Made]]:
    """Put the tensors of all patterns one behind the other."""
    (target,) = targets
    dim = operation.dim
    items = [item for of_pattern in made.values() for item in of_pattern]
    shape = list(items[0].shape)
    shape[dim] = sum(item.shape[dim] for item in items)
    parts: list[tuple[Fragment, tuple[Step, ...]]] = []
    start = 0
    for item in items:
        parts += item.below(shape, _rows(dim, start, item.shape[dim])).parts
        start += item.shape[dim]
    return {target: [_Made(tuple(shape), tuple(parts))]}


def _rows(dim: int, start: int, size: int) -> Step:
    return functools.partial(torch.narrow, dim=dim, start=start, length=size)


def _transpose(
    operation: Any, made: dict[str, list[_Made]], targets: list[str], expected: tuple[int, ...]
) -> dict[str, list[_Made]]:
    """Exchange two dimensions, or, where the rule says so, only if the shape is not right."""
    ((pattern, (item,)),) = made.items()
    one, other = operation.dim0, operation.dim1
    name = targets[0] if len(targets) == 1 else pattern
    if operation.check_dims and item.shape == expected:
        return {name: [item]}
    shape = list(item.shape)
    shape[one], shape[other] = shape[other], shape[one]
    return {name: [item.below(shape, functools.partial(torch.transpose, dim0=one, dim1=other))]}


def _chunk(
    operation: Any, made: dict[str, list[_Made]], targets: list[str], expected: tuple[int, ...]
) -> dict[str, list[_Made]]:
    """Cut one tensor into equal parts, which follow one another in the file."""
    ((_, (item,)),) = made.items()
    ((fragment, steps),) = item.parts
    rows, left = divmod(item.shape[0], len(targets))
    if operation.dim or operation.num_shards_attribute or steps or left:
        raise ValueError("not rows of one tensor")
    shape = (rows, *item.shape[1:])
    nbytes = fragment.stored.nbytes // len(targets)
    found = {}
    for number, target in enumerate(targets):
        begin = fragment.stored.begin + number * nbytes
        stored = replace(fragment.stored, shape=shape, begin=begin, nbytes=nbytes)
        found[target] = [_Made(shape, ((replace(fragment, stored=stored), ()),))]
    return found


_OPERATIONS: dict[str, Callable[..., dict[str, list[_Made]]]] = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Transpose": _transpose,
    "Chunk": _chunk,
}
