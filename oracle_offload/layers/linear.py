"""Managed ``nn.Linear``: operator, derivative and cost.

The arithmetic repeats, call by call, what torch's own derivatives do for ``at::linear``
(``aten/src/ATen/native/Linear.cpp``, ``should_fold`` in ``LinearAlgebra.cpp``, ``mm_mat1_grad`` and
``mm_mat2_grad`` in ``FunctionsManual.cpp``): the choice between ``addmm``, ``mm`` and ``bmm`` and
the layout of the operands decide the last bits.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import traced
from .autocast import cast_requires_grad
from .leaf import Tensors
from .loan import Needs, node_of
from .traced import Traced


class LinearLayer(Traced):
    """A managed ``nn.Linear``; `x` is ``(*, in_features)``."""

    base_forward = staticmethod(nn.Linear.forward)
    names = ("weight", "bias")
    required = ("weight",)
    backward_reads = ("weight",)
    node = node_of("ManagedLinear")
    has_buffers = True
    operator = staticmethod(traced.linear)

    def base_call(self, module: Any, x: Tensor, tensors: Any) -> Tensor:
        """``F.linear`` with the given tensors."""
        w, b = tensors
        return F.linear(x, w, b)

    def compute(self, x: Tensor, tensors: Any) -> Tensor:
        """``F.linear`` where autograd records nothing."""
        w, b = tensors
        weight = self.masters.present[0]
        # A view of a trainable weight requires grad even under no_grad; a cast may.
        is_cast = w.dtype is not weight.dtype
        trains = cast_requires_grad(weight, self.device_type) if is_cast else weight.requires_grad
        return linear(x, w, b, trains)[0]

    def record(self, ctx: Any, x: Tensor, trained: Tensors, tensors: Any) -> Tensor:
        """``F.linear``; the input, as it was folded, is kept for a weight gradient alone."""
        trains = trained[0] is not None
        w, b = tensors
        y, folded = linear(x, w, b, trains)
        ctx.geometry = x.shape, x.stride(), None if folded is None else folded.stride()
        if trains:
            ctx.save_for_backward(x if folded is None else folded)
        return y

    def restore(
        self, ctx: Any, x: Tensor | None, shape: torch.Size, stride: Any, *arguments: Any
    ) -> None:
        """Put into `ctx` what `record` had kept there."""
        folded = None
        if x is not None:
            given = torch.empty_strided(shape, stride, device="meta")  # as forward saw it
            if not is_one_matrix(given, self.masters.layout[1] is not None):
                x = x.reshape(-1, shape[-1])
                folded = x.stride()
            ctx.save_for_backward(x)
        ctx.geometry = shape, stride, folded

    def derivative(self, ctx: Any, grad: Tensor, needs: Needs) -> Tensors:
        """Return the gradients of input, weight and bias; the input's alone needs the weight."""
        shape, stride, folded = ctx.geometry
        dims = len(shape)
        gx = gw = gb = None
        if needs[0]:
            gx = self.lend_backward(
                ctx, grad, needs, lambda t: input_gradient(grad, t, shape, stride, folded)
            )
        if needs[1]:
            (x,) = ctx.saved_tensors
            x2 = x if dims == 2 else x.reshape(-1, shape[-1])
            g2 = grad if dims == 2 else grad.reshape(x2.shape[0], grad.shape[-1])
            weight = self.masters.present[0]
            if weight.stride() == (weight.shape[1], 1):
                gw = torch.mm(g2.t(), x2)
            else:
                gw = torch.mm(x2.t(), g2).t()
        if needs[2]:
            flat = dims != 2 and is_contiguous(shape, stride)
            gb = grad.reshape(-1, grad.shape[-1]) if flat else grad
            if gb.dim() > 1:
                gb = gb.sum(list(range(gb.dim() - 1)))
        return gx, gw, gb

    def forward_cost(self, x: Tensor) -> tuple[float, int]:
        """2 x rows x in x out operations."""
        weight = self.masters.present[0]
        out_features, features = weight.shape
        rows = x.numel() // max(1, features)
        moved = (x.numel() + weight.numel() + rows * out_features) * weight.element_size()
        return 2.0 * rows * features * out_features, moved

    def backward_cost(self, grad: Tensor, needs: Needs) -> tuple[float, int]:
        """The same for the input's and, where wanted, the weight's gradient."""
        weight = self.masters.present[0]
        out_features, features = weight.shape
        rows = grad.numel() // max(1, out_features)
        products = needs[0] + needs[1]
        moved = products * (grad.numel() + weight.numel() + rows * features) * grad.element_size()
        return 2.0 * products * rows * features * out_features, moved


def linear(
    x: Tensor, w: Tensor, b: Tensor | None, requires_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """``F.linear(x, w, b)`` as torch does it for a weight that has this `requires_grad`.

    With a trainable weight ``at::matmul`` folds an input of whatever layout into a matrix, by a
    copy if need be; it asks the weight, and a slot's view never requires grad.

    Returns
    -------
    tuple
        The result, and `x` as a matrix where it was folded so: a copy, or a view.
    """
    if not requires_grad or is_one_matrix(x, b is not None):
        y = F.linear(x, w, b)
        # torch forbids in-place changes of a view that a custom function returns.
        return (torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y), None
    folded = x.reshape(-1, x.shape[-1])
    y = torch.ops.aten._unsafe_view(torch.mm(folded, w.t()), (*x.shape[:-1], w.shape[0]))
    return (y if b is None else y.add_(b)), folded


def input_gradient(
    grad: Tensor,
    tensors: Any,
    shape: torch.Size,
    stride: tuple[int, ...],
    folded: tuple[int, ...] | None = None,
) -> Tensor:
    """Gradient of the input, by the operator that torch would use for this geometry.

    Parameters
    ----------
    grad : Tensor
        ``(*, out_features)``.
    tensors : tuple of Tensor
        The weight, ``(out_features, in_features)``, and the bias; of that is read whether it is
        there.
    shape, stride : tuple of int
        Of the input that forward saw.
    folded : tuple of int, optional
        Strides of the matrix that forward folded the input into because the weight is trainable.
    """
    w: Tensor = tensors[0]
    dims = len(shape)
    if dims == 2:
        if stride[0] == 1 and stride[1] == shape[0]:
            return torch.mm(w.t(), grad.t()).t()
        return torch.mm(grad, w)
    features = shape[-1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    if folded is None and not folds(shape, stride):
        biased = len(tensors) > 1 and tensors[1] is not None
        if not (biased and is_contiguous(shape, stride)):
            batch = rows // shape[-2]
            g3 = grad.reshape(batch, shape[-2], w.shape[0])
            return torch.bmm(g3, w.expand(batch, *w.shape)).reshape(shape)
    g2 = grad.reshape(rows, w.shape[0])
    # mm_mat1_grad turns the product round for a column-major input.
    if folded is None and (rows == 1 or features == 1 or stride[-1] != 1):
        # A meta tensor answers by the same code what the folded view would look like.
        probe = torch.empty_strided(shape, stride, device="meta")
        folded = probe.reshape(rows, features).stride()
    if folded == (1, rows):
        return torch.mm(w.t(), g2.t()).t().reshape(shape)
    return torch.mm(g2, w).reshape(shape)


def is_one_matrix(x: Tensor, biased: bool) -> bool:
    """Whether torch multiplies `x` as one matrix even by a weight that is not trained.

    With a bias ``at::linear`` asks whether `x` is contiguous; without one ``at::matmul`` goes by
    the strides alone.
    """
    return x.dim() <= 2 or (x.is_contiguous() and (biased or folds(x.shape, x.stride())))


def folds(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether ``at::matmul`` multiplies an input of three or more dimensions as one matrix."""
    if 0 in shape:
        return True
    axes = [axis for axis in range(len(shape) - 1) if READS_ONES or shape[axis] != 1]
    return all(stride[i] == stride[j] * shape[j] for i, j in itertools.pairwise(axes))


def _reads_ones() -> bool:
    """Whether ``at::matmul`` of this torch goes by the stride of an axis of one, which may be any.

    Where it does not multiply as one matrix, it multiplies each of a batch; torch 2.14 reads none.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(4, device="cpu", requires_grad=True).as_strided((1, 2, 2), (7, 2, 1))
        shaped = F.linear(x, torch.ones(2, 2, device="cpu")).grad_fn
        product = None if shaped is None else shaped.next_functions[0][0]
        assert product is not None
        return product.name().startswith("Bmm")


READS_ONES = _reads_ones()


def is_contiguous(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether a tensor of this geometry is contiguous, as torch counts it."""
    if 0 in shape:
        return True
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True
