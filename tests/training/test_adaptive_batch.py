"""Batches that shrink where memory runs out: same effective batch, same gradients, counted."""

from __future__ import annotations

import copy
from collections import UserDict, namedtuple

import pytest
import torch
from equality import FailsAt, assert_same, attached, gradients
from torch import nn

from oracle_offload import NoRoomError
from oracle_offload.train import AdaptiveBatch
from oracle_offload.train.survive.adaptive_batch import as_parts, samples_of
from oracle_offload.train.survive.attempts import MINUS_16, Shrink

WIDTH = 8
Pair = namedtuple("Pair", "rows more")
PAIRS = Shrink(factor=0.5, floor=2)  # batch norm refuses to train on one sample


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 3)
    )


def batch(samples=12, device="cpu"):
    labels = torch.arange(samples) % 3
    labels[::5] = -100
    return {"x": torch.randn(samples, WIDTH).to(device), "labels": labels.to(device), "scale": 2.0}


class Losses:
    """The mean loss over the labels that count; more samples than `limit` do not fit."""

    def __init__(self, model, limit=None):
        self.model, self.limit, self.sizes = model, limit, []

    def __call__(self, part):
        self.sizes.append(len(part["x"]))
        logits = self.model(part["x"]) * part["scale"]
        if len(part["x"]) > (self.limit or len(part["x"])):
            raise torch.OutOfMemoryError("too many samples")
        return nn.functional.cross_entropy(logits, part["labels"])


def tokens(part):
    return (part["labels"] != -100).sum()


def plain(model, whole, size):
    """What anyone would write: parts of one size, each weighted by its tokens."""
    total, loss = float(tokens(whole)), 0.0
    for begin in range(0, len(whole["x"]), size):
        part = {k: v[begin : begin + size] if k != "scale" else v for k, v in whole.items()}
        one = Losses(model)(part) * (float(tokens(part)) / total)
        one.backward()
        loss = loss + one.detach()
    return loss


@pytest.mark.parametrize("again", [False, True])
def test_gradients_are_those_of_the_plain_loop_whether_memory_ran_out_or_not(again, device):
    managed = net()
    resident = copy.deepcopy(managed).to(device)
    whole = batch(device=device)
    with attached(managed, device) as manager:
        losses = Losses(managed, limit=4)
        batches = AdaptiveBatch(managed, losses, size=16, weight_of=tokens)
        for step in range(2):
            torch.manual_seed(step)
            found = batches.backward(whole)
            torch.manual_seed(step)
            expected = plain(resident, whole, 3)
            if not again:
                for model in (managed, resident):
                    model.zero_grad()
            assert_same(found, expected)
            assert_same(gradients(managed), gradients(resident))
            assert_same(dict(managed.named_buffers()), dict(resident.named_buffers()))
        assert manager.state.engine.stats()["acquires"] > 0
    assert losses.sizes == [12, 6, 3, 3, 3, 3, 3, 3, 3, 3]
    assert batches.size == 3
    assert (batches.counts.successes, batches.counts.failures) == (2, 2)
    assert batches.counts.success_rate == 0.5
    assert batches.counts.last_failure == "too many samples"


def test_every_token_counts_the_same_however_the_batch_is_divided():
    model = nn.Linear(WIDTH, 3, dtype=torch.float64)
    whole = batch()
    whole["x"] = whole["x"].double()
    found = {}
    for size in (1, 2, 5, 12):
        model.zero_grad()
        loss = AdaptiveBatch(model, Losses(model), size=size, weight_of=tokens).backward(whole)
        found[size] = [loss, *gradients(model).values()]
    for size in (1, 2, 5):
        for one, other in zip(found[size], found[12], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_running_out_of_memory_at_any_operator_changes_no_bit():
    managed = net()
    resident = copy.deepcopy(managed)
    whole = batch(4)
    state = copy.deepcopy(managed.state_dict())

    def part_of(model, size, losses=None):
        return AdaptiveBatch(model, losses or Losses(model), size=size, weight_of=tokens)

    with attached(managed, "cpu"):
        number = 0
        while True:
            number += 1
            expected = []
            for model in (managed, resident):
                model.load_state_dict(state)
                model.zero_grad()
                torch.manual_seed(1)
                part_of(model, 4).backward(whole)  # gradients that are there already
                torch.manual_seed(2)
                if model is managed:
                    losses = Losses(model)
                    batches = part_of(model, 4, losses)
                    with FailsAt(number, lambda losses=losses: bool(losses.sizes)) as mode:
                        found = batches.backward(whole)
                    continue
                expected.append(part_of(model, batches.size).backward(whole))
            if not batches.counts.failures:
                break
            assert batches.size == 2
            assert_same([found], expected)
            assert_same(gradients(managed), gradients(resident), f"operator {number}")
            assert_same(dict(managed.named_buffers()), dict(resident.named_buffers()))
            assert mode.count > number
    assert number > 25


def test_the_floor_is_an_error_and_gradients_are_as_before(device):
    model = net()
    with attached(model, device):
        whole = batch(device=device)
        AdaptiveBatch(model, Losses(model), size=12, weight_of=tokens).backward(whole)
        before = copy.deepcopy({k: v.cpu() for k, v in gradients(model).items()})
        buffers = {k: v.cpu().clone() for k, v in model.named_buffers()}
        state = torch.get_rng_state()
        batches = AdaptiveBatch(
            model, Losses(model, limit=1), size=4, shrink=PAIRS, weight_of=tokens
        )
        with pytest.raises(NoRoomError, match="size 2 does not fit, and it is the smallest"):
            batches.backward(whole)
        assert batches.counts.failures == 2 and batches.counts.success_rate == 0.0
        assert batches.size == 4
        assert_same({k: v.cpu() for k, v in gradients(model).items()}, before)
        assert_same({k: v.cpu() for k, v in model.named_buffers()}, buffers)
        assert torch.equal(torch.get_rng_state(), state)


def test_another_error_passes_and_gradients_are_none_as_before():
    model = net()

    def fail(part):
        Losses(model)(part).backward()
        raise KeyError

    with pytest.raises(KeyError):
        AdaptiveBatch(model, fail, size=4).backward(batch())
    assert set(gradients(model).values()) == {None}


def test_a_law_a_scaler_and_generators_are_used():
    model = nn.Linear(WIDTH, 3)
    generator = torch.Generator().manual_seed(1)
    begins = []

    def loss_of(part):
        begins.append(float(torch.rand(1, generator=generator)))
        if len(part["x"]) > 40:
            raise MemoryError
        return Losses(model)(part)

    batches = AdaptiveBatch(
        model,
        loss_of,
        size=64,
        shrink=MINUS_16,
        scaler=torch.amp.GradScaler("cpu", init_scale=4.0),
        generators=[generator],
    )
    whole = batch(64)
    loss = batches.backward(whole)
    assert batches.size == 32 and begins[0] == begins[1] == begins[2] != begins[3]
    scaled = copy.deepcopy(gradients(model))
    model.zero_grad()
    other = AdaptiveBatch(model, Losses(model), size=32).backward(whole)
    assert_same(loss, other)  # the scale is in the gradients alone
    for name, gradient in gradients(model).items():
        assert torch.equal(scaled[name], gradient * 4)


def test_a_small_last_batch_does_not_make_later_ones_smaller():
    model = nn.Linear(WIDTH, 3)
    batches = AdaptiveBatch(model, losses := Losses(model), size=8, weight_of=tokens)
    for samples in (3, 16):
        batches.backward(batch(samples))
    assert losses.sizes == [3, 8, 8] and batches.size == 8


def test_parts_without_weight_are_left_out_and_a_batch_without_any_is_refused():
    model = nn.Linear(WIDTH, 3)
    whole = batch(6)
    whole["labels"][2:4] = -100
    AdaptiveBatch(model, losses := Losses(model), size=2, weight_of=tokens).backward(whole)
    assert losses.sizes == [2, 2]
    whole["labels"][:] = -100
    with pytest.raises(ValueError, match="the batch weighs 0; at least one"):
        AdaptiveBatch(model, losses, size=2, weight_of=tokens).backward(whole)


def test_batches_are_divided_whatever_they_are_made_of():
    x = torch.arange(5)
    scalar = torch.tensor(3)
    assert [part.tolist() for part in as_parts(x, 2)] == [[0, 1], [2, 3], [4]]
    (one, two) = as_parts((x[:4], [x[:4] * 2, {"y": scalar, "z": "text"}]), 3)
    assert one[0].tolist() == [0, 1, 2] and two[1][0].tolist() == [6]
    assert isinstance(two, tuple) and isinstance(two[1], list)
    assert two[1][1] == {"y": scalar, "z": "text"}
    assert samples_of({"a": x, "b": [x]}) == 5
    (one, two) = as_parts(UserDict(x=x, y=Pair(x * 2, 7)), 3)  # what tokenizers answer is one
    assert isinstance(two, UserDict) and two["x"].tolist() == [3, 4] and two["y"].more == 7
    assert one["y"].rows.tolist() == [0, 2, 4] and isinstance(one["y"], Pair)
    for bad in ({}, [scalar], "text", (x, x[:2])):
        with pytest.raises(ValueError, match="cannot be split; give tensors"):
            samples_of(bad)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match="is not a whole number above zero"):
        AdaptiveBatch(nn.Linear(1, 1), lambda part: part, size=size)
