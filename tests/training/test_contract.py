"""What attach accepts, refuses and promises about the modules it changes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
from itertools import pairwise

import pytest
import torch
from equality import assert_models_agree, assert_same, attached, step_of
from models import LoRA, Parts
from torch import nn

import oracle_offload
from oracle_offload import MemoryManager, OffloadError
from oracle_offload.engine.engines import open_states
from oracle_offload.model import selection


def mlp(*sizes):
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers)


def forward(model):
    with torch.no_grad():
        return [model(torch.ones(2, 8))]


# ---- bad input ----


NOT_FINITE = [float("inf"), float("-inf"), float("nan"), "1e999"]
REFUSED = {
    "offload_percent": [-0.1, 1.5, 91, "a lot", None, True, *NOT_FINITE],
    "vram_budget": [0, -1, "8 parsecs", "", 1024, *NOT_FINITE],
    "ram_budget": NOT_FINITE,
    "lock": NOT_FINITE,
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_a_budget_that_makes_no_sense_is_refused_with_its_value(name, value):
    hint = r".*0\.91" if value == 91 else ""
    kind = OffloadError if value == 1024 else ValueError  # which is too little for this model
    with pytest.raises(kind, match=f"{name}={value!r}{hint}"):
        oracle_offload.attach(mlp(64, 64, 64), "cpu", **{name: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(
    ("where", "named"),
    [(("cuda",), "cuda"), (("cuda:3",), "cuda:3"), ((0,), "cuda:0"), ((), "cuda")],
    ids=str,
)
def test_cuda_without_cuda(where, named):
    said = f"device='{named}', but torch sees no CUDA device .*device='cpu'"
    with pytest.raises(OffloadError, match=said):
        oracle_offload.attach(mlp(8, 8), *where)


def test_not_a_module():
    with pytest.raises(ValueError, match=r"nn\.Module"):
        oracle_offload.attach([mlp(8, 8)], "cpu")


def test_meta_parameters():
    with torch.device("meta"):
        model = mlp(8, 8)
    with pytest.raises(OffloadError, match=r"'0\.weight', '0\.bias' are on the meta device"):
        oracle_offload.attach(model, "cpu")
    with torch.device("meta"):
        model = mlp(*[8] * 12)
    with pytest.raises(OffloadError, match=r"'0\.weight', .* and 14 more are on the meta device"):
        oracle_offload.attach(model, "cpu")


def test_nothing_to_manage():
    with pytest.raises(OffloadError, match="no layer to manage"):
        oracle_offload.attach(nn.Sequential(nn.LayerNorm(8), nn.EmbeddingBag(4, 8)), "cpu")


def test_attach_twice():
    model = mlp(8, 8)
    with attached(model, "cpu"):
        with pytest.raises(OffloadError, match="attached already"):
            oracle_offload.attach(model, "cpu")
        with pytest.raises(OffloadError, match="attached already"):
            oracle_offload.attach(nn.Sequential(model), "cpu")
        forward(model)


def test_detach_what_is_not_attached():
    model = mlp(8, 8)
    with pytest.raises(OffloadError, match="not attached"):
        MemoryManager.detach(model)
    manager = oracle_offload.attach(model, "cpu")
    assert manager.detach() is manager.detach() is model


def test_a_copy_of_a_managed_layer_has_no_manager():
    model = nn.Linear(8, 8)
    expected = forward(model)
    with attached(model, "cpu"):
        clone = copy.deepcopy(nn.Sequential(model))[0]
        assert not hasattr(clone, "_memory_manager")
        with attached(clone, "cpu") as manager:
            assert len(manager.layers) == 1
            assert_same(forward(clone), expected)
        assert "__reduce_ex__" not in vars(clone)
        assert_same(forward(copy.deepcopy(clone)), expected)
    assert "__reduce_ex__" not in vars(model)


def test_detach_of_a_deleted_model_does_nothing():
    model = mlp(8, 8)
    manager = oracle_offload.attach(model, "cpu")
    del model
    gc.collect()
    assert manager.detach() is None
    assert manager.detach() is None


@pytest.mark.parametrize("how", ["to its end", "detached inside", "by an exception", "deleted"])
def test_a_with_statement_detaches(how):
    model = mlp(8, 8)
    expected = forward(model)

    def use():
        nonlocal model
        with oracle_offload.attach(model, "cpu") as manager:
            assert isinstance(manager, MemoryManager)
            assert_same(forward(model), expected)
            assert manager.state.engine.stats()["acquires"] > 0
            if how == "detached inside":
                manager.detach()
            if how == "by an exception":
                raise KeyError("mine")
            if how == "deleted":
                model = None
                gc.collect()

    if how == "by an exception":
        with pytest.raises(KeyError, match="mine"):
            use()
    else:
        use()
    assert not open_states()
    if model is not None:
        assert type(model[0]) is nn.Linear
        assert_same(forward(model), expected)


def test_a_budget_too_small_names_every_layer_that_is_too_large():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 800), nn.Linear(800, 8))
    with pytest.raises(OffloadError, match="two of the largest units") as refused:
        oracle_offload.attach(model, "cpu", vram_budget=2048)
    for name in ("0", "1", "2"):  # one unit: small leaves travel together
        assert f"'{name}'" in str(refused.value) or "ignore_modules" not in str(refused.value)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8000), nn.Linear(8000, 8))
    with pytest.raises(OffloadError, match="ignore_modules: '1', '2'") as refused:
        oracle_offload.attach(model, "cpu", vram_budget="32KiB")
    with attached(model, "cpu", vram_budget="32KiB", ignore_modules=["1", "2"]) as manager:
        assert [layer.name for layer in manager.layers] == ["0"], "the remedy works"


def test_detach_while_in_use():
    """From inside a layer's operator: refused, and the model goes on working."""
    model = mlp(8, 8)

    class Inside(torch.utils._python_dispatch.TorchDispatchMode):
        error = None

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "addmm" in str(func) and self.error is None:
                try:
                    MemoryManager.detach(model)
                except OffloadError as error:
                    self.error = error
            return func(*args, **(kwargs or {}))

    with attached(model, "cpu"):
        expected = forward(model)
        with Inside() as mode:
            found = forward(model)
        assert mode.error is not None
        assert_same(found, expected)
        assert_same(forward(model), expected)


def test_backward_after_detach():
    model = mlp(8, 8)
    manager = oracle_offload.attach(model, "cpu")
    loss = model(torch.ones(2, 8, requires_grad=True)).sum()
    manager.detach()
    with pytest.raises(OffloadError, match="detached between forward and backward"):
        loss.backward()


def test_ignore_modules_that_do_not_exist():
    with pytest.raises(ValueError, match="no module or parameter named 'attn'"):
        oracle_offload.attach(mlp(8, 8), "cpu", ignore_modules=["attn"])
    with pytest.raises(ValueError, match="neither a module"):
        oracle_offload.attach(mlp(8, 8), "cpu", ignore_modules=[3])


def blocks():
    return nn.ModuleDict(
        {
            "blocks": nn.ModuleList(
                nn.ModuleDict({"attn": nn.Linear(8, 8), "mlp": mlp(8, 8, 8)}) for _ in range(3)
            ),
            "proj_out": nn.Linear(8, 8),
        }
    )


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        (["blocks.*.attn"], 3),
        (["*.attn", "proj_*"], 4),
        (["blocks.[01].mlp"], 4),
        (["blocks.?"], 9),
        ("blocks.1", 3),
        (["*mlp.0"], 3),
    ],
    ids=str,
)
def test_ignored_by_pattern(patterns, left):
    with attached(blocks(), "cpu", ignore_modules=patterns) as manager:
        assert len(manager.layers) == 10 - left
        assert {name.rpartition(".")[0] for name in manager.resident} == {
            name
            for name, module in manager.module.named_modules()
            if isinstance(module, nn.Linear) and name not in {y.name for y in manager.layers}
        }


@pytest.mark.parametrize(
    ("pattern", "near"), [("proj_ot", "'proj_out'"), ("attn", r"'blocks\.0\.attn'"), ("x.*", "")]
)
def test_a_pattern_that_matches_nothing_names_what_is_near(pattern, near):
    with pytest.raises(
        ValueError, match=f"no module or parameter named '{re.escape(pattern)}'.*{near}"
    ):
        oracle_offload.attach(blocks(), "cpu", ignore_modules=[pattern])


def test_a_failed_attach_leaves_an_ordinary_model():
    model = mlp(8, 8)
    before = forward(model)
    with pytest.raises((ValueError, OffloadError)):
        oracle_offload.attach(model, "cpu", vram_budget=16)
    assert type(model[0]) is nn.Linear
    assert_same(forward(model), before)
    with attached(model, "cpu"):
        assert_same(forward(model), before)


# ---- what is managed ----


def test_multihead_attention_is_left_resident():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    chosen = selection.select(model)
    assert [leaf.name for leaf in chosen.leaves] == ["1"]


def test_encoder_layer(device="cpu"):
    managed = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    managed = nn.Sequential(managed.eval(), nn.Linear(16, 4))
    resident = copy.deepcopy(managed)

    def step(model):
        with torch.no_grad():
            return [model(torch.ones(2, 5, 16))]

    with attached(managed, device):
        assert_models_agree(managed, resident, step)


def test_parametrised_and_tied_weights_stay_resident():
    parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    embedding, head, free = nn.EmbeddingBag(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
    head.weight = embedding.weight
    model = nn.ModuleList([parametrised, embedding, head, free])
    chosen = selection.select(model)
    assert [leaf.name for leaf in chosen.leaves] == ["3"]
    with attached(model, "cpu"):
        assert head.weight is embedding.weight


def test_parameters_in_one_memory_stay_resident():
    """Two Parameters over the same bytes: each would be given a master of its own."""
    model = mlp(8, 8, 8, 8)
    model[2].weight = nn.Parameter(model[0].weight.data)
    chosen = selection.select(model)
    assert [leaf.name for leaf in chosen.leaves] == ["4"]
    assert "overlaps" in chosen.resident["0"]
    with attached(model, "cpu"):
        with torch.no_grad():
            model[0].weight.fill_(3)
        assert torch.equal(model[2].weight, model[0].weight)


@pytest.mark.parametrize(
    "lay_out",
    [lambda t: torch.cat([t, t], 1)[:, ::2], lambda t: t[:1].expand(t.shape), lambda t: t.t()],
    ids=["gaps", "repeated", "transposed"],
)
def test_a_weight_keeps_its_layout(lay_out):
    """Kernels choose by strides: a master made contiguous would give other bits."""
    model = mlp(8, 8, 8)
    model[0].weight = nn.Parameter(lay_out(torch.randn(8, 8)), requires_grad=False)
    stride = model[0].weight.stride()
    x = torch.randn(3, 8)
    expected = model(x)
    with attached(model, "cpu") as manager:
        dense = stride == (1, 8)
        assert [layer.name for layer in manager.layers] == (["0", "2"] if dense else ["2"])
        assert dense or f"strides {stride}" in manager.resident["0.weight"]
        assert model[0].weight.stride() == stride
        assert torch.equal(model(x), expected)


def test_what_is_not_managed_is_moved_once_and_stays_shared():
    """To the meta device, which is another one on any machine."""
    model = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 8)])
    model[1].register_buffer("shared", model[2].running_mean)
    with attached(model, "cpu") as manager:
        model.append(nn.LayerNorm(8))
        assert manager.structure.changed, "a new module may have to be moved"
        manager.structure.device = torch.device("meta")
        manager.settle()
        assert not manager.structure.changed
        model[3].weight = model[3].weight
        assert not manager.structure.changed, "nothing came"
        assert {tensor.device.type for tensor in model[3].parameters()} == {"cpu"}
        others = [t for i in (0, 1, 2, 4) for t in model[i].state_dict(keep_vars=True).values()]
        assert {tensor.device.type for tensor in others} == {"meta"}
        assert model[1].shared is model[2].running_mean


def test_layers_that_share_a_parameter():
    managed = mlp(8, 8, 8)
    managed[2].weight = managed[0].weight
    resident = copy.deepcopy(managed)
    assert resident[2].weight is resident[0].weight

    step = step_of(torch.ones(2, 8))
    with attached(managed, "cpu") as manager:
        assert managed[2].weight is managed[0].weight
        assert len(manager.layers) == 2
        assert_models_agree(managed, resident, step)
        with torch.no_grad():
            managed[0].weight.add_(1)
            resident[0].weight.add_(1)
        assert_models_agree(managed, resident, step)


def test_subclasses_with_their_own_forward_are_not_touched():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Named(nn.Linear):
        pass

    model = nn.ModuleList([Scaled(8, 8), Named(8, 8)])
    chosen = selection.select(model)
    assert [leaf.name for leaf in chosen.leaves] == ["1"]
    with attached(model, "cpu"):
        assert isinstance(model[1], Named)
        assert type(model[1]).__name__ == "Named"
    assert type(model[1]) is Named


@pytest.mark.parametrize("wrap_first", [True, False])
def test_lora_style_wrappers_around_forward(wrap_first):
    """kohya's way: module.forward is replaced, and the original kept in org_forward."""
    model = mlp(8, 8)
    resident = copy.deepcopy(model)
    wrapper = LoRA(resident[0])
    expected = forward(resident)

    def wrap():
        lora = LoRA(model[0])
        lora.load_state_dict(wrapper.state_dict())
        return lora

    lora = wrap() if wrap_first else None
    kept = lora and lora.org_forward
    with attached(model, "cpu") as manager:
        assert [layer.module() for layer in manager.layers] == [model[0]]
        lora = lora or wrap()
        with oracle_offload.model.witness.Witness() as witness:
            assert_same(forward(model), expected)
        assert witness.arena_reads
        assert kept is None or lora.org_forward == kept
    assert kept is None or lora.org_forward == kept
    assert_same(forward(model), expected)


def test_ignored_modules_and_parameters():
    model = nn.ModuleDict({"a": mlp(8, 8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8)})
    chosen = selection.select(model, ["a", model["b"].weight])
    assert [leaf.name for leaf in chosen.leaves] == ["c"]


# ---- what modules can do while managed ----


def test_identity_of_parameters_and_modules():
    model = mlp(8, 8)
    modules, parameters = list(model.modules()), list(model.parameters())
    names = list(model.state_dict())
    with attached(model, "cpu"):
        assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert list(model.state_dict()) == names
        assert isinstance(model[0], nn.Linear)
        assert repr(model[0]).startswith("Linear(in_features=8")
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert type(model[0]) is nn.Linear


def test_a_copy_of_a_layer_is_none():
    with attached(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) as manager:
        layers = [*manager.layers]
        assert copy.deepcopy(layers) == pickle.loads(pickle.dumps(layers)) == [None, None]


def test_a_saved_model_loads_without_this_package(forks, tmp_path):
    model = mlp(8, 8)
    with attached(model, "cpu"):
        torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['oracle_offload'] = None\n"
        "import torch\n"
        f"m = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "print(float(m(torch.ones(2, 8)).sum()))"
    )
    assert float(forks.print(code)) == pytest.approx(float(forward(model)[0].sum()))


def test_saving_one_tensor_saves_one_tensor():
    model = mlp(64, 64, 64)
    with attached(model, "cpu"):
        buffer = io.BytesIO()
        torch.save(model[0].weight.data, buffer)
    assert buffer.tell() < 64 * 64 * 4 + 4096


def test_a_state_dict_outlives_the_model():
    model = mlp(32, 32)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    manager = oracle_offload.attach(model, "cpu")
    state = model.state_dict()
    manager.detach()
    del model, manager
    assert_same(dict(state), expected)
    state["0.weight"].add_(1)
    assert torch.equal(state["0.weight"], expected["0.weight"] + 1)


@pytest.mark.parametrize("end", ["detach", "delete"])
def test_layers_that_left_the_model_become_ordinary_ones_with_it(end):
    """A layer taken out of an attached model, or kept when the model goes, still computes."""
    model = mlp(8, 8, 8)
    kept, expected = model[2], forward(model[2])
    manager = oracle_offload.attach(model, "cpu")
    if end == "detach":
        del model[2]
        manager.detach()
    else:
        del model, manager
        gc.collect()
    assert type(kept) is nn.Linear
    assert_same(forward(kept), expected)


def test_detaching_one_model_leaves_anothers_layers_managed():
    one, other = mlp(8, 8), mlp(8, 8)
    manager = oracle_offload.attach(one, "cpu")
    with attached(other, "cpu"):
        one.append(other[0])
        expected = forward(one)
        manager.detach()
        assert type(one[0]) is nn.Linear
        with oracle_offload.model.witness.Witness() as witness:
            forward(other)
        assert witness.arena_reads, "its layer is managed still"
        with torch.no_grad():
            assert_same([other[0](one[:2](torch.ones(2, 8)))], expected)


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double", "to"])
def test_a_change_of_dtype_moves_the_masters(convert):
    managed = mlp(8, 8, 8)
    resident = copy.deepcopy(managed)

    def change(model):
        model.to(torch.bfloat16) if convert == "to" else getattr(model, convert)()

    step = step_of(torch.ones(2, 8))
    with attached(managed, "cpu") as manager:
        assert_models_agree(managed, resident, step)
        parameters = list(managed.parameters())
        change(managed)
        change(resident)
        assert all(a is b for a, b in zip(parameters, managed.parameters(), strict=True))
        assert_models_agree(managed, resident, step)
        stats = manager.state.engine.stats()
        assert stats["pageable_bytes"] == 0, "the new masters are locked too"


def test_channels_last_is_kept_as_a_layout():
    managed = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 4, 3))
    resident = copy.deepcopy(managed)
    step = step_of(torch.randn(2, 4, 9, 9).contiguous(memory_format=torch.channels_last))
    with attached(managed, "cpu"):
        for model in (managed, resident):
            model.to(memory_format=torch.channels_last)
        assert managed[0].weight.stride() == resident[0].weight.stride()
        assert_models_agree(managed, resident, step)


def test_everything_else_is_moved_and_keeps_its_dtype(device):
    def compute(parts, x):
        y = parts.linear(parts.norm(x)) * parts.scale + parts.index
        return parts.rnn(parts.conv(y.t()).t())[0]

    layers = {"linear": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "conv": nn.Conv1d(8, 8, 1)}
    managed = Parts(compute, **layers, rnn=nn.GRU(8, 8), scale=nn.Parameter(torch.ones(8)))
    managed.register_buffer("index", torch.arange(8))
    resident = copy.deepcopy(managed)
    step = step_of(torch.ones(3, 8), device)
    with attached(managed, device):
        assert managed.index.dtype == torch.int64
        kind = torch.device(device).type
        others = [managed.scale, managed.index, *managed.rnn.parameters()]
        assert all(tensor.device.type == kind for tensor in others)
        assert_models_agree(managed, resident, step, device=device)


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("default", ["meta", "its own"])
def test_it_does_not_matter_where_torch_makes_tensors_by_default(default, trains, device):
    """Masters and gradients are on the host, whatever `torch.set_default_device` says."""
    layers = [nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 8, 1), nn.Embedding(4, 8)]
    managed = nn.ModuleList(layers).requires_grad_(trains)
    resident = copy.deepcopy(managed)
    x = torch.randn(2, 3, 8, device=device)
    index = torch.tensor([[0, 1, 2], [3, 2, 1]], device=device)

    def step(model):
        linear, norm, conv, embedding = model
        given = x.clone().requires_grad_()
        y = conv(norm(linear(given)).transpose(1, 2)).transpose(1, 2) + embedding(index)
        y.square().sum().backward()
        return [y, given.grad]

    with torch.device(device if default == "its own" else default), attached(managed, device):
        assert_models_agree(managed, resident, step, device=device)
    assert managed[0].weight.device.type == "cpu"


def test_a_buffer_of_a_linear_layer_moves_with_the_model(device):
    """The layer's own code asks for none, but a hook may."""
    managed = nn.Sequential(nn.Linear(8, 8))
    managed[0].register_buffer("shift", torch.randn(8))
    managed[0].register_forward_hook(lambda module, _, y: y + module.shift)
    resident = copy.deepcopy(managed)
    step = step_of(torch.ones(3, 8), device)
    with attached(managed, device) as manager:
        assert manager.layers and managed[0].shift.device.type == torch.device(device).type
        assert_models_agree(managed, resident, step, device=device)
        for model in (managed, resident):
            model.to(torch.bfloat16)
        assert managed[0].shift.dtype is managed[0].weight.dtype is torch.bfloat16
        assert managed[0].weight.device.type == "cpu", "the layer is not managed"
        assert_models_agree(managed, resident, step, device=device)


# ---- what is refused ----


def test_double_backward_is_refused():
    model = mlp(8, 8)
    with attached(model, "cpu"):
        x = torch.ones(2, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert gradient.requires_grad
        with pytest.raises(OffloadError, match="double backward"):
            gradient.square().sum().backward()


def test_forward_mode_and_functorch_are_refused():
    model = mlp(8, 8)
    with attached(model, "cpu"):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(torch.ones(2, 8), torch.ones(2, 8))
            with pytest.raises(OffloadError, match="forward-mode"):
                model(dual)
        with pytest.raises(OffloadError, match=r"torch\.func"):
            torch.func.vmap(model)(torch.ones(2, 3, 8))
        with pytest.raises(OffloadError, match=r"torch\.func"):
            torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 8))
        forward(model)


def test_keyword_input_and_wrong_shapes():
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(3, 3, 1))
    with attached(model, "cpu"):
        model[0](input=torch.ones(2, 8))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model[0](torch.ones(2, 9))
        with pytest.raises(RuntimeError, match="channel"):
            model[1](torch.ones(1, 4, 5, 5))
        model[0](torch.ones(2, 8))
