"""Optimizers that step in backward: the bits of the resident model, and no gradient goes home."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import sys
import time

import pytest
import torch
from equality import assert_same, attached
from models import Tower
from test_late_gradients import Raises
from test_stepping import OPTIMIZERS, Net, assert_alike, backward, cloned
from torch import nn
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload import DriverError, OffloadError, accumulate
from oracle_offload import manager as manager_of
from oracle_offload.engine import simulator
from oracle_offload.model.witness import Witness
from oracle_offload.train import in_backward, stepping, stream_optimizer

WEIGHT = 4 * 32 * 32
MANAGED = 3 * WEIGHT + 4 * 4 * 32  # bytes of the weights and biases of `Net`'s layers


@pytest.fixture(autouse=True, params=["apart", "together"])
def small_batches(request, monkeypatch):
    """A weight and its bias at a time; each layer is a unit, or all of them are one."""
    monkeypatch.setattr(stepping, "BATCH_BYTES", 12000)
    if request.param == "apart":
        monkeypatch.setattr(manager_of, "group_units", lambda leaves: [[leaf] for leaf in leaves])
    return request.param


apart = pytest.mark.parametrize("small_batches", ["apart"], indirect=True)


def streamed(optimizer):
    return stream_optimizer(optimizer, during_backward=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@contextlib.contextmanager
def pair(managed, device, make=OPTIMIZERS["adamw"], **options):
    """Attach a model, whose optimizer steps in backward, next to a resident one with its own."""
    models = managed, copy.deepcopy(managed).to(device)
    with attached(managed, device, **options) as manager:
        optimizers = [make(model.parameters()) for model in models]
        streamed(optimizers[0])
        yield manager, models, optimizers


def after_one_step(models, kind, device):
    """Return the optimizers of models after a step; the first has made it in backward."""
    optimizers = [kind(model.parameters(), lr=0.1) for model in models]
    streamed(optimizers[0])
    step_all(models, optimizers, 0, device)
    return optimizers


def step_all(models, optimizers, number, device, width=32, forward=nn.Module.__call__):
    """Make a step of each model with the same input; return the losses."""
    losses = []
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(number)
        loss = forward(model, torch.randn(4, width).to(device).requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def moved(manager):
    stats = manager.state.engine.stats()
    return {name: stats[name] for name in ("d2h_bytes", "brought_bytes", "host_waits")}


def states(manager, optimizer):
    """Bytes of what the optimizer keeps of the managed Parameters, without numbers of the host."""
    own = {id(p) for layer in manager.layers for p in layer.masters.present}
    return sum(
        value.numel() * value.element_size()
        for p, state in optimizer.state.items()
        for value in state.values()
        if id(p) in own and isinstance(value, torch.Tensor) and value.dim()
    )


def both(device, reentrant=None):
    """Return a model to attach, and its twin on the device."""
    managed = Net(reentrant)
    return managed, copy.deepcopy(managed).to(device)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_have_the_resident_bits_and_gradients_stay(device, name, small_batches):
    if "fused" in name and device == "simgpu":
        pytest.skip("torch has no fused kernels for this type of device")
    if small_batches == "together" and name not in ("adamw", "muon"):
        pytest.skip("the others are tried apart")
    reentrant = {"groups": True, "momentum": False}.get(name)
    managed, resident = both(device, reentrant)
    make = OPTIMIZERS[name]
    with attached(managed, device) as manager:
        assert len(manager.layers) == 4
        assert len({layer.unit for layer in manager.layers}) == (small_batches == "apart") * 3 + 1
        models = managed, resident
        optimizers = [make(list(model.parameters())) for model in models]
        assert streamed(optimizers[0]) is optimizers[0]
        trained = {id(p) for g in optimizers[0].param_groups for p in g["params"]}
        own = {p for layer in manager.layers for p in layer.masters.present}
        nbytes = sum(4 * p.numel() for p in own if id(p) in trained)
        others = MANAGED - nbytes  # gradients that other optimizers would take
        for number in range(4):
            kept = states(manager, optimizers[0])
            before = moved(manager)
            losses = [backward(model, number, device) for model in models]
            after = moved(manager)
            assert_same(*losses)
            assert all(p.grad is None for p in own if id(p) in trained)
            # Of weights those come that are not stepped where backward has used them.
            assert kept <= after["brought_bytes"] - before["brought_bytes"] <= nbytes + kept + 64
            home = nbytes + states(manager, optimizers[0]) + others
            if "fused" not in name:  # whose counters are on the device, too
                weights = after["brought_bytes"] - before["brought_bytes"] - kept
                assert 0 <= weights <= nbytes
                assert after["d2h_bytes"] - before["d2h_bytes"] == home
            assert after["host_waits"] - before["host_waits"] == 1
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for model in models:
                model.zero_grad()
            assert moved(manager) == after  # the norm alone was left
            assert_alike(models, optimizers)
        held = managed.first.weight
        assert manager.state.engine.is_locked(held.data_ptr(), WEIGHT)


def test_schedulers_hooks_and_a_closure_see_one_step(device):
    managed, resident = both(device)
    with attached(managed, device) as manager:
        assert len(manager.layers) == 4
        models, seen = (managed, resident), ([], [])
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        schedulers = [torch.optim.lr_scheduler.LinearLR(one, 0.1, 1.0, 3) for one in optimizers]
        streamed(optimizers[0])
        for optimizer, notes in zip(optimizers, seen, strict=True):
            optimizer.register_step_post_hook(lambda *_, notes=notes: notes.append("after"))
            optimizer.register_step_pre_hook(lambda *_, notes=notes: notes.append("before"))
        for number in range(3):
            for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
                if number == 1:
                    optimizer.step(lambda model=model: backward(model, 1, device))
                else:
                    backward(model, number, device)
                    optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            assert_alike(models, optimizers)
        assert seen[0] == seen[1] == 3 * ["before", "after"]
        kept = cloned(optimizers[0].state_dict())
        optimizers[0].load_state_dict(kept)
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, 9, device)
            optimizer.step()
        assert_alike(models, optimizers)


def test_a_parameter_with_a_hook_is_stepped_afterwards(device):
    """The hook sees its gradient, and may change it."""
    with pair(Net(), device) as (manager, models, optimizers):
        managed, seen = models[0], []
        for model in models:
            model.body[0].weight.register_hook(lambda gradient: 2 * gradient)
            model.body[1].bias.register_post_accumulate_grad_hook(
                lambda p: seen.append(p.grad.detach().clone().cpu())
            )
        for number in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                backward(model, number, device)
                if model is managed:
                    with_grad = {n for n, p in model.named_parameters() if p.grad is not None}
                    assert with_grad == {
                        "body.0.weight", "body.1.bias", "norm.weight", "norm.bias"
                    }  # fmt: skip
                optimizer.step()
                optimizer.zero_grad()
            assert not manager.state.rewritten, "later uses would wait for what is home"
            assert_alike(models, optimizers)
        assert_same(seen[0], seen[1])


def test_no_copy_is_kept_for_an_optimizer_that_this_backward_steps_nothing_of(device, monkeypatch):
    """Another one steps in it, so that uses may be kept; these gradients go home."""
    monkeypatch.setattr(stepping, "PART_OF_ARENA", 1)
    managed = Late()
    with attached(managed, device, offload_percent=0.0) as manager:
        ours = [p for layer in managed.layers[3:] for p in layer.parameters()]
        hooked = [p for layer in managed.layers[:3] for p in layer.parameters()]
        optimizers = [streamed(torch.optim.SGD(each, lr=0.1)) for each in (ours, hooked)]
        for parameter in hooked:
            parameter.register_hook(lambda gradient: 2 * gradient)
        for number in range(3):
            backward(managed, number, device)
            assert all(p.grad is None for p in ours) and all(p.grad is not None for p in hooked)
            assert manager.state.kept_bytes == 0
            assert not any(pins for *_, pins in manager.state.engine.residents())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@apart
def test_an_optimizer_that_is_gone_with_its_scheduler_leaves_its_parameters(device):
    """By their last references, as with plain torch, and without the garbage collector."""
    managed = Net()
    with attached(managed, device):
        former = torch.optim.AdamW(managed.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(former)
        streamed(former)
        with pytest.raises(OffloadError, match="another optimizer steps a Parameter of shape"):
            streamed(torch.optim.SGD(managed.parameters(), lr=0.1))
        assert scheduler.optimizer is former
        gc.disable()
        try:
            del former, scheduler
            optimizer = streamed(torch.optim.SGD(managed.parameters(), lr=0.1))
        finally:
            gc.enable()
        before = managed.first.weight.detach().clone()
        backward(managed, 0, device)
        optimizer.step()
        assert managed.first.weight.grad is None
        assert not torch.equal(managed.first.weight.detach(), before)


def test_two_optimizers_share_the_layers(device):
    managed, resident = both(device)
    with attached(managed, device) as manager:
        assert len(manager.layers) == 4
        models, pairs = (managed, resident), []
        for model in models:
            matrices = [p for p in model.parameters() if p.dim() == 2]
            others = [p for p in model.parameters() if p.dim() != 2]
            pairs.append((torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1)))
        for optimizer in pairs[0]:
            streamed(optimizer)
        for number in range(3):
            for model, pair in zip(models, pairs, strict=True):
                backward(model, number, device)
                if model is managed:
                    assert model.first.weight.grad is None and model.first.bias.grad is None
                for optimizer in pair:
                    optimizer.step()
                    optimizer.zero_grad()
        for optimizers in zip(*pairs, strict=True):
            assert_alike(models, optimizers)
        with pytest.raises(OffloadError, match="another optimizer steps a Parameter of shape"):
            streamed(torch.optim.SGD(managed.parameters(), lr=0.1))


# ---- what cannot be had ----


def scaled(model, optimizer, device):
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=4.0)
    scaler.scale(model(torch.ones(4, 32).to(device)).sum()).backward()


def scaled_among_others(model, optimizer, device):
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=4.0)
    losses = scaler.scale([model(torch.ones(4, 32).to(device)).sum()])
    losses[0].backward()


def retained(model, optimizer, device):
    model(torch.ones(4, 32).to(device)).sum().backward(retain_graph=True)


def with_a_graph(model, optimizer, device):
    model(torch.ones(4, 32).to(device)).sum().backward(create_graph=True)


def given_a_gradient(model, optimizer, device):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model(torch.ones(4, 32).to(device)).sum().backward()


REFUSED = {
    scaled: "is scaled by a GradScaler",
    scaled_among_others: "is scaled by a GradScaler",
    retained: "retain_graph=True",
    with_a_graph: "retain_graph=True",
    given_a_gradient: "gets a second gradient before step",
}


@pytest.mark.parametrize("use", REFUSED)
@pytest.mark.parametrize("reentrant", [None, True], ids=["plain", "reentrant"])
def test_what_is_refused_before_anything_is_stepped(device, use, reentrant):
    with pair(Net(reentrant), device) as (manager, models, optimizers):
        assert len(manager.layers) == 4
        managed = models[0]
        before = cloned(managed.state_dict())
        with pytest.raises(OffloadError, match=f"AdamW steps in backward: .*{REFUSED[use]}"):
            use(managed, optimizers[0], device)
        gc.collect()
        assert_same(managed.state_dict(), before)
        for optimizer in optimizers:
            optimizer.zero_grad()
        step_all(models, optimizers, 1, device)
        assert_alike(models, optimizers)


def test_a_second_backward_is_refused_until_the_step(device):
    with pair(Net(), device) as (_, models, optimizers):
        managed, resident = models
        for model in models:
            backward(model, 0, device)
        with pytest.raises(OffloadError, match="by another backward"):
            backward(managed, 1, device)
        gc.collect()
        managed.norm.zero_grad()
        resident.norm.zero_grad()
        managed.first.weight.grad = torch.ones(32, 32)
        with pytest.raises(OffloadError, match=r"because \.grad was set"):
            optimizers[0].step()
        managed.first.weight.grad = None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_alike(models, optimizers)
        step_all(models, optimizers, 2, device)
        assert_alike(models, optimizers)


def test_a_use_after_the_step_is_refused_and_nothing_goes_on(device, monkeypatch):
    """A reentrant checkpoint differentiates by itself; the other kind sums first."""
    managed = Tower(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh())] * 2)  # one, twice
    resident = copy.deepcopy(managed).to(device)
    with attached(managed, device):
        models = managed, resident
        optimizers = after_one_step(models, torch.optim.SGD, device)
        assert_alike(models, optimizers)
        managed.reentrant = True
        with pytest.raises(OffloadError, match="second reentrant checkpoint that uses it"):
            backward(managed, 1, device)
        gc.collect()
        with pytest.raises(OffloadError, match="the latest backward was broken off before"):
            optimizers[0].step()
        monkeypatch.setattr(stepping, "BATCH_BYTES", 0)
        monkeypatch.setattr(in_backward.InBackward, "take", at_once(in_backward.InBackward.take))
        with pytest.raises(OffloadError, match="second reentrant checkpoint that uses it"):
            backward(managed, 2, device)
        gc.collect()
        for call in (optimizers[0].step, lambda: backward(managed, 3, device)):
            with pytest.raises(OffloadError, match="it takes no further step"):
                call()


def at_once(take):
    """`take` that steps what is taken, without waiting for more."""

    def run(stepper, master, gradient):
        take(stepper, master, gradient)
        with torch.no_grad():
            for batch in stepper._left:
                if not batch.is_home:
                    stepper._bring(stepper._running, batch)
                    stepper._step_batch(stepper._running, batch)

    return run


def test_code_that_adds_on_the_host_is_refused(device):
    managed, make = Net(), OPTIMIZERS["sgd"]
    with attached(managed, device) as manager:
        optimizer = streamed(make(managed.parameters()))
        loss = managed(torch.ones(4, 32).to(device)).sum()
        with pytest.raises(OffloadError, match="by code that uses it on the host"):
            (loss.cpu() + managed.body[0].weight.square().sum().cpu()).backward()
        gc.collect()
        # The thread of the device may compute on for a while: the error is of the host's thread.
        end = time.monotonic() + 60
        while manager.attachment.held() and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(OffloadError):
            optimizer.step()


@pytest.mark.parametrize(
    "clip",
    [
        lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0),
        lambda p: torch.nn.utils.clip_grad_norm_(iter(p), 1.0),
        lambda p: torch.nn.utils.clip_grad_value_(p, 1.0),
        lambda p: torch.nn.utils.clip_grads_with_norm_(p, 1.0, torch.ones(())),
    ],
)
def test_clipping_is_refused_by_name(device, clip):
    managed, resident = both(device)
    make = OPTIMIZERS["sgd"]
    with attached(managed, device):
        optimizer = streamed(make(managed.parameters()))
        backward(managed, 0, device)
        with pytest.raises(OffloadError, match=r"clip_grad.*steps these Parameters in backward"):
            clip(list(managed.parameters()))
        backward(resident, 0, device)
        clip(list(resident.parameters()))
        clip([managed.norm.weight])
        optimizer.step()
        del optimizer
        gc.collect()
        clip(list(managed.parameters()))  # no optimizer steps them any more


def test_micro_batches_that_are_summed_are_refused_before_they_are_computed(device):
    managed, make = Net(), OPTIMIZERS["sgd"]
    batches = [torch.ones(2, 32).to(device)] * 2
    with attached(managed, device):
        optimizer = streamed(make(managed.parameters()))
        before = cloned(managed.state_dict())
        with pytest.raises(OffloadError, match="accumulate was called while an optimizer steps in"):
            accumulate(lambda batch: managed(batch).sum(), batches)
        assert_same(managed.state_dict(), before)
        accumulate(lambda batch: managed(batch).sum(), batches[:1])
        assert managed.first.weight.grad is None
        optimizer.step()


def test_it_is_streamed_one_way_or_the_other(device):
    managed = Net()
    with attached(managed, device):
        optimizer = streamed(torch.optim.SGD(managed.parameters(), lr=0.1))
        assert streamed(optimizer) is optimizer
        with pytest.raises(OffloadError, match="streamed already, with during_backward=True"):
            stream_optimizer(optimizer)


def test_values_without_grad_are_no_steps(device):
    """``autograd.grad`` gives gradients as ever."""
    managed, resident = both(device)
    make = OPTIMIZERS["sgd"]
    with attached(managed, device):
        streamed(make(managed.parameters()))
        found = []
        for model in (managed, resident):
            loss = model(torch.ones(4, 32).to(device)).sum()
            found.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
        assert_same(*found)


# ---- when it is broken off ----


class Late(nn.Module):
    """Its backward raises in the end, after the gradients of most layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fails = False
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if self.fails and number == 0:
                x = Raises.apply(x)
        return x


def test_a_backward_that_raises_after_a_step_is_the_last(device, small_batches):
    managed = Late()
    resident = copy.deepcopy(managed).to(device)
    with attached(managed, device) as manager:
        assert len(manager.layers) == 5
        models = managed, resident
        optimizers = after_one_step(models, torch.optim.SGD, device)
        managed.fails = True
        with pytest.raises(ZeroDivisionError):
            backward(managed, 1, device)
        gc.collect()
        managed.fails = False
        if small_batches == "together":  # one unit is one batch: it was not complete
            assert_alike(models, optimizers)
            with pytest.raises(OffloadError, match="broken off before anything was stepped"):
                optimizers[0].step()
            step_all(models, optimizers, 1, device)
            assert_alike(models, optimizers)
            return
        for call in (optimizers[0].step, lambda: backward(managed, 2, device)):
            with pytest.raises(OffloadError, match="it takes no further step"):
                call()
        # The model itself goes on with what is at home.
        with torch.no_grad():
            for p, q in zip(managed.parameters(), resident.parameters(), strict=True):
                q.copy_(p.to(device))
            x = torch.ones(4, 32).to(device)
            assert_same(managed(x), resident(x))


def test_a_step_is_refused_while_the_exception_of_its_backward_is_at_hand(device, monkeypatch):
    """Its traceback holds what the backward has left."""
    managed = Late()
    with attached(managed, device):
        optimizer = streamed(torch.optim.SGD(managed.parameters(), lr=0.1))

        def fails(stepper, optimizer, batch):
            raise ZeroDivisionError

        with monkeypatch.context() as patched:
            patched.setattr(stepping.Stepper, "_compute", fails)
            with pytest.raises(ZeroDivisionError) as held:
                backward(managed, 1, device)
        with pytest.raises(OffloadError, match="broken off before anything was stepped"):
            optimizer.step()
        assert held.value.__traceback__ is not None


@apart
@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventRecord"])
def test_a_fault_of_the_driver_is_never_silent(sim, call):
    """At one call in several of one backward: completed, or refused, or untouched."""
    ends = {"completed": 0, "untouched": 0, "refused": 0}
    for nth in range(1, 31, 3):
        with pair(Late(), "cpu") as (_, models, optimizers):
            managed, resident = models
            backward(resident, 0, "cpu")
            before = cloned(managed.state_dict())
            torch.manual_seed(0)
            loss = managed(torch.randn(4, 32).requires_grad_()).square().mean()
            raised = False
            with simulator.fault(call, nth):
                try:
                    loss.backward()
                except (DriverError, OffloadError):
                    raised = True
            del loss
            gc.collect()
            check_end(ends, optimizers, models, before, raised)
    assert ends["refused"] + ends["untouched"] > 0 and sum(ends.values()) == 10, ends


def check_end(ends, optimizers, models, before, raised):
    managed, _ = models
    stepper = optimizers[0].__dict__[stepping.STEPPER]
    if stepper.unfinished:
        assert raised
        with pytest.raises(OffloadError, match="it takes no further step"):
            optimizers[0].step()
        stepper.unfinished = False
        ends["refused"] += 1
    elif torch.equal(managed.state_dict()["layers.4.weight"], before["layers.4.weight"]):
        assert raised
        assert_same(managed.state_dict(), before)
        try:  # torch steps what has a gradient, which is nothing, where nothing had come yet
            optimizers[0].step()
        except OffloadError as error:
            assert "broken off before anything was stepped" in str(error)
        assert_same(managed.state_dict(), before)
        ends["untouched"] += 1
    else:
        for optimizer in optimizers:
            optimizer.step()
        assert_alike(models, optimizers)
        ends["completed"] += 1


class Interrupts:
    """Raises at the n-th line of what steps that runs."""

    files = (stepping.__file__, in_backward.__file__)

    def __init__(self, nth):
        self.left = nth

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_an_interrupt_at_one_line_in_many_is_never_silent(device, small_batches):
    if device != "cpu":
        pytest.skip("autograd steps on a thread of its own, which no interrupt reaches")
    ends = {"completed": 0, "untouched": 0, "refused": 0}
    nth, finished = 1, False
    while not finished:
        managed = Late()
        resident = copy.deepcopy(managed).to(device)
        with attached(managed, device):
            models = managed, resident
            optimizers = after_one_step(models, torch.optim.AdamW, device)
            backward(resident, 1, device)
            before = cloned(managed.state_dict())
            raised = True
            sys.settrace(Interrupts(nth))
            try:
                backward(managed, 1, device)
                finished, raised = True, False
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            gc.collect()
            nth += 67
            check_end(ends, optimizers, models, before, raised)
            optimizers[0].zero_grad()
    assert ends["untouched"] and ends["completed"], ends
    assert ends["refused"] or small_batches == "together", ends


# ---- what is used while it is rewritten ----


@apart
def test_a_weight_that_is_used_again_in_the_same_backward_is_the_stepped_one(device):
    """By a hook, without grad: its copy waits until the weight is home."""
    managed = Late()
    with attached(managed, device) as manager:
        assert len(manager.layers) == 5
        optimizer, seen = streamed(torch.optim.SGD(managed.parameters(), lr=0.1)), []
        for number in range(2):
            x = torch.ones(4, 32).to(device).requires_grad_()

            def use_again(gradient, x=x):
                with torch.no_grad():
                    seen.append(managed.layers[4](x.detach()).cpu())

            x.register_hook(use_again)
            managed(x).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                assert_same(seen[number], managed.layers[4](x.detach()).cpu())
        assert len(seen) == 2


class WithTable(nn.Module):
    """A table whose rows are used last, and so stepped first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(5))
        self.table = nn.Embedding(512, 32)

    def forward(self, x, rows, look=None):
        for layer in self.layers:
            x = layer(x).tanh()
            if look is not None:
                x.register_hook(look)
        return x + self.table(rows)


@apart
def test_rows_that_are_read_in_the_same_backward_are_whole(sim):
    """The device reads a table in place, before it is stepped or once that is home."""
    sim.slow_link(0.001)
    managed, rows = WithTable(), torch.tensor([3, 1, 2, 0])
    with attached(managed, "cpu") as manager:
        assert len(manager.layers) == 6
        optimizer, seen = streamed(torch.optim.SGD(managed.parameters(), lr=0.1)), []

        def look(gradient):
            with torch.no_grad():
                seen.append(managed.table(rows).clone())

        for _ in range(3):
            seen.clear()
            before = managed.table(rows).detach().clone()
            managed(torch.ones(4, 32).requires_grad_(), rows, look).square().sum().backward()
            optimizer.step()
            after = managed.table(rows).detach().clone()
            assert len(seen) == 5 and not torch.equal(before, after)
            assert torch.equal(seen[0], before) and torch.equal(seen[-1], after)
            assert all(torch.equal(s, before) or torch.equal(s, after) for s in seen)


@apart
def test_a_use_that_no_gradient_follows_ends_with_the_backward(device, monkeypatch):
    """A hook sees the gradient: the copy that was kept for its step is not stepped."""
    monkeypatch.setattr(stepping, "PART_OF_ARENA", 1)
    with pair(wide(), device, sgd, offload_percent=0.5) as (manager, models, optimizers):
        for model in models:
            model[7].weight.register_hook(lambda gradient: 2 * gradient)
        kept = []
        own = in_backward.InBackward.keep

        def keep(stepper, layer, master):
            own(stepper, layer, master)
            kept.append(layer.unit in stepper._used)

        monkeypatch.setattr(in_backward.InBackward, "keep", keep)
        for number in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                torch.manual_seed(number)
                model(torch.randn(4, 128).to(device).requires_grad_()).square().mean().backward()
                if model is models[0]:
                    assert not any(pins for *_, pins in manager.state.engine.residents())
                    assert manager.state.kept_bytes == manager.state.n_stepping == 0
                optimizer.step()
                optimizer.zero_grad()
            assert_alike(models, optimizers)
        assert any(kept)


@apart
@pytest.mark.parametrize("percent", [0.0, 0.5], ids=["all", "half"])
def test_what_backward_has_used_is_what_is_stepped(device, monkeypatch, percent):
    """The link brings a weight once for forward and once for backward, and states once."""
    monkeypatch.setattr(stepping, "BATCH_BYTES", 4 * 4 * 128**2)  # a weight with its states
    monkeypatch.setattr(stepping, "PART_OF_ARENA", 2)
    weights = sum(p.nbytes for p in wide().parameters())
    slot = weights / 16
    with pair(wide(), device, offload_percent=percent) as (manager, models, optimizers):
        assert len({layer.unit for layer in manager.layers}) == 16
        missing = max(0, weights - manager.attachment.arena.capacity_bytes)
        for number in range(5):
            before = manager.state.engine.stats()
            step_all(models, optimizers, number, device, 128)
            after = manager.state.engine.stats()
            assert_alike(models, optimizers)
        came, brought, home = (
            after[name] - before[name] for name in ("h2d_bytes", "brought_bytes", "d2h_bytes")
        )
        assert home == 3 * weights
        # The states; and the weight whose gradient tells that a backward steps.
        assert 2 * weights <= brought <= 2 * weights + slot * (missing > 0)
        assert 2 * missing <= came <= 2 * missing + 4 * slot * (missing > 0)
        assert not any(pins for *_, pins in manager.state.engine.residents())


@apart
def test_no_copy_is_kept_of_a_weight_that_several_layers_have(device, monkeypatch):
    """Each has a copy of its own, and its gradient comes after the last of them was used."""
    monkeypatch.setattr(stepping, "PART_OF_ARENA", 1)
    managed = wide()
    managed[9].weight = managed[3].weight
    with pair(managed, device, sgd, offload_percent=0.0) as (manager, models, optimizers):
        (unit,) = [layer.unit for layer in manager.layers if layer.name == "9"]
        pinned = []

        def look(_):
            pinned.extend(p for u, *_, p in manager.state.engine.residents() if u == unit)

        def forward(model, x):
            y = model[:7](x)
            if model is managed:
                y.register_hook(look)
            return model[7:](y)

        for number in range(3):
            step_all(models, optimizers, number, device, 128, forward)
            assert_alike(models, optimizers)
        assert pinned == [0] * 3


def wide():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(16)))


@apart
def test_some_batches_wait_for_their_states_while_further_gradients_come(device, monkeypatch):
    monkeypatch.setattr(stepping, "BATCH_BYTES", 2 * 4 * 128**2)  # a weight with its gradient
    monkeypatch.setattr(stepping, "PART_OF_ARENA", 1)
    managed = wide()
    with attached(managed, device, offload_percent=0.0) as manager:
        optimizer = streamed(torch.optim.SGD(managed.parameters(), lr=0.1))
        for _ in range(2):
            home = []
            before = manager.state.engine.stats()["d2h_bytes"]
            x = torch.ones(4, 128).to(device).requires_grad_()
            for layer in managed:
                x.register_hook(
                    lambda _, home=home: home.append(manager.state.engine.stats()["d2h_bytes"])
                )
                x = layer(x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert home.count(before) == stepping.WAITING + 2


@apart
def test_a_copy_that_waits_to_be_stepped_may_be_used_again(device, monkeypatch):
    """By a hook, without grad, before its batch is full, or once it is home."""
    monkeypatch.setattr(stepping, "BATCH_BYTES", 3 * 2 * 4 * 128**2)  # three weights at first
    monkeypatch.setattr(stepping, "PART_OF_ARENA", 1)
    with pair(wide(), device, sgd, offload_percent=0.0) as (_, models, optimizers):
        used = []

        def forward(model, x):
            def use_again(gradient):
                with torch.no_grad():
                    used.extend(layer(x.detach()) for layer in model[8:])

            y = model[:8](x)
            if model is models[0]:
                y.register_hook(use_again)
            return model[8:](y)

        for number in range(2):
            step_all(models, optimizers, number, device, 128, forward)
            assert_alike(models, optimizers)
        assert len(used) == 16


class Again(nn.Module):
    """Layers in checkpointed pairs, some of them twice."""

    order = 0, 1, 2, 3, 4, 5, 3, 2, 1

    def __init__(self):
        super().__init__()
        torch.manual_seed(50)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=bool(i % 2)) for i in range(6))
        self.hook = None

    def forward(self, x):
        for n in range(0, len(self.order), 2):
            x = checkpoint(self.pair, self.order[n : n + 2], x, use_reentrant=False)
            if self.hook is not None:
                x.register_hook(self.hook)
        return x

    def pair(self, numbers, x):
        for number in numbers:
            x = self.layers[number](x).tanh() + x * 0.5
        return x


@apart
def test_a_batch_that_waits_is_brought_again_where_its_unit_is_fetched(sim, monkeypatch):
    """Where it came from the host, too: else it goes home while the unit's copy reads that."""
    monkeypatch.setattr(stepping, "LEAVING", 50)
    sim.slow_link()
    managed = Again()

    def use_two(_):
        with torch.no_grad():
            for number in (0, 5):
                managed.layers[number](torch.ones(1, 32))

    with pair(managed, "cpu", offload_percent=1.0) as (manager, models, optimizers):
        assert len(manager.layers) == 6
        managed.hook = use_two
        for number in range(5):
            step_all(models, optimizers, number, "cpu")
            assert_alike(models, optimizers)


def test_a_model_leaves_while_the_exception_of_its_backward_is_at_hand(device, monkeypatch):
    """Copies that waited to be stepped are in use until then."""
    monkeypatch.setattr(stepping, "PART_OF_ARENA", 1)
    managed = wide()
    manager = oracle_offload.attach(managed, device, offload_percent=0.0)
    optimizer = streamed(torch.optim.SGD(managed.parameters(), lr=0.1))

    def fails(stepper, optimizer, batch):
        raise ZeroDivisionError

    monkeypatch.setattr(stepping.Stepper, "_compute", fails)
    with pytest.raises(ZeroDivisionError) as raised:
        managed(torch.randn(4, 128).to(device).requires_grad_()).square().mean().backward()
    assert raised.value.__traceback__ is not None
    manager.detach()
    assert optimizer is not None


@pytest.mark.parametrize("reentrant", [None, True], ids=["plain", "reentrant"])
def test_with_a_small_arena_units_are_fetched_ahead_while_others_are_stepped(
    sim, monkeypatch, reentrant
):
    """A copy of bytes that are being written would be a race, which the driver reports."""
    monkeypatch.setattr(stepping, "BATCH_BYTES", 4 * 4 * 128**2)
    sim.slow_link(0.05)
    least = 5 * 4 * (128**2 + 128)
    with pair(Deep(reentrant), "cpu", vram_budget=least) as (manager, models, optimizers):
        assert len({layer.unit for layer in manager.layers}) == 10
        ahead = []
        for number in range(5):
            before = manager.state.engine.stats()
            assert_same(*step_all(models, optimizers, number, "cpu", 128))
            after = manager.state.engine.stats()
            assert after["evictions"] > before["evictions"]
            ahead.append(after["prefetches"] - before["prefetches"])
        assert ahead[-1] > 0, ahead
        assert_alike(models, optimizers)


class Deep(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(10))

    def forward(self, x):
        with torch.no_grad():  # what the next step needs first is stepped first
            shift = x
            for layer in self.layers[:-4:-1]:
                shift = layer(shift).tanh()
        x = x + shift
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x).tanh()
            else:
                x = checkpoint(lambda x, f=layer: f(x).tanh(), x, use_reentrant=self.reentrant)
        return x


# ---- copies in the arena that are stepped there ----


def row(depth=24):
    """Layers of which an arena at its floor has two."""
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(32, 32), nn.Tanh())))


def row_step(models, optimizers, number, between=None):
    """A step of each model; `between` is called in the first one's backward, where a part ends."""
    for model, own in zip(models, optimizers, strict=True):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
        x = x.to(next(iter(models[1].parameters())).device)
        for index, layer in enumerate(model):
            x = layer(x)
            if between is not None and model is models[0] and index in (15, 21, 27):
                x.register_hook(between)
        x.square().mean().backward()
        for optimizer in own:
            optimizer.step()
            optimizer.zero_grad()


@apart
@pytest.mark.parametrize(
    ("sizes", "checkpointed"),
    [([32, 8, 32, 64, 32, 32, 32, 32], True), ([64, 32, 32, 8, 8, 64, 8, 32], False)],
)
def test_where_a_unit_has_no_place_copies_that_wait_to_be_stepped_are_given_up(
    device, monkeypatch, sizes, checkpointed
):
    """An arena at its floor, and a batch that is not full before the end."""
    monkeypatch.setattr(stepping, "BATCH_BYTES", 1 << 30)
    monkeypatch.setattr(stepping, "PART_OF_ARENA", 1)
    managed = nn.Sequential(*(nn.Linear(*each) for each in itertools.pairwise(sizes)))
    with pair(managed, device, offload_percent=1.0) as (manager, models, optimizers):
        assert len({layer.unit for layer in manager.layers}) == len(sizes) - 1
        given, own = [], manager.state.give_up_copies
        monkeypatch.setattr(
            manager.state, "give_up_copies", lambda: given.append(own()) or given[-1]
        )

        def forward(model, x):
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            return x

        for number in range(3):
            step_all(models, optimizers, number, device, sizes[0], forward)
            assert_alike(models, optimizers)
        assert given and all(given)
        assert not any(pins for *_, pins in manager.state.engine.residents())
        assert not manager.state.kept_bytes


@apart
def test_where_a_unit_has_no_place_uses_that_wait_for_a_gradient_end(device, monkeypatch):
    """Each of the first two is used twice: its gradient comes when what is between has computed."""
    monkeypatch.setattr(stepping, "PART_OF_ARENA", 1)
    sizes = [(32, 32), (32, 32), (32, 52), (52, 32), (32, 4)]
    managed = nn.Sequential(*(nn.Linear(*each) for each in sizes))
    with pair(managed, device, offload_percent=1.0) as (manager, models, optimizers):
        assert len({layer.unit for layer in manager.layers}) == 5

        def forward(model, x):
            return model[4](model[:2](model[:4](x)))  # the gradient of the last is the first

        for number in range(3):
            step_all(models, optimizers, number, device, forward=forward)
            assert_alike(models, optimizers)
        assert not any(pins for *_, pins in manager.state.engine.residents())
        assert not manager.state.kept_bytes


def test_the_witness_lets_a_step_in_backward_copy_what_is_not_locked(device):
    with pair(Net(), device, lock="never") as (manager, models, optimizers):
        assert len(manager.layers) == 4
        managed, resident = models
        for number in range(2):
            with Witness() as witness:
                backward(managed, number, device)
            assert witness.arena_reads
            backward(resident, number, device)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_alike(models, optimizers)


def assert_same_row(models):
    ours, theirs = ([p.detach().cpu() for p in model.parameters()] for model in models)
    assert_same(ours, theirs, "parameters")


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_a_copy_that_is_on_its_way_is_stepped_once_it_is_there(device, percent):
    """An optimizer for each Parameter: many copies are fetched ahead, and used by nothing."""
    managed = row()
    resident = copy.deepcopy(managed).to(device)
    with attached(managed, device, offload_percent=percent) as manager:
        assert len(manager.layers) == 24
        models = managed, resident
        optimizers = [[torch.optim.AdamW([p], lr=0.01) for p in m.parameters()] for m in models]
        for optimizer in optimizers[0]:
            streamed(optimizer)
        for number in range(3):
            row_step(models, optimizers, number)
            assert_same_row(models)


def test_of_two_optimizers_of_one_unit_none_steps_what_took_its_place(device, monkeypatch):
    monkeypatch.setattr(
        manager_of, "group_units", lambda all: [list(all[i : i + 2]) for i in range(0, len(all), 2)]
    )
    managed, teacher = row(), row().requires_grad_(False)
    resident = copy.deepcopy(managed).to(device)
    with attached(managed, device, offload_percent=0.2), attached(teacher, device):
        optimizers = []
        for model in (managed, resident):
            layers = [layer for layer in model if isinstance(layer, nn.Linear)]
            second = [layers[number] for number in (21, 19, 1)]
            parts = [layer for layer in layers if layer not in second], second
            optimizers.append(
                [
                    torch.optim.AdamW([p for layer in part for p in layer.parameters()], lr=0.01)
                    for part in parts
                ]
            )
        for optimizer in optimizers[0]:
            streamed(optimizer)

        def evict(gradient):
            with torch.no_grad():
                teacher(torch.ones(1, 32).to(device))

        for number in range(3):
            row_step((managed, resident), optimizers, number, evict)
            assert_same_row((managed, resident))


@pytest.mark.parametrize("during_backward", [True, False])
def test_what_code_writes_after_the_step_of_a_weight_is_what_the_next_forward_has(
    device, during_backward
):
    managed, fresh = row(10), row(10).to(device)
    with attached(managed, device, offload_percent=0.0):
        optimizer = torch.optim.SGD(managed.parameters(), lr=0.1, momentum=0.9)
        stream_optimizer(optimizer, during_backward=during_backward)
        weight = managed[18].weight

        def write(gradient):
            with torch.no_grad():
                weight.mul_(0.5)

        x = torch.randn(4, 32).to(device)
        for number in range(3):
            y = managed[:2](x)
            if number == 2:
                y.register_hook(write)
            managed[2:](y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for here, there in zip(managed.parameters(), fresh.parameters(), strict=True):
                there.copy_(here)
            assert_same(managed(x), fresh(x))


@apart
def test_every_optimizer_gives_up_its_copies(device, monkeypatch):
    """Two step one unit: what one of them ends there, the other must not step in place."""
    monkeypatch.setattr(stepping, "BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(stepping, "PART_OF_ARENA", 1)
    managed = Late()
    with attached(managed, device, offload_percent=0.0) as manager:
        parts = [[p for p in managed.parameters() if p.dim() == n] for n in (2, 1)]
        optimizers = [streamed(torch.optim.SGD(part, lr=0.1)) for part in parts]
        state, seen = manager.state, []

        def give_up(gradient):
            steppers = set(state.steppers.values())
            seen.append(sum(bool(stepper._rewritten) for stepper in steppers))
            assert state.give_up_copies()
            seen.append(sum(bool(stepper._rewritten) for stepper in steppers))

        y = managed.layers[0](torch.ones(4, 32).to(device))
        y.register_hook(give_up)
        for layer in managed.layers[1:]:
            y = layer(y).tanh()
        y.square().mean().backward()
        assert seen == [2, 0]
        for optimizer in optimizers:
            optimizer.step()
