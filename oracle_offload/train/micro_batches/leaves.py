"""What a joint backward gives gradients to, and whether their sums keep the plain loop's order.

autograd sums what reaches one leaf in the order in which it computes it: the newest node first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ...errors import OffloadError
from ...layers.gradients import accumulator_of

# Nodes of a cast that autocast keeps: where it is dropped in between, there are several.
_CASTS = ("ToCopyBackward0", "CastStandInBackward")


class Graph:
    """What `roots` were computed from, as far as one accumulation has to know it.

    Attributes
    ----------
    edges : dict
        By the node that accumulates into a leaf: the nodes that hand it gradients.
    functions : list of int
        The `id` of each node that is a function written in Python: it may run a backward itself.
    nodes : set
        All nodes but those that accumulate into leaves.
    """

    def __init__(self, roots: Sequence[Tensor]) -> None:
        self.edges: dict[Any, list[Any]] = {}
        self.functions: list[int] = []
        self.nodes: set[Any]
        self.nodes = seen = {root.grad_fn for root in roots if root.grad_fn is not None}
        waiting: list[Any] = list(seen)
        while waiting:
            node = waiting.pop()
            if isinstance(node, BackwardCFunction):
                self.functions.append(id(node))
            for below in (accumulator_of(below) for below, _ in node.next_functions):
                if below is None or below in seen:
                    continue
                if hasattr(below, "variable"):
                    self.edges.setdefault(below, []).append(node)
                else:
                    seen.add(below)
                    waiting.append(below)

    def before_functions(self, call: Callable[[], None]) -> None:
        """Make a call before each function written in Python is computed in backward."""
        for node in self.nodes:
            if isinstance(node, BackwardCFunction):
                node.register_prehook(lambda *_: call())


class Leaves:
    """The leaves that gradients of one accumulation go to; none has a gradient before.

    Parameters
    ----------
    name_of : callable
        Returns how a message calls a leaf.
    """

    def __init__(self, name_of: Callable[[Tensor], str]) -> None:
        self._name_of = name_of
        # By id, while they live: those that a checkpoint makes for its backward soon do not.
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        self._outer: set[int] = set()  # leaves that the joint backward itself goes to
        self._last: dict[int, int] = {}  # by leaf: the micro-batch that reached it last

    def note(self, graph: Graph) -> None:
        """Take the leaves of a graph that backward is about to go through.

        Raises
        ------
        OffloadError
            A leaf has a gradient already: the sum would be another.
        """
        for node in graph.edges:
            self._note(node.variable)

    def _note(self, leaf: Tensor) -> None:
        known = self._leaves.get(id(leaf))
        if known is not None and known() is leaf:
            return
        if leaf.grad is not None:
            raise OffloadError(
                f"{self._name_of(leaf)} has a gradient before accumulate begins, and what is added "
                "to it would be summed in another order. Call optimizer.zero_grad() before "
                "(set_to_none=True, the default)."
            )
        self._leaves[id(leaf)] = weakref.ref(leaf)
        self._outer.discard(id(leaf))  # of another, which is gone
        self._last.pop(id(leaf), None)

    def check_order(self, of_each: Sequence[Graph]) -> None:
        """Raise where gradients would be summed in another order than one after the other.

        Parameters
        ----------
        of_each : sequence
            The graph of each micro-batch, in their order.
        """
        lowest: dict[Any, int] = {}
        seen: set[Any] = set()
        for graph in of_each:
            for common in seen & graph.nodes:
                raise OffloadError(
                    f"the steps share a tensor that {common.name()} gives gradients to: they would "
                    "be summed there, before it. Compute the tensor in each step, or pass "
                    "interleave=False."
                )
            seen |= graph.nodes
            self._outer.update(id(node.variable) for node in graph.edges)
            for node, sources in graph.edges.items():
                casts = sum(source.name() in _CASTS for source in sources)
                shared = sum(node in other.edges for other in of_each) > 1
                if casts > 1 or (shared and len(sources) > 1):
                    self._refuse_order(node.variable)
                if not shared:
                    continue
                if node.variable._backward_hooks:
                    raise OffloadError(
                        f"{self._name_of(node.variable)} has a gradient hook, which would see the "
                        "sum over all micro-batches instead of each gradient. Remove the hook, or "
                        "pass interleave=False."
                    )
                number = sources[0]._sequence_nr()
                if number > lowest.get(node, number):
                    self._refuse_order(node.variable)
                lowest[node] = number

    def note_inner(self, graph: Graph, micro_batch: int | None) -> None:
        """Take the leaves of a backward inside another one: a checkpoint's.

        Parameters
        ----------
        graph : Graph
            That the inner backward goes through. Its leaves are what is trained, and the detached
            inputs of the checkpoint, which belong to it alone.
        micro_batch : int or None
            Whose backward that is; None where they are not interleaved.
        """
        for node in graph.edges:
            leaf = node.variable
            self._note(leaf)
            if micro_batch is not None:
                if id(leaf) in self._outer or self._last.get(id(leaf), -1) > micro_batch:
                    self._refuse_order(leaf)
                self._last[id(leaf)] = micro_batch

    def _refuse_order(self, leaf: Tensor) -> None:
        raise OffloadError(
            f"{self._name_of(leaf)} is used several times by one micro-batch, or in another order "
            "by each: its gradients would be summed in another order than one after the other. "
            "Pass interleave=False."
        )

    def restore(self) -> None:
        """Take away the gradients that have come: there were none before."""
        for reference in self._leaves.values():
            leaf = reference()
            if leaf is not None:
                leaf.grad = None


def no_graph_task() -> bool:
    """Whether no backward is under way in this thread."""
    return torch._C._current_graph_task_id() == -1
