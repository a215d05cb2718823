"""`accumulate`: one fetch of each block for several micro-batches, with the bits of a loop."""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import functools
import random
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy
import pytest
import torch
from equality import (
    assert_models_agree,
    assert_same,
    attached,
    count_acquires,
    gradients,
    h2d_bytes,
    resident_pair,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import oracle_offload
from oracle_offload import OffloadError, accumulate
from oracle_offload.model import selection
from oracle_offload.model.witness import Witness
from oracle_offload.train.micro_batches import thread_state
from oracle_offload.train.micro_batches.attributes import are_same
from oracle_offload.train.micro_batches.thread_state import Generators

pytest.importorskip("greenlet")
MICRO_BATCHES = 4
CHECKPOINTS = [None, True, False]  # none, reentrant, non-reentrant
WIDTH = 32


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.lora_a = nn.Linear(WIDTH, 4, bias=False)
        self.lora_b = nn.Linear(4, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        y = self.dropout(self.down(torch.tanh(self.up(x))))
        return x + y + self.lora_b(self.lora_a(x))


class Net(nn.Module):
    def __init__(self, reentrant=None, full=False, dropout=0.0, blocks=5):
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(full or "lora" in name or "stem" in name)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        return x

    def adapters(self):
        return [part for name, part in self.named_modules() if "lora" in name]


def net(*, full=False, **options):
    torch.manual_seed(0)
    return Net(full=full, **options)


@contextlib.contextmanager
def streamed(model, device, **options):
    """Attach with an arena of little more than one block."""
    resident = [] if any(p.requires_grad for p in model.blocks[0].up.parameters()) else None
    ignored = model.adapters() if resident is None else []
    with attached(model, device, offload_percent=1.0, ignore_modules=ignored, **options) as manager:
        yield manager


def inputs(device, count=MICRO_BATCHES):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, WIDTH, generator=generator).to(device) for _ in range(count)]


def loss_of(model, x, autocast=False):
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        y = model(x)
    return y.float().square().mean()


def is_managed_model(model):
    return "_memory_manager" in model.__dict__


def is_equal_to_reference(model, device, step, **options):
    """Compare `accumulate` over a managed model with one stream after the other, resident."""
    managed, resident = resident_pair(model)

    def both(model):
        return accumulate(
            lambda x: step(model, x), inputs(device), interleave=is_managed_model(model)
        )

    with streamed(managed, device, **options):
        assert_models_agree(managed, resident, both, steps=3, device=device)


# ---- bits and bytes ----


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["nockpt", "reentrant", "nonreentrant"])
def test_gradients_have_the_bits_of_the_plain_loop(device, reentrant, full, autocast):
    managed, resident = resident_pair(net(reentrant=reentrant, full=full))

    def step(model):
        if is_managed_model(model):
            return accumulate(lambda x: loss_of(model, x, autocast), inputs(device))
        losses = []
        for x in inputs(device):
            loss = loss_of(model, x, autocast)
            loss.backward()
            losses.append(loss.detach())
        return losses

    with streamed(managed, device):
        assert_models_agree(managed, resident, step, device=device)


def assert_blocks_are_fetched_once(model, device):
    moved = {}
    with streamed(model, device):
        for interleave in (False, True):
            for _ in range(4):  # the order is learned by the third
                before = h2d_bytes(device)
                model.zero_grad()
                accumulate(lambda x: loss_of(model, x), inputs(device), interleave=interleave)
                moved[interleave] = h2d_bytes(device) - before
    assert moved[True] <= 0.26 * moved[False]


@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["nockpt", "reentrant", "nonreentrant"])
def test_a_block_is_fetched_once_for_all_micro_batches(device, reentrant):
    model = net(reentrant=reentrant)
    assert_blocks_are_fetched_once(model, device)


def test_a_block_is_fetched_once_after_a_function_that_failed_and_was_caught(device):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            raise KeyError("not today")

    class Tries(Net):
        def forward(self, x):
            with contextlib.suppress(KeyError):
                Fails.apply(x)
            return super().forward(x)

    model = net()
    model.__class__ = Tries
    assert_blocks_are_fetched_once(model, device)


@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["nockpt", "reentrant", "nonreentrant"])
def test_each_micro_batch_draws_from_its_own_generators(device, reentrant):
    def step(model, x):
        noise = torch.randn(3, WIDTH) + random.random() + float(numpy.random.rand())
        return loss_of(model, x + noise.to(x.device), autocast=True)

    is_equal_to_reference(net(reentrant=reentrant, dropout=0.3), device, step)


def three():
    return torch.rand(()).item(), random.random(), numpy.random.rand()


def test_generators_are_seeded_in_order_and_the_ambient_ones_go_on_alike(device):
    model, drawn, after = net(), {}, {}
    with streamed(model, device):
        for interleave in (True, False):
            torch.manual_seed(5)
            random.seed(5)
            numpy.random.seed(5)
            model.zero_grad()

            def step(x, drawn=drawn, interleave=interleave):
                drawn.setdefault(interleave, {})[x.data_ptr()] = three()
                return loss_of(model, x)

            batches = inputs(device)
            accumulate(step, batches, interleave=interleave)
            drawn[interleave] = [drawn[interleave][x.data_ptr()] for x in batches]
            after[interleave] = three()
    torch.manual_seed(5)
    seeds = torch.randint(2**62, (MICRO_BATCHES,)).tolist()
    expected = []
    for seed in seeds:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        expected.append(three())
    assert drawn == {True: expected, False: expected}
    assert after[True] == after[False]


def test_generators_of_gpus_without_a_managed_model_are_each_micro_batchs_own(monkeypatch):
    """Parts of a model that are not managed may draw on another GPU; here there is none."""
    cards = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda card: cards[card.index].get_state())
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, card: cards[card.index].set_state(state)
    )
    generators = Generators([torch.device("cpu"), torch.device("cuda", 1)])
    before = generators.now()
    drawn = [torch.rand(3, generator=card) for card in cards]
    generators.restore(before)
    assert_same([torch.rand(3, generator=card) for card in cards], drawn)


@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["nockpt", "reentrant", "nonreentrant"])
def test_backward_may_be_called_inside_a_context_that_each_step_enters(device, reentrant):
    def step(model, x):
        with torch.autocast(x.device.type, torch.bfloat16), Witness(strict=False):
            loss = model(x).float().square().mean()
            loss.backward()
        return loss

    is_equal_to_reference(net(reentrant=reentrant, full=True), device, step)


def test_a_gradient_scaler_scales_every_loss():
    def step(model, x):
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        loss = loss_of(model, x)
        scaler.scale(loss).backward()
        return loss

    is_equal_to_reference(net(), "cpu", step)
    model, _ = resident_pair(net())
    with streamed(model, "cpu"):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        before = model.blocks[3].lora_b.weight.detach().clone()
        losses = accumulate(lambda x: scaler.scale(loss_of(model, x)), inputs("cpu"))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**10 and losses[0] > losses[0] / 2**10
        assert not torch.equal(model.blocks[3].lora_b.weight, before)


def test_one_micro_batch_and_weights_that_all_have_room_run_one_after_another(device):
    model, calls = net(), []

    def step(x):
        calls.append("begun")
        loss_of(model, x).backward()
        calls.append("ended")

    with streamed(model, device):
        accumulate(step, inputs(device, 1))
    with attached(model, device, offload_percent=0.0, ignore_modules=model.adapters()):
        model.zero_grad()
        accumulate(step, inputs(device))
    assert calls == ["begun", "ended"] * (1 + MICRO_BATCHES)
    assert accumulate(step, []) == []


def test_without_a_managed_model_it_is_the_loop():
    model = net()
    losses = accumulate(lambda x: loss_of(model, x), inputs("cpu"))
    found = gradients(model)
    assert len(losses) == MICRO_BATCHES and not any(loss.requires_grad for loss in losses)
    model.zero_grad()
    for x in inputs("cpu"):
        loss_of(model, x).backward()
    assert_same(found, gradients(model))


def test_several_models_take_turns_together(device):
    torch.manual_seed(0)
    pair = nn.ModuleList([net(), net(reentrant=False)])
    managed, resident = resident_pair(pair)

    def both(models):
        return accumulate(
            lambda x: loss_of(models[1], models[0](x)),
            inputs(device),
            interleave=is_managed_model(models[0]),
        )

    with streamed(managed[0], device), streamed(managed[1], device):
        managed.__dict__["_memory_manager"] = None
        assert_models_agree(managed, resident, both, steps=3, device=device)
        moved = {}
        for interleave in (False, True):
            for _ in range(4):
                managed.zero_grad()
                before = h2d_bytes(device)
                accumulate(
                    lambda x: loss_of(managed[1], managed[0](x)),
                    inputs(device),
                    interleave=interleave,
                )
                moved[interleave] = h2d_bytes(device) - before
    assert moved[True] <= 0.3 * moved[False]


# ---- what is each micro-batch's own ----


def test_contexts_that_a_step_enters_are_its_own(device):
    """A mode, saved-tensor hooks, autocast, no_grad: none is seen by another micro-batch."""
    seen = {}

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self, index):
            super().__init__()
            self.index = index

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.setdefault(self.index, []).append(str(func))
            return func(*args, **(kwargs or {}))

    def step(model, x):
        index = int(x[0, 0].item() * 1e6)
        packed = []

        def pack(tensor):
            packed.append(index)
            return tensor

        even = index % 2 == 0
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
            stack.enter_context(torch.set_grad_enabled(True))
            if even:
                stack.enter_context(Mode((index, is_managed_model(model), id(model))))
            stack.enter_context(torch.autocast(x.device.type, torch.bfloat16, enabled=even))
            y = model(x)
            assert torch.is_autocast_enabled(x.device.type) is even
        with torch.no_grad():
            model(x)
            assert not torch.is_grad_enabled()
        assert set(packed) == {index}
        return y.float().square().mean()

    is_equal_to_reference(net(reentrant=False), device, step)
    counts = {}
    for (index, is_managed, _), operators in seen.items():
        found = counts.setdefault(index, {True: [], False: []})[is_managed]
        found.append(operators.count("aten.tanh.default"))
    for found in counts.values():  # on CUDA a copy of the resident model has run one step before
        assert max(found[True]) == max(found[False]) > 0


def set_precision(value):
    torch.backends.cuda.matmul.fp32_precision = value


FLAGS = {
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "matmul tf32": (
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_tf32", value),
        True,
    ),
    "cudnn tf32": (
        lambda: torch.backends.cudnn.allow_tf32,
        lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
        False,
    ),
    "cudnn benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        True,
    ),
    "cudnn deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda value: setattr(torch.backends.cudnn, "deterministic", value),
        True,
    ),
    "reductions": (
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        lambda value: setattr(
            torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", value
        ),
        False,
    ),
    "deterministic": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        1,
    ),
    "only deterministic": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        2,
    ),
    "mkldnn": (
        lambda: torch.backends.mkldnn.enabled,
        lambda value: setattr(torch.backends.mkldnn, "enabled", value),
        False,
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads, 3),
    "denormals": (
        lambda: torch.full((), 1e-40).add(0).item() == 0,
        torch.set_flush_denormal,
        True,
    ),
    "anomalies": (torch.is_anomaly_enabled, torch.set_anomaly_enabled, True),
}
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    FLAGS["precision"] = (lambda: torch.backends.cuda.matmul.fp32_precision, set_precision, "tf32")
    FLAGS["precision of all"] = (
        lambda: torch.backends.mkldnn.conv.fp32_precision,
        lambda value: setattr(torch.backends, "fp32_precision", value),
        "ieee",
    )


@pytest.mark.filterwarnings("ignore:Please use the new API settings")
@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_the_whole_process_are_each_micro_batchs_own(flag):
    get, put, other = FLAGS[flag]
    model, found, in_backward = net(), [], []
    before = thread_state.kernel_flags.now()
    ambient = get()
    assert ambient != other

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            in_backward.append(get())
            return gradient

    def step(x, several):
        begins = get()
        if several or x is batches[2]:
            put(other)
        wanted = get()
        loss = loss_of(model, x)
        found.append((begins, get() == wanted))
        if not several:
            put(ambient)
        return Seen.apply(loss)

    batches = inputs("cpu")
    try:
        with streamed(model, "cpu"):
            for several in (False, True):
                for interleave in (True, False):
                    model.zero_grad()
                    one = functools.partial(step, several=several)
                    accumulate(one, batches, interleave=interleave)
                    assert thread_state.kernel_flags.now() == before, get()
    finally:
        thread_state.kernel_flags.restore(before)
    assert found == [(ambient, True)] * (4 * MICRO_BATCHES)
    assert in_backward == [ambient] * (2 * MICRO_BATCHES) + [other] * (2 * MICRO_BATCHES)


def test_backward_in_the_precision_of_one_micro_batch_is_refused():
    batches = inputs("cpu")

    def step(model, x):
        torch.backends.cudnn.allow_tf32 = bool((x != batches[1]).any())
        return loss_of(model, x)

    refused("different contexts .* flags of precision", net(), step)
    assert torch.backends.cudnn.allow_tf32


def test_inference_mode_inside_a_step_is_not_divided(device):
    """Its guards end in the order in which they began, or the thread stays in it."""

    def step(model, x):
        with torch.inference_mode():
            y = model(x)
        assert not torch.is_inference_mode_enabled()
        return loss_of(model, x + y.clone())

    is_equal_to_reference(net(), device, step)
    assert not torch.is_inference_mode_enabled()


def test_phases_are_its_own():
    model = net()

    def step(x):
        with oracle_offload.observe.phase("sampling"), torch.no_grad():
            model(x)
        assert oracle_offload.engine.engines.phase_now() == "training"
        return loss_of(model, x)

    with streamed(model, "cpu"):
        accumulate(step, inputs("cpu"))
        assert oracle_offload.engine.engines.phase_now() == "training"


class Rooted(Net):
    """A model whose own Parameter is lent to all of its forward."""

    def __init__(self, full):
        super().__init__(full=full)
        self.table = nn.Parameter(torch.randn(600, WIDTH), requires_grad=full)

    def forward(self, x):
        x = x + self.table[:3]
        x = super().forward(x)
        return x * self.table[3:6]


@pytest.mark.parametrize("full", [False, True], ids=["frozen", "trained"])
def test_weights_lent_to_a_forward_come_and_go_with_its_micro_batch(device, full):
    torch.manual_seed(0)
    model = Rooted(full)
    managed, resident = resident_pair(model)

    def both(model):
        interleave = is_managed_model(model)
        return accumulate(lambda x: loss_of(model, x), inputs(device), interleave=interleave)

    with attached(managed, device, offload_percent=1.0) as manager:
        assert "table" not in {row.name for row in manager.resident}
        took = []
        for interleave in (False, True):
            before = count_acquires()
            accumulate(lambda x: loss_of(managed, x), inputs(device), interleave=interleave)
            took.append(count_acquires() - before)
            managed.zero_grad()
        assert took[0] == took[1] > 0, "the table is lent to each, not to the first alone"
        assert_models_agree(managed, resident, both, device=device)
        assert managed.table.device.type == "cpu"


# ---- what cannot have the loop's bits is refused ----


def refused(match, model, step, device="cpu", **options):
    before = gradients(model)
    with streamed(model, device), pytest.raises(OffloadError, match=match):
        accumulate(lambda x: step(model, x), inputs(device), **options)
    assert_same(gradients(model), before)


def test_a_gradient_that_is_there_already_is_refused():
    model = net()
    model.blocks[2].lora_a.weight.grad = torch.ones(4, WIDTH)
    match = r"parameter 'blocks.2.lora_a.weight' has a gradient before .* optimizer.zero_grad\(\)"
    refused(match, model, loss_of)
    refused(match, model, loss_of, interleave=False)


def test_a_trained_tensor_that_is_no_parameter_is_refused_and_restored_alike():
    class Prompted(Net):
        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(lambda x, block=block: block(x) * prompt, x, use_reentrant=True)
            return x

    prompt = torch.ones(WIDTH, requires_grad=True)
    model = net()
    model.__class__ = Prompted

    def trained(model, x):
        return loss_of(model, x.clone().requires_grad_())

    refused(r"a tensor of shape \[32\] is used several times", model, trained)
    assert prompt.grad is None
    prompt.grad = torch.ones(WIDTH)
    refused(r"a tensor of shape \[32\] has a gradient before", model, trained)


def test_a_trained_tensor_that_one_checkpoint_uses_several_times_is_not(device):
    """The bits of the loop: no other micro-batch comes in between."""

    class Scaled(Net):
        def forward(self, x):
            x = x.clone().requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)

            def tail(x):
                for _ in range(2):
                    x = checkpoint(lambda x: self.stem(x).tanh(), x, use_reentrant=True)
                return x

            return checkpoint(tail, x, use_reentrant=True)

    model = net()
    model.__class__ = Scaled
    is_equal_to_reference(model, device, loss_of)


# What a step multiplies the model's input and its result by, of a trained weight and its number.
SUMS = {
    "each in turn": (lambda w, i: (1, w), ""),
    "one alone, twice": (lambda w, i: (1, 1 if i else w * w + w), ""),
    "each twice": (lambda w, i: (1, w * w + w), "used several times"),
    "the first one earlier": (lambda w, i: (1, w) if i else (w, 1), "in another order by each"),
    "the first one later": (lambda w, i: (w, 1) if i else (1, w), ""),
    "one cast": (lambda w, i: (1, 1 if i else w.to(torch.bfloat16)), ""),
    "two casts": (
        lambda w, i: (1, 1 if i else w.to(torch.bfloat16) + w.to(torch.bfloat16)),
        "used several times",
    ),
    "a hook": (lambda w, i: (1, w), "a gradient hook"),
    "a hook that sees one": (lambda w, i: (1, 1 if i else w), ""),
}


@pytest.mark.parametrize("case", SUMS)
def test_an_order_of_sums_is_refused_where_it_is_not_the_loops(case):
    """Sums of gradients are rounded: another order has other bits."""
    factors, refusal = SUMS[case]
    weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
    if "hook" in case:
        weight.register_hook(lambda gradient: gradient * 2)
    batches, model = inputs("cpu"), net()

    def step(x):
        first, last = factors(weight, [given is x for given in batches].index(True))
        return (model(x * first) * last).float().square().mean()

    with streamed(model, "cpu"):
        if refusal:
            with pytest.raises(OffloadError, match=refusal):
                accumulate(step, batches)
            assert weight.grad is None
            return
        found = []
        for interleave in (True, False):
            weight.grad = None
            model.zero_grad()
            accumulate(step, batches, interleave=interleave)
            found.append([weight.grad, gradients(model)])
        assert_same(*found)


def test_a_tensor_computed_before_the_steps_is_refused():
    model = net()
    extra = nn.Parameter(torch.randn(WIDTH))
    shared = extra.to(torch.bfloat16)

    def step(model, x):
        return (model(x) + shared).square().mean()

    refused("the steps share a tensor that ToCopyBackward0 gives gradients to", model, step)
    assert extra.grad is None
    with streamed(model, "cpu"):
        accumulate(lambda x: step(model, x), inputs("cpu"), interleave=False)
    assert extra.grad is not None


@pytest.mark.parametrize("by_data", [False, True], ids=["no_grad", "data"])
def test_a_frozen_weight_that_forwards_write_is_refused(by_data, monkeypatch):
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)

    class Writes(Block):
        def forward(self, x):
            with torch.no_grad():
                (self.up.weight.data if by_data else self.up.weight).mul_(0.9)
            return super().forward(x)

    model = net()
    model.blocks[1].__class__ = Writes
    which = "a weight of 'blocks.1.up'" if by_data else "weight 'blocks.1.up.weight'"
    refused(f"the forward writes to {which}", model, loss_of)


def test_a_trained_weight_that_is_read_has_a_node_for_each_micro_batch(device, monkeypatch):
    monkeypatch.setattr(selection, "SMALL_BYTES", 0)

    class Reads(Block):
        def forward(self, x):
            y = torch.nn.functional.linear(x, self.lora_a.weight)
            y = self.lora_b(y.tanh() + torch.nn.functional.linear(x.cos(), self.lora_a.weight))
            return x + self.down(torch.tanh(self.up(y)))

    model = net(full=True)
    for block in model.blocks:
        block.__class__ = Reads
    is_equal_to_reference(model, device, loss_of)


def test_a_buffer_is_found_though_another_model_has_one_of_its_name():
    models = [net(), net()]
    for model in models:
        model.register_buffer("calls", torch.zeros(()))

    def step(x):
        models[0].calls += 1
        return sum(loss_of(model, x) for model in models)

    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(streamed(model, "cpu"))
        stack.enter_context(pytest.raises(OffloadError, match="writes to buffer 'calls'"))
        accumulate(step, inputs("cpu"))


def test_a_cast_that_autocast_would_keep_over_several_blocks_is_refused():
    model = net(full=True)
    x = inputs("cpu")[0].requires_grad_()

    class Twice(Net):
        def forward(self, x):
            return super().forward(x) + self.blocks[4](x)

    model.__class__ = Twice
    with streamed(model, "cpu"), pytest.raises(OffloadError, match=r"several times"):
        accumulate(lambda x: loss_of(model, x, autocast=True), [x, x.detach()])


def test_what_a_step_must_not_do_is_said():
    def twice(model, x):
        loss = loss_of(model, x)
        (loss / 2).backward(retain_graph=False)
        (loss / 2).backward()

    refused("called backward twice", net(), twice)
    refused("called backward twice", net(), twice, interleave=False)
    model = net()
    with torch.inference_mode(), pytest.raises(OffloadError, match="in inference mode"):
        accumulate(lambda x: loss_of(model, x), inputs("cpu"))


def test_greenlet_that_is_missing_is_named(monkeypatch):
    model = net()
    found = builtins.__import__

    def without(name, *rest):
        if name == "greenlet":
            raise ModuleNotFoundError("No module named 'greenlet'", name="greenlet")
        return found(name, *rest)

    with streamed(model, "cpu"):
        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(ModuleNotFoundError, match="pip install greenlet"):
            accumulate(lambda x: loss_of(model, x), inputs("cpu"))
        assert len(accumulate(lambda x: loss_of(model, x), inputs("cpu"), interleave=False)) == 4


def test_a_torch_that_does_not_name_its_hooks_is_refused(monkeypatch):
    model = net()
    monkeypatch.setattr(thread_state, "_top_hooks", None)
    refused(r"turns from torch 2.8 on, and this is torch .* interleave=False", model, loss_of)
    with streamed(model, "cpu"):
        assert len(accumulate(lambda x: loss_of(model, x), inputs("cpu"), interleave=False)) == 4


def test_importing_the_package_imports_no_greenlet():
    code = "import oracle_offload, sys; assert 'greenlet' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- errors ----


class Fails(BaseException):
    """What a trainer may be ended by: no Exception."""


@pytest.mark.parametrize(
    ("where", "error", "reentrant"),
    [
        ("forward", KeyboardInterrupt, None),
        ("forward", ValueError, True),
        ("forward", Fails, False),
        ("backward", ValueError, None),
        ("backward", ValueError, True),
        ("backward", KeyboardInterrupt, False),
        ("after", KeyboardInterrupt, None),
        ("unwinding", ValueError, None),
    ],
)
def test_an_error_unwinds_every_micro_batch_in_its_own_state(device, where, error, reentrant):
    managed, resident = resident_pair(net(reentrant=reentrant, dropout=0.2))
    resident.to(device)
    unwound = []
    failing = 2

    class FailingGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise error("planned")

    def step(x):
        index = [x[0, 0].item() == other[0, 0].item() for other in batches].index(True)
        dtype = torch.bfloat16 if index % 2 else torch.float16
        try:
            with torch.autocast(x.device.type, dtype):
                y = managed.stem(x)
                for number, block in enumerate(managed.blocks):
                    if where in ("forward", "unwinding") and (index, number) == (failing, 4):
                        raise error("planned")
                    if where == "backward" and (index, number) == (failing, 3):
                        y = FailingGradient.apply(y)
                    y = (
                        block(y)
                        if reentrant is None
                        else checkpoint(block, y, use_reentrant=reentrant)
                    )
            loss = y.float().square().mean()
            loss.backward()
            if where == "after" and index == failing:
                raise error("planned")
        finally:
            unwound.append(index)
            assert torch.get_autocast_dtype(x.device.type) == ambient
            assert not torch.is_autocast_enabled(x.device.type)
            assert torch.autograd.graph is not None and torch.is_grad_enabled()
            if where == "unwinding" and index == 0:
                raise ArithmeticError("while it was ended")

    def plain(model):
        torch.manual_seed(3)
        for x in batches:
            loss_of(model, x).backward()
        return gradients(model)

    batches = inputs(device)
    ambient = torch.get_autocast_dtype(torch.device(device).type)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks
    with streamed(managed, device):
        for _ in range(2):
            unwound.clear()
            torch.manual_seed(4)
            with pytest.raises(error, match="planned"):
                accumulate(step, batches)
            assert sorted(unwound) == list(range(MICRO_BATCHES))
            assert all(gradient is None for gradient in gradients(managed).values())
            assert torch.is_grad_enabled() and hooks(True) is None
            assert not torch.is_autocast_enabled(torch.device(device).type)
        assert_same(plain(managed), plain(resident))
        for model in (managed, resident):
            model.zero_grad()
        torch.manual_seed(4)
        accumulate(lambda x: loss_of(managed, x), batches)
        torch.manual_seed(4)
        accumulate(lambda x: loss_of(resident, x), batches, interleave=False)
        assert_same(gradients(managed), gradients(resident))


def autocast_depth():
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def as_torch_has_it(model):
    """Return what `accumulate` exchanges, and what is kept per thread."""
    return (
        torch.autograd.backward,
        torch.autograd.Function.__dict__["apply"],
        [name for name in vars(torch.utils.checkpoint._checkpoint_hook) if "__e" in name],
        list(oracle_offload.model.structure.frames_aside),
        [hook for part in model.modules() for hook in part._forward_hooks.values()],
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        autocast_depth(),
        torch.get_default_dtype(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.backends.cudnn.benchmark,
    )


class Lines:
    """Sees the lines of `accumulate`'s own files; raises KeyboardInterrupt at one of them.

    Parameters
    ----------
    names : tuple of str
        Of functions; none for all.
    at : tuple, optional
        The line, and which of its visits.
    """

    files = frozenset(
        (accumulate.__code__.co_filename, thread_state.__file__, thread_state.kernel_flags.__file__)
    )

    def __init__(self, names, at=None):
        self.names, self.at = names, at
        self.visits = collections.Counter()

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if code.co_filename not in self.files or (self.names and code.co_name not in self.names):
            return None
        if event == "line":
            line = code.co_filename, frame.f_lineno
            self.visits[line] += 1
            if (line, self.visits[line]) == self.at:
                raise KeyboardInterrupt
        return self

    def seen(self):
        """Return each line with its first and its last visit."""
        return sorted({(line, at) for line, last in self.visits.items() for at in (1, last)})


@pytest.mark.parametrize("interleave", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("accumulate", "install", "uninstall", "_forwards"), id="hooks"),
        pytest.param((), id="all", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_at_any_line_leaves_torch_as_it_was(interleave, names):
    model = net(blocks=3, reentrant=False)
    batches = inputs("cpu", 2)

    def step(x):
        torch.backends.cudnn.benchmark = True
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    def run(lines):
        model.zero_grad()
        sys.settrace(lines)
        try:
            accumulate(step, batches, interleave=interleave)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    with streamed(model, "cpu"):
        before, lines = as_torch_has_it(model), Lines(names)
        assert not run(lines)
        expected = gradients(model)
        assert len(lines.seen()) >= 30
        for at in lines.seen():
            raised = run(Lines(names, at))
            assert as_torch_has_it(model) == before, at
            found = gradients(model)
            if raised and any(gradient is not None for gradient in found.values()):
                assert_same(found, expected)  # it came after the last one
        assert not run(Lines(names))
        assert_same(gradients(model), expected)


# ---- what else runs at the same time ----


def test_weights_lent_to_another_thread_stay_there():
    model, other = net(), Rooted(full=False)
    inside, goes_on, found = threading.Event(), threading.Event(), []
    x = inputs("cpu")[0]
    with torch.no_grad():
        expected = other(x)

    def wait(*_):
        inside.set()
        goes_on.wait(60)

    def compute():
        with torch.no_grad():
            found.append(other(x))

    thread = threading.Thread(target=compute)
    with streamed(model, "cpu"), attached(other, "cpu", offload_percent=1.0):
        other.blocks[2].register_forward_pre_hook(wait)
        thread.start()
        try:
            assert inside.wait(60)
            assert other._memory_manager.layers[0].is_lending()
            accumulate(lambda x: loss_of(model, x), inputs("cpu"))
        finally:
            goes_on.set()
            thread.join()
    assert_same(found[0], expected)


def test_attributes_are_the_same_where_that_can_be_seen():
    same = [
        *((1, 1), ("a", "a"), (0.5, 0.5), (True, True), (None, None)),
        *((torch.float16, torch.float16), (torch.device("cpu"), torch.device("cpu"))),
        *(((1, [2, "b"]), (1, [2, "b"])), (torch.ones(2), torch.ones(2))),
        *(({1: 2}, {1: 2}), ({"a": [torch.ones(2)]}, {"a": [torch.ones(2)]}), ({1}, {1})),
    ]
    others = [
        *((1, 2), ("a", "b"), (0.5, 0.25), (True, False), (None, 0)),
        *((torch.float16, torch.float32), (torch.device("cpu"), torch.device("meta"))),
        *(((1, [2]), (1, [3])), ((1,), [1]), ([1], [1, 2]), (torch.ones(2), torch.zeros(2))),
        *((torch.ones(2), 1), ({1: 2}, {1: 3}), ({1: 2}, {2: 2}), ({1}, {2}), ({1}, {1: 1})),
        *((1, torch.ones(1)), (1, torch.ones(2)), (None, torch.ones(1)), ((1,), 1), (1, (1,))),
        (SimpleNamespace(a=1), SimpleNamespace(a=1)),
    ]
    assert [are_same(copy.deepcopy(a), b) for a, b in same] == [True] * len(same)
    assert [are_same(a, b) for a, b in others] == [False] * len(others)
