"""Misuses of torch's streams, planted in the package's own Python: each is caught, and by what.

Without one of them the same training is equal to the resident model's and reports nothing.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from pathlib import Path

import pytest
import simulated_cuda
import torch
from own_process import in_a_process
from torch import nn

import oracle_offload
from oracle_offload.engine import devices
from oracle_offload.model import intake


def chain(layers=6, width=256):
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*parts).requires_grad_(False)


def trained(model, x, resident):
    """Whether two steps have the bits of the resident model's."""
    equal = True
    for _ in range(2):
        found = []
        for each in (model, resident):
            given = x.clone().requires_grad_()
            y = each(given)
            y.square().mean().backward()
            found.append((y.detach(), given.grad))
        torch.cuda.synchronize()
        equal &= all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    return equal


def on_a_side_stream(card=0):
    """Train on a stream that is not the default one, with the first card current.

    Returns whether the steps are equal, and what was reported.
    """
    device = torch.device("cuda", card)
    model = chain()
    resident = copy.deepcopy(model).to(device)
    x = torch.randn(16, 256, device=device)
    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)
    # That of the stream makes its card the current one.
    with torch.cuda.stream(side), torch.cuda.device(0), attached(model, device):
        equal = trained(model, x, resident)
    torch.cuda.synchronize(device)
    return equal, simulated_cuda.verdict()


@contextlib.contextmanager
def attached(model, device):
    manager = oracle_offload.attach(model, device)
    assert len(manager.layers) == 6
    yield
    manager.detach()


def answering(answer):
    """Let `answer` (of a device and an engine) say on which stream torch computes."""

    def stream_of(self, engine):
        return lambda: answer(self.device.index)

    return stream_of


def current(index):
    return torch._C._cuda_getCurrentRawStream(index)


def in_backward(answer):
    """Let `answer` say it on the threads of backward alone."""

    def found(index):
        ours = threading.current_thread() is threading.main_thread()
        return current(index) if ours else answer(index)

    return found


def test_as_it_is_nothing_is_reported():
    assert on_a_side_stream() == (True, [])


def test_a_current_stream_that_is_not_asked_is_a_race(monkeypatch):
    monkeypatch.setattr(devices.Cuda, "stream_of", answering(lambda index: 0))
    assert any("race" in text for text in on_a_side_stream()[1])


def test_a_current_stream_that_is_not_asked_in_backward_is_a_race(monkeypatch):
    asks_nobody = answering(in_backward(lambda index: 0))
    monkeypatch.setattr(devices.Cuda, "stream_of", asks_nobody)
    assert any("race" in text for text in on_a_side_stream()[1])


HERE = str(Path(__file__).parent)
TWO = f"""
import sys
sys.path.append({HERE!r})
import test_cuda_planted as planted
from oracle_offload.engine import devices
from oracle_offload.model import intake
"""


@pytest.mark.parametrize(
    "plant, raced",
    [
        ("", False),
        ("devices.Cuda.stream_of = planted.answering(lambda index: planted.current(0))", True),
        # Whatever device is current: right only under a guard.
        (
            "devices.Cuda.stream_of = planted.answering("
            "lambda index: planted.current(torch.cuda.current_device()))",
            True,
        ),
        # As a thread of backward that has set no device: the first card is its current one.
        (
            "devices.Cuda.stream_of = planted.answering("
            "planted.in_backward(lambda index: planted.current(0)))",
            True,
        ),
    ],
    ids=["as it is", "wrong device", "no device guard", "no device guard in backward"],
)
def test_the_stream_of_another_card_is_a_race(plant, raced):
    trains = "\nequal, reports = planted.on_a_side_stream(card=1)\n"
    prints = "print(equal, any('race' in text for text in reports), len(reports))"
    said = in_a_process(TWO + plant + trains + prints, CUDA_SIM_DEVICES="2").split()
    assert said[1] == str(raced)
    assert raced or said == ["True", "False", "0"]


# ---- weights that are taken off a card, on a stream aside ----


def taken_off():
    """Attach a model that is on the card; whether its values arrived, and what was reported."""
    model = chain().cuda()
    expected = [p.detach().cpu().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(2)  # on the current stream, just before
    manager = oracle_offload.attach(model, "cuda")
    found = [p.detach().clone() for p in model.parameters()]
    manager.detach()
    arrived = all(torch.equal(a, 2 * b) for a, b in zip(found, expected, strict=True))
    torch.cuda.synchronize()
    return arrived, simulated_cuda.verdict()


def test_weights_come_off_a_card_whole():
    assert taken_off() == (True, [])


def test_weights_leave_a_card_by_locked_memory_at_the_speed_of_its_link(monkeypatch):
    model = chain(6, 1024).cuda()  # 24 MiB, by two buffers of 4
    torch.cuda.synchronize()
    of_cuda, locked, copy = simulated_cuda.simulator(), [], devices._CudaCopies.copy

    def watched(self, target, source):
        locked.extend([target.nbytes] if target.is_pinned() else [])
        copy(self, target, source)

    monkeypatch.setattr(devices._CudaCopies, "copy", watched)
    monkeypatch.setattr(intake, "HALF_BYTES", 4 << 20)
    with of_cuda.trace() as timeline:
        manager = oracle_offload.attach(model, "cuda")
        of_cuda.finish()
    manager.detach()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    copies = [row for row in timeline if row.kind == "d2h"]
    assert sum(locked) == sum(row.bytes for row in copies) == nbytes
    took_s = max(row.end_s for row in copies) - min(row.start_s for row in copies)
    assert took_s <= 1.05 * nbytes / (of_cuda.get_device(0).link_gbps * 1e9)


def test_a_copy_aside_that_does_not_wait_for_the_current_stream_is_a_race(monkeypatch):
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: None)
    assert any("race" in text for text in taken_off()[1])


def test_a_buffer_that_is_given_back_without_its_event_is_refused():
    """In a process of its own: what is refused stays page-locked."""
    said = in_a_process(
        TWO
        + """
devices._CudaCopies.mark = lambda self: lambda: None
arrived, reports = planted.taken_off()
print(arrived, any("in flight" in text for text in reports))
"""
    )
    assert said.split() == ["False", "True"]
