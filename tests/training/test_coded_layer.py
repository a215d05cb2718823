"""What a layer knows of the codes of its masters: whether they are stale, and of which tensors."""

from __future__ import annotations

import pytest
import torch
from equality import assert_same, attached, resident_pair
from models import Parts
from torch import nn

from oracle_offload.layers.leaf import Masters


def two():
    """Return what computes with two matrices that are worth to be compressed."""
    first, second = torch.randn(2, 512, 512).bfloat16() / 16
    return Parts(
        lambda parts, x: x @ parts.first @ parts.second,
        first=nn.Parameter(first.clone(), requires_grad=False),
        second=nn.Parameter(second.clone(), requires_grad=False),
    )


@pytest.fixture
def coded():
    """A layer of two coded masters."""
    model = nn.Sequential(two())
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


@pytest.mark.parametrize("make", [two, lambda: nn.Linear(512, 512, bias=False).bfloat16()])
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


def test_a_master_may_lie_where_it_was_moved_and_is_no_other_there(coded):
    coded.left = {30: 10}  # out of its codes
    places = [(10, 10), (10, 30), (10, 40), (20, 10), (20, 30), (50, 20)]
    found = [coded.has_only_moved(then, now) for then, now in places]
    assert found == [True, True, False, False, False, False]
