"""`from_pretrained`: to the last bit what the library's own gives, attached; nothing is guessed."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
import socket
import sys
from types import SimpleNamespace

import models
import pytest
import torch
from equality import assert_models_agree, assert_same
from safetensors.torch import load_file, save_file
from torch import nn

import oracle_offload
from oracle_offload.disk import conversion
from oracle_offload.disk.checkpoint import Checkpoint
from oracle_offload.disk.header import Stored
from oracle_offload.disk.source import Fragment, Source
from oracle_offload.engine.engines import open_states
from oracle_offload.errors import OffloadError
from oracle_offload.train import pretrained


def of_transformers(name, config, **sizes):
    """Return what makes a model of a class of transformers, of such a configuration."""

    def make():
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**sizes))

    return make


def of_diffusers(name, **sizes):
    """Return what makes a model of a class of diffusers."""

    def make():
        import diffusers

        return getattr(diffusers, name)(**sizes)

    return make


TEXT = dict(vocab_size=100, num_attention_heads=4, num_hidden_layers=2)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2, use_cache=False)
IMAGE = dict(num_attention_heads=2, num_layers=2)
BUILDS = {
    "llama": models.llama,
    "llama-tied": lambda: models.llama(tie_word_embeddings=True),
    "mixtral": models.mixtral,
    "qwen2-moe": models.qwen2_moe,
    "gpt-oss": of_transformers(
        *("GptOssForCausalLM", "GptOssConfig"), **TEXT, **EXPERTS, num_key_value_heads=2,
        hidden_size=64, intermediate_size=32, head_dim=16,
    ),
    "t5": of_transformers(
        *("T5EncoderModel", "T5Config"), vocab_size=100, d_model=32, d_kv=8, d_ff=64,
        num_layers=2, num_heads=4,
    ),
    "clip": of_transformers(
        *("CLIPTextModelWithProjection", "CLIPTextConfig"), **TEXT, hidden_size=32,
        intermediate_size=64, max_position_embeddings=16,
    ),
    "flux": models.flux,
    "unet": models.unet,
    "autoencoder": models.autoencoder,
    "pixart": of_diffusers(
        "PixArtTransformer2DModel", **IMAGE, attention_head_dim=8, in_channels=4, out_channels=8,
        cross_attention_dim=16, caption_channels=16, sample_size=8, use_additional_conditions=False,
    ),
    "qwen-image": of_diffusers(
        "QwenImageTransformer2DModel", **IMAGE, attention_head_dim=16, in_channels=16,
        out_channels=4, joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    ),
    "wan": of_diffusers(
        "WanTransformer3DModel", **IMAGE, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=32, rope_max_seq_len=32,
    ),
}  # fmt: skip


def saved(name, folder, dtype=torch.float32):
    """Return the class of a small model, written to `folder` in shards."""
    torch.manual_seed(0)
    model = BUILDS[name]().to(dtype)
    model.save_pretrained(folder, max_shard_size="100KB")
    return type(model)


def plain_attributes(model):
    return {
        f"{name}.{key}": value
        for name, inner in model.named_modules()
        for key, value in vars(inner).items()
        if isinstance(value, torch.Tensor) and key != "freqs_cis"
    }


def assert_same_model(found, expected):
    assert type(found).__name__ == type(expected).__name__
    assert found.training == expected.training
    names = [name for name, _ in expected.named_parameters(remove_duplicate=False)]
    assert [name for name, _ in found.named_parameters(remove_duplicate=False)] == names
    for kind in ("named_parameters", "named_buffers"):
        assert_same(dict(getattr(found, kind)()), dict(getattr(expected, kind)()), kind)
    ours, theirs = plain_attributes(found), plain_attributes(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    if hasattr(found.config, "to_dict"):
        drop = {"_name_or_path", "transformers_version", "dtype"}
        ours, theirs = found.config.to_dict(), expected.config.to_dict()
        assert {k: v for k, v in ours.items() if k not in drop} == {
            k: v for k, v in theirs.items() if k not in drop
        }


def assert_loads(kind, folder, expected=None, **options):
    """Assert that the model of a folder is the library's own, and return it, detached."""
    model = oracle_offload.from_pretrained(kind, folder, "cpu", **options)
    assert model._memory_manager.layers
    assert_same_model(model, expected or kind.from_pretrained(folder, **options))
    return model._memory_manager.detach()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, None) for name in BUILDS),
        ("mixtral", torch.bfloat16),
        ("t5", torch.bfloat16),
        ("t5", torch.float16),  # a part stays in float32
        ("pixart", torch.bfloat16),
        ("wan", torch.float16),
    ],
    ids=str,
)
def test_the_model_is_the_librarys_own_of_the_dtype_that_is_asked_for(tmp_path, name, dtype):
    assert_loads(saved(name, tmp_path), tmp_path, **({} if dtype is None else {"dtype": dtype}))


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_a_file_with_the_names_of_the_model_is_read_as_it_is(tmp_path, name):
    expected = BUILDS[name]().eval()
    try:
        expected.save_pretrained(tmp_path, save_original_format=False)
    except TypeError:
        pytest.skip("before version 5 a file has the model's names in any case")
    opened = Checkpoint(tmp_path)
    opened.close()
    assert {n for n, _ in expected.named_parameters()} == opened.tensors.keys()
    assert_loads(type(expected), tmp_path, expected)


def test_the_dtype_of_the_configuration_is_taken(tmp_path):
    kind = saved("llama", tmp_path, torch.bfloat16)
    model = assert_loads(kind, tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "step"),
    [("mixtral", models.language_step), ("flux", models.flux_step)],
    ids=["mixtral", "flux"],
)
def test_it_trains_as_the_librarys_own(tmp_path, name, step):
    kind = saved(name, tmp_path)
    # A copy, because tensors in a mapped file are not aligned, which changes bits of some kernels.
    resident = copy.deepcopy(kind.from_pretrained(tmp_path))
    model = oracle_offload.from_pretrained(kind, tmp_path, "cpu", offload_percent=0.9)
    assert_models_agree(model, resident, step, steps=1)
    model._memory_manager.detach()


def test_auto_classes_and_the_settings_of_generation(tmp_path):
    from transformers import AutoModelForCausalLM, GenerationConfig

    saved("llama", tmp_path)
    GenerationConfig(max_new_tokens=7, temperature=0.3, do_sample=True).save_pretrained(tmp_path)
    model = assert_loads(AutoModelForCausalLM, tmp_path)
    assert model.generation_config.max_new_tokens == 7


def test_a_name_of_the_hub_is_no_folder(tmp_path, monkeypatch):
    """The libraries would ask a network for it."""
    from diffusers import FluxTransformer2DModel
    from transformers import LlamaForCausalLM

    def refuse(*arguments):
        raise AssertionError("asked a network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for kind in (LlamaForCausalLM, FluxTransformer2DModel):
        with pytest.raises(OffloadError, match="name' is no folder; nothing is downloaded"):
            oracle_offload.from_pretrained(kind, "owner/name", "cpu")


def test_a_part_of_a_pipeline_and_the_hub_cache(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    kind = saved("flux", snapshot / "transformer")
    expected = kind.from_pretrained(snapshot, subfolder="transformer")
    options = {"subfolder": "transformer", "ram_budget": "offloaded"}
    assert_loads(kind, tmp_path / "models--a--b", expected, **options)


# ---- the library's own conversion of names ----


def test_experts_of_a_file_are_one_by_one_and_are_read_into_their_stack(tmp_path, monkeypatch):
    from oracle_offload.disk import source

    kind = saved("mixtral", tmp_path)
    names = {
        name
        for path in tmp_path.glob("*.safetensors")
        for name in load_file(path)
        if "experts" in name
    }
    assert len(names) == 2 * 4 * 3  # layers, experts, matrices
    strides = []
    original = source.Source.parts

    def parts(self, reader, target):
        if len(self.fragments) > 1:
            strides.extend(f.part_of(target).is_contiguous() for f in self.fragments)
        return original(self, reader, target)

    monkeypatch.setattr(source.Source, "parts", parts)
    model = oracle_offload.from_pretrained(kind, tmp_path, "cpu")
    assert len(strides) == len(names) and all(strides)  # so bytes are read where they stay
    model._memory_manager.detach()


def change(folder, edit):
    """Let `edit` change all tensors of a checkpoint, which is one file then."""
    state = {}
    for path in sorted(folder.glob("*.safetensors")):
        state.update(load_file(path))
        path.unlink()
    for path in folder.glob("*.index.json"):
        path.unlink()
    edit(state)
    save_file({name: t.contiguous() for name, t in state.items()}, folder / "model.safetensors")


def without(pattern):
    def edit(state):
        for name in [name for name in state if re.search(pattern, name)]:
            del state[name]

    return edit


def other_shape(pattern):
    def edit(state):
        for name in [name for name in state if re.search(pattern, name)]:
            state[name] = state[name][:-1]

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without(r"experts\.3\.w1"), "has shape .* of 7 in all, but the model's has"),
        (without(r"experts\.3\."), "of 6 in all, but the model's has"),
        (
            without(r"layers\.0.*experts"),
            "it lacks: 'model.layers.0.mlp.experts.gate_up_proj', 'mo",
        ),
        (
            other_shape(r"experts\.2\.w2"),
            "'model.layers.0.block_sparse_moe.experts.2.w2.weight' has",
        ),
        (other_shape(r"experts\.0\.w2"), "has shape"),
    ],
    ids=["a matrix", "an expert", "a layer", "a shape", "the first shape"],
)
def test_experts_that_lack_something_are_refused(tmp_path, edit, message):
    kind = saved("mixtral", tmp_path)
    change(tmp_path, edit)
    with pytest.raises(OffloadError, match=message):
        oracle_offload.from_pretrained(kind, tmp_path, "cpu")
    assert not open_states()


def rule(module, entries):
    """Let transformers know one more rule for this kind of model."""
    from transformers import conversion_mapping as mapping

    original = mapping.get_model_conversion_mapping
    return lambda model, *rest, **more: entries + original(model, *rest, **more)


@pytest.mark.parametrize("what", ["chunk", "transpose", "check", "concatenate", "rename"])
def test_every_rule_does_what_the_library_does(tmp_path, monkeypatch, what):
    """Against `from_pretrained` with the same rule, on a file that is written for it."""
    from transformers import conversion_mapping, core_model_loading
    from transformers import modeling_utils as utils

    load = core_model_loading
    rules = {
        "chunk": load.WeightConverter(
            ["self_attn.kv_proj.weight"],
            ["self_attn.k_proj.weight", "self_attn.v_proj.weight"],
            [load.Chunk(dim=0)],
        ),
        "transpose": load.WeightConverter(
            "mlp.turned.weight", "mlp.down_proj.weight", [load.Transpose(0, 1)]
        ),
        "check": load.WeightConverter(
            "mlp.turned.weight", "mlp.down_proj.weight", [load.Transpose(0, 1, check_dims=True)]
        ),
        "concatenate": load.WeightConverter(
            ["mlp.left.weight", "mlp.right.weight"],
            "mlp.down_proj.weight",
            [load.Concatenate(dim=1)],
        ),
        "rename": load.WeightRenaming("mlp.old.weight", "mlp.down_proj.weight"),
    }

    def edit(state):
        for name in list(state):
            if what == "chunk" and name.endswith("k_proj.weight"):
                other = name.replace("k_proj", "v_proj")
                both = torch.cat([state.pop(name), state.pop(other)])
                state[name.replace("k_proj", "kv_proj")] = both
            elif name.endswith("down_proj.weight") and what != "chunk":
                stem, weight = name.removesuffix("down_proj.weight"), state.pop(name)
                if what == "concatenate":
                    state[f"{stem}left.weight"] = weight[:, :50]
                    state[f"{stem}right.weight"] = weight[:, 50:]
                elif what == "rename":
                    state[f"{stem}old.weight"] = weight
                else:
                    turned = what == "transpose" or "layers.1" in name
                    state[f"{stem}turned.weight"] = weight.T if turned else weight

    kind = saved("llama", tmp_path)
    plain = kind.from_pretrained(tmp_path)
    change(tmp_path, edit)
    asked = rule(kind, [rules[what]])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", asked)
    monkeypatch.setattr(utils, "get_model_conversion_mapping", asked, raising=False)
    assert_same_model(kind.from_pretrained(tmp_path), plain)
    assert_loads(kind, tmp_path)


def test_a_rule_that_is_not_known_is_refused_by_name(tmp_path, monkeypatch):
    from transformers import conversion_mapping, core_model_loading

    class Unheard(core_model_loading.Transpose):
        pass

    kind = saved("llama", tmp_path)
    rules = [
        core_model_loading.WeightConverter(
            "mlp.down_proj.weight", "mlp.down_proj.weight", [Unheard(0, 1)]
        )
    ]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", rule(kind, rules))
    name = r"model\.layers\.0\.mlp\.down_proj\.weight"
    with pytest.raises(OffloadError, match=f"makes '{name}' of '{name}' and 0 others by Unheard,"):
        oracle_offload.from_pretrained(kind, tmp_path, "cpu")
    assert not open_states()


CHUNKS = {
    "two rows": ({}, (2, 3), ["k", "v"], [(0, 12), (12, 12)]),
    "three rows": ({}, (3, 3), ["k", "v"], None),
    "columns": ({"dim": 1}, (2, 4), ["k", "v"], None),
    "as many as an attribute says": ({"num_shards_attribute": "heads"}, (2, 3), ["k", "v"], None),
    "a vector": ({}, (6,), ["q", "k", "v"], [(0, 8), (8, 8), (16, 8)]),
}


@pytest.mark.parametrize("what", CHUNKS)
def test_a_tensor_is_cut_into_rows_that_lie_one_behind_the_other(what):
    about, shape, targets, places = CHUNKS[what]
    nbytes = 4 * torch.Size(shape).numel()
    stored = Stored("F32", shape, 100, nbytes)
    whole = Source(shape, (Fragment("kv", None, stored, lambda tensor: tensor),))
    operation = SimpleNamespace(**{"dim": 0, "num_shards_attribute": None, **about})
    made = {"kv": [conversion._Made.of(whole)]}
    if places is None:
        with pytest.raises(ValueError, match="not rows of one tensor"):
            conversion._chunk(operation, made, targets, ())
        return
    found = conversion._chunk(operation, made, targets, ())
    assert list(found) == targets
    for target, (begin, size) in zip(targets, places, strict=True):
        (fragment,) = found[target][0].source().fragments
        rows = (shape[0] // len(targets), *shape[1:])
        assert fragment.stored == Stored("F32", rows, 100 + begin, size)
        assert found[target][0].shape == rows
    turned = found[targets[0]][0].below((3, 1), torch.t)
    with pytest.raises(ValueError, match="not rows of one tensor"):
        conversion._chunk(operation, {"kv": [turned]}, ["k"], ())


def test_names_that_the_library_ignores_are_ignored(tmp_path):
    kind = saved("llama", tmp_path)
    change(tmp_path, lambda state: state.update({"model.rotary_emb.inv_freq": torch.zeros(8)}))
    oracle_offload.from_pretrained(kind, tmp_path, "cpu")._memory_manager.detach()
    change(tmp_path, lambda state: state.update({"model.position_ids": torch.zeros(8)}))
    with pytest.raises(OffloadError, match=r"the model has no: 'model\.position_ids'"):
        oracle_offload.from_pretrained(kind, tmp_path, "cpu")
    kind = saved("clip", tmp_path / "clip")
    name = "text_model.embeddings.position_ids"
    change(tmp_path / "clip", lambda state: state.update({name: torch.zeros(1, 16)}))
    oracle_offload.from_pretrained(kind, tmp_path / "clip", "cpu")._memory_manager.detach()


def test_deprecated_names_of_diffusers_are_converted(tmp_path):
    kind = saved("autoencoder", tmp_path)

    def edit(state):
        for now, then in (("to_q", "query"), ("to_k", "key"), ("to_v", "value")):
            for name in [name for name in state if f".{now}." in name]:
                state[name.replace(now, then)] = state.pop(name)
        for name in [name for name in state if ".to_out.0." in name]:
            state[name.replace("to_out.0", "proj_attn")] = state.pop(name)

    change(tmp_path, edit)
    (tmp_path / "model.safetensors").rename(tmp_path / "diffusion_pytorch_model.safetensors")
    assert_loads(kind, tmp_path)


# ---- what is refused ----


@pytest.mark.parametrize("name", ["llama", "flux"])
def test_a_checkpoint_that_is_quantised_is_refused(tmp_path, name):
    kind = saved(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OffloadError, match=r"is quantised \(fp8\)"):
        oracle_offload.from_pretrained(kind, tmp_path, "cpu")


def test_a_class_with_a_configuration_of_its_own_needs_no_entry_in_the_library(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    class OwnConfig(LlamaConfig):
        model_type = "not known to the library"

    class Own(LlamaForCausalLM):
        config_class = OwnConfig

    config = OwnConfig(**models.llama().config.to_dict() | {"model_type": OwnConfig.model_type})
    Own(config).save_pretrained(tmp_path)
    model = oracle_offload.from_pretrained(Own, tmp_path, "cpu")
    assert type(model.config) is OwnConfig and model._memory_manager.layers
    assert_same(dict(model.state_dict()), dict(Own.from_pretrained(tmp_path).state_dict()))
    model._memory_manager.detach()


# ---- classes of other libraries' kinds, of which nothing else is known ----


class Config:
    """A configuration that any class of transformers may have."""

    def __init__(self, dtype=torch.bfloat16):
        self.dtype, self.quantization_config, self._name_or_path = dtype, None, ""

    @classmethod
    def from_pretrained(cls, path):
        found = cls(*([] if (path / "config.json").read_text() == "plain" else [torch.float16]))
        found.read_by = cls.__name__
        return found


class OwnConfig(Config):
    pass


class Learner(nn.Module):
    """What is asked of a model of transformers."""

    _keep_in_fp32_modules = None
    _keep_in_fp32_modules_strict = None

    def __init__(self, config, generates):
        super().__init__()
        self.config, self.dtype, self.generates = config, config.dtype, generates
        self.generation_config = "of the class"
        self.router = nn.Linear(2, 2)
        self.norm = nn.ModuleDict({"weight_of_norm": nn.LayerNorm(2)})
        self.to(config.dtype)
        self.steps = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)

    def can_generate(self):
        return self.generates


def learner(own=None, made="_from_config", generates=True, **kept):
    """Return a class of transformers, and one below it that is defined elsewhere."""

    class PreTrainedModel(Learner):
        __module__ = "transformers.modeling_utils"

    def make(config, **named):
        config.dtype = named.get("dtype", config.dtype)
        return PreTrainedModel(config, generates)

    PreTrainedModel.config_class = own
    setattr(PreTrainedModel, made, staticmethod(make))
    for name, value in kept.items():
        setattr(PreTrainedModel, name, value)
    return type("Own", (PreTrainedModel,), {"__module__": "somewhere"}), PreTrainedModel


def diffuser(kept=None, fails=False):
    """Return a class with what is asked of one of diffusers."""

    class ModelMixin(nn.Module):
        __module__ = "diffusers.models"
        _keep_in_fp32_modules = kept

        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.block = nn.ModuleDict({"norm": nn.LayerNorm(width), "normal": nn.Linear(width, 1)})
            self.register_buffer("table", torch.ones(width))
            self.scale = nn.Parameter(torch.ones(width, dtype=torch.float32))  # as some classes do
            self.count = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
            self.registered = {}
            if fails:
                raise KeyError("planned")

        @classmethod
        def load_config(cls, path):
            return {"width": 3, "quantization_config": None}

        @classmethod
        def from_config(cls, config):
            return cls(config["width"])

        def register_to_config(self, **named):
            self.registered.update(named)

    return ModelMixin


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Of transformers only the configurations are there; return what is given to `attach`."""
    (tmp_path / "config.json").write_text("plain")
    generation = SimpleNamespace(from_pretrained=lambda path: f"of {path.name}")
    library = SimpleNamespace(AutoConfig=Config, GenerationConfig=generation)
    monkeypatch.setitem(sys.modules, "transformers", library)
    attached = []
    monkeypatch.setattr(
        pretrained, "attach", lambda model, device, **named: attached.append((device, named))
    )
    return attached


def in_float32(model):
    return {name for name, p in model.named_parameters() if p.dtype is torch.float32}


def test_a_model_of_transformers_has_its_configuration_and_that_of_generation(given, tmp_path):
    for own, made, file, generates in itertools.product(
        (None, OwnConfig), ("_from_config", "from_config"), (False, True), (False, True)
    ):
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        if file:
            (tmp_path / "generation_config.json").write_text("{}")
        for kind in learner(own, made, generates):
            model = oracle_offload.from_pretrained(kind, tmp_path)
            assert model.config.read_by == ("Config" if own is None else "OwnConfig")
            told = f"of {tmp_path.name}" if file and generates else "of the class"
            assert model.generation_config == told
            assert model.config._name_or_path == str(tmp_path) and not model.training
            assert model.dtype is torch.bfloat16 and model.router.weight.is_meta
            assert not in_float32(model)


@pytest.mark.parametrize(
    ("dtype", "strict", "half", "found"),
    [
        (torch.bfloat16, ["router", "steps"], ["norm"], ["router"]),
        (torch.float16, ["router"], ["norm.*norm"], ["norm", "router"]),
        (torch.float16, None, ["wei*_of_norm"], ["norm"]),
        (torch.float64, ["router"], ["norm"], []),
        (torch.float16, None, None, []),
        (torch.bfloat16, None, ["norm"], []),
    ],
)
def test_what_a_class_keeps_in_float32_follows_from_the_dtype(
    given, tmp_path, dtype, strict, half, found
):
    kind, _ = learner(_keep_in_fp32_modules_strict=strict, _keep_in_fp32_modules=half)
    model = oracle_offload.from_pretrained(kind, tmp_path, dtype=dtype)
    assert model.dtype is dtype and model.steps.dtype is torch.int64
    assert sorted({name.split(".")[0] for name in in_float32(model)}) == found


@pytest.mark.parametrize(
    ("kept", "dtype", "found"),
    [
        ("norm", torch.bfloat16, ["block.norm", "norm"]),
        (["block"], torch.float16, ["block.norm", "block.normal"]),
        (["orm", "table"], torch.bfloat16, []),
        (None, torch.bfloat16, []),
    ],
)
def test_a_model_of_diffusers_is_of_the_dtype_but_for_what_it_keeps(
    given, tmp_path, kept, dtype, found
):
    model = oracle_offload.from_pretrained(diffuser(kept), tmp_path, "cpu", dtype=dtype)
    assert sorted({name.rpartition(".")[0] for name in in_float32(model)}) == found
    others = {p.dtype for name, p in model.named_parameters() if name not in in_float32(model)}
    assert others == {dtype, torch.int64} and model.count.dtype is torch.int64
    assert model.table.dtype is dtype, "computed as the class does"
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.table.is_meta and model.registered == {"_name_or_path": str(tmp_path)}
    assert given == [("cpu", {"weights": tmp_path})] and not model.training


def test_the_default_dtype_is_the_models_while_it_is_made(given, tmp_path):
    before = torch.get_default_dtype()
    model = oracle_offload.from_pretrained(diffuser("norm"), tmp_path)
    assert {p.dtype for p in model.parameters()} == {before, torch.int64}
    for fails in (False, True):
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            oracle_offload.from_pretrained(diffuser(fails=fails), tmp_path, dtype=torch.float16)
        assert torch.get_default_dtype() is before


def test_where_and_of_what_it_is_attached(given, tmp_path):
    folder = tmp_path / "unet"
    folder.mkdir()
    (folder / "config.json").write_text("float16")
    kind, _ = learner()
    model = oracle_offload.from_pretrained(kind, tmp_path, "cpu", subfolder="unet", ram_budget=1)
    assert model.dtype is torch.float16
    oracle_offload.from_pretrained(kind, str(folder), weights="elsewhere")
    assert given == [
        ("cpu", {"weights": folder, "ram_budget": 1}),
        ("cuda", {"weights": "elsewhere"}),
    ]


@pytest.mark.parametrize(
    ("config", "method"),
    [({"quant_method": "gptq"}, "gptq"), ({"bits": 4}, "None"), ("by words", "by words"), ({}, "")],
)
def test_what_is_quantised_is_refused_by_its_method(given, tmp_path, monkeypatch, config, method):
    kind, _ = learner()
    read = Config.from_pretrained

    def quantised(path):
        found = read(path)
        found.quantization_config = config
        return found

    monkeypatch.setattr(Config, "from_pretrained", quantised)
    if not method:
        oracle_offload.from_pretrained(kind, tmp_path)
        return
    with pytest.raises(OffloadError) as raised:
        oracle_offload.from_pretrained(kind, tmp_path)
    assert str(raised.value).startswith(f"'{tmp_path}' is quantised ({method}): its library")
    assert not given


def test_what_is_no_models_class_or_no_folder_is_refused(given, tmp_path):
    other = type("ModelMixin", (nn.Module,), {"__module__": "another.library"})
    for kind in (other, nn.Linear, "transformers.PreTrainedModel"):
        with pytest.raises(OffloadError, match="is no model's class of transformers or diffusers"):
            oracle_offload.from_pretrained(kind, tmp_path)
    with pytest.raises(OffloadError, match="gone' is no folder; nothing is downloaded"):
        oracle_offload.from_pretrained(learner()[0], tmp_path / "gone")
    assert not given


# ---- a library's rules, as its objects say them ----


class Rule:
    """As transformers' converters: patterns of a file, those of the model, and what is done."""

    def __init__(self, sources, *operations, targets=("t",)):
        self.source_patterns, self.target_patterns = sources, targets
        self.operations = operations


class Renaming:
    pass


def operation(kind, **about):
    return type(kind, (), about)()


def merged(dim):
    return operation("MergeModulelist", dim=dim)


def behind(dim):
    return operation("Concatenate", dim=dim)


def turned(check):
    return operation("Transpose", dim0=0, dim1=1, check_dims=check)


class Renamed(nn.Module):
    """A model whose tensor `t` is made of those of a file."""

    base_model_prefix = "model"

    def __init__(self, shape):
        super().__init__()
        self.t = nn.Parameter(torch.zeros(shape))
        self.norm = nn.Linear(3, 2, bias=False)

    def get_parameter_or_buffer(self, name):
        return self.get_parameter(name)


def sources_of(folder, monkeypatch, tensors, rules, shape=(2, 3)):
    """Return the sources of a model by rules, of a file with these tensors, and what was asked.

    Tensors named x.0, x.1, ... are those of the pattern x.
    """
    asked = []

    def rename(key, renamings, converters, prefix, state):
        asked.append((key, len(renamings), len(converters), prefix, sorted(state)))
        pattern, _, number = key.rpartition(".")
        if number.isdigit():
            return ("t" if "lost" not in key else key), pattern
        return key.removeprefix("old."), None

    core = SimpleNamespace(
        WeightConverter=Rule,
        WeightRenaming=Renaming,
        dot_natural_key=lambda key: [int(p) if p.isdigit() else p for p in key.split(".")],
        rename_source_key=rename,
    )
    mapping = SimpleNamespace(get_model_conversion_mapping=lambda module: rules)
    modeling = SimpleNamespace(PreTrainedModel=Renamed)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", mapping)
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", core)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", modeling)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    checkpoint = Checkpoint(folder)
    try:
        return conversion.find_sources(Renamed(shape), checkpoint), asked
    finally:
        checkpoint.close()


def filled(source, tensors):
    """Return the tensor that its parts fill, each with the values of its name."""
    target = torch.zeros(source.shape)
    for fragment in source.fragments:
        fragment.part_of(target).copy_(tensors[fragment.name])
    return target


A, B, C, D = (torch.arange(6.0).view(2, 3) + number for number in (0, 10, 20, 30))
WIDE, SQUARE = torch.arange(8.0).view(2, 4), torch.arange(9.0).view(3, 3)
RULES = {
    "stacked along the first": ({"x.0": A, "x.2": B, "x.10": C}, [merged(0)], (A, B, C)),
    "stacked along the last": ({"x.0": A, "x.1": B}, [merged(2)], torch.stack([A, B], 2)),
    "one behind the other": ({"x.0": A, "y.0": WIDE}, [behind(1)], torch.cat([A, WIDE], 1)),
    "of three": ({"x.0": A, "y.0": B, "z.0": D}, [behind(0)], torch.cat([A, B, D])),
    "stacks": (
        {"x.0": A, "x.1": C, "y.0": B, "y.1": D},
        [merged(0), behind(2)],
        torch.cat([torch.stack([A, C]), torch.stack([B, D])], 2),
    ),
    "stacked along the second": ({"x.0": A, "x.1": C}, [merged(1)], torch.stack([A, C], 1)),
    "turned": ({"x.0": A}, [turned(False)], A.T),
    "turned to fit": ({"x.0": A}, [turned(True)], A.T),
    "fits as it is": ({"x.0": A}, [turned(True)], A),
    "a square is turned": ({"x.0": SQUARE}, [turned(False)], SQUARE.T),
    "a square fits as it is": ({"x.0": SQUARE}, [turned(True)], SQUARE),
}


@pytest.mark.parametrize("what", RULES)
def test_the_parts_of_a_tensor_lie_where_the_library_puts_them(tmp_path, monkeypatch, what):
    tensors, operations, expected = RULES[what]
    expected = torch.stack(expected) if isinstance(expected, tuple) else expected
    rules = [Rule(["x", "y", "z"], *operations)]
    found, _ = sources_of(tmp_path, monkeypatch, tensors, rules, expected.shape)
    assert list(found) == ["t"] and found["t"].shape == expected.shape
    assert torch.equal(filled(found["t"], tensors), expected)


def test_what_no_rule_is_for_keeps_the_name_that_the_library_gives(tmp_path, monkeypatch):
    tensors = {"x.10": A, "x.2": B, "old.norm.weight": C, "lost.1": D, "old.beside": WIDE}
    rules = [Rule(["x"], merged(0)), Renaming(), Renaming()]
    found, asked = sources_of(tmp_path, monkeypatch, tensors, rules, (2, 2, 3))
    assert sorted(found) == ["lost.1", "norm.weight", "old.beside", "t"]
    for name, kept in (("norm.weight", C), ("old.beside", WIDE), ("lost.1", D)):
        assert torch.equal(filled(found[name], tensors), kept)
    assert torch.equal(filled(found["t"], tensors), torch.stack([B, A]))
    assert {row[1:] for row in (tuple(map(str, row)) for row in asked)} == {
        ("2", "1", "model", "['norm.weight', 't']")
    }


def test_a_name_of_the_model_itself_comes_before_one_that_is_renamed(tmp_path, monkeypatch):
    tensors = {"norm.weight": A, "old.norm.weight": B}
    found, _ = sources_of(tmp_path, monkeypatch, tensors, [])
    assert list(found) == ["norm.weight"]
    assert torch.equal(filled(found["norm.weight"], tensors), A)


def test_what_the_library_does_in_a_way_that_is_not_known_is_refused(tmp_path, monkeypatch):
    tensors = {"x.1": A, "x.2": B, "x.3": C}
    rules = [Rule(["x"], merged(0), operation("Unheard"))]
    with pytest.raises(OffloadError) as raised:
        sources_of(tmp_path, monkeypatch, tensors, rules)
    assert str(raised.value).startswith(
        f"'{tmp_path}': transformers makes 't' of 'x.1' and 2 others by MergeModulelist, Unheard, "
        "which cannot be done while they are read"
    )


def test_without_such_rules_a_file_has_the_names_of_the_model(tmp_path, monkeypatch):
    found, _ = sources_of(tmp_path, monkeypatch, {"x.1": A}, [Rule(["x"], merged(0))])
    assert list(found) == ["t"]
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    checkpoint = Checkpoint(tmp_path)
    assert list(conversion.find_sources(Renamed((2, 3)), checkpoint)) == ["x.1"]
    checkpoint.close()


def test_names_that_older_files_have_are_left_out_where_the_library_does(monkeypatch):
    model = nn.Module()
    model.rotary_emb = nn.Module()
    model.rotary_emb.register_buffer("inv_freq", torch.ones(1))
    model.register_buffer("position_ids", torch.ones(1))
    assert conversion.ignored_patterns(model) == []
    model._keys_to_ignore_on_load_unexpected = ["own"]
    assert conversion.ignored_patterns(model) == ["own"]
    library = SimpleNamespace(PreTrainedModel=nn.Module)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", library)
    both = ["own", r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    assert conversion.ignored_patterns(model) == both
    del model.position_ids
    assert conversion.ignored_patterns(model) == both[:2]
