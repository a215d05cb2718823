"""What one attached model holds of its device, and how it is closed."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from .. import _core
from .._core import HostBuffer
from ..engine import engines
from ..engine.devices import repoint
from ..engine.engines import DeviceState, Layout, close_if_unused, registry_if_free
from ..engine.geometry import memory_of, tensor_bytes, unit_bytes
from ..errors import DriverError, OffloadError
from ..host.sizes import format_size
from ..layers.autocast import StandIns
from ..layers.flatten import attributes_of, is_wrapper
from ..layers.gradients import Gradients
from ..layers.leaf import Leaf, is_memory_held_elsewhere
from ..layers.managed import HANDLE
from ..layers.swap import swap_out
from ..layers.traffic import Traffic
from . import masters
from .arena import Arena
from .auto_budget import AutoBudget, Change, Reading
from .budget import AUTO, Budget, Weights, place

if TYPE_CHECKING:
    from .on_disk import InMemory

logger = logging.getLogger("oracle_offload")


class Record(Protocol):
    """What is written of one attached model, for the next run of it."""

    def after_step(self, attachment: Attachment) -> None:
        """An optimizer has made a step."""

    def keep(self, attachment: Attachment) -> None:
        """Write what was learned; never raises."""


class Attachment:
    """What one attached model holds of its device; outlives the module only until it is closed.

    Parameters
    ----------
    module : nn.Module
        The model; only a weak reference to it is kept.
    state : DeviceState
        The device.
    lock_limit : float
        Most bytes of masters to page-lock.
    reasons : dict of str to str
        Why a layer, by name, is not managed.
    kept_bytes : int
        Of the units that stay on the device because `ram_budget` has no room for their masters.

    Attributes
    ----------
    layers : list of Leaf
        The managed ones, in module order.
    budget : Budget
        What the weights may take.
    auto_budget : AutoBudget or None
        How the arena follows what the steps leave of the device, where it does.
    order, steps : Record or None
        The file that its order of use is kept in, and that of what its steps take.
    compressed_because : str
        Why ``compress="auto"`` compresses what it does.
    lost : dict of str to weak references
        The layers that were let go, by name: what replaced them may be managed again.
    is_attached : bool
        Whether the engine knows the model still.
    """

    def __init__(
        self,
        module: nn.Module,
        state: DeviceState,
        lock_limit: float,
        reasons: dict[str, str],
        kept_bytes: int,
    ) -> None:
        self.module = weakref.ref(module)
        self.state = state
        self.name = type(module).__name__
        self.layers: list[Leaf] = []
        self.reasons = reasons
        self.kept_bytes = kept_bytes
        self.budget = Budget()
        self._size_to_restore: int | None = None  # of the arena, once nothing is in use there
        self.auto_budget: AutoBudget | None = None
        self._budget_acquires = 0  # of the engine, when the budget saw a step last
        self._budget_segments: object = None  # of the device, as it left them
        self.order: Record | None = None
        self.steps: Record | None = None
        self.compressed_because = ""
        self.lost: dict[str, weakref.ref[nn.Module]] = {}
        self._maybe_lost: list[Leaf] = []
        self.trained_units: set[int] = set()
        self.held_units: set[int] = set()  # of those, what the engine holds: see `tell_trained`
        self.arena = Arena(state)
        self.pieces = masters.Pieces(state, self.name, lock_limit)
        self.traffic = Traffic(self.name)
        self.gradients = Gradients(state, self.pieces.may_lock_beside)
        self.stand_ins = StandIns(self.gradients)
        with torch.inference_mode(False):
            # In compiled code each use of a layer writes it.
            self.sequence = torch.zeros(1, device="cpu")
        self._pid = os.getpid()
        self._replaced_outside = False  # masters are in no piece, perhaps only for a while
        self._replaced_warning_shown = False
        self._lost_warning_shown = False
        self._left_codes_shown = False
        self._is_left = False
        self._in_memory: InMemory | None = None  # of what stays in files
        self._samples: bool | None = None  # alone, as the first use has shown
        self._turned_at = state.pace.uses  # see `during_forward`
        self.model = state.engine.add_model()
        self.is_attached = True
        state.join(self)

    @property
    def buffers(self) -> list[HostBuffer]:
        """The host memory of the masters."""
        return self.pieces.buffers

    @property
    def weight_bytes(self) -> int:
        """Bytes of the managed weights."""
        return sum(nbytes for layer in list(self.layers) for _, nbytes in layer.extents())

    @property
    def managed_bytes(self) -> int:
        """Bytes that the managed weights take on the device, where each is aligned."""
        return sum(unit_bytes(layer.tensors()) for layer in list(self.layers))

    @property
    def weights(self) -> Weights:
        """What there is to place by now: layers are let go and managed again after attach."""
        all_locked, arena = self.pieces.budget.locks_all, self.arena
        layers = [one for one in list(self.layers) if one.needs_place or not all_locked]
        streamed = sum(unit_bytes(layer.tensors()) for layer in layers)
        return Weights(streamed, arena.floor_bytes, self.kept_bytes, arena.staging_bytes)

    def unit_layers(self) -> dict[int, str]:
        """Return the names of the layers that travel in each unit, by unit."""
        names: dict[int, list[str]] = {}
        for layer in list(self.layers):
            names.setdefault(layer.unit, []).append(layer.name)
        return {unit: ", ".join(layers) for unit, layers in names.items()}

    def x_min_bytes(self) -> int:
        """Least bytes a step can move to the device: max(0, W - C) a sweep, docs/how-it-works.md.

        W counts the weights that the sweep needs, without tables that are read in host memory: the
        padding between them need not travel. Where some are compressed, those travel that get
        smallest.
        """
        layers = [layer for layer in list(self.layers) if layer.needs_place]
        return sum(
            self._least(
                [layer.link_bytes() for layer in layers if units is None or layer.unit in units]
            )
            for units in self._sweeps()
        )

    def _least(self, travels: list[tuple[int, int]]) -> int:
        missing = sum(weights for weights, _ in travels) - self.arena.capacity_bytes
        least = 0.0
        for weights, moved in sorted(travels, key=lambda row: row[1] / row[0]):
            share = min(1.0, max(0, missing) / weights)
            least += share * moved
            missing -= weights
        return int(least)

    def _sweeps(self) -> list[set[int] | None]:
        """Return the units that the last forward and its backward used; None means all.

        One sweep where there are only forwards that nothing records; two of all units while no
        backward has shown which of them it needs.
        """
        visits = self.state.engine.visits(self.model)
        sweeps: list[tuple[bool, set[int]]] = []
        for unit, kind in visits:
            is_backward = kind in (_core.BACKWARD, _core.RECOMPUTE)
            if not sweeps or sweeps[-1][0] != is_backward:
                sweeps.append((is_backward, set()))
            sweeps[-1][1].add(unit)
        for nth, (is_backward, units) in reversed(list(enumerate(sweeps))):
            if is_backward:
                return [sweeps[nth - 1][1] if nth else None, units]
        return (
            [None] if visits and all(kind == _core.FORWARD for _, kind in visits) else [None, None]
        )

    def coded_bytes(self) -> tuple[int, int]:
        """Return the bytes of the compressed weights: as they are, and on the host."""
        coded = {one.start: one for layer in list(self.layers) for one in layer.coded}
        return (
            sum(one.tensor_bytes for one in coded.values()),
            sum(one.nbytes for one in coded.values()),
        )

    # ---- what the device tells: see `engines.Listener` ----

    def before_forward(self) -> None:
        """Grow the arena to the largest checkpointed block the engine has learned."""
        if self._is_left:
            with contextlib.suppress(OffloadError):  # else later
                self.close()
            return
        if self.pieces.share is not None:
            self.pieces.share.check_generation()
        self._choose_memory(turned=True)
        self.pieces.lock_arrived(turned=True)
        self._restore_size(logging.DEBUG)
        if self.arena.may_grow:
            self._grow_to_block()

    def during_forward(self) -> None:
        """Lock what has arrived: where no backward ever runs, nothing else does."""
        if self._is_left:
            return
        self._choose_memory(self.state.turned)
        # No backward divides sweeps: in twice as many uses as layers there is a whole one.
        turned = self.state.pace.uses - self._turned_at > 2 * len(self.layers)
        if turned:
            self._turned_at = self.state.pace.uses
        if self.pieces.waits_for(turned):
            self.pieces.lock_arrived(turned)

    def keep_in_memory(self, in_memory: InMemory) -> None:
        """Choose what of the model's files is in memory by what it is used for."""
        self._in_memory = in_memory
        self.state.pace.next_look = self.state.pace.uses + 2  # the first use has ended by then

    def _choose_memory(self, turned: bool) -> None:
        """Have in memory what suits a model that samples alone, where the first use shows that.

        Once a backward of it has run (`turned`: of any model) it is what suits training, for good.
        """
        in_memory, model, samples = self._in_memory, self.module(), self._samples
        if in_memory is None or model is None:
            return
        if samples == in_memory.samples and not (samples and turned):
            return
        visits = self.state.engine.visits(self.model)
        with self.state.lock:
            if not visits or not self.is_attached:
                return
            may_sample = not model.training if samples is None else samples
            self._samples = may_sample and all(kind == _core.FORWARD for _, kind in visits)
            in_memory.suit(self._samples)

    def _grow_to_block(self) -> None:
        engine = self.state.engine
        block = engine.learned_block_bytes
        if block > self.arena.floor_bytes:
            largest = self._largest_unit(engine.stats(self.model))
            self.arena.grow(block, largest, self.managed_bytes)

    def _largest_unit(self, stats: _core.Stats) -> int:
        # What needs no place there is no unit of the arena's.
        return min(stats["largest_unit_bytes"], self.arena.floor_bytes // 2)

    def look_ahead_units(self) -> int:
        """Return how many of the largest units the arena holds in addition to the one in use."""
        largest = self._largest_unit(self.state.engine.stats(self.model))
        return max(0, self.arena.capacity_bytes // max(1, largest) - 1)

    def _follow_budget(self, budget: AutoBudget, stats: _core.Stats) -> None:
        """Let the arena follow what this step has left of the device."""
        if stats["acquires"] == self._budget_acquires:
            return  # another optimizer of the same step
        self._budget_acquires = stats["acquires"]
        self._grow_to_block()
        if self.state.segments is not self._budget_segments:
            if self._budget_segments is not None:
                budget.begin_anew()
                self.state.kind.begin_peak()
                self._budget_segments = self.state.segments
                return
            self._budget_segments = self.state.segments
        arena = self.arena
        growing = [
            held
            for held in attachments_on(self.state)
            if held.auto_budget is not None and held.arena.capacity_bytes < held.weights.most
        ]
        change = budget.after_step(
            self._reading(),
            arena.capacity_bytes,
            arena.floor_bytes,
            self.weights.most,
            2 * self._largest_unit(stats),
            max(1, len(growing)),
        )
        if budget.window == 1:
            self.state.kind.begin_peak()
        if change is not None:
            self._resize(budget, change)

    def _reading(self) -> Reading:
        free, total = self.state.engine.mem_info()
        counted = self.state.kind.counted()
        if (
            counted is None
        ):  # of all tensors on the device those are known that the package put there
            held = attachments_on(self.state)
            arenas = sum(attachment.arena.capacity_bytes for attachment in held)
            kept = sum(attachment.kept_bytes for attachment in held)
            cached = self.state.kind.cached_bytes()
            return Reading(total, free, arenas + cached, arenas + kept, 0)
        return Reading(total, free, *counted)

    def _resize(self, budget: AutoBudget, change: Change) -> None:
        before = self.arena.capacity_bytes
        try:
            self.arena.resize(change.bytes)
        except (OffloadError, MemoryError, torch.OutOfMemoryError) as error:
            logger.info(
                "%s: the arena should be %s: %s", self.name, format_size(change.bytes), error
            )
        after = self.arena.capacity_bytes
        self._budget_segments = self.state.segments
        self.state.kind.begin_peak()
        budget.changed(change, after)
        if after == before:
            return
        logger.info(
            "%s: the arena is %s now, it was %s: %s; look-ahead is %d units",
            self.name,
            format_size(after),
            format_size(before),
            change.why,
            self.look_ahead_units(),
        )
        self._tell_resized(before, change.why)

    def _tell_resized(self, before: int, why: str) -> None:
        for observer in engines.observers:
            observer.resized(self.state, self.name, before, self.arena.capacity_bytes, why)

    def take_budget(self, budget: Budget) -> None:
        """Let the arena follow `budget` from now on; its size is as it was."""
        self.budget = budget
        self.arena.may_grow = budget.may_grow
        self.auto_budget = None
        if budget.vram_budget == AUTO:
            counted = self.state.kind.counted()
            self.auto_budget = AutoBudget(0 if counted is None else counted.failures)

    def set_budget(self, budget: Budget) -> AbstractContextManager[Any]:
        """Replace the arena by that of another budget; the context undoes it: see the manager."""
        with self.state.lock:
            weights = self.weights
            size = weights.floor  # of "auto" the steps tell how much more there is
            if budget.vram_budget != AUTO:
                size = place(budget, weights, self.state.engine.mem_info()[1], 0)
            if size < weights.floor:
                needed = weights.floor + weights.kept + weights.staging
                raise OffloadError(
                    f"vram_budget={budget.vram_budget!r}: the units need {format_size(needed)} on "
                    "the device, two of the largest and what was learned of blocks; raise the "
                    "budget to that."
                )
            undo = contextlib.ExitStack()
            undo.callback(self._restore_budget, self.budget, self.arena.capacity_bytes)
            self._replace_arena(size, "set_budget")
            self._size_to_restore = None
            self.take_budget(budget)
        return undo

    def _restore_budget(self, budget: Budget, size: int) -> None:
        """End the block of a `set_budget`; what cannot be yet is done later."""
        if not self.is_attached:
            return
        with self.state.lock:
            self.take_budget(budget)
            self._size_to_restore = size
            self._restore_size(logging.WARNING)

    def _restore_size(self, level: int) -> None:
        size = self._size_to_restore
        if size is None:
            return
        try:
            self._replace_arena(max(size, self.arena.floor_bytes), "the end of set_budget")
            self._size_to_restore = None
        except (OffloadError, MemoryError, torch.OutOfMemoryError) as error:
            self.state.turned = True  # the next forward that records begins again
            logger.log(
                level,
                "%s: the arena stays at %s after the block of set_budget, and is tried again "
                "before the next forward that autograd records: %s",
                self.name,
                format_size(self.arena.capacity_bytes),
                error,
            )

    def _replace_arena(self, size: int, why: str) -> None:
        before = self.arena.capacity_bytes
        self._refuse_while_held("try again")
        self.forget_views()
        self.arena.replace(size)
        self.state.kind.begin_peak()
        self._tell_resized(before, why)

    def before_step(self) -> bool:
        """Tell the engine which units are trained now: many a model is frozen after attach.

        Returns
        -------
        bool
            Whether any is.
        """
        if not self.is_attached:
            return False
        trained = self._units_with_trained()
        stale = [
            layer
            for layer in list(self.layers)
            if layer.coded and (layer.unit in trained or layer.has_stale_codes())
        ]
        if stale:
            self.leave_codes(stale)
            trained = self._units_with_trained()  # a layer that follows may get another unit
        if trained - self.trained_units:
            self._own_trained([layer for layer in list(self.layers) if layer.unit in trained])
            trained = self._units_with_trained()
        self.trained_units = trained
        self.tell_trained()
        if not trained:
            self.gradients.give_back_all()
        return bool(trained)

    def tell_trained(self) -> None:
        """Tell the engine of which units code may rewrite masters unseen: they are trained.

        But for those of which all that is trained is stepped by streamed optimizers.
        """
        if not self.is_attached:
            return
        held = self._units_with_trained(is_unseen=True)
        if self.held_units - held:
            self.state.engine.hold()  # what was copied until now is no better than it was
        for unit in held ^ self.held_units:
            if unit in self.state.stamps:
                self.state.engine.set_trainable(unit, unit in held)
        self.held_units = held

    def _units_with_trained(self, is_unseen: bool = False) -> set[int]:
        return {
            layer.unit
            for layer in list(self.layers)
            if any(
                tensor.requires_grad and not (is_unseen and self.state.is_streamed(tensor))
                for tensor in layer.tensors()
            )
        }

    def before_frozen_write(self, tensors: Sequence[Tensor]) -> None:
        """Wait for copies of masters that a step may write though it trains none of them."""
        if not self.is_attached:
            return
        share = self.pieces.share
        if share is not None and not (share.is_writing and share.ranks.is_first):
            shared = [t for t in tensors if self.is_shared(t)]
            if shared:
                raise OffloadError(
                    f"{len(shared)} weights that ranks share were about to be written, by a step "
                    "of an optimizer or a merge of adapters: one rank alone writes them, while the "
                    "others wait: with manager.writing() as mine: ..."
                )
        own = {id(master) for layer in list(self.layers) for master in layer.tensors()}
        if any(id(t) in own or self.pieces.at(memory_of(t)[0]) is not None for t in tensors):
            self.state.engine.settle()
            self.state.engine.refresh(self.model)  # nothing is copied until the next use

    def after_step(self) -> None:
        """Take the bytes that moved since the last optimizer step, and free what is unused."""
        if not self.is_attached:
            return
        stats = self.state.engine.stats(self.model)
        self.traffic.end_step(stats["h2d_bytes"] + self.traffic.rows_bytes, stats["d2h_bytes"])
        if self.auto_budget is not None:
            self._follow_budget(self.auto_budget, stats)
        self.pieces.give_back()
        if self._replaced_outside:  # for a whole step: not for a while
            self._warn_of_replaced()
        for kept in (self.order, self.steps):
            if kept is not None:
                kept.after_step(self)

    def forget_views(self) -> None:
        """Let go of views into the arena: they keep their segment's memory alive."""
        for layer in list(self.layers):
            layer.views.clear()

    def held(self) -> list[Leaf]:
        """Return the layers whose slots something holds now."""
        pinned = {unit for unit, _, _, pins in self.state.engine.residents() if pins}
        return [layer for layer in list(self.layers) if layer.unit in pinned]

    # ---- masters that were replaced ----

    def take_over(self, called: Leaf | None = None, lasting: bool = False) -> None:
        """Follow every layer whose masters were replaced, and lock what is new.

        New memory that is its layer's alone moves into a locked piece of its own; what else holds,
        or may be swapped back, stays where it is and goes through the ring. Layers that are lost
        are let go.

        Parameters
        ----------
        called : Leaf, optional
            One that has followed already, because it is being called; None looks at all of them.
        lasting : bool
            Look at `called` alone: its new memory belongs to it alone and will stay.
        """
        in_use_later = contextlib.suppress(OffloadError)  # a layer in use follows at its next call
        with self.state.lock:
            replaced = [] if called is None else [called]
            for layer in [] if lasting else list(self.layers):
                if layer is called:
                    continue
                if layer.has_moved():
                    self.let_go_soon(layer)
                    if layer.member < 0 or not layer.has_plain_masters():
                        continue
                    with in_use_later:
                        layer.follow()
                        replaced.append(layer)
                elif called is None:
                    replaced.append(layer)
            self.pieces.give_back()
            own: list[tuple[Leaf, list[Tensor]]] = []
            held_too = False
            for layer in replaced:
                new = {id(tensor): tensor for tensor in self._outside([layer])}
                held = {id(tensor): held for tensor, held in layer.replaced_for_good()}
                own.append((layer, [t for k, t in new.items() if lasting or held.get(k) is False]))
                self._replaced_outside |= len(own[-1][1]) < len(new)
                held_too |= any(held.get(key) for key in new)
            with contextlib.suppress(MemoryError):  # what finds no room stays where it is
                for tensors in masters.split_pieces([tensors for _, tensors in own]):
                    self.pieces.add(masters.Piece(tensors, node=self.pieces.node))
            for layer in [layer for layer, _ in own if layer.has_moved()]:
                with contextlib.nullcontext() if layer is called else in_use_later:
                    layer.follow()
            if held_too and not lasting:
                self._warn_of_replaced()

    def _outside(self, layers: Iterable[Leaf]) -> list[Tensor]:
        """Return the masters that are in no piece."""
        tensors = (tensor for layer in layers for tensor in layer.tensors())
        return [tensor for tensor in tensors if self.pieces.at(tensor.data_ptr()) is None]

    def _warn_of_replaced(self) -> None:
        outside = self._outside(self.layers)
        self._replaced_outside = bool(outside)
        if outside and not self._replaced_warning_shown:
            self._replaced_warning_shown = True
            logger.warning(
                "%s: %s of its weights were replaced by memory that cannot be page-locked, because "
                "something else holds it too (a state dict?), or holds what it replaced (an "
                "optimizer?): they are copied through a small locked ring, which is slower. If "
                "they are to stay, load them without assign=True, or drop what holds them and call "
                "manager.refresh().",
                self.name,
                format_size(sum(tensor_bytes(tensor) for tensor in outside)),
            )

    # ---- coded masters that were written ----

    def leave_codes(self, layers: Iterable[Leaf]) -> None:
        """Make the masters of `layers` as all others are: some were written, or will be trained.

        They move into locked memory, unless something else holds theirs and is to see writes.
        """
        with self.state.lock:
            left = {coded.start: coded for layer in layers for coded in layer.coded}
            using = [
                layer for layer in self.layers if left.keys() & {at for at, _ in layer.extents()}
            ]
            for coded in left.values():
                self.pieces.forget_coded(coded)
            tensors = {id(t): t for t in self._outside(using)}
            own = [t for t in tensors.values() if not is_memory_held_elsewhere(t, True)]
            before = [tensor.data_ptr() for tensor in own]
            with contextlib.suppress(MemoryError):  # they stay in their mappings, which are theirs
                for piece in masters.split_pieces([[tensor] for tensor in own]):
                    self.pieces.add(masters.Piece(piece, node=self.pieces.node))
            moved = {t.data_ptr(): then for t, then in zip(own, before, strict=True)}
            for layer in using:
                layer.left = {**layer.left, **moved}
                with contextlib.suppress(OffloadError):  # in use: it follows at its next call
                    layer.follow()
            for coded in left.values():  # what something else holds too
                if not self.pieces.is_on_disk(coded.start):
                    coded.own()
            self._replaced_outside |= len(own) < len(tensors)
            self.pieces.give_back()
        if not self._left_codes_shown:
            self._left_codes_shown = True
            logger.warning(
                "%s: the weight of layer '%s' was written, or is trained, after attach; it is not "
                "compressed any more and takes its whole size of host memory, and so will others.",
                self.name,
                using[0].name,
            )

    # ---- masters that ranks share ----

    def _own_trained(self, layers: Sequence[Leaf]) -> None:
        """Give this rank its own masters of `layers`, which it trains now, in memory."""
        with self.state.lock:
            apart = {
                id(tensor): tensor
                for layer in layers
                for tensor in layer.tensors()
                if self.pieces.shared_at(tensor.data_ptr())
                or (tensor.requires_grad and self.pieces.is_on_disk(tensor.data_ptr()))
            }
            if not apart:
                return
            shown = {key: tensor.detach() for key, tensor in apart.items()}
            self.pieces.check_files(shown.values())
            for piece in masters.split_pieces([[tensor] for tensor in apart.values()]):
                self.pieces.add(masters.Piece(piece, node=self.pieces.node))
            try:
                self.pieces.check_files(shown.values())  # while they were copied
            except OffloadError:
                for key, tensor in apart.items():
                    repoint(tensor, shown[key])
                raise
            for layer in layers:
                with contextlib.suppress(OffloadError):  # in use: it follows at its next call
                    layer.follow()

    def written_elsewhere(
        self, leaf: Leaf, module: nn.Module, state: Mapping[str, Any], prefix: str, assign: bool
    ) -> list[str]:
        """Return those of a module's tensors in a state dict that another rank writes, by name.

        Raises
        ------
        OffloadError
            Ranks share them, and are not in `MemoryManager.writing`; they are quantised, or shall
            be replaced (``assign=True``).
        """
        share = self.pieces.share
        if share is None:
            return []
        own = {**module._parameters, **module._buffers}
        shared = [
            name
            for name, tensor in own.items()
            if tensor is not None and self.is_shared(tensor)
            if any(key == prefix + name or key.startswith(f"{prefix}{name}.") for key in state)
        ]
        if shared and not share.is_writing:
            raise OffloadError(
                f"'{leaf.name}' has weights that ranks share, which are written by all ranks "
                "together alone: with manager.writing(): model.load_state_dict(...). Adapters are "
                "loaded without them: load_state_dict(adapters, strict=False)."
            )
        if shared and (assign or any(type(own[name]) is not nn.Parameter for name in shared)):
            raise OffloadError(
                f"'{leaf.name}' has weights that ranks share and that "
                + ("assign=True would replace on this rank" if assign else "are quantised")
                + ", which load_state_dict cannot write once for all: "
                + ("leave assign=True away." if assign else "detach, load, and attach again.")
            )
        return [] if share.ranks.is_first else shared

    def before_saving(self, module: nn.Module) -> None:
        """Refuse what of a module's tensors is in a file that was written since.

        Raises
        ------
        OffloadError
            It names the file.
        """
        own = (*module._parameters.values(), *module._buffers.values())
        self.pieces.check_files(tensor for tensor in own if type(tensor) is nn.Parameter)

    def warn_of_written_files(self) -> None:
        """Say that weights which were left in files are others now."""
        try:
            for layer in list(self.layers):
                self.pieces.check_files(layer.tensors())
        except OffloadError as error:
            logger.warning(
                "%s is detached, and what of its weights is in files is as these are now: %s",
                self.name,
                str(error).encode(errors="backslashreplace").decode(),  # a path may be no text
            )

    def is_shared(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory that ranks share, or is made of some that are."""
        if is_wrapper(tensor):
            inner = attributes_of(tensor).values()
            return any(isinstance(part, Tensor) and self.is_shared(part) for part in inner)
        return self.pieces.shared_at(memory_of(tensor)[0])

    @contextlib.contextmanager
    def merging(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Let all ranks merge adapters into `weights`, in a ``with`` block, and one write them.

        In the block each rank has copies of its own of what is shared; the first writes back what
        became of its copies. So adapters are as merged on all ranks as the weights are.
        """
        share = self.pieces.share
        if share is None or not share.is_writing:  # then `before_frozen_write` refuses it
            yield
            return
        shared = {weight: weight.detach() for weight in weights if self.is_shared(weight)}
        if any(type(weight) is not nn.Parameter for weight in shared):
            raise OffloadError(
                "adapters cannot be merged into quantised weights that ranks share: detach first, "
                "or attach without share='node'."
            )
        try:
            for weight, master in shared.items():
                repoint(weight, master.clone())
            yield
            share.merges += 1
            if share.ranks.is_first:
                for weight, master in shared.items():
                    with torch.no_grad():
                        master.copy_(weight.detach())
        finally:
            for weight, master in shared.items():
                repoint(weight, master)

    # ---- layers that were lost ----

    def let_go_if_lost(self, layer: Leaf) -> bool:
        """Make a layer an ordinary one again if its class or weights were replaced or taken.

        Its masters are given back. When the structure settles, what the layer holds now is managed
        again if it can be (it was quantised); else it is moved to the device, like everything that
        is not managed, and `MemoryManager.resident` has it.
        """
        with self.state.lock:
            reason = layer.why_lost()
            return bool(reason) and self.let_go(layer, reason)

    def let_go(self, layer: Leaf, reason: str) -> bool:
        """Make a layer an ordinary one; False where it is one already."""
        with self.state.lock:
            if layer not in self.layers:
                return False
            engines.remove(self.state.engine.remove_member, layer.member)
            self.layers.remove(layer)
            self._release_layer(layer)
            self.pieces.count_uses(layer.masters.addresses.values(), ())
            layer.forget_masters()
            Layout.version += 1
            module = layer.module()
            if module is not None:
                self.pieces.take_out(module._parameters.values())
            self.pieces.give_back()
        if self.module() is not None:
            self.lost[layer.name] = layer.module
            if module is not None:
                self.reasons[layer.name] = reason
                layer.structure.settle_soon()
        return True

    def let_go_soon(self, layer: Leaf) -> None:
        """`let_go_if_lost`, now or at the next such change, or when the structure settles.

        Not now where the layer is in use, or while who replaces a weight holds the old one still.
        """
        with self.state.lock:
            waiting, self._maybe_lost = {*self._maybe_lost, layer}, []
            for each in waiting:
                try:
                    if self.let_go_if_lost(each):
                        continue
                except OffloadError:
                    each.structure.changed = True
                if each in self.layers and not each.has_plain_masters():
                    self._maybe_lost.append(each)

    def warn_of_lost(self) -> None:
        """Say once that a layer was let go, and could not be managed again."""
        for name in self.lost:
            if name in self.reasons and not self._lost_warning_shown:
                self._lost_warning_shown = True
                logger.warning(
                    "%s: layer '%s' is not managed any more (%s). What it holds now stays on the "
                    "device; manager.resident lists this and every further one.",
                    self.name,
                    name,
                    self.reasons[name],
                )

    # ---- closing ----

    def close(self) -> None:
        """Give everything back to the device; masters stay where they are, as ordinary memory."""
        if os.getpid() != self._pid:
            return
        # Any step may fail, or be refused while in use: what was done stays done, and closing again
        # goes on from there.
        with self.state.lock:  # two threads may close what is left
            self._refuse_while_held()
            if self.is_attached:
                for kept in (self.order, self.steps):
                    if kept is not None:
                        kept.keep(self)
                for observer in engines.observers:
                    observer.leaving(self.state)
                engines.remove(self.state.engine.remove_model, self.model)
                self.is_attached = False
            self._let_go_of_layers()
            self.gradients.give_back_all()
            self.pieces.give_back_all()
            self.arena.take_back()  # refused while another model computes in it
            self.state.leave(self)
            close_if_unused(self.state)

    def own_weights(self) -> None:
        """Copy what is in files still to memory, once all else was given back."""
        left = self.pieces.own()
        if left:
            logger.warning(
                "%s: the host has no memory for %s of its weights, which are read from files of "
                "the cache as before.",
                self.name,
                format_size(left),
            )

    def _refuse_while_held(self, then: str = "detach") -> None:
        """Name the layers whose tensors code keeps, which no step to come will give back."""
        held = [layer.name for layer in self.held() if layer.lends_to_code]
        if held and self.is_attached:
            more = f" and {len(held) - 3} more" if len(held) > 3 else ""
            raise OffloadError(
                f"weights of {', '.join(map(repr, held[:3]))}{more} are still held on the device: "
                "by a graph that awaits its backward, or by code that keeps them (a cache of a "
                f"weight, ctx.weight = weight). Let go of that, then {then}; or leave the layer "
                "resident with ignore_modules=[...]."
            )

    def close_patiently(self) -> None:
        """Close at detach: what the driver fails twice, or another model still uses, is left.

        Raises
        ------
        OffloadError
            A call computes with the model itself; it stays attached.
        """
        self.state.break_off_steps()  # before the device's lock, as a backward takes them
        with self.state.lock:  # who computes in what is left finds it at its own detach
            self._close_patiently()
        close_leftovers(self.state, but=self)

    def _close_patiently(self) -> None:
        try:
            try:
                self.close()
            except DriverError as error:
                logger.warning("detaching %s, at the second attempt: %s", self.name, error)
                self.close()
        except OffloadError as error:
            if self.is_attached and not isinstance(error, DriverError):
                raise
            self._close_later(error)

    def close_quietly(self) -> None:
        """Close, and log what fails; it is tried again at the next attach or detach."""
        with self.state.lock:  # no forward may meet what is closed in part and not left yet
            try:
                self.close()
            except Exception as error:
                self._close_later(error)

    def close_deleted(self) -> None:
        """End of a deleted model; where a thread holds a lock, it is left for later."""
        with self.state.gradients_lock.if_free() as gradients:
            if gradients:
                self.state.break_off_steps()
        with self.state.lock.if_free() as device, registry_if_free() as registry:
            if device and registry:
                self.close_quietly()
            else:
                self._is_left = True

    def close_if_left(self) -> None:
        """Close what could not be closed when its end came."""
        if self._is_left:
            self.close_quietly()

    def _close_later(self, error: Exception) -> None:
        """Keep what could not be given back, for the next attach or detach to try again."""
        in_use = isinstance(error, OffloadError) and not isinstance(error, DriverError)
        logger.log(
            logging.INFO if in_use else logging.WARNING,
            "%s is detached, but some of its memory could not be given back yet: %s. It is tried "
            "again at the next attach or detach.",
            self.name,
            error,
            exc_info=None if isinstance(error, OffloadError) else error,
        )
        if self.is_attached:  # at exit, copy threads must not outlive what they copy to
            with contextlib.suppress(OffloadError):
                self.state.engine.refresh(self.model)
        self._let_go_of_layers()
        self._is_left = True
        self.state.join(self)

    def _let_go_of_layers(self) -> None:
        """Make the layers ordinary ones again."""
        self.stand_ins.forget()
        with self.state.lock:
            for layer in list(self.layers):
                self._release_layer(layer)
            self.layers.clear()
            Layout.version += 1  # what is there next is no master

    def _release_layer(self, layer: Leaf) -> None:
        self.state.forget_member(layer.unit, layer.member)
        layer.unplaced()
        for module in layer.modules():  # also one that is no part of the model any more
            if module.__dict__.get(HANDLE) is layer:
                swap_out(module)


def attachments_on(state: DeviceState) -> list[Attachment]:
    """Return what holds something of a device."""
    return [held for held in state.listeners if isinstance(held, Attachment)]


def close_leftovers(state: DeviceState, but: Attachment | None = None) -> None:
    """Close what could not be closed when its end came: a fault lasted, a lock was held."""
    for attachment in attachments_on(state):
        if attachment is not but:
            attachment.close_if_left()
