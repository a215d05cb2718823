"""What a compiler is given of a call: how it is written down, compared, copied and watched."""

from __future__ import annotations

import math
import random
import sys
from collections import OrderedDict, deque, namedtuple

import numpy
import pytest
import torch
from equality import attached
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from oracle_offload import OffloadError
from oracle_offload.layers import compiled, traced

FIRST, SECOND = torch.ones(2), torch.zeros(3)
Pair = namedtuple("Pair", "a b")


def written(value):
    """Return the text, tensors and whole numbers of a call."""
    tensors, numbers = [], []
    return compiled._written(value, tensors, numbers), tensors, numbers


def read(text, tensors, numbers):
    return compiled._filled(compiled._read(text), iter(tensors), iter(numbers))


CALLS = [
    *(None, True, False, "", 'it\'s "said"\n', 0, -3, 1 << 40, 1.5, -0.0, 1e-320, math.inf),
    *((), (1,), [], [2, [3.5]], {}, {"a": 1, "b": (None, {"c": "d"})}),
    ([True, False], "forward", (FIRST, 4), {"shift": (SECOND, None), "factor": 0.1}),
]


@pytest.mark.parametrize("call", CALLS, ids=repr)
def test_a_call_that_is_written_down_is_read_as_it_was(call):
    text, tensors, numbers = written(call)
    assert compiled._OTHER not in text
    found = read(text, tensors, numbers)
    assert repr(found) == repr(call) and type(found) is type(call)


def test_tensors_and_whole_numbers_are_none_of_the_text_and_all_else_is():
    text, tensors, numbers = written((FIRST, 3, [SECOND, 4], True))
    assert [id(t) for t in tensors] == [id(FIRST), id(SECOND)] and numbers == [3, 4]
    assert written((SECOND, 5, [FIRST, 6], True))[0] == text
    others = [(FIRST, 3, [SECOND, 4], False), (FIRST, 3, (SECOND, 4), True), (FIRST, 3.0, [], 1)]
    assert len({text, *(written(other)[0] for other in others)}) == 4
    assert written(0.0)[0] != written(-0.0)[0]
    assert read(text, [SECOND, FIRST], [7, 8]) == (SECOND, 7, [FIRST, 8], True)


@pytest.mark.parametrize(
    "value",
    [object(), Pair(1, 2), OrderedDict(a=1), {1, 2}, torch.float32, slice(1), b"bytes", 1j],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_written_down_is_told_wherever_it_is(value):
    for call in (value, (1, value), [value], {"a": [value]}):
        assert compiled._OTHER in written(call)[0]


def test_a_result_is_like_what_was_told_where_every_known_size_and_step_is():
    y = torch.zeros(2, 3, 1)
    told = compiled._look(y)
    assert told == (torch.float32, [2, 3, 1], [3, 1, 1])
    assert compiled._describe(told) == (
        "a tensor of torch.float32, shape [2, 3, 1] and strides [3, 1, 1]"
    )
    for other, is_like in {
        y: True,
        torch.zeros(2, 3): False,
        torch.zeros(2, 3, 1, 1): False,
        torch.zeros(2, 4, 1): False,
        torch.zeros(5, 3, 1): False,
        torch.zeros(2, 4, 1)[:, :3]: False,
        y.double(): False,
        torch.zeros(3, 2, 1).transpose(0, 1): False,
        torch.zeros(2, 3, 5)[..., :1]: False,
        torch.zeros(2, 3, 1).as_strided((2, 3, 1), (3, 1, 7)): True,  # a single step is none
    }.items():
        assert compiled._is_like(other, told) is is_like, other.stride()
    unknown = torch.float32, [None, 3, 1], [3, None, 1]
    assert compiled._is_like(torch.zeros(7, 3, 1), unknown)
    assert compiled._is_like(torch.zeros(7, 6, 1)[:, ::2], (torch.float32, [7, 3, 1], [None] * 3))
    assert not compiled._is_like(torch.zeros(7, 4, 1), unknown)


def test_a_size_that_a_compiler_does_not_know_is_none_that_is_told():
    class Sized:
        dtype, shape = torch.float32, (2, torch.SymInt)

        def stride(self):
            return (torch.SymInt, 1)

    assert compiled._look(Sized()) == (torch.float32, [2, None], [None, 1])


def test_a_copy_of_containers_is_written_to_and_the_original_is_not():
    inner = [FIRST]
    value = {"list": inner, "same": inner, "deque": deque([inner], maxlen=3), "set": {1}}
    value["pair"], value["plain"] = Pair(inner, 1), (FIRST, "x")
    value["itself"] = value
    copied = compiled._copied(value, {})
    assert copied is not value and copied["itself"] is copied
    assert copied["list"] is copied["same"] is copied["deque"][0] is copied["pair"].a
    assert copied["list"] is not inner and copied["list"][0] is FIRST
    assert type(copied["pair"]) is Pair and copied["deque"].maxlen == 3
    assert copied["plain"] is value["plain"], "a tuple of what is no container stays"
    copied["list"].append(1)
    copied["set"].add(2)
    copied["deque"].append(2)
    assert inner == [FIRST] and value["set"] == {1} and len(value["deque"]) == 1


WRITES = {
    "key": lambda value: value.update(new=1),
    "value": lambda value: value.update(list=[SECOND]),
    "list": lambda value: value["list"].append(FIRST),
    "tuple": lambda value: value["tuple"][0].append(FIRST),
    "deque": lambda value: value["deque"].popleft(),
    "set": lambda value: value["set"].add(SECOND),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_container_is_seen(write):
    value = {"list": [FIRST], "tuple": ([SECOND],), "deque": deque([FIRST]), "set": {FIRST}}
    before = compiled._identity(value)
    assert compiled._identity(value) == before
    kept = dict(value)
    WRITES[write](value)
    assert compiled._identity(value) != before
    assert kept


@pytest.mark.parametrize("with_numpy", [False, True])
def test_what_is_drawn_is_drawn_again(with_numpy, monkeypatch):
    if not with_numpy:
        monkeypatch.delitem(sys.modules, "numpy")
    state = compiled._drawn()
    drawn = random.random(), numpy.random.rand()
    assert compiled._drawn() != state
    compiled._draw_from(state)
    assert random.random() == drawn[0]
    assert (numpy.random.rand() == drawn[1]) is with_numpy


def test_uses_are_counted_as_gradients_come():
    x, w, unused = (torch.ones(2, requires_grad=True) for _ in range(3))
    shared = x.sin()
    found = [*compiled._uses(shared * shared + x * w)]
    counts = [sum(t is leaf for t in found) for leaf in (x, w, unused)]
    assert counts == [2, 1, 0], "the sine takes x once, whatever is made of it"
    assert [*compiled._uses(torch.ones(2))] == []


def test_a_gradient_has_the_layout_of_its_tensor_and_memory_of_its_own():
    tensor, columns = torch.zeros(3, 2), torch.arange(6.0).view(2, 3).t()
    found = compiled._as_told(columns, tensor, ())
    assert found.stride() == (2, 1) and torch.equal(found, columns)
    rows = columns.contiguous()
    assert compiled._as_told(rows, tensor, (tensor, None)) is rows
    found = compiled._as_told(rows, tensor, (rows.view(-1)[:1],))
    assert found is not rows and torch.equal(found, rows)


def test_modes_and_settings_of_a_call():
    module = nn.Sequential(nn.Dropout(0.25), nn.Identity())
    modes = [each.training for each in module.modules()]
    with pytest.raises(KeyError), compiled._trained(module, [False, True, False]):
        assert [each.training for each in module.modules()] == [False, True, False]
        raise KeyError
    assert [each.training for each in module.modules()] == modes
    module[1].name, module[1].kept, module[1].number = "a", [1], 3
    assert compiled._settings(module) == {
        (1, "p"): 0.25,
        (1, "inplace"): False,
        (2, "name"): "a",
        (2, "number"): 3,
    }


def test_a_tensor_that_is_given_twice_is_no_operators():
    compiled._check_given([FIRST, FIRST], [True, False])
    with pytest.raises(compiled._NoOperator, match="the same tensor more than once"):
        compiled._check_given([FIRST, FIRST], [True, True])


# ---- layers that are one operator ----


def test_a_leaf_is_found_by_its_number_while_it_is_there():
    assert traced.layer_by_number(1 << 40) is None
    key = torch.tensor(1 << 40)
    with pytest.raises(OffloadError, match=r"detached since; call the compiled model again"):
        traced.layer_of(key)
    with pytest.raises(OffloadError, match=r"detached between forward and backward; run backward"):
        traced.layer_in_backward(key)


def test_a_leaf_is_found_until_it_is_detached():
    with attached(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) as manager:
        layers = [*manager.layers]
        assert [layer.member for layer in layers] == [0, 1]
        for layer in layers:
            assert traced.layer_by_number(layer.number) is layer
            assert traced.layer_of(layer.key) is traced.layer_in_backward(layer.key) is layer
    for layer in layers:
        with pytest.raises(OffloadError, match="detached since"):
            traced.layer_of(layer.key)
        with pytest.raises(OffloadError, match=f"'{layer.name}' was detached between forward and"):
            traced.layer_in_backward(layer.key)


def test_what_runs_is_known_of_our_operators_alone():
    assert traced.kernel_of(traced.linear) is traced._forward
    assert traced.kernel_of(torch.ops.aten.add.Tensor) is None


@pytest.mark.parametrize(
    ("given", "dtype", "found"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.bfloat16, torch.float64),
        (torch.int64, torch.bfloat16, torch.int64),
    ],
)
def test_what_autocast_makes_of_a_tensor_is_computed_and_told(given, dtype, found):
    tensor = torch.zeros(2, 3, dtype=given).t()
    assert traced._autocast_of(tensor, dtype) is found
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is torch.bfloat16):
        if given.is_floating_point and dtype is not torch.float32:
            assert F.linear(tensor, tensor).dtype is found
    told = traced._on(torch.device("meta"), tensor, dtype)
    assert told.is_meta and told.dtype is found and told.stride() == tensor.stride()
    assert traced._on(torch.device("meta"), None, dtype) is None


CONVOLUTION = [2, 1], [1, 0], [1, 2], 2


def test_compilers_are_told_the_geometry_of_every_gradient():
    with FakeTensorMode():
        x, weight = torch.empty(2, 5, 8), torch.empty(3, 8)
        grad = F.linear(x, weight)
        assert traced._linear_gradient(grad, x, weight).shape == x.shape
        x, weight = torch.empty(2, 4, 9, 11), torch.empty(6, 2, 3, 3)
        y = traced._convolution(x, weight, None, *CONVOLUTION)
        assert y.shape == F.conv2d(x, weight, None, *CONVOLUTION).shape
        assert traced._convolution_gradient(y, x, weight, *CONVOLUTION).shape == x.shape
        ids, table = torch.empty(2, 5, dtype=torch.int64), torch.empty(7, 3)
        rows = traced._rows(ids, table, None, -1, False, False)
        assert rows.shape == (2, 5, 3)
        for sparse, layout in ((False, torch.strided), (True, torch.sparse_coo)):
            found = traced._rows_gradient(rows, ids, table, -1, False, sparse)
            assert found.shape == table.shape and found.layout is layout
        y = traced._library_code(x, weight, None, 7, torch.float16, torch.float32, None, False)
        assert y.shape == (2, 4, 9, 7) and y.dtype is torch.float16
        found = traced._like_input(y, x, weight, 7, torch.float16, torch.bfloat16, None, False)
        assert found.shape == x.shape and found.dtype is torch.bfloat16 and found.is_contiguous()
    with pytest.raises(AssertionError, match="row numbers have no gradient"):
        traced._no_gradient(rows, ids, table, -1, False, False)


def test_backward_reads_an_input_that_its_operator_says():
    trained, frozen = torch.ones(2, requires_grad=True), torch.ones(2)
    assert traced._reads_rows(torch.zeros(2, dtype=torch.int64), None)
    assert not traced._reads_rows(frozen, trained)
    for reads, bias, found in (
        *((True, None, True), (True, frozen, True), (False, None, False)),
        *((False, frozen, False), (False, trained, True)),
    ):
        assert traced._reads_what_it_says(frozen, bias, 7, None, reads) is found
