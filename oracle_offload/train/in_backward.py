"""Optimizers that step managed weights while backward goes on: no gradient leaves the device.

A weight's gradient is complete where its landing has it (`layers.gradients`): then autograd has
nothing left to compute with that weight. It is taken there, and stepped with the next ones that
make a batch; its states come while backward computes further, and go home with it. ``step()`` does
what is left.

What needs all gradients at once cannot be had: it is refused, before anything is stepped where that
can be known by then. Where a backward ends by an exception after something was stepped, the
missing gradients exist nowhere: no further step is taken.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ..engine import optimizer_states, step_scalars
from ..engine.engines import DeviceState, open_states, patch
from ..engine.geometry import tensor_bytes
from ..errors import OffloadError
from ..layers.norms import rewrap
from . import stepping
from .stepping import Batch, Stepper, bytes_of, homes, refuse_sparse

_AFTER = "Stream the optimizer without during_backward=True"
_CLIPS = (
    clip_grad.clip_grad_norm_,
    clip_grad.clip_grad_value_,
    clip_grad._clip_grads_with_norm_,
)


class InBackward(Stepper):
    """Steps the Parameters of one optimizer as their gradients come.

    `DeviceState.gradients_lock` is held by the caller, except for `step` and `await_home`.
    """

    steps_in_backward = True

    def __init__(self, state: DeviceState, optimizer: Any) -> None:
        super().__init__(state)
        self._optimizer = weakref.ref(optimizer)
        self._taken: dict[int, Tensor] = {}  # since the latest `step`, by their ids
        self._left: list[Batch] = []  # of the backward that runs; the last one is not full
        self._units: set[int] = set()  # of that
        self._kept: dict[int, int] = {}  # bytes of copies that others may not replace, by unit
        self._used: dict[int, Any] = {}  # of those, uses that last until a gradient has come
        self._late: weakref.ref[Any] | None = None  # the graph task that runs
        self._running: Any = None  # the optimizer, for as long as it does
        self._stream: Any = contextlib.nullcontext()  # on which gradients are
        self._was_dropped = False  # what was taken, and nothing stepped
        self._known = dict.fromkeys(optimizer.state)  # whose states were there at the latest `step`
        patch(step_scalars.watch_scalers)
        patch(watch_clipping)
        self._homes = homes()
        self._register(optimizer)

    def _register(self, optimizer: Any) -> None:
        """Take the gradients of all managed Parameters that the optimizer has by now."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._homes:
                    continue
                other = self.state.steppers.get(id(parameter))
                if other is not None and other is not self:
                    raise OffloadError(
                        f"{type(optimizer).__name__} cannot step in backward: another optimizer "
                        f"steps a Parameter of shape {tuple(parameter.shape)} there already. Give "
                        "each Parameter to one of them."
                    )
                self.state.steppers[id(parameter)] = self

    # ---- in backward ----

    def refuse(self, late: Any, master: Tensor, gradient: Tensor) -> None:
        """Refuse what cannot be stepped in backward, before the master is."""
        optimizer = self._optimizer()
        name = type(optimizer).__name__
        self.refuse_unfinished(optimizer)
        refuse_sparse(optimizer, master, gradient)
        if late.is_scaled:
            self._refuse(
                name, "the loss is scaled by a GradScaler, whose scale and overflows are known "
                f"when all gradients are. {_AFTER}, or train in bfloat16 without a scaler"
            )  # fmt: skip
        if late.keeps_graph:
            self._refuse(
                name, "backward was called with retain_graph=True or create_graph=True, and what "
                f"is stepped cannot be differentiated again. Leave it out, or: {_AFTER}"
            )  # fmt: skip
        if self._late is not None and self._late() is not late:
            self._refuse(
                name, "another backward has not ended: it runs in another thread, or was broken "
                "off and its exception is still at hand. Call backward where that is gone"
            )  # fmt: skip
        if id(master) in self._taken or master.grad is not None:
            self.refuse_more(master, is_certain=True)

    def refuse_more(self, master: Tensor, is_certain: bool = False) -> None:
        """Refuse a second gradient of a master that has been stepped, or is about to be."""
        if not (is_certain or id(master) in self._taken):
            return
        self._refuse(
            type(self._optimizer()).__name__,
            f"a Parameter of shape {tuple(master.shape)} gets a second gradient before step(): by "
            "another backward (accumulation), by a second reentrant checkpoint that uses it, by "
            "code that uses it on the host, or because .grad was set. Call step() and zero_grad() "
            f"after each backward, checkpoint with use_reentrant=False, or: {_AFTER}",
        )

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise OffloadError(f"{name} steps in backward: {why}.")

    def begin(self, late: Any) -> None:
        """Take gradients in a graph task from now on."""
        optimizer = self._running = self._optimizer()
        if self._late is None:
            self.state.n_stepping += 1
        self._late = weakref.ref(late)
        self._was_dropped = False
        self._end_rewrites()  # what could not be ended before
        optimizer_states.follow(optimizer)
        self._homes = homes()
        self._note_fused(optimizer)
        if self.state.device.type == "cuda":  # the end of the graph task may be on another one
            self._stream = torch.cuda.stream(torch.cuda.current_stream(self.state.device))

    @torch.no_grad()
    def take(self, master: Tensor, gradient: Tensor) -> None:
        """Step a master with its gradient, now or when more have come."""
        optimizer = self._running
        nbytes = bytes_of(optimizer, master)
        units = set(self._homes[id(master)].units) if id(master) in self._homes else set()
        # Where a unit is cut, the uses of what is left of it wait until the batch is home.
        batch = self._left[-1] if self._left else None
        if batch is None or (
            batch.nbytes + nbytes > stepping.BATCH_BYTES and self._units.isdisjoint(units)
        ):
            if batch is not None:
                self._advance(optimizer)
            batch = Batch([])
            self._left.append(batch)
            self._units = set()
        batch.gradients[id(master)] = gradient
        batch.parameters.append(master)
        batch.nbytes += nbytes
        self._units |= units
        self._taken[id(master)] = master
        self._keep_copy(master)

    def keep(self, layer: Any, master: Tensor) -> None:
        """Keep the copy that backward uses until the gradient is there: see `_keep_copy`."""
        with self.state.gradients_lock:
            if self._late is not None and self._has_room_to_keep(master):
                kind = self.state.kind.dlpack_type, self.state.ordinal
                stream, nbytes = self.state.stream(), tensor_bytes(layer.masters.present[0])
                capsule = self.state.engine.keep(layer.member, stream, 0, nbytes, *kind)
                self._used[layer.unit] = capsule

    def _has_room_to_keep(self, master: Tensor) -> bool:
        """Count the copy of a master among those that are kept, where that leaves enough room.

        Of a unit of several layers the others may be used next.
        """
        home = self._homes.get(id(master))
        if home is None or len(home.places) != 1:
            return False
        ((layer, _),) = home.places
        unit, state = layer.unit, self.state
        if unit in self._kept or unit in self._rewritten or len(state.stamps.get(unit, ())) != 1:
            return False
        nbytes = sum(map(tensor_bytes, layer.masters.present))
        if (state.kept_bytes + nbytes) * stepping.PART_OF_ARENA > state.arena_bytes():
            return False
        self._kept[unit] = nbytes
        state.kept_bytes += nbytes
        return True

    def _keep_copy(self, master: Tensor) -> None:
        """Keep the copy that backward has used until it is stepped, if there is one."""
        home = self._homes.get(id(master))
        if home is None or not (home.units[0] in self._used or self._has_room_to_keep(master)):
            return
        unit, state = home.units[0], self.state
        state.rewrite(unit, self)
        self._used.pop(unit, None)
        self._rewrite(home, master)
        if not self._rewritten[unit]:
            self._drop_kept(unit)

    def _advance(self, optimizer: Any) -> None:
        """Let the states of the latest batch come, and step what has waited longest for its own."""
        *before, latest = self._left
        self._bring(optimizer, latest)
        waiting = [batch for batch in before if not batch.is_home]
        nbytes = sum(batch.nbytes for batch in waiting)
        for batch in waiting:
            if nbytes <= self._at_most(stepping.WAITING):
                break
            if batch.stepped is None:
                self._bring(optimizer, batch)  # what was used again has gone
            self._step_batch(optimizer, batch)
            nbytes -= batch.nbytes

    def _bring(self, optimizer: Any, batch: Batch) -> None:
        if not batch.is_brought:
            # Before anything is brought: a copy of the unit that is queued by now comes before what
            # is brought, on one stream, and so before what goes home.
            for parameter in batch.parameters:
                home = self._homes.get(id(parameter))
                for unit in home.units if home is not None else ():
                    self.state.rewrite(unit, self)
        super()._bring(optimizer, batch)

    def _send_home(self, optimizer: Any, batch: Batch) -> None:
        super()._send_home(optimizer, batch)
        batch.gradients.clear()
        self._count_writes(batch.parameters)
        # The stream waits for what these have sent.
        n = sum(other.is_home and other.sent <= self._joined for other in self._left)
        later = {unit for other in self._left[n:] for unit in other.units}
        for other in self._left[:n]:
            for unit in other.units - later:
                if self._rewritten.get(unit):
                    self._rewritten[unit] = 0
                    self._written.add(unit)
                    self.state.engine.written(unit, self.state.stream())
                self._drop_kept(unit)

    def _drop_kept(self, unit: int) -> None:
        """Others may replace the copy again."""
        self.state.kept_bytes -= self._kept.pop(unit, 0)

    def await_home(self, unit: int) -> None:
        """Wait until what was sent of a unit is home; more may be sent afterwards."""
        with self.state.gradients_lock:
            if self._open:
                self.state.engine.trip_await(self._open[-1][0])
            if unit in self._rewritten:
                for batch in self._left:
                    if unit in batch.units and batch.stepped is None:
                        self._let_go(batch)  # it comes again
                self._end_rewrite(unit, is_right=True)
                self._drop_kept(unit)

    def give_up_copies(self) -> bool:
        """End the uses that wait for a gradient, and `await_home` of all units that are left."""
        with self.state.gradients_lock:
            used, units = list(self._used), list(self._rewritten)
            self._used.clear()
            for unit in used:
                self._drop_kept(unit)
            for unit in units:
                self.await_home(unit)
            return bool(used or units)

    @torch.no_grad()
    def end(self) -> None:
        """Step what was taken and is not stepped: the graph task ends."""
        if self._late is None:
            return
        try:
            with self._stream:
                self._finish(self._running, self._left)
        finally:
            self._forget(is_complete=all(batch.is_home for batch in self._left))

    def break_off(self) -> None:
        """Forget a graph task that has ended by an exception, if there is one."""
        if self._late is not None:
            self._forget(is_complete=False)

    def _forget(self, is_complete: bool) -> None:
        batches = self._left
        if any(batch.stepped is not None for batch in batches):
            self.unfinished = not is_complete
        elif batches:
            self._was_dropped = True
            self._taken.clear()
        self._left = []
        if self._late is not None:
            self.state.n_stepping -= 1
        self._late = self._running = None
        self._used.clear()
        self._stream = contextlib.nullcontext()
        with contextlib.suppress(OffloadError):
            self._arrive()
        self._drop(batches)
        self._end_rewrites()
        for unit in list(self._kept):
            self._drop_kept(unit)
        self.state.end_rewrites(self)

    # ---- afterwards ----

    def step(self, optimizer: Any) -> None:
        """Step what has a gradient by now: all that was not stepped in backward."""
        with self.state.gradients_lock:
            self.break_off()
            self.refuse_unfinished(optimizer)
            if self._was_dropped:
                self._was_dropped = False
                raise OffloadError(
                    f"{type(optimizer).__name__} steps in backward, and the latest backward was "
                    "broken off before anything was stepped. Call backward again before step()."
                )
            for parameter in self._taken.values():
                if parameter.grad is not None:
                    self.refuse_more(parameter)
        try:
            super().step(optimizer)
        finally:
            self.state.end_rewrites(self)
        self._taken.clear()
        self._put_in_order(optimizer)
        self._register(optimizer)

    def _put_in_order(self, optimizer: Any) -> None:
        """Have states in the order in which a step of all Parameters makes them."""
        state, known = optimizer.state, self._known
        if state.keys() != known.keys():
            own = [p for group in optimizer.param_groups for p in group["params"]]
            order = [*known, *(p for p in own if p not in known)]
            made: Any = defaultdict(dict, {p: state[p] for p in order if p in state})
            made.update({p: kept for p, kept in state.items() if p not in made})
            optimizer.state = made
            self._known = dict.fromkeys(made)

    def _is_stepped(self) -> None:
        if self._late is None:
            self._taken.clear()


# ---- clipping ----


def watch_clipping() -> Callable[[], None]:
    """Let torch's clipping refuse what is stepped in backward; return what undoes that."""
    return rewrap(_CLIPS, _refusing)


def _refusing(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def run(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(parameters, Tensor):
            parameters = list(parameters)
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        for state in open_states():
            stepped = [p for p in given if id(p) in state.steppers]
            if stepped and not homes().keys().isdisjoint(map(id, stepped)):
                raise OffloadError(
                    f"{clip.__name__}: an optimizer steps these Parameters in backward, before "
                    f"all gradients are known. {_AFTER}, or do not clip (max_grad_norm=0 in many "
                    "trainers)."
                )
        return clip(parameters, *args, **kwargs)

    return run
