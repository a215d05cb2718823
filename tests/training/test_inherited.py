"""Classes whose forward asks ``super()`` are told from those that compute for themselves."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracle_offload.layers.bytecode import every_code, names_in
from oracle_offload.layers.embedding import EmbeddingLayer
from oracle_offload.layers.inherited import answering_class, asks_super


class Plain(nn.Embedding):
    """Computes as its base does."""


class Scales(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class ScalesAgain(Scales):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class Asks(nn.Embedding):
    """What the host can answer as well."""

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input).to(self.weight.dtype)
        return found if self.weight.requires_grad and self.weight.ndim else found[..., :1]


class Documented(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        """What the base says of its forward."""
        return super().forward(input)


class Reads(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.weight.mean()


class ReadsInside(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        mean = lambda: self.weight.mean()  # noqa: E731
        return super().forward(input) + mean()


class ReadsAtTheEnd(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        super().forward(input)
        return self.weight


class Computes(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.one_hot(input).float()


class AboveComputes(Computes):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class AsksForAnother(nn.Embedding):
    def forward(self, input: Tensor) -> Any:
        return super().extra_repr()


class Partial(nn.Embedding):
    forward = functools.partialmethod(nn.Embedding.forward)  # type: ignore[assignment]


ANSWERS = {
    **dict.fromkeys((nn.Embedding, Plain, Scales, ScalesAgain, Asks), True),
    **dict.fromkeys((Reads, ReadsInside, ReadsAtTheEnd, Computes, AboveComputes), False),
    **dict.fromkeys((AsksForAnother, Partial), False),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_forward_asks_super_and_reads_nothing_of_its_tensors(kind: Any) -> None:
    assert asks_super(kind, nn.Embedding) is ANSWERS[kind]
    assert EmbeddingLayer.computes(kind) is ANSWERS[kind]
    assert not EmbeddingLayer.computes(nn.Linear)


def test_a_class_stands_below_only_where_the_forward_is_its_own() -> None:
    below = answering_class(nn.Embedding)
    assert EmbeddingLayer.stands_below(Scales) is below is answering_class(nn.Embedding)
    assert EmbeddingLayer.stands_below(Plain) is None is EmbeddingLayer.stands_below(nn.Embedding)
    assert issubclass(below, nn.Embedding) and below.__name__ == "Embedding"
    assert answering_class(Documented).forward.__doc__ == "What the base says of its forward."
    table = below(4, 3)
    rows = torch.tensor([1, 3])
    assert torch.equal(table(rows), table.weight[rows]), "without a layer its base computes"


def test_names_are_those_of_functions_inside_as_well() -> None:
    def outer(x: Any) -> Any:
        def inner() -> Any:
            return [x.first for _ in x.second]

        return inner, lambda: x.third, print

    assert names_in(outer.__code__) == {"first", "second", "third", "print"}
    codes = list(every_code(outer.__code__))
    assert codes[0] is outer.__code__ and {code.co_name for code in codes} >= {
        *("outer", "inner", "<lambda>"),
    }
