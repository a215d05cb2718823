"""`accumulate` on a small model: whose turn it is, what ends it, and what is left after it."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import logging
import random
import re
import sys
import threading
from types import SimpleNamespace

import numpy
import pytest
import torch
from equality import assert_same, attached, gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from oracle_offload import OffloadError, accumulate
from oracle_offload.model import structure
from oracle_offload.train.micro_batches.accumulate import _Accumulation
from oracle_offload.train.micro_batches.thread_state import can_take_turns

pytest.importorskip("greenlet")
pytestmark = pytest.mark.skipif(not can_take_turns(), reason="turns are taken from torch 2.8 on")
WIDTH, LAYERS = 64, 8  # of which the arena holds six


class Turns(list):
    """What all micro-batches note: of a class of its own, it belongs to none of them."""


class Chain(nn.Module):
    """Layers one after the other; it notes which micro-batch computes which of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.seen = Turns()

    def layer(self, number, x, index):
        self.seen.append((index, number))
        return torch.tanh(self.layers[number](x))

    def forward(self, x, index):
        for number in range(LAYERS):
            x = self.layer(number, x, index)
        return x


class Lent(Chain):
    """Its own Parameter is lent to all of its forward."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(320, WIDTH), requires_grad=False)
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x, index):
        x = super().forward(x + self.table[:2], index)
        return x * self.table[2:4]


class Pair(Chain):
    """Two layers in a checkpoint, with something done between them, and the others behind it."""

    def __init__(self, between=None, reentrant=False):
        super().__init__()
        self.between, self.reentrant = between, reentrant

    def forward(self, x, index):
        def both(x):
            x = self.layer(0, x, index)
            if self.between is not None:
                x = self.between(x, index)
            return self.layer(1, x, index)

        x = checkpoint(both, x, use_reentrant=self.reentrant)
        for number in range(2, LAYERS):
            x = self.layer(number, x, index)
        return x


class Copied(torch.autograd.Function):
    """A function that is written in Python."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@contextlib.contextmanager
def streamed(model):
    with attached(model, "cpu", offload_percent=1.0) as manager:
        assert manager.attachment.managed_bytes > manager.attachment.arena.capacity_bytes
        yield model


def made(kind=Chain, *arguments):
    torch.manual_seed(0)
    return kind(*arguments)


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (index, torch.randn(2, WIDTH, generator=generator, requires_grad=True))
        for index in range(count)
    ]


def loss_of(model, batch):
    index, x = batch
    return model(x, index).square().mean()


def in_turns(count, numbers=range(LAYERS)):
    """Return who computes which layer: the last micro-batch begins."""
    return [(index, number) for number in numbers for index in reversed(range(count))]


def one_by_one(count):
    return [(index, number) for index in range(count) for number in range(LAYERS)]


def forget(model, given):
    model.zero_grad()
    model.seen.clear()
    for _, x in given:
        x.grad = None


def plain(model, given):
    losses = []
    for batch in given:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("calls", [False, True], ids=["returned", "called"])
@pytest.mark.parametrize("kind", [Chain, Lent, Pair])
def test_all_compute_one_layer_before_any_goes_on_and_sums_are_the_loops(kind, calls):
    model = made(kind)
    resident = copy.deepcopy(model)
    given, ended = batches(), []

    def step(batch):
        loss = loss_of(model, batch)
        if calls:
            loss.backward()
            assert model.layers[0].weight.grad is not None
            assert not any(part._forward_hooks for part in model.modules())
            ended.append(batch[0])
        return loss

    with streamed(model):
        found = accumulate(step, given)
        assert [loss.requires_grad for loss in found] == [False] * 3
        layers = {
            (index, number): at for at, (index, number) in enumerate(model.seen[: 3 * LAYERS])
        }
        assert len(layers) == 3 * LAYERS and (
            kind is Pair or model.seen[: 3 * LAYERS] == in_turns(3)
        )
        took = gradients(model)
        forget(model, given)
        assert_same(accumulate(step, given, interleave=False), found)
        assert kind is Pair or model.seen == one_by_one(3)
        assert_same(gradients(model), took)
    assert ended == ([0, 1, 2] * 2 if calls else [])
    forget(resident, given)
    assert_same(found, plain(resident, given))
    assert_same(took, gradients(resident))


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("between", [None, lambda x, index: Copied.apply(x)], ids=["", "function"])
def test_a_checkpoint_is_not_divided_whatever_ends_inside_it(reentrant, between):
    model = made(Pair, between, reentrant)
    with streamed(model):
        accumulate(functools.partial(loss_of, model), batches())
    pairs = [(index, number) for index in (2, 1, 0) for number in (0, 1)]
    assert model.seen[: 3 * LAYERS] == [*pairs, *in_turns(3, range(2, LAYERS))]


class Refuses(Copied):
    @staticmethod
    def forward(ctx, x):
        raise KeyError("not today")


def test_a_function_ends_no_turn_that_no_layer_has_ended_and_none_after_it():
    """Whether or not it has failed."""
    model = made()

    def step(batch):
        index, x = batch
        x = checkpoint(lambda x: model.layer(0, x, index), x, use_reentrant=False)
        for name in ("once", "twice"):
            with pytest.raises(KeyError, match="not today"):
                Refuses.apply(x)
            x = Copied.apply(x)
            model.seen.append((index, name))
        for number in (1, 2):
            x = model.layer(number, x, index)
        return x.square().mean()

    with streamed(model):
        accumulate(step, batches(2))
    turns = [[0], ["once", "twice", 1], [2]]
    expected = [(index, number) for turn in turns for index in (1, 0) for number in turn]
    assert model.seen[: len(expected)] == expected


def test_a_single_micro_batch_and_none_have_no_turns_to_take():
    """So what depends on their order is no matter."""
    model = made()
    model.norm, model.other = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(2, track_running_stats=False)
    step = functools.partial(loss_of, model)
    with streamed(model):
        assert accumulate(step, []) == []
        (found,) = accumulate(step, batches(1))
        assert model.layers[0].weight.grad is not None and not found.requires_grad
        model.zero_grad()
        with pytest.raises(OffloadError, match=r"'norm' \(BatchNorm1d\) trains"):
            accumulate(step, batches(2))
        model.norm.eval()
        assert len(accumulate(step, batches(2))) == 2


def test_it_is_not_begun_inside_a_backward():
    told = []
    x = torch.ones(2, requires_grad=True)

    def inside(gradient):
        with pytest.raises(OffloadError, match="was called inside a backward, or in inference"):
            accumulate(lambda batch: (x * batch).sum(), [1.0, 2.0])
        told.append(x.grad)

    y = x * 2
    y.register_hook(inside)
    y.sum().backward()
    assert told == [None]


def test_calls_that_wait_for_their_turn_are_seen_by_a_change_of_the_model():
    """A module whose call is set aside keeps the class that its forward was looked up in."""
    model, seen = made(), []

    def step(batch):
        loss = loss_of(model, batch)
        seen.append(sum(module is model for module in structure._calls_begun()))
        return loss

    with streamed(model):
        accumulate(step, batches())
        assert structure.frames_aside == []
    assert seen == [2, 1, 0]


def test_what_a_step_sets_for_its_own_context_is_seen_by_no_other():
    model, found = made(), []
    variable = contextvars.ContextVar("variable", default=None)
    variable.set("ambient")
    before = torch.backends.cudnn.benchmark

    def step(batch):
        found.append(variable.get())
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cudnn.benchmark is before
        torch.backends.cudnn.benchmark = not before
        variable.set(batch[0])
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=batch[0] == 1),
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            loss = loss_of(model, batch)
            assert torch.is_autocast_enabled("cpu") is (batch[0] == 1)
            assert not torch.backends.cuda.flash_sdp_enabled()
        found.append(variable.get() == batch[0] and torch.backends.cuda.flash_sdp_enabled())
        return loss.float()

    with streamed(model):
        try:
            accumulate(step, batches(2))
            assert torch.backends.cudnn.benchmark is before
        finally:
            torch.backends.cudnn.benchmark = before
    assert found == ["ambient", "ambient", True, True] and variable.get() == "ambient"
    assert not torch.is_autocast_enabled("cpu")


def test_a_backward_of_another_thread_is_its_own():
    model, found = made(), []

    def other():
        x = torch.ones(2, requires_grad=True)
        (x * 3).sum().backward()
        found.append(x.grad.tolist())

    def step(batch):
        x = model.layer(0, batch[1], batch[0])
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return model.layer(1, x, batch[0]).sum()

    with streamed(model):
        for interleave in (True, False):
            accumulate(step, batches(2), interleave=interleave)
            model.zero_grad()
    assert found == [[3.0, 3.0]] * 4


# ---- what is refused ----


def refused(match, model, step=None, **options):
    step = functools.partial(loss_of, model) if step is None else step
    before = gradients(model)
    with streamed(model), pytest.raises(OffloadError, match=match):
        accumulate(step, batches(2), **options)
    assert_same(gradients(model), before)


class Two(Chain):
    """Each layer in a checkpoint of its own, in one more where that is asked for."""

    def __init__(self, nested=False):
        super().__init__()
        self.nested = nested

    def forward(self, x, index):
        for number in range(LAYERS):

            def once(x, number=number):
                return checkpoint(self.layer, number, x, index, use_reentrant=True)

            def twice(x, once=once):
                return checkpoint(once, x, use_reentrant=True)

            x = (twice if self.nested else once)(x)
        return x


@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
def test_weights_of_reentrant_checkpoints_are_known_when_they_are_computed_again(nested):
    """No leaf of theirs is in the graph where the joint backward begins."""
    model = made(Two, nested)
    model.layers[5].weight.grad = torch.ones(WIDTH, WIDTH)
    refused(r"'layers.5.weight' has a gradient before", model)
    model = made(Two, nested)
    model.layers[6] = model.layers[2]
    refused(r"'layers.2.(weight|bias)' is used several times", model)
    model = made(Two, nested)
    resident = copy.deepcopy(model)
    with streamed(model):
        found = accumulate(functools.partial(loss_of, model), given := batches(2))
        took = gradients(model)
        forget(model, given)
        accumulate(functools.partial(loss_of, model), given, interleave=False)
    assert_same(gradients(model), took)
    forget(model, given)
    assert_same(found, plain(resident, given))
    assert_same(took, gradients(resident))


@pytest.mark.parametrize(
    "kind", [(Chain,), (Pair,), (Pair, None, True)], ids=["", "checkpoint", "reentrant"]
)
def test_a_weight_that_is_used_twice_is_refused_unless_one_comes_after_the_other(kind):
    """By what follows it, or by a checkpoint and by what is behind that."""
    model = made(*kind)
    model.layers[3] = model.layers[1]
    refused(r"'layers.1.(weight|bias)' is used several times", model)
    with streamed(model):
        assert len(accumulate(functools.partial(loss_of, model), batches(), interleave=False)) == 3


def test_a_backward_in_unlike_contexts_is_refused():
    model = made()

    def step(batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=batch[0] == 1):
            loss_of(model, batch).float().backward()

    refused("call backward in different contexts", model, step)


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(()), random.random, numpy.random.rand], ids=["torch", "", "numpy"]
)
def test_random_numbers_in_backward_are_refused_unless_one_comes_after_the_other(draw):
    model = made()

    class Draws(Copied):
        @staticmethod
        def backward(ctx, gradient):
            return gradient * draw()

    def step(batch):
        return Draws.apply(loss_of(model, batch))

    refused("random numbers were drawn in backward", model, step)
    with streamed(model):
        assert len(accumulate(step, batches(2), interleave=False)) == 2


@pytest.mark.parametrize("interleave", [True, False], ids=["together", "one by one"])
def test_one_inside_another_is_refused_and_leaves_the_outer_one(interleave):
    model, told = made(), []

    def step(batch):
        with pytest.raises(OffloadError, match="already under way in this process"):
            accumulate(functools.partial(loss_of, model), batches(2))
        told.append(batch[0])
        return loss_of(model, batch)

    with streamed(model):
        assert len(accumulate(step, batches(2), interleave=interleave)) == 2
        assert model.layers[0].weight.grad is not None
    assert told == ([1, 0] if interleave else [0, 1])


HANDED = "and did not call backward; return the loss, or call loss.backward() once."


@pytest.mark.parametrize("interleave", [True, False], ids=["together", "one by one"])
def test_a_loss_is_a_tensor_with_a_gradient(interleave):
    for wrong, what in (
        (None, "NoneType"),
        (3, "int"),
        (torch.ones(()), "a tensor without a grad"),
    ):
        match = f"^the step returned {what}.*{re.escape(HANDED)}$"
        refused(match, made(), lambda batch, wrong=wrong: wrong, interleave=interleave)


@pytest.mark.parametrize("given", ["retain_graph", "create_graph", "inputs", "grad_variables"])
def test_a_backward_over_all_takes_no_such_argument(given):
    model = made()
    value = {"inputs": [model.layers[0].weight], "grad_variables": ()}.get(given, True)

    def step(batch):
        torch.autograd.backward(loss_of(model, batch), **{given: value})

    refused(
        "^the step called backward with retain_graph, create_graph or inputs, which a backward "
        "over all micro-batches cannot take; leave them out.$",
        model,
        step,
    )


@pytest.mark.parametrize("way", ["written", "replaced", "deleted", "inference", "kept"])
def test_a_buffer_that_forwards_write_is_named(way):
    model = made()
    model.inner = nn.ReLU()
    with torch.inference_mode(way == "inference"):
        model.inner.register_buffer("calls", torch.zeros(2))
    change = {
        "written": lambda: model.inner.calls.add_(1),
        "replaced": lambda: setattr(model.inner, "calls", torch.zeros(2)),
        "deleted": lambda: vars(model.inner)["_buffers"].pop("calls", None),
    }.get(way, lambda: None)

    def step(batch):
        change()
        return loss_of(model, batch)

    if way in ("inference", "kept"):
        with streamed(model):
            assert len(accumulate(step, batches(2))) == 2
        return
    match = "^the forward writes to buffer 'inner.calls': what one micro-batch leaves there"
    refused(match, model, step)
    model.inner.register_buffer("calls", torch.zeros(2))
    with streamed(model):
        assert len(accumulate(step, batches(2), interleave=False)) == 2
    assert way != "written" or model.inner.calls.tolist() == [2.0, 2.0]


# ---- what a step hands over, and what it is answered ----


@pytest.mark.parametrize("interleave", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize("roots", ["one", "one with its gradient", "two, one with its gradient"])
def test_losses_and_their_gradients_are_those_that_backward_was_called_with(roots, interleave):
    model = made()
    resident = copy.deepcopy(model)
    factor = torch.tensor(3.0)

    def step(model, batch):
        loss = loss_of(model, batch)
        if roots == "one":
            torch.autograd.backward(loss)
        elif roots == "one with its gradient":
            torch.autograd.backward(loss, factor)
        else:
            torch.autograd.backward([loss, loss * 2], [None, factor])

    with streamed(model):
        found = accumulate(
            functools.partial(step, model), given := batches(), interleave=interleave
        )
    for batch in given:
        batch[1].grad = None
        step(resident, batch)
    assert_same(gradients(model), gradients(resident))
    assert_same(found, [loss_of(resident, batch) for batch in given])
    assert not any(loss.requires_grad for loss in found)


@pytest.mark.parametrize("interleave", [True, False], ids=["together", "one by one"])
def test_the_answer_is_what_a_step_returned(interleave):
    model = made()

    def step(batch):
        loss = loss_of(model, batch)
        loss.backward()
        return [None, loss * 3, "words"][batch[0]]

    with streamed(model):
        first, second, third = accumulate(step, given := batches(), interleave=interleave)
    losses = [loss_of(model, batch).detach() for batch in given]
    assert_same([first, second], [losses[0], losses[1] * 3])
    assert third == "words" and not second.requires_grad


# ---- what is left after it ----


def test_ctrl_c_while_torch_gets_its_own_back_is_made_good():
    """A second one, as people press it: the first has ended the step."""
    code = _Accumulation.uninstall.__code__
    before = torch.autograd.backward, torch.autograd.Function.__dict__["apply"]

    def trace(frame, event, argument):
        if frame.f_code is code and event == "line":
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    x = torch.ones(2, requires_grad=True)
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            accumulate(lambda batch: (x * batch).sum(), [1.0, 2.0])
    finally:
        sys.settrace(None)
    assert (torch.autograd.backward, torch.autograd.Function.__dict__["apply"]) == before
    assert structure.frames_aside == []
    x.grad = None
    assert len(accumulate(lambda batch: (x * batch).sum(), [1.0, 2.0])) == 2


@pytest.mark.parametrize("interleave", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_no_gradient_is_left_of_what_failed(where, interleave):
    model = made()
    fails_at = 0 if interleave else 2  # which computes last

    class Fails(Copied):
        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("planned")

    def step(batch):
        x = model.layer(0, batch[1], batch[0])
        if where == "backward" and batch[0] == 2:
            x = Fails.apply(x)
        x = model.layer(1, x, batch[0])
        if where == "forward" and batch[0] == fails_at:
            raise KeyError("planned")
        return model.layer(2, x, batch[0]).sum()

    with streamed(model), pytest.raises(KeyError, match="planned"):
        accumulate(step, given := batches(), interleave=interleave)
    assert all(gradient is None for gradient in gradients(model).values())
    assert all(x.grad is None for _, x in given)


@pytest.mark.parametrize("interleave", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize("fails", ["", "begun", "turns"])
def test_a_backward_that_a_step_has_kept_is_torchs_own_afterwards(interleave, fails):
    """A module that a step imports may keep the name for good."""
    model, kept = made(), []

    def step(batch):
        kept.append(torch.autograd.backward)
        if fails == "begun":
            raise KeyError("planned")
        if fails == "turns" and batch[0] == 0:
            model.layer(0, batch[1], 0)
            raise KeyError("planned")
        return loss_of(model, batch)

    expected = pytest.raises(KeyError, match="planned") if fails else contextlib.nullcontext()
    with streamed(model):
        with expected:
            accumulate(step, batches(), interleave=interleave)
        assert not any(part._forward_hooks for part in model.modules())
        x = torch.ones(2, requires_grad=True)
        for number, backward in enumerate([*kept, *kept, torch.autograd.backward], 1):
            backward((x * 3).sum())
            assert x.grad.tolist() == [3.0 * number] * 2
        model.zero_grad()
        accumulate(functools.partial(loss_of, model), batches())


def test_attributes_of_ones_own_are_afterwards_as_the_last_micro_batch_leaves_them():
    model = made()
    trainer = SimpleNamespace(step=0, counts={"seen": 0})
    at_layer = []

    def step(batch):
        trainer.step = trainer.counts["seen"] = 10 + batch[0]
        x = model.layer(0, batch[1], batch[0])
        at_layer.append((batch[0], trainer.step, trainer.counts["seen"]))
        loss = model.layer(1, x, batch[0]).sum()
        loss.backward()
        trainer.step += 10
        return loss

    with streamed(model):
        for interleave in (True, False):
            trainer.step = trainer.counts["seen"] = 0
            accumulate(step, batches(), interleave=interleave, own=[trainer])
            assert vars(trainer) == {"step": 22, "counts": {"seen": 12}}
            assert sorted(at_layer) == [(index, 10 + index, 10 + index) for index in range(3)]
            at_layer.clear()
            model.zero_grad()


def test_backward_has_the_state_of_the_first_micro_batch():
    """Though another one was the last to compute."""
    model, seen = made(), []
    before = torch.get_default_dtype()

    class Asks(Copied):
        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.get_default_dtype())
            return gradient

    def step(batch):
        loss = loss_of(model, batch)
        if batch[0] == 2:
            loss = loss + model.layers[0](batch[1].detach()).detach().sum()
            torch.set_default_dtype(torch.float64)
        return Asks.apply(loss)

    try:
        with streamed(model):
            accumulate(step, batches())
        assert torch.get_default_dtype() is before
    finally:
        torch.set_default_dtype(before)
    assert seen == [torch.float32] * 3


# ---- what ends it ----


def warnings_of(caplog):
    """Return the warnings about micro-batches."""
    told = [row.getMessage() for row in caplog.records if row.levelno >= logging.WARNING]
    return [message for message in told if message.startswith("micro-batch")]


@pytest.mark.parametrize("way", ["", "forward", "backward", "raises"])
def test_every_step_has_ended_when_one_has_failed(way, caplog):
    """One that goes on is ended again; a warning reports one that fails meanwhile."""
    model, ended = made(), []

    def step(batch):
        index = batch[0]
        try:
            x = model.layer(0, batch[1], index)
            if index == 1:
                raise KeyError("planned")
            model.layer(1, x, index)
        except KeyError:
            raise
        except BaseException:
            if way == "raises":
                raise ArithmeticError("while it was ended") from None
            if way == "forward":
                model.layer(2, batch[1], index)
            if way == "backward":
                torch.autograd.backward((batch[1] * 2).sum())
            raise
        finally:
            ended.append(index)

    given = batches(4)
    with streamed(model), pytest.raises(KeyError, match="planned"):
        accumulate(step, given)
    assert sorted(ended) == [0, 1, 2, 3]
    told = [f"micro-batch {index} failed while it was ended" for index in (0, 2, 3)]
    assert warnings_of(caplog) == (told if way == "raises" else [])
    assert all(x.grad is None for _, x in given)


def test_steps_that_have_not_begun_are_not_ended(caplog):
    model, begun = made(), []

    def step(batch):
        begun.append(batch[0])
        raise KeyError("planned")

    with streamed(model), pytest.raises(KeyError, match="planned"):
        accumulate(step, batches())
    assert begun == [2] and warnings_of(caplog) == []


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_no_other_goes_on_while_a_checkpoint_fails(reentrant):
    def fail(x, index):
        raise KeyError("planned")

    model = made(Pair, fail, reentrant)
    with streamed(model), pytest.raises(KeyError, match="planned"):
        accumulate(functools.partial(loss_of, model), batches())
    assert model.seen == [(2, 0)]
