"""Batches of samples of like length, so that little of them is padding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence


class LengthBuckets:
    """Indices of samples in batches of like length, in an order that a seed decides.

    An epoch has every sample once. Samples are shuffled, cut into pools of `pool` batches, sorted
    by length in each, and the batches are shuffled again: batches differ from epoch to epoch.

    Parameters
    ----------
    lengths : sequence of int
        Of each sample.
    batch_size : int
        Samples in a batch; the last batch of a pool may have fewer.
    seed : int
        Decides the order, together with the epoch's number.
    pool : int
        More of them sort better, fewer mix better. 0: no sorting.

    Examples
    --------
    ``DataLoader(dataset, batch_sampler=LengthBuckets(lengths, 8))``; `set_epoch` before each epoch.
    """

    def __init__(
        self, lengths: Sequence[int], batch_size: int, seed: int = 0, pool: int = 50
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        if not lengths:
            raise ValueError("there are no samples to put into batches")
        self._lengths = list(lengths)
        self._batch_size = batch_size
        self._seed = seed
        self._pool = pool
        self._epoch = 0
        self._made: tuple[int, list[list[int]]] | None = None  # of which epoch, and its batches

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch is iterated over from now on."""
        self._epoch = epoch

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch: always the same for the same number."""
        if self._made is None or self._made[0] != epoch:  # a trainer asks in every step
            self._made = epoch, self._make(epoch)
        return list(self._made[1])

    def _make(self, epoch: int) -> list[list[int]]:
        draw = random.Random(f"{self._seed} {epoch}")
        order = list(range(len(self._lengths)))
        draw.shuffle(order)
        size = self._batch_size * max(1, self._pool)
        batches = []
        for begin in range(0, len(order), size):
            pool = order[begin : begin + size]
            if self._pool:
                pool.sort(key=self._lengths.__getitem__)
            batches += [
                pool[at : at + self._batch_size] for at in range(0, len(pool), self._batch_size)
            ]
        draw.shuffle(batches)
        return batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches(self._epoch))

    def __len__(self) -> int:
        pools, rest = divmod(len(self._lengths), self._batch_size * max(1, self._pool))
        return pools * max(1, self._pool) + -(-rest // self._batch_size)

    def padding(self, epoch: int = 0) -> float:
        """Return which share of what the batches compute with is padding."""
        computed = used = 0
        for batch in self.batches(epoch):
            lengths = [self._lengths[index] for index in batch]
            computed += len(batch) * max(lengths)
            used += sum(lengths)
        return 1 - used / max(1, computed)
