"""`attach`, `MemoryManager`: from an ordinary model to one whose weights are streamed, and back."""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from . import _core, masters, selection
from .autocast import StandIns
from .devices import parse_device
from .direct_uses import used_directly
from .engines import DeviceState, Layout, Segment, close_if_unused, open_state
from .errors import DriverError, OffloadError
from .first_forward import FirstForward, watch_first_forward
from .foreign_hooks import refuse_weight_movers
from .geometry import stored_bytes, tensor_bytes, unit_bytes
from .layers.leaf import HANDLE, Layer, is_managed, layer_type, put_on_trial, swap_in, swap_out
from .selection import Leaf, group_units, wrapper_of
from .sizes import GIB, format_size, parse_size
from .views.progress import DelayedBar

logger = logging.getLogger("oracle_offload")

ATTRIBUTE = "_memory_manager"  # on the attached module; AI-Toolkit's name
_SEGMENT_BYTES = GIB
_attached_roots: weakref.WeakSet[MemoryManager] = weakref.WeakSet()
_structure_hooks: list[Any] = []
_settle_hooks: list[Any] = []


class Attachment:
    """What one attached model holds of its device; outlives the module only until it is closed."""

    def __init__(self, state: DeviceState, name: str) -> None:
        self.state = state
        self.name = name
        self.pid = os.getpid()
        self.layers: list[Layer] = []
        self.manager: Callable[[], MemoryManager | None] = lambda: None
        self.pieces: dict[int, masters.Piece] = {}  # by address, in the order they were made
        self._starts: list[int] = []  # their addresses, sorted
        self.lock_limit = float("inf")  # bytes
        self.lent: dict[int, list[Segment]] = {}  # by the engine's lease
        self.lease = -1  # the one in use; others of `lent` go back as soon as the engine lets them
        self._swapped = False  # masters lie in no piece, perhaps only for a while
        self._told: set[str] = set()
        self.capacity_bytes = 0
        self.floor_bytes = 0
        self.fixed_capacity = False
        self.step_h2d_bytes: int | None = None
        self.step_d2h_bytes: int | None = None
        self.steps = 0
        self.trained_units: set[int] = set()
        self._last = (0, 0)
        self.stand_ins = StandIns(state)
        self.computed_bytes: dict[str, int] = {}  # by layer
        self.leaving: list[Layer] = []  # on the device for good; see `trial`
        self.model = state.engine.add_model()
        state.models[self.model] = self

    def update_trainable(self) -> bool:
        """Tell the engine which units are trained now: many a model is frozen after attach.

        Returns
        -------
        bool
            Whether any is.
        """
        trained = {
            layer.unit
            for layer in self.layers
            if any(tensor.requires_grad for tensor in layer.tensors())
        }
        for unit in (trained ^ self.trained_units) & self.state.units.keys():
            self.state.engine.set_trainable(unit, unit in trained)
        self.trained_units = trained
        return bool(trained)

    # ---- masters ----

    @property
    def buffers(self) -> list[_core.HostBuffer]:
        """The host memory of the masters."""
        return [piece.buffer for piece in self.pieces.values()]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the managed weights."""
        return sum(nbytes for layer in self.layers for _, nbytes in layer.extents())

    @property
    def managed_bytes(self) -> int:
        """Bytes that the managed weights take on the device, where each is aligned."""
        return sum(unit_bytes(layer.tensors()) for layer in self.layers)

    def _tell_once(self, what: str, message: str, *arguments: object) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning(message, self.name, *arguments)

    def add_piece(self, piece: masters.Piece) -> None:
        """Make a piece known to the engine, page-locked as far as `lock_limit` allows."""
        locked = sum(buffer.nbytes for buffer in self.buffers if buffer.locked)
        wanted = locked + piece.buffer.nbytes <= self.lock_limit
        refused = self.state.engine.lock(piece.buffer, wanted)
        self.pieces[piece.start] = piece
        bisect.insort(self._starts, piece.start)
        if refused is not None:
            self._tell_once(
                "refused",
                "%s: the system does not page-lock %s of its weights (%s); what is not locked is "
                "copied through a small locked ring, which is slower. Close what else holds locked "
                "memory, raise the limit (ulimit -l), or set ram_budget to what may be locked.",
                format_size(piece.buffer.nbytes),
                refused,
            )

    def piece_at(self, address: int) -> masters.Piece | None:
        """Return the piece that `address` lies in."""
        index = bisect.bisect_right(self._starts, address) - 1
        piece = self.pieces[self._starts[index]] if index >= 0 else None
        return piece if piece is not None and address < piece.end else None

    def count_uses(self, left: Iterable[int], entered: Iterable[int]) -> None:
        """Note which masters a layer has left and which it uses from now on, by address."""
        for addresses, change in ((left, -1), (entered, 1)):
            for address in addresses:
                piece = self.piece_at(address)
                if piece is not None:
                    piece.uses += change

    def give_back(self) -> None:
        """Unlock, and so free, the pieces that no layer uses and no tensor points into."""
        for start in [start for start, piece in self.pieces.items() if piece.is_abandoned()]:
            try:
                self.state.engine.unlock(self.pieces[start].buffer)
            except OffloadError as error:
                logger.warning("%s: old weights are given back later: %s", self.name, error)
                return
            del self.pieces[start]
            self._starts.remove(start)

    def take_over(self, called: Layer | None = None, lasting: bool = False) -> None:
        """Follow every layer whose masters were replaced, and lock what is new.

        New memory that is its layer's alone moves into a locked piece of its own; what else holds,
        or may be swapped back, stays where it is and goes through the ring. Layers that are lost
        are let go.

        Parameters
        ----------
        called : Layer, optional
            One that has followed already, because it is being called; None looks at all of them.
        lasting : bool
            Look at `called` alone, whose new memory is nobody else's and to stay.
        """
        in_use_later = contextlib.suppress(OffloadError)  # it follows when it is called itself
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
            self.give_back()
            own: list[tuple[Layer, list[Tensor]]] = []
            held_too = False
            for layer in replaced:
                new = {id(tensor): tensor for tensor in self._outside([layer])}
                held = {id(tensor): held for tensor, held in layer.replaced_for_good()}
                own.append((layer, [t for k, t in new.items() if lasting or held.get(k) is False]))
                self._swapped |= len(own[-1][1]) < len(new)
                held_too |= any(held.get(key) for key in new)
            with contextlib.suppress(MemoryError):  # what finds no room stays where it is
                for tensors in masters.split_pieces([tensors for _, tensors in own]):
                    self.add_piece(masters.Piece(tensors))
            for layer in [layer for layer, _ in own if layer.has_moved()]:
                with contextlib.nullcontext() if layer is called else in_use_later:
                    layer.follow()
            if held_too and not lasting:
                self._tell_of_swapped()

    def _outside(self, layers: Iterable[Layer]) -> list[Tensor]:
        """Return the masters that lie in no piece."""
        tensors = (tensor for layer in layers for tensor in layer.tensors())
        return [tensor for tensor in tensors if self.piece_at(tensor.data_ptr()) is None]

    def _tell_of_swapped(self) -> None:
        outside = self._outside(self.layers)
        self._swapped = bool(outside)
        if outside:
            self._tell_once(
                "demoted",
                "%s: %s of its weights were replaced by memory that cannot be page-locked, because "
                "something else holds it too (a state dict?), or holds what it replaced (an "
                "optimizer?): they are copied through a small locked ring, which is slower. If "
                "they are to stay, load them without assign=True, or drop what holds them and call "
                "manager.refresh().",
                format_size(sum(tensor_bytes(tensor) for tensor in outside)),
            )

    def let_go_if_lost(self, layer: Layer) -> bool:
        """Make a layer an ordinary one for good where it is none of ours any more.

        Its masters are given back. What it holds now is moved to the device when the manager
        settles, like everything that is not managed, and `MemoryManager.resident` has it.
        """
        with self.state.lock:
            reason = layer.why_lost()
            if not reason or layer not in self.layers:
                return False
            self.state.engine.remove_member(layer.member)
            self.layers.remove(layer)
            self._release_layer(layer)
            self.count_uses(layer.addresses(), ())
            # So that the memory can go.
            layer.weight, layer.bias, layer.parameters = torch.empty(0), None, {}
            Layout.version += 1
            self.give_back()
        manager = self.manager()
        if manager is not None and layer.module() is not None:
            manager.reasons[layer.name] = reason
            manager.settle_soon()
            self._tell_once(
                "lost",
                "%s: layer '%s' is not managed any more (%s). What it holds now stays on the "
                "device; manager.resident lists this and every further one.",
                layer.name,
                reason,
            )
        return True

    def let_go_soon(self, layer: Layer) -> None:
        """`let_go_if_lost`, now or, where the layer is in use, when the manager settles."""
        try:
            self.let_go_if_lost(layer)
        except OffloadError:
            layer.unsettled[0] = True

    # ---- the arena ----

    @property
    def segments(self) -> list[Segment]:
        """The device memory lent to the engine."""
        return [segment for segments in self.lent.values() for segment in segments]

    def lend_arena(self, nbytes: int, largest_unit: int) -> None:
        """Lend `nbytes` of device memory to the arena, in segments of about 1 GiB.

        What was lent before is taken back once the new memory is there: units do not span
        segments, so one large segment caches more than the same bytes in pieces.
        """
        engine = self.state.engine
        size = max(_SEGMENT_BYTES, 4 * largest_unit)
        lease, left = engine.add_lease(), nbytes
        segments = self.lent[lease] = []
        try:
            while left > 0:
                # A rest too small for the largest unit would be of no use to most units.
                take = left if left < size + 2 * largest_unit else size
                segment = Segment(take, self.state.device)
                # Findable first: other threads are answered with it as soon as the engine has it.
                segments.append(segment)
                self.state.exchange_segments([], [segment])
                engine.add_segment(lease, segment.address, take, self.state.stream())
                left -= take
            self.lease, self.capacity_bytes = lease, nbytes
        finally:
            self.take_back_replaced()

    def take_back(self, lease: int) -> None:
        """Take memory back from the engine; it stays alive until the engine has let go of it."""
        self.state.engine.remove_lease(lease)
        self.state.exchange_segments(self.lent.pop(lease), [])

    def take_back_replaced(self) -> None:
        """Take back all but the lease in use; what another thread computes with goes later."""
        for lease in [lease for lease in self.lent if lease != self.lease]:
            try:
                self.take_back(lease)
            except OffloadError as error:
                level = logging.WARNING if isinstance(error, DriverError) else logging.INFO
                logger.log(level, "replaced device memory is given back later: %s", error)

    def grow_to_block(self) -> None:
        """Grow the arena, once, to the largest checkpointed block the engine has learned."""
        self.take_back_replaced()
        if self.fixed_capacity:
            return
        stats = self.state.engine.stats(self.model)
        learned = stats["learned_block_bytes"]
        if learned <= self.floor_bytes:
            return
        capacity = min(self.capacity_bytes + learned - self.floor_bytes, self.managed_bytes)
        if capacity <= self.capacity_bytes:
            return
        self.fixed_capacity = True
        try:
            self.lend_arena(_round(capacity), stats["largest_unit_bytes"])
            self.floor_bytes = learned
        except (OffloadError, MemoryError, torch.OutOfMemoryError) as error:
            logger.warning("the arena stays at %s: %s", format_size(self.capacity_bytes), error)

    def note_computed(self, layer: str, nbytes: int) -> None:
        """Count host bytes that a layer computes with in the place of its own; warn once."""
        if nbytes and not self.computed_bytes:
            logger.warning(
                "%s: layer '%s' is called with a weight that is computed on the host, or stands in "
                "the place of its own. The results are right, but each call copies %s to the "
                "device, outside the arena. memory_summary() counts all such layers.",
                self.name,
                layer,
                format_size(nbytes),
            )
        if nbytes:
            self.computed_bytes[layer] = nbytes

    def end_of_step(self) -> None:
        """Take the bytes that moved since the last optimizer step."""
        stats = self.state.engine.stats(self.model)
        now = stats["h2d_bytes"], stats["d2h_bytes"]
        self.step_h2d_bytes, self.step_d2h_bytes = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
        self.steps += 1
        self.give_back()
        if self._swapped:  # for a whole step: not for a while
            self._tell_of_swapped()

    def x_min_bytes(self) -> int:
        """Least bytes a step can move to the device: 2 max(0, W - C), docs/how-it-works.md.

        W counts the weights alone: the padding between them need not travel.
        """
        return 2 * max(0, self.weight_bytes - self.capacity_bytes)

    def close(self) -> None:
        """Give everything back to the device; masters stay where they are, as ordinary memory."""
        if os.getpid() != self.pid:
            return
        # Any step may fail, or be refused while in use: what was done stays done, and closing again
        # goes on from there.
        engine = self.state.engine
        for lease in list(self.lent):
            self.take_back(lease)
        if self.model in self.state.models:
            engine.remove_model(self.model)
            del self.state.models[self.model]
        self.let_go_of_layers()
        while self.pieces:
            start, piece = next(reversed(self.pieces.items()))
            engine.unlock(piece.buffer)
            del self.pieces[start]
        self._starts.clear()
        if self in self.state.unclosed:
            self.state.unclosed.remove(self)
        close_if_unused(self.state)

    def let_go_of_layers(self) -> None:
        """Make the layers ordinary ones again."""
        self.stand_ins.forget()
        for layer in [*self.layers, *self.leaving]:
            self._release_layer(layer)
        self.layers.clear()
        self.leaving.clear()

    def _release_layer(self, layer: Layer) -> None:
        self.state.forget_layer(layer)
        layer.member = -1
        layer.views.clear()
        leaf = layer.module()  # also one that is no part of the model any more
        if leaf is not None and leaf.__dict__.get(HANDLE) is layer:
            swap_out(leaf)

    def close_later(self) -> None:
        """Keep what could not be given back, for the next attach or detach to try again."""
        self.let_go_of_layers()
        if self not in self.state.unclosed:
            self.state.unclosed.append(self)


class _DetachMethod:
    """`detach` works on the class (AI-Toolkit's way) and on an instance (without an argument)."""

    def __get__(
        self, manager: MemoryManager | None, owner: type[MemoryManager]
    ) -> Callable[..., nn.Module | None]:
        def detach(module: nn.Module | None = None) -> nn.Module | None:
            """Make the module an ordinary one again; see `MemoryManager`."""
            found = manager
            if module is not None:
                found = module.__dict__.get(ATTRIBUTE)
                if found is None:
                    raise OffloadError(
                        f"{type(module).__name__} is not attached; detach takes the module that "
                        "was given to attach."
                    )
            if found is None:
                raise TypeError("MemoryManager.detach() needs the attached module")
            return found._detach()

        return detach


class MemoryManager:
    """Streams the weights of one attached model; made by `attach`.

    ``manager.detach()`` or ``MemoryManager.detach(module)`` waits for all copies, gives the arena
    back and makes the layers ordinary ones again. Their weights stay in host memory, in the same
    Parameters; parts that were not managed stay on the device. Once the model is deleted, detach
    does nothing, because that gave everything back. A driver that fails does not keep it from that:
    what could not be given back is logged, kept, and tried again at the next attach or detach.

    Attributes
    ----------
    module : nn.Module
        The attached model.
    device : torch.device
        Where it computes.
    resident : dict
        Every parameter that is not managed, by name: the reason, a string with the ``bytes`` that
        the parameter takes on the device.
    """

    detach = _DetachMethod()

    def __init__(self, module: nn.Module, state: DeviceState, attachment: Attachment) -> None:
        self._module = weakref.ref(module)
        self.state = state
        self.device = state.device
        self.attachment = attachment
        self.reasons: dict[str, str] = {}  # why a layer, by name, is not managed
        self.unsettled = [False]
        self.lock = threading.Lock()  # one thread settles
        self.wrappers: list[tuple[Any, Any]] = []
        self._parts = frozenset(id(part) for part in module.modules())
        self.finalizer: Any = None
        attachment.manager = weakref.ref(self)
        self.first_forward: FirstForward | None = None

    @classmethod
    def attach(
        cls,
        module: nn.Module,
        device: Any = "cuda",
        offload_percent: float = 1.0,
        ignore_modules: Iterable[Any] = (),
    ) -> MemoryManager:
        """AI-Toolkit's spelling of `oracle_offload.attach`."""
        return attach(
            module, device, offload_percent=offload_percent, ignore_modules=ignore_modules
        )

    @property
    def module(self) -> nn.Module:
        """The attached model; `OffloadError` once it is gone."""
        module = self._module()
        if module is None:
            raise OffloadError("the attached model has been deleted")
        return module

    @property
    def resident(self) -> dict[str, Resident]:
        """Every parameter that is not managed, as the model is now."""
        return residents(self.module, self.reasons)

    @property
    def layers(self) -> list[Layer]:
        """The managed layers, in module order."""
        return list(self.attachment.layers)

    def __repr__(self) -> str:
        attachment = self.attachment
        return (
            f"MemoryManager({attachment.name} on {self.device}: {len(attachment.layers)} layers, "
            f"{format_size(attachment.managed_bytes)} managed, arena "
            f"{format_size(attachment.capacity_bytes)})"
        )

    def is_alive(self) -> bool:
        """Whether the model is there still."""
        return self._module() is not None

    def is_root(self, module: nn.Module) -> bool:
        """Whether `module` is the attached model itself."""
        return module is self._module()

    def contains(self, module: nn.Module) -> bool:
        """Whether `module` is part of the model, as it was when the manager last settled."""
        return id(module) in self._parts and self._module() is not None

    def refresh(self, module: nn.Module | None = None) -> None:
        """Forget all device copies: for writes to masters that nothing else can see.

        Weights that were replaced, and that nothing else holds any more, are page-locked.

        Parameters
        ----------
        module : nn.Module, optional
            Only checked to be the attached one: a refresh is of the whole model.
        """
        if module is not None and module.__dict__.get(ATTRIBUTE) not in (None, self):
            raise OffloadError("this manager manages another model")
        self.state.engine.refresh(self.attachment.model)
        self.attachment.take_over()

    def memory_summary(self, abbreviated: bool = False) -> Any:
        """Return the `MemoryReport` of this model."""
        from .views.summary import memory_summary

        return memory_summary(self.device, abbreviated, model=self._module())

    def settle_soon(self) -> None:
        """Settle before the next call of any part of the model, managed or not."""
        self.unsettled[0] = True
        if not _settle_hooks:
            hook = torch.compiler.disable(_settle_first)
            _settle_hooks.append(register_module_forward_pre_hook(hook))

    def settle(self) -> None:
        """Bring modules that were added since (an adapter) to the device."""
        if not self.unsettled[0]:
            return
        with self.lock:
            module = self._module()
            if module is not None and self.unsettled[0]:
                for layer in self.layers:
                    self.attachment.let_go_if_lost(layer)
                move_unmanaged(module, self.device, self.attachment)
                self._look_for_direct_uses(module)
                self._parts = frozenset(id(part) for part in module.modules())
                if self.first_forward is not None:
                    self.first_forward.look_again()
                self.unsettled[0] = False
                self.attachment.give_back()

    def _look_for_direct_uses(self, module: nn.Module) -> None:
        """Put layers on trial whose weight a module that came since may use directly."""
        found = used_directly(module.modules())
        for layer in self.layers:
            leaf = layer.module()
            if leaf is not None and id(leaf) in found:
                put_on_trial(leaf, found[id(leaf)][1])

    def __enter__(self) -> MemoryManager:
        return self

    def __exit__(self, *details: object) -> None:
        if self.finalizer.alive:
            self._detach()

    def _detach(self) -> nn.Module | None:
        module = self._module()
        if module is None:
            return None  # its memory was given back when it was deleted
        if not self.finalizer.alive:
            raise OffloadError(f"{self.attachment.name} is detached already")
        self.state.check_process()
        _close_patiently(self.attachment)
        self.finalizer.detach()
        if self.first_forward is not None:
            self.first_forward.end()
        for wrapper, original in self.wrappers:
            wrapper.org_forward = original
        module.__dict__.pop(ATTRIBUTE, None)
        _attached_roots.discard(self)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of an attached model is an ordinary one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def attach(
    module: nn.Module,
    device: Any = "cuda",
    *,
    offload_percent: float = 1.0,
    vram_budget: int | float | str | None = None,
    ram_budget: int | float | str | None = None,
    ignore_modules: Iterable[Any] = (),
) -> MemoryManager:
    """Keep the weights of `module` in page-locked host memory and stream them while it computes.

    Linear and Conv2d layers are managed: their Parameters keep their identity and lie on the host,
    so optimizers, ``state_dict`` and EMA see them there. Everything else is moved to `device` once.

    Parameters
    ----------
    module : nn.Module
        The model, on any device, with loaded weights.
    device : torch.device or str
        Where it computes: ``"cuda"`` (the default), ``"cuda:1"``, or ``"cpu"`` for the simulated
        device.
    offload_percent : float
        Share in [0, 1] of the managed bytes that has no room on the device. The arena holds the
        rest and a floor of two of the largest units (later: one checkpointed block).
    vram_budget : int, float, str, optional
        Arena in bytes (``"8GiB"``, a fraction of the device's memory, ``"auto"`` for 90% of what is
        free); replaces what follows from `offload_percent`. No more is taken than the model can
        use.
    ram_budget : int, float, str, optional
        Most host memory to page-lock; the rest is copied through a small locked ring.
    ignore_modules : iterable of nn.Module, Parameter or str
        Modules and parameters that stay resident: by object, or modules by dotted name or pattern
        (``"blocks.*.attn"``, as in `fnmatch`).

    Returns
    -------
    MemoryManager
        Also found as ``module._memory_manager``. As a context manager it detaches at its exit:
        ``with oracle_offload.attach(model) as manager: ...``

    Raises
    ------
    ValueError
        An argument that makes no sense; the message has its value.
    OffloadError
        A model that cannot be attached (attached already, meta parameters, nothing to manage), no
        such device, or a budget too small for two of the largest units.
    torch.OutOfMemoryError
        The arena does not fit the device.
    MemoryError
        The host has no memory left for the weights.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"attach() takes an nn.Module, not {type(module).__name__}")
    if isinstance(offload_percent, bool) or not isinstance(offload_percent, int | float):
        raise ValueError(f"offload_percent={offload_percent!r} is not a number in [0, 1]")
    if not 0.0 <= offload_percent <= 1.0:
        hint = f"; did you mean {offload_percent / 100}?" if 1 < offload_percent <= 100 else ""
        raise ValueError(f"offload_percent={offload_percent!r} is outside [0, 1]{hint}")
    if module.__dict__.get(ATTRIBUTE) is not None:
        raise OffloadError(
            f"{type(module).__name__} is attached already; detach it first (MemoryManager.detach)."
        )
    where = parse_device(device)
    refuse_weight_movers(module)
    lock_limit = _lock_limit(ram_budget)
    chosen = selection.select(module, ignore_modules)
    units = group_units(chosen.leaves)
    sizes = [unit_bytes([t for leaf in unit for t in leaf.tensors()]) for unit in units]
    managed, largest = sum(sizes), max(sizes)
    _close_leftovers(open_state(where))
    state = open_state(where)  # closing the last leftover closes the engine
    try:
        attachment = Attachment(state, type(module).__name__)
    except BaseException:
        with contextlib.suppress(OffloadError):  # else at the next attach
            close_if_unused(state)
        raise
    try:
        floor = 2 * largest
        capacity = _capacity(state, units, sizes, offload_percent, vram_budget)
        attachment.floor_bytes = floor
        attachment.fixed_capacity = vram_budget is not None
        attachment.lock_limit = lock_limit
        attachment.lend_arena(capacity, largest)
        manager = MemoryManager(module, state, attachment)
        manager.reasons = chosen.resident
        _build_masters(attachment, units, managed)
        _add_units(manager, units)
    except BaseException:
        _close_quietly(attachment)
        raise
    for leaf, layer in zip(
        (leaf for unit in units for leaf in unit), attachment.layers, strict=True
    ):
        wrapper = wrapper_of(leaf.module) if "forward" in leaf.module.__dict__ else None
        swap_in(leaf.module, layer)
        if wrapper is not None:
            # The wrapper calls what it found; let it call the managed forward instead.
            manager.wrappers.append((wrapper, wrapper.org_forward))
            wrapper.org_forward = type(leaf.module).forward.__get__(leaf.module)
    module.__dict__[ATTRIBUTE] = manager
    manager.finalizer = weakref.finalize(module, _close_quietly, attachment)
    move_unmanaged(module, where)
    _watch_structure()
    _attached_roots.add(manager)
    manager.first_forward = watch_first_forward(manager)
    logger.info("attached %r; %d layers stay resident", manager, len(chosen.resident))
    _warn_of_residents(manager)
    return manager


def _warn_of_residents(manager: MemoryManager) -> None:
    """Say what stays on the device where that is more than a tenth of the model."""
    resident = manager.resident
    managed, left = manager.attachment.weight_bytes, distinct_bytes(manager.module)
    if managed >= 0.9 * (managed + left):
        return
    largest = sorted(resident.items(), key=lambda item: item[1].bytes, reverse=True)[:3]
    logger.warning(
        "%s: only %.0f%% of its %s are managed; %s stay on the device. The largest: %s. "
        "manager.resident lists all.",
        manager.attachment.name,
        100 * managed / (managed + left),
        format_size(managed + left),
        format_size(left),
        "; ".join(f"'{name}', {format_size(why.bytes)} ({why})" for name, why in largest),
    )


def _capacity(
    state: DeviceState,
    units: Sequence[Sequence[Leaf]],
    sizes: Sequence[int],
    offload_percent: float,
    vram_budget: int | float | str | None,
) -> int:
    managed, floor = sum(sizes), 2 * max(sizes)
    if vram_budget is None:
        return _round(int((1.0 - offload_percent) * managed)) + floor
    free, total = state.engine.mem_info()
    if vram_budget == "auto":
        budget = int(0.9 * free)
    else:
        budget = parse_size(vram_budget, total=total, name="vram_budget")
    # More than the planner can ever use would be memory lost to everything else.
    budget = min(budget, managed + floor)
    budget = budget // _core.ALIGNMENT * _core.ALIGNMENT
    if budget < floor:
        large = [unit for unit, size in zip(units, sizes, strict=True) if 2 * size > budget]
        names = [leaf.name for unit in large for leaf in unit]
        raise OffloadError(
            f"vram_budget={vram_budget!r} is {format_size(budget)}, but two of the largest units "
            f"need {format_size(floor)}; raise the budget to that"
            + (
                f", or leave resident what is too large for it, with ignore_modules: "
                f"{selection.listed(names)}."
                if len(large) < len(units)
                else "."
            )
        )
    return budget


def _round(nbytes: int) -> int:
    return -(-nbytes // _core.ALIGNMENT) * _core.ALIGNMENT


def _lock_limit(ram_budget: int | float | str | None) -> float:
    if ram_budget is None or ram_budget == "auto":
        return float("inf")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if os.name == "posix" else None
    return parse_size(ram_budget, total=total, name="ram_budget")


def _build_masters(attachment: Attachment, units: Sequence[Sequence[Leaf]], managed: int) -> None:
    tensors = [[t for leaf in unit for t in leaf.tensors()] for unit in units]
    with DelayedBar(managed, "oracle_offload: attach") as bar:
        for tensors_of_piece in masters.split_pieces(tensors):
            piece = masters.Piece(tensors_of_piece, bar.update)
            masters.trim_heap()
            attachment.add_piece(piece)


def _add_units(manager: MemoryManager, units: Sequence[Sequence[Leaf]]) -> None:
    attachment = manager.attachment
    engine = attachment.state.engine
    for unit in units:
        layers = []
        for leaf in unit:
            kind = layer_type(leaf.module)
            assert kind is not None
            layers.append(kind(leaf.module, leaf.name, manager))
            layers[-1].doubtful = leaf.doubtful
        trainable = any(tensor.requires_grad for leaf in unit for tensor in leaf.tensors())
        number, members = engine.add_unit(
            attachment.model, [layer.extents() for layer in layers], trainable
        )
        for layer, (member, offsets) in zip(layers, members, strict=True):
            layer.placed(number, member, offsets)
            attachment.layers.append(layer)
            attachment.count_uses((), layer.addresses())
        if trainable:
            attachment.trained_units.add(number)


class Resident(str):
    """Why a parameter is not managed: a string, with the `bytes` it takes on the device."""

    bytes: int

    def __new__(cls, reason: str, nbytes: int) -> Resident:
        """Make one of a reason and a size."""
        made = super().__new__(cls, reason)
        made.bytes = nbytes
        return made


def unmanaged_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield ``(layer, its module, key, parameter)`` of everything outside the managed layers."""
    for name, inner in module.named_modules():
        if not is_managed(inner):
            for key, parameter in inner._parameters.items():
                if parameter is not None:
                    yield name, inner, key, parameter


def residents(module: nn.Module, reasons: dict[str, str]) -> dict[str, Resident]:
    """List what is not managed, by name; `reasons` are those known of layers."""
    found = {}
    for name, inner, key, parameter in unmanaged_parameters(module):
        if name in reasons:
            reason = reasons[name]
        elif layer_type(inner) is not None:
            reason = "it was added after attach"
        else:
            reason = f"{type(inner).__name__} is no kind of layer that is managed"
        found[f"{name}.{key}" if name else key] = Resident(reason, stored_bytes(parameter))
    return found


def distinct_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters that are not managed; a shared one counts once."""
    distinct = {id(parameter): parameter for *_, parameter in unmanaged_parameters(module)}
    return sum(stored_bytes(parameter) for parameter in distinct.values())


def move_unmanaged(
    module: nn.Module, device: torch.device, attachment: Attachment | None = None
) -> None:
    """Move every parameter and buffer outside the managed layers to `device`, dtypes untouched.

    Shared tensors stay shared: a Parameter keeps its identity, a buffer that several modules hold
    is moved once. What a layer that was let go left among the masters of `attachment` leaves them.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def stays(tensor: Tensor) -> bool:
        if tensor.device != device or type(tensor) not in (Tensor, nn.Parameter):
            return tensor.device == device
        if attachment is None or device.type != "cpu":
            return True
        return attachment.piece_at(tensor.data_ptr()) is None

    def move(tensor: Tensor) -> Tensor:
        if stays(tensor):
            return tensor
        known = moved.get(id(tensor))
        if known is None:
            known = tensor, tensor.to(device, copy=True)
            moved[id(tensor)] = known
        return known[1]

    with torch.inference_mode(False):
        for inner in module.modules():
            if is_managed(inner):
                continue
            if any(t is not None and not stays(t) for t in _own_tensors(inner)):
                inner._apply(move, recurse=False)


def _own_tensors(module: nn.Module) -> list[Tensor | None]:
    return [*module._parameters.values(), *module._buffers.values()]


def _watch_structure() -> None:
    """Hear of what is added to modules anywhere: an adapter or a parametrisation put on a model."""
    if not _structure_hooks:
        modules = torch.nn.modules.module
        _structure_hooks.extend(
            (
                modules.register_module_module_registration_hook(_module_added),
                modules.register_module_parameter_registration_hook(_parameter_added),
                modules.register_module_buffer_registration_hook(_buffer_added),
            )
        )


def _module_added(parent: nn.Module, name: str, child: Any) -> None:
    _structure_changed(parent, parent._modules.get(name), child)


def _parameter_added(parent: nn.Module, name: str, parameter: Any) -> None:
    _structure_changed(parent, parent._parameters.get(name), parameter)


def _buffer_added(parent: nn.Module, name: str, buffer: Any) -> None:
    _structure_changed(parent, parent._buffers.get(name), buffer)


def _structure_changed(parent: nn.Module, before: Any, now: Any) -> None:
    """Look at a model again; watch its next forward, unless like was only replaced by like."""
    if before is now:
        return
    for manager in list(_attached_roots):
        if manager.contains(parent):
            manager.unsettled[0] = True
            if type(before) is not type(now) and manager.first_forward is not None:
                manager.first_forward.arm()


def _settle_first(module: nn.Module, args: Any) -> None:
    for manager in list(_attached_roots):
        if manager.contains(module):
            manager.settle()
    if not any(manager.unsettled[0] for manager in list(_attached_roots)):
        while _settle_hooks:
            _settle_hooks.pop().remove()


def _close_patiently(attachment: Attachment) -> None:
    """Close at detach, which a driver that fails does not prevent: what fails twice is left."""
    _close_leftovers(attachment.state)
    try:
        try:
            attachment.close()
        except DriverError as error:
            logger.warning("detaching %s, at the second attempt: %s", attachment.name, error)
            attachment.close()
    except DriverError as error:
        attachment.close_later()
        logger.warning(
            "%s is detached, but some of its memory could not be given back yet: %s. It is tried "
            "again at the next attach or detach.",
            attachment.name,
            error,
        )


def _close_quietly(attachment: Attachment) -> None:
    """End of a deleted model or of an attach that failed; what fails is tried again later."""
    try:
        attachment.close()
    except Exception:
        attachment.close_later()
        logger.exception("could not give back a model's memory yet")


def _close_leftovers(state: DeviceState) -> None:
    """Close what could not be closed while a fault lasted."""
    for attachment in list(state.unclosed):
        _close_quietly(attachment)


def manager_of(module: nn.Module) -> MemoryManager | None:
    """Return the manager of an attached module, None for any other."""
    return cast("MemoryManager | None", module.__dict__.get(ATTRIBUTE))
