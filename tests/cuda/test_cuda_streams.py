"""What PyTorch's streams, events and allocator order is ordered here; all else is a race."""

from __future__ import annotations

import ctypes
import threading

import pytest
import simulated_cuda
import torch

WORDS = 1 << 20


@pytest.fixture
def host():
    return torch.arange(WORDS, dtype=torch.float32).pin_memory()


@pytest.fixture
def card():
    found = torch.empty(WORDS, device="cuda")
    torch.cuda.synchronize()
    return found


def races():
    """What was reported so far; it counts as seen."""
    torch.cuda.synchronize()
    return simulated_cuda.verdict()


def test_a_kernel_that_waits_for_a_copy_sees_it_and_is_no_race(host, card):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        card.copy_(host, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    found = card + 1
    assert not races()
    assert torch.equal(found.cpu(), host + 1)


def test_a_kernel_that_does_not_wait_for_a_copy_is_reported_and_reads_no_true_value(host, card):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        card.copy_(host, non_blocking=True)
    found = card + 1
    assert "read-after-write" in races()[0]
    assert not torch.equal(found.cpu(), host + 1)


def test_an_event_orders_what_came_before_its_record_alone(host, card):
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        event.record()
        card.copy_(host, non_blocking=True)
    event.wait()
    card.add_(1)
    assert "race" in races()[0]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_block_that_another_stream_uses_is_handed_on_in_time_with_record_stream_alone(
    host, recorded
):
    side, block = torch.cuda.Stream(), torch.empty(WORDS, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        block.copy_(host, non_blocking=True)
        block.mul_(2)
    if recorded:
        block.record_stream(side)
    address = block.data_ptr()
    del block
    again = torch.zeros(WORDS, device="cuda")
    assert (again.data_ptr() == address) is not recorded
    assert bool(races()) is not recorded


def test_a_copy_to_page_locked_memory_has_not_arrived_before_somebody_waits(host, card):
    card.fill_(3)
    host.copy_(card, non_blocking=True)
    assert not torch.equal(host, torch.full((WORDS,), 3.0))
    torch.cuda.synchronize()
    assert torch.equal(host, torch.full((WORDS,), 3.0))


def test_kernels_of_two_streams_run_at_the_same_time():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    sides = [torch.cuda.Stream() for _ in range(2)]
    begin.record()
    for side in sides:
        side.wait_event(begin)
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_500_000)
    for side in sides:
        torch.cuda.current_stream().wait_stream(side)
    end.record()
    end.synchronize()
    assert 1 <= begin.elapsed_time(end) < 1.5, "two kernels of 1 ms each"


def test_a_thread_has_a_current_stream_of_its_own(card):
    side, seen = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
    assert seen[0] == torch.cuda.default_stream() != side


def test_backward_runs_on_the_stream_of_its_forward(card):
    side, seen = torch.cuda.Stream(), []
    x = card.requires_grad_()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        y = x * 2
        y.register_hook(lambda grad: seen.append(torch.cuda.current_stream()))
        loss = y.sum()
    torch.cuda.current_stream().wait_stream(side)
    loss.backward()
    assert seen == [side]
    assert not races()


def test_a_host_function_runs_after_what_was_queued_before_it(host, card):
    runtime, seen = ctypes.CDLL("libcudart.so.13"), []
    card.fill_(7)
    host.copy_(card, non_blocking=True)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def note(_):
        seen.append(host[-1].item())

    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert runtime.cudaLaunchHostFunc(stream, note, None) == 0
    torch.cuda.synchronize()
    assert seen == [7.0]


def test_a_question_whether_a_stream_is_done_orders_the_host_only_when_it_is(host, card):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(250_000_000)
        assert not side.query()
    side.synchronize()
    assert side.query()
