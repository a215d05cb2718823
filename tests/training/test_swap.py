"""What a managed module still is: its class by name, copies, casts, what is next to masters."""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from equality import Through, assert_models_agree, attached, resident_pair
from ostris import to_ostris
from torch import Tensor, nn

from oracle_offload.layers import swap
from oracle_offload.layers.handle import Handle
from oracle_offload.layers.managed import HANDLE, is_managed
from oracle_offload.layers.swap import base_class, has_own_forward, managed_keys

pytestmark = pytest.mark.usefixtures("nothing_is_small")


class Table(nn.Module):
    """Computes with a Parameter and a buffer of its own, and with a child."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(8, 4))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.child = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Scale what the child makes."""
        return self.child(x) * self.scale + self.table[:1]

    def encode(self, x: Tensor) -> Tensor:
        return x @ self.table.t()

    def forward_twice(self, x: Tensor) -> Tensor:
        return self.forward(self.forward(x))

    def fuse(self) -> str:
        return "fused"


MODULES = {
    "linear": (lambda: nn.Linear(4, 4), (2, 4)),
    "convolution": (lambda: nn.Conv2d(4, 4, 3), (2, 4, 5, 5)),
    "table": (Table, (2, 4)),
    "recurrent": (lambda: nn.GRU(4, 4), (3, 2, 4)),
}


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A managed module, what it was, and an input."""
    torch.manual_seed(0)
    make, shape = MODULES[request.param]
    made = make()
    kind, before = type(made), copy.deepcopy(made)
    with attached(made, "cpu", offload_percent=1.0) as manager:
        assert manager.layers and is_managed(made)
        yield made, kind, before, torch.randn(shape)
    assert type(made) is kind and HANDLE not in vars(made) and not is_managed(made)


def result(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = module(x)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("which", ["linear", "convolution", "table"])
def test_the_forward_that_its_class_has_computes_whenever_that_came(
    which: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries replace the forward of a class, while a model of it is attached, or in between."""
    make, shape = MODULES[which]
    torch.manual_seed(0)
    managed, resident = resident_pair(nn.Sequential(make(), nn.Tanh()))
    kind = type(managed[0])
    own: Any = kind.forward

    def step(model: nn.Module) -> list[Tensor]:
        x = torch.randn(shape).to(device).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        assert x.grad is not None
        return [y.detach(), x.grad]

    for _ in range(2):
        with attached(managed, device, offload_percent=1.0) as manager:
            assert manager.layers[0].name == "0"
            assert_models_agree(managed, resident, step, steps=1, device=device)
            with monkeypatch.context() as patch:
                patch.setattr(kind, "forward", lambda module, x: own(module, x * 2) * 3)
                assert_models_agree(managed, resident, step, steps=1, device=device)
            assert_models_agree(managed, resident, step, steps=1, device=device)
        monkeypatch.setattr(kind, "forward", lambda module, x: own(module, x.sin()))


def test_a_managed_class_is_a_subclass_by_the_same_name(module: Any) -> None:
    made, kind, _, _ = module
    now = type(made)
    assert now is not kind and issubclass(now, kind) and base_class(made) is kind
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(now, name) == getattr(kind, name)
    assert now.forward.__doc__ == kind.forward.__doc__
    assert base_class(nn.Linear(1, 1)) is nn.Linear
    other = next(one for one in (make() for make, _ in MODULES.values()) if type(one) is kind)
    with attached(other, "cpu", offload_percent=1.0):
        assert type(other) is now, "one class for all of a kind"


def test_copies_and_pickles_are_what_the_module_was(module: Any) -> None:
    made, kind, before, x = module
    expected = result(before, x)
    assert torch.equal(result(made, x), expected)
    copies = [copy.deepcopy(made), *(pickle.loads(pickle.dumps(made, n)) for n in range(6))]
    for other in copies:
        assert not is_managed(other) and HANDLE not in vars(other)
        assert torch.equal(result(other, x), expected)
        assert [*other.state_dict()] == [*before.state_dict()]
    assert all(type(other) is kind for other in copies[1:])


def test_methods_that_compute_are_lent_to_and_others_are_not() -> None:
    table = Table()
    x = torch.randn(2, 4)
    with torch.no_grad():
        expected = table.encode(x), table.forward_twice(x)
    with attached(table, "cpu", offload_percent=1.0) as manager:
        engine = manager.state.engine
        for call, wanted in zip((table.encode, table.forward_twice), expected, strict=True):
            before = engine.stats()["acquires"]
            with torch.no_grad():
                assert torch.equal(call(x), wanted)
            assert engine.stats()["acquires"] > before
        before = engine.stats()["acquires"]
        assert table.fuse() == "fused" and engine.stats()["acquires"] == before
        assert "fuse" not in vars(type(table)) and "encode" in vars(type(table))
        assert inspect.signature(type(table).encode) is not None
        assert type(table).encode.__name__ == "encode"


def test_what_lies_beside_masters_is_told_apart() -> None:
    table, linear = Table(), nn.Linear(4, 4)
    assert managed_keys(table) == set() == managed_keys(linear)
    assert [id(t) for t in swap.resident_tensors(linear)] == [id(linear.weight), id(linear.bias)]
    with attached(table, "cpu", offload_percent=1.0), attached(linear, "cpu", offload_percent=1.0):
        assert managed_keys(table) == {"table"} and managed_keys(linear) == {"weight", "bias"}
        assert swap.resident_tensors(linear) == []
        (scale,) = swap.resident_tensors(table)
        assert scale is table.scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_cast_is_kept_and_a_move_is_not(module: Any, dtype: torch.dtype) -> None:
    made, _, before, x = module
    made(x)[0].sum().backward()
    parameters = dict(made.named_parameters())
    assert made.to(dtype) is made
    before.to(dtype)
    for name, parameter in made.named_parameters():
        assert parameter is parameters[name] and parameter.dtype is dtype, name
        assert parameter.grad is None or parameter.grad.dtype is dtype
        assert parameter.device.type == "cpu"
    assert all(buffer.dtype is dtype for buffer in made.buffers())
    assert torch.equal(result(made, x.to(dtype)), result(before, x.to(dtype)))
    made.to("meta")
    assert all(parameters[name].device.type == "cpu" for name in parameters)


def test_what_a_change_does_is_asked_once_for_each_kind_of_tensor() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    asked: list[Tensor] = []

    def change(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        return tensor.double()

    with attached(model, "cpu", offload_percent=1.0):
        weights = [layer.weight.data_ptr() for layer in model]
        model._apply(change)
        assert sorted(t.dim() for t in asked) == [1, 2], "no weight is cast to see what comes of it"
        assert all(t.numel() <= 4 for t in asked)
        assert all(layer.weight.dtype is torch.float64 for layer in model)
        weights = [layer.weight.data_ptr() for layer in model]
        model._apply(lambda tensor: tensor)
        assert [layer.weight.data_ptr() for layer in model] == weights
        model.float()
        assert all(layer.weight.dtype is torch.float32 for layer in model)


@pytest.mark.parametrize("name", MODULES)
def test_a_forward_that_a_hook_has_left_on_the_instance_is_followed(name: str) -> None:
    """As accelerate's ``remove_hook_from_module`` leaves it, before attach or after."""
    make, shape = MODULES[name]
    made, x = make(), torch.randn(shape)
    expected = result(made, x)
    assert not has_own_forward(made)
    made.forward = made.forward
    assert has_own_forward(made)
    for _ in range(2):
        with attached(made, "cpu", offload_percent=1.0) as manager:
            assert manager.resident == {} and "forward" not in vars(made) and is_managed(made)
            made.forward = made.forward
            assert has_own_forward(made) and torch.equal(result(made, x), expected)
            assert manager.state.engine.stats()["acquires"] > 0
            assert torch.equal(result(copy.deepcopy(made), x), expected)
        assert "forward" not in vars(made) and torch.equal(result(made, x), expected)
    for foreign in (make().forward, lambda x: x):
        made.forward = foreign
        assert not has_own_forward(made)


def test_recurrent_weights_are_listed_as_they_stand() -> None:
    recurrent = nn.LSTM(4, 4, bias=False)
    recurrent._flat_weights = []
    swap.list_weights(recurrent)
    assert recurrent._flat_weights == [recurrent.weight_ih_l0, recurrent.weight_hh_l0]
    assert [reference() for reference in recurrent._flat_weight_refs] == recurrent._flat_weights
    del recurrent._parameters["weight_hh_l0"]
    swap.list_weights(recurrent)
    assert recurrent._flat_weights[1] is None is recurrent._flat_weight_refs[1]


def test_a_tracer_is_refused_in_a_sentence() -> None:
    with pytest.raises(swap.OffloadError) as raised:
        swap.refuse_tracing("torch.jit")
    assert str(raised.value) == (
        "torch.jit cannot trace an attached model: each layer has its weights for one call alone. "
        "Detach the model first, or compile it with torch.compile, which can."
    )


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("compiling", [False, True])
def test_an_older_torch_exports_where_it_compiles_and_dynamo_does_not(
    compiling: bool, dynamo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: dynamo)
    assert swap._is_tracing_for_export() is (compiling and not dynamo)


@pytest.mark.parametrize("fails", [False, True])
def test_no_compiler_sees_what_a_layer_computes_and_the_next_sees_it_again(fails: bool) -> None:
    class Layer:
        def __call__(self, x: int) -> int:
            seen.append(set_compiler(None))
            if fails:
                raise KeyError
            return x

    set_compiler = torch._C._dynamo.eval_frame.set_eval_frame
    seen: list[Any] = []
    before = set_compiler(False)  # what is compiled runs, nothing is compiled
    try:
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            assert swap.call(Layer(), 3) == 3
        after = set_compiler(False)
    finally:
        set_compiler(before)
    assert seen == [None] and after is False


def test_a_change_of_dtype_is_followed_at_once_by_whatever_function_it_is_made() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(2, 2, 3))
    with attached(model) as manager:
        for change, dtype in (
            (lambda: model.to(torch.bfloat16), torch.bfloat16),
            (lambda: model._apply(torch.Tensor.double), torch.float64),
            (lambda: model._apply(torch.Tensor.float), torch.float32),
        ):
            model[0].weight.grad = torch.zeros_like(model[0].weight)
            change()
            assert {p.dtype for p in model.parameters()} == {dtype} == {model[0].weight.grad.dtype}
            assert not any(layer.has_moved() for layer in manager.layers)
        masters = [layer.masters for layer in manager.layers]
        model.to(torch.float32)
        model.to(memory_format=torch.contiguous_format)
        assert [layer.masters for layer in manager.layers] == masters, "nothing has changed"


@pytest.mark.parametrize(
    ("axes", "layout"), [(2, torch.channels_last), (3, torch.channels_last_3d)], ids=str
)
def test_a_change_of_layout_has_the_residents_bits(axes: int, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    make = (nn.Conv2d, nn.Conv3d)[axes - 2]
    parts = make(4, 4, 3), nn.Tanh(), make(4, 4, 2), nn.Linear(5 - axes, 3)
    managed, resident = resident_pair(nn.Sequential(*parts))
    parameters = [*managed.parameters()]
    x = torch.randn(2, 4, *(7, 6, 5)[:axes])

    def step(model: nn.Module) -> list[Any]:
        given = x.clone().requires_grad_()
        y = model(given)
        y.square().sum().backward()
        return [y.detach(), given.grad]

    with attached(managed) as manager:
        assert len(manager.layers) == 3
        for there in (layout, torch.contiguous_format):
            for model in (managed, resident):
                model.to(memory_format=there)
            strides = [[p.stride() for p in model.parameters()] for model in (managed, resident)]
            assert strides[0] == strides[1]
            assert all(map(operator.is_, managed.parameters(), parameters))
            assert_models_agree(managed, resident, step)


# ---- what stays of it where somebody derived a class ----


@pytest.mark.parametrize("name", ["linear", "table"])
def test_a_class_that_was_derived_after_attach_is_an_ordinary_one_after_detach(name: str) -> None:
    """A parametrisation's: its base is the managed class still, and manages nothing."""
    make, shape = MODULES[name]
    key = {"linear": "bias", "table": "table"}[name]
    torch.manual_seed(0)
    made, resident = resident_pair(make())
    x = torch.randn(shape)
    with attached(nn.Sequential(made), "cpu", offload_percent=1.0):
        assert is_managed(made)
        for each in (made, resident):
            torch.nn.utils.parametrize.register_parametrization(each, key, nn.Tanh())
    assert torch.nn.utils.parametrize.is_parametrized(made)
    assert not is_managed(made) and managed_keys(made) == set()
    assert torch.equal(result(made, x), result(resident, x))
    assert len(swap.resident_tensors(made)) == len(swap.resident_tensors(resident))
    for each in (made, resident):
        each.double()
        each.requires_grad_(False)
    assert {p.dtype for p in made.parameters()} == {torch.float64}
    assert torch.equal(result(made, x.double()), result(resident, x.double()))
    compiled = torch.compile(made, backend="eager")
    assert torch.equal(result(compiled, x.double()), result(resident, x.double()))


def test_what_a_graph_breaks_at_says_why_where_torch_lets_it() -> None:
    def computes(x: Tensor) -> Tensor:
        return x + 1

    function = swap.outside(computes)
    x = torch.ones(2)
    assert torch.equal(function(x), x + 1)
    compiled = torch.compile(lambda x: function(x) * 2, backend="eager", fullgraph=True)
    with pytest.raises(Exception) as raised:
        compiled(x)
    if "reason" in inspect.signature(torch.compiler.disable).parameters:
        assert "docs/compile.md" in str(raised.value)


# ---- what is lent to, and what is not ----


class Names(Table):
    """Has names that begin as methods do which are lent to, and are none."""

    forward_cache: Any = None
    forward_limit = 3

    def forward(self, x: Tensor) -> Tensor:
        assert self.forward_cache is None and self.forward_limit == 3
        return super().forward(x)


def test_hooks_see_what_borrows_and_attributes_stay_what_they_are() -> None:
    model = nn.Sequential(Names())
    master = model[0].table
    seen: list[bool] = []

    def look(module: Any, *_: Any) -> None:
        seen.append(type(module.table) is Handle and module._parameters["table"] is master)

    model[0].register_forward_pre_hook(look)
    model[0].register_forward_hook(look)
    with attached(model, "cpu", offload_percent=1.0):
        model(torch.randn(2, 4))
        assert type(model[0]).forward_limit == 3 and type(model[0]).forward_cache is None
        assert model[0].table is master
    assert seen == [True, True]


# ---- what a change is made of ----


class Looks(nn.Linear):
    """Looks at its weight in a method that torch calls for each change."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        assert self.weight is not None, "a master is out of its place"
        return super()._apply(fn, recurse)


def test_masters_stay_in_their_places_where_nothing_else_is_to_be_changed() -> None:
    """Other threads may compute with them meanwhile."""
    model = nn.Sequential(Looks(4, 4), nn.Linear(4, 4))
    with attached(model, "cpu", offload_percent=1.0) as manager:
        assert len(manager.layers) == 2
        model.double()
        assert {p.dtype for p in model.parameters()} == {torch.float64}


@pytest.mark.parametrize("name", ["table", "recurrent"])
def test_a_change_that_fails_leaves_the_masters_in_their_places(name: str) -> None:
    make, shape = MODULES[name]
    made = make()
    made.register_buffer("other", torch.ones(3))
    before = copy.deepcopy(made)
    x = torch.randn(shape)
    with attached(made, "cpu", offload_percent=1.0):
        parameters = dict(made.named_parameters())

        def fails(tensor: Tensor) -> Tensor:
            raise KeyError("planted")

        with pytest.raises(KeyError, match="planted"):
            made._apply(fails)
        assert all(made.get_parameter(key) is tensor for key, tensor in parameters.items())
        assert [*made._parameters] == [*before._parameters]
        assert torch.equal(result(made, x), result(before, x))
        made.double()
        assert made.other.dtype is torch.float64
        assert torch.equal(result(made, x.double()), result(before.double(), x.double()))


def test_a_change_without_children_is_of_the_module_alone() -> None:
    table = Table()
    with attached(table, "cpu", offload_percent=1.0):
        table._apply(lambda tensor: tensor.double(), recurse=False)
        assert table.table.dtype is table.scale.dtype is torch.float64
        assert table.child.weight.dtype is torch.float32
        table._apply(lambda tensor: tensor.double())
        assert table.child.weight.dtype is torch.float64


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4, 5, 6)], ids=str)
def test_a_layout_is_by_channels_where_no_other_name_fits(shape: tuple[int, ...]) -> None:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    plain = torch.randn(shape)
    one = plain[:, :1].contiguous()  # with one channel both are the same
    assert swap._format_of(plain) is torch.contiguous_format
    assert swap._format_of(plain.contiguous(memory_format=last)) is last
    assert swap._format_of(one.contiguous(memory_format=last)) is torch.contiguous_format
    assert swap._format_of(plain.transpose(0, 1)) is torch.contiguous_format
    for flat in (plain.flatten(2), plain.flatten(2).transpose(0, 1)):
        assert swap._format_of(flat) is torch.contiguous_format


# ---- what is notified of a change ----


class Other(nn.Linear):
    pass


class Reader(nn.Module):
    """An adapter that computes with a layer's weight."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.org_module = [layer]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.org_module[0].weight.data)


def set_cast(layer: Any) -> None:
    """As diffusers' layerwise casting is put on a layer."""
    vars(layer)["_diffusers_hook"] = types.SimpleNamespace(hooks={"layerwise_casting": 1})
    layer.forward = layer.forward
    del vars(layer)["_diffusers_hook"]


SET: dict[str, tuple[Callable[[Any], None], bool]] = {
    "class": (lambda layer: setattr(layer, "__class__", Other), True),
    "weight": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(4, 4))), True),
    "reader": (lambda layer: setattr(layer, "forward", Reader(layer).forward), False),
    "cast": (set_cast, True),
    "forward": (lambda layer: setattr(layer, "forward", layer.forward), False),
    "name": (lambda layer: setattr(layer, "name", "a layer"), False),
}


@pytest.mark.parametrize("what", SET)
def test_what_is_set_on_a_layer_is_told_where_it_computes_nothing_without(what: str) -> None:
    change, told = SET[what]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with attached(model, "cpu", offload_percent=1.0) as manager:
        layer = manager.layers[0]
        attachment, heard = layer.attachment, []

        def let_go_soon(layer: Any) -> None:
            heard.append(layer.name)
            attachment.let_go_soon(layer)

        layer.attachment = Through(attachment, let_go_soon=let_go_soon)
        change(model[0])
        layer.attachment = attachment
        assert heard == (["0"] if told else [])
        model(torch.ones(2, 4))


def test_what_a_recurrent_module_lists_is_its_parameters_after_a_change() -> None:
    recurrent, other = nn.GRU(4, 4), nn.GRU(4, 4)
    other.load_state_dict(recurrent.state_dict())
    for each in (recurrent, other):
        each.register_buffer("steps", torch.ones(1))  # so that torch's own _apply runs for it
    x = torch.randn(3, 2, 4).double()
    with attached(nn.Sequential(recurrent), "cpu", offload_percent=1.0):
        recurrent.double()
        assert recurrent.steps.dtype is torch.float64
        standing = [recurrent._parameters[name] for name in recurrent._flat_weights_names]
        for listed, parameter in zip(recurrent._flat_weights, standing, strict=True):
            assert listed is parameter
    assert torch.equal(result(recurrent, x), result(other.double(), x))


def test_a_bias_that_is_an_empty_buffer_is_passed_over() -> None:
    """As some libraries say that there is none."""
    linear = nn.Linear(4, 4, bias=False)
    del linear._parameters["bias"]
    linear.register_buffer("bias", None)
    before = copy.deepcopy(linear)
    x = torch.randn(2, 4)
    with attached(linear, "cpu", offload_percent=1.0):
        assert is_managed(linear)
        assert linear.double().weight.dtype is torch.float64 and linear.bias is None
        assert torch.equal(result(linear, x.double()), result(before.double(), x.double()))


def test_a_cast_of_quantised_buffers_is_the_residents_and_followed_at_once() -> None:
    model = nn.Sequential(nn.Linear(256, 256))
    to_ostris(model[0])
    model, resident = resident_pair(model)
    with attached(model, "cpu", offload_percent=1.0) as manager:
        (layer,) = manager.layers
        for each in (model, resident):
            each.to(torch.bfloat16)
        found = {name: buffer.dtype for name, buffer in model.named_buffers()}
        assert found == {name: buffer.dtype for name, buffer in resident.named_buffers()}
        assert torch.bfloat16 in found.values() and not layer.has_moved()
