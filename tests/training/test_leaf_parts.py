"""One managed leaf: what it knows of its masters, and what it tells the engine of them."""

from __future__ import annotations

import copy
import gc
import pickle
import types

import numpy
import pytest
import torch
from equality import Recorder, assert_same, attached, resident_pair
from torch import nn

from oracle_offload import OffloadError
from oracle_offload.layers import leaf as leaf_module
from oracle_offload.layers.leaf import (
    Masters,
    is_memory_held_elsewhere,
    unfit_tensor,
    version_of,
)

KIND = types.SimpleNamespace(names=("weight", "bias"), backward_reads=("weight",))


def noted(**tensors):
    return Masters(KIND, {"weight": nn.Parameter(torch.randn(4, 6)), "bias": None, **tensors})


def set_data(parameter, data):
    parameter.data = data.detach()


CHANGES = {
    "nothing": (True, lambda found: None),
    "another tensor": (False, lambda found: found.update(weight=found["weight"].detach())),
    "a bias": (False, lambda found: found.update(bias=found["weight"])),
    "none": (False, lambda found: found.update(weight=None)),
    "no entry for what was none": (True, lambda found: found.pop("bias")),
    "memory": (False, lambda found: set_data(found["weight"], found["weight"] * 2)),
    "strides": (False, lambda found: set_data(found["weight"], found["weight"].view(6, 4).t())),
    "size": (False, lambda found: set_data(found["weight"], found["weight"][:3])),
    "dtype": (False, lambda found: set_data(found["weight"], found["weight"].view(torch.int32))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_masters_are_those_that_lie_there_as_they_did(change):
    weight = nn.Parameter(torch.randn(4, 6), requires_grad=False)
    masters = noted(weight=weight)
    found = {"weight": weight, "bias": None}
    is_same, make = CHANGES[change]
    make(found)
    assert masters.are(found) is is_same


def test_what_was_replaced_is_named_with_its_memory():
    weight, bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4))
    before = noted(weight=weight, bias=bias)
    assert [*noted(weight=weight, bias=bias).replaced(before)] == []
    assert [*noted(weight=weight).replaced(before)] == [], "what is gone was not replaced"
    assert [*before.replaced(noted(weight=weight))] == [], "nor what came"
    storage = weight.untyped_storage()._weak_ref()
    set_data(weight, weight * 2)
    ((name, (memory, reassigned)),) = noted(weight=weight, bias=bias).replaced(before)
    assert (name, memory.cdata, reassigned) == ("weight", storage, False)
    assert memory.expired()
    other = nn.Parameter(torch.randn(4))
    found = dict(noted(weight=nn.Parameter(weight.data), bias=other).replaced(before))
    assert found["bias"][1] is True is found["weight"][1] and not found["bias"][0].expired()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_tensor_is_replaced_for_good_where_nobody_else_holds_it(name):
    masters = noted(weight=nn.Parameter(torch.ones(2)), bias=nn.Parameter(torch.ones(2)))
    assert masters.holds_alone(name)
    held = dict(masters.named())[name]
    assert not masters.holds_alone(name)
    del held
    assert masters.holds_alone(name)


def test_a_write_to_any_tensor_changes_the_version():
    first, second = torch.zeros(2), torch.zeros(2)
    with torch.inference_mode():
        unversioned = torch.zeros(2)
    assert version_of([]) == version_of([unversioned]) == 0
    for tensors in ([first, second], [first, unversioned, second]):
        before = version_of(tensors)
        for written in (first, second):
            written.add_(1)
        assert version_of(tensors) == before + 2


def test_memory_is_taken_over_where_no_other_tensor_sees_it():
    for reassigned in (False, True):
        tensor = nn.Parameter(torch.ones(4))
        assert not is_memory_held_elsewhere(tensor, reassigned)
        other = tensor.detach()[1:]
        assert is_memory_held_elsewhere(tensor, reassigned)
        del other
        assert not is_memory_held_elsewhere(tensor, reassigned)
        shared = nn.Parameter(torch.ones(4).share_memory_())
        assert is_memory_held_elsewhere(shared, reassigned)
        # Who else holds it, torch does not count; a Parameter that was put there is for good.
        numpys = nn.Parameter(torch.from_numpy(numpy.ones(4)))
        assert is_memory_held_elsewhere(numpys, reassigned) is not reassigned


PLAIN = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("tensor", "options", "why"),
    [
        (PLAIN, {}, ""),
        (PLAIN, {"floating": False}, ""),
        (PLAIN, {"plain": torch.Tensor}, "'t' is a Parameter, not a plain parameter"),
        (torch.ones(4), {}, "'t' is a Tensor, not a plain parameter"),
        (torch.ones(4), {"plain": torch.Tensor}, ""),
        (nn.Parameter(torch.eye(4).to_sparse()), {}, "'t' is a Parameter, not a plain parameter"),
        (nn.Parameter(torch.ones(4).char(), False), {}, "'t' is torch.int8"),
        (nn.Parameter(torch.ones(4).char(), False), {"floating": False}, ""),
        (nn.Parameter(torch.ones(0, 4)), {}, "'t' is empty"),
        (
            nn.Parameter(torch.ones(4, 8)[:, ::2]),
            {"floating": False},
            "'t' has gaps or overlaps in memory (strides (8, 2))",
        ),
    ],
)
def test_why_a_tensor_cannot_become_a_master(tensor, options, why):
    assert unfit_tensor("t", tensor, **options) == why


# ---- a leaf ----


def pair():
    torch.manual_seed(0)
    return resident_pair(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


X = torch.linspace(-1, 1, 24).view(3, 8)


class Other(nn.Linear):
    pass


def integers():
    return nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)


def meta():
    return nn.Parameter(torch.ones(8, 8, device="meta"), requires_grad=False)


LOST = {
    "nothing": (lambda m: None, True, False, ""),
    "no bias": (lambda m: m._parameters.update(bias=None), True, True, ""),
    "no weight": (
        lambda m: m._parameters.update(weight=None),
        *(False, True, "its weight was taken away after attach, or is computed since"),
    ),
    "another weight": (
        lambda m: m._parameters.update(weight=nn.Parameter(torch.ones(8, 8))),
        *(True, True, ""),
    ),
    "another kind": (
        lambda m: m._parameters.update(weight=integers()),
        *(False, True, "its weight was replaced after attach, by a Parameter of torch.int8"),
    ),
    "another bias": (
        lambda m: m._parameters.update(bias=integers()[0].requires_grad_(False)),
        *(False, True, ""),
    ),
    "a tensor that no other code holds": (  # a hook may compute one for a while
        lambda m: m._parameters.update(weight=torch.ones(8, 8)),
        *(False, True, ""),
    ),
    "another class": (
        lambda m: object.__setattr__(m, "__class__", Other),
        *(True, False, "its class was replaced after attach, by Other"),
    ),
}


@pytest.mark.parametrize("change", LOST)
def test_a_leaf_says_whether_its_masters_moved_can_be_managed_and_are_lost(change):
    model, _ = pair()
    make, plain, moved, why = LOST[change]
    with attached(model) as manager:
        layer = manager.layers[0]
        assert not layer.is_lending()
        make(model[0])
        found = layer.has_plain_masters(), layer.has_moved(), layer.why_lost()
        assert found == (plain, moved, why)
        assert layer.is_current() is not moved
        model[0] = nn.Identity()
        gc.collect()
        assert layer.has_moved() and layer.why_lost() == "it was deleted"


def test_a_weight_of_another_kind_that_somebody_can_put_back_loses_nothing():
    model, _ = pair()
    with attached(model) as manager:
        kept = model[0].weight
        model[0]._parameters["weight"] = integers()
        assert manager.layers[0].why_lost() == ""
        model[0]._parameters["weight"] = kept
        model[0]._parameters["weight"] = integers()
        del kept
        assert "by a Parameter of torch.int8" in manager.layers[0].why_lost()


def test_a_move_that_the_engine_refuses_changes_nothing_and_is_made_later():
    model, resident = pair()
    with attached(model) as manager:
        layer, engine = manager.layers[0], manager.state.engine

        class Refusing(Recorder):
            def move_member(self, *arguments):
                assert layer.moving
                raise OffloadError("planted")

        model(X)
        masters = layer.masters
        layer.coded = coded = (types.SimpleNamespace(was_written=lambda: False),)
        for each in (model, resident):
            each[0].weight.data = torch.eye(8)
        manager.state.engine = Refusing(engine)
        with pytest.raises(OffloadError, match="planted"):
            layer.follow()
        assert not layer.moving
        assert layer.masters is masters and layer.coded is coded and layer.has_moved()
        manager.state.engine, layer.coded = engine, ()
        assert_same(model(X), resident(X))
        assert not layer.has_moved()


def test_the_engine_stamps_a_leaf_under_the_unit_that_it_is_in_now():
    model, _ = pair()
    with attached(model) as manager:
        layer, stamps = manager.layers[0], manager.state.stamps
        before = layer.unit
        version = leaf_module.Layout.version
        assert stamps[layer.unit][layer.member]() == layer.stamp()
        model[0].weight.data = torch.eye(8)
        layer.follow()
        assert layer.unit != before and layer.member not in stamps.get(before, {})
        assert stamps[layer.unit][layer.member]() == layer.stamp()
        assert leaf_module.Layout.version > version


def test_views_of_few_addresses_are_kept_and_a_slot_has_to_be_aligned(monkeypatch):
    monkeypatch.setattr(leaf_module, "_MAX_VIEWS", 3)
    model, _ = pair()
    with attached(model) as manager:
        model(X)
        layer = manager.layers[0]
        ((address, views),) = layer.views.items()
        assert [view.shape for view in views] == [(8, 8), (8,)]
        assert layer.view_at(address) is views
        layer.views.clear()
        sizes = []
        for step in range(5):
            layer.view_at(address + 4 * step)
            sizes.append(len(layer.views))
        assert sizes == [1, 2, 3, 1, 2]
        with pytest.raises(OffloadError, match=r"of layer '0' is not aligned for torch\.float32"):
            layer.view_at(address + 2)


def test_a_copy_of_a_leaf_is_none():
    model, _ = pair()
    with attached(model) as manager:
        layer = manager.layers[0]
        assert copy.deepcopy(layer) is None is pickle.loads(pickle.dumps(layer))
        assert layer.link_bytes() == (4 * 72, 4 * 72)
    with pytest.raises(OffloadError, match="'0' was detached between forward and backward"):
        layer.refuse_detached()


def test_a_layer_is_lost_to_a_hook_that_replaces_its_weight_around_each_call():
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).requires_grad_(False)
    hook = types.SimpleNamespace(hooks={"layerwise_casting": 1})
    vars(model[0])["_diffusers_hook"] = hook
    with attached(model) as manager:
        lent, layer = manager.layers
        assert lent.lends_to_code and not layer.lends_to_code
        assert (lent.why_lost(), layer.why_lost()) == ("", "")
        vars(model[1])["_diffusers_hook"] = hook
        lost = [each.why_lost() for each in (lent, layer)]
        assert lost == ["", "layerwise casting replaces its weight around each call"]
        del vars(model[1])["_diffusers_hook"]


# ---- coded masters ----


class Two(nn.Module):
    """Computes with two matrices that are worth to be compressed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (
            nn.Parameter(torch.randn(512, 512).bfloat16() / 16, requires_grad=False)
            for _ in range(2)
        )

    def forward(self, x):
        return x @ self.first @ self.second


@pytest.fixture
def coded():
    """A layer of two coded masters."""
    model = nn.Sequential(Two())
    with attached(model, compress="lossless") as manager:
        (layer,) = manager.layers
        assert layer.lends_to_code and len(layer.coded) == 2
        yield layer


def test_a_coded_master_is_told_as_such_while_it_is_what_was_coded(coded):
    starts = [coded.masters.addresses[name] for name in ("first", "second")]
    nbytes = 512 * 512 * 2
    both = coded.coded
    travels = sum(one.nbytes for one in both)
    assert coded.link_bytes() == (2 * nbytes, travels) and travels < 2 * nbytes
    assert [len(extent) for extent in coded.told(coded.masters)] == [4, 4]
    assert list(coded.coded) == list(both)

    second = coded.module().second
    whole = second.data
    second.data = whole[:256]  # at the same place, and less of it
    told = coded.told(Masters(coded, coded.parameters))
    assert len(told[0]) == 4 and told[1] == (starts[1], nbytes // 2)
    assert list(coded.coded) == [both[0]]
    second.data = whole
    assert [len(extent) for extent in coded.told(coded.masters)] == [4, 4]

    second.data[0, 0] += 1
    told = coded.told(coded.masters)
    assert len(told[0]) == 4 and told[1] == (starts[1], nbytes)
    assert list(coded.coded) == [both[0]]
    coded.coded = both


@pytest.mark.parametrize("make", [Two, lambda: nn.Linear(512, 512, bias=False).bfloat16()])
def test_calls_leave_codes_as_they_are_while_nobody_writes(make):
    model, resident = resident_pair(nn.Sequential(make()).requires_grad_(False))
    x = torch.linspace(-1, 1, 1024).view(2, 512).bfloat16().requires_grad_()
    with attached(model, compress="lossless") as manager:
        (layer,) = manager.layers
        before = layer.coded
        assert before
        for _ in range(2):
            found, expected = (torch.autograd.grad(each(x).sum(), x) for each in (model, resident))
            assert_same(found, expected)
        assert layer.coded is before


def test_codes_are_stale_once_a_tensor_is_written_or_trained(coded):
    assert not coded.has_stale_codes()
    coded.module().first.requires_grad_(True)
    assert coded.has_stale_codes()
    coded.module().first.requires_grad_(False)
    assert not coded.has_stale_codes()
    coded.module().second.data[0, 0] += 1
    assert coded.has_stale_codes()


def test_a_write_to_codes_is_seen_of_the_tensors_that_are_asked_for(coded):
    masters, names = coded.masters, ("first", "second")
    assert not coded.was_coded_written(masters, names)
    coded.module().second.data[0, 0] += 1
    found = [coded.was_coded_written(masters, given) for given in (names[:1], names[1:], names)]
    assert found == [False, True, True]
    assert not coded.was_coded_written(masters, ()) and not coded.was_coded_written(masters, ("x",))
    kept, coded.coded = coded.coded, ()
    assert not coded.was_coded_written(masters, names)
    coded.coded = kept


def test_a_master_may_lie_where_it_was_moved_and_is_no_other_there():
    model, _ = pair()
    with attached(model) as manager:
        layer = manager.layers[0]
        layer.left = {30: 10}  # out of its codes
        places = [(10, 10), (10, 30), (10, 40), (20, 10), (20, 30), (50, 20)]
        found = [layer.has_only_moved(then, now) for then, now in places]
        assert found == [True, True, False, False, False, False]
