"""What autocast does once per region, done the same way for weights that are not there.

Inside an autocast region torch casts a float32 leaf once, keeps the cast until the outermost region
ends, and sums the gradients of all its uses at that cast, in low precision. An input is given the
very cast that torch keeps; a weight on the host gets a stand-in for it, `CastStandIn`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from .._core import Taken

if TYPE_CHECKING:
    from .gradients import Gradients

_autograd: Any = torch._C._autograd
_hooks_allowed = _autograd._saved_tensors_hooks_is_enabled


def saving(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Taken[Any]:
    """Have autograd save tensors so, as `torch.autograd.graph.saved_tensors_hooks` does.

    No interrupt leaves these in force behind the ``with`` block.
    """
    push = functools.partial(_autograd._push_saved_tensors_default_hooks, pack, unpack)
    return Taken(push, _autograd._pop_saved_tensors_default_hooks)


def cast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast computes in on this type of device; None where it is off."""
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def computing_in(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Compute as under autocast to `dtype`, or without where that is None: as code was compiled."""
    if cast_dtype(device_type) is dtype:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype, enabled=dtype is not None)


def is_cast(tensor: Tensor) -> bool:
    """Whether autocast casts such a tensor at all: floating, and not float64."""
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def kept_cast(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cast of `leaf` that autocast keeps in this region.

    An operator that autocast casts for saves its operand; what it has saved is that cast, with the
    node that every other use of the leaf shares. A product with a matrix without columns computes
    nothing; beyond three dimensions one elementwise pass is needed.

    Parameters
    ----------
    leaf : Tensor
        A float32 leaf of any shape that requires grad, and is no view.
    dtype : torch.dtype
        Of the autocast region.

    Returns
    -------
    Tensor
        Of `dtype`, shape and strides of `leaf`.
    """
    # The innermost hooks decide what is saved: a checkpoint's, further out, must not count this.
    with saving(_as_is, _as_is):
        if leaf.dim() in (2, 3):
            # In the cast's dtype: float32 zeros would be kept by autocast, too.
            nothing = torch.empty(
                *leaf.shape[:-2], leaf.shape[-1], 0, dtype=dtype, device=leaf.device
            )
            product = torch.matmul if leaf.dim() == 2 else torch.bmm
            used = product(leaf, nothing.requires_grad_())
        else:
            used = F.prelu(leaf, torch.empty(1, dtype=dtype, device=leaf.device).requires_grad_())
    return cast("Tensor", used.grad_fn._saved_self)  # type: ignore[union-attr]


def _is_kept(leaf: Tensor) -> bool:
    """Whether autocast keeps the cast of a tensor for all its uses in the region."""
    return (
        leaf.requires_grad
        and leaf.is_leaf
        and leaf.dtype is torch.float32
        and not leaf._is_view()
        and torch.is_autocast_cache_enabled()
    )


class _Products(TorchDispatchMode):
    """Whether a batch was multiplied matrix by matrix."""

    each = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.each = self.each or func is torch.ops.aten.bmm.default
        return func(*args, **(kwargs or {}))


@functools.cache
def keeps_casts_with_grad(device_type: str) -> bool:
    """Whether a cast that autocast keeps on this type of device requires grad, made without or not.

    The next use in the region may need its gradient, which torch 2.6 loses. By a weight that
    requires grad a transposed batch is multiplied as one matrix.
    """
    weight = torch.ones(2, 2, device=device_type, requires_grad=True)
    x = torch.ones(2, 2, 2, device=device_type).transpose(0, 1)
    kept = torch.autocast(device_type, torch.bfloat16, cache_enabled=True)
    products = _Products()  # type: ignore[no-untyped-call]
    with torch.no_grad(), kept, products:
        F.linear(x, weight)
    return not products.each


def cast_requires_grad(leaf: Tensor, device_type: str) -> bool:
    """Whether autocast, where none is recorded, computes with a cast of it that requires grad."""
    return (
        _is_kept(leaf)
        and not torch.is_inference_mode_enabled()
        and keeps_casts_with_grad(device_type)
    )


def cast_input(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast an input as autocast would, visible to autograd; a float32 leaf once per region."""
    if x.dtype is dtype or not is_cast(x):
        return x
    if (
        x.requires_grad
        and not torch.compiler.is_dynamo_compiling()  # where autocast keeps none
        and _is_kept(x)
        and torch.is_grad_enabled()
        and _hooks_allowed()
    ):
        return kept_cast(x, dtype)
    return x.to(dtype)


def cast_tensors(
    dtype: torch.dtype, tensors: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Cast borrowed tensors as autocast would, those that are wanted."""
    return tuple(
        tensor.to(dtype) if cast and tensor is not None and is_cast(tensor) else tensor
        for tensor, cast in zip(tensors, wanted, strict=True)
    )


class CastStandIn(Function):
    """Represents a trainable parameter's low-precision copy in one autocast region.

    Autocast casts a trainable weight once per region and uses that copy everywhere, so gradients
    of several uses are summed in low precision before they are cast back. The stand-in gives
    autograd the same node to sum at, on the compute device; it has the copy's shape, dtype and
    device, and no memory of its own.
    """

    @staticmethod
    def forward(ctx: Any, landing: Tensor, gradients: Gradients, dtype: torch.dtype) -> Tensor:
        """Compute; see the class."""
        ctx.dtype = landing.dtype
        return torch.empty(1, dtype=dtype, device=gradients.device).expand(landing.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradient in the parameter's dtype."""
        return grad_outputs[0].to(ctx.dtype), None, None


_stand_in: Any = CastStandIn.apply


class StandIns:
    """The stand-ins of one model's trainable weights in the autocast region that is open.

    They belong to Parameters: two layers that share one share its stand-in, as they share its cast.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._leaf: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Let go of the region and its Parameters."""
        self._region: object = None
        self._made: dict[int, Tensor] = {}  # each keeps its Parameter alive, and so the id

    def of(self, parameter: Tensor, landing: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the stand-in for `parameter`'s cast to `dtype`; its gradient goes to `landing`.

        Autocast keeps casts of float32 leaves only; others are cast again at each use, and float64
        is not cast. Where its cache is disabled every use is in a region of its own.
        """
        if not is_cast(parameter):
            dtype = parameter.dtype
        if parameter.dtype is not torch.float32 or dtype is torch.float32:
            return cast("Tensor", _stand_in(landing, self._gradients, dtype))
        region = self._open_region()
        if region is not self._region:
            self._region, self._made = region, {}
        made = self._made.get(id(parameter))
        if made is None:
            made = self._made[id(parameter)] = _stand_in(landing, self._gradients, dtype)
        return made

    def _open_region(self) -> Any:
        """Return an object that stays the same until torch drops the casts it keeps.

        torch has no name for an autocast region. An empty leaf is cast as every trainable weight
        is; the node of its cast is the region's identity.
        """
        with torch.enable_grad():
            if self._leaf is None:
                with torch.inference_mode(False):
                    self._leaf = torch.empty(
                        0, 0, device=self._gradients.device, requires_grad=True
                    )
            product = torch.mm(self._leaf, self._leaf)
        return product.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
