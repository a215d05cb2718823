"""Loading by a library's class, its steps alone: whose class it is, dtypes, and refusals."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from oracle_offload.disk import conversion, pretrained
from oracle_offload.disk.header import Stored
from oracle_offload.disk.source import Fragment, Source, whole
from oracle_offload.errors import OffloadError


def named(name, module, *bases):
    return type(name, bases or (object,), {"__module__": module})


def test_whose_class_it_is_follows_from_what_it_is_made_of():
    base = named("PreTrainedModel", "transformers.modeling_utils")
    for kind, library in (
        (named("Own", "somewhere", base), "transformers"),
        (named("_BaseAutoModelClass", "transformers.models.auto"), "transformers"),
        (named("Other", "a.b", named("ModelMixin", "diffusers.models")), "diffusers"),
        (named("ModelMixin", "another.library"), "another"),
        (nn.Linear, ""),
        ("transformers.PreTrainedModel", ""),
    ):
        assert pretrained._library_of(kind) == library


@pytest.mark.parametrize(
    ("config", "method"),
    [({"quant_method": "gptq"}, "gptq"), ({"bits": 4}, "None"), ("by words", "by words")],
)
def test_what_is_quantised_is_refused_by_its_method(config, method, tmp_path):
    with pytest.raises(OffloadError) as raised:
        pretrained._refuse_quantised(config, tmp_path)
    assert str(raised.value).startswith(f"'{tmp_path}' is quantised ({method}): its library")
    for nothing in (None, {}):
        pretrained._refuse_quantised(nothing, tmp_path)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_default_dtype_is_the_models_while_it_is_made(dtype, fails):
    before = torch.get_default_dtype()
    seen = []

    def make():
        with pretrained._default_dtype(dtype):
            seen.append(torch.get_default_dtype())
            if fails:
                raise KeyError("planned")

    if fails:
        with pytest.raises(KeyError, match="planned"):
            make()
    else:
        make()
    assert seen == [dtype or before] and torch.get_default_dtype() is before


def diffuser(kept):
    """Return a class with what is asked of one of diffusers."""

    class Model(nn.Module):
        _keep_in_fp32_modules = kept

        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.block = nn.ModuleDict({"norm": nn.LayerNorm(width), "normal": nn.Linear(width, 1)})
            self.register_buffer("table", torch.ones(width))
            self.scale = nn.Parameter(torch.ones(width, dtype=torch.float32))  # as some classes do
            self.count = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
            self.registered = {}

        @classmethod
        def load_config(cls, path):
            return {"width": 3, "quantization_config": None}

        @classmethod
        def from_config(cls, config):
            return cls(config["width"])

        def register_to_config(self, **named):
            self.registered.update(named)

    return Model


@pytest.mark.parametrize(
    ("kept", "dtype", "found"),
    [
        ("norm", torch.bfloat16, ["block.norm", "norm"]),
        (["block"], torch.float16, ["block.norm", "block.normal"]),
        (["orm", "table"], torch.bfloat16, []),
        (None, torch.bfloat16, []),
        ("norm", None, []),
    ],
)
def test_a_model_of_diffusers_is_of_the_dtype_but_for_what_it_keeps(kept, dtype, found, tmp_path):
    model, pattern = pretrained._of_diffusers(diffuser(kept), tmp_path, dtype)
    names = {
        name.rpartition(".")[0] for name, _ in model.named_parameters() if pattern.search(name)
    }
    assert sorted(names) == found
    dtypes = {p.dtype for name, p in model.named_parameters() if name != "count"}
    assert dtypes == {dtype or torch.float32} and model.count.dtype is torch.int64
    assert model.table.dtype is (dtype or torch.float32), "computed as the class does"
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.table.is_meta and model.registered == {"_name_or_path": str(tmp_path)}


# ---- what becomes of places in files ----


def placed(name, *shape):
    nbytes = 4 * torch.Size(shape).numel()
    stored = Stored("F32", shape, 0, nbytes)
    return conversion._Made.of(Source(shape, (Fragment(name, None, stored, whole),)))


def filled(made, values):
    """Return the tensor that its parts fill, each with the values of its name."""
    source = made.source()
    target = torch.zeros(source.shape)
    for fragment in source.fragments:
        fragment.part_of(target).copy_(values[fragment.name])
    return target


A, B, C = (torch.arange(6.0).view(2, 3) + number for number in (0, 10, 20))
VALUES = {"a": A, "b": B, "c": C, "wide": torch.arange(8.0).view(2, 4)}


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_tensors_of_a_pattern_are_stacked(dim):
    operation = SimpleNamespace(dim=dim)
    made = {"x": [placed("a", 2, 3), placed("b", 2, 3), placed("c", 2, 3)]}
    found = conversion._merge(operation, made, ["y"], ())
    assert list(found) == ["y"]
    assert torch.equal(filled(found["y"][0], VALUES), torch.stack([A, B, C], dim))
    both = {"x": [placed("a", 2, 3)], "z": [placed("b", 2, 3), placed("c", 2, 3)]}
    found = conversion._merge(operation, both, ["y"], ())
    assert list(found) == ["x", "z"]
    assert torch.equal(filled(found["z"][0], VALUES), torch.stack([B, C], dim))


def test_tensors_of_all_patterns_lie_one_behind_the_other():
    made = {"x": [placed("a", 2, 3)], "y": [placed("wide", 2, 4)], "z": [placed("b", 2, 3)]}
    (found,) = conversion._concatenate(SimpleNamespace(dim=1), made, ["t"], ())["t"]
    assert torch.equal(filled(found, VALUES), torch.cat([A, VALUES["wide"], B], 1))
    stacked = conversion._merge(
        SimpleNamespace(dim=0),
        {"x": [placed("a", 2, 3), placed("c", 2, 3)], "y": [placed("b", 2, 3), placed("a", 2, 3)]},
        ["t"],
        (),
    )
    (found,) = conversion._concatenate(SimpleNamespace(dim=2), stacked, ["t"], ())["t"]
    expected = torch.cat([torch.stack([A, C]), torch.stack([B, A])], 2)
    assert torch.equal(filled(found, VALUES), expected)


@pytest.mark.parametrize(
    ("check", "expected", "turns"),
    [(False, (2, 3), True), (True, (2, 3), False), (True, (3, 2), True)],
)
@pytest.mark.parametrize(("targets", "name"), [(["t"], "t"), (["t", "u"], "x")])
def test_dimensions_are_exchanged_where_the_rule_says_so(check, expected, turns, targets, name):
    operation = SimpleNamespace(dim0=0, dim1=1, check_dims=check)
    found = conversion._transpose(operation, {"x": [placed("a", 2, 3)]}, targets, expected)
    assert list(found) == [name]
    assert torch.equal(filled(found[name][0], VALUES), A.T if turns else A)


def test_names_that_older_files_have_are_left_out_where_the_library_does(monkeypatch):
    model = nn.Module()
    model.rotary_emb = nn.Module()
    model.rotary_emb.register_buffer("inv_freq", torch.ones(1))
    model.register_buffer("position_ids", torch.ones(1))
    assert conversion.ignored_patterns(model) == []
    model._keys_to_ignore_on_load_unexpected = ["own"]
    assert conversion.ignored_patterns(model) == ["own"]
    library = SimpleNamespace(PreTrainedModel=nn.Module)
    monkeypatch.setitem(conversion.sys.modules, "transformers.modeling_utils", library)
    both = ["own", r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    assert conversion.ignored_patterns(model) == both
    del model.position_ids
    assert conversion.ignored_patterns(model) == both[:2]
    assert not conversion._is_of(model, "transformers.modeling_utils", "Another")
    assert not conversion._is_of(model, "no.such.library", "PreTrainedModel")


# ---- the library's own rules, by names ----


class Rule:
    """As transformers' converters: patterns of a file, those of the model, and what is done."""

    def __init__(self, sources, targets, *operations):
        self.source_patterns, self.target_patterns = sources, targets
        self.operations = operations


class MergeModulelist:
    dim = 0


class Unheard:
    pass


class Renaming:
    pass


class Stacks(nn.Module):
    base_model_prefix = "model"

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({"up": nn.Linear(3, 2, bias=False)})
        self.experts["up"].weight = nn.Parameter(torch.zeros(3, 2, 3))
        self.norm = nn.Linear(3, 2, bias=False)

    def get_parameter_or_buffer(self, name):
        return self.get_parameter(name)


@pytest.fixture
def converted(monkeypatch):
    """Return a function that finds the sources of a model by rules."""

    def find(rules, *names):
        asked = []

        def rename(key, renamings, converters, prefix, state):
            asked.append((key, len(renamings), len(converters), prefix, sorted(state)))
            number = key.rpartition(".")[2]
            if number.isdigit():
                return "experts.up.weight" if "lost" not in key else key, "experts.*"
            return key.removeprefix("old."), None

        core = SimpleNamespace(
            WeightConverter=Rule,
            WeightRenaming=Renaming,
            dot_natural_key=lambda key: [int(p) if p.isdigit() else p for p in key.split(".")],
            rename_source_key=rename,
        )
        mapping = SimpleNamespace(get_model_conversion_mapping=lambda module: rules)
        monkeypatch.setitem(conversion.sys.modules, "transformers", SimpleNamespace())
        monkeypatch.setitem(conversion.sys.modules, "transformers.conversion_mapping", mapping)
        monkeypatch.setitem(conversion.sys.modules, "transformers.core_model_loading", core)
        plain = {}
        for name in names:
            stored = Stored("F32", (2, 3), 0, 24)
            plain[name] = Source((2, 3), (Fragment(name, None, stored, whole),))
        return conversion._of_transformers(Stacks(), plain, "the file"), plain, asked

    return find


def test_experts_come_into_their_stack_in_the_order_of_their_numbers(converted):
    rules = [Rule(["experts.*"], ["up"], MergeModulelist()), Renaming(), Renaming()]
    names = ["e.10", "e.2", "old.norm.weight", "lost.1", "beside"]
    found, plain, asked = converted(rules, *names)
    assert sorted(found) == ["beside", "experts.up.weight", "lost.1", "norm.weight"]
    assert found["norm.weight"] is plain["old.norm.weight"]
    assert found["beside"] is plain["beside"] and found["lost.1"] is plain["lost.1"]
    stack = found["experts.up.weight"]
    assert stack.shape == (2, 2, 3)
    target = torch.zeros(2, 2, 3)
    for fragment, number in zip(stack.fragments, (2, 10), strict=True):
        assert fragment.name == f"e.{number}"
        fragment.part_of(target).fill_(number)
    assert target[0].unique().tolist() == [2] and target[1].unique().tolist() == [10]
    state = ["experts.up.weight", "norm.weight"]
    assert {row[1:4] for row in asked} == {(2, 1, "model")} and asked[0][4] == state


def test_a_name_of_the_model_itself_comes_before_one_that_is_renamed(converted):
    found, plain, _ = converted([], "norm.weight", "old.norm.weight")
    assert found == {"norm.weight": plain["norm.weight"]}


def test_what_the_library_does_in_a_way_that_is_not_known_is_refused(converted):
    with pytest.raises(OffloadError) as raised:
        converted([Rule(["experts.*"], ["up"], MergeModulelist(), Unheard())], "e.1", "e.2", "e.3")
    assert str(raised.value).startswith(
        "'the file': transformers makes 'experts.up.weight' of 'e.1' and 2 others by "
        "MergeModulelist, Unheard, which cannot be done while they are read"
    )


def test_without_the_library_a_file_has_the_names_of_the_model(monkeypatch):
    monkeypatch.setitem(conversion.sys.modules, "transformers.conversion_mapping", None)
    plain = {"a": 1}
    assert conversion._of_transformers(nn.Linear(1, 1), plain, "x") is plain


# ---- a model of transformers, and the whole way ----


class Config:
    def __init__(self, dtype=torch.bfloat16, quantization_config=None):
        self.dtype, self.quantization_config = dtype, quantization_config
        self._name_or_path = ""

    @classmethod
    def from_pretrained(cls, path):
        (text,) = {file.read_text() for file in path.glob("config.json")}
        found = cls(*([] if text == "plain" else [torch.float16]))
        found.read_by = cls.__name__
        if text == "quantised":
            found.quantization_config = {"quant_method": "gptq"}
        return found


class OwnConfig(Config):
    pass


class Learner(nn.Module):
    """What is asked of a model of transformers."""

    _keep_in_fp32_modules = None
    _keep_in_fp32_modules_strict = None

    def __init__(self, config, generates=True):
        super().__init__()
        self.config, self.dtype, self.generates = config, config.dtype, generates
        self.generation_config = "of the class"
        self.router = nn.Linear(2, 2)
        self.norm = nn.ModuleDict({"weight_of_norm": nn.LayerNorm(2)})
        self.to(config.dtype)
        self.steps = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)

    def can_generate(self):
        return self.generates


@pytest.fixture
def transformers(monkeypatch):
    """A library of which only the configurations are there."""
    generation = SimpleNamespace(from_pretrained=lambda path: f"of {path.name}")
    library = SimpleNamespace(AutoConfig=Config, GenerationConfig=generation)
    monkeypatch.setitem(sys.modules, "transformers", library)


def kind_of(own=None, made="_from_config", generates=True, **kept):
    class PreTrainedModel(Learner):
        __module__ = "transformers.modeling_utils"

    def make(config, **named):
        if "dtype" in named:
            config.dtype = named["dtype"]
        return PreTrainedModel(config, generates)

    PreTrainedModel.config_class = own
    setattr(PreTrainedModel, made, staticmethod(make))
    for name, value in kept.items():
        setattr(PreTrainedModel, name, value)
    return PreTrainedModel


@pytest.mark.parametrize("own", [None, OwnConfig])
@pytest.mark.parametrize("made", ["_from_config", "from_config"])
@pytest.mark.parametrize(("file", "generates"), [(True, True), (True, False), (False, True)])
def test_a_model_of_transformers_has_its_configuration_and_that_of_generation(
    transformers, tmp_path, own, made, file, generates
):
    (tmp_path / "config.json").write_text("plain")
    if file:
        (tmp_path / "generation_config.json").write_text("{}")
    model, kept = pretrained._of_transformers(kind_of(own, made, generates), tmp_path, None)
    assert model.config.read_by == ("Config" if own is None else "OwnConfig")
    told = f"of {tmp_path.name}" if file and generates else "of the class"
    assert model.generation_config == told and model.config._name_or_path == str(tmp_path)
    assert model.dtype is torch.bfloat16 and model.router.weight.is_meta
    assert not any(kept.search(name) for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("dtype", "strict", "half", "found"),
    [
        (torch.bfloat16, ["router"], ["norm"], ["router"]),
        (torch.float16, ["router"], ["norm.*norm"], ["norm", "router"]),
        (torch.float16, None, ["w*norm"], ["norm"]),
        (torch.float32, ["router"], ["norm"], []),
        (torch.float16, None, None, []),
        (torch.bfloat16, None, ["norm"], []),
    ],
)
def test_what_a_class_keeps_in_float32_follows_from_the_dtype(
    transformers, tmp_path, dtype, strict, half, found
):
    (tmp_path / "config.json").write_text("plain")
    kept = {"_keep_in_fp32_modules_strict": strict, "_keep_in_fp32_modules": half}
    model, pattern = pretrained._of_transformers(kind_of(**kept), tmp_path, dtype)
    assert model.dtype is dtype
    names = {name.split(".")[0] for name, _ in model.named_parameters() if pattern.search(name)}
    assert sorted(names) == found


def test_a_folder_is_attached_as_a_model_in_evaluation_mode(transformers, tmp_path, monkeypatch):
    folder = tmp_path / "unet"
    folder.mkdir()
    (folder / "config.json").write_text("plain")
    attached = []
    monkeypatch.setattr(
        pretrained, "attach", lambda model, device, **named: attached.append((device, named))
    )
    kind = kind_of(_keep_in_fp32_modules_strict=["router", "steps"])
    model = pretrained.from_pretrained(kind, tmp_path, "cpu", subfolder="unet", ram_budget=1)
    assert not model.training and attached == [("cpu", {"weights": folder, "ram_budget": 1})]
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes.pop("steps") is torch.int64
    assert {name for name, kind in dtypes.items() if kind is torch.float32} == {
        *("router.weight", "router.bias"),
    }
    pretrained.from_pretrained(kind, str(folder), weights="elsewhere")
    assert attached[1] == ("cuda", {"weights": "elsewhere"})
    (folder / "config.json").write_text("quantised")
    with pytest.raises(OffloadError, match=r"unet' is quantised \(gptq\)"):
        pretrained.from_pretrained(kind, folder)
    with pytest.raises(OffloadError, match="is no model's class of transformers or diffusers"):
        pretrained.from_pretrained(nn.Linear, folder)
    with pytest.raises(OffloadError, match="gone' is no folder; nothing is downloaded"):
        pretrained.from_pretrained(kind, tmp_path / "gone")
    assert len(attached) == 2


def test_a_folder_of_diffusers_is_attached_alike(tmp_path, monkeypatch):
    attached = []
    monkeypatch.setattr(
        pretrained, "attach", lambda model, device, **named: attached.append((device, named))
    )
    kind = named("ModelMixin", "diffusers.models", diffuser("norm"))
    model = pretrained.from_pretrained(kind, tmp_path, "cpu", dtype=torch.bfloat16)
    assert attached == [("cpu", {"weights": tmp_path})] and not model.training
    floats = {n for n, p in model.named_parameters() if p.dtype is torch.float32}
    assert floats == {
        f"{name}.{part}" for name in ("norm", "block.norm") for part in ("weight", "bias")
    }
