"""The operators that replace managed layers in compiled graphs, called without a compiler."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from equality import Recorder, assert_same, attached, resident_pair
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from oracle_offload import OffloadError, StaleWeightsError
from oracle_offload._core import BACKWARD, FORWARD, RECOMPUTE, RECORDED
from oracle_offload.layers import traced

KINDS = {
    "linear": (lambda: nn.Linear(8, 6), lambda: torch.randn(2, 3, 8)),
    "linear without bias": (lambda: nn.Linear(8, 6, bias=False), lambda: torch.randn(2, 3, 8)),
    "convolution": (
        lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        lambda: torch.randn(2, 4, 7, 8),
    ),
    "embedding": (
        lambda: nn.Embedding(9, 6, padding_idx=2),
        lambda: torch.arange(12).view(3, 4) % 7,
    ),
}
VALUES = [kind for kind in KINDS if kind != "embedding"]  # of which the input has a gradient


def arguments_of(module):
    """Return what the operator of a module takes in addition to tensors."""
    if isinstance(module, nn.Conv2d):
        return module.stride, module.padding, module.dilation, module.groups
    if isinstance(module, nn.Embedding):
        return module.padding_idx, module.scale_grad_by_freq, module.sparse
    return ()


def call(layer, x, weight=None, bias=None, recorded=traced.NOT, dtype=None):
    """Call the operator of a layer, with its own tensors unless others are given."""
    module = layer.module()
    own = module._parameters  # as compiled code finds them: a recompute's read would be a handle
    weight = own["weight"] if weight is None else weight
    bias = own.get("bias") if bias is None else bias
    return layer.operator(x, weight, bias, layer.key, dtype, recorded, *arguments_of(module))


def call_backward(layer, grad, x, needs, dtype=None):
    """Call the operator of a layer's backward."""
    module = layer.module()
    name = {nn.Linear: "linear", nn.Conv2d: "convolution", nn.Embedding: "embedding"}
    (kind,) = (name[base] for base in name if isinstance(module, base))
    operator = getattr(torch.ops.oracle_offload, f"{kind}_backward")
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    own = weight, bias, layer.key, dtype, list(needs)
    return operator(grad, x, x.shape, x.stride(), *own, *arguments_of(module))


def made(kind, trains=True):
    torch.manual_seed(0)
    make, build = KINDS[kind]
    managed, resident = resident_pair(nn.Sequential(make()).requires_grad_(trains))
    x = build()
    return managed, resident, x.requires_grad_() if x.is_floating_point() else x


class Kinds(Recorder):
    """Notes what kind of a use each was."""

    def __init__(self, engine):
        super().__init__(engine)
        self.kinds = []

    def use(self, member, stream, stamp, kind, *rest):
        self.kinds.append(kind)
        return super().use(member, stream, stamp, kind, *rest)


@pytest.fixture
def kinds_of_use(monkeypatch):
    """Let a manager's engine note the kinds of uses."""

    def note(manager):
        recorder = Kinds(manager.state.engine)
        monkeypatch.setattr(manager.state, "engine", recorder)
        return recorder.kinds

    yield note
    monkeypatch.undo()


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "frozen"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_operator_has_the_residents_bits_and_brings_gradients_to_the_host(kind, trains):
    managed, resident, x = made(kind, trains)
    with attached(managed) as manager:
        (layer,) = manager.layers
        for _ in range(2):
            results = []
            for compute in (lambda: call(layer, x), lambda: resident(x)):
                for model in (managed, resident):
                    model.zero_grad()
                x.grad = None
                before = manager.state.engine.stats()["d2h_bytes"]
                y = compute()
                if y.requires_grad:
                    y.square().sum().backward()
                moved = manager.state.engine.stats()["d2h_bytes"] - before
                model = managed if not results else resident
                results.append([y, x.grad, *(p.grad for p in model.parameters())])
                own = sum(p.nbytes for p in managed.parameters())
                assert moved == (own if trains and model is managed else 0)
            assert_same(*results)
            with torch.no_grad():
                assert_same(call(layer, x), resident(x))
        assert not manager.attachment.held()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["", "autocast"])
@pytest.mark.parametrize("kind", VALUES)
def test_compilers_are_told_the_geometry_of_each_gradient_and_of_none_that_is_not_asked(
    kind, dtype
):
    managed, _, x = made(kind)
    biased = managed[0].bias is not None
    with attached(managed) as manager, torch.no_grad():
        (layer,) = manager.layers
        x = x.detach().to(dtype or x.dtype)
        y = call(layer, x, dtype=dtype)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            told = call(layer, fake.from_tensor(x), dtype=dtype)
        assert (told.shape, told.stride(), told.dtype) == (y.shape, y.stride(), y.dtype)
        for needs in itertools.product([True, False], repeat=3):
            with fake:
                given = fake.from_tensor(y), fake.from_tensor(x)
                told = call_backward(layer, *given, needs, dtype)
            if needs[2] and not biased:
                assert told[2].shape == (0,), "there is none"
                continue
            found = call_backward(layer, y, x, needs, dtype)
            own = managed[0].weight.dtype
            assert [t.dtype for t in found[1:] if t.numel()] == [own] * sum(needs[1:])
            for real, expected, need in zip(found, told, needs, strict=True):
                assert real.shape == expected.shape and real.dtype is expected.dtype
                assert bool(real.numel()) is need
                assert real.stride() == expected.stride()


def other(master, how):
    """Return what is given in the place of a master."""
    return {
        "itself": lambda: master,
        "an alias": lambda: master.detach(),
        "other memory": lambda: master.detach().clone(),
        "another dtype": lambda: master.detach().view(torch.int32),
        "fewer": lambda: master.detach()[:3],
        "turned": lambda: master.detach().t(),
        "none": lambda: None,
    }[how]()


@pytest.mark.parametrize(
    ("how", "same"),
    [
        *(("itself", True), ("an alias", True), ("other memory", False), ("fewer", False)),
        *(("another dtype", False), ("turned", False), ("none", False)),
    ],
)
def test_a_tensor_is_a_master_where_it_is_all_of_it_as_it_lies(how, same):
    managed = nn.Sequential(nn.Linear(6, 6))
    with attached(managed) as manager:
        (layer,), (weight, bias) = manager.layers, managed[0].parameters()
        assert layer.is_master("weight", other(weight, how)) is same
        assert layer.is_given(other(weight, how), bias) is same
        assert layer.is_given(weight, other(bias, how)) is (same or how == "turned")
        layer.check_given(weight, other(bias, how))  # backward reads no bias
        if how == "none" or same:
            return
        with pytest.raises(StaleWeightsError, match="the weight of managed layer '0' is not what"):
            layer.check_given(other(weight, how), bias)


def test_no_bias_is_the_master_of_a_layer_without_one():
    managed = nn.Sequential(nn.Linear(6, 6, bias=False))
    with attached(managed) as manager:
        (layer,) = manager.layers
        assert layer.is_given(managed[0].weight, None)
        assert not layer.is_given(managed[0].weight, torch.ones(6))


@pytest.mark.parametrize("kind", VALUES)
def test_another_weight_is_computed_with_where_nothing_is_recorded_and_else_refused(kind):
    managed, resident, x = made(kind, trains=False)
    weight = torch.randn_like(managed[0].weight)
    with attached(managed) as manager:
        (layer,) = manager.layers
        with torch.no_grad():
            expected = torch.func.functional_call(resident, {"0.weight": weight}, (x,))
            before = manager.state.engine.stats()["acquires"]
            assert_same(call(layer, x, weight), expected)
            assert manager.state.engine.stats()["acquires"] == before, "no master is fetched"
        with pytest.raises(OffloadError, match=r"'0' has a computed weight.*ignore_modules"):
            call(layer, x, weight)
        if managed[0].bias is not None:
            bias = torch.randn(6)
            with torch.no_grad():
                expected = torch.func.functional_call(resident, {"0.bias": bias}, (x,))
                assert_same(call(layer, x, None, bias), expected)
        assert not manager.attachment.held()


@pytest.mark.parametrize("kind", VALUES)
def test_a_weight_that_cannot_be_managed_is_computed_with_as_it_lies(kind):
    """What the operator is given is the Parameter, but no slot has a place for one with gaps."""
    managed, resident, x = made(kind, trains=False)
    weight = torch.randn(2 * len(managed[0].weight), *managed[0].weight.shape[1:])[::2]
    with attached(managed) as manager:
        (layer,) = manager.layers
        for model in (managed, resident):
            model[0].weight.data = weight
        before = manager.state.engine.stats()["acquires"]
        with torch.no_grad():
            assert_same(call(layer, x), resident(x))
        assert manager.state.engine.stats()["acquires"] == before
        with pytest.raises(OffloadError, match="'0' has a computed weight"):
            call(layer, x)


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_the_engine_is_told_what_each_use_is_for(kind, kinds_of_use):
    managed, _, x = made(kind)
    with attached(managed) as manager:
        (layer,) = manager.layers
        kinds = kinds_of_use(manager)

        def seen():
            found = kinds[:]
            kinds.clear()
            return found

        y = call(layer, x)
        assert seen() == [RECORDED]
        y.sum().backward()
        assert seen() == [BACKWARD]
        with torch.no_grad():
            call(layer, x)
            assert seen() == [FORWARD]
            call(layer, x, recorded=traced.BY_GRAPH)
            assert seen() == [RECORDED]
        managed.requires_grad_(False)
        call(layer, x.detach())
        assert seen() == [RECORDED], "it is part of a forward under grad mode"
        checkpoint(lambda t: call(layer, t).sin(), x, use_reentrant=False).sum().backward()
        assert seen() == [RECORDED, RECOMPUTE, BACKWARD]


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_forward_after_a_backward_begins_once(kind):
    """The operator that a graph records says so itself."""
    managed, _, x = made(kind)
    with attached(managed) as manager:
        (layer,), pace = manager.layers, manager.state.pace

        def block(given):
            return given * call(layer, given).sin().mean()

        def train(again=False):
            y = x
            for _ in range(3):
                y = checkpoint(block, y, use_reentrant=False) if again else block(y)
            y.sum().backward()

        train()
        assert pace.passes == 0, "nothing was before it"
        train()
        assert pace.passes == 1
        train(again=True)
        assert pace.passes == 2, "a recompute begins no forward"
        with torch.no_grad():
            call(layer, x)
            assert pace.passes == 2, "nor does a sample"
            call(layer, x, recorded=traced.BY_GRAPH)
            call(layer, x, recorded=traced.BY_GRAPH)
            assert pace.passes == 3


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("trains", [True, False])
def test_an_operator_takes_the_simulated_time_of_the_layer(kind, trains, monkeypatch):
    managed, _, x = made(kind, trains)
    asked = []
    with attached(managed) as manager:
        (layer,), time = manager.layers, manager.state.time
        monkeypatch.setattr(
            type(time), "kernel_seconds", lambda self, *given: asked.append(given) or 1e-9
        )

        def cost(compute):
            asked.clear()
            compute(x).sum().backward()
            return asked[:]

        expected = cost(managed)
        assert len(expected) == 2
        assert cost(lambda given: call(layer, given)) == expected


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_weight_that_changes_is_refused_where_torch_reads_it_in_backward(kind):
    """A convolution keeps it for every gradient, a product for that of the input alone."""
    for needs_input, trains in ((True, True), (True, False), (False, True)):
        managed, resident, x = made(kind, trains)
        x = x.detach().requires_grad_(needs_input)

        def outcome(compute, weight, x=x):
            y = compute(x)
            with torch.no_grad():
                weight.mul_(2)
            try:
                y.sum().backward()
            except RuntimeError as error:
                return "modified by an inplace operation" in str(error).replace("\n", " ")
            return None

        with attached(managed) as manager:
            (layer,) = manager.layers
            found = outcome(lambda given, layer=layer: call(layer, given), managed[0].weight)
        expected = outcome(resident, resident[0].weight)
        assert found == expected
        assert expected is (True if needs_input or kind == "convolution" else None)


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_an_input_is_kept_for_the_gradient_of_a_weight_alone(kind):
    for trains in (True, False):
        managed, _, x = made(kind, trains)
        kept = []

        def keep(tensor, kept=kept):
            kept.append(tensor)
            return tensor

        with attached(managed) as manager:
            (layer,) = manager.layers
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                y = call(layer, x)
            assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()] * trains
            y.sum().backward()
            managed[0].bias.requires_grad_(True)
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                call(layer, x)
            assert len(kept) == trains, "the gradient of a bias asks for no input"


class Products(TorchDispatchMode):
    """Notes the operators that multiply."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.ours = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        shapes = [tuple(t.shape) for t in args if isinstance(t, torch.Tensor)]
        # What has no elements replaces in the graph what autocast would have cast.
        if name in ("mm", "bmm", "addmm", "sum") and all(0 not in shape for shape in shapes):
            self.names.append((name, shapes))
        kernel = traced.kernel_of(func)
        if kernel is not None:  # one of ours: look at what it runs
            self.ours.append(name)
            with self:
                return kernel(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["exact", "over one"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
def test_backward_of_a_folded_input_has_the_layout_of_eager(bias, how):
    """A graph keeps the input as it was given; what it is folded to goes by bias and strides."""
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(nn.Linear(5, 4, bias=bias)))
    plain = torch.randn(1, 3, 5)
    x = plain if how == "exact" else plain.as_strided((1, 3, 5), (7, 5, 1))
    for given in (x, torch.randn(3, 2, 5).transpose(0, 1), torch.randn(2, 5, 3).transpose(1, 2)):
        expected = given.detach().requires_grad_()
        y = resident(expected)
        grad = torch.randn_like(y)
        with Products() as products:
            gx, gw = torch.autograd.grad(y, (expected, resident[0].weight), grad)
        with attached(managed) as manager, Products() as ours:
            found = call_backward(manager.layers[0], grad, given, (True, True, False))
        assert sorted(ours.names) == sorted(products.names)
        assert torch.equal(found[0], gx) and found[0].stride() == gx.stride()
        assert torch.equal(found[1], gw) and found[1].stride() == gw.stride()


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_elsewhere_is_brought_to_the_device(kind):
    managed, _, x = made(kind)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with attached(managed) as manager, torch.no_grad():
        (layer,) = manager.layers
        expected = call(layer, x)
        with fake:
            given = torch.empty(x.shape, dtype=x.dtype, device="cuda")
            y = layer.traced(managed[0], given)
        assert y.device.type == "cpu" and y.shape == expected.shape


@pytest.mark.parametrize("trains", [True, False], ids=["trains", "frozen"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
def test_a_product_is_made_as_torch_makes_it_for_what_is_trained(bias, trains):
    """By an operator of a graph, by the layer, and where nothing is recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4, bias=bias)).requires_grad_(trains)
    managed, resident = resident_pair(model)

    def products(compute, x, record, autocast=False):
        with (
            torch.set_grad_enabled(record),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            Products() as seen,
        ):
            y = compute(x)
        return seen.names, y

    with attached(managed) as manager:
        (layer,) = manager.layers
        for x in (torch.randn(2, 5, 3).transpose(1, 2), torch.randn(3, 2, 5).transpose(0, 1)):
            for record in (True, False):
                expected = products(resident, x.requires_grad_(record), record)
                found = products(managed, x, record)
                assert found[0] == expected[0] and torch.equal(found[1], expected[1])
                if record:
                    found = products(lambda given: call(layer, given), x, record)
                    assert found[0] == expected[0] and torch.equal(found[1], expected[1])
                    expected = products(resident, x, record, autocast=True)
                    found = products(managed, x, record, autocast=True)
                    assert found[0] == expected[0] and torch.equal(found[1], expected[1])
                x = x.detach()


GEOMETRIES = {
    "one row": lambda: torch.randn(5),
    "one row with gaps": lambda: torch.randn(10)[::2],
    "rows": lambda: torch.randn(3, 5),
    "columns": lambda: torch.randn(5, 3).t(),
    "batch": lambda: torch.randn(2, 3, 5),
    "batch of columns": lambda: torch.randn(2, 5, 3).transpose(1, 2),
    "batch first last": lambda: torch.randn(3, 2, 5).transpose(0, 1),
    "batch of batches": lambda: torch.randn(2, 3, 2, 5),
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_gradient_of_a_bias_is_summed_as_torch_sums_it(geometry):
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(nn.Linear(5, 4)))
    managed[0].weight.requires_grad_(False)
    resident[0].weight.requires_grad_(False)
    x = GEOMETRIES[geometry]()
    with attached(managed):
        seen = []
        for model in (managed, resident):
            y = model(x.detach())
            turned = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
            if y.dim() > 1:  # the gradient that comes is not laid out as the result
                turned = turned.transpose(0, 1).contiguous().transpose(0, 1)
            with Products() as sums:
                (gradient,) = torch.autograd.grad(y, model[0].bias, turned)
            seen.append((gradient, [row for row in sums.names if row[0] == "sum"]))
    assert torch.equal(seen[0][0], seen[1][0])
    assert seen[0][1] == seen[1][1]


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_masters_are_held_once_a_graph_task_has_used_what_is_trained(kind, monkeypatch):
    """They may be rewritten at its end; frozen ones are not."""
    for trains in (True, False):
        managed, _, x = made(kind, trains)
        with attached(managed) as manager:
            (layer,) = manager.layers
            held = []

            class Holding(Recorder):
                def rest(self, held=held):
                    held.append(1)
                    return self._engine.rest()

            with monkeypatch.context() as patch:
                patch.setattr(manager.state, "engine", Holding(manager.state.engine))
                call(layer, x).sum().backward()
                assert len(held) == trains
                y = checkpoint(lambda t, layer=layer: call(layer, t).sin(), x, use_reentrant=False)
                assert len(held) == trains, "a forward is no graph task"
                torch.autograd.grad(y.sum(), x)
                assert len(held) == 2 * trains, "its recompute took part"
            assert not manager.state.late


def test_operands_of_a_convolution_look_as_in_training():
    """torch chooses by that which kernel computes: some are for inference alone."""

    class Looks(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") == "convolution":
                seen.append((torch.is_grad_enabled(), args[0].requires_grad))
            return func(*args, **(kwargs or {}))

    managed, resident, x = made("convolution")
    x = x.detach()
    seen = []
    with attached(managed), Looks():
        y = managed(x)
        assert seen == [(True, True)]
        assert not x.requires_grad
        seen.clear()
        with torch.no_grad():
            managed(x)
        assert seen == [(False, False)]
    assert torch.equal(y, resident(x))


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: nn.Linear(6, 6), (5, 6)), (lambda: nn.Conv2d(4, 4, 3, padding=1), (2, 4, 5, 6))],
    ids=["linear", "convolution"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_product_of_backward_moves_its_operands_and_its_result(make, shape, dtype):
    """In these shapes the gradients of input and result are of one size."""
    managed = nn.Sequential(make().to(dtype))
    x = torch.randn(shape, dtype=dtype)
    with attached(managed) as manager:
        (layer,) = manager.layers
        weight = managed[0].weight
        operations = 2 * x.numel() * weight[0].numel()
        managed(x)  # which reads the arguments of a convolution
        assert layer.forward_cost(x)[0] == operations
        for needs in itertools.product([True, False], repeat=3):
            products = sum(needs[:2])
            flops, moved = layer.backward_cost(x, needs)
            assert flops == products * operations
            assert moved == products * (2 * x.nbytes + weight.nbytes)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_compiled_code_calls_is_the_operator_with_the_residents_bits(kind, autocast):
    managed, resident, x = made(kind)
    with attached(managed) as manager:
        (layer,) = manager.layers
        results = []
        for compute in (lambda given: layer.traced(managed[0], given), resident):
            given = x.detach().requires_grad_(x.requires_grad)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Products() as seen:
                y = compute(given)
            y.float().square().sum().backward()
            results.append([y.detach(), given.grad])
            assert bool(seen.ours) is (compute is not resident)
        assert_same(*results)
        for one, other in zip(managed.parameters(), resident.parameters(), strict=True):
            assert_same(one.grad, other.grad)
        if kind != "embedding":
            with pytest.raises(OffloadError, match=r"torch\.func transforms over"):
                torch.func.vmap(lambda t: layer.traced(managed[0], t))(x.detach()[None])


PADDINGS = [
    {"padding": 1},
    {"padding": "valid"},
    {"padding": "same", "dilation": 2},
    {"padding": "same", "kernel_size": (2, 4)},
    {"padding": (1, 2), "padding_mode": "reflect"},
    {"padding": (2, 1), "padding_mode": "circular"},
]


@pytest.mark.parametrize("options", PADDINGS, ids=str)
def test_a_convolution_is_padded_and_batched_before_its_operator(options):
    torch.manual_seed(0)
    options = {"kernel_size": 3, **options}
    managed, resident = resident_pair(nn.Sequential(nn.Conv2d(4, 4, **options)))
    with attached(managed) as manager:
        (layer,) = manager.layers
        for shape in ((2, 4, 7, 8), (4, 7, 8)):
            results = []
            for compute in (lambda given: layer.traced(managed[0], given), resident):
                given = torch.linspace(-1, 1, 448 if len(shape) == 4 else 224).view(shape)
                given.requires_grad_()
                y = compute(given)
                (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
                results.append([y.detach(), given.grad])
            assert_same(*results)
            assert_same(managed[0].weight.grad, resident[0].weight.grad)
        assert not manager.attachment.held()


def test_what_was_put_before_an_operator_is_called_from_outside():
    """A convolution that pads otherwise, and a table that is written to."""
    managed, resident, x = made("convolution")
    with attached(managed) as manager, torch.no_grad():
        (layer,) = manager.layers
        for model in (managed, resident):
            model[0]._conv_forward = lambda given, weight, bias, conv=model[0]: (
                torch.nn.functional.conv2d(given, weight, bias, 1, 0, 1, conv.groups)
            )
        with Products() as seen:
            y = layer.traced(managed[0], x)
        assert not seen.ours
        assert_same(y, resident(x))
    managed, _, rows = made("embedding")
    with attached(managed) as manager:
        managed[0].max_norm = 1.0
        with pytest.raises(OffloadError, match="max_norm of managed layer '0' was set after"):
            manager.layers[0].traced(managed[0], rows)


def test_a_table_costs_the_rows_that_travel():
    managed, _, rows = made("embedding")
    managed.to(torch.bfloat16)
    with attached(managed) as manager:
        (layer,), time = manager.layers, manager.state.time
        y = managed(rows)
        time.pending_kernel_s = 1e-6
        layer(rows)
        assert time.pending_kernel_s == 0, "what was computed before is queued before the table"
        assert layer.forward_cost(rows) == (0, y.nbytes)
        assert layer.forward_seconds(rows) == time.link_seconds(y.nbytes) > 0
        assert layer.backward_cost(y, (False, True)) == (0, 0)
        assert manager.attachment.traffic.rows_bytes == 2 * y.nbytes


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("needs", [True, False])
def test_the_gradient_of_a_table_is_made_of_its_rows_where_it_is_asked_for(needs, padding_idx):
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(nn.Embedding(9, 6, padding_idx=padding_idx)))
    rows = torch.tensor([[1, 3], [3, 8]])
    y = resident(rows)
    grad = torch.randn_like(y)
    y.backward(grad)
    with attached(managed) as manager, torch.no_grad():
        (layer,) = manager.layers
        padding = -1 if padding_idx is None else padding_idx
        own = managed[0].weight, None, layer.key, None, [False, needs, False]
        gx, gw, gb = torch.ops.oracle_offload.embedding_backward(
            grad, rows, rows.shape, rows.stride(), *own, padding, False, False
        )
    assert gx.numel() == gb.numel() == 0
    assert_same(gw, resident[0].weight.grad if needs else torch.empty(0))


class Recorded(TorchDispatchMode):
    """Notes of our operators what a graph would hold of who records them."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "oracle_offload" and len(args) > 5:
            self.found.append(args[5])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_an_operator_of_a_graph_says_who_records_it(kind):
    """A graph is made with tensors that hold nothing, its key among them."""
    managed, _, x = made(kind)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with attached(managed) as manager:
        (layer,) = manager.layers
        module, given, key = managed[0], fake.from_tensor(x.detach()), fake.from_tensor(layer.key)

        def recorded(key, given):
            with Recorded() as seen:
                own = module.weight, module.bias, key, None, traced.NOT
                layer.operator(given, *own, *arguments_of(module))
            (found,) = seen.found
            return found

        for trains in (True, False):
            managed.requires_grad_(trains)
            with fake:
                assert recorded(key, given) == traced.BY_GRAPH
                with torch.no_grad():
                    assert recorded(key, given) == traced.NOT
            assert recorded(layer.key, x.detach()) == (traced.HERE if trains else traced.NOT)


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_weight_that_is_replaced_before_backward_is_refused(kind):
    """torch's versions do not tell of it."""
    managed, _, x = made(kind)
    with attached(managed) as manager:
        (layer,) = manager.layers
        y = call(layer, x)
        managed[0].weight.data = managed[0].weight.data.clone()
        with pytest.raises(StaleWeightsError, match=r"'0' is not what .*replaced through \.data"):
            y.sum().backward()
        call(layer, x).sum().backward()
        assert not manager.attachment.held()


def test_nothing_is_kept_of_a_leaf_that_is_gone():
    managed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with attached(managed) as manager:
        numbers = {layer.number for layer in manager.layers}
        assert len(numbers) == 2 and numbers <= traced.layers.keys()
        assert [int(layer.key) for layer in manager.layers] == sorted(numbers)
    del managed, manager
    gc.collect()
    assert not numbers & traced.layers.keys()


class Scaled(nn.Embedding):
    """Asks ``super()`` to look up."""

    def forward(self, input):
        return super().forward(input) * 2


def test_a_class_that_asks_super_calls_the_operator_in_compiled_code_alone():
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(Scaled(9, 6)))
    rows = torch.arange(12).view(3, 4) % 7
    torch._dynamo.reset()
    with attached(managed) as manager, torch.no_grad():
        with Products() as seen:
            assert_same(managed(rows), resident(rows))
        assert not seen.ours
        compiled = torch.compile(managed, backend="eager", fullgraph=True)
        assert_same(compiled(rows), resident(rows))
        assert manager.attachment.traffic.rows_read == 2
    torch._dynamo.reset()
