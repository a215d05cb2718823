"""torch's allocators over the simulated driver: blocks, pools, segments that grow, no more room."""

from __future__ import annotations

import pytest
import torch
from own_process import in_a_process

GIB = 1 << 30


def test_a_fresh_block_holds_nothing_that_looks_like_a_number():
    torch.cuda.empty_cache()  # what other tests gave back holds what they wrote
    assert torch.empty(1 << 20, device="cuda").isnan().all()


def test_what_does_not_fit_is_refused_in_torchs_words_and_the_rest_goes_on():
    with pytest.raises(torch.OutOfMemoryError, match=r"of which .* is free"):
        torch.empty(64 * GIB, dtype=torch.uint8, device="cuda")
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_torch_counts_what_it_has_allocated():
    before = torch.cuda.memory_allocated()
    block = torch.empty(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() - before == block.nbytes


def test_the_cache_goes_back_to_the_card():
    block = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    del block
    assert torch.cuda.mem_get_info()[0] == free
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free + GIB


SEGMENTS = """
    blocks = [torch.full((6 << 20,), float(i), device="cuda") for i in range(4)]  # 24 MiB each
    second = blocks[1].data_ptr()
    del blocks[1], blocks[1]
    joined = torch.full((12 << 20,), 9.0, device="cuda")  # where two blocks were
    again = joined.data_ptr() == second
    host = torch.empty(12 << 20).pin_memory()
    host.copy_(joined, non_blocking=True)
    torch.cuda.synchronize()
    assert host.eq(9).all() and blocks[0].eq(0).all() and blocks[1].eq(3).all()
    del blocks, joined
    torch.cuda.empty_cache()
    print(again, torch.cuda.memory_reserved(), len(races()))
"""


def test_segments_that_grow_are_one_memory_of_pieces_that_touch():
    said = in_a_process(SEGMENTS, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert said.split() == ["True", "0", "0"]


def test_segments_as_they_are_by_default_are_several():
    assert in_a_process(SEGMENTS).split() == ["False", "0", "0"]


POOL = """
    side = torch.cuda.Stream()
    block = torch.ones(1 << 20, device="cuda")
    address = block.data_ptr()
    print(torch.cuda.get_allocator_backend())
    {uses}
    del block
    other = torch.zeros(1 << 20, device="cuda")
    print(other.data_ptr() == address, len(races()) > 0)
"""
UNSAFE = "\n    ".join(
    (
        "side.wait_stream(torch.cuda.current_stream())",
        "with torch.cuda.stream(side):",
        "    block.mul_(2)",
    )
)


@pytest.mark.parametrize(
    "uses, raced",
    [("pass", False), (UNSAFE, True), (UNSAFE + "\n    block.record_stream(side)", False)],
    ids=["one stream", "another stream", "another stream, recorded"],
)
def test_the_drivers_own_pool_hands_a_block_on_in_the_order_of_its_stream(uses, raced):
    said = in_a_process(
        POOL.format(uses=uses), PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync"
    ).split()
    assert said[0] == "cudaMallocAsync"
    assert said[2] == str(raced)
