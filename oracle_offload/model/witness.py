"""An independent witness of what torch's operators touch.

`attach` rests on a promise: no operator reads a host master while a managed model computes. On a
machine without CUDA nothing in the results would show a broken promise, because master and slot
hold the same bits. `Witness` is a dispatch mode that sees every operator below autograd. Strict, it
fails one that touches a master; on the simulated device it also declares what operators read and
write of the arena and of masters, so that the race detector sees what really happened, and, with a
clock, charges each operator's time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..engine import simulator
from ..engine.engines import DeviceState, Layout, open_states
from ..engine.exemption import is_exempt
from ..engine.geometry import Spans, memory_of
from ..engine.operators import (
    Operator,
    autocast_reaches_kernels,
    operator_of,
    run_in_mode,
    tensors_in,
)
from ..errors import OffloadError
from ..layers.handle import computes
from ..layers.traced import kernel_of
from .attachment import attachments_on

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _untraced(function: _Function) -> _Function:
    """Let torch.compile run `function`, and what it calls, as it is."""
    return cast("_Function", torch.compiler.disable(function))


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
        self._autocast = contextlib.ExitStack()
        self._layout = -1
        self._masters = Spans([])
        self._arena = Spans([])

    @_untraced
    def __enter__(self) -> Witness:
        states = self._map_memory()
        if self.clock:
            self._clocked = [state for state in states if state.simulated]
            for state in self._clocked:
                state.time.witnesses += 1
        self._autocast.enter_context(autocast_reaches_kernels())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _map_memory(self) -> list[DeviceState]:
        """Note where masters and arenas are now."""
        self._layout = Layout.version
        states = open_states()
        self._masters = Spans(
            [
                (start, end, f"{layer.name}.{key}" if layer.name else key)
                for state in states
                for attachment in attachments_on(state)
                for layer in list(attachment.layers)
                for key, tensor in layer.masters.named()
                for start, end in [memory_of(tensor)]
            ]
        )
        self._arena = Spans(
            [
                (segment.address, segment.address + segment.nbytes, state)
                for state in states
                for segment in state.segments
            ]
        )
        return states

    @_untraced
    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._autocast.close()
        for state in self._clocked:
            state.time.flush(state.stream())
            state.time.witnesses -= 1
        self._clocked = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (kernel := kernel_of(func)) is not None:  # a managed layer: what it runs is looked at
            with self._looking_on():
                return kernel(*args, **kwargs)
        if (run := computes(types, args, kwargs)) is not None:  # with weights that it borrows
            with self._looking_on():
                return run(func, types, args, kwargs)
        operator = operator_of(func)
        if not operator.touches_bytes:
            return func(*args, **kwargs)
        self.operators += 1
        if self._layout != Layout.version:
            self._map_memory()
        return self._observe(operator, func, args, kwargs)

    @contextlib.contextmanager
    def _looking_on(self) -> Iterator[None]:
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _observe(self, operator: Operator, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator that touches bytes, and see to what it touches."""
        reads: list[tuple[int, int, Any]] = []
        writes: list[tuple[int, int, Any]] = []
        moved = 0
        for tensor, written in operator.tensors(args, kwargs):
            start, end = memory_of(tensor)
            moved += end - start
            for touched in self._masters.touched(start, end):
                self._master_touched(func, touched, written)
            (writes if written else reads).extend(self._arena.touched(start, end))
        if reads or writes:
            self.arena_reads += bool(reads)
            if self.declare:
                _declare(reads, writes)
        result = run_in_mode(func, args, kwargs)
        if self._clocked:
            self._charge(operator, args, kwargs, result, moved, bool(reads or writes))
        return result

    def _master_touched(self, func: Any, touched: tuple[int, int, str], written: bool) -> None:
        start, end, name = touched
        if is_exempt():
            if self.declare and any(state.simulated for state in open_states()):
                simulator.host_access(start, end - start, written)
            return
        if self.strict:
            raise refusal(f"operator {func} {'writes' if written else 'reads'}", name)

    def _charge(
        self, operator: Operator, args: Any, kwargs: Any, result: Any, moved: int, now: bool
    ) -> None:
        outputs = list(tensors_in(result))
        moved += sum(end - start for start, end in map(memory_of, outputs))
        formula = operator.flops
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
        dtype = outputs[0].dtype if outputs else torch.float32
        for state in self._clocked:
            state.time.pending_kernel_s += state.time.operator_seconds(float(flops), moved, dtype)
            if now:  # before the slot is released
                state.time.flush(state.stream())


def refusal(what: str, name: str) -> OffloadError:
    """Say that code computed with a weight in host memory; `what` ends in a verb."""
    # A weight of the model itself is named alone: its module is the whole model.
    return OffloadError(
        f"{what} the host master of '{name}': some code computes with the weight of a managed "
        "layer instead of calling the layer. Leave it resident: "
        f"attach(..., ignore_modules=[{name.rpartition('.')[0] or name!r}])."
    )


def _declare(reads: list[tuple[int, int, Any]], writes: list[tuple[int, int, Any]]) -> None:
    """Declare one operator's arena accesses on the stream of each simulated device involved."""
    for state in {id(what): what for _, _, what in (*reads, *writes)}.values():
        if state.simulated:
            simulator.launch(
                state.stream(),
                [(start, end - start) for start, end, what in reads if what is state],
                [(start, end - start) for start, end, what in writes if what is state],
                0.0,
            )
