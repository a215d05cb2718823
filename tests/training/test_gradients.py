"""Gradients of weights on the host: the memory they are in, which nothing else overwrites."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from equality import assert_same, attached, gradients
from models import Parts
from torch import nn

from oracle_offload.layers import gradients as module
from oracle_offload.model.witness import Witness


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Weights of 16 KiB are large ones here."""
    monkeypatch.setattr(module, "LEAST_BYTES", 1 << 14)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64, bias=False))


DEFAULT = module.LEAST_BYTES
LARGE_BYTES = 2 * 4 * 64 * 96
RING_BYTES = 16 << 20  # which small gradients go through, and all that cannot be locked


def backward(model, number=0, clear=True):
    device = next(p for p in model.parameters()).device
    if clear:
        model.zero_grad()
    torch.manual_seed(number)
    device = getattr(model, "computes_on", device)
    model(torch.randn(8, 64, device=device)).square().sum().backward()


def both(device):
    managed = build()
    resident = copy.deepcopy(managed).to(device)
    managed.computes_on = torch.device(device)
    return managed, resident


def locked(manager):
    return manager.state.engine.stats()["locked_bytes"]


def several(parts, x):
    x = x + parts.table(torch.arange(4, device=x.device))
    return parts.layer(parts.conv(x[:, :, None].repeat(1, 1, 5))[:, :, 2]) @ parts.own.t()


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_gradients_of_many_outputs_at_once_are_the_resident_ones(device, autocast):
    """Of a layer of each kind that trains."""
    layers = {"table": nn.Embedding(64, 96), "conv": nn.Conv1d(96, 96, 3, padding=1)}
    own = nn.Parameter(torch.randn(192, 96))
    managed = Parts(several, **layers, layer=nn.Linear(96, 96), own=own)
    resident = copy.deepcopy(managed).to(device)
    with attached(managed, device) as manager:
        assert [layer.name for layer in manager.layers] == ["", "table", "conv", "layer"]
        found = []
        for model, watch in ((managed, None), (resident, None), (managed, Witness())):
            x = torch.ones(4, 96).to(device).requires_grad_()
            with watch or contextlib.nullcontext():
                with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
                    y = model(x).float()
                wanted = torch.eye(4 * 192)[:5].reshape(5, 4, 192).to(device)
                of = [x, *model.parameters()]
                found.append(torch.autograd.grad(y, of, wanted, is_grads_batched=True))
        assert_same(found[0], found[1])
        assert_same(found[2], found[1])


@pytest.mark.parametrize("accumulate", [False, True], ids=["cleared", "accumulated"])
def test_gradients_are_the_resident_ones_in_locked_memory(device, accumulate):
    managed, resident = both(device)
    with attached(managed, device) as manager:
        before = locked(manager)
        for number in range(4):
            for model in (managed, resident):
                backward(model, number, clear=number == 0 or not accumulate)
            assert_same(gradients(managed), gradients(resident))
            where = {p.grad.data_ptr() for p in managed.parameters() if p.numel() > 96}
            if number == 0:
                first, grown = where, locked(manager)
                assert grown - before >= LARGE_BYTES  # both are there, the bias does not
        if accumulate:  # at most two more, while they are added to what is there
            assert locked(manager) <= grown + LARGE_BYTES
        elif device == "cpu":  # elsewhere a thread of the device may let go late
            assert locked(manager) == grown and where == first


def test_a_large_gradient_is_one_copy_and_a_small_one_goes_through_the_ring(sim, monkeypatch):
    managed = build()
    with attached(managed, "cpu") as manager:
        backward(managed)
        before = locked(manager)
        copies = sim.call_count("cuMemcpyDtoHAsync")
        adopted = sim.stats().d2h_bytes
        backward(managed)
        assert sim.call_count("cuMemcpyDtoHAsync") - copies == 3
        assert sim.stats().d2h_bytes - adopted == sum(4 * p.numel() for p in managed.parameters())
        assert locked(manager) == before
        monkeypatch.setattr(module, "LEAST_BYTES", 4 * 96 + 1)
        backward(managed)
        assert locked(manager) == before, "the bias is one byte too small"
        monkeypatch.setattr(module, "LEAST_BYTES", 4 * 96)
        backward(managed)
        assert locked(manager) > before


@pytest.mark.parametrize(("rows", "has_its_own"), [(511, False), (512, True)])
def test_large_is_one_mib(monkeypatch, rows, has_its_own):
    monkeypatch.setattr(module, "LEAST_BYTES", DEFAULT)
    model = nn.Sequential(nn.Linear(512, rows, bias=False))
    with attached(model, "cpu") as manager:
        before = locked(manager)
        model(torch.ones(1, 512)).sum().backward()
        assert locked(manager) - before == 2**20
        assert (manager.attachment.gradients._shared is None) is has_its_own


def test_a_gradient_that_is_kept_is_not_overwritten(device):
    managed, _ = both(device)
    with attached(managed, device):
        kept, copies = [], []
        for number in range(3):
            backward(managed, number)
            kept.append(managed[0].weight.grad[3:])  # a view alone
            copies.append(kept[-1].clone())
        assert_same(kept, copies)
        assert not torch.equal(kept[0], kept[1])
        free = kept[1].untyped_storage().data_ptr()
        del kept[1]
        backward(managed, 5, clear=False)  # each needs memory while it is added to what is there
        backward(managed, 6)
        if device == "cpu":  # elsewhere a thread of the device may let go late
            assert free in {p.grad.data_ptr() for p in managed.parameters()}
        assert_same(kept[0], copies[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_s_gradients_lie_there_too(device, dtype):
    if device == "cpu" and dtype == torch.float16:
        dtype = torch.bfloat16
    managed, resident = both(device)
    with attached(managed, device) as manager:
        before = locked(manager)
        for number in range(2):
            for model in (managed, resident):
                with torch.autocast(device, dtype):
                    backward(model, number)
            assert_same(gradients(managed), gradients(resident))
        assert locked(manager) - before >= LARGE_BYTES


def test_a_convolution_s_gradient_keeps_its_strides(device):
    managed = nn.Sequential(nn.Conv2d(32, 32, 3)).to(memory_format=torch.channels_last)
    resident = copy.deepcopy(managed).to(device)
    with attached(managed, device) as manager:
        before = locked(manager)
        for model in (managed, resident):
            torch.manual_seed(1)
            model(torch.randn(2, 32, 5, 5, device=device)).square().sum().backward()
        assert_same(gradients(managed), gradients(resident))
        assert managed[0].weight.grad.stride() == resident[0].weight.grad.stride()
        assert locked(manager) > before


def test_gradients_outlive_the_attachment(device):
    managed, resident = both(device)
    with attached(managed, device):
        for model in (managed, resident):
            backward(model)
    assert_same(gradients(managed), gradients(resident))
    kept = [p.grad for p in managed.parameters()]
    managed.zero_grad()
    gc.collect()
    del managed
    assert_same(kept, [p.grad for p in resident.parameters()])


def test_no_more_is_locked_than_was_asked_for(device):
    managed, _ = both(device)
    managed[0].bias.requires_grad_(False)  # it would share memory with other small ones
    with attached(managed, device) as manager:
        masters = sum(buffer.nbytes for buffer in manager.attachment.pieces.buffers)
    one = LARGE_BYTES // 2
    for spare, buffers in ((one - 1, 0), (one, 1), (2 * one - 1, 1), (2 * one, 2)):
        with attached(managed, device, lock=masters + spare) as manager:
            before = locked(manager)
            backward(managed)
            backward(managed, clear=False)
            assert (locked(manager) - before) % RING_BYTES == buffers * one


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_refusal_leaves_the_room_to_others(sim, nth):
    """The first piece is the masters'. What was locked for gradients by then is given back."""
    managed, resident = both("cpu")
    sim.refuse_registration(nth)
    with attached(managed, "cpu") as manager:
        tried = sim.call_count("cuMemHostRegister")
        for number in range(3):
            for model in (managed, resident):
                backward(model, number)
            assert_same(gradients(managed), gradients(resident))
        assert sim.live().registrations == (0 if nth == 1 else 1)
        assert sim.call_count("cuMemHostRegister") - tried == nth - 1
        assert (manager.state.engine.stats()["pageable_bytes"] > 0) is (nth == 1)


def test_a_model_that_is_frozen_gives_them_back(sim):
    managed, _ = both("cpu")
    with attached(managed, "cpu") as manager:
        before = locked(manager)
        backward(managed)
        assert sim.live().registrations == 4  # the masters', two large ones', the small one's
        kept = managed[0].weight.grad.clone()
        managed.requires_grad_(False)
        x = nn.Parameter(torch.ones(1))
        x.grad = torch.ones(1)
        torch.optim.SGD([x], lr=1.0).step()
        assert sim.live().registrations == 1 and (locked(manager) - before) % RING_BYTES == 0
        assert torch.equal(managed[0].weight.grad, kept)
        managed.requires_grad_(True)
        backward(managed)
        assert sim.live().registrations == 4


def test_threads_do_not_share_what_they_bring(device):
    """Two models of one device, each with memory of its own."""
    (one, resident), (other, _) = both(device), both(device)
    with attached(one, device), attached(other, device):
        backward(one, 1)
        backward(other, 2)
        backward(resident, 1)
        assert_same(gradients(one), gradients(resident))
        assert one[0].weight.grad.data_ptr() != other[0].weight.grad.data_ptr()


KINDS = {
    "dense": lambda: torch.randn(6, 8),
    "transposed": lambda: torch.randn(6, 8).t(),
    "strided": lambda: torch.randn(6, 8)[:, ::2],
    "expanded": lambda: torch.randn(6, 1).expand(6, 8),
    "empty": lambda: torch.randn(0, 8),
    "sparse": lambda: torch.sparse_coo_tensor([[3, 1, 3]], torch.randn(3, 8), (6, 8)),
    "coalesced": lambda: torch.eye(6).to_sparse().coalesce(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_any_layout_arrives_as_it_is(device, kind):
    gradient = KINDS[kind]().to(device)
    with attached(build(), device) as manager:
        arrived = manager.attachment.gradients.to_host(gradient)
    assert arrived.device.type == "cpu" and arrived.layout is gradient.layout
    if gradient.is_sparse:
        assert arrived.is_coalesced() is gradient.is_coalesced()
        assert_same(arrived._indices(), gradient._indices().cpu())
        assert_same(arrived._values(), gradient._values().cpu())
    assert_same(arrived.to_dense(), gradient.to_dense().cpu())
    if kind in ("dense", "transposed"):
        assert arrived.stride() == gradient.stride()


def test_backwards_that_ended_by_an_exception_are_forgotten():
    model = nn.Sequential(nn.Linear(8, 8))
    with attached(model, "cpu") as manager:
        x = torch.ones(1, 8).requires_grad_()
        x.register_hook(lambda g: 1 / 0)
        for _ in range(3):
            with contextlib.suppress(ZeroDivisionError):
                model(x).sum().backward()
            assert not manager.state.late
