"""Linear and Conv2d: results and all gradients have the resident model's bits."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
from equality import Products, assert_models_agree, assert_same, attached, resident_pair
from torch import nn
from torch.utils.checkpoint import checkpoint

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHECKPOINTS = [None, True, False]  # none, reentrant, non-reentrant


class Block(nn.Module):
    """Two layers of one kind, the second one used twice, inside a checkpoint or not."""

    def __init__(self, first: nn.Module, second: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = first, second, reentrant

    def inner(self, x):
        x = torch.tanh(self.first(x))
        return self.second(torch.tanh(self.second(x)))

    def forward(self, x):
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def weights_of(y):
    """A loss that weighs every element differently."""
    return torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)


def make_step(x, device, autocast, backward_inside=False):
    def step(model):
        leaf = x.to(device).requires_grad_()
        leaf = leaf.detach().requires_grad_()
        context = (
            torch.autocast(torch.device(device).type, torch.bfloat16)
            if autocast
            else contextlib.nullcontext()
        )
        with context:
            y = model(leaf)
            loss = (y.float() * weights_of(y)).sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return [y.detach(), leaf.grad]

    return step


def train_only(model: nn.Module, trainable: bool) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(trainable)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["nockpt", "reentrant", "nonreentrant"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_has_the_residents_bits(device, dtype, bias, trainable, reentrant, autocast):
    torch.manual_seed(0)
    model = Block(nn.Linear(48, 40, bias=bias), nn.Linear(40, 40, bias=bias), reentrant).to(dtype)
    train_only(model, trainable)
    managed, resident = resident_pair(model)
    shapes = [torch.randn(6, 48), torch.randn(3, 2, 48).transpose(0, 1), torch.randn(2, 3, 2, 48)]
    with attached(managed, device):
        for x in shapes:
            step = make_step(x.to(dtype), device, autocast)
            assert_models_agree(managed, resident, step, device=device)


CONVOLUTIONS = {
    "3x3": dict(kernel_size=3, padding=1),
    "same": dict(kernel_size=3, padding="same"),
    "same-even-dilated": dict(kernel_size=(4, 2), padding="same", dilation=(1, 2)),
    "reflect": dict(kernel_size=3, padding=(2, 1), padding_mode="reflect"),
    "circular-same": dict(kernel_size=3, padding="same", padding_mode="circular"),
    "strided": dict(kernel_size=3, stride=2, padding=1),
    "padded one way": dict(kernel_size=3, padding=(1, 0)),
    "strided one way": dict(kernel_size=3, stride=(1, 2), padding=1),
    "valid": dict(kernel_size=3, padding="valid"),
    "grouped": dict(kernel_size=3, padding=1, groups=4),
    "depthwise": dict(kernel_size=3, padding=1, groups=8),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["nockpt", "reentrant", "nonreentrant"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conv2d_has_the_residents_bits(device, dtype, bias, trainable, reentrant, autocast):
    for options in (CONVOLUTIONS["3x3"], CONVOLUTIONS["same"]):
        torch.manual_seed(0)
        model = Block(
            nn.Conv2d(8, 8, bias=bias, **options), nn.Conv2d(8, 8, bias=bias, **options), reentrant
        ).to(dtype)
        train_only(model, trainable)
        managed, resident = resident_pair(model)
        with attached(managed, device):
            step = make_step(torch.randn(2, 8, 9, 10).to(dtype), device, autocast)
            assert_models_agree(managed, resident, step, device=device)


@pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"]
)
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_every_argument_of_conv2d(device, options, trainable, layout):
    torch.manual_seed(0)
    model = Block(nn.Conv2d(8, 8, **options), nn.Conv2d(8, 8, **options), None)
    model = model.to(memory_format=layout)
    train_only(model, trainable)
    managed, resident = resident_pair(model)
    with attached(managed, device):
        for x in (
            torch.randn(2, 8, 9, 10),
            torch.randn(2, 8, 9, 10).contiguous(memory_format=torch.channels_last),
            torch.randn(8, 9, 10),
            torch.randn(2, 8, 9, 20)[..., ::2],
        ):
            assert_models_agree(managed, resident, make_step(x, device, False), device=device)


CHANGES = {
    "stride": [dict(stride=(2, 1))],
    "padding": [dict(padding=(2, 0))],
    "dilation": [dict(dilation=(1, 2))],
    "to same": [dict(padding="same")],
    "to reflect": [dict(padding_mode="reflect")],
    "to two borders": [dict(padding_mode="reflect"), dict(padding_mode="circular")],
    "to another border": [
        dict(padding_mode="circular", _reversed_padding_repeated_twice=[2, 0, 1, 1])
    ],
    "all": [dict(stride=(2, 2), padding=(1, 2), dilation=(2, 1))],
}


@pytest.mark.parametrize("change", CHANGES)
def test_arguments_of_a_convolution_changed_after_attach(device, change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 6, (3, 2), padding="same"))
    managed, resident = resident_pair(model)
    step = make_step(torch.randn(2, 4, 9, 10), device, False)
    with attached(managed, device) as manager:
        assert len(manager.layers) == 2
        assert_models_agree(managed, resident, step, steps=1, device=device)
        for values in CHANGES[change]:
            for layer in (managed[0], resident[0]):
                for name, value in values.items():
                    setattr(layer, name, value)
            assert_models_agree(managed, resident, step, device=device)


def test_a_same_padded_kernel_replaced_by_one_of_another_size(device):
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(nn.Conv2d(4, 6, 3, padding="same")))
    step = make_step(torch.randn(2, 4, 9, 10), device, False)
    kernel = torch.randn(6, 4, 4, 2)
    with attached(managed, device) as manager:
        assert_models_agree(managed, resident, step, steps=1, device=device)
        for layer in (managed[0], resident[0]):
            layer.weight.data = kernel.clone().to(layer.weight.device)
        assert_models_agree(managed, resident, step, device=device)
        assert len(manager.layers) == 1


class ChangesInPlace(nn.Module):
    """A layer whose output is written to, as residual connections and activations do."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        y += 1
        y[..., :2] *= x[..., :2]
        return torch.relu_(y)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 5, 8), (2, 8, 5, 8), (8, 5, 8)], ids=str)
def test_outputs_can_be_changed_in_place(device, shape, trainable, autocast):
    """As the resident layer's can: torch forbids it for a view that a custom function returns."""
    torch.manual_seed(0)
    kinds = [lambda: nn.Linear(8, 8)]
    for axes, kind in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1):
        if len(shape) in (axes + 1, axes + 2):
            channels = shape[-axes - 1]
            kinds.append(functools.partial(kind, channels, channels, 3, padding=1))
    x = torch.randn(shape)
    for build in kinds:
        model = nn.Sequential(ChangesInPlace(build()), ChangesInPlace(build()))
        train_only(model, trainable)
        managed, resident = resident_pair(model)
        with attached(managed, device) as manager:
            assert len(manager.layers) == 2
            for laid_out in (x, torch.stack([x, x], -1)[..., 0]):
                step = make_step(laid_out, device, autocast)
                assert_models_agree(managed, resident, step, device=device)


GEOMETRIES = {
    "vector": lambda k: torch.randn(k),
    "strided vector": lambda k: torch.randn(2 * k)[::2],
    "matrix": lambda k: torch.randn(6, k),
    "column-major": lambda k: torch.randn(k, 6).t(),
    "one row": lambda k: torch.randn(1, k),
    "sliced": lambda k: torch.randn(4, 2 * k)[:, :k],
    "strided": lambda k: torch.randn(4, 2 * k)[:, ::2],
    "expanded": lambda k: torch.randn(1, k).expand(5, k),
    "batch": lambda k: torch.randn(2, 5, k),
    "transposed batch": lambda k: torch.randn(5, 2, k).transpose(0, 1),
    "transposed features": lambda k: torch.randn(2, k, 5).transpose(1, 2),
    "transposed features of one": lambda k: torch.randn(1, k, 5).transpose(1, 2),
    "sliced batch": lambda k: torch.randn(2, 4, 2 * k)[:, :, :k],
    "transposed batch of one": lambda k: torch.randn(5, 1, k).transpose(0, 1),
    "batch of one row": lambda k: torch.randn(1, 5, k).transpose(0, 1),
    "expanded batch": lambda k: torch.randn(1, 3, k).expand(5, 3, k),
    "image": lambda k: torch.randn(2, k, 3, 4).permute(0, 2, 3, 1),
    "five": lambda k: torch.randn(2, 1, 3, 1, k),
    "empty": lambda k: torch.randn(0, 3, k),
    "strided empty": lambda k: torch.randn(2, 0, 2 * k)[..., ::2],
}


@pytest.mark.parametrize("features", [(48, 40), (1, 7), (33, 1)], ids=str)
@pytest.mark.parametrize("trains", [(0, 0), (1, 1), (0, 1), (1, 0)], ids=["-", "wb", "b", "w"])
def test_linear_over_every_geometry(device, features, trains):
    """at::linear picks addmm, mm or bmm by layout and by requires_grad: so must its gradients."""
    torch.manual_seed(0)
    for bias in (True, False):
        layer = nn.Linear(*features, bias=bias)
        layer.weight.requires_grad_(bool(trains[0]))
        if bias:
            layer.bias.requires_grad_(bool(trains[1]))
        managed, resident = resident_pair(nn.Sequential(layer))
        with attached(managed, device):
            for build in GEOMETRIES.values():
                step = make_step(build(features[0]), device, False)
                assert_models_agree(managed, resident, step, steps=1, device=device)


def over_one(k):
    """Yield contiguous inputs with each stride of their axes of one, which may be any."""
    for shape in ((1, 5, k), (5, 1, k), (1, 1, k), (2, 1, 5, k), (2, 5, 1, k), (1, 5, 1, k)):
        ones = [axis for axis, size in enumerate(shape) if size == 1]
        for steps in itertools.product((0, 1, k, 5 * k, 7 * k), repeat=len(ones)):
            x = torch.randn(shape)
            stride = list(x.stride())
            for axis, step in zip(ones, steps, strict=True):
                stride[axis] = step
            yield x.as_strided(shape, stride)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trainable"])
def test_linear_over_every_stride_of_an_axis_of_one(device, trains, autocast):
    """Such an input is contiguous; without a bias at::linear goes by that stride all the same."""
    torch.manual_seed(0)
    for bias in (True, False):
        managed, resident = resident_pair(nn.Sequential(nn.Linear(48, 40, bias=bias)))
        train_only(managed, trains)
        train_only(resident, trains)
        with attached(managed, device):
            for x in over_one(48):
                train = make_step(x, device, autocast)

                def step(model, x=x, train=train):
                    with torch.no_grad():
                        sampled = model(x.to(device))
                    return [sampled, *train(model)]

                assert_models_agree(managed, resident, step, steps=1, device=device)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("features", [(48, 40), (1, 7), (33, 1)], ids=str)
def test_linear_runs_the_residents_products_over_every_geometry(features, trainable, bias):
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(nn.Linear(*features, bias=bias)))
    train_only(managed, trainable)
    train_only(resident, trainable)
    with attached(managed):
        for name, build in GEOMETRIES.items():
            ran = []
            x = build(features[0])
            for model in (managed, resident):
                with Products() as products:
                    leaf = x.detach().requires_grad_()
                    y = model(leaf)
                    forward = len(products.ran)
                    y.backward(torch.ones_like(y))
                # Torch orders the products of the backward as it likes.
                ran.append((products.ran[:forward], sorted(products.ran[forward:])))
            assert ran[0] == ran[1], name


def test_inputs_of_one_leaf_share_autocasts_cast(device):
    """Autocast casts a float32 leaf once per region, so its gradients are summed in bfloat16."""
    torch.manual_seed(0)

    class Fan(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            return self.q(x) * self.k(x) + self.v(x)

    managed, resident = resident_pair(Fan())
    with attached(managed, device):
        for inside in (False, True):
            step = make_step(torch.randn(64, 32), device, True, backward_inside=inside)
            assert_models_agree(managed, resident, step, device=device)


def test_autocast_regions_are_kept_apart(device):
    """Gradients are summed in bfloat16 within a region, and in float32 from one to the next."""
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(nn.Linear(32, 32), nn.Tanh()))

    def step(model):
        x = torch.randn(64, 32, device=device, requires_grad=True)
        y = 0
        for _ in range(3):
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                y = y + (model(x) * model(x)).float()
        (y * weights_of(y)).sum().backward()
        return [y, x.grad]

    with attached(managed, device):
        assert_models_agree(managed, resident, step, device=device)


def test_a_leaf_in_the_place_of_another_is_cast_anew(device):
    """A new tensor may have the identity of one that is gone, within one autocast region."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    managed, resident = resident_pair(model)

    def step(model):
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return [
                model(torch.randn(4, 32, device=device, requires_grad=True)).detach()
                for _ in range(20)
            ]

    with attached(managed, device):
        assert_models_agree(managed, resident, step, device=device)


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"]
)
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_without_grad(device, mode, trainable):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Flatten(2), nn.Linear(90, 30), nn.Linear(30, 4)
    )
    train_only(model, trainable)
    managed, resident = resident_pair(model)

    def step(module):
        with mode():
            return [module(torch.randn(2, 8, 9, 10).to(device))]

    with attached(managed, device):
        assert_models_agree(managed, resident, step, steps=3, device=device)


def test_frozen_layers_save_nothing(device):
    """A frozen Linear or Conv2d keeps no activation: its input gradient needs the weight alone."""
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(2), nn.Linear(36, 12), nn.Linear(12, 5)
    )
    train_only(model, False)
    saved: list[torch.Tensor] = []

    def count():
        saved.clear()
        x = torch.randn(2, 4, 6, 6, device=device, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = model(x)
        y.sum().backward()
        return len(saved)

    with attached(model, device):
        assert count() == 0
        model[2].weight.requires_grad_(True)
        assert count() == 1, "a trainable weight needs its layer's input, and only that"


def test_gradients_keep_the_residents_layout(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3)).to(memory_format=torch.channels_last)
    managed, resident = resident_pair(model)
    step = make_step(torch.randn(2, 4, 8, 8), device, False)
    with attached(managed, device):
        assert_models_agree(managed, resident, step, device=device)
        assert managed[0].weight.grad.stride() == resident[0].weight.grad.stride()
        assert managed[0].weight.grad.device.type == "cpu"


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gradient_of_an_input_has_the_residents_layout(device, bias, trainable):
    """A column-major input, of three dimensions that fold into two without a copy."""
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(nn.Linear(6, 5, bias=bias)))
    managed.requires_grad_(trainable)
    resident.requires_grad_(trainable).to(device)
    x = torch.randn(6, 4, device=device).t().unsqueeze(0).requires_grad_()
    with attached(managed, device) as manager:
        assert len(manager.layers) == 1
        found, expected = (torch.autograd.grad(m(x).sum(), x)[0] for m in (managed, resident))
    assert_same(found, expected)
    assert found.stride() == expected.stride()
