"""Autograd functions of the managed layers: the same bits as torch's own, from a borrowed slot.

Forward and backward each borrow the layer's tensors for one operator (`Layer.lend`), inside the
function: code after ``Function.apply`` or in a module hook never runs for the last layer of a
checkpoint that stops early. Backward asks by layer, never by the address that forward saw.

Weights are not saved for backward (saved-tensor hooks would copy whole masters); their versions
are, so that a change between forward and backward raises as torch would. The input is saved only
for a weight gradient. The arithmetic repeats, call by call, what torch's own derivatives do for
``at::linear`` and ``at::convolution`` (``aten/src/ATen/native/Linear.cpp``, ``should_fold`` in
``LinearAlgebra.cpp``, ``mm_mat1_grad`` and ``mm_mat2_grad`` in ``FunctionsManual.cpp``): the choice
between ``addmm``, ``mm`` and ``bmm`` and the layout of the operands decide the last bits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from .._core import BACKWARD
from ..errors import OffloadError, StaleWeightsError
from ..gradients import note_trainable, to_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..engines import DeviceState
    from .leaf import Conv2dLayer, Layer, LinearLayer

_graph_task = torch._C._current_graph_task_id
_convolution_backward = torch.ops.aten.convolution_backward.default


class _Refuse(Function):
    """Identity whose backward refuses: gradients of managed layers are differentiable once."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *grad_outputs: Tensor) -> Tensor:
        """Compute; see the class."""
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise OffloadError(
            "double backward through a managed layer is not supported: its weights are gone from "
            "the device by then. Leave the layers that need it resident with ignore_modules=[...]."
        )


def _refuse_double_backward(gradients: tuple[Any, ...], grad_output: Tensor) -> tuple[Any, ...]:
    """Tie `gradients` of a backward under ``create_graph=True`` to a node that refuses."""
    if not grad_output.requires_grad:
        grad_output = grad_output.detach().requires_grad_()
    refuse: Any = _Refuse.apply
    return tuple(
        refuse(gradient, grad_output) if isinstance(gradient, Tensor) else gradient
        for gradient in gradients
    )


def _once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Any:
    """Run `backward` without grad; under ``create_graph=True`` its results refuse to go on."""

    @functools.wraps(backward)
    def run(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, grad)
        with torch.no_grad():
            gradients = backward(ctx, grad)
        return _refuse_double_backward(gradients, grad)

    return staticmethod(run)


def check_unchanged(layer: Layer, expected: tuple[int, int]) -> None:
    """Raise `StaleWeightsError` where the weight is not what forward used.

    Parameters
    ----------
    expected : tuple of int
        ``(version, address)`` of the weight, as forward saw them.
    """
    layer.check_attached()
    weight = layer.parameters["weight"]
    found = layer.weight_state(weight)
    if found != expected:
        what = (
            f"is at version {found[0]}; expected version {expected[0]} instead"
            if found[0] != expected[0]
            else "was replaced through .data"
        )
        raise StaleWeightsError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: the weight of managed layer '{layer.name}' {what}. Change weights after "
            "backward, or leave the layer resident with ignore_modules=[...]."
        )


# ---- linear ----


def _folds(x: Tensor) -> bool:
    """Whether ``at::matmul`` multiplies an input of three or more dimensions as one matrix."""
    if x.numel() == 0:
        return True
    shape, stride = x.shape, x.stride()
    return all(stride[i] == stride[i + 1] * shape[i + 1] for i in range(len(shape) - 2))


def _is_column_major(matrix: Tensor) -> bool:
    stride = matrix.stride()
    return stride[0] == 1 and stride[1] == matrix.shape[0]


def linear(
    x: Tensor, w: Tensor, b: Tensor | None, requires_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """``F.linear(x, w, b)`` as torch does it for a weight that has this `requires_grad`.

    With a trainable weight ``at::matmul`` folds an input of whatever layout into a matrix, by a
    copy if need be; it asks the weight, and a slot's view never requires grad.

    Returns
    -------
    tuple
        The result, and the folded copy of `x` where one was made.
    """
    if not requires_grad or x.dim() <= 2 or x.is_contiguous() or _folds(x):
        y = F.linear(x, w, b)
        # torch forbids in-place changes of a view that a custom function returns.
        return (torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y), None
    folded = x.reshape(-1, x.shape[-1])
    y = torch.ops.aten._unsafe_view(torch.mm(folded, w.t()), (*x.shape[:-1], w.shape[0]))
    return (y if b is None else y.add_(b)), folded


class ManagedLinear(Function):
    """``F.linear(x, weight, bias)`` on a weight borrowed from the arena.

    ``apply(x, layer)``, or ``apply(x, layer, weight, bias, cast)`` under autocast (`cast` is its
    dtype) and where a parameter is trainable: `weight` and `bias` are then those that require grad
    (their stand-ins under autocast) and only tell autograd where gradients go. `x` is
    ``(*, in_features)`` on the compute device.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: LinearLayer,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        cast: torch.dtype | None = None,
    ) -> Tensor:
        """Compute; see the class."""
        state = layer.state
        task = _graph_task()
        if state.turned and task == -1:
            state.begin_forward()
        y: Tensor
        y, saved = layer.lend(
            layer.forward_kind(task),
            task,
            layer.forward_seconds(x) if state.simulated else 0.0,
            cast,
            lambda w, b: linear(x, w, b, weight is not None),
        )
        ctx.layer = layer
        ctx.cast = cast
        ctx.task = task
        ctx.geometry = x.shape, x.stride()
        ctx.folded = saved is not None
        ctx.expected = layer.weight_state(layer.weight)
        ctx.wide = weight is not None or bias is not None or cast is not None
        if weight is not None:
            ctx.save_for_backward(x if saved is None else saved)
        if task != -1 and (weight is not None or bias is not None):
            note_trainable(state, task)
        return y

    @_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients; host tensors for parameters on the host."""
        layer: LinearLayer = ctx.layer
        state = layer.state
        state.turned = True
        shape, stride = ctx.geometry
        dims = len(shape)
        needs = ctx.needs_input_grad
        gx = gw = gb = None
        if needs[0]:
            check_unchanged(layer, ctx.expected)
            gx = layer.lend(
                BACKWARD,
                _graph_task(),
                layer.backward_seconds(grad, needs) if state.simulated else 0.0,
                ctx.cast,
                lambda w, _: _linear_input_grad(grad, w, shape, stride, ctx.folded),
                with_bias=False,
            )
        if not ctx.wide:
            return gx, None
        layer.check_attached()
        if needs[2]:
            (x,) = ctx.saved_tensors
            x2 = x if x.dim() == 2 else x.reshape(-1, shape[-1])
            g2 = grad if dims == 2 else grad.reshape(x2.shape[0], grad.shape[-1])
            if layer.row_major:
                gw = torch.mm(g2.t(), x2)
            else:
                gw = torch.mm(x2.t(), g2).t()
        if needs[3]:
            flat = dims != 2 and _is_contiguous(shape, stride)
            gb = grad.reshape(-1, grad.shape[-1]) if flat else grad
            if gb.dim() > 1:
                gb = gb.sum(list(range(gb.dim() - 1)), keepdim=True).view(grad.shape[-1])
        if needs[2] or needs[3]:
            note_trainable(state, _graph_task() if ctx.task == -1 else -1)
            if ctx.cast is None and not layer.on_device:
                gw, gb = to_host(state, gw), to_host(state, gb)
        return gx, None, gw, gb, None


def _is_contiguous(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size == 0:
            return True
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def _linear_input_grad(
    grad: Tensor, w: Tensor, shape: torch.Size, stride: tuple[int, ...], copied: bool
) -> Tensor:
    """Gradient of the input, by the operator that torch would use for this geometry.

    Parameters
    ----------
    grad : Tensor
        ``(*, out_features)``.
    w : Tensor
        ``(out_features, in_features)``.
    shape, stride : tuple of int
        Of the input that forward saw.
    copied : bool
        Whether forward folded the input by a copy.
    """
    dims = len(shape)
    if dims == 2:
        if stride[0] == 1 and stride[1] == shape[0]:
            return torch.mm(w.t(), grad.t()).t()
        return torch.mm(grad, w)
    features = shape[-1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    # A meta tensor answers by the same code what the folded view would look like.
    if dims > 2 and not copied and not _is_contiguous(shape, stride):
        probe = torch.empty_strided(shape, stride, device="meta")
        if not _folds(probe):
            batch = rows // shape[-2]
            g3 = grad.reshape(batch, shape[-2], w.shape[0])
            return torch.bmm(g3, w.expand(batch, *w.shape)).reshape(shape)
    g2 = grad.reshape(rows, w.shape[0])
    # mm_mat1_grad turns the product round for a column-major input; a folded one is column-major
    # only in degenerate shapes.
    if not copied and (rows == 1 or features == 1 or stride[-1] != 1):
        probe = torch.empty_strided(shape, stride, device="meta").reshape(rows, features)
        if _is_column_major(probe):
            return torch.mm(w.t(), g2.t()).t().reshape(shape)
    return torch.mm(g2, w).reshape(shape)


# ---- convolution ----


def convolution(x: Tensor, w: Tensor, b: Tensor | None, layer: Conv2dLayer) -> Tensor:
    """``at::convolution`` with the layer's arguments."""
    return torch.convolution(
        x, w, b, layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups
    )


def _convolve(x: Tensor, w: Tensor, b: Tensor | None, layer: Conv2dLayer) -> Tensor:
    """`convolution`, choosing its backend as the resident model would in training.

    Some CPU backends (3x3 depthwise Winograd, XNNPACK) are for inference only, and torch asks
    ``GradMode`` and ``requires_grad`` of the operands for that; inside a `Function` both say no.
    """
    if not x.requires_grad:
        x = x.detach().requires_grad_()
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        return convolution(x, w, b, layer)


class ManagedConv2d(Function):
    """``F.conv2d`` on a weight borrowed from the arena; arguments as `ManagedLinear`.

    `x` is ``(N, C, H, W)``: batched, and padded where the padding is not the operator's own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: Conv2dLayer,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        cast: torch.dtype | None = None,
    ) -> Tensor:
        """Compute; see the class."""
        state = layer.state
        task = _graph_task()
        if state.turned and task == -1:
            state.begin_forward()
        y: Tensor = layer.lend(
            layer.forward_kind(task),
            task,
            layer.forward_seconds(x) if state.simulated else 0.0,
            cast,
            lambda w, b: _convolve(x, w, b, layer),
        )
        ctx.layer = layer
        ctx.cast = cast
        ctx.task = task
        ctx.geometry = x.shape, x.stride(), x.dtype, x.device
        ctx.expected = layer.weight_state(layer.weight)
        ctx.wide = weight is not None or bias is not None or cast is not None
        ctx.saves_input = weight is not None
        if weight is not None:
            ctx.save_for_backward(x)
        if task != -1 and (weight is not None or bias is not None):
            note_trainable(state, task)
        return y

    @_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradients; host tensors for parameters on the host."""
        layer: Conv2dLayer = ctx.layer
        state = layer.state
        state.turned = True
        needs = ctx.needs_input_grad
        # torch keeps the weight for each of the three gradients, and so refuses any of them.
        check_unchanged(layer, ctx.expected)
        wants_weight = ctx.wide and needs[2]
        wants_bias = ctx.wide and needs[3]
        if ctx.saves_input:  # saved tensors may be asked for only once under checkpointing
            (x,) = ctx.saved_tensors
        else:
            # The input gradient needs the input's geometry alone.
            shape, stride, dtype, device = ctx.geometry
            x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        task = _graph_task()
        # One operator makes all three gradients, and takes the weight even where it needs its
        # geometry alone.
        gx, gw, gb = layer.lend(
            BACKWARD,
            task,
            layer.backward_seconds(grad, needs) if state.simulated else 0.0,
            ctx.cast,
            lambda w, _: _convolution_backward(
                grad,
                x,
                w,
                [w.shape[0]] if layer.has_bias else None,
                layer.stride,
                layer.padding,
                layer.dilation,
                False,
                (0, 0),
                layer.groups,
                (needs[0], wants_weight, wants_bias),
            ),
            with_bias=False,
        )
        # Some backends return more than they were asked for.
        gx = gx if needs[0] else None
        gw = gw if wants_weight else None
        gb = gb if wants_bias else None
        if not ctx.wide:
            return gx, None
        if wants_weight or wants_bias:
            note_trainable(state, task if ctx.task == -1 else -1)
            if ctx.cast is None and not layer.on_device:
                gw, gb = to_host(state, gw), to_host(state, gb)
        return gx, None, gw, gb, None


# ---- autocast ----


class CastStandIn(Function):
    """Stands for a trainable parameter's low-precision copy in one autocast region.

    Autocast casts a trainable weight once per region and uses that copy everywhere, so gradients
    of several uses are summed in low precision before they are cast back. The stand-in gives
    autograd the same node to sum at, on the compute device; it has the copy's shape, dtype and
    device, and no memory of its own.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, state: DeviceState, dtype: torch.dtype) -> Tensor:
        """Compute; see the class."""
        ctx.state = state
        ctx.dtype = parameter.dtype
        return torch.empty(1, dtype=dtype, device=state.device).expand(parameter.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradients; host tensors for parameters on the host."""
        with torch.no_grad():
            gradient = to_host(ctx.state, grad_outputs[0].to(ctx.dtype))
        return gradient, None, None


# Function.apply is a Python method that asks functorch first; the layers have asked already.
apply_linear: Any = super(Function, ManagedLinear).apply
apply_conv2d: Any = super(Function, ManagedConv2d).apply
apply_stand_in: Any = CastStandIn.apply
