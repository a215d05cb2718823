"""A backend for torch.compile that tells what was captured."""

from __future__ import annotations

import torch
import torch._dynamo
from equality import Recorder, attached
from torch import nn
from torch.utils.checkpoint import checkpoint

BACKENDS = ("eager", "aot_eager")


class Backend:
    """Compile by a backend of torch; count the operators of ours in what dynamo captured."""

    def __init__(self, name):
        self.compiler = torch._dynamo.lookup_backend(name)
        self.graphs, self.ran = 0, []

    def __call__(self, graph, inputs):
        self.graphs += 1
        found = [
            str(n.target) for m in graph.modules() for n in m.graph.nodes if n.op[:4] == "call"
        ]
        compiled = self.compiler(graph, inputs)

        def run(*arguments):
            self.ran.extend(found)
            return compiled(*arguments)

        return run

    def count(self, *kinds):
        return sum(call == f"oracle_offload.{kind}.default" for call in self.ran for kind in kinds)


class Checkpointed(nn.Module):
    """Blocks, of which each may be checkpointed, in either of torch's ways; and a head."""

    def __init__(self, blocks, head=None, checkpointing=""):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        self.checkpointing = checkpointing

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return x if self.head is None else self.head(x)


def compiled(model, how, backend, **options):
    """Return what to call in place of `model`, of which the whole is compiled, or each block."""
    if how == "torch.compile":
        return torch.compile(model, backend=backend, **options)
    for part in [model] if how == "model.compile" else model.blocks:
        part.compile(backend=backend, **options)
    return model


def uses(model, backend, call):
    """Return the order in which leaves took their weights, and the bytes that came, of a call."""
    torch._dynamo.reset()
    with attached(model) as manager:
        state = manager.attachment.state
        called = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            call(called)
        before = state.engine.stats()["h2d_bytes"]
        state.engine = recorder = Recorder(state.engine)
        call(called)
        state.engine = recorder._engine
        names = {layer.member: layer.name for layer in manager.attachment.layers}
        brought = state.engine.stats()["h2d_bytes"] - before
    return [names[member] for member in recorder.acquired], brought
