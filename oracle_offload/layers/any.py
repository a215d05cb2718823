"""The loan for every other module that owns large tensors, whatever it computes with them.

While the module's forward runs, device tensors replace its Parameters. The loan lasts as long as
they do: the slot is free again when the last alias of them is gone. Reference counts say when that
is, not hooks. What autograd saves of them is replaced by a note of which bytes they were; backward
takes a slot again for them. So this code need know nothing about the operators.

A loan begins with `AnyLayer.lend_to`, around the forward of whatever module computes with the
tensors. That is mostly the one that owns them. It is a parent where that one has no forward
(``nn.ParameterList``) or where the parent uses the tensors by name (``nn.MultiheadAttention``), and
peft's wrapper where a parametrisation is put on them for each forward.
"""

from __future__ import annotations

import collections
import functools
import operator
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import starmap
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function, profiler

from .._core import BACKWARD, Taken
from ..engine.exemption import exempt
from ..engine.geometry import count_writes, is_dense, tensor_bytes
from ..engine.locks import Lock
from ..errors import OffloadError
from .autocast import saving
from .compiled import Whole
from .flatten import is_wrapper, value_at
from .gradients import landing, note_backward, note_trainable
from .handle import Handle, Readable, make_put_off
from .leaf import Masters, Structure, Tensors, version_of
from .loan import forward_kind, once_differentiable
from .managed import HANDLE
from .swap import base_class, swap_in, weight_lists

_graph_task = torch._C._current_graph_task_id
_autograd: Any = torch._C._autograd
_top_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", None)  # from torch 2.8 on
_hooks_allowed = _autograd._saved_tensors_hooks_is_enabled
_push_hooks = _autograd._push_saved_tensors_default_hooks
_pop_hooks = _autograd._pop_saved_tensors_default_hooks
_from_dlpack = torch._C._from_dlpack
_PATIENCE_S = 60.0  # that a call waits for another thread's of the same module


class Places(Mapping[str, Any]):
    """Where the tensors of a module and its children are looked up, by dotted name.

    While device tensors replace the masters, lookups still return the masters.

    Parameters
    ----------
    module : nn.Module
        That the names begin at.
    names : sequence of str
        Of the Parameters, and of tensors in objects that a module keeps (`formats.held_tensors`).
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._rows: dict[str, tuple[dict[str, Any], str]] = {}
        self.owners: dict[int, tuple[weakref.ref[nn.Module], set[str]]] = {}
        for name in names:
            path, _, key = name.rpartition(".")
            owner = value_at(module, path)
            if isinstance(owner, nn.Module):
                self._rows[name] = cast("dict[str, Any]", owner._parameters), key
                self.owners.setdefault(id(owner), (weakref.ref(owner), set()))[1].add(key)
            else:
                self._rows[name] = vars(owner), key
        self.lent: dict[str, tuple[Any, Any]] = {}  # by name: what replaces it, and the master

    def __getitem__(self, name: str) -> Any:
        found = self.lent.get(name)
        if found is not None:
            return found[1]
        parameters, key = self._rows[name]
        return parameters[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def name_of(self, module: nn.Module, key: str) -> str | None:
        """Return the name of the tensor that ``module.<key>`` is; None where it is none."""
        own: Any = module._parameters
        return next((n for n, (where, k) in self._rows.items() if k == key and where is own), None)

    def __len__(self) -> int:
        return len(self._rows)

    def lending(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        """Put `tensors` in the places of these names for a ``with`` block.

        After an interrupt either all of them are in place or none.
        """
        return Taken(self._putting(tensors), self.restore)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Put `tensors` in the places of these names; `restore` undoes it."""
        self._putting(tensors)()

    def _putting(self, tensors: Mapping[str, Tensor]) -> Callable[[], object]:
        rows: list[tuple[dict[str, Any], str, Any]] = []
        lent: dict[str, tuple[Any, Any]] = {}
        for name, tensor in tensors.items():
            parameters, key = self._rows[name]
            lent[name] = tensor, parameters.get(key)
            rows.append((parameters, key, tensor))
        return self._exchanging(rows, lent)

    def restore(self) -> None:
        """Put back what was there, except where other code has put something else since then."""
        rows: list[tuple[dict[str, Any], str, Any]] = []
        for name, (tensor, master) in self.lent.items():
            parameters, key = self._rows[name]
            if parameters.get(key) is tensor:
                rows.append((parameters, key, master))
        self._exchanging(rows, {})()

    def _exchanging(
        self, rows: list[tuple[dict[str, Any], str, Any]], lent: dict[str, tuple[Any, Any]]
    ) -> Callable[[], object]:
        """Return what sets the items of `rows`, and `lent`, in one call of C."""
        for reference, _ in self.owners.values():
            if isinstance(owner := reference(), nn.RNNBase):
                own: Any = owner._parameters
                changed = {key: value for parameters, key, value in rows if parameters is own}
                lists = weight_lists(owner, {**own, **changed})
                rows += [(owner.__dict__, name, found) for name, found in lists.items()]
        rows.append((vars(self), "lent", lent))
        return functools.partial(collections.deque, starmap(operator.setitem, rows), 0)


class AnyLayer(Whole, Readable):
    """A leaf whose tensors are lent to code that computes with them as it likes.

    Parameters
    ----------
    module : nn.Module
        Whose forward computes; the names of the tensors begin there.
    name : str
        Its name within the attached model, for messages.
    structure : Structure
        Of the attached model that it is part of.
    """

    lends_to_code = True
    floating = False  # the code knows what its numbers mean

    parameters: Places

    def __init__(self, module: nn.Module, name: str, structure: Structure) -> None:
        super().__init__(module, name, structure)
        self._turn = Lock("turn")  # one thread at a time: the places are the module's
        kind = self.state.kind
        self._where = kind.dlpack_type, self.state.ordinal

    @classmethod
    def named_tensors(cls, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a module of this kind, by name."""
        return dict(Places(module, cls.names))

    def places(self, module: nn.Module) -> Places:
        """Return where the leaf's tensors are looked up, by name."""
        return Places(module, self.names)

    def modules(self) -> list[nn.Module]:
        """Return the module whose forward computes, those that own tensors, and wrappers."""
        references = [self.module, *(row[0] for row in self.parameters.owners.values())]
        found = (reference() for reference in [*references, *self.wrappers])
        return list({id(module): module for module in found if module is not None}.values())

    def keys_of(self, module: nn.Module) -> set[str]:
        """Return the keys of those Parameters of `module` that are lent."""
        return self.parameters.owners.get(id(module), (None, set()))[1]

    def name_of(self, module: nn.Module, key: str) -> str | None:
        """Return the name of the leaf's tensor that ``module.<key>`` is; None where it is none."""
        return self.parameters.name_of(module, key)

    def forget_masters(self) -> None:
        """Let go of the tensors, so that their memory can go; they are current no more."""
        super().forget_masters()
        self.masters = Masters(self, dict.fromkeys(self.names, torch.empty(0, device="cpu")))
        self.parameters = Places(nn.Module(), ())

    def is_lending(self) -> bool:
        """Whether device tensors are in the places of the masters now."""
        return bool(self.parameters.lent)

    def is_lending_here(self) -> bool:
        """Whether they are there for a call of this thread."""
        return self._turn.is_held() and self.is_lending()

    # ---- a forward ----

    def __call__(self, x: Tensor) -> Any:
        """Compute for code that keeps the forward which the module had as another kind of leaf."""
        module: Any = self.module()
        return self.lend_to(functools.partial(base_class(module).forward, module, x))

    def lend_to(self, call: Callable[[], Any]) -> Any:
        """Return ``call()``, with device tensors in the masters' places while it runs.

        Where this thread is inside such a call already, the tensors are in place.

        Raises
        ------
        OffloadError
            Another thread has been computing with the same module for a minute; a transform of
            torch.func is active; `call` wrote to a tensor, which would be lost.
        NoRoomError
            The arena has no room for the unit; it is a `torch.OutOfMemoryError`.
        """
        if self._turn.is_held():
            return call()
        with self._turn.within(_PATIENCE_S) as taken:
            if not taken:
                raise OffloadError(
                    f"another thread has been inside the forward of '{self.name}' for "
                    f"{_PATIENCE_S:.0f} seconds; its weights are lent to one thread at a time."
                )
            if profiler._is_profiler_enabled:
                with self.profiled():
                    return self._lend_to(call)
            return self._lend_to(call)

    def _lend_to(self, call: Callable[[], Any]) -> Any:
        self.look_again()
        if not (self.masters.are(self.parameters) or self.adopt()):
            return self._with_foreign(call)
        state, task = self.state, _graph_task()
        records = torch.is_grad_enabled()
        if any(tensor.requires_grad for tensor in self.masters.present):
            note_trainable(state, task)
        if records and state.turned and task == -1:
            state.begin_forward()
        slot: Tensor | None = None
        lent: dict[str, Tensor] = {}
        try:
            slot = self.borrow(forward_kind(task, records), task)
            lent.update(self._tensors_in(slot))
            before = [(_writes_to(tensor), tensor.grad_fn) for tensor in lent.values()]
            notes = _Notes(self, slot) if records and _hooks_allowed() else None
            with self.parameters.lending(lent):
                try:
                    if notes is not None:
                        with saving(notes.pack, notes.unpack):
                            result = call()
                    else:
                        result = call()
                finally:
                    # A parametrisation that comes and goes sets each to itself: no write of bytes.
                    if not self.wrappers:
                        self._take_over(lent, before, notes)
        finally:
            slot = None
            lent.clear()  # a traceback may keep this frame
        return result

    def pause(self) -> dict[str, Tensor]:
        """Put the masters back while another micro-batch computes in this thread; see `go_on`."""
        lent = {name: tensor for name, (tensor, _) in self.parameters.lent.items()}
        self.parameters.restore()
        self._turn.release()
        return lent

    def go_on(self, lent: Mapping[str, Tensor]) -> None:
        """Put what `pause` returned in the masters' places again."""
        self._turn.acquire()
        self.parameters.put(lent)

    def _take_over(
        self, lent: dict[str, Tensor], before: Sequence[tuple[int, Any]], notes: _Notes | None
    ) -> None:
        """Write to the masters what code has written to what it was lent."""
        written = [
            (name, tensor, node)
            for (name, tensor), (writes, node) in zip(lent.items(), before, strict=True)
            if _writes_to(tensor) != writes
        ]
        if not written:
            return
        state = self.state
        state.engine.settle()
        state.engine.refresh(self.attachment.model)
        for name, tensor, node in written:
            if tensor.grad_fn is not node:
                named = [f"{self.name}.{name}".lstrip(".")]
                raise OffloadError(
                    f"the forward of '{self.name}' writes to its {name}, and autograd records it: "
                    "that is no Parameter any more. Write under torch.no_grad(), or leave it "
                    f"resident: attach(..., ignore_modules={named})."
                )
            master = self.parameters[name]
            make_put_off(self, (self.names.index(name),))
            with exempt(), torch.inference_mode(False), torch.no_grad():
                master.copy_(self.attachment.gradients.to_host(tensor.detach().clone()))
            if notes is not None:
                notes.follow(name, tensor._version, version_of((master,)))

    def _with_foreign(self, call: Callable[[], Any]) -> Any:
        """Compute with whatever the tensors are now, brought to the compute device.

        Reached where ``functional_call`` or a hook put other tensors in the Parameters' places, or
        user code moved them.
        """
        device = self.state.device
        with exempt():
            now = {name: self.parameters.get(name) for name in self.names}
            there: dict[str, Tensor] = {
                # What is on the host is copied, on the simulated device too; a copy closes gaps.
                name: tensor.to(device, copy=tensor.device.type == "cpu" and is_dense(tensor))
                for name, tensor in now.items()
                if tensor is not None
            }
        self.attachment.traffic.note_computed(
            self.name,
            sum(tensor_bytes(t) for t in now.values() if t is not None and t.device.type == "cpu"),
        )
        with self.parameters.lending(there):
            return call()

    # ---- slots ----

    def borrow(self, kind: int, task: int) -> Tensor:
        """Return a slot with this leaf's tensors, as bytes on the device.

        It is taken until the last alias of the tensor's memory is gone. Then the use ends, on the
        stream that is torch's now.

        Parameters
        ----------
        kind, task
            See `Borrower.lend`.
        """
        state = self.state
        seconds = 0.0
        if state.simulated:
            seconds = state.time.kernel_seconds(0.0, self._bytes(), torch.uint8)
        return cast("Tensor", self.lend(kind, task, seconds, None, self._keep))

    def _bytes(self) -> int:
        """Bytes from the first tensor of the leaf to the end of the last, in the unit."""
        return self.offsets[-1] + tensor_bytes(self.masters.present[-1]) - self.offsets[0]

    def _keep(self, tensors: Tensors) -> Tensor:
        state = self.state
        with torch.inference_mode(False):
            return _from_dlpack(
                state.engine.keep(
                    self.member, state.stream(), self.offsets[0], self._bytes(), *self._where
                )
            )

    def tensor_in(
        self,
        slot: Tensor,
        at: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        stride: Sequence[int],
    ) -> Tensor:
        """Return a tensor that begins at byte `at` of a slot, and is no view."""
        with torch.inference_mode(False), torch.no_grad():
            start = at // dtype.itemsize
            empty = torch.empty(0, dtype=dtype, device=self.state.device)
            return empty.set_(slot.untyped_storage(), start, shape, stride)

    def _tensors_in(self, slot: Tensor) -> dict[str, Tensor]:
        """Return what is put in the masters' places, by name.

        These are Parameters without a gradient, and tensors that pass gradients on to the masters.
        The latter require gradients under ``no_grad`` too, as Parameters do: code that checks
        ``requires_grad`` finds the same.
        """
        lent: dict[str, Tensor] = {}
        layouts = (layout for layout in self.masters.layout if layout is not None)
        inference = torch.is_inference_mode_enabled()
        for (name, master), layout, offset in zip(
            self.masters.named(), layouts, self.offsets, strict=True
        ):
            at = offset - self.offsets[0]
            if master.requires_grad and not inference:
                with torch.enable_grad():
                    tensor = _edge(landing(self, master), self, slot, at, layout)
                tensor._is_param = True  # what isinstance(_, nn.Parameter) asks
            else:
                tensor = self.tensor_in(slot, at, *layout)
                if type(master) is not Tensor:
                    tensor = Tensor._make_subclass(Lent, tensor, master.requires_grad)
            lent[name] = tensor
        return lent

    def name_at(self, at: int) -> str:
        """Return the name of the tensor that byte `at` of a slot belongs to."""
        named = zip(self.masters.named(), self.offsets, strict=True)
        return [name for (name, _), offset in named if offset - self.offsets[0] <= at][-1]

    def take_again(self, note: _Note) -> Tensor:
        """Return, for backward, what forward saw: an alias of a slot that is taken again."""
        self.check_unchanged((note.name,), note.masters, note.version)
        self.state.turned = True
        if self.member < 0:
            self.refuse_detached()
        slot = self.borrow(BACKWARD, _graph_task())
        return self.tensor_in(slot, note.at, note.dtype, note.shape, note.stride)


@functools.cache
def any_kind(names: tuple[str, ...], around_call: bool = False) -> type[AnyLayer]:
    """Return the kind of leaf that lends the tensors of these names; see `Leaf.around_call`."""
    own = {"names": names, "required": names, "backward_reads": names, "around_call": around_call}
    return type("AnyLayer", (AnyLayer,), {"__doc__": AnyLayer.__doc__, **own})


def wrap(module: nn.Module, layer: AnyLayer) -> None:
    """Let the loan of `layer` begin with the forward of `module`, a wrapper of its own module."""
    layer.wrappers.append(weakref.ref(module))
    swap_in(module, layer)


def find_wrappers(root: nn.Module) -> Iterator[tuple[nn.Module, AnyLayer]]:
    """Yield peft's wrappers of single Parameters that are lent, which are not swapped yet.

    Such a wrapper puts a parametrisation on the Parameter for the length of each forward.
    """
    for module in root.modules():
        if not hasattr(module, "parameter_name") or HANDLE in module.__dict__:
            continue
        inner: Any = module
        while (below := inner._modules.get("base_layer")) is not None:
            inner = below
        leaf = inner.__dict__.get(HANDLE)
        if isinstance(leaf, AnyLayer) and inner is not module:
            yield module, leaf


# ---- what autograd keeps ----


class Lent(nn.Parameter):
    """A tensor in the place of a master; it notices what is written through ``.data``."""

    _data: list[Tensor] | None = None
    _pointed: int = 0

    @property
    def data(self) -> Tensor:
        """The same, unknown to autograd, which counts no writes to it."""
        found: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        self._data = [*(self._data or ()), found]
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        self._pointed, self._data = self._pointed + 1, None
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


def _writes_to(tensor: Tensor) -> int:
    """Return how often a tensor in the place of a master was written, or given other data."""
    by_data = getattr(tensor, "_data", None) or ()
    return count_writes(tensor) + sum(map(count_writes, by_data)) + getattr(tensor, "_pointed", 0)


class _Note:
    """Which bytes of a leaf's tensors autograd has saved: all that is kept of them."""

    __slots__ = (
        *("at", "dtype", "layer", "masters", "name", "shape", "stride", "version", "writes"),
        "__weakref__",
    )

    def __init__(self, layer: AnyLayer, tensor: Tensor, at: int) -> None:
        self.layer = layer
        self.at = at
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.name = layer.name_at(at)
        self.masters = layer.masters
        self.version = version_of((layer.parameters[self.name],))
        self.writes = count_writes(tensor)


class _Flat:
    """A tensor that autograd has saved and that is made of others: what is kept of each of them."""

    __slots__ = ("inner", "kind", "meta", "shape", "stride")

    def __init__(self, tensor: Any, pack: Callable[[Tensor], Any]) -> None:
        names, self.meta = tensor.__tensor_flatten__()
        self.kind, self.shape, self.stride = type(tensor), tensor.size(), tensor.stride()
        self.inner = {name: pack(getattr(tensor, name)) for name in names}

    def made_again(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        """Return a tensor of the same class, made of what `unpack` returns."""
        inner = {name: unpack(kept) for name, kept in self.inner.items()}
        made: Tensor = self.kind.__tensor_unflatten__(inner, self.meta, self.shape, self.stride)
        return made


class _Through(NamedTuple):
    """A handle of another leaf's, and how often it was written."""

    handle: Tensor
    version: int


class ChainedHooks(ABC):
    """A pair of saved-tensor hooks that knows the pair outside: torch calls the innermost alone.

    Made where the pair outside is the innermost still.
    """

    def __init__(self) -> None:
        self._outer: tuple[Any, Any] | None = (
            self._hooks_found() if _top_hooks is None else _top_hooks(True)
        )

    @abstractmethod
    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps for `tensor`."""

    @abstractmethod
    def unpack(self, kept: Any) -> Tensor:
        """Return what was packed."""

    def _hooks_found(self) -> tuple[Any, Any] | None:
        """Return what packs and unpacks by the pair outside, if any, where torch does not name it.

        A function that saves a tensor has it packed by them; a saved tensor that has been packed
        takes no hooks of its own.
        """
        kept = _kept_by_hooks(
            torch.empty(0, device="cpu")
        )  # it has to live as long as what its node has saved
        saved = kept.grad_fn._raw_saved_tensors[0]
        try:
            saved.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
        except RuntimeError:
            return self._pack_outside, lambda kept: kept.grad_fn.saved_tensors[0]
        return None

    def _pack_outside(self, tensor: Tensor) -> Any:
        # These are the innermost now.
        with Taken(_pop_hooks, functools.partial(_push_hooks, self.pack, self.unpack)):
            return _kept_by_hooks(tensor)


class _Notes(ChainedHooks):
    """The saved-tensor hooks of one forward: what aliases the slot becomes a note.

    torch calls the innermost pair of hooks alone. So everything else goes on to the pair outside,
    a checkpoint's perhaps, and where there is none it stays what it is.

    Parameters
    ----------
    layer : AnyLayer
        That lends.
    slot : Tensor
        The bytes that it lends.
    """

    def __init__(self, layer: AnyLayer, slot: Tensor) -> None:
        self._layer = layer
        self._start = slot.data_ptr()
        self._nbytes = slot.numel()
        self._sizes = {size for tensor in layer.masters.present for size in _sizes_made_of(tensor)}
        self._derived: dict[int, int] = {}  # bytes made of the weights, by address
        self._stays = False
        self._made: list[weakref.ref[_Note]] = []
        super().__init__()
        # Whether what is packed stays what it is, however many such pairs it goes through, and
        # waits for a backward that has not begun.
        outer: Any = None if self._outer is None else getattr(self._outer[0], "__self__", None)
        self._stays = _graph_task() == -1 and (
            self._outer is None or (isinstance(outer, _Notes) and outer._stays)
        )

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps for `tensor`."""
        if isinstance(tensor, Handle):  # which keeps no bytes
            return _Through(tensor, count_writes(tensor))
        address = _address(tensor)
        at = address - self._start
        if 0 <= at < self._nbytes:
            note = _Note(self._layer, tensor, at)
            self._made.append(weakref.ref(note))
            return note
        if address == 0 and is_wrapper(tensor) and self._is_made_of_slot(tensor):
            return _Flat(tensor, self.pack)
        if self._stays and tensor.numel() in self._sizes:
            self._derived[address] = tensor_bytes(tensor)
            self._layer.attachment.traffic.note_derived(
                self._layer.name, sum(self._derived.values())
            )
        if self._outer is not None:
            return (self._outer[0](tensor),)
        return tensor, count_writes(tensor)

    def follow(self, name: str, writes: int, version: int) -> None:
        """Let backward meet what was written, where autograd has saved it since."""
        for note in (found for reference in self._made if (found := reference()) is not None):
            if note.name == name and note.writes == writes:
                note.version = version

    def _is_made_of_slot(self, tensor: Any) -> bool:
        """Whether a tensor that is made of others is made of what is lent."""
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if 0 <= _address(inner) - self._start < self._nbytes:
                return True
            if is_wrapper(inner) and self._is_made_of_slot(inner):
                return True
        return False

    def unpack(self, kept: Any) -> Tensor:
        """Return what was packed."""
        if isinstance(kept, _Note):
            return kept.layer.take_again(kept)
        if isinstance(kept, _Flat):
            return kept.made_again(self.unpack)
        if self._outer is not None and not isinstance(kept, _Through):
            unpacked: Tensor = self._outer[1](kept[0])
            return unpacked
        tensor: Tensor = kept[0]
        version = kept[1]
        if count_writes(tensor) != version:
            # torch compares no versions where there are hooks.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {list(tensor.shape)} that the forward of "
                f"'{self._layer.name}' saved is at version {tensor._version}; expected version "
                f"{version} instead."
            )
        return tensor


class _Keeping(Function):
    """Saves a tensor, and does nothing else."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.clone()

    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        raise NotImplementedError


def _kept_by_hooks(tensor: Tensor) -> Any:
    """Return a result whose node has saved a tensor by the hooks that are the innermost now."""
    with torch.enable_grad():
        return _keep(torch.empty(0, device="cpu", requires_grad=True), tensor)


_keep: Any = super(Function, _Keeping).apply


def _sizes_made_of(tensor: Tensor) -> tuple[int, ...]:
    """Return how many numbers a cast or a dequantised copy has; integers may hold two to a byte."""
    size = tensor.numel()
    packed = not tensor.is_floating_point() and tensor.element_size() == 1
    return (size, 2 * size) if packed else (size,)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # without memory of its own
        return 0


class _Edge(Function):
    """Represents a trainable master on the device: its gradient goes to the master, on the host."""

    @staticmethod
    def forward(
        ctx: Any, landing: Tensor, layer: AnyLayer, slot: Tensor, at: int, layout: Any
    ) -> Tensor:
        """Return a tensor that is no view: torch chooses operators by what a view is of."""
        ctx.layer, ctx.task = layer, _graph_task()
        return Tensor._make_subclass(Lent, layer.tensor_in(slot, at, *layout))

    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradient where the master is."""
        layer: AnyLayer = ctx.layer
        state = layer.state
        state.turned = True
        if layer.member < 0:
            layer.refuse_detached()
        note_backward(state, ctx.task)
        return grad, None, None, None, None


_edge: Any = super(Function, _Edge).apply
