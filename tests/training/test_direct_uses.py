"""Weights that code uses without calling their layer: reads borrow, and writes are kept."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from equality import (
    assert_models_agree,
    assert_same,
    attached,
    gradients,
    is_simulated,
    resident_pair,
)
from models import Parts
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from oracle_offload import OffloadError
from oracle_offload.errors import StaleWeightsError
from oracle_offload.layers.handle import Handle
from oracle_offload.model.witness import Witness

pytestmark = pytest.mark.usefixtures("nothing_is_small")
WIDTH = 32
MODES = ["plain", "autocast", "not-reentrant"]


def parts_of(compute, make=nn.Linear):
    return Parts(compute, inner=make(WIDTH, WIDTH), other=make(WIDTH, WIDTH))


def inputs(device="cpu", rows=3):
    return torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH).to(device)


def step_of(device, mode="plain"):
    def step(model):
        x = inputs(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=mode == "autocast"):
            if "reentrant" in mode:
                y = checkpoint(model, x, use_reentrant=mode == "reentrant")
            else:
                y = model(x)
        y.float().square().sum().backward()
        with torch.no_grad():
            return y, x.grad, model(x)

    return step


def assert_streams(model, device, mode="plain", trains=False):
    """Assert that nothing of a model is resident, and that it has the resident's bits."""
    managed, resident = resident_pair(model.requires_grad_(trains))
    with attached(managed, device) as manager:
        assert manager.resident == {}
        assert_models_agree(managed, resident, step_of(device, mode), device=device)
        assert manager.resident == {} and not manager.attachment.held()
        assert all(p.device.type == "cpu" for p in managed.parameters())
    if is_simulated(device):
        assert_same(dict(managed.cpu().state_dict()), dict(resident.cpu().state_dict()))


# ---- what is read ----


def norm(parts, x):
    """As DoRA's, of a layer that is called as well."""
    y = parts.other(x)
    return parts.inner(y) / torch.linalg.norm(parts.inner.weight + 0.5, dim=1)


def linear(parts, x):
    return F.linear(parts.other(x).tanh(), parts.inner.weight, parts.inner.bias)


def probe(parts, x):
    """As T5's, of dtype and device."""
    weight = parts.inner.weight
    assert isinstance(weight, nn.Parameter) and weight.shape == (WIDTH, WIDTH)
    return parts.inner(parts.other(x.to(weight.device)).to(weight.dtype))


def transposed(parts, x):
    return x @ parts.inner.weight.t()[:, ::2].repeat(1, 2) + parts.other.bias


def at_once(parts, x):
    """Of two layers in one operator, in a list."""
    return x @ torch.stack([parts.inner.weight, parts.other.weight]).sum(0)


def cast(parts, x):
    weight = parts.inner.weight.to(torch.float64)
    return F.linear(x.double(), weight.view(WIDTH, 1, WIDTH).squeeze(1)).to(x.dtype)


class Product(Function):
    """Keeps its weight where autograd does not look."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight.to(grad.dtype), None


def by_function(parts, x):
    return Product.apply(x, parts.inner.weight.detach())


def product(parts, x):
    """As LyCORIS' GLoRA: of the weight by a matrix, and DyLoRA's: of some of its rows."""
    weight = parts.inner.weight.data
    whole = weight + weight @ parts.other.weight
    return F.linear(x, whole) + x @ weight[:7].t().sum(1, keepdim=True)


def by_host(parts, x):
    """Of a weight that is taken to another device."""
    weight = parts.inner.weight.to("cpu")
    assert weight.is_cpu and parts.inner.weight.to("meta").is_meta
    return F.linear(parts.other(x), weight.to(x.device))


def three_times(parts, x):
    """All reads of a graph share one node: one for each would add gradients in another order."""
    first, second = parts.inner.weight, parts.inner.weight
    assert first is second
    return (x @ first).tanh() @ second + (x @ parts.inner.weight).sin()


READS = [norm, linear, probe, transposed, at_once, cast, by_function, product, by_host]
TRAINED = [norm, linear, transposed, at_once, three_times]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_what_a_frozen_weight_is_read_for_streams(device, read, mode):
    assert_streams(parts_of(read), device, mode)


def test_pieces_that_share_memory_outlive_what_is_in_the_arena(device):
    """Of such an operator torch does not say that it makes views."""

    def in_halves(parts, x):
        halves = torch.unsafe_chunk(parts.inner[0].weight, 2)
        return parts.other(parts.inner(x.repeat(1, 4))) @ torch.cat(halves)

    model = parts_of(in_halves, lambda *_: nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)))
    managed, resident = resident_pair(model.requires_grad_(False))
    with attached(managed, device, offload_percent=1.0):
        assert_models_agree(managed, resident, step_of(device), device=device)


@pytest.mark.parametrize("mode", ["plain", "reentrant", "not-reentrant"])
@pytest.mark.parametrize("read", TRAINED, ids=lambda read: read.__name__)
def test_what_a_trained_weight_is_read_for_has_the_residents_gradients(device, read, mode):
    assert_streams(parts_of(read), device, mode, trains=True)


def test_a_trained_weight_that_is_read_under_autocast_once_has_the_residents_gradient(device):
    assert_streams(
        parts_of(lambda parts, x: F.linear(x, parts.inner.weight)), device, "autocast", True
    )


@pytest.mark.parametrize("mode", ["plain", "reentrant", "not-reentrant"])
def test_a_weight_that_is_first_read_in_the_middle_of_a_step_adds_to_the_gradient_there(
    device, mode
):
    """A node that is made again for it would add one use to the sum before the next."""

    def compute(parts, x):
        y = parts.inner(x).tanh()
        if parts.reads:
            y = parts.inner((y @ parts.inner.weight).sin())
        return parts.other(y)

    managed, resident = resident_pair(parts_of(compute))
    resident.to(device)

    def step(model):
        x = inputs(device)
        for model.reads in (False, True, True):  # `.grad` is there from the first backward on
            model(x).square().sum().backward()
            loss = model(x).sum()
            model.reads = not model.reads  # one graph of both kinds
            run = model if mode == "plain" else functools.partial(checkpoint, model)
            options = {} if mode == "plain" else {"use_reentrant": mode == "reentrant"}
            (loss + run(x.requires_grad_(), **options).square().sum()).backward()
        return [x.grad]

    with attached(managed, device) as manager:
        assert_models_agree(managed, resident, step, device=device)
        assert manager.resident == {} and all(p.device.type == "cpu" for p in managed.parameters())


def test_a_kernel_that_calls_operators_computes_under_autocast(device):
    """A class without an operator here, called, and its weight read."""

    def compute(parts, x):
        there = parts.inner(x, x)
        return there + F.bilinear(x, x, parts.inner.weight, parts.inner.bias) + parts.other(x, x)

    model = parts_of(compute, lambda *sizes: nn.Bilinear(WIDTH, *sizes)).requires_grad_(False)
    managed, resident = resident_pair(model)
    resident.to(device)
    with attached(managed, device) as manager, torch.autocast(device, torch.bfloat16):
        assert manager.resident == {}
        x = inputs(device)
        for _ in range(2):
            assert_same(managed(x), resident(x))
        with Witness():
            found = managed(x)
        assert_same(found, resident(x))


class Adapted(nn.Module):
    """As peft wraps a layer with DoRA."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora = nn.Linear(WIDTH, WIDTH, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        weight = self.weight.to(x.dtype)
        scale = torch.linalg.norm(weight + self.lora.weight.detach(), dim=1)
        return self.base_layer(x) / scale + F.linear(x, self.lora.weight)


@pytest.mark.parametrize("mode", ["plain", "reentrant"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_adapter_that_takes_a_weight_leaves_its_layer_managed(device, when, mode):
    managed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    adapted = copy.deepcopy(managed)
    adapted[1] = Adapted(adapted[1])
    resident = copy.deepcopy(adapted)
    managed = managed if when == "after" else adapted
    with attached(managed, device) as manager:
        if when == "after":
            managed[1] = Adapted(managed[1])
            managed[1].lora.load_state_dict(resident[1].lora.state_dict())
        assert_models_agree(managed, resident, step_of(device, mode), device=device)
        assert {layer.name for layer in manager.layers} in ({"0", "1"}, {"0", "1.base_layer"})
        assert all("lora" in name for name in manager.resident)


def test_a_convolution_that_a_patched_forward_holds_streams(device):
    """In a default argument, where attach does not see it."""
    managed, resident = resident_pair(
        nn.Sequential(nn.Conv3d(3, 64, (2, 4, 4), bias=False), nn.Linear(64, 64)).requires_grad_(
            False
        )
    )
    resident.to(device)
    for model in (managed, resident):

        def fast(x, _layer=model[0]):
            return x @ _layer.weight.reshape(64, -1).t()

        model[0].forward = fast
    with attached(managed, device) as manager:
        assert manager.resident == {} and len(manager.layers) == 2
        assert_models_agree(
            managed, resident, lambda m: [m(torch.ones(4, 96, device=device))], device=device
        )


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", ["plain", "reentrant"])
def test_a_convolution_that_its_owners_patched_forward_holds_streams(device, mode, when):
    """The owner's forward is replaced by one that reads the layer's weight and never calls it."""
    owner = nn.ModuleDict({"proj": nn.Conv3d(3, WIDTH, (2, 4, 4), (2, 4, 4))})
    model = nn.Sequential(owner, nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    managed, resident = resident_pair(model)

    def patch(model):
        def fast(patches, _proj=model[0]["proj"]):
            weight = _proj.weight.reshape(_proj.weight.shape[0], -1)
            return F.linear(patches.view(-1, weight.shape[1]).to(weight.dtype), weight, _proj.bias)

        model[0].forward = fast

    def step(model):
        x = torch.linspace(-1, 1, 5 * 96, device=device).sin().view(5, 96).requires_grad_()
        y = checkpoint(model, x, use_reentrant=True) if mode == "reentrant" else model(x)
        y.square().mean().backward()
        return [y, x.grad]

    patch(resident)
    resident.to(device)
    if when == "before":
        patch(managed)
    with attached(managed, device) as manager:
        if when == "after":
            patch(managed)
        assert manager.resident == {} and len(manager.layers) == 2
        assert_models_agree(managed, resident, step, device=device)


def test_a_parameter_of_a_module_without_an_operator_is_read_by_another(device):
    def own(*sizes):
        return Parts(lambda own, x: x @ own.table, table=nn.Parameter(torch.randn(sizes)))

    read = parts_of(lambda parts, x: parts.inner(x) + x @ parts.inner.table + parts.other(x), own)
    assert_streams(read, device, trains=True)


def test_a_head_that_is_tied_to_a_table_reads_it(device):
    def tied(parts, x):
        ids = (x[:, :4] * 7).long().clamp(0, WIDTH - 1)
        rows = parts.inner(ids).sum(1) + F.embedding(ids[:, 0], parts.other.weight)
        return parts.last(F.linear(rows + x, parts.inner.weight))

    model = parts_of(tied, nn.Embedding)
    model.last = nn.Linear(WIDTH, WIDTH)
    assert_streams(model, device, trains=True)


# ---- where reads are answered so ----


@pytest.mark.parametrize("called", [False, True], ids=["read", "called"])
@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("how", ["method", "attribute", "kept"])
def test_a_forward_says_whether_a_weight_is_trained(device, how, trains, called):
    """In its first call; what was read before obeys as well."""

    def compute(parts, x):
        weight = parts.inner.weight
        if how == "attribute":
            parts.inner.weight.requires_grad = not trains
        else:
            weight.requires_grad_(not trains)
        if how != "kept":
            weight = parts.inner.weight
        return (parts.inner(x) if called else F.linear(x, weight)) + parts.other(x)

    managed, resident = resident_pair(parts_of(compute).requires_grad_(trains))
    with attached(managed, device) as manager:
        assert manager.resident == {}
        assert_models_agree(managed, resident, lambda m: [*step_of(device)(m)], device=device)
        assert managed.inner.weight.requires_grad is not trains
        assert (managed.inner.weight.grad is None) is trains


@pytest.mark.parametrize("called", [False, True], ids=["read", "called"])
def test_a_hook_on_a_weights_gradient_that_a_forward_registers_once_stays(device, called):
    """As a mask of gradients."""

    def compute(parts, x):
        if not hasattr(parts, "hook"):
            parts.hook = parts.inner.weight.register_hook(lambda grad: grad * 0.5)
            parts.met = []
            parts.inner.bias.register_post_accumulate_grad_hook(lambda _: parts.met.append(1))
        y = parts.inner(x) if called else F.linear(x, parts.inner.weight, parts.inner.bias)
        return y + parts.other(x)

    managed, resident = resident_pair(parts_of(compute))
    resident.to(device)
    with attached(managed, device) as manager:
        assert manager.resident == {}
        for _ in range(2):
            for model in (managed, resident):
                model(inputs(device)).square().sum().backward()
            assert_same(gradients(managed), gradients(resident))
        assert managed.met == resident.met == [1, 1]


def test_outside_of_forwards_and_backwards_a_weight_is_the_parameter():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    own, met = model[0].weight, []
    with attached(model) as manager:
        assert model[0].weight is own
        model.register_forward_hook(lambda *_: met.append(model[0].weight))
        model[0].register_full_backward_hook(lambda *_: met.append(model[0].bias))
        y = model(inputs())
        assert model[0].weight is own is next(model.parameters())
        y.sum().backward()
        assert [isinstance(each, Handle) for each in met] == [True, True]
        assert met[1].grad is None or met[1].grad is model[0].bias.grad
        with manager.on_device():
            with manager.on_device():
                assert isinstance(model[0].weight, Handle)
            assert isinstance(model[0].weight, Handle)
            found = []
            thread = threading.Thread(target=lambda: found.append(model[0].weight))
            thread.start()
            thread.join()
            assert found == [own], "of this thread alone"
        assert model[0].weight is own
    assert model[0].weight is own


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def encode_text(this, x):
        this.met = type(this.inner.weight)
        return F.linear(x, this.inner.weight)

    def generate(self, x):
        return self.encode_text(x)

    def get_text_features(self, x):
        self.met = type(self.inner.weight)
        return F.linear(x, self.inner.weight)


@pytest.mark.parametrize("method", ["encode_text", "get_text_features", "generate"])
def test_other_methods_that_compute_read_what_is_on_the_device(device, method):
    managed, resident = resident_pair(Encoder().requires_grad_(False))
    with attached(managed, device) as manager:
        assert manager.resident == {}
        assert_models_agree(
            managed, resident, lambda m: [getattr(m, method)(inputs(device))], device=device
        )
        assert managed.met is Handle


def test_a_loss_computes_with_the_weight_of_a_head(device):
    """Outside of the model's forward, where it says so."""
    managed, resident = resident_pair(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2)]))
    resident.to(device)
    with attached(managed, device) as manager, manager.on_device():
        for model in (managed, resident):
            hidden = model[0](inputs(device))
            F.cross_entropy(F.linear(hidden, model[1].weight), hidden.argmax(1)).backward()
        assert_same(gradients(managed), gradients(resident))
        assert managed[1].weight.device.type == torch.device(device).type
        assert managed[1].weight.grad is managed[1]._parameters["weight"].grad


def test_what_stands_in_the_place_of_a_parameter_is_what_is_read():
    model = parts_of(linear)
    x, weight = inputs(), torch.eye(WIDTH) * 2
    with attached(model):
        given = {"inner.weight": weight}
        found = torch.func.functional_call(model, given, x)
    assert_same(found, torch.func.functional_call(model, given, x))


def test_a_layer_that_is_tied_in_a_forward_gets_the_parameter():
    def tie(parts, x):
        parts.other.weight = parts.inner.weight
        parts.inner.bias = parts.inner.bias
        return parts.other(x)

    model = parts_of(tie)
    own = model.inner.weight
    with attached(model):
        model(inputs())
        assert model.other.weight is own is model.inner.weight
        assert type(model.inner.bias) is nn.Parameter


def test_a_write_between_forward_and_backward_is_refused():
    model = parts_of(lambda parts, x: F.linear(x, parts.inner.weight)).requires_grad_(False)
    x = inputs().requires_grad_()
    with attached(model) as manager:
        y = model(x)
        with manager.writing():
            model.inner.weight.add_(1)
        with pytest.raises(StaleWeightsError, match=r"weight of managed layer 'inner'"):
            y.sum().backward()


def test_a_weight_that_was_kept_and_written_outside_is_to_be_read_anew():
    def compute(parts, x):
        if not hasattr(parts, "kept"):
            vars(parts)["kept"] = parts.inner.weight
        return F.linear(x, parts.kept)

    model = parts_of(compute).requires_grad_(False)
    with attached(model), torch.no_grad():
        model(inputs())
        model.inner.weight.add_(1)
        with pytest.raises(StaleWeightsError, match=r"'inner.weight' was kept since it was read"):
            model(inputs())


def test_nothing_that_was_read_keeps_a_model():
    model = parts_of(linear)
    with attached(model):
        model(inputs())
    gone = weakref.ref(model.inner)
    del model
    gc.collect()
    assert gone() is None


def test_an_operator_on_more_than_the_arena_holds_computes_beside_it(device, caplog):
    def all_of_it(parts, x):
        weights = [layer.weight for layer in parts.layers]
        return x * torch.stack(torch._foreach_norm(weights)).sum()

    model = parts_of(all_of_it)
    model.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(8)])
    managed, resident = resident_pair(model.requires_grad_(False))
    with attached(managed, device, vram_budget="600KiB") as manager:
        assert_models_agree(managed, resident, step_of(device), device=device)
        assert manager.attachment.traffic.beside_bytes
    assert sum("outside the arena" in record.getMessage() for record in caplog.records) == 1


def test_threads_that_read_two_weights_in_turn_both_compute(device):
    """Whatever the order in which they name them."""
    model = parts_of(lambda parts, x: x).requires_grad_(False)
    resident, found = copy.deepcopy(model).to(device), []
    with attached(model, device) as manager, manager.on_device():

        def work(first, second):
            with manager.on_device():
                for _ in range(50):
                    y = torch.addmm(first.bias, first.weight, second.weight)
                found.append((first is model.inner, y))

        pairs = [(model.inner, model.other), (model.other, model.inner)]
        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 2
        with torch.no_grad():
            for is_inner, y in found:
                a, b = (resident.inner, resident.other)[:: 1 if is_inner else -1]
                assert_same(y, torch.addmm(a.bias, a.weight, b.weight))


def test_code_that_takes_an_address_gets_memory_from_the_next_read_on():
    def by_address(parts, x):
        return x @ parts.inner.weight + 0 * parts.inner.weight.data_ptr()

    managed, resident = resident_pair(parts_of(by_address).requires_grad_(False))
    with attached(managed) as manager:
        with pytest.raises(OffloadError, match=r"data_ptr\(\) of 'inner.weight'"):
            managed(inputs())
        assert_same(managed(inputs()), resident(inputs()))
        assert manager.resident == {}


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("how", ["whole", "row", "detached", "data", "new data", "kept"])
def test_a_write_to_what_has_memory_since_its_address_was_asked_is_refused(how, trains):
    def compute(parts, x):
        weight = parts.inner.weight
        if not hasattr(parts, "asked"):
            parts.asked = True
            weight.data_ptr()
        with torch.no_grad():
            if how == "whole":
                parts.inner.weight.mul_(2)
            elif how == "row":
                parts.inner.weight[0].zero_()
            elif how == "detached":
                parts.inner.weight.detach().mul_(2)
            elif how == "data":
                parts.inner.weight.data.mul_(2)
            elif how == "new data":
                parts.inner.weight.data = weight * 2
            else:
                weight.mul_(2)
        return parts.inner(x)

    model = parts_of(compute).requires_grad_(trains)
    with attached(model) as manager:
        assert manager.resident == {}
        with pytest.raises(OffloadError, match=r"data_ptr\(\) of 'inner.weight'"):
            model(inputs())
        with pytest.raises(OffloadError, match=r"code wrote to .inner.weight., of which it has a"):
            model(inputs())


def test_a_weight_that_is_logged_outside_of_the_model_is_borrowed_as_before():
    model = parts_of(lambda parts, x: vars(parts).update(met=parts.inner.weight) or parts.inner(x))
    with attached(model) as manager:
        model(inputs())
        with pytest.raises(OffloadError, match=r"Take it of a copy: .clone\(\)"):
            model.met.detach().numpy()
        model(inputs())
        assert isinstance(model.met, Handle) and manager.resident == {}


# ---- what is written ----


def normalised(parts, x):
    """As EDM2's, by the parent."""
    with torch.no_grad():
        parts.inner.weight.copy_(F.normalize(parts.inner.weight))
        parts.inner.weight.mul_(1.5).clamp_(-1, 1)
        parts.inner.weight[1:, 0].add_(parts.other.bias[1:])
    return parts.inner(x) + F.linear(x, parts.inner.weight) + parts.other(x)


def out(parts, x):
    with torch.no_grad():
        torch.add(parts.inner.weight, parts.other.weight, out=parts.inner.weight)
        torch.mul(parts.inner.weight, 0.5, out=parts.inner.weight)
    return parts.inner(x) + x @ parts.inner.weight


def by_data(parts, x):
    """As a teacher that follows its student."""
    parts.other.weight.data.mul_(0.9).add_(parts.inner.weight.data, alpha=0.1)
    parts.inner.weight.data[0] *= 0.5
    return parts.inner(x) + parts.other(x)


def new_data(parts, x):
    parts.other.bias.data = parts.inner.bias.data * 2
    parts.other.weight.data = parts.other.weight.data.t().contiguous().t()
    return parts.inner(x) + parts.other(x) + parts.other.bias


def many(parts, x):
    with torch.no_grad():
        torch._foreach_lerp_(
            [parts.inner.weight, parts.inner.bias], [parts.other.weight, x[0]], 0.1
        )
    return parts.inner(x) + parts.other(x)


def own_copy(parts, x):
    """What is made of a weight is the code's own."""
    half = parts.inner.weight.detach().to(torch.float64)
    view = half.t()
    half.mul_(2)
    view[0].zero_()
    return F.linear(x.double(), half).to(x.dtype) + parts.inner(x)


def cast_before(parts, x):
    """A cast is of what the weight was when it was made."""
    old, copied = parts.inner.weight.double(), parts.inner.weight.detach().to(x.dtype, copy=True)
    with torch.no_grad():
        parts.inner.weight.copy_(F.normalize(old))
    return (x.double() @ old).to(x.dtype) + x @ copied + parts.inner(x)


def cast_used(parts, x):
    """So is what autograd keeps of it."""
    y = (x.double() @ parts.inner.weight.double()).tanh()
    parts.inner.weight.data.mul_(2)
    return y.to(x.dtype) + parts.other(x)


def cast_replaced(parts, x):
    """Where the weight is given other data."""
    old = parts.inner.weight.double()
    parts.inner.weight.data = parts.inner.weight.data * 2
    return (x.double() @ old).to(x.dtype) + parts.inner(x)


CASTS = [cast_before, cast_used, cast_replaced]


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("write", CASTS, ids=lambda write: write.__name__)
def test_a_cast_of_a_weight_stays_what_it_was(device, write, trains):
    assert_streams(parts_of(write), device, "plain", trains)


class OwnConvolution(nn.Conv2d):
    """As EDM2's, of a class that has an operator here."""

    def __init__(self, *sizes):
        super().__init__(*sizes, 1)

    def forward(self, x):
        weight = self.weight.to(torch.float64)
        with torch.no_grad():
            self.weight.copy_(F.normalize(weight, dim=1))
        return F.conv2d(x.double(), F.normalize(weight, dim=1) / 1.3 + weight).to(x.dtype)


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
def test_a_cast_in_a_layers_own_forward_stays_what_it_was(device, trains):
    def compute(parts, x):
        return parts.other(parts.inner(x[..., None, None]))

    assert_streams(parts_of(compute, OwnConvolution), device, "plain", trains)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_changes_no_cast_that_somebody_kept(fused):
    """Neither an anchor of L2-SP, nor what backward is to use; of a fused step torch knows none."""

    def compute(parts, x):
        if not hasattr(parts, "anchor"):
            parts.anchor = parts.inner.weight.detach().double()
        far = (parts.inner.weight.double() - parts.anchor).square().sum()
        return F.linear(x.double(), parts.inner.weight.double()).to(x.dtype) + far

    managed, resident = resident_pair(parts_of(compute))

    def run(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        found = []
        for _ in range(3):
            x = inputs().requires_grad_()
            y = model(x)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            y.square().sum().backward()
            found += [y, x.grad, model.anchor]
        with torch.no_grad():
            return [each.clone() for each in found]

    with attached(managed) as manager:
        assert manager.resident == {}
        assert_same(run(managed), run(resident))


def detached(parts, x):
    """Where autograd records, but not this."""
    parts.inner.weight.detach().mul_(0.9)
    parts.inner.weight.detach()[0].zero_()
    return parts.inner(x) + parts.other(x)


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("mode", ["plain", "reentrant"])
@pytest.mark.parametrize(
    "write", [normalised, out, by_data, many, own_copy, detached], ids=lambda write: write.__name__
)
def test_what_a_forward_writes_is_written_to_the_parameter(device, write, mode, trains):
    assert_streams(parts_of(write), device, mode, trains)


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("write", ["normalised", "by_data", "many", "new_data"])
def test_a_write_in_a_checkpoint_that_is_not_reentrant_is_refused(device, write, trains):
    model = parts_of(globals()[write]).requires_grad_(trains)
    x = inputs(device).requires_grad_()
    with (
        attached(model, device) as manager,
        pytest.raises(
            OffloadError, match="is written inside a checkpoint with use_reentrant=False"
        ),
    ):
        assert manager.resident == {}
        checkpoint(model, x, use_reentrant=False)


def test_a_weight_that_a_forward_ties_to_anothers_data_is_refused():
    def tie(parts, x):
        parts.inner.weight.data = parts.other.weight.data.t()
        return parts.inner(x)

    model = parts_of(tie)
    with (
        attached(model),
        pytest.raises(OffloadError, match=r"'inner.weight' is given the \.data of"),
    ):
        model(inputs())


def test_data_that_a_forward_gives_to_a_parameter_is_the_parameters(device):
    assert_streams(parts_of(new_data), device)


class Normalised(nn.Module):
    """As EDM2's layer, which has no operator here."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        weight = self.weight.to(torch.float32)
        if self.training:
            with torch.no_grad():
                self.weight.copy_(F.normalize(weight))
        return x @ (F.normalize(weight) / 2).to(x.dtype).t()


class ByData(Normalised):
    def forward(self, x):
        self.weight.data.clamp_(-0.5, 0.5)
        return x @ self.weight


class NewData(Normalised):
    def forward(self, x):
        self.weight.data = self.weight.data.clamp(-0.5, 0.5) * 0.9
        return x @ self.weight


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("mode", ["plain", "autocast"])
@pytest.mark.parametrize("kind", [Normalised, ByData, NewData])
def test_what_a_module_writes_to_what_it_is_lent_is_written_to_the_parameter(
    device, kind, mode, trains
):
    called = parts_of(lambda parts, x: parts.other(parts.inner(x)), kind)
    assert_streams(called, device, mode, trains)


def test_a_write_that_autograd_would_record_is_refused():
    model = parts_of(lambda parts, x: parts.inner.weight.mul_(2) @ x.t())
    with attached(model), pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        model(inputs())
    lent = parts_of(lambda parts, x: parts.inner(x), Records)
    with attached(lent), pytest.raises(OffloadError, match="autograd records it"):
        lent(inputs())


class Records(Normalised):
    def forward(self, x):
        self.weight.mul_(2)
        return x @ self.weight


def test_what_a_forward_that_failed_has_written_is_there():
    class Fails(Normalised):
        def forward(self, x):
            with torch.no_grad():
                self.weight.fill_(7)
            raise ValueError("now")

    model = parts_of(lambda parts, x: parts.inner(x), Fails)
    with attached(model) as manager:
        with pytest.raises(ValueError, match="now"):
            model(inputs())
        assert not manager.attachment.held()
    assert model.inner.weight.eq(7).all()


# ---- a library that is not known ----


class Rounded(Tensor):
    """A weight of an invented library, made of two tensors, with its own autograd function."""

    @staticmethod
    def __new__(cls, whole, scale):
        return Tensor._make_wrapper_subclass(
            cls, whole.size(), dtype=scale.dtype, device=whole.device, requires_grad=False
        )

    def __init__(self, whole, scale):
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self):
        return ["whole", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["whole"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, bias = (*args, None)[:3]
            y = Dequantised.apply(x, weight)
            return y if bias is None else y + bias
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale)
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            return cls(
                *(
                    func(each, *args[1:], **_but_dtype(kwargs))
                    for each in (args[0].whole, args[0].scale)
                )
            )
        raise NotImplementedError(func)


def _but_dtype(kwargs):
    return {key: value for key, value in (kwargs or {}).items() if key != "dtype"}


class Dequantised(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ (weight.whole.to(x.dtype) * weight.scale).t()

    @staticmethod
    def backward(ctx, grad):
        weight = ctx.weight
        return grad @ (weight.whole.to(grad.dtype) * weight.scale).to(grad.dtype), None


def rounded(layer):
    scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
    whole = (layer.weight.detach() / scale).round().to(torch.int8)
    layer.weight = nn.Parameter(Rounded(whole, scale), requires_grad=False)
    return layer.requires_grad_(False)


@pytest.mark.parametrize("mode", MODES)
def test_a_quantised_class_of_an_invented_library_streams(device, mode):
    compute = lambda parts, x: parts.other(parts.inner(x).tanh())  # noqa: E731
    managed, resident = (parts_of(compute).requires_grad_(False) for _ in range(2))
    resident.load_state_dict(managed.state_dict())
    for model in (managed, resident):
        rounded(model.inner), rounded(model.other)
    resident.to(device)
    with attached(managed, device) as manager:
        assert manager.resident == {}
        assert [type(layer).__name__ for layer in manager.layers] == ["QuantisedLayer"] * 2
        assert_models_agree(managed, resident, step_of(device, mode), device=device)
        assert not manager.attachment.held() and not manager.attachment.traffic.runs_again


# ---- in compiled code ----


def whole(weight):
    weight.mul_(2)


def row(weight):
    weight[0].zero_()


def viewed(weight):
    weight.view(-1)[3:].fill_(1)


def into(weight):
    torch.add(weight, 1, out=weight)


@pytest.mark.parametrize("fullgraph", [False, True], ids=["breaks", "fullgraph"])
@pytest.mark.parametrize("write", [whole, row, viewed, into], ids=lambda write: write.__name__)
def test_compiled_code_that_writes_to_what_it_reads_is_refused(write, fullgraph):
    """Each time: it is compiled once."""

    def compute(parts, x):
        with torch.no_grad():
            write(parts.inner.weight)
        return parts.other(x)

    torch._dynamo.reset()
    with attached(parts_of(compute).requires_grad_(False)) as manager:
        assert manager.resident == {}
        called = torch.compile(manager.structure.module, backend="aot_eager", fullgraph=fullgraph)
        for _ in range(2):
            with pytest.raises(
                OffloadError, match=r"compiled code writes to the weight of .*'inner'"
            ):
                called(inputs())
    torch._dynamo.reset()


def test_compiled_code_that_only_reads_computes():
    def compute(parts, x):
        weight = parts.inner.weight
        return parts.other(F.linear(x, weight) * weight.norm() + x @ weight.t().contiguous())

    torch._dynamo.reset()
    managed, resident = resident_pair(parts_of(compute))
    with attached(managed) as manager:
        assert manager.resident == {}
        called = torch.compile(managed, backend="aot_eager")
        for _ in range(2):
            assert_same(called(inputs()), torch.compile(resident, backend="aot_eager")(inputs()))
    torch._dynamo.reset()
