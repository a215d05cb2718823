"""An independent witness of what torch's operators touch.

`attach` rests on a promise: no operator reads a host master while a managed model computes. On a
machine without CUDA nothing in the results would show a broken promise, because master and slot
hold the same bits. `Witness` is a dispatch mode that sees every operator below autograd. Strict, it
fails one that touches a master; on the simulated device it also declares what operators read and
write of the arena and of masters, so that the race detector sees what really happened, and, with a
clock, charges each operator's time.

A milder one watches the first forward of every attached model, see `oracle_offload.first_forward`.
"""

from __future__ import annotations

import bisect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .engines import DeviceState, Layout, open_states
from .errors import OffloadError

# Operators that ask a tensor for its geometry and read none of its bytes.
_GEOMETRY_ONLY = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
# Operators that launch no kernel: they allocate, or make a tensor of memory that is there.
_NO_KERNEL = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "set_", "resize_", "_unsafe_view", "_reshape_alias")
)

_exempt = threading.local()
_STEP_FILE = torch_optimizer.Optimizer.profile_hook_step.__code__.co_filename  # wraps each step()


@contextmanager
def exempt() -> Iterator[None]:
    """Let operators of this thread touch masters: what an optimizer step may do."""
    depth = getattr(_exempt, "depth", 0)
    _exempt.depth = depth + 1
    try:
        yield
    finally:
        _exempt.depth = depth


def is_exempt() -> bool:
    """Whether this thread may touch masters now.

    An optimizer step is told by its frame: torch's hooks do not say when a step has failed.
    """
    if getattr(_exempt, "depth", 0):
        return True
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == _STEP_FILE:
            return True
        frame = frame.f_back
    return False


class _Spans:
    """Byte ranges that do not overlap, each with what it is."""

    def __init__(self, spans: list[tuple[int, int, Any]]) -> None:
        self.spans = sorted(set(spans), key=lambda span: span[:2])
        self.starts = [span[0] for span in self.spans]
        self.start = self.spans[0][0] if spans else 0
        self.end = max((span[1] for span in spans), default=0)

    def touched(self, start: int, end: int) -> Iterator[tuple[int, int, Any]]:
        """Yield the intersections of [start, end) with the ranges."""
        index = max(0, bisect.bisect_right(self.starts, start) - 1)
        for low, high, what in self.spans[index:]:
            if low >= end:
                return
            if high > start:
                yield max(low, start), min(high, end), what


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address range ``(start, end)`` of a tensor's elements; empty where it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return 0, 0
    try:
        start = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper subclass or a fake tensor
        return 0, 0
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + extent * tensor.element_size()


class Witness(TorchDispatchMode):
    """See every operator; fail those that touch a host master.

    Parameters
    ----------
    strict : bool
        Raise `OffloadError` for an operator that touches a master outside an optimizer step.
    declare : bool
        On simulated devices, declare accesses to arena and masters to the race detector.
    clock : bool
        On simulated devices, charge every operator its virtual time (FLOPs by
        ``torch.utils.flop_counter``, bytes of operands and results), the managed ones too.

    Attributes
    ----------
    operators, arena_reads : int
        How many operators ran, and how many read the arena: a run that saw none proves nothing.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile trace under the mode; what the compiled graph runs is seen here."""
        return True

    def __init__(self, *, strict: bool = True, declare: bool = True, clock: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.strict = strict
        self.declare = declare
        self.clock = clock
        self.operators = 0
        self.arena_reads = 0
        self._clocked: list[DeviceState] = []
        self._layout = -1
        self._masters = _Spans([])
        self._arena = _Spans([])

    def __enter__(self) -> Witness:
        states = self._map_memory()
        if self.clock:
            self._clocked = [state for state in states if state.simulated]
            for state in self._clocked:
                state.clocked_outside += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _map_memory(self) -> list[DeviceState]:
        """Note where masters and arenas lie now."""
        self._layout = Layout.version
        states = open_states()
        self._masters = _Spans(
            [
                (start, end, f"{layer.name}.{key}" if layer.name else key)
                for state in states
                for attachment in list(state.models.values())
                for layer in attachment.layers
                for key, tensor in zip(("weight", "bias"), layer.tensors(), strict=False)
                for start, end in [memory_of(tensor)]
            ]
        )
        self._arena = _Spans(
            [
                (segment.address, segment.address + segment.nbytes, state)
                for state in states
                for segment in state.segments
            ]
        )
        return states

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        for state in self._clocked:
            state.pay()
            state.clocked_outside -= 1
        self._clocked = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = operator_of(func)
        if not operator.touches_bytes:
            return func(*args, **kwargs)
        self.operators += 1
        if self._layout != Layout.version:
            self._map_memory()
        reads: list[tuple[int, int, Any]] = []
        writes: list[tuple[int, int, Any]] = []
        moved = 0
        for tensor, written in operator.tensors(args, kwargs):
            start, end = memory_of(tensor)
            moved += end - start
            if start < self._masters.end and end > self._masters.start:
                for touched in self._masters.touched(start, end):
                    self._master_touched(func, touched, written)
            if start < self._arena.end and end > self._arena.start:
                (writes if written else reads).extend(self._arena.touched(start, end))
        if reads or writes:
            self.arena_reads += bool(reads)
            if self.declare:
                _declare(reads, writes)
        result = func(*args, **kwargs)
        if self._clocked:
            self._charge(operator, args, kwargs, result, moved, bool(reads or writes))
        return result

    def _master_touched(self, func: Any, touched: tuple[int, int, str], written: bool) -> None:
        start, end, name = touched
        if is_exempt():
            if self.declare:
                from . import simulator

                if any(state.simulated for state in open_states()):
                    simulator.host_access(start, end - start, written)
            return
        if self.strict:
            raise refusal(f"operator {func} {'writes' if written else 'reads'}", name)

    def _charge(
        self, operator: _Operator, args: Any, kwargs: Any, result: Any, moved: int, now: bool
    ) -> None:
        outputs = list(tensors_in(result))
        moved += sum(end - start for start, end in map(memory_of, outputs))
        formula = operator.flops
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
        dtype = outputs[0].dtype if outputs else torch.float32
        for state in self._clocked:
            state.owed_s += state.operator_seconds(float(flops), moved, dtype)
            if now:  # before the slot is released
                state.pay()


def refusal(what: str, name: str) -> OffloadError:
    """Say that a weight was computed with where it lies; `what` ends in a verb."""
    return OffloadError(
        f"{what} the host master of '{name}': some code computes with the weight of a managed "
        "layer instead of calling the layer. Leave it resident: "
        f"attach(..., ignore_modules=[{name.rpartition('.')[0]!r}])."
    )


class _Operator:
    """What has to be known of one operator, read off its schema once."""

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        arguments = () if schema is None else schema.arguments
        written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        self.touches_bytes = not (
            schema is not None  # a higher-order operator may do anything with its arguments
            and (
                func.is_view
                or (schema.name.endswith(_GEOMETRY_ONLY) and not any(written))
                or schema.name in _NO_KERNEL
            )
        )
        self.flops = flop_registry.get(getattr(func, "_overloadpacket", None))
        self.positional: list[bool] = written
        self.named = {a.name: w for a, w in zip(arguments, written, strict=True)}

    def tensors(self, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
        """Yield the tensors among the arguments, each with whether it is written."""
        for value, written in zip_longest(args, self.positional[: len(args)], fillvalue=False):
            for tensor in tensors_in(value):
                yield tensor, written
        for name, value in kwargs.items():
            for tensor in tensors_in(value):
                yield tensor, self.named.get(name, False)


_operators: dict[Any, _Operator] = {}


def operator_of(func: Any) -> _Operator:
    """Return what has to be known of `func`."""
    operator = _operators.get(func)
    if operator is None:
        operator = _operators[func] = _Operator(func)
    return operator


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested list, of a wrapper subclass those that it is made of."""
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
            return
        for name in flatten()[0]:  # what a wrapper subclass is made of
            yield from tensors_in(getattr(value, name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def _declare(reads: list[tuple[int, int, Any]], writes: list[tuple[int, int, Any]]) -> None:
    """Declare one operator's arena accesses on the stream of each simulated device involved."""
    from . import simulator

    for state in {id(what): what for _, _, what in (*reads, *writes)}.values():
        if state.simulated:
            simulator.launch(
                state.stream(),
                [(start, end - start) for start, end, what in reads if what is state],
                [(start, end - start) for start, end, what in writes if what is state],
                0.0,
            )
