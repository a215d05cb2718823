"""Which layers are managed, why others are not, and in which units they travel."""

from __future__ import annotations

import types

import pytest
import torch
from equality import attached
from torch import nn
from torch.nn.utils import parametrizations

from oracle_offload import OffloadError
from oracle_offload.layers.linear import LinearLayer
from oracle_offload.layers.wrappers import wrapper_of
from oracle_offload.selection import Chosen, group_units, listed, select

KIB, MIB = 1 << 10, 1 << 20


def pair(**changed):
    """Return a model of one layer that is as it should be, and another."""
    return nn.Sequential(nn.Linear(8, 8, **changed), nn.Linear(8, 8))


def reasons(model, ignore=()):
    chosen = select(model, ignore)
    assert not {leaf.name for leaf in chosen.leaves} & chosen.resident.keys()
    return chosen.resident


def other_parameter(layer):
    layer.scale = nn.Parameter(torch.ones(1))


def unregistered_parameter(layer):
    layer.register_parameter("scale", None)


def integers(layer):
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)


def sparse(layer):
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse())


def of_a_class(layer):
    class Quantised(nn.Parameter):
        pass

    layer.weight = Quantised(layer.weight.detach())


def with_gaps(layer):
    layer.weight = nn.Parameter(torch.randn(8, 16)[:, :8])


def replaced_forward(layer):
    layer.forward = lambda x: x


def own_forward(layer):
    layer.forward = types.MethodType(type(layer).forward, layer)


def computed_bias(layer):
    bias = layer._parameters.pop("bias")
    layer.bias = bias.detach() * 2


def no_bias(layer):
    layer.bias = None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (parametrizations.weight_norm, "its weight is computed (parametrised), not a parameter"),
        (other_parameter, "it has another parameter, 'scale'"),
        (unregistered_parameter, None),
        (integers, "'weight' is torch.int8"),
        (sparse, "'weight' is a Parameter, not a plain parameter"),
        (of_a_class, "'weight' is a Quantised, not a plain parameter"),
        (with_gaps, "'weight' has gaps or overlaps in memory (strides (16, 1))"),
        (replaced_forward, "its forward was replaced"),
        (own_forward, None),
        (computed_bias, "its bias is computed, not a parameter"),
        (no_bias, None),
    ],
)
def test_what_keeps_a_layer_on_the_device(change, reason):
    model = pair()
    change(model[0])
    assert reasons(model) == ({"0": reason} if reason else {})


def test_a_layer_without_elements_stays():
    assert reasons(nn.Sequential(nn.Linear(0, 8), nn.Linear(8, 8))) == {"0": "'weight' is empty"}


def test_a_parameter_that_is_ignored_keeps_its_layer():
    model = pair()
    assert reasons(model, model[0].bias) == {"0": "'bias' is named in ignore_modules"}
    assert reasons(model, [model[1].weight]) == {"1": "'weight' is named in ignore_modules"}


def test_heads_of_attention_and_adapters_are_named_with_their_module():
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(8, 8)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})
            self.dropout = None

    model = nn.Sequential(nn.MultiheadAttention(8, 2), Lora())
    assert reasons(model) == {
        "0.out_proj": "part of MultiheadAttention '0', which computes with it, and 256 B are too "
        "small to stream",
        "1.lora_A.default": "adapter of '1'",
    }


class Tied(nn.Module):
    def __init__(self, *names):
        super().__init__()
        self.embedding = nn.EmbeddingBag(8, 8)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        for name in names:
            getattr(self, name).weight = self.embedding.weight


def test_what_is_tied_to_a_module_that_is_not_managed_stays_with_it():
    tied = "its weight is tied to '{}', which is not managed"
    assert reasons(Tied("second")) == {"second": tied.format("embedding")}
    assert reasons(Tied()) == {}
    shared = Tied()
    shared.second.weight = shared.first.weight
    assert reasons(shared) == {}, "two managed layers may share one"
    assert reasons(shared, "second") == {
        "first": tied.format("second"), "second": "named in ignore_modules",
    }  # fmt: skip


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
    """Also those that do not lie next to its beginning."""
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
        ("upp", r"no module named 'upp'; did you mean 'up'\? Names are dotted"),
        ("0", r"no module named '0'; did you mean '0' or 'up.0' or 'down.0'\?"),
        ("zzz", r"no module named 'zzz' Names are dotted, with the wildcards of fnmatch"),
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


@pytest.mark.parametrize(
    ("count", "shown"), [(1, "'0'"), (2, "'0', '1'"), (3, "'0', '1' and 1 more")]
)
def test_names_for_a_message(count, shown):
    assert listed([str(n) for n in range(count)], 2) == shown


# ---- wrappers of LoRA ----


class Wrapper:
    def __init__(self, wrapped):
        self.org_forward = wrapped.forward
        wrapped.forward = self.forward

    def forward(self, x):
        return self.org_forward(x) + 1


def test_the_innermost_wrapper_is_found_up_to_sixteen_deep():
    layer = nn.Linear(8, 8)
    assert wrapper_of(layer) is None
    first = Wrapper(layer)
    for _ in range(15):
        assert wrapper_of(layer) is first
        Wrapper(layer)
    assert wrapper_of(layer) is first
    assert reasons(nn.Sequential(layer, nn.Linear(8, 8))) == {}
    Wrapper(layer)
    assert wrapper_of(layer) is None
    assert reasons(nn.Sequential(layer, nn.Linear(8, 8))) == {"0": "its forward was replaced"}


def test_a_wrapper_around_something_else_is_none():
    layer, other = nn.Linear(8, 8), nn.Linear(8, 8)
    wrapper = Wrapper(layer)
    wrapper.org_forward = other.forward
    assert wrapper_of(layer) is None
    wrapper.org_forward = lambda x: x
    assert wrapper_of(layer) is None


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

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.inner = nn.Linear(8, 8), nn.Identity()
            self.inner.key = nn.Linear(8, 8)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Attention(), Attention()])
            self.head = Attention()

    found = {leaf.name: leaf.block for leaf in select(Model()).leaves}
    assert found == {
        "blocks.0.query": "blocks.0", "blocks.0.inner.key": "blocks.0",
        "blocks.1.query": "blocks.1", "blocks.1.inner.key": "blocks.1",
        "head.query": "", "head.inner.key": "",
    }  # fmt: skip
