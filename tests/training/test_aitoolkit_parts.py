"""Small parts of AI-Toolkit's drop-in: who trains, and modules that stream themselves."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from oracle_offload.aitoolkit.run_folder import find_run_folder, find_trainer
from oracle_offload.aitoolkit.self_streaming import keep_in_place, let_move

# ---- the trainer among the callers ----


class Process:
    """AI-Toolkit's process that trains, as far as it is looked at."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def loads(self, ask: Any) -> Any:
        return ask()


def test_the_folder_and_the_trainer_are_those_of_the_innermost_caller(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder in (inner, outer):
        folder.mkdir()
    one = Process(save_root=str(inner), config={"model": {}})
    other = Process(save_root=str(outer), config={"model": {}})
    assert other.loads(lambda: one.loads(find_run_folder)) == str(inner)
    assert other.loads(lambda: one.loads(find_trainer)) is one
    assert other.loads(find_run_folder) == str(outer)


@pytest.mark.parametrize("what", ["nothing", "no folder", "no text", "no configuration"])
def test_a_caller_that_is_none_is_passed_over(tmp_path: Path, what: str) -> None:
    attributes: dict[str, Any] = {
        "nothing": {},
        "no folder": {"save_root": str(tmp_path / "gone")},
        "no text": {"save_root": tmp_path, "config": {}},
        "no configuration": {"save_root": str(tmp_path)},
    }[what]
    inner = Process(**attributes)
    outer = Process(save_root=str(tmp_path), config={})
    assert outer.loads(lambda: inner.loads(find_run_folder)) == str(tmp_path)
    assert outer.loads(lambda: inner.loads(find_trainer)) is outer
    found = str(tmp_path) if what == "no configuration" else None
    assert inner.loads(find_run_folder) == found and inner.loads(find_trainer) is None


def test_a_caller_that_has_no_attributes_of_its_own_is_passed_over(tmp_path: Path) -> None:
    def ask(self: Any) -> Any:
        return find_run_folder(), find_trainer()

    assert ask(1) == (None, None)
    outer = Process(save_root=str(tmp_path), config={})
    assert outer.loads(lambda: ask(1)) == (str(tmp_path), outer)


# ---- modules that stream themselves ----


class Experts(nn.Module):
    """Keeps a bank on the host, and says where it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.offload_device: Any = torch.device("meta")
        self.bank = nn.Parameter(torch.ones(4, 2))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))


def test_what_streams_itself_is_cast_and_not_moved() -> None:
    model = nn.ModuleDict({"experts": Experts(), "plain": nn.Linear(2, 2)})
    experts: Any = model["experts"]
    keep_in_place(model)
    keep_in_place(model)  # a second time is the same
    assert type(experts) is not Experts and isinstance(experts, Experts)
    assert (type(experts).__name__, type(experts).__qualname__) == ("Experts", "Experts")
    assert type(experts).__doc__ == Experts.__doc__ and type(experts).__module__ == __name__
    assert type(model["plain"]) is nn.Linear
    bank = experts.bank
    model.to("meta")
    assert experts.bank is bank and bank.device.type == "cpu" and model["plain"].weight.is_meta
    model.to(torch.bfloat16)
    assert experts.bank.dtype is torch.bfloat16 and experts.bank.device.type == "cpu"
    assert experts.counts.dtype is torch.int64 and experts.counts.device.type == "cpu"
    copied = copy.deepcopy(experts)
    assert type(copied) is Experts and torch.equal(copied.bank, experts.bank)
    let_move(model)
    let_move(model)
    assert type(experts) is Experts
    model.to("meta")
    assert experts.bank.is_meta and experts.counts.is_meta


def test_what_names_no_device_is_moved_as_ever() -> None:
    experts = Experts()
    experts.offload_device = None
    keep_in_place(experts)
    assert type(experts) is Experts
    experts.offload_device = "meta"
    keep_in_place(nn.ModuleList([experts, nn.ReLU()]))
    assert type(experts) is not Experts
    other = Experts()
    keep_in_place(other)
    assert type(other) is type(experts), "a class is made once"
    kept: Any = SimpleNamespace(modules=lambda: [other])
    let_move(kept)
    assert type(other) is Experts and type(experts) is not Experts
