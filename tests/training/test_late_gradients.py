"""Gradients leave while backward goes on, and the host waits once: who sees them when."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from equality import assert_same, attached, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from oracle_offload.layers import gradients as module
from oracle_offload.model.witness import Witness


class Tied(nn.Module):
    """Two layers share a weight; the others are checkpointed, if asked for."""

    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.last.weight = self.first.weight
        self.body = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.body:
            if self.reentrant is None:
                x = layer(x).tanh()
            else:
                x = checkpoint(lambda x, f=layer: f(x).tanh(), x, use_reentrant=self.reentrant)
        return self.last(x)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def pair(device, reentrant=None):
    managed = Tied(reentrant)
    return managed, copy.deepcopy(managed).to(device)


def backward(model, number, device, weight=1.0):
    torch.manual_seed(number)
    x = torch.randn(4, 32).to(device).requires_grad_()
    (model(x).square().sum() * weight).backward()


def waits(manager):
    return manager.state.engine.stats()["host_waits"]


@pytest.mark.parametrize(
    "reentrant", [None, False, True], ids=["plain", "nonreentrant", "reentrant"]
)
def test_a_backward_waits_once_and_adds_up_as_the_resident_one(device, reentrant):
    managed, resident = pair(device, reentrant)
    with attached(managed, device) as manager:
        assert len(manager.layers) == 4
        for number in range(3):
            for model, watch in ((managed, Witness() if number == 1 else None), (resident, None)):
                before = waits(manager)
                with watch or contextlib.nullcontext():
                    backward(model, number, device)
                assert waits(manager) - before == (model is managed)
            assert_same(gradients(managed), gradients(resident))
            kept = managed.body[0].weight.grad
        assert kept is managed.body[0].weight.grad
        assert manager.state.engine.stats()["brought_bytes"] > 0  # sums came for what was added


def test_few_bytes_leave_at_a_time(device, monkeypatch):
    """Beyond those the stream waits for the oldest, whose memory is free then."""
    monkeypatch.setattr(module, "MOST_LEAVING", 5000)
    managed, resident = pair(device)
    with attached(managed, device) as manager:
        leaving, send = [], module.Late.send

        def watched(late, *given, **named):
            send(late, *given, **named)
            leaving.append(late._leaving_bytes)

        monkeypatch.setattr(module.Late, "send", watched)
        for number in range(2):
            before = waits(manager)
            backward(managed, number, device)
            assert waits(manager) - before == 1
            backward(resident, number, device)
        assert_same(gradients(managed), gradients(resident))
        assert len(leaving) == 14 and max(leaving) <= 5000


@pytest.mark.parametrize("hook", ["tensor", "accumulated", "node", "node before"])
def test_a_hook_sees_bytes_that_have_arrived(device, hook):
    managed, resident = pair(device)
    seen = []

    def note(parameter, value=None):
        seen.append((parameter.grad if value is None else value).detach().clone().cpu())

    with attached(managed, device) as manager:
        backward(managed, 0, device)  # so that what the hook is put on is known already
        backward(resident, 0, device)
        for model in (managed, resident):
            weight = model.body[1].weight
            if hook == "tensor":
                weight.register_hook(lambda value, w=weight: note(w, value))
            elif hook == "accumulated":
                weight.register_post_accumulate_grad_hook(note)
            else:
                node = weight.view_as(weight).grad_fn.next_functions[0][0]
                weight.kept = node  # torch keeps none
                if hook == "node":
                    node.register_hook(lambda *_, w=weight: note(w))
                else:
                    node.register_prehook(lambda values, w=weight: note(w, values[0]))
            before = waits(manager)
            backward(model, 1, device)
            assert waits(manager) - before == (2 if model is managed else 0)
        assert_same(gradients(managed), gradients(resident))
        assert_same(seen[0], seen[1])


def test_gradients_that_are_asked_for_have_arrived(device):
    managed, resident = pair(device)
    with attached(managed, device):
        found = []
        for model in (managed, resident):
            x = torch.ones(4, 32).to(device)
            found.append(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))
            assert all(p.grad is None for p in model.parameters())
            weights = [model.body[0].weight]
            model(x).square().sum().backward(inputs=weights)
            found[-1] += (weights[0].grad,)
            assert model.first.weight.grad is None
        assert_same(found[0], found[1])


def test_what_code_adds_to_a_gradient_on_the_host_is_added(device):
    managed, resident = pair(device)
    with attached(managed, device):
        for number in range(3):
            for model in (managed, resident):
                torch.manual_seed(number)
                y = model(torch.randn(4, 32).to(device)).square().sum()
                (y + model.body[0].weight.abs().sum().to(y.device)).backward()
            assert_same(gradients(managed), gradients(resident))


def test_a_backward_that_raises_sets_no_gradient_and_the_next_one_is_whole(device):
    managed, resident = pair(device)
    with attached(managed, device):
        forward = managed.first.forward
        managed.first.forward = lambda x: Raises.apply(forward(x))
        with pytest.raises(ZeroDivisionError):
            backward(managed, 0, device)
        del managed.first.forward
        managed.zero_grad()
        for model in (managed, resident):
            backward(model, 1, device)
        assert_same(gradients(managed), gradients(resident))


def test_trained_units_stay_between_micro_batches_and_go_with_a_step(device):
    managed, resident = pair(device)
    with attached(managed, device, offload_percent=0.0) as manager:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (managed, resident)]
        copied = []
        for number in range(6):
            before = manager.state.engine.stats()["h2d_bytes"]
            backward(managed, number, device)
            backward(resident, number, device)
            copied.append(manager.state.engine.stats()["h2d_bytes"] - before)
            if number % 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                if device == "cpu" or device == "simgpu":
                    assert_same(dict(managed.named_parameters()), dict(resident.named_parameters()))
        assert copied[2] == copied[4] > 0 and copied[3] == copied[5] == 0
        # Code that steps by hand is not seen: what it may have written to is copied anew.
        backward(managed, 6, device)
        managed.zero_grad()
        before = manager.state.engine.stats()["h2d_bytes"]
        backward(managed, 7, device)
        assert manager.state.engine.stats()["h2d_bytes"] > before
