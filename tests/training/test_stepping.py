"""Optimizers that are streamed: the bits of the resident model, and one step to who looks on."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import pickle
import random
from typing import ClassVar

import numpy as np
import pytest
import torch
from equality import assert_same, attached, gradients, is_simulated
from models import Tower
from test_late_gradients import Tied
from test_thread_state import StopsAt, are_same
from torch import nn
from torch.utils._pytree import tree_map

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.engine import simulator
from oracle_offload.model.witness import Witness
from oracle_offload.train import stepping, stream_optimizer
from oracle_offload.train.micro_batches.thread_state import Generators
from oracle_offload.train.step_seconds import predict

WEIGHTS = 3  # of `Tied`, without biases


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """A weight and its bias at a time."""
    monkeypatch.setattr(stepping, "BATCH_BYTES", 12000)


class Net(Tied):
    """With something that stays on the device."""

    def __init__(self, reentrant=None):
        super().__init__(reentrant)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        return super().forward(self.norm(x))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[:3]}, {"params": p[3:], "lr": 0.1, "weight_decay": 0.0}], lr=0.01
    ),
}


@contextlib.contextmanager
def streamed(managed, device, make, **options):
    """Attach, and yield the manager, the model with its resident twin, and optimizers of both."""
    models = managed, copy.deepcopy(managed).to(device)
    with attached(managed, device, **options) as manager:
        optimizers = [make(list(model.parameters())) for model in models]
        assert stream_optimizer(optimizers[0]) is optimizers[0]
        yield manager, models, optimizers


def step_both(optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train_both(models, optimizers, number, device):
    """A step of each, by gradients of its own."""
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(model, number, device)
        optimizer.step()
        optimizer.zero_grad()


def cloned(state):
    """A copy of a state dict: the tests' own device type has no copies of storages."""
    return tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, state)


def backward(model, number, device):
    torch.manual_seed(number)
    loss = model(torch.randn(4, 32).to(device).requires_grad_()).square().mean()
    loss.backward()
    return loss.detach()


def assert_alike(models, optimizers):
    one, other = ({n: p.detach().cpu() for n, p in m.named_parameters()} for m in models)
    assert_same(one, other, "parameters")
    one, other = (optimizer.state_dict() for optimizer in optimizers)
    assert list(one["state"]) == list(other["state"])
    assert one["param_groups"] == other["param_groups"]
    for key, state in other["state"].items():
        assert list(one["state"][key]) == list(state)
        assert_same(one["state"][key], state, f"state of {key}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_have_the_resident_bits(device, name):
    if "fused" in name and device == "simgpu":
        pytest.skip("torch has no fused kernels for this type of device")
    managed = Net(reentrant=name == "groups" or None)
    with streamed(managed, device, OPTIMIZERS[name]) as (manager, models, optimizers):
        assert len(manager.layers) == 4
        assert isinstance(optimizers[0], type(optimizers[1]))
        for number in range(4):
            losses = [backward(model, number, device) for model in models]
            assert_same(*losses)
            before = manager.state.engine.stats()
            step_both(optimizers)
            after = manager.state.engine.stats()
            assert after["host_waits"] - before["host_waits"] == 1
            assert after["brought_bytes"] - before["brought_bytes"] >= 2 * 4 * WEIGHTS * 32**2
            assert after["d2h_bytes"] - before["d2h_bytes"] >= 4 * WEIGHTS * 32**2
            assert_alike(models, optimizers)
        at = managed.first.weight.data_ptr()
        assert manager.state.engine.is_locked(at, 4 * 32**2)
        for value in optimizers[0].state[managed.first.weight].values():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                assert manager.state.engine.is_locked(value.data_ptr(), 4 * value.numel())


def a_stack(layers=8, side=64):
    """Some with a bias; of 64 a side several share a unit, of 128 each has its own."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(side, side, bias=bool(n % 2)) for n in range(layers)))


def both(models, device, seed, part=1.0):
    """Run both backward, with a graph each, and compare outputs and gradients."""
    torch.manual_seed(seed)
    x = torch.randn(4, next(models[0].parameters()).shape[1])
    outputs = []
    for model in models:
        y = model(x.to(device).requires_grad_())
        (y.square().mean() * part).backward()
        outputs.append(y.detach().cpu())
    assert_same(*outputs, "outputs")
    assert_same(*(gradients(model) for model in models), "gradients")


def copied(manager):
    """What units have brought to the device."""
    return manager.state.engine.stats()["h2d_bytes"]


@contextlib.contextmanager
def nothing_touches_masters(witness):
    if not witness:
        yield
        return
    with Witness() as seen:
        yield
    assert seen.arena_reads


@pytest.mark.parametrize("name", ["adamw foreach", "momentum"])
@pytest.mark.parametrize("witness", [False, True], ids=["alone", "witness"])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["nockpt", "reentrant", "ckpt"])
def test_weights_stay_in_the_arena_over_rounds_and_steps(device, reentrant, witness, name):
    """They come once, are stepped in place, and the next forward begins with them."""
    if witness and not device.startswith("cpu"):
        pytest.skip("torch's own device types see to it")
    layers = a_stack()
    managed = Tower(*(layers[n : n + 2] for n in range(0, 8, 2)), reentrant=reentrant)
    weights = sum(p.nbytes for p in managed.parameters())
    run = streamed(managed, device, OPTIMIZERS[name], offload_percent=0.0)
    with run as (manager, models, optimizers):
        assert len(manager.layers) == 8
        for step in range(3):
            for number in range(3):
                before = copied(manager)
                with nothing_touches_masters(witness):
                    both(models, device, 3 * step + number, 0.5)
                came = copied(manager) - before
                assert came == 0 if step or number else came >= weights
            before = manager.state.engine.stats()
            step_both(optimizers)
            after = manager.state.engine.stats()
            states = 0 if step == 0 else {"adamw foreach": 2, "momentum": 1}[name]
            assert after["brought_bytes"] - before["brought_bytes"] == (1 + states) * weights
            assert after["h2d_bytes"] == before["h2d_bytes"]
            assert after["host_waits"] - before["host_waits"] == 1
            assert_alike(models, optimizers)
        assert not any(pins for *_, pins in manager.state.engine.residents())


def test_with_half_an_arena_the_step_brings_what_is_not_there(device):
    managed = a_stack(12, 128)
    weights = sum(p.nbytes for p in managed.parameters())
    run = streamed(managed, device, OPTIMIZERS["adamw"], offload_percent=0.5)
    with run as (manager, models, optimizers):
        assert len({layer.unit for layer in manager.layers}) == 12
        missing = weights - manager.attachment.arena.capacity_bytes
        assert weights / 4 < missing < weights / 2
        for step in range(5):
            before = manager.state.engine.stats()
            for number in range(2):
                both(models, device, 2 * step + number, 0.5)
            step_both(optimizers)
            after = manager.state.engine.stats()
            assert_alike(models, optimizers)
        brought = after["brought_bytes"] - before["brought_bytes"]
        # The gradients' sum, to add to it and to step; states; and of the weights what was gone.
        slot = weights / 12
        assert missing <= brought - 4 * weights < missing + 2 * slot
        # In two rounds a forward and a backward bring what is not there.
        came = after["h2d_bytes"] - before["h2d_bytes"]
        assert 4 * missing <= came < 4 * (missing + slot)


def write_a_version(model, manager):
    with torch.no_grad():
        model[3].weight[5] += 1.0


def write_through_data(model, manager):
    model[3].weight.data.mul_(2.0)


def replace_data(model, manager):
    model[3].weight.data = model[3].weight.data * 2.0


def write_rows_in_writing(model, manager):
    with contextlib.nullcontext() if manager is None else manager.writing():
        model[3].weight.data[7] += 1.0


def step_by_another(model, manager):
    weight = model[3].weight
    grad, weight.grad = weight.grad, torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()
    weight.grad = grad


def load_a_state(model, manager):
    state = cloned(model.state_dict())
    model.load_state_dict({name: value.cpu() * 2 for name, value in state.items()})


WRITES = {
    "version": write_a_version,
    "data": write_through_data,
    "replaced": replace_data,
    "writing": write_rows_in_writing,
    "another optimizer": step_by_another,
    "loaded": load_a_state,
}


@pytest.mark.parametrize("when", ["before the step", "before forward"])
@pytest.mark.parametrize("write", WRITES)
def test_what_code_writes_is_stepped_and_computed_with(device, write, when):
    """As of frozen weights, whose copies stay as well."""
    if write == "another optimizer" and not is_simulated(device):
        pytest.skip("steps on the host have its bits")
    run = streamed(a_stack(), device, OPTIMIZERS["adamw"], offload_percent=0.0)
    with run as (manager, models, optimizers):
        for step in range(3):
            both(models, device, step)
            if when == "before forward":
                step_both(optimizers)
            for model, its in zip(models, (manager, None), strict=True):
                WRITES[write](model, its)
            if when == "before the step":
                step_both(optimizers)
            assert_alike(models, optimizers)


@pytest.mark.parametrize("gone", ["optimizer", "group"])
def test_copies_are_trusted_only_while_something_answers_for_them(device, gone):
    """Rows that code writes by hand, of which samples may miss all, are seen as without it."""
    torch.manual_seed(0)
    managed = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    resident = copy.deepcopy(managed).to(device)
    models = managed, resident
    x = torch.ones(2, 512)
    with attached(managed, device, offload_percent=0.0) as manager:
        optimizer = stream_optimizer(torch.optim.SGD(managed.parameters(), lr=0.0))
        managed(x.to(device)).sum().backward()
        optimizer.step()
        before = copied(manager)
        managed(x.to(device)).sum().backward()
        assert copied(manager) == before
        if gone == "optimizer":
            del optimizer
        else:
            optimizer.param_groups[0]["params"].pop(0)
            optimizer.step()
        for row in range(3, 512, 101):
            found = []
            for model in models:
                y = model(x.to(device))
                y.sum().backward()
                model[0].weight.data[row] += 1.0
                found.append(y.detach().cpu())
            assert_same(*found)


class FailsOnce(torch.optim.AdamW):
    """Raises in one of its steps, before or after it has written what it is given."""

    calls: ClassVar[list[int]] = []
    fails_at = 0
    writes = False

    def step(self, closure=None):
        FailsOnce.calls += [1] if FailsOnce.fails_at else []  # and not in the trial
        fails = len(FailsOnce.calls) == FailsOnce.fails_at > 0
        if FailsOnce.writes or not fails:
            super().step(closure)
        if fails:
            raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("writes", [False, True], ids=["before it writes", "after"])
@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_an_error_says_whether_the_step_was_completed(device, monkeypatch, fails_at, writes):
    """Who catches it and tries again must not step twice; where nothing is stepped, he may.

    A copy that was stepped by half is not trusted: the master at home is stepped again.
    """
    run = streamed(a_stack(), device, lambda p: FailsOnce(p, lr=0.1), offload_percent=0.0)
    with run as (manager, models, (ours, theirs)):
        both(models, device, 0)
        theirs.step()
        FailsOnce.calls.clear()
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError) as caught:
            patch.setattr(FailsOnce, "fails_at", fails_at)
            patch.setattr(FailsOnce, "writes", writes)
            ours.step()
        assert not any(pins for *_, pins in manager.state.engine.residents())
        notes = getattr(caught.value, "__notes__", [])
        assert ["FailsOnce was completed" in note for note in notes] == [True] * (fails_at > 1)
        if not notes:
            ours.step()
        assert_alike(models, (ours, theirs))
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        both(models, device, 1)


def test_all_that_trainers_do_around_a_step(device):
    """Accumulation, clipping, a scheduler from before, hooks, a closure, an average, a scaler."""
    managed = Net(reentrant=False)
    models, seen = (managed, copy.deepcopy(managed).to(device)), ([], [])
    with attached(managed, device):
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        schedulers = [torch.optim.lr_scheduler.LinearLR(one, 0.1, 1.0, 3) for one in optimizers]
        stream_optimizer(optimizers[0])
        scalers = [
            torch.amp.GradScaler(torch.device(device).type, init_scale=4.0, growth_interval=2)
            for _ in models
        ]
        for optimizer, notes in zip(optimizers, seen, strict=True):
            optimizer.register_step_post_hook(lambda *_, notes=notes: notes.append("after"))
            optimizer.register_step_pre_hook(lambda *_, notes=notes: notes.append("before"))
        averages = [cloned(model.state_dict()) for model in models]
        for number in range(4):
            for model, optimizer, scheduler, scaler, average in zip(
                models, optimizers, schedulers, scalers, averages, strict=True
            ):
                for part in range(2):
                    torch.manual_seed(10 * number + part)
                    loss = model(torch.randn(4, 32).to(device)).square().mean()
                    scaler.scale(loss).backward()
                if number == 1:
                    model.body[0].weight.grad[0, 0] = float("inf")
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for key, value in model.state_dict().items():
                        average[key].lerp_(value.to(average[key].device), 0.1)
            assert scalers[0].get_scale() == scalers[1].get_scale()
            assert_alike(models, optimizers)
        assert seen[0] == seen[1] == 3 * ["before", "after"]
        assert_same({k: v.cpu() for k, v in averages[0].items()}, averages[1])
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):

            def closure(model=model):
                return backward(model, 9, device)

            losses.append(optimizer.step(closure))
        assert_same(*losses)
        assert_alike(models, optimizers)
        torch.manual_seed(10)
        x = torch.randn(4, 32).to(device)
        assert_same(*(model(x).detach().cpu() for model in models), "a forward with what is new")


def test_states_load_in_plain_torch_and_back_in_place(device):
    make = OPTIMIZERS["adamw"]
    with streamed(Net(), device, make) as (manager, models, optimizers):
        managed, resident = models
        train_both(models, optimizers, 0, device)
        plain = make(resident.parameters())
        plain.load_state_dict(cloned(optimizers[0].state_dict()))
        assert_same(plain.state_dict()["state"], optimizers[1].state_dict()["state"])
        kept = cloned(optimizers[0].state_dict())
        where = optimizers[0].state[managed.first.weight]["exp_avg"].data_ptr()
        weights = cloned(managed.state_dict())
        backward(managed, 1, device)
        optimizers[0].step()
        managed.load_state_dict(weights)
        optimizers[0].load_state_dict(kept)
        assert optimizers[0].state[managed.first.weight]["exp_avg"].data_ptr() == where
        assert_alike(models, optimizers)
        assert manager.state.engine.is_locked(where, 4 * 32**2)
        managed.zero_grad()
        train_both(models, optimizers, 2, device)
        assert_alike(models, optimizers)
        torch.save(optimizers[0].state_dict(), io.BytesIO())


@pytest.mark.parametrize("again", [False, True], ids=["a new one", "the same"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_of_a_state_are_where_a_load_puts_the_residents(device, dtype, again):
    """Torch casts all but the step to the Parameter's type, and brings them to its device."""
    with streamed(Net().to(dtype), device, OPTIMIZERS["nadam"]) as (_, models, optimizers):
        for number in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                torch.manual_seed(number)
                x = torch.randn(4, 32).to(device, dtype).requires_grad_()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_alike(models, optimizers)
            saved = [cloned(optimizer.state_dict()) for optimizer in optimizers]
            if not again:
                optimizers = [OPTIMIZERS["nadam"](list(model.parameters())) for model in models]
                stream_optimizer(optimizers[0])
            for optimizer, state in zip(optimizers, saved, strict=True):
                optimizer.load_state_dict(state)


def views_of(saved):
    """A dict of states with other tensors in the same memory."""
    return {
        **saved,
        "state": {
            key: {name: value.detach() for name, value in state.items()}
            for key, state in saved["state"].items()
        },
    }


HOLDERS = {
    "state_dict": lambda one: one.state_dict(),
    "inner dicts": lambda one: dict(one.state_dict()),
    "tensors": lambda one: tree_map(lambda each: each, one.state_dict()),
    "views": lambda one: views_of(one.state_dict()),
}


@pytest.mark.parametrize("hold", HOLDERS)
def test_what_somebody_holds_of_the_states_is_as_before_after_another_load(device, hold):
    """Saved without a copy, others loaded, and the saved ones loaded again."""
    with streamed(Net(), device, OPTIMIZERS["adamw"]) as (_, models, optimizers):
        train_both(models, optimizers, 0, device)
        for optimizer in optimizers:
            saved = HOLDERS[hold](optimizer)
            other = cloned(saved)
            for state in other["state"].values():
                state["exp_avg"].zero_()
            optimizer.load_state_dict(other)
            assert not optimizer.state_dict()["state"][0]["exp_avg"].any()
            optimizer.load_state_dict(saved)
        assert_alike(models, optimizers)
        train_both(models, optimizers, 1, device)
        assert_alike(models, optimizers)


def test_a_checkpoint_holds_them_and_the_run_goes_on_alike(device, tmp_path):
    make = OPTIMIZERS["adamw"]
    with streamed(Net(), device, make) as (manager, models, optimizers):
        managed, resident = models
        backward(managed, 0, device)
        optimizers[0].step()
        oracle_offload.train.Checkpoint(tmp_path / "a", managed, optimizer=optimizers[0]).save(1)
        fresh = stream_optimizer(make(managed.parameters()))
        backward(managed, 1, device)
        fresh.step()
        managed.zero_grad()
        mine = oracle_offload.train.Checkpoint(tmp_path / "a", managed, optimizer=fresh)
        theirs = oracle_offload.train.Checkpoint(tmp_path / "a", resident, optimizer=optimizers[1])
        assert mine.load() == theirs.load() == 1
        assert_alike(models, (fresh, optimizers[1]))
        newest = stream_optimizer(make(managed.parameters()))
        oracle_offload.train.Checkpoint(tmp_path / "a", managed, optimizer=newest).load()
        train_both(models, (newest, optimizers[1]), 2, device)
        assert_alike(models, (newest, optimizers[1]))
        first = newest.state[managed.first.weight]["exp_avg"]
        assert manager.state.engine.is_locked(first.data_ptr(), 4 * 32**2)


def test_states_that_a_step_on_the_host_has_made_are_taken_along(device):
    managed = Net()
    models = managed, copy.deepcopy(managed).to(device)
    with attached(managed, device):
        optimizers = [OPTIMIZERS["momentum"](list(model.parameters())) for model in models]
        for number in range(3):
            for model in models:
                backward(model, number, device)
            if number == 1:
                stream_optimizer(optimizers[0])
            if number or is_simulated(device):
                for optimizer in optimizers:
                    optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        assert_alike(models, optimizers)


def test_after_detach_it_steps_as_plain_torch_and_after_a_new_attachment_on_the_device(device):
    with streamed(Net(), device, OPTIMIZERS["adamw"]) as (_, models, optimizers):
        train_both(models, optimizers, 0, device)
    managed, resident = models
    if is_simulated(device):  # a card's resident model stays there, and rounds otherwise
        for name, p in managed.named_parameters():
            p.grad = torch.ones_like(p)
            other = resident.get_parameter(name)
            other.grad = torch.ones_like(other)
        step_both(optimizers)
        assert_alike(models, optimizers)
        with pytest.raises(OffloadError, match="trains no managed Parameter"):
            stream_optimizer(optimizers[0])
    with attached(managed, device) as manager:
        assert stream_optimizer(optimizers[0]) is optimizers[0]
        before = manager.state.engine.stats()["brought_bytes"]
        train_both(models, optimizers, 1, device)
        after = manager.state.engine.stats()["brought_bytes"]
        assert after - before >= 2 * 4 * WEIGHTS * 32**2
        assert_alike(models, optimizers)


class KeepsAll(torch.optim.SGD):
    """Its copies have every attribute."""

    def __getstate__(self):
        return self.__dict__


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "pickle 0": lambda one: pickle.loads(pickle.dumps(one, 0)),
    "torch.save": lambda one: save_and_load(one),
}


def save_and_load(one):
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, KeepsAll])
def test_a_copy_is_an_optimizer_that_is_not_streamed(sim, kind, how):

    def make(parameters):
        optimizer = kind(parameters, lr=0.1)
        if kind is not KeepsAll:  # a scheduler's step in its place cannot be copied of any
            torch.optim.lr_scheduler.ConstantLR(optimizer)
        return optimizer

    with streamed(Net(), "cpu", make) as (_, models, (ours, theirs)):
        train_both(models, (ours, theirs), 0, "cpu")
        one, other = COPIES[how](ours), copy.deepcopy(theirs)
        assert type(one) is kind and type(ours) is not kind
        assert stepping.STEPPER not in one.__dict__
        for optimizer in (one, other):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.ones_like(p)
            optimizer.step()
        mine, its = (optimizer.param_groups[0]["params"] for optimizer in (one, other))
        for p, q in zip(mine, its, strict=True):
            assert_same(p.detach(), q.detach())
        assert_same(one.state_dict()["state"], other.state_dict()["state"])
        train_both(models, (ours, theirs), 1, "cpu")
        assert_alike(models, (ours, theirs))


def test_an_interrupt_at_one_line_in_many_steps_nothing_twice(device):
    """The call is completed, or nothing was stepped yet, or no further step is taken."""
    make = OPTIMIZERS["adamw foreach"]
    with streamed(Net(), device, make) as (manager, (managed, resident), (ours, theirs)):
        for model in (managed, resident):
            backward(model, 0, device)
        ours.step()
        theirs.step()
        before = [cloned(managed.state_dict()), cloned(ours.state_dict())]
        theirs.step()
        after = {name: p.detach().cpu() for name, p in resident.named_parameters()}
        ends = {"completed": 0, "untouched": 0, "refused": 0}
        nth, finished, other = 0, False, copy.deepcopy(resident)
        while not finished:
            with torch.no_grad():  # loading may make Parameters of others, without gradients
                for key, value in managed.state_dict().items():
                    value.copy_(before[0][key])
            ours.load_state_dict(cloned(before[1]))
            finished = not StopsAt(nth, "line", stepping).stops(ours.step)
            nth += 31 if device == "cpu" else 97
            stepper = ours.__dict__[stepping.STEPPER]
            now = {name: p.detach().cpu() for name, p in managed.named_parameters()}
            if stepper.unfinished:
                with pytest.raises(OffloadError, match="it takes no further step"):
                    ours.step()
                stepper.unfinished = False
                ends["refused"] += 1
            elif all(torch.equal(now[key], after[key]) for key in now):
                assert float(ours.state[managed.first.weight]["step"]) == 2
                ends["completed"] += 1
            else:
                assert_same(now, {key: before[0][key].cpu() for key in now})
                ends["untouched"] += 1
            with torch.no_grad():  # whatever became of the step, copies are what masters are
                other.load_state_dict(cloned(managed.state_dict()))
                x = torch.ones(4, 32).to(device)
                assert_same(managed(x), other(x))
        assert ends["completed"] > 5 and ends["untouched"] > 0 and ends["refused"] <= 1, ends
        assert nth > 1000
        manager.state.engine.settle()


class Prodigal(torch.optim.SGD):
    """What it does for one Parameter depends on the others."""

    def step(self, closure=None):
        norm = sum(
            p.grad.square().sum()
            for g in self.param_groups
            for p in g["params"]
            if p.grad is not None
        )
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = float(1 / (1 + norm))
        super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


class WritesAnOption(torch.optim.SGD):
    """The same one by one as together, and lost by batches that have other groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["n"] = group["warm"] = self.state[p].get("n", 0) + 1


def test_a_step_that_cannot_be_completed_is_the_last(device, monkeypatch):
    managed = Net()
    with attached(managed, device):
        optimizer = stream_optimizer(torch.optim.SGD(managed.parameters(), lr=0.1))
        backward(managed, 0, device)
        arrive = stepping.Stepper._arrive

        def fails(stepper):
            arrive(stepper)
            raise OSError("a fault that lasts")

        with monkeypatch.context() as patched:
            patched.setattr(stepping.Stepper, "_arrive", fails)
            with pytest.raises(OSError, match="that lasts"):
                optimizer.step()
        with pytest.raises(OffloadError, match="it takes no further step"):
            optimizer.step()


class NeedsAClosure(torch.optim.SGD):
    def step(self, closure):
        closure()
        return super().step()


def test_what_cannot_be_streamed_is_refused_by_name(device):
    managed = Net()
    with attached(managed, device):
        own = list(managed.parameters())
        for make, why in (
            (torch.optim.LBFGS, "LBFGS cannot be streamed: .* '_params' holds"),
            (WritesAnOption, "WritesAnOption cannot be streamed: .* option 'warm' of a group"),
            (NeedsAClosure, "NeedsAClosure cannot be streamed: .* closure"),
            (lambda p: Prodigal(p, lr=0.1), "Prodigal cannot be streamed: it steps small"),
            (
                lambda p: torch.optim.AdamW(p, capturable=True),
                r"AdamW\(capturable=True\) cannot be streamed",
            ),
            (
                lambda p: torch.optim.SGD([p[-1]], lr=0.1),
                "SGD trains no managed Parameter",
            ),
        ):
            optimizer = make(own)
            with pytest.raises(OffloadError, match=why):
                stream_optimizer(optimizer)
            assert type(optimizer) is type(make(own))
            assert stepping.STEPPER not in optimizer.__dict__
        optimizer = torch.optim.SGD(own, lr=0.1)
        optimizer.is_paged = True
        with pytest.raises(OffloadError, match="its states are paged"):
            stream_optimizer(optimizer)
        optimizer = torch.optim.SGD(own, lr=0.1)
        optimizer.step = lambda: None
        with pytest.raises(OffloadError, match="another step into this object"):
            stream_optimizer(optimizer)
    with pytest.raises(TypeError, match=r"object is not a torch\.optim\.Optimizer"):
        stream_optimizer(object())


class Own(torch.optim.Optimizer):
    """Plain descent; each class below does one thing more."""

    def __init__(self, params, **defaults):
        super().__init__(params, {"lr": 0.1, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(group, p)

    def one(self, group, p):
        p.sub_(group["lr"] * p.grad)


class KeepsMomentum(Own):
    def __init__(self, params):
        super().__init__(params)
        self.momenta = {}

    def one(self, group, p):
        momentum = self.momenta.setdefault(p, torch.zeros_like(p))
        p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=group["lr"])


class Keeps(Own):
    """Each step changes an attribute; a tenth step that differs is beyond any short trial."""

    def __init__(self, params, kept, change):
        super().__init__(params)
        self.kept, self.change = kept, change

    def step(self, closure=None):
        self.change(self)
        super().step()


class CountsInItsClass(Own):
    counts: ClassVar = [0]

    def one(self, group, p):
        self.counts[0] += 1
        super().one(group, p)


class HoldsAnother(Own):
    def __init__(self, params):
        params = list(params)
        super().__init__(params)
        self.base = torch.optim.SGD(params, lr=0.1)

    def step(self, closure=None):
        self.base.step()


def add_one(one):
    one.kept += 1


def turn(one):
    one.kept = not one.kept


KEEPERS = {
    "momenta": (KeepsMomentum, "'momenta'"),
    "a number": (lambda p: Keeps(p, 0, add_one), "'kept'"),
    "an iterator": (lambda p: Keeps(p, itertools.count(), lambda one: next(one.kept)), "'kept'"),
    "a tensor": (lambda p: Keeps(p, torch.zeros(1), add_one), "'kept'"),
    "a switch": (lambda p: Keeps(p, False, turn), "'kept'"),
    "in its class": (CountsInItsClass, "'counts'"),
    "another": (HoldsAnother, "'base' holds"),
    "parameters": (lambda p: Keeps(p, [p], lambda one: None), "'kept' holds"),
}


@pytest.mark.parametrize("what", KEEPERS)
def test_what_keeps_something_on_itself_is_refused_and_the_trial_leaves_nothing(device, what):
    make, attribute = KEEPERS[what]
    managed = Net()
    with attached(managed, device):
        optimizer = make(list(managed.parameters()))
        kind = type(optimizer)
        backward(managed, 0, device)
        before = cloned(managed.state_dict())
        with pytest.raises(OffloadError, match=f"{kind.__name__} cannot.* attribute {attribute}"):
            stream_optimizer(optimizer)
        assert type(optimizer) is kind
        assert_same(managed.state_dict(), before)
        assert not getattr(optimizer, "momenta", None)
        if what in ("a number", "a tensor", "a switch"):
            assert not optimizer.kept
        optimizer.zero_grad()


class Draws(Own):
    """Rounding at random draws a number for each element; in the order of the trial, the same."""

    def __init__(self, params, draw):
        super().__init__(params)
        self.draw = draw

    def one(self, group, p):
        self.draw(p)
        super().one(group, p)


class DrawsFromItsOwn(Own):
    def __init__(self, params):
        super().__init__(params)
        self.generator = torch.Generator()

    def one(self, group, p):
        p.add_(torch.randn(1, generator=self.generator).item())


DRAWS = {
    "of the device": lambda p: p.add_(torch.randn_like(p)),
    "of the host": lambda p: p.add_(torch.randn(1)[0].item()),
    "of Python": lambda p: p.add_(random.random()),
    "of numpy": lambda p: p.add_(float(np.random.random())),
}


@pytest.mark.parametrize("of", DRAWS)
def test_what_draws_random_numbers_is_refused_and_none_are_used_up(device, of):
    managed = Net()
    with attached(managed, device):
        before = Generators([torch.device(device)]).now()
        with pytest.raises(OffloadError, match="Draws cannot be streamed: its step draws"):
            stream_optimizer(Draws(managed.parameters(), DRAWS[of]))
        assert are_same(before, Generators([torch.device(device)]).now())
        optimizer = DrawsFromItsOwn(managed.parameters())
        state = optimizer.generator.get_state()
        with pytest.raises(OffloadError, match="changes the attribute 'generator'"):
            stream_optimizer(optimizer)
        assert torch.equal(state, optimizer.generator.get_state())


class CouplesLargeOnes(Own):
    """As those that keep statistics of large tensors alone."""

    def __init__(self, params, least):
        super().__init__(params)
        self.least = least

    def step(self, closure=None):
        large = [
            p.grad.norm()
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and p.dim() and self.is_large(p)
        ]
        self.param_groups[0]["lr"] = 0.1 / (1 + float(sum(large)))
        super().step()
        self.param_groups[0]["lr"] = 0.1

    def is_large(self, p):
        return p.numel() >= self.least if p.dim() == 1 else sorted(p.shape)[-2] >= self.least


@pytest.mark.parametrize(
    ("make", "least"),
    [
        (lambda: nn.Linear(160, 130, bias=False), 128),
        (lambda: nn.Conv2d(130, 140, 3, bias=False), 128),
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(5000)), 4096),
    ],
)
def test_what_couples_only_large_parameters_is_refused(device, make, least):
    managed = make()
    own = [p for p in managed.parameters() if p.shape != (16,) and p.shape != (16, 16)]
    with attached(managed, device):
        own = own if len(own) == 1 else [managed[0].weight, *own]
        with pytest.raises(OffloadError, match="CouplesLargeOnes cannot be streamed: it steps sm"):
            stream_optimizer(CouplesLargeOnes(own, least))


class Marks(Own):
    """As torch's fused ones and bitsandbytes do; what the first step prepares may come again."""

    ready = False

    def one(self, group, p):
        self.ready = True
        super().one(group, p)


def test_a_mark_of_the_first_step_is_accepted(device):
    with streamed(Net(), device, Marks) as (_, models, optimizers):
        train_both(models, optimizers, 0, device)
        assert_alike(models, optimizers)


class BeginsSlowly(Marks):
    """Its first step, which is a tenth of others, has been made once the last one is stepped."""

    def one(self, group, p):
        p.sub_(group["lr"] * (1.0 if self.ready else 0.1) * p.grad)
        self.ready |= p is self.param_groups[-1]["params"][-1]


def test_what_goes_by_a_mark_of_the_first_step_is_refused(device):
    """Each batch would begin again."""
    managed = Net()
    with attached(managed, device):
        optimizer = BeginsSlowly(managed.parameters())
        with pytest.raises(OffloadError, match="BeginsSlowly cannot be streamed: it steps small"):
            stream_optimizer(optimizer)


def test_a_sparse_gradient_is_refused_and_nothing_is_stepped(device):
    if device == "simgpu":
        pytest.skip("torch has no sparse tensors for this type of device")
    managed = nn.Sequential(nn.Embedding(64, 32, sparse=True), nn.Linear(32, 32))
    with attached(managed, device):
        optimizer = stream_optimizer(torch.optim.SGD(managed.parameters(), lr=0.1))
        before = cloned(managed.state_dict())
        managed(torch.arange(4, device=device)).sum().backward()
        with pytest.raises(OffloadError, match="has a sparse gradient"):
            optimizer.step()
        assert_same(managed.state_dict(), before)


def test_both_directions_of_the_link_work_at_once(sim):
    """The step takes as long as the direction with more bytes, and the last copy home."""
    sim.slow_link(0.01)
    managed = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12))).bfloat16()
    weight = 2 * 64**2
    with attached(managed, "cpu") as manager:
        optimizer = stream_optimizer(torch.optim.AdamW(managed.parameters()))
        for _ in range(2):
            managed(torch.ones(2, 64).bfloat16()).sum().backward()
            before = manager.state.counters()
            optimizer.step()
            after = manager.state.counters()
        # The weights are in the arena: gradients and states come.
        assert after["brought_bytes"] - before["brought_bytes"] == 12 * 3 * weight
        assert after["d2h_bytes"] - before["d2h_bytes"] == 12 * 3 * weight
        least = 12 * 3 * weight / 0.01e9
        last = 3 * weight / 0.01e9
        assert least + last <= after["now_s"] - before["now_s"] < 1.05 * (least + last)


# ---- on the host, or where it is faster ----


def test_on_the_host_it_steps_as_torch_does_there(device):
    managed = Net()
    with attached(managed, device) as manager:
        optimizer = torch.optim.AdamW(managed.parameters(), lr=0.1)
        before = vars(optimizer).keys()
        assert stream_optimizer(optimizer, step="host") is optimizer
        assert type(optimizer) is torch.optim.AdamW and vars(optimizer).keys() == before
        own = [p for layer in manager.layers for p in layer.masters.present]
        assert len(manager.layers) == 4 and all(p.is_cpu for p in own)
        resident = [p.detach().clone().requires_grad_() for p in own]
        on_host = torch.optim.AdamW(resident, lr=0.1)
        for number in range(3):
            backward(managed, number, device)
            for p, q in zip(own, resident, strict=True):
                q.grad = p.grad.clone()
            for one in (optimizer, on_host):
                one.step()
            for p, q in zip(own, resident, strict=True):
                assert_same(p.detach(), q.detach())
                assert_same(optimizer.state[p]["exp_avg_sq"], on_host.state[q]["exp_avg_sq"])
            optimizer.zero_grad()
        assert manager.state.engine.stats()["brought_bytes"] == 0
        ((name, how),) = oracle_offload.memory_summary(device).devices[0].optimizers
        assert (name, how) == ("AdamW", "after backward, on the host: as it was asked to")
        stream_optimizer(optimizer)  # and goes on there
        backward(managed, 9, device)
        optimizer.step()
        assert manager.state.engine.stats()["brought_bytes"] > 0
        with pytest.raises(OffloadError, match="streamed already"):
            stream_optimizer(optimizer, step="host")


LINKS = {"device": 1e9, "host": 1e-9}  # GB/s: the host is neither as fast nor as slow


@pytest.mark.parametrize("where", LINKS)
def test_auto_takes_what_is_faster_and_says_so(sim, caplog, where):
    fast = dict(link_gbps=LINKS[where], memory_gbps=1e9, launch_s=0.0, copy_latency_s=0.0)
    simulator.set_device(0, dataclasses.replace(simulator.get_device(0), **fast))
    managed = Net()
    caplog.set_level("INFO", logger="oracle_offload")
    with attached(managed, "cpu") as manager:
        optimizer = torch.optim.AdamW(managed.parameters())
        given = copy.deepcopy(optimizer.state_dict())
        drawn = torch.get_rng_state()
        assert stream_optimizer(optimizer, step="auto") is optimizer
        assert optimizer.state_dict() == given and torch.equal(torch.get_rng_state(), drawn)
        assert (stepping.STEPPER in vars(optimizer)) is (where == "device")
        if where == "device":
            assert stream_optimizer(optimizer, step="auto") is optimizer
        backward(managed, 0, "cpu")
        optimizer.step()
        assert bool(manager.state.engine.stats()["brought_bytes"]) is (where == "device")
        report = oracle_offload.memory_summary("cpu")
        ((_, how),) = report.devices[0].optimizers
        assert how.startswith(f"after backward, on the {where}: ")
        assert "s are predicted on the device" in how and "s on the host" in how
        assert f"AdamW steps {how}" in caplog.text
        assert "AdamW steps" in str(report) and "AdamW steps" in report.to_html()


def test_what_a_step_is_predicted_to_take(sim):
    """Bytes as a step then moves them, at the rate of the copies before it."""
    sim.slow_link(0.01)
    managed = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(16)))
    weights = 16 * 4 * 128**2
    with attached(managed, "cpu", offload_percent=0.5) as manager:
        capacity = manager.attachment.arena.capacity_bytes
        assert 0 < capacity < weights
        optimizer = torch.optim.AdamW(managed.parameters())
        for _ in range(2):
            managed(torch.ones(2, 128)).sum().backward()
            found = predict(optimizer, torch.optim.AdamW, manager.state, stepping.homes())
            assert found.there_bytes == weights - capacity + 3 * weights
            assert found.home_bytes == 3 * weights
            assert found.there_bps == pytest.approx(0.01e9, rel=0.02)
            assert found.device_s == found.there_bytes / found.there_bps
            assert found.host_s > capacity / found.there_bps
            managed.zero_grad()


def test_auto_steps_on_the_host_what_cannot_be_streamed(sim):
    managed = Net()
    with attached(managed, "cpu"):
        optimizer = torch.optim.LBFGS(managed.parameters())
        assert stream_optimizer(optimizer, step="auto") is optimizer
        assert type(optimizer) is torch.optim.LBFGS
        ((name, how),) = oracle_offload.memory_summary("cpu").devices[0].optimizers
        assert name == "LBFGS" and "on the host: LBFGS cannot be streamed" in how


class Counts:
    def __init__(self):
        self.steps = 0
        self.sums = {"first": torch.zeros(2)}
        self.itself = self


class StepsWithAHelper(torch.optim.SGD):
    """What counts its steps, and sets the rate by that, is an object of its own."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.helper = Counts()

    def step(self, closure=None):
        self.helper.steps += 1
        self.helper.itself.sums["first"] += 1
        return super().step(closure)


def test_what_a_refused_optimizer_holds_is_as_it_was(sim):
    """It steps on the host then, from where it was."""
    managed = Net()
    with attached(managed, "cpu"):
        optimizer = StepsWithAHelper(managed.parameters())
        helper = optimizer.helper
        stream_optimizer(optimizer, step="auto")
        ((_, how),) = oracle_offload.memory_summary("cpu").devices[0].optimizers
        assert "on the host: StepsWithAHelper cannot be streamed: " in how and "'helper'" in how
        assert optimizer.helper is helper and helper.itself is helper
        assert helper.steps == 0 and not helper.sums["first"].any()
        backward(managed, 0, "cpu")
        optimizer.step()
        assert helper.steps == 1


def test_places_that_there_are_not_are_refused(sim):
    managed = Net()
    with attached(managed, "cpu"):
        optimizer = torch.optim.AdamW(managed.parameters())
        with pytest.raises(ValueError, match="step='gpu' is none of 'device', 'host', 'auto'"):
            stream_optimizer(optimizer, step="gpu")
        for step in ("host", "auto"):
            with pytest.raises(ValueError, match=f"step='{step}': with during_backward=True"):
                stream_optimizer(optimizer, step=step, during_backward=True)
        assert type(optimizer) is torch.optim.AdamW


# ---- fifty steps ----


def lion(p):
    return pytest.importorskip("bitsandbytes").optim.Lion(p, lr=1e-3)


def adamw8bit(p):
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(p, lr=1e-3)


def torchao8bit(p):
    return pytest.importorskip("torchao.optim").AdamW8bit(p, lr=1e-3)


LONG = {
    **{name: OPTIMIZERS[name] for name in ("adamw loop", "adamw foreach", "adamw fused")},
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "momentum foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "momentum fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adafactor": OPTIMIZERS["adafactor"],
    "adafactor foreach": lambda p: torch.optim.Adafactor(p, lr=0.01, foreach=True),
    "muon": OPTIMIZERS["muon"],
    "lion": lion,
    "adamw8bit": adamw8bit,
    "torchao8bit": torchao8bit,
}
OF_LIBRARIES = ("lion", "adamw8bit", "torchao8bit")  # their kernels know no other device here
BOTH_WAYS = ("adamw foreach", *OF_LIBRARIES)
WAYS = [
    pytest.param(name, early, marks=[pytest.mark.slow] if early and name not in BOTH_WAYS else [])
    for name in LONG
    for early in (False, True)
]


@pytest.mark.parametrize(("name", "early"), WAYS)
def test_fifty_steps_are_the_resident_run(device, monkeypatch, name, early):
    if device == "simgpu" and ("fused" in name or name in OF_LIBRARIES):
        pytest.skip("there are no such kernels for this type of device")
    if name == "torchao8bit" and device == "cpu":  # to compile each shape takes a minute
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(stepping, "BATCH_BYTES", 2 * 4 * 4 * 64**2)
    managed = a_stack(4)
    models = managed, copy.deepcopy(managed).to(device)
    with attached(managed, device, offload_percent=0.5) as manager:
        assert len(manager.layers) == 4
        optimizers = [LONG[name](list(model.parameters())) for model in models]
        stream_optimizer(optimizers[0], during_backward=early)
        for number in range(50):
            losses = []
            for model, optimizer in zip(models, optimizers, strict=True):
                torch.manual_seed(number)
                loss = model(torch.randn(4, 64).to(device).requires_grad_()).square().mean()
                loss.backward()
                losses.append(loss.detach().cpu())
                optimizer.step()
                model.zero_grad()
            assert_same(*losses, f"loss {number}")
        assert manager.state.engine.stats()["brought_bytes"] > 49 * 4 * 4 * 64
        assert_same(*({n: p.detach().cpu() for n, p in m.named_parameters()} for m in models))
        for pair in zip(*(model.parameters() for model in models), strict=True):
            states = [one.state.get(p, {}) for one, p in zip(optimizers, pair, strict=True)]
            assert states[0].keys() == states[1].keys()
            for key, value in states[1].items():
                assert stepping._same(on_host(states[0][key]), on_host(value)), key


def on_host(value):
    return value.to("cpu") if isinstance(value, torch.Tensor) else value
