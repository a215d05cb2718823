"""The products of a managed Linear are torch's: the same operators, of operands laid out alike."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from equality import Products
from torch import Tensor
from torch.nn import functional as F

from oracle_offload.layers.linear import input_gradient, is_contiguous, linear

IN, OUT = 5, 4


def strided(shape: tuple[int, ...], order: tuple[int, ...], features: int = IN) -> Tensor:
    """Return an input of a shape whose axes are stored in this order, the innermost last."""
    sizes = [shape[axis] for axis in order]
    back = [order.index(axis) for axis in range(len(order))]
    return torch.randn(sizes).permute(back)


def inputs() -> dict[str, Tensor]:
    """Return inputs of every order of their axes, with sizes of one and none among them."""
    torch.manual_seed(0)
    found = {}
    shapes = [(IN,), (3, IN), (1, IN), (0, IN), (2, 3, IN), (1, 3, IN), (2, 1, IN), (1, 1, IN),
              (2, 3, 2, IN), (2, 1, 3, IN), (0, 3, IN), (2, 2, 1, 2, IN)]  # fmt: skip
    for shape in shapes:
        for order in itertools.permutations(range(len(shape))):
            if len(shape) < 5 or order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (1, 0, 2, 3, 4)):
                found[f"{shape} {order}"] = strided(shape, order)
    found["gaps"] = torch.randn(2, 6, IN)[:, ::2]
    found["wide rows"] = torch.randn(2, 3, 2 * IN)[..., :IN]
    found["every other feature"] = torch.randn(2, 3, 2 * IN)[..., ::2]
    found["the same row"] = torch.randn(1, 1, IN).expand(2, 3, IN)
    found["the same feature"] = torch.randn(2, 3, 1).expand(2, 3, IN)
    return found


INPUTS = inputs()


def resident(x: Tensor, weight: Tensor, bias: Tensor | None, trains: bool) -> Any:
    """Return torch's result, products, gradient of the input, and the products of that."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_(trains)
    with Products() as forward:
        y = F.linear(x, weight, bias)
    grad = torch.linspace(-1, 1, max(1, y.numel()))[: y.numel()].view(y.shape)
    with Products() as backward:
        (gx,) = torch.autograd.grad(y, x, grad)
    return y.detach(), forward.ran, grad, gx, backward.ran


def steps_over_one(x: Tensor) -> bool:
    """Whether an input is contiguous but for the stride of an axis of one."""
    steps, sizes = x.stride()[:-1], x.stride()[1:]
    exact = all(a == b * n for a, b, n in zip(steps[:-1], sizes[:-1], x.shape[1:-1], strict=True))
    return x.dim() > 2 and x.is_contiguous() and not exact


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize(
    ("bias", "over_one"),
    [
        pytest.param(True, False, id="bias"),
        pytest.param(True, True, id="bias, over one"),
        pytest.param(False, False, id="nobias"),
        pytest.param(False, True, id="nobias, over one"),
    ],
)
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trains"])
def test_result_and_gradient_of_each_geometry_are_made_as_torch_makes_them(
    trains: bool, bias: bool, over_one: bool, layout: str
) -> None:
    torch.manual_seed(1)
    weight = torch.randn(OUT, IN) if layout == "rows" else torch.randn(IN, OUT).t()
    b = torch.randn(OUT) if bias else None
    asked = {name: x for name, x in INPUTS.items() if steps_over_one(x) is over_one}
    assert len(asked) >= 9
    for name, x in asked.items():
        y, products, grad, gx, of_backward = resident(x, weight, b, trains)
        with torch.no_grad(), Products() as ours:
            found, folded = linear(x, weight, b, trains)
        assert torch.equal(found, y) and found.stride() == y.stride(), name
        assert ours.ran == products, name
        assert not found._is_view(), "it may be changed in place"
        # Without a bias torch goes by the stride of an axis of one as well, unless x is empty.
        is_matrix = x.is_contiguous() and (bias or not over_one or x.numel() == 0)
        is_folded = trains and x.dim() > 2 and not is_matrix
        assert (folded is not None) is is_folded, name
        if folded is not None:
            assert torch.equal(folded, x.reshape(-1, IN)) and folded.dim() == 2
        with Products() as ours:
            stride = None if folded is None else folded.stride()
            gradient = input_gradient(grad, (weight, b), x.shape, x.stride(), stride)
        assert torch.equal(gradient, gx) and gradient.stride() == gx.stride(), name
        assert ours.ran == of_backward, name


@pytest.mark.parametrize("features", [1, 2])
def test_inputs_of_one_feature_are_multiplied_as_torch_does(features: int) -> None:
    weight = torch.randn(OUT, features)
    for shape in ((3, features), (2, 3, features), (features,), (2, 2, 3, features)):
        for order in itertools.permutations(range(len(shape))):
            x = strided(shape, order)
            *_, grad, gx, products = resident(x, weight, None, False)
            with Products() as ours:
                gradient = input_gradient(grad, (weight,), x.shape, x.stride())
            assert torch.equal(gradient, gx) and gradient.stride() == gx.stride()
            assert ours.ran == products, (shape, order)


def test_a_geometry_is_contiguous_where_torch_says_so() -> None:
    draw = random.Random(0)
    seen = set()
    for _ in range(3000):
        shape = torch.Size(draw.choice((0, 1, 1, 2, 3, 3)) for _ in range(draw.randrange(5)))
        if draw.random() < 0.4:
            stride = torch.empty(shape).stride()
        else:
            stride = tuple(draw.choice((0, 1, 1, 2, 3, 6, 9)) for _ in shape)
        expected = torch.empty_strided(shape, stride, device="meta").is_contiguous()
        assert is_contiguous(shape, stride) is expected, (shape, stride)
        seen.add((expected, 0 in shape, 1 in shape))
    assert len(seen) >= 6, "both answers, with and without axes of none and of one"
