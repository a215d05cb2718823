"""A managed leaf: the named tensors of one module, on the host and in the arena.

`Masters` is what they are on the host, as the engine knows them. `Leaf` follows them when they are
replaced, and makes views of their copies in a slot of the arena.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..engine.engines import Layout
from ..engine.geometry import count_writes, is_dense, tensor_bytes
from ..errors import OffloadError
from .managed import casts_layerwise, is_managed

if TYPE_CHECKING:
    from ..engine.coded import CodedMaster
    from ..engine.engines import DeviceState
    from .autocast import StandIns
    from .gradients import Gradients
    from .traffic import Traffic

_MAX_VIEWS = 16  # addresses remembered per leaf; placement repeats in the steady state

_serials = itertools.count()

Tensors = tuple[Tensor | None, ...]
Extent = tuple[int, int] | tuple[int, int, int, int]  # see `Engine.add_unit`


class Pieces(Protocol):
    """What a layer asks of the host memory of its model's masters."""

    def coded_at(self, address: int) -> CodedMaster | None:
        """Return the coded master of the tensor that is at `address`."""

    def count_uses(self, left: Iterable[int], entered: Iterable[int]) -> None:
        """Note which masters a layer has left and which it uses from now on, by address."""


class Attachment(Protocol):
    """What a layer asks of what its model holds: see `oracle_offload.model.attachment`."""

    state: DeviceState
    model: int  # in the engine
    sequence: Tensor  # orders the operators of compiled code
    layers: list[Leaf]
    traffic: Traffic
    gradients: Gradients
    stand_ins: StandIns

    @property
    def pieces(self) -> Pieces:
        """The host memory of the masters."""

    def take_over(self, called: Leaf | None = None, lasting: bool = False) -> None:
        """Follow every layer whose masters were replaced."""

    def leave_codes(self, layers: Iterable[Leaf]) -> None:
        """Make the masters of `layers` as all others are: coded no more."""

    def let_go_if_lost(self, layer: Leaf) -> bool:
        """Make a layer an ordinary one again if its class or weights were replaced or taken."""

    def let_go_soon(self, layer: Leaf) -> None:
        """Do so now, or when the structure settles."""

    def before_saving(self, module: nn.Module) -> None:
        """Refuse what of a module's tensors is in a file that was written since."""

    def written_elsewhere(
        self, leaf: Leaf, module: nn.Module, state: Mapping[str, Any], prefix: str, assign: bool
    ) -> list[str]:
        """Return those of a module's tensors in a state dict that another rank writes, by name."""


class Structure(Protocol):
    """What a layer asks of the model that it is part of: see `oracle_offload.model.structure`."""

    changed: bool  # `settle` has something to do

    @property
    def attachment(self) -> Attachment:
        """What the model holds of its device."""

    def is_inside(self) -> bool:
        """Whether this thread computes with the model."""

    def settle(self) -> None:
        """Bring modules that were added since to the device."""

    def settle_soon(self) -> None:
        """Settle before the next call of any part of the model."""


class Masters:
    """The named tensors of one module, as they are on the host at one moment.

    Nothing in it changes: a master that is replaced makes another one.

    Parameters
    ----------
    kind : Leaf, or a type of it
        Whose names they have, in the order that the engine knows them.
    tensors : dict
        What is there under these names; None, or no entry, where there is nothing.
    """

    def __init__(self, kind: Leaf | type[Leaf], tensors: Any) -> None:
        names = kind.names
        self.serial = next(_serials)  # of no other
        self._noted = [
            (name, None, 0, (), 0, None)
            if (tensor := tensors.get(name)) is None
            else (
                name,
                tensor,
                tensor.data_ptr(),
                tensor.stride(),
                tensor.numel(),
                tensor.dtype,
            )
            for name in names
        ]
        self.none = (None,) * len(names)
        self.needs_of_input = (True, *(False for _ in names))  # where no tensor is trained
        self.tensors: Tensors = tuple([row[1] for row in self._noted])  # None where nothing is
        noted: list[Any] = [row for row in self._noted if row[1] is not None]
        self.present: tuple[Tensor, ...] = tuple([row[1] for row in noted])
        self.layout = [
            None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride())
            for tensor in self.tensors
        ]
        self.read = [row[1] for row in noted if row[0] in kind.backward_reads]
        self.addresses: dict[str, int] = {row[0]: row[2] for row in noted}
        self._storages = {
            name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in self.named()
        }

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that are there, with their names."""
        return [(row[0], row[1]) for row in self._noted if row[1] is not None]

    def are(self, tensors: Any) -> bool:
        """Whether these are the tensors that are there now, with the same addresses and layouts."""
        for name, tensor, address, stride, numel, dtype in self._noted:
            now = tensors.get(name)
            if now is not tensor:
                return False
            if now is not None and (
                now.data_ptr() != address
                or now.stride() != stride
                or now.numel() != numel  # of dense masters: with the strides, the shape
                or now.dtype is not dtype
            ):
                return False
        return True

    def extents(self) -> list[tuple[int, int]]:
        """Return ``(host address, bytes)`` of each tensor."""
        sizes = map(tensor_bytes, self.present)
        return list(zip(self.addresses.values(), sizes, strict=True))

    def replaced(self, before: Masters) -> Iterator[tuple[str, tuple[StorageWeakRef, bool]]]:
        """Yield the names whose memory is another than `before`.

        With each the memory that was replaced, and whether by that of another Parameter.
        """
        for now, then in zip(self._noted, before._noted, strict=True):
            if now[1] is not None and then[1] is not None and now[2] != then[2]:
                yield now[0], (before._storages[now[0]], now[1] is not then[1])

    def holds_alone(self, name: str) -> bool:
        """Whether only this object holds the tensor of `name`: no other code can bring it back."""
        (row,) = (row for row in self._noted if row[0] == name)
        # `_noted`, `tensors`, `present`, perhaps `read`, and the argument of the call below.
        own_references = 4 + any(tensor is row[1] for tensor in self.read)
        return sys.getrefcount(row[1]) <= own_references


class Leaf:
    """One managed module: its masters, its place in the engine, and its views of a slot.

    Parameters
    ----------
    module : nn.Module
        The leaf; only a weak reference to it is kept.
    name : str
        Its name within the attached model, for messages.
    structure : Structure
        Of the attached model that it is part of.
    """

    names: tuple[str, ...]  # of its tensors
    required: tuple[str, ...]  # without which it computes nothing
    backward_reads: tuple[str, ...]  # those whose values a derivative asks for
    lends_to_code: ClassVar[bool] = False  # the module's own forward computes: see `layers.any`
    around_call: ClassVar[bool] = False  # to ``module.forward``, whichever function that is now
    needs_place: ClassVar[bool] = True  # in the arena; else it is read in host memory, if locked
    has_buffers: ClassVar[bool] = False  # the module may have some, which are none of its tensors
    floating: ClassVar[bool] = True  # so are its plain Parameters, all of them
    coded: Sequence[CodedMaster] = ()  # those of its masters that the engine knows as coded
    waits: ClassVar[bool] = False  # for its model to be attached; see `aitoolkit.single_layers`
    moving = False  # `follow` is under way, in some thread
    left: Mapping[int, int] = {}  # a master's old address by its new one, since it is not coded

    def __init__(self, module: nn.Module, name: str, structure: Structure) -> None:
        self.module = weakref.ref(module)
        self.name = name
        self.structure = structure
        self.attachment = structure.attachment
        self.state: DeviceState = self.attachment.state
        self.device_type = self.state.device.type
        self.on_cpu = self.device_type == "cpu"
        self.parameters = self.places(module)
        self.member = -1
        self.unit = -1
        self.offsets: list[int] = []
        self.views: dict[int, Tensors] = {}
        # What a replaced master replaced, and whether by another Parameter.
        self.replaced: dict[str, tuple[StorageWeakRef, bool]] = {}
        self.masters = Masters(self, self.parameters)
        self.landings: dict[int, Tensor] = {}  # see `gradients.landing`

    # ---- what it is made of ----

    @classmethod
    def named_tensors(cls, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a module of this kind, by name."""
        found = {name: module._parameters.get(name) for name in cls.names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @classmethod
    def aliases(cls, module: nn.Module) -> dict[int, list[Tensor]]:
        """Return the tensors over the bytes of one of `named_tensors`, by the `id` of that one."""
        return {}

    @classmethod
    def unfit(cls, module: nn.Module) -> str:
        """Say why the module's own tensors keep it from being managed; empty where none does."""
        weight = module._parameters.get("weight")
        if weight is None:
            return "its weight is computed (parametrised), not a parameter"
        for key, tensor in module._parameters.items():
            if tensor is None:
                continue
            if key not in cls.names:
                return f"it has another parameter, '{key}'"
            if why := unfit_tensor(key, tensor):
                return why
        if module._parameters.get("bias") is None and getattr(module, "bias", None) is not None:
            return "its bias is computed, not a parameter"
        return ""

    @classmethod
    def stands_below(cls, module_class: Any) -> Any:
        """Return the class that computes where the forward of `module_class` asks ``super()`` to.

        None: the layer computes in the place of the whole forward.
        """
        return None

    @classmethod
    def prepare(cls, module: nn.Module) -> None:
        """Make the tensors of a module its own, before they become masters."""

    def places(self, module: nn.Module) -> Any:
        """Return an object whose `get` returns the tensor that is under a name now."""
        return module._parameters

    def modules(self) -> list[nn.Module]:
        """Return the modules whose class is swapped for this leaf, as far as they are there."""
        module = self.module()
        return [] if module is None else [module]

    def name_of(self, module: nn.Module, key: str) -> str | None:
        """Return the name of the leaf's tensor that ``module.<key>`` is; None where it is none."""
        return key if key in self.names else None

    def read(self, module: nn.Module, key: str) -> Tensor | None:
        """Return what ``module.<key>`` is; None where that is what the module itself has there."""
        return None

    def traced_read(self, module: nn.Module, key: str) -> Tensor | None:
        """`read`, in compiled code."""
        return None

    def placed_again(self, value: Any) -> Any:
        """Return what is to be put under a name, where code assigns `value` that it has read."""
        return value

    def keys_of(self, module: nn.Module) -> set[str]:
        """Return the keys of those Parameters of `module` that are the leaf's."""
        return set(self.names)

    def is_lending(self) -> bool:
        """Whether device tensors are in the places of the masters now."""
        return False

    # ---- masters ----

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are there, in the order of their names."""
        return list(self.masters.present)

    def extents(self) -> list[tuple[int, int]]:
        """Return ``(host address, bytes)`` of each tensor."""
        return self.masters.extents()

    def told(self, masters: Masters) -> list[Extent]:
        """Return the extents of `masters` for the engine, of their codes where they are coded.

        The coded ones are in `coded` from then on.
        """
        found: list[Extent] = []
        coded: list[CodedMaster] = []
        for address, nbytes in masters.extents():
            known = self.attachment.pieces.coded_at(address)
            if known is None or known.tensor_bytes != nbytes or known.was_written():
                found.append((address, nbytes))
            else:
                found.append(known.extent)
                coded.append(known)
        self.coded = tuple(coded)
        return found

    def link_bytes(self) -> tuple[int, int]:
        """Return the bytes of the tensors: as they are, and as they travel."""
        weights = sum(nbytes for _, nbytes in self.extents())
        saved = sum(coded.tensor_bytes - coded.nbytes for coded in self.coded)
        return weights, weights - saved

    def has_stale_codes(self) -> bool:
        """Whether a tensor is trained, or was written, since its coded master was made."""
        return any(tensor.requires_grad for tensor in self.masters.present) or any(
            coded.was_written() for coded in self.coded
        )

    def was_coded_written(self, masters: Masters, names: Sequence[str]) -> bool:
        """Whether a tensor of these names was written, of which the engine still has the codes."""
        if not self.coded:
            return False
        starts = {masters.addresses[name] for name in names if name in masters.addresses}
        return any(coded.start in starts and coded.was_written() for coded in self.coded)

    def has_only_moved(self, then: int, now: int) -> bool:
        """Whether what is at `now` is the master that was at `then`, or that one's copy."""
        return now == then or then == self.left.get(now)

    def stamp(self) -> int:
        """Return the masters' `version_of`."""
        return version_of(self.masters.present)

    def is_current(self) -> bool:
        """Whether the masters are those that the engine knows."""
        return self.masters.are(self.parameters)

    def has_moved(self) -> bool:
        """Whether the masters are not what the engine believes, or the module is gone."""
        return self.module() is None or not self.is_current()

    def has_plain_masters(self) -> bool:
        """Whether what is in the parameters' places now can be managed."""
        for name in self.names:
            tensor = self.parameters.get(name)
            plain = is_plain_master(tensor, self.floating)
            if not (plain or (tensor is None and not self._is_missing(name))):
                return False
        return True

    def _is_missing(self, name: str) -> bool:
        """Whether a tensor that is no Parameter (any more) is needed, or computed since."""
        return name in self.required or getattr(self.module(), name, None) is not None

    def forget_masters(self) -> None:
        """Let go of the tensors, so that their memory can go; they are current no more."""
        self.masters = Masters(self, dict.fromkeys(self.names, torch.empty(0, device="cpu")))
        self.landings = {}
        self.parameters = {}

    def replaced_for_good(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield masters whose predecessor is freed, and whether other code holds their memory too.

        Where other code still holds the predecessor, a swap for a while is likely (weights of an
        EMA), and the new memory is left to the code that will take it back.
        """
        for name, tensor in self.masters.named():
            before, reassigned = self.replaced.get(name, (None, False))
            if before is not None and before.expired():
                yield tensor, is_memory_held_elsewhere(tensor, reassigned)

    def why_lost(self) -> str:
        """Say why the module is no leaf of ours any more; empty where it is, or may be again.

        A Parameter of another kind (quantised) is to stay if only this object holds the one from
        before: then no other code can bring that back.
        """
        module = self.module()
        if module is None:
            return "it was deleted"
        if not is_managed(module):
            return f"its class was replaced after attach, by {type(module).__name__}"
        if not self.lends_to_code and casts_layerwise(module):
            return "layerwise casting replaces its weight around each call"
        for name in dict.fromkeys((*self.required, *self.names)):
            now = self.parameters.get(name)
            if now is None and self._is_missing(name):
                return f"its {name} was taken away after attach, or is computed since"
            if (
                name in self.required
                and isinstance(now, nn.Parameter)
                and not is_plain_master(now, self.floating)
                and self.masters.holds_alone(name)
            ):
                kind = type(now).__name__
                return f"its {name} was replaced after attach, by a {kind} of {now.dtype}"
        return ""

    # ---- following masters that were replaced ----

    def adopt(self, *, lasting: bool = False) -> bool:
        """Follow ``p.data = t``, a swapped Parameter or a changed layout to the new memory.

        The old master is left alone: code may hold it. False where what is there now cannot be
        managed (a computed weight, another device, a tensor subclass); where that is to stay, the
        leaf is let go.

        Parameters
        ----------
        lasting : bool
            The new memory is known to stay, and no other code uses it: it becomes locked memory.
            Else `Attachment.take_over` decides.
        """
        if not self.has_plain_masters():
            if self.attachment.let_go_if_lost(self):
                self.structure.settle()
            return False
        with self.state.lock:
            if not self.is_current():  # else another thread was first
                self.follow()
                self.attachment.take_over(self, lasting)
        return True

    def follow(self) -> None:
        """Tell the engine where plain masters are now.

        The engine knows the new place before this object does. What another thread takes in
        between, a loan gives back unread. Where the engine refuses, it goes on copying from where
        it did, and the next call sees the change again.
        """
        with self.state.lock:
            before, now = self.masters, Masters(self, self.parameters)
            coded = self.coded
            self.moving = True
            try:
                with torch.inference_mode(False):
                    unit, offsets = self.state.engine.move_member(self.member, self.told(now))
                self.masters = now
                self.landings = {}
                self.replaced.update(now.replaced(before))
                self.placed(unit, self.member, offsets)
                self.attachment.pieces.count_uses(before.addresses.values(), now.addresses.values())
            except OffloadError:
                self.coded = coded  # of which the engine knows still
                raise
            finally:
                self.moving = False

    def placed(self, unit: int, member: int, offsets: list[int]) -> None:
        """Take the engine's answer to where the leaf's unit is."""
        self.state.forget_member(self.unit, self.member)
        self.unit, self.member, self.offsets = unit, member, offsets
        self.views.clear()
        Layout.version += 1
        self.state.add_member(unit, member, self.stamp)

    def unplaced(self) -> None:
        """Be a leaf no more: the engine does not have it."""
        self.member = -1
        self.views.clear()

    def refuse_detached(self) -> NoReturn:
        """Say that the leaf was detached since forward."""
        raise OffloadError(
            f"managed layer '{self.name}' was detached between forward and backward; run backward "
            "first, then detach."
        )

    def view_at(self, address: int) -> Tensors:
        """Return the tensors as they are in the slot at `address`; they never require grad.

        Autocast and autograd know tensors by identity, so a view that required grad could be cached
        beyond its stay.
        """
        storage, base = self.state.storage_at(address)
        offsets = iter(self.offsets)
        views: list[Tensor | None] = []
        # A selective checkpoint counts the operators that it sees; these are none of the module's.
        with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.no_grad():
            for layout in self.masters.layout:
                if layout is None:
                    views.append(None)
                    continue
                dtype, shape, stride = layout
                start, rest = divmod(address + next(offsets) - base, dtype.itemsize)
                if rest:
                    raise OffloadError(
                        f"slot at {address:#x} of layer '{self.name}' is not aligned for {dtype}"
                    )
                view = torch.empty(0, dtype=dtype, device=self.state.device)
                views.append(view.set_(storage, start, shape, stride))
        if len(self.views) >= _MAX_VIEWS:
            self.views.clear()
        return self.views.setdefault(address, tuple(views))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a managed module is an ordinary one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def version_of(tensors: Sequence[Tensor]) -> int:
    """Return a number that changes whenever torch knows of a write to one of `tensors`.

    A version only ever grows, so their sum tells of a write to any.
    """
    version = 0
    try:
        for tensor in tensors:
            version += tensor._version
    except RuntimeError:
        return sum(map(count_writes, tensors))
    return version


def unfit_tensor(
    key: str, tensor: Tensor, floating: bool = True, plain: type[Tensor] = nn.Parameter
) -> str:
    """Say why a tensor, on whichever device, cannot become a master; empty where it can.

    `floating`: whether it has to be of a floating dtype. `plain`: of which class it has to be.
    """
    if type(tensor) is not plain or tensor.layout is not torch.strided:
        return f"'{key}' is a {type(tensor).__name__}, not a plain parameter"
    if floating and not tensor.is_floating_point():
        return f"'{key}' is {tensor.dtype}"
    if tensor.numel() == 0:
        return f"'{key}' is empty"
    if not is_dense(tensor):
        return f"'{key}' has gaps or overlaps in memory (strides {tensor.stride()})"
    return ""


def is_plain_master(tensor: Any, floating: bool = True) -> bool:
    """Whether `tensor` can be a host master: a dense, plain Parameter in CPU memory.

    `floating`: whether it has to be of a floating dtype.
    A tensor that is no Parameter replaces one for a while only (``functional_call``).
    """
    return (
        type(tensor) is nn.Parameter
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and (tensor.is_floating_point() or not floating)
        and tensor.is_leaf
        and tensor.numel() > 0
        and is_dense(tensor)
    )


def is_memory_held_elsewhere(tensor: Tensor, reassigned: bool) -> bool:
    """Whether anything but this one tensor may see its memory, so that it has to stay there.

    Parameters
    ----------
    tensor : Tensor
        A master that was replaced.
    reassigned : bool
        Whether another Parameter was put in the place of the first, as loading with
        ``assign=True`` does; else ``.data`` was re-pointed. Torch does not count holders outside of
        torch, so memory that torch did not allocate is taken over only from a Parameter.
    """
    storage = tensor.untyped_storage()
    own_references = 2  # of the tensor, and of `storage` itself
    return (
        storage.is_shared()
        or torch._C._storage_Use_Count(storage._cdata) > own_references
        or not (reassigned or storage.resizable())
    )
