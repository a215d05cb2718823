"""A backend for torch.compile that tells what was captured."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

BACKENDS = ("eager", "aot_eager")


def in_turn(names, rows, backends=BACKENDS):
    """Parametrize by rows that take turns at the backends, which come last as `name`.

    With the other backend each runs in `make proof`.
    """
    cases = []
    for nth, row in enumerate(rows):
        for at, name in enumerate(backends):
            marks = pytest.mark.slow if at != nth % len(backends) else ()
            given = row if isinstance(row, tuple) else (row,)
            cases.append(pytest.param(*given, name, marks=marks))
    return pytest.mark.parametrize(f"{names},name", cases)


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
