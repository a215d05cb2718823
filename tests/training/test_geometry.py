"""Where bytes of tensors are: sizes, strides, density, address ranges and their intersections."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from oracle_offload import _core
from oracle_offload.engine.geometry import (
    Spans,
    aligned,
    contiguous_stride,
    is_dense,
    memory_of,
    stored_bytes,
    unit_bytes,
)

STEP = _core.ALIGNMENT
TENSORS = {
    "contiguous": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "one element": lambda: torch.randn(1, 1),
    "no dimension": lambda: torch.tensor(2.0),
    "sizes of one with odd strides": lambda: torch.randn(8).as_strided((1, 4, 1), (7, 1, 5)),
    "sliced": lambda: torch.randn(3, 8)[:, :4],
    "strided": lambda: torch.randn(3, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "overlapping": lambda: torch.randn(8).as_strided((4, 4), (1, 1)),
    "every other row": lambda: torch.randn(6, 4)[::2],
    "bfloat16, from the middle": lambda: torch.randn(8, 4).bfloat16()[2:5],
    "complex": lambda: torch.randn(3, 4, dtype=torch.complex64),
}


def addresses(tensor):
    """Return the address of every element."""
    found = torch.zeros((), dtype=torch.long)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[dim] = size
        found = found + (torch.arange(size) * stride).view(shape)
    return (found * tensor.element_size() + tensor.data_ptr()).flatten().tolist()


@pytest.mark.parametrize("build", TENSORS.values(), ids=TENSORS)
def test_the_elements_of_a_tensor_lie_in_its_range_and_dense_ones_fill_it(build):
    tensor = build()
    where = addresses(tensor)
    start, end = memory_of(tensor)
    assert (start, end) == (min(where), max(where) + tensor.element_size())
    fills = len({*where}) == len(where) and (end - start) == len(where) * tensor.element_size()
    assert is_dense(tensor) == fills


def fake():
    with FakeTensorMode():
        return torch.empty(2, 2)


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.empty(0, 3), torch.ones(4, 4)[2:2], torch.empty(2, 2, device="meta")),
        *(torch.eye(3).to_sparse(), torch.eye(3).to_mkldnn(), fake()),
    ],
    ids=["empty", "empty within another", "meta", "sparse", "opaque", "fake"],
)
def test_what_has_no_memory_has_an_empty_range(tensor):
    assert memory_of(tensor) == (0, 0)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 1, 4), (2, 0, 4)], ids=str)
def test_contiguous_strides_are_torchs(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_sizes_of_units_are_multiples_of_the_alignment():
    assert [aligned(n) for n in (0, 1, STEP - 1, STEP, STEP + 1)] == [0, STEP, STEP, STEP, 2 * STEP]
    tensors = [torch.empty(STEP // 4), torch.empty(1), torch.empty(STEP // 4 + 1)]
    assert unit_bytes(tensors) == STEP + STEP + 2 * STEP


def test_bytes_of_a_wrapper_are_those_of_what_it_is_made_of():
    class Halves(torch.Tensor):
        @staticmethod
        def __new__(cls, low, high):
            return torch.Tensor._make_wrapper_subclass(cls, (64, 64))

        def __init__(self, low, high):
            self.low, self.high = low, high

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("only its size is asked for")

        def __tensor_flatten__(self):
            return ["low", "high"], None

    low, high = torch.empty(10, dtype=torch.uint8), torch.empty(3, dtype=torch.float64)
    assert stored_bytes(Halves(low, high)) == 10 + 24
    assert stored_bytes(Halves(low, Halves(low, high))) == 10 + 10 + 24
    assert stored_bytes(low) == 10


def test_intersections_of_ranges():
    spans = Spans([(30, 40, "c"), (10, 20, "a"), (20, 25, "b")])

    def touched(start, end):
        return list(spans.touched(start, end))

    assert touched(0, 10) == touched(25, 30) == touched(40, 99) == touched(0, 0) == []
    assert touched(9, 11) == [(10, 11, "a")]
    assert touched(19, 21) == [(19, 20, "a"), (20, 21, "b")]
    assert touched(10, 20) == [(10, 20, "a")]
    assert touched(0, 99) == [(10, 20, "a"), (20, 25, "b"), (30, 40, "c")]
    assert touched(24, 31) == [(24, 25, "b"), (30, 31, "c")]
    assert touched(39, 40) == [(39, 40, "c")]
    assert list(Spans([]).touched(0, 99)) == []
