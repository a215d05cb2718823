"""Clipping of gradients that are on the host: norms are the device's, summed as a resident's."""

from __future__ import annotations

import copy

import pytest
import torch
from equality import assert_same, attached, gradients
from test_stepping import Net, assert_alike, backward
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode

from oracle_offload import DriverError
from oracle_offload.engine import simulator
from oracle_offload.layers import norms
from oracle_offload.train import stream_optimizer

MANAGED = 4 * (3 * 32**2 + 4 * 32)  # bytes of the weights and biases of `Net`'s layers
KINDS = {"2": {}, "loop": {"foreach": False}, "inf": {"norm_type": float("inf")}, "1.5": {}}
KINDS["1.5"] = {"norm_type": 1.5, "error_if_nonfinite": True}
total_norm = clip_grad._get_total_norm


def pair(device):
    managed = Net()
    return managed, copy.deepcopy(managed).to(device)


def counted(manager, *names):
    stats = manager.state.engine.stats()
    return [stats[name] for name in names]


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_is_the_resident_one_and_norms_are_read_as_gradients_leave(device, kind):
    models = managed, _ = pair(device)
    with attached(managed, device) as manager:
        assert len(manager.layers) == 4
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        stream_optimizer(optimizers[0])
        for number in range(3):
            for part in range(2):
                for model in models:
                    backward(model, 2 * number + part, device)
            before = counted(manager, "brought_bytes", "host_waits")
            totals = [
                nn.utils.clip_grad_norm_(model.parameters(), 0.01, **KINDS[kind])
                for model in models
            ]
            brought, waits = (
                now - then
                for now, then in zip(
                    counted(manager, "brought_bytes", "host_waits"), before, strict=True
                )
            )
            assert totals[0].device == totals[1].device and totals[0] > 0.01
            assert_same(*(total.cpu() for total in totals), "norms")
            assert_same(*(gradients(model) for model in models), "gradients")
            # The first call tells which norms are wanted.
            assert brought == (MANAGED if number == 0 else 0)
            # torch's own calls let time pass on a card: the gradients may be there already.
            assert waits == (number == 0) or (device == "cuda" and waits == 0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_alike(models, optimizers)


class CountsReads(TorchDispatchMode):
    """Counts reads by the host of what the device has computed."""

    def __init__(self, device):
        super().__init__()
        self.device, self.count = torch.device(device).type, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if given is not None and given.device.type == self.device:
            kwargs_device = (kwargs or {}).get("device")
            is_copy = func is torch.ops.aten._to_copy.default and kwargs_device is not None
            self.count += func is torch.ops.aten._local_scalar_dense.default or (
                is_copy and kwargs_device.type == "cpu"
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["foreach", "loop"])
@pytest.mark.parametrize("layers", [2, 9])
def test_the_host_reads_known_norms_once(device, how, layers):
    """Not once for each gradient."""
    if device == "cpu":
        pytest.skip("what the device computes is stored where the host's own numbers are")
    managed = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
    with attached(managed, device) as manager:
        assert len(manager.layers) == layers
        optimizer = stream_optimizer(torch.optim.SGD(managed.parameters(), lr=0.1))
        for number in range(2):
            optimizer.zero_grad()
            managed(torch.randn(4, 32).to(device)).square().mean().backward()
            (before,) = counted(manager, "brought_bytes")
            with CountsReads(device) as reads:
                total = total_norm([p.grad for p in managed.parameters()], foreach=how == "foreach")
            assert total.device.type == reads.device
            (after,) = counted(manager, "brought_bytes")
            assert (after == before) == (number == 1)
        assert reads.count == 1


def scale_unseen(gradient):
    gradient.data.mul_(2.0)


def unscale(gradient):
    """As GradScaler does, which bumps no version."""
    inverse, found = (torch.full((), v, device=gradient.device) for v in (2.0, 0.0))
    version = gradient._version
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, inverse)
    assert gradient._version == version


WRITES = {
    "in place": lambda gradient: gradient[1, 2:4].fill_(9.0),
    "by .data": scale_unseen,
    "unscaled": unscale,
    "zeros": lambda gradient: (gradient.data.zero_(), gradient.data[3, 1:3].fill_(9.0)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_gradient_that_was_written_to_is_brought_anew(device, write):
    if write == "unscaled" and device == "simgpu":
        pytest.skip("torch's kernel is not there for this type of device")
    models = managed, _ = pair(device)
    with attached(managed, device) as manager:
        optimizer = stream_optimizer(torch.optim.SGD(managed.parameters(), lr=0.1))
        assert optimizer is not None
        for number in range(2):
            for model in models:
                model.zero_grad()
                backward(model, number, device)
                if number:
                    WRITES[write](model.body[1].weight.grad)
            (before,) = counted(manager, "brought_bytes")
            totals = [total_norm([p.grad for p in model.parameters()]) for model in models]
            assert_same(*(total.cpu() for total in totals))
            (after,) = counted(manager, "brought_bytes")
            assert after - before == (4 * 32**2 if number else MANAGED)


def write_few(model, manager):
    model.body[1].weight.grad.data[1, 1] = 9.0  # between samples: of every 16 elements one


def write_few_and_say_so(model, manager):
    with manager.writing():
        write_few(model, manager)


def clamp(model, manager):
    model.body[1].weight.grad.data.clamp_(-9.0, 9.0)


UNSEEN = {
    "plain": (False, write_few),
    "plain clamp": (False, clamp),
    "in a block": (True, write_few_and_say_so),
    "overflow": (True, clamp),
}


@pytest.mark.parametrize("way", UNSEEN)
def test_few_elements_that_code_writes_by_data_count(device, way):
    """No sample sees them; where an optimizer is streamed, its code says of such writes."""
    is_streamed, write = UNSEEN[way]
    models = managed, _ = pair(device)
    with attached(managed, device) as manager:
        optimizer = torch.optim.SGD(managed.parameters(), lr=0.1)
        if is_streamed:
            stream_optimizer(optimizer)
        for number in range(3):
            totals = []
            for model in models:
                model.zero_grad()
                x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number)).to(device)
                y = model.body[1](x)
                y[:, 1:].square().mean().backward()
                if write is clamp:
                    x = torch.zeros(4, 32)
                    x[0, 1] = 1.0
                    (1e30 * model.body[1](x.to(device))[0, 1]).backward()
                gradient = model.body[1].weight.grad
                sampled = norms._sampled(gradient)
                assert sampled.any()
                write(model, manager)
                assert_same(norms._sampled(gradient), sampled)
                totals.append(total_norm([gradient]).cpu())
            assert_same(*totals)


def test_compiled_clipping_is_torchs_own(device):
    """Nothing replaces a gradient there; the host sums."""
    models = managed, _ = pair("cpu")
    with attached(managed, device):
        for model in models:
            backward(model, 0, device if model is managed else "cpu")
        models[1].load_state_dict(managed.state_dict())
        for one, other in zip(managed.parameters(), models[1].parameters(), strict=True):
            other.grad = one.grad.cpu().clone()
        clip = torch.compile(total_norm, backend="eager")
        own = [p for layer in managed._memory_manager.layers for p in layer.masters.present]
        found = clip([p.grad for p in own])
        assert found > 0
        managed._memory_manager.detach()
        assert_same(found, total_norm([p.grad for p in own]))


def test_a_backward_in_inference_mode_leaves_no_norms(device):
    """Its gradients have no version."""
    managed, _ = pair(device)
    with attached(managed, device) as manager:
        optimizer = stream_optimizer(torch.optim.SGD(managed.parameters(), lr=0.1))
        for number in range(2):
            optimizer.zero_grad()
            loss = managed(torch.randn(4, 32).to(device).requires_grad_()).square().mean()
            with torch.inference_mode(number == 1):
                loss.backward()
            total = total_norm([p.grad for p in managed.parameters()])
            assert total.isfinite() and total > 0
        assert managed.first.weight.grad.is_inference()
        assert manager.state.wanted_norms and not manager.state.norms


def test_samples_of_zeros_are_not_trusted(device):
    """A table's gradient is zero but in few rows, which samples miss."""
    models = managed, _ = pair(device)
    with attached(managed, device):
        optimizer = stream_optimizer(torch.optim.SGD(managed.parameters(), lr=0.1))
        assert optimizer is not None
        for number in range(3):
            totals = []
            for model in models:
                model.zero_grad()
                x = torch.zeros(4, 32)
                x[:, 3] = number + 1.0
                model.body[1](x.to(device))[:, 7].sum().backward()
                gradient = model.body[1].weight.grad
                assert gradient.count_nonzero() == 1 and not norms._sampled(gradient).any()
                if number:
                    gradient.data.mul_(3.0)
                totals.append(total_norm([gradient]).cpu())
            assert_same(*totals)


def test_gradients_that_others_have_set_and_one_alone(device):
    """Not page-locked, of a hook, and a tensor instead of a list of them."""
    models = managed, _ = pair(device)
    with attached(managed, device):
        for model in models:
            model.body[0].weight.register_hook(lambda gradient: 2 * gradient)
            backward(model, 0, device)
            model.body[1].weight.grad = torch.ones(32, 32).to(model.body[1].weight.device)
        for number in range(2):
            for one in (
                lambda model: [p.grad for p in model.parameters()],
                lambda model: (p.grad for p in model.parameters()),
                lambda model: model.first.weight.grad,
                lambda model: model.body[1].weight.grad,
            ):
                totals = [total_norm(one(model)) for model in models]
                assert_same(*(total.cpu() for total in totals))
                assert totals[0].device == totals[1].device, number
            with pytest.raises(RuntimeError, match="non-finite"):
                managed.first.weight.grad.fill_(float("nan"))
                total_norm(managed.first.weight.grad, error_if_nonfinite=True)
            managed.first.weight.grad.copy_(models[1].first.weight.grad)


def test_scaled_gradients_are_not_known(device):
    models = managed, _ = pair(device)
    with attached(managed, device) as manager:
        scalers = [torch.amp.GradScaler(torch.device(device).type) for _ in models]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        stream_optimizer(optimizers[0])
        for number in range(3):
            (before,) = counted(manager, "brought_bytes")
            totals = []
            for model, scaler, optimizer in zip(models, scalers, optimizers, strict=True):
                torch.manual_seed(number)
                loss = model(torch.randn(4, 32).to(device)).square().mean()
                scaler.scale(loss).backward()
                assert not manager.state.norms
                scaler.unscale_(optimizer)
                totals.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
                if model is managed:
                    (after,) = counted(manager, "brought_bytes")
                    assert after - before == MANAGED
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert_same(*(total.cpu() for total in totals))


def test_what_is_not_managed_is_torchs_own(device, monkeypatch):
    managed, _ = pair(device)
    with attached(managed, device):
        backward(managed, 0, device)
        given = []
        monkeypatch.setattr(norms, "_Answers", given.append)
        total_norm([managed.norm.weight.grad])
        total_norm([])
        total_norm([torch.ones(3)])
        assert not given
    backward(managed.to("cpu"), 0, "cpu")
    total_norm([p.grad for p in managed.parameters()])
    assert not given


def test_a_sum_of_norms_that_something_else_has_put_there_is_asked(monkeypatch):
    """It has no variables of functions around, as that of torch does."""
    monkeypatch.setattr(clip_grad, "_get_total_norm", lambda *_, **__: torch.tensor(8.0))
    managed, _ = pair("cpu")
    with attached(managed, "cpu"):
        backward(managed, 0, "cpu")
        assert nn.utils.clip_grad_norm_(managed.parameters(), 1.0) == 8


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize"])
def test_a_fault_of_the_driver_is_told_and_the_next_call_is_right(sim, call):
    models = managed, _ = pair("cpu")
    with attached(managed, "cpu"):
        told = 0
        for nth in range(1, 6):
            managed.zero_grad()
            models[1].zero_grad()
            for model in models:
                backward(model, nth, "cpu")
            managed._memory_manager.state.norms.clear()
            found = [p.grad for p in managed.parameters()]
            with simulator.fault(call, nth):
                try:
                    total_norm(found)
                except DriverError:
                    told += 1
            assert_same(*(total_norm([p.grad for p in model.parameters()]) for model in models))
        assert told == (1 if call == "cuEventSynchronize" else 5)  # it waits once
