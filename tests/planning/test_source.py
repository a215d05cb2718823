"""Where a planned model comes from: files of which only headers are read, and no network."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import architectures
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import oracle_offload
from oracle_offload import Budget
from oracle_offload.disk.source import DTYPES as STORED_DTYPES
from oracle_offload.host.cache import hub_cache
from oracle_offload.planning.source import source_of, switch_of


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
    model = nn.ModuleDict({"token_emb": nn.Embedding(50, 96), "first": nn.Conv2d(3, 8, 3)})
    blocks = [{"norm": nn.LayerNorm(96), "up": nn.Linear(96, 192)} for _ in range(2)]
    model["blocks"] = nn.ModuleList(map(nn.ModuleDict, blocks))
    model.requires_grad_(False)
    save_file(model.state_dict(), tmp_path / "net.safetensors")
    found = oracle_offload.plan(
        tmp_path / "net.safetensors", budget=Budget(offload_percent=1.0), ram="64GB"
    )
    manager = oracle_offload.attach(model, "cpu")
    try:
        stats = manager.state.engine.stats(manager.attachment.model)
        assert len(found.storage.units) == stats["units"]
        assert found.fit.arena_bytes == manager.attachment.arena.capacity_bytes
    finally:
        manager.detach()
    assert any("matrices are taken for Linear" in said for said in found.assumptions)
    assert found.step.why == "no forward is known"


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
    path = tmp_path / "net.safetensors"
    save_file({"a." * 100 + "weight": torch.zeros(4, 4)}, path)
    assert source_of(path).parameters == 16
    for deeper in (101, 5000):
        save_file({"a." * deeper + "weight": torch.zeros(4, 4)}, path)
        with pytest.raises(oracle_offload.OffloadError, match="is no name of a tensor in any mod"):
            plan(path)


def test_what_tensors_are_for_is_guessed_by_their_names_and_shapes(tmp_path: Path) -> None:
    shapes = {
        "scale": (3,),
        "token_emb.weight": (50, 96),
        "pos_emb.weight": (4, 96),
        "pos_emb.bias": (4,),
        "patch_embed.weight": (8, 3, 2, 2),
        "conv.weight": (8, 3, 3, 5),
        "conv.bias": (8,),
        "emb_norm.weight": (96,),
        "lora.weight": (4, 4),
        "lora.scale": (4,),
        "blocks.0.up.weight": (192, 96),
        "blocks.0.up.inner.weight": (5, 6),
        "blocks.0.tail.bias": (7,),
    }
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tensors["packed.weight"] = torch.zeros(4, 6, dtype=torch.int8)
    save_file(tensors, tmp_path / "net.safetensors")
    found = source_of(tmp_path / "net.safetensors")
    module = found.module
    assert module is not None and found.name == "net.safetensors" and not found.runs
    assert {n: (tuple(p.shape), p.dtype) for n, p in module.named_parameters()} == {
        name: (tuple(t.shape), t.dtype) for name, t in tensors.items()
    }
    kinds = {
        "": "_Stored()",
        "token_emb": "Embedding(50, 96)",
        "pos_emb": "Linear(in_features=96, out_features=4, bias=True)",
        "patch_embed": "Conv2d(3, 8, kernel_size=(2, 2), stride=(1, 1), bias=False)",
        "conv": "Conv2d(3, 8, kernel_size=(3, 5), stride=(1, 1))",
        "emb_norm": "_Stored()",
        "lora": "_Stored()",
        "packed": "_Stored()",
        "blocks": "ModuleDict()",
        "blocks.0": "_Stored()",
        "blocks.0.up": "Linear(in_features=96, out_features=192, bias=False)",
        "blocks.0.up.inner": "Linear(in_features=6, out_features=5, bias=False)",
        "blocks.0.tail": "_Stored()",
    }
    found_kinds = {}
    for name, inner in module.named_modules():
        extra = inner.extra_repr()
        found_kinds[name] = f"{type(inner).__name__}({extra})"
    assert found_kinds == kinds
    (tmp_path / "only").mkdir()
    (tmp_path / "net.safetensors").rename(tmp_path / "only" / "model.safetensors")
    of_folder = source_of(tmp_path / "only")
    assert (of_folder.name, of_folder.parameters) == ("only", found.parameters)


def test_a_dtype_that_this_torch_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a.weight": torch.zeros(4, dtype=torch.float8_e5m2)}, tmp_path / "m.safetensors")
    monkeypatch.delitem(STORED_DTYPES, "F8_E5M2")
    with pytest.raises(oracle_offload.OffloadError) as error:
        plan(tmp_path / "m.safetensors")
    path, version = tmp_path / "m.safetensors", torch.__version__
    assert str(error.value) == f"{path}: 'a.weight' is F8_E5M2, which torch {version} does not have"


def test_the_dtype_is_that_of_most_weights_of_the_files_else_what_the_config_says(
    tmp_path: Path,
) -> None:
    kind, config = architectures.class_and_config("bert")
    said = {**config.to_dict(), "architectures": [kind.__name__]}
    tensors = {
        "a": torch.zeros(100, dtype=torch.float16),
        "b": torch.zeros(40),
        "c": torch.zeros(41),
        "d": torch.zeros(1000, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    for words, dtype in (
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "float16"),
        ({}, "bfloat16"),
    ):
        without = {key: value for key, value in said.items() if "dtype" not in key}
        (tmp_path / "config.json").write_text(json.dumps(without | words))
        found = source_of(tmp_path / "config.json")
        assert found.notes == (f"weights are taken for {dtype}; dtype= says otherwise",)
        assert str(next(found.module.parameters()).dtype) == f"torch.{dtype}"
        found = source_of(tmp_path)
        assert found.notes == ("weights are float16, as their files have them",)
    assert source_of(tmp_path, dtype=torch.float32).notes == ()


class Kept(nn.Module):
    """Tensors of each kind that a loader treats differently, some in float32 by the class."""

    _keep_in_fp32_modules = ("norm",)
    _keep_in_fp32_modules_strict = ("gate",)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.norm = nn.Linear(4, 4, bias=False)
        self.gate = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.packed = nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("steps", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.zeros(4), persistent=False)


OF_TRANSFORMERS = type("Kept", (Kept,), {"__module__": "transformers.models.kept"})
PLAIN = type("Kept", (Kept,), dict.fromkeys(("_keep_in_fp32_modules", *[
    "_keep_in_fp32_modules_strict"])))  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype", "norm", "gate"),
    [
        (Kept, "float16", "float32", "float32"),
        (Kept, "bfloat16", "float32", "float32"),
        (Kept, "float32", "float32", "float32"),
        (Kept, "float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"),
        (OF_TRANSFORMERS, "float16", "float32", "float32"),
        (OF_TRANSFORMERS, "bfloat16", "bfloat16", "float32"),
        (PLAIN, "float16", "float16", "float16"),
    ],
)
def test_a_dtype_is_given_to_what_a_loader_gives_it_to(
    kind: type[Kept], dtype: str, norm: str, gate: str
) -> None:
    wanted = {
        "up.weight": dtype,
        "up.bias": dtype,
        "norm.weight": norm,
        "gate.weight": gate,
        "packed": "float8_e4m3fn",
        "steps": "int64",
        "mean": dtype,
        "table": "float32",
    }
    found = source_of(kind(), dtype=getattr(torch, dtype)).module
    assert found is not None
    tensors = {**dict(found.named_parameters()), **dict(found.named_buffers())}
    assert {name: str(t.dtype) for name, t in tensors.items()} == {
        name: f"torch.{dtype}" for name, dtype in wanted.items()
    }


class Made(nn.Module):
    """Notes what it was made of; its table has the dtype that new tensors have by default."""

    def __init__(self, width: int, **more: Any) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.register_buffer("table", torch.zeros(3), persistent=False)


class OfConfig(Made):
    """As diffusers makes its own; it takes what it knows out of the config."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.width)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OfConfig:
        return cls(SimpleNamespace(width=config.pop("width")))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Made, {"width": 8}),
        (Made, MappingProxyType({"width": 8})),
        (OfConfig, MappingProxyType({"width": 8})),
        (OfConfig, {"width": 8}),
        (OfConfig, SimpleNamespace(width=8)),
    ],
)
def test_a_class_is_made_of_its_config_as_its_loader_makes_it(
    kind: type[nn.Module], config: Any
) -> None:
    before = dict(config) if isinstance(config, Mapping) else vars(config).copy()
    for dtype, table in (
        (None, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.float8_e4m3fn, torch.float32),  # no tensor is made in 8 bits by itself
    ):
        found = source_of(kind, config, dtype)
        assert (found.name, found.parameters, found.notes) == (kind.__name__, 64, ())
        module: Any = found.module
        assert module.up.weight.dtype is (dtype or torch.bfloat16)
        assert module.table.dtype is table and module.table.is_meta
        assert torch.get_default_dtype() is torch.float32
    assert before == (dict(config) if isinstance(config, Mapping) else vars(config))


def test_a_class_that_fails_is_named_with_its_error() -> None:
    class Refuses(nn.Module):
        def __init__(self, error: Exception) -> None:
            raise error

    for error, says in ((KeyError(), "KeyError"), (ValueError("no heads"), "no heads")):
        with pytest.raises(oracle_offload.OffloadError) as raised:
            plan(Refuses, config={"error": error})
        assert str(raised.value) == f"Refuses cannot be made of this config: {says}"
        assert raised.value.__cause__ is error
        assert torch.get_default_dtype() is torch.float32
    with pytest.raises(oracle_offload.OffloadError, match="Made cannot be made of this config: "):
        plan(Made)


@pytest.mark.parametrize(
    ("library", "config"),
    [("diffusers", {"_class_name": "A"}), ("transformers", {"architectures": ["A"]})],
)
def test_a_library_that_is_not_installed_is_named(
    library: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)  # as Python has what cannot be imported
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(oracle_offload.OffloadError) as error:
        plan(path)
    assert str(error.value) == f"{path} is a config of {library}, which is not installed"


def test_the_hub_cache_is_where_its_libraries_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert hub_cache() == Path.home() / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub_cache() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert hub_cache() == tmp_path / "cache"


def test_checkpointing_is_turned_on_as_the_class_has_it() -> None:
    names = ("gradient_checkpointing_enable", "enable_gradient_checkpointing")
    for name in names:
        assert switch_of(type("Net", (nn.Module,), {name: lambda self: None})()) == name
    assert switch_of(nn.Linear(1, 1)) == switch_of(None) == ""


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
    model[0].bias.requires_grad_(False)
    before["0.bias"] = (before["0.bias"][0], False)
    found = source_of(model)
    assert all(p.is_meta for p in found.module.parameters())
    copied = dict(found.module.named_parameters())
    assert all(isinstance(p, nn.Parameter) for p in copied.values())
    assert {n: p.requires_grad for n, p in copied.items()} == {n: g for n, (_, g) in before.items()}
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
    ("text", "count"),
    [("4B", 4e9), ("1.5m", 1.5e6), (7, 7), ("12 K", 12e3), ("2T", 2e12), (1, 1), (1.5, 1)],
)
def test_a_number_of_parameters(text: Any, count: float) -> None:
    assert source_of(text).parameters == count


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nothing", "'nothing' is no file, no folder, no model that is known by name "),
        (None, "not NoneType"),
        (0, "a number of parameters is above zero"),
        (0.5, "a number of parameters is above zero"),
        (10**18, "a number of parameters is above zero, and below 1e18"),
        (dict, "not type"),
        (Path("owner/name"), "'owner/name' is no file, no folder"),
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
        ("config.json", '{"architectures": []}', "names no class"),
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
        (
            "config.json",
            '{"architectures": ["LlamaConfig"]}',
            "is of class 'LlamaConfig', which transformers",
        ),
        ("m.safetensors", "short", "too short for a safetensors file"),
        ("m.safetensors.index.json", "{}", "it has no 'weight_map'"),
        (
            "m.safetensors.index.json",
            '{"weight_map": {"a": "../a.safetensors"}}',
            "names '../a.safetensors', which is no file next to it",
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
    for folder, file in (("index", "model_index.json"), ("part", "unet/config.json")):
        path = tmp_path / folder / file  # a pipeline has both
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        with pytest.raises(oracle_offload.OffloadError) as error:
            plan(tmp_path / folder)
        whole = f"{tmp_path / folder} holds neither config.json nor safetensors files"
        assert str(error.value) == whole
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
