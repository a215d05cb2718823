"""The device type "simgpu" itself, and that it finds what the device "cpu" cannot show.

Run by `make device-type`, with all other tests that take a device.
"""

from __future__ import annotations

import copy
import threading

import pytest
import simgpu
import torch
from equality import attached
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.parametrize("device", ["simgpu"])


def test_a_tensor_keeps_address_strides_and_storage(device):
    host = torch.arange(12.0).reshape(3, 4).t()
    tensor = simgpu.on_device(host)
    assert tensor.device == torch.device("simgpu:0") and type(tensor) is torch.Tensor
    assert tensor.data_ptr() == host.data_ptr() and tensor.stride() == (1, 4)
    part = tensor[1:, ::2]
    assert part.data_ptr() == tensor[1:].data_ptr()
    part.add_(100)
    assert torch.equal(host[1:, ::2], part.cpu()) and host[0, 0] == 0
    placed = torch.empty(0, device=device).set_(tensor.untyped_storage(), 2, (4,), (2,))
    assert placed.data_ptr() == host.data_ptr() + 8


def test_memory_outlives_the_tensor_that_it_came_from(device):
    tensor = simgpu.on_device(torch.full((1000,), 7.0))
    half = tensor[500:]
    del tensor
    torch.full((1000,), 8.0)
    assert torch.equal(half.cpu(), torch.full((500,), 7.0))


def test_a_deep_copy_has_memory_of_its_own(device):
    original = nn.Module()
    original.weight, original.buffer = nn.Parameter(torch.ones(3, device=device)), torch.ones(3)
    original.view = original.buffer = original.buffer.to(device)
    copied = copy.deepcopy(original)
    original.weight.data.zero_()
    original.buffer.zero_()
    for tensor in (copied.weight, copied.buffer):
        assert tensor.device.type == device and torch.equal(tensor.cpu(), torch.ones(3))
    assert copied.view is copied.buffer


@pytest.mark.parametrize(
    "operator",
    [
        lambda x, w: F.linear(x, w),
        lambda x, w: x @ w.t() + 1,
        lambda x, w: F.gelu(x).sum(),
        lambda x, w: torch.cat([x, w]).softmax(-1),
        lambda x, w: (x > 0) & (x < 1),
        lambda x, w: torch.max(x, dim=1).indices,
        lambda x, w: torch.where(x > 0, x, 2),
        lambda x, w: torch.arange(5, device=x.device) % 3,
        lambda x, w: x.clone().masked_fill_(x > 0, 3),
        lambda x, w: torch.add(x, w, alpha=2, out=torch.empty(0, device=x.device)),
        lambda x, w: x.to(torch.bfloat16) / 3,
        lambda x, w: F.layer_norm(x, (6,)),
        lambda x, w: torch.frexp(x).mantissa,
    ],
)
def test_an_operator_has_the_hosts_bits(device, operator):
    torch.manual_seed(0)
    x, w = torch.randn(4, 6), torch.randn(4, 6)
    found = operator(x.to(device), w.to(device))
    assert found.device.type == device
    assert torch.equal(found.cpu(), operator(x, w))


def test_a_host_tensor_among_device_tensors_is_refused(device):
    with pytest.raises(RuntimeError, match=r"shape \(4, 3\) is on cpu, others are on simgpu:0"):
        torch.randn(2, 4, device=device) @ torch.randn(4, 3)


@pytest.mark.parametrize("wait", [lambda x: x.cpu(), lambda x: x[0].item()], ids=["copy", "item"])
def test_a_copy_that_nobody_waited_for_arrives_late(device, wait):
    """With what the stream had computed when it was queued, over what the host wrote meanwhile."""
    x = torch.ones(3, device=device)
    fresh = x.to("cpu", non_blocking=True)
    there = torch.empty(3).copy_(x, non_blocking=True)
    x.add_(1)
    assert fresh.isnan().all() and there.isnan().all()
    there.zero_()
    wait(x)
    assert torch.equal(fresh, torch.ones(3)) and torch.equal(there, torch.ones(3))
    assert torch.equal(
        torch.full((3,), 5.0).to(device, non_blocking=True).cpu(), torch.full((3,), 5.0)
    )
    assert torch.equal(x.double().to("cpu", torch.int64), torch.full((3,), 2))


def managed_linear(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8, device=device, requires_grad=True)


def test_backward_runs_on_a_thread_of_the_device(device):
    model, x = managed_linear(device)
    threads = set()
    x.register_hook(lambda gradient: threads.add(threading.get_ident()))
    with attached(model, device):
        model(x).sum().backward()
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_state_of_a_thread_that_backward_reads_is_found(device):
    """Planted: the stream is kept per thread, by the thread that computes forward."""
    model, x = managed_linear(device)
    with attached(model, device) as manager:
        kept = threading.local()
        kept.stream = manager.state.stream()
        manager.state.stream = lambda: kept.stream
        y = model(x)
        with pytest.raises(AttributeError, match="stream"):
            y.sum().backward()
        manager.state.stream = lambda stream=kept.stream: stream
        y.sum().backward()


def test_a_host_master_that_is_given_to_an_operator_is_found(device, monkeypatch):
    """Planted: the loan hands out the master instead of its copy in the slot."""
    model, x = managed_linear(device)
    with attached(model, device) as manager:
        (layer,) = manager.layers
        model(x)  # the watch over the first forward would find it too
        layer.views.clear()
        monkeypatch.setattr(type(layer), "view_at", lambda layer, address: tuple(layer.tensors()))
        with pytest.raises(RuntimeError, match="is on cpu, others are on simgpu:0"):
            model(x)
