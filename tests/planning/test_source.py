"""Where a planned model comes from: files of which only headers are read, and no network."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import oracle_offload
from oracle_offload.planning.source import source_of


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a plan asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def plan(model: Any, **options: Any) -> dict[str, Any]:
    return oracle_offload.plan(model, card=24, ram="64GB", measure=False, **options).to_dict()


def header_alone(folder: Path) -> None:
    """Leave of each weight file its header, and a hole of the same size."""
    for file in folder.rglob("*.safetensors"):
        size = file.stat().st_size
        length = int.from_bytes(file.read_bytes()[:8], "little")
        file.write_bytes(file.read_bytes()[: 8 + length])
        os.truncate(file, size)


@pytest.mark.parametrize("name", ["flux", "llama"])
def test_a_folder_its_config_and_its_weights_give_one_plan(name: str, tmp_path: Path) -> None:
    architectures.real(name).to(torch.float16).save_pretrained(tmp_path)
    header_alone(tmp_path)
    of_folder = plan(tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    assert of_folder == plan(weights) == plan(str(weights))
    assert "weights are float16, as their files have them" in of_folder["assumptions"]
    of_config = plan(tmp_path / "config.json", dtype="fp16")
    assert of_config["persistent_bytes"] == of_folder["persistent_bytes"]


def test_shards_by_their_index(tmp_path: Path) -> None:
    architectures.real("llama").save_pretrained(tmp_path / "whole")
    architectures.real("llama").save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    (index,) = (tmp_path / "shards").glob("*.index.json")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    header_alone(tmp_path)
    assert plan(index) == plan(tmp_path / "shards") == plan(tmp_path / "whole")
    (tmp_path / "shards" / "config.json").unlink()
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(oracle_offload.OffloadError, match="named by the index, but not there"):
        plan(index)


def test_a_pipeline_and_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    for commit in ("abc", "def"):
        folder = repository / "snapshots" / commit
        architectures.real("flux" if commit == "abc" else "unet").save_pretrained(
            folder / "transformer"
        )
        (folder / "model_index.json").write_text("{}")
    (repository / "refs").mkdir()
    for commit, kind in (("abc", "FluxTransformer2DModel"), ("def", "UNet2DConditionModel")):
        (repository / "refs" / "main").write_text(commit)
        assert plan("owner/name")["model"] == kind == plan(repository)["model"]
    with pytest.raises(ValueError, match="'owner/other' is neither a path nor in the local hub"):
        plan("owner/other")


def test_headers_without_a_config_give_the_units_of_their_layers(tmp_path: Path, sim: Any) -> None:
    """As if each matrix were a Linear's; blocks are what has numbers below it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(96)
            self.up = nn.Linear(96, 192)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token_emb = nn.Embedding(50, 96)
            self.first = nn.Conv2d(3, 8, 3)
            self.blocks = nn.ModuleList([Block(), Block()])

    model = Net().requires_grad_(False)
    save_file(model.state_dict(), tmp_path / "net.safetensors")
    found = oracle_offload.plan(tmp_path / "net.safetensors", offload_percent=1.0, ram="64GB")
    manager = oracle_offload.attach(model, "cpu")
    try:
        stats = manager.state.engine.stats(manager.attachment.model)
        assert len(found.storage.units) == stats["units"]
        assert found.fit.arena_bytes == manager.attachment.arena.capacity_bytes
    finally:
        manager.detach()
    assert any("matrices are taken for Linear" in said for said in found.assumptions)


@pytest.mark.parametrize(
    "names",
    [
        ["forward.weight", "float.0.weight", "type.bias"],
        ["blocks.items.weight", "blocks.0.weight"],
        ["a", "a.weight"],
        ["a..b.weight", ".", ".."],
    ],
)
def test_a_file_may_call_its_tensors_anything(names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save_file({"up.weight": torch.zeros(8, 8)} | {n: torch.zeros(4, 4) for n in names}, path)
    found = plan(path, rank=1, targets="up")
    assert found["parameters"] == 64 + 16 * len(names)
    assert found["persistent_bytes"]["weights"] == 4 * found["parameters"]


def test_a_name_deeper_than_any_model_is_refused(tmp_path: Path) -> None:
    save_file({"a." * 5000 + "weight": torch.zeros(4, 4)}, tmp_path / "net.safetensors")
    with pytest.raises(oracle_offload.OffloadError, match="is no name of a tensor in any model"):
        plan(tmp_path / "net.safetensors")


def test_the_dtype_is_that_of_the_file_that_would_be_loaded(tmp_path: Path) -> None:
    model = architectures.real("llama")
    model.save_pretrained(tmp_path)
    plain = plan(tmp_path)
    model.to(torch.float16).save_pretrained(tmp_path / "half", variant="fp16")
    (half,) = (tmp_path / "half").glob("*.safetensors")
    half.rename(tmp_path / half.name)
    assert plan(tmp_path) == plain
    whole = {name: t.to(torch.int8) for name, t in model.state_dict().items()}
    save_file(whole, tmp_path / "model.safetensors")  # no floating-point values to go by
    assert "weights are taken for" in "".join(plan(tmp_path)["assumptions"])


def test_a_module_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    before = {name: (p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    found = source_of(model)
    assert all(p.is_meta for p in found.module.parameters())
    oracle_offload.plan(model, train="lora", dtype="bf16", ram="64GB")
    assert before == {n: (p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()}
    assert model[0].weight.dtype is torch.float32


def test_a_module_that_keeps_what_it_computed_is_planned() -> None:
    model = torch.nn.utils.weight_norm(nn.Linear(8, 8))  # its weight is no leaf
    assert plan(model, train="full")["parameters"] == 64 + 8 + 8


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert plan(model, targets="0", train="lora", rank=1)["persistent_bytes"]["weights"] == 4 * 64


@pytest.mark.parametrize(
    ("text", "count"), [("4B", 4e9), ("1.5m", 1.5e6), (7, 7), ("12 K", 12e3), ("2T", 2e12)]
)
def test_a_number_of_parameters(text: Any, count: float) -> None:
    assert source_of(text).parameters == count


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nothing", "'nothing' is no file, no folder and no number of parameters"),
        (None, "not NoneType"),
        (0, "a number of parameters is above zero"),
        ("9" * 400 + "T", "a number of parameters is above zero, and below 1e18"),
        (float("inf"), "a number of parameters is above zero, and below 1e18"),
        (True, "not bool"),
        (nn.ReLU(), "ReLU has no parameters"),
    ],
)
def test_what_is_no_model_is_said(model: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        oracle_offload.plan(model)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.json", "{}", "names no class"),
        ("config.json", "[]", "holds no JSON object"),
        ("config.json", "{", "is not JSON"),
        ("config.json", "[" * 100_000, "is not JSON"),
        ("config.json", '{"architectures": 5}', "names no class"),
        ("config.json", '{"_class_name": 5}', "names no class"),
        (
            "config.json",
            '{"architectures": ["LlamaForCausalLM"], "quantization_config": {"bits": 4}}',
            "is of a model that is quantised already",
        ),
        (
            "config.json",
            '{"architectures": ["NoSuch"]}',
            "is of class 'NoSuch', which transformers",
        ),
        ("m.safetensors", "short", "too short for a safetensors file"),
        ("m.safetensors.index.json", "{}", "it has no 'weight_map'"),
        (
            "m.safetensors.index.json",
            '{"weight_map": {"a": "../a.safetensors"}}',
            "names '../a.safetensors', which is no file beside it",
        ),
        ("other.txt", "", "is neither a safetensors file"),
    ],
)
def test_files_that_hold_no_model_are_named(
    name: str, text: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, oracle_offload.OffloadError), match=says) as error:
        plan(tmp_path / name)
    assert str(tmp_path) in str(error.value)


def test_an_empty_folder_and_a_config_that_its_class_refuses(tmp_path: Path) -> None:
    with pytest.raises(oracle_offload.OffloadError, match=r"holds neither config\.json nor"):
        plan(tmp_path)
    with pytest.raises(oracle_offload.OffloadError, match="Linear cannot be made of this config"):
        plan(nn.Linear, config={"in_features": 3})
    for wrong in ({"num_attention_heads": 0}, {"hidden_size": "x"}, {"hidden_size": -8}):
        (tmp_path / "config.json").write_text(
            json.dumps({"architectures": ["LlamaForCausalLM"], **wrong})
        )
        with pytest.raises(oracle_offload.OffloadError, match="cannot be made of this config: "):
            plan(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"in_features": 3, "out_features": 5}))
    assert plan(nn.Linear, config=tmp_path, rank=1, targets="")["parameters"] == 20
