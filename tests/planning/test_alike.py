"""A step of which five of alike blocks are run is the step of them all, to the byte."""

from __future__ import annotations

from typing import Any

import architectures
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload.planning import measure
from oracle_offload.planning.alike import rows_of, shortened
from oracle_offload.planning.measure import Step

DEEP = {
    "flux": dict(num_layers=8, num_single_layers=9),
    "sd3": dict(num_layers=8),
    "llama": dict(num_hidden_layers=9),
    "qwen2": dict(num_hidden_layers=8),
    "unet": dict(transformer_layers_per_block=7),
}
SAMPLES: dict[str, Any] = {"flux": (64, 64), "sd3": (64, 64), "unet": (64, 64)}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are small; all that is saved leaves."""
    monkeypatch.setattr(measure, "_LEAST", 1)


class Counted:
    """How many blocks of lists each run of a step had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        run = measure._run
        monkeypatch.setattr(
            measure, "_run", lambda rows, *more: self.rows.append(len(rows)) or run(rows, *more)
        )


def whole(monkeypatch: pytest.MonkeyPatch, *given: Any, **options: Any) -> Step:
    with monkeypatch.context() as patched:
        patched.setattr(measure, "rows_of", lambda *_: [])
        return oracle_offload.plan(*given, **options).step


def same(one: Step, other: Step) -> None:
    assert one.why == other.why == "" and one.note == other.note
    assert one.stages == other.stages
    assert one.staying == other.staying != one.stages and one.largest == other.largest > 0
    assert one.events == other.events
    assert one.regions == other.regions and one.numbers == other.numbers


CASES = [
    *((name, "lora", True) for name in DEEP),
    *(
        ("llama", train, checkpointing)
        for train, checkpointing in (("lora", False), ("full", True))
    ),
    ("sd3", "full", False),
]


@pytest.mark.parametrize(("name", "train", "checkpointing"), CASES)
def test_the_step_of_five_blocks_is_that_of_all(
    name: str, train: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, config = architectures.class_and_config(name)
    if isinstance(config, dict):
        config = {**config, **DEEP[name]}
    else:
        config = type(config)(**{**config.to_dict(), **DEEP[name], "layer_types": None})
    options = dict(config=config, train=train, checkpointing=checkpointing, vram="1GiB", rank=2)
    options |= dict(sample=SAMPLES.get(name, 16), ram="1GiB")
    counted = Counted(monkeypatch)
    short = oracle_offload.plan(kind, **options).step
    assert len(counted.rows) == 1 and counted.rows[0] >= (2 if name == "flux" else 1)
    same(short, whole(monkeypatch, kind, **options))


class Block(nn.Module):
    """A layer, and what its place in the row makes of it."""

    def __init__(self, place: int, more: int = 0) -> None:
        super().__init__()
        self.place = place
        self.layer, self.more = nn.Linear(16, 16), nn.ModuleList()
        self.more.extend(nn.Linear(16, 16) for _ in range(more))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).relu()
        for layer in self.more:
            x = layer(x)
        return x


class Tower(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Wide(Block):
    """From the fifth on it keeps more, which no attribute tells."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.exp().sin() if self.place > 4 else x


class InPairs(Tower):
    """Two blocks in each checkpointed region."""

    def forward(self, x: Tensor) -> Tensor:
        for n in range(0, len(self.blocks), 2):
            x = checkpoint(self.pair, n, x, use_reentrant=False)
        return x

    def pair(self, n: int, x: Tensor) -> Tensor:
        return self.blocks[n + 1](self.blocks[n](x))


class Back(Tower):
    """Goes through its blocks twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class WithOneBetween(Tower):
    """Asks for one layer of its own before each block."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.between = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(self.between(x))
        return x


class ByNumber(Tower):
    """Asks for each block by its number, of which it knows how many there are."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.many = len(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for n in range(self.many):
            x = self.blocks[n](x)
        return x


TOWERS = {
    "alike": (lambda: Tower(*(Block(n) for n in range(9))), [1]),
    "others before": (lambda: Tower(Block(0, 2), Block(1, 1), *map(Block, range(2, 10))), [1]),
    "others behind": (lambda: Tower(*map(Block, range(8)), Block(8, 2)), [1]),
    "one between": (lambda: WithOneBetween(*map(Block, range(8))), [1]),
    "too few": (lambda: Tower(*map(Block, range(6))), [0]),
    "no two alike": (lambda: Tower(*(Block(0, n) for n in range(6))), [0]),
    "other inside": (lambda: Tower(*(Wide(n) for n in range(8))), [1, 0]),
    "in pairs": (lambda: InPairs(*(Block(n) for n in range(8))), [1, 0]),
    "twice": (lambda: Back(*(Block(n) for n in range(8))), [1, 0]),
    "by number": (lambda: ByNumber(*(Block(n) for n in range(8))), [1, 0]),
}


@pytest.mark.parametrize("name", TOWERS)
def test_what_only_looks_alike_is_run_as_a_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, runs = TOWERS[name]
    options: dict[str, Any] = dict(rank=1, sample={"x": (16,)}, vram="1GiB", ram="1GiB")
    counted = Counted(monkeypatch)
    short = oracle_offload.plan(make(), **options).step
    assert counted.rows == runs
    same(short, whole(monkeypatch, make(), **options))


def test_blocks_differ_by_shapes_values_leaves_and_adapters() -> None:
    def length(model: nn.Module, managed: Any = (), adapters: Any = None) -> list[int]:
        found = rows_of(model, managed, adapters or {})
        return [row.end - row.begin for row in found]

    tower = Tower(*map(Block, range(10)))
    assert length(tower) == [10]
    assert length(tower, ["blocks.1.layer"]) == [8]
    assert length(tower, (), {"blocks.0.layer": ((1, 16), (16, 1))}) == [9]
    tower.blocks[9].place = 3
    assert length(tower) == [9], "not by as much as their places do"
    tower.blocks[0].slope = 0.5
    assert length(tower) == [8]
    tower.blocks[7].layer.weight.requires_grad_(False)
    assert length(tower) == [], "six are left"
    shared = Tower(*map(Block, range(8)))
    shared.blocks[7].layer.weight = shared.blocks[6].layer.weight
    assert length(shared) == [], "a weight that two blocks share"


def test_lists_are_whole_again_whatever_happens_meanwhile() -> None:
    tower = Tower(Block(0, 1), *map(Block, range(1, 9)))
    blocks = list(tower.blocks)
    (row,) = rows_of(tower, (), {})
    assert (row.begin, row.end, row.kept) == (1, 9, [0, 1, 2, 3, 6, 8])
    with pytest.raises(ZeroDivisionError), shortened([row]) as renamed:
        assert list(tower.blocks) == [blocks[n] for n in row.kept]
        assert renamed("blocks.6.layer") == "blocks.4.layer" and renamed("blocks.4.layer") is None
        assert renamed("other.4") == "other.4"
        raise ZeroDivisionError
    assert list(tower.blocks) == blocks
    assert torch.equal(tower(torch.ones(2, 16)), tower(torch.ones(2, 16)))
