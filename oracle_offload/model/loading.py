"""A model without values and the files that they come from: `attach` with ``weights=``.

Everything is compared before anything is read. Then each tensor without values becomes a host
tensor without memory, and `attach` goes on as with any model; where it would copy values into
masters, it has them read there. A tensor keeps its identity: only its contents are swapped, and
are swapped back if the attach fails.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..disk.checkpoint import Checkpoint, WeightFile
from ..disk.conversion import find_sources, ignored_patterns
from ..disk.origin import Origin
from ..disk.quantising import Quantiser, Quantize, plain_tensors_of
from ..disk.reading import Part, Reader
from ..disk.source import Source
from ..engine.geometry import contiguous_stride, is_dense, tensor_bytes
from ..errors import OffloadError
from ..host.progress import DelayedBar
from ..host.sizes import GIB, MIB
from .masters import trim_heap
from .selection import listed

if TYPE_CHECKING:
    from ..engine.devices import Device

_QUANTISED_PIECE_BYTES = 64 * MIB
_BATCH_BYTES = 64 * MIB  # of tensors that stay resident, on the host at once


class Loading:
    """The weights of one model, on their way from files to where `attach` wants them.

    Parameters
    ----------
    module : nn.Module
        With Parameters on the meta device.
    weights : str or path
        See `Checkpoint`.
    quantize : callable, optional
        See `Quantiser`.

    Raises
    ------
    OffloadError
        The files are damaged, or do not fit the model; the model is as it was.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: str | os.PathLike[str],
        quantize: Quantize | None = None,
    ) -> None:
        self._module = module
        self._quantiser = None if quantize is None else Quantiser(module, quantize)
        # What was quantised is in ordinary memory: at most one piece of it is there twice.
        self.piece_bytes = None if quantize is None else _QUANTISED_PIECE_BYTES
        self._reader = Reader()
        self._swapped: list[tuple[Tensor, Tensor]] = []
        self._is_done = False
        self._read_bytes, self._began = 0, time.monotonic()
        self._checkpoint = Checkpoint(weights)
        try:
            sources = find_sources(module, self._checkpoint)
            self._to_come = _match(module, sources, str(weights))  # by `id` of the tensor
        except BaseException:
            self._checkpoint.close()
            raise

    def __enter__(self) -> Loading:
        try:
            for tensor, _ in self._to_come.values():
                self._swap(tensor, _without_memory(tensor))
            if self._quantiser is not None:
                self._quantise(self._quantiser)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reader.close()
        self._checkpoint.close()
        if self._quantiser is not None and not self._is_done:
            self._quantiser.undo()
        while self._swapped and not self._is_done:
            torch.utils.swap_tensors(*self._swapped.pop())

    def _swap(self, tensor: Tensor, other: Tensor) -> None:
        try:
            torch.utils.swap_tensors(tensor, other)
        except RuntimeError as error:
            names = [name for name, t in _named_tensors(self._module) if t is tensor]
            raise OffloadError(
                f"'{names[0]}' cannot be given values, because something else holds it, a hook "
                f"say ({error}); attach right after the model was made."
            ) from error
        self._swapped.append((tensor, other))

    def _quantise(self, quantiser: Quantiser) -> None:
        """Read the modules one by one and let each be quantised before the next is read."""
        total = sum(source.nbytes for _, source in self._to_come.values())
        read = 0
        with DelayedBar(total, "oracle_offload: quantise") as bar:
            for name, inner in quantiser.modules():
                batch = [(t, _on_host(t)) for t in plain_tensors_of(inner) if self.have(t)]
                read += sum(self.bytes_of(tensor) for tensor, _ in batch)
                self.read(batch, bar.update)
                while batch:
                    tensor, there = batch.pop()
                    tensor.data = there
                    del tensor, there
                quantiser.quantise(name, inner)
                if read >= _BATCH_BYTES:
                    read = 0
                    trim_heap()

    # ---- what attach asks for: see `disk.reading.Files` ----

    def have(self, tensor: Tensor) -> bool:
        """Whether the values of `tensor` are still to come."""
        return id(tensor) in self._to_come

    def origin(self, tensor: Tensor) -> Origin | None:
        """Return where the bytes of `tensor` are, if one file has them unchanged."""
        _, source = self._to_come[id(tensor)]
        return source.origin(tensor)

    def place(self, tensor: Tensor) -> tuple[WeightFile, int] | None:
        """Return the file that has the bytes of `tensor` unchanged, and where they begin."""
        if id(tensor) not in self._to_come:
            return None
        return self._to_come[id(tensor)][1].place(tensor)

    def skip(self, tensor: Tensor) -> None:
        """Read nothing for `tensor`: it is in the file that has its values."""
        self._to_come.pop(id(tensor))

    def identity(self) -> list[list[int | str]]:
        """Return which files they are: two processes read the same where these are equal."""
        return self._checkpoint.identity()

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes that are read for `tensor`, or else copied."""
        _, source = self._to_come.get(id(tensor), (None, None))
        return tensor_bytes(tensor) if source is None else source.nbytes

    def read(
        self, tensors: Sequence[tuple[Tensor, Tensor]], on_bytes: Callable[[int], object]
    ) -> None:
        """Read the values of the first of each pair into the second, a dense host tensor."""
        self._reader.run(self._parts(tensors), on_bytes)
        for tensor, _ in tensors:
            self._read_bytes += self._to_come.pop(id(tensor))[1].nbytes

    def read_rest(self, kind: Device, device: torch.device) -> None:
        """Read everything that is no master, and bring Parameters to `device`."""
        batch: list[tuple[Tensor, Tensor]] = []
        size = 0
        for tensor, _ in list(self._to_come.values()):
            batch.append((tensor, _on_host(tensor)))
            size += tensor_bytes(tensor)
            if size >= _BATCH_BYTES:
                self._read_resident(batch, kind, device)
                size = 0
        self._read_resident(batch, kind, device)

    def _read_resident(
        self, batch: list[tuple[Tensor, Tensor]], kind: Device, device: torch.device
    ) -> None:
        self.read(batch, lambda nbytes: None)
        while batch:
            tensor, there = batch.pop()
            if isinstance(tensor, nn.Parameter):
                kind.set_data(tensor, there.to(device))
            else:  # attach moves buffers, each for all that hold it
                tensor.data = there

    def uncache(self) -> None:
        """Let the system drop what it has cached of the files: that memory is short is known."""
        self._checkpoint.uncache()

    def done(self) -> str:
        """Keep the values from now on; return what was read, and how fast, in words.

        Raises
        ------
        OffloadError
            A file was written meanwhile.
        """
        self._checkpoint.check_unwritten()
        self._is_done = True
        seconds = max(time.monotonic() - self._began, 1e-9)
        return (
            f"{self._read_bytes / GIB:.3f} GiB from '{self._checkpoint.path}' in {seconds:.1f} s "
            f"({self._read_bytes / seconds / 1e9:.2f} GB/s)"
        )

    def _parts(self, tensors: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Part]:
        for tensor, target in tensors:
            yield from self._to_come[id(tensor)][1].parts(self._reader, target.detach())


def _on_host(tensor: Tensor) -> Tensor:
    """Return ordinary memory for the values of `tensor`."""
    with torch.inference_mode(False):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _without_memory(tensor: Tensor) -> Tensor:
    """Return a host tensor with the shape, dtype and attributes of `tensor`, and no memory."""
    stride = tensor.stride() if is_dense(tensor) else contiguous_stride(tensor.shape)
    with torch.inference_mode(False), torch.no_grad():
        # No code touches its memory.
        made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="cpu")
        made.untyped_storage().resize_(0)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


# ---- comparing a model with its files ----


def _match(
    module: nn.Module, sources: dict[str, Source], path: str
) -> dict[int, tuple[Tensor, Source]]:
    """Return the tensors that files have values of, and these.

    Raises
    ------
    OffloadError
        Names or shapes differ, or a value is in no file and computed by no one.
    """
    expected = {name: t for name, t in module.state_dict(keep_vars=True).items() if _is_plain(t)}
    names: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        names.setdefault(id(tensor), []).append(name)
    found: dict[int, tuple[Tensor, Source]] = {}
    for name, tensor in expected.items():  # of tied ones the last counts, as in load_state_dict
        if name in sources:
            found[id(tensor)] = tensor, sources[name]
    missing = [
        same[0] for key, same in names.items() if key not in found and expected[same[0]].is_meta
    ]
    ignored = ignored_patterns(module)
    unexpected = [
        name
        for name in sources
        if name not in expected and not any(re.search(pattern, name) for pattern in ignored)
    ]
    if missing or unexpected:
        raise OffloadError(
            f"'{path}' does not fit {type(module).__name__}: "
            + " and ".join(
                f"{what}: {listed(keys)}"
                for what, keys in (("it lacks", missing), ("the model has no", unexpected))
                if keys
            )
            + "."
        )
    _refuse_lost(module, {*names}, path)
    for tensor, source in found.values():
        source.check(tensor, path)
    return found


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _refuse_lost(module: nn.Module, expected: set[int], path: str) -> None:
    """Refuse a model with values that no file has: they were lost when it was made."""
    lost = [name for name, t in _named_tensors(module) if t.is_meta and id(t) not in expected]
    for name, inner in module.named_modules():
        for key, value in vars(inner).items():
            if isinstance(value, Tensor) and value.is_meta:
                lost.append(f"{name}.{key}" if name else key)
    if lost:
        raise OffloadError(
            f"{listed(lost)} {'is' if len(lost) == 1 else 'are'} on the meta device, and no file "
            f"has what {type(module).__name__} computed there; make the model inside "
            "oracle_offload.empty_weights() instead, which leaves only Parameters without values."
        )
