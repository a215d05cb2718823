"""Host masters: how weights are divided into pieces, where they are, and when a piece goes back."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import sys
from pathlib import Path

import pytest
import torch
from equality import attached
from torch import nn

from oracle_offload import DriverError, _core
from oracle_offload._core import HostBuffer
from oracle_offload.engine import simulator
from oracle_offload.engine.geometry import is_dense
from oracle_offload.host import memory
from oracle_offload.model import masters
from oracle_offload.model.masters import Piece, Pieces, split_pieces

STEP = _core.ALIGNMENT


def tensor(steps):
    """Return a tensor of so many times the alignment."""
    return torch.zeros(steps * STEP, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("units", "pieces"),
    [
        ([], []),
        ([[2], [2]], [[2, 2]]),
        ([[2], [3]], [[2], [3]]),
        ([[1, 1], [1, 1]], [[1, 1, 1, 1]]),
        ([[1, 1], [1, 2]], [[1, 1], [1, 2]]),
        ([[9], [1]], [[9], [1]]),
        ([[1], [9], [1], [3], [1]], [[1], [9], [1, 3], [1]]),
    ],
    ids=str,
)
def test_a_piece_of_several_units_does_not_exceed_its_size(units, pieces):
    split = split_pieces([[tensor(steps) for steps in unit] for unit in units], 4 * STEP)
    assert [[t.numel() // STEP for unit in piece for t in unit] for piece in split] == pieces


def test_a_tensor_of_two_units_is_placed_once_and_counts_once():
    shared, other = tensor(3), tensor(1)
    (piece,) = split_pieces([[shared], [shared, other], [other]], 4 * STEP)
    ((first,), (second,)) = piece
    assert first is shared and second is other
    (piece,) = split_pieces([[shared, other, shared]], 4 * STEP)
    assert [[id(t) for t in unit] for unit in piece] == [[id(shared), id(other)]]


def test_pieces_are_of_a_gibibyte():
    meta = torch.empty(1 << 29, dtype=torch.uint8, device="meta")
    other = torch.empty((1 << 29) + 1, dtype=torch.uint8, device="meta")
    assert len(list(split_pieces([[meta], [meta.clone()]]))) == 1
    assert len(list(split_pieces([[meta], [other]]))) == 2


def test_a_cut_is_a_page_at_which_a_unit_begins(monkeypatch):
    """No tensor is locked by half, and little is lost between cuts."""
    monkeypatch.setattr(masters, "CUT_BYTES", 40 * STEP)
    page = mmap.PAGESIZE // STEP
    if page != 16:
        pytest.skip(f"the sizes below are of pages of 4 KiB, not {mmap.PAGESIZE} bytes")
    for sizes, offsets, cuts in (
        ([5], [0], [5]),
        ([20, 20], [0, 20], [40]),
        ([20, 21], [0, 2 * page], [2 * page, 2 * page + 21]),
        ([41, 1], [0, 3 * page], [3 * page, 3 * page + 1]),
        ([1, 41], [0, page], [page, page + 41]),
        ([page, 30, 11], [0, page, 3 * page], [page, 3 * page, 3 * page + 11]),
    ):
        found = masters.lay_out([[STEP * steps] for steps in sizes])
        assert found == ([STEP * n for n in offsets], [STEP * n for n in cuts]), sizes


SOURCES = {
    "contiguous": lambda: torch.randn(3, 5),
    "transposed": lambda: torch.randn(3, 5).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "sliced": lambda: torch.randn(3, 10)[:, ::2],
    "expanded": lambda: torch.randn(1, 5).expand(3, 5),
    "bfloat16": lambda: torch.randn(7).bfloat16(),
}


@pytest.mark.parametrize("build", SOURCES.values(), ids=SOURCES)
def test_a_master_has_the_values_and_the_dense_strides_and_nothing_else_in_its_storage(build):
    before = nn.Parameter(torch.randn(1))
    parameter = nn.Parameter(build())
    values, told = parameter.detach().clone(), []
    stride = parameter.stride() if is_dense(parameter) else values.contiguous().stride()
    piece = Piece([[before, parameter]], told.append)
    assert torch.equal(parameter, values) and parameter.stride() == stride
    assert parameter.untyped_storage().nbytes() == parameter.nbytes and parameter._base is None
    assert parameter.data_ptr() == piece.start + STEP
    assert piece.end - piece.start == piece.buffer.nbytes >= STEP + parameter.nbytes
    assert told == [before.nbytes, parameter.nbytes] and parameter.is_leaf


@pytest.fixture
def state():
    with attached(nn.Sequential(nn.Linear(8, 8))) as manager:
        yield manager.state


@pytest.fixture
def pieces(state):
    """Masters, next to those of an attached model."""
    made = Pieces(state, "Model", float("inf"))
    yield made
    made.give_back_all()


def test_a_piece_is_found_by_every_address_in_it_and_by_no_other(pieces):
    held = [nn.Parameter(torch.randn(4)) for _ in range(3)]
    made = [Piece([[parameter]]) for parameter in held]
    for piece in made:
        pieces.add(piece)
    for piece in made:
        assert pieces.at(piece.start) is pieces.at(piece.end - 1) is piece
        neighbours = {other.start for other in made} | {other.end - 1 for other in made}
        assert piece.end in neighbours or pieces.at(piece.end) is None
        assert piece.start - 1 in neighbours or pieces.at(piece.start - 1) is None
    assert pieces.at(0) is None and pieces.at(1 << 62) is None
    assert pieces.buffers == [piece.buffer for piece in made]


def test_a_piece_goes_back_when_no_layer_uses_it_and_no_tensor_points_into_it(pieces):
    held = nn.Parameter(torch.randn(4))
    piece = Piece([[held]])
    pieces.add(piece)
    pieces.count_uses([], [piece.start, piece.start, 7])
    pieces.count_uses([piece.start], [])
    assert piece.uses == 1
    pieces.give_back()
    del held
    gc.collect()
    assert not piece.is_abandoned()
    pieces.give_back()
    assert piece.buffer.locked and pieces.at(piece.start) is piece
    pieces.count_uses([piece.start], [])
    pieces.give_back()
    assert not piece.buffer.locked and pieces.at(piece.start) is None and pieces.buffers == []


def test_a_piece_that_a_tensor_points_into_stays(pieces):
    held = nn.Parameter(torch.randn(4))
    pieces.add(Piece([[held]]))
    pieces.give_back()
    assert len(pieces.buffers) == 1
    kept = held.detach()
    del held
    pieces.give_back()
    assert len(pieces.buffers) == 1
    del kept
    pieces.give_back()
    assert pieces.buffers == []


def test_pieces_are_locked_up_to_the_limit(state):
    held = [nn.Parameter(torch.randn(STEP)) for _ in range(3)]
    size = held[0].nbytes
    for limit, locked in ((2 * size, 2), (2 * size - 1, 1), (0, 0)):
        limited = Pieces(state, "Model", limit)
        for parameter in held:
            limited.add(Piece([[parameter]]))
        assert [buffer.locked for buffer in limited.buffers] == [n < locked for n in range(3)]
        limited.give_back_all()
        assert limited.buffers == []


def test_a_refusal_to_lock_is_told_once_with_what_to_do(pieces, caplog):
    held = [nn.Parameter(torch.randn(STEP)) for _ in range(3)]
    refused = simulator.fault("cuMemHostRegister", result=2, lasting=True)
    with caplog.at_level(logging.WARNING), refused:
        for parameter in held:
            pieces.add(Piece([[parameter]]))
        pieces.budget.leave_headroom(pieces.in_order())
        pieces.add(Piece([[nn.Parameter(torch.randn(STEP))]]))
    (record,) = caplog.records
    said, nbytes = record.getMessage(), sum(parameter.nbytes for parameter in held)
    assert said.startswith(f"Model: the system does not page-lock {nbytes / 1024:.2f} KiB")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in said and "ulimit -l" in said


def test_a_piece_that_is_refused_and_cannot_be_forgotten_goes_back_later(pieces):
    """A failing driver call ends the attach in between; the end of it finds the piece."""
    piece = Piece([[nn.Parameter(torch.randn(STEP))]])
    calls = simulator.call_count("cuCtxGetCurrent")
    with simulator.fault("cuMemHostRegister", result=2, lasting=True):
        simulator.set_fault("cuCtxGetCurrent", 3, 701)  # stats, lock, unlock
        with pytest.raises(DriverError, match="cuCtxGetCurrent"):
            pieces.add(piece)
    assert simulator.call_count("cuCtxGetCurrent") == calls + 3
    assert pieces.buffers == [piece.buffer]
    pieces.give_back_all()
    assert pieces.buffers == []


def test_masters_are_asked_for_on_the_devices_numa_node(monkeypatch):
    """Which threads then touch them is in tests/c/test_numa.c."""
    asked = []

    def create(nbytes, node=-1):
        asked.append(node)
        return HostBuffer(nbytes, node)

    class Near:
        """An engine whose device is nearest to node 5."""

        numa_node = 5

        def __init__(self, engine):
            self._engine = engine

        def __getattr__(self, name):
            return getattr(self._engine, name)

    monkeypatch.setattr(masters, "HostBuffer", create)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with attached(nn.Linear(8, 8)) as keeper:
        state = keeper.state
        assert state.engine.numa_node == -1 and asked == [-1]
        monkeypatch.setattr(state, "engine", Near(state.engine))
        with attached(model) as manager:
            assert asked[1:] == [5]
            with torch.no_grad():
                model[0].weight.data = torch.ones(64, 64)
                model[1].weight = nn.Parameter(torch.ones(64, 64))
            manager.refresh()
            assert set(asked[1:]) == {5} and len(asked) > 2
        monkeypatch.undo()


def test_memory_that_a_user_still_held_goes_back_after_the_step_in_which_he_lets_go(device):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])
    with attached(model, device) as manager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            model(torch.ones(2, 256, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return manager.attachment.pieces.buffers

        (piece,) = step()
        held = [p.detach() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter)
        assert step() == step() == [piece]
        del held
        gc.collect()
        assert manager.attachment.pieces.buffers == [piece]
        assert step() == [] and not piece.locked


def test_a_layer_that_was_let_go_holds_no_tensor():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with attached(model) as manager:
        layer = manager.attachment.layers[0]
        assert layer.parameters and layer.masters.present
        assert manager.attachment.let_go(layer, "a reason")
        assert not layer.parameters and not any(t.numel() for t in layer.masters.present)
        assert not manager.attachment.let_go(layer, "a reason")


def test_memory_that_is_taken_out_is_the_parameters_own(pieces):
    class Quantised(nn.Parameter):
        pass

    plain, other = nn.Parameter(torch.randn(4)), Quantised(torch.randn(4))
    outside, meta = nn.Parameter(torch.randn(4)), nn.Parameter(torch.empty(4, device="meta"))
    piece = Piece([[plain, other]])
    pieces.add(piece)
    values = [t.detach().clone() for t in (plain, other, outside)]
    before = [t.data_ptr() for t in (plain, other, outside)]
    pieces.take_out([None, plain, other, outside, meta])
    after = [t.data_ptr() for t in (plain, other, outside)]
    assert before[0] != after[0] and pieces.at(plain.data_ptr()) is None
    assert before[1:] == after[1:] and pieces.at(other.data_ptr()) is piece
    for tensor, value in zip((plain, other, outside), values, strict=True):
        assert torch.equal(tensor, value)
    assert plain.requires_grad and type(plain) is nn.Parameter


def test_tensors_that_shared_memory_share_it_where_it_lies_now():
    master = torch.randn(6, 4).t()[1:]
    others = [nn.Parameter(torch.zeros(1)), torch.zeros(3)]
    masters.share_memory(master, others)
    for other in others:
        assert torch.equal(other, master) and other.stride() == master.stride()
        assert other.data_ptr() == master.data_ptr()
    master[0, 0] = 5.0
    assert others[0][0, 0] == 5.0


def test_what_did_not_move_is_not_moved_back():
    tensor, calls = nn.Parameter(torch.randn(4)), []
    address = tensor.data_ptr()
    tensor.grad = gradient = torch.ones(4)
    masters.move_back(
        [(tensor, torch.device("cpu"), [torch.zeros(1)])], lambda *found: calls.append(found)
    )
    assert not calls and tensor.data_ptr() == address and tensor.grad is gradient


def test_a_move_back_takes_the_gradient_and_what_shares_the_memory_along():
    """To a device without memory, which any machine has."""
    there = torch.device("meta")
    moved, without = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2))
    moved.grad, other = torch.ones(4), torch.randn(4)

    def set_data(tensor, data):
        torch.utils.swap_tensors(tensor, nn.Parameter(data) if tensor.requires_grad else data)

    masters.move_back([(moved, there, [other]), (without, there, [])], set_data)
    assert moved.device == moved.grad.device == other.device == without.device == there
    assert (moved.shape, other.shape, without.shape) == ((4,), (4,), (2,))
    assert without.grad is None


def test_pieces_tell_what_they_hold_and_what_may_be_locked_beside_them(state, pieces):
    sizes = (4, 8)
    made = [Piece([[nn.Parameter(torch.randn(STEP * n))]]) for n in sizes]
    held = [piece.buffer for piece in made]
    for piece in made:
        assert (piece.uses, piece.locked_bytes, piece.is_known, piece.coded) == (0, 0, False, {})
        assert (piece.start, piece.end) == (piece.buffer.address, piece.start + piece.cuts[-1])
        pieces.add(piece)
        assert piece.is_known and piece.locked_bytes == piece.cuts[-1] == piece.buffer.nbytes
    assert pieces.in_order() == made and pieces.buffers == held and pieces.node == -1
    assert pieces.coded == [] and pieces.coded_at(made[0].start) is None
    assert pieces.may_lock_beside(1 << 40), "there is no limit"
    whole = sum(buffer.nbytes for buffer in held)
    limited = Pieces(state, "Model", whole + 8)
    kept = [nn.Parameter(torch.randn(STEP * n)) for n in sizes]
    for parameter in kept:
        limited.add(Piece([[parameter]]))
    assert limited.may_lock_beside(8) and not limited.may_lock_beside(9)
    limited.give_back_all()
    assert limited.in_order() == [] and not any(map(limited.at, (p.data_ptr() for p in kept)))


def test_all_that_is_abandoned_goes_back_at_the_next_attempt_after_one_that_failed(pieces, caplog):
    for _ in range(3):
        pieces.add(Piece([[nn.Parameter(torch.randn(4))]]))
    gc.collect()
    fault = simulator.fault("cuMemHostUnregister", result=701, lasting=True)
    with caplog.at_level(logging.WARNING), fault:
        pieces.give_back()
        assert len(pieces.buffers) == 3
    (record,) = caplog.records
    assert record.getMessage().startswith("Model: old weights are given back later: ")
    pieces.give_back()
    assert pieces.buffers == [] and pieces.own() == 0


def held_by_the_process():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells what a process holds")
def test_what_small_weights_left_in_the_heap_goes_back_to_the_system():
    """Free blocks below one that is in use stay with the process otherwise."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("this system's heap is not glibc's")
    libc.malloc.restype = ctypes.c_void_p
    size, count = 64 << 10, 512
    blocks = [libc.malloc(ctypes.c_size_t(size)) for _ in range(count + 1)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:
        libc.free(ctypes.c_void_p(block))
    before = held_by_the_process()
    masters.trim_heap()
    after = held_by_the_process()
    libc.free(ctypes.c_void_p(blocks[-1]))
    assert before - after > size * count // 2


@pytest.mark.skipif(sys.platform != "linux", reason="no other system maps files so")
@pytest.mark.parametrize(
    ("available", "stay"), [(None, 0), (4.0, 0), (3.9, 2), (0, 2)], ids=["unknown", 4, 3.9, 0]
)
def test_what_lies_in_files_is_copied_where_half_of_what_is_free_has_room_for_it(
    tmp_path, monkeypatch, caplog, available, stay
):
    monkeypatch.setenv("ORACLE_OFFLOAD_CACHE_DIR", str(tmp_path))
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    model.bfloat16().requires_grad_(False)
    expected, size = [module.weight.clone() for module in model], model[0].weight.nbytes
    with attached(model, compress="lossless") as manager:
        pieces = manager.attachment.pieces
        assert len(pieces.coded) == 2
        monkeypatch.setattr(memory, "SPARED", 0.5)
        room = None if available is None else int(available * size / 2)
        monkeypatch.setattr(memory, "available_bytes", lambda: room)
        assert pieces.own() == stay * size
        assert pieces.own() == 0, "what stays is looked at once"
    assert [torch.equal(m.weight, e) for m, e in zip(model, expected, strict=True)] == [True, True]


def test_the_heap_is_given_back_as_often_as_a_piece_is_filled(monkeypatch):
    """What small weights leave would add up to the model else."""
    calls = []
    monkeypatch.setattr(masters, "PIECE_BYTES", 1)  # a piece for each unit
    monkeypatch.setattr(masters, "trim_heap", lambda: calls.append(1))
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3)))
    with attached(model) as manager:
        assert len(calls) == len(manager.attachment.buffers) == 3
