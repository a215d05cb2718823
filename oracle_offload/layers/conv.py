"""Managed ``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``: operator, derivative and cost."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import traced
from .autocast import cast_dtype, cast_input
from .leaf import Tensors
from .loan import Needs, node_of
from .swap import untraced
from .traced import WithInherited

_convolution_backward = torch.ops.aten.convolution_backward.default


class ConvLayer(WithInherited):
    """A managed convolution; `x` is ``(N, C, *)`` or ``(C, *)``, with `axes` sizes in ``*``.

    The operator gets it batched, and padded where the padding is not the operator's own.
    """

    axes: ClassVar[int]
    none: ClassVar[tuple[int, ...]]  # as a padding
    names = ("weight", "bias")
    required = ("weight",)
    backward_reads = ("weight",)
    operator = staticmethod(traced.convolution)
    # Of the operator: what padding_mode and 'same' leave to it. Set for each call.
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def computes(cls, module_class: Any) -> bool:
        """Whether modules of this class compute as `base` does, or have it do so."""
        return (
            super().computes(module_class)
            and module_class._conv_forward is cls.base._conv_forward  # or it computes otherwise
        )

    def ready(self, x: Tensor) -> bool:
        """Check everything a call depends on; False where it must run on foreign weights.

        So must a ``_conv_forward`` that was put into the module itself: a patch for textures that
        repeat pads in its own way.
        """
        return super().ready(x) and "_conv_forward" not in cast("Any", self.module()).__dict__

    def base_call(self, module: Any, x: Tensor, tensors: Any) -> Tensor:
        """``F.conv2d``, or its like, with the given tensors."""
        w, b = tensors
        return cast("Tensor", module._conv_forward(x, w, b))

    def call(self, x: Tensor) -> Tensor:
        """Pad, batch and cast in the order in which torch does, then compute."""
        module = cast("Any", self.module())
        self.read_arguments(module)
        weight = self.masters.present[0]
        channels = -1 - self.axes
        if x.dim() - self.axes not in (1, 2) or x.shape[channels] != weight.shape[1] * self.groups:
            # torch's own words for a wrong shape, from tensors of a single element.
            given = [
                torch.zeros((), dtype=t.dtype, device=self.state.device).expand(t.shape)
                for t in (x, weight)
            ]
            module._conv_forward(*given, None)
        x, batched, _ = self.prepared(x, self.pad, self.pad_mode)
        y = super().call(x)
        return y if batched else y.squeeze(0)

    def prepared(
        self, x: Tensor, pad: list[int] | None, mode: str
    ) -> tuple[Tensor, bool, torch.dtype | None]:
        """Return the input padded, cast and batched; whether it was batched; autocast's dtype."""
        if mode != "constant":
            x = F.pad(x, cast("list[int]", pad), mode=mode)
        dtype = cast_dtype(self.device_type)
        if dtype is not None:
            x = cast_input(x, dtype)
        batched = x.dim() == self.axes + 2
        if not batched:
            x = x.unsqueeze(0)
        if pad is not None and mode == "constant":
            x = F.pad(x, pad)
        return x, batched, dtype

    def read_arguments(self, module: Any) -> None:
        """Read what the module computes with apart from its tensors; user code may change it."""
        self.stride, self.dilation, self.groups = module.stride, module.dilation, module.groups
        self.padding, self.pad, self.pad_mode = self.padding_of(module)

    def padding_of(self, module: Any) -> tuple[tuple[int, ...], list[int] | None, str]:
        """Return the operator's own padding, and what ``F.pad`` takes before it.

        ``padding='same'`` follows ``convolution_same`` in ``aten/src/ATen/native/Convolution.cpp``:
        an uneven remainder is padded on the right first.
        """
        if module.padding_mode != "zeros":
            return self.none, list(module._reversed_padding_repeated_twice), module.padding_mode
        if module.padding == "valid":
            return self.none, None, "constant"
        if module.padding != "same":
            return module.padding, None, "constant"
        left, extra = [], []
        sizes = module._parameters["weight"].shape[2:]
        for size, step in zip(sizes, module.dilation, strict=True):
            total = step * (size - 1)
            left.append(total // 2)
            extra.append(total - 2 * (total // 2))
        pad = [side for after in reversed(extra) for side in (0, after)] if any(extra) else None
        return tuple(left), pad, "constant"

    def traced(self, module: Any, x: Tensor) -> Tensor:
        """Pad and batch where a compiler sees it, then compute by the operator."""
        if "_conv_forward" in module.__dict__:  # a patch, which pads in its own way
            return cast("Tensor", untraced(self, x))
        padding, pad, mode = self.padding_of(module)
        if x.is_cpu is not self.on_cpu:
            x = x.to(self.state.device)
        x, batched, dtype = self.prepared(x, pad, mode)
        arguments = module.stride, padding, module.dilation, module.groups
        y = self.operate(module, x, dtype, *arguments)
        return y if batched else y.squeeze(0)

    def taking(self, *arguments: Any) -> AbstractContextManager[None]:
        """Compute with the arguments of an operator, whatever the module's are."""
        self.stride, self.padding, self.dilation = map(tuple, arguments[:3])
        self.groups = arguments[3]
        return super().taking()

    def restore(
        self, ctx: Any, x: Tensor | None, shape: torch.Size, stride: Any, *arguments: Any
    ) -> None:
        """Put into `ctx` what `record` had kept there."""
        ctx.geometry = shape, stride
        ctx.arguments = arguments
        ctx.saves_input = x is not None
        if x is not None:
            ctx.save_for_backward(x)

    def compute(self, x: Tensor, tensors: Any) -> Tensor:
        """``at::convolution`` with the layer's arguments."""
        w, b = tensors
        return torch.convolution(
            x, w, b, self.stride, self.padding, self.dilation, False, self.none, self.groups
        )

    def record(self, ctx: Any, x: Tensor, trained: Tensors, tensors: Any) -> Tensor:
        """`compute`, choosing its backend as the resident model would in training.

        Some CPU backends (3x3 depthwise Winograd, XNNPACK) are for inference only, and torch asks
        ``GradMode`` and ``requires_grad`` of the operands for that; inside a `Function` both say
        no. The input is kept for a weight gradient alone: its own gradient needs its geometry.
        """
        ctx.geometry = x.shape, x.stride()
        ctx.arguments = self.stride, self.padding, self.dilation, self.groups
        ctx.saves_input = trained[0] is not None
        if ctx.saves_input:
            ctx.save_for_backward(x)
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            y = self.compute(x, tensors)
        # Of one axis it is a view of two, which torch forbids to change once a function returns it.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    def derivative(self, ctx: Any, grad: Tensor, needs: Needs) -> Tensors:
        """Return the gradients of input, weight and bias.

        One operator makes all three, and takes the weight even where it needs its geometry alone:
        torch keeps the weight for each of them, and so refuses any of them once it has changed.
        """
        if ctx.saves_input:  # saved tensors may be asked for only once under checkpointing
            (x,) = ctx.saved_tensors
        else:
            shape, stride = ctx.geometry
            x = torch.empty_strided(shape, stride, dtype=grad.dtype, device=grad.device)

        def gradients(tensors: Any) -> Tensors:
            w, b = tensors
            stride, padding, dilation, groups = ctx.arguments
            size = None if b is None else [w.shape[0]]
            window = stride, padding, dilation, False, self.none, groups
            return cast("Tensors", _convolution_backward(grad, x, w, size, *window, needs))

        found = self.lend_backward(ctx, grad, needs, gradients)
        # Some backends return more than they were asked for.
        return tuple(
            [gradient if wanted else None for gradient, wanted in zip(found, needs, strict=True)]
        )

    def forward_cost(self, x: Tensor) -> tuple[float, int]:
        """2 x outputs x weights per output channel."""
        weight = self.masters.present[0]
        outputs = x.shape[0] * weight.shape[0]
        for axis in range(self.axes):
            reach = self.dilation[axis] * (weight.shape[2 + axis] - 1) + 1
            outputs *= (x.shape[2 + axis] + 2 * self.padding[axis] - reach) // self.stride[axis] + 1
        per_output = weight.numel() // max(1, weight.shape[0])
        moved = (x.numel() + weight.numel() + outputs) * x.element_size()
        return 2.0 * outputs * per_output, moved

    def backward_cost(self, grad: Tensor, needs: Needs) -> tuple[float, int]:
        """The same for the input's and, where wanted, the weight's gradient."""
        products = needs[0] + needs[1]
        weight = self.masters.present[0]
        per_output = weight.numel() // max(1, weight.shape[0])
        moved = products * (2 * grad.numel() + weight.numel()) * grad.element_size()
        return 2.0 * products * grad.numel() * per_output, moved


class Conv1dLayer(ConvLayer):
    """A managed ``nn.Conv1d``."""

    axes, none = 1, (0,)
    base = nn.Conv1d
    base_forward = staticmethod(nn.Conv1d.forward)
    node = node_of("ManagedConv1d")


class Conv2dLayer(ConvLayer):
    """A managed ``nn.Conv2d``."""

    axes, none = 2, (0, 0)
    base = nn.Conv2d
    base_forward = staticmethod(nn.Conv2d.forward)
    node = node_of("ManagedConv2d")


class Conv3dLayer(ConvLayer):
    """A managed ``nn.Conv3d``, or a causal one that pads before it asks ``super()``."""

    axes, none = 3, (0, 0, 0)
    base = nn.Conv3d
    base_forward = staticmethod(nn.Conv3d.forward)
    node = node_of("ManagedConv3d")
