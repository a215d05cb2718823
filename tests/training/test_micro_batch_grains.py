"""Which parts of a model micro-batches are computed in, one after the other."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from equality import attached
from torch import Tensor, nn

import oracle_offload
from oracle_offload.train.micro_batches.grains import grains_of


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks in a list that has no forward, a head, and what has no weights.

    The arena has room for two of its largest layer: next to a wide head the blocks are small.
    """

    def __init__(self, blocks: int = 6, head: int = 20 * 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.act = nn.Tanh()
        self.head = nn.Linear(64, head)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.act(x))


class Table(nn.Module):
    """Its own Parameter is lent to all of its forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.table = inner, nn.Parameter(torch.randn(600, 64))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x + self.table[:1])


def grains_named(model: nn.Module, **options: Any) -> tuple[list[str], list[str]]:
    """Return the names of a model's grains, and of the layers that lend around them."""
    known = {module: name for name, module in model.named_modules()}
    with attached(model, "cpu", offload_percent=1.0, **options) as manager:
        found = grains_of(manager.attachment)
        assert manager.attachment.managed_bytes > manager.attachment.arena.capacity_bytes
        return [known[module] for module in found.modules], [one.name for one in found.lending]


BLOCKS = [f"blocks.{i}" for i in range(6)]
PARTS = [f"blocks.{i}.{part}" for i in range(6) for part in ("up", "down")]


def test_grains_are_the_blocks_where_they_are_small_beside_the_arena() -> None:
    assert grains_named(Net()) == ([*BLOCKS, "head"], [])
    nested = [f"0.{name}" for name in (*BLOCKS, "head")]
    assert grains_named(nn.Sequential(Net())) == (nested, [])


def test_grains_are_layers_where_a_block_is_large_beside_the_arena() -> None:
    assert grains_named(Net(head=4), ignore_modules=["head", "blocks.2"]) == (
        [part for part in PARTS if "blocks.2" not in part],
        [],
    )


def test_a_grain_is_the_largest_module_up_to_a_quarter_of_the_arena() -> None:
    model = Net(head=4)
    nbytes = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    assert grains_named(model, vram_budget=4 * nbytes) == ([*BLOCKS, "head"], [])
    assert grains_named(model, vram_budget=4 * nbytes - 256) == ([*PARTS, "head"], [])


def test_a_compiled_block_is_one_grain_however_large() -> None:
    net = Net(head=4)
    net.blocks[1].compile(backend="eager")
    found, _ = grains_named(net)
    assert found == [*PARTS[:2], "blocks.1", *PARTS[4:], "head"]


class Listed(nn.Module):
    """Lists that have no forward, and a table whose rows are read in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5000, 64)
        self.few = nn.ModuleList([Block()])
        self.heads = nn.ModuleList(nn.Linear(64, 20 * 64) for _ in range(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.few[0](self.table(x))
        return [head(x) for head in self.heads]


def test_a_grain_is_called_and_has_weights_that_travel() -> None:
    heads = [f"heads.{i}" for i in range(4)]
    assert grains_named(Listed()) == (["few.0", *heads], [])
    model = Listed()
    model.few.forward = lambda x: model.few[0](x)  # type: ignore[method-assign]
    assert grains_named(model) == (["few", *heads], [])


class Rows(nn.Module):
    """Has a Parameter of its own next to a layer, and both are too large for one grain."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(width, 4 * width))
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(x @ self.rows))


def test_a_module_on_whose_parameter_peft_puts_an_adapter_is_one_grain_however_large() -> None:
    """The sum of both is in the Parameter's place until its forward has ended."""
    peft = pytest.importorskip("peft")
    net = Net(head=4)
    net.blocks = nn.ModuleList([Rows(), Rows(), *net.blocks[2:]])
    net.requires_grad_(False)
    adapters = peft.LoraConfig(r=4, target_modules=[], target_parameters=["blocks.1.rows"])
    found, lending = grains_named(peft.get_peft_model(net, adapters))
    parts = ["blocks.0.down", "blocks.1", *PARTS[4:], "head"]
    assert found == [f"base_model.model.{name}" for name in parts]
    assert lending == ["base_model.model.blocks.0"]


def test_a_model_that_is_gone_has_no_grains() -> None:
    model = Net()
    attachment = oracle_offload.attach(model, "cpu", offload_percent=1.0).attachment
    assert len(grains_of(attachment).modules) == 7
    del model
    gc.collect()
    assert attachment.module() is None and grains_of(attachment) == ([], [])


def test_what_lends_around_grains_is_told_from_the_outside_in() -> None:
    """As a call takes turns, or two threads wait for each other."""
    model = Table(Table(Net()))
    inner = [f"inner.inner.{name}" for name in (*BLOCKS, "head")]
    assert grains_named(model) == (inner, ["", "inner"])
    nested = [f"0.{name}" for name in inner]
    assert grains_named(nn.Sequential(model)) == (nested, ["0", "0.inner"])


def test_there_are_no_grains_where_all_weights_have_room() -> None:
    with attached(Net(6), "cpu", offload_percent=0.0) as manager:
        assert grains_of(manager.attachment) == ([], [])


def test_there_are_no_grains_where_the_weights_are_as_large_as_the_arena() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    with attached(model, "cpu", offload_percent=1.0) as manager:
        found = manager.attachment
        assert found.managed_bytes == found.arena.capacity_bytes
        assert grains_of(found) == ([], [])
