"""The loan for any other module: the resident model's bits, whatever the forward computes."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from equality import (
    Recorder,
    assert_models_agree,
    assert_same,
    attached,
    gradients,
    is_simulated,
    resident_pair,
    step_alike,
)
from models import Parts, Tower, compute_device, enable_checkpointing
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import oracle_offload
from oracle_offload import OffloadError, StaleWeightsError
from oracle_offload._core import BACKWARD
from oracle_offload.engine import simulator
from oracle_offload.layers import any as any_module
from oracle_offload.layers.any import AnyLayer
from oracle_offload.model import selection
from oracle_offload.model.witness import Witness

pytestmark = pytest.mark.usefixtures("nothing_is_small")
WIDTH = 16


def weights(*shape):
    return nn.Parameter(torch.randn(*shape) / 4)


class Einsum(nn.Module):
    """A bare stack of matrices, used through a view, and a vector."""

    def __init__(self):
        super().__init__()
        self.stack, self.scale = weights(4, WIDTH, WIDTH), weights(WIDTH)

    def forward(self, x):
        return F.gelu(torch.einsum("bth,eho->bto", x, self.stack.transpose(1, 2))) + self.scale * x


def in_lists():
    """Parameters of a module that has no forward, by index."""
    return Parts(
        lambda parts, x: torch.tanh(x @ parts.tables[0] + parts.tables[1]) @ parts.named["out"],
        tables=nn.ParameterList([weights(WIDTH, WIDTH), weights(WIDTH)]),
        named=nn.ParameterDict({"out": weights(WIDTH, WIDTH)}),
    )


def attention():
    """torch's own, which hands its child's weight to one operator."""
    return Parts(
        lambda parts, x: x + parts.attention(x, x, x, need_weights=False)[0],
        attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    )


def recurrent(kind=nn.LSTM):
    """torch's own, which keeps a list of its Parameters."""
    rnn = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
    return Parts(lambda parts, x: x + parts.rnn(x)[0], rnn=rnn)


class Nested(nn.Module):
    """Tensors that stay lent while children are lent theirs."""

    def __init__(self):
        super().__init__()
        self.gate, self.einsum, self.linear = weights(WIDTH), Einsum(), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.gate * self.linear(self.einsum(self.gate * x)))


def parametrised():
    """A weight that torch computes at each use."""
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH, bias=False))
    return nn.Sequential(linear)


class Keeps(torch.autograd.Function):
    """Keeps its weight where no hook sees it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight.t(), None


def past_hooks():
    matrix = weights(WIDTH, WIDTH).requires_grad_(False)
    return Parts(lambda parts, x: torch.tanh(Keeps.apply(x, parts.matrix)), matrix=matrix)


KINDS = {
    "einsum": Einsum,
    "listed": in_lists,
    "attention": attention,
    "lstm": recurrent,
    "gru": lambda: recurrent(nn.GRU),
    "nested": Nested,
    "parametrised": parametrised,
}


def net(make, reentrant=None, depth=3):
    return Tower(*(make() for _ in range(depth)), reentrant=reentrant)


def make_step(device, dtype=torch.float32, autocast=False, keeps_casts=True):
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(5)).to(dtype)

    def step(model):
        leaf = x.to(device).detach().requires_grad_()
        context = contextlib.nullcontext()
        if autocast:
            context = torch.autocast(
                torch.device(device).type, torch.bfloat16, cache_enabled=keeps_casts
            )
        with context:
            y = model(leaf)
        (
            y.float() * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
        ).sum().backward()
        return [y.detach(), leaf.grad]

    return step


def train_only(model, trainable):
    for parameter in model.parameters():
        parameter.requires_grad_(trainable)
    return model


def held(manager):
    """Return how many slots something holds."""
    return sum(pins for *_, pins in manager.state.engine.residents())


def assert_all_is_lent(manager):
    assert manager.resident == {}
    assert any(isinstance(layer, AnyLayer) for layer in manager.layers)


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_module_has_the_residents_bits(device, kind, trainable, reentrant):
    model = train_only(net(KINDS[kind], reentrant), trainable)
    managed, resident = resident_pair(model)
    with attached(managed, device) as manager:
        assert_all_is_lent(manager)
        assert_models_agree(managed, resident, make_step(device), device=device)
        gc.collect()
        assert held(manager) == 0


@functools.cache
def computes_low_precision_lstm():
    with torch.autocast("cpu"):
        try:
            nn.LSTM(8, 8)(torch.ones(2, 2, 8))
        except RuntimeError:
            return False
    return True


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_has_the_residents_bits(device, kind, trainable, how):
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    model = train_only(net(KINDS[kind], False), trainable).to(dtype)
    managed, resident = resident_pair(model)
    with attached(managed, device) as manager:
        assert_all_is_lent(manager)
        step = make_step(device, dtype, how == "autocast")
        on_host = device != "cuda"
        if kind == "lstm" and how == "autocast" and on_host and not computes_low_precision_lstm():
            pytest.skip("oneDNN has no LSTM in bfloat16 for this processor")
        # docs/how-it-works.md, differences: cells that use their casts again at every step. The
        # gradients of the uses are summed as by the resident model that keeps no cast.
        in_cells = kind == "gru" or (
            kind == "lstm" and device == "cuda" and not torch.backends.cudnn.enabled
        )
        if in_cells and (trainable, how) == (True, "autocast"):
            keeps_none = make_step(device, dtype, autocast=True, keeps_casts=False)
            assert_same(step(managed), keeps_none(resident.to(device)))
            assert_same(gradients(managed), gradients(resident))
            return
        assert_models_agree(managed, resident, step, device=device)


# ---- experts ----


def experts(kind, implementation):
    """Return a block of fused experts as transformers has it, in a residual stream."""
    transformers = pytest.importorskip("transformers")
    name = {"qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "gpt_oss": "GptOss"}[kind]
    sizes = dict(hidden_size=WIDTH, num_local_experts=4, num_experts=4, num_experts_per_tok=2)
    widths = dict(moe_intermediate_size=24, intermediate_size=24)
    config = transformers.CONFIG_MAPPING[kind](**sizes, **widths)
    config._experts_implementation = implementation
    modeling = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["_"])
    block = getattr(modeling, "GptOssMLP" if name == "GptOss" else f"{name}SparseMoeBlock")

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block(config)
            for parameter in self.block.parameters():
                nn.init.normal_(parameter, std=0.2)

        def forward(self, x):
            y = self.block(x)
            return x + (y[0] if isinstance(y, tuple) else y)

    return Residual


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_fused_experts_have_the_residents_bits(device, kind, implementation, trainable, reentrant):
    model = net(experts(kind, implementation), reentrant, depth=2).to(torch.bfloat16)
    managed, resident = resident_pair(train_only(model, trainable))
    with attached(managed, device) as manager:
        assert_all_is_lent(manager)
        step = make_step(device, torch.bfloat16)
        assert_models_agree(managed, resident, step, steps=1, device=device)
        gc.collect()
        assert held(manager) == 0


def adapted_experts(after_attach, checkpointing, device):
    """Return two models whose experts have LoRA by peft, the first of them attached."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=24, vocab_size=64)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    config = transformers.CONFIG_MAPPING["qwen3_moe"](
        **sizes, **heads, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, use_cache=False
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter, std=0.1)
    model.requires_grad_(False)
    if checkpointing is not None:
        enable_checkpointing(model, gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.enable_input_require_grads()
        model.train()
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False
    )

    def adapt(one):
        torch.manual_seed(3)
        return peft.get_peft_model(one, lora)

    managed, resident = resident_pair(model)
    if after_attach:
        manager = oracle_offload.attach(managed, device)
        managed = adapt(managed)
    else:
        managed = adapt(managed)
        manager = oracle_offload.attach(managed, device)
    return managed, adapt(resident), manager


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non"])
@pytest.mark.parametrize("after_attach", [False, True], ids=["before", "after"])
def test_target_parameters_of_peft_have_the_residents_bits(device, after_attach, checkpointing):
    managed, resident, manager = adapted_experts(after_attach, checkpointing, device)
    ids = torch.arange(14).view(2, 7)

    def step(model):
        there = ids.to(compute_device(model) if model is resident else manager.device)
        output = model(input_ids=there, labels=there)
        output.loss.backward()
        return [output.loss, output.logits]

    try:
        stacks = [layer for layer in manager.layers if "experts" in layer.name]
        assert len(stacks) == 2 and all(isinstance(layer, AnyLayer) for layer in stacks)
        assert_models_agree(managed, resident, step, device=device)
        gc.collect()
        assert held(manager) == 0
        assert not manager.structure.changed, "every forward looks at the whole model again"
        for layer in stacks:
            assert all(type(t) is nn.Parameter for t in layer.tensors())
            assert set(layer.module()._parameters) == {"gate_up_proj", "down_proj"}
        if checkpointing is None:  # the sums of weight and adapter wait for backward
            derived = manager.attachment.traffic.derived_bytes
            assert {name for name in derived if "experts" in name} == {s.name for s in stacks}
            assert "checkpoint" in str(manager.memory_summary())
    finally:
        manager.detach()


# ---- what ends a loan, and what must not be lost ----


def run(model, device, **options):
    return make_step(device, **options)(model)


def test_slots_are_free_after_forward_and_taken_again_in_backward(device):
    managed = train_only(net(Einsum), False)
    with attached(managed, device) as manager:
        x = torch.randn(2, 3, WIDTH).to(device).requires_grad_()
        y = managed(x)
        assert held(manager) == 0, "autograd keeps what it need not"
        before = manager.state.engine.stats()["acquires"]
        y.sum().backward()
        assert manager.state.engine.stats()["acquires"] > before
        assert held(manager) == 0


def test_a_weight_that_no_hook_sees_is_kept_until_backward(device):
    managed, resident = resident_pair(net(past_hooks))
    with attached(managed, device) as manager:
        x = torch.randn(2, WIDTH).to(device).requires_grad_()
        y = managed(x)
        assert held(manager) == 3
        assert {layer.name for layer in manager.attachment.held()} == {f"{i}" for i in range(3)}
        with pytest.raises(OffloadError, match=r"'0'.*are still held"):
            manager.detach()
        y.sum().backward()
        del y
        gc.collect()
        assert held(manager) == 0
        assert_models_agree(managed, resident, make_step(device), device=device)


class Halved(torch.Tensor):
    """A tensor that is made of another, as a library's quantised ones are."""

    @staticmethod
    def __new__(cls, inner):
        options = dict(dtype=inner.dtype, device=inner.device)
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], "meta"

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        assert meta == "meta" and size == inner["inner"].shape
        return cls(inner["inner"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


def values_of(made):
    return values_of(made.inner) / 2 if isinstance(made, Halved) else made


class ProductOfMade(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, made):
        ctx.save_for_backward(made)
        return x @ values_of(made)

    @staticmethod
    def backward(ctx, grad):
        (made,) = ctx.saved_tensors
        return grad @ values_of(made).t(), None


class MakesAnother(nn.Module):
    """Autograd saves a tensor that is made of the weight, or of one that is."""

    def __init__(self, depth):
        super().__init__()
        self.matrix, self.depth = weights(WIDTH, WIDTH).requires_grad_(False), depth

    def forward(self, x):
        made = self.matrix
        for _ in range(self.depth):
            made = Halved(made)
        return torch.tanh(ProductOfMade.apply(x, made))


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_saved_tensor_that_is_made_of_a_lent_one_lets_go_of_its_slot(device, depth, reentrant):
    managed, resident = resident_pair(net(lambda: MakesAnother(depth), reentrant))
    with attached(managed, device) as manager:
        y = managed(torch.randn(2, 3, WIDTH).to(device).requires_grad_())
        assert held(manager) == 0
        y.sum().backward()
        assert_models_agree(managed, resident, make_step(device), device=device)


class MadeOfItself(nn.Module):
    """Autograd saves a tensor that is made of nothing lent."""

    def __init__(self):
        super().__init__()
        self.matrix = weights(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        return ProductOfMade.apply(x, Halved(self.matrix * 2))


def test_a_saved_tensor_that_is_made_of_others_stays_what_it_is(device):
    managed, resident = resident_pair(net(MadeOfItself))
    with attached(managed, device):
        assert_models_agree(managed, resident, make_step(device), device=device)


class Dequantises(nn.Module):
    """Makes a weight of packed integers, and another of plain ones; autograd keeps both."""

    def __init__(self):
        super().__init__()
        packed = torch.arange(WIDTH * WIDTH // 2, dtype=torch.int32).remainder(256)
        values = packed.to(torch.uint8).view(WIDTH, WIDTH // 2)
        self.packed = nn.Parameter(values, requires_grad=False)
        self.plain = nn.Parameter(weights(WIDTH, 2 * WIDTH).detach().half(), requires_grad=False)

    def forward(self, x):
        halves = torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(-2)
        wide = x @ (halves.float() / 64) @ self.plain.float()
        return torch.tanh(wide.unflatten(-1, (2, WIDTH)).sum(-2))


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non"])
def test_what_is_made_of_weights_is_counted_by_its_bytes(device, reentrant):
    """But for what a checkpoint makes again."""
    managed, resident = resident_pair(net(Dequantises, reentrant))
    with attached(managed, device) as manager:
        assert_models_agree(managed, resident, make_step(device), device=device)
        kept = manager.attachment.traffic.derived_bytes
        made = {f"{i}": 3 * WIDTH * WIDTH * 4 for i in range(3)}
        assert kept == (made if reentrant is None else {})
        assert ("checkpoint the blocks" in str(manager.memory_summary())) is (reentrant is None)


class Fails(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.at, self.inner, self.matrix = at, Einsum(), weights(WIDTH, WIDTH)

    def fail(self, where):
        if self.at == where:
            raise torch.OutOfMemoryError("planted")

    def forward(self, x):
        self.fail("begin")
        x = x @ self.matrix
        self.fail("middle")
        x = self.inner(x)
        self.fail("end")
        return x


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("at", ["begin", "middle", "end"])
def test_an_error_in_forward_leaves_nothing_behind(device, at, trainable):
    managed, resident = resident_pair(train_only(net(lambda: Fails(None)), trainable))
    masters = {name: id(p) for name, p in managed.named_parameters()}
    with attached(managed, device) as manager:
        managed[1].at = at
        with pytest.raises(torch.OutOfMemoryError, match="planted") as raised:
            run(managed, device)
        gc.collect()
        assert held(manager) == 0, "the traceback, which knows all frames, holds a slot"
        del raised
        assert {name: id(p) for name, p in managed.named_parameters()} == masters
        managed[1].at = None
        managed.zero_grad()
        assert_models_agree(managed, resident, make_step(device), device=device)


def test_an_error_in_backward_leaves_nothing_behind(device):
    managed, resident = resident_pair(train_only(net(Einsum), True))

    class Raise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise torch.OutOfMemoryError("planted")

    with attached(managed, device) as manager:
        x = torch.randn(2, 3, WIDTH).to(device)
        y = managed[2](Raise.apply(managed[1](managed[0](x))))
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            y.sum().backward()
        del y
        gc.collect()
        assert held(manager) == 0
        assert_models_agree(managed, resident, make_step(device), device=device)


CHANGES = {
    "in place": (lambda block: block.scale.mul_(2), r".*is at version \d+; expected version \d+"),
    "other data": (
        lambda block: setattr(block.scale, "data", block.scale.data.clone()),
        r".*replaced through \.data",
    ),
    "taken away": (lambda block: setattr(block, "scale", None), " '1'"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_weight_that_changed_before_backward_is_refused(device, how):
    """Each in a model of its own: at another version than 0 a weight is refused anyway."""
    change, said = CHANGES[how]
    managed = train_only(net(Einsum), False)
    with attached(managed, device):
        y = managed(torch.randn(2, 3, WIDTH).to(device).requires_grad_())
        with torch.no_grad():
            change(managed[1])
        with pytest.raises(StaleWeightsError, match=rf"scale of managed layer{said}"):
            y.sum().backward()


def test_a_tensor_without_memory_of_its_own_has_no_address():
    tensor = torch.eye(2)
    assert any_module._address(tensor) == tensor.data_ptr() != 0
    assert any_module._address(tensor.to_sparse()) == 0


def test_an_activation_that_forward_changes_in_place_is_refused_as_ever(device):
    def compute(parts, x):
        y = x @ parts.matrix
        z = y * y
        with torch.no_grad():
            y.add_(1)
        return z

    model = net(lambda: Parts(compute, matrix=weights(WIDTH, WIDTH)))
    managed, resident = resident_pair(model)
    with attached(managed, device):
        for model in (managed, resident.to(device)):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                run(model, device)


class Queries(nn.Module):
    """Has a Parameter of its own, which forward and other methods begin with."""

    def __init__(self):
        super().__init__()
        self.queries, self.layer = weights(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x + self.queries)

    @torch.no_grad()
    def generate(self, x):
        return self.layer(self(x) + self.queries)

    def get_text_features(self, x):
        return self.layer(x * self.queries)

    def another(self, x):
        return self.layer(x @ self.queries)


def test_a_models_own_parameter_is_lent_to_what_it_generates_with(device):
    managed, resident = resident_pair(Queries().requires_grad_(False))
    resident.to(device)
    x = torch.ones(WIDTH, WIDTH).to(device)
    with attached(managed, device) as manager:
        assert [layer.name for layer in manager.layers] == ["", "layer"]
        for name in ("generate", "get_text_features", "forward"):
            expected = getattr(resident, name)(x)
            assert_same(getattr(managed, name)(x), expected)
            with Witness():
                assert_same(getattr(managed, name)(x), expected)
        remedy = r"'queries'.*attach\(\.\.\., ignore_modules=\['queries'\]\)"
        with pytest.raises(OffloadError, match=remedy), Witness():
            managed.another(x)
    with attached(managed, device, ignore_modules=["queries"]) as manager:
        assert [layer.name for layer in manager.layers] == ["layer"]
        assert "named in ignore_modules" in manager.resident["queries"]
        for name in ("another", "generate", "forward"):
            expected = getattr(resident, name)(x)
            assert_same(getattr(managed, name)(x), expected)
            with Witness():
                assert_same(getattr(managed, name)(x), expected)


def test_a_forward_where_hooks_are_forbidden_keeps_its_slots_until_backward(device):
    managed, resident = resident_pair(net(Einsum))
    resident.to(device)
    found = []
    with attached(managed, device) as manager:
        for model in (managed, resident):
            with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
                y = model(torch.ones(2, 3, WIDTH).to(device))
            if model is managed:
                assert held(manager) > 0
            y.square().sum().backward()
            found.append([y, [p.grad for p in model.parameters()]])
            del y
        assert_same(*found)
        assert held(manager) == 0


def test_a_thread_that_waits_too_long_for_another_is_told_which_module_it_waits_for(monkeypatch):
    class Waits(Einsum):
        def forward(self, x):
            if threading.current_thread() is other:
                begun.set()
                assert go_on.wait(30)
            return super().forward(x)

    begun, go_on, found = threading.Event(), threading.Event(), []
    x = torch.ones(2, 3, WIDTH)
    model = nn.Sequential(Waits())
    with attached(model), torch.no_grad():
        other = None
        expected = model(x)
        monkeypatch.setattr(any_module, "_PATIENCE_S", 0.05)
        other = threading.Thread(target=lambda: found.append(model(x).detach()))
        other.start()
        assert begun.wait(30)
        said = "another thread has been inside the forward of '0' for 0 seconds; its weights are "
        with pytest.raises(OffloadError, match=said):
            model(x)
        go_on.set()
        other.join(30)
        assert_same([*found, model(x)], [expected, expected])


def test_what_was_let_go_holds_no_tensor():
    model = net(Einsum)
    with attached(model) as manager:
        (first, *_) = manager.layers
        manager.attachment.let_go(first, "planted")
        assert all(tensor.numel() == 0 for tensor in first.tensors()) and not len(first.parameters)


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_a_backward_after_detach_is_refused_by_name(trainable):
    model = train_only(net(Einsum), trainable)
    with attached(model) as manager:
        y = model(torch.ones(2, 3, WIDTH).requires_grad_()).sum()
        manager.detach()
        with pytest.raises(OffloadError, match=r"'2' was detached between forward and"):
            y.backward()


def test_a_loan_takes_the_device_the_time_to_read_what_is_lent(monkeypatch):
    model, asked = net(Einsum), []
    with attached(model) as manager, torch.no_grad():
        time = manager.state.time
        monkeypatch.setattr(
            type(time), "kernel_seconds", lambda self, *given: asked.append(given) or 1e-9
        )
        model(torch.ones(2, 3, WIDTH))
    read = sum(p.nbytes for p in model[0].parameters())
    assert asked == [(0.0, read, torch.uint8)] * 3


def test_a_loan_on_a_card_takes_the_time_that_the_card_takes():
    """None is charged: the clock of the simulated device is not asked."""
    asked = []
    layer = SimpleNamespace(
        state=SimpleNamespace(simulated=False),
        lend=lambda *given: asked.append(given) or "the slot",
        _keep="keeps",
    )
    assert AnyLayer.borrow(layer, BACKWARD, 7) == "the slot"
    assert asked == [(BACKWARD, 7, 0.0, None, "keeps")]


class Asks(nn.Module):
    """Notes what its tensors look like where it computes with them."""

    def __init__(self):
        super().__init__()
        self.matrix, self.scale = weights(WIDTH, WIDTH), weights(WIDTH)

    def forward(self, x):
        passes_on = not torch.is_inference_mode_enabled()
        self.found = [
            (
                isinstance(t, nn.Parameter),
                t.requires_grad,
                t.is_leaf or (t.requires_grad and passes_on),
                t.shape,
            )
            for t in (self.matrix, self.scale)
        ]
        return x @ self.matrix * self.scale


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_what_is_lent_looks_like_the_parameters(device, trainable, context):
    managed, resident = resident_pair(Asks().requires_grad_(trainable))
    managed.scale.requires_grad_(False)
    resident.to(device).scale.requires_grad_(False)
    x = torch.ones(2, WIDTH).to(device)
    with attached(managed, device) as manager, context():
        assert_all_is_lent(manager)
        assert_same(managed(x), resident(x))
    assert managed.found == resident.found


class Holds(Recorder):
    """Counts how often the host has waited for reads of masters: a step may write them then."""

    count = 0

    def hold(self):
        self.count += 1
        self._engine.hold()

    def rest(self):
        self.count += 1
        self._engine.rest()


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non"])
@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("make", [Einsum, lambda: nn.Linear(WIDTH, WIDTH)], ids=["any", "linear"])
def test_nothing_reads_trainable_masters_once_a_backward_is_over(make, trainable, reentrant):
    model = train_only(net(make, reentrant), trainable)
    with attached(model) as manager:
        state = manager.state
        engine = state.engine
        y = model(torch.ones(2, 3, WIDTH).requires_grad_()).sum()
        state.engine = Holds(engine)
        try:
            with torch.no_grad():
                model(torch.ones(2, 3, WIDTH))
            assert state.engine.count == 0
            y.backward()
            assert state.engine.count == int(trainable)
            assert not state.late
        finally:
            state.engine = engine


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non"])
@pytest.mark.parametrize("make", [Einsum, lambda: nn.Linear(WIDTH, WIDTH)], ids=["any", "linear"])
def test_a_pass_begins_with_the_first_recorded_forward_after_a_backward(make, reentrant):
    model = train_only(net(make, reentrant), False)
    x = torch.ones(2, 3, WIDTH).requires_grad_()
    with attached(model) as manager:
        pace = manager.state.pace
        model(x).sum().backward()
        before, found = pace.passes, []
        with torch.no_grad():
            model(x)
        found.append(pace.passes - before)
        for _ in range(2):
            y = model(x)
            found.append(pace.passes - before)
            y.sum().backward()
            found.append(pace.passes - before)
        # The forward of a reentrant checkpoint is not recorded, and its recompute is no pass.
        assert found == ([0] * 5 if reentrant else [0, 1, 1, 2, 2])


# ---- the module is still the module ----


def test_parameters_keep_identity_order_and_names(device):
    managed, resident = resident_pair(net(Nested))
    before = [(name, id(p)) for name, p in managed.named_parameters()]
    with attached(managed, device):
        run(managed, device)
        assert [(name, id(p)) for name, p in managed.named_parameters()] == before
        assert_same(managed.state_dict(), resident.state_dict())
        copied = copy.deepcopy(managed)
        assert type(copied[0]) is Nested
        assert_same(copied.state_dict(), resident.state_dict())
    assert type(managed[0]) is Nested and type(managed[0].einsum) is Einsum


@pytest.mark.parametrize("kind", ["nested", "lstm", "attention"])
def test_a_change_of_dtype_is_followed(device, kind):
    managed, resident = resident_pair(train_only(net(KINDS[kind]), True))
    with attached(managed, device):
        run(managed, device)
        managed.to(device, torch.bfloat16)
        resident.to(torch.bfloat16)
        assert all(p.dtype is torch.bfloat16 for p in managed.parameters())
        assert_models_agree(managed, resident, make_step(device, torch.bfloat16), device=device)


def test_optimizer_steps_have_the_residents_bits(device):
    managed, resident = resident_pair(train_only(net(Nested, False), True))
    with attached(managed, device):
        resident.to(device)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (managed, resident))
        for _ in range(3):
            assert_same(run(managed, device), run(resident, device))
            step_alike(managed, resident, (ours, theirs), device)
        assert_same(managed.state_dict(), resident.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_inference_has_the_residents_bits(device, kind):
    managed, resident = resident_pair(net(KINDS[kind]))
    managed.eval()
    resident.eval().to(device)
    x = torch.randn(2, 3, WIDTH).to(device)
    with attached(managed, device) as manager:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                for _ in range(2):
                    assert_same(managed(x), resident(x), kind)
        assert held(manager) == 0


def test_the_places_of_a_module_are_a_mapping_of_its_masters():
    module = nn.ModuleDict({"one": nn.Linear(2, 3), "two": nn.Linear(3, 4)})
    names = ["one.weight", "two.bias"]
    places = any_module.Places(module, names)
    found = {name: module.get_parameter(name) for name in names}
    assert len(places) == 2 and dict(places) == found and list(places) == names
    places.put({"two.bias": torch.zeros(4)})
    assert dict(places) == found and module["two"].bias is not found["two.bias"]
    places.restore()
    assert module["two"].bias is found["two.bias"]
    places.put({name: torch.zeros(1) for name in names})
    another = nn.Parameter(torch.ones(3, 2))
    module["one"]._parameters["weight"] = another  # while device tensors were there
    places.restore()
    assert module["one"].weight is another and module["two"].bias is found["two.bias"]
    assert not places.lent


def test_a_byte_of_a_slot_belongs_to_the_tensor_that_begins_there_or_before():
    model = nn.Sequential(nn.GRU(64, 64, num_layers=2))
    with attached(model) as manager:
        (layer,) = manager.layers
        named = [name for name, _ in layer.masters.named()]
        starts = [offset - layer.offsets[0] for offset in layer.offsets]
        assert len(named) > 2 and len(set(starts)) == len(named)
        for name, start, (_, master) in zip(named, starts, layer.masters.named(), strict=True):
            for at in (start, start + 1, start + master.nbytes - 1):
                assert layer.name_at(at) == name


class Wrapper(nn.Module):
    """As peft's wrapper of one Parameter of its base layer."""

    def __init__(self, base_layer):
        super().__init__()
        self.parameter_name = "weight"
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x)


def test_wrappers_are_found_of_what_is_lent_alone():
    model = nn.ModuleList(Wrapper(Wrapper(make())) for make in (Einsum, lambda: nn.Linear(16, 16)))
    with attached(model, "cpu") as manager:
        kinds = {layer.name: isinstance(layer, AnyLayer) for layer in manager.layers}
        assert kinds == {"0.base_layer.base_layer": True, "1.base_layer.base_layer": False}
        found = [wrapper for wrapper, _ in any_module.find_wrappers(model)]
        assert all(wrapper in (model[0], model[0].base_layer) for wrapper in found)
        for wrapper in (model[0], model[0].base_layer):
            assert wrapper in found or any_module.HANDLE in wrapper.__dict__


def test_other_tensors_in_the_places_are_computed_with(device):
    managed, resident = resident_pair(net(Einsum))
    resident.to(device)
    others = {name: torch.randn_like(p) for name, p in resident.named_parameters()}
    x = torch.randn(2, 3, WIDTH).to(device)
    with attached(managed, device) as manager:
        found = torch.func.functional_call(managed, others, (x,))
        assert_same(found, torch.func.functional_call(resident, others, (x,)))
        host = sum(other.nbytes for other in others.values() if other.device.type == "cpu")
        assert sum(manager.attachment.traffic.computed_bytes.values()) == host
        assert_same(managed(x), resident(x))
        assert held(manager) == 0


def test_tensors_that_lie_on_a_device_already_are_not_counted_as_copied():
    """Fake ones: here there is no other device than the host."""
    model = nn.Sequential(Einsum(), nn.Linear(WIDTH, WIDTH))
    with attached(model, "cpu") as manager, FakeTensorMode():
        for where, copied in (("cuda", {}), ("cpu", {"0", "1"})):
            others = {
                name: torch.empty(p.shape, device=where) for name, p in model.named_parameters()
            }
            x = torch.empty(2, 3, WIDTH)
            assert torch.func.functional_call(model, others, (x,)).device.type == "cpu"
            assert manager.attachment.traffic.computed_bytes.keys() == set(copied)


def test_functorch_is_refused(device):
    managed = net(Einsum)
    with attached(managed, device):
        managed(torch.randn(1, 3, WIDTH).to(device))
        with pytest.raises(OffloadError, match=r"torch\.func transforms"):
            torch.func.vmap(managed)(torch.randn(2, 1, 3, WIDTH).to(device))


def test_double_backward_through_frozen_tensors_has_the_residents_bits(device):
    managed, resident = resident_pair(train_only(net(Einsum), False))

    def step(model):
        leaf = torch.linspace(-1, 1, 6 * WIDTH).view(2, 3, WIDTH).to(device).requires_grad_()
        (grad,) = torch.autograd.grad(model(leaf).square().sum(), leaf, create_graph=True)
        grad.square().sum().backward()
        return [grad.detach(), leaf.grad]

    with attached(managed, device):
        assert_models_agree(managed, resident, step, device=device)


def test_threads_take_turns(device):
    managed, resident = resident_pair(train_only(net(Nested), False))
    x = torch.randn(2, 3, WIDTH).to(device)
    expected = resident.to(device)(x).detach()
    found = []
    with attached(managed, device, offload_percent=0.0) as manager:  # room for what each holds

        def compute():
            with torch.no_grad():
                found.extend(managed(x) for _ in range(10))

        managed(x)  # watched
        threads = [threading.Thread(target=compute) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 40
        for y in found:
            assert_same(y, expected)
        assert held(manager) == 0


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_the_smallest_arena_has_room_for_what_stays_lent(device, trainable):
    managed, resident = resident_pair(train_only(net(Nested, False, depth=4), trainable))
    floor = oracle_offload.attach(managed, device, offload_percent=1.0)
    assert floor.attachment.arena.capacity_bytes == floor.attachment.arena.floor_bytes
    try:
        assert_models_agree(managed, resident, make_step(device), device=device)
        assert floor.state.engine.stats()["evictions"] > 0 or not is_simulated(device)
    finally:
        floor.detach()


def test_a_steady_step_creates_nothing(device):
    managed = train_only(net(Nested, False), True)
    with attached(managed, device) as manager:
        for _ in range(3):
            run(managed, device)

        def created():
            arena = manager.attachment.arena.capacity_bytes
            live = simulator.live() if is_simulated(device) else None
            lent = None if live is None else (live.adopted_bytes, live.device_bytes, live.events)
            return manager.state.engine.stats()["allocations"], arena, lent

        before = created()
        for _ in range(3):
            run(managed, device)
            assert created() == before


# ---- what stays resident ----


class Sized(nn.Module):
    def __init__(self, *nbytes):
        super().__init__()
        for number, size in enumerate(nbytes):
            self.register_parameter(f"t{number}", nn.Parameter(torch.zeros(size // 4)))

    def forward(self, x):
        return x + sum(p.sum() for p in self.parameters())


def test_small_tensors_stay_and_together_they_are_little(monkeypatch):
    monkeypatch.setattr(selection, "SMALL_BYTES", 64 << 10)
    monkeypatch.setattr(selection, "SMALL_TOGETHER", (10 << 10, 100 << 10))
    chosen = selection.select(Sized(64 << 10, (64 << 10) - 4, 4096, 2048))
    assert [leaf.kind.names for leaf in chosen.leaves] == [("t0", "t1")]
    assert set(chosen.parameters) == {"t2", "t3"}
    assert "4.00 KiB are too small" in chosen.parameters["t2"]
    # A hundredth of a large model, and no more than the limit.
    chosen = selection.select(Sized(8 << 20, 60 << 10, 20 << 10))
    assert set(chosen.parameters) == {"t1", "t2"}
    chosen = selection.select(Sized(8 << 20, 60 << 10, 30 << 10))
    assert set(chosen.parameters) == {"t2"}
    chosen = selection.select(Sized(64 << 20, 60 << 10, 50 << 10))
    assert set(chosen.parameters) == {"t2"}


def test_a_buffer_lies_on_the_device_and_so_does_a_small_parameter(device, monkeypatch):
    monkeypatch.setattr(selection, "SMALL_BYTES", 4 * WIDTH + 1)
    monkeypatch.setattr(selection, "SMALL_TOGETHER", (1 << 20, 1 << 20))
    managed = Einsum()
    managed.register_buffer("steps", torch.zeros(1))
    with attached(managed, device) as manager:
        assert set(manager.resident) == {"scale"}
        wanted = torch.device(device).type
        assert managed.scale.device.type == managed.steps.device.type == wanted
        managed.to(torch.bfloat16)
        assert {t.dtype for t in (managed.scale, managed.steps, managed.stack)} == {torch.bfloat16}
        assert managed.stack.device.type == "cpu"


def test_max_norm_stays(device):
    with pytest.raises(OffloadError, match="max_norm"):
        oracle_offload.attach(nn.Embedding(8, 8, max_norm=1.0), device)


class Tied(nn.Module):
    """A language model in small: what its embedding and its head share is one Parameter."""

    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(24, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 24, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.embedding(ids))))


def token_step(device):
    def step(model):
        ids = torch.arange(14).view(2, 7).to(device)
        y = model(ids)
        y.float().square().mean().backward()
        return [y.detach()]

    return step


def test_a_shared_weight_that_code_takes_from_the_head_streams(device):
    managed, resident = resident_pair(train_only(Tied(), False))
    for model in (managed, resident):
        model.inner.requires_grad_(True)

        def forward(ids, model=model):  # a trainer's own
            inner = model.inner(model.embedding(ids))
            return F.linear(inner, model.head.weight)

        model.forward = forward
    with attached(managed, device) as manager:
        assert len(manager.layers) == 3
        assert_models_agree(managed, resident, token_step(device), device=device)
        assert {layer.name for layer in manager.layers} == {"embedding", "inner", "head"}
        assert managed.embedding.weight is managed.head.weight and manager.resident == {}


def test_code_that_shares_the_weight_of_a_layer_that_is_read_streams(device):
    """It is used directly as well where `when` says."""

    def compute(parts, x):
        y = parts.inner(parts.stem(x))
        y = y + F.linear(y, parts.inner.weight) if parts.when else y
        return parts.own(y)

    inner = nn.Linear(WIDTH, WIDTH)
    own = Parts(
        lambda parts, x: x @ parts.matrix * parts.scale, matrix=inner.weight, scale=weights(WIDTH)
    )
    model = Parts(compute, stem=nn.Linear(WIDTH, WIDTH), inner=inner, own=own, when=False)
    managed, resident = resident_pair(train_only(model, False))
    step = make_step(device)
    with attached(managed, device) as manager:
        assert {layer.name for layer in manager.layers} == {"stem", "inner", "own"}
        assert_models_agree(managed, resident, step, device=device)
        managed.when = resident.when = True
        assert_models_agree(managed, resident, step, device=device)
        assert {layer.name for layer in manager.layers} == {"stem", "inner", "own"}
        assert managed.own.matrix is managed.inner.weight and manager.resident == {}


def test_what_a_recurrent_module_lists_is_what_stands_there():
    """torch asks the weak references, too, whether its list is of its Parameters."""
    model = recurrent()
    with attached(model) as manager:
        assert any(isinstance(layer, AnyLayer) for layer in manager.layers)
        seen = []
        model.rnn.register_forward_pre_hook(lambda rnn, _: seen.append(listed(rnn)))
        model(torch.randn(2, 3, WIDTH))
        seen.append(listed(model.rnn))
    assert seen == [True, True]


def listed(rnn):
    standing = [rnn._parameters[name] for name in rnn._flat_weights_names]
    listed = [*rnn._flat_weights], [reference() for reference in rnn._flat_weight_refs]
    return all(a is b for tensors in listed for a, b in zip(tensors, standing, strict=True))
