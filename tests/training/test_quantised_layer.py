"""A managed layer of quantised weights: what it keeps, runs again, costs and takes for its own.

Its class is a stand-in with the names that ComfyUI's files have; tests/clients computes with the
libraries themselves.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import weakref

import pytest
import torch
from equality import assert_same, attached, resident_pair
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from oracle_offload import OffloadError
from oracle_offload.layers import formats
from oracle_offload.layers.formats import Format
from oracle_offload.layers.handle import Handle
from oracle_offload.layers.quantised import QuantisedLayer

IN, OUT = 12, 20


class Coded(nn.Module):
    """A linear layer whose weight is of int8, with a scale for each row."""

    def __init__(self, bias=True):
        super().__init__()
        self.in_features, self.out_features = IN, OUT
        weight = torch.randint(-9, 9, (OUT, IN), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Buffer(torch.rand(OUT) / IN)
        self.comfy_quant = nn.Buffer(torch.zeros(1, dtype=torch.uint8))
        self.register_parameter("bias", nn.Parameter(torch.randn(OUT)) if bias else None)

    def forward(self, x):
        weight = self.weight.to(x.dtype) * self.weight_scale[:, None].to(x.dtype)
        return F.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))


class OfSquares(Coded):
    """Its gradient depends on the input, and its result is a view."""

    def forward(self, x):
        return super().forward(x * x)[...]


class OfMemory(OfSquares):
    """It asks for the memory of its weight, as one with kernels of its own does."""

    def forward(self, x):
        assert self.weight.data_ptr()
        return super().forward(x)


SETTLED: list[torch.dtype] = []
PLAIN = Format("coded")
READS = Format("coded, and its input is read", reads_input=True)
SETTLES = Format("coded, and settled", settle=lambda module, x: SETTLED.append(x.dtype))


@pytest.fixture(autouse=True)
def as_format(monkeypatch):
    """Let the stand-in be of another format than `PLAIN`."""
    torch.manual_seed(0)
    SETTLED.clear()
    monkeypatch.setattr(formats, "_COMFY", PLAIN)
    return lambda found: monkeypatch.setattr(formats, "_COMFY", found)


def layer_of(manager):
    (layer,) = manager.layers
    assert isinstance(layer, QuantisedLayer)
    return layer


X = torch.linspace(-1, 1, 3 * IN).view(3, IN)


@contextlib.contextmanager
def frozen(kind=Coded):
    """Attach a frozen layer; yield its manager, it, its module and a twin that stays resident."""
    managed, resident = resident_pair(nn.Sequential(kind()).requires_grad_(False))
    with attached(managed) as manager:
        yield manager, layer_of(manager), managed[0], resident[0]


def gradients_of(model, x, autocast=False):
    x = x.detach().requires_grad_(x.requires_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    bias = model[0].bias
    found = [y.detach(), x.grad, None if bias is None else bias.grad]
    model.zero_grad()
    return found


FORMATS = {"plain": PLAIN, "reads": READS}


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("bias", ["none", "frozen", "trained"])
@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_the_residents_and_nothing_runs_again(name, bias, autocast, as_format):
    as_format(FORMATS[name])
    kind = OfSquares if name == "reads" else Coded
    managed, resident = resident_pair(nn.Sequential(kind(bias != "none")))
    trains = bias == "trained"
    for model in (managed, resident):
        model.requires_grad_(False)
        if trains:
            model[0].bias.requires_grad_()
    x = torch.randn(3, IN)
    with attached(managed) as manager:
        layer = layer_of(manager)
        assert layer.format is FORMATS[name]
        for needs in (True, False):
            x.requires_grad_(needs)
            if not needs and not trains:
                continue
            assert_same(gradients_of(managed, x, autocast), gradients_of(resident, x, autocast))
        assert manager.attachment.traffic.flops_again == 0
        with torch.no_grad():
            assert_same(managed(x), resident(x))
        assert not manager.attachment.held()


def kept_by(compute):
    """Return the memory that autograd keeps of a call; a handle has none."""
    kept = []

    def keep(tensor):
        if not isinstance(tensor, Handle):
            kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = compute()
    del y
    return kept


@pytest.mark.parametrize("name", FORMATS)
def test_the_input_is_kept_where_backward_asks_for_its_values(name, as_format):
    as_format(FORMATS[name])
    managed = nn.Sequential(OfSquares() if name == "reads" else Coded())
    x = torch.randn(3, IN, requires_grad=True)
    with attached(managed) as manager:
        layer = layer_of(manager)
        for trains in (True, False):
            managed[0].bias.requires_grad_(trains)
            reads = name == "reads"
            assert set(kept_by(lambda: managed(x))) == ({x.data_ptr()} if reads else set())
            keeps = trains or reads
            assert kept_by(lambda: layer.traced(managed[0], x)) == [x.data_ptr()] * keeps
        assert not managed(x.detach()).requires_grad


@pytest.mark.parametrize("kind", [OfSquares, OfMemory])
def test_a_result_may_be_written_to(as_format, kind):
    """torch forbids that for views which custom functions return."""
    as_format(READS)
    managed, resident = resident_pair(nn.Sequential(kind()))
    x = torch.randn(3, IN, requires_grad=True)
    with attached(managed):
        found = managed(x).mul_(2)
        assert_same(found, resident(x).mul_(2))
        found.sum().backward()


def test_what_a_first_input_settles_is_settled_before_each_call(as_format):
    as_format(SETTLES)
    managed = nn.Sequential(Coded()).requires_grad_(False)
    with attached(managed) as manager:
        layer = layer_of(manager)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(3, IN, dtype=dtype)
            SETTLED.clear()
            managed(x)
            assert [dtype] == SETTLED
            SETTLED.clear()
            assert layer.result_of(layer.look, dtype, None) is dtype
            assert [dtype] == SETTLED, "an input without values settles it as well"


# ---- its operator ----


class Ours(TorchDispatchMode):
    """Notes our operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "oracle_offload":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def traced(layer, x, module=None):
    """Return a result as compiled code has it, and whether an operator computed it."""
    with Ours() as ours:
        y = layer.traced(layer.module() if module is None else module, x)
    return y, "quantised" in ours.names


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_operator_has_the_bits_and_gradients_of_the_layer(name, autocast, as_format):
    as_format(FORMATS[name])
    managed, resident = resident_pair(nn.Sequential(OfSquares() if name == "reads" else Coded()))
    x = torch.randn(2, 3, IN, requires_grad=True)
    with attached(managed) as manager:
        layer = layer_of(manager)
        for trains in (False, True):
            for model in (managed, resident):
                model[0].bias.requires_grad_(trains)
            results = []
            for compute in (lambda given: traced(layer, given)[0], resident):
                given = x.detach().requires_grad_()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    y = compute(given)
                y.float().square().sum().backward()
                results.append([y.detach(), given.grad])
            assert_same(*results)
            assert_same(managed[0].bias.grad, resident[0].bias.grad)
        with torch.no_grad():
            y, is_one = traced(layer, x)
            assert is_one
            assert_same(y, resident(x))
        assert not manager.attachment.held()


def test_a_layer_is_no_operator_of_a_graph_where_something_of_it_is_not_as_it_was():
    x = X
    with frozen() as (_, layer, module, resident), torch.no_grad():
        expected = resident(x)
        assert traced(layer, x)[1]
        module.bias.requires_grad_()
        assert traced(layer, x)[1], "a trained bias is given to the operator"
        module.bias.requires_grad_(False)
        for name, other in (
            ("weight", nn.Parameter(module.weight.clone(), requires_grad=False)),
            ("bias", nn.Parameter(module.bias.clone(), requires_grad=False)),
        ):
            kept = module._parameters[name]
            module._parameters[name] = other
            y, is_one = traced(layer, x)
            assert not is_one and torch.equal(y, expected)
            module._parameters[name] = kept
        module.out_features = float(OUT)  # no size
        y, is_one = traced(layer, x)
        assert not is_one and torch.equal(y, expected)
        del module.out_features
        assert not traced(layer, x)[1]
        module.out_features = OUT
        assert traced(layer, x)[1]


def test_a_result_is_as_compiled_code_was_told():
    with frozen() as (_, layer, *_):
        y, rest = torch.randn(OUT, 3).t(), (torch.float32, None, False)
        found = layer.as_told(y, OUT, torch.float32, *rest)
        assert torch.equal(found, y) and found.is_contiguous()
        for told in ((OUT + 1, torch.float32), (OUT, torch.bfloat16)):
            with pytest.raises(OffloadError, match=r"'0' returns 20 features of torch.float32, an"):
                layer.as_told(y, *told, *rest)


def test_a_bias_that_is_not_the_layers_is_refused_by_the_operator():
    with frozen() as (manager, layer, module, resident), torch.no_grad():
        arguments = OUT, torch.float32, torch.float32, None, False

        def call(bias):
            return layer.operator(X, layer.clock, bias, layer.key, None, 0, *arguments)

        assert layer.is_given(layer.clock, None) and layer.is_given(layer.clock, module.bias)
        assert not layer.is_given(layer.clock, torch.randn(OUT))
        assert_same(call(module.bias), resident(X))
        with pytest.raises(OffloadError, match="'0' has a computed weight"):
            call(torch.randn(OUT))
        # A weight that no slot has a place for is used where it is.
        for each in (module, resident):
            with_gaps(each)
        before = manager.state.engine.stats()["acquires"]
        assert_same(call(module.bias), resident(X))
        assert manager.state.engine.stats()["acquires"] == before


# ---- its masters ----


def frozen_weight(dtype):
    return {"weight": nn.Parameter(torch.ones(OUT, IN, dtype=dtype), requires_grad=False)}


def with_gaps(module):
    module.weight.data = torch.ones(2 * OUT, IN, dtype=torch.int8)[::2]


OTHERS = "its quantised weights were replaced after attach by others"
CHANGES = {
    "nothing": (lambda module: None, True, ""),
    "another weight": (lambda m: m._parameters.update(frozen_weight(torch.int8)), True, ""),
    "plain": (lambda m: m._parameters.update(frozen_weight(torch.float32)), False, OTHERS),
    "with gaps": (with_gaps, False, ""),
    "elsewhere": (lambda m: m._buffers.update(weight_scale=m.weight_scale.to("meta")), False, ""),
    "one more": (lambda m: m.register_buffer("more", torch.ones(3)), False, OTHERS),
    "no bias": (lambda m: m._parameters.update(bias=None), False, OTHERS),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_says_whether_its_weights_can_be_managed_and_are_lost(change):
    make, manageable, why = CHANGES[change]
    managed = nn.Sequential(Coded()).requires_grad_(False)
    with attached(managed) as manager:
        layer, module = layer_of(manager), managed[0]
        kept = {**module._parameters}, {**module._buffers}, module.weight.data
        make(module)
        assert (layer.has_plain_masters(), layer.why_lost()) == (manageable, why)
        module._parameters.update(kept[0])
        module._buffers.clear()
        module._buffers.update(kept[1])
        module.weight.data = kept[2]
        assert (layer.has_plain_masters(), layer.why_lost()) == (True, "")
        made, module.__class__ = type(module), Coded
        assert layer.why_lost() == "its class was replaced after attach, by Coded"
        module.__class__ = made
        del module
        managed[0] = nn.Identity()
        gc.collect()
        assert (layer.has_plain_masters(), layer.why_lost()) == (False, "it was deleted")


def test_a_parameter_that_leads_to_its_module_keeps_it_no_more():
    module, other = Coded(bias=False), Coded()
    module.weight.module, other.weight.module = module, module
    for each in (module, other):
        QuantisedLayer.prepare(each)
    assert module.weight.module is None and other.weight.module is module
    assert "module" not in vars(other.bias)


def test_a_leaf_that_was_let_go_computes_by_itself():
    with frozen() as (manager, layer, _, resident):
        traffic, expected = manager.attachment.traffic, resident(X)
        assert traffic.computed_bytes == {}
        assert_same(layer.foreign(X), expected)
        own = sum(t.nbytes for t in layer.masters.present)
        assert traffic.computed_bytes == {"0": own}
    assert_same(layer.foreign(X), expected)
    assert traffic.computed_bytes == {"0": own}, "nothing travels"


def test_the_cost_is_of_a_product_and_compiled_backward_runs_it_twice():
    with frozen() as (_, layer, *_):
        weights = sum(t.nbytes for t in layer.masters.present)
        for dtype, shape in itertools.product(
            (torch.float32, torch.bfloat16), ((5, IN), (2, 3, IN))
        ):
            x = torch.empty(shape, dtype=dtype)
            y = torch.empty(*shape[:-1], OUT, dtype=dtype)
            assert layer.forward_cost(x) == (2 * x.numel() * OUT, weights + x.nbytes + y.nbytes)
            flops, moved = layer.forward_cost(y)
            for trains in (False, True):
                needs = (True, *(False for _ in layer.names[1:]), trains)
                assert layer.backward_cost(y, needs) == (2 * flops, 2 * moved)
        assert layer.forward_cost(torch.tensor(2.0))[0] == 2 * OUT


def test_a_copy_of_an_attached_model_is_plain():
    with frozen() as (_, _, module, resident):
        copied = copy.deepcopy(module)
        assert type(copied) is Coded
        assert_same(copied(X), resident(X))


def test_a_leaf_that_forgot_its_weights_keeps_none_of_them():
    managed = nn.Sequential(Coded()).requires_grad_(False)
    with attached(managed) as manager:
        layer = layer_of(manager)
        managed(torch.randn(3, IN))
    weight = weakref.ref(managed[0].weight)
    del managed, manager
    layer.forget_masters()
    gc.collect()
    assert weight() is None
    assert not layer.is_current()


class Constant(Coded):
    def forward(self, x):
        return torch.ones(*x.shape[:-1], OUT, dtype=x.dtype) * self.weight_scale.sum()


@pytest.mark.parametrize("name", ["plain", "reads"])
def test_an_input_that_nothing_depends_on_has_a_gradient_of_zero_in_a_graph(name, as_format):
    """Compiled code expects one."""
    as_format(FORMATS[name])
    managed, resident = resident_pair(nn.Sequential(Constant()).requires_grad_(False))
    x = torch.randn(3, IN, requires_grad=True)
    with attached(managed) as manager:
        y, is_one = traced(layer_of(manager), x)
        assert is_one
        assert_same(y.detach(), resident(x))
        y.sum().backward()
    assert_same(x.grad, torch.zeros(3, IN))


def test_a_weight_that_is_trained_is_no_operators():
    module = Coded()
    module.weight = nn.Parameter(torch.randn(OUT, IN).to(torch.float8_e4m3fn))
    managed, resident = resident_pair(nn.Sequential(module).requires_grad_(False))
    x = torch.randn(3, IN)
    with attached(managed) as manager, torch.no_grad():
        layer = layer_of(manager)
        assert traced(layer, x)[1]
        managed[0].weight.requires_grad_()
        y, is_one = traced(layer, x)
        assert not is_one
        assert_same(y, resident(x))


class Wide(Coded):
    def forward(self, x):
        return super().forward(x).double()


class Asks(Coded):
    """Computes by a value, which an input without values does not have."""

    def forward(self, x):
        return super().forward(x).double() * float(x.sum())


def test_the_dtype_of_a_result_is_found_without_values_where_it_can_be():
    for kind, plain_dtype, cast_dtype in (
        (Coded, torch.float32, torch.bfloat16),
        (Wide, torch.float64, torch.float64),
        (Asks, torch.float32, torch.float32),  # that of the input, which is likely
    ):
        with attached(nn.Sequential(kind()).requires_grad_(False)) as manager:
            layer = layer_of(manager)
            assert layer.result_of(layer.look, torch.float32, None) is plain_dtype
            assert layer.result_of(layer.look, torch.float32, torch.bfloat16) is cast_dtype
            half = layer.result_of(layer.look, torch.bfloat16, None)
            assert half is (torch.float64 if kind is Wide else torch.bfloat16)
            assert not manager.attachment.held()


def test_layers_look_alike_whatever_their_biases_are():
    """One compiled block serves them; the library may cast a bias in its first call."""
    wide = Coded()
    wide.weight = nn.Parameter(wide.weight.repeat(2, 1), requires_grad=False)
    wide.weight_scale = wide.weight_scale.repeat(2)
    wide.out_features, wide.bias = 2 * OUT, nn.Parameter(torch.randn(2 * OUT))
    half = Coded()
    half.bias = nn.Parameter(half.bias.detach().bfloat16())
    model = nn.ModuleList([Coded(), Coded(), half, Coded(bias=False), wide])
    with attached(model.requires_grad_(False)) as manager:
        looks = [layer.look for layer in manager.layers]
    assert len(looks) == 5 and len({*looks[:4]}) == 1 and looks[4] != looks[0]


class State:
    """What a library keeps tensors in."""

    def __init__(self, table):
        self.table = table


def test_a_small_table_that_layers_share_is_copied_for_each(as_format):
    as_format(Format("coded", holders=frozenset({f"{State.__module__}.State"})))
    shared, large = torch.randn(4), torch.randn(4096)
    models = [Coded(), Coded()]
    for module in models:
        module.state, module.wide = State(shared), State(large)
        QuantisedLayer.prepare(module)
        assert torch.equal(module.state.table, shared) and module.wide.table is large
    assert models[0].state.table is not models[1].state.table is not shared
    assert [*QuantisedLayer.named_tensors(models[0])][-2:] == ["state.table", "wide.table"]


POINTERS = []


class Aliased(Coded):
    """Computes with another tensor over the bytes of its weight."""

    def __init__(self):
        super().__init__()
        self.codes = self.weight.detach()

    def forward(self, x):
        POINTERS.append((self.weight.data_ptr(), self.codes.data_ptr()))
        return F.linear(x, self.codes.to(x.dtype) * self.weight_scale[:, None], self.bias)


def test_tensors_over_the_bytes_of_a_weight_are_lent_with_it():
    managed, _ = resident_pair(nn.Sequential(Aliased()).requires_grad_(False))
    module = managed[0]
    assert QuantisedLayer.aliases(module) == {id(module.weight): [module.codes]}
    assert QuantisedLayer.aliases(Coded()) == {}
    x = torch.randn(3, IN)
    expected = managed(x)
    with attached(managed) as manager:
        layer = layer_of(manager)
        assert "codes" not in layer.names
        for compute in (managed, managed, layer.foreign):
            POINTERS.clear()
            assert_same(compute(x), expected)
            ((weight, codes),) = POINTERS
            assert weight == codes != module.weight.data_ptr()
    assert module.codes.data_ptr() == module.weight.data_ptr()


class Two(torch.Tensor):
    """A tensor that is made of two."""

    def __new__(cls, a, b):
        how = {"strides": a.stride(), "dtype": a.dtype, "device": a.device}
        return torch.Tensor._make_wrapper_subclass(cls, a.size(), **how)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Two(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.detach.default
        return cls(args[0].a, args[0].b)


class OfTwo(Coded):
    """Its weight is made of two tensors."""

    def __init__(self):
        super().__init__()
        codes = self.weight.detach()
        self.weight = nn.Parameter(Two(codes, codes.clone()), requires_grad=False)

    def forward(self, x):
        weight = self.weight.a.to(x.dtype) * self.weight_scale[:, None]
        return F.linear(x, weight, self.bias)


def test_a_weight_that_is_made_of_others_stays_the_object_that_it_is():
    managed = nn.Sequential(OfTwo())
    weight, inner = managed[0].weight, managed[0].weight.a
    managed[0].bias.requires_grad_(False)
    x = torch.randn(3, IN)
    expected = managed(x)
    with attached(managed) as manager:
        layer = layer_of(manager)
        assert layer.names[:2] == ("weight.a", "weight.b")
        assert layer.required == ("weight", "bias", "weight_scale", "comfy_quant")
        assert layer.backward_reads == ("weight.a", "weight.b", "weight_scale", "comfy_quant")
        assert managed[0].weight is weight and weight.a is inner
        for _ in range(2):
            assert_same(managed(x), expected)
        ((address, slot),) = layer.views.items()
        assert len(slot.wrappers) == 1, "what was made of a slot's tensors is made once"
        assert layer.view_at(address) is not slot and layer.views[address].wrappers == {}
