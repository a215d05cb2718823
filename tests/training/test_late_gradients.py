"""Gradients leave while backward goes on, and the host waits once: who sees them when."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
from equality import assert_same, attached, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from oracle_offload import DriverError
from oracle_offload.engine import simulator
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


def test_a_sum_comes_while_the_gradients_before_its_own_are_computed(device, monkeypatch):
    managed, resident = pair(device)
    with attached(managed, device) as manager:
        assert len(manager.layers) == 4
        events, bring, send = [], module.Late.bring, module.Late.send

        def brings(late, master, *given):
            events.append(("comes", id(master)))
            bring(late, master, *given)

        def sends(late, master, *given, **named):
            events.append(("leaves", id(master)))
            send(late, master, *given, **named)

        monkeypatch.setattr(module.Late, "bring", brings)
        monkeypatch.setattr(module.Late, "send", sends)
        for number in range(3):
            events.clear()
            brought = manager.state.engine.stats()["brought_bytes"]
            for model in (managed, resident):
                backward(model, number, device)
            assert_same(gradients(managed), gradients(resident))
            came = manager.state.engine.stats()["brought_bytes"] - brought
            # Once each, and also the tied one's partial sum.
            sums = sum(p.nbytes for p in managed.parameters()) if number else 0
            assert came - sums in (0, managed.first.weight.nbytes)
        order = [of for what, of in events if what == "leaves"]
        ahead = [
            of
            for number, (what, of) in enumerate(events)
            if what == "comes" and ("leaves", of) not in events[number : number + 2]
        ]
        assert len(set(order)) == 7 and set(order[1:]) - {order[0]} <= {*ahead, order[1]}


@pytest.mark.parametrize("how", ["added to", "replaced", "dropped", "swapped"])
def test_a_sum_that_code_changes_while_it_comes_is_brought_anew(device, how):
    """What came is of no use: a hook between two layers has changed what is at home."""
    managed, resident = pair(device)
    with attached(managed, device):
        for number in range(3):
            for model in (managed, resident):
                torch.manual_seed(number)
                x = torch.randn(4, 32).to(device).requires_grad_()
                y = model.body[0](model.first(x)).tanh()

                def change(_, model=model):
                    simulator.finish()  # what comes is there, as it was
                    weight, one, other = model.body[0].weight, model.body[0].bias, model.first.bias
                    if how == "added to":
                        weight.grad.add_(1.0)
                    elif how == "replaced":
                        weight.grad = weight.grad + 1.0
                    elif how == "dropped":
                        weight.grad = None
                    else:
                        one.grad, other.grad = other.grad, one.grad

                if number:
                    y.register_hook(change)
                model.last(model.body[1](y).tanh()).square().sum().backward()
            assert_same(gradients(managed), gradients(resident))


def test_a_sum_that_came_for_no_gradient_is_let_go(device):
    managed, resident = pair(device)
    with attached(managed, device) as manager:
        for number in range(3):
            for model in (managed, resident):
                torch.manual_seed(number)
                x = torch.randn(4, 32).to(device)
                y = model.body[0](model.first(x))
                if number == 2:  # backward ends here, where others are on their way
                    y = y.detach().requires_grad_()
                model.last(model.body[1](y).tanh()).square().sum().backward()
            assert_same(gradients(managed), gradients(resident))
            assert not manager.state.late and not manager.state.unended


def test_few_bytes_leave_at_a_time(device, monkeypatch):
    """Beyond those the stream waits for the oldest, whose memory is free then."""
    monkeypatch.setattr(module, "MOST_LEAVING", 5000)
    managed, resident = pair(device)
    with attached(managed, device) as manager:
        leaving, send = [], module.Late.send

        def watched(late, *given, **named):
            send(late, *given, **named)
            leaving.append(sum(nbytes for _, nbytes in late._leaving.values()))
            assert late._leaving_bytes == leaving[-1]

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
            # A hook may look at all of them: each arrives before it is set.
            assert waits(manager) - before == (7 if model is managed else 0)
        assert_same(gradients(managed), gradients(resident))
        assert_same(seen[0], seen[1])


def test_a_hook_may_change_the_gradients_that_were_set_before_it():
    """On the host, where torch sets them in the order in which they land."""
    device = "cpu"
    managed, resident = pair(device)
    seen = []

    def halve(model):
        # In which order a layer's own are set is not said.
        others = [*model.body[1].named_parameters(), ("first", model.first.weight)]
        others += [("last", model.last.bias)]
        grads = {name: p.grad for name, p in others if p.grad is not None}
        seen.append({name: grad.detach().clone().cpu() for name, grad in grads.items()})
        for grad in grads.values():
            grad.mul_(0.5)

    with attached(managed, device) as manager:
        assert len(manager.layers) == 4
        for model in (managed, resident):
            model.body[0].weight.register_post_accumulate_grad_hook(lambda _, m=model: halve(m))
        for number in range(2):
            for model in (managed, resident):
                backward(model, number, device)
            assert_same(gradients(managed), gradients(resident))
            assert_same(seen[-2], seen[-1])
        assert len(seen[0]) == 3 and len(seen[-1]) == 4


@pytest.mark.parametrize("to_none", [True, False], ids=["dropped", "replaced"])
def test_a_gradient_that_is_dropped_on_its_way_stays_dropped(device, to_none):
    managed, resident = pair(device)
    with attached(managed, device) as manager:
        assert len(manager.layers) == 4
        for number in range(2):
            for model in (managed, resident):
                torch.manual_seed(number)
                x = torch.randn(4, 32).to(device).requires_grad_()

                def drop(_, model=model):
                    for parameter in model.body.parameters():
                        none = to_none or parameter.grad is None
                        parameter.grad = None if none else torch.ones_like(parameter)

                y = model.first(x)
                if number:
                    y.register_hook(drop)
                for layer in model.body:
                    y = layer(y).tanh()
                model.last(y).square().sum().backward()
            assert_same(gradients(managed), gradients(resident))
        found = managed.body[0].weight.grad
        assert found is None if to_none else torch.equal(found, torch.ones(32, 32))
        for model in (managed, resident):
            backward(model, 2, device)
        assert_same(gradients(managed), gradients(resident))


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


@pytest.mark.parametrize("most", [module.MOST_LEAVING, 5000], ids=["", "few leave"])
def test_what_code_adds_to_a_gradient_on_the_host_is_added(device, most, monkeypatch):
    monkeypatch.setattr(module, "MOST_LEAVING", most)
    managed, resident = pair(device)
    with attached(managed, device):
        for number in range(3):
            for model in (managed, resident):
                torch.manual_seed(number)
                y = model(torch.randn(4, 32).to(device)).square().sum()
                others = [model.body[1].weight.abs().sum(), model.body[0].weight.abs().sum()]
                (y + sum(others).to(y.device)).backward()
            assert_same(gradients(managed), gradients(resident))


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("backwards", [0, 1], ids=["first", "added"])
def test_one_weight_at_all_levels_of_nested_checkpoints(device, levels, backwards):
    managed = nn.Sequential(nn.Linear(64, 64, bias=False))
    resident = copy.deepcopy(managed).to(device)
    with attached(managed, device) as manager:
        assert len(manager.layers) == 1
        for model in (managed, resident):
            torch.manual_seed(1)
            for _ in range(backwards):
                model(torch.randn(4, 64).to(device)).sum().backward()

            def around(inside, model=model):
                def run(x):
                    return model(inside(model(x).tanh())).tanh()

                return lambda x: checkpoint(run, x, use_reentrant=True)

            f = lambda x, model=model: model(x).tanh()  # noqa: E731
            for _ in range(levels):
                f = around(f)
            f(torch.randn(4, 64).to(device).requires_grad_()).square().sum().backward()
        assert_same(gradients(managed), gradients(resident))


class Whole(nn.Module):
    """Layers whose weights are small whole numbers: sums of gradients have no order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        for parameter in self.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape).float()

    def forward(self, x):
        return self.layers(x)


def test_threads_lose_no_gradient(device):
    """Each has a forward of its own, and they are in backward together."""
    managed = Whole()
    resident = copy.deepcopy(managed).to(device)
    with attached(managed, device) as manager:
        assert len(manager.layers) == 4
        for model in (managed, resident):
            together, errors = threading.Barrier(2), []

            def run(number, model=model, together=together, errors=errors):
                try:
                    for _ in range(8):
                        x = torch.full((2, 64), float(number)).to(device)
                        y = model(x).sum()
                        together.wait()
                        y.backward()
                except BaseException as error:
                    errors.append(error)
                    together.abort()

            model(torch.ones(2, 64).to(device)).sum().backward()
            threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors
        assert_same(gradients(managed), gradients(resident))


def test_a_backward_in_another_thread_is_seen_by_one_that_goes_on():
    """On the host each backward runs in its own thread, so that one can stop for the other."""
    managed = Whole()
    resident = copy.deepcopy(managed)
    with attached(managed, "cpu") as manager:
        assert len(manager.layers) == 4
        for model in (managed, resident):
            model(torch.ones(2, 64)).sum().backward()
            there, go_on, threads, errors = threading.Event(), threading.Event(), [], []

            def other(_, model=model, there=there, go_on=go_on, threads=threads, errors=errors):
                def stop(_):
                    there.set()
                    go_on.wait(60)

                def run():
                    try:
                        y = model.layers[0](torch.full((2, 64), 2.0))
                        y.register_hook(stop)
                        model.layers[1:](y).sum().backward()
                    except BaseException as error:
                        errors.append(error)
                    there.set()

                thread = threading.Thread(target=run)
                thread.start()
                there.wait(60)
                threads.append(thread)

            y = model.layers[:2](torch.full((2, 64), 3.0))
            y.register_hook(other)
            model.layers[2:](y).sum().backward()
            go_on.set()
            for thread in threads:
                thread.join()
            assert len(threads) == 1 and not errors
        assert_same(gradients(managed), gradients(resident))


def test_a_backward_that_raises_sets_no_gradient_and_the_next_one_is_whole(device):
    managed, resident = pair(device)
    with attached(managed, device):
        forward = managed.first.forward
        managed.first.forward = lambda x: Raises.apply(forward(x))
        with pytest.raises(ZeroDivisionError):
            backward(managed, 0, device)
        assert all(parameter.grad is None for parameter in managed.parameters())
        del managed.first.forward
        managed.zero_grad()
        for model in (managed, resident):
            backward(model, 1, device)
        assert_same(gradients(managed), gradients(resident))


def test_a_trip_whose_end_fails_is_told_of_and_ended_by_the_next_backward():
    """Else its memory would be torch's again while a copy may read it, and the record stay."""
    managed, resident = pair("cpu")
    call, kept = "cuStreamWaitEvent", 0
    with attached(managed, "cpu") as manager:
        backward(managed, 0, "cpu")
        before = simulator.call_count(call)
        backward(managed, 0, "cpu")
        for nth in range(1, simulator.call_count(call) - before + 1):
            managed.zero_grad()
            simulator.set_fault(call, nth, 701)
            with contextlib.suppress(DriverError):
                backward(managed, 0, "cpu")
                assert not manager.state.unended, "no error was raised"
            simulator.clear_faults()
            kept += len(manager.state.unended)
            for model in (managed, resident):
                model.zero_grad()
                backward(model, 1, "cpu")
            assert not manager.state.unended
            assert_same(gradients(managed), gradients(resident))
    assert kept


def test_a_wait_that_fails_ends_all_trips_of_its_backward():
    """Else each such backward would leave records, and let go of memory that copies still read."""
    managed, _ = pair("cpu")
    with attached(managed, "cpu"):
        backward(managed, 0, "cpu")
        made = simulator.call_count("cuEventCreate")
        managed.zero_grad()
        with simulator.fault("cuEventSynchronize", 1), pytest.raises(DriverError):
            backward(managed, 0, "cpu")
        managed.zero_grad()
        backward(managed, 0, "cpu")
        assert simulator.call_count("cuEventCreate") == made > 0


@pytest.mark.parametrize("writes", ["between", "steps"])
def test_rows_that_code_writes_by_hand_are_seen_by_the_next_forward(device, writes):
    """Samples miss a few rows, and an optimizer that has stepped before promises nothing."""
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(1024, 1024, bias=False))
    resident = copy.deepcopy(managed).to(device)
    x = torch.randn(4, 1024).to(device)
    with attached(managed, device, offload_percent=0.0) as manager:
        assert len(manager.layers) == 1
        outputs = []
        for model in (managed, resident):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            weight, found = model[0].weight, []
            for number in range(5):
                rows = slice(100 + 8 * number, 108 + 8 * number)
                y = model(x)
                found.append(y.detach().cpu())
                if writes == "steps":
                    model.zero_grad()
                y.square().mean().backward()
                by = weight.grad[rows] * 10 if writes == "steps" else torch.ones_like(weight[rows])
                weight.data[rows] -= by
            outputs.append(found)
        if device in ("cpu", "simgpu"):  # elsewhere a step on the host has other bits
            assert_same(*outputs)
        else:
            for one, other in zip(*outputs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_trained_units_stay_for_a_second_backward_and_go_with_a_forward(device):
    managed, resident = pair(device)
    with attached(managed, device, offload_percent=0.0) as manager:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (managed, resident)]
        copied = []
        for number in range(6):
            before = manager.state.engine.stats()["h2d_bytes"]
            for model in (managed, resident):
                torch.manual_seed(number)
                loss = model(torch.randn(4, 32).to(device).requires_grad_()).square().sum()
                forward = manager.state.engine.stats()["h2d_bytes"] - before
                loss.backward(retain_graph=True)
                loss.backward()
                if model is managed:
                    copied.append(forward)
                    assert manager.state.engine.stats()["h2d_bytes"] - before == forward
            if number % 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                if device == "cpu" or device == "simgpu":
                    assert_same(dict(managed.named_parameters()), dict(resident.named_parameters()))
        assert copied[2] == copied[3] == copied[4] == copied[5] > 0


def test_memory_that_somebody_has_is_given_to_none_where_it_cannot_be_unlocked(sim):
    """Of gradients that share a buffer, and of large ones; the next backward takes other memory."""
    managed = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600, bias=False))
    with attached(managed, "cpu") as manager:
        own = manager.attachment.gradients
        pool = own._pool
        managed(torch.ones(2, 600)).square().sum().backward()
        held = [p.grad for p in managed.parameters()]
        before = [gradient.clone() for gradient in held]
        assert len(pool._buffers) == 3
        for number, address in enumerate(list(pool._buffers)):
            pool._buffers = {address: pool._buffers[address], **pool._buffers}  # this one first
            with simulator.fault("cuMemHostUnregister", 1), pytest.raises(DriverError):
                own.give_back_all()
            managed.zero_grad()
            managed(torch.full((2, 600), 2.0 + number)).square().sum().backward()
            assert_same(held, before)
        own.give_back_all()
        assert not own.locked_bytes
