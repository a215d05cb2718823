"""Batches of like length: every sample once, in an order that a seed and an epoch decide."""

from __future__ import annotations

import random

import pytest

from oracle_offload.train.recipes.lengths import LengthBuckets

LENGTHS = [random.Random(number).randrange(1, 500) for number in range(203)]


@pytest.mark.parametrize("pool", [0, 1, 5, 50])
def test_every_sample_is_there_once(pool):
    buckets = LengthBuckets(LENGTHS, 8, seed=3, pool=pool)
    batches = list(buckets)
    assert sorted(index for batch in batches for index in batch) == list(range(203))
    assert len(batches) == len(buckets) == 26
    for size in (1, 7, 203, 500):
        buckets = LengthBuckets(LENGTHS, size, pool=pool)
        assert len(buckets) == len(list(buckets))
    assert all(1 <= len(batch) <= 8 for batch in batches)


def test_sorting_saves_most_of_the_padding():
    plain = LengthBuckets(LENGTHS, 8, pool=0).padding()
    assert LengthBuckets(LENGTHS, 8, pool=50).padding() < plain / 4
    assert LengthBuckets([7] * 20, 8).padding(3) == 0


def test_the_order_is_that_of_seed_and_epoch():
    buckets = LengthBuckets(LENGTHS, 8, seed=1)
    first = list(buckets)
    assert first == LengthBuckets(LENGTHS, 8, seed=1).batches(0) != buckets.batches(1)
    assert first != LengthBuckets(LENGTHS, 8, seed=2).batches(0)
    buckets.set_epoch(1)
    assert list(buckets) == buckets.batches(1)
    means = [sum(LENGTHS[index] for index in batch) / len(batch) for batch in first]
    assert means != sorted(means), "the batches are not shuffled"


@pytest.mark.parametrize("pool", [0, 2])
def test_other_samples_meet_in_another_epoch(pool):
    buckets = LengthBuckets([7] * 64, 8, pool=pool)
    met = [{frozenset(batch) for batch in buckets.batches(epoch)} for epoch in (0, 1)]
    assert not met[0] & met[1]


def test_an_epoch_is_put_together_once(monkeypatch):
    buckets, made = LengthBuckets(LENGTHS, 8), []
    make = buckets._make
    monkeypatch.setattr(buckets, "_make", lambda epoch: made.append(epoch) or make(epoch))
    first = buckets.batches(0)
    expected = list(first)
    first.reverse()
    assert buckets.batches(0) == expected, "what a caller does to its list is its own"
    assert buckets.batches(1) != expected == buckets.batches(0)
    assert made == [0, 1, 0]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        LengthBuckets([1], 0)
    with pytest.raises(ValueError, match="no samples"):
        LengthBuckets([], 1)
