"""Optimizers that step weights of the host on the device, with states on the host.

`step` brings a few Parameters at a time to the device, with their gradients and states, lets the
optimizer's own code step them there, and sends Parameters and states home while the next ones come.
No arithmetic of any optimizer is written here: the bits are those of a model on that device.

A class of optimizers is accepted where a trial shows that it steps Parameters one by one as it does
together. What is stepped is kept on the device until its copies home are queued, and what is not
yet stepped is untouched at home: so a step that was interrupted is completed, and steps nothing
twice.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..engine.engines import DeviceState, open_states
from ..engine.exemption import exempt
from ..engine.geometry import copied_to, is_dense, stored_bytes, tensor_bytes
from ..errors import DriverError, OffloadError
from ..layers.gradients import Gradients
from .micro_batches.thread_state import Generators

BATCH_BYTES = 192 << 20  # of Parameters that are stepped together, their gradients and states
LEAVING = 4  # batches, whose copies home may be under way while further ones are stepped
# Of those that are stepped in backward, which wait for their states while further gradients come. A
# block's come in a burst, and none while it is computed again.
WAITING = 5
PART_OF_ARENA = 8  # such memory, of each kind, is an eighth of the arena at most
_TRIAL_STEPS = 3
_TRIAL_TENSORS = 3  # of each group
_TRIAL_SIDE = 8
# Of two more matrices and two more vectors in each group: optimizers treat tensors otherwise from
# some size on. bitsandbytes keeps 8 bits from 4,096 elements on, and factored moments begin at
# sides of 128.
_TRIAL_LONG_SIDE = 128
_TRIAL_VECTOR = 4096
STEPPER = "_oracle_offload_stepper"
# Attributes that a part has of its own.
_ELSEWHERE = frozenset({"state", "param_groups", STEPPER})
# What an attribute may point to without keeping a step's results there.
_NOT_KEPT = (
    type,
    nn.Module,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    property,
    staticmethod,
    classmethod,
    torch.dtype,
    torch.device,
)


@dataclass
class Home:
    """Where a managed Parameter belongs."""

    state: DeviceState
    gradients: Gradients
    # The layers that have it, and which of their tensors it is.
    places: list[tuple[Any, int]] = field(default_factory=list)

    @property
    def units(self) -> list[int]:
        """The units that it is part of."""
        return [layer.unit for layer, _ in self.places]


def homes() -> dict[int, Home]:
    """Return where each managed Parameter belongs, by its `id`."""
    found: dict[int, Home] = {}
    for state in open_states():
        for attachment in state.listeners:
            for layer in getattr(attachment, "layers", ()):
                for index, master in enumerate(layer.masters.tensors):
                    if master is not None:
                        home = found.setdefault(id(master), Home(state, layer.attachment.gradients))
                        home.places.append((layer, index))
    return found


def state_of(optimizer: Any, homes: dict[int, Home]) -> DeviceState | None:
    """Return the device on which an optimizer's managed Parameters are used; None without any."""
    own = [id(p) for group in optimizer.param_groups for p in group["params"]]
    states = {id(homes[p].state): homes[p].state for p in own if p in homes}
    if len(states) > 1:
        raise OffloadError(
            f"{type(optimizer).__name__} trains models on several devices; use an optimizer for "
            "each."
        )
    return next(iter(states.values()), None)


# ---- the class ----


@functools.cache
def streamed(kind: Any) -> Any:
    """Return a class of optimizers that steps as `kind`, group by group."""

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Step all Parameters; see `stream_optimizer`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.__dict__[STEPPER].step(self)
        return loss

    def load_state_dict(self: Any, state_dict: Any) -> None:
        """Load what a `state_dict` returned, into the memory that the states have."""
        before = dict(self.state)
        kind.load_state_dict(self, state_dict)
        _fill(before, self.state)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Copy as one that is not streamed: this class has no name that a pickle could find."""
        # Later protocols insist on the object's own class.
        reduced = kind.__reduce_ex__(self, min(protocol, 1))
        if isinstance(reduced, str):
            return reduced
        made, arguments, *rest = reduced
        if rest and isinstance(rest[0], dict):  # of a class that keeps all of its attributes
            ours = (STEPPER, "step")
            rest[0] = {name: value for name, value in rest[0].items() if name not in ours}
        return made, tuple(kind if each is type(self) else each for each in arguments), *rest

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True  # torch wraps no step twice
    members = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "step": hooked,
        "load_state_dict": load_state_dict,
        "__reduce_ex__": __reduce_ex__,
    }
    return type(kind.__name__, (kind,), members)


def own_step(kind: Any) -> Callable[..., Any]:
    """Return what a class of optimizers runs as a step, without the hooks around it."""
    step = kind.step
    return cast("Callable[..., Any]", step.__wrapped__ if getattr(step, "hooked", False) else step)


def _fill(before: dict[Any, Any], now: dict[Any, Any]) -> None:
    """Put what was loaded into the tensors that were there, where those are alike.

    A tensor that something else holds too (a `state_dict` from before) is left as it is, and what
    was loaded takes its place, as in plain torch.
    """
    for parameter, loaded in now.items():
        former = before.get(parameter)
        if not isinstance(former, dict) or not isinstance(loaded, dict):
            continue
        del former
        if _holders(before, parameter) > _holders({parameter: {}}, parameter):
            continue
        for name, value in loaded.items():
            there: Any = before[parameter].get(name)
            if _is_plain(value) and _is_plain(there) and _are_alike(value, there):
                if value.data_ptr() != there.data_ptr():
                    del there
                    if not _is_alone(before[parameter], name):
                        continue
                    there = before[parameter][name]
                    with torch.no_grad():
                        there.copy_(value)
                loaded[name] = there


def _holders(held: dict[Any, Any], key: Any) -> int:
    """Return how often a value is referred to, and as often more as for any that this is asked."""
    return sys.getrefcount(held[key])


def _is_alone(held: dict[Any, Any], key: Any) -> bool:
    """Whether nothing but a dict refers to a tensor, or to its memory."""
    lone: dict[Any, Any] = {key: torch.empty(1, device="cpu")}
    if _holders(held, key) > _holders(lone, key):
        return False
    uses = [
        torch._C._storage_Use_Count(one.untyped_storage()._cdata) for one in (held[key], lone[key])
    ]
    return uses[0] <= uses[1]


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and value.layout is torch.strided and is_dense(value)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype and one.device == other.device


# ---- a part of the optimizer ----


def _part_of(optimizer: Any, kind: Any, groups: list[dict[str, Any]], state: Any) -> Any:
    """Return an optimizer that has everything of `optimizer` but its Parameters and states."""
    part = object.__new__(kind)
    part.__dict__.update(optimizer.__dict__)
    part.__dict__.pop(STEPPER, None)
    part.param_groups, part.state = groups, state
    return part


def _groups_with(
    optimizer: Any, stands_for: dict[int, Tensor], nothing: Tensor
) -> list[dict[str, Any]]:
    """Return the groups with other Parameters at the same places; `nothing` has no gradient."""
    return [
        {**group, "params": [stands_for.get(id(p), nothing) for p in group["params"]]}
        for group in optimizer.param_groups
    ]


# ---- the trial ----


def try_steps(optimizer: Any, kind: Any, device: torch.device, managed: Container[int]) -> None:
    """Refuse a class that steps Parameters otherwise together than one by one."""
    groups: list[list[Tensor]] = []
    generator = torch.Generator("cpu").manual_seed(0)

    def made(shape: Iterable[int], like: Tensor) -> Tensor:
        drawn = torch.randn(list(shape), generator=generator, device="cpu").to(like.dtype)
        return drawn.to(device, copy=True)

    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad and p.is_floating_point()]
        chosen = [p for p in trained if id(p) in managed] or trained
        shapes = [(p, [min(side, _TRIAL_SIDE) for side in p.shape]) for p in chosen]
        del shapes[_TRIAL_TENSORS:]
        for alike in ([p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]):
            if alike:
                largest = max(alike, key=Tensor.numel)
                shapes += 2 * [(largest, _cut(largest.shape))]
        groups.append([made(shape, p) for p, shape in shapes])
    steps = [
        [[made(tensor.shape, tensor) for tensor in group] for group in groups]
        for _ in range(_TRIAL_STEPS)
    ]
    found = []
    generators = Generators([device])
    before = generators.now()
    try:
        for together in (True, False):
            found.append(_trial(optimizer, kind, groups, steps, together))
            if not _same(before, generators.now()):
                raise OffloadError(
                    f"{kind.__name__} cannot be streamed: its step draws random numbers, which "
                    "would be others by batches. Its step runs on the host, as without "
                    "stream_optimizer."
                )
    except OffloadError:
        raise
    except Exception as error:
        raise OffloadError(
            f"{kind.__name__} cannot be streamed: stepping small Parameters "
            f"{'together' if together else 'one by one'} without a closure raised "
            f"{type(error).__name__}: {error}. Its states are on the host and its step "
            "runs there, as without stream_optimizer."
        ) from error
    finally:
        generators.restore(before)
    if not _same(*found):
        raise OffloadError(
            f"{kind.__name__} cannot be streamed: it steps small Parameters otherwise one by one "
            "than together, so that what it computes for one depends on others or on how often it "
            "is called. Its step runs on the host, as without stream_optimizer."
        )


def _cut(shape: Sequence[int]) -> list[int]:
    """Return a shape of the same kind that is small to step and large to an optimizer."""
    if len(shape) == 1:
        return [min(shape[0], _TRIAL_VECTOR)]
    long = sorted(range(len(shape)), key=lambda n: shape[n])[-2:]
    sides = [_TRIAL_LONG_SIDE if n in long else _TRIAL_SIDE for n in range(len(shape))]
    return list(map(min, shape, sides))


def _trial(
    optimizer: Any, kind: Any, groups: Any, gradients: Any, together: bool
) -> tuple[Any, Any, Any]:
    """Return Parameters, states and options after a few steps."""
    own = [[nn.Parameter(tensor.clone()) for tensor in group] for group in groups]
    options = [
        {key: value if key == "params" else copy.deepcopy(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    for group, parameters in zip(options, own, strict=True):
        group["params"] = parameters
    states: Any = defaultdict(dict)
    part = own_part_of(optimizer, kind, options, states)
    keeps = _Keeps(optimizer, part)
    step = own_step(kind)
    flat = [parameter for group in own for parameter in group]
    for of_step in gradients:
        of_all = [gradient for group in of_step for gradient in group]
        for now in [range(len(flat))] if together else [[n] for n in range(len(flat))]:
            for n, parameter in enumerate(flat):
                parameter.grad = of_all[n].clone() if n in now else None
            if not together:  # each batch of a step has another part
                part = own_part_of(optimizer, kind, options, states)
            step(part)
            if together:
                keeps.refuse_a_change(part)
                _refuse_written_options(kind, optimizer.param_groups, options)
    kept = [{key: value for key, value in group.items() if key != "params"} for group in options]
    return [p.detach() for p in flat], [states.get(p) for p in flat], kept


def _refuse_written_options(kind: Any, before: Any, now: Any) -> None:
    """Refuse a class that writes options: each batch has a copy of the groups."""
    for group, own in zip(before, now, strict=True):
        for name in (group.keys() | own.keys()) - {"params"}:
            if not (name in group and name in own and _same(group[name], own[name])):
                raise OffloadError(
                    f"{kind.__name__} cannot be streamed: its step changes the option {name!r} of "
                    "a group, which is lost between batches. Its step runs on the host, as without "
                    "stream_optimizer."
                )


def own_part_of(optimizer: Any, kind: Any, groups: list[dict[str, Any]], state: Any) -> Any:
    """Return a part whose step leaves no trace in what `optimizer` keeps in its attributes."""
    part = _part_of(optimizer, kind, groups, state)
    shared = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for name, value in part.__dict__.items():
        if name not in _ELSEWHERE:
            part.__dict__[name] = _apart(value, shared)
    return part


def _apart(value: Any, done: dict[int, Any]) -> Any:
    """Return a value in containers and tensors of its own; `done` are those by their ids."""
    if id(value) in done:
        return done[id(value)]
    if type(value) in (dict, defaultdict, OrderedDict):
        made = done[id(value)] = copy.copy(value)
        made.update({key: _apart(each, done) for key, each in value.items()})
    elif type(value) in (list, deque):
        made = done[id(value)] = copy.copy(value)
        for n, each in enumerate(value):
            made[n] = _apart(each, done)
    elif type(value) is tuple:
        made = tuple(_apart(each, done) for each in value)
    elif type(value) in (set, bytearray):
        made = copy.copy(value)
    elif isinstance(value, Tensor):
        made = value.detach().clone()
    elif isinstance(value, torch.Generator):
        made = value.clone_state()
    elif hasattr(value, "__dict__") and not isinstance(value, (*_NOT_KEPT, Optimizer)):
        try:
            made = done[id(value)] = copy.copy(value)
        except Exception:  # of whatever its class does for that
            return value
        if made is not value:
            vars(made).update({name: _apart(each, done) for name, each in vars(value).items()})
    else:
        return value
    done[id(value)] = made
    return made


class _Keeps:
    """What an optimizer keeps in attributes, which the parts that step batches do not hand on."""

    def __init__(self, optimizer: Any, part: Any) -> None:
        self._kind = type(part)
        self._own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._before = self._look(part)
        self._is_first = True

    def refuse_a_change(self, part: Any) -> None:
        """Refuse a class that keeps something of a step elsewhere than in its states."""
        before, now = self._before, self._look(part)
        for name in before.keys() | now.keys():
            changed = not _same(before.get(name), now.get(name))
            # A mark of the first step is well: the trial shows that it may be missing later.
            if changed and not (self._is_first and type(now.get(name)) is bool):
                raise OffloadError(
                    f"{self._kind.__name__} cannot be streamed: its step changes the attribute "
                    f"{name!r}, which is lost between batches. Only what is in `state` is kept; "
                    "its step runs on the host, as without stream_optimizer."
                )
        self._before, self._is_first = now, False

    def _look(self, part: Any) -> dict[str, Any]:
        classes = [c for c in self._kind.__mro__ if c not in Optimizer.__mro__]
        kept = {name: value for c in reversed(classes) for name, value in vars(c).items()}
        kept.update(part.__dict__)
        return {
            name: self._note(name, value, {})
            for name, value in kept.items()
            if name not in _ELSEWHERE and not name.startswith("__")
        }

    def _note(self, name: str, value: Any, seen: dict[int, Any]) -> Any:
        """Return something that stays equal for as long as nothing in a value changes."""
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return "nan" if value != value else value
        if isinstance(value, Optimizer) or id(value) in self._own:
            raise OffloadError(
                f"{self._kind.__name__} cannot be streamed: its attribute {name!r} holds "
                "Parameters or another optimizer, which its step would change where they are. Its "
                "step runs on the host, as without stream_optimizer."
            )
        if id(value) in seen or isinstance(value, _NOT_KEPT):
            return id(value)
        seen[id(value)] = value
        if isinstance(value, Tensor):
            counted = None if value.is_inference() else value._version
            return [id(value), counted, value.detach().clone()]
        if isinstance(value, torch.Generator):
            return [id(value), value.get_state()]
        if isinstance(value, dict):
            keys = [self._note(name, key, seen) for key in value]
            return [keys, [self._note(name, each, seen) for each in value.values()]]
        if isinstance(value, list | tuple | set | frozenset | deque):
            return [self._note(name, each, seen) for each in value]
        held = object.__getstate__(value)  # of `__dict__` and slots; the class may have its own
        return [id(value), repr(value) if held is None else self._note(name, held, seen)]


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal to the last bit."""
    if isinstance(one, Tensor):
        if type(one) is not type(other) or one.shape != other.shape or one.dtype is not other.dtype:
            return False
        if hasattr(one, "__tensor_flatten__"):
            return all(
                _same(getattr(one, n), getattr(other, n)) for n in one.__tensor_flatten__()[0]
            )
        return one.device == other.device and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):  # an array of numpy
        return bool(one.tobytes() == other.tobytes())
    return bool(one == other)


# ---- a step ----


_Row = tuple[Tensor, Tensor, "dict[str, Any] | None"]  # Parameter, its stand-in, its state


@dataclass
class Batch:
    """Parameters that are stepped together.

    Attributes
    ----------
    nbytes : int
        Of the Parameters, their gradients and states.
    gradients : dict
        Those that are on the device already, by the `id` of the Parameter.
    brought : list
        Their stand-ins on the device, while they are about to be stepped; all of them where
        `is_brought`.
    tickets : list
        Of the copies there, and what they write to, which lives as long.
    units : set
        What is rewritten with it: units of its Parameters, whose copies in the arena may be stepped
        in place.
    is_spent : bool
        Whether its step was begun: the optimizer may have written to `gradients`.
    stepped : list or None
        The same once they are stepped; None before. From then on only copies home are to be made.
    is_home : bool
        Whether those are queued.
    sent : int
        How many copies home were queued by then, of those that the stepper has open.
    """

    parameters: list[Tensor]
    nbytes: int = 0
    gradients: dict[int, Tensor] = field(default_factory=dict)
    brought: list[_Row] = field(default_factory=list)
    is_brought: bool = False
    tickets: list[tuple[int, Tensor]] = field(default_factory=list)
    units: set[int] = field(default_factory=set)
    is_spent: bool = False
    stepped: list[_Row] | None = None
    is_home: bool = False
    sent: int = 0

    def is_lost(self) -> bool:
        """Whether its step ended half-way, with gradients that are nowhere else."""
        return self.is_spent and self.stepped is None and bool(self.gradients)


class Stepper:
    """Steps the Parameters of one optimizer, batch by batch."""

    steps_in_backward = False

    def __init__(self, state: DeviceState) -> None:
        self.unfinished = False  # some Parameters are stepped, and some are not
        self._use(state)
        self._homes: dict[int, Home] = {}
        self._counters: dict[int, set[str]] = {}  # names of states that are numbers of the host
        self._fused: set[int] = set()  # whose numbers are on the device
        self._own: dict[int, Tensor] = {}  # managed Parameters that no one else steps, by `id`
        # By unit whose masters are being rewritten, where its copy is that is stepped, too; 0: it
        # is not.
        self._rewritten: dict[int, int] = {}
        self._written: set[int] = set()  # of those, whose copies were stepped, and may be gone
        # Of those, the stamps of the masters: as this has left them, None once others wrote, too.
        self._left_as: dict[int, list[tuple[int, int]] | None] = {}

    def _use(self, state: DeviceState) -> None:
        """Step on a device from now on."""
        self.state = state
        with torch.inference_mode(False):
            self._nothing = nn.Parameter(torch.empty(0, device=state.device))
        # Copies home that are queued, and what they read, until the stream waits for them.
        self._open: list[tuple[int, Tensor | None]] = []
        self._joined = 0  # of those
        self._leaving = 0  # bytes of the others
        self._is_home = False  # all of them have arrived

    def cover(self, optimizer: Any) -> None:
        """Answer for the masters of the optimizer: what it steps stays on the device as it is.

        The engine takes them for frozen ones, which this rewrites: see `DeviceState.streamed`.
        """
        homes, state = self._homes, self.state
        own = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        own = {key: p for key, p in own.items() if key in homes and homes[key].state is state}
        if own.keys() == self._own.keys() and all(map(state.is_streamed, own.values())):
            return
        self._own = own
        state.cover(dict.fromkeys(own, self))

    def begin_to_cover(self, optimizer: Any, homes: dict[int, Home]) -> None:
        """`cover` what the optimizer has before its first step."""
        self._homes = homes
        self.cover(optimizer)

    def covers(self, master: Tensor) -> bool:
        """Whether it steps that."""
        return self._own.get(id(master)) is master

    def is_of(self, optimizer: Any) -> bool:
        """Whether it steps for that optimizer."""
        return optimizer.__dict__.get(STEPPER) is self

    @torch.no_grad()
    def step(self, optimizer: Any) -> None:
        """Step every Parameter that has a gradient, once."""
        self.refuse_unfinished(optimizer)
        kind = type(optimizer).__mro__[1]
        self._homes = homes()
        state = state_of(optimizer, self._homes)
        if state is None:  # the model was detached: it is as if nothing had been streamed
            own_step(kind)(optimizer)
            return
        if state is not self.state:  # it was attached again
            if state.device != self.state.device:
                try_steps(optimizer, kind, state.device, self._homes)
            self._use(state)
        self._end_rewrites()
        self._finish(optimizer, list(self._batches(optimizer)))
        self.cover(optimizer)

    def refuse_unfinished(self, optimizer: Any) -> None:
        """Refuse to go on after a step that could not be completed."""
        if self.unfinished:
            raise OffloadError(
                f"a step of {type(optimizer).__name__} was broken off: some of its Parameters are "
                "stepped and some are not, and it takes no further step. Load a checkpoint into "
                "the model, make a new optimizer, and load its states."
            )

    def _finish(self, optimizer: Any, batches: list[Batch]) -> None:
        """Do what is left of a step; where that fails, all of it or nothing, if it can be."""
        self.unfinished = True
        try:
            self._run(optimizer, batches)
        except BaseException as error:
            if any(batch.stepped is not None for batch in batches):
                if any(batch.is_lost() for batch in batches):
                    raise
                self._run(optimizer, batches)  # what is left of the call
                self._is_stepped()
                error.add_note(
                    f"This step of {type(optimizer).__name__} was completed before the error went "
                    "on: every Parameter is stepped. Do not call step() again for it."
                )
            else:  # nothing has changed
                self._drop(batches)
            self.unfinished = False
            raise
        finally:
            self._end_rewrites()
        self._is_stepped()
        self.unfinished = False

    def _is_stepped(self) -> None:
        """Every Parameter is, whether or not an error goes on."""

    def _note_fused(self, optimizer: Any) -> None:
        self._fused.clear()
        for group in optimizer.param_groups:
            if group.get("fused"):
                self._fused.update(map(id, group["params"]))

    def _batches(self, optimizer: Any) -> Iterator[Batch]:
        """Yield what to step in turn, in the order of the groups."""
        batch = Batch([])
        self._note_fused(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                refuse_sparse(optimizer, parameter, gradient)
                size = bytes_of(optimizer, parameter)
                if batch.parameters and batch.nbytes + size > BATCH_BYTES:
                    yield batch
                    batch = Batch([])
                batch.parameters.append(parameter)
                batch.nbytes += size
        if batch.parameters:
            yield batch

    def _run(self, optimizer: Any, batches: list[Batch]) -> None:
        """Do what is left to do of a step; may be called again after it raised."""
        left = [batch for batch in batches if not batch.is_home]
        for batch, following in itertools.zip_longest(left, left[1:]):
            if batch.stepped is None:
                self._bring(optimizer, batch)
                if following is not None and following.stepped is None:
                    self._bring(optimizer, following)  # comes while this one is stepped
            self._step_batch(optimizer, batch)
        self._arrive()
        for batch in batches:
            self._count_writes(batch.parameters)
        for unit in list(self._rewritten):
            self._end_rewrite(unit, is_right=True)

    def _step_batch(self, optimizer: Any, batch: Batch) -> None:
        if batch.stepped is None:
            self._compute(optimizer, batch)
        self._send_home(optimizer, batch)
        batch.is_home = True
        batch.stepped = []

    # ---- to the device ----

    def _bring(self, optimizer: Any, batch: Batch) -> None:
        if batch.is_brought:
            return
        self._let_go(batch)
        for parameter in batch.parameters:
            there = self._copy_of(parameter, batch)
            if there is None:
                there = self._there(parameter.detach(), batch)
            there = nn.Parameter(there, requires_grad=parameter.requires_grad)
            gradient = batch.gradients.get(id(parameter))
            if gradient is None:
                gradient = self._there(cast("Tensor", parameter.grad).detach(), batch)
            there.grad = gradient
            known = optimizer.state.get(parameter)
            if known is not None:
                known = {
                    name: value.clone()
                    if self._is_counter(parameter, name, value)
                    else self._state_there(value, batch)
                    for name, value in known.items()
                }
            batch.brought.append((parameter, there, known))
        batch.is_brought = True

    def _copy_of(self, parameter: Tensor, batch: Batch) -> Tensor | None:
        """Return a Parameter as it is in the arena, where it is stepped; None: it has to come.

        From here on its units are rewritten. What another unit has of it, too, is not trusted.
        """
        home = self._homes.get(id(parameter))
        if home is None:
            return None
        self._rewrite(home, parameter)
        batch.units.update(home.units)
        layer, index = home.places[0]
        address = self._rewritten[layer.unit]
        if not address:
            self._written.difference_update(home.units)
            return None
        views = layer.views.get(address) or layer.view_at(address)
        return cast("Tensor", views[index])

    def _rewrite(self, home: Home, parameter: Tensor) -> None:
        """Rewrite a Parameter from here on, and the copy of its unit, if there is one that may be.

        Where code has given it other memory, copies are of what it was.
        """
        is_alone = len(home.places) == 1 and is_dense(parameter)
        is_alone = is_alone and all(layer.masters.are(layer.parameters) for layer, _ in home.places)
        for unit in home.units:
            if unit not in self._rewritten:
                self._rewritten[unit] = 0  # whatever interrupts this, its rewrite ends
                self._left_as[unit] = stamps = self._stamps(unit)
                self._rewritten[unit] = self.state.engine.rewrite(
                    unit, self.state.stream(), stamps if is_alone else []
                )
            elif not is_alone:
                self._rewritten[unit] = 0

    def _stamps(self, unit: int) -> list[tuple[int, int]]:
        return [(member, stamp()) for member, stamp in self.state.stamps.get(unit, {}).items()]

    def _count_writes(self, parameters: list[Tensor]) -> None:
        """Let torch count what went to masters; a copy lacks what others have written to them."""
        units = {unit for p in parameters for unit in self._units_of(p) if unit in self._rewritten}
        for unit in units:
            if self._left_as.get(unit) != self._stamps(unit):
                self._left_as[unit] = None
        torch.autograd.graph.increment_version(parameters)
        for unit in units:
            if self._left_as[unit] is not None:
                self._left_as[unit] = self._stamps(unit)

    def _units_of(self, parameter: Tensor) -> Iterable[int]:
        home = self._homes.get(id(parameter))
        return () if home is None else home.units

    def _end_rewrite(self, unit: int, is_right: bool) -> None:
        """The masters of a unit are written; `is_right`: so is its copy, if it was to be."""
        is_right = is_right and (self._rewritten[unit] != 0 or unit in self._written)
        stamps = self._stamps(unit)
        is_right = is_right and self._left_as.get(unit) == stamps
        self.state.engine.rewritten(unit, self.state.stream(), stamps if is_right else [])
        del self._rewritten[unit]
        self._left_as.pop(unit, None)
        self._written.discard(unit)

    def _end_rewrites(self) -> None:
        """Begin again with what a step has left: no copy of it is trusted."""
        if self._rewritten:
            with contextlib.suppress(OffloadError):
                self._arrive()  # what goes home may be in the arena
        for unit in list(self._rewritten):
            with contextlib.suppress(OffloadError):  # else at the next step
                self._end_rewrite(unit, is_right=False)

    def _is_counter(self, parameter: Tensor, name: str, value: Any) -> bool:
        """Whether a state is a number that the optimizer has on the host."""
        if not (_is_plain(value) and value.dim() == 0 and value.device.type == "cpu"):
            return False
        if value.is_floating_point() and value.element_size() < 4:
            return False  # cast by a load, which brings a resident Parameter's to the device
        known = self._counters.get(id(parameter))
        return id(parameter) not in self._fused if known is None else name in known

    def _let_go(self, batch: Batch) -> None:
        """Forget what was brought; its memory is free in the order of the stream."""
        batch.is_brought = False
        if batch.is_spent and batch.stepped is None:  # it may be stepped half
            self._rewritten.update(dict.fromkeys(batch.units & self._rewritten.keys(), 0))
        while batch.tickets:
            self._end_last(batch.tickets)
        batch.brought.clear()

    def _drop(self, batches: Iterable[Batch]) -> None:
        """Forget batches, whatever fails: an error goes on already."""
        for batch in batches:
            for _ in range(1 + len(batch.tickets)):  # one that fails is left to the next backward
                with contextlib.suppress(DriverError):
                    self._let_go(batch)

    def _state_there(self, value: Any, batch: Batch) -> Any:
        if isinstance(value, Tensor):
            if _is_plain(value):
                return self._there(value, batch)
            if hasattr(value, "__tensor_flatten__"):
                return _rebuilt(value, lambda name, part: self._state_there(part, batch))
            return copied_to(value, self.state.device)
        if isinstance(value, dict):
            return {k: self._state_there(v, batch) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._state_there(v, batch) for v in value)
        return copy.copy(value)

    def _there(self, host: Tensor, batch: Batch) -> Tensor:
        """Return a copy on the device, which may be on its way there."""
        state = self.state
        nbytes = tensor_bytes(host)
        if not is_dense(host):
            host = host.contiguous()
        there = torch.empty_strided(
            host.size(), host.stride(), dtype=host.dtype, device=state.device
        )
        if nbytes and self._is_locked(host):
            stream = state.stream()
            state.time.flush(stream)
            trip_in, addresses = state.engine.trip_in, (there.data_ptr(), host.data_ptr())
            batch.tickets.append((trip_in(*addresses, nbytes, stream), there))
        else:
            with exempt():  # in backward no frame of a step is around this
                there.copy_(host)
        return there

    # ---- on the device ----

    def _compute(self, optimizer: Any, batch: Batch) -> None:
        state, stream = self.state, self.state.stream()
        brought = batch.brought
        for ticket, _ in batch.tickets:
            state.engine.trip_join(ticket, stream)
        kind = type(optimizer).__mro__[1]
        stands_for = {id(parameter): there for parameter, there, _ in brought}
        states: Any = defaultdict(dict)
        states.update({there: known for _, there, known in brought if known is not None})
        groups = _groups_with(optimizer, stands_for, self._nothing)
        batch.is_spent = True
        batch.is_brought = False  # what is brought may be stepped from here on, or half of it
        own_step(kind)(_part_of(optimizer, kind, groups, states))
        if state.simulated:
            moved = sum(3 * tensor_bytes(there) for _, there, _ in brought)
            moved += sum(2 * stored_bytes(v) for s in states.values() for v in tensors_of(s))
            dtype = brought[0][1].dtype
            state.time.pending_kernel_s += state.time.kernel_seconds(0.0, moved, dtype)
            state.time.flush(stream)
        for parameter, there, _ in brought:
            self._counters[id(parameter)] = {
                name
                for name, value in states.get(there, {}).items()
                if _is_plain(value) and value.dim() == 0 and value.device.type == "cpu"
            }
        batch.stepped = [(parameter, there, states.get(there)) for parameter, there, _ in brought]

    # ---- home ----

    def _send_home(self, optimizer: Any, batch: Batch) -> None:
        before = len(self._open)
        for parameter, there, known in batch.stepped or ():
            home = self._homes.get(id(parameter))
            if home is None:
                parameter.detach().copy_(there.detach())
            else:
                self._send(there.detach(), parameter.detach())
            if known is None:
                continue
            state = optimizer.state[parameter]
            for name in [name for name in state if name not in known]:
                del state[name]
            for name, value in known.items():
                state[name] = self._state_home(value, state.get(name), home)
        self._let_go(batch)
        batch.sent = len(self._open)
        # What comes next takes the memory of what has left. The latest batch may be under way, and
        # some more: backward makes gradients in bursts, which copies need not keep up with.
        while self._joined < before and self._leaving > self._at_most(LEAVING):
            ticket, held = self._open[self._joined]
            self.state.engine.trip_join(ticket, self.state.stream())
            self._open[self._joined] = ticket, None
            self._joined += 1
            self._leaving -= 0 if held is None else tensor_bytes(held)

    def _state_home(self, value: Any, former: Any, home: Home | None) -> Any:
        """Return what the state is at home; its bytes are on their way there."""
        if isinstance(value, Tensor):
            if home is None:  # of a Parameter that stays on the device
                return value
            if hasattr(value, "__tensor_flatten__"):
                parts = former if type(former) is type(value) else None

                def part_home(name: str, part: Any) -> Any:
                    return self._state_home(part, getattr(parts, name, None), home)

                return _rebuilt(value, part_home)
            if not _is_plain(value):
                return value.to("cpu")
            is_there = _is_plain(former) and former.device.type == "cpu"
            if value.dim() == 0 and value.device.type == "cpu":
                if not (is_there and _are_alike(former, value)):
                    return value
                former.copy_(value)
                return former
            is_there = (
                is_there
                and former.shape == value.shape
                and former.dtype is value.dtype
                and former.stride() == value.stride()
            )
            if not (is_there and self._is_locked(former)):
                locked = home.gradients.locked_like(value) if value.numel() else None
                if locked is not None:
                    former = locked
                elif not is_there:
                    former = torch.empty_strided(
                        value.size(), value.stride(), dtype=value.dtype, device="cpu"
                    )
            self._send(value, former)
            return former
        if isinstance(value, dict):
            before = former if isinstance(former, dict) else {}
            return {k: self._state_home(v, before.get(k), home) for k, v in value.items()}
        if type(value) in (list, tuple):
            alike = isinstance(former, list | tuple) and len(former) == len(value)
            pairs = zip(value, former if alike else [None] * len(value), strict=True)
            return type(value)(self._state_home(v, before, home) for v, before in pairs)
        return value

    def _at_most(self, batches: int) -> int:
        """Return the bytes of some batches, or of the part of the arena that they may take."""
        return min(batches * BATCH_BYTES, self.state.arena_bytes() // PART_OF_ARENA)

    def _send(self, there: Tensor, host: Tensor) -> None:
        """Let the bytes of a tensor go to where it is at home."""
        state, nbytes = self.state, tensor_bytes(there)
        if not nbytes:
            return
        stream = state.stream()
        state.time.flush(stream)
        if there.stride() != host.stride():
            state.engine.settle()
            with exempt():
                host.copy_(there)
        elif self._is_locked(host):
            trip_home, addresses = state.engine.trip_home, (host.data_ptr(), there.data_ptr())
            self._open.append((trip_home(*addresses, nbytes, stream), there))
            self._leaving += nbytes
        else:
            state.engine.settle()  # copies of units may still read what the host writes next
            state.engine.download(host.data_ptr(), there.data_ptr(), nbytes, stream)

    def _is_locked(self, host: Tensor) -> bool:
        return self.state.engine.is_locked(host.data_ptr(), tensor_bytes(host))

    def _arrive(self) -> None:
        """Wait until everything is home: code may read it next."""
        if self._open and not self._is_home:
            self.state.engine.trip_await(self._open[-1][0])
            self._is_home = True
        while self._open:
            self._end_last(self._open)
        self._joined = self._leaving = 0
        self._is_home = False

    def _end_last(self, trips: list[tuple[int, Any]]) -> None:
        """End the latest of some trips. Where the driver fails, the next backward ends it."""
        ticket, held = trips[-1]
        try:
            self.state.engine.trip_end(ticket)
        except DriverError:
            self.state.unended.append((ticket, held))
            trips.pop()
            raise
        except OffloadError:  # it has ended: an interrupt came between that and what follows
            pass
        trips.pop()


def refuse_sparse(optimizer: Any, parameter: Tensor, gradient: Tensor) -> None:
    """Refuse a gradient that has no bytes to take along as they are."""
    if gradient.layout is not torch.strided:
        raise OffloadError(
            f"{type(optimizer).__name__} cannot be streamed: a Parameter of shape "
            f"{tuple(parameter.shape)} has a sparse gradient. Make the layer with sparse=False."
        )


def bytes_of(optimizer: Any, parameter: Tensor) -> int:
    """Return the bytes of a Parameter, its gradient and its states."""
    states = optimizer.state.get(parameter, {}).values()
    return 2 * tensor_bytes(parameter) + sum(map(stored_bytes, tensors_of(states)))


def _rebuilt(value: Any, make: Callable[[str, Any], Any]) -> Any:
    """Return a tensor of a class with tensors inside, of what `make` returns of each of them."""
    names, how = value.__tensor_flatten__()
    parts = {name: make(name, getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(parts, how, value.size(), value.stride())


def tensors_of(values: Any) -> Iterable[Tensor]:
    """Yield the tensors of a state, those in its dicts and lists too."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict | list | tuple):
            yield from tensors_of(value)
