"""A step of a model without memory: what its activations take, and what it asks of an engine.

The step runs under torch's FakeTensorMode: shapes and dtypes are computed, nothing else. Each
operator's work is noted, and each use of a managed leaf, as the engine would be asked for it. Of
blocks that are alike four are run: `oracle_offload.planning.alike`.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from .._core import BACKWARD, FORWARD, RECOMPUTE
from ..engine.geometry import tensor_bytes
from ..engine.operators import operator_of, tensors_in
from ..engine.simulated_time import SimulatedTime
from ..layers.conv import ConvLayer
from ..layers.linear import LinearLayer, input_gradient, linear
from ..model.selection import Chosen
from .alike import Mark, Memory, Row, rows_of, shortened, told
from .sample import UnknownSample, inputs
from .source import copy_with, switch_of
from .storage import Pair

logger = logging.getLogger("oracle_offload")

# The defaults of `offload_activations`: what is as large leaves, and so many of the largest stay.
_LEAST, _HELD = 1 << 20, 4
_TICKETS = 1 << 32  # more than a micro-batch has uses
_graph_task = torch._C._current_graph_task_id

# An operator: floating-point operations, bytes it reads and writes, dtype of its result; the last
# says whether it reads them over the link.
Work = tuple[float, int, torch.dtype, bool]


class Stage(NamedTuple):
    """A part of a micro-batch: its forward, or the backward of one checkpointed region.

    Attributes
    ----------
    peak : int
        Most bytes that live at once apart from what the training keeps.
    waiting : int
        Bytes that a micro-batch keeps while it waits for others to get through the same part.
    """

    peak: int
    waiting: int


class Leaving(NamedTuple):
    """A step's activations where `oracle_offload.train.offload_activations` lets them leave.

    Attributes
    ----------
    device_bytes : int
        On the device, at most.
    host_bytes : int
        On the host, page-locked.
    longer : float
        So many times the tokens, or the pixels, take as much of the device as all of them do.
    """

    device_bytes: int
    host_bytes: int
    longer: float


@dataclass
class Step:
    """What a step takes.

    Attributes
    ----------
    stages : list of Stage
        Of the memory of one micro-batch; none where that is unknown.
    staying : list of Stage
        The same less what `oracle_offload.train.offload_activations` lets leave.
    largest : int
        Bytes of the largest that leaves so; 0 where nothing does.
    events : list
        ``("work", [Work, ...])``, ``("acquire", leaf, kind, ticket)``, ``("release", ticket)``, of
        one micro-batch.
    numbers : dict of str to int
        The leaves of the events, by name.
    regions : dict of int to int
        By leaf: the number of the checkpointed region that computes with it, from one on.
    why : str
        Why nothing is known; empty where something is.
    note : str
        What was taken for granted.
    micro_batches : int
        In a step.
    together : bool
        Whether all of them compute a block before any goes on, as in `oracle_offload.accumulate`.
    """

    stages: list[Stage] = field(default_factory=list)
    staying: list[Stage] = field(default_factory=list)
    largest: int = 0
    events: list[tuple[Any, ...]] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    regions: dict[int, int] = field(default_factory=dict)
    why: str = ""
    note: str = ""
    micro_batches: int = 1
    together: bool = False

    @property
    def activations(self) -> int | None:
        """Most bytes that live at once apart from what the training keeps; None unknown."""
        return self._most(self.stages) if self.stages else None

    def _most(self, stages: Sequence[Stage]) -> int:
        waiting = self.micro_batches - 1 if self.together else 0
        return max(stage.peak + waiting * stage.waiting for stage in stages)

    def leaving(self) -> Leaving | None:
        """Return what `oracle_offload.train.offload_activations` makes of the activations.

        What autograd saves in forward, of a mebibyte or more, is on the host when backward begins.
        In addition to all else the device holds its default budget of it. None where nothing is
        known, or nothing leaves.
        """
        whole = self.activations
        if not whole or not self.largest:
            return None
        saved = self.stages[0].waiting - self.staying[0].waiting
        saved *= self.micro_batches if self.together else 1
        device = min(whole, self._most(self.staying) + min(saved, _HELD * self.largest))
        return Leaving(device, saved, whole / device)

    def _seconds(self, work: Sequence[Work], time: SimulatedTime) -> float:
        """Return what operators take one after the other."""
        return sum(
            time.link_seconds(moved) if mapped else time.operator_seconds(flops, moved, dtype)
            for flops, moved, dtype, mapped in work
        )

    def replayed(self, time: SimulatedTime) -> list[tuple[Any, ...]]:
        """Return the events as `oracle_offload.engine.replay` takes them, at the rates of `time`.

        Of several micro-batches each computes a checkpointed region as a whole; what is in none,
        all of them compute while its weights are there.
        """
        found: list[tuple[Any, ...]] = []
        for is_region, events in self._parts():
            rounds, share = (self.micro_batches, 1) if is_region else (1, self.micro_batches)
            for number in range(rounds):
                for event in events:
                    if event[0] == "work":
                        found.append(("launch", share * self._seconds(event[1], time)))
                        continue
                    ticket = event[-1] + number * _TICKETS
                    if event[0] == "acquire":
                        task = -1 if event[2] == FORWARD else 0
                        found.append(("acquire", event[1], event[2], task, ticket))
                    else:
                        found.append(("release", ticket))
        return found

    def _parts(self) -> list[tuple[bool, list[tuple[Any, ...]]]]:
        """Return the events in parts, each with whether it is (of) a checkpointed region."""
        parts: list[tuple[bool, list[tuple[Any, ...]]]] = []
        now = -1
        for event in self.events:
            if event[0] == "acquire":
                region = self.regions.get(event[1], 0)
                if region != now:
                    parts.append((region > 0, []))
                    now = region
            elif not parts:
                parts.append((False, []))
            parts[-1][1].append(event)
        return parts

    def phases(self, time: SimulatedTime) -> tuple[float, float]:
        """Return the seconds that forward and backward compute at the rates of `time`."""
        forward, backward = (
            self.micro_batches
            * sum(self._seconds(event[1], time) for event in part if event[0] == "work")
            for part in self._halves()
        )
        return forward, backward

    def used(self) -> tuple[set[int], set[int]]:
        """Return the leaves that forward and backward compute with."""
        forward, backward = (
            {event[1] for event in part if event[0] == "acquire"} for part in self._halves()
        )
        return forward, backward

    def _halves(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        turn = next(
            (n for n, e in enumerate(self.events) if e[0] == "acquire" and e[2] != FORWARD),
            len(self.events),
        )
        return self.events[:turn], self.events[turn:]


def measure(
    module: nn.Module,
    leaves: Sequence[Chosen],
    adapters: dict[str, Pair],
    adapter_dtype: torch.dtype,
    checkpointing: bool,
    sample: Any,
    batch: int,
) -> Step:
    """Return what a step of `module` takes, forward and backward.

    Parameters
    ----------
    module : nn.Module
        On the meta device, marked as trained or frozen.
    leaves : sequence of Chosen
        The managed ones of `module`, numbered by their place.
    adapters : dict
        See `Storage.adapters`.
    adapter_dtype : torch.dtype
    checkpointing : bool
        Whether the model's own switch is turned on.
    sample, batch
        See `oracle_offload.planning.sample.inputs`.
    """
    numbers = {leaf.name: number for number, leaf in enumerate(leaves)}
    arguments = module, leaves, numbers, adapters, adapter_dtype, checkpointing, sample, batch
    rows = rows_of(module, numbers, adapters)
    if rows:
        marks, why, note = _run(rows, *arguments)
        whole = told(marks, rows, numbers) if marks else None
        if whole is not None:
            return _step(whole, numbers, note)
        logger.debug("blocks that look alike are not, so each of them is run: %s", why)
    marks, why, note = _run((), *arguments)
    return _step(marks, numbers, note) if marks else Step(why=why)


def _step(marks: Sequence[Mark], numbers: dict[str, int], note: str) -> Step:
    """Return the step that marks describe, its tickets and regions numbered as they come."""
    tickets: dict[Any, int] = {}
    numbered: dict[Any, int] = {0: 0}
    events: list[tuple[Any, ...]] = []
    regions: dict[int, int] = {}
    for event, region, *_ in marks:
        if event[0] == "acquire":
            ticket = tickets[event[3]] = len(tickets) + 1
            if region:
                regions[event[1]] = numbered.setdefault(region, len(numbered))
            events.append((*event[:3], ticket))
        elif event[0] == "release":
            events.append(("release", tickets[event[1]]))
        elif event[0] == "work":
            events.append(event)
    stages, staying = stages_of(marks), stages_of(marks, staying=True)
    largest = max(mark.largest for mark in marks)
    return Step(stages, staying, largest, events, numbers, regions, note=note)


def stages_of(marks: Sequence[Mark], *, staying: bool = False) -> list[Stage]:
    """Return the stages of a step, with what lives in each; `staying`: see `Mark`."""
    stages: list[Stage] = []
    live = peak = least = begun = 0
    for mark in marks:
        memory = mark.staying if staying else mark.memory
        peak, least = max(peak, live + memory.high), min(least, live + memory.low)
        live += memory.delta
        if mark.event[0] != "stage":
            continue
        # Those that are through with forward wait with what it has left, the others begin with it.
        stages.append(Stage(peak, begun if stages else live))
        # What a region computes before it is computed again is not left by the one before it.
        begun = least if len(stages) > 1 else live
        peak = least = live
    return stages


def _run(
    rows: Sequence[Row],
    module: nn.Module,
    leaves: Sequence[Chosen],
    numbers: dict[str, int],
    adapters: dict[str, Pair],
    adapter_dtype: torch.dtype,
    checkpointing: bool,
    sample: Any,
    batch: int,
) -> tuple[list[Mark], str, str]:
    """Run a step of which `rows` are shortened: return its marks, or why there are none."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # what a class keeps in plain attributes
    with fake:
        with shortened(rows) as renamed:
            model = copy_with(
                module, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
            )
        model.train()
        try:
            arguments, note = inputs(model, sample, batch)
        except UnknownSample as error:
            return [], str(error), ""
        switch = switch_of(model)
        if checkpointing and switch:
            getattr(model, switch)()
        elif checkpointing:
            note = f"{note}, no checkpointing, for which the class has no switch".lstrip(", ")
        config: Any = getattr(model, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        ask = getattr(model, "enable_input_require_grads", None)
        if ask is not None and adapters and switch and checkpointing:
            ask()  # as peft does
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        there: list[tuple[int, Any, Chosen]] = []
        for leaf in leaves:
            name = renamed(leaf.name)
            if name is not None:
                there.append((numbers[leaf.name], model.get_submodule(name), leaf))
        tracer = _Tracer(model, there)
        for _, frozen, leaf in there:
            if any(parameter.requires_grad for parameter in frozen.parameters()):
                continue
            if leaf.kind is LinearLayer:
                frozen.forward = partial(_forward, _FrozenLinear, frozen)
            elif issubclass(leaf.kind, ConvLayer) and _pads_itself(frozen):
                frozen.forward = partial(_forward, _FrozenConv, frozen)
        named = {renamed(name): pair for name, pair in adapters.items()}
        added = {name: pair for name, pair in named.items() if name is not None}
        tracer.keep(_add_adapters(model, added, adapter_dtype))
        try:
            with tracer, tracer.noting_regions():
                tracer.count(arguments)
                with saved_tensors_hooks(tracer.pack, tracer.unpack):
                    output = model(**arguments)
                loss = _loss(output)
                del output
                tracer.end_stage()
                loss.backward()
        except (
            Exception
        ) as error:  # whatever a model's own code does with values that are not there
            said = str(error).strip().splitlines() or [type(error).__name__]
            return [], f"its forward or backward cannot be run without values: {said[0]}", ""
    tracer.flush()
    tracer.end_stage()
    return tracer.marks, "", note


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is not None:
        found: Tensor = loss
        return found
    if isinstance(output, Tensor):
        tensors = [output]
    else:
        tensors = list(tensors_in(list(output.values() if hasattr(output, "values") else output)))
    wanted = [t for t in tensors if t.requires_grad and t.is_floating_point()]
    if not wanted:
        raise ValueError("no result of the model depends on what is trained")
    return torch.stack([tensor.float().square().mean() for tensor in wanted]).sum()


class _FrozenLinear(torch.autograd.Function):
    """A managed Linear, which saves nothing: a checkpoint need not compute the last one again."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        ctx.layer, ctx.shape, ctx.stride = layer, x.shape, x.stride()
        return linear(x, layer.weight, layer.bias, False)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        layer = ctx.layer
        return None, input_gradient(grad, (layer.weight, layer.bias), ctx.shape, ctx.stride)


def _forward(function: type[torch.autograd.Function], layer: nn.Module, input: Tensor) -> Any:
    """Take the argument by its name, too, as torch's own layers do."""
    return function.apply(layer, input)


def _pads_itself(convolution: Any) -> bool:
    """Whether nothing is padded before the operator, which would be kept or made again."""
    return convolution.padding_mode == "zeros" and not isinstance(convolution.padding, str)


class _FrozenConv(torch.autograd.Function):
    """A managed convolution, which saves nothing either: backward needs its input's geometry."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        ctx.layer, ctx.shape, ctx.stride = layer, x.shape, x.stride()
        result: Tensor = layer._conv_forward(x, layer.weight, layer.bias)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        layer, none = ctx.layer, (0,) * len(ctx.layer.stride)
        x = torch.empty_strided(ctx.shape, ctx.stride, dtype=grad.dtype, device=grad.device)
        batched = x.dim() == 2 + len(none)
        if not batched:
            x, grad = x[None], grad[None]
        arguments = layer.stride, layer.padding, layer.dilation, False, none, layer.groups
        wanted = (True, False, False)
        gradients = torch.ops.aten.convolution_backward(
            grad, x, layer.weight, None, *arguments, wanted
        )
        return None, gradients[0] if batched else gradients[0][0]


def _add_adapters(
    model: nn.Module, adapters: dict[str, Pair], dtype: torch.dtype
) -> list[nn.Parameter]:
    """Let each layer add what a LoRA of peft adds; return what is trained."""
    added: list[nn.Parameter] = []
    for name, (down, up) in adapters.items():
        layer = model.get_submodule(name)
        a = nn.Parameter(torch.empty(down, dtype=dtype))
        b = nn.Parameter(torch.empty(up, dtype=dtype))
        layer.register_forward_hook(partial(_adapted, a, b), with_kwargs=True)
        a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
        added += [a, b]
    return added


def _adapted(
    a: Tensor,
    b: Tensor,
    layer: Any,
    args: tuple[Any, ...],
    named: dict[str, Any],
    result: Tensor,
) -> Tensor:
    x, *_ = (*args, *named.values())
    x = x.to(a.dtype)
    if a.dim() == 2:
        low = nn.functional.linear(nn.functional.linear(x, a), b)
    else:
        convolve = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[a.dim() - 3]
        low = convolve(convolve(x, a, None, layer.stride, layer.padding, layer.dilation), b)
    return (result + low * 1.0).to(result.dtype)


class _Bytes:
    """Bytes that live, and the most and the least of them since the last mark."""

    def __init__(self) -> None:
        self._now = self._high = self._low = 0

    def add(self, nbytes: int) -> None:
        """Count some more, or some less."""
        self._now += nbytes
        self._high, self._low = max(self._high, self._now), min(self._low, self._now)

    def mark(self) -> Memory:
        """Return what became of them since the last call."""
        found = Memory(self._high, self._low, self._now)
        self._now = self._high = self._low = 0
        return found


class _Storage:
    """The memory of tensors, as long as it is counted."""

    __slots__ = ("is_away", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.is_away = nbytes, False


class _Packed:
    """What autograd holds of a tensor."""

    __slots__ = ("__weakref__", "storage", "tensor")

    def __init__(self, tensor: Tensor, storage: _Storage) -> None:
        self.tensor, self.storage = tensor, storage


class _Tracer(TorchDispatchMode):
    """Notes each operator's work, what lives meanwhile, and which managed leaves it computes with.

    Attributes
    ----------
    marks : list of Mark
        Of what was run.
    """

    def __init__(
        self, model: nn.Module, leaves: Sequence[tuple[int, nn.Module, Chosen]] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks: list[Mark] = []
        self._region = self._depth = 0  # the last checkpointed one, and how many it is inside
        self._live, self._staying = _Bytes(), _Bytes()  # all; less what would have left
        self._largest = 0  # of what would have, since the last mark
        self._kind = FORWARD  # of the last use
        self._work: list[Work] = []
        self._leaf_at: dict[int, int] = {}  # by the storage of its tensors
        self._mapped: set[int] = set()
        self._lent: list[int] = []  # the leaves whose forward is under way
        self._tickets = 0
        self._known: Any = weakref.WeakKeyDictionary()  # storages that are counted, or kept anyway
        self.keep([*model.parameters(), *model.buffers()])
        for number, module, leaf in leaves:
            for tensor in leaf.kind.named_tensors(module).values():
                self._leaf_at[tensor.untyped_storage()._cdata] = number
            if not leaf.kind.needs_place:
                self._mapped.add(number)
                continue
            tickets: list[int] = []
            module.register_forward_pre_hook(partial(self._begin, number, tickets))
            module.register_forward_hook(partial(self._end, tickets), always_call=True)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Leave out what the training keeps from step to step, with its gradients."""
        for tensor in tensors:
            self._known[tensor.untyped_storage()] = _Storage(0)
            if tensor.grad is not None:
                self._known[tensor.grad.untyped_storage()] = _Storage(0)

    @contextlib.contextmanager
    def noting_regions(self) -> Iterator[None]:
        """Note which leaves checkpointed regions compute with, of either reentrancy."""
        hooks: Any = checkpoint._checkpoint_hook
        function: Any = checkpoint.CheckpointFunction
        forward = function.__dict__["forward"]

        def begin(hook: Any) -> None:
            saved_tensors_hooks.__enter__(hook)
            self._begin_region()

        def end(hook: Any, *error: Any) -> None:
            saved_tensors_hooks.__exit__(hook, *error)
            self._depth -= 1

        def noted(*args: Any) -> Any:
            self._begin_region()
            try:
                return forward.__func__(*args)
            finally:
                self._depth -= 1

        hooks.__enter__, hooks.__exit__, function.forward = begin, end, staticmethod(noted)
        try:
            yield
        finally:
            del hooks.__enter__, hooks.__exit__
            function.forward = forward

    def _begin_region(self) -> None:
        self._region += not self._depth
        self._depth += 1

    def _begin(self, leaf: int, tickets: list[int], module: Any, args: Any) -> None:
        tickets.append(self._acquire(leaf, FORWARD if _graph_task() < 0 else RECOMPUTE))
        self._lent.append(leaf)

    def _end(self, tickets: list[int], module: Any, args: Any, result: Any) -> None:
        self._lent.pop()
        self._release(tickets.pop())

    def _acquire(self, leaf: int, kind: int) -> int:
        self.flush()
        if kind == RECOMPUTE != self._kind:
            self.end_stage()
        self._kind = kind
        region = self._region if self._depth and kind == FORWARD else 0
        self._tickets += 1
        self._mark(("acquire", leaf, kind, self._tickets), region)
        return self._tickets

    def _release(self, ticket: int) -> None:
        self.flush()
        self._mark(("release", ticket))

    def _mark(self, event: tuple[Any, ...], region: int = 0) -> None:
        memory, staying = self._live.mark(), self._staying.mark()
        self.marks.append(Mark(event, region, memory, staying, self._largest))
        self._largest = 0

    def end_stage(self) -> None:
        """Another part of the step begins: backward, or a checkpointed region in it."""
        self._mark(("stage",))

    def flush(self) -> None:
        """Note the work since the last event."""
        if self._work:
            self._mark(("work", self._work))
            self._work = []

    def count(self, values: Any) -> None:
        """Count the memory of tensors that are not counted yet, until it is given back."""
        found = list(values.values()) if isinstance(values, dict) else values
        for tensor in tensors_in(found):
            storage = tensor.untyped_storage()
            if storage in self._known:
                continue
            counted = self._known[storage] = _Storage(storage.nbytes())
            for ledger in (self._live, self._staying):
                ledger.add(counted.nbytes)
            weakref.finalize(storage, self._forget, counted).atexit = False

    def _forget(self, storage: _Storage) -> None:
        self._live.add(-storage.nbytes)
        if not storage.is_away:
            self._staying.add(-storage.nbytes)
        storage.nbytes = 0

    def pack(self, tensor: Tensor) -> Any:
        """Let the memory of what autograd saves in forward leave."""
        storage = self._known.get(tensor.untyped_storage())
        if storage is None or storage.nbytes < _LEAST or _graph_task() >= 0:
            return tensor
        self._largest = max(self._largest, storage.nbytes)
        if not storage.is_away:
            storage.is_away = True
            self._staying.add(-storage.nbytes)
        packed = _Packed(tensor, storage)
        weakref.finalize(packed, self._return, storage).atexit = False
        return packed

    def unpack(self, kept: Any) -> Any:
        """Let it come back for backward."""
        if not isinstance(kept, _Packed):
            return kept
        self._return(kept.storage)
        return kept.tensor

    def _return(self, storage: _Storage) -> None:
        if storage.is_away:
            storage.is_away = False
            self._staying.add(storage.nbytes)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = operator_of(func)
        result = func(*args, **kwargs)
        self.count([result])
        if not operator.touches_bytes or getattr(func, "namespace", "") == "prim":
            return result  # a question, not a kernel
        moved, used = 0, -1
        for tensor, _ in operator.tensors(args, kwargs):
            leaf = self._leaf_at.get(tensor.untyped_storage()._cdata, -1)
            if leaf in self._mapped:
                continue  # a table, of which only rows are read
            moved += tensor_bytes(tensor)
            if leaf >= 0 and leaf not in self._lent:
                used = leaf
        outputs = list(tensors_in(result))
        moved += sum(map(tensor_bytes, outputs))
        formula = operator.flops
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
        dtype = outputs[0].dtype if outputs else torch.float32
        mapped = any(
            self._leaf_at.get(t.untyped_storage()._cdata, -1) in self._mapped
            for t, _ in operator.tensors(args, kwargs)
        )
        ticket = self._acquire(used, BACKWARD) if used >= 0 else None
        self._work.append((float(flops), moved, dtype, mapped))
        if ticket is not None:
            self._release(ticket)
        return result
