"""`attach`, `MemoryManager`: from an ordinary model to one whose weights are streamed, and back."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from .compress.choice import (
    Expected,
    HostRoom,
    ask_by_pace,
    choose,
    codable,
    coder_for,
    part,
    staging_bytes,
)
from .compress.coded_files import coded_places
from .compress.steps import Pace, StepRecord, key_of
from .disk.quantising import Quantize
from .engine.devices import parse_device
from .engine.engines import DeviceState, open_state, opened
from .engine.geometry import stored_bytes, unit_bytes
from .engine.optimizer_states import note_moved
from .errors import OffloadError
from .host.sizes import format_size, parse_size
from .host.terminal import printable
from .layers.any import find_wrappers, wrap
from .layers.formats import unknown_format
from .layers.handle import make_put_off
from .layers.leaf import Leaf
from .layers.loan import Borrower
from .model import admission, answers, masters, on_disk, other_libraries, selection
from .model.answers import Answers
from .model.arena import Arena
from .model.attachment import Attachment, close_leftovers
from .model.budget import AUTO, Budget, Weights, budget_of, place
from .model.foreign_hooks import refuse_weight_movers
from .model.kept import Kept, same_limit
from .model.loading import Loading
from .model.order import OrderFile
from .model.residents import (
    Resident,
    list_residents,
    move_residents,
    resident_bytes,
    unmanaged_parameters,
)
from .model.selection import Unit, group_units, least_bytes, place_bytes
from .model.sharing import Share, together
from .model.structure import Structure
from .observe import heartbeat

logger = logging.getLogger("oracle_offload")

ATTRIBUTE = answers.MANAGER
_HOST = torch.device("cpu")


class _DetachMethod:
    """`detach` works on the class (AI-Toolkit's way) and on an instance (without an argument)."""

    def __get__(
        self, manager: MemoryManager | None, owner: type[MemoryManager]
    ) -> Callable[..., nn.Module | None]:
        def detach(module: nn.Module | None = None, *, to: Any = None) -> nn.Module | None:
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
            return found._detach(to)

        return detach


class MemoryManager:
    """Streams the weights of one attached model; made by `attach`.

    ``manager.detach()`` or ``MemoryManager.detach(module)`` waits for all copies, gives the arena
    back and makes the layers ordinary ones again, in the same Parameters. All of the model,
    adapters and norms too, is then on the device where the weights were before attach, or on
    another: ``detach(to="cuda")``. Where that has no room, all of it is on the host, and a warning
    says so. A second detach does nothing, nor does one once the model is deleted, because that gave
    everything back. A driver that fails does not keep it from that: what could not be given back is
    logged, kept, and tried again at the next attach or detach.

    Until then the model is *on the device* to code that asks it (``model.device``), and a deep copy
    of it is an ordinary model on the host.

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

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.attachment = structure.attachment
        self.state = self.attachment.state
        self.device = self.state.device
        self.home = _HOST  # where the weights were before attach
        self.answers: Answers | None = None
        self.finalizer: Any = None

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
        module = self.structure.module
        if module is None:
            raise OffloadError("the attached model has been deleted")
        return module

    @property
    def resident(self) -> dict[str, Resident]:
        """Every parameter that is not managed, as the model is now."""
        return list_residents(self.module, self.attachment.reasons)

    @property
    def layers(self) -> list[Leaf]:
        """The managed layers, in module order."""
        return list(self.attachment.layers)

    def __repr__(self) -> str:
        attachment = self.attachment
        return (
            f"MemoryManager({printable(attachment.name)} on {self.device}: "
            f"{len(attachment.layers)} layers, {format_size(attachment.managed_bytes)} managed, "
            f"arena {format_size(attachment.arena.capacity_bytes)})"
        )

    def contains(self, module: nn.Module) -> bool:
        """Whether `module` is part of the model, as it was when the manager last settled."""
        return self.structure.contains(module)

    def settle(self) -> None:
        """Bring modules that were added since (an adapter) to the device."""
        self.structure.settle()

    def refresh(self, module: nn.Module | None = None) -> None:
        """Forget all device copies: for writes to masters that nothing else can see.

        Weights that were replaced, and that nothing else holds any more, are page-locked. Where
        ranks share weights, all of them call it together.

        Parameters
        ----------
        module : nn.Module, optional
            Only checked to be the attached one: a refresh is of the whole model.
        """
        if module is not None and module.__dict__.get(ATTRIBUTE) not in (None, self):
            raise OffloadError("this manager manages another model")
        if self.attachment.pieces.share is not None:
            with self.writing():  # which all ranks do together
                return
        self._forget_copies()

    def _forget_copies(self) -> None:
        self.state.engine.refresh(self.attachment.model)
        self.state.norms.clear()
        self.attachment.take_over()

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """Write to weights in a ``with`` block: in place, by ``.data``, from numpy.

        Of an optimizer that is streamed, to gradients as well: see `stream_optimizer`.

        A copy that a forward has queued may read a weight after that forward has returned, and
        nothing sees a write through a tensor that code kept. At its entry the block waits for
        what is queued; at its exit all device copies are forgotten, as by `refresh`. Nothing in it
        may call the model. ``load_state_dict`` waits by itself, and so does a step of an optimizer
        that holds the weights. MeZO's perturbations in a loop of one's own belong here, and merges
        of adapters.

        Where ranks share weights, all of them enter the block, and leave it, together. It yields
        True on the one that may write what they share, False on the others, where that is read
        alone: ``with manager.writing() as mine: ...``. ``load_state_dict`` in it, on all ranks,
        does the right thing on each.
        """
        self.state.check_process()
        pieces = self.attachment.pieces
        try:
            self.state.engine.settle()
        except OffloadError as error:
            if pieces.share is not None:  # the others are about to wait
                pieces.share.ranks.fail_with(error)
            raise
        for layer in self.layers:
            if isinstance(layer, Borrower):
                make_put_off(layer, range(len(layer.names)))
        try:
            if pieces.share is None:
                yield True
            else:
                with pieces.share.writing(pieces.shared()) as mine:
                    yield mine
        finally:
            self._forget_copies()

    @property
    def budget(self) -> Budget:
        """What the weights may take, as `attach` or `set_budget` was last asked."""
        return self.attachment.budget

    def set_budget(
        self,
        budget: Budget | None = None,
        *,
        offload_percent: float | None = None,
        vram_budget: int | float | str | None = None,
    ) -> AbstractContextManager[None]:
        """Give the weights another part of the device, from now on or for a ``with`` block.

        Sampling may use the room that training needs for activations: ``with
        manager.set_budget(vram_budget="20GiB"): sample()``. All copies on the device are made
        again. What is on the host, and how, is decided at `attach`. Blocks nest: what was set in
        one ends with it. Where something is in use at its end, the arena is replaced before the
        next forward that autograd records, and a warning says so.

        Parameters
        ----------
        budget : Budget, optional
            Whose ``ram_budget``, ``lock``, ``compress`` and ``disk`` are those of `attach`.
        offload_percent, vram_budget : optional
            The two fields of it that can change, as of `attach`.

        Raises
        ------
        ValueError
            A budget that makes no sense, or would change what is on the host.
        OffloadError
            It is too small for the largest units, or a call computes with the model now; nothing
            has changed.
        torch.OutOfMemoryError
            The device has no room for it; nothing has changed.
        """
        self.state.check_process()
        before = self.attachment.budget
        if budget is None:
            if offload_percent is None and vram_budget is None:
                raise ValueError(
                    "set_budget() needs a budget=, an offload_percent= or vram_budget="
                )
            budget = replace(before, offload_percent=offload_percent, vram_budget=vram_budget)
        else:
            share = 1.0 if offload_percent is None else offload_percent
            budget = budget_of(budget, offload_percent=share, vram_budget=vram_budget)
        for name in ("ram_budget", "lock", "compress", "disk"):
            asked, was = getattr(budget, name), getattr(before, name)
            if asked != was:
                raise ValueError(
                    f"{name}={asked!r}: the model was attached with {was!r}, which set_budget does "
                    "not change; detach it, and attach it again."
                )
        return self.attachment.set_budget(budget)

    def on_device(self) -> AbstractContextManager[None]:
        """Let weights answer as they do inside the model's forward, for a ``with`` block.

        Outside of forwards and backwards ``layer.weight`` is the Parameter, on the host. In the
        block it is on the device, borrowed for each operator: for a loss that computes with
        ``model.lm_head.weight``.
        """
        self.state.check_process()
        self.structure.settle()
        return self.structure.on_device()

    def memory_summary(self, abbreviated: bool = False) -> Any:
        """Return the `MemoryReport` of this model."""
        from .observe.summary import memory_summary

        return memory_summary(self.device, abbreviated, model=self.structure.module)

    def __enter__(self) -> MemoryManager:
        return self

    def __exit__(self, *details: object) -> None:
        if self.finalizer.alive:
            self._detach()

    def _detach(self, to: Any = None) -> nn.Module | None:
        where = self.home if to is None else parse_device(to)
        if not self.finalizer.alive:  # detached already, or deleted
            return self.structure.module
        module = self._end()
        if module is not None:
            self._bring_to(where, module)
        return module

    def _end(self) -> nn.Module | None:
        """Make the model an ordinary one; `detach`, but that all of it stays where it is.

        Returns
        -------
        nn.Module or None
            The model, unless it was deleted.
        """
        module = self.structure.module
        if module is None:
            return None  # its memory was given back when it was deleted
        self.state.check_process()
        self.attachment.warn_of_written_files()
        self.attachment.close_patiently()
        if self.answers is not None:
            self.answers.end()
        self.structure.end()
        self.attachment.own_weights()
        module.__dict__.pop(ATTRIBUTE, None)
        self.finalizer.detach()  # last: after Ctrl-C in between, `detach` goes on from there
        return module

    def _bring_to(self, device: torch.device, module: nn.Module) -> bool:
        """Move all of a model that was detached to one device: other code expects one.

        Returns
        -------
        bool
            Whether it had room for it; else all of it is on the host.
        """
        has_room = True
        try:
            move_residents(module.modules(), device, leave_meta=True)
        except torch.OutOfMemoryError as error:
            has_room = False
            move_residents(module.modules(), _HOST, leave_meta=True)
            logger.warning(
                "%s is detached, and all of it is on the host: %s has no room for it (%s).",
                self.attachment.name,
                device,
                str(error).partition(". ")[0],
            )
        note_moved(module.parameters())
        return has_room

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of an attached model is an ordinary one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _described(given: Any) -> str:
    """Return the type of what was given for a model, and what of it can be attached."""
    components = getattr(given, "components", None)
    parts = components if isinstance(components, dict) else {}
    names = [f"{name!r}" for name, part in parts.items() if isinstance(part, nn.Module)]
    hint = f"; attach its parts one by one: {', '.join(names)}" if names else ""
    return f"{type(given).__name__}{hint}"


def attach(
    module: nn.Module,
    device: Any = "cuda",
    *,
    budget: Budget | None = None,
    offload_percent: float = 1.0,
    vram_budget: int | float | str | None = None,
    ram_budget: int | float | str | None = None,
    lock: int | float | str = "auto",
    ignore_modules: Iterable[Any] = (),
    order_file: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    quantize: Quantize | None = None,
    compress: str | None = None,
    disk: bool = False,
    share: str | None = None,
) -> MemoryManager:
    """Keep the weights of `module` in page-locked host memory and stream them while it computes.

    All weights but small ones are managed (docs/weights.md): their Parameters keep their identity
    and are on the host, so optimizers, ``state_dict`` and EMA see them there. Everything else is
    moved to `device` once; ``manager.resident`` says what that is, and why.

    Parameters
    ----------
    module : nn.Module
        The model, on any device, with loaded weights; on the meta device with `weights`.
    device : torch.device or str
        Where it computes: ``"cuda"`` (the default), ``"cuda:1"``, or ``"cpu"`` for the simulated
        device.
    budget : Budget, optional
        What weights may take of device and host, as one object; or each of its six fields, which
        come next, as an argument.
    offload_percent : float
        Share in [0, 1] of the managed bytes that has no room on the device. The arena holds the
        rest and a floor of two of the largest units (later: one checkpointed block).
    vram_budget : int, float, str, optional
        What weights may take on the device, in bytes (``"8GiB"``, a fraction of its memory,
        ``"auto"`` for what the steps leave, see docs/memory.md); replaces what follows from
        `offload_percent`. No more is taken than the model can use.
    ram_budget : int, float, str, optional
        Most host memory for weights: bytes (``"20GiB"``, a fraction of the machine's memory),
        ``"auto"`` for 90% of what the machine can spare, or ``"offloaded"`` for the share that
        `offload_percent` names. Units beyond it, spread evenly over the model, stay on the device
        always, where they take memory in addition to a floor; by default there are none.
    lock : {"auto", "never"}, int, float or str
        Page-lock the weights as far as the system allows, not at all, or no more than a size. What
        is not locked is copied through a small locked ring.
    ignore_modules : iterable of nn.Module, Parameter or str
        Modules and parameters that stay resident: by object, or by dotted name or pattern
        (``"blocks.*.attn"``, as in `fnmatch`).
    order_file : str or path, optional
        Where the order in which layers are used is kept from one run to the next, so that the first
        step of the next one is as quick as any: a file, or the folder of the checkpoints, in which
        it is named after the model's structure. A file of another model is passed over.
    weights : str or path, optional
        Files of safetensors, or their folder, that the weights are read from straight into locked
        memory (docs/from-disk.md); `module` may be on the meta device then.
    quantize : optional
        With `weights`: how Linear weights are quantised as they are read (docs/from-disk.md).
    compress : {"lossless", "auto"}, optional
        Keep frozen weights in fewer bytes, without loss: all that get smaller, or the least that
        removes waiting for copies, and what `ram_budget` has no room for (docs/lossless.md).
    disk : bool
        With `weights`: frozen weights for which `ram_budget` (``"auto"`` then) has no room stay in
        their files, and are read from there each time they travel (docs/from-disk.md).
    share : {"node"}, optional
        Under torchrun: all ranks of this machine have the frozen weights in one host copy, each
        reading it for its own GPU (docs/several-gpus.md). All of them have to call it alike.

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
        such device, or a budget too small for the largest units; `weights` that are damaged or not
        this model's; with `share`, on all ranks, what any of them raises or has otherwise.
    torch.OutOfMemoryError
        The arena, or what stays resident, does not fit the device.
    MemoryError
        The host has no memory left for the weights.

    Examples
    --------
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    >>> with oracle_offload.attach(model, "cpu", offload_percent=0.75) as manager:
    ...     model(torch.randn(2, 256)).sum().backward()
    ...     print(len(manager.layers), "layers stream;", manager.resident or "none stays")
    8 layers stream; none stays
    """
    # What is wrong on one rank is an error on all: none waits for one that does not come.
    with together(share) as shared:
        wanted = budget_of(
            budget,
            offload_percent=offload_percent,
            vram_budget=vram_budget,
            ram_budget=ram_budget,
            lock=lock,
            compress=compress,
            disk=disk,
        )
        if wanted.disk and shared is not None:
            raise OffloadError(
                "disk=True next to share='node': what a rank writes to a weight that stays in its "
                "file is its own, and the others would not see it; leave one of them away."
            )
        where = _check(module, device, wanted, reads=weights is not None, quantizes=quantize)
        order = None if order_file is None else OrderFile(order_file)
        reading = None if weights is None else Loading(module, weights, quantize)
        with reading or contextlib.nullcontext() as loading:
            placed = _place(module, where, wanted, ignore_modules, loading, shared)
            manager = _build(module, where, placed)
        _watch(manager, placed, order)
        if shared is not None:
            try:
                shared.ranks.exchange("attached")
            except BaseException:  # another rank could not
                manager.detach()
                raise
    return manager


def _check(
    module: nn.Module, device: Any, budget: Budget, *, reads: bool, quantizes: Any
) -> torch.device:
    """Return the device; refuse what cannot be attached, before anything is done."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"attach() takes an nn.Module, not {_described(module)}")
    if module.__dict__.get(ATTRIBUTE) is not None:
        raise OffloadError(
            f"{type(module).__name__} is attached already; detach it first (MemoryManager.detach)."
        )
    where = parse_device(device)
    if budget.vram_budget is not None and budget.offloaded_share != 1.0:
        logger.warning(
            "vram_budget=%r says what weights may take on %s; offload_percent=%r is passed over.",
            budget.vram_budget,
            where,
            budget.offload_percent,
        )
    refuse_weight_movers(module)
    admission.leave_inference_mode(module)
    if quantizes is not None and not reads:
        raise ValueError("quantize= is for weights that are read; quantise what is there already")
    return where


# ---- place: which units there are, and what of them is where ----


@dataclass(frozen=True)
class _Placed:
    """Where the weights of a model are to be, before any of them moves.

    Attributes
    ----------
    asked, budget : Budget
        As it was given, and as all ranks take it.
    reasons : dict of str to str
        Why a layer or a parameter is resident, by name.
    units, kept : list, Kept
        What streams, and what always stays on the device.
    sizes : list of int
        Bytes of each unit in the arena.
    floor : int
        The least bytes of an arena.
    host_room : HostRoom
        What the host has for them, compressed or not.
    expected : Expected
        How small compressed weights get.
    home : torch.device
        Where the weights are now.
    disk : OnDisk
        What stays in files.
    loading, shared : Loading, Share or None
        The files that they come from; the ranks that have them together.
    why_none_decoded : str
        Why nothing of files is compressed, where the device cannot decode.
    """

    asked: Budget
    budget: Budget
    reasons: dict[str, str]
    units: list[Unit]
    kept: Kept
    sizes: list[int]
    floor: int
    host_room: HostRoom
    expected: Expected
    home: torch.device
    disk: on_disk.OnDisk
    loading: Loading | None
    shared: Share | None
    why_none_decoded: str = ""

    def weights(self, staging: int) -> Weights:
        """Return what `place` needs to know."""
        return Weights(sum(self.sizes), self.floor, self.kept.bytes, staging)


def _place(
    module: nn.Module,
    where: torch.device,
    budget: Budget,
    ignore_modules: Iterable[Any],
    loading: Loading | None,
    shared: Share | None,
) -> _Placed:
    """Part the weights into units that stream and those that stay; nothing is moved."""
    chosen = selection.select(module, ignore_modules)
    expected = Expected(loading)
    every = group_units(chosen.leaves)
    asked = budget
    if shared is not None:
        budget = same_limit(every, asked, shared)
    disk, why_none_decoded = on_disk.OnDisk(), ""
    if budget.disk:
        floor = least_bytes(every, budget.most_locked_bytes() == float("inf"))
        capacity = _arena_without_kept(where, budget, every, floor)
        why_none_decoded = _why_none_decoded(where, budget) if budget.compress else ""
        code = coded_places if budget.compress and not why_none_decoded else None
        units, kept, disk = on_disk.part(every, budget, loading, capacity, floor, code)
        host_room = HostRoom()
    else:
        units, kept, host_room = part(every, budget, expected)
    all_locked = budget.most_locked_bytes() == float("inf")
    return _Placed(
        asked,
        budget,
        {**chosen.parameters, **chosen.resident, **kept.reasons()},
        units,
        kept,
        [place_bytes(unit, all_locked) for unit in units],
        least_bytes(units, all_locked),
        host_room,
        expected,
        _home_of(units),
        disk,
        loading,
        shared,
        why_none_decoded,
    )


def _arena_without_kept(
    where: torch.device, budget: Budget, units: Sequence[Unit], floor: int
) -> int:
    """Return the bytes of an arena with which nothing stays on the device; 0: steps say."""
    if budget.vram_budget == AUTO:
        return 0
    with opened(where) as state:
        _, total = state.engine.mem_info()
    streamed = sum(place_bytes(unit, True) for unit in units)
    staging = staging_bytes(codable(units)) if budget.compress else 0
    return place(budget, Weights(streamed, floor, staging=staging), total, 0)


# ---- build: masters, arena, units; all of it or nothing ----


def _build(module: nn.Module, where: torch.device, placed: _Placed) -> MemoryManager:
    """Move the weights into masters and lend an arena; what fails leaves the model as it was."""
    loading, shared = placed.loading, placed.shared
    close_leftovers(open_state(where))
    with opened(where) as state:
        locked = placed.budget.most_locked_bytes()
        attachment = Attachment(module, state, locked, placed.reasons, placed.kept.bytes)
        moved: list[masters.Moved] = []
        try:
            structure = Structure(module, attachment)
            coded = _coded(attachment, placed)
            staging = staging_bytes([*coded, *placed.disk.coded_tensors()])
            if placed.budget.vram_budget != AUTO:  # what cannot be is refused before anything moves
                _capacity(state, placed, staging)
            _fill_masters(attachment, placed, coded, moved)
            if moved:  # the arena takes the place that the weights have left
                state.kind.release_cached()
            _lend(attachment, placed, staging if attachment.pieces.coded else 0)
            layers = admission.add_units(structure, placed.units)
            if loading is not None:
                loading.read_rest(state.kind, where)
            placed.kept.move_to(where)
            if loading is not None:
                logger.info("%s: read %s", attachment.name, loading.done())
                if placed.disk.places:
                    loading.uncache()
        except BaseException as error:
            if shared is not None:  # before its connections end: the others are to learn why
                shared.ranks.fail_with(error)
            attachment.close_quietly()
            masters.move_back(moved, state.kind.set_data)
            if loading is None:  # else they have no values again
                attachment.own_weights()
            raise
    manager = MemoryManager(structure)
    manager.home = placed.home
    manager.answers = Answers(module, where)  # below the classes of managed modules
    admission.take_over_calls(layers)
    for outer, inner in list(find_wrappers(module)):
        wrap(outer, inner)
    module.__dict__[ATTRIBUTE] = manager
    manager.finalizer = weakref.finalize(module, attachment.close_deleted)
    try:
        move_residents(module.modules(), where)
    except BaseException as error:  # the device has no room for them
        if shared is not None:
            shared.ranks.fail_with(error)
        manager._end()
        if manager._bring_to(placed.home, module):
            masters.move_back(moved, state.kind.set_data)
        raise
    return manager


def _coded(attachment: Attachment, placed: _Placed) -> list[Tensor]:
    """Return the tensors that become coded masters, the same on all ranks."""
    budget, state = placed.budget, attachment.state
    coded = codable(placed.units) if budget.compress else []
    coded = [tensor for tensor in coded if not placed.disk.has(tensor)]
    if budget.compress == AUTO and (coded or not placed.disk.places):
        room = (
            int(0.9 * state.free_bytes()) - placed.kept.bytes
            if budget.vram_budget == AUTO
            else _capacity(state, placed, 0)
        )
        coded = _least_coded(attachment, placed, room)
        coded = [tensor for tensor in coded if not placed.disk.has(tensor)]
    why_none = placed.why_none_decoded
    if coded and not why_none:
        why_none = _why_none_decoded(state.device, budget, placed.host_room.short > 0)
    if why_none:
        attachment.compressed_because = why_none
        logger.warning("%s: compress='auto': %s", attachment.name, why_none)
        coded = []
    if budget.compress == AUTO and placed.disk.coded:
        because = ["what is read from files is less there", attachment.compressed_because]
        attachment.compressed_because = "; ".join(filter(None, because))
    if placed.shared is not None:
        files = [] if placed.loading is None else placed.loading.identity()
        coded = placed.shared.agree(placed.units, coded, files)
    return coded


def _fill_masters(
    attachment: Attachment, placed: _Placed, coded: list[Tensor], moved: list[masters.Moved]
) -> None:
    pieces, shared = attachment.pieces, placed.shared
    managed = sum(unit_bytes([t for leaf in unit for t in leaf.tensors()]) for unit in placed.units)
    pieces.budget.reserve_rings(managed)
    coder = coder_for(coded, placed.budget.ram_budget, placed.host_room)
    pieces.share_with(shared)
    in_memory = admission.build_masters(
        pieces, placed.units, moved, placed.loading, coder, shared, placed.disk
    )
    if in_memory is not None:
        attachment.keep_in_memory(in_memory)
    pieces.budget.leave_headroom(pieces.in_order())
    if shared is not None:
        shared.seal(pieces.shared())


def _lend(attachment: Attachment, placed: _Placed, staging: int) -> None:
    """Lend the arena, and what coded weights pass through."""
    arena = attachment.arena
    arena.floor_bytes = placed.floor
    attachment.take_budget(placed.asked)
    capacity = _capacity(attachment.state, placed, staging)
    # Of "auto" the steps tell how much more there is.
    arena.lend(placed.floor if placed.budget.vram_budget == AUTO else capacity)
    if attachment.pieces.coded:
        arena.lend_staging(staging)


# ---- watch: what follows the model while it is attached ----


def _watch(manager: MemoryManager, placed: _Placed, order: OrderFile | None) -> None:
    module, attachment = manager.module, manager.attachment
    note_moved(module.parameters())
    other_libraries.bring_together()
    manager.structure.watch()
    logger.info("attached %r; %d parameters stay resident", manager, len(manager.resident))
    _warn_of_unknown_formats(module, attachment.name)
    _warn_of_residents(manager, placed.kept)
    if order is not None:
        attachment.order = order
        order.tell(attachment)
    heartbeat.start()


def _home_of(units: Iterable[Unit]) -> torch.device:
    """Return where the weights are before they move: the host, where that is no one device."""
    devices = {tensor.device for unit in units for leaf in unit for tensor in leaf.tensors()}
    return (
        devices.pop() if len(devices) == 1 and not {d.type for d in devices} & {"meta"} else _HOST
    )


def _warn_of_unknown_formats(module: nn.Module, name: str) -> None:
    """Say which quantised weights stay on the device because nothing is known of their class."""
    found: dict[str, int] = {}
    for _, inner, _, parameter in unmanaged_parameters(module):
        what = unknown_format(inner, parameter)
        if what:
            found[what] = found.get(what, 0) + stored_bytes(parameter)
    if found:
        logger.warning(
            "%s: quantised weights of no known format stay on the device: %s.",
            name,
            "; ".join(f"{what}, {format_size(nbytes)}" for what, nbytes in found.items()),
        )


def _warn_of_residents(manager: MemoryManager, kept: Kept) -> None:
    """Say what stays on the device, unasked for, where that is more than a tenth of the model."""
    resident = {name: why for name, why in manager.resident.items() if why != kept.reason}
    managed = manager.attachment.weight_bytes + kept.bytes
    left = resident_bytes(manager.module) - kept.bytes
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


def _why_none_decoded(where: torch.device, budget: Budget, short: bool = False) -> str:
    """Return why the device cannot decode: asked before anything is coded, which takes long.

    Raises
    ------
    OffloadError
        It cannot, and what was asked for needs it: all compressed, or room that is `short`.
    """
    try:
        with opened(where) as state:
            Arena(state).check_staging()
    except OffloadError as error:
        if budget.compress != AUTO or short:
            raise
        return f"the device cannot decode: {error}"
    return ""


def _least_coded(attachment: Attachment, placed: _Placed, room: int) -> list[Tensor]:
    """Return what ``compress="auto"`` codes, by what steps take; say why. `room` is the arena's."""
    units, sizes = placed.units, placed.sizes
    attachment.steps = steps = StepRecord(key_of(units, attachment.state))
    device = attachment.state.kind.model
    pace, known_by = steps.recall(device), "as planned from those before"
    if pace is None and device is not None and room < sum(sizes):
        pace, known_by = _estimated(attachment, units, device)
    ask = None if pace is None else functools.partial(ask_by_pace, capacity=room, pace=pace)
    choice = choose(units, sizes, room, placed.host_room.short, ask, placed.expected, known_by)
    attachment.compressed_because = choice.why
    logger.info("%s: compress='auto': %s", attachment.name, choice.why)
    return choice.tensors


def _estimated(
    attachment: Attachment, units: Iterable[Unit], device: Any
) -> tuple[Pace | None, str]:
    """Return about what a step takes that was never measured, and how that is known."""
    from .planning.unmeasured import estimated_pace  # much that no other attach needs

    module, state = cast("nn.Module", attachment.module()), attachment.state
    tables = [leaf.name for unit in units for leaf in unit if not leaf.kind.needs_place]
    name = "" if state.simulated else state.engine.device_name
    found = estimated_pace(module, tables, device, name)
    return (None, "") if found is None else (found[0], f"as estimated of {found[1]}")


def _capacity(state: DeviceState, placed: _Placed, staging: int) -> int:
    """Return the size of the arena.

    Raises
    ------
    OffloadError
        The budget is too small for one.
    """
    kept = placed.kept
    left = 0
    if placed.budget.vram_budget == AUTO:
        # The simulated driver does not know of torch's tensors, on whichever device they are.
        to_come = kept.bytes if state.simulated else kept.bytes_to_come(state.device)
        left = int(0.9 * max(0, state.free_bytes() - to_come - staging))
    _, total = state.engine.mem_info()
    found = place(placed.budget, placed.weights(staging), total, left)
    if found < placed.floor:
        _refuse_budget(placed, staging, total, left)
    return found


def _refuse_budget(placed: _Placed, staging: int, total: int, left: int) -> NoReturn:
    budget, kept, sizes, floor = placed.budget.vram_budget, placed.kept, placed.sizes, placed.floor
    is_auto = budget is None or budget == AUTO
    given = left
    if budget is not None and budget != AUTO:
        given = parse_size(budget, total=total, name="vram_budget")
    room = given if is_auto else max(0, given - kept.bytes - staging)
    large = [unit for unit, size in zip(placed.units, sizes, strict=True) if 2 * size > room]
    what, needed = "two of the largest units", floor
    if floor > 2 * max(sizes):
        what += ", and what stays lent around them,"
    if kept.bytes and not is_auto:
        what += " and what ram_budget keeps on the device"
        needed += kept.bytes
    if staging and not is_auto:
        what += " and what compressed weights pass through"
        needed += staging
    names = selection.listed([leaf.name for unit in large for leaf in unit])
    remedy = "."
    if 0 < len(large) < len(sizes):
        remedy = f", or leave resident what is too large for it, with ignore_modules: {names}."
    raise OffloadError(
        f"vram_budget={budget!r} is {format_size(given)}, but {what} need {format_size(needed)}; "
        f"raise the budget to that{remedy}"
    )
