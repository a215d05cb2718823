"""Managed layers: what `attach` turns ``nn.Linear`` and ``nn.Conv2d`` into.

A managed module keeps its identity, its parameters and its class name; its class becomes a cached
subclass whose ``forward`` borrows the weight from the arena. The state lies in one instance
attribute, ``_layer_memory_manager``: without it (a deep copy, a detached layer) the same forward is
the base class's.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from .. import engines
from .._core import BACKWARD, FORWARD, RECOMPUTE
from ..autocast import cast_dtype, cast_input, cast_tensors
from ..errors import NoRoomError, OffloadError, StaleWeightsError, no_room_error
from ..exemption import exempt
from ..geometry import is_dense
from . import loan

if TYPE_CHECKING:
    from ..engines import DeviceState
    from ..structure import Structure

HANDLE = "_layer_memory_manager"
_TENSORS = ("weight", "bias")
_MAX_VIEWS = 16  # addresses remembered per layer; placement repeats in the steady state
_MASK = (1 << 64) - 1

_functorch_active = torch._C._are_functorch_transforms_active
_graph_task = torch._C._current_graph_task_id


class Layer:
    """One managed module: where its masters are, and how its slot is viewed.

    Parameters
    ----------
    module : nn.Module
        The leaf; only a weak reference to it is kept.
    name : str
        Its name within the attached model, for messages.
    structure : Structure
        Of the attached model that it is part of.
    """

    base_forward: ClassVar[Callable[..., Tensor]]
    # Where code reads the weight as a value, in branches that may never be taken: file and line,
    # each with the method. See `oracle_offload.layers.trial`.
    doubtful: dict[tuple[str, int], str]
    on_device = False  # the weight lies there for good, and so do its gradients
    moving = False  # `follow` is under way, in some thread

    def __init__(self, module: nn.Module, name: str, structure: Structure) -> None:
        self.doubtful = {}
        self.module = weakref.ref(module)
        self.name = name
        self.structure = structure
        self.attachment = structure.attachment
        self.state: DeviceState = self.attachment.state
        self.parameters: dict[str, Any] = cast("dict[str, Any]", module._parameters)
        self.weight: Tensor = module._parameters["weight"]  # type: ignore[assignment]
        self.bias: Tensor | None = module._parameters.get("bias")
        self.has_bias = self.bias is not None
        self.member = -1
        self.unit = -1
        self.offsets: list[int] = []
        self.views: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.device_type = self.state.device.type
        self.on_cpu = self.device_type == "cpu"
        # What a replaced master replaced, and whether by another Parameter.
        self.replaced: dict[str, tuple[StorageWeakRef, bool]] = {}
        self.note_masters()

    # ---- masters ----

    def tensors(self) -> list[Tensor]:
        """Return the layer's tensors in member order: weight, then bias if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def note_masters(self) -> None:
        """Remember addresses and geometry of the masters as they are now."""
        weight, bias = self.weight, self.bias
        self.weight_ptr = weight.data_ptr()
        self.bias_ptr = 0 if bias is None else bias.data_ptr()
        self.weight_numel = weight.numel()
        self.bias_numel = 0 if bias is None else bias.numel()
        self.layout = [(t.dtype, t.shape, t.stride()) for t in self.tensors()]
        self.storages = [StorageWeakRef(t.untyped_storage()) for t in self.tensors()]
        if weight.dim() == 2:
            self.row_major = weight.stride() == (weight.shape[1], 1)

    def extents(self) -> list[tuple[int, int]]:
        """Return ``(host address, bytes)`` of each tensor."""
        return [(t.data_ptr(), t.numel() * t.element_size()) for t in self.tensors()]

    def placed(self, unit: int, member: int, offsets: list[int]) -> None:
        """Take the engine's answer to where the layer's unit is."""
        self.state.forget_layer(self)
        self.unit, self.member, self.offsets = unit, member, offsets
        self.views.clear()
        engines.Layout.version += 1
        self.state.units.setdefault(unit, []).append(self)

    def stamp(self) -> int:
        """Return a number that changes whenever torch knows of a write to the masters."""
        weight, bias = self.weight, self.bias
        version = 0 if weight.is_inference() else weight._version
        if bias is not None and not bias.is_inference():
            version += bias._version << 32
        return version & _MASK

    def weight_state(self, weight: Tensor) -> tuple[int, int]:
        """Return ``(version, address)`` of a weight."""
        return (0 if weight.is_inference() else weight._version), weight.data_ptr()

    def check_attached(self) -> None:
        """Raise where the layer was detached since forward."""
        if self.member < 0:
            raise OffloadError(
                f"managed layer '{self.name}' was detached between forward and backward; run "
                "backward first, then detach."
            )

    def adopt(self, *, lasting: bool = False) -> bool:
        """Follow ``p.data = t``, a swapped Parameter or a changed layout to the new memory.

        The old master is left alone: somebody may hold it. False where what is there now cannot be
        managed (a computed weight, another device, a tensor subclass); where that is to stay, the
        layer is let go.

        Parameters
        ----------
        lasting : bool
            The new memory is known to be nobody else's, and to stay: it becomes locked memory. Else
            `Attachment.take_over` decides.
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

    def has_plain_masters(self) -> bool:
        """Whether what lies in the parameters' places now can be managed."""
        weight, bias = self.parameters.get("weight"), self.parameters.get("bias")
        return is_plain_master(weight) and (bias is None or is_plain_master(bias))

    def has_moved(self) -> bool:
        """Whether a master lies elsewhere than the engine believes, or the module is gone."""
        weight, bias = self.parameters.get("weight"), self.parameters.get("bias")
        return (
            self.module() is None
            or weight is not self.weight
            or bias is not self.bias
            or weight.data_ptr() != self.weight_ptr
            or (bias is not None and bias.data_ptr() != self.bias_ptr)
        )

    def follow(self) -> None:
        """Tell the engine of plain masters where they lie now.

        The engine knows the new place before this object does. What another thread borrows in
        between, `lend` gives back unread.
        """
        with self.state.lock:
            before = self.weight, self.bias
            places = self.addresses()
            self.moving = True
            self.weight, self.bias = self.parameters["weight"], self.parameters.get("bias")
            try:
                with torch.inference_mode(False):
                    unit, offsets = self.state.engine.move_member(self.member, self.extents())
                self.has_bias = self.bias is not None
                for name, now, then, place, storage in zip(
                    _TENSORS, self.tensors(), before, places, self.storages, strict=False
                ):
                    if now.data_ptr() != place:
                        self.replaced[name] = storage, now is not then
                self.note_masters()
                self.placed(unit, self.member, offsets)
                self.attachment.pieces.count_uses(places, self.addresses())
            except BaseException:
                # The engine copies from where it did: the next call must see the change again.
                self.weight, self.bias = before
                raise
            finally:
                self.moving = False

    def addresses(self) -> list[int]:
        """Return where the engine believes the masters."""
        return [self.weight_ptr] if self.bias is None else [self.weight_ptr, self.bias_ptr]

    def replaced_for_good(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield masters that replaced one which nobody holds, and whether something holds them too.

        Where somebody holds the one from before, a swap for a while is likely (weights of an EMA),
        and the new memory is left to whoever will take it back.
        """
        for name, tensor in zip(_TENSORS, self.tensors(), strict=False):
            before, reassigned = self.replaced.get(name, (None, False))
            if before is not None and before.expired():
                yield tensor, is_held_elsewhere(tensor, reassigned)

    def why_lost(self) -> str:
        """Say why the module is no layer of ours any more; empty where it is, or may be again.

        A Parameter of another kind (quantised) is to stay if nobody but this object holds the one
        from before, and so could bring it back.
        """
        module = self.module()
        weight = self.parameters.get("weight")
        own_references = 2  # the attribute's, and the argument's of the call below
        if module is None:
            return "it was deleted"
        if not is_managed(module):
            return f"its class was replaced after attach, by {type(module).__name__}"
        if weight is None:
            return "its weight was taken away after attach, or is computed since"
        if (
            weight is not self.weight
            and isinstance(weight, nn.Parameter)
            and not is_plain_master(weight)
            and sys.getrefcount(self.weight) <= own_references
        ):
            kind = type(weight).__name__
            return f"its weight was replaced after attach, by a {kind} of {weight.dtype}"
        return ""

    # ---- slots ----

    def lend(
        self,
        kind: int,
        task: int,
        seconds: float,
        dtype: torch.dtype | None,
        compute: Callable[[Tensor, Tensor | None], Any],
        with_bias: bool = True,
    ) -> Any:
        """Return ``compute(weight, bias)`` of the tensors as they lie on the device.

        The whole life of a loan: what acquires also releases, whatever happens in between.

        Parameters
        ----------
        kind : int
            ``FORWARD``, ``RECOMPUTE`` or ``BACKWARD``.
        task : int
            The running graph task, -1 for none.
        seconds : float
            How long the simulated device computes.
        dtype : torch.dtype or None
            What autocast computes in; None where it is off.
        compute : callable
            Queues all work that uses the tensors, and keeps none of them.
        with_bias : bool
            Whether the bias is wanted.

        Raises
        ------
        NoRoomError
            The arena has no room for the unit; it is a `torch.OutOfMemoryError`.
        """
        state = self.state
        engine = state.engine
        stream = state.stream()
        if state.time.pending_kernel_s:
            state.time.flush(stream)
        try:
            ticket, address, fetched = engine.acquire(
                self.member, stream, self.stamp(), kind, task, seconds
            )
        except NoRoomError as error:
            raise no_room_error(f"no room for layer '{self.name}': {error}") from error
        try:
            if fetched:
                state.stamp_units(fetched)
            if not self.moving:
                w, b = self.views.get(address) or self.view_at(address)
                return compute(*(w, b) if dtype is None else cast_tensors(dtype, w, b, with_bias))
        finally:
            fetched = engine.release(ticket, stream)
            if fetched:
                state.stamp_units(fetched)
        return self._lend_after_move(kind, task, seconds, dtype, compute, with_bias)

    def _lend_after_move(self, kind: int, *rest: Any) -> Any:
        """Another thread has moved the masters since they were checked: wait, and begin anew."""
        if kind == BACKWARD:
            raise StaleWeightsError(
                f"the weight of managed layer '{self.name}' was replaced by another thread while "
                "its backward began; change weights between steps."
            )
        with self.state.lock:
            pass
        return self.lend(kind, *rest)

    def lend_without_grad(
        self, x: Tensor, dtype: torch.dtype | None, compute: Callable[..., Tensor]
    ) -> Tensor:
        """`lend` for a forward that autograd does not record."""
        task = _graph_task()
        seconds = self.forward_seconds(x) if self.state.simulated else 0.0
        return cast("Tensor", self.lend(self.forward_kind(task), task, seconds, dtype, compute))

    @staticmethod
    def forward_kind(task: int) -> int:
        """Return what a forward is to the engine: inside a graph task a checkpoint recomputes."""
        return FORWARD if task == -1 else RECOMPUTE

    def view_at(self, address: int) -> tuple[Tensor, Tensor | None]:
        """Return the layer's tensors as they lie in the slot at `address`; they never require grad.

        Autocast and autograd know tensors by identity, so a view that required grad could be cached
        beyond its stay.
        """
        storage, base = self.state.storage_at(address)
        views: list[Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            for (dtype, shape, stride), offset in zip(self.layout, self.offsets, strict=True):
                start, rest = divmod(address + offset - base, dtype.itemsize)
                if rest:
                    raise OffloadError(
                        f"slot at {address:#x} of layer '{self.name}' is not aligned for {dtype}"
                    )
                view = torch.empty(0, dtype=dtype, device=self.state.device)
                views.append(view.set_(storage, start, shape, stride))
        pair = views[0], views[1] if self.has_bias else None
        if len(self.views) >= _MAX_VIEWS:
            self.views.clear()
        self.views[address] = pair
        return pair

    # ---- the call ----

    def ready(self, x: Tensor) -> bool:
        """Check everything a call depends on; False where it must run on foreign weights."""
        if self.structure.changed:  # an adapter was added: look at it before computing
            self.structure.settle()
        if _functorch_active():
            raise OffloadError(
                f"torch.func transforms over managed layer '{self.name}' are not supported; leave "
                "it resident with ignore_modules=[...] or detach the model first."
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise OffloadError(
                f"forward-mode differentiation through managed layer '{self.name}' is not "
                "supported; leave it resident with ignore_modules=[...]."
            )
        return self.is_current() or self.adopt()

    def is_current(self) -> bool:
        """Whether the masters are what the engine was told of."""
        parameters = self.parameters
        weight = parameters.get("weight")
        bias = parameters.get("bias")
        return (
            weight is self.weight
            and bias is self.bias
            and weight.data_ptr() == self.weight_ptr
            and weight.stride() == self.layout[0][2]
            and weight.numel() == self.weight_numel  # of dense masters: with the strides, the shape
            and weight.dtype is self.layout[0][0]
            and (
                bias is None
                or (
                    bias.data_ptr() == self.bias_ptr
                    and bias.stride() == self.layout[1][2]
                    and bias.numel() == self.bias_numel
                    and bias.dtype is self.layout[1][0]
                )
            )
        )

    def foreign(self, x: Tensor) -> Tensor:
        """Compute with whatever ``module.weight`` is now, brought to the compute device.

        Reached when a parametrisation, ``functional_call`` or a hook put a computed tensor in the
        parameter's place, or somebody moved the parameter to the device by hand.
        """
        module = cast("Any", self.module())
        device = self.state.device
        with exempt():
            used: list[Any] = [module.weight, module.bias]
            on_host = [t for t in used if t is not None and t.device.type == "cpu"]
            computed = sum(t.numel() * t.element_size() for t in on_host if t is not self.bias)
            self.attachment.traffic.note_computed(self.name, computed)
            # What lies on the host is copied, on the simulated device too; but a copy closes gaps.
            used = [
                t if t is None else t.to(device, copy=t.device.type == "cpu" and is_dense(t))
                for t in used
            ]
            return self.base_call(module, x.to(device), used[0], used[1])

    def base_call(self, module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The base class's computation with the given tensors."""
        raise NotImplementedError

    def forward_seconds(self, x: Tensor) -> float:
        """Simulated seconds of the forward operator."""
        raise NotImplementedError

    def gradient_takers(
        self, trains_weight: bool, trains_bias: bool, dtype: torch.dtype | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what receives the gradients of weight and bias; None where none is asked."""
        w = self.weight if trains_weight else None
        b = self.bias if trains_bias else None
        if dtype is not None:
            stand_ins = self.attachment.stand_ins
            w = w if w is None else stand_ins.of(w, dtype)
            b = b if b is None else stand_ins.of(b, dtype)
        return w, b

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer for `x`."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a managed module is an ordinary one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class LinearLayer(Layer):
    """A managed ``nn.Linear``; `x` is ``(*, in_features)``."""

    base_forward = staticmethod(nn.Linear.forward)

    def base_call(self, module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``F.linear`` with the given tensors."""
        return F.linear(x, weight, bias)

    def forward_seconds(self, x: Tensor) -> float:
        """Simulated seconds of the product: 2 x rows x in x out operations."""
        weight = self.weight
        out_features, features = weight.shape
        rows = x.numel() // features if features else 0
        moved = (x.numel() + weight.numel() + rows * out_features) * weight.element_size()
        return self.state.time.kernel_seconds(2.0 * rows * features * out_features, moved, x.dtype)

    def backward_seconds(self, grad: Tensor, needs: tuple[bool, ...]) -> float:
        """Simulated seconds of the input's and, where wanted, the weight's gradient."""
        weight = self.weight
        out_features, features = weight.shape
        rows = grad.numel() // out_features if out_features else 0
        products = int(needs[0]) + int(len(needs) > 2 and needs[2])
        moved = products * (grad.numel() + weight.numel() + rows * features) * grad.element_size()
        return self.state.time.kernel_seconds(
            2.0 * products * rows * features * out_features, moved, grad.dtype
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer for `x`."""
        if not self.ready(x):
            return self.foreign(x)
        if x.is_cpu is not self.on_cpu:
            x = x.to(self.state.device)
        dtype = cast_dtype(self.device_type)
        if dtype is not None:
            x = cast_input(x, dtype)
        weight, bias = self.weight, self.bias
        trains_weight = weight.requires_grad
        trains_bias = bias is not None and bias.requires_grad
        if torch.is_grad_enabled() and (x.requires_grad or trains_weight or trains_bias):
            if dtype is None and not trains_weight and not trains_bias:
                return cast("Tensor", loan.apply_linear(x, self))
            w, b = self.gradient_takers(trains_weight, trains_bias, dtype)
            return cast("Tensor", loan.apply_linear(x, self, w, b, dtype))
        return self.without_grad(x, dtype)

    def without_grad(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The call where autograd records nothing."""
        weight = self.weight

        def compute(w: Tensor, b: Tensor | None) -> Tensor:
            # A view of a trainable weight requires grad even under no_grad; a cast one does not.
            return loan.linear(x, w, b, weight.requires_grad and w.dtype is weight.dtype)[0]

        return self.lend_without_grad(x, dtype, compute)


class Conv2dLayer(Layer):
    """A managed ``nn.Conv2d``; `x` is ``(N, C, H, W)`` or ``(C, H, W)``."""

    base_forward = staticmethod(nn.Conv2d.forward)
    # Of the operator: what padding_mode and 'same' leave to it. Set for each call.
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def note_masters(self) -> None:
        """Also forget the arguments: 'same' pads by the size of the weight."""
        super().note_masters()
        self.arguments: tuple[Any, ...] = ()

    @staticmethod
    def arguments_of(module: Any) -> tuple[Any, ...]:
        """Return what the module computes with beside its tensors; anyone may assign it anew."""
        pads = module.padding_mode != "zeros" and tuple(module._reversed_padding_repeated_twice)
        return module.stride, module.padding, module.dilation, module.groups, pads

    def read_arguments(self, module: Any) -> None:
        """Work out how the module's padding splits into ``F.pad`` and the operator's own.

        ``padding='same'`` follows ``convolution_same`` in ``aten/src/ATen/native/Convolution.cpp``:
        an uneven remainder is padded on the right first.
        """
        self.arguments = self.arguments_of(module)
        self.stride, self.dilation, self.groups = module.stride, module.dilation, module.groups
        self.pad: list[int] | None = None
        self.pad_mode = "constant"
        if module.padding_mode != "zeros":
            self.pad = list(module._reversed_padding_repeated_twice)
            self.pad_mode = module.padding_mode
            self.padding = (0, 0)
        elif module.padding == "valid":
            self.padding = (0, 0)
        elif module.padding == "same":
            left, extra = [], []
            for size, step in zip(self.weight.shape[2:], module.dilation, strict=True):
                total = step * (size - 1)
                left.append(total // 2)
                extra.append(total - 2 * (total // 2))
            self.padding = (left[0], left[1])
            if any(extra):
                self.pad = [0, extra[1], 0, extra[0]]
        else:
            self.padding = module.padding

    def base_call(self, module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``F.conv2d`` with the given tensors."""
        return cast("Tensor", module._conv_forward(x, weight, bias))

    def forward_seconds(self, x: Tensor) -> float:
        """Simulated seconds: 2 x outputs x weights per output channel."""
        flops, moved = self._work(x.shape)
        return self.state.time.kernel_seconds(flops, moved * x.element_size(), x.dtype)

    def backward_seconds(self, grad: Tensor, needs: tuple[bool, ...]) -> float:
        """Simulated seconds of the input's and, where wanted, the weight's gradient."""
        products = int(needs[0]) + int(len(needs) > 2 and needs[2])
        weight = self.weight
        per_output = weight.numel() // max(1, weight.shape[0])
        flops = 2.0 * products * grad.numel() * per_output
        moved = products * (2 * grad.numel() + weight.numel()) * grad.element_size()
        return self.state.time.kernel_seconds(flops, moved, grad.dtype)

    def _work(self, shape: torch.Size) -> tuple[float, int]:
        weight = self.weight
        outputs = shape[0] * weight.shape[0]
        for axis in (0, 1):
            reach = self.dilation[axis] * (weight.shape[2 + axis] - 1) + 1
            outputs *= (shape[2 + axis] + 2 * self.padding[axis] - reach) // self.stride[axis] + 1
        per_output = weight.numel() // max(1, weight.shape[0])
        return 2.0 * outputs * per_output, shape.numel() + weight.numel() + outputs

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer for `x`."""
        if not self.ready(x):
            return self.foreign(x)
        if x.is_cpu is not self.on_cpu:
            x = x.to(self.state.device)
        module = cast("Any", self.module())
        if self.arguments != self.arguments_of(module):
            self.read_arguments(module)
        channels = self.weight.shape[1] * self.groups
        if x.dim() not in (3, 4) or x.shape[-3] != channels:
            # torch's own words for a wrong shape, from tensors without data.
            module._conv_forward(
                torch.empty_like(x, device="meta"),
                torch.empty_like(self.weight, device="meta"),
                None,
            )
        if self.pad_mode != "constant":
            x = F.pad(x, self.pad, mode=self.pad_mode)  # type: ignore[arg-type]
        dtype = cast_dtype(self.device_type)
        if dtype is not None:
            x = cast_input(x, dtype)
        batched = x.dim() == 4
        if not batched:
            x = x.unsqueeze(0)
        if self.pad is not None and self.pad_mode == "constant":
            x = torch.constant_pad_nd(x, self.pad, 0)
        weight, bias = self.weight, self.bias
        trains_weight = weight.requires_grad
        trains_bias = bias is not None and bias.requires_grad
        if torch.is_grad_enabled() and (x.requires_grad or trains_weight or trains_bias):
            if dtype is None and not trains_weight and not trains_bias:
                y = cast("Tensor", loan.apply_conv2d(x, self))
            else:
                w, b = self.gradient_takers(trains_weight, trains_bias, dtype)
                y = cast("Tensor", loan.apply_conv2d(x, self, w, b, dtype))
        else:
            y = self.without_grad(x, dtype)
        return y if batched else y.squeeze(0)

    def without_grad(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The call where autograd records nothing."""
        return self.lend_without_grad(x, dtype, lambda w, b: loan.convolution(x, w, b, self))


def is_plain_master(tensor: Any) -> bool:
    """Whether `tensor` can be a host master: a dense, floating, plain Parameter in CPU memory.

    A tensor that is no Parameter stands in one's place for a while (``functional_call``).
    """
    return (
        type(tensor) is nn.Parameter
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and tensor.is_leaf
        and tensor.numel() > 0
        and is_dense(tensor)
    )


def is_held_elsewhere(tensor: Tensor, reassigned: bool) -> bool:
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


# ---- classes ----


def layer_type(module: nn.Module) -> type[Layer] | None:
    """Return how a module of this class is managed; None where it is not."""
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return LinearLayer
    if forward is nn.Conv2d.forward:
        return Conv2dLayer
    return None


@functools.cache
def managed_class(base: Any, on_trial: bool) -> Any:
    """Return the subclass of `base` whose forward borrows its weight; one per base, same name.

    `on_trial`: and that looks who reads its weight.
    """

    def forward(self: Any, input: Tensor) -> Tensor:
        layer = self.__dict__.get(HANDLE)
        if layer is None:
            return cast("Tensor", base.forward(self, input))
        return cast("Tensor", layer(input))

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if not is_managed(self):
            return base._apply(self, fn, recurse)
        apply_to_masters(self, fn)
        return self

    def __setattr__(self: Any, name: str, value: Any) -> None:
        base.__setattr__(self, name, value)
        if name in ("__class__", "weight"):
            layer = self.__dict__.get(HANDLE)
            if layer is not None:
                layer.attachment.let_go_soon(layer)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # pickle insists that what __newobj__ makes has the object's own class; the older
        # reconstructor of the standard library does the same without asking.
        _, _, state, *rest = cast("Any", super(made, self)).__reduce_ex__(2)
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != HANDLE}
        return copyreg._reconstructor, (base, object, None), state, *rest  # type: ignore[attr-defined]

    def __getattr__(self: Any, name: str) -> Any:
        if name in _TENSORS:
            layer = self.__dict__.get(HANDLE)
            if layer is not None and layer.doubtful:
                from .trial import meet

                meet(layer, sys._getframe(1))
        return cast("Any", super(made, self)).__getattr__(name)

    functools.update_wrapper(forward, base.forward, assigned=("__doc__",), updated=())
    trial = {"__getattr__": torch.compiler.disable(__getattr__)} if on_trial else {}
    made = type(
        base.__name__,
        (base,),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "forward": torch.compiler.disable(forward),
            "_apply": _apply,
            "__setattr__": __setattr__,
            "__reduce_ex__": __reduce_ex__,
            "_oracle_offload_base": base,
            **trial,
        },
    )
    return made


def has_own_forward(module: nn.Module) -> bool:
    """Whether ``module.forward`` was set to the class's own: what removing a hook leaves behind."""
    forward = module.__dict__.get("forward")
    base: Any = getattr(type(module), "_oracle_offload_base", type(module))
    return getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) in (
        base.forward,
        managed_class(base, False).forward,
        managed_class(base, True).forward,
    )


def swap_in(module: nn.Module, layer: Layer) -> None:
    """Make `module` a managed one."""
    _follow_class(module)
    module.__dict__[HANDLE] = layer
    module.__class__ = managed_class(cast("Any", type(module)), bool(layer.doubtful))


def put_on_trial(module: nn.Module, doubtful: dict[tuple[str, int], str]) -> None:
    """Look from now on who reads the weight of a managed layer; see `Layer.doubtful`."""
    layer: Layer = module.__dict__[HANDLE]
    layer.doubtful = doubtful
    base = vars(type(module)).get("_oracle_offload_base")
    if base is not None:  # else somebody has derived a class, which may look for itself
        module.__class__ = managed_class(base, True)


def swap_out(module: nn.Module) -> None:
    """Undo `swap_in`; a class that somebody derived or put in its place meanwhile stays."""
    _follow_class(module)
    module.__dict__.pop(HANDLE, None)
    base = vars(type(module)).get("_oracle_offload_base")
    if base is not None:  # a class that was derived since (a parametrisation's) stays
        module.__class__ = base


def _follow_class(module: nn.Module) -> None:
    """Drop an own forward from the instance: it would hide that of the class to come."""
    if has_own_forward(module):
        del module.__dict__["forward"]


def is_managed(module: nn.Module) -> bool:
    """Whether the weight lies on the host: not once it moved, or the class was replaced."""
    layer = module.__dict__.get(HANDLE)
    managed = hasattr(type(module), "_oracle_offload_base")
    return managed and layer is not None and not layer.on_device


_outcomes: tuple[Any, dict[tuple[int, torch.dtype], tuple[torch.dtype, bool]]] = (None, {})


def _outcome(
    fn: Callable[[Tensor], Tensor], dim: int, dtype: torch.dtype
) -> tuple[torch.dtype, bool]:
    """Return the dtype that `fn` gives such a tensor, and whether it makes it channels-last.

    One ``.to()`` asks for every layer with the same `fn`; trainers call it at every step.
    """
    global _outcomes
    if _outcomes[0] is None or _outcomes[0]() is not fn:
        try:
            _outcomes = weakref.ref(fn), {}
        except TypeError:
            _outcomes = None, {}
    known = _outcomes[1].get((dim, dtype))
    if known is None:
        with torch.no_grad():
            result = fn(torch.zeros((2,) * dim, dtype=dtype))
        known = result.dtype, result.dim() == 4 and not result.is_contiguous()
        _outcomes[1][dim, dtype] = known
    return known


def apply_to_masters(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """``module._apply(fn)`` for masters: a change of dtype or layout is kept, a move is not.

    What `fn` does is read off a small tensor of the same kind, so that no weight travels to a
    device only to come back.
    """
    layer: Layer = module.__dict__[HANDLE]
    changed = False
    for name in _TENSORS:
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        dtype, channels_last = _outcome(fn, parameter.dim(), parameter.dtype)
        wanted = parameter.data
        if dtype != parameter.dtype:
            wanted = wanted.to(dtype)
        if channels_last:
            wanted = wanted.contiguous(memory_format=torch.channels_last)
        if wanted is not parameter.data and wanted.data_ptr() != parameter.data_ptr():
            parameter.data = wanted
            changed = True
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)
    if changed:
        layer.adopt(lasting=True)
