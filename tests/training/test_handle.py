"""A weight that borrows its bytes: what any library computes with it has the resident's bits."""

import copy
import gc
import weakref

import pytest
import torch
from equality import assert_models_agree, assert_same, attached, is_simulated, resident_pair
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from oracle_offload import OffloadError
from oracle_offload.errors import StaleWeightsError
from oracle_offload.layers.handle import Handle
from oracle_offload.layers.quantised import QuantisedLayer

IN, OUT = 24, 72  # a weight of more bytes than a constant may have


class Invented(nn.Module):
    """A layer of a library that is not known; `product` is its code."""

    def __init__(self, product, features=IN, out_features=OUT):
        super().__init__()
        self.in_features, self.out_features, self.product = features, out_features, product
        weight = torch.randint(-99, 99, (out_features, features), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Buffer(torch.rand(out_features, 1) / 99)
        self.comfy_quant = nn.Buffer(torch.zeros(1, dtype=torch.uint8))
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x):
        return self.product(self, x)


def dequantised(layer, x):
    return F.linear(x, layer.weight.to(x.dtype) * layer.weight_scale.to(x.dtype), layer.bias)


def in_place(layer, x):
    """What is made of a weight is the code's own: it may be written to."""
    weight = layer.weight.to(x.dtype).mul_(layer.weight_scale.to(x.dtype))
    return F.linear(x, weight, layer.bias)


class OwnProduct(Function):
    """Keeps its weights where autograd does not look, and writes to what it makes of them."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.weights = weight, [scale]
        return x @ (weight.to(x.dtype) * scale).t()

    @staticmethod
    def backward(ctx, grad):
        weight, (scale,) = ctx.weights
        return grad @ weight.to(grad.dtype, copy=True).mul_(scale), None, None


def own_product(layer, x):
    return OwnProduct.apply(x, layer.weight, layer.weight_scale) + layer.bias


def by_address(layer, x):
    """A kernel that takes addresses: no operator of torch, nothing that dispatches."""
    weight = layer.weight
    at = [0 * tensor.data_ptr() for tensor in (weight, layer.weight_scale)]
    return dequantised(layer, x) + sum(at)


def by_parts(layer, x):
    """Views of a weight, several in one operator, in lists and by name."""
    halves = layer.weight.view(2, -1, layer.in_features).unbind()
    above, below = (half.to(x.dtype) for half in halves)
    weight = torch.cat([above, below]) * layer.weight_scale.expand(-1, layer.in_features)
    return torch.addmm(input=layer.bias, mat1=x.flatten(0, -2), mat2=weight.t()).view(
        *x.shape[:-1], -1
    )


def transposed(layer, x):
    signs = layer.weight.view(torch.uint8).view(torch.int8).t().contiguous().t()
    return F.linear(x, signs.to(x.dtype) * layer.weight_scale.select(1, 0)[:, None], layer.bias)


def into_its_own(layer, x):
    """Small tensors of the code's own are written by what a weight has."""
    scale = torch.full((layer.out_features, 1), 2.0, device=x.device).mul_(layer.weight_scale)
    half = torch.empty_like(scale)
    torch.mul(layer.weight_scale, 0.5, out=half)
    return F.linear(x, layer.weight.to(x.dtype) * (scale * half).to(x.dtype), layer.bias)


def strided(layer, x):
    weight = layer.weight
    same = weight.as_strided(weight.shape, weight.stride(), weight.storage_offset())
    second = weight.storage_offset() + layer.in_features
    row = weight[1:].as_strided((layer.in_features,), (1,), second)
    return F.linear(x, same.to(x.dtype) * layer.weight_scale, layer.bias) + row.sum()


def pointed_anew(layer, x):
    """Gives its weights other data, made of what they have."""
    layer.weight.data = layer.weight.data.view(torch.uint8).view(torch.int8)
    layer.bias.data = layer.bias.data.to(torch.float64).to(torch.float32)
    return dequantised(layer, x)


def caught(layer, x):
    """Has a fast kernel, and another way where that cannot be had."""
    try:
        at = layer.weight.data_ptr()
    except RuntimeError:
        return -dequantised(layer, x)
    return dequantised(layer, x) + 0 * at


def late(layer, x):
    """Has something saved before it asks for an address."""
    return by_address(layer, x.sigmoid())


def by_chance(layer, x):
    return in_place(layer, F.dropout(x, 0.5))


class InParts(OwnProduct):
    @staticmethod
    def backward(ctx, grad):
        weight, (scale,) = ctx.weights
        whole = torch.cat([weight[:1], weight[1:]]).to(grad.dtype)
        return grad @ (whole * scale).to(grad.dtype), None, None


def in_parts(layer, x):
    return InParts.apply(x, layer.weight, layer.weight_scale) + layer.bias


PRODUCTS = [
    *(dequantised, in_place, own_product, by_address, by_parts, transposed),
    *(into_its_own, strided, pointed_anew, caught, late, by_chance, in_parts),
]
ASKS_FOR_ADDRESSES = (by_address, caught, late)


class Net(nn.Module):
    def __init__(self, product, mode="plain"):
        super().__init__()
        self.mode = mode
        self.first, self.second = Invented(product), Invented(product, OUT, IN)
        self.norm = nn.LayerNorm(IN)

    def block(self, x):
        return x + self.second(F.silu(self.first(self.norm(x))))

    def forward(self, x):
        if self.mode == "plain":
            return self.block(self.block(x))
        if self.mode == "autocast":  # which casts a trained bias once for two calls
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.mode == "reentrant")


def layers_of(manager):
    layers = [layer for layer in manager.layers if isinstance(layer, QuantisedLayer)]
    assert [layer.name for layer in layers] == ["first", "second"], manager.resident
    return layers


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "bias trains"])
@pytest.mark.parametrize("mode", ["plain", "reentrant", "not-reentrant", "autocast"])
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.__name__)
def test_any_code_has_the_bits_of_the_resident(device, product, mode, trains):
    torch.manual_seed(0)
    managed, resident = resident_pair(Net(product, mode))
    for model in (managed, resident):
        model.first.bias.requires_grad_(trains)
        model.second.bias.requires_grad_(trains)
    x = torch.randn(3, 5, IN)

    def step(model):
        given = x.detach().to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=mode == "autocast"):
            y = model(given)
        y.float().square().sum().backward()
        with torch.no_grad():
            return y, given.grad, model(given)

    with attached(managed, device) as manager:
        layers = layers_of(manager)
        assert_models_agree(managed, resident, step, device=device)
        asks = product in ASKS_FOR_ADDRESSES
        assert all(layer.wants_memory is asks for layer in layers)
        assert bool(manager.attachment.traffic.runs_again) == asks
        assert not manager.attachment.held()


def kept_bytes(compute):
    """Return the bytes of weights, and of what was made of them, that autograd keeps of a call."""
    kept = []

    def keep(tensor):
        if not isinstance(tensor, Handle) and tensor.numel() == IN * OUT:
            kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = compute()
    del y
    return sum(kept)


def test_no_dequantised_weight_is_kept_for_backward():
    managed, resident = resident_pair(nn.Sequential(Invented(dequantised)).requires_grad_(False))
    x = torch.randn(3, 5, IN, requires_grad=True)
    with attached(managed) as manager:
        assert [type(layer) for layer in manager.layers] == [QuantisedLayer]
        assert kept_bytes(lambda: managed(x)) == 0
    assert kept_bytes(lambda: resident(x)) == 4 * IN * OUT


@pytest.mark.parametrize(
    "product", [dequantised, in_place, by_parts, own_product], ids=lambda p: p.__name__
)
def test_what_it_is_computed_with_goes_without_a_collection(product):
    """It may be all activations of a block, and collections are rare."""
    model = nn.Sequential(Invented(product)).requires_grad_(False)
    with attached(model) as manager:
        assert [type(layer) for layer in manager.layers] == [QuantisedLayer]
        for _ in range(2):
            model(torch.randn(3, IN))
        gc.collect()
        gc.disable()
        try:
            x = torch.randn(3, IN, requires_grad=True)
            gone = weakref.ref(x)
            model(x)  # a graph that no backward frees
            del x
            assert gone() is None
            assert gc.collect() == 0
        finally:
            gc.enable()


def test_what_it_is_computed_with_is_as_it_was_in_forward():
    gamma = nn.Parameter(torch.full((OUT, 1), 3.0), requires_grad=False)

    def by_gamma(layer, x):
        return F.linear(x, layer.weight.to(x.dtype) * layer.weight_scale * gamma)

    managed, resident = resident_pair(nn.Sequential(Invented(dequantised)).requires_grad_(False))
    x = torch.randn(2, IN, requires_grad=True)
    found = []
    with attached(managed):
        for model in (managed, resident):
            model[0].product = by_gamma
            gamma.fill_(3.0)
            y = model(x)
            gamma.fill_(9.0)
            found += [torch.autograd.grad(y.sum(), x)]
    assert_same(*found)


def test_a_bias_that_backward_reads_is_looked_at_as_well():
    def by_bias(layer, x):
        return (x @ layer.weight.to(x.dtype).t()) * layer.bias

    managed = nn.Sequential(Invented(by_bias)).requires_grad_(False)
    x = torch.randn(2, IN, requires_grad=True)
    with attached(managed) as manager:
        y = managed(x)
        with manager.writing():
            managed[0]._parameters["bias"].add_(1)
        with pytest.raises(StaleWeightsError, match="the bias of managed layer '0'"):
            y.sum().backward()


class AddressInBackward(OwnProduct):
    @staticmethod
    def backward(ctx, grad):
        weight, (scale,) = ctx.weights
        return grad @ (weight.to(grad.dtype) * scale) + 0 * weight.data_ptr(), None, None


def test_an_address_that_backward_alone_asks_for_is_there_from_the_next_step_on():
    def product(layer, x):
        return AddressInBackward.apply(x, layer.weight, layer.weight_scale)

    managed, resident = resident_pair(nn.Sequential(Invented(product)).requires_grad_(False))
    x = torch.randn(2, IN, requires_grad=True)
    with attached(managed) as manager:
        y = managed(x)
        with pytest.raises(OffloadError, match="From the next call on the layer's code gets"):
            y.sum().backward()
        found = torch.autograd.grad(managed(x).sum(), x)
        assert_same(found, torch.autograd.grad(resident(x).sum(), x))
        assert manager.attachment.traffic.runs_again == 1 and not manager.attachment.held()


def test_a_parameter_that_is_frozen_again_gets_no_gradient():
    managed = nn.Sequential(Invented(dequantised))
    x = torch.randn(2, IN, requires_grad=True)
    with attached(managed):
        managed(x).sum().backward()
        managed.requires_grad_(False).zero_grad()
        assert not handle_in(managed, lambda weight: managed[0].bias).requires_grad
        assert managed[0].bias.grad is None


def test_attributes_of_a_librarys_parameter_are_its_own():
    managed = nn.Sequential(Invented(dequantised), Invented(dequantised, OUT, IN))
    weight = managed[0].weight = Noted(managed[0].weight.data)
    weight.layer, weight.masters, weight.value = "q_proj", None, 7
    x = torch.randn(2, IN, requires_grad=True)
    with attached(managed.requires_grad_(False)) as manager:
        assert [type(layer) for layer in manager.layers] == [QuantisedLayer] * 2
        assert handle_in(managed[:1], lambda w: (w.layer, w.value)) == ("q_proj", 7)
        managed(x).sum().backward()


def handle_in(managed, ask):
    """Call a model whose layer hands its weight to `ask`."""
    found = []
    managed[0].product = lambda layer, x: (found.append(ask(layer.weight)), dequantised(layer, x))[
        1
    ]
    managed(torch.randn(2, IN, requires_grad=True)).sum().backward()
    return found[0]


def test_a_handle_is_like_its_weight():
    managed = nn.Sequential(Invented(dequantised))
    with attached(managed):
        weight = handle_in(managed, lambda weight: weight)
        assert isinstance(weight, Handle) and not weight.requires_grad
        assert (weight.shape, weight.stride()) == ((OUT, IN), (IN, 1))
        assert (weight.dtype, weight.device) == (torch.int8, torch.device("cpu"))
        assert repr(weight) == (
            f"Handle('0.weight', shape=({OUT}, {IN}), dtype=torch.int8, device='cpu')"
        )
        view = weight[4:, 2:].t()
        assert isinstance(view, Handle) and view.shape == (IN - 2, OUT - 4)
        assert view.storage_offset() == 4 * IN + 2
        assert torch.equal(view + 0, managed[0]._parameters["weight"][4:, 2:].t())
        assert torch.equal(weight.data + 0, managed[0]._parameters["weight"])


ASKS = {
    "address": lambda weight: weight.data_ptr(),
    "storage": lambda weight: weight.untyped_storage(),
    "numpy": lambda weight: weight.numpy(),
    "array": lambda weight: weight.__array__(),
    "DLPack": lambda weight: weight.__dlpack__(),
    "array interface": lambda weight: weight.__cuda_array_interface__,
    "copy": copy.deepcopy,
    "pickle": lambda weight: weight.__reduce_ex__(2),
    "new data": lambda weight: setattr(weight, "data", torch.zeros(OUT, IN, dtype=torch.int8)),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_what_needs_memory_is_refused_by_a_handle_and_the_layer_gets_some(ask):
    managed = nn.Sequential(Invented(dequantised))
    with attached(managed) as manager:
        weight = handle_in(managed, lambda weight: weight)
        with pytest.raises(OffloadError, match=r"of '0.weight': its weights are on the device for"):
            ask(weight)
        managed[0].product = lambda layer, x: (weight.data_ptr(), dequantised(layer, x))[1]
        with pytest.raises(OffloadError, match=r"data_ptr\(\) of '0.weight'"):
            managed(torch.randn(2, IN, requires_grad=True))  # of the code's own: it cannot be had
        assert not manager.attachment.held()


WRITES = {
    "zeroed": lambda weight: weight.zero_(),
    "an output": lambda weight: torch.neg(torch.ones(OUT, IN, dtype=torch.int8), out=weight),
    "a view": lambda weight: weight[1:].add_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_a_weight_is_refused_and_writes_nothing(write):
    managed = nn.Sequential(Invented(dequantised))
    before = managed[0].weight.clone()
    x = torch.randn(2, IN, requires_grad=True)
    with attached(managed) as manager:
        expected = managed(x)
        with pytest.raises(OffloadError, match=r"writes to '0.weight'.*would be lost"):
            handle_in(managed, write)
        assert torch.equal(managed[0]._parameters["weight"], before)
        managed[0].product = dequantised
        assert_same(managed(x), expected)
        assert not manager.attachment.held()


def test_backward_meets_the_weights_that_forward_used():
    managed = nn.Sequential(Invented(own_product))
    x = torch.randn(2, IN, requires_grad=True)
    with attached(managed) as manager:
        y = managed(x)
        with manager.writing():
            managed[0]._parameters["weight"].add_(1)
        with pytest.raises(StaleWeightsError, match="modified by an inplace operation"):
            y.sum().backward()
        managed(x).sum().backward()
        y = managed(x)
        manager.detach()
        with pytest.raises(OffloadError, match="detached between forward and backward"):
            y.sum().backward()


class Scaled(nn.Module):
    """Its scale trains, and is used by two operators."""

    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = IN, OUT
        self.weight = nn.Parameter(torch.ones(OUT, IN, dtype=torch.int8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.rand(OUT, 1))
        self.comfy_quant = nn.Buffer(torch.zeros(1, dtype=torch.uint8))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.weight_scale) * self.weight_scale.t()


@pytest.mark.parametrize("mode", ["plain", "reentrant", "not-reentrant"])
def test_a_trained_scale_has_the_residents_gradient(device, mode):
    managed, resident = resident_pair(nn.Sequential(Scaled()))

    def step(model):
        x = torch.linspace(-1, 1, 2 * IN, device=device).view(2, IN).requires_grad_()
        y = model(x) if mode == "plain" else checkpoint(model, x, use_reentrant=mode == "reentrant")
        y.square().sum().backward()
        return y, x.grad

    with attached(managed, device) as manager:
        assert [type(layer) for layer in manager.layers] == [QuantisedLayer]
        assert_models_agree(managed, resident, step, device=device)
        assert managed[0].weight_scale.grad.device.type == "cpu"


def test_a_second_derivative_is_torchs_own():
    managed, resident = resident_pair(nn.Sequential(Invented(dequantised)).requires_grad_(False))
    x = torch.randn(2, IN, requires_grad=True)

    def second(model):
        (first,) = torch.autograd.grad(model(x).sigmoid().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with attached(managed) as manager:
        assert [type(layer) for layer in manager.layers] == [QuantisedLayer]
        assert_same(second(managed), second(resident))


class Noted(nn.Parameter):
    """A library's class of Parameters, which makes others of itself by every operator."""

    def __new__(cls, data, requires_grad=False, bits=8):
        made = Tensor._make_subclass(cls, data, requires_grad)
        made.bits = bits
        return made

    def __deepcopy__(self, memo):
        return Noted(self.data.clone(), bits=self.bits)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        bits = next((each.bits for each in args if isinstance(each, Noted)), 8)
        is_coded = isinstance(result, Tensor) and not result.is_floating_point()
        return cls(result, bits=bits) if is_coded else result


def of_a_class(layer, x):
    assert isinstance(layer.weight, Noted) and layer.weight.bits == 4
    halves = layer.weight.t()
    assert type(halves).__name__ == "Noted" and halves.bits == 4
    return dequantised(layer, x)


def test_a_librarys_class_of_parameters_stays_what_it_is(device):
    managed = nn.Sequential(Invented(of_a_class), Invented(dequantised, OUT, IN))
    managed[0].weight = Noted(managed[0].weight.data, bits=4)
    managed, resident = resident_pair(managed.requires_grad_(False))
    if not is_simulated(device):
        resident.to(device)
        resident[0].weight.bits = 4

    def step(model):
        x = torch.linspace(-1, 1, 2 * IN, device=device).view(2, IN).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        return y, x.grad

    with attached(managed, device) as manager:
        assert [type(layer) for layer in manager.layers] == [QuantisedLayer] * 2
        assert_models_agree(managed, resident, step, device=device)
