"""Autocast casts a float32 leaf once per region: gradients have the resident model's bits.

Block inputs under reentrant checkpointing are such leaves, and feed managed layers and resident
ones (norms, adapters, layers named in ignore_modules). See also test_matrix.py.
"""

from __future__ import annotations

import copy
import functools

import models
import pytest
import torch
from equality import assert_models_agree, attached, resident_pair
from test_matrix import CHECKPOINTS, make_step, train_only, weights_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from oracle_offload.layers.autocast import (
    cast_dtype,
    cast_input,
    cast_tensors,
    computing_in,
    keeps_casts_with_grad,
)

RESIDENT = ["r"]
SHAPES = {
    "features": (32,),
    "matrix": (64, 32),
    "batch": (3, 7, 32),
    "image": (2, 3, 5, 32),
    "transposed": (7, 3, 32),
}


class Fan(nn.Module):
    """One input for three layers, one of which is to stay resident."""

    def __init__(self, layer, reentrant):
        super().__init__()
        self.q, self.r, self.v = (layer() for _ in range(3))
        self.reentrant = reentrant

    def inner(self, x):
        return self.q(x) * self.r(x) + self.v(x) + self.q(torch.tanh(x))

    def forward(self, x):
        return models.checkpointed(self.inner, x, reentrant=self.reentrant)


def linear():
    return nn.Linear(32, 32)


def conv():
    return nn.Conv2d(8, 8, 3, padding=1)


def expect_torch_to_lose_gradients(request, device):
    """Expect the comparison to fail where the resident model's own gradients are lost.

    torch 2.6 keeps a cast made without grad, and a use with grad gets it: the weight's gradient is
    lost, of the resident model alone.
    """
    weight = torch.ones(4, 4, device=device, requires_grad=True)
    x = torch.ones(1, 4, device=device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        with torch.no_grad():
            nn.functional.linear(x, weight)
        keeps_it = nn.functional.linear(x, weight).requires_grad
    if not keeps_it:
        request.applymarker(pytest.mark.xfail(reason="this torch loses gradients", strict=True))


@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["nockpt", "reentrant", "nonreentrant"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_leaf_is_cast_once_for_managed_and_resident_layers(
    request, device, shape, trainable, reentrant
):
    if trainable and reentrant:
        expect_torch_to_lose_gradients(request, device)
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(Fan(linear, reentrant), Fan(linear, reentrant)))
    train_only(managed, trainable)
    train_only(resident, trainable)
    x = torch.randn(SHAPES[shape])
    if shape == "transposed":
        x = x.transpose(0, 1)
    with attached(managed, device, ignore_modules=["0.r", "1.r"]) as manager:
        assert len(manager.layers) == 4
        for inside in (False, True):
            step = make_step(x, device, True, backward_inside=inside)
            assert_models_agree(managed, resident, step, device=device)


@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["nockpt", "reentrant", "nonreentrant"])
@pytest.mark.parametrize("shape", [(2, 8, 9, 10), (8, 9, 10)], ids=["batch", "image"])
def test_an_image_is_cast_once_for_managed_and_resident_convolutions(device, shape, reentrant):
    managed, resident = resident_pair(nn.Sequential(Fan(conv, reentrant)))
    with attached(managed, device, ignore_modules=["0.r"]) as manager:
        assert len(manager.layers) == 2
        step = make_step(torch.randn(shape), device, True)
        assert_models_agree(managed, resident, step, device=device)


def test_casts_without_grad_do_not_disturb_those_with_it(request, device):
    """A sample drawn in the same region, the cache switched off, saved-tensor hooks forbidden."""
    expect_torch_to_lose_gradients(request, device)
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(Fan(linear, True), nn.Tanh(), linear()))
    kind = torch.device(device).type

    def step(model):
        x = torch.randn(4, 32).to(device).requires_grad_()
        leaves = [x, *(torch.randn(4, 32).to(device).requires_grad_() for _ in range(2))]
        with torch.autocast(kind, torch.bfloat16):
            with torch.no_grad():
                drawn = model(torch.randn(4, 32).to(device))
            y = model(leaves[0]).float()
            with torch.autocast(kind, torch.bfloat16, cache_enabled=False):
                y = y + model(leaves[1]).float()
        with (
            torch.autocast(kind, torch.bfloat16),
            torch.autograd.graph.disable_saved_tensors_hooks("not now"),
        ):
            y = y + model[2](leaves[2]).float()
        (y * weights_of(y)).sum().backward()
        return [drawn, y, *(leaf.grad for leaf in leaves)]

    with attached(managed, device, ignore_modules=["0.r"]):
        assert_models_agree(managed, resident, step, device=device)


def test_saved_tensor_hooks_around_a_region_see_no_more_than_for_the_resident_model(device):
    """What is asked of autocast to learn its cast is hidden from the hooks outside."""
    managed, resident = resident_pair(nn.Sequential(Fan(linear, None)).requires_grad_(False))
    x = torch.randn(2, 4, 32, device=device, requires_grad=True)
    packed = {}
    with attached(managed, device):
        resident.to(device)
        for name, model in (("managed", managed), ("resident", resident)):
            seen = packed[name] = []
            with (
                torch.autocast(torch.device(device).type, torch.bfloat16),
                torch.autograd.graph.saved_tensors_hooks(
                    lambda t, seen=seen: seen.append(t.shape) or t, lambda t: t
                ),
            ):
                model(x)
    assert all(list(shape).count(0) == 0 for shape in packed["managed"])
    assert len(packed["managed"]) <= len(packed["resident"])


@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["nockpt", "reentrant", "nonreentrant"])
def test_layers_that_share_a_parameter_share_its_cast(device, reentrant):
    """The gradients of one weight are summed in bfloat16, whichever layer they come from."""

    layers = [part for _ in range(3) for part in (nn.Linear(16, 16), nn.Tanh())]
    model = models.Tower(nn.Sequential(*layers), reentrant=reentrant)
    first, second, third = layers[::2]
    second.weight = third.weight = first.weight
    third.bias = first.bias
    resident = copy.deepcopy(model)
    with attached(model, device) as manager:
        assert len(manager.layers) == 3
        step = make_step(torch.randn(7, 16), device, True)
        assert_models_agree(model, resident, step, device=device)
        assert len({id(layer.tensors()[0]) for layer in manager.layers}) == 1


def test_a_weight_that_is_not_cast_is_its_own_at_each_use(device):
    """Autocast keeps no copy where it computes in float32, so gradients are summed as they are."""
    managed = nn.Sequential(nn.Linear(8, 8))
    kind = torch.device(device).type
    with attached(managed, device) as manager, torch.autocast(kind, torch.bfloat16):
        weight = managed[0].weight
        of = functools.partial(manager.attachment.stand_ins.of, weight)
        assert of(weight, torch.bfloat16) is of(weight, torch.bfloat16)
        one, other = of(weight, torch.float32), of(weight, torch.float32)
        assert one is not other and one.dtype is other.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_gradients_of_other_dtypes_are_summed_as_they_are(device, dtype):
    """Autocast keeps casts of float32 leaves alone; float64 would lose most of its digits."""
    managed, resident = resident_pair(nn.Sequential(Fan(linear, None)).to(dtype))
    with attached(managed, device) as manager:
        assert len(manager.layers) == 3
        step = make_step(torch.randn(7, 32).to(dtype), device, True)
        assert_models_agree(managed, resident, step, device=device)


def leaf(dtype=torch.float32, requires_grad=True):
    return torch.randn(3, 4).to(dtype).requires_grad_(requires_grad)


INPUTS = {
    "no gradient": lambda: leaf(requires_grad=False),
    "no leaf": lambda: leaf() * 2,
    "another dtype": lambda: leaf(torch.float16),
    "a view": lambda: leaf(requires_grad=False)[1:].requires_grad_(),
    "no cache": leaf,
}


@pytest.mark.parametrize("what", INPUTS)
def test_an_input_that_autocast_keeps_no_cast_of_is_cast_by_one_operator(what):
    x = INPUTS[what]()
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=what != "no cache"),
        Launches() as launches,
    ):
        found = cast_input(x, torch.bfloat16)
    assert launches.operators == [torch.ops.aten._to_copy.default]
    assert torch.equal(found, x.bfloat16()) and found.requires_grad is x.requires_grad


def test_a_region_that_has_ended_keeps_no_weight(device):
    """The stand-ins of a region refer to Parameters: they go with the next region, or detach."""
    model = nn.Sequential(nn.Linear(8, 8))
    with attached(model, device) as manager:
        step = make_step(torch.randn(2, 8), device, True)
        step(model)
        stand_ins = manager.attachment.stand_ins
        assert stand_ins._made
        made = next(iter(stand_ins._made.values()))
        step(model)
        assert made is not next(iter(stand_ins._made.values()))
    assert not stand_ins._made


class Launches(TorchDispatchMode):
    """Results of operators that compute anything."""

    def __init__(self):
        super().__init__()
        self.operators = []
        self.computing = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operators.append(func)
        if result.numel():
            self.computing.append(func)
        return result


def test_asking_for_the_region_computes_nothing(device):
    """It is asked at each use of a trainable weight: no kernel may be launched for it."""
    with attached(nn.Sequential(nn.Linear(8, 8)), device) as manager:
        ask = manager.attachment.stand_ins._open_region
        with torch.autocast(torch.device(device).type, torch.bfloat16), Launches() as launches:
            region = ask()
            assert ask() is region
        assert torch.ops.aten.mm.default in launches.operators
        assert not launches.computing
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            assert ask() is not region


@pytest.mark.parametrize("cache", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_without_grad_a_product_is_the_residents(device, bias, trainable, cache):
    """torch goes by the weight's cast: the one that it keeps may require grad all the same."""
    managed, resident = resident_pair(nn.Sequential(nn.Linear(32, 32, bias=bias)))
    train_only(managed, trainable)
    train_only(resident, trainable)
    keeps_casts_with_grad(torch.device(device).type)  # asked once, by a product of its own
    x = torch.randn(7, 3, 32).transpose(0, 1).to(device)
    found = []
    with attached(managed, device) as manager:
        assert len(manager.layers) == 1
        resident.to(device)
        for model in (resident, managed):
            region = torch.autocast(torch.device(device).type, torch.bfloat16, cache_enabled=cache)
            with torch.no_grad(), region, Launches() as launches:
                y = model(x)
            found.append(({torch.ops.aten.mm.default, torch.ops.aten.bmm.default}
                          & set(launches.operators), y))  # fmt: skip
    (expected, y), (used, managed_y) = found
    assert len(expected) == 1 and used == expected
    assert torch.equal(managed_y, y)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "nonreentrant"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", ["q_proj", "v_proj", "down_proj"]), ("flux", ["to_q", "to_v", "proj_out"])],
    ids=["llama", "flux"],
)
def test_adapters_of_float32_models_train_alike(device, name, targets, reentrant):
    """LoRA on a float32 base: block inputs are leaves under reentrant checkpoints."""
    build = {"llama": models.llama, "flux": models.flux}[name]
    inner = {"llama": models.language_step, "flux": models.flux_step}[name]
    managed, resident = resident_pair(models.lora(build().train(), targets))

    def step(model):
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return inner(model)

    for model in (managed, resident):
        if name == "flux":

            def function(block, *args):
                return checkpoint(block, *args, use_reentrant=reentrant)

            model.enable_gradient_checkpointing(function)
        else:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
    with attached(managed, device, offload_percent=0.8) as manager:
        assert len(manager.layers) > 5
        assert_models_agree(managed, resident, step, device=device)


def test_borrowed_tensors_are_cast_as_autocast_does():
    """Floating ones but float64, and those alone that are wanted."""
    tensors = [torch.ones(2, dtype=d) for d in (torch.float32, torch.float64, torch.int32)]
    found = cast_tensors(torch.bfloat16, [*tensors, None, tensors[0]], [True] * 4 + [False])
    assert [None if t is None else t.dtype for t in found] == [
        torch.bfloat16,
        torch.float64,
        torch.int32,
        None,
        torch.float32,
    ]


@pytest.mark.parametrize("now", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("then", [None, torch.bfloat16, torch.float16], ids=str)
def test_code_computes_in_the_dtype_that_it_was_compiled_for(now, then):
    with torch.autocast("cpu", now, enabled=now is not None):
        with computing_in("cpu", then):
            assert cast_dtype("cpu") is then
        assert cast_dtype("cpu") is now
