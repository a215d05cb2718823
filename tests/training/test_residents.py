"""What is not managed: listed, measured, warned about."""

from __future__ import annotations

import pytest
import torch
from equality import attached
from torch import nn

import oracle_offload
from oracle_offload.model import masters
from oracle_offload.model.residents import move_residents, resident_gradient_bytes


class Mixed(nn.Module):
    """One layer that is managed, next to all that is not."""

    def __init__(self, experts=8):
        super().__init__()
        self.embedding = nn.Embedding(4, 16, max_norm=1.0)
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.experts = nn.Parameter(torch.randn(experts, 16, 16))

    def forward(self, index):
        x = self.linear(self.norm(self.embedding(index)))
        return self.head(torch.einsum("bi,eij->bj", x, self.experts))


def test_every_parameter_is_managed_or_listed_with_bytes_and_reason():
    model = Mixed()
    with attached(model, "cpu") as manager:
        managed = {id(tensor) for layer in manager.layers for tensor in layer.tensors()}
        names = {
            name
            for name, p in model.named_parameters(remove_duplicate=False)
            if id(p) not in managed
        }
        assert managed and names == set(manager.resident)
        for name, why in manager.resident.items():
            assert why.bytes == 4 * model.get_parameter(name).numel()
            assert isinstance(why, str) and why
        assert "tied" in manager.resident["head.weight"]
        assert "LayerNorm" in manager.resident["norm.bias"]
        assert manager.resident["experts"].bytes == 8 * 16 * 16 * 4


def test_what_is_ignored_and_what_is_added_later_are_listed_as_such():
    model = Mixed()
    model.other = nn.Linear(16, 16)
    with attached(model, "cpu", ignore_modules=["linear"]) as manager:
        model.adapter = nn.Linear(16, 2, bias=False)
        assert "after attach" in manager.resident["adapter.weight"]
        assert "ignore_modules" in manager.resident["linear.bias"]


def test_attach_warns_of_a_model_that_stays_on_the_device_and_names_the_largest(warnings):
    with attached(Mixed(), "cpu"):
        (said,) = warnings()
    assert "only 11% of its 9.44 KiB" in said
    assert "'experts', 8.00 KiB" in said
    assert said.index("'experts'") < said.index("256 B")


def test_attach_says_nothing_where_nine_tenths_are_managed(warnings):
    model = nn.Sequential(nn.Linear(60, 60, bias=False), nn.LayerNorm(200))
    with attached(model, "cpu"):
        assert not warnings(), "9 of 10 are"
    model.append(nn.LayerNorm(30))
    with attached(model, "cpu"):
        assert "only 89%" in warnings()[0]


def test_the_summary_has_the_bytes_that_are_not_managed():
    model = Mixed()
    with attached(model, "cpu"):
        report = oracle_offload.memory_summary(model=model)
        usage = report.devices[0].models[0]
        assert usage.resident_bytes == 4 * (4 * 16 + 2 * 16 + 8 * 16 * 16), "tied ones count once"
        assert usage.resident_parameters == 5
        assert "parameters that are not managed" in str(report)
        assert "parameters that are not managed" in str(
            oracle_offload.memory_summary(abbreviated=True)
        )


def test_x_min_counts_weights_and_no_padding():
    model = nn.Sequential(*[nn.Linear(33, 33) for _ in range(8)])
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    for options in ({}, {"offload_percent": 0.1}):
        with attached(model, "cpu", **options) as manager:
            attachment = manager.attachment
            assert attachment.weight_bytes == weights < attachment.managed_bytes
            assert attachment.x_min_bytes() == 2 * max(0, weights - attachment.arena.capacity_bytes)


def test_the_gradients_of_what_is_not_managed_count_once():
    model = Mixed()
    assert resident_gradient_bytes(model) == 0
    model.experts.grad = torch.zeros_like(model.experts)
    model.head.weight.grad = torch.zeros(4, 16)  # and that of the embedding
    assert resident_gradient_bytes(model) == 4 * (8 * 16 * 16 + 4 * 16)


def test_what_is_there_already_is_not_copied():
    model = nn.Sequential(Mixed(), nn.BatchNorm1d(4))
    before = {name: (id(t), t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    move_residents(model.modules(), torch.device("cpu"))
    after = {name: (id(t), t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    assert after == before


def test_what_lies_among_the_masters_leaves_them_and_nothing_else_is_copied():
    model = Mixed()
    with attached(model, "cpu") as manager:
        pieces = manager.attachment.pieces
        given = model.linear.weight.detach()  # of a layer that was let go
        left = nn.ParameterList([nn.Parameter(given, requires_grad=False)])
        before = model.norm.weight.data_ptr()
        move_residents([model.norm, left], torch.device("cpu"), pieces)
        assert model.norm.weight.data_ptr() == before
        assert pieces.at(given.data_ptr()) is not None and pieces.at(left[0].data_ptr()) is None
        assert torch.equal(left[0], given)


def test_what_several_modules_share_is_moved_once():
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    shared = torch.zeros(3)
    for module in (one, other):
        module.register_buffer("table", shared)
        module.register_buffer("nothing", None)
    move_residents(iter([one, other]), torch.device("meta"))
    assert one.table is other.table and one.table.is_meta
    assert one.weight.is_meta and other.bias.is_meta and one.nothing is None


def test_a_sparse_buffer_and_a_sparse_parameter_move_too():
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.eye(2).to_sparse())
    module.scale = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    move_residents([module], torch.device("meta"))
    assert module.table.is_meta and module.scale.is_meta and module.weight.is_meta


@pytest.mark.parametrize(
    ("piece_bytes", "begin", "trims"),
    [(150, "cpu", 2), (100, "cpu", 3), (1000, "cpu", 1), (1, "meta", 0)],
)
def test_what_moved_tensors_leave_is_given_back_piece_by_piece(
    monkeypatch, piece_bytes, begin, trims
):
    modules = [nn.Linear(5, 4, device=begin) for _ in range(3)]
    for module in modules:
        module.register_buffer("one", torch.zeros(1, device=begin))  # 4 * (5 * 4 + 4 + 1) bytes
    calls = []
    monkeypatch.setattr(masters, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(masters, "trim_heap", lambda: calls.append(1))
    move_residents(modules, torch.device("meta"))
    assert len(calls) == trims
