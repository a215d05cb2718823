"""Weights from the device pass two locked buffers, and are whole whatever is under way."""

from __future__ import annotations

import itertools
import threading

import pytest
from equality import assert_models_agree, attached, resident_pair

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import oracle_offload  # noqa: E402
from oracle_offload.engine import devices  # noqa: E402
from oracle_offload.model import intake, locking, masters  # noqa: E402

WIDTHS = (64, 200, 33, 128)  # a layer of 200 x 64 fills more than one buffer of the tests


class Late:
    """Copies that run when somebody waits for them, and not before."""

    def __init__(self):
        self.pending, self.copied_bytes = [], 0
        self.goes_on = []  # of each wait: whether later copies were under way meanwhile

    def copy(self, target, source):
        self.pending.append((target, source))

    def mark(self):
        begun = list(self.pending)

        def wait():
            waited = {id(target) for target, _ in begun}
            self.goes_on.append(any(id(target) not in waited for target, _ in self.pending))
            for target, source in begun:
                if any(target is other for other, _ in self.pending):
                    target.copy_(source)
                    self.copied_bytes += target.nbytes
            self.pending = [p for p in self.pending if all(p[0] is not t for t, _ in begun)]

        return wait


@pytest.fixture
def late(monkeypatch):
    copies = Late()
    monkeypatch.setattr(devices.Simulated, "copies_aside", lambda self: copies)
    monkeypatch.setattr(intake, "HALF_BYTES", 16384)
    return copies


def net():
    torch.manual_seed(0)
    widths = [*WIDTHS, WIDTHS[0]]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    layers[1].weight.data = layers[1].weight.data.t().contiguous().t()  # dense, another order
    layers[2].weight.data = layers[2].weight.data.bfloat16().float()
    return nn.Sequential(*layers).requires_grad_(False)


def step(model):
    x = torch.ones(3, WIDTHS[0], requires_grad=True)
    y = model(x)
    y.sum().backward()
    return y, x.grad


def bytes_of(model):
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("piece_bytes", [masters.PIECE_BYTES, 30_000], ids=["one", "several"])
def test_all_weights_arrive_whole_and_where_they_belong(late, monkeypatch, piece_bytes):
    monkeypatch.setattr(masters, "PIECE_BYTES", piece_bytes)
    managed, resident = resident_pair(net())
    with attached(managed, "cpu") as manager:
        assert late.copied_bytes == bytes_of(resident) and not late.pending
        assert (len(manager.attachment.pieces.in_order()) > 1) is (piece_bytes == 30_000)
        assert all(piece.buffer.locked for piece in manager.attachment.pieces.in_order())
        for one, other in zip(managed.parameters(), resident.parameters(), strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride()
        assert_models_agree(managed, resident, step)


def test_the_link_is_busy_while_what_has_arrived_is_spread(late):
    with attached(net(), "cpu"):
        *waits, last, closed = late.goes_on
    assert len(waits) >= 2 and all(waits)
    assert not last and not closed


def test_a_piece_is_locked_while_the_next_one_is_filled(monkeypatch):
    """Each lock waits for the next piece to be begun: one after the other they would not meet."""
    monkeypatch.setattr(masters, "PIECE_BYTES", 30_000)
    turn, begun, met = threading.Condition(), [], []
    make, attempt = masters.Piece.__init__, locking.LockBudget.attempt

    def begin(self, *args):
        with turn:
            begun.append(self)
            turn.notify_all()
        make(self, *args)

    def lock(self, piece, others):
        if threading.current_thread() is not threading.main_thread():
            later = begun.index(piece) + 2
            with turn:
                met.append(turn.wait_for(lambda: len(begun) >= later, timeout=20))
        return attempt(self, piece, others)

    monkeypatch.setattr(masters.Piece, "__init__", begin)
    monkeypatch.setattr(locking.LockBudget, "attempt", lock)
    managed, resident = resident_pair(net())
    with attached(managed, "cpu") as manager:
        assert len(begun) == len(manager.attachment.pieces.in_order()) >= 3
        assert met == [True] * (len(begun) - 1)
        assert all(piece.buffer.locked for piece in begun)
        assert_models_agree(managed, resident, step)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupt_leaves_the_model_whole_and_no_copy_under_way(late, monkeypatch, at):
    """Buffers are given back and weights dropped: nothing may still be copied from or to them."""
    managed, resident = resident_pair(net())
    real, calls = late.copy, []

    def copy(target, source):
        calls.append(target)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        real(target, source)

    monkeypatch.setattr(late, "copy", copy)
    with pytest.raises(KeyboardInterrupt):
        oracle_offload.attach(managed, "cpu")
    assert not late.pending
    for one, other in zip(managed.parameters(), resident.parameters(), strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(late, "copy", real)
    with attached(managed, "cpu"):
        assert_models_agree(managed, resident, step)


def test_where_the_buffers_cannot_be_locked_weights_come_as_they_did(late, sim):
    managed, resident = resident_pair(net())
    with sim.fault("cuMemHostRegister", 1, 2, lasting=True), attached(managed, "cpu"):
        assert late.copied_bytes == 0
        assert_models_agree(managed, resident, step)
