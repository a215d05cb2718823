"""Which layers are managed, why others are not, and in which units they travel."""

from __future__ import annotations

import io
import types
import weakref

import pytest
import torch
from equality import attached
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from oracle_offload import OffloadError
from oracle_offload._core import ALIGNMENT
from oracle_offload.layers.linear import LinearLayer
from oracle_offload.layers.swap import apply_to_residents
from oracle_offload.model import selection
from oracle_offload.model.selection import (
    Chosen,
    NothingToManage,
    choose,
    choose_again,
    group_units,
    least_bytes,
    listed,
    place_bytes,
    select,
)

KIB, MIB = 1 << 10, 1 << 20


def pair(**changed):
    """Return a model of one layer that is as it should be, and another."""
    return nn.Sequential(nn.Linear(8, 8, **changed), nn.Linear(8, 8))


def reasons(model, ignore=()):
    chosen = select(model, ignore)
    assert not {leaf.name for leaf in chosen.leaves} & chosen.resident.keys()
    return chosen.resident


class Quantised(nn.Parameter):
    """A Parameter of a class of its own."""


def set_weight(make, kind=nn.Parameter, **options):
    return lambda layer: setattr(layer, "weight", kind(make(layer.weight.detach()), **options))


integers = set_weight(torch.Tensor.char, requires_grad=False)


def own_forward(layer):
    layer.forward = types.MethodType(type(layer).forward, layer)
    return layer


def replaced(model):
    model.forward = lambda x: x
    return model


def computed_bias(layer):
    bias = layer._parameters.pop("bias")
    layer.bias = bias.detach() * 2


CHANGES = {
    "computed": (
        parametrizations.weight_norm,
        "its weight is computed (parametrised), not a parameter",
    ),
    "another parameter": (
        lambda layer: layer.register_parameter("scale", nn.Parameter(torch.ones(1))),
        "it has another parameter, 'scale'",
    ),
    "none registered": (lambda layer: layer.register_parameter("scale", None), None),
    "integers": (integers, "'weight' is torch.int8"),
    "sparse": (
        set_weight(torch.Tensor.to_sparse),
        "'weight' is a Parameter, not a plain parameter",
    ),
    "of a class": (
        set_weight(torch.clone, Quantised),
        "'weight' is a Quantised, not a plain parameter",
    ),
    "with gaps": (
        set_weight(lambda weight: torch.randn(8, 16)[:, :8]),
        "'weight' has gaps or overlaps in memory (strides (16, 1))",
    ),
    "forward replaced": (replaced, None),
    "forward of its own": (own_forward, None),
    "bias computed": (computed_bias, "its bias is computed, not a parameter"),
    "no bias": (lambda layer: setattr(layer, "bias", None), None),
    "max norm": (
        lambda table: setattr(table, "max_norm", 2.0),
        "max_norm writes its weight in forward",
    ),
}
OF_TABLES = ("another parameter", "integers", "with gaps", "max norm", "no bias")


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        *((nn.Linear, what) for what in CHANGES if what != "max norm"),
        *((nn.Embedding, what) for what in OF_TABLES),
    ],
)
def test_what_keeps_a_layer_on_the_device(kind, what):
    change, reason = CHANGES[what]
    model = nn.Sequential(kind(8, 8), nn.Linear(8, 8))
    change(model[0])
    assert reasons(model) == ({"0": reason} if reason else {})
    assert [leaf.name for leaf in select(model).leaves] == (["1"] if reason else ["0", "1"])


def test_a_layer_without_elements_stays():
    assert reasons(nn.Sequential(nn.Linear(0, 8), nn.Linear(8, 8))) == {"0": "'weight' is empty"}


def test_a_parameter_that_is_ignored_keeps_its_layer():
    model = pair()
    assert reasons(model, model[0].bias) == {"0": "'bias' is named in ignore_modules"}
    assert reasons(model, [model[1].weight]) == {"1": "'weight' is named in ignore_modules"}


def test_heads_of_attention_and_adapters_are_named_with_their_module():
    lora = nn.ModuleDict({"base_layer": nn.Linear(8, 8)})
    lora["lora_A"] = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
    lora.register_module("dropout", None)
    model = nn.Sequential(nn.MultiheadAttention(8, 2), lora)
    assert reasons(model) == {
        "0.out_proj": "part of MultiheadAttention '0', which computes with it, and 256 B are too "
        "small to stream",
        "1.lora_A.default": "adapter of '1'",
    }


def test_what_is_tied_to_a_module_that_is_not_managed_stays_with_it():
    tied = "its weight is tied to '{}', which is not managed"
    model = nn.Sequential(nn.EmbeddingBag(8, 8), *(nn.Linear(8, 8) for _ in range(3)))
    assert reasons(model) == {}
    model[2].weight = model[1].weight
    assert reasons(model) == {}, "two managed layers may share one"
    assert reasons(model, "2") == {"1": tied.format("2"), "2": "named in ignore_modules"}
    model[2].weight = model[0].weight
    assert reasons(model) == {"2": tied.format("0")}


def test_a_chain_of_ties_is_followed_to_its_end():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[1].weight = model[0].weight
    model[2].bias = model[1].bias
    assert set(reasons(model, "2")) == {"0", "1", "2"}


@pytest.mark.parametrize("gap", [-1, 0, 1])
def test_memory_that_overlaps_stays_and_memory_that_touches_does_not(gap):
    memory = torch.randn(200)
    model = pair(bias=False)
    model[0].weight = nn.Parameter(memory[:64].view(8, 8))
    model[1].weight = nn.Parameter(memory[64 + gap : 128 + gap].view(8, 8))
    model.append(nn.Linear(8, 8))
    overlaps = "its memory overlaps another parameter's"
    assert reasons(model) == (dict.fromkeys(("0", "1"), overlaps) if gap < 0 else {})


def test_all_parts_of_one_parameter_overlap_it():
    """Also those that are not next to its beginning."""
    whole = torch.zeros(16, 4)
    model = nn.Sequential(*(nn.Linear(4, n, bias=False) for n in (16, 2, 2, 4)))
    for layer, part in zip(model, (whole, whole[2:4], whole[8:10], torch.zeros(4, 4)), strict=True):
        layer.weight = nn.Parameter(part)
    assert reasons(model) == dict.fromkeys("012", "its memory overlaps another parameter's")


def test_a_buffer_in_the_memory_of_a_weight_keeps_it():
    model = pair()
    model.register_buffer("view", model[0].weight.detach()[3])
    model.register_buffer("nothing", None)
    assert reasons(model) == {"0": "its memory overlaps another parameter's"}


# ---- what is asked for ----


def blocks():
    return nn.ModuleDict(
        {name: nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for name in ("up", "down")}
    )


@pytest.mark.parametrize(
    ("entries", "left"),
    [
        ((), set()),
        (None, set()),
        ("up", {"up.0", "up.1"}),
        ("*.1", {"up.1", "down.1"}),
        (["up.0", "down.0"], {"up.0", "down.0"}),
        (lambda model: model["up"], {"up.0", "up.1"}),
        (lambda model: [model["down"][1]], {"down.1"}),
        (lambda model: model["up"][0].weight, {"up.0"}),
    ],
    ids="nothing none name pattern names module modules parameter".split(),
)
def test_what_is_ignored_stays(entries, left):
    model = blocks()
    assert set(reasons(model, entries(model) if callable(entries) else entries)) == left


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("upp", r"no module or parameter named 'upp'; did you mean 'up'\? Names are dotted"),
        ("0", r"no module or parameter named '0'; did you mean '0' or 'up.0' or 'down.0'\?"),
        (
            "zzz",
            r"no module or parameter named 'zzz' Names are dotted, with the wildcards of fnmatch",
        ),
        (3, "ignore_modules: 3 is neither a module, a parameter nor a module's name"),
    ],
)
def test_an_entry_that_names_nothing_is_refused_with_what_is_near(entry, said):
    model = blocks()
    with pytest.raises(ValueError, match=said):
        select(model, [entry])


def test_a_model_with_nothing_to_manage_says_why_of_each_layer():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    with pytest.raises(OffloadError) as said:
        select(model, "?")
    assert str(said.value) == (
        "Sequential has no layer to manage: no Linear, convolution or embedding with plain "
        "floating-point weights ('0', '1', '2' and 2 more: named in ignore_modules)."
    )
    with pytest.raises(OffloadError, match=r"floating-point weights\.$"):
        select(nn.Tanh())
    with pytest.raises(OffloadError, match=r"weights \('Linear': named in ignore_modules\)\.$"):
        select(nn.Linear(8, 8), "")


def test_one_and_several_meta_parameters():
    with pytest.raises(OffloadError, match=r"^'weight' is on the meta device, without values"):
        select(nn.Linear(8, 8, bias=False, device="meta"))
    with pytest.raises(OffloadError, match=r"^'0.weight', '0.bias' are on the meta device"):
        select(nn.Sequential(nn.Linear(8, 8, device="meta")))
    model = pair()
    model.register_buffer("mean", torch.empty(2, device="meta"))
    with pytest.raises(OffloadError, match=r"^'mean' is on the meta device"):
        select(model)


def test_layers_of_another_attach_are_named():
    model = pair()
    with attached(model):
        with pytest.raises(OffloadError, match=r"^'inner.0', 'inner.1': attached already"):
            select(nn.ModuleDict({"inner": model}))
        with pytest.raises(OffloadError, match=r"^'Linear': attached already"):
            select(model[0])
        beside = nn.ModuleDict({"inner": model, "other": nn.Linear(8, 8)})
        assert [leaf.name for leaf in select(beside, [model]).leaves] == ["other"]
        assert [leaf.name for leaf in select(beside, "inner*").leaves] == ["other"]


@pytest.mark.parametrize(
    ("count", "shown"), [(1, "'0'"), (2, "'0', '1'"), (3, "'0', '1' and 1 more")]
)
def test_names_for_a_message(count, shown):
    assert listed([str(n) for n in range(count)], 2) == shown


# ---- units ----


def leaf(nbytes, block="b", trainable=False):
    module = nn.Linear(1, nbytes // 4, bias=False)
    module.weight.requires_grad_(trainable)
    return Chosen("", module, LinearLayer, block)


def sizes(leaves):
    return [[leaf.module.weight.nbytes for leaf in unit] for unit in group_units(leaves)]


def test_small_leaves_of_a_block_travel_together_up_to_64_kib():
    assert sizes([leaf(32 * KIB)] * 3) == [[32 * KIB] * 2, [32 * KIB]]
    assert sizes([leaf(32 * KIB), leaf(32 * KIB + 512)]) == [[32 * KIB], [32 * KIB + 512]]
    assert sizes([leaf(MIB), leaf(4 * KIB)]) == [[MIB], [4 * KIB]]


def test_blocks_and_trainable_leaves_travel_apart():
    small = 4 * KIB
    assert sizes([leaf(small), leaf(small, "c"), leaf(small)]) == [[small]] * 3
    assert sizes([leaf(small), leaf(small, trainable=True), leaf(small)]) == [[small]] * 3
    assert sizes([leaf(small, trainable=True)] * 2) == [[small] * 2]


@pytest.mark.parametrize(
    ("total", "limit"), [(32 * MIB, 128 * KIB), (1 << 30, 4 * MIB), (2 << 30, 4 * MIB)]
)
def test_a_unit_of_several_is_at_most_a_256th_of_all_and_4_mib(total, limit):
    def unit_of(first, second):
        rest = total - first - second
        meta = nn.Linear(1, rest // 4, bias=False, device="meta")
        return group_units([leaf(first), leaf(second), Chosen("", meta, LinearLayer, "other")])

    assert len(unit_of(limit // 2, limit // 2)) == 2
    assert len(unit_of(limit // 2, limit // 2 + 512)) == 3


def test_a_block_is_an_element_of_a_list():
    inner = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"a": nn.Linear(8, 8)}))
    model = nn.ModuleDict({"blocks": nn.ModuleList([inner]), "head": nn.Linear(8, 8)})
    found = {leaf.name: leaf.block for leaf in select(model).leaves}
    assert found == {"blocks.0.0": "blocks.0", "blocks.0.1.a": "blocks.0.1", "head": ""}

    def attention():
        made = nn.Module()
        made.query, made.inner = nn.Linear(8, 8), nn.Identity()
        made.inner.key = nn.Linear(8, 8)
        return made

    model = nn.Module()
    model.blocks, model.head = nn.ModuleList([attention(), attention()]), attention()
    found = {leaf.name: leaf.block for leaf in select(model).leaves}
    assert found == {
        "blocks.0.query": "blocks.0", "blocks.0.inner.key": "blocks.0",
        "blocks.1.query": "blocks.1", "blocks.1.inner.key": "blocks.1",
        "head.query": "", "head.inner.key": "",
    }  # fmt: skip


# ---- what is lent, and to whom ----


class Bare(nn.Module):
    """A Parameter, and a forward that computes with it; `uses` says which others it uses."""

    def __init__(self, *shape):
        super().__init__()
        self.table = nn.Parameter(torch.ones(shape or (4, 4)))

    def forward(self, x):
        return x @ self.table


class Held(nn.Module):
    """Parameters of modules without a forward, two deep."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.tables = nn.ParameterList([torch.ones(4, 4), torch.ones(4)])
        self.inner.nothing = None
        self.inner.register_parameter("none", None)

    def forward(self, x):
        return x @ self.inner.tables[0] + self.inner.tables[1]


class Takes(nn.Module):
    """Computes with the tensors of its children instead of calling them."""

    def __init__(self):
        super().__init__()
        self.child, self.bag = nn.Linear(4, 4), nn.EmbeddingBag(4, 4)

    def forward(self, x):
        return F.linear(x, self.child.weight, self.child.bias) @ self.bag.weight


class Sibling(nn.Module):
    """Computes with a tensor of a module that is no part of it, but next to it in a list."""

    def __init__(self, layer):
        super().__init__()
        self.__dict__["others"] = layer

    def forward(self, x):
        return x @ self.others.weight


def siblings(readers):
    """A layer and as many modules next to it, each of which computes with its weight."""
    layer = nn.EmbeddingBag(4, 4)
    return nn.ModuleList([layer, *(Sibling(layer) for _ in range(readers))])


def lent(model, ignore=()):
    """Return the lent tensors of each lender, and why others stay."""
    chosen = choose(model, ignore)
    return {
        leaf.name: leaf.kind.names for leaf in chosen.leaves if leaf.kind.lends_to_code
    }, chosen.parameters | chosen.resident


@pytest.mark.parametrize(
    ("model", "lenders", "stay"),
    [
        (Bare(), {"": ("table",)}, {}),
        (nn.Sequential(Bare(), Bare()), {"0": ("table",), "1": ("table",)}, {}),
        (Held(), {"": ("inner.tables.0", "inner.tables.1")}, {}),
        (nn.Sequential(Held()), {"0": ("inner.tables.0", "inner.tables.1")}, {}),
        (
            nn.Sequential(nn.MultiheadAttention(4, 2)),
            {"0": ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")},
            {},
        ),
        (Takes(), {"bag": ("weight",)}, {}),
        (nn.ModuleList([Takes()]), {"0.bag": ("weight",)}, {}),
        (siblings(2), {"0": ("weight",)}, {}),
        (
            nn.ModuleList([nn.ParameterList([torch.ones(4)]), nn.Linear(4, 4)]), {},
            {"0.0": "no module that it is part of has a forward"},
        ),
        (
            nn.Sequential(nn.Linear(4, 4), nn.EmbeddingBag(4, 4, max_norm=1.0)), {},
            {"1.weight": "max_norm writes its weight in forward"},
        ),
        (nn.Sequential(nn.Linear(4, 4), replaced(Bare())), {"1": ("table",)}, {}),
        (own_forward(Bare()), {"": ("table",)}, {}),
        (replaced(Held()), {"": ("inner.tables.0", "inner.tables.1")}, {}),
    ],
    ids=(
        "own two held deep attention takes deeper two no-forward max-norm replaced own-forward root"
    ).split(),
)  # fmt: skip
def test_what_is_lent_to_whom_and_why_the_rest_is_not(model, lenders, stay, nothing_is_small):
    if not lenders and all(type(part) is not nn.Linear for part in model.modules()):
        with pytest.raises(NothingToManage) as refused:
            choose(model)
        name = type(model).__name__
        assert str(refused.value) == (
            f"{name} has no layer to manage: no Linear, convolution or embedding with plain "
            f"floating-point weights ({listed(list(stay))}: {next(iter(stay.values()))})."
        )
    else:
        assert lent(model) == (lenders, stay)


def test_leaves_stand_in_the_order_of_the_modules_whoever_they_are_lent_by(nothing_is_small):
    model = nn.Sequential(nn.Linear(4, 4), Bare(), nn.Linear(4, 4), Takes())
    leaves = choose(model).leaves
    assert [leaf.name for leaf in leaves] == ["0", "1", "2", "3.child", "3.bag"]
    assert [leaf.block for leaf in leaves] == ["", "", "", "3", "3"]
    assert leaves[1].tensors() == [model[1].table]


def test_tensors_that_cannot_be_lent_stay_one_by_one(nothing_is_small):
    model = nn.Sequential(Bare(), nn.Linear(4, 4))
    model[0].whole = nn.Parameter(torch.ones(4).to_sparse())
    model[0].second, model[0].third = (nn.Parameter(torch.ones(4)) for _ in range(2))
    found, stay = lent(model, [model[0].second])
    assert found == {"0": ("table", "third")}
    assert stay == {
        "0.whole": "'whole' is a Parameter, not a plain parameter",
        "0.second": "'second' is named in ignore_modules",
    }
    found, stay = lent(model, ["0"])
    assert found == {} and set(stay.values()) == {"named in ignore_modules"} and len(stay) == 4


def test_what_shares_memory_with_a_lent_tensor_stays_and_the_others_are_lent(nothing_is_small):
    model = nn.Sequential(Bare(), Bare(), nn.Linear(4, 4))
    model[0].second = nn.Parameter(torch.ones(4))
    model.register_buffer("view", model[0].table.detach()[1])
    model.register_buffer("again", model[1].table.detach())
    found, stay = lent(model)
    assert found == {"0": ("second",)}
    assert stay == dict.fromkeys(("0.table", "1.table"), "its memory overlaps another parameter's")
    model[1].register_buffer("own", model[1].table.detach()[:1])
    del model.again
    assert lent(model) == (found, stay), "nor is what it shares with a tensor of its own module"
    tied = nn.Sequential(Bare(), Bare(), Bare())
    tied[1].table = tied[0].table
    assert lent(tied)[0] == dict.fromkeys("012", ("table",)), "two may be lent one"
    assert lent(tied, "1")[0] == {"2": ("table",)}
    assert lent(tied, "1")[1]["0.table"] == "its weight is tied to '1', which is not managed"


def test_a_layer_whose_tensors_its_parent_takes_is_resident_as_a_layer(nothing_is_small):
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    chosen = choose(model, [model[0].out_proj.bias])
    assert chosen.resident == {"0.out_proj": "'bias' is named in ignore_modules"}
    assert chosen.parameters == {}
    assert {leaf.name: leaf.kind.names for leaf in chosen.leaves if leaf.kind.lends_to_code} == {
        "0": ("in_proj_weight", "in_proj_bias", "out_proj.weight")
    }


def cast_layerwise(layer):
    """As diffusers does: a hook that casts the weights before each call, and back after it."""
    layer._diffusers_hook = types.SimpleNamespace(hooks={"layerwise_casting": object()})
    return layer


def test_what_a_hook_replaces_around_each_call_is_lent_for_as_long(monkeypatch):
    model = nn.Sequential(cast_layerwise(nn.Linear(4, 4)), nn.Linear(4, 4))
    said = (
        "layerwise casting replaces its weight around each call, and {} B are too small to stream"
    )
    assert reasons(model) == {"0": said.format(64)}
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)
    assert lent(model) == ({"0": ("weight", "bias")}, {})
    around = {leaf.name: leaf.kind.around_call for leaf in choose(model).leaves}
    assert around == {"0": True, "1": False}
    assert not choose(nn.Sequential(Bare())).leaves[0].kind.around_call


class Comfy(nn.Module):
    """A quantised layer, whose tensors move together or not at all."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
        self.register_buffer("weight_scale", torch.ones(4))
        self.register_buffer("comfy_quant", torch.zeros(4, dtype=torch.uint8))

    def forward(self, x):
        return x @ self.weight.to(x.dtype) * self.weight_scale


def taken_quantised():
    model = Takes()
    model.child = Comfy()
    return nn.Sequential(nn.Linear(8, 8), model)


def quantised_head():
    model = nn.MultiheadAttention(4, 2)
    model.child = Comfy()
    return nn.Sequential(nn.Linear(8, 8), model)


@pytest.mark.parametrize("model", [taken_quantised(), quantised_head()], ids=["taken", "head"])
def test_a_quantised_layer_that_others_compute_with_is_managed(model):
    chosen = choose(model)
    assert "1.child" in {leaf.name for leaf in chosen.leaves}
    assert not any(name.startswith("1.child") for name in (*chosen.resident, *chosen.parameters))
    cast_layerwise(model[1].child)
    why = choose(model).resident["1.child"]
    assert why == "layerwise casting replaces its weight around each call"


class Whole(nn.Module):
    """Calls its child; with `reads` it computes with the child's table, too."""

    def __init__(self, child, reads):
        super().__init__()
        self.child, self.last, self.reads = child, nn.Linear(4, 4), reads

    def forward(self, x):
        return self.last(self.child(x)) + (x @ self.child.table if self.reads else x)


def loaded(scripted):
    """Return what a file of TorchScript has: tensors, no Parameters."""
    with io.BytesIO() as file:
        torch.jit.save(scripted, file)
        file.seek(0)
        return torch.jit.load(file)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("of_file", [False, True])
def test_a_part_in_torchscript_stays_and_the_model_has_the_residents_bits(
    reads, of_file, nothing_is_small, caplog
):
    torch.manual_seed(0)
    parts = [torch.jit.script(Bare()) for _ in range(2)]
    resident, managed = models = [Whole(loaded(p) if of_file else p, reads) for p in parts]
    managed.load_state_dict(resident.state_dict())
    inputs = torch.randn(3, 4)
    with attached(managed, "cpu") as manager:
        assert [layer.name for layer in manager.layers] == ["last"]
        assert manager.resident == {"child.table": "child is compiled TorchScript"}
        assert "no known format" not in caplog.text
        for model in models:
            model(inputs).square().sum().backward()
        assert manager.state.engine.stats()["h2d_bytes"] > 0
        for one, other in zip(managed.parameters(), resident.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    with pytest.raises(NothingToManage, match=r"'table': the model is compiled TorchScript"):
        choose(parts[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("made", ["plain", "scripted", "of a file"])
def test_a_part_that_is_not_managed_moves_to_the_device_once(made):
    """In TorchScript, too."""
    part = nn.BatchNorm1d(4)
    part = part if made == "plain" else torch.jit.script(part)
    part = loaded(part) if made == "of a file" else part
    before = dict(part.named_parameters())
    apply_to_residents(part, lambda tensor: tensor + 1)
    assert all(tensor is before[key] for key, tensor in part.named_parameters())
    expected = {"weight": 2.0, "bias": 1.0, "running_mean": 1.0, "running_var": 2.0}
    assert {key: part.state_dict()[key].tolist() for key in expected} == {
        key: [value] * 4 for key, value in expected.items()
    }
    assert part.num_batches_tracked == 1


# ---- small tensors ----


def tables(*sizes, beside=0):
    """Tensors of these bytes on the meta device, and a layer of `beside` bytes."""
    with torch.device("meta"):
        model = nn.Sequential(*(Bare(1, nbytes // 4) for nbytes in sizes))
        model.append(nn.Linear(1, max(1, beside // 4), bias=False))
    return model


def small(model):
    """Return the places of those that stay because they are small."""
    chosen = choose(model)
    assert all(
        why.startswith("Bare has no operator of its own here, and ")
        and why.endswith(" are too small to stream")
        for why in chosen.parameters.values()
    )
    return [int(name.split(".")[0]) for name in chosen.parameters]


@pytest.mark.parametrize(
    ("model", "stay"),
    [
        (tables(64 * KIB, 64 * KIB - 4, 4), [1, 2]),
        # Together a MiB, the smallest first.
        (tables(*[32 * KIB] * 33), list(range(32))),
        (tables(60 * KIB, *[32 * KIB] * 32, 4 * KIB), [*range(1, 32), 33]),
        (tables(*[32 * KIB] * 33, beside=90 * MIB), list(range(32))),
        # Or 1% of a model of more than 100 MiB, which they are part of.
        (tables(*[32 * KIB] * 100, beside=200 * MIB), list(range(65))),
        (tables(*[32 * KIB] * 65, beside=206 * MIB - 32 * KIB), list(range(65))),
        # Never more than 64 MiB.
        (tables(*[63 * KIB] * 1100, beside=7000 * MIB), list(range(1040))),
    ],
    ids="each together smallest little share edge most".split(),
)
def test_small_tensors_stay_as_long_as_they_are_little_together(model, stay):
    assert small(model) == stay


def test_a_small_tensor_counts_once_and_its_size_is_told():
    model = tables(*[32 * KIB] * 40)
    for number in range(1, 40):
        model[number].table = model[0].table
    chosen = choose(model)
    assert len(chosen.parameters) == 40
    assert chosen.parameters["7.table"] == (
        "Bare has no operator of its own here, and 32.00 KiB are too small to stream"
    )


def test_a_tensor_belongs_to_the_module_that_it_is_a_part_of():
    modules = dict.fromkeys(("", "a", "a.b"))
    for name, owner in (
        ("weight", ""), ("a.weight", "a"), ("a.b.weight.data.scale", "a.b"), ("state.codes", ""),
    ):  # fmt: skip
        assert selection._owner_of(name, modules) == owner


# ---- how much room ----


def chosen_units(model):
    return group_units(choose(model).leaves)


def test_the_least_room_is_two_of_the_largest_and_what_stays_lent_around_a_layer(nothing_is_small):
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(1, n * MIB // 4, bias=False) for n in (3, 5, 4)))
    assert least_bytes(chosen_units(layers)) == 10 * MIB

    class Around(nn.Module):
        """Uses its own table while it calls what is inside."""

        def __init__(self, nbytes, inner):
            super().__init__()
            self.table, self.inner = nn.Parameter(torch.empty(nbytes // 4)), inner

        def forward(self, x):
            return self.inner(x) + self.table

    with torch.device("meta"):
        one = Around(2 * MIB, nn.Linear(1, 5 * MIB // 4, bias=False))
        two = Around(3 * MIB, Around(2 * MIB, nn.Linear(1, 5 * MIB // 4, bias=False)))
        beside = nn.Sequential(Around(8 * MIB, nn.Identity()), two)
    assert least_bytes(chosen_units(one)) == 2 * 5 * MIB + 2 * MIB
    assert least_bytes(chosen_units(two)) == 3 * 5 * MIB + (3 + 2) * MIB
    # What stays around others is not around this one.
    assert least_bytes(chosen_units(beside)) == 3 * 8 * MIB + (3 + 2) * MIB


def test_a_table_that_is_read_from_locked_memory_needs_no_room():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(MIB, 4), nn.Linear(1, MIB, bias=False))
    units = chosen_units(model)
    assert [place_bytes(unit, True) for unit in units] == [0, 4 * MIB]
    assert [place_bytes(unit, False) for unit in units] == [16 * MIB, 4 * MIB]
    assert least_bytes(units) == 32 * MIB and least_bytes(units, True) == 8 * MIB
    assert least_bytes(units[:1], True) == ALIGNMENT, "an arena is never empty"


# ---- what is now in the places of layers that were let go ----


def again(model, *names, of=None):
    """Return the names of what is managed again, where these layers of `of` were let go."""
    found = dict((of or model).named_modules())
    lost = {name: weakref.ref(found[name]) for name in names}
    return [leaf.name for leaf in choose_again(model, lost)]


def test_what_stands_where_a_layer_was_is_managed_anew(monkeypatch):
    before, model = pair(), pair()
    assert again(model) == [] and again(model, "0") == ["0"]
    assert again(model, "0", of=before) == ["0"], "another has its name"
    assert again(model, "0", "1", of=before) == ["0", "1"]
    assert again(nn.Sequential(nn.Tanh()), "0", of=before) == []
    assert again(nn.Sequential(), "0", of=before) == []
    moved = nn.Sequential(before[1], nn.Tanh(), before[0])
    assert again(moved, "0", of=before) == ["2"], "it has another name now"
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)
    assert again(nn.Sequential(Bare(), nn.Linear(8, 8)), "0", of=before) == [], "of no such kind"
    integers(model[1])
    assert again(model, "1") == [] and again(model, "0", "1") == ["0"]
    with attached(before):
        assert again(before, "0") == [], "it is managed"
    quantised = nn.Sequential(Comfy(), nn.Linear(8, 8))
    assert again(quantised, "0") == ["0"]
    with attached(quantised):
        assert again(quantised, "0") == [], "nor a quantised one"
    tied = pair(bias=False)
    tied[1].weight = tied[0].weight
    assert again(tied, "0") == [], "it is tied to what was not let go"
    assert again(tied, "0", "1") == ["0", "1"]
