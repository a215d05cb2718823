"""torch.compile with ``fullgraph=True``: a managed layer is one operator of the captured graph."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch._inductor.utils
from capturing import BACKENDS, Backend, Checkpointed, compiled, uses
from equality import (
    RUNS,
    assert_models_agree,
    assert_same,
    attached,
    gradients,
    resident_pair,
)
from peak import peak_of
from tiers import in_turn
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload import OffloadError
from oracle_offload.layers import traced

DEPTH = 3
LAYERS = 6  # of a block


class Block(nn.Module):
    """Attention whose q, k and v may compute in any order, and a layer that nothing comes of."""

    def __init__(self, unused):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        for name in ("q", "k", "v", "out", "unused", "down"):
            self.add_module(name, nn.Linear(32, 32))
        self.has_unused = unused

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (part(y).unsqueeze(1) for part in (self.q, self.k, self.v))
        y = self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        if self.has_unused:
            self.unused(y)
        return self.down(x + y.sin())  # nothing after it is saved: a checkpoint ends with it


pytestmark = pytest.mark.usefixtures("made_there", "from_the_start")


def model_of(checkpointing=False, unused=True):
    blocks = [Block(unused) for _ in range(DEPTH)]
    return Checkpointed(blocks, nn.Linear(32, 8), checkpointing)


def step(called, shape=(2, 5, 32)):
    x = torch.randn(shape, requires_grad=True)
    y = called(x)
    y.square().sum().backward()
    return [y, x.grad]


@pytest.mark.parametrize(
    ("how", "order", "name", "checkpointing", "frozen"),
    [
        ("torch.compile", "attach first", "aot_eager", False, False),
        ("torch.compile", "attach first", "aot_eager", True, True),
        ("torch.compile", "compile first", "aot_eager", True, False),
        ("torch.compile", "compile first", "eager", False, True),
        ("torch.compile", "attach first", "eager", True, False),
        ("block.compile", "attach first", "aot_eager", True, True),
        ("block.compile", "compile first", "eager", True, False),
        ("block.compile", "compile first", "aot_eager", False, False),
    ],
)
def test_each_managed_layer_is_one_operator(how, order, name, checkpointing, frozen):
    managed, resident = resident_pair(model_of(checkpointing, unused=False))
    for model in (managed, resident):
        model.requires_grad_(not frozen)
    backend, reference = Backend(name), Backend(name)
    called = None
    if order == "compile first":
        called = compiled(managed, how, backend, fullgraph=True)
        step(called)  # compiled and run before there is anything to manage
        managed.zero_grad()
        assert backend.count("linear") == 0
    beside = compiled(resident, how, reference, fullgraph=True)
    with attached(managed) as manager:
        assert len(manager.layers) == LAYERS * DEPTH + 1
        if called is None:
            called = compiled(managed, how, backend, fullgraph=True)
        backend.ran.clear()
        state = manager.attachment.state
        calls = {managed: called, resident: beside}
        assert_models_agree(managed, resident, lambda m: step(calls.get(m, m)))
        layers = (LAYERS - 1) * DEPTH + (how == "torch.compile")
        again = checkpointing and how == "block.compile"  # its recompute runs the graph again
        assert backend.count("linear") == RUNS * 2 * layers * (1 + again)
        assert state.engine.stats()["h2d_bytes"] > 0
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("checkpointing", "name"),
    [
        (False, "aot_eager"),
        (True, "aot_eager"),
        (True, "inductor"),
        pytest.param(False, "inductor", marks=pytest.mark.slow),
    ],
)
def test_order_and_bytes_are_those_of_eager(name, checkpointing):
    """A recompute is directly before its backward, and what nothing comes of is used too."""
    model = model_of(checkpointing, unused=not checkpointing).requires_grad_(False)
    order, brought = uses(copy.deepcopy(model), None, step)
    found, found_brought = uses(copy.deepcopy(model), name, step)
    assert brought > 0
    assert found == order
    assert found_brought == brought


PURE = {
    "advance": lambda advance, sequence, y: None,
    "forward": lambda advance, sequence, y: advance(sequence, sequence),  # nothing holds its result
}


@in_turn("which,name", PURE, ("aot_eager", "inductor"))
def test_an_operator_declared_pure_is_caught(which, name, monkeypatch):
    """What the test above sees: a compiler drops a pure operator whose result is not used."""
    model = model_of(unused=True).requires_grad_(False)
    order, _ = uses(copy.deepcopy(model), None, step)
    impure, advance = PURE[which], traced.advance
    monkeypatch.setattr(traced, "advance", lambda sequence, y: impure(advance, sequence, y))
    found, _ = uses(copy.deepcopy(model), name, step)
    assert found != order
    assert not any("unused" in name for name in found)


def test_saved_activations_are_those_of_eager():
    """With the checkpoint inside the compiled region: the input of each block."""
    model = model_of(checkpointing=True, unused=False).requires_grad_(False)
    x = torch.randn(64, 16, 32, requires_grad=True)
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with attached(model):
        called = compiled(model, "torch.compile", "aot_eager", fullgraph=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            called(x)
        for parameter in model.parameters():
            saved.pop(parameter.untyped_storage().data_ptr(), None)
    assert 0 < sum(tensor.nbytes for tensor in saved.values()) <= 1.05 * DEPTH * x.nbytes


@pytest.mark.parametrize(
    ("how", "frozen"),
    [("torch.compile", True), ("torch.compile", False), ("block.compile", True)],
)
def test_the_peak_of_activations_is_that_of_eager(how, frozen):
    """Each block's recompute goes with its backward: all at once would live side by side.

    The checkpoint is inside the compiled region, or around it where blocks are compiled.
    """
    model = model_of(checkpointing=True, unused=False).requires_grad_(not frozen)
    x = torch.randn(256, 16, 32, requires_grad=True)

    def peak(called):
        def train():
            called(x).sum().backward()

        train()
        x.grad = None
        model.zero_grad()
        return peak_of(train)

    with attached(model) as manager:
        eager = peak(model)
        called = compiled(model, how, "aot_eager", fullgraph=True)
        before = manager.attachment.state.engine.stats()["h2d_bytes"]
        found = peak(called)
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > before
    assert eager > (DEPTH + LAYERS) * x.nbytes  # of all blocks the inputs, of one all
    assert found <= 1.05 * eager


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_forward_after_a_backward_is_noticed(name):
    """Then the arena may grow to the blocks that were learned; a sample is none."""
    model = model_of(checkpointing=True, unused=False).requires_grad_(False)
    with attached(model) as manager:
        called = compiled(model, "torch.compile", name, fullgraph=True)
        for number in range(3):
            step(called)
            with torch.no_grad():
                called(torch.randn(2, 5, 32))
            assert manager.attachment.state.pace.passes == number


def test_lengths_and_modes_are_compiled_few_times():
    """By dynamo, whose guards say so; test_compile_families.py has any size under aot_eager."""
    managed, resident = resident_pair(model_of())
    backend = Backend("eager")
    with attached(managed) as manager:
        called = compiled(managed, "torch.compile", backend, fullgraph=True)
        for length in (5, 7, 11, 3):
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    x = torch.randn(2, length, 32)
                    assert torch.equal(called(x), resident(x))
        with torch.inference_mode():
            assert torch.equal(called(x), resident(x))
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    assert backend.graphs <= 5  # with and without gradients: of one length, of any; inference


def test_one_compiled_block_serves_all():
    managed = model_of().requires_grad_(False)
    backend = Backend("eager")
    with attached(managed), torch.no_grad():
        compiled(managed, "block.compile", backend, fullgraph=True)
        for _ in range(3):
            managed(torch.randn(2, 5, 32))
    assert backend.graphs == 1
    assert backend.count("linear") == 3 * DEPTH * LAYERS


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_several_forwards_before_a_backward(name):
    """Of one graph, and of several that break apart inside one block."""

    class Broken(Checkpointed):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
                torch._dynamo.graph_break()
                x = x + block.q(block.k(x))
            return self.head(x)

    def forwards(model):
        x = torch.randn(2, 5, 32, requires_grad=True)
        first, second = calls.get(model, model)(x), calls.get(model, model)(x + 1)
        with torch.no_grad():
            calls.get(model, model)(x)
        first.sum().backward()
        second.square().sum().backward()
        return [first, second, x.grad]

    blocks = [Block(unused=False) for _ in range(DEPTH)]
    managed, resident = resident_pair(Broken(blocks, nn.Linear(32, 8)))
    with attached(managed):
        calls = {model: torch.compile(model, backend=name) for model in (managed, resident)}
        assert_models_agree(managed, resident, forwards)


class Mixed(nn.Module):
    """The other kinds, with every way to pad."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8, padding_idx=1)
        self.one = nn.Conv1d(8, 8, 3, padding="same")
        self.even = nn.Conv1d(8, 8, 4, padding="same", dilation=2)
        self.two = nn.Conv2d(1, 4, 3, stride=2, padding=1, padding_mode="circular")
        self.three = nn.Conv3d(4, 4, (1, 2, 2), padding=(0, 1, 1), groups=2)
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, rows):
        x = self.table(rows).transpose(1, 2)
        x = self.even(self.one(x).relu()).unsqueeze(1)
        x = self.three(self.two(x).unsqueeze(2)).mean(dim=2)
        return self.head(x.flatten(1)[:, :8])


@in_turn("frozen,name", [True, False], BACKENDS)
def test_the_other_kinds(name, frozen):
    managed, resident = resident_pair(Mixed())
    for model in (managed, resident):
        model.requires_grad_(not frozen)
        model.three.requires_grad_(True)
    backend = Backend(name)

    def mixed_step(model):
        rows = torch.arange(24).view(2, 12) % 10
        y = calls.get(model, model)(rows)
        y.square().sum().backward()
        return [y]

    with attached(managed):
        calls = {
            managed: torch.compile(managed, backend=backend, fullgraph=True),
            resident: torch.compile(resident, backend=name, fullgraph=True),
        }
        assert_models_agree(managed, resident, mixed_step)
    counts = [backend.count(kind) for kind in ("linear", "convolution", "embedding")]
    assert counts == [2 * RUNS * n for n in (1, 4, 1)]


def test_the_other_kinds_under_inductor(monkeypatch, tmp_path):
    """Which fuses what is between them with other roundings, in a resident model too."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what it wrote before is no proof
    model = Mixed()
    model.even.requires_grad_(False)
    rows = torch.arange(24).view(2, 12) % 10
    wanted = copy.deepcopy(model)
    expected = wanted(rows)
    expected.square().sum().backward()
    with attached(model) as manager:
        assert len(manager.layers) == 6
        found = torch.compile(model, fullgraph=True)(rows)
        found.square().sum().backward()
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    torch.testing.assert_close(found, expected)
    for one, other in zip(model.parameters(), wanted.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


class Sparse(nn.Module):
    """Rows of a table, where padding has no gradient, looked up in two ways that add up."""

    def __init__(self, checkpointing):
        super().__init__()
        self.table = nn.Embedding(64, 8, padding_idx=1, sparse=True)
        self.head = nn.Linear(8, 4)
        self.checkpointing = checkpointing

    def look_up(self, rows):
        return self.head(self.table(rows).sin() + self.table(rows.flip(0)))

    def forward(self, rows):
        if self.checkpointing:
            return checkpoint(self.look_up, rows, use_reentrant=False)
        return self.look_up(rows)


@in_turn("checkpointing,name", [False, True], BACKENDS)
def test_sparse_gradients_break_no_graph(checkpointing, name):
    """The resident model as it is without a compiler: compiled it fails, for the padding."""
    managed, resident = resident_pair(Sparse(checkpointing))
    backend = Backend(name)
    with attached(managed) as manager:
        called = torch.compile(managed, backend=backend, fullgraph=True)
        for length in (4, 4, 6, 7):  # gradients add up
            rows = torch.arange(2 * length).view(2, length) % 5
            found, expected = called(rows), resident(rows)
            found.square().sum().backward()
            expected.square().sum().backward()
            grads = managed.table.weight.grad, resident.table.weight.grad
            assert all(grad.is_sparse and not grad.is_coalesced() for grad in grads)
            parts = ([grad._indices(), grad._values()] for grad in grads)
            assert_same([found, *next(parts)], [expected, *next(parts)])
        assert_same(managed.head.weight.grad, resident.head.weight.grad)
        assert backend.count("embedding") == 4 * 2
        assert backend.graphs <= 2  # one length, any
        assert manager.attachment.traffic.rows_read >= 4 * 2
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
        managed.table.requires_grad_(False)
        assert_same(called(rows), resident(rows))
        called(rows).sum().backward()
        assert_same(managed.table.weight.grad._values(), grads[1]._values())


def test_sparse_gradients_under_inductor(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what it wrote before is no proof
    model = nn.Sequential(nn.Embedding(64, 8, padding_idx=1, sparse=True), nn.Linear(8, 4))
    wanted = copy.deepcopy(model)
    rows = torch.arange(10) % 5
    wanted(rows).square().sum().backward()
    with attached(model) as manager:
        torch.compile(model, fullgraph=True)(rows).square().sum().backward()
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    found, expected = model[0].weight.grad, wanted[0].weight.grad
    assert found.is_sparse
    assert_same(found._indices(), expected._indices())
    torch.testing.assert_close(found._values(), expected._values())


@pytest.mark.parametrize("first", ["attach", "adapters"])
def test_lora(first):
    peft = pytest.importorskip("peft")
    plain = model_of(unused=False)
    settings = peft.LoraConfig(r=2, target_modules=["q", "v", "down"], init_lora_weights=False)
    torch.manual_seed(3)
    resident = peft.get_peft_model(copy.deepcopy(plain), settings)
    backend = Backend("aot_eager")
    managed = copy.deepcopy(plain)
    torch.manual_seed(3)
    if first == "adapters":
        managed = peft.get_peft_model(managed, settings)
    with attached(managed) as manager:
        if first == "attach":
            managed = peft.get_peft_model(managed, settings)
        calls = {
            managed: torch.compile(managed, backend=backend, fullgraph=True),
            resident: torch.compile(resident, backend="aot_eager", fullgraph=True),
        }
        for _ in range(2):
            torch.manual_seed(4)
            found = step(calls[managed])
            torch.manual_seed(4)
            assert_same(found, step(calls[resident]))
        grads = [
            {n: p.grad for n, p in m.named_parameters() if "lora" in n} for m in (managed, resident)
        ]
        assert_same(*grads)
        assert all(g is not None for g in grads[0].values())
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    assert backend.count("linear") >= 2 * ((LAYERS - 1) * DEPTH + 1)


class Adapter(nn.Module):
    """A LoRA as AI-Toolkit has it: its forward is put in that of the layer."""

    def __init__(self, layer):
        super().__init__()
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        self.org_module, self.org_forward = [layer], layer.forward
        layer.forward = self.forward

    def forward(self, x, *args, **kwargs):
        return self.org_forward(x, *args, **kwargs) + self.up(self.down(x))


def test_the_compile_gate_of_ai_toolkit():
    """After attach and adapters: wrappers in the list of blocks, for any size from the first on."""
    managed, resident = resident_pair(model_of(True, unused=False).requires_grad_(False))
    backend, theirs, found = Backend("aot_eager"), Backend("aot_eager"), {}
    lengths = (5, 7, 11)
    with attached(managed) as manager:
        for model, called in ((managed, backend), (resident, theirs)):
            torch.manual_seed(1)
            adapters = nn.ModuleList([Adapter(block.q) for block in model.blocks])
            for i, block in enumerate(model.blocks):
                model.blocks[i] = torch.compile(block, dynamic=True, fullgraph=True, backend=called)
            found[model] = []
            for length in lengths:
                adapters.zero_grad()
                found[model] += step(model, shape=(2, length, 32))
                found[model] += [p.grad for p in adapters.parameters()]
                with torch.no_grad():
                    found[model].append(model(torch.ones(2, length, 32)))
        layers = len(manager.layers) - 1
        assert layers == LAYERS * DEPTH
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    assert_same(found[managed], found[resident])
    assert backend.count("linear") == 3 * len(lengths) * (layers - DEPTH)  # one of them again
    assert backend.graphs <= theirs.graphs + 1  # of a block whose input needs no gradient


def test_accumulate_fetches_compiled_blocks_once():
    """A compiled block is one piece for micro-batches that take turns, whatever its size."""
    managed, resident = resident_pair(model_of(unused=False))
    batches = [torch.randn(2, 5, 32) for _ in range(3)]
    for batch in batches:
        resident(batch).square().mean().backward()
    with attached(managed) as manager:
        compiled(managed, "block.compile", "aot_eager", fullgraph=True)
        state, brought = manager.attachment.state, []
        for interleave in (False, False, True, True):  # the second of each has all compiled
            managed.zero_grad()
            before = state.engine.stats()["h2d_bytes"]
            oracle_offload.accumulate(
                lambda x: managed(x).square().mean(), batches, interleave=interleave
            )
            brought.append(state.engine.stats()["h2d_bytes"] - before)
        assert 0 < brought[3] < 0.5 * brought[1]
        assert_same(gradients(managed), gradients(resident))


def test_autocast():
    managed, resident = resident_pair(model_of(unused=False))
    backend = Backend("aot_eager")

    def autocast_step(model):
        with torch.autocast("cpu", torch.bfloat16):
            y = calls.get(model, model)(torch.randn(2, 5, 32))
        y.float().square().sum().backward()
        return [y]

    with attached(managed):
        calls = {
            managed: torch.compile(managed, backend=backend, fullgraph=True),
            resident: torch.compile(resident, backend="aot_eager", fullgraph=True),
        }
        assert_models_agree(managed, resident, autocast_step)
    assert backend.count("linear") == 2 * RUNS * ((LAYERS - 1) * DEPTH + 1)


@pytest.mark.parametrize("first", [lambda: nn.Linear(16, 16), lambda: nn.Conv1d(4, 4, 1)])
def test_a_leaf_that_autocast_casts(first):
    one, other = resident_pair(nn.Sequential(first(), nn.Linear(16, 16)))
    calls = {m: torch.compile(m, backend="aot_eager", fullgraph=True) for m in (one, other)}

    def cast_step(model):
        x = torch.randn(2, 4, 16, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = calls.get(model, model)(x)
        y.float().square().sum().backward()
        return [y, x.grad]

    with attached(one) as manager:
        assert len(manager.layers) == 2
        assert_models_agree(one, other, cast_step)


@in_turn("write,name", ["in place", "through .data"], BACKENDS)
def test_a_weight_that_changes_before_backward_is_refused(write, name):
    model = model_of(unused=False)
    with attached(model):
        called = torch.compile(model, backend=name, fullgraph=True)
        loss = called(torch.randn(2, 5, 32, requires_grad=True)).sum()
        weight = model.blocks[1].out.weight
        if write == "in place":
            with torch.no_grad():
                weight.add_(1)
        else:
            weight.data = weight.data.clone()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|replaced through .data"):
            loss.backward()


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_kernel_that_changes_is_refused_for_its_own_gradient_as_well(name):
    """torch's convolution keeps the weight for whichever gradient is asked for."""
    model = nn.Sequential(nn.Conv2d(2, 2, 3))
    with attached(model):
        called = torch.compile(model, backend=name, fullgraph=True)
        loss = called(torch.randn(1, 2, 8, 8)).sum()
        with torch.no_grad():
            model[0].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()


def pair():
    """Return a small model and its resident equal."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False)
    return resident_pair(model)


def called_with_another_weight(model, x, weight):
    return torch.func.functional_call(model, {"0.weight": weight}, (x,))


def called_with_another_bias(model, x, weight):
    return torch.func.functional_call(model, {"0.bias": weight[0]}, (x,))


def writes_a_weight(model, x, weight):
    before = model(x)
    with torch.no_grad():
        model[0].weight.mul_(weight)
    return before + model(x)


@in_turn(
    "change,name", [called_with_another_bias, writes_a_weight, called_with_another_weight], BACKENDS
)
def test_a_compiled_region_computes_with_the_weight_that_it_has(change, name):
    managed, resident = pair()
    x, weight = torch.randn(2, 8), torch.randn(8, 8)
    with attached(managed) as manager, torch.no_grad():
        called = torch.compile(change, backend=name, fullgraph=True)
        for _ in range(2):
            assert_same(called(managed, x, weight), change(resident, x, weight))
            assert_same(managed(x), resident(x))
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
        transposed = managed[0].weight.t()  # at the master's address
        found = torch.compile(called_with_another_weight, backend=name)(managed, x, transposed)
        assert_same(found, called_with_another_weight(resident, x, resident[0].weight.t()))


@in_turn("change,name", [called_with_another_weight, writes_a_weight], BACKENDS)
def test_with_gradients_such_a_weight_is_refused(change, name):
    managed, _ = pair()
    weight = torch.randn(8, 8)

    def gradient(model, called):
        x = torch.ones(2, 8, requires_grad=True)
        called(model, x, weight).square().sum().backward()
        return x.grad

    refused = pytest.raises(RuntimeError, match=r"computed weight|computed with|by an inplace")
    with attached(managed), refused:
        gradient(managed, torch.compile(change, backend=name, fullgraph=True))


@in_turn("transform,name", ["grad", "vmap", "jvp"], BACKENDS)
def test_transforms_of_functions_are_refused_as_without_a_compiler(transform, name):
    managed, _ = pair()
    transforms = {
        "grad": lambda x: torch.func.grad(lambda y: managed(y).sum())(x),
        "vmap": lambda x: torch.func.vmap(managed)(x),
        "jvp": lambda x: torch.func.jvp(managed, (x,), (torch.ones_like(x),))[1],
    }
    with attached(managed), pytest.raises(OffloadError, match=r"^torch\.func transforms over"):
        torch.compile(transforms[transform], backend=name)(torch.randn(2, 8))


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_attributes_that_compiled_code_changes_are_used(name):
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)
            self.table = nn.Embedding(6, 2, padding_idx=1)

        def forward(self, rows):
            conv, table = self.conv, self.table
            x = table(rows).view(1, 2, 6, 6)
            y = conv(x)
            conv.dilation = conv.padding = 2, 2
            table.padding_idx, table.scale_grad_by_freq = 2, True
            y = y + conv(x) + table(rows).view(1, 2, 6, 6)
            conv.dilation = conv.padding = 1, 1
            table.padding_idx, table.scale_grad_by_freq = 1, False
            return y

    managed, resident = resident_pair(Changing())
    rows = torch.arange(36) % 5 + (torch.arange(36) == 7)

    def changing_step(model):
        y = calls.get(model, model)(rows)
        y.square().sum().backward()
        return [y]

    with attached(managed) as manager:
        assert len(manager.layers) == 2
        calls = {m: torch.compile(m, backend=name, fullgraph=True) for m in (managed, resident)}
        assert_models_agree(managed, resident, changing_step)


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_detach_before_backward_is_refused_as_without_a_compiler(name):
    model, _ = pair()
    x = torch.randn(2, 8, requires_grad=True)
    with attached(model):
        y = torch.compile(model, backend=name, fullgraph=True)(x)
    with pytest.raises(OffloadError, match=r"was detached between forward and backward; run"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_backward_after_the_model_is_gone_is_refused(name):
    x = torch.randn(2, 8, requires_grad=True)
    model, _ = pair()
    with attached(model):
        y = torch.compile(model, backend=name, fullgraph=True)(x)
    del model
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(OffloadError, match=r"was detached between forward and backward; run"):
        y.sum().backward()
    with pytest.raises(OffloadError, match=r"of compiled code was detached between forward and"):
        traced.layer_in_backward(torch.tensor(-1))


def test_cuda_graphs_leave_the_operators_out():
    """And whatever else takes a result's place in memory for fixed."""
    if not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("this torch has no such tag")
    operators = [*traced._kernels]
    assert len(operators) >= 2 * 4 + 1
    for operator in operators:
        assert torch.Tag.cudagraph_unsafe in operator.tags
    asks = getattr(torch._inductor.utils, "is_cudagraph_unsafe_fx_node", None)
    if asks is None:
        return  # a torch that asks elsewhere
    graphs, (model, _) = [], pair()

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    with attached(model):
        torch.compile(model, backend=keep, fullgraph=True)(torch.randn(2, 8))
    unsafe = [node.target for node in graphs[0].graph.nodes if asks(node)]
    assert unsafe == [traced.linear, traced.advance] * 2


def test_code_that_was_compiled_for_an_attached_model_is_refused_after_detach():
    """Dynamo sees that the classes are others; who keeps the captured code does not."""
    model, _ = pair()
    kept = []

    def keep(graph, inputs):
        kept.append((graph, inputs))
        return graph

    with attached(model):
        expected = torch.compile(model, backend=keep, fullgraph=True)(torch.randn(2, 8))
        (graph, inputs), layers = kept[0], list(model._memory_manager.layers)
        assert_same(graph(*inputs)[0], expected)
    refused = "compiled code computes with a managed layer that was detached since"
    with pytest.raises(OffloadError, match=refused):
        graph(*inputs)
    del layers
    gc.collect()
    with pytest.raises(OffloadError, match=refused):
        graph(*inputs)


def test_what_was_added_since_is_in_the_one_graph_of_its_model():
    """No part of it is called before torch traces, where nothing can be brought to the device."""
    managed, resident = pair()
    x = torch.randn(2, 8)
    with attached(managed):
        compiled = torch.compile(managed, backend="eager", fullgraph=True)
        for model in (managed, resident):
            torch.manual_seed(0)
            model.append(nn.Linear(8, 8).requires_grad_(False))
        assert_same(compiled(x), resident(x))


def test_what_else_traces_is_refused_in_a_sentence():
    from torch.fx.experimental.proxy_tensor import make_fx

    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)
    tracers = {
        "torch.export": lambda: torch.export.export(model, (x,), strict=False),
        "torch.jit.trace": lambda: torch.jit.trace(model, x),
        "make_fx": lambda: make_fx(model)(x),
    }
    expected = model(x)
    with attached(model):
        for name, trace in tracers.items():
            with pytest.raises(
                OffloadError, match=f"^{name} cannot trace an attached model.*Detach"
            ):
                trace()
            assert torch.equal(model(x), expected), "a refusal leaves the model usable"
        if hasattr(torch.compiler, "is_exporting"):
            refused = r"torch\.export cannot trace an attached model.*Detach"
            with pytest.raises(Exception, match=refused):
                torch.export.export(model, (x,), strict=True)
            assert torch.equal(model(x), expected)
        else:  # it takes the weights along
            program = torch.export.export(model, (x,), strict=True).module()
            assert torch.equal(program(x), expected)
