"""Convolutions of one and three axes, transposed and causal ones: the resident model's bits."""

from __future__ import annotations

import contextlib

import pytest
import torch
from equality import (
    assert_models_agree,
    assert_same,
    attached,
    is_simulated,
    resident_pair,
    step_of,
)
from models import Parts, Tower
from torch import nn
from torch.nn import functional as F

from oracle_offload.layers.any import AnyLayer
from oracle_offload.layers.conv import Conv1dLayer, Conv2dLayer, Conv3dLayer
from oracle_offload.layers.swap import answering_class

pytestmark = pytest.mark.usefixtures("nothing_is_small")
CHANNELS = 4
SIZES = {1: (11,), 2: (7, 9), 3: (5, 6, 7)}


class Causal(nn.Conv3d):
    """As Wan's and Qwen-Image's: it pads, with frames that are given, and ``super()`` computes."""

    def forward(self, x, before=None):
        frames = self.kernel_size[0] - 1
        if before is not None:
            x = torch.cat([before.to(x.device), x], dim=-4 + 1)
            frames -= before.shape[-4 + 1]
        return super().forward(F.pad(x, (1, 1, 1, 1, frames, 0)))


def with_frames():
    """Return what calls a causal convolution by keyword, and positionally."""
    return Parts(
        lambda parts, x: parts.conv(parts.conv(x, x[:, :, :1]), before=None),
        conv=Causal(CHANNELS, CHANNELS, 3),
    )


def net(make, reentrant=None):
    return Tower(*(nn.Sequential(make(), nn.Tanh()) for _ in range(2)), reentrant=reentrant)


def make_step(axes, device, dtype=torch.float32, autocast=False, batch=(2,)):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(*batch, CHANNELS, *SIZES[axes], generator=generator)

    def step(model):
        leaf = x.to(device, dtype).detach().requires_grad_()
        context = contextlib.nullcontext()
        if autocast:
            context = torch.autocast(torch.device(device).type, torch.bfloat16)
        with context:
            y = model(leaf)
        weights = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
        (y.float() * weights).sum().backward()
        return [y.detach(), leaf.grad]

    return step


CLASSES = {
    1: (nn.Conv1d, Conv1dLayer),
    2: (nn.Conv2d, Conv2dLayer),
    3: (nn.Conv3d, Conv3dLayer),
}
PADDINGS = [
    {"padding": 1},
    {"padding": "valid"},
    {"padding": "same", "dilation": 2},
    {"padding": "same", "kernel_size": 2},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "replicate"},
    {"padding": 1, "padding_mode": "circular"},
    {"padding": "same", "kernel_size": 2, "padding_mode": "circular"},
    {"padding": 2, "stride": 2, "dilation": 2, "bias": False},
    {"padding": 1, "groups": CHANNELS},
]


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("options", PADDINGS, ids=str)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_each_padding_has_the_residents_bits(device, axes, options, trainable):
    if not is_simulated(device) and axes == 3 and options.get("padding_mode") == "reflect":
        pytest.skip("torch's reflection_pad3d does not compute the same gradient twice on a card")
    made, kind = CLASSES[axes]
    options = {"kernel_size": 3, **options}
    model = net(lambda: made(CHANNELS, CHANNELS, **options)).requires_grad_(trainable)
    managed, resident = resident_pair(model)
    with attached(managed, device) as manager:
        assert manager.resident == {} and {type(layer) for layer in manager.layers} == {kind}
        for batch in ((2,), (), (0,)):
            step = make_step(axes, device, batch=batch)
            assert_models_agree(managed, resident, step, steps=1, device=device)


WAYS = {
    "conv1d": (1, lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1), Conv1dLayer),
    "conv3d": (3, lambda: nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1, groups=2), Conv3dLayer),
    "causal": (3, with_frames, Conv3dLayer),
    "transposed": (2, lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1), AnyLayer),
}


@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("way", WAYS)
def test_a_convolution_has_the_residents_bits(device, way, trainable, reentrant, how):
    axes, make, kind = WAYS[way]
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    model = net(make, reentrant).to(dtype).requires_grad_(trainable)
    managed, resident = resident_pair(model)
    with attached(managed, device) as manager:
        assert manager.resident == {}
        assert all(isinstance(layer, kind) for layer in manager.layers)
        step = make_step(axes, device, dtype, how == "autocast")
        assert_models_agree(managed, resident, step, steps=1, device=device)
        with torch.no_grad():
            x = torch.ones(1, CHANNELS, *SIZES[axes]).to(device, dtype)
            assert_same(managed(x), resident(x))


TRANSPOSED = [
    {"stride": 2, "output_padding": 1},
    {"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2},
    {"groups": 2, "bias": False},
    {"padding": 1, "groups": CHANNELS, "dilation": 2},
]


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("options", TRANSPOSED, ids=str)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_transposed_convolution_has_the_residents_bits(device, axes, options, trainable):
    made = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
    model = net(lambda: made(CHANNELS, CHANNELS, 3, **options)).requires_grad_(trainable)
    managed, resident = resident_pair(model)
    with attached(managed, device) as manager:
        assert manager.resident == {}
        assert all(isinstance(layer, AnyLayer) for layer in manager.layers)
        step = make_step(axes, device)
        assert_models_agree(managed, resident, step, steps=1, device=device)


def test_the_output_size_of_a_transposed_convolution_is_the_callers(device):
    def compute(parts, x):
        return parts.up(x, output_size=[2 * size + 2 for size in x.shape[2:]])

    def sized():
        return Parts(compute, up=nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, stride=2))

    managed, resident = resident_pair(net(sized))
    with attached(managed, device) as manager:
        assert manager.resident == {}
        assert_models_agree(managed, resident, make_step(2, device), steps=1, device=device)


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """What autograd keeps for backward."""

    def __init__(self):
        self.bytes = 0
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        self.bytes += tensor.nbytes
        return tensor


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_frozen_convolution_keeps_no_activation(device, axes):
    made, kind = CLASSES[axes]
    model = made(CHANNELS, CHANNELS, 3, padding=1).requires_grad_(False)
    x = torch.randn(2, CHANNELS, *SIZES[axes]).to(device).requires_grad_()
    with attached(model, device) as manager:
        assert [type(layer) for layer in manager.layers] == [kind]
        with (kept := Kept()):
            model(x).sum().backward()
        assert kept.bytes == 0
    resident = model.to(device)
    with (kept := Kept()):
        resident(x).sum().backward()
    assert kept.bytes >= x.nbytes


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_backward_uses_the_arguments_that_forward_used(device, trainable):
    """A loop may widen its one convolution as it goes."""

    def compute(parts, x):
        for reach in (1, 2, 3):
            parts.conv.dilation = parts.conv.padding = reach, reach
            x = x + parts.conv(x)
        return x

    model = Parts(compute, conv=nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1))
    managed, resident = resident_pair(model.requires_grad_(trainable))
    with attached(managed, device) as manager:
        assert [type(layer) for layer in manager.layers] == [Conv2dLayer]
        step = make_step(2, device, torch.float32, False)
        assert_models_agree(managed, resident, step, device=device)


def test_a_wrong_shape_is_refused_in_torchs_words(device):
    for axes, (made, _) in CLASSES.items():
        managed, resident = resident_pair(made(CHANNELS, CHANNELS, 3))
        resident.to(device)
        with attached(managed, device):
            for shape in ((2, CHANNELS + 1, *SIZES[axes]), SIZES[axes], (1, 1, 2, 2, 2, 2, 2)):
                said = []
                for model in (managed, resident):
                    with pytest.raises(RuntimeError) as raised:
                        model(torch.ones(shape).to(device))
                    said.append(str(raised.value))
                assert said[0] == said[1]
            managed(torch.ones(2, CHANNELS, *SIZES[axes]).to(device))


class ReadsBias(nn.Conv3d):
    def forward(self, x):
        return super().forward(x) + self.bias.sum()


class Decorated(nn.Conv1d):
    forward = torch.no_grad()(nn.Conv1d.forward)


class Standardised(nn.Conv2d):
    """Computes with another weight than its own, where ``forward`` is inherited."""

    def _conv_forward(self, input, weight, bias):
        mean = weight.mean(dim=(1, 2, 3), keepdim=True)
        return super()._conv_forward(input, weight - mean, bias)


def tile(module):
    """The well-known patch for textures that repeat."""

    def _conv_forward(input, weight, bias):
        padded = F.pad(input, (1, 1, 1, 1), mode="circular")
        return F.conv2d(padded, weight, bias, module.stride, 0, module.dilation, module.groups)

    module._conv_forward = _conv_forward


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("when", ["class", "before", "after"])
def test_a_convolution_of_another_way_is_not_passed_over(when, trainable, device):
    made = Standardised if when == "class" else nn.Conv2d
    managed, resident = resident_pair(
        nn.Sequential(*[made(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2)])
    )
    for model in (managed, resident):
        model.requires_grad_(trainable)
        if when == "before":
            tile(model[0])
    step = step_of(torch.randn(2, CHANNELS, 5, 6), device)
    with attached(managed, device) as manager:
        assert len(manager.layers) == 2
        if when == "after":
            assert_models_agree(managed, resident, step, steps=1, device=device)
            tile(managed[0])
            tile(resident[0])
        assert_models_agree(managed, resident, step, device=device)


def test_which_subclasses_have_the_operator(device):
    models = {
        Causal(4, 4, 3): Conv3dLayer,
        ReadsBias(4, 4, 3): Conv3dLayer,
        Decorated(4, 4, 3): Conv1dLayer,
        Standardised(4, 4, 3): AnyLayer,
        type("Named", (nn.Conv1d,), {})(4, 4, 3): Conv1dLayer,
    }
    for model, kind in models.items():
        with attached(model, device) as manager:
            assert all(isinstance(layer, kind) for layer in manager.layers)
            if isinstance(model, Causal):
                below = answering_class(nn.Conv3d, nn.Conv3d.forward)
                order = type(model).__mro__
                at = order.index(Causal)
                assert at and order[at : at + 3] == (Causal, below, nn.Conv3d)
