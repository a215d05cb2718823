"""What `train-lora` is made of, each part alone: adapters, texts of a language model, its kind."""

from __future__ import annotations

import json
import shutil

import peft
import pytest
import torch
from torch import nn

from oracle_offload.trainer import language, load, lora
from oracle_offload.trainer.settings import Settings, SettingsError

# ---- adapters ----


class Net(nn.Module):
    """Layers of several kinds; one Parameter has a name that peft gives to its own."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.q_proj = nn.Linear(8, 8)
        self.block = nn.ModuleDict({"q_proj": nn.Linear(8, 8), "my_q_proj": nn.Linear(8, 8)})
        self.block["out"] = nn.Sequential(nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)
        self.lora_scale = nn.Parameter(torch.ones(8))
        self.to(dtype)


def settings(**told):
    return Settings("m", "d", **{"rank": 2, "alpha": 3.0, **told})


def injected(named, by_default=(), **told):
    model = Net()
    config = lora.inject(model, settings(target_modules=named, **told), by_default)
    return model, config


@pytest.mark.parametrize(
    ("named", "by_default", "layers"),
    [
        ("q_proj", [], ["block.q_proj", "q_proj"]),
        (" q_proj , out.0,", [], ["block.out.0", "block.q_proj", "q_proj"]),
        ("my_q_proj", ["q_proj"], ["block.my_q_proj"]),
        ("", ["block.my_q_proj", "embedding", "norm"], ["block.my_q_proj"]),
        (" ,", ["block.q_proj"], ["block.q_proj"]),
    ],
)
def test_adapters_are_beside_the_linear_layers_that_are_named(named, by_default, layers):
    model, config = injected(named, by_default)
    found = sorted(name.partition(".lora_")[0] for name in lora.trained(model))
    assert found == sorted([*layers, *layers])
    assert (config.r, config.lora_alpha) == (2, 3.0) and sorted(config.target_modules) == layers


def test_a_name_that_ends_another_one_stands_for_itself_alone():
    """peft takes a list for ends of names; what lies deeper is to stay as it is."""
    model, config = injected("", ["q_proj"])
    assert {name.partition(".lora_")[0] for name in lora.trained(model)} == {"q_proj"}
    again = Net()
    peft.inject_adapter_in_model(config, again)
    assert lora.trained(again).keys() == lora.trained(model).keys()


def test_adapters_are_float32_and_all_that_is_trained():
    model, _ = injected("q_proj")
    names = {name for name, _ in model.named_parameters()}
    trained = lora.trained(model)
    assert len(trained) == 4 and all(".lora_" in name for name in trained)
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    others = [model.get_parameter(name) for name in names - trained.keys()]
    assert not any(parameter.requires_grad for parameter in others)
    assert {parameter.dtype for parameter in others} == {torch.bfloat16}
    found = lora.values(model)
    assert found.keys() == trained.keys() and not any(v.requires_grad for v in found.values())
    before = {name: value.clone() for name, value in found.items()}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(1)
    assert all(torch.equal(found[name], before[name]) for name in found), "they are copies"


def test_adapters_begin_as_the_seed_decides():
    one, same, other = (lora.values(injected("q_proj", seed=seed)[0]) for seed in (1, 1, 2))
    (name, *_) = (name for name in one if "lora_A" in name)
    assert torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name])


@pytest.mark.parametrize(("named", "by_default"), [("norm", []), ("", []), ("proj", ["q_proj"])])
def test_names_of_no_linear_layer_are_refused(named, by_default):
    with pytest.raises(SettingsError, match=f"target_modules='{named}': no linear layer has such"):
        injected(named, by_default)


# ---- language ----


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of a language model without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    """Return a function that makes a task of texts."""

    def of(model, *given, **told):
        file = tmp_path / "texts.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in given))
        return language.Language(Settings(str(model), str(file), rank=2, **told))

    return of


def test_bytes_are_tokens_and_others_are_left_out():
    tokens = language.Bytes()
    assert tokens.encode("hé") == [104, 195, 169]
    assert tokens.decode([104, 255, 256, 257, 105, 195, 169]) == "h\ufffdié"


def test_a_byte_of_nothing_is_a_token_like_any_other(llama, texts):
    task = texts(llama, "a\0b\0", "a\0")
    assert task.lengths == [4, 2] and task.eval_lengths == []
    (piece,) = task.pieces([0, 1], torch.device("cpu"), False)
    assert piece.terms == 3 + 1
    expected = 0.0
    for text in ("a\0b\0", "a\0"):
        ids = torch.tensor([list(text.encode())])
        expected += float(task.model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
    assert float(piece.loss_sum()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("length", "window", "told"),
    [(17, -1, "context carried: "), (17, 0, "1 of 2 chunks"), (18, 0, "2 of 3 chunks")],
)
def test_what_chunks_see_is_told_of_the_longest_text(llama, texts, length, window, told):
    task = texts(llama, "abc", "a" * length, chunk_size=8, window_size=window)
    assert told in task.notes[-1]
    pieces = task.pieces([1], torch.device("cpu"), False)
    assert [piece.terms for piece in pieces] == [8, 8, 1][: len(pieces)]
    assert sum(piece.terms for piece in pieces) == length - 1


def test_all_layers_but_the_head_get_an_adapter(llama, texts):
    task = texts(llama, "abc")
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in lora.trained(task.model)}
    assert names == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert task.model.training


def test_a_text_of_one_token_is_left_out_and_none_is_refused(llama, texts):
    assert texts(llama, "a", "ab", "").lengths == [2]
    with pytest.raises(SettingsError, match="no text has two tokens"):
        texts(llama, "a", "")


def test_what_is_saved_says_of_which_model_it_is_and_for_what(llama, texts, tmp_path):
    from safetensors.torch import load_file

    task = texts(llama, "abc")
    path = task.save(tmp_path)
    told = json.loads((tmp_path / "adapter_config.json").read_text("utf-8"))
    assert (told["task_type"], told["base_model_name_or_path"]) == ("CAUSAL_LM", str(llama))
    assert told["r"] == 2 and path.name == "adapter_model.safetensors"
    found = load_file(path)
    assert len(found) == 2 * 7
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in found


def test_a_model_of_too_few_tokens_for_bytes_needs_its_tokenizer(llama, texts, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    file = folder / "config.json"
    for tokens, fits in ((256, True), (255, False)):
        file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": tokens}))
        if fits:
            assert texts(folder, "abc").notes == [
                "the model has no tokenizer that loads: each byte is a token"
            ]
            continue
        task = language.Language.__new__(language.Language)
        task._settings = Settings(str(folder), "d")
        task.model = nn.Module()
        task.model.config = type("Config", (), {"vocab_size": tokens})()
        with pytest.raises(SettingsError, match=f"and {tokens} tokens are too few for bytes"):
            task._load_tokenizer()


# ---- which of them it is ----


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the hub; return a function that puts files of a model there."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def put(name, *files):
        folder = tmp_path / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("1234")
        (folder / "snapshots" / "1234").mkdir(parents=True)
        for file in files:
            (folder / "snapshots" / "1234" / file).write_text("{}")

    return put


@pytest.mark.parametrize("where", ["folder", "cache"])
@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["model_index.json"], "images"),
        (["model_index.json", "config.json"], "images"),
        (["config.json"], "language"),
        (["other.json"], ""),
    ],
    ids=str,
)
def test_a_task_is_chosen_by_the_files_of_the_model(
    where, files, kind, tmp_path, cache, monkeypatch
):
    from oracle_offload.trainer import images

    monkeypatch.setattr(images, "Images", lambda settings: ("images", settings.model))
    monkeypatch.setattr(language, "Language", lambda settings: ("language", settings.model))
    name = "some/model"
    if where == "cache":
        cache(name, *files)
    else:
        name = str(tmp_path / "model")
        (tmp_path / "model").mkdir()
        for file in files:
            (tmp_path / "model" / file).write_text("{}")
    if kind:
        assert load.load_task(Settings(name, "d")) == (kind, name)
        return
    with pytest.raises(SettingsError, match="is neither the folder of a transformers model"):
        load.load_task(Settings(name, "d"))


def test_no_model_is_in_a_cache_that_cannot_be_asked(cache, monkeypatch):
    import sys

    cache("some/model", "config.json")
    assert load._has("some/model", "config.json")
    assert not load._has("no name of a model", "config.json")
    assert not load._has("another/model", "config.json")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert not load._has("some/model", "config.json")
