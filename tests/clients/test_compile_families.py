"""torch.compile of whole models of libraries: each layer an operator, and no graph more."""

from __future__ import annotations

import copy
import itertools
import re

import models
import pytest
import sides
import torch
from capturing import Backend
from equality import (
    RUNS,
    Recorder,
    assert_models_agree,
    assert_same,
    attached,
    gradients,
    resident_pair,
)
from families import FAMILIES, call_flux, call_sdxl, enable_checkpointing, noise
from torch._dynamo.utils import counters

from oracle_offload.model import selection

KINDS = ("linear", "convolution", "embedding", "lent")

pytestmark = pytest.mark.usefixtures("made_there", "from_the_start")


@pytest.fixture(autouse=True)
def as_in_large_ones(monkeypatch):
    """Lend small experts, too, but no norms: so it is in large models."""
    monkeypatch.setattr(selection, "SMALL_BYTES", 4 << 10)
    monkeypatch.setattr(selection, "SMALL_TOGETHER", (1 << 20, 1 << 20))


def read(model, size):
    """Call a language model whose table is trained, instead of an input."""
    table = model.get_input_embeddings().weight.requires_grad_()
    table.grad = None
    tokens = 7 + size
    return model(input_ids=torch.arange(2 * tokens).view(2, tokens) % 64)[0], table


def of(family):
    return FAMILIES[family].call


CALLS = {  # of three sizes, but SDXL
    "Flux": lambda model, size: call_flux(model, 16 + 4 * size),
    "Qwen-Image": lambda model, size: of("Qwen-Image")(  # each size of an image is compiled again
        model, encoder_hidden_states=noise(1, 5 + size, 16)
    ),
    "Wan": lambda model, size: of("Wan")(model, (1, 4, 2 + size, 4, 4)),
    "SDXL": lambda model, size: call_sdxl(model),
    "Llama": read,
    "Qwen3-MoE": read,
}
BLOCK = re.compile(r"\w+_blocks\.\d+\.(resnets|attentions)\.\d+|(model\.)?\w+(\.\d+)?")


def families(*dear):
    """Of dear families `make proof` has what a cheaper one shows in .ci/run."""
    rows = [pytest.param(f, marks=pytest.mark.slow if f in dear else ()) for f in CALLS]
    return pytest.mark.parametrize("family", rows)


def step(family, model, size=0):
    y, x = CALLS[family](model, size)
    y.square().sum().backward()
    return [y.detach(), x.grad]


def blocks_of(model):
    """Yield what the library says to repeat in its model, with its name."""
    kinds = getattr(model, "_repeated_blocks", None) or model._no_split_modules
    for name, module in model.named_modules():
        if type(module).__name__ in kinds:
            yield name, module


@families("Flux")
def test_a_model_that_was_compiled_and_run_before_attach_is_one_graph_of_any_size(family):
    managed, resident = resident_pair(FAMILIES[family].make().requires_grad_(False))
    backend = Backend("aot_eager")
    managed.compile(backend=backend, fullgraph=True)
    step(family, managed)
    assert backend.graphs == 1
    assert backend.count(*KINDS) == 0
    with attached(managed) as manager:
        engine = manager.attachment.state.engine
        for size in range(3):
            backend.ran.clear()
            brought = engine.stats()["h2d_bytes"]
            assert_models_agree(managed, resident, lambda m, s=size: step(family, m, s), steps=1)
            assert backend.count(*KINDS) == RUNS * len(manager.layers) > 0
            assert engine.stats()["h2d_bytes"] > brought
    assert backend.graphs <= 1 + 2  # for one size, and for any


@families()
def test_compiled_blocks_with_adapters_and_checkpoints(family):
    """diffusers checkpoints around the blocks, transformers inside them."""
    managed, resident = resident_pair(FAMILIES[family].make())
    for model in (managed, resident):
        models.lora(model.train(), list(FAMILIES[family].adapted))
        enable_checkpointing(model, False)
    backend = Backend("eager")
    with attached(managed) as manager:
        blocks = dict(blocks_of(managed))
        for block in blocks.values():
            block.compile(backend=backend, fullgraph=True)
        assert_models_agree(managed, resident, lambda m: step(family, m))
        inside = [
            layer for layer in manager.layers if any(layer.name.startswith(f"{b}.") for b in blocks)
        ]
        again = not hasattr(managed, "gradient_checkpointing_enable")  # a recompute runs the graph
        assert backend.count(*KINDS) == RUNS * 2 * (1 + again) * len(inside) > 0
        # What a card recomputes is in a thread that has no default device, which dynamo guards.
        apart = again and sides.DEVICE == "cuda"
        assert backend.graphs <= 2 * (1 + apart) * len({type(block) for block in blocks.values()})
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    assert not counters["graph_break"]
    assert all(p.grad is not None for n, p in managed.named_parameters() if "lora" in n)


def uses(family, model, backend):
    """Return the order in which layers took their weights, the bytes that came, and the results.

    Adapters come after attach.
    """
    model = copy.deepcopy(model)
    with attached(model) as manager:
        models.lora(model, list(FAMILIES[family].adapted))
        if backend is not None:
            model.compile(backend=backend, fullgraph=True)
        state = manager.attachment.state
        for _ in range(2):
            step(family, model)
        before = state.engine.stats()["h2d_bytes"]
        state.engine = recorder = Recorder(state.engine)
        model.zero_grad()
        torch.manual_seed(1)
        found = step(family, model)
        state.engine = recorder._engine
        names = {layer.member: layer.name for layer in manager.attachment.layers}
        brought = state.engine.stats()["h2d_bytes"] - before
    return [names[member] for member in recorder.acquired], brought, [*found, gradients(model)]


def blocks_in(order):
    return [block for block, _ in itertools.groupby(BLOCK.match(name)[0] for name in order)]


# Where the compiler's order within a block lets other units stay: the most times as many bytes.
MORE_BYTES = {"Flux": 1.25, "Qwen-Image": 1.25, "SDXL": 1.25, "Wan": 1.05}


@families("SDXL")
def test_checkpoints_inside_the_graph_keep_order_bytes_and_bits(family):
    """Within a block a compiler orders the operators, and leaves out what nothing needs.

    The last blocks of Flux return views, which torch's partitioner does not save, of a resident
    model either: it computes them all again before the first backward.
    """
    model = FAMILIES[family].make().train()
    enable_checkpointing(model, False)
    order, brought, expected = uses(family, model, None)
    found_order, found_brought, found = uses(family, model, "aot_eager")
    assert_same(found, expected)
    if family != "Flux":
        assert blocks_in(found_order) == blocks_in(order)
    if family in MORE_BYTES:
        assert 0 < found_brought <= MORE_BYTES[family] * brought
    else:
        assert found_brought == brought > 0
    assert not counters["graph_break"]


# .ci/run has each kind of operator under inductor, in a small model: linear, convolution and
# embedding in test_compile_fullgraph.py, lent in test_compile_lent.py, quantised in its own file.
@pytest.mark.slow
@families()
def test_inductor_rounds_otherwise_and_no_more(family, monkeypatch, tmp_path):
    """It fuses what is between the layers; measured were up to 1.5e-6 of a tensor's norm."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what it wrote before is no proof
    managed, resident = resident_pair(FAMILIES[family].make().requires_grad_(False))
    torch.manual_seed(1)
    expected = step(family, resident)
    with attached(managed) as manager:
        managed.compile(fullgraph=True)
        torch.manual_seed(1)
        found = step(family, managed)
        assert manager.attachment.state.engine.stats()["h2d_bytes"] > 0
    assert not counters["graph_break"]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
