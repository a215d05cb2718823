"""Several cards, each with its own streams, memory and context."""

from __future__ import annotations

import pytest
import torch
from own_process import in_a_process

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.train import (
    PressureMonitor,
    find_batch_size,
    get_detailed_memory_info,
    set_memory_fraction,
)


def test_two_cards_take_part_in_one_graph():
    said = in_a_process(
        """
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8).to(f"cuda:{i}") for i in range(2)]
        x = torch.randn(2, 8)
        y = layers[1](layers[0](x.to("cuda:0")).to("cuda:1"))
        y.square().sum().backward()
        expected = x
        for layer in layers:
            tensors = layer.weight.cpu(), layer.bias.cpu()
            expected = torch.nn.functional.linear(expected, *tensors)
        print(torch.cuda.device_count(), y.device, torch.equal(y.cpu(), expected),
              *(layer.weight.grad.device for layer in layers), len(races()))
        """,
        CUDA_SIM_DEVICES="2",
    )
    assert said.split() == ["2", "cuda:1", "True", "cuda:0", "cuda:1", "0"]


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_cards_can_be_hidden_from_a_program_that_wants_none(hidden):
    said = in_a_process(
        """
        import os
        torch.ones(1, requires_grad=True).sum().backward()
        threads = os.listdir("/proc/self/task")
        print(torch.cuda.is_available(), torch.cuda.device_count(), len(threads))
        """,
        CUDA_VISIBLE_DEVICES=hidden,
        OMP_NUM_THREADS="1",
    )
    assert said.split() == ["False", "0", "1"]  # no thread of a card's backward, either


def test_tensors_of_two_cards_do_not_mix():
    said = in_a_process(
        """
        one, other = (torch.ones(3, device=f"cuda:{i}") for i in range(2))
        for mix in (lambda: one + other, lambda: torch.cat([one, other])):
            try:
                mix()
            except RuntimeError as error:
                print("on the same device" in str(error))
        """,
        CUDA_SIM_DEVICES="2",
    )
    assert said.split() == ["True", "True"]


def test_a_stream_of_one_card_orders_nothing_on_the_other():
    said = in_a_process(
        """
        host = torch.ones(1 << 20).pin_memory()
        card = torch.empty(1 << 20, device="cuda:1")
        torch.cuda.synchronize(1)
        side = torch.cuda.Stream(1)
        with torch.cuda.stream(side):
            card.copy_(host, non_blocking=True)
        torch.cuda.current_stream(0).wait_stream(side)  # of the wrong card
        with torch.cuda.device(1):
            card.add_(1)
        torch.cuda.synchronize(1)
        print(len(simulated_cuda.verdict()) > 0)
        """,
        CUDA_SIM_DEVICES="2",
    )
    assert said.split() == ["True"]


def test_memory_is_counted_for_each():
    said = in_a_process(
        """
        before = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
        block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:1")
        after = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
        print(*(a - b >> 30 for a, b in zip(before, after)))
        """,
        CUDA_SIM_DEVICES="2",
    )
    assert said.split() == ["0", "1"]


@pytest.mark.parametrize("named", ["cuda:9", 9], ids=str)
def test_a_card_that_is_not_there_is_refused_and_nothing_is_known_of_it(named):
    """torch itself ends some of these calls with an internal assertion, or with a sticky error."""
    model = torch.nn.Linear(8, 8)
    for refused in (
        lambda: oracle_offload.attach(model, named),
        lambda: find_batch_size(pytest.fail, model, device=named),
    ):
        with pytest.raises(OffloadError, match=r"device='cuda:9', but torch sees 1 CUDA device"):
            refused()
    with pytest.raises(OffloadError, match=r"only torch's allocator of a CUDA card does, .* are 1"):
        set_memory_fraction(0.5, named)
    assert get_detailed_memory_info(named)["free_bytes"] is None
    assert PressureMonitor(device=named).device.used_bytes is None
    assert torch.ones(3, device="cuda").sum().item() == 3
