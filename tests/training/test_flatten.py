"""Plain tensors inside a module are found by their paths, and the same is made of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from oracle_offload.layers.flatten import (
    Copy,
    Places,
    attributes_of,
    class_name,
    copy_tables,
    is_wrapper,
    plain_tensors,
    value_at,
)


class State:
    """What a library keeps tensors in."""

    def __init__(self, **tensors: Any) -> None:
        self.__dict__.update(tensors)


class Marked(nn.Parameter):
    """A Parameter of a library's own."""


HOLDERS = frozenset({class_name(State)})


def make_layer() -> Any:
    """A layer whose weight is made of two, with a state that keeps a table and its scale."""
    layer: Any = nn.Module()
    pair = TwoTensor(torch.ones(4, 4), torch.zeros(4, 4))
    layer.weight = nn.Parameter(pair, requires_grad=False)
    layer.register_buffer("codes", torch.arange(8.0))
    layer.register_parameter("bias", None)
    layer.noted = torch.full((3,), 2.0)
    layer.state = State(
        table=torch.arange(6.0), scale=torch.ones(1), inner=State(deep=torch.ones(5))
    )
    layer.other = SimpleNamespace(hidden=torch.ones(3))
    layer.nothing = torch.empty(0)
    layer.state.itself = layer.state
    return layer


def test_what_holds_bytes_is_found_by_path_and_each_object_once() -> None:
    layer = make_layer()
    layer.again = layer.codes
    layer.view = layer.codes.detach()
    layer.other_view = layer.codes.detach()
    layer.part = layer.codes[:4]
    layer.whole = layer.codes.view(torch.int32)
    layer.turned = layer.codes.view(2, 4)
    found, same = plain_tensors(layer, HOLDERS)
    assert [*found] == [
        *("weight.a", "weight.b", "codes", "noted", "state.table", "state.scale"),
        *("state.inner.deep", "part", "whole", "turned"),
    ]
    assert (
        found["weight.a"] is layer.weight.a and found["state.inner.deep"] is layer.state.inner.deep
    )
    assert [*same] == ["codes"] and len(same["codes"]) == 2
    assert same["codes"][0] is layer.view and same["codes"][1] is layer.other_view
    assert "state.table" not in plain_tensors(layer)[0]


def test_a_parameter_of_a_librarys_own_is_searched_and_a_plain_one_is_not() -> None:
    layer: Any = nn.Module()
    layer.weight = Marked(torch.ones(2))
    layer.weight.absmax = torch.ones(3)
    layer.bias = nn.Parameter(torch.ones(2))
    layer.bias.absmax = torch.ones(3)
    assert [*plain_tensors(layer)[0]] == ["weight", "weight.absmax", "bias"]


def test_a_wrapper_is_a_tensor_that_is_made_of_others() -> None:
    class Flattens:
        __tensor_flatten__ = None

    assert is_wrapper(TwoTensor(torch.ones(2), torch.ones(2)))
    assert not is_wrapper(torch.ones(2)) and not is_wrapper(Flattens())
    pair = TwoTensor(torch.ones(2), torch.zeros(2))
    assert attributes_of(pair) == {"a": pair.a, "b": pair.b}
    assert attributes_of(State(x=1)) == {"x": 1}
    layer = make_layer()
    keys = {"weight", "bias", "codes", "noted", "state", "other", "nothing"}
    assert keys <= attributes_of(layer).keys()
    assert class_name(nn.Linear) == "torch.nn.modules.linear.Linear"


def test_a_path_leads_to_tensors_objects_and_modules() -> None:
    layer = make_layer()
    layer.child = nn.Linear(2, 2)
    wanted = {
        "": layer,
        "child": layer.child,
        "child.weight": layer.child.weight,
        "codes": layer.codes,
        "weight.b": layer.weight.b,
        "state": layer.state,
        "state.inner.deep": layer.state.inner.deep,
        "bias": None,
        "child.none.weight": None,
        "bias.data": None,
        "state.none": None,
        "state.none.deep": None,
        "none": None,
    }
    for path, value in wanted.items():
        assert value_at(layer, path) is value, path
    places, missing = Places(layer), object()
    assert places.get("codes") is layer.codes and places.get("codes", missing) is layer.codes
    assert places.get("none", missing) is missing and places.get("none") is None
    del layer, wanted, value
    assert places.get("codes", missing) is missing


def test_small_tables_of_objects_are_copied_and_nothing_else() -> None:
    layer = make_layer()
    before = plain_tensors(layer, HOLDERS)[0]
    copy_tables(layer, HOLDERS, before["state.inner.deep"].nbytes)
    after = plain_tensors(layer, HOLDERS)[0]
    assert after.keys() == before.keys()
    copied = {path for path in after if after[path] is not before[path]}
    assert copied == {"state.scale", "state.inner.deep"}
    assert all(torch.equal(after[path], before[path]) for path in after)
    assert not any(after[path].data_ptr() == before[path].data_ptr() for path in copied)


def test_a_copy_is_the_same_over_other_bytes() -> None:
    layer = make_layer()
    layer.weight.loaded_by = "a loader"
    layer.twice = layer.state
    layer.own = Marked(torch.ones(2))
    layer.own.absmax = torch.ones(3)
    layer.own.origin = "own"
    found, _ = plain_tensors(layer, HOLDERS)
    replaced = {id(tensor): tensor.detach() + 10 for tensor in found.values()}
    wrappers: dict[int, Tensor] = {}
    copies = [Copy(replaced, HOLDERS, wrappers).module(layer, nn.Module) for _ in range(2)]
    for made in copies:
        there, _ = plain_tensors(made, HOLDERS)
        assert there.keys() == found.keys()
        for path, tensor in there.items():
            assert tensor.data_ptr() == replaced[id(found[path])].data_ptr(), path
            assert torch.equal(tensor.detach(), found[path].detach() + 10)
        assert type(made) is nn.Module and type(made.own) is Marked and made.own.origin == "own"
        assert made.state is made.twice is not layer.state and made.state.itself is made.state
        assert made.other is layer.other and made._parameters["bias"] is None
        assert made.weight.loaded_by == "a loader" and not made.own.requires_grad
        assert made.nothing.numel() == 0
    assert copies[0].weight is copies[1].weight is not layer.weight
    assert copies[0].state is not copies[1].state and copies[0].codes is not copies[1].codes
    late = torch.ones(2)
    assert torch.equal(Copy(replaced, HOLDERS, wrappers).of(late), late)
    assert Copy({}, HOLDERS, {}).of(layer.other) is layer.other


class Told(TwoTensor):
    """Notes on itself who made it."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        made = Told(inner["a"], inner["b"])
        made.by = "unflatten"
        return made


def test_a_copy_of_what_is_made_of_others_has_the_notes_that_it_does_not_make_itself() -> None:
    layer: Any = nn.Module()
    weight: Any = Told(torch.ones(2), torch.zeros(2))
    weight.by, weight.loaded_by, weight.scale = "a loader", "a loader", torch.ones(1)
    layer.weight = weight
    found, _ = plain_tensors(layer)
    replaced = {id(tensor): tensor.detach() + 10 for tensor in found.values()}
    made = Copy(replaced, frozenset(), {}).module(layer, nn.Module).weight
    assert type(made) is Told and torch.equal(made.a, torch.full((2,), 11.0))
    assert made.by == "unflatten" and made.loaded_by == "a loader"
    assert "scale" not in vars(made), "a tensor is no note"
    assert weight.by == "a loader" and weight.scale.numel() == 1
